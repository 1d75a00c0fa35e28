"""Where the main thread of this process is, seen from another thread: the line of ours that it stands in."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

PACKAGE: Final = Path(__file__).parents[1]
_WATCHING: Final = (__file__, str(Path(__file__).with_name("watch.py")))
_COLLECTIVES: Final = str(Path(__file__).parent)
_TORCH_COLLECTIVES: Final = str(Path("torch", "distributed"))


class Progress:
    """Counts the collectives that this process has entered: two processes at one line may be a step apart.

    Attributes:
        count: That number.
        is_patient: Whether the first rank is known to work alone for long, and this is it or one that waits for it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_patient = False

    def advance(self) -> None:
        """Count one more."""
        self.count += 1

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Work alone, or wait for the one that does, without a timeout."""
        self.is_patient = True
        try:
            yield
        finally:
            self.is_patient = False


PROGRESS: Final = Progress()
"""Of this process."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the main thread was when it was looked at.

    Attributes:
        place: File, line and function, for people.
        waits: Whether it was in a collective.
        is_patient: Whether the first rank worked alone, and this was it or one that waited for it.
        collectives: How many collectives it had entered.
        spot: The instruction of every function of ours that it was in.
        since: Time at which it came there, by the monotonic clock.
    """

    place: str
    waits: bool
    is_patient: bool
    collectives: int
    spot: tuple[tuple[str, int], ...]
    since: float

    @property
    def still_seconds(self) -> float:
        """For how long it has not moved."""
        return time.monotonic() - self.since


def look(before: Whereabouts | None = None) -> Whereabouts:
    """Return where the main thread is now.

    Args:
        before: Where it was when it was last looked at.
    """
    frames = _frames(sys._current_frames().get(threading.main_thread().ident or 0))
    ours = [frame for frame in frames if _is_ours(frame)]
    spot = tuple((frame.f_code.co_qualname, frame.f_lasti) for frame in ours)
    count = PROGRESS.count
    since = time.monotonic()
    if before is not None and (before.spot, before.collectives) == (spot, count):
        since = before.since
    is_patient = PROGRESS.is_patient
    waits = _waits(frames, ours) and not is_patient
    return Whereabouts(_show(ours or frames), waits, is_patient, count, spot, since)


def failed_in_collective(error: BaseException) -> bool:
    """Return whether an exception was raised inside a collective: then the cause may be in another process."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    return _waits(frames, [frame for frame in frames if _is_ours(frame)])


def _frames(innermost: FrameType | None) -> list[FrameType]:
    """Return a stack, innermost first."""
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(PACKAGE)) and frame.f_code.co_filename not in _WATCHING


def _waits(frames: list[FrameType], ours: list[FrameType]) -> bool:
    """Return whether the innermost function of ours is a collective, or has called one of torch's."""
    if not ours:
        return False
    if ours[0].f_code.co_filename.startswith(_COLLECTIVES):
        return True
    deeper = frames[: frames.index(ours[0])]
    return any(_TORCH_COLLECTIVES in frame.f_code.co_filename for frame in deeper)


def _show(frames: list[FrameType]) -> str:
    if not frames:
        return "no Python code"
    frame = frames[0]
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else path
    return f"{shown}:{frame.f_lineno} ({frame.f_code.co_name})"
