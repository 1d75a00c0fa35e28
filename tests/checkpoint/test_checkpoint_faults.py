"""Full disks and wrong bytes: the checkpoint before always loads. Faults at any write are in test_fault_table.py."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import assert_is_step, flip_byte, names_in, reseal, save_step, seal
from kit.faults import largest_file

from vembed.checkpoint.format import FutureCheckpointError, InvalidCheckpointError
from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.tensors import LoadedCheckpoint, validate
from vembed.errors import ConfigError, MachineError


def test_every_file_is_forced_to_disk_the_manifest_last_then_renamed_then_the_parent_then_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    save_step(manager, 1)
    save_step(manager, 2)
    events: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record_fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().relative_to(tmp_path)}")
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        events.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    def record_replace(source: Path, target: Path) -> None:
        events.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_replace)
    save_step(manager, 3)
    saving = ".saving-step-00000003"
    assert events == [
        f"fsync {saving}/model.safetensors",
        f"fsync {saving}/optimizer.safetensors",
        f"fsync {saving}/rng.safetensors",
        f"fsync {saving}/state.json",
        f"fsync {saving}/manifest.json",
        f"fsync {saving}",
        f"rename {saving} step-00000003",
        "fsync .",
        "fsync .LATEST.tmp",
        "replace LATEST",
        "fsync .",
        "rename step-00000001 .deleting-step-00000001",
    ]


def test_only_our_own_leftovers_are_cleared(tmp_path: Path) -> None:
    for name in (".saving-step-00000009", ".deleting-step-00000001", ".saving-my-notes", "step-notes", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    save_step(CheckpointManager(tmp_path), 1)
    assert names_in(tmp_path) == [".saving-my-notes", "LATEST", "other", "step-00000001", "step-notes"]


def test_a_disk_that_refuses_in_the_middle_of_a_file_loses_nothing_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    save_step(manager, 1)
    with largest_file(100_000):
        assert save_step(manager, 2, rows=10_000) is None
        assert "too large" in caplog.text
        assert names_in(tmp_path) == ["LATEST", "step-00000001"]
        assert_is_step(manager.load("auto"), 1)
        assert save_step(manager, 3)
    assert "training continues (failure 1 of 3 in a row)" in caplog.text
    assert save_step(manager, 4, rows=10_000)


def test_a_save_needs_1_2_times_its_bytes_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = 0
    manager = CheckpointManager(tmp_path, free_bytes=lambda folder: free)
    assert save_step(manager, 1, rows=1000) is None
    assert caplog.messages[-1].endswith("0.0 MB free")
    assert names_in(tmp_path) == []
    tensor_bytes = 2 * 1000 * 8 * 4
    free = int(1.1 * tensor_bytes)
    assert not save_step(manager, 1, rows=1000)
    free = int(1.2 * tensor_bytes) + 1000
    assert save_step(manager, 1, rows=1000)


def test_the_third_failed_save_in_a_row_stops_the_run_and_a_good_one_between_starts_the_count_anew(
    tmp_path: Path,
) -> None:
    free = 0
    manager = CheckpointManager(tmp_path, free_bytes=lambda folder: free)
    assert not save_step(manager, 1)
    assert not save_step(manager, 2)
    free = 10**9
    assert save_step(manager, 3)
    free = 0
    assert not save_step(manager, 4)
    assert not save_step(manager, 5)
    with pytest.raises(MachineError, match="3 saves in a row failed") as caught:
        save_step(manager, 6)
    assert caught.value.exit_code == 5
    assert_is_step(manager.load("auto"), 3)


def test_a_folder_that_can_not_be_made_is_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    manager = CheckpointManager(tmp_path / "file" / "checkpoints")
    assert not save_step(manager, 1)
    assert not save_step(manager, 2)
    with pytest.raises(MachineError, match="file/checkpoints"):
        save_step(manager, 3)


def test_a_pointer_that_can_not_be_written_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "LATEST").mkdir(parents=True)
    (tmp_path / "LATEST" / "full").write_text("so that no file can take its place")
    manager = CheckpointManager(tmp_path)
    assert save_step(manager, 1)
    assert "LATEST can't be updated" in caplog.text
    assert_is_step(manager.load("auto"), 1)


def two_steps(folder: Path) -> CheckpointManager:
    """Return a manager whose folder holds steps 1 and 2."""
    manager = CheckpointManager(folder)
    save_step(manager, 1)
    save_step(manager, 2)
    return manager


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_one_wrong_bit_anywhere_is_seen(tmp_path: Path, name: str) -> None:
    two_steps(tmp_path)
    folder = tmp_path / "step-00000002"
    validate(folder)
    size = (folder / name).stat().st_size
    for position in range(0, size, 3):
        flip_byte(folder / name, position)
        with pytest.raises(InvalidCheckpointError):
            validate(folder)
        flip_byte(folder / name, position)
    validate(folder)


def in_place_of(folder: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(folder)
    make(folder)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flip": lambda folder: flip_byte(folder / "model.safetensors", -1),
    "truncate": lambda folder: os.truncate(path := folder / "model.safetensors", path.stat().st_size - 1),
    "empty": lambda folder: os.truncate(folder / "model.safetensors", 0),
    "missing": lambda folder: (folder / "model.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a fifo": lambda folder: ((folder / "model.safetensors").unlink(), os.mkfifo(folder / "model.safetensors")),
    "empty folder": lambda folder: in_place_of(folder, Path.mkdir),
    "a file": lambda folder: in_place_of(folder, lambda path: path.write_text("{}")),
    "a link to nothing": lambda folder: in_place_of(folder, lambda path: path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_newest_checkpoint_is_skipped_with_one_warning_and_refused_when_named(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = two_steps(tmp_path)
    newest = tmp_path / "step-00000002"
    DAMAGE[damage](newest)
    assert_is_step(manager.load("auto"), 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step-00000002 skipped" in caplog.text
    with pytest.raises((InvalidCheckpointError, ConfigError)):
        manager.load(newest)
    assert_is_step(manager.load(tmp_path / "step-00000001"), 1)
    assert save_step(manager, 2), "what is broken makes room"
    assert_is_step(manager.load("auto"), 2)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("manifest.json", "stamp", nested(200), "nests more than 32 deep"),
        ("manifest.json", "stamp", None, "stamp"),
        ("manifest.json", "stamp", {"world_size": 1}, "holds no config_hash, strategy"),
        ("manifest.json", "step", "2", "step"),
        ("manifest.json", "best", 1, "best"),
        ("manifest.json", "files", [], "files"),
        ("manifest.json", "more", 1, "unknown keys"),
        ("state.json", "epoch", nested(200), "state.json: nests more than 32 deep"),
        ("state.json", "epoch", float("inf"), "isn't finite"),
    ],
)
def test_json_of_another_shape_is_skipped_although_its_checksums_are_right(
    tmp_path: Path, name: str, key: str, value: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = two_steps(tmp_path)
    newest = tmp_path / "step-00000002"
    content = json.loads((newest / name).read_text())
    content[key] = value
    (newest / name).write_text(json.dumps(content))
    if key == "files":
        seal(newest / name, content)
    else:
        reseal(newest)
    assert_is_step(manager.load("auto"), 1)
    assert "step-00000002 skipped" in caplog.text
    assert words in caplog.text
    with pytest.raises(InvalidCheckpointError, match=name):
        manager.load(newest)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe", b'{"a": 1e999}', b"9" * 5000, b"[]", b""])
def test_text_that_is_no_manifest_is_skipped(tmp_path: Path, text: bytes) -> None:
    manager = two_steps(tmp_path)
    (tmp_path / "step-00000002" / "manifest.json").write_bytes(text)
    assert_is_step(manager.load("auto"), 1)


def test_a_shape_that_the_caller_refuses_is_skipped_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = two_steps(tmp_path)

    def check(loaded: LoadedCheckpoint) -> None:
        if loaded.step == 2:
            raise ValueError("not as I need it")

    assert_is_step(manager.load("auto", check=check), 1)
    assert "step-00000002 skipped" in caplog.text
    assert "not as I need it" in caplog.text


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_in_the_place_of_all_checkpoints_does_not_start_the_run_over(tmp_path: Path, is_link: bool) -> None:
    folder = tmp_path / "checkpoints"
    if is_link:
        folder.symlink_to(tmp_path / "an unmounted disk")
    else:
        folder.write_text("lost")
    with pytest.raises(InvalidCheckpointError, match="is no folder"):
        CheckpointManager(folder).load("auto")


def test_when_every_checkpoint_is_broken_auto_does_not_start_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = two_steps(tmp_path)
    for step in (1, 2):
        flip_byte(tmp_path / f"step-{step:08d}" / "model.safetensors", 0)
    with pytest.raises(InvalidCheckpointError, match="none of its 2 checkpoints is whole"):
        manager.load("auto")
    assert len(caplog.records) == 2


def set_version(folder: Path, version: int) -> None:
    """Rewrite a manifest as another format version would, its checksum right."""
    reseal(folder, format_version=version)


def test_a_future_version_is_refused_not_skipped_and_the_known_one_loads(tmp_path: Path) -> None:
    manager = two_steps(tmp_path)
    newest = tmp_path / "step-00000002"
    set_version(newest, 2)
    with pytest.raises(FutureCheckpointError, match="Upgrade vembed"):
        manager.load("auto")
    with pytest.raises(FutureCheckpointError, match="Upgrade vembed"):
        manager.load(newest)
    with pytest.raises(FutureCheckpointError):
        save_step(manager, 2)
    set_version(newest, 1)
    assert_is_step(manager.load("auto"), 2)


def test_a_manifest_that_points_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    manager = two_steps(tmp_path)
    newest = tmp_path / "step-00000002"
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["../step-00000001/model.safetensors"] = manifest["files"].pop("model.safetensors")
    seal(newest / "manifest.json", manifest)
    with pytest.raises(InvalidCheckpointError, match="names files that no checkpoint has"):
        manager.load(newest)
