"""Ways through a space, on a trainer of arithmetic: what continues, what is chosen, and the same after any stop."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from vembed.errors import DataError, PreemptedError
from vembed.evaluation.results import EvaluationResult, write_evaluation
from vembed.workflows.sweeping.report import chosen_lines, rank, terminal_lines
from vembed.workflows.sweeping.space import grid, parse_tries
from vembed.workflows.sweeping.sweep import rungs, shorter, train_halving, train_optuna
from vembed.workflows.sweeping.trials import OUTCOME_FILE, Trial, Trials, trial_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

METRIC = "ndcg@10"
QUERIES = 40


@pytest.fixture(autouse=True)
def _unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a few hundred small files without forcing each to the disk."""
    monkeypatch.setattr("vembed.files.fsync_path", lambda _: None)


def result(mean: float, *, noise: float = 0.05, seed: int = 0) -> EvaluationResult:
    source = random.Random(seed)
    values = {f"q{number}": mean + noise * source.uniform(-1, 1) for number in range(QUERIES)}
    metrics = {METRIC: sum(values.values()) / QUERIES}
    run = {query: [("d", 1.0)] for query in values}
    return EvaluationResult("set/dev", "model", metrics, {METRIC: values}, run, QUERIES, 1)


class Arithmetic:
    """Trains nothing: the dev metric is a formula of the values, nearer to its end the more steps there are."""

    def __init__(self, *, failing: str = "", stops_at: int | None = None) -> None:
        self.failing = failing
        self.left = stops_at
        self.trained: list[str] = []

    def __call__(self, trial: Trial, folder: Path) -> str:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise PreemptedError("stopped")
        self.trained.append(trial.name)
        if self.failing and self.failing in trial.values:
            return "out of memory"
        rate, temperature = (float(trial.choice.get(key, "0.05")) for key in ("learning_rate", "temperature"))
        mean = 0.6 - abs(rate - 3e-5) * 3e3 - abs(temperature - 0.05) + 1e-4 * trial.steps
        write_run(folder, mean, kept=trial.steps)
        return ""


def write_run(folder: Path, mean: float, *, kept: int) -> None:
    """Write what a finished run leaves, as far as a sweep reads it."""
    (folder / "report").mkdir(parents=True)
    report = {"checkpoint": {"kept_step": kept}, "dev_task": "set/dev", "verdict": {"sentence": "improved: ..."}}
    (folder / "report" / "report.json").write_text(json.dumps(report), "utf-8")
    write_evaluation(folder / "evaluation" / f"step-{kept}", result(mean))


def trials(*words: str) -> list[Trial]:
    choices = grid(parse_tries(words))
    return [Trial(trial_name(n, choice, of=len(choices)), choice, steps=64) for n, choice in enumerate(choices, 1)]


def table(folder: Path, method: Callable[[Trials], Any], **options: Any) -> list[str]:
    runs = Trials(folder, Arithmetic(**options), METRIC, 8)
    return terminal_lines(rank(method(runs), METRIC), METRIC)


SIX = trials("learning_rate=1e-5,3e-5,6e-5", "temperature=0.05,0.3")


def test_a_grid_chooses_the_best_and_says_what_noise_explains(tmp_path: Path) -> None:
    outcomes = [*map(Trials(tmp_path, Arithmetic(), METRIC, 6).train, SIX)]
    ranked = rank(outcomes, METRIC)
    assert ranked[0].outcome.trial.choice == {"learning_rate": "3e-5", "temperature": "0.05"}
    assert [each.word for each in ranked] == ["best", *["worse"] * 5]
    lines = chosen_lines(ranked, METRIC, has_test=True)
    assert "dev set set/dev alone" in lines[0]
    assert any("one of 6 was chosen on the dev set" in line for line in lines)
    flattering = chosen_lines(ranked, METRIC, has_test=False)
    assert any("flatters it; give test_data_path" in line for line in flattering)


def test_a_difference_that_its_interval_does_not_exclude_is_within_noise(tmp_path: Path) -> None:
    two = trials("learning_rate=3e-5,1e-5")

    def runner(trial: Trial, folder: Path) -> str:
        mean, seed = (0.5, 0) if trial is two[0] else (0.495, 5)
        (folder / "report").mkdir(parents=True)
        write_run_of(folder, result(mean, noise=0.3, seed=seed))
        return ""

    ranked = rank([*map(Trials(tmp_path, runner, METRIC, 2).train, two)], METRIC)
    assert [each.word for each in ranked] == ["best", "within noise"]
    assert "noise explains its difference to 1 of the 1 others" in "\n".join(
        chosen_lines(ranked, METRIC, has_test=True)
    )


def write_run_of(folder: Path, dev: EvaluationResult) -> None:
    report = {"checkpoint": {"kept_step": 8}, "dev_task": "set/dev", "verdict": {"sentence": "improved: ..."}}
    (folder / "report" / "report.json").write_text(json.dumps(report), "utf-8")
    write_evaluation(folder / "evaluation" / "step-8", dev)


def test_more_trials_widen_the_intervals(tmp_path: Path) -> None:
    outcomes = [*map(Trials(tmp_path, Arithmetic(), METRIC, 6).train, SIX)]
    two, six = rank(outcomes[:4:2], METRIC), rank(outcomes, METRIC)
    assert two[1].to_best is not None
    of_six = next(each for each in six if each.outcome is two[1].outcome).to_best
    assert of_six is not None
    assert two[1].to_best.confidence == pytest.approx(0.95)
    assert of_six.confidence == pytest.approx(0.99)


