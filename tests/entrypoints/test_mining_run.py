"""A run that mines hard negatives: every n epochs, from a corpus, by a teacher, with workers, killed and resumed."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
from kit.runs import Outcome, Site, assert_same_run, run_here, run_keys, run_killed, write_config
from kit.several_ranks import exact, run_ranks
from kit.text_models import write_cross_encoder

from vembed.errors import MachineError
from vembed.evaluation import mining_report
from vembed.training.refresh import documents_per_query

if TYPE_CHECKING:
    from pathlib import Path

STEPS_PER_EPOCH = 6
KEYS = {
    "mine": 1,
    "mine_negatives": 2,
    "mine_sampling": "random",
    "mine_range_max": 90,
    "max_steps": 14,
    "save_steps": 4,
    "eval_steps": 7,
    "gradient_cache_chunk_size": 16,
    "num_workers": 0,
}


@pytest.fixture(scope="module")
def whole(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that nothing stopped."""
    outcome = run_keys(tmp_path_factory.mktemp("whole"), site.keys(**KEYS))
    assert outcome.code == 0, outcome.err
    return outcome


def test_negatives_are_mined_before_each_epoch_and_the_report_says_so(whole: Outcome, site: Site) -> None:
    mining = whole.folder / "mining"
    names = [f"epoch-0000{epoch}" for epoch in (1, 2, 3)]
    assert sorted(path.name for path in mining.iterdir()) == sorted([*names, *(f"{name}.npz" for name in names)])
    found = [dict(np.load(mining / f"{name}.npz")) for name in names]
    assert all(each["counts"].max() == 2 for each in found)
    assert found[0]["items"].tolist() != found[1]["items"].tolist(), "the model and the draw have changed"
    report = json.loads((whole.folder / "report" / "report.json").read_text("utf-8"))
    assert "hard negatives mined before epoch 3" in json.dumps(report)
    assert json.loads((mining / names[1] / "report.json").read_text("utf-8"))["negatives"] == found[1]["counts"].sum()
    plan = json.loads((whole.folder / "plan.json").read_text("utf-8"))
    assert any(
        "mine: up to 2 hard negatives of each record before epoch 1 and every epoch, from" in each
        for each in plan["reasons"]
    )


@pytest.mark.slow
def test_data_workers_make_the_same_batches(whole: Outcome, site: Site, tmp_path: Path) -> None:
    outcome = run_keys(tmp_path, site.keys(**KEYS | {"num_workers": 2}))
    assert outcome.code == 0, outcome.err
    assert outcome.same_rows == whole.same_rows


@pytest.mark.slow
@pytest.mark.parametrize("step", [12, *(pytest.param(step, marks=pytest.mark.slow) for step in (5, 6, 10))])
def test_a_run_that_is_killed_goes_on_with_what_was_mined(
    step: int, whole: Outcome, site: Site, tmp_path: Path
) -> None:
    config = write_config(tmp_path, site.keys(**KEYS))
    run_killed(config, after=step)
    outcome = run_here(config)
    assert outcome.code == 0, outcome.err
    assert_same_run(outcome.folder, whole.folder)


@pytest.mark.slow
def test_a_run_beyond_a_lost_mining_is_refused_in_words(site: Site, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys(**KEYS))
    run_killed(config, before=9)
    (tmp_path / "out" / "mining" / "epoch-00002.npz").unlink()
    outcome = run_here(config)
    assert outcome.code == 5
    assert "epoch-00002.npz: it isn't there: it was computed with the model before epoch 2" in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError("no such colour"), MachineError("the disk is full")])
