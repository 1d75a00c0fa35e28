"""A verdict on queries that were trained on, or on the set that chose the checkpoint, says so."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest
from test_run_pictures import drawn
from test_run_sets import result_of
from test_run_sets import run as train

from vembed.config.schema import Config
from vembed.data.hold_out import ENOUGH_QUERIES
from vembed.data.run_data import load_run_data
from vembed.errors import DataError
from vembed.evaluation.judge import SetOutcome, caveats, headline

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vembed.data.run_data import RunData

pytestmark = pytest.mark.usefixtures("undrawn")

Row = dict[str, str]

LETTERS = "bcdfghjklmnpqrstvwxz"


def row(number: int, seed: int = 0) -> Row:
    word = LETTERS[number % 20] * 3 + LETTERS[number // 20 % 20] * 4 + LETTERS[number // 400] * 2
    return {"query": f"where is {seed} {word}", "positive": f"it is {seed} at {word[::-1]} {number * 7}"}


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def load(folder: Path, **keys: object) -> RunData:
    values = {"model_name": "m", "data_path": str(folder / "train.jsonl")} | keys
    return load_run_data(Config.model_validate(values), needs_dev=False)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with 20 training rows and 10 test rows; rows 4 and 5 of training are rows of the test, one shouted."""
    rows = [row(number) for number in range(20)]
    shouted = {column: f" {text.upper()}" for column, text in rows[5].items()}
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", [rows[4], shouted, *(row(number, seed=1) for number in range(8))])
    return tmp_path


def test_the_plan_shows_each_set_and_what_is_trained_on(planted: Path) -> None:
    write(planted / "guard.jsonl", [row(number, seed=2) for number in range(3)])
    write(planted / "dev.jsonl", [row(6), row(1, seed=3)])
    names = {"test_data_path": "test", "guard_data": "guard", "val_data_path": "dev"}
    data = load(planted, **{key: str(planted / f"{name}.jsonl") for key, name in names.items()})
    assert data.set_facts() == {
        "dev set": "dev.jsonl: 2 queries, 2 documents; 1 trained on with an answer, "
        "1 of 2 answers are training documents",
        "test set": "test.jsonl: 10 queries, 10 documents; 2 trained on with an answer, "
        "2 of 10 answers are training documents",
        "guard set": "guard.jsonl: 3 queries, 3 documents; no query trained on",
    }
    of_dev, of_test = data.leaks()
    assert of_dev.startswith("1 of 2 queries of dev.jsonl are trained on with an answer (1 row: train.jsonl:7); ")
    assert of_test.startswith("2 of 10 queries of test.jsonl are trained on with an answer (2 rows: train.jsonl:5, ")


def test_drop_leaves_the_rows_out_before_anything_counts_them(planted: Path) -> None:
    test = str(planted / "test.jsonl")
    warned, dropped = load(planted, test_data_path=test), load(planted, test_data_path=test, leak="drop")
    assert (len(warned.records), len(dropped.records), dropped.counts.num_records) == (20, 18, 18)
    assert {record.location for record in warned.records} - {record.location for record in dropped.records} == {
        "train.jsonl:5",
        "train.jsonl:6",
    }
    assert dropped.read["data"].startswith(f"20 rows of {planted / 'train.jsonl'}: 18 train, 2 left out (leak: drop)")
    assert dropped.leaks() == []
    assert warned.fingerprint != dropped.fingerprint
    write(planted / "train.jsonl", [row(number) for number in range(20) if number not in (4, 5)])
    assert load(planted, test_data_path=test).fingerprint == dropped.fingerprint, "as if they had never been there"


def test_refuse_names_three_rows(planted: Path) -> None:
    write(planted / "test.jsonl", [row(number) for number in range(4, 9)])
    with pytest.raises(DataError) as refused:
        load(planted, test_data_path=str(planted / "test.jsonl"), leak="refuse")
    first, *shown, cure = str(refused.value).splitlines()
    assert first == "5 of 20 training rows hold a query of test.jsonl with an answer:"
    assert [line.partition(": query '")[0] for line in shown] == [f"  train.jsonl:{line}" for line in (5, 6, 7)]
    assert cure.startswith("leak is refuse: set it to drop")
    clean = write(planted / "clean.jsonl", [row(1, seed=9), row(2, seed=9)])
    assert load(planted, test_data_path=str(clean), leak="refuse").leaks() == []


