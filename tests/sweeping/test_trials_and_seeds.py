"""Trials and seeds on a fake trainer: graded sets, data that change in between, what is tried again, and secrets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from vembed.config.load import load_values
from vembed.entrypoints import sweep
from vembed.errors import DataError, ExitCode
from vembed.evaluation.results import EvaluationResult, write_evaluation
from vembed.pages.write import write_page
from vembed.workflows.sweeping.report import chosen_lines, rank, sweep_page, terminal_lines
from vembed.workflows.sweeping.seeds import train_seeds
from vembed.workflows.sweeping.trials import (
    OUTCOME_FILE,
    Outcome,
    TrainProcess,
    Trial,
    Trials,
    TryAgainError,
    trial_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

METRIC = "ndcg@10"
GRADED = "spearman"
TWO = [Trial(f"0{n}", {"learning_rate": f"{n}e-5"}, steps=8) for n in (1, 2)]


@pytest.fixture(autouse=True)
def _unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write small files without forcing each to the disk."""
    monkeypatch.setattr("vembed.files.fsync_path", lambda _: None)


def result(mean: float, *, metric: str = METRIC, task: str = "set", first: int = 0) -> EvaluationResult:
    values = {f"q{number}": mean + 0.01 * (number % 5) for number in range(first, first + 20)}
    run = {query: [("d", 1.0)] for query in values}
    return EvaluationResult(task, "model", {metric: sum(values.values()) / 20}, {metric: values}, run, 20, 1)


class Runner:
    """Trains nothing, and writes what a finished run leaves: a dev set and further sets, each with its metric."""

    def __init__(
        self,
        *,
        dev: str = METRIC,
        sets: Mapping[str, str] | None = None,
        hashes: Mapping[str, Mapping[str, str]] | None = None,
        first: Mapping[str, int] | None = None,
    ) -> None:
        self.dev = dev
        self.sets = sets or {"test": METRIC}
        self.hashes = hashes or {}
        self.first = first or {}
        self.trained: list[str] = []

    def __call__(self, trial: Trial, folder: Path) -> str:
        self.trained.append(trial.name)
        mean = 0.4 + 0.01 * len(self.trained)
        first = self.first.get(trial.name, 0)
        (folder / "report").mkdir(parents=True)
        report = {
            "checkpoint": {"kept_step": 8},
            "dev_task": "dev",
            "verdict": {"sentence": "improved: ..."},
            "sets": [{"role": role.partition("-")[0]} for role in self.sets],
            "data_hashes": self.hashes.get(trial.name, {}),
        }
        (folder / "report" / "report.json").write_text(json.dumps(report), "utf-8")
        write_evaluation(folder / "evaluation" / "step-8", result(mean, metric=self.dev, first=first))
        for place, (name, metric) in enumerate(self.sets.items()):
            own = folder / "evaluation" / (name if place else "")
            write_evaluation(own / "baseline", result(0.3, metric=metric, task=name, first=first))
            write_evaluation(own / "final", result(mean, metric=metric, task=name, first=first))
        (folder / "model").mkdir()
        (folder / "plan.json").write_text("{}")
        return ""


def seeds(folder: Path, runner: Runner, count: int = 2) -> None:
    given = {"model_name": "builtin:ngram-bag", "data_path": "a.jsonl", "val_data_path": "b.jsonl"}
    config = load_values(given | {"output_dir": str(folder), "seeds": [*range(1, count + 1)]}, {}).config
    train_seeds(config, runner, lambda _: 8, "vembed train")


def test_a_graded_dev_set_decides_by_its_own_metric(tmp_path: Path) -> None:
    runs = Trials(tmp_path, Runner(dev=GRADED), METRIC, 2)
    outcomes = [runs.train(trial) for trial in TWO]
    ranked = rank(outcomes, METRIC)
    assert [each.outcome.trial.name for each in ranked] == ["02", "01"]
    assert ranked[1].to_best is not None
    assert ranked[1].to_best.metric == GRADED


