"""The output folder: what a run may delete there, and its log."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import pytest

from vembed.errors import ConfigError, MachineError
from vembed.models.names import RUN_MARKS
from vembed.training.output import EARLY_END, OWN_NAMES, OutputFolder

if TYPE_CHECKING:
    from pathlib import Path


def fill(folder: Path) -> None:
    """Leave what a run leaves, and what a user put beside it."""
    for name in OWN_NAMES:
        path = folder / name
        if "." in name:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
        else:
            path.mkdir(parents=True)
            (path / "file").write_text("x")
    (folder / "nonfinite-step-3.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")


def test_a_folder_with_checkpoints_is_another_run_until_it_may_be_deleted(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(ConfigError, match="holds another run"):
        OutputFolder(tmp_path).start_fresh(overwrite=False)
    assert (tmp_path / "model/file").is_file()
    OutputFolder(tmp_path).start_fresh(overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_a_run_left_that_was_killed_before_its_first_checkpoint_makes_room(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    (tmp_path / "checkpoints/file").rename(tmp_path / "checkpoints/.saving-step-00000003")
    with pytest.raises(ConfigError, match="the model of a run, and no checkpoint"):  # they were removed
        OutputFolder(tmp_path).start_fresh(overwrite=False)
    shutil.rmtree(tmp_path / "model")
    OutputFolder(tmp_path).start_fresh(overwrite=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "teacher"], "what is known by its content"


def test_a_folder_whose_checkpoints_were_deleted_by_hand_makes_room_although_their_pointers_stand(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    (tmp_path / "checkpoints/file").rename(tmp_path / "checkpoints/LATEST")
    (tmp_path / "checkpoints/BEST").write_text("step-00000003")
    with pytest.raises(ConfigError, match="the model of a run, and no checkpoint"):
        OutputFolder(tmp_path).start_fresh(overwrite=False)
    shutil.rmtree(tmp_path / "model")
    OutputFolder(tmp_path).start_fresh(overwrite=False)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("name", [name for name in OWN_NAMES if name not in {*RUN_MARKS, *EARLY_END}])
def test_a_file_that_only_has_a_runs_name_is_never_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="which no run wrote"):
            OutputFolder(tmp_path).start_fresh(overwrite=overwrite)
    assert (tmp_path / name).is_dir()
    (tmp_path / "train.log").write_text("")
    if name == "model":  # a run's, which took long to make
        with pytest.raises(ConfigError, match="holds the model of a run"):
            OutputFolder(tmp_path).start_fresh(overwrite=False)
        assert (tmp_path / name).is_dir()
    OutputFolder(tmp_path).start_fresh(overwrite=name == "model")
    assert (tmp_path / name).exists() == (name == "teacher"), "what a teacher said is known by its content"


def test_an_exit_json_alone_makes_room_and_beside_other_files_it_marks_nothing(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text("{}")
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"exit\.json, model, which no run wrote"):
        OutputFolder(tmp_path).start_fresh(overwrite=True)
    assert (tmp_path / "model").is_dir()
    (tmp_path / "model").rmdir()
    OutputFolder(tmp_path).start_fresh(overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_deleted_and_not_what_it_points_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("x")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "train.log").write_text("")
    (folder / "model").symlink_to(elsewhere)
    OutputFolder(folder).start_fresh(overwrite=True)
    assert not (folder / "model").is_symlink()
    assert (elsewhere / "weights").is_file()


def test_the_log_file_ends_with_its_block_and_one_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    logger = logging.getLogger("vembed")
    handlers = list(logger.handlers)
    with OutputFolder(tmp_path).log_file():
        logger.warning("inside")
    logger.warning("outside")
    assert logger.handlers == handlers
    text = (tmp_path / "train.log").read_text()
    assert "WARNING inside" in text
    assert "outside" not in text
    (tmp_path / "other/train.log").mkdir(parents=True)
    with pytest.raises(MachineError, match=r"train\.log can't be written"), OutputFolder(tmp_path / "other").log_file():
        pass
