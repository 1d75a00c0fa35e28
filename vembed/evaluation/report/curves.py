"""The curves of a run: taken from the logged rows, thinned without losing spikes, and put into a sentence each.

Shape legend: N points.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vembed.evaluation.text import bytes_text, count_text, finite, metric_text, number_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

T = TypeVar("T")

MAX_POINTS = 500
"""Most points drawn of one curve: more can't be told apart at its width, and each costs bytes."""

SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """How one logged key is shown."""

    key: str
    title: str
    unit: str  # of the axis; empty for none
    show: Callable[[float], str]  # turns a value into text
    divisor: float = 1.0  # what values are divided by on the axis
    is_noisy: bool = False  # a running mean is drawn over the values


STEP_CURVES = (
    CurveSpec("loss", "Training loss", "", number_text, is_noisy=True),
    CurveSpec("learning_rate", "Learning rate", "", number_text),
    CurveSpec("grad_norm", "Gradient norm", "", number_text, is_noisy=True),
    CurveSpec("samples_per_second", "Samples per second", "", number_text, is_noisy=True),
    CurveSpec("tokens_per_second", "Tokens per second", "", number_text, is_noisy=True),
    CurveSpec("peak_memory_bytes", "Peak memory", "GiB", bytes_text, divisor=2**30),
)

SOURCE_LOSS = "loss_source_"
"""What the key of the loss of one source's batches begins with; the number of the source follows, from 1."""


def source_curves(rows: Sequence[Mapping[str, float]]) -> tuple[CurveSpec, ...]:
    """Return how the loss of each source is shown, where batches are of one source."""
    keys = {key for row in rows for key in row if key.startswith(SOURCE_LOSS)}
    numbers = sorted(int(key.removeprefix(SOURCE_LOSS)) for key in keys)
    return tuple(
        CurveSpec(f"{SOURCE_LOSS}{number}", f"Training loss, source {number}", "", number_text, is_noisy=True)
        for number in numbers
    )


OPTIONAL_CURVES = (
    CurveSpec("temperature", "Temperature", "", number_text),
    CurveSpec("masked_negatives", "False negatives masked", "per step", number_text, is_noisy=True),
    CurveSpec("data_seconds", "Waiting for data", "s per step", number_text, is_noisy=True),
)
"""Curves that say something only where they move."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve, ready to draw."""

    spec: CurveSpec
    steps_N: NDArray[np.int64]  # of the points that are drawn
    values_N: NDArray[np.float64]  # finite
    mean_N: NDArray[np.float64] | None  # running mean over all points, before thinning
    num_points: int  # finite points before thinning
    num_non_finite: int  # points left out because they are NaN or infinite
    summary: str  # the curve in a sentence

    @property
    def title(self) -> str:
        """Title of the chart, with the unit of its axis."""
        return f"{self.spec.title}, {self.spec.unit}" if self.spec.unit else self.spec.title

    @property
    def varies(self) -> bool:
        """Whether not all points are the same."""
        return bool((self.values_N != self.values_N[0]).any())


def step_curve(rows: Sequence[Mapping[str, float]], spec: CurveSpec) -> Curve | None:
    """Return the curve of one key of the logged rows, or None where no row has a finite value."""
    points = [(int(row["step"]), finite(row[spec.key])) for row in rows if "step" in row and spec.key in row]
    return curve_of(points, spec)


def curve_of(points: Sequence[tuple[int, float]], spec: CurveSpec) -> Curve | None:
    """Return the curve through (step, value) points, or None where none is finite."""
    steps_N = np.array([step for step, _ in points], dtype=np.int64)
    values_N = np.array([value for _, value in points], dtype=np.float64)
    kept_N = np.isfinite(values_N)
    num_non_finite = int((~kept_N).sum())
    steps_N, values_N = steps_N[kept_N], values_N[kept_N]
    if not len(values_N):
        return None
    mean_N = _running_mean(values_N) if spec.is_noisy and len(values_N) >= 20 else None
    rows_N = thinned_rows(values_N, MAX_POINTS)
    return Curve(
        spec=spec,
        steps_N=steps_N[rows_N],
        values_N=values_N[rows_N],
        mean_N=None if mean_N is None else mean_N[rows_N],
        num_points=len(values_N),
        num_non_finite=num_non_finite,
        summary=_summary(steps_N, values_N, spec, num_non_finite=num_non_finite),
    )


def thinned_rows(values_N: NDArray[np.float64], limit: int) -> NDArray[np.int64]:
    """Return at most `limit` rows, in order: first, last, and the lowest and highest of each stretch between them.

    A stretch keeps its extremes, so that a spike of one step is still drawn.
    """
    count = len(values_N)
    if count <= limit:
        return np.arange(count, dtype=np.int64)
    bounds = np.linspace(1, count - 1, (limit - 2) // 2 + 1).astype(np.int64)
    rows = {0, count - 1}
    for start, stop in pairwise(bounds):
        stretch = values_N[start:stop]
        rows |= {int(start + stretch.argmin()), int(start + stretch.argmax())}
    return np.array(sorted(rows), dtype=np.int64)


def _running_mean(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over a centred window of 5% of the points, cut at the ends."""
    half = max(2, len(values_N) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values_N)])
    rows = np.arange(len(values_N))
    low, high = np.maximum(rows - half, 0), np.minimum(rows + half + 1, len(values_N))
    return np.asarray((sums[high] - sums[low]) / (high - low), dtype=np.float64)


def _summary(steps_N: NDArray[np.int64], values_N: NDArray[np.float64], spec: CurveSpec, *, num_non_finite: int) -> str:
    """Return first, last and extreme values, what was left out, and what was thinned."""
    lowest, highest = int(values_N.argmin()), int(values_N.argmax())

    def at(row: int) -> str:
        return f"{spec.show(float(values_N[row]))} at step {count_text(int(steps_N[row]))}"

    if len(values_N) == 1:
        sentence = f"{at(0)}, the only point."
    elif values_N[lowest] == values_N[highest]:
        sentence = f"{spec.show(float(values_N[0]))} throughout."
    else:
        sentence = f"From {at(0)} to {at(-1)}; lowest {at(lowest)}, highest {at(highest)}."
    if num_non_finite:
        sentence += f" {plural(num_non_finite, 'value')} NaN or infinite, left out."
    if len(values_N) > MAX_POINTS:
        sentence += (
            f" Thinned to at most {MAX_POINTS} of {count_text(len(values_N))} points: "
            "the lowest and the highest of each stretch."
        )
    return sentence


def sparkline(curve: Curve, *, characters: int = 24) -> str:
    """Return the curve as a row of block characters, lowest to highest."""
    values_N = curve.values_N if curve.mean_N is None else curve.mean_N
    rows = np.linspace(0, len(values_N) - 1, min(characters, len(values_N))).round().astype(int)
    low, high = float(values_N.min()), float(values_N.max())
    span = high - low
    return "".join(SPARKS[int((float(values_N[row]) - low) / span * 7.999) if span else 3] for row in rows)


def dev_curve(evaluations: Sequence[tuple[int, Mapping[str, float]]], metric: str) -> Curve | None:
    """Return the curve of one dev metric over the steps, or None where no evaluation has it."""
    points = [(int(step), finite(metrics[metric])) for step, metrics in evaluations if metric in metrics]
    return curve_of(points, CurveSpec(metric, "", "", metric_text))


def evenly_spread(rows: Sequence[T], most: int) -> Sequence[T]:
    """Return at most so many rows, evenly spread, first and last included."""
    if len(rows) <= most:
        return rows
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]
