"""What trackers have in common that send what a run tells to a service, through its own Python package."""

from __future__ import annotations

import importlib
import json
import logging
import math
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vembed.errors import MachineError
from vembed.files import replace_text
from vembed.training.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_log = logging.getLogger(__name__)

PROJECT = "vembed"
"""Where runs are shown, unless the service's own variables say otherwise."""


class HostedTracker(Tracker, ABC):
    """Send numbers under `train/`, `ranks/` and `evaluation/` by a package that is named as the tracker is.

    The package is imported here and the run is opened at the first thing to send, so that a missing package ends the
    run before training, and a service that can't be reached is switched off by the guard.

    A resumed training continues in the run that it began, and does not send again the steps that the service has.

    Raises:
        MachineError: The package is missing.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        super().__init__(folder, resume_step=resume_step, config=config)
        try:
            self.package: Any = importlib.import_module(self.name)
        except ImportError as error:
            raise MachineError(missing_text(self.name, str(error))) from error
        self._run: Any = None
        self._sent: dict[str, int] = {}
        self.error: BaseException | None = None

    @abstractmethod
    def open(self, run_id: str) -> Any:
        """Return the service's run of an id, made now, or opened again."""

    @abstractmethod
    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""

    def finish(self, run: Any) -> None:
        """Let the service end the run; `self.error` is what ended it early."""
        run.finish()

    def place(self, run: Any) -> str:  # noqa: ARG002 - of packages that don't print it themselves
        """Return where a user finds the run; empty says nothing."""
        return ""

    def last_steps(self, run: Any) -> dict[str, int]:  # noqa: ARG002 - of services that can be asked
        """Return the last step that the service has of each group of numbers."""
        with suppress(OSError, ValueError):
            found = json.loads((self.folder / "sent.json").read_text("utf-8"))
            return {str(group): int(step) for group, step in found.items()}
        return {}

    @property
    def run(self) -> Any:
        """The service's run, opened when it is first asked for."""
        if self._run is None:
            self._run = self.open(self._run_id())
            self._sent = self.last_steps(self._run) if self.resume_step else {}
            if place := self.place(self._run):
                _log.info("%-7s %s", self.name, place)
        return self._run

    @property
    def run_name(self) -> str:
        """What the run is called: as the output folder."""
        return self.folder.absolute().parents[1].name

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

    def log_result(self, step: int, values: Mapping[str, float]) -> None:
        """Send what came of the whole run."""
        self._send("result", step, values)

    def log_stop(self, error: BaseException) -> None:
        """Remember what ended the run early."""
        self.error = error

    def close(self) -> None:
        """Let the service finish the run."""
        if self._run is not None:
            self.finish(self._run)
            self._run = None

    def _send(self, group: str, step: int, values: Mapping[str, float]) -> None:
        run = self.run
        if step <= self._sent.get(group, -1):
            return
        self.send(run, step, {f"{group}/{name}": value for name, value in values.items()})
        self._sent[group] = step
        (self.folder / "sent.json").write_text(json.dumps(self._sent), "utf-8")

    def _run_id(self) -> str:
        """Return the id of the service's run: a resumed training continues in the one that it began."""
        path = self.folder / "run_id"
        if self.resume_step and path.is_file():
            return path.read_text("utf-8")
        self.folder.mkdir(parents=True, exist_ok=True)
        made = uuid.uuid4().hex[:16]
        replace_text(path, made)
        return made


def missing_text(name: str, why: str) -> str:
    """Return what a user is told whose machine lacks the package of a tracker."""
    return (
        f"the tracker {name} needs a package that is missing ({why}): "
        f'pip install "vembed[{name}]", or leave it out of report_to'
    )