def test_a_report_of_a_mining_that_fails_takes_nothing_from_the_run(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(mining_report, "mining_page", Mock(side_effect=error))
    outcome = run_keys(tmp_path, site.keys(**KEYS | {"mine": "once", "max_steps": 1, "eval_steps": 1}))
    assert outcome.code == 0, outcome.err
    assert [path.name for path in (outcome.folder / "mining").iterdir()] == ["epoch-00001.npz"]
    log = (outcome.folder / "train.log").read_text("utf-8")
    assert "the report of the mining could not be written; training continues" in log
    assert str(error) in log


@pytest.mark.slow
def test_once_is_before_the_first_epoch_and_keys_without_effect_are_refused(site: Site, tmp_path: Path) -> None:
    outcome = run_keys(tmp_path / "once", site.keys(**KEYS | {"mine": "once", "max_steps": 7, "eval_steps": 7}))
    assert outcome.code == 0, outcome.err
    assert [path.name for path in sorted((outcome.folder / "mining").glob("*.npz"))] == ["epoch-00001.npz"]
    refused = run_keys(tmp_path / "idle", site.keys(mine_negatives=3))
    assert refused.code == 2
    assert "mine_negatives has no effect with mine never; remove it or set mine to once, or 1 or more" in refused.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_path": "classes.jsonl"}, "rows of one class answer each other's queries"),
        ({"mine_index": "IFV9"}, "FAISS can't build the index 'IFV9'"),
        ({"mine_range_min": 88}, "mine_range_min 88 skips all candidates: there are 84 documents"),
        ({"mine_corpus": "corpus.jsonl"}, "takes texts, and the data hold pictures"),
    ],
)
def test_what_can_not_be_mined_is_refused_by_the_plan_and_before_an_old_run_is_replaced(
    changes: dict[str, Any], message: str, whole: Outcome, site: Site, balls: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in site.train.read_text("utf-8").splitlines()]
    classes = "".join(json.dumps({**row, "label": ["cat", "dog"][place % 2]}) + "\n" for place, row in enumerate(rows))
    (tmp_path / "classes.jsonl").write_text(classes, "utf-8")
    shutil.copy(balls / "red.png", tmp_path)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "image": "red.png"}) + "\n", "utf-8")
    paths = {name: str(tmp_path / value) for name, value in changes.items() if str(value).endswith("jsonl")}
    keys = site.keys(**KEYS | changes | paths | {"resume": "never", "overwrite_output_dir": True})
    shutil.copytree(whole.folder, tmp_path / "out")
    for words in (("--plan",), ()):
        refused = run_keys(tmp_path, keys, *words)
        assert refused.code in (2, 3)
        assert message in refused.err
    assert (tmp_path / "out" / "report" / "report.html").is_file()


@pytest.mark.slow
def test_two_processes_mine_and_train_as_one_does(site: Site, tmp_path: Path) -> None:
    one = run_keys(tmp_path / "1", exact(site, **KEYS))
    two = run_ranks(write_config(tmp_path / "2", exact(site, **KEYS | {"batch_size": 8, "num_processes": 2})))
    assert (one.code, two.code) == (0, 0), two.err
    assert two.losses == pytest.approx(one.losses, abs=1e-9)
    for name in ("epoch-00001.npz", "epoch-00003.npz"):
        found = [dict(np.load(run.folder / "mining" / name)) for run in (one, two)]
        np.testing.assert_array_equal(found[0]["items"], found[1]["items"])


