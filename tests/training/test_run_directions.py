"""A run on captioned pictures measures both directions before and after, and says what came of each."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, cast

import pytest
from test_run_pictures import write_rows

from vembed.config.schema import Config
from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys
from vembed.data.run_data import load_run_data
from vembed.errors import MachineError
from vembed.evaluation.judge import headline
from vembed.evaluation.results import EvaluationResult, write_evaluation
from vembed.training.evaluations import Evaluations
from vembed.training.run import run_from_config

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.training.finish import RunResult
    from vembed.vectors.encode import ItemEncoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]


def run(folder: Path, data: Path, **keys: object) -> RunResult:
    values = {
        "model_name": "builtin:tiny-clip",
        "data_path": str(data),
        "val_data_path": str(data),
        "test_data_path": str(data),
        "output_dir": str(folder / "out"),
        "batch_size": 6,
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "report_to": "none",
        "learning_rate": 1e-2,
    }
    if keys.get("eval_strategy") == "no":
        del values["eval_steps"]
    result = run_from_config(Config.model_validate(values | keys))
    assert result is not None
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("directions")
    logger = logging.getLogger("vembed")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        return folder / "out", run(folder, write_rows(folder / "data", "t2i", count=6))
    finally:
        logger.setLevel(level)


def test_a_run_on_captioned_pictures_measures_both_directions(finished: tuple[Path, RunResult]) -> None:
    output, result = finished
    names = {path.name for path in (output / "evaluation").iterdir()} - {"last", "last-reversed"}
    assert names == {
        "baseline", "baseline-reversed", "final", "final-reversed", "step-0", "step-1", "step-2", "step-3"
    }  # fmt: skip
    assert result.reverse is not None
    assert result.reverse.task.direction == "pictures search texts"
    assert result.reverse.verdict.comparison.baseline == result.reverse.baseline.metrics["ndcg@10"]
    assert result.reverse.verdict.comparison.candidate == result.reverse.final.metrics["ndcg@10"]
    assert result.verdict.comparison.candidate == result.final.metrics["ndcg@10"]


def test_the_log_tells_the_other_direction_and_ends_with_the_verdict(finished: tuple[Path, RunResult]) -> None:
    output, result = finished
    lines = [line.split(" INFO ")[-1] for line in (output / "train.log").read_text().splitlines()]
    assert result.reverse is not None
    assert f"reversed      pictures search texts: {result.reverse.verdict.sentence}" in lines
    assert any(line.startswith("rsum ") for line in lines)
    assert lines[-1] == headline(result.verdict, result.sets)


def test_the_plan_says_that_both_directions_are_measured(finished: tuple[Path, RunResult]) -> None:
    reasons = json.loads((finished[0] / "plan.json").read_text())["reasons"]
    assert [reason for reason in reasons if "also measured in reverse" in reason and "pictures search texts" in reason]


def test_all_forms_of_the_report_hold_both_directions(finished: tuple[Path, RunResult]) -> None:
    output, result = finished
    report = json.loads((output / "report" / "report.json").read_text())
    assert result.reverse is not None
    assert report["reverse"]["verdict"]["sentence"] == result.reverse.verdict.sentence
    assert report["reverse"]["rsum"]["final"]["value"] == pytest.approx(
        100 * sum(each.metrics[f"hit@{k}"] for each in (result.final, result.reverse.final) for k in (1, 5, 10))
    )
    assert report["checkpoint"]["last_step"] == 3
    for name in ("report.html", "report.md"):
        assert "Reversed, pictures search texts: " in (output / "report" / name).read_text().replace("\\", ""), name


def test_the_masked_pairs_of_every_step_are_logged_and_added_up(finished: tuple[Path, RunResult]) -> None:
    output = finished[0]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    facts = dict(json.loads((output / "report" / "report.json").read_text())["data_facts"])
    total = sum(row["masked_negatives"] for row in rows)
    assert facts["false negatives masked"] == f"{total} (query, document) pairs in 3 steps"


def test_a_filter_that_leaves_out_every_negative_is_told(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", "t2t", count=6)
    keys = {"model_name": "builtin:ngram-bag", "eval_strategy": "no", "bm25": False, "max_steps": 3}
    run(tmp_path, data, false_negative_filter="threshold", false_negative_margin=1.0, **keys)
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    found = {finding["cause"]: finding["advice"] for finding in report["findings"]}
    assert "false_negative_filter" in found["loss of 0"]
    told = dict(report["data_facts"])["false negatives masked"]
    assert told.endswith(" in 3 steps; those that false_negative_filter leaves out aren't counted")


def test_texts_are_measured_in_one_direction_unless_both_are_asked_for(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", "t2t", count=6)
    keys = {"model_name": "builtin:ngram-bag", "eval_strategy": "no", "bm25": False, "max_steps": 1}
    assert run(tmp_path, data, **keys).reverse is None
    both = run(tmp_path / "both", data, eval_both_directions=True, **keys)
    assert both.reverse is not None
    assert both.reverse.task.direction == "texts search texts"
    pictures = write_rows(tmp_path / "pictures", "t2i", count=6)
    one = run(tmp_path / "one", pictures, eval_both_directions=False, eval_strategy="no", max_steps=1)
    assert one.reverse is None


def test_masked_pairs_arent_counted_where_nothing_is_masked(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", "t2t", count=6)
    keys = {"model_name": "builtin:ngram-bag", "eval_strategy": "no", "bm25": False, "max_steps": 1}
    run(tmp_path, data, mask_false_negatives=False, **keys)
    assert "masked_negatives" not in (tmp_path / "out" / "metrics.jsonl").read_text()
    facts = dict(json.loads((tmp_path / "out" / "report" / "report.json").read_text())["data_facts"])
    assert facts["false negatives masked"] == "none: mask_false_negatives is false"


def test_the_model_of_the_last_step_is_measured_where_another_one_is_kept(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", "t2i", count=6)
    # A rate that changes nothing: all evaluations tie, and a tie keeps the earlier step.
    result = run(tmp_path, data, max_steps=4, learning_rate=1e-12, warmup_ratio=0.0, scheduler_type="constant", seed=1)
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    kept, last = report["checkpoint"]["kept_step"], report["checkpoint"]["last_step"]
    assert last == 4
    assert (result.last is None) == (kept == last)
    assert ((tmp_path / "out" / "evaluation" / "last").is_dir()) == (kept != last)
    assert kept != last, "the test needs a run whose best step isn't the last"
    assert report["metrics"]["last"]["values"]["ndcg@10"] == result.last.metrics["ndcg@10"]  # type: ignore[union-attr]


def test_a_trained_model_without_its_reversed_baseline_is_refused(tmp_path: Path) -> None:
    task = RetrievalData("s", {"q": "a"}, {"d": "b"}, {"q": {"d": 1}})
    result = EvaluationResult("s", "m", {"ndcg@10": 1.0}, {"ndcg@10": {"q": 1.0}}, {"q": (("d", 1.0),)}, 1, 1)

    def evaluations(both: bool) -> Evaluations:
        unused = cast("ItemEncoder", None)
        return Evaluations(unused, None, task, tmp_path, "ndcg@10", lambda: None, False, both_directions=both)

    write_evaluation(tmp_path / "baseline", result)
    evaluations(both=False).require_baseline()
    with pytest.raises(MachineError, match="baseline-reversed is gone"):
        evaluations(both=True).require_baseline()
    write_evaluation(tmp_path / "baseline-reversed", result)
    evaluations(both=True).require_baseline()
    assert evaluations(both=True).baseline_reversed() == result
    assert evaluations(both=False).baseline_reversed() is None


def test_rows_that_were_skipped_are_counted_among_the_facts(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "t2t")
    for broken, expected in (("", "0"), ('{"query": "", "positive": "x"}\n', "1")):
        path.write_text(path.read_text() + broken)
        tested = str(write_rows(tmp_path / "test", "t2t"))
        keys = DataKeys(data_path=str(path), test_data_path=tested, skip_invalid_records=True, max_invalid_records=3)
        data = load_run_data(keys, needs_dev=False)
        assert dict(data.facts())["rows skipped because they can't be used"] == expected
