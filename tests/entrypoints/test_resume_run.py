"""Killed anywhere, resumed with the same command: bit for bit the run that was never stopped."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkpoint_cases import reseal
from kit.runs import (
    Outcome,
    Site,
    assert_same_run,
    environment,
    evaluation,
    metric_rows,
    run_here,
    run_keys,
    start_process,
    steps_saved,
    write_config,
    write_rows,
)
from safetensors.torch import load_file

import vembed.training.evaluations as room
from vembed.gradcache.engine import GradCacheEngine
from vembed.training.evaluations import Evaluations
from vembed.training.loop import TrainingLoop
from vembed.training.saving import RunCheckpoints, RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.warm import WarmProcess

TRANSFORMER = {
    "model_name": "builtin:tiny-transformer",
    "learn_temperature": True,
    "max_steps": 14,
    "eval_steps": 4,
    "save_steps": 3,
    "early_stopping_patience": 9,
    "gradient_cache_chunk_size": 6,
    "retain": 0.3,
}
"""Dropout 0.1, a tokenizer trained on the data, several chunks a step, evaluations and saves that don't coincide."""

BERT = {
    "learn_temperature": True,
    "max_steps": 12,
    "eval_steps": 5,
    "save_steps": 3,
    "gradient_cache_chunk_size": 6,
    "retain": 0,
}