def test_seeds_judge_each_set_by_its_own_metric_and_the_whole_by_the_first_ones(tmp_path: Path) -> None:
    seeds(tmp_path, Runner(sets={"test": METRIC, "test-1": GRADED, "guard-2": GRADED}))
    written = json.loads((tmp_path / "seeds.json").read_text())
    assert [each["role"] for each in written["sets"]] == ["test", "test", "guard"]
    assert written["verdict"]["mean"] == pytest.approx(written["sets"][0]["mean"])
    assert "mean" not in written["verdict"]["sentence"]
    assert GRADED in written["sets"][1]["sentence"]


def test_seeds_on_a_graded_dev_set_name_its_metric(tmp_path: Path) -> None:
    seeds(tmp_path, Runner(dev=GRADED), count=4)
    page = (tmp_path / "seeds.md").read_text()
    assert f"{GRADED} (dev)" in page
    assert "The model in model/ is that of seed-4" in page
    assert "4 seeds leave 3 degrees of freedom" in page


def test_data_that_changed_between_two_trials_are_refused(tmp_path: Path) -> None:
    one, other = {"training": "a", "dev": "b"}, {"training": "A", "dev": "b"}
    runner = Runner(hashes={"01": one, "02": other, "seed-1": one, "seed-2": other})
    runs = Trials(tmp_path / "sweep", runner, METRIC, 2)
    runs.train(TWO[0])
    with pytest.raises(DataError, match=r"their data differ \(training\), so files have changed"):
        runs.train(TWO[1])
    with pytest.raises(DataError, match=r"seed-2 and .*seed-1 can't be compared: their data differ"):
        seeds(tmp_path / "seeds", runner)


def test_training_data_that_are_tried_may_differ_and_the_dev_set_may_not(tmp_path: Path) -> None:
    tried = [Trial(name, {"data_path": name}, steps=8) for name in ("01", "02", "03")]
    hashes = {
        "01": {"training": "a", "dev": "b"},
        "02": {"training": "c", "dev": "b"},
        "03": {"training": "a", "dev": "B"},
    }
    runs = Trials(tmp_path, Runner(hashes=hashes), METRIC, 3)
    runs.train(tried[0])
    runs.train(tried[1])
    with pytest.raises(DataError, match=r"differ \(dev\)"):
        runs.train(tried[2])


def test_other_queries_are_refused_in_words_where_no_hash_tells(tmp_path: Path) -> None:
    runner = Runner(first={"02": 5, "seed-2": 5})
    runs = Trials(tmp_path / "sweep", runner, METRIC, 2)
    outcomes = [runs.train(trial) for trial in TWO]
    with pytest.raises(DataError, match="can't be compared with"):
        rank(outcomes, METRIC)
    with pytest.raises(DataError, match="can't be judged together"):
        seeds(tmp_path / "seeds", runner)


def test_a_cause_outside_of_the_trial_is_tried_again_by_the_same_command(tmp_path: Path) -> None:
    def missing(trial: Trial, folder: Path) -> str:
        raise TryAgainError("wandb isn't installed")

    failed = Trials(tmp_path, missing, METRIC, 1).train(TWO[0])
    lines = terminal_lines(rank([failed], METRIC), METRIC)
    assert lines[-1].endswith("wandb isn't installed (the same command tries it again)")
    assert not (tmp_path / TWO[0].name / OUTCOME_FILE).exists()
    assert Trials(tmp_path, Runner(), METRIC, 1).train(TWO[0]).dev is not None


def test_the_reason_of_a_failure_is_of_this_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "01.log").write_text("error: an earlier stop\n")
    codes = {"crashed": 1, "error: no such file": ExitCode.CONFIG}

    def attempt(said: str) -> str:
        def run(_: TrainProcess, __: object, log: Path) -> int:
            with log.open("a") as file:
                file.write(f"{said}\n")
            return codes[said]

        monkeypatch.setattr(TrainProcess, "_run", run)
        return TrainProcess(None, [], lambda: None)(TWO[0], tmp_path / "01")

    assert attempt("crashed") == "crashed"
    with pytest.raises(TryAgainError, match="no such file"):
        attempt("error: no such file")


