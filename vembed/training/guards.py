"""What may stop a run: a signal, or numbers that are not finite."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

from vembed.errors import ExitCode, NonFiniteError, PreemptedError
from vembed.files import replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType, TracebackType

Agree: TypeAlias = "Callable[[bool], bool]"
"""Takes this process's verdict and returns True when every process says True; all must call it at the same points."""

_log = logging.getLogger(__name__)

_LEAVE_CODES: Final = {
    signal.SIGTERM: ExitCode.PREEMPTED,
    signal.SIGHUP: ExitCode.PREEMPTED,
    signal.SIGUSR1: ExitCode.PREEMPTED,
    signal.SIGINT: ExitCode.INTERRUPTED,
}
_OPTIONAL: Final = (signal.SIGHUP, signal.SIGUSR1)
"""Left alone where somebody else has a use for them: nohup, faulthandler, the program that calls us."""

SAME_SECONDS: Final = 3.0
"""How far apart two signals of one request may arrive."""

AGAIN_SECONDS: Final = 0.1


def alone(ok: bool) -> bool:
    """Agree with oneself: the agreement of a run of one process."""
    return ok


class LeaveNow(BaseException):
    """A signal ends the command where it stands, before anything asks for signals."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"stopped by {received.name}")
        self.exit_code = _LEAVE_CODES[received]


def stop_behind(error: BaseException) -> LeaveNow | None:
    """Return the stop that an error was made of, if any: Python 3.11 wraps what a class's `__set_name__` raises."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, LeaveNow):
        seen = seen.__cause__ or seen.__context__
    return seen