def test_a_failed_trial_is_a_row_with_its_reason_and_stops_no_other(tmp_path: Path) -> None:
    lines = table(tmp_path, lambda runs: [*map(runs.train, SIX)], failing="3e-5")
    assert sum("failed" in line for line in lines) == 4  # two rows, and a line each with the reason
    again = f"(delete {tmp_path / SIX[3].name} to try it again)"
    assert lines[-1] == f"failed: learning_rate=3e-5 temperature=0.3: out of memory {again}"
    assert lines[1].split()[:3] == ["1", "1e-5", "0.05"]


def test_rounds_halve_down_to_two_trials_with_all_steps() -> None:
    assert rungs(8) == [(8, 0.25), (4, 0.5), (2, 1.0)]
    assert rungs(6) == [(6, 0.25), (3, 0.5), (2, 1.0)]
    assert rungs(2) == [(2, 1.0)]
    assert rungs(1) == [(1, 1.0)]


def test_a_shorter_trial_shrinks_its_whole_schedule() -> None:
    short = shorter(SIX[0], 0.25, warmup_steps=10)
    assert short.overrides == {"max_steps": "16", "warmup_steps": "3"}
    assert shorter(SIX[0], 0.25, None).overrides == {"max_steps": "16"}
    assert shorter(Trial("t", {}, steps=1), 0.25, 1).overrides == {"max_steps": "1", "warmup_steps": "0"}
    assert shorter(SIX[0], 1.0, 10) is SIX[0]
    assert short.name != SIX[0].name


def test_halving_lets_the_better_half_go_on(tmp_path: Path) -> None:
    trainer = Arithmetic()
    outcomes = train_halving(SIX, Trials(tmp_path, trainer, METRIC, 11).train, METRIC, lambda _: None)
    assert len(trainer.trained) == 6 + 3 + 2
    assert len(outcomes) == 6
    ranked = rank(outcomes, METRIC)
    assert ranked[0].outcome.trial.name == SIX[2].name
    assert [each.word for each in ranked].count("shorter") == 4
    assert [each.outcome.trial.steps for each in ranked] == [64, 64, 32, 16, 16, 16]


def test_halving_leaves_out_what_failed(tmp_path: Path) -> None:
    runs = Trials(tmp_path, Arithmetic(failing="learning_rate=3e-5"), METRIC, 11)
    ranked = rank(train_halving(SIX, runs.train, METRIC, lambda _: None), METRIC)
    assert ranked[0].outcome.trial.choice["learning_rate"] != "3e-5"
    assert [each.word for each in ranked].count("failed") == 2


def optuna_way(folder: Path) -> Callable[[Trials], Any]:
    tried = parse_tries(["learning_rate=1e-6..1e-4", "temperature=0.05,0.3"])
    return lambda runs: train_optuna(tried, runs.train, METRIC, count=14, seed=1, steps=8, folder=folder)


def test_optuna_comes_near_the_best_values(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra optuna isn't installed: pip install 'vembed[optuna]'")
    ranked = rank(optuna_way(tmp_path)(Trials(tmp_path, Arithmetic(), METRIC, 14)), METRIC)
    best = ranked[0].outcome.trial.choice
    assert best["temperature"] == "0.05"
    assert 1e-5 < float(best["learning_rate"]) < 6e-5
    assert (tmp_path / "optuna.journal").is_file()


def ways(tmp_path: Path) -> dict[str, Callable[[Trials], Any]]:
    return {
        "grid": lambda runs: [*map(runs.train, SIX)],
        "halving": lambda runs: train_halving(SIX, runs.train, METRIC, lambda _: None),
        "optuna": optuna_way(tmp_path),
    }


@pytest.mark.parametrize("way", ["grid", "halving", "optuna"])
def test_a_sweep_that_was_stopped_twice_ends_in_the_same_table(way: str, tmp_path: Path) -> None:
    if way == "optuna":
        pytest.importorskip("optuna", reason="the extra optuna isn't installed: pip install 'vembed[optuna]'")
    method = ways(tmp_path)[way]
    whole = table(tmp_path / "whole", method, failing="1e-5")
    whole = [line.replace(str(tmp_path / "whole"), str(tmp_path / "stopped")) for line in whole]
    for stop in (1, 3):
        with pytest.raises(PreemptedError):
            table(tmp_path / "stopped", method, failing="1e-5", stops_at=stop)
    trainer = Arithmetic(failing="1e-5")
    again = terminal_lines(rank(method(Trials(tmp_path / "stopped", trainer, METRIC, 8)), METRIC), METRIC)
    assert again == whole
    assert len(trainer.trained) < 11
    trainer = Arithmetic()
    method(Trials(tmp_path / "stopped", trainer, METRIC, 8))
    assert trainer.trained == []


def test_what_is_done_is_read_and_a_broken_record_is_refused(tmp_path: Path) -> None:
    runs = Trials(tmp_path, Arithmetic(), METRIC, 6)
    folder = runs.train(SIX[0]).folder
    (folder / OUTCOME_FILE).write_text("{", "utf-8")
    with pytest.raises(DataError, match="delete it to train the trial again"):
        Trials(tmp_path, Arithmetic(), METRIC, 6).train(SIX[0])


def test_names_of_folders_hold_nothing_that_a_file_system_refuses() -> None:
    name = trial_name(3, {"model_name": "../../etc/x y", "query_prompt": "é" * 200}, of=12)
    assert name.startswith("03_")
    assert "/" not in name
    assert len(name.encode()) < 120
