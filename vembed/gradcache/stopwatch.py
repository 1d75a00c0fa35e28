"""Seconds of the parts of a step, measured without making anything wait.

On a CPU the clock is read at both ends of a part. An accelerator runs behind the program, so there an event is put
into its queue at both ends, and the time between them is read once both have passed: the parts that lie before the
step's own reading of the loss are complete by then, the update is counted at the next reading.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Part: TypeAlias = Literal["encode", "wait", "loss", "reduce", "update"]
"""Parts of a step on the device, in order: both passes of the encoders, waiting until every rank has encoded, the loss
with the gather of its embeddings, the reduction of the gradients, clipping and the optimizer."""


class Stopwatch:
    """Adds up the seconds of each part of a step.

    Attributes:
        running: The part that is running, for a thread that looks on.
    """

    def __init__(self, device: torch.device) -> None:
        self.running: Part | None = None
        self._on_cuda = device.type == "cuda"
        self._seconds: dict[Part, float] = {}
        self._pending: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Count what runs inside the block to a part; blocks of one step may repeat a part, but not nest."""
        self.running = name
        if not self._on_cuda:
            started = time.perf_counter()
            try:
                yield
            finally:
                self.running = None
                self._add(name, time.perf_counter() - started)
            return
        # Events are entries of the device's queue; `synchronize()` would keep the program from running ahead of it.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            yield
        finally:
            self.running = None
            end.record()
            self._pending.append((name, start, end))

    def read(self) -> Mapping[Part, float]:
        """Return the seconds of each part since the last reading, and begin anew. Waits for nothing.

        What an accelerator hasn't finished is left to the next reading.
        """
        unfinished = []
        for name, start, end in self._pending:
            if end.query():
                self._add(name, start.elapsed_time(end) / 1000)
            else:
                unfinished.append((name, start, end))
        seconds, self._seconds, self._pending = self._seconds, {}, unfinished
        return seconds

    def _add(self, name: Part, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