def test_a_test_set_that_is_the_training_data_leaves_nothing_to_train_on(planted: Path) -> None:
    with pytest.raises(DataError, match="leaves no row to train on"):
        load(planted, test_data_path=str(planted / "train.jsonl"), leak="drop")


def test_a_picture_under_another_name_is_the_same(tmp_path: Path) -> None:
    for name, number in {"a.png": 1, "b.png": 2, "again.png": 1, "other.png": 3}.items():
        (tmp_path / name).write_bytes(drawn(number))
    train_rows = [{"query": "a dot", "positive_image": "a.png"}, {"query": "a spot", "positive_image": "b.png"}]
    write(tmp_path / "train.jsonl", train_rows)
    test_rows = [{"query": "A  dot", "positive_image": "again.png"}, {"query": "a spot", "positive_image": "other.png"}]
    data = load(tmp_path, test_data_path=str(write(tmp_path / "test.jsonl", test_rows)))
    assert data.set_facts()["test set"].endswith(
        "1 trained on with an answer, 1 trained on with other documents, 1 of 2 answers are training documents"
    )


def dev_and_test(folder: Path, count: int, **keys: object) -> RunData:
    write(folder / "train.jsonl", [row(number) for number in range(count)])
    values = {"model_name": "m", "data_path": str(folder / "train.jsonl"), "val_fraction": 0.5} | keys
    return load_run_data(Config.model_validate(values), needs_dev=True, divides=True)


def test_enough_held_out_rows_are_a_dev_set_and_a_test_set(tmp_path: Path) -> None:
    data = dev_and_test(tmp_path, 4 * ENOUGH_QUERIES)
    assert data.dev is not None
    assert data.test is not None
    assert (data.dev.name, data.test.name) == ("held-out dev", "held-out test")
    assert len(data.dev.queries) == len(data.test.queries) == ENOUGH_QUERIES
    assert not set(data.dev.queries.values()) & set(data.test.queries.values())
    assert "472 train, 236 dev, 236 test" in data.read["data"]
    assert "one half chooses the checkpoint" in " ".join(data.notes)
    assert "no test set" not in " ".join(data.notes)


def test_too_few_are_one_set_and_the_plan_says_so(tmp_path: Path) -> None:
    data = dev_and_test(tmp_path, 4 * ENOUGH_QUERIES - 2)
    assert data.test is None
    assert any(
        note == "no test set (half of 472 or more held-out queries would be one): the verdict is on the rows that "
        "choose the checkpoint; give other test_data_path."
        for note in data.notes
    )


def test_a_test_set_that_is_the_dev_set_is_told(tmp_path: Path) -> None:
    other = str(write(tmp_path / "other.jsonl", [row(number, seed=1) for number in range(9)]))
    keys = {"val_data_path": other, "test_data_path": other, "val_fraction": "auto"}
    data = dev_and_test(tmp_path, 40, **keys)
    assert any(note.startswith("the test set is the dev set: ") for note in data.notes)


