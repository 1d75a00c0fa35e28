"""Time and memory of a step by part, as metrics.jsonl has them, and how the ranks differ in both.

Each rank measures itself. What differs between ranks is gathered once in a logging interval, in one small collective,
and the row of that step says how far they lie apart.

Shape legend: W ranks, M numbers that each of them has.
"""

from __future__ import annotations

import math
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vembed.distributed.runtime import utilisation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.stopwatch import Part

SHARED_PARTS = ("wait", "reduce")
"""Parts of a step that only several ranks have."""

AVERAGED = ("step_seconds", "data_seconds", "encode_seconds", "wait_seconds", "reduce_seconds", "tokens")
LATEST = ("loss", "peak_memory_bytes", "utilisation")
NUMBERS_M = (*AVERAGED, *LATEST)


def seconds_of_parts(
    parts: Mapping[Part, float], *, step_seconds: float, data_seconds: float, alone: bool
) -> dict[str, float]:
    """Return the times of a step as metrics.jsonl has them, such as `encode_seconds`.

    Args:
        alone: Whether there is one rank, which neither waits for others nor reduces anything.
    """
    of_parts = {f"{name}_seconds": seconds for name, seconds in parts.items() if not (alone and name in SHARED_PARTS)}
    return {"step_seconds": step_seconds, "data_seconds": data_seconds, **of_parts}


class RankMeter:
    """Averages what this rank measures between two log lines, and gathers it from all."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._sums = dict.fromkeys(AVERAGED, 0.0)
        self._num_steps = 0
        self._loss = math.nan

    def add(self, row: Mapping[str, float], *, tokens: int, loss: float) -> None:
        """Count a step.

        Args:
            row: Its numbers on this rank, of which the times are taken.
            tokens: Those that this rank encoded.
            loss: Of this rank's share of the batch.
        """
        for name in AVERAGED[:-1]:
            self._sums[name] += row.get(name, 0.0)
        self._sums["tokens"] += tokens
        self._loss = loss
        self._num_steps += 1

    def read(self) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
        """Gather the numbers of all ranks and begin anew. Every rank must call it at the same step.

        Returns:
            Name -> the number of each rank, in their order: times and tokens are means of a step, loss and memory the
            latest; a number that is measured nowhere is left out. And how far the ranks lie apart, as the row of the
            step has it.
        """
        load = utilisation(self._device)
        means = [total / max(1, self._num_steps) for total in self._sums.values()]
        numbers = [*means, self._loss, peak_memory_bytes(self._device), math.nan if load is None else load]
        self._sums, self._num_steps = dict.fromkeys(AVERAGED, 0.0), 0
        # In float64, as float32 doesn't hold every count of bytes beyond 2^24. NaN: the rank can't measure it.
        device = "cpu" if self._ranks.is_one else self._device  # alone nothing has to go through a device
        x_1M = torch.tensor([numbers], dtype=torch.float64, device=device)
        x_WM = self._ranks.gather_rows(x_1M, [1] * self._ranks.world_size).tolist()
        columns = {name: tuple(row[place] for row in x_WM) for place, name in enumerate(NUMBERS_M)}
        by_rank = {name: values for name, values in columns.items() if not all(map(math.isnan, values))}
        return by_rank, summarise(by_rank)


def summarise(by_rank: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """Return how far ranks lie apart: what one number of a step's row can say.

    `token_imbalance` and `encode_imbalance` are the largest over the mean, 1 where all are equal. `scaling_efficiency`
    is the mean share of the time in which a rank neither waited for another nor reduced gradients: what one process,
    which does neither, would have needed, over what these did together.
    """
    summary: dict[str, float] = {}
    if loads := [load for load in by_rank.get("utilisation", ()) if not math.isnan(load)]:
        summary |= {"device_utilisation": sum(loads) / len(loads), "least_device_utilisation": min(loads)}
    # Ranks meet in every step, so the one that encodes longest holds up all; its number is what to look at.
    encode, steps = by_rank["encode_seconds"], by_rank["step_seconds"]
    if len(steps) == 1:
        return summary
    if sum(by_rank["tokens"]) > 0:
        summary["token_imbalance"] = max(by_rank["tokens"]) / _mean(by_rank["tokens"])
    if sum(encode) > 0:
        summary |= {"encode_imbalance": max(encode) / _mean(encode), "slowest_rank": encode.index(max(encode))}
    summary["largest_rank_memory_bytes"] = max(by_rank["peak_memory_bytes"])
    if min(steps) > 0:
        shared = zip(by_rank["wait_seconds"], by_rank["reduce_seconds"], steps, strict=True)
        summary["scaling_efficiency"] = _mean(tuple(1 - (wait + reduce) / step for wait, reduce, step in shared))
    return summary


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that was in use so far: allocated on an accelerator, resident on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    # Not getrusage where there is another way: on Linux its maximum also counts the process that started this one.
    if status.is_file() and (peak := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(peak[1]) * 1024
    peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_memory if sys.platform == "darwin" else peak_memory * 1024  # gVisor is a Linux without VmHWM
