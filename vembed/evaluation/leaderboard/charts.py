"""Draw quality against cost: a mark for each form of the vectors, a line through those that nothing beats.

Marks carry numbers, never names: what a user wrote stays in the table under the drawing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from vembed.evaluation.leaderboard.content import frontier
from vembed.pages.charts import OTHER_SERIES, SERIES, axis_labels, chart_axes, inline_svg, tick_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from markupsafe import Markup
    from matplotlib.axes import Axes

    from vembed.evaluation.leaderboard.content import VariantRow

INCHES = (5.2, 3.3)

COLOURS = (SERIES, *OTHER_SERIES)
# Marks in the drawing and in its legend; with the colours they tell 20 models apart.
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"))

DECADE = 10.0


def series_mark(position: int) -> tuple[str, str]:
    """Return the class and the character of a model's mark in the legend."""
    return f"series-{position % len(COLOURS) + 1}", MARKERS[position % len(MARKERS)][1]


def draw_cost(
    series: Sequence[Sequence[VariantRow]],
    cost: Callable[[VariantRow], float],
    *,
    axis: str,
    name: str,
    label: str,
) -> Markup:
    """Draw quality against one kind of cost, as an `svg` element as wide as what it stands in.

    Args:
        cost: Above 0.
        name: Prefix of the ids in the drawing: a word of ours, another one for each drawing of a page.
    """
    with chart_axes(INCHES) as (figure, axes):
        for position, rows in enumerate(series):
            colour, marker = COLOURS[position % len(COLOURS)], MARKERS[position % len(MARKERS)][0]
            points = [(cost(row), row.value) for row in rows]
            best = frontier(points)
            axes.plot(*zip(*best, strict=True), color=colour, linewidth=1.2, alpha=0.55)
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5.0, linestyle="")
            place = (4, 4) if position % 2 == 0 else (4, -10)  # forms of two models often share a cost
            for row, (x, y) in zip(rows, points, strict=True):
                axes.annotate(
                    str(row.number), (x, y), textcoords="offset points", xytext=place, fontsize=8.0, color=colour
                )
        costs = [cost(row) for rows in series for row in rows]
        _cost_axis(axes, min(costs), max(costs))
        axes.set_xlabel(axis)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(axis_labels())
        axes.margins(x=0.08, y=0.12)
        return inline_svg(figure, name=name, label=label)


def _cost_axis(axes: Axes, low: float, high: float) -> None:
    """Make the axis of costs logarithmic where they span a decade, with ticks at 1, 2 and 5 below two of them."""
    if high / low < DECADE:
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(axis_labels())
        return
    axes.set_xscale("log")
    few = high / low < DECADE**2
    axes.xaxis.set_major_locator(LogLocator(DECADE, subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(tick_text))
    axes.xaxis.set_minor_formatter(NullFormatter())
