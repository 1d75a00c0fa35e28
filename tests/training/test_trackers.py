"""metrics.jsonl with each step once, trackers that stop no run, and their packages."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kit.faults import largest_file

from vembed.errors import MachineError
from vembed.registry import TRACKERS
from vembed.training.trackers import JsonlTracker, Tracker, open_trackers, read_rows, refuse_missing_packages, tell


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read rows as a reader does that knows no NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in rows_of(path)]


def written(path: Path, last: int) -> JsonlTracker:
    """Write the rows of steps 1 to `last`, and return a tracker of a resumed run."""
    tracker = JsonlTracker(path)
    for step in range(1, last + 1):
        tracker.log(step, {"loss": step / 2})
    tracker.close()
    return JsonlTracker(path)


def test_each_step_is_one_row_of_json_that_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 1 / 3, "learning_rate": 1e-5})
    first = {"step": 1, "loss": 1 / 3, "learning_rate": 1e-5}
    assert rows_of(path) == [first]
    tracker.log_evaluation(1, {"ndcg@10": 0.5})
    tracker.log(2, {"loss": float("nan"), "grad_norm": float("-inf"), "epoch": 0.0})
    assert rows_of(path) == [first, {"step": 2, "loss": None, "grad_norm": None, "epoch": 0.0}]


def test_a_number_that_was_not_finite_is_read_as_nan_only_where_asked(path: Path) -> None:
    JsonlTracker(path).log(1, {"loss": float("inf"), "epoch": 0.5})
    assert read_rows(path) == [{"step": 1, "epoch": 0.5}]
    (row,) = read_rows(path, keeps_nan=True)
    assert math.isnan(row.pop("loss"))
    assert row == {"step": 1, "epoch": 0.5}


def test_a_step_is_never_logged_twice(path: Path) -> None:
    tracker = JsonlTracker(path)
    tracker.log(5, {"loss": 1.0})
    for step in (5, 4):
        with pytest.raises(ValueError, match="logged once"):
            tracker.log(step, {"loss": 2.0})
    with pytest.raises(ValueError, match="has its step"):
        tracker.log(6, {"step": 2.0})
    tracker.log(6, {"loss": 3.0})
    assert steps_of(path) == [5, 6]


def test_a_run_that_starts_over_or_forgets_to_cut_back_still_has_each_step_once(path: Path) -> None:
    tracker = written(path, 9)
    tracker.log(4, {"loss": 7.0})
    tracker.close()
    assert steps_of(path) == [1, 2, 3, 4]
    JsonlTracker(path).log(1, {"loss": 8.0})
    assert rows_of(path) == [{"step": 1, "loss": 8.0}]


def test_cut_back_keeps_the_rows_up_to_the_checkpoint_byte_for_byte(path: Path) -> None:
    tracker = written(path, 10)
    before, inode = path.read_bytes(), path.stat().st_ino
    assert tracker.cut_back(10) == 0
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode), "nothing to write"
    assert tracker.cut_back(6) == 4
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:6])
    tracker.log(7, {"loss": 9.0})
    assert [*path.parent.iterdir()] == [path]
    assert (steps_of(path), rows_of(path)[-1]["loss"]) == ([*range(1, 8)], 9.0)
    assert JsonlTracker(path.parent / "none" / path.name).cut_back(3) == 0


@pytest.mark.parametrize(
    "end", [b"", b'\n{"step": 4, "lo', b'\n{"step": 4', b"\n\x00\x00\x00", b'\n{"step": 4, "loss": 2.0\xff']
)
def test_a_torn_last_line_is_dropped_and_one_that_misses_its_line_end_alone_is_kept(path: Path, end: bytes) -> None:
    tracker = written(path, 3)
    path.write_bytes(path.read_bytes()[:-1] + end)
    assert tracker.cut_back(10) == (end != b"")
    tracker.log(4, {"loss": 1.0})
    assert steps_of(path) == [1, 2, 3, 4]


GARBAGE = ["\x00\xff garbage", '{"step": 2}', '{"step": 2, "loss": "high"}', "[" * 100_000, '{"step": true, "loss": 1}']


@pytest.mark.parametrize("line", [None, *GARBAGE])
def test_rows_that_are_lost_are_counted_and_what_was_there_is_kept(
    path: Path, line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = written(path, 6)
    tracker.say_lost(5)
    assert not caplog.records, "rows after the checkpoint are not missed"
    lines = path.read_text().splitlines()
    path.unlink()
    if line is not None:
        path.write_text("\n".join([lines[0], line, line, *lines[3:]]))
    before = [path.read_bytes() for path in path.parent.iterdir()]
    tracker.say_lost(5)
    tracker.cut_back(5)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    lost = {None: 5, '{"step": 2}': 1}.get(line, 2)
    assert f"{lost} of the 5 steps up to the checkpoint are missing" in warning
    assert ("kept as metrics.jsonl.broken-1" in warning) == (line is not None)
    assert [copy.read_bytes() for copy in path.parent.glob("*.broken-1")] == before
    assert len(read_rows(path)) == 5 - lost
    tracker.log(6, {"loss": 1.0})
    assert read_rows(path)[-1] == {"step": 6, "loss": 1.0}


def test_what_is_no_file_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(MachineError, match="it is no file"):
        JsonlTracker(path).say_lost(3)


def test_a_disk_that_refuses_a_row_stops_the_run_and_the_torn_row_is_gone_after_the_resume(path: Path) -> None:
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 1.0})
    with largest_file(path.stat().st_size + 5), pytest.raises(MachineError, match=r"metrics\.jsonl: can't be written"):
        tracker.log(2, {"loss": 1.0})
    assert len(path.read_bytes().splitlines()) == 2
    resumed = JsonlTracker(path)
    assert resumed.cut_back(1) == 1
    resumed.log(2, {"loss": 1.0})
    assert steps_of(path) == [1, 2]


def test_a_killed_process_loses_no_row(path: Path) -> None:
    child = os.fork()
    if child == 0:
        tracker = JsonlTracker(path)
        for step in range(1, 21):
            tracker.log(step, {"loss": 1.0})
        os.kill(os.getpid(), 9)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
    assert steps_of(path) == [*range(1, 21)]


class Flaky(Tracker):
    """A tracker that remembers its calls and fails from the n-th on."""

    name = "flaky"

    def __init__(self, fails_from: int, error: BaseException) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails_from, self._error = fails_from, error

    def log(self, *words: Any, **_: Any) -> None:
        self.calls.append(words)
        if len(self.calls) >= self._fails_from:
            raise self._error

    log_ranks = log_evaluation = close = log


CALLS: list[tuple[Any, ...]] = [
    ("log", 1, {"loss": 1.0}),
    ("log_ranks", 1, {"loss": (1.0,)}),
    ("log_evaluation", 1, {"ndcg@10": 0.5}),
    ("log", 2, {"loss": 0.5}),
    ("close",),
]


@pytest.mark.parametrize("fails_from", [1, 2, 3, 4, 5])
def test_a_failing_tracker_is_dropped_with_one_warning_and_the_others_get_every_call(
    fails_from: int, caplog: pytest.LogCaptureFixture
) -> None:
    down = ConnectionError("the tracking server is down")
    first, sound, last = (Flaky(number, down) for number in (1, 99, fails_from))
    trackers: list[Tracker] = [first, sound, last]
    for name, *words in CALLS:
        tell(trackers, name, *words)
    assert trackers == [sound]
    told = [tuple(words) for _, *words in CALLS]
    assert [tracker.calls for tracker in (first, sound, last)] == [told[:1], told, told[:fails_from]]
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert record.message.startswith("Tracker flaky failed")
        assert record.message.endswith("ConnectionError: the tracking server is down")


def test_ctrl_c_passes_through_a_tracker() -> None:
    with pytest.raises(KeyboardInterrupt):
        tell([Flaky(1, KeyboardInterrupt())], "log", 1, {})


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


@pytest.mark.parametrize("package", ["nowhere.cloud", "nowhere"])
def test_a_package_within_one_that_is_missing_is_missing_too(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    class Cloud(Tracker):
        name = "cloud"

    Cloud.package = package
    monkeypatch.setitem(TRACKERS._entries, Cloud.name, Cloud)
    monkeypatch.setitem(TRACKERS._plugins, Cloud.name, __name__)
    with pytest.raises(MachineError, match=f"pip install {package}, or leave it out"):
        refuse_missing_packages(Cloud.name)


def test_importing_the_trackers_does_not_import_tensorboard() -> None:
    code = (
        "import sys, vembed.training.tensorboard as t; import vembed.training.trackers;"
        "sys.exit(any(name.split('.')[0] == 'tensorboard' for name in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
