"""Base of the trackers of services: run ids, resuming, and the steps that a service has already."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vembed.errors import MachineError
from vembed.files import replace_text
from vembed.redact import redact
from vembed.training.trackers import Tracker, flatten_ranks, missing_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_log = logging.getLogger(__name__)

PROJECT = "vembed"
"""Project of the runs, unless the service's own variables name another."""


class HostedTracker(Tracker, ABC):
    """A run of a service, fed through the service's Python package (`package`; imported, it is `self.service`).

    Numbers go under `train/`, `ranks/`, `evaluation/` and `result/`. The tracker's folder keeps two files:

    - `run_id`: a resumed training continues in the service's run that it began.
    - `sent.json`: group of numbers -> last step sent. Steps that a resumed training does again aren't sent again.

    The package is imported by the constructor, so that a missing one ends the run before training. The service's run is
    opened at the first thing to send: by then a service that can't be reached costs the tracker and not the run.

    Raises:
        MachineError: The package is missing.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        super().__init__(folder, resume_step=resume_step, config=config)
        try:
            self.service: Any = importlib.import_module(self.package or self.name)
        except ImportError as error:
            raise MachineError(missing_text(self.name, str(error))) from error
        self._run: Any = None
        self._sent: dict[str, int] = {}
        self.error: BaseException | None = None  # that ended the training early

    @abstractmethod
    def open(self, run_id: str) -> Any:
        """Return the service's run of an id, made now, or opened again."""

    @abstractmethod
    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""

    def finish(self, run: Any) -> None:
        """Let the service end the run; `self.error` is what ended it early."""
        run.finish()

    def location(self, run: Any) -> str:  # noqa: ARG002 - of packages that don't print it themselves
        """Return where a user finds the run; empty says nothing."""
        return ""

    def last_steps(self, run: Any) -> dict[str, int]:  # noqa: ARG002 - of services that can be asked
        """Return the last step that the service has of each group of numbers."""
        with suppress(OSError, ValueError):
            steps = json.loads((self.folder / "sent.json").read_text("utf-8"))
            return {str(group): int(step) for group, step in steps.items()}
        return {}

    @property
    def run(self) -> Any:
        """The service's run, opened when it is first asked for."""
        if self._run is None:
            path = self.folder / "run_id"
            if self.resume_step and path.is_file():
                run_id = path.read_text("utf-8")
            else:  # written before the service hears of the run: a kill between the two leaves no run that nobody knows
                self.folder.mkdir(parents=True, exist_ok=True)
                run_id = uuid.uuid4().hex[:16]
                replace_text(path, run_id)
            command = sys.argv
            sys.argv = [redact(word) for word in command]  # W&B and SwanLab record the command line
            try:
                self._run = self.open(run_id)
            finally:
                sys.argv = command
            self._sent = self.last_steps(self._run) if self.resume_step else {}
            if location := self.location(self._run):
                _log.info("%-7s %s", self.name, location)
        return self._run

    @property
    def run_name(self) -> str:
        """The name of the output folder."""
        return self.folder.absolute().parents[1].name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a training step."""
        self._send_group("train", step, values)

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        """Send what each process measured."""
        self._send_group("ranks", step, flatten_ranks(by_rank))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of an evaluation."""
        self._send_group("evaluation", step, metrics)

    def log_result(self, step: int, values: Mapping[str, float]) -> None:
        """Send the main metrics before and after training."""
        self._send_group("result", step, values)

    def log_stop(self, error: BaseException) -> None:
        """Remember what ended the run early."""
        self.error = error

    def close(self) -> None:
        """Let the service finish the run."""
        if self._run is not None:
            self.finish(self._run)
            self._run = None

    def _send_group(self, group: str, step: int, values: Mapping[str, float]) -> None:
        run = self.run
        if step <= self._sent.get(group, -1):  # -1: an evaluation may be of step 0
            return
        self.send(run, step, {f"{group}/{name}": value for name, value in values.items()})
        # After the call, not before: a kill between the two sends a step twice, and loses none.
        self._sent[group] = step
        (self.folder / "sent.json").write_text(json.dumps(self._sent), "utf-8")
