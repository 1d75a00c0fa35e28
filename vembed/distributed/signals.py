"""Signals that ask a command to stop: a flag that loops look at, or an exception before there is anything to save.

SIGTERM, SIGHUP and SIGUSR1 come from batch systems, launchers and closed terminals, and mean "save and leave" (exit
code 75); SIGINT comes from a person (130). One request may reach a process several times: SLURM signals every process
of a job, and a launcher passes on what it got itself.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from vembed.errors import ExitCode, PreemptedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

Agree: TypeAlias = "Callable[[bool], bool]"
"""Takes this process's verdict and returns True when every process says True; all must call it at the same points."""

SAME_SECONDS: Final = 3.0
"""Two signals that arrive within this time are one request, unless the second is a SIGINT."""

AGAIN_SECONDS: Final = 0.1
"""Pause before the next attempt to leave, where the interrupted code was handling an error."""

_LEAVE_CODES: Final = {
    signal.SIGTERM: ExitCode.PREEMPTED,
    signal.SIGHUP: ExitCode.PREEMPTED,
    signal.SIGUSR1: ExitCode.PREEMPTED,
    signal.SIGINT: ExitCode.INTERRUPTED,
}

_OPTIONAL: Final = (signal.SIGHUP, signal.SIGUSR1)
"""Left alone where somebody else has a use for them: nohup, faulthandler, the program that calls us."""

_log = logging.getLogger(__name__)


def alone(ok: bool) -> bool:
    """Agree with oneself: the agreement of a run of one process."""
    return ok


class LeaveNow(BaseException):
    """A signal that ends the command where it stands; not an `Exception`, so that no library catches it."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"stopped by {received.name}")
        self.exit_code = _LEAVE_CODES[received]


def stop_behind(error: BaseException) -> LeaveNow | None:
    """Return the stop that an error was made of, if any: Python 3.11 wraps what a class's `__set_name__` raises."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, LeaveNow):
        cause = cause.__cause__ or cause.__context__
    return cause


class StopSignal:
    """Handler that turns the first signal into a flag for a loop to look at, and leaves at once on a second.

    The handler only sets the flag, so a signal during a save or a step breaks nothing. The second request ends the
    process without any clean-up; Python sees it when the torch call that is running returns. Another signal within
    `SAME_SECONDS` of the first belongs to the same request, unless it is a SIGINT.

    Use as a context manager, in the main thread: Python delivers signals nowhere else, so in another thread it does
    nothing but say so once. Processes forked inside the context die of SIGTERM as usual and ignore the rest, which a
    terminal or a batch system sends to all of them: stopping is the business of the process that made this object.

    Args:
        agree: Returns True when every rank passes True. `requested` and `poll` call it, so with several ranks all must
            reach them at the same points.
        at_once: Raise `LeaveNow` on the first signal, outside of `asking`: there is nothing to save yet. Not while an
            error is handled, which may be about to be reported.
        advice: What a user does after a stop, for the message.
    """

    def __init__(self, *, agree: Agree = alone, at_once: bool = False, advice: str = "") -> None:
        self._agree = agree
        self._at_once = at_once
        self._advice = f"; {advice}" if advice else ""
        self._received: signal.Signals | None = None
        self._received_at = 0.0  # by the monotonic clock
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            _log.info("Not in the main thread: SIGTERM and SIGINT keep the effect that they have")
            return self
        self._process = os.getpid()
        for number in _LEAVE_CODES:
            if number not in _OPTIONAL or _is_free(number):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if signal.SIGALRM in self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, previous in self._previous.items():
            # None: the handler was installed by C code, which Python can't put back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    @contextmanager
    def asking(self, agree: Agree) -> Iterator[None]:
        """Only set the flag inside the block, where a loop asks for it together with the other ranks."""
        before = self._agree, self._at_once
        self._agree, self._at_once = agree, False
        try:
            yield
        finally:
            self._agree, self._at_once = before

    @property
    def requested(self) -> bool:
        """True when a signal asked any rank to stop; a collective where there are several."""
        return not self._agree(self._received is None)

    def poll(self) -> None:
        """Leave a long loop (evaluation, encoding, mining) when a signal asked to.

        Raises:
            PreemptedError: A signal asked any rank to stop.
        """
        if self.requested:
            name = self._received.name if self._received is not None else "a signal to another process"
            raise PreemptedError(f"stopped by {name}{self._advice}")

    def poll_alone(self) -> None:
        """Do the same where this rank works for all of them: only its own signals are looked at.

        Raises:
            PreemptedError: A signal asked this process to stop.
        """
        if self._received is not None:
            raise PreemptedError(f"stopped by {self._received.name}{self._advice}")

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature that signal calls
        # Runs between two bytecodes of whatever the main thread does, so it takes no lock: the interrupted code may
        # hold it. That rules out logging and print, not os.write.
        received = signal.Signals(number)
        if os.getpid() != self._process:  # a forked data worker, which inherited this handler
            if received == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self._received is not None:
            if received != signal.SIGINT and time.monotonic() - self._received_at < SAME_SECONDS:
                return
            os.write(2, f"\n{received.name} again: leaving at once\n".encode())
            os._exit(_LEAVE_CODES[received])
        self._received, self._received_at = received, time.monotonic()
        self._leave_if_free()

    def _leave_if_free(self, *_: object) -> None:
        """Raise `LeaveNow` where the first signal does; also the handler of SIGALRM, which calls it again."""
        if not self._at_once or self._received is None:
            return
        if sys.exc_info()[0] is None:
            raise LeaveNow(self._received)
        # The interrupted code is handling an error, whose message would be lost: try again in a moment. `setdefault`
        # keeps the handler that was there before the first of these alarms.
        self._previous.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, self._leave_if_free))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)


def _is_free(number: signal.Signals) -> bool:
    """Return whether nobody ignores a signal or handles it, in Python or in C."""
    handler = signal.getsignal(number)
    if isinstance(getattr(handler, "__self__", None), StopSignal):
        return True  # one context inside another
    if handler is not signal.SIG_DFL:
        return False
    # Python shows SIG_DFL for what C code handles, as faulthandler does; the system's mask of caught signals knows.
    try:
        status = Path("/proc/self/status").read_text("utf-8", errors="replace")
    except OSError:
        return True
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or not int(caught[1], 16) >> (number - 1) & 1
