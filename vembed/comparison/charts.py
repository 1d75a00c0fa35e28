"""Curves of several runs in one drawing, over steps and over seconds.

A noisy curve is drawn as its running mean, with the values themselves faint behind it while there are few runs; nothing
is left out but points that can't be told apart, of which each stretch keeps its lowest and highest.
Shape legend: N points.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.report.curves import STEP_CURVES, dev_curve, step_curve, thinned_rows
from vembed.pages.charts import SERIES_COLOURS, SERIES_MARKERS, chart_axes, inline_svg, scale_axis, set_ticks
from vembed.pages.text import finite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup
    from numpy.typing import NDArray

    from vembed.comparison.runs import Run
    from vembed.evaluation.report.curves import Curve

OVERLAY_INCHES = (5.2, 2.9)

FEW_RUNS = 4
"""Most runs whose values are drawn faint behind their running means."""

MOST_POINTS, FEWEST_POINTS, ALL_POINTS = 300, 60, 1500
"""Points of a curve on a page of few and of many runs, and of all curves of a drawing together, about."""

MARKS = 6
"""Marks along a curve, which tell it from others without its colour."""

SPECS = tuple(spec for spec in STEP_CURVES if spec.key in ("loss", "learning_rate"))


@dataclass(frozen=True, slots=True)
class Overlay:
    """One kind of curve of all runs that have it."""

    key: str
    title: str
    is_metric: bool
    curves: tuple[tuple[int, Curve], ...]  # place of the run, its curve
    seconds: tuple[Mapping[int, float], ...]  # of each run: step -> seconds of training until then

    @property
    def is_smoothed(self) -> bool:
        """Whether running means are drawn."""
        return any(curve.mean_N is not None for _, curve in self.curves)

    @property
    def has_seconds(self) -> bool:
        """Whether every curve can be drawn over seconds."""
        return all(self.seconds[place] for place, _ in self.curves)


def overlays(runs: Sequence[Run], metric: str) -> list[Overlay]:
    """Return training loss, dev metric and learning rate, without those that no run has."""
    seconds = tuple(seconds_at(run.rows) for run in runs)
    found = []
    for spec in SPECS:
        curves = [(place, step_curve(run.rows, spec)) for place, run in enumerate(runs)]
        found.append((spec.key, spec.title, False, curves))
    known = {name for run in runs for _, metrics in run.evaluations for name in metrics}
    metric = metric if metric in known else min(known, default=metric)
    dev = [(place, dev_curve(run.evaluations, metric)) for place, run in enumerate(runs)]
    found.insert(1, ("dev", f"Dev {metric}", True, dev))
    made = [
        Overlay(key, title, is_metric, tuple((place, curve) for place, curve in curves if curve is not None), seconds)
        for key, title, is_metric, curves in found
    ]
    return [overlay for overlay in made if overlay.curves]


def seconds_at(rows: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Return how long training had taken after each step, evaluations left out; empty where that wasn't logged."""
    steps = [finite(row.get("step_seconds")) for row in rows]
    if not rows or not np.isfinite(steps).all():
        return {}
    return {0: 0.0, **dict(zip((int(row["step"]) for row in rows), accumulate(steps), strict=True))}


def draw_overlay(overlay: Overlay, *, over_seconds: bool, label: str) -> Markup:
    """Draw the curves of all runs, over steps or over seconds."""
    count = len(overlay.curves)
    limit = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // count))
    with chart_axes(OVERLAY_INCHES) as (figure, axes):
        drawn = []
        for place, curve in overlay.curves:
            rows_N = _rows(curve, overlay.seconds[place] if over_seconds else None, limit)
            steps_N = curve.steps_N[rows_N]
            across_N = np.array([overlay.seconds[place][step] for step in steps_N]) if over_seconds else steps_N
            colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
            marker = SERIES_MARKERS[place % len(SERIES_MARKERS)][0]
            values_N = curve.values_N[rows_N] / curve.spec.divisor
            line_N = values_N if curve.mean_N is None else curve.mean_N[rows_N] / curve.spec.divisor
            if curve.mean_N is not None and count <= FEW_RUNS:
                axes.plot(across_N, values_N, color=colour, alpha=0.22, linewidth=0.8)
                drawn.append(values_N)
            every = 1 if len(line_N) <= 2 * MARKS else len(line_N) // MARKS
            axes.plot(
                across_N, line_N, color=colour, marker=marker, markersize=4.5, markevery=(place % every, every)
            )  # marks of runs that lie on each other stand apart
            drawn.append(line_N)
        if not overlay.is_metric:
            scale_axis(axes, np.concatenate(drawn))
        else:
            set_ticks(axes.yaxis)
        axes.set_xlabel("seconds of training" if over_seconds else "step")
        set_ticks(axes.xaxis, 5, integer=not over_seconds)
        name = f"{overlay.key}-{'seconds' if over_seconds else 'steps'}"
        return inline_svg(figure, name=name, label=label)


def _rows(curve: Curve, seconds: Mapping[int, float] | None, limit: int) -> NDArray[np.int64]:
    """Return the points to draw: few enough, and those whose second is known."""
    rows_N = thinned_rows(curve.values_N, limit)
    if seconds is None:
        return rows_N
    known = [row for row in rows_N.tolist() if int(curve.steps_N[row]) in seconds]
    return np.array(known, dtype=np.int64)
