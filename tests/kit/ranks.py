"""A pool of gloo processes on this machine, started once per test session: they stand in for ranks on GPUs."""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from kit.warm import WARM

TIMEOUT_SECONDS = 120


class RankPool:
    """Runs functions on all ranks at once.

    Args:
        world_size: Processes.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._start()

    def _start(self) -> None:
        port = _free_port()
        self._ends, self._processes = [], []
        for rank in range(self.world_size):
            ours, theirs = WARM.Pipe()
            process = WARM.Process(target=_serve, args=(theirs, rank, self.world_size, port), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, *arguments)` on every rank and return what each returned.

        Raises:
            AssertionError: A rank raised, and its traceback is in the message; or it died or said nothing, and the next
                call gets new processes.
        """
        answers = []
        for rank, end in enumerate(self._ends):
            try:
                end.send((function, arguments))
            except OSError:
                self._fail(rank)
        for rank, end in enumerate(self._ends):
            try:
                answers.append(end.recv() if end.poll(TIMEOUT_SECONDS) else self._fail(rank))
            except (EOFError, OSError):
                self._fail(rank)
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def _fail(self, rank: int) -> NoReturn:
        """Fail a call that a rank left without an answer, and replace all ranks: its answer may still come."""
        self._processes[rank].join(1)
        code = self._processes[rank].exitcode
        self.close()
        self._start()
        raise AssertionError(
            f"rank {rank} said nothing for {TIMEOUT_SECONDS} seconds" if code is None else f"rank {rank} died: {code}"
        )

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:  # they hold nothing that must be put away
            process.kill()
            process.join()


def _serve(end: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            break
        try:
            end.send((True, function(rank, *arguments)))
        except Exception:  # noqa: BLE001  the test has to see whatever it was
            end.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
