"""Small parts of a run: its counters, its folder, and what a checkpoint holds."""

from __future__ import annotations

import json
import logging
import math
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.data.run_data import load_run_data
from vembed.errors import ConfigError, MachineError, NonFiniteError
from vembed.models.names import RUN_MARKS
from vembed.training.model import refuse_nonfinite_weights
from vembed.training.output import EARLY_END, OWN_NAMES, OutputFolder
from vembed.training.saving import RunState, load_module, module_tensors

if TYPE_CHECKING:
    from pathlib import Path


def test_the_best_is_the_first_of_equals_and_the_stale_ones_are_counted() -> None:
    state = RunState()
    seen = []
    for step, value in [(0, 0.5), (2, 0.7), (4, 0.7), (6, 0.6), (8, 0.8)]:
        state.step = step
        seen.append((state.record({"ndcg@10": value, "mrr@10": -value}, "ndcg@10"), state.stale_evaluations))
    assert seen == [(False, 0), (True, 0), (False, 1), (False, 2), (True, 0)], "the untrained model is no candidate"
    assert (state.best_step, state.best_metric, state.evaluated_step) == (8, 0.8, 8)
    assert [step for step, _ in state.evaluations] == [0, 2, 4, 6, 8]


def test_the_state_comes_back_from_json_as_it_was() -> None:
    state = RunState(step=7, skipped_steps=2, num_truncated=3)
    state.record({"ndcg@10": 1 / 3}, "ndcg@10")
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state
    with pytest.raises(KeyError):
        RunState.from_json({"step": 7})


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


class Tied(nn.Module):
    """Two names for one parameter, a buffer that is saved and one that isn't."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2, bias=False)
        self.second = nn.Linear(width, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def test_tied_tensors_are_saved_once_and_come_back_in_both_places() -> None:
    one, other = Tied(), Tied()
    one.count += 5
    tensors = module_tensors(one)
    assert tensors.keys() == {"first.weight", "count"}
    load_module(other, tensors)
    assert torch.equal(other.second.weight, one.first.weight)
    assert other.count.item() == 5
    with pytest.raises(ConfigError, match=r"another model: 1 tensors differ, the first is first\.weight"):
        load_module(Tied(width=4), tensors)


def test_weights_that_are_not_finite_are_named() -> None:
    from vembed.models.tables import NgramBag, NgramBagConfig

    bag = NgramBag(NgramBagConfig(dimension=4, buckets=8))
    refuse_nonfinite_weights(bag)
    with torch.no_grad():
        bag.weight.weight[2] = math.inf
    with pytest.raises(NonFiniteError, match=r"1 weights are NaN or infinite as loaded, the first is weight\.weight"):
        refuse_nonfinite_weights(bag)


def test_the_fingerprint_covers_all_that_a_run_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"q{n}", "positive": f"p{n}"}) + "\n" for n in range(4)))
    keys = DataKeys(data_path=str(rows), test_data_path="builtin:shapes")

    def fingerprint(*, document: str = "d", grade: int = 1, query: str = "q") -> str:
        task = RetrievalData("test", {"1": query}, {"2": document}, {"1": {"2": grade}})
        monkeypatch.setattr(DataSource, "judged", lambda *_, **__: task)
        return load_run_data(keys, needs_dev=False).fingerprint

    first = fingerprint()
    assert fingerprint() == first
    others = {fingerprint(document="e"), fingerprint(grade=2), fingerprint(query="r")}
    rows.write_text(rows.read_text().replace("p3", "p4"))
    others.add(fingerprint())
    assert len(others | {first}) == 5
