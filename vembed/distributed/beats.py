"""What processes tell of themselves every second, and whom that accuses when others wait."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vembed.distributed.failures import Failure, now
from vembed.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NUMBERING: Final = Path("/proc/self/ns/pid")


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
        process: The system's number for it.
        numbering: What tells where such numbers mean the same process: a machine since its start, without containers;
            empty where the system doesn't say.
    """

    number: int
    host: str
    place: str
    waits: bool
    is_patient: bool
    collectives: int
    process: int
    numbering: str


def numbering() -> str:
    """Return what tells where the system's numbers of processes mean the same process as here, empty if unknown.

    Host names don't: two containers may have the same one.
    """
    try:
        return f"{_BOOT.read_text('utf-8').strip()} {_NUMBERING.readlink()}"
    except OSError:
        return ""


def ended_ranks(beats: Mapping[int, Beat], *, own: int) -> list[int]:
    """Return the processes that the system of this one knows no more.

    Args:
        beats: Rank -> what it last told.
        own: The rank that looks; only those that it can see are looked for.
    """
    here = beats[own].numbering
    return [rank for rank, beat in beats.items() if here and beat.numbering == here and not _is_known(beat.process)]


def _is_known(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's now
    return True


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