def test_the_verdict_is_given_again_without_what_was_trained_on() -> None:
    before, after = result_of([0.1, 0.2, 0.5, 0.5, 0.5]), result_of([0.9, 1.0, 0.5, 0.4, 0.5])
    outcome = SetOutcome.of("test", before, after, "ndcg@10", trained=["q0"], near=["q1"])
    unseen = outcome.unseen
    assert unseen is not None
    assert unseen.verdict == SetOutcome.of("test", result_of([0.5] * 3), result_of([0.5, 0.4, 0.5]), "ndcg@10").verdict
    (caveat,) = caveats([outcome], num_choices=0)
    assert caveat == (
        f"of 5 queries of s, 1 was trained on with an answer and 1 was nearly trained on; without them "
        f"{unseen.verdict.sentence}"
    )
    assert headline(outcome.verdict, [outcome]) == f"{outcome.verdict.sentence}; trained on 1 of these queries"
    all_of_it = SetOutcome.of("test", before, after, "ndcg@10", trained=before.per_query["ndcg@10"])
    assert caveats([all_of_it], num_choices=0)[0].endswith("; no other is left to judge by")
    clean = SetOutcome.of("test", before, after, "ndcg@10")
    assert caveats([clean], num_choices=1) == ()
    assert headline(clean.verdict, [clean]) == clean.verdict.sentence


def test_the_mean_over_sets_is_given_again_too() -> None:
    leaked = SetOutcome.of("test", result_of([0.1, 0.2, 0.3]), result_of([0.9, 0.2, 0.3]), "ndcg@10", trained=["q0"])
    other = SetOutcome.of("test", result_of([0.4, 0.6]), result_of([0.4, 0.6]), "ndcg@10")
    _, whole = caveats([leaked, other], num_choices=0)
    assert whole.startswith("all test sets without such queries: within noise: mean ndcg@10 of 2 sets 0.375 -> 0.375")


def last_lines(output: Path, count: int) -> list[str]:
    return [line.split(" INFO ")[-1] for line in (output / "train.log").read_text().splitlines()][-count:]


@pytest.fixture(autouse=True)
def _log_of_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vembed")


def test_a_run_on_planted_rows_says_it_in_log_report_and_result(planted: Path) -> None:
    near = {"query": f"{row(7)['query']}s", "positive": f"{row(7)['positive']}."}
    with (planted / "test.jsonl").open("a") as file:
        file.write(json.dumps(near) + "\n")
    result = train(planted, planted / "train.jsonl", test_data_path=str(planted / "test.jsonl"))
    (outcome,) = result.sets
    assert (len(outcome.trained), len(outcome.near)) == (2, 1)
    assert outcome.unseen is not None
    assert outcome.unseen.verdict.comparison.num_queries == 8
    caveat = "of 11 queries of test.jsonl, 2 were trained on with an answer and 1 was nearly trained on; without them "
    assert result.caveats == (caveat + outcome.unseen.verdict.sentence,)
    assert last_lines(planted / "out", 2) == [
        f"{'caveat':12}  {result.caveats[0]}",
        f"{result.verdict.sentence}; trained on 2 of these queries",
    ]
    report = json.loads((planted / "out" / "report" / "report.json").read_text())
    assert report["caveats"] == list(result.caveats)
    assert (report["sets"][0]["trained_queries"], report["sets"][0]["near_queries"]) == (2, 1)
    assert report["sets"][0]["unseen"]["word"] == outcome.unseen.verdict.word
    assert "2 were trained on with an answer" in (planted / "out" / "report" / "report.md").read_text()
    assert "2 of 11 queries of test.jsonl were trained on" in (planted / "out" / "model" / "README.md").read_text()
    reasons = json.loads((planted / "out" / "plan.json").read_text())["reasons"]
    assert reasons[0].startswith("2 of 11 queries of test.jsonl are trained on with an answer (2 rows: train.jsonl:5")


def test_a_verdict_on_the_dev_set_says_so(planted: Path) -> None:
    keys = {"val_data_path": str(planted / "test.jsonl"), "test_data_path": None, "leak": "drop"}
    result = train(planted, planted / "train.jsonl", **keys, eval_strategy="steps", eval_steps=1)
    (caveat,) = result.caveats
    assert caveat == (
        "the verdict is on the dev set that chose one of 2 checkpoints, which flatters it; give test_data_path for one "
        "that counts"
    )
    assert last_lines(planted / "out", 2)[0] == f"{'caveat':12}  {result.caveats[0]}"
    page = (planted / "out" / "report" / "report.md").read_text()
    assert "The verdict is on the dev set that chose one of 2 checkpoints" in page.replace("\\", "")
