"""Sweeps and seeds on fake trainers: what is tried, what is chosen, the same after any stop, and no secret told."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
from kit.pages import assert_sound

from vembed.config.load import load_values
from vembed.config.schema import SECTIONS, Config
from vembed.data.keys import DataKeys
from vembed.data.run_data import load_run_data
from vembed.entrypoints import sweep
from vembed.errors import ConfigError, DataError, ExitCode, PreemptedError
from vembed.evaluation.results import EvaluationResult, write_evaluation
from vembed.pages.write import write_page
from vembed.registry import LOSSES
from vembed.workflows.sweeping.process import TrainProcess
from vembed.workflows.sweeping.report import chosen_lines, rank, sweep_page, terminal_lines
from vembed.workflows.sweeping.seeds import train_seeds
from vembed.workflows.sweeping.space import Range, corners, drawn, grid, parse_tries
from vembed.workflows.sweeping.sweep import _counted, _report, rungs, shorter, train_halving, train_optuna
from vembed.workflows.sweeping.trials import (
    ASK_FOR_ROWS,
    LEAVE_ROWS,
    OUTCOME_FILE,
    Trial,
    Trials,
    TryAgainError,
    trial_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def test_a_grid_has_every_combination_in_order() -> None:
    tried = parse_tries(["learning_rate=1e-5,2e-5", "temperature=0.02,0.05"])
    found = [tuple(choice.values()) for choice in grid(tried)]
    assert found == [("1e-5", "0.02"), ("1e-5", "0.05"), ("2e-5", "0.02"), ("2e-5", "0.05")]


def test_values_with_commas_of_their_own_stay_whole() -> None:
    (values,) = parse_tries(["mrl_dims=[64,32],[128,64],null"]).values()
    assert values == ("[64,32]", "[128,64]", "null")
    (values,) = parse_tries(["query_prompt='query, please: ',plain"]).values()
    assert values == ("'query, please: '", "plain")


def test_draws_are_the_same_for_the_same_seed_and_all_different() -> None:
    tried = parse_tries(["learning_rate=1e-6..1e-4", "batch_size=16..64", "temperature=0.02,0.05"])
    found = drawn(tried, 40, seed=3)
    assert found == drawn(tried, 40, seed=3)
    assert found != drawn(tried, 40, seed=4)
    assert len({tuple(choice.values()) for choice in found}) == 40
    assert all(1e-6 <= float(choice["learning_rate"]) <= 1e-4 for choice in found)
    assert all(16 <= int(choice["batch_size"]) <= 64 for choice in found)


def test_a_range_over_decades_is_drawn_by_its_logarithm_and_a_narrow_one_is_not() -> None:
    wide, narrow = parse_tries(["learning_rate=1e-6..1e-4", "temperature=0.02..0.1"]).values()
    assert isinstance(wide, Range)
    assert wide.is_log
    assert isinstance(narrow, Range)
    assert not narrow.is_log
    found = [math.log10(float(choice["learning_rate"])) for choice in drawn({"learning_rate": wide}, 200, seed=0)]
    assert 0.35 < sum(value < -5 for value in found) / len(found) < 0.65


def test_a_range_of_a_key_that_takes_fractions_is_not_drawn_in_whole_numbers() -> None:
    tried = parse_tries(["weight_decay=0..1"])
    assert len(drawn(tried, 8, seed=0)) == 8
    (whole,) = parse_tries(["warmup_steps=0..4"]).values()
    assert isinstance(whole, Range)
    assert whole.whole


def test_fewer_combinations_than_asked_for_are_all_taken_and_told(caplog: pytest.LogCaptureFixture) -> None:
    tried = parse_tries(["temperature=0.02,0.05,0.1"])
    assert drawn(tried, 10, seed=0) == grid(tried)
    assert len(drawn(parse_tries(["epochs=1..3"]), 8, seed=0)) == 3
    assert "--random 8" in caplog.text


def test_corners_have_every_value_once() -> None:
    tried = parse_tries(["learning_rate=1e-6..1e-4", "temperature=0.02,0.05,0.1"])
    found = list(corners(tried))
    assert [choice["temperature"] for choice in found] == ["0.02", "0.05", "0.1"]
    assert {choice["learning_rate"] for choice in found} == {"1e-06", "0.0001"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["learing_rate=1"], "learning_rate"), (["learning_rate"], "KEY=VALUE"), (["=1"], "KEY=VALUE"),
        (["learning_rate=1,,2"], "missing"), (["learning_rate=1,1"], "twice"), (["learning_rate=2..1"], "smaller"),
        (["learning_rate=1..1e999"], "smaller"), (["learning_rate=e..1"], "two numbers"),
        (["output_dir=a,b"], "--output"), (["resume=never"], "--output"), (["seeds=1"], "seed=1,2,3"),
        (["val_data_path=a"], "same sets"), (["test_data_path=a"], "same sets"),
        (["metric_for_best_model=mrr@10"], "compared by"), (["lr=1", "learning_rate=2"], "already"),
        (["logging_steps=1,2"], "doesn't change the result"), (["cpu_offload=true,false"], "doesn't change the result"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_tried_say_what_to_write(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"--try.*{told}"):
        parse_tries(words)
    with pytest.raises(ConfigError) as refused:
        parse_tries(["temperature=0.1", *words, "nothing=1"])
    assert len(str(refused.value).splitlines()) == 2, "all wrong words are told at once"


def test_a_grid_of_a_range_and_one_too_large_point_to_random() -> None:
    with pytest.raises(ConfigError, match="--random N"):
        grid(parse_tries(["learning_rate=1e-6..1e-4"]))
    values = ",".join(map(str, range(1, 41)))
    with pytest.raises(ConfigError, match="1,600"):
        grid(parse_tries([f"batch_size={values}", f"epochs={values}"]))


# --- ways through a space, on a trainer of arithmetic


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
        return write_run(folder, result(mean), kept=trial.steps)


def write_run(folder: Path, dev: EvaluationResult, *, kept: int = 8) -> str:
    """Write what a finished run leaves, as far as a sweep reads it."""
    (folder / "report").mkdir(parents=True)
    report = {"checkpoint": {"kept_step": kept}, "dev_task": "set/dev", "verdict": {"sentence": "improved: ..."}}
    (folder / "report" / "report.json").write_text(json.dumps(report), "utf-8")
    write_evaluation(folder / "evaluation" / f"step-{kept}", dev)
    return ""


def trials(*words: str) -> list[Trial]:
    choices = grid(parse_tries(words))
    return [Trial(trial_name(n, choice, of=len(choices)), choice, steps=64) for n, choice in enumerate(choices, 1)]


def table(folder: Path, method: Callable[[Trials], Any], **options: Any) -> list[str]:
    runs = Trials(folder, Arithmetic(**options), METRIC, 8)
    return terminal_lines(rank(method(runs), METRIC), METRIC)


SIX = trials("learning_rate=1e-5,3e-5,6e-5", "temperature=0.05,0.3")


def test_a_grid_chooses_the_best_and_more_trials_widen_the_intervals(tmp_path: Path) -> None:
    outcomes = [*map(Trials(tmp_path, Arithmetic(), METRIC, 6).train, SIX)]
    six, two = rank(outcomes, METRIC), rank(outcomes[:4:2], METRIC)
    assert six[0].outcome.trial.choice == {"learning_rate": "3e-5", "temperature": "0.05"}
    assert [each.word for each in six] == ["best", *["worse"] * 5]
    for has_test in (True, False):
        told = "\n".join(chosen_lines(six, METRIC, has_test=has_test))
        assert "flatters it" in told
        assert ("had no part" in told) == ("it chooses nothing" in told) == has_test
    of_six = next(each for each in six if each.outcome is two[1].outcome).to_best
    assert of_six is not None
    assert two[1].to_best is not None
    assert (two[1].to_best.confidence, of_six.confidence) == pytest.approx((0.95, 0.99))


def test_a_difference_that_its_interval_does_not_exclude_is_within_noise(tmp_path: Path) -> None:
    two = trials("learning_rate=3e-5,1e-5")

    def runner(trial: Trial, folder: Path) -> str:
        mean, seed = (0.5, 0) if trial is two[0] else (0.495, 5)
        return write_run(folder, result(mean, noise=0.3, seed=seed))

    ranked = rank([*map(Trials(tmp_path, runner, METRIC, 2).train, two)], METRIC)
    assert [each.word for each in ranked] == ["best", "within noise"]


def test_a_difference_on_one_query_is_within_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "QUERIES", 1)
    outcomes = [*map(Trials(tmp_path, Arithmetic(), METRIC, 2).train, SIX[:2])]
    assert [each.word for each in rank(outcomes, METRIC)] == ["best", "within noise"]


def test_a_failed_trial_is_a_row_with_its_reason_and_stops_no_other(tmp_path: Path) -> None:
    lines = table(tmp_path, lambda runs: [*map(runs.train, SIX)], failing="3e-5")
    assert sum("failed" in line for line in lines) == 4  # two rows, and a line each with the reason
    again = f"(delete {tmp_path / SIX[3].name} to try it again)"
    assert lines[-1] == f"failed: learning_rate=3e-5 temperature=0.3: out of memory {again}"
    assert lines[1].split()[:3] == ["1", "1e-5", "0.05"]


@pytest.mark.parametrize(
    ("tries", "batch_size", "plans"),
    [
        ("temperature=0.02,0.05", 64, 1),
        ("lr=1e-5,2e-5", 64, 1),
        ("lora_r=8,16", 64, 1),
        ("lora_r=8,16", "auto", 2),
        ("epochs=1,2", 64, 2),
        ("max_invalid_records=5,50", 64, 2),
    ],
)
def test_trials_whose_steps_cannot_differ_are_planned_once(
    tries: str, batch_size: int | str, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = trials(tries)
    planned: list[str] = []

    def steps(_: TrainProcess, trial: Trial) -> int:
        planned.append(trial.name)
        return 100 * len(planned)

    monkeypatch.setattr(TrainProcess, "steps", steps)
    config = load_values({"model_name": "builtin:tiny-transformer", "batch_size": batch_size}, {}).config
    counted = _counted(tried, TrainProcess(None, [], lambda: None), {trial.name: config for trial in tried}, {})
    assert len(planned) == len({trial.steps for trial in counted}) == plans


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


def test_halving_lets_the_better_half_go_on_and_leaves_out_what_failed(tmp_path: Path) -> None:
    trainer = Arithmetic()
    outcomes = train_halving(SIX, Trials(tmp_path / "all", trainer, METRIC, 11).train, METRIC, lambda _: None)
    assert (len(trainer.trained), len(outcomes)) == (6 + 3 + 2, 6)
    ranked = rank(outcomes, METRIC)
    assert ranked[0].outcome.trial.name == SIX[2].name
    assert [each.word for each in ranked].count("shorter") == 4
    assert [each.outcome.trial.steps for each in ranked] == [64, 64, 32, 16, 16, 16]
    runs = Trials(tmp_path / "failing", Arithmetic(failing="learning_rate=3e-5"), METRIC, 11)
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
    folder = Trials(tmp_path, Arithmetic(), METRIC, 6).train(SIX[0]).folder
    (folder / OUTCOME_FILE).write_text("{", "utf-8")
    with pytest.raises(DataError, match=OUTCOME_FILE):
        Trials(tmp_path, Arithmetic(), METRIC, 6).train(SIX[0])


def test_names_of_folders_hold_nothing_that_a_file_system_refuses() -> None:
    name = trial_name(3, {"model_name": "../../etc/x y", "query_prompt": "é" * 200}, of=12)
    assert name.startswith("03_")
    assert "/" not in name
    assert len(name.encode()) < 120


# --- trials and seeds of graded sets, data that change in between, secrets


GRADED = "spearman"


TWO = [Trial(f"0{n}", {"learning_rate": f"{n}e-5"}, steps=8) for n in (1, 2)]


def dev_of(mean: float, *, metric: str = METRIC, task: str = "set", first: int = 0) -> EvaluationResult:
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
        write_evaluation(folder / "evaluation" / "step-8", dev_of(mean, metric=self.dev, first=first))
        for place, (name, metric) in enumerate(self.sets.items()):
            own = folder / "evaluation" / (name if place else "")
            write_evaluation(own / "baseline", dev_of(0.3, metric=metric, task=name, first=first))
            write_evaluation(own / "final", dev_of(mean, metric=metric, task=name, first=first))
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
    for fact in (f"{GRADED} (dev)", "seed-4", "3 degrees of freedom"):
        assert fact in page
    assert_sound((tmp_path / "seeds.html").read_text())


def test_data_that_changed_between_two_trials_are_refused_and_tried_ones_may_differ(tmp_path: Path) -> None:
    one, other = {"training": "a", "dev": "b"}, {"training": "A", "dev": "b"}
    runner = Runner(hashes={"01": one, "02": other, "03": one | {"dev": "B"}, "seed-1": one, "seed-2": other})
    runs = Trials(tmp_path / "sweep", runner, METRIC, 2)
    runs.train(TWO[0])
    with pytest.raises(DataError, match="training"):
        runs.train(TWO[1])
    with pytest.raises(DataError, match="seed-2"):
        seeds(tmp_path / "seeds", runner)
    for key in ("num_workers", "loss_tile_size", "teacher_cache"):  # leave the rows alone, whatever their names say
        tried = Trials(tmp_path / key, runner, METRIC, 2)
        tried.train(Trial("01", {key: "01"}, steps=8))
        with pytest.raises(DataError, match="training"):
            tried.train(Trial("02", {key: "02"}, steps=8))
    # Rows that leak into a set are left out, or trained on; a mapping and a kind of label make other rows of one file.
    for key in (
        *("data_path", "leak", "added_losses", "column_mapping.text", "label_kind", "skip_invalid_records"),
        *("image_root", "false_negative_filter", "teacher_model_name"),
    ):
        tried = Trials(tmp_path / key, runner, METRIC, 3)
        for name in ("01", "02"):
            tried.train(Trial(name, {key: name}, steps=8))
        with pytest.raises(DataError, match="dev"):
            tried.train(Trial("03", {key: "03"}, steps=8))

    queries = Runner(first={"02": 5, "seed-2": 5})  # no hash tells, and they are others
    runs = Trials(tmp_path / "queries", queries, METRIC, 2)
    with pytest.raises(DataError):
        rank([runs.train(trial) for trial in TWO], METRIC)
    with pytest.raises(DataError):
        seeds(tmp_path / "other seeds", queries)


def test_the_keys_by_which_a_loss_asks_for_rows_are_those_that_it_reads() -> None:
    class Recorder:
        run_loss = Config.run_loss

        def __init__(self, config: Config) -> None:
            self._config = config

        def __getattr__(self, name: str) -> object:
            read.add(name)
            return getattr(self._config, name)

    read: set[str] = set()
    for loss in LOSSES.names():
        given = {"model_name": "builtin:ngram-bag", "data_path": "a.jsonl", "teacher_model_name": "far/away"}
        config = Config.model_construct(**given, loss_type=loss, false_negative_filter="teacher", added_losses={})
        Config.loss_needs(Recorder(config))  # type: ignore[arg-type]
    assert read - SECTIONS["Data"].model_fields.keys() == ASK_FOR_ROWS


def test_the_keys_that_leave_the_rows_alone_do_so(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"query": "one {number}", "positive": "two {number}"}}\n' for number in range(8)))
    others = {
        "source_batches": "single",
        "source_temperature": 2.0,
        "image_augmentation": "strong",
        "image_flip": True,
        "retrieval_mode": "t2t",
        "num_workers": 3,
        "prefetch_factor": 3,
        "drop_last": True,
    }
    assert others.keys() == LEAVE_ROWS
    base = {"data": [{"path": str(rows)}], "val_data_path": str(rows)}
    hashes = {
        load_run_data(DataKeys(**base | {key: value}), needs_dev=True).hashes["training"]
        for key, value in ({"leak": "warn"} | others).items()
    }
    assert len(hashes) == 1


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
    assert sum("https://" in text for text in told) > 3, "the value is told, without them"


def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: Runner, *words: str) -> Path:
    """Run the command on a trainer that trains nothing."""
    rows, output = tmp_path / "rows.jsonl", tmp_path / "sweep"
    rows.write_text('{"query": "one", "positive": "two"}\n' * 4)
    monkeypatch.setattr(runner, "steps", lambda _: 8, raising=False)
    monkeypatch.setattr("vembed.workflows.sweeping.sweep.TrainProcess", lambda *_: runner)
    monkeypatch.setattr("vembed.workflows.comparison.compare.compare_runs", lambda *_, **__: None)
    given = ["model_name=builtin:ngram-bag", f"data_path={rows}", f"val_data_path={rows}", f"output_dir={tmp_path}/out"]
    given.append("document_prompt=https://h/?api_key=c4n4ry ")
    words = (*words, "--output", str(output), "--config_override", *given)
    assert sweep.main([*words], program="vembed sweep") == ExitCode.OK
    return output


def test_no_file_of_a_sweep_by_optuna_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna", reason="the extra optuna isn't installed: pip install 'vembed[optuna]'")
    tried = []

    class Watched(Runner):
        def __call__(self, trial: Trial, folder: Path) -> str:
            tried.append(trial.choice["query_prompt"])
            return super().__call__(trial, folder)

    secrets = ["https://u:c4n4ry1@h ", "https://u:c4n4ry2@h "]
    output = swept(tmp_path, monkeypatch, Watched(), "--try", f"query_prompt={','.join(secrets)}", "--optuna", "6")
    assert {each.strip() for each in tried} == {each.strip() for each in secrets}, "trials get the values themselves"
    assert (output / "optuna.journal").is_file()
    assert [path for path in output.rglob("*") if path.is_file() and b"c4n4ry" in path.read_bytes()] == []


def test_a_sweep_without_a_file_names_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = swept(tmp_path, monkeypatch, Runner(dev=GRADED), "--try", "temperature=0.1,0.2")
    written = json.loads((output / "sweep.json").read_text())
    assert written["metric"] == GRADED
    assert "configuration" not in written["facts"]
    assert_sound((output / "sweep.html").read_text())


def test_the_best_runs_are_compared_by_what_decides_on_their_sets(tmp_path: Path) -> None:
    runs = Trials(tmp_path / "trials", Runner(sets={"test": GRADED}), METRIC, 2)
    _report([runs.train(trial) for trial in TWO], tmp_path, METRIC, {}, "vembed sweep")
    written = json.loads((tmp_path / "comparison" / "compare.json").read_text())
    assert written["metric"] == GRADED
    assert [verdict["word"] for verdict in written["verdicts"]] == ["worse"]
