"""The page of a sweep: the table, a drawing of the dev metric over what was tried, and what was chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import NullLocator

from vembed.evaluation.pages import write_report
from vembed.pages.charts import BETTER, CURVE_INCHES, LINE, SERIES, chart_axes, inline_svg
from vembed.pages.page import Cell, Table
from vembed.pages.text import metric_text, signed_text
from vembed.sweeping.ranking import chosen_lines
from vembed.sweeping.space import LOG_RATIO
from vembed.sweeping.trials import dev_value
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup
    from matplotlib.axes import Axes

    from vembed.sweeping.ranking import Ranked

TEMPLATE = Path(__file__).parent / "templates" / "sweep"
NAME = "sweep"
MOST_MARKED = 6
"""Values of one key that all stand on its axis; of more only the lowest and the highest."""
SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it

LIMITS = (
    "Differences are paired over the queries of the dev set, and their intervals hold together at 95%: each is widened "
    "for how many trials are compared with the best one. They speak of other queries, not of other training seeds; "
    "train the chosen values with the key seeds to see how much those change."
)


@dataclass(frozen=True)
class SweepReport:
    """What the page is made of."""

    ranked: Sequence[Ranked]
    metric: str
    has_test: bool
    facts: Mapping[str, str]  # method, seed, configuration
    command: str

    @property
    def keys(self) -> list[str]:
        """The keys that were tried."""
        return list(dict.fromkeys(key for each in self.ranked for key in each.outcome.trial.choice))


def write_sweep_report(folder: Path, report: SweepReport) -> None:
    """Write sweep.json, sweep.md and sweep.html.

    Raises:
        MachineError: The folder can't be written.
    """
    drawings = {"drawing": partial(_draw, report)}
    write_report(folder, TEMPLATE, _document(report), _shared(report), drawings, name=NAME)


def _document(report: SweepReport) -> dict[str, Any]:
    """Return the report for programs, every number unrounded."""

    def values(ranked: Ranked) -> dict[str, Any]:
        outcome, comparison = ranked.outcome, ranked.to_best
        return {
            "trial": outcome.trial.name,
            "values": outcome.trial.shown,
            "word": ranked.word,
            "steps": outcome.trial.steps or None,
            "kept_step": outcome.kept_step if outcome.dev is not None else None,
            "dev": dev_value(outcome, report.metric) if outcome.dev is not None else None,
            "difference": None if comparison is None else comparison.difference,
            "low": None if comparison is None else comparison.low,
            "high": None if comparison is None else comparison.high,
            "verdict": outcome.sentence or None,
            "error": outcome.error or None,
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "metric": report.metric,
        "trials": [values(each) for each in report.ranked],
        "chosen": next((each.outcome.trial.name for each in report.ranked if each.word == "best"), None),
        "facts": dict(report.facts),
        "command": report.command,
    }


def _shared(report: SweepReport) -> dict[str, Any]:
    """Return what the page and the Markdown file both tell."""
    rows: list[list[str | Cell]] = []
    for each in report.ranked:
        outcome = each.outcome
        values = [outcome.trial.shown.get(key, "") for key in report.keys]
        if outcome.dev is None:
            rows.append([*values, "", "", f"failed: {outcome.error}", ""])
            continue
        word = f"after {outcome.trial.steps} steps" if each.word == "shorter" else each.word
        rows.append(
            [*values, metric_text(dev_value(outcome, report.metric), 4), _cell(each), word, str(outcome.kept_step)]
        )
    tones = {place: "chosen" for place, each in enumerate(report.ranked) if each.word == "best"}
    heads = [*report.keys, f"{report.metric} (dev)", "Difference", "Beside the best", "Step"]
    words = frozenset({*range(len(report.keys)), len(report.keys) + 2})
    return {
        "title": f"{plural(len(report.ranked), 'trial')} over {', '.join(report.keys)}",
        "chosen": chosen_lines(report.ranked, report.metric, has_test=report.has_test),
        "limits": LIMITS,
        "trials": Table(heads, rows, words=words, tones=tones),
        "settings": list(report.facts.items()),
        "folders": [(each.outcome.trial.name, each.outcome.trial.values) for each in report.ranked],
        "command": report.command,
        "metric": report.metric,
    }


def _cell(ranked: Ranked) -> str | Cell:
    comparison = ranked.to_best
    if comparison is None:
        return ""
    bounds = f"{signed_text(comparison.low, 4)} to {signed_text(comparison.high, 4)}"
    return Cell(signed_text(comparison.difference, 4), bounds)


def _draw(report: SweepReport) -> Markup:
    """Draw the dev metric over the one key that was tried, or a line for each trial through an axis for each key."""
    shown = [each for each in report.ranked if each.word in ("best", "within noise", "worse")]
    shown = shown or [each for each in report.ranked if each.word == "shorter"]
    values = [dev_value(each.outcome, report.metric) for each in shown]
    with chart_axes(CURVE_INCHES) as (figure, axes):
        draw = _draw_points if len(report.keys) == 1 else _draw_lines
        draw(axes, report, shown, values)
        label = "The dev metric of each trial over the values that were tried; the table has the numbers."
        return inline_svg(figure, name="trials", label=label)


def _draw_points(axes: Axes, report: SweepReport, shown: Sequence[Ranked], values: Sequence[float]) -> None:
    texts = [each.outcome.trial.shown[report.keys[0]] for each in shown]
    numbers = _numbers(texts)
    names = list(dict.fromkeys(texts))
    across = numbers or [float(names.index(text)) for text in texts]
    points = sorted(zip(across, values, strict=True))
    axes.plot(*zip(*points, strict=True), color=SERIES, marker="o", markersize=4.5, linestyle="-" if numbers else "")
    axes.plot(across[0], values[0], color=BETTER, marker="o", markersize=8.0, linestyle="", label="chosen")
    if numbers is not None and min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_RATIO:
        axes.set_xscale("log")
    if len(names) <= MOST_MARKED:
        axes.set_xticks([across[texts.index(name)] for name in names], [_short(name) for name in names], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel=report.keys[0], ylabel=f"{report.metric} (dev)")
    axes.legend(loc="best")


def _draw_lines(axes: Axes, report: SweepReport, shown: Sequence[Ranked], values: Sequence[float]) -> None:
    """Draw parallel coordinates: each axis from its lowest value to its highest, the last one is the metric."""
    columns = []
    for place, key in enumerate(report.keys):
        texts = [each.outcome.trial.shown[key] for each in shown]
        columns.append(_axis(axes, place, texts))
    low, high = min(values), max(values)
    columns.append([(value - low) / (high - low) if high > low else 0.5 for value in values])
    for end, value in ((0.0, low), (1.0, high)) if high > low else ((0.5, low),):
        _write(axes, f"{value:.3f}", len(report.keys), end)
    across = range(len(report.keys) + 1)
    for place, line in reversed(list(enumerate(zip(*columns, strict=True)))):
        colour, width = (BETTER, 2.6) if place == 0 else (SERIES, 1.1)
        axes.plot(across, line, color=colour, linewidth=width, alpha=1.0 if place == 0 else 0.55)
    for place in across:
        axes.axvline(place, color=LINE, linewidth=0.8)
    axes.set_xticks(list(across), [*map(_short, report.keys), f"{report.metric} (dev)"])
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(report.keys) + 0.3)
    axes.set_ylim(-0.15, 1.15)


def _axis(axes: Axes, place: int, texts: Sequence[str]) -> list[float]:
    """Write the values of one key along its axis, and return where each trial stands on it."""
    numbers = _numbers(texts)
    if numbers is None:
        names = list(dict.fromkeys(texts))
        heights = {name: (number + 0.5) / len(names) for number, name in enumerate(names)}
    else:
        ordered = sorted(set(numbers))
        is_log = ordered[0] > 0 and ordered[-1] / ordered[0] >= LOG_RATIO
        scaled = {number: math.log(number) if is_log else number for number in ordered}
        low, high = scaled[ordered[0]], scaled[ordered[-1]]
        heights = {
            text: (scaled[number] - low) / (high - low) if high > low else 0.5
            for text, number in zip(texts, numbers, strict=True)
        }
    lowest, highest = min(heights, key=heights.__getitem__), max(heights, key=heights.__getitem__)
    for name in heights if len(heights) <= MOST_MARKED else (lowest, highest):
        _write(axes, name, place, heights[name])
    return [heights[text] for text in texts]


def _write(axes: Axes, text: str, place: int, height: float) -> None:
    """Write a value at its place on an axis, where few lines pass: above it, or below the lowest one."""
    above = height > 0.0
    axes.annotate(
        _short(text),
        (place, height),
        xytext=(0, 4 if above else -4),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
    )


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """Return values as numbers; None where one isn't a finite one."""
    try:
        found = [float(text) for text in texts]
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


def _short(text: str) -> str:
    return text if len(text) <= 18 else f"{text[:17]}…"
