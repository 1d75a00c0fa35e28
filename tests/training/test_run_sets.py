"""A run with several test sets and guard sets: a verdict for each, their mean, and what the model forgets."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from kit.warm import run_warm
from scipy.special import stdtrit
from test_run_pictures import write_rows

from vembed.config.load import load_config
from vembed.config.schema import Config
from vembed.data.run_data import load_run_data
from vembed.errors import ConfigError, MachineError
from vembed.evaluation.judge import SetOutcome, headline, mean_verdict, overall
from vembed.evaluation.results import EvaluationResult, read_evaluation
from vembed.training.run import run_from_config

if TYPE_CHECKING:
    from vembed.training.finish import RunResult

pytestmark = pytest.mark.usefixtures("undrawn")


def run(folder: Path, data: Path, **keys: object) -> RunResult:
    values = {
        "model_name": "builtin:tiny-clip",
        "data_path": str(data),
        "test_data_path": str(data),
        "output_dir": str(folder / "out"),
        "batch_size": 6,
        "max_steps": 2,
        "eval_strategy": "no",
        "report_to": "none",
        "learning_rate": 1e-2,
        "bm25": False,
    }
    result = run_from_config(Config.model_validate(values | keys))
    assert result is not None
    return result


def rows(folder: Path, seed: int, *, count: int = 12) -> Path:
    """Write rows whose texts differ from one seed to another."""
    folder.mkdir()
    letters = "abcdefghijkl"
    lines = [
        json.dumps({"query": f"query {seed} {letters[i] * 3}", "positive": f"text {seed} {i * 7} {letters[-i] * 3}"})
        for i in range(count)
    ]
    (folder / f"set{seed}.jsonl").write_text("\n".join(lines) + "\n")
    return folder / f"set{seed}.jsonl"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("sets")
    logger = logging.getLogger("vembed")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        paths = [str(rows(folder / f"d{seed}", seed)) for seed in range(4)]
        # Trained on the first set with a large rate: what it knew of the others is lost in part.
        result = run(
            folder, Path(paths[0]), test_data_path=paths[:2], guard_data=paths[2:], learning_rate=0.5, max_steps=4
        )
        return folder / "out", result
    finally:
        logger.setLevel(level)


def test_every_set_is_measured_before_and_after(finished: tuple[Path, RunResult]) -> None:
    output, result = finished
    found = {str(path.parent.relative_to(output / "evaluation")) for path in output.rglob("metrics.json")}
    further = {f"{name}/{when}" for name in ("test-1", "guard-2", "guard-3") for when in ("baseline", "final")}
    assert found == {"baseline", "final"} | further
    assert [each.role for each in result.sets] == ["test", "test", "guard", "guard"]
    assert [each.final.task for each in result.sets] == [f"set{seed}.jsonl" for seed in range(4)]
    assert result.sets[0].final is result.final


def test_the_verdict_is_of_the_mean_over_the_test_sets(finished: tuple[Path, RunResult]) -> None:
    result = finished[1]
    tests = result.sets[:2]
    assert result.verdict.comparison.metric == "mean ndcg@10 of 2 sets"
    assert result.verdict.comparison.candidate == pytest.approx(np.mean([t.final.metrics["ndcg@10"] for t in tests]))
    assert result.verdict.comparison.difference == pytest.approx(
        np.mean([t.verdict.comparison.difference for t in tests])
    )


def test_the_log_has_a_line_for_each_set_and_ends_with_the_verdict(finished: tuple[Path, RunResult]) -> None:
    output, result = finished
    lines = [line.split(" INFO ")[-1] for line in (output / "train.log").read_text().splitlines()]
    count = len(result.caveats)
    assert count == 2, "the first set is the training data: one caveat for it, one for the mean"
    assert lines[-5 - count : -1 - count] == [f"{each.role:12}  {each.line}" for each in result.sets]
    assert lines[-1 - count : -1] == [f"{'caveat':12}  {caveat}" for caveat in result.caveats]
    assert lines[-1] == headline(result.verdict, result.sets)


def test_report_and_card_tell_of_all_sets(finished: tuple[Path, RunResult]) -> None:
    output, result = finished
    report = json.loads((output / "report" / "report.json").read_text())
    assert report["verdict"]["sentence"] == result.verdict.sentence
    assert [(each["task"], each["role"], each["forgets"]) for each in report["sets"]] == [
        (each.final.task, each.role, each.forgets) for each in result.sets
    ]
    for name in ("report/report.html", "report/report.md", "model/README.md"):
        text = (output / name).read_text().replace("\\", "")
        for each in result.sets:
            assert each.final.task in text, name
    page = (output / "report" / "report.html").read_text()
    assert "mean of 2 test sets" in page
    card = (output / "model" / "README.md").read_text()
    assert "Over the test sets: " in card
    body = card.partition("---\n")[2].partition("\n---")[2]
    assert body.count("(guard set)") == 2


def test_sets_of_one_file_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [rows(tmp_path / f"d{seed}", seed) for seed in range(3)]
    tests = [str(path.rename(path.with_name("test.jsonl"))) for path in paths[:2]]
    keys = {"data_path": tests[0], "test_data_path": tests, "guard_data": [tests[0], str(paths[2])]}
    data = load_run_data(Config.model_validate({"model_name": "builtin:tiny-clip"} | keys), needs_dev=False)
    assert data.test is not None
    assert [data.test.name, *(task.name for task in data.further.values())] == [*tests, tests[0], "set2.jsonl"]
    told = [fact.partition(": ")[0] for label, fact in data.facts() if label in ("test set", "guard set")]
    assert told == [*tests, tests[0], "set2.jsonl"]


def result_of(values: list[float], task: str = "s") -> EvaluationResult:
    per_query = {f"q{number}": value for number, value in enumerate(values)}
    return EvaluationResult(task, "m", {"ndcg@10": float(np.mean(values))}, {"ndcg@10": per_query}, {}, len(values), 9)


def test_a_guard_set_that_is_worse_is_named_as_forgotten() -> None:
    before, after = result_of([0.9] * 8 + [0.5], "scifact/test"), result_of([0.6] * 8 + [0.4], "scifact/test")
    outcome = SetOutcome.of("guard", before, after, "ndcg@10")
    assert outcome.forgets
    assert outcome.line.startswith("scifact/test: ndcg@10 0.856 -> 0.578 (-0.278, 95% interval ")
    assert outcome.line.endswith("9 queries): forgets")
    test = SetOutcome.of("test", before, after, "ndcg@10")
    assert not test.forgets
    assert test.line.endswith(": worse")
    assert headline(test.verdict, [test, outcome]) == f"{test.verdict.sentence}; forgets on scifact/test"
    kept = SetOutcome.of("guard", before, before, "ndcg@10")
    assert kept.line.endswith(": within noise")
    assert headline(test.verdict, [test, kept]) == test.verdict.sentence


def test_one_test_set_gives_the_verdict_whatever_the_guards() -> None:
    test = SetOutcome.of("test", result_of([0.1, 0.2, 0.2]), result_of([0.5, 0.7, 0.8]), "ndcg@10")
    guard = SetOutcome.of("guard", result_of([0.9, 0.8]), result_of([0.1, 0.1]), "ndcg@10")
    assert overall([test, guard]) is test.verdict


def test_the_mean_over_sets_has_welchs_interval() -> None:
    draw = np.random.default_rng(5)
    sets = [(draw.random(size), draw.random(size)) for size in (20, 35, 8)]
    found = mean_verdict([(result_of(list(a)), result_of(list(b))) for a, b in sets], "ndcg@10").comparison
    errors = np.array([(b - a).var(ddof=1) / len(a) / 9 for a, b in sets])
    middle = np.mean([(b - a).mean() for a, b in sets])
    freedom = errors.sum() ** 2 / sum(e**2 / (len(a) - 1) for e, (a, _) in zip(errors, sets, strict=True))
    reach = stdtrit(freedom, 0.975) * errors.sum() ** 0.5
    assert (found.low, found.high) == pytest.approx((middle - reach, middle + reach), abs=1e-9)
    assert found.num_queries == 63
    assert mean_verdict([(result_of([0.1]), result_of([0.9]))] * 2, "ndcg@10").word == "within noise"


@pytest.mark.slow
def test_one_path_in_a_list_is_as_the_path_alone(tmp_path: Path) -> None:
    data = rows(tmp_path / "d", 0)
    alone, listed = run(tmp_path / "a", data), run(tmp_path / "b", data, test_data_path=[str(data)])
    assert alone.verdict == listed.verdict
    assert alone.final.per_query == listed.final.per_query


@pytest.mark.slow
def test_guards_may_be_of_another_kind_and_need_no_test_set(tmp_path: Path) -> None:
    pictures, texts = write_rows(tmp_path / "data", "t2i", count=6), rows(tmp_path / "d", 0)
    result = run(
        tmp_path, pictures, model_name="builtin:tiny-clip", test_data_path=None, val_data_path=str(pictures),
        guard_data=str(texts), retrieval_mode="t2i",
    )  # fmt: skip
    assert [each.role for each in result.sets] == ["dev", "guard"]


@pytest.mark.slow
def test_a_run_that_goes_on_reads_what_the_untrained_model_did(tmp_path: Path) -> None:
    data, guard = rows(tmp_path / "d", 0), rows(tmp_path / "g", 1)
    keys = {"guard_data": str(guard), "save_steps": 1, "save_total_limit": 9, "max_steps": 3}
    whole = run(tmp_path / "whole", data, **keys)
    run(tmp_path / "cut", data, **keys)
    for step in (2, 3):
        for path in (tmp_path / "cut" / "out" / "checkpoints").glob(f"step-*{step}"):
            for each in sorted(path.rglob("*"), reverse=True):
                each.unlink()
            path.rmdir()
    again = run(tmp_path / "cut", data, **keys)
    assert [each.verdict for each in again.sets] == [each.verdict for each in whole.sets]
    evaluation = tmp_path / "cut" / "out" / "evaluation"
    assert read_evaluation(evaluation / "guard-1" / "baseline").per_query == whole.sets[1].baseline.per_query
    for path in sorted((evaluation / "guard-1" / "baseline").iterdir()):
        path.unlink()
    with pytest.raises(MachineError, match="guard-1/baseline is gone"):
        run(tmp_path / "cut", data, **keys)


def test_a_set_named_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "data_path: builtin:stdlib-code\noutput_dir: x\nmodel_name: builtin:ngram-bag\nguard_data: [a, a]\n"
    )
    with pytest.raises(ConfigError, match="guard_data lists a twice"):
        load_config(path)


@pytest.mark.slow
def test_two_processes_measure_the_same_sets(tmp_path: Path) -> None:
    paths = [str(rows(tmp_path / f"d{seed}", seed)) for seed in range(3)]
    (tmp_path / "config.yaml").write_text(
        f"model_name: builtin:tiny-clip\ndata_path: {paths[0]}\ntest_data_path: {json.dumps(paths[:2])}\n"
        f"guard_data: {paths[2]}\nglobal_batch_size: 6\nmax_steps: 2\neval_strategy: 'no'\nsave_strategy: 'no'\n"
        "bm25: false\nreport_to: none\ntrainable: all\n"
    )
    for count in (1, 2):
        words = ["-m", "vembed", "train", "config.yaml", "--config_override", f"num_processes={count}"]
        done = run_warm([*words, f"output_dir=run{count}"], cwd=tmp_path, env=os.environ, scratch=tmp_path)
        assert done.returncode == 0, done.stderr
    for name in ("test-1", "guard-2"):
        for when in ("baseline", "final"):
            one, two = (read_evaluation(tmp_path / f"run{count}" / "evaluation" / name / when) for count in (1, 2))
            assert one.per_query == two.per_query
            assert one.task == two.task
