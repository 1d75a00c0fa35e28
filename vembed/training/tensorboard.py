"""TensorBoard, the default tracker: numbers as curves, those of each process too, texts and pictures."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

import numpy

from vembed.errors import MachineError
from vembed.training.trackers import Tracker, flatten_ranks, is_picture, missing_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vembed.training.trackers import Cell


class TensorBoardTracker(Tracker):
    """Write scalars that TensorBoard shows: `train/loss` ..., `evaluation/ndcg@10` ..., `ranks/loss/0` ...

    TensorBoard is imported by the constructor, so that a missing package is refused before training. The folder is made
    at the first number: by then a full disk costs the tracker and not the run.

    Raises:
        MachineError: The package is missing.
    """

    name = package = "tensorboard"
    advice = "see that its folder can be written and the disk isn't full"

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        super().__init__(folder, resume_step=resume_step, config=config)
        try:
            self._writer_class: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise MachineError(missing_text(self.name, str(error))) from error
        self._writer: Any = None
        self._excepthook = threading.excepthook

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a training step under `train/`."""
        self._add("train", step, values)

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        """Record what each process measured under `ranks/`, e.g. `ranks/peak_memory_bytes/3` for process 3."""
        self._add("ranks", step, flatten_ranks(by_rank))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation under `evaluation/`."""
        self._add("evaluation", step, metrics)

    def log_result(self, step: int, values: Mapping[str, float]) -> None:
        """Record the main metrics before and after training under `result/`."""
        self._add("result", step, values)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Record a text, with its columns aligned."""
        self._open().add_text(name, f"```\n{text}\n```", step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table as a text, and its pictures as images that it names."""
        writer, lines = self._open(), [_line(columns), _line(["---"] * len(columns))]
        for number, row in enumerate(rows, start=1):
            cells: list[Cell] = list(row)
            for index, cell in enumerate(row):
                if is_picture(cell):
                    cells[index] = f"{name}/{number}/{columns[index]}"
                    writer.add_image(cells[index], numpy.asarray(cell.convert("RGB")), step, dataformats="HWC")
            lines.append(_line(cells))
        writer.add_text(name, "\n".join(lines), step)

    def close(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            threading.excepthook = self._excepthook

    def _add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        writer = self._open()
        for name, value in values.items():
            writer.add_scalar(f"{group}/{name}", value, step)

    def _open(self) -> Any:
        """Return the writer; the first one begins with the configuration."""
        if self._writer is None:
            # TensorBoard writes in a thread of its own. An error that ends the thread would be printed with a traceback
            # that says nothing new: the next number raises the same error here, and the tracker goes with one line.
            self._excepthook, threading.excepthook = threading.excepthook, self._show_other_threads
            # TensorBoard hides what older event files hold from `purge_step` on: those steps are done again.
            self._writer = self._writer_class(str(self.folder), purge_step=self.resume_step + 1)
            rows = [_line(["key", "value"]), _line(["---", "---"]), *map(_line, self.config.items())]
            self._writer.add_text("configuration", "\n".join(rows), self.resume_step)
        return self._writer

    def _show_other_threads(self, failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            self._excepthook(failure)


def _line(cells: Sequence[object]) -> str:
    """Return a row of a Markdown table."""
    # A cell holds no line break and no bar: either would end it.
    texts = ("" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"| {' | '.join(' '.join(text.split()).replace('|', '&#124;') for text in texts)} |"
