"""How many processes make batches ahead, and how far."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vembed.plan.hardware import cpu_memory_bytes
from vembed.text import show_bytes

if TYPE_CHECKING:
    from vembed.data.keys import DataKeys
    from vembed.plan.hardware import Machine
    from vembed.plan.problem import DataSize

MOST_WORKERS = 8
BATCHES_PER_WORKER = 2
"""One that is being made, and one that waits."""

ROW_BYTES = 4096
"""Host memory of a row of text on its way through a step: tokens, lengths, ids."""

MEMORY_SHARE = 8
"""Batches ahead take at most one part in so many of the machine's memory, beside the first of each worker."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How batches are made."""

    num_workers: int  # processes; 0 makes them in the training process
    batches_ahead: int  # most batches that wait or are being made in workers
    reason: str  # in one plain sentence with its numbers


def plan_loading(
    keys: DataKeys, machine: Machine, data: DataSize, *, num_queries: int, num_processes: int = 1
) -> Loading:
    """Decide the number of data workers: the cores that don't compute, where there are pictures or an accelerator.

    Args:
        num_queries: Records of a batch on one device.
        num_processes: Processes that share the machine's memory.
    """
    if data.pictures_per_record:  # beside which texts are nothing
        batch_bytes, content = round(num_queries * data.pictures_per_record * data.picture_bytes), "pixels"
    else:
        batch_bytes, content = round(num_queries * (1 + data.documents_per_query) * ROW_BYTES), "tokens"
    budget = cpu_memory_bytes() // (MEMORY_SHARE * num_processes)
    num_workers, why = _num_workers(keys.num_workers, machine, data)
    if keys.num_workers == "auto" and num_workers * batch_bytes > budget:
        num_workers = budget // batch_bytes
        why += f"; {num_workers} whose batches of {show_bytes(batch_bytes)} take at most {show_bytes(budget)}"
    if not num_workers:
        return Loading(0, 0, f"num_workers 0: {why}")
    has_room = BATCHES_PER_WORKER * num_workers * batch_bytes <= budget
    per_worker = (BATCHES_PER_WORKER if has_room else 1) if keys.prefetch_factor == "auto" else keys.prefetch_factor
    ahead = per_worker * num_workers
    amount = f"up to {ahead} batches ahead, {show_bytes(ahead * batch_bytes)} of {content}"
    return Loading(num_workers, ahead, f"num_workers {num_workers}: {why}; {amount}")


def _num_workers(wanted: int | Literal["auto"], machine: Machine, data: DataSize) -> tuple[int, str]:
    """Return how many workers there are and why, before memory is looked at."""
    if wanted != "auto":
        more = f", more than the {machine.num_cores} cores" if wanted > machine.num_cores else ""
        return wanted, f"as set{more}"
    if not data.pictures_per_record and machine.device == "cpu":
        return 0, "no pictures to decode"  # and tokenizing would take its threads from training
    if sys.platform != "linux":
        return 0, "data workers need Linux"
    spare = max(0, machine.num_cores - machine.num_busy_cores)
    cores = f"{machine.num_cores} cores less {machine.num_busy_cores} that training keeps busy"
    work = "decode" if data.pictures_per_record else "tokenize"
    return min(MOST_WORKERS, spare), f"{cores} leave {spare}, of which at most {MOST_WORKERS} {work}"
