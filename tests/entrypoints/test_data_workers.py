"""Whole runs with data workers: killed, stopped, resumed, and a picture that vanishes in the middle."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
from kit.runs import (
    assert_same_run,
    metric_rows,
    run_process,
    start_process,
    steps_saved,
    write_config,
    write_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.warm import WarmProcess

NUM_RECORDS = 48
WHOLE = 40
"""Steps: enough to be stopped in the middle of."""


def write_pictures(folder: Path) -> Path:
    """Write captions with a picture each; every picture comes in every 6th step."""
    folder.mkdir(parents=True)
    for number in range(NUM_RECORDS):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        PIL.Image.fromarray(pixels).save(buffer, "PNG")
        (folder / f"{number}.png").write_bytes(buffer.getvalue())
    rows = [{"query": f"noise number {number}", "positive_image": f"{number}.png"} for number in range(NUM_RECORDS)]
    return write_rows(folder / "rows.jsonl", rows)


def keys(rows: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model_name": "builtin:tiny-clip",
        "data_path": str(rows),
        "test_data_path": str(rows),
        "batch_size": 8,
        "max_steps": WHOLE,
        "save_steps": 10,
        "eval_strategy": "no",
        "eval_both_directions": False,
        "image_augmentation": "strong",
        "report_to": "none",
        "logging_steps": 20,
        "num_workers": 2,
    } | changes


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "data")


@pytest.fixture(scope="module")
def whole(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without workers and without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = run_process(write_config(folder, keys(rows, num_workers=0)))
    assert outcome.code == 0, outcome.err
    return outcome.folder


def children_of(process: WarmProcess) -> list[int]:
    """Return the processes that a process started and that live."""
    tasks = Path(f"/proc/{process.pid}/task")
    return [int(word) for task in tasks.iterdir() for word in (task / "children").read_text().split()]


def lives(number: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], *, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_and_wait(config: Path, *, steps: int) -> tuple[WarmProcess, list[int]]:
    """Start a run and return it with its workers, once it has done some steps."""
    process = start_process(config)
    wait_until(lambda: process.poll() is not None or len(metric_rows(config.parent / "out")) >= steps)
    assert process.poll() is None, (config.parent / "output.txt").read_text()
    workers = children_of(process)
    assert len(workers) == 2
    return process, workers


def output_of(config: Path) -> str:
    return (config.parent / "output.txt").read_text()


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_5_and_the_same_command_goes_on(
    rows: Path, whole: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, keys(rows))
    process, workers = start_and_wait(config, steps=15)
    started = time.monotonic()
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(timeout=150) == 5, output_of(config)
    assert time.monotonic() - started < 60
    said = output_of(config)
    assert f"error: a data worker (process {workers[0]}, one of num_workers: 2) was killed by SIGKILL" in said
    assert "Traceback" not in said
    assert steps_saved(tmp_path / "out")
    assert not any(map(lives, workers))
    resumed = run_process(config)
    assert resumed.code == 0, resumed.err
    assert "resume: continuing from" in resumed.out
    assert_same_run(whole, resumed.folder)


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [False, True], ids=["to the run", "to its whole group"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_with_75_and_leaves_no_worker(
    rows: Path, tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    config = write_config(tmp_path, keys(rows))
    process, workers = start_and_wait(config, steps=12)
    for target in (*workers, process.pid) if to_all else (process.pid,):
        os.kill(target, number)
    assert process.wait(timeout=150) == 75, output_of(config)
    assert "Traceback" not in output_of(config)
    assert not any(map(lives, workers))
    stopped = steps_saved(tmp_path / "out")[-1]
    assert stopped == len(metric_rows(tmp_path / "out")) < WHOLE


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_another_number_of_workers(rows: Path, whole: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, keys(rows))
    process, _ = start_and_wait(config, steps=12)
    process.terminate()
    assert process.wait(timeout=150) == 75, output_of(config)
    resumed = run_process(write_config(tmp_path, keys(rows, num_workers=1)))
    assert resumed.code == 0, resumed.err
    assert "resume: num_workers was 2 and is 1 now" in resumed.out
    assert_same_run(whole, resumed.folder)


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed(rows: Path, tmp_path: Path) -> None:
    process, workers = start_and_wait(write_config(tmp_path, keys(rows)), steps=2)
    assert all(map(lives, workers))
    process.kill()
    process.wait(timeout=20)
    wait_until(lambda: not any(map(lives, workers)), seconds=10)


@pytest.mark.slow
def test_a_picture_that_vanishes_while_training_ends_the_run_with_3_and_its_name(tmp_path: Path) -> None:
    rows = write_pictures(tmp_path / "data")
    config = write_config(tmp_path, keys(rows))
    process, workers = start_and_wait(config, steps=3)
    (tmp_path / "data/17.png").unlink()
    assert process.wait(timeout=150) == 3, output_of(config)
    said = output_of(config)
    assert f"error: {tmp_path / 'data/17.png'}: no such file" in said
    assert "Traceback" not in said
    assert not any(map(lives, workers))


@pytest.mark.slow
def test_the_plan_says_how_many_workers_and_why(rows: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, keys(rows, num_workers="auto"))
    outcome = run_process(config, "--plan")
    assert outcome.code == 0, outcome.err
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    reason = next(line for line in plan["reasons"] if "num_workers" in line)
    assert f"num_workers {plan['num_workers']}: " in reason
    assert "that training keeps busy leave" in reason
