"""What processes tell of themselves every second, and whom that accuses when others wait: plain functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.distributed.failures import Failure, now
from vembed.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process last told of itself.

    Attributes:
        number: Counts the times that it told.
        host: Its machine.
        place: Where its main thread is, for people.
        waits: Whether that is in a collective.
        is_patient: Whether the first rank works alone just now, and this is it or one that waits for it.
        collectives: How many it has entered.
    """

    number: int
    host: str
    place: str
    waits: bool
    is_patient: bool
    collectives: int


def silent_ranks(before: Mapping[int, Beat], after: Mapping[int, Beat], *, own: int) -> list[int]:
    """Return the processes that have told nothing between two looks.

    Args:
        before: Rank -> what it last told.
        after: The same, some seconds later.
        own: The rank that looks; it can't be silent.
    """
    return [rank for rank in before if rank != own and before[rank].number == after[rank].number]


def late_ranks(beats: Mapping[int, Beat]) -> list[int]:
    """Return the processes that others wait for: they are in no collective, or have entered fewer.

    Args:
        beats: Rank -> what it last told.
    """
    waiting = [rank for rank, beat in beats.items() if beat.waits]
    absent = [rank for rank, beat in beats.items() if not beat.waits and not beat.is_patient]
    if waiting and absent:
        return absent
    fewest = min(beat.collectives for beat in beats.values())
    behind = [rank for rank, beat in beats.items() if beat.collectives == fewest]
    return behind if len(behind) < len(beats) else []


def silence_of(ranks: Sequence[int], beats: Mapping[int, Beat]) -> Failure:
    """Return the failure that the silence of some processes is.

    Args:
        ranks: The silent ones.
        beats: What every process last told.
    """
    return _failure(
        ranks,
        beats,
        f"ended or stopped without a word, last seen in {beats[ranks[0]].place}. Killed from outside (did the machine "
        f"run out of memory?), stopped, crashed in a library, or its machine or network is gone",
    )


def lateness_of(ranks: Sequence[int], beats: Mapping[int, Beat], seconds: float) -> Failure:
    """Return the failure that some processes are missing from a collective.

    Args:
        ranks: The missing ones.
        beats: What every process last told.
        seconds: For how long the others have waited.
    """
    return _failure(
        ranks,
        beats,
        f"the other processes have waited {seconds:g} s for it in a collective (nccl_timeout), and it is still in "
        f"{beats[ranks[0]].place}. If that is slow but right, raise nccl_timeout",
    )


def _failure(ranks: Sequence[int], beats: Mapping[int, Beat], message: str) -> Failure:
    others = f" (the same holds for rank {', '.join(map(str, ranks[1:]))})" if ranks[1:] else ""
    return Failure(int(ExitCode.ENVIRONMENT), ranks[0], beats[ranks[0]].host, message + others, now())
