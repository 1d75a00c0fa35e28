"""metrics.jsonl: one JSON object per step, in order, each step once, whatever was killed and resumed.

Every row reaches the operating system before `log` returns, so a killed process loses none. At a resume the file is cut
back to the checkpoint's step, because the steps after it are done again.

NaN and infinity are written as null: JSON has neither, and a file that only Python can read is no record. What exactly
the number was stands in nonfinite-step-N.json.

This is the run's own record, so it isn't guarded: when the disk refuses a row the run stops with `MachineError`, and
the last checkpoint is as good as it was.
"""

from __future__ import annotations

import io
import json
import logging
import math
from typing import TYPE_CHECKING

from vembed.errors import MachineError
from vembed.files import replace_text
from vembed.training.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping
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
            step: Of the checkpoint that the run goes on from; 0 drops everything.

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
            text = self._path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.split("\n") if line]
            kept = [line for line in lines if _in_range(line, step)]
            cut = "".join(f"{line}\n" for line in kept)
            if cut != text:
                replace_text(self._path, cut)
        except OSError as error:
            raise self._refused(error) from error
        dropped = len(lines) - len(kept)
        if dropped:
            _log.info("%s: %d lines after step %d dropped, those steps are done again", self._path, dropped, step)
        return dropped

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


def _in_range(line: str, step: int) -> bool:
    """Return whether a line is a whole row of a step up to `step`."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step
