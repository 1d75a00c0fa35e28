"""Trackers: each step once in metrics.jsonl, and no tracker that stops a run."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import threading
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vembed.errors import MachineError
from vembed.plugins.trackers.wandb import WandbTracker
from vembed.registry import TRACKERS
from vembed.training.tensorboard import TensorBoardTracker
from vembed.training.trackers import JsonlTracker, Tracker, open_trackers, read_rows, refuse_missing_packages, tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def rows_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in rows_of(path)]


def test_each_step_is_one_row_that_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 0.5, "learning_rate": 1e-5})
    assert rows_of(path) == [{"step": 1, "loss": 0.5, "learning_rate": 1e-5}]
    tracker.log(2, {"loss": 1 / 3})
    assert rows_of(path)[1]["loss"] == 1 / 3
    tracker.close()


def test_numbers_that_are_not_finite_become_null_and_the_file_stays_json(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"loss": float("nan"), "grad_norm": float("-inf"), "epoch": 0.0})
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None, "epoch": 0.0}]


def test_a_step_is_never_logged_twice(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(5, {"loss": 1.0})
    for step in (5, 4):
        with pytest.raises(ValueError, match="logged once"):
            tracker.log(step, {"loss": 2.0})
    with pytest.raises(ValueError, match="has its step"):
        tracker.log(6, {"step": 2.0})
    tracker.log(6, {"loss": 3.0})
    assert steps_of(tmp_path / "metrics.jsonl") == [5, 6]


def written(path: Path, steps: range) -> Path:
    tracker = JsonlTracker(path)
    for step in steps:
        tracker.log(step, {"loss": step / 2})
    tracker.close()
    return path


def test_cut_back_keeps_the_rows_up_to_the_checkpoint_byte_for_byte(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", range(1, 11))
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:6])
    tracker = JsonlTracker(path)
    assert tracker.cut_back(6) == 4
    assert path.read_bytes() == kept
    tracker.log(7, {"loss": 9.0})
    assert steps_of(path) == list(range(1, 8))
    assert rows_of(path)[-1]["loss"] == 9.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b'{"step": 4', b"\x00\x00\x00", b'{"step": 4, "loss": 2.0\xff'])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = written(tmp_path / "metrics.jsonl", range(1, 4))
    path.write_bytes(path.read_bytes() + torn)
    tracker = JsonlTracker(path)
    assert tracker.cut_back(10) == 1
    tracker.log(4, {"loss": 1.0})
    assert steps_of(path) == [1, 2, 3, 4]


def test_a_whole_last_row_without_its_line_end_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", range(1, 4))
    os.truncate(path, path.stat().st_size - 1)
    tracker = JsonlTracker(path)
    assert tracker.cut_back(3) == 0
    tracker.log(4, {"loss": 1.0})
    assert steps_of(path) == [1, 2, 3, 4]


def test_cutting_back_nothing_leaves_the_file_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", range(1, 4))
    inode = path.stat().st_ino
    assert JsonlTracker(path).cut_back(3) == 0
    assert path.stat().st_ino == inode
    assert JsonlTracker(tmp_path / "none" / "metrics.jsonl").cut_back(3) == 0


def test_a_run_that_starts_over_or_forgets_to_cut_back_still_has_each_step_once(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", range(1, 10))
    tracker = JsonlTracker(path)
    tracker.log(4, {"loss": 7.0})
    assert steps_of(path) == [1, 2, 3, 4]
    tracker.close()
    JsonlTracker(path).log(1, {"loss": 8.0})
    assert rows_of(path) == [{"step": 1, "loss": 8.0}]


GARBAGE = ["\x00\xff garbage", '{"step": 2}', '{"step": 2, "loss": "high"}', "[" * 100_000, '{"step": true, "loss": 1}']


@pytest.mark.parametrize("line", [None, *GARBAGE])
def test_rows_that_are_lost_are_counted_and_what_was_there_is_kept(
    tmp_path: Path, line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "metrics.jsonl", range(1, 7))
    tracker = JsonlTracker(path)
    tracker.say_lost(5)
    assert not caplog.records, "rows after the checkpoint are not missed"
    if line is None:
        path.unlink()
    else:
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], line, line, *lines[3:]]))
    broken = None if line is None else path.read_bytes()
    lost = {None: 5, '{"step": 2}': 1}.get(line, 2)
    tracker.say_lost(5)
    tracker.cut_back(5)
    assert [record.levelname for record in caplog.records][:1] == ["WARNING"]
    assert f"{lost} of the 5 steps up to the checkpoint are missing" in caplog.text
    assert [each.name for each in tmp_path.glob("*.broken*")] == ([] if line is None else ["metrics.jsonl.broken-1"])
    if broken is not None:
        assert (tmp_path / "metrics.jsonl.broken-1").read_bytes() == broken
        assert len(read_rows(path)) == 5 - lost
        assert "kept as metrics.jsonl.broken-1" in caplog.text
    tracker.log(6, {"loss": 1.0})
    assert read_rows(path)[-1] == {"step": 6, "loss": 1.0}


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(MachineError, match="it is no file"):
        JsonlTracker(tmp_path / "metrics.jsonl").say_lost(3)


def test_an_evaluation_adds_no_row(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"loss": 1.0})
    tracker.log_evaluation(1, {"ndcg@10": 0.5})
    tracker.log(2, {"loss": 1.0})
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse to make any file larger than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_a_row_stops_the_run_and_the_torn_row_is_gone_after_the_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 1.0})
    with largest_file(path.stat().st_size + 5), pytest.raises(MachineError, match=r"metrics\.jsonl: can't be written"):
        tracker.log(2, {"loss": 1.0})
    assert len(path.read_bytes().splitlines()) == 2
    resumed = JsonlTracker(path)
    assert resumed.cut_back(1) == 1
    resumed.log(2, {"loss": 1.0})
    assert steps_of(path) == [1, 2]


def test_a_killed_process_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        tracker = JsonlTracker(path)
        for step in range(1, 21):
            tracker.log(step, {"loss": 1.0})
        os.kill(os.getpid(), 9)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
    assert steps_of(path) == list(range(1, 21))


class FlakyTracker(Tracker):
    """A tracker that counts its calls and fails from the n-th on."""

    name = "flaky"

    def __init__(self, *, fails_from: int) -> None:
        self.calls: list[str] = []
        self._fails_from = fails_from

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) >= self._fails_from:
            raise ConnectionError("the tracking server is down")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._called(f"log {step} {dict(values)}")

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        self._called(f"ranks {step} {dict(by_rank)}")

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._called(f"evaluation {step} {dict(metrics)}")

    def close(self) -> None:
        self._called("close")


def drive(tracker: Tracker) -> list[Tracker]:
    """Tell a tracker of two steps, and return the list of those that still work."""
    trackers = [tracker]
    tell(trackers, "log", 1, {"loss": 1.0})
    tell(trackers, "log_ranks", 1, {"loss": (1.0,)})
    tell(trackers, "log_evaluation", 1, {"ndcg@10": 0.5})
    tell(trackers, "log", 2, {"loss": 0.5})
    tell(trackers, "close")
    return trackers


ALL_CALLS = [
    "log 1 {'loss': 1.0}",
    "ranks 1 {'loss': (1.0,)}",
    "evaluation 1 {'ndcg@10': 0.5}",
    "log 2 {'loss': 0.5}",
    "close",
]


@pytest.mark.parametrize("fails_from", [1, 2, 3, 4, 5])
def test_a_failing_tracker_is_dropped_with_one_warning_and_never_raises(
    fails_from: int, caplog: pytest.LogCaptureFixture
) -> None:
    flaky = FlakyTracker(fails_from=fails_from)
    assert drive(flaky) == []
    assert flaky.calls == ALL_CALLS[:fails_from]
    assert len(caplog.records) == 1
    assert "Tracker flaky failed" in caplog.text
    assert "ConnectionError: the tracking server is down" in caplog.text


def test_a_tracker_that_works_gets_every_call_beside_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    flaky = FlakyTracker(fails_from=99)
    assert drive(flaky) == [flaky]
    assert flaky.calls == ALL_CALLS
    assert caplog.records == []
    first, last = FlakyTracker(fails_from=1), FlakyTracker(fails_from=2)
    trackers: list[Tracker] = [first, flaky, last]
    for _ in range(3):
        tell(trackers, "close")
    assert [len(tracker.calls) for tracker in (first, flaky, last)] == [1, 3 + len(ALL_CALLS), 2]
    assert trackers == [flaky]
    assert len(caplog.records) == 2


def test_ctrl_c_passes_through_a_tracker() -> None:
    class Interrupted(FlakyTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(Interrupted(fails_from=99))


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    return {tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def test_tensorboard_shows_training_and_evaluation_and_each_step_once_after_a_resume(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path / "tensorboard")
    assert not (tmp_path / "tensorboard").exists()
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": 1.0})
    first.log_evaluation(2, {"ndcg@10": 0.5})
    first.close()
    resumed = TensorBoardTracker(tmp_path / "tensorboard", resume_step=2)
    for step in (3, 4, 5):
        resumed.log(step, {"loss": 2.0})
    resumed.close()
    assert scalars_in(tmp_path / "tensorboard") == {
        "train/loss": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)],
        "evaluation/ndcg@10": [(2, 0.5)],
    }


def test_tensorboard_shows_the_numbers_of_each_process(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_ranks(10, {"loss": (0.5, 0.75), "utilisation": (float("nan"), 0.25)})
    tracker.close()
    assert scalars_in(tmp_path) == {
        "ranks/loss/0": [(10, 0.5)],
        "ranks/loss/1": [(10, 0.75)],
        "ranks/utilisation/1": [(10, 0.25)],
    }


def test_tensorboard_on_a_folder_that_can_not_be_made_does_not_stop_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    drive(TensorBoardTracker(tmp_path / "file" / "tensorboard"))
    assert "Tracker tensorboard failed" in caplog.text


def test_a_disk_that_fills_up_under_tensorboard_is_one_warning_and_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    trackers: list[Tracker] = [TensorBoardTracker(tmp_path)]
    tell(trackers, "log", 1, {"loss": 1.0})
    failed = threading.Event()

    def fail(self: object, data: bytes) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", fail)
    tell(trackers, "log", 2, {"loss": 1.0})
    assert failed.wait(20)
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    tell(trackers, "close")
    (record,) = caplog.records
    assert record.message.startswith("Tracker tensorboard failed and is switched off; training continues")
    assert record.message.endswith("OSError: [Errno 28] No space left on device")
    assert len(shown) == 1, "of the thread that isn't TensorBoard's"


def test_a_missing_tensorboard_is_said_before_training_with_the_key_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(MachineError, match="pip install tensorboard, or leave it out of report_to"):
            TensorBoardTracker(None)  # type: ignore[arg-type]
    TensorBoardTracker(None)  # type: ignore[arg-type]


def test_all_is_each_tracker_whose_package_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for installed in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, installed, None)
    (tmp_path / "swanlab").mkdir()  # what runs of a service leave behind is no package

    def kinds(report_to: str | list[str]) -> list[str]:
        opened = open_trackers(report_to, tmp_path / "run", resume_step=0, config={})[1:]
        return [tracker.name for tracker in opened]

    assert kinds("all") == ["tensorboard"]
    assert kinds(["tensorboard", "tensorboard"]) == ["tensorboard"]
    (tmp_path / "swanlab").rmdir()
    (tmp_path / "swanlab.py").write_text("")
    importlib.invalidate_caches()
    assert kinds("all") == ["tensorboard", "swanlab"]
    assert kinds("none") == []


def test_a_missing_package_of_a_service_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MachineError, match=r'pip install "vembed\[wandb\]"'):
        WandbTracker(None)  # type: ignore[arg-type]
    with pytest.raises(MachineError, match=r'pip install "vembed\[wandb\]"'):
        refuse_missing_packages(["tensorboard", "wandb"])


def test_the_package_that_a_missing_tracker_asks_for_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    required = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    ours = [name for name in TRACKERS.names() if name not in TRACKERS.plugins()]
    assert len(ours) >= 5
    for name in ours:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MachineError, match=r'pip install (\w+|"vembed\[\w+\]"), or leave it out') as refused:
            refuse_missing_packages(name)
        asked = re.search(r'pip install "?(?:vembed\[)?(\w+)', str(refused.value))[1]  # type: ignore[index]
        assert asked in (project["optional-dependencies"] if "vembed[" in str(refused.value) else required), name


def test_importing_the_trackers_does_not_import_tensorboard() -> None:
    code = (
        "import sys, vembed.training.tensorboard as t; import vembed.training.trackers;"
        "sys.exit(any(name.split('.')[0] == 'tensorboard' for name in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
