"""TensorBoard: the same numbers as curves, and those of each process."""

from __future__ import annotations

import importlib
import math
import threading
from typing import TYPE_CHECKING, Any

from vembed.errors import MachineError
from vembed.training.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class TensorBoardTracker(Tracker):
    """Write scalars that TensorBoard shows: `train/loss` ..., `evaluation/ndcg@10` ..., `ranks/loss/0` ...

    TensorBoard is imported here, not with the module, and the folder is made at the first number, so that a full disk
    fails inside the guard and a missing package before training.

    TensorBoard hides what older event files hold of steps after `resume_step`.

    Raises:
        MachineError: The package is missing.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        super().__init__(folder, resume_step=resume_step, config=config)
        try:
            self._writer_class: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise MachineError(
                f"the tracker tensorboard needs a package that is missing ({error}): "
                "pip install tensorboard, or set report_to: none"
            ) from error
        self._writer: Any = None
        self._shown = threading.excepthook

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a training step under `train/`."""
        self._add("train", step, values)

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        """Record what each process measured under `ranks/`, e.g. `ranks/peak_memory_bytes/3` for process 3."""
        values = {
            f"{name}/{rank}": value
            for name, numbers in by_rank.items()
            for rank, value in enumerate(numbers)
            if not math.isnan(value)
        }
        self._add("ranks", step, values)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation under `evaluation/`."""
        self._add("evaluation", step, metrics)

    def close(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            threading.excepthook = self._shown

    def _add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._shown, threading.excepthook = threading.excepthook, self._show
            self._writer = self._writer_class(str(self.folder), purge_step=self.resume_step + 1)
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def _show(self, told: threading.ExceptHookArgs) -> None:
        """Show what ended a thread, but for TensorBoard's writer: the next number it gets raises the same error."""
        if not type(told.thread).__module__.startswith("tensorboard."):
            self._shown(told)
