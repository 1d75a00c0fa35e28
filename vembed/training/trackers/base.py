"""What a tracker is, and the guard around those that a run can do without."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_log = logging.getLogger(__name__)


class Tracker:
    """A place that the numbers of a run are sent to; what isn't overridden does nothing.

    Args:
        folder: Its own, for what it writes; the first to write makes it.
        resume_step: Step of the checkpoint that the run goes on from: later ones come again; 0 from the start.
        config: Key -> value of the run, without secrets.
    """

    name: ClassVar[str]
    """What `report_to` calls it."""

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        self.resume_step = resume_step
        self.config = config or {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a training step.

        Args:
            step: Optimizer steps done, 1 after the first.
            values: Name -> number, e.g. `{"loss": 0.7, "learning_rate": 2e-5}`; NaN and infinity are allowed.
        """

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        """Record what each process measured since the last call.

        Args:
            by_rank: Name -> the number of each process, in their order; NaN is allowed.
        """

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation.

        Args:
            step: Optimizer steps done, 0 for the baseline.
            metrics: Name -> number, e.g. `{"ndcg@10": 0.645}`.
        """

    def close(self) -> None:
        """Write what is still held back; nothing is logged afterwards."""


class GuardedTracker(Tracker):
    """Pass everything to another tracker until it fails; then warn once and go on without it."""

    def __init__(self, tracker: Tracker, *, name: str) -> None:
        self._tracker: Tracker | None = tracker
        self._name = name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a training step while the tracker works."""
        self._try(lambda tracker: tracker.log(step, values))

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        """Record what each process measured while the tracker works."""
        self._try(lambda tracker: tracker.log_ranks(step, by_rank))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation while the tracker works."""
        self._try(lambda tracker: tracker.log_evaluation(step, metrics))

    def close(self) -> None:
        """Close the tracker if it still works."""
        self._try(lambda tracker: tracker.close())
        self._tracker = None

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # noqa: BLE001 - a tracker is third-party code that may fail in any way
            self._tracker = None
            warn_of_failure(self._name, error)


def warn_of_failure(name: str, error: Exception) -> None:
    """Say that a run goes on without a tracker."""
    _log.warning(
        "Tracker %s failed and is switched off; training goes on and metrics.jsonl has everything: %s: %s",
        name, type(error).__name__, error,
    )  # fmt: skip
