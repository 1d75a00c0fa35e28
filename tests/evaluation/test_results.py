"""The three files of an evaluation: exact, readable by trec_eval, and whole after a crash at any point."""

from __future__ import annotations

import errno
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
import pytrec_eval

from vembed.data.judged import RetrievalData
from vembed.errors import DataError, MachineError
from vembed.evaluation.evaluate import EvaluationOptions, evaluate
from vembed.evaluation.results import RECORD_FILE, EvaluationResult, read_evaluation, write_evaluation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Side


SMALL = EvaluationResult(
    task="tiny/test", system="my model, step 100", metrics={"ndcg@10": 1 / 3},
    per_query={"ndcg@10": {"q1": 2 / 3, "q2": 0.0}},
    run={"q1": (("d2", 0.1), ("d1", float(np.float32(0.1))), ("d0", -1e-30)), "q2": ()}, num_queries=2,
    num_documents=3, notes=("1 query shares no word with the corpus: nothing found.",), seconds=0.123456789,
)  # fmt: skip


def random_task() -> tuple[RetrievalData, dict[str, NDArray[np.float32]]]:
    """A task with many exact ties: documents are copies of 40 vectors."""
    rng = np.random.default_rng(0)
    distinct = rng.normal(size=(40, 8)).astype(np.float32)
    table = {f"text {n}": distinct[n % 40] for n in range(200)} | {
        f"ask {n}": vector for n, vector in enumerate(rng.normal(size=(30, 8)).astype(np.float32))
    }
    task = RetrievalData(
        name="random",
        queries={f"q{n}": f"ask {n}" for n in range(30)},
        documents={f"d{n}": f"text {n}" for n in range(200)},
        qrels={f"q{n}": {f"d{d}": int(rng.integers(1, 4)) for d in rng.choice(200, 6)} for n in range(30)},
    )
    return task, table


def random_result() -> tuple[EvaluationResult, RetrievalData]:
    task, table = random_task()

    def encode(texts: Sequence[str], side: Side) -> NDArray[np.float32]:
        return np.stack([table[text] for text in texts])

    return evaluate(encode, task, EvaluationOptions(system="random")), task


def test_what_is_read_equals_what_was_written(tmp_path: Path) -> None:
    for number, result in enumerate((SMALL, random_result()[0])):
        folder = tmp_path / "deep" / str(number)
        write_evaluation(folder, result)
        again = read_evaluation(folder)
        assert again == result
        assert [list(hits) for hits in again.run.values()] == [list(hits) for hits in result.run.values()]
        assert sorted(path.name for path in folder.iterdir()) == ["metrics.json", "per_query.json", "run.trec"]


def test_trec_eval_finds_the_same_numbers_in_the_run_file(tmp_path: Path) -> None:
    result, task = random_result()
    scores = [score for hits in result.run.values() for _, score in hits]
    assert len(scores) - len(set(scores)) > 1000  # ties are what this is about
    write_evaluation(tmp_path / "final", result)
    with (tmp_path / "final" / "run.trec").open(encoding="utf-8") as file:
        run = pytrec_eval.parse_run(file)
    names = {"ndcg": "ndcg_cut", "recall": "recall", "precision": "P", "map": "map_cut", "hit": "success"}
    recomputed = pytrec_eval.RelevanceEvaluator(
        task.qrels, {f"{measure}.1,3,5,10,100" for measure in names.values()}
    ).evaluate(run)
    for metric, mean in result.metrics.items():
        name, k = metric.split("@")
        if name == "mrr":
            continue
        values = {query: measures[f"{names[name]}_{k}"] for query, measures in recomputed.items()}
        assert values == result.per_query[metric]
        assert fmean(values.values()) == mean


def test_the_lines_of_the_file_cut_at_k_give_the_mrr(tmp_path: Path) -> None:
    result, task = random_result()
    write_evaluation(tmp_path / "final", result)
    lines = (tmp_path / "final" / "run.trec").read_text(encoding="utf-8").splitlines()
    cut = pytrec_eval.parse_run([line for line in lines if int(line.split()[3]) <= 3])
    values = pytrec_eval.RelevanceEvaluator(task.qrels, {"recip_rank"}).evaluate(cut)
    assert {query: value["recip_rank"] for query, value in values.items()} == result.per_query["mrr@3"]


def test_the_run_file_has_the_six_columns_of_trec_and_metrics_json_what_people_look_for(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "final", SMALL)
    assert (tmp_path / "final" / "run.trec").read_text(encoding="utf-8").splitlines() == [
        "q1 Q0 d2 1 0.1 my%20model,%20step%20100",
        "q1 Q0 d1 2 0.10000000149011612 my%20model,%20step%20100",
        "q1 Q0 d0 3 -1e-30 my%20model,%20step%20100",
    ]
    summary = json.loads((tmp_path / "final" / "metrics.json").read_text(encoding="utf-8"))
    expected = {"task": "tiny/test", "system": "my model, step 100", "num_queries": 2, "num_documents": 3}
    expected |= {"metrics": {"ndcg@10": 1 / 3}, "notes": ["1 query shares no word with the corpus: nothing found."]}
    assert {key: summary[key] for key in expected} == expected


