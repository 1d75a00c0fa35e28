"""What trackers have in common that send the numbers to a service, through its own Python package."""

from __future__ import annotations

import importlib
import math
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vembed.errors import MachineError
from vembed.training.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PROJECT = "vembed"
"""Where runs are shown, unless the service's own variables say otherwise."""


class HostedTracker(Tracker, ABC):
    """Send numbers under `train/`, `ranks/` and `evaluation/` by a package that is named as the tracker is.

    The package is imported here and the run is opened at the first number, so that a missing package ends the run
    before training, and a service that can't be reached is switched off by the guard.

    Raises:
        MachineError: The package is missing.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        super().__init__(folder, resume_step=resume_step, config=config)
        try:
            self.package: Any = importlib.import_module(self.name)
        except ImportError as error:
            raise MachineError(
                f"the tracker {self.name} needs a package that is missing ({error}): pip install {self.name}, "
                "or leave it out of report_to"
            ) from error
        self._run: Any = None

    @abstractmethod
    def open(self, run_id: str) -> Any:
        """Return the service's run of an id, made now, or opened again."""

    @abstractmethod
    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a training step."""
        self._send("train", step, values)

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        """Send what each process measured."""
        values = {f"{name}/{rank}": value for name, ranks in by_rank.items() for rank, value in enumerate(ranks)}
        self._send("ranks", step, {name: value for name, value in values.items() if not math.isnan(value)})

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of an evaluation."""
        self._send("evaluation", step, metrics)

    def close(self) -> None:
        """Let the service finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _send(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self.open(self._run_id())
        self.send(self._run, step, {f"{group}/{name}": value for name, value in values.items()})

    def _run_id(self) -> str:
        """Return the id of the service's run: a resumed training goes on in the one that it began."""
        path = self.folder / "run_id"
        if self.resume_step and path.is_file():
            return path.read_text("utf-8")
        self.folder.mkdir(parents=True, exist_ok=True)
        made = uuid.uuid4().hex[:16]
        path.write_text(made, "utf-8")
        return made