class StopSignal:
    """Turn SIGTERM, SIGINT, SIGHUP and SIGUSR1 into a flag that a loop looks at; a second signal leaves at once.

    Another signal within `SAME_SECONDS` of the first is the same request, unless it is a SIGINT: batch systems and
    `timeout` send theirs to every process of a job, and a launcher sends it on to those that it started.

    The handler only sets the flag, so a signal during a save or a step breaks nothing. The second signal ends the
    process without any clean-up, with exit code 75, and 130 after SIGINT; Python sees it when the torch call that is
    running returns. Processes forked inside the context die of SIGTERM as usual; the others, which a terminal or a
    batch system sends to all of them, they leave to the process that made this object.

    Use as a context manager, in the main thread: Python delivers signals nowhere else, so in another thread it does
    nothing but say so once.

    Args:
        agree: Returns True when every rank passes True. `requested` and `poll` call it, so with several ranks all must
            reach them at the same points.
        at_once: Whether the first signal raises `LeaveNow` outside of `asking`: there is nothing to save yet. Not while
            an error is handled, which may be about to be told.
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
        """Whether a signal asked any rank to stop."""
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
        """Set the flag, or leave; nothing here may take a lock that the interrupted code holds, so no logging."""
        received = signal.Signals(number)
        if os.getpid() != self._process:
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
        if self._at_once:
            self._leave()

    def _leave(self, *_: object) -> None:
        """Raise `LeaveNow`; while the interrupted code handles an error, look again a little later."""
        if self._at_once and self._received is not None and sys.exc_info()[0] is None:
            raise LeaveNow(self._received)
        if self._at_once:
            self._previous.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, self._leave))
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)


def _is_free(number: signal.Signals) -> bool:
    """Return whether nobody ignores a signal or handles it, in Python or in C."""
    handler = signal.getsignal(number)
    if isinstance(getattr(handler, "__self__", None), StopSignal):
        return True
    return handler is signal.SIG_DFL and not _is_caught(number)


def _is_caught(number: signal.Signals) -> bool:
    """Return whether this process handles a signal, as the system says: Python doesn't know the handlers of C code."""
    try:
        status = Path("/proc/self/status").read_text("utf-8", errors="replace")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of a step before its gradients change any weight."""

    step: int  # its number, 1 for the first
    loss: float
    grad_norm: float  # L2 norm over all gradients, before clipping
    record_ids: Sequence[int]
    temperature: float | None  # of the loss; None when it has none
    # returns module -> L2 norm of its gradients; called only when something isn't finite
    module_norms: Callable[[], Mapping[str, float]]


class NonFiniteGuard:
    """Keep NaN and infinity out of the weights.

    A step whose loss or gradient norm isn't finite leaves `nonfinite-step-N.json` (batch ids, loss, temperature,
    gradient norm per module) and then stops the run, or is skipped and counted.

    Args:
        policy: "stop", or "skip" for up to `limit` steps of the whole run.
        limit: Steps that may be skipped; one more stops the run. Unused with "stop".
        folder: Where the reports go; made when there is one. None writes none: another rank does.
        agree: Returns True when every rank passes True; called once per step, so that all ranks skip the same steps.

    Attributes:
        skipped: Steps skipped so far; belongs into the checkpoint's state.
    """

    def __init__(
        self,
        policy: Literal["stop", "skip"],
        *,
        limit: int,
        folder: Path | None,
        skipped: int = 0,
        agree: Agree = alone,
    ) -> None:
        self._policy = policy
        self._limit = limit
        self._folder = folder
        self.skipped = skipped
        self._agree = agree

    def accepts(self, facts: StepFacts) -> bool:
        """Return whether the step's gradients may change the weights.

        Returns:
            False when the step is to be skipped.

        Raises:
            NonFiniteError: The policy is "stop", or the limit is used up.
        """
        if self._agree(math.isfinite(facts.loss) and math.isfinite(facts.grad_norm)):
            return True
        norms = facts.module_norms()
        report = self._report(facts, norms)
        what = _describe(facts, norms)
        if self._policy == "stop":
            raise NonFiniteError(f"{what}. No weight was changed. {_advice(report)}")
        if self.skipped >= self._limit:
            raise NonFiniteError(
                f"{what}, and {self.skipped} steps were skipped before, all that max_skipped_steps allows. "
                f"No weight was changed. {_advice(report)}"
            )
        self.skipped += 1
        _log.warning("%s; step skipped (%d of at most %d), see %s", what, self.skipped, self._limit, report)
        return False

    def _report(self, facts: StepFacts, norms: Mapping[str, float]) -> Path:
        """Write what is known of the step; a disk that refuses must not hide the numbers' own error."""
        path = Path(f"nonfinite-step-{facts.step}.json")
        if self._folder is None:
            return path
        path = self._folder / path
        content = {
            "step": facts.step,
            "loss": _number(facts.loss),
            "grad_norm": _number(facts.grad_norm),
            "temperature": None if facts.temperature is None else _number(facts.temperature),
            "module_grad_norms": {name: _number(norm) for name, norm in norms.items()},
            "record_ids": list(facts.record_ids),
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            _log.warning("%s can't be written: %s", path, error)
        return path


def _describe(facts: StepFacts, norms: Mapping[str, float]) -> str:
    """Say which numbers of a step are not finite."""
    parts = [
        f"{name} is {_number(value)}"
        for name, value in (("the loss", facts.loss), ("the gradient norm", facts.grad_norm))
        if not math.isfinite(value)
    ] or ["another process has a loss or gradient that is not finite"]
    modules = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if modules:
        rest = f" and {len(modules) - 3} more modules" if len(modules) > 3 else ""
        parts.append(f"with gradients that are not finite in {', '.join(modules[:3])}{rest}")
    return f"step {facts.step}: {', '.join(parts)}"


def _advice(report: Path) -> str:
    return (
        f"The batch is in {report}. Lower learning_rate or max_grad_norm, or raise temperature; "
        "if the same rows come up again, look at them; or set nonfinite_policy: skip."
    )


def _number(value: float) -> float | str:
    """Return a number as JSON can hold it: "nan", "inf" and "-inf" as strings."""
    return value if math.isfinite(value) else str(value)