def test_odd_ids_come_back_and_ordinary_ones_stand_as_they_are(tmp_path: Path) -> None:
    odd = [
        "a b",
        "tab\there",
        "line\nfeed",
        "\r",
        "\x1c\x85",
        "\u2028",
        "\u3000",
        "\xa0",
        "nul\0",
        "%20",
        "%%41",
        "%4 1",
    ]
    usual = ["doc:1/a_b-c.d", "日本語", "100%", "é%", "a+b&c=d", "#1"]
    for name in (*odd, *usual):
        run = {name: ((name, 0.5), ("plain", 0.25)), f"{name}empty": ()}
        result = replace(SMALL, per_query={"ndcg@10": {name: 1.0}}, run=run)
        write_evaluation(tmp_path / "final", result)
        assert read_evaluation(tmp_path / "final") == result, name
        lines = [line.split() for line in (tmp_path / "final" / "run.trec").read_text(encoding="utf-8").splitlines()]
        assert {len(line) for line in lines} == {6}, name
        assert (lines[0][2] == name) == (name in usual)


@pytest.mark.parametrize(
    "change", [{"run": {"q1": (("", 0.5),)}}, {"metrics": {"ndcg@10": float("nan")}}], ids=["empty id", "no number"]
)
def test_what_cannot_be_read_back_is_refused_and_leaves_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_evaluation(tmp_path / "final", replace(SMALL, **change))
    assert not any(tmp_path.iterdir())


def test_an_existing_evaluation_is_replaced_and_a_file_of_the_user_stays(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "final", SMALL, extra={RECORD_FILE: "{}"})
    (tmp_path / "final" / "notes.txt").write_text("x")
    newer = replace(SMALL, seconds=9.0)
    write_evaluation(tmp_path / "final", newer)
    assert read_evaluation(tmp_path / "final") == newer
    kept = ["metrics.json", "notes.txt", "per_query.json", "run.trec"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["final", *kept]


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    write_evaluation(folder, SMALL)  # an empty one is fine
    other = tmp_path / "notes"
    other.mkdir()
    (other / "chapter.txt").write_text("x")
    with pytest.raises(MachineError, match=r"notes: .*other files"):
        write_evaluation(other, SMALL)
    assert [path.name for path in other.iterdir()] == ["chapter.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "thesis"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_or_rename_that_fails_leaves_the_old_evaluation_and_no_litter(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_evaluation(tmp_path / "final", SMALL)
    real = Path.replace

    def no_space(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def refuse_new(path: Path, target: Path) -> Path:
        if path.name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync", no_space) if failing == "fsync" else (Path, "replace", refuse_new)))
        with pytest.raises(MachineError, match="final"):
            write_evaluation(tmp_path / "final", replace(SMALL, seconds=9.0))
    assert read_evaluation(tmp_path / "final") == SMALL
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize(
    ("function", "count", "survivor"),
    [("fsync", 1, "final"), ("fsync", 3, "final"), ("replace", 1, "final"), ("replace", 2, ".final.old")],
)
def test_a_process_that_dies_while_writing_leaves_one_whole_evaluation(
    function: str, count: int, survivor: str, tmp_path: Path
) -> None:
    write_evaluation(tmp_path / "final", SMALL)
    child = os.fork()
    if child == 0:
        calls, owner = itertools.count(1), os if function == "fsync" else Path
        real = getattr(owner, function)
        setattr(owner, function, lambda *words: os._exit(9) if next(calls) == count else real(*words))
        try:
            write_evaluation(tmp_path / "final", replace(SMALL, seconds=9.0))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert read_evaluation(tmp_path / survivor) == SMALL
    write_evaluation(tmp_path / "final", replace(SMALL, seconds=1.0))  # the next one cleans up
    assert read_evaluation(tmp_path / "final").seconds == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def changed(content: dict[str, Any]) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | content)


def lines_of(*numbers: int, more: str = "") -> Callable[[str], str]:
    return lambda text: "".join(text.splitlines(keepends=True)[number] for number in numbers) + more


@pytest.mark.parametrize(
    ("name", "change", "place"),
    [
        ("metrics.json", changed({"metrics": None}), "metrics.json"),
        ("metrics.json", changed({"metrics": {"ndcg@10": "high"}}), "metrics.json"),
        ("metrics.json", changed({"notes": None}), "metrics.json"),
        ("metrics.json", changed({"num_hits": "3"}), "metrics.json"),
        ("metrics.json", lambda _: '{"task": "tiny"}', "num_hits"),
        ("metrics.json", lambda text: text[:-9], r"metrics\.json:\d+: "),
        ("per_query.json", changed({"ndcg@10": [1.0]}), "per_query.json"),
        ("per_query.json", lambda _: "[" * 100_000, "per_query.json"),
        ("per_query.json", lambda text: text[:-9], r"per_query\.json:\d+: "),
        ("run.trec", lambda text: text[:-9], r"run\.trec:3: "),
        ("run.trec", lines_of(0, 1), r"run\.trec:3: "),
        ("run.trec", lines_of(0, more="q1 Q0 d1 2 0.1\nq1 Q0 d0 3 -1e-30 x\n"), r"run\.trec:2: "),
    ],
)
def test_a_broken_or_missing_file_is_a_data_error_with_its_place(
    name: str, change: Callable[[str], str], place: str, tmp_path: Path
) -> None:
    write_evaluation(tmp_path / "final", SMALL)
    path = tmp_path / "final" / name
    whole = path.read_text("utf-8")
    path.write_text(change(whole), "utf-8")
    with pytest.raises(DataError, match=place):
        read_evaluation(tmp_path / "final")
    path.unlink()
    with pytest.raises(DataError, match=name):
        read_evaluation(tmp_path / "final")
    path.write_text(whole, "utf-8")
    assert read_evaluation(tmp_path / "final") == SMALL
