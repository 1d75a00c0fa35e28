"""Where the time of the training steps went: each part's share, its course, and the key that changes the largest.

Shape legend: P parts, N stretches of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.text import finite, number_text, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

MAX_STRETCHES = 60
"""Most stretches that are drawn; each shows the mean of its steps."""

NO_FINDINGS = "Nothing stands out: no part of the step, no rank and no limit asks for another setting."


@dataclass(frozen=True, slots=True)
class PartSpec:
    """How one part of a step is shown.

    Attributes:
        key: Key of the rows; empty for what no other part has.
        name: What it is called.
        lever: What to change where it is the largest part.
    """

    key: str
    name: str
    lever: str


PARTS = (
    PartSpec("data_seconds", "waiting for data", "num_workers (decode and tokenize in more processes)"),
    PartSpec(
        "encode_seconds",
        "encoding, forward and backward",
        "retain (keep more graphs, encode less twice), gradient_cache_chunk_tokens, and bf16 where the device has it",
    ),
    PartSpec("wait_seconds", "waiting for the slowest rank", "what slows that rank; see the ranks' own numbers"),
    PartSpec("loss_seconds", "loss over the batch", "loss_tile_size, or a smaller global batch"),
    PartSpec(
        "reduce_seconds",
        "adding gradients up over ranks",
        "the global batch (larger ones reduce less often) or use_lora (fewer gradients)",
    ),
    PartSpec("update_seconds", "clipping and optimizer", "what is trained (trainable, use_lora)"),
    PartSpec("", "everything else", "nothing of its own: it is the loop, the logging and the random state"),
)


@dataclass(frozen=True, slots=True)
class TimePart:
    """One part over all steps.

    Attributes:
        spec: Which.
        seconds: Mean of a step.
        share: Of the step.
        course_N: Mean seconds of a step in each stretch.
    """

    spec: PartSpec
    seconds: float
    share: float
    course_N: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the time went.

    Attributes:
        parts: Those that took any, in the order of the step.
        step_seconds: Mean of a step.
        steps_N: Middle step of each stretch.
        num_steps: Steps that were measured.
        sentence: The largest part and what changes it.
    """

    parts: tuple[TimePart, ...]
    step_seconds: float
    steps_N: NDArray[np.float64]
    num_steps: int
    sentence: str


def settled_rows(rows: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the rows whose times count: those that have them, without the first, which also warms everything up."""
    timed = [row for row in rows if finite(row.get("step_seconds")) > 0]
    return timed[1:] if len(timed) > 2 else timed


def split_time(rows: Sequence[Mapping[str, float]]) -> TimeSplit | None:
    """Return where the time of the logged steps went, or None where no row has times."""
    timed = settled_rows(rows)
    if not timed:
        return None
    stretches = np.array_split(np.arange(len(timed)), min(MAX_STRETCHES, len(timed)))
    step_R = np.array([finite(row["step_seconds"]) for row in timed])
    named = {spec.key: _column(timed, spec.key) for spec in PARTS if spec.key}
    rest_R = np.maximum(0.0, step_R - np.sum(list(named.values()), axis=0))
    total = float(step_R.sum())
    parts = []
    for spec in PARTS:
        seconds_R = named.get(spec.key, rest_R)
        if seconds_R.any():
            course_N = np.array([seconds_R[stretch].mean() for stretch in stretches])
            share = float(seconds_R.sum()) / total
            parts.append(TimePart(spec, float(seconds_R.mean()), share, course_N))
    steps_N = np.array([np.mean([finite(timed[row].get("step")) for row in stretch]) for stretch in stretches])
    return TimeSplit(tuple(parts), float(step_R.mean()), steps_N, len(timed), _sentence(parts, float(step_R.mean())))


def seconds_text(seconds: float) -> str:
    """Return a duration for people, e.g. "1.3 s", "12.4 ms"."""
    return f"{number_text(float(f'{seconds:.3g}'))} s" if seconds >= 1 else f"{float(f'{seconds * 1000:.3g}'):g} ms"


def percent_text(share: float) -> str:
    """Return a share in percent, one that isn't zero never as 0%."""
    return "under 1%" if 0 < share < 0.01 else f"{100 * share:.0f}%"


def _column(rows: Sequence[Mapping[str, float]], key: str) -> NDArray[np.float64]:
    values = [finite(row.get(key)) for row in rows]
    return np.array([0.0 if math.isnan(value) else value for value in values])


def _sentence(parts: Sequence[TimePart], step_seconds: float) -> str:
    largest = max(parts, key=lambda part: part.share)
    return (
        f"A step took {seconds_text(step_seconds)} on average, {percent_text(largest.share)} of it "
        f"{largest.spec.name}. What changes that: {largest.spec.lever}."
    )


def measured_note(split: TimeSplit) -> str:
    """Say what the means are over."""
    left_out = "; the first one, which also warms everything up, is left out" if split.num_steps > 1 else ""
    return f"Means over {plural(split.num_steps, 'step')}{left_out}."
