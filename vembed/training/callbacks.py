"""Callbacks of a Python caller: they hear of a run's events, and may stop it or set another learning rate.

A callback is an object with some of the methods `on_step`, `on_evaluation`, `on_save` and `on_end`, or a function that
hears everything; each gets one event. The first rank alone calls them, and all ranks do what they decided. A decision
is in the checkpoint of its step; what a callback remembers is not, so an evaluation comes with all those before it.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from vembed.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vembed.distributed.ranks import Ranks
    from vembed.training.finish import RunResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step was done."""

    step: int  # 1 for the first
    total_steps: int
    loss: float
    learning_rate: float
    metrics: Mapping[str, float]  # numbers of the step, as in metrics.jsonl but for the spread between ranks


@dataclass(frozen=True, slots=True)
class EvaluationEvent:
    """The model was evaluated on the dev set; step 0 is the untrained one."""

    step: int
    metrics: Mapping[str, float]
    is_best: bool  # whether the trained model is the best so far
    history: Sequence[tuple[int, Mapping[str, float]]]  # (step, metrics) of all evaluations, this one last


@dataclass(frozen=True, slots=True)
class SaveEvent:
    """A new checkpoint is on disk; one that a resumed run found there isn't told again. Nothing can be decided here."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The model, the verdict and the report are written; nothing can be decided here."""

    result: RunResult


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by a callback: end the training after this step, which is evaluated as the last one always is."""

    reason: str


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Returned by a callback: use this rate from the next step on, in place of the schedule's."""

    value: float


Event: TypeAlias = StepEvent | EvaluationEvent | SaveEvent | EndEvent
Callback: TypeAlias = Any
"""An object with some of the methods on_step, on_evaluation, on_save, on_end, or a function of any event."""

_METHODS: dict[type[Event], str] = {
    StepEvent: "on_step",
    EvaluationEvent: "on_evaluation",
    SaveEvent: "on_save",
    EndEvent: "on_end",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of all callbacks about one event."""

    stop: str | None = None
    learning_rate: float | None = None
    failed: str | None = None  # the callback that raised an error, and where


class Callbacks:
    """Ask the callbacks of a run.

    Args:
        callbacks: In the order in which they are asked; of two decisions the later counts.

    Raises:
        TypeError: One of them is no callback.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if isinstance(callback, type) or not (
                callable(callback) or any(hasattr(callback, name) for name in _METHODS.values())
            ):
                raise TypeError(
                    f"callbacks: {callback!r} is no callback; give a function of an event, or an object with some of "
                    f"the methods {', '.join(_METHODS.values())}"
                )
        self._callbacks = tuple(callbacks)
        self.failure: Exception | None = None  # what the first callback that failed has raised

    @property
    def names(self) -> str:
        """The callbacks by name, which must be the same on every rank."""
        return ", ".join(getattr(callback, "__name__", type(callback).__name__) for callback in self._callbacks)

    def hear(self, kind: type[Event]) -> bool:
        """Return whether any callback listens to events of a kind."""
        return any(callable(callback) or hasattr(callback, _METHODS[kind]) for callback in self._callbacks)

    def notify(self, event: Event, ranks: Ranks) -> Decision:
        """Tell all callbacks of an event and return what they decide, the same on every rank.

        A callback that fails is the last that hears of it: `failure` keeps its error.
        """
        if self.failure is not None or not self.hear(type(event)):
            return Decision()
        decision = ranks.from_first(lambda: self._notify_here(event))
        # The error itself may not survive pickling. The other ranks make one of its words, so that all of them save the
        # step and end at the same line of the loop.
        if decision.failed is not None and self.failure is None:
            self.failure = MachineError(f"{decision.failed} on the first process, which tells why")
        return decision

    def _notify_here(self, event: Event) -> Decision:
        name = _METHODS[type(event)]
        stop: str | None = None
        rate: float | None = None
        for callback in self._callbacks:
            # A method of the event's name wins over the object itself, which may be callable for another reason.
            method = getattr(callback, name, callback if callable(callback) else None)
            if method is None:
                continue
            try:
                match _checked(method(event), name):
                    case Stop(reason):
                        stop = reason
                    case LearningRate(value):
                        rate = value
            except Exception as error:  # noqa: BLE001 - whatever it is, the run saves its step and raises it
                self.failure = error
                who = getattr(callback, "__name__", type(callback).__name__)
                return Decision(stop, rate, f"the callback {who} failed in {name}")
        return Decision(stop, rate)


def _checked(answer: object, method: str) -> Stop | LearningRate | None:
    """Return what a callback said, once it is something that it may say there."""
    if answer is None:
        return None
    if not isinstance(answer, (Stop, LearningRate)) or method in ("on_save", "on_end"):
        allowed = "None" if method in ("on_save", "on_end") else "None, vembed.Stop or vembed.LearningRate"
        raise TypeError(f"{method} returned {answer!r}; it may return {allowed}")
    if isinstance(answer, Stop):
        if not isinstance(answer.reason, str):
            raise TypeError(f"{method} returned {answer!r}; the reason to stop is a text")
        return answer
    value = float(answer.value)  # of a library's number too: it goes into checkpoints
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{method} returned {answer!r}; a learning rate is a number of at least 0")
    return LearningRate(value)
