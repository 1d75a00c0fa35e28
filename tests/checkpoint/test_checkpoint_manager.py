"""What a save leaves on disk, what is kept, and what is found again."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_cases import STAMP, assert_is_step, names_in, save_step, tensors_of

from vembed.checkpoint.format import InvalidCheckpointError
from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.tensors import validate
from vembed.errors import ConfigError, NonFiniteError


def test_a_checkpoint_comes_back_bit_for_bit_with_its_state_and_stamp(tmp_path: Path) -> None:
    path = save_step(CheckpointManager(tmp_path / "deep" / "checkpoints"), 1200, best=True)
    assert path == tmp_path / "deep" / "checkpoints" / "step-00001200"
    reader = CheckpointManager(tmp_path / "deep" / "checkpoints")
    assert_is_step(reader.load("auto"), 1200)
    assert_is_step(reader.load(path), 1200)
    assert reader.best() == path


def test_no_checkpoint_is_none_for_auto_and_for_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "nothing")
    assert manager.load("auto") is None
    assert manager.best() is None
    assert not (tmp_path / "nothing").exists()


def test_nothing_on_disk_is_a_pickle_and_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    path = save_step(CheckpointManager(tmp_path), 1)
    assert path is not None
    tensors = [f"{part}.safetensors" for part in ("model", "optimizer", "rng")]
    assert names_in(path) == ["manifest.json", *tensors, "state.json"]
    for file in path.iterdir():
        assert file.stat().st_mode & 0o777 == path.stat().st_mode & 0o666


def test_tied_transposed_and_empty_tensors_are_saved(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    model = {"a": weight, "tied": weight, "turned": weight.t(), "row": weight[1], "none": torch.zeros(0)}
    manager = CheckpointManager(tmp_path)
    manager.save(1, tensors={"model": model, "optimizer": {}}, state={}, stamp=STAMP, best=False)
    loaded = manager.load("auto")
    assert loaded is not None
    assert loaded.tensors["optimizer"] == {}
    assert loaded.tensors["model"].keys() == model.keys()
    assert all(torch.equal(loaded.tensors["model"][name], tensor) for name, tensor in model.items())


def test_saving_a_step_that_is_there_and_whole_writes_nothing_but_can_make_it_the_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    path = save_step(manager, 5)
    assert path is not None
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert save_step(manager, 5, best=True) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert manager.best() == path


def test_saving_a_step_that_is_there_deletes_what_a_kill_kept_from_being_deleted(tmp_path: Path) -> None:
    save_step(CheckpointManager(tmp_path), 2)
    for _ in range(2):  # a new step, and one that is there
        for name in ("step-00000001", ".deleting-step-00000000"):  # killed in the deletions that end a save
            shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
        save_step(CheckpointManager(tmp_path), 3)
        assert names_in(tmp_path) == ["LATEST", "step-00000002", "step-00000003"]


def test_saving_a_step_that_is_there_but_broken_replaces_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    path = save_step(manager, 5)
    assert path is not None
    (path / "state.json").unlink()
    assert save_step(manager, 5) == path
    assert_is_step(manager.load("auto"), 5)
    assert names_in(tmp_path) == ["LATEST", "step-00000005"]


def test_a_kill_before_a_best_step_was_marked_is_healed_by_the_next_save(tmp_path: Path) -> None:
    save_step(CheckpointManager(tmp_path), 1, best=True)
    save_step(CheckpointManager(tmp_path), 2, best=True)
    for left in (None, "step-00000001\n"):
        (tmp_path / "BEST").unlink() if left is None else (tmp_path / "BEST").write_text(left)
        save_step(CheckpointManager(tmp_path), 3)
        assert (tmp_path / "BEST").read_text() == "step-00000002\n"


def test_retention_keeps_the_last_k_and_the_best_and_k_is_two_or_more(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        CheckpointManager(tmp_path, keep_last=1)
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in range(1, 8):
        save_step(manager, step, best=step == 2)
    assert manager.steps() == [2, 5, 6, 7]
    assert manager.best() == tmp_path / "step-00000002"
    save_step(manager, 8, best=True)
    assert manager.steps() == [6, 7, 8]
    assert (tmp_path / "LATEST").read_text() == (tmp_path / "BEST").read_text() == "step-00000008\n"


def test_a_broken_checkpoint_does_not_count_as_one_of_the_last_k(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        save_step(manager, step)
    assert manager.steps() == [2, 3]
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"short")
    save_step(manager, 4)
    assert manager.steps() == [2, 3, 4]
    save_step(manager, 5)
    assert manager.steps() == [4, 5]


def test_a_deletion_that_fails_is_a_warning_and_is_made_up_for_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        save_step(manager, step)

    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} is in use")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        assert save_step(manager, 3)
    assert "can't be deleted" in caplog.text
    assert ".deleting-step-00000001" in names_in(tmp_path)
    save_step(manager, 4)
    assert names_in(tmp_path) == ["LATEST", "step-00000003", "step-00000004"]


def test_auto_goes_by_step_number_not_by_time_or_latest(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (900, 1000):
        save_step(manager, step)
    os.utime(tmp_path / "step-00000900", (4e9, 4e9))
    for lie in ("step-00000900\n", "step-00009999\n", "../../etc\n", ""):
        (tmp_path / "LATEST").write_text(lie)
        assert_is_step(manager.load("auto"), 1000)
    (tmp_path / "LATEST").unlink()
    assert_is_step(manager.load("auto"), 1000)


def test_the_best_is_right_although_its_pointer_is_missing_stale_or_lying(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=5)
    save_step(manager, 1, best=True)
    save_step(manager, 2, best=True)
    save_step(manager, 3)
    for content in ("step-00000001\n", "step-00000099\n", "../step-00000001\n", "\x00"):
        (tmp_path / "BEST").write_text(content)
        assert manager.best() == tmp_path / "step-00000002"
    (tmp_path / "BEST").unlink()
    assert manager.best() == tmp_path / "step-00000002"


def test_a_broken_best_is_skipped_loudly_for_the_best_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    save_step(manager, 1, best=True)
    save_step(manager, 2, best=True)
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"short")
    assert manager.best() == tmp_path / "step-00000001"
    assert "step-00000002 skipped" in caplog.text


def test_a_required_part_that_is_missing_is_an_error_and_one_that_is_there_is_not(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save_step(manager, 1)
    with pytest.raises(InvalidCheckpointError, match="holds no loss, sampler"):
        manager.load("auto", required=("model", "loss", "sampler", "skipped"))
    assert_is_step(manager.load("auto", required=("model", "optimizer", "rng", "epoch")), 1)


def test_a_path_that_is_no_checkpoint_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    good = save_step(manager, 7)
    assert good is not None
    folder = good.parent
    for wrong in (folder.parent, folder, good.with_name("step-00000008"), good / "state.json"):
        with pytest.raises(ConfigError) as caught:
            manager.load(wrong)
        if wrong.name != "state.json":
            assert str(good) in str(caught.value)
    assert_is_step(manager.load(good), 7)


def test_a_copy_under_another_name_loads_but_not_under_another_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    good = save_step(manager, 7)
    assert good is not None
    shutil.copytree(good, tmp_path / "my-favourite")
    assert_is_step(manager.load(tmp_path / "my-favourite"), 7)
    shutil.copytree(good, tmp_path / "step-00000009")
    with pytest.raises(InvalidCheckpointError, match="renamed"):
        manager.load(tmp_path / "step-00000009")


@pytest.mark.parametrize("part", ["model", "loss"])
def test_weights_that_are_not_finite_are_never_saved_but_state_of_an_optimizer_is(tmp_path: Path, part: str) -> None:
    manager = CheckpointManager(tmp_path)
    save_step(manager, 1)
    bad = tensors_of(2) | {part: {"weight": torch.ones(3), "broken": torch.tensor([1.0, float("nan")])}}
    with pytest.raises(NonFiniteError, match=f"{part}/broken"):
        manager.save(2, tensors=bad, state={}, stamp=STAMP, best=True)
    assert names_in(tmp_path) == ["LATEST", "step-00000001"]
    infinite = {"exp_avg/weight": torch.tensor([float("inf")])}
    finite = tensors_of(2) | {part: {"weight": torch.ones(3)}, "optimizer": infinite}
    assert manager.save(2, tensors=finite, state={}, stamp=STAMP, best=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": {"../model": {}}}, "part"),
        ({"state": {"best": float("-inf")}}, "state can't be written as JSON"),
        ({"state": {"when": object()}}, "state can't be written as JSON"),
        ({"stamp": {"strategy": "ddp"}}, "config_hash, world_size missing"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, dict[str, object]], message: str
) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints")
    valid: dict[str, object] = {"tensors": tensors_of(1), "state": {"best": 0.5}, "stamp": STAMP}
    with pytest.raises(ValueError, match=message):
        manager.save(1, best=False, **(valid | change))  # type: ignore[arg-type]
    assert not (tmp_path / "checkpoints").exists()
    assert manager.save(1, best=False, **valid)  # type: ignore[arg-type]


def test_going_back_sets_later_checkpoints_aside_and_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in (100, 200, 300):
        save_step(manager, step, best=step == 300)
    with caplog.at_level(logging.INFO):
        assert manager.set_aside_after(300) == []
    assert caplog.text == ""
    moved = manager.set_aside_after(100)
    assert [path.name for path in moved] == ["abandoned-1-step-00000200", "abandoned-1-step-00000300"]
    assert "abandoned-1-step-00000300" in caplog.text
    validate(moved[1])
    assert_is_step(manager.load("auto"), 100)
    assert manager.best() is None
    assert save_step(manager, 200) == tmp_path / "step-00000200"
    assert [path.name for path in manager.set_aside_after(100)] == ["abandoned-2-step-00000200"]


def test_a_step_done_again_after_going_back_is_not_the_best_because_its_abandoned_twin_was(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in (100, 200):
        save_step(manager, step, best=True)
    manager.set_aside_after(100)
    save_step(manager, 200)
    assert manager.best() == tmp_path / "step-00000100"
    assert (tmp_path / "BEST").read_text() == "step-00000100\n"
    # The same where the kill came between the renaming and the pointer, or a user deleted the later folder.
    (tmp_path / "BEST").write_text("step-00000200\n")
    shutil.rmtree(tmp_path / "step-00000200")
    assert manager.set_aside_after(100) == []
    save_step(manager, 200)
    assert manager.best() == tmp_path / "step-00000100"