@pytest.fixture(scope="session")
def whole(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The transformer's run without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = run_keys(folder, site.keys(**TRANSFORMER))
    assert outcome.code == 0, outcome.err
    assert all(row["num_chunks"] > 1 for row in outcome.rows), "the second pass must replay dropout"
    return outcome.folder


@pytest.fixture(scope="session")
def whole_bert(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BERT's run without a stop."""
    outcome = run_keys(tmp_path_factory.mktemp("whole_bert"), site.keys(**BERT))
    assert outcome.code == 0, outcome.err
    return outcome.folder


def wait_for(condition: Callable[[], bool], process: WarmProcess, seconds: float = 60) -> None:
    """Wait until something holds; fail when the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill(process: WarmProcess) -> None:
    process.kill()
    assert process.wait(timeout=20) == -signal.SIGKILL


def log_size(folder: Path) -> int:
    """Return the bytes of a run's log; 0 where a run that starts afresh has removed it."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / "train.log").stat().st_size
    return 0


@pytest.mark.slow
def test_two_runs_without_a_stop_are_equal_and_another_seed_is_not(
    site: Site, whole_bert: Path, tmp_path: Path
) -> None:
    again = run_keys(tmp_path / "again", site.keys(**BERT))
    assert_same_run(whole_bert, again.folder)
    other = run_keys(tmp_path / "other", site.keys(**BERT, seed=43))
    assert other.losses != again.losses


def test_a_run_killed_after_a_step_and_resumed_is_the_run_that_was_never_stopped(
    site: Site, whole: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, site.keys(**TRANSFORMER))
    process = start_process(config)
    wait_for(lambda: len(metric_rows(tmp_path / "out")) >= 8, process)
    kill(process)
    assert steps_saved(tmp_path / "out"), "killed after a checkpoint"
    assert not (tmp_path / "out/model").exists(), "killed before the end"
    resumed = run_here(config)
    assert resumed.code == 0, resumed.err
    assert "resume: continuing from" in resumed.out
    assert_same_run(whole, resumed.folder)
    saved = load_file(resumed.folder / "checkpoints/step-00000014/optimizer.safetensors")
    assert any(name.startswith("exp_avg/") for name in saved)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_afresh(site: Site, whole: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, site.keys(**TRANSFORMER))
    process = start_process(config)
    wait_for((tmp_path / "out/evaluation/baseline/metrics.json").is_file, process)
    kill(process)
    assert steps_saved(tmp_path / "out") == []
    (tmp_path / "out/initial_model/model.safetensors").write_bytes(b"half a file")  # as a kill could leave it
    saving = tmp_path / "out/checkpoints/.saving-step-00000003"  # and a kill in the first save
    saving.mkdir(parents=True)
    (saving / "model.safetensors").write_bytes(b"half a file")
    resumed = run_here(config)
    assert resumed.code == 0, resumed.err
    assert "resume" not in resumed.out
    assert_same_run(whole, resumed.folder)


@pytest.mark.slow
def test_a_run_killed_ten_times_at_random_moments_is_the_run_that_was_never_stopped(
    site: Site, whole: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, site.keys(**TRANSFORMER))
    numbers = random.Random(11)
    kills = runs = 0
    while True:
        runs += 1
        assert runs < 60
        process = start_process(config)
        if kills < 10:
            # Where a process that starts anew is when the log grows is the start of its work, not of its imports.
            size = log_size(tmp_path / "out")
            wait_for(lambda size=size: log_size(tmp_path / "out") not in {0, size}, process)  # type: ignore[misc]
            time.sleep(numbers.uniform(0, 1.2))
            if process.poll() is None:
                kill(process)
                kills += 1
                continue
        assert process.wait(timeout=120) == 0, (tmp_path / "output.txt").read_text()
        break
    assert kills >= 3, "a run that is over before it is killed proves nothing"
    assert_same_run(whole, tmp_path / "out")


@pytest.mark.slow
def test_sigterm_in_training_saves_that_step_exits_75_and_resumes_equal(
    site: Site, whole: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, site.keys(**TRANSFORMER))
    process = start_process(config)
    wait_for(lambda: len(metric_rows(tmp_path / "out")) >= 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75
    rows = metric_rows(tmp_path / "out")
    assert len(rows) < 14
    assert steps_saved(tmp_path / "out")[-1] == rows[-1]["step"]
    assert "stopped by SIGTERM" in (tmp_path / "output.txt").read_text()
    resumed = run_here(config)
    assert resumed.code == 0, resumed.err
    assert f"resume: continuing from {tmp_path}/out/checkpoints/step-{rows[-1]['step']:08d}" in resumed.out
    assert_same_run(whole, resumed.folder)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("step-0", "step-5", "final", "bm25")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["baseline", *SLOW])
def test_sigterm_in_an_evaluation_exits_75_and_resumes_equal(
    site: Site, whole_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = write_config(tmp_path, site.keys(**BERT) | {"bm25": True})
    if name == "bm25":
        search = room.evaluate_bm25

        def stop_and_search(*words: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return search(*words, **options)

        monkeypatch.setattr(room, "evaluate_bm25", stop_and_search)
    else:
        evaluate = Evaluations._evaluate

        def stop_and_evaluate(self: Evaluations, which: str, *rest: Any) -> Any:
            if which == name:
                os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(self, which, *rest)

        monkeypatch.setattr(Evaluations, "_evaluate", stop_and_evaluate)
    stopped = run_here(config)
    assert stopped.code == 75, stopped.err
    assert "stopped by SIGTERM" in stopped.err
    assert not (stopped.folder / "evaluation" / name).exists()
    assert steps_saved(stopped.folder)[-1] == {"step-5": 5, "final": 12, "bm25": 12}.get(name, 0)
    monkeypatch.undo()
    resumed = run_here(config)
    assert resumed.code == 0, resumed.err
    assert_same_run(whole_bert, resumed.folder)


@pytest.mark.slow
def test_the_best_checkpoint_is_found_again_when_its_evaluation_was_interrupted(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted evaluation is the best of the run: model/ must hold that step and no later one."""
    keys = site.keys(max_steps=12, eval_steps=2, learning_rate=2e-2, scheduler_type="constant")
    whole = run_keys(tmp_path / "whole", keys)
    best = json.loads((whole.folder / "checkpoints/step-00000012/state.json").read_text())["run"]["best_step"]
    assert 0 < best < 12
    evaluate = Evaluations._evaluate

    def stop_and_evaluate(self: Evaluations, which: str, *rest: Any) -> Any:
        if which == f"step-{best}":
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, which, *rest)

    monkeypatch.setattr(Evaluations, "_evaluate", stop_and_evaluate)
    config = write_config(tmp_path / "stopped", keys)
    assert run_here(config).code == 75
    monkeypatch.undo()
    resumed = run_here(config)
    assert f"step {best}, the best on the dev set" in resumed.out
    assert_same_run(whole.folder, resumed.folder)


@pytest.mark.slow
def test_sigint_twice_leaves_a_long_step_at_once(site: Site, tmp_path: Path) -> None:
    """A step that takes for ever stands for the long one that a user doesn't want to wait for."""
    config = write_config(tmp_path, site.keys())
    slow = (
        "import sys, time\n"
        "from vembed.gradcache.engine import GradCacheEngine\n"
        "step = GradCacheEngine.step\n"
        "def wait(*words, **options):\n"
        "    print('in a step', flush=True)\n"
        "    for _ in range(600): time.sleep(0.1)\n"
        "    return step(*words, **options)\n"
        "GradCacheEngine.step = wait\n"
        "from vembed.entrypoints.train import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line == "in a step\n":
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the first one only asks"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "SIGINT again: leaving at once" in errors


def test_one_sigint_is_a_preemption(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, site.keys())
    signal_after_step(monkeypatch, 3, signal.SIGINT)
    stopped = run_here(config)
    assert stopped.code == 75
    assert steps_saved(stopped.folder)[-1] == 3


def test_a_best_checkpoint_that_the_disk_refused_is_still_the_best_one_when_a_signal_saves_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saves = RunCheckpoints.save, []

    def refused_once(self: RunCheckpoints, state: RunState, *, best: bool, is_last: bool = False) -> Path | None:
        saves.append((state.step, best))
        if len(saves) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            return None
        return save(self, state, best=best, is_last=is_last)

    monkeypatch.setattr(RunCheckpoints, "save", refused_once)
    stopped = run_here(write_config(tmp_path, site.keys(eval_steps=2, save_steps=100)))
    assert stopped.code == 75, stopped.err
    assert saves == [(2, True), (2, True)]


def signal_after_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send a signal to this process when a step is logged."""
    log = TrainingLoop.log

    def log_and_signal(self: TrainingLoop, metrics: Any) -> None:
        log(self, metrics)
        if self.state.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(TrainingLoop, "log", log_and_signal)


def stop_at(monkeypatch: pytest.MonkeyPatch, config: Path, step: int) -> Outcome:
    """Run until a step and stop there."""
    with monkeypatch.context() as patch:
        signal_after_step(patch, step, signal.SIGTERM)
        outcome = run_here(config)
    assert outcome.code == 75, outcome.err
    assert steps_saved(outcome.folder)[-1] == step
    return outcome


@pytest.mark.slow
def test_a_corrupt_newest_checkpoint_is_skipped_loudly_and_the_end_is_the_same(
    site: Site, whole_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, site.keys(**BERT))
    stopped = stop_at(monkeypatch, config, 8)
    newest = stopped.folder / "checkpoints/step-00000008"
    content = bytearray((newest / "optimizer.safetensors").read_bytes())
    content[-100] ^= 1
    (newest / "optimizer.safetensors").write_bytes(content)
    resumed = run_here(config)
    assert resumed.code == 0, resumed.err
    assert "warning: Checkpoint step-00000008 skipped" in resumed.out
    assert "optimizer.safetensors: the content has changed" in resumed.out
    assert "step-00000006" in resumed.out.partition("continuing from")[2].splitlines()[0]
    assert_same_run(whole_bert, resumed.folder)


@pytest.mark.slow
def test_a_bent_newest_checkpoint_and_lost_rows_are_told_and_the_model_is_the_same(
    site: Site, whole_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, site.keys(**BERT))
    stopped = stop_at(monkeypatch, config, 8)
    newest = stopped.folder / "checkpoints/step-00000008"
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["stamp"]["config"]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    reseal(newest)
    (stopped.folder / "metrics.jsonl").write_text("\0" * 500)
    resumed = run_here(config)
    assert resumed.code == 0, resumed.err
    assert "warning: Checkpoint step-00000008 skipped" in resumed.out
    assert "manifest.json: stamp['config']" in resumed.out
    assert "step-00000006" in resumed.out.partition("continuing from")[2].splitlines()[0]
    assert "6 of the 6 steps up to the checkpoint are missing, and their numbers are lost" in resumed.out
    assert (stopped.folder / "metrics.jsonl.broken-1").read_text() == "\0" * 500
    assert [row["step"] for row in resumed.rows] == list(range(7, 13))
    weights = [folder / "model/model.safetensors" for folder in (whole_bert, resumed.folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_when_every_checkpoint_is_broken_the_run_does_not_start_over_by_itself(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, site.keys(**BERT))
    stopped = stop_at(monkeypatch, config, 8)
    for folder in (stopped.folder / "checkpoints").glob("step-*"):
        (folder / "model.safetensors").unlink()
    refused = run_here(config)
    assert refused.code == 5
    assert "none of its" in refused.err
    assert len(refused.rows) == 8


@pytest.mark.slow
def test_resume_by_path_goes_back_to_that_step(
    site: Site, whole_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, site.keys(**BERT))
    stopped = stop_at(monkeypatch, config, 8)
    resumed = run_here(config, "--resume", str(stopped.folder / "checkpoints/step-00000006"))
    assert resumed.code == 0, resumed.err
    assert "later checkpoints are kept as" in resumed.out
    assert_same_run(whole_bert, resumed.folder)


@pytest.mark.slow
def test_a_resume_path_that_is_no_checkpoint_is_refused_with_the_nearest(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, site.keys(**BERT))
    stopped = stop_at(monkeypatch, config, 8)
    refused = run_here(config, "--resume", str(stopped.folder / "checkpoints/step-00000099"))
    assert refused.code == 2
    assert f"the newest one nearby is {stopped.folder}/checkpoints/step-00000008" in refused.err
    assert len(refused.rows) == 8


@pytest.mark.slow
def test_a_checkpoint_of_another_folder_is_refused_because_its_baseline_is_not_here(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stop_at(monkeypatch, write_config(tmp_path / "first", site.keys(**BERT)), 8)
    path = first.folder / "checkpoints/step-00000008"
    refused = run_here(write_config(tmp_path / "second", site.keys(**BERT)), "--resume", str(path))
    assert refused.code == 2
    assert "set output_dir to the folder of the run" in refused.err
    moved = first.folder.rename(tmp_path / "moved")
    config = write_config(tmp_path / "third", site.keys(**BERT) | {"output_dir": str(moved)})
    assert run_here(config).code == 0, "a folder that was moved as a whole continues"


@pytest.mark.slow
def test_a_resumed_run_without_its_baseline_is_refused(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, site.keys(**BERT))
    stopped = stop_at(monkeypatch, config, 8)
    baseline = stopped.folder / "evaluation/baseline"
    kept = baseline.rename(tmp_path / "kept")
    refused = run_here(config)
    assert refused.code == 5
    assert "evaluation/baseline is gone" in refused.err
    kept.rename(baseline)
    assert run_here(config).code == 0


@pytest.fixture
def stopped(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was stopped at step 8; returns its configuration."""
    config = write_config(tmp_path, site.keys(**BERT))
    stop_at(monkeypatch, config, 8)
    return config


@pytest.mark.slow
def test_resuming_with_another_learning_rate_is_refused_and_shows_both(stopped: Path) -> None:
    before = (stopped.parent / "out/config.yaml").read_bytes()
    refused = run_here(stopped, "--config_override", "learning_rate=0.5", "batch_size=8")
    assert refused.code == 2
    assert "learning_rate: 0.003 in the checkpoint, 0.5 now" in refused.err
    assert "batch_size: 16 in the checkpoint, 8 now" in refused.err
    assert "resume=never overwrite_output_dir=true" in refused.err
    assert (stopped.parent / "out/config.yaml").read_bytes() == before


@pytest.mark.slow
def test_a_resumed_run_holds_no_file_of_its_checkpoint(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a process has mapped keeps its place on the disk, also once its folder is deleted."""
    train_step, mapped = TrainingLoop.train_step, []

    def look(self: TrainingLoop, number: int) -> Any:
        mapped.append("step-00000008" in Path("/proc/self/maps").read_text("utf-8"))
        return train_step(self, number)

    monkeypatch.setattr(TrainingLoop, "train_step", look)
    assert run_here(stopped).code == 0
    assert mapped == [False] * 4


@pytest.mark.slow
def test_a_checkpoint_that_is_a_file_or_a_link_to_nothing_is_skipped(stopped: Path) -> None:
    folder = stopped.parent / "out/checkpoints"
    (folder / "step-00000009").write_text("")
    (folder / "step-00000010").symlink_to(folder / "moved-away")
    resumed = run_here(stopped)
    assert resumed.code == 0, resumed.err
    assert "step-00000010 skipped" in resumed.out + resumed.err
    assert "continuing from " + str(folder / "step-00000008") in resumed.out


@pytest.mark.slow
def test_resuming_with_other_logging_steps_is_allowed_and_said(stopped: Path, whole_bert: Path) -> None:
    checkpoint = stopped.parent / "out/checkpoints/step-00000008"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["stamp"]["config_hash"] = "0" * 64  # of a version that hashed other keys
    manifest["packages"] |= {"torch": "1.0", "gone": "3"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    reseal(checkpoint)
    resumed = run_here(stopped, "--config_override", "logging_steps=3", "save_steps=2", "eval_batch_size=3")
    assert resumed.code == 0, resumed.err
    assert "step-00000008" in resumed.out.partition("continuing from")[2].splitlines()[0]
    assert "resume: logging_steps was 1 and is 3 now" in resumed.out
    version = importlib.metadata.version("torch")
    assert f"resume: torch was 1.0 and is {version} now: numbers agree to rounding" in resumed.out
    assert resumed.out.count("resume: ") == 5, "what is as it was isn't said"
    assert resumed.same_rows == [tuple(row[key] for key in ("step", "epoch", "loss", "learning_rate", "grad_norm"))
                                 for row in metric_rows(whole_bert)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dev", "test"))])
def test_resuming_with_changed_data_is_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str)\
        -> None:  # fmt: skip
    key = {"train": "data_path", "dev": "val_data_path", "test": "test_data_path"}[name]
    data = tmp_path / "data.jsonl"
    shutil.copy(getattr(site, name), data)
    config = write_config(tmp_path, site.keys(**BERT) | {key: str(data)})
    stop_at(monkeypatch, config, 8)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    write_rows(data, [*rows[:-1], rows[-1] | {"positive": "something else"}])
    refused = run_here(config)
    assert refused.code == 2
    assert "belongs to another run" in refused.err
    assert "data_fingerprint" in refused.err
    assert len(refused.rows) == 8
    write_rows(data, rows)
    assert run_here(config).code == 0


@pytest.mark.slow
def test_resuming_with_another_model_is_refused(stopped: Path, site: Site) -> None:
    refused = run_here(stopped, "--config_override", f"model_name={site.bert_without_dropout}")
    assert refused.code == 2
    assert f"model_name: '{site.bert}' in the checkpoint, '{site.bert_without_dropout}' now" in refused.err


@pytest.mark.slow
def test_a_step_is_interrupted_nowhere_between_its_gradients_and_its_weights(
    site: Site, whole_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the chunk loop lets the step end: its checkpoint is the one that the whole run passed through."""
    step = GradCacheEngine.step
    calls = []

    def signal_and_step(self: GradCacheEngine, *words: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *words, **options)

    config = write_config(tmp_path, site.keys(**BERT))
    with monkeypatch.context() as patch:
        patch.setattr(GradCacheEngine, "step", signal_and_step)
        assert run_here(config).code == 75
    assert steps_saved(tmp_path / "out")[-1] == 7
    assert_same_run(whole_bert, run_here(config).folder)


def test_the_comparison_of_runs_can_fail(whole_bert: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole_bert, copy)
    assert_same_run(whole_bert, copy)
    path = copy / "checkpoints/step-00000012/optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(AssertionError, match="optimizer"):
        assert_same_run(whole_bert, copy)
    assert evaluation(whole_bert, "baseline") != evaluation(whole_bert, "final")
