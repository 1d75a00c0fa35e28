"""What a tracker is, and the guard around those that a run can do without."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image as Bitmap

    Cell: TypeAlias = str | float | Bitmap | None  # of a table: a text, a number, a small picture, or nothing

_log = logging.getLogger(__name__)


class Tracker:
    """A place that what a run tells is sent to; what isn't overridden does nothing.

    Args:
        folder: Its own, for what it writes; the first to write makes it.
        resume_step: Step of the checkpoint that the run continues from: later ones come again; 0 from the start.
        config: Key -> value of the run, without secrets.
    """

    name: ClassVar[str]
    """What `report_to` calls it."""

    advice: ClassVar[str] = "leave it out of report_to to run without it"
    """What a user can do when it fails."""

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

    def log_result(self, step: int, values: Mapping[str, float]) -> None:
        """Record what came of the whole run.

        Args:
            step: The last one.
            values: Name -> number, e.g. `{"baseline/ndcg@10": 0.61, "final/ndcg@10": 0.645}`.
        """

    def log_text(self, step: int, name: str, text: str) -> None:
        """Record a text: the plan, the verdict."""

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table, e.g. the example queries with what was found."""

    def log_file(self, path: Path) -> None:
        """Keep a copy of a file: the report, the configuration, the log."""

    def log_model(self, folder: Path) -> None:
        """Keep a copy of the trained model."""

    def log_stop(self, error: BaseException) -> None:
        """Record that the run ends early, before `close`."""

    def close(self) -> None:
        """Write what is still held back; nothing is logged afterwards."""


class GuardedTracker(Tracker):
    """Pass everything to another tracker until it fails; then warn once and continue without it."""

    def __init__(self, tracker: Tracker, *, name: str) -> None:
        self._tracker: Tracker | None = tracker
        self._name = name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a training step while the tracker works."""
        self._try("log", step, values)

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        """Record what each process measured while the tracker works."""
        self._try("log_ranks", step, by_rank)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation while the tracker works."""
        self._try("log_evaluation", step, metrics)

    def log_result(self, step: int, values: Mapping[str, float]) -> None:
        """Record what came of the run while the tracker works."""
        self._try("log_result", step, values)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Record a text while the tracker works."""
        self._try("log_text", step, name, text)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table while the tracker works."""
        self._try("log_table", step, name, columns, rows)

    def log_file(self, path: Path) -> None:
        """Keep a copy of a file while the tracker works."""
        self._try("log_file", path)

    def log_model(self, folder: Path) -> None:
        """Keep a copy of the model while the tracker works."""
        self._try("log_model", folder)

    def log_stop(self, error: BaseException) -> None:
        """Record that the run ends early while the tracker works."""
        self._try("log_stop", error)

    def close(self) -> None:
        """Close the tracker if it still works."""
        self._try("close")
        self._tracker = None

    def _try(self, call: str, *arguments: object) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, call)(*arguments)
        except Exception as error:  # noqa: BLE001 - a tracker is third-party code that may fail in any way
            advice = getattr(self._tracker, "advice", Tracker.advice)
            self._tracker = None
            warn_of_failure(self._name, error, advice)


def warn_of_failure(name: str, error: Exception, advice: str) -> None:
    """Say that a run continues without a tracker, and what would help."""
    _log.warning(
        "Tracker %s failed and is switched off; training continues and metrics.jsonl has everything (%s): %s: %s",
        name, advice, type(error).__name__, error,
    )  # fmt: skip


def is_picture(cell: Cell) -> TypeGuard[Bitmap]:
    """Tell whether a cell of a table is a picture."""
    return not isinstance(cell, str | float | int | None)
