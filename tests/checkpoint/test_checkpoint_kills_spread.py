"""Two processes save shards and one is killed at a write: whichever it is, and wherever, a whole checkpoint is left."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoint_cases import names_in
from test_checkpoint_faults import WRITES
from warm_process import run_warm

from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.tensors import validate, whole

if TYPE_CHECKING:
    from pathlib import Path

# Saves step 4 over a copy of the base folder again and again, by two forked processes of which one kills itself one
# write later than the time before, until both come through. What they tell each other goes through a pipe, whose end
# ends the other one. Neither reaches a collective, so the process group is torch's own fake.
KILLER = (
    WRITES
    + """
import shutil
from multiprocessing import Pipe

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vembed.checkpoint.manager import CheckpointManager
from vembed.distributed.ranks import Ranks

LOST_THE_OTHER = 9
STAMP = {"config_hash": "c0ffee", "strategy": "fsdp", "world_size": 2}


def shards_of(rank, step):
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(5.0) + 100 * step
    shard = DTensor.from_local(values[:3] if rank == 0 else values[3:], mesh, [Shard(0)], run_check=False,
                               shape=values.shape, stride=(1,))
    return {"model": {"shared": shard, "whole": values[:2].clone()}, "optimizer": {"exp_avg/shared": shard}}


def save(folder, rank, end, step):
    class RanksOfAPipe(Ranks):
        def gather_objects(self, own):
            try:
                end.send(own)
                other = end.recv()
            except (EOFError, OSError):
                os._exit(LOST_THE_OTHER)
            return [own, other] if rank == 0 else [other, own]

        def _object_from_first(self, own):
            return self.gather_objects(own)[0]

    parts = shards_of(rank, step)
    manager = CheckpointManager(folder, ranks=RanksOfAPipe(rank, 2))
    return manager.save(step, tensors=parts, state={"step": step}, stamp=STAMP, best=step in (1, 4))


def run(folder, step, fatal_rank=None, fatal_call=None):
    ends = Pipe()
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            ends[1 - rank].close()
            if rank == fatal_rank:
                arm(fatal_call)
            os._exit(0 if save(folder, rank, ends[rank], step) else 3)
        children.append(child)
    for end in ends:
        end.close()
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


base, work = Path(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
shards_of(0, 0)  # the first one in a process takes a second
dist.destroy_process_group()
for step in (1, 2, 3):
    assert run(base, step) == [0, 0]
for rank in (0, 1):
    for fatal_call in range(1, 500):
        folder = work / f"{rank}-{fatal_call:03d}"
        shutil.copytree(base, folder)
        codes = run(folder, 4, rank, fatal_call)
        if codes == [0, 0]:
            break
        assert codes[rank] == -9 and codes[1 - rank] in (0, LOST_THE_OTHER), codes
        shutil.copytree(folder, work / f"next-{folder.name}")
        assert run(work / f"next-{folder.name}", 5) == [0, 0]
    else:
        sys.exit("never came through")
"""
)


def assert_is_step(folder: Path, step: int) -> None:
    """Fail unless the newest checkpoint of a folder is, bit for bit, the one that was saved at a step."""
    loaded = CheckpointManager(folder).load("auto")
    assert loaded is not None
    assert (loaded.step, loaded.state) == (step, {"step": step})
    values = torch.arange(5.0) + 100 * step
    assert torch.equal(whole(loaded.tensors["model"]["shared"]), values)
    assert torch.equal(whole(loaded.tensors["model"]["whole"]), values[:2])
    assert torch.equal(whole(loaded.tensors["optimizer"]["exp_avg/shared"]), values)


@pytest.mark.slow
def test_a_kill_of_either_rank_at_a_write_leaves_a_whole_checkpoint_and_the_next_save_clears_up(tmp_path: Path) -> None:
    base, work = tmp_path / "base", tmp_path / "work"
    work.mkdir()
    script = tmp_path / "killer.py"
    script.write_text(KILLER)
    words = [str(script), str(base), str(work)]
    run_warm(words, cwd=tmp_path, env=os.environ, scratch=tmp_path).check_returncode()
    assert_is_step(base, 3)
    for rank in (0, 1):
        folders = sorted(work.glob(f"{rank}-*"))
        found = []
        for folder in folders:
            manager = CheckpointManager(folder)
            loaded = manager.load("auto")
            assert loaded is not None
            assert_is_step(folder, loaded.step)
            found.append(loaded.step)
            best = manager.best()
            assert best is not None
            assert best.name == ("step-00000004" if loaded.step == 4 else "step-00000001")
            if loaded.step == 3:
                for step in (1, 2, 3):
                    validate(folder / f"step-{step:08d}")
        # The step switches once, at the rename, which the first process does; the last save was not killed.
        assert found == sorted(found)
        assert found.count(3) >= 12 if rank == 0 else found == [3] * (len(folders) - 1) + [4]
        assert len(folders) >= 5
        for folder in work.glob(f"next-{rank}-*"):
            assert_is_step(folder, 5)
            assert not [name for name in names_in(folder) if name.startswith((".saving-", ".deleting-"))]
            shutil.rmtree(folder)
