"""metrics.jsonl: one JSON object per step, in order, each step once, whatever was killed and resumed.

Every row reaches the operating system before `log` returns, so a killed process loses none. At a resume the file is cut
back to the checkpoint's step, because the steps after it are done again.

NaN and infinity are written as null: JSON has neither, and a file that only Python can read is no record. What exactly
the number was stands in nonfinite-step-N.json.

This is the run's own record, so it isn't guarded: when the disk refuses a row the run stops with `MachineError`, and
the last checkpoint is as good as it was.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import math
import os
import shutil
from typing import TYPE_CHECKING, Any

from vembed.errors import MachineError
from vembed.files import replace_text
from vembed.training.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)


class JsonlTracker(Tracker):
    """Append one row per step to a file; an evaluation writes a folder of its own, and adds none.

    Before the first row of step s, whatever the file holds of step s or later is cut away, so no order of calls can
    make a step appear twice.

    Args:
        path: The file; made at the first row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        self._last_step = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the row of a step.

        Args:
            step: Optimizer steps done; greater than that of the row before.
            values: Name -> number. NaN and infinity become null.

        Raises:
            ValueError: The step was logged before, or a value is called "step".
            MachineError: The disk refused.
        """
        if "step" in values:
            raise ValueError("a row has its step already; call the value something else")
        if self._file is not None and step <= self._last_step:
            raise ValueError(
                f"step {step} comes after step {self._last_step} in {self._path.name}; each step is logged once"
            )
        row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            if self._file is None:
                self.cut_back(step - 1)
                self._file = io.FileIO(self._path, "a")
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self.close()
            raise self._refused(error) from error
        self._last_step = step

    def cut_back(self, step: int) -> int:
        """Drop the rows after a step, and a last line that a crash cut off; atomic, and nothing when there are none.

        Args:
            step: Of the checkpoint that the run continues from; 0 drops everything.

        Returns:
            Lines dropped.

        Raises:
            MachineError: The disk refused; the file is as it was.
        """
        self.close()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                return 0
            text = _text_of(self._path)
            lines = [line for line in text.split("\n") if line]
            kept = [line for line, found in _whole_rows(lines) if found["step"] <= step]
            cut = "".join(f"{line}\n" for line in kept)
            if cut != text:
                replace_text(self._path, cut)
        except OSError as error:
            raise self._refused(error) from error
        dropped = len(lines) - len(kept)
        if dropped:
            _log.info("%s: %d lines after step %d dropped, those steps are done again", self._path, dropped, step)
        return dropped

    def say_lost(self, step: int) -> None:
        """Warn where rows up to the checkpoint's step are missing, and keep what stands in their place aside.

        Raises:
            MachineError: The disk refused.
        """
        kept_as = ""
        try:
            text = _text_of(self._path) if os.path.lexists(self._path) else ""
            lines = [line for line in text.split("\n") if line]
            there = {row["step"] for _, row in _whole_rows(lines)} & {*range(1, step + 1)}
            if len(there) == step:
                return
            if text:
                aside = next(path for path in map(self._aside, itertools.count(1)) if not path.exists())
                shutil.copyfile(self._path, aside)
                kept_as = f"; what it holds is kept as {aside.name}"
        except OSError as error:
            raise self._refused(error) from error
        _log.warning(
            "%s: %d of the %d steps up to the checkpoint are missing, and their numbers are lost; weights and later "
            "steps are as they would have been%s",
            self._path, step - len(there), step, kept_as,
        )  # fmt: skip

    def _aside(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.broken-{number}")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _refused(self, error: OSError) -> MachineError:
        return MachineError(
            f"{self._path}: can't be written ({error}). Without it the run has no record: "
            "free some space or fix the permissions, then resume from the last checkpoint."
        )


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the whole rows of the file, each step once; a number that wasn't finite is left out of its row."""
    lines = _text_of(path).split("\n") if path.is_file() else []
    return [{key: value for key, value in row.items() if value is not None} for _, row in _whole_rows(lines)]


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_text(encoding="utf-8", errors="replace")


def _whole_rows(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines that are whole rows of a step later than the one before, each with its numbers."""
    last = 0
    for line in lines:
        row = _row_of(line)
        if row is not None and row["step"] > last:
            last = row["step"]
            yield line, row


def _row_of(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row if all(value is None or type(value) in (int, float) for value in row.values()) else None
