"""Save a checkpoint again and again, with a fault one write later each time, until a save meets none.

Run as a program: fault_cases.py BASE WORK NUM_RANKS FAULT. Each save goes over a copy of BASE (steps 1 to 3, 1 is the
best) into `WORK/RANK-CALL`, in forked processes: the one of RANK meets the fault at its CALL-th write.
`WORK/codes.json` tells how each process ended.
"""

import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from checkpoint_cases import STAMP, tensors_of
from torch import Tensor

import vembed.checkpoint.tensors as tensor_files
from vembed.checkpoint.manager import CheckpointManager
from vembed.distributed.ranks import Ranks
from vembed.distributed.signals import StopSignal

FAULTS = ("SIGKILL", "SIGTERM", "ENOSPC", "EIO")
STEP = 4
MET, NOT_SAVED, NOT_ASKED = 16, 32, 64  # bits of an exit code; Python's own are 1 and 2
LOST_THE_OTHER = 9

_met: list[str] = []  # faults of this process


def arm(fault: str, fatal_call: int) -> None:
    """Let this process meet a fault at one of its calls that change the disk; a file is half written by then."""
    calls = 0

    def strike() -> None:
        _met.append(fault)
        if fault.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[fault])
        else:
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))

    def is_due() -> bool:
        nonlocal calls
        calls += 1
        return calls == fatal_call

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*words: Any, **options: Any) -> Any:
            changes_nothing = call.__name__ == "mkdir" and Path(words[0]).exists()
            if not changes_nothing and is_due():
                strike()
            return call(*words, **options)

        return wrapper

    def torn(call: Callable[..., Any], path_of: Callable[..., Path]) -> Callable[..., Any]:
        def wrapper(*words: Any, **options: Any) -> Any:
            is_fatal = is_due()
            result = call(*words, **options)
            if is_fatal:
                path = path_of(*words)
                if fault != "SIGTERM":  # which interrupts nothing
                    os.truncate(path, path.stat().st_size // 2)
                strike()
            return result

        return wrapper

    for name in ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, before(getattr(os, name)))
    Path.write_text = torn(Path.write_text, lambda path, text, **_: path)  # type: ignore[method-assign]
    tensor_files.save_file = torn(tensor_files.save_file, lambda tensors, path, header: path)  # type: ignore[assignment]


def parts_of(step: int, *, rank: int, num_ranks: int) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a step; with two ranks one of each part is cut in two."""
    parts = tensors_of(step)
    if num_ranks == 1:
        return parts
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Neither process reaches a collective, so the process group is torch's own fake.
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    values = shared_values(step)
    parts["model"]["shared"] = parts["optimizer"]["exp_avg/shared"] = DTensor.from_local(
        values[:3] if rank == 0 else values[3:], init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False,
        shape=values.shape, stride=(1,),
    )  # fmt: skip
    return parts


def shared_values(step: int) -> Tensor:
    """Return the whole of the tensor that two ranks share."""
    return torch.arange(5.0) + 100 * step


class PipedRanks(Ranks):
    """Two processes that talk through a pipe, whose end ends the other one."""

    end: Connection

    def gather_objects(self, value: Any) -> list[Any]:
        if self.is_one:
            return [value]
        try:
            self.end.send(value)
            other = self.end.recv()
        except (EOFError, OSError):
            os._exit(LOST_THE_OTHER)
        return [value, other] if self.is_first else [other, value]

    def _object_from_first(self, value: Any) -> Any:
        return self.gather_objects(value)[0]


def save(folder: Path, step: int, *, num_ranks: int, fault: str = "", fatal_rank: int = 0, fatal_call: int = 0) -> Any:
    """Save a step in as many forked processes, and return how each ended."""
    ends = Pipe()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ends[1 - rank].close()
                ranks = PipedRanks(rank, num_ranks)
                object.__setattr__(ranks, "end", ends[rank])
                parts = parts_of(step, rank=rank, num_ranks=num_ranks)
                state = {"epoch": step / 10, "skipped": 0}
                with StopSignal() as stop:
                    if fault and rank == fatal_rank:
                        arm(fault, fatal_call)
                    manager = CheckpointManager(folder, ranks=ranks)
                    path = manager.save(step, tensors=parts, state=state, stamp=STAMP, best=step in (1, STEP))
                    code = MET * bool(_met) | NOT_SAVED * (path is None) | NOT_ASKED * (not stop.requested)
            except Exception:  # noqa: BLE001 - whatever it is, the test has to see it
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    for end in ends:
        end.close()
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(base: Path, work: Path, num_ranks: int, fault: str) -> None:
    torch.set_num_threads(1)
    if num_ranks == 2:  # the first shards in a process take a second
        parts_of(0, rank=0, num_ranks=2)
        torch.distributed.destroy_process_group()
    if not base.exists():
        for step in (1, 2, 3):
            assert save(base, step, num_ranks=num_ranks) == [NOT_ASKED] * num_ranks
    codes: dict[str, list[int]] = {}
    for rank in range(num_ranks):
        for call in range(1, 500):
            name = f"{rank}-{call:03d}"
            shutil.copytree(base, work / name)
            codes[name] = save(work / name, STEP, num_ranks=num_ranks, fault=fault, fatal_rank=rank, fatal_call=call)
            if codes[name] == [NOT_ASKED] * num_ranks:
                break
            shutil.copytree(work / name, work / f"next-{name}")
            for step in (STEP, STEP + 1):
                assert save(work / f"next-{name}", step, num_ranks=num_ranks) == [NOT_ASKED] * num_ranks
        else:
            sys.exit("never came through")
    (work / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
