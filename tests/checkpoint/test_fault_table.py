"""A fault at any write of a save: a process is killed or asked to stop, or its disk refuses; alone, and one of two."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoint_cases import assert_is_step, names_in, tensors_of
from fault_cases import FAULTS, LOST_THE_OTHER, MET, NOT_ASKED, NOT_SAVED, STEP, shared_values
from kit.warm import run_warm

from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.tensors import validate

KILLED = -9
SAVED, UNSAVED = MET | NOT_ASKED, MET | NOT_ASKED | NOT_SAVED

EXPECTED: dict[str, set[tuple[int, ...]]] = {
    "SIGKILL": {(KILLED,)},
    "SIGTERM": {(MET,)},  # saved, and asked to stop
    "ENOSPC": {(SAVED,), (UNSAVED,)},
    "EIO": {(SAVED,), (UNSAVED,)},
}
"""Fault -> how the process that meets it may end: never by an exception."""

EXPECTED_OF_OTHER: dict[int, set[int]] = {
    KILLED: {NOT_ASKED, LOST_THE_OTHER},
    MET: {NOT_ASKED},
    SAVED: {NOT_ASKED},
    UNSAVED: {NOT_ASKED | NOT_SAVED},
}
"""How one process ends -> how the other one may: with the same outcome."""


@dataclass(frozen=True)
class Row:
    """All saves of as many processes that met one kind of fault."""

    fault: str
    num_ranks: int
    folders: dict[Path, list[int]]  # in the order of the calls -> how each process ended

    def struck(self, rank: int) -> list[Path]:
        """Return the folders whose save met the fault on a rank."""
        of_rank = {path: codes for path, codes in self.folders.items() if path.name.startswith(f"{rank}-")}
        return [path for path, codes in of_rank.items() if set(codes) != {NOT_ASKED}]


pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[(fault, num_ranks) for num_ranks in (1, 2) for fault in FAULTS],
    ids=lambda row: f"{row[0]} in {row[1]}",
)
def row(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Row:
    fault, num_ranks = request.param
    scratch = tmp_path_factory.mktemp("faults")
    work = scratch / "work"
    work.mkdir()
    words = [str(Path(__file__).with_name("fault_cases.py")), str(scratch / "base"), str(work), str(num_ranks), fault]
    done = run_warm(words, cwd=scratch, env=os.environ, scratch=scratch)
    assert done.returncode == 0, done.stderr
    codes = json.loads((work / "codes.json").read_text())
    return Row(fault, num_ranks, {work / name: codes[name] for name in codes})


def assert_newest_is(folder: Path, step: int, num_ranks: int) -> None:
    expected = tensors_of(step)
    if num_ranks == 2:
        expected["model"]["shared"] = expected["optimizer"]["exp_avg/shared"] = shared_values(step)
    assert_is_step(CheckpointManager(folder).load("auto"), step, expected)


def step_of(folder: Path) -> int:
    return CheckpointManager(folder).steps()[-1]


def test_every_write_is_tried_and_each_save_ends_as_it_should(row: Row) -> None:
    for rank in range(row.num_ranks):
        struck = row.struck(rank)
        assert len(struck) >= (20 if rank == 0 else 4)
        for folder in struck:
            codes = row.folders[folder]
            assert (codes[rank],) in EXPECTED[row.fault], (folder, codes)
            if row.num_ranks == 2:
                assert codes[1 - rank] in EXPECTED_OF_OTHER[codes[rank]], (folder, codes)
        assert {codes for folder in struck for codes in row.folders[folder]} >= {
            code for (code,) in EXPECTED[row.fault] if rank == 0 or code != SAVED
        }, "each way to end was met"


def test_the_newest_whole_checkpoint_is_the_new_one_or_the_one_before_and_none_before_is_lost(row: Row) -> None:
    steps = {folder: step_of(folder) for folder in row.folders}
    for folder, step in steps.items():
        before = names_in(folder)
        assert_newest_is(folder, step, row.num_ranks)
        best = CheckpointManager(folder).best()
        assert best is not None
        assert best.name == ("step-00000004" if step == STEP else "step-00000001")
        if step < STEP:
            assert step == STEP - 1
            for old in (1, 2, 3):
                validate(folder / f"step-{old:08d}")
        assert names_in(folder) == before, "a reader changes nothing"
    for rank in range(row.num_ranks):
        found = [steps[folder] for folder in row.struck(rank)]
        if row.fault == "SIGTERM":
            assert set(found) == {STEP}
        else:  # the step switches once, at the rename, which the first process does
            assert found == sorted(found)
            assert found.count(STEP - 1) >= (12 if rank == 0 else 4)
            assert found.count(STEP) >= (8 if rank == 0 else 0)


def test_a_save_tells_what_it_did(row: Row) -> None:
    """But for a checkpoint that has its name and couldn't be forced to disk: the next save has another look at it."""
    told = [
        (not codes[0] & NOT_SAVED, step_of(folder) == STEP)
        for folder, codes in row.folders.items()
        if codes[0] >= 0 and codes[0] != LOST_THE_OTHER
    ]
    assert (True, False) not in told
    assert told.count((False, True)) <= 1


def test_the_next_save_clears_up(row: Row) -> None:
    for rank in range(row.num_ranks):
        for folder in row.struck(rank):
            again = folder.with_name(f"next-{folder.name}")
            assert names_in(again) == ["BEST", "LATEST", "step-00000004", "step-00000005"]
            assert_newest_is(again, STEP + 1, row.num_ranks)
