"""Queries that improved or got worse by the training: their number, and by how much."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.report.speed import percent_text
from vembed.pages.charts import BARS, BETTER, INK, WORSE, chart_axes, inline_svg, set_ticks
from vembed.pages.page import Figure, Section, Share, Shares, SideBySide
from vembed.pages.text import count_text, signed_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from vembed.evaluation.report.inputs import RunReport


def change_counts(gains: Sequence[float]) -> dict[str, int]:
    """Return how many queries moved up, not at all, or down in the verdict's metric."""
    improved, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return {"improved": improved, "unchanged": len(gains) - improved - worse, "worse": worse}


def changes_section(report: RunReport, gains: Sequence[float]) -> Section:
    """Return how many queries changed, and by how much.

    Args:
        gains: Final minus baseline in the verdict's metric, of each query that has a finite value in both.
    """
    metric, counts = report.metric, change_counts(gains)
    improved, unchanged, worse = map(count_text, counts.values())
    sentence = (
        f"Of {plural(len(gains), 'query', 'queries')}, {improved} improved, {unchanged} stayed the same and {worse} "
        f"got worse in {metric}."
    )
    if left_out := len(report.final.per_query[metric]) - len(gains):
        sentence += f" {plural(left_out, 'query has', 'queries have')} no finite value in both results, left out."
    if report.task.grades:
        sentence += " A query's value is the measure over all pairs, and how its own pairs move it."
    if gains:  # 0.0 where all queries lost, or all won
        sentence += f" Largest gain {signed_text(max(0.0, *gains))}, largest loss {signed_text(min(0.0, *gains))}."

    def share(name: str) -> str:
        return f" ({percent_text(counts[name] / len(gains))})" if gains else ""

    shares = Shares(
        sentence,
        [
            Share("improved", "▲", counts["improved"], f"improved{share('improved')}"),
            Share("unchanged", "=", counts["unchanged"], f"stayed the same{share('unchanged')}"),
            Share("worse", "▼", counts["worse"], f"got worse{share('worse')}"),
        ],
    )
    if not any(gains):  # nothing to draw
        return Section("changes", "Query by query", [shares])
    words = "Queries by difference; those that stayed the same are left out."
    figure = Figure(f"How much {metric} changed", partial(draw_gains, gains), words)
    return Section("changes", "Query by query", [SideBySide([figure, shares])])


def draw_gains(gains: Sequence[float], *, name: str, label: str) -> Markup:
    """Draw how many queries changed by how much; at least one must have changed."""
    from matplotlib.ticker import MaxNLocator

    changed_N = np.array([gain for gain in gains if gain], dtype=np.float64)
    reach = float(np.abs(changed_N).max())
    edges = np.linspace(-reach, reach, BARS + 1)  # as many bars on each side: none spans zero
    # matplotlib's own bins would put small losses and small gains into one bar.
    counts, _ = np.histogram(changed_N, bins=edges)
    with chart_axes((5.2, 2.5)) as (figure, axes):
        width, half = edges[1] - edges[0], BARS // 2
        axes.bar(edges[:half], counts[:half], width * 0.86, align="edge", color=WORSE, linewidth=0)
        axes.bar(edges[half:-1] + width * 0.14, counts[half:], width * 0.86, align="edge", color=BETTER, linewidth=0)
        axes.axvline(0.0, color=INK, linewidth=0.8)
        axes.set(xlim=(-reach * 1.03, reach * 1.03), xlabel="final minus baseline", ylabel="queries")
        axes.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
        # As many decimals as tell the ticks apart: two from a reach of 0.1 on, one more for each power of ten below.
        decimals = max(2, 1 - math.floor(math.log10(reach)))
        axes.xaxis.set_major_formatter(lambda value, _: signed_text(value, decimals))
        set_ticks(axes.yaxis, integer=True)
        return inline_svg(figure, name=name, label=label)