def test_secrets_of_tried_values_reach_no_name_table_or_page(tmp_path: Path) -> None:
    secrets = ("hunter2", "s3cr3t")
    choice = {"data_path": "https://u:hunter2@h/x?token=s3cr3t"}
    name = trial_name(1, choice, of=2)
    trials = [Trial(name, choice, steps=8), Trial("02", {"data_path": "plain"}, steps=8)]
    runs = Trials(tmp_path, Runner(), METRIC, 2)
    ranked = rank([runs.train(trial) for trial in trials], METRIC)
    write_page(tmp_path, sweep_page(ranked, METRIC, has_test=True, facts={}, command=""), name="sweep")
    told = [name, trials[0].values, *terminal_lines(ranked, METRIC), *chosen_lines(ranked, METRIC, has_test=True)]
    told += [(tmp_path / f"sweep.{ending}").read_text() for ending in ("json", "md", "html")]
    assert not [secret for secret in secrets for text in told if secret in text]


def test_no_file_of_a_sweep_by_optuna_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna", reason="the extra optuna isn't installed: pip install 'vembed[optuna]'")
    rows, output = tmp_path / "rows.jsonl", tmp_path / "sweep"
    rows.write_text('{"query": "one", "positive": "two"}\n' * 4)
    tried = []

    class Process(Runner):
        def steps(self, trial: Trial) -> int:
            return 8

        def __call__(self, trial: Trial, folder: Path) -> str:
            tried.append(trial.choice["query_prompt"])
            return super().__call__(trial, folder)

    monkeypatch.setattr("vembed.workflows.sweeping.sweep.TrainProcess", lambda *_: Process())
    monkeypatch.setattr("vembed.workflows.sweeping.sweep._compare", lambda *_: None)
    given = ["model_name=builtin:ngram-bag", f"data_path={rows}", f"val_data_path={rows}", f"output_dir={tmp_path}/out"]
    given.append("document_prompt=https://h/?api_key=c4n4ry ")
    secrets = ["https://u:c4n4ry1@h ", "https://u:c4n4ry2@h "]
    words = ["--try", f"query_prompt={','.join(secrets)}", "--optuna", "6", "--output", str(output)]
    assert sweep.main([*words, "--config_override", *given], program="vembed sweep") == ExitCode.OK
    assert {each.strip() for each in tried} == {each.strip() for each in secrets}, "trials get the values themselves"
    assert (output / "optuna.journal").is_file()
    assert [path for path in output.rglob("*") if path.is_file() and b"c4n4ry" in path.read_bytes()] == []


def test_a_sweep_without_a_file_names_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "sweep"
    rows.write_text('{"query": "one", "positive": "two"}\n' * 4)

    class Process(Runner):
        def steps(self, trial: Trial) -> int:
            return 8

    monkeypatch.setattr("vembed.workflows.sweeping.sweep.TrainProcess", lambda *_: Process(dev=GRADED))
    monkeypatch.setattr("vembed.workflows.sweeping.sweep._compare", lambda *_: None)
    given = ["model_name=builtin:ngram-bag", f"data_path={rows}", f"val_data_path={rows}", f"output_dir={tmp_path}/out"]
    words = ["--try", "temperature=0.1,0.2", "--output", str(output), "--config_override", *given]
    assert sweep.main(words, program="vembed sweep") == ExitCode.OK
    written = json.loads((output / "sweep.json").read_text())
    assert written["metric"] == GRADED
    assert "configuration" not in written["facts"]


def test_the_comparison_on_the_test_set_is_said_to_choose_nothing(tmp_path: Path) -> None:
    dev = result(0.4)
    ranked = rank([Outcome(trial, tmp_path, dev) for trial in TWO], METRIC)
    assert "it chooses nothing" in "\n".join(chosen_lines(ranked, METRIC, has_test=True))
    assert "it chooses nothing" not in "\n".join(chosen_lines(ranked, METRIC, has_test=False))
