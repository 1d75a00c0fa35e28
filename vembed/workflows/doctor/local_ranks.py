"""Run a function on several fresh processes of this machine that share a process group, and bring back what it says.

For looking at whether processes can work together here. A training run is launched otherwise (launch.py).
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.distributed as dist

from vembed.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

Answer = TypeVar("Answer")

Backend = Literal["gloo", "nccl"]

TIMEOUT_SECONDS = 90
"""Longest wait for all processes together, their start included."""

LEAVE_SECONDS = 2
"""Longest wait for all of them to end by themselves, once they have answered or one of them has failed."""


def run_on_local_ranks(
    function: Callable[[torch.device], Answer],
    *,
    world_size: int,
    backend: Backend,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Answer]:
    """Call a function on every rank of a fresh process group, and return what each rank returned, in their order.

    Args:
        function: Of a module, so that a new process can import it; gets the device of its rank.
        backend: "gloo" on the CPU, "nccl" with a GPU for each.

    Raises:
        MachineError: A process failed or said nothing in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, function, rank, world_size, backend, Path(folder) / "store")
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _answers(ends, time.monotonic() + timeout_seconds)
        finally:
            until = time.monotonic() + LEAVE_SECONDS
            for process in processes:
                process.join(max(0.0, until - time.monotonic()))
            for process in processes:
                process.kill()
                process.join()


def _answers(ends: list[Connection], deadline: float) -> list[Answer]:
    """Wait for all ranks; the first that fails is named, as the others only wait for it."""
    answers: dict[int, Answer] = {}
    waiting = dict(enumerate(ends))
    while waiting:
        ready = multiprocessing.connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = ", ".join(map(str, waiting))
            raise MachineError(f"process {silent} of {len(ends)} said nothing in time")
        for rank, end in list(waiting.items()):
            if end not in ready:
                continue
            del waiting[rank]
            try:
                worked, said = end.recv()
            except EOFError:
                worked, said = False, "it ended without a word"
            if not worked:
                raise MachineError(f"process {rank} of {len(ends)} failed: {said}")
            answers[rank] = said
    return [answers[rank] for rank in range(len(ends))]


def _serve(
    end: Connection,
    function: Callable[[torch.device], object],
    rank: int,
    world_size: int,
    backend: Backend,
    store: Path,
) -> None:
    torch.set_num_threads(1)
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            from vembed.distributed.runtime import leave_out_broken_links

            torch.cuda.set_device(device)
            leave_out_broken_links()
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",  # no port that another program may have
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        end.send((True, function(device)))
    except Exception:  # noqa: BLE001 - whatever it is, the process that asked must see it
        end.send((False, traceback.format_exc().strip().rpartition("\n")[2]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
