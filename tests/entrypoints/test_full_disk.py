"""A disk that is too small, or fills up: refused before the first step, and a trained model is never lost."""

from __future__ import annotations

import gc
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import Outcome, Site, assert_same_run, run_keys, steps_saved

import vembed
from vembed.training import disk as space
from vembed.training.loop import TrainingLoop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Disk:
    """A small file system."""

    path: Path

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.path).free

    def leave(self, num_bytes: int) -> None:
        """Fill it up, but for so many bytes."""
        with (self.path / "filler").open("ab") as file:
            file.write(bytes(max(0, self.free - num_bytes)))

    def empty(self) -> None:
        (self.path / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """A file system of 24 MiB, or of as many as the test asks for."""
    path = tmp_path / "disk"
    path.mkdir()
    size = getattr(request, "param", 24)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield Disk(path)
    gc.collect()  # a refused run may leave mapped files in a cycle of its traceback
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def keys(site: Site, bag: Path) -> dict[str, Any]:
    """A run of 8 steps of a model of 1 MiB, whose checkpoints take 3."""
    return site.keys(
        model_name=str(bag), val_data_path=None, eval_strategy="no", eval_steps=None, save_steps=2, save_total_limit=2
    )


def train(disk: Disk, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, left: int) -> Outcome:
    """Run on a disk that somebody fills after the last step, but for so many bytes."""
    log = TrainingLoop.log

    def fill(self: TrainingLoop, metrics: Any) -> None:
        log(self, metrics)
        if self.state.step == self.run.plan.steps.total:
            disk.leave(left)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "log", fill)
        return run_keys(disk.path, keys)


@pytest.mark.slow
@pytest.mark.parametrize("disk", [150], indirect=True)
def test_a_run_that_cannot_fit_is_refused_before_its_first_step(disk: Disk, site: Site) -> None:
    keys = site.keys(model_name="builtin:ngram-bag", save_steps=2, save_total_limit=5, eval_strategy="no",
                     eval_steps=None, val_data_path=None)  # fmt: skip
    refused = run_keys(disk.path, keys)
    assert refused.code == 5
    assert "the run writes at least 873.8 MiB (4 x 192.8 MiB for checkpoints" in refused.err
    for way in ("another disk", "lower save_total_limit from 5", "raise save_steps"):
        assert way in refused.err
    assert not refused.rows
    shutil.rmtree(refused.folder)
    planned = run_keys(disk.path, keys | {"max_steps": 1, "save_steps": None}, "--plan")
    assert planned.code == 0
    assert (
        "disk writes up to 359.8 MiB (1 checkpoint of 192.8 MiB, model/ 64.2 MiB, initial_model/ 64.2 MiB), "
        "150.0 MiB free " in planned.flat
    )


def test_a_full_disk_is_told_before_anything_is_loaded(disk: Disk, site: Site) -> None:
    (disk.path / "config.yaml").write_bytes(bytes(4096))  # its place is taken by then
    (disk.path / "out").mkdir()
    disk.leave(0)
    refused = run_keys(disk.path, site.keys())
    assert refused.code == 5
    assert refused.err == (
        f"error: output folder {refused.folder} can't be written: No space left on device. Free some space, or choose "
        f"another folder\n"
    )
    assert not refused.out
    assert not [*refused.folder.iterdir()]


def test_the_model_comes_before_the_last_checkpoint(
    disk: Disk, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = train(disk, keys, monkeypatch, left=3 * MIB + MIB // 2)
    assert done.code == 0, done.err
    assert vembed.load(done.folder).dimension == 64
    assert steps_saved(done.folder) == [4, 6]
    assert "warning: The last checkpoint is not saved" in done.out
    assert "step-00000004, step-00000006 in" in done.out


def test_older_checkpoints_make_room_for_the_model(
    disk: Disk, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = train(disk, keys, monkeypatch, left=MIB // 2)
    assert done.code == 0, done.err
    assert vembed.load(done.folder).dimension == 64
    assert steps_saved(done.folder) == [6], "the newest whole one stays"
    assert "step-00000004 is removed: the model found no room beside it" in done.out
    assert not [path for path in done.folder.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_without_any_room_the_run_goes_on_from_what_is_whole(
    disk: Disk, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = keys | {"save_steps": 6}
    full = train(disk, one, monkeypatch, left=MIB // 2)
    assert full.code == 5
    assert "step-00000006 in" in full.err
    assert full.err.count("\n") == 1
    assert not (full.folder / "model").exists()
    disk.empty()
    again = run_keys(disk.path, one)
    assert again.code == 0, again.err
    assert_same_run(run_keys(tmp_path / "alone", one).folder, again.folder)


def test_nothing_is_called_whole_where_nothing_is(
    disk: Disk, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "free_disk_bytes", lambda folder: 1 << 40)
    disk.leave(2 * MIB)
    full = run_keys(disk.path, keys)
    assert full.code == 5
    assert "3 saves in a row failed" in full.err
    assert "no checkpoint of this run is whole" in full.err
    disk.empty()
    disk.leave(4 * MIB)
    only = run_keys(disk.path, keys | {"max_steps": 2})
    assert only.code == 0, only.err
    assert "no earlier one is whole" in only.out
    assert vembed.load(only.folder).dimension == 64
