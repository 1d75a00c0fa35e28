"""Where the time of the training steps went: each part's share, its course, and the key that changes the largest.

Shape legend: P parts, N stretches of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.pages import Table
from vembed.evaluation.text import capitalised, finite, number_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

MAX_STRETCHES = 60
"""Most stretches that are drawn; each shows the mean of its steps."""

NO_FINDINGS = "Nothing stands out: no setting looks worth changing."


PARTS = {
    "data_seconds": ("waiting for data", "num_workers (decode and tokenize in more processes)"),
    "encode_seconds": (
        "encoding, forward and backward",
        "retain (keep more graphs, encode less twice), gradient_cache_chunk_tokens, and bf16 where the device has it",
    ),
    "wait_seconds": ("waiting for the slowest rank", "what slows that rank; see the ranks' own numbers"),
    "loss_seconds": ("loss over the batch", "loss_tile_size, or a smaller global batch"),
    "reduce_seconds": (
        "adding gradients up over ranks",
        "the global batch (larger ones reduce less often) or use_lora (fewer gradients)",
    ),
    "update_seconds": ("clipping and optimizer", "what is trained (trainable, use_lora)"),
    "": ("everything else", "nothing of its own: it is the loop, the logging and the random state"),
}
"""Key of the rows, empty for what no other part has -> what the part is called, what to change where it is largest."""


@dataclass(frozen=True, slots=True)
class TimePart:
    """One part of a step, over all steps."""

    key: str  # one of `PARTS`
    seconds: float  # mean of a step
    share: float  # of the step
    course_N: NDArray[np.float64]  # mean seconds of a step in each stretch

    @property
    def name(self) -> str:
        """What the part is called."""
        return PARTS[self.key][0]


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the time went."""

    parts: tuple[TimePart, ...]  # those that took any, in the order of the step
    step_seconds: float  # mean of a step
    steps_N: NDArray[np.float64]  # middle step of each stretch
    num_steps: int  # steps that were measured

    @property
    def sentence(self) -> str:
        """The largest part and what changes it."""
        largest = max(self.parts, key=lambda part: part.share)
        return (
            f"A step took {seconds_text(self.step_seconds)} on average, {percent_text(largest.share)} of it "
            f"{largest.name}. What changes that: {PARTS[largest.key][1]}."
        )

    @property
    def note(self) -> str:
        """What the means are over."""
        left_out = "; the first one, which also warms everything up, is left out" if self.num_steps > 1 else ""
        return f"Means over {plural(self.num_steps, 'step')}{left_out}."

    @property
    def table(self) -> Table:
        """Mean and share of each part."""
        rows = [[capitalised(part.name), seconds_text(part.seconds), percent_text(part.share)] for part in self.parts]
        return Table(("Part of a step", "Mean", "Share"), rows)


def settled_rows(rows: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the rows whose times count: those that have them, without the first, which also warms everything up."""
    timed = [row for row in rows if finite(row.get("step_seconds")) > 0]
    return timed[1:] if len(timed) > 2 else timed


def rate(rows: Sequence[Mapping[str, float]], key: str) -> float | None:
    """Return a rate over all steps together: long steps count for as long as they took."""
    timed = [row for row in rows if key in row]
    seconds = sum(row["step_seconds"] for row in timed)
    return sum(row[key] * row["step_seconds"] for row in timed) / seconds if seconds else None


def split_time(rows: Sequence[Mapping[str, float]]) -> TimeSplit | None:
    """Return where the time of the logged steps went, or None where no row has times."""
    timed = settled_rows(rows)
    if not timed:
        return None
    stretches = np.array_split(np.arange(len(timed)), min(MAX_STRETCHES, len(timed)))
    step_R = np.array([finite(row["step_seconds"]) for row in timed])
    named = {key: _column(timed, key) for key in PARTS if key}
    rest_R = np.maximum(0.0, step_R - np.sum(list(named.values()), axis=0))
    total = float(step_R.sum())
    parts = []
    for key in PARTS:
        seconds_R = named.get(key, rest_R)
        if seconds_R.any():
            course_N = np.array([seconds_R[stretch].mean() for stretch in stretches])
            share = float(seconds_R.sum()) / total
            parts.append(TimePart(key, float(seconds_R.mean()), share, course_N))
    steps_N = np.array([np.mean([finite(timed[row].get("step")) for row in stretch]) for stretch in stretches])
    return TimeSplit(tuple(parts), float(step_R.mean()), steps_N, len(timed))


def seconds_text(seconds: float) -> str:
    """Return a duration for people, e.g. "1.3 s", "12.4 ms"."""
    return f"{number_text(float(f'{seconds:.3g}'))} s" if seconds >= 1 else f"{float(f'{seconds * 1000:.3g}'):g} ms"


def percent_text(share: float) -> str:
    """Return a share in percent, one that isn't zero never as 0%."""
    return "under 1%" if 0 < share < 0.01 else f"{100 * share:.0f}%"


def _column(rows: Sequence[Mapping[str, float]], key: str) -> NDArray[np.float64]:
    values = [finite(row.get(key)) for row in rows]
    return np.array([0.0 if math.isnan(value) else value for value in values])