def corpus_and_teacher(site: Site, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    words = [row["positive"] for row in map(json.loads, site.dev.read_text("utf-8").splitlines())]
    (folder / "corpus.txt").write_text("".join(f"{one} {other}\n" for one, other in pairwise(words)), "utf-8")
    return {
        **KEYS, "model_name": str(site.bert_without_dropout), "mine": "once", "mine_sampling": "top",
        "mine_corpus": str(folder / "corpus.txt"), "mine_teacher": str(site.bert), "mine_relative_margin": 0.001,
        "max_steps": 4, "save_steps": 2, "eval_strategy": "no", "eval_steps": None,
    }  # fmt: skip


def mined_texts(outcome: Outcome) -> list[list[str]]:
    """Return what the run mined for each of its rows."""
    from vembed.config.load import load_config
    from vembed.training.data import load_data

    config = load_config(outcome.folder / "config.yaml", []).config
    data, found = load_data(config), np.load(outcome.folder / "mining" / "epoch-00001.npz")
    table = data.records if data.corpus is None else data.records.with_items(data.corpus)
    ends = np.cumsum(found["counts"])
    return [[str(item) for item in table.items.at(part)] for part in np.split(found["items"], ends[:-1])]


def test_a_run_mines_from_a_corpus_and_by_a_teacher_as_the_command_does(call: Any, site: Site, tmp_path: Path) -> None:
    keys = corpus_and_teacher(site, tmp_path / "run")
    outcome = run_keys(tmp_path / "run", site.keys(**keys))
    assert outcome.code == 0, outcome.err
    words = ["--data", site.train, "--output", tmp_path / "mined.jsonl", "--corpus", keys["mine_corpus"]]
    words += ["--teacher", site.bert, "--negatives", "2", "--relative-margin", "0.001", "--range-max", "90"]
    done = call("mine", site.bert_without_dropout, *words)
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text("utf-8").splitlines()]
    assert mined_texts(outcome) == [row.get("negatives", []) for row in rows]
    further = set((tmp_path / "run" / "corpus.txt").read_text("utf-8").splitlines())
    assert further & {text for texts in mined_texts(outcome) for text in texts}
    report = json.loads((outcome.folder / "mining" / "epoch-00001" / "report.json").read_text("utf-8"))
    assert report["documents"] == 84 + len(further)
    facts = (outcome.folder / "report" / "report.md").read_text("utf-8")
    assert "further documents to mine from" in facts
    reasons = json.loads((outcome.folder / "plan.json").read_text("utf-8"))["reasons"]
    assert any(f"mine_teacher {site.bert}: its scores decide" in each for each in reasons)


@pytest.mark.slow
def test_a_run_goes_on_with_its_corpus_and_refuses_another_one(site: Site, tmp_path: Path) -> None:
    keys = corpus_and_teacher(site, tmp_path)
    whole = run_keys(tmp_path, site.keys(**keys, output_dir=str(tmp_path / "whole")))
    assert whole.code == 0, whole.err
    config = write_config(tmp_path, site.keys(**keys))
    run_killed(config, before=3)
    corpus = tmp_path / "corpus.txt"
    text = corpus.read_text("utf-8")
    corpus.write_text(text + "one more\n", "utf-8")
    refused = run_here(config)
    assert refused.code != 0
    assert "data_fingerprint" in refused.err or "other data" in refused.err
    corpus.write_text(text, "utf-8")
    assert run_here(config).code == 0
    assert_same_run(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
def test_a_loss_asks_its_teacher_about_what_was_mined(site: Site, tmp_path: Path) -> None:
    judge, words = (
        tmp_path / "judge",
        {word for row in site.train.read_text("utf-8").split('"') for word in row.split()},
    )
    write_cross_encoder(judge, sorted(words))
    keys = {"loss_type": "kl", "temperature": None, "teacher_model_name": str(judge), "max_steps": 8}
    whole = run_keys(tmp_path / "kl", site.keys(**KEYS | keys) | {"mine_relative_margin": None})
    assert whole.code == 0, whole.err
    assert min(whole.losses) > 0, "without what is mined a row has one document, of which nothing can be learnt"
    pairs = list((whole.folder / "teacher").glob("pairs-*/vectors.npy"))
    assert len(pairs) == 3, "what rows have, and what each epoch adds"
    corpus = corpus_and_teacher(site, tmp_path / "filter")
    filtered = {"false_negative_filter": "teacher", "teacher_model_name": str(site.bert)}
    done = run_keys(tmp_path / "filter", site.keys(**corpus | filtered))
    assert done.code == 0, done.err
    assert "further documents" in (done.folder / "report" / "report.md").read_text("utf-8")


def test_documents_of_a_batch_are_planned_with_the_mined_ones(site: Site) -> None:
    from vembed.config.schema import Config
    from vembed.training.data import load_data

    config = Config.model_validate(site.keys(output_dir="out", **KEYS))
    counts = load_data(config).counts
    assert documents_per_query(config, counts) == 3
    assert documents_per_query(Config.model_validate(site.keys(output_dir="out")), counts) == 1
