"""The report of a merge: what each mixture wins and loses beside the first model, and which was taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from vembed.evaluation.benchmark.names import model_labels
from vembed.evaluation.pages import Cell, Table, write_report
from vembed.evaluation.report.charts import (
    BETTER,
    CURVE_INCHES,
    INK,
    LINE,
    SERIES,
    AxisTicks,
    chart_axes,
    inline_svg,
)
from vembed.evaluation.text import metric_text, signed_text
from vembed.merging.choose import shown_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from vembed.evaluation.significance import Comparison
    from vembed.merging.choose import Choice, Point

TEMPLATE = Path(__file__).parent / "templates" / "merging"
SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it

LIMITS = (
    "These sets chose the mixture, so that its numbers here flatter it. Evaluate the merged model on sets that had no "
    "part in the choice (vembed evaluate) before you rely on it."
)


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a report is made of."""

    choice: Choice
    models: Sequence[str]
    facts: Mapping[str, str]  # method, settings, versions
    command: str

    @property
    def headline(self) -> str:
        """What was taken, in a sentence or two."""
        choice = self.choice
        chosen, share = choice.chosen, choice.share_kept
        if chosen is choice.first:
            reason = "no mixture that keeps the guard sets wins anything" if share else "none wins on the target sets"
            return f"The first model alone is the best of {len(choice.points)} mixtures: {reason}."
        kept = "" if share is None else f", {100 * share:.0f}% of the most that any mixture gains"
        return f"{self.taken}{kept}."

    @property
    def taken(self) -> str:
        """The weights, and the metric before and after on each set."""
        choice = self.choice
        sets = []
        for before, after in zip(
            (*choice.first.targets, *choice.first.guards), (*choice.chosen.targets, *choice.chosen.guards), strict=True
        ):
            values = " -> ".join(metric_text(each.metrics[choice.metric]) for each in (before, after))
            sets.append(f"{after.task} {values}")
        return f"Weights {shown_weights(choice.chosen.weights)}: {choice.metric} on {', '.join(sets)}"


def write_merge_report(folder: Path, report: MergeReport) -> None:
    """Write report.json, report.md and report.html.

    Raises:
        MachineError: The folder can't be written.
    """
    write_report(folder, TEMPLATE, _document(report), _shared(report), {"drawing": partial(_draw, report.choice)})


def _document(report: MergeReport) -> dict[str, Any]:
    """Return the report for programs, every number unrounded."""
    choice = report.choice

    def values(point: Point) -> dict[str, Any]:
        targets, guards = choice.differences(point)
        return {
            "weights": list(point.weights),
            "targets": [_numbers(each) for each in targets],
            "guards": [_numbers(each) for each in guards],
            "loses": choice.loses(point),
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "models": list(report.models),
        "metric": choice.metric,
        "targets": [result.task for result in choice.first.targets],
        "guards": [result.task for result in choice.first.guards],
        "chosen": list(choice.chosen.weights),
        "share_of_gain": choice.share_kept,
        "points": [values(point) for point in choice.points],
        "facts": dict(report.facts),
        "command": report.command,
    }


def _numbers(comparison: Comparison) -> dict[str, float]:
    return {
        "value": comparison.candidate,
        "difference": comparison.difference,
        "low": comparison.low,
        "high": comparison.high,
    }


def _shared(report: MergeReport) -> dict[str, Any]:
    """Return what the page and the Markdown file both tell."""
    choice = report.choice
    sets = [*choice.first.targets, *choice.first.guards]
    roles = ["target"] * len(choice.first.targets) + ["guard"] * len(choice.first.guards)
    rows: list[list[str | Cell]] = []
    tones = {}
    for place, point in enumerate(choice.points):
        cells = [_cell(each) for side in choice.differences(point) for each in side]
        said = "taken" if point is choice.chosen else "loses on a guard set" if choice.loses(point) else "not taken"
        rows.append([shown_weights(point.weights), *cells, said])
        if point is choice.chosen:
            tones[place] = "chosen"
    heads = ["Weights", *(f"{each.task} ({role})" for each, role in zip(sets, roles, strict=True)), "Reading"]
    return {
        "report": report,
        "title": " + ".join(model_labels(report.models)),
        "limits": LIMITS,
        "points": Table(heads, rows, words=frozenset({0, len(heads) - 1}), tones=tones),
        "models": [(f"model {place}", name) for place, name in enumerate(report.models, start=1)],
        "settings": list(report.facts.items()),
        "has_guards": bool(choice.first.guards),
    }


def _cell(comparison: Comparison) -> Cell:
    bounds = f"{signed_text(comparison.low)} to {signed_text(comparison.high)}"
    return Cell(f"{metric_text(comparison.candidate)} ({signed_text(comparison.difference)})", bounds)


def _draw(choice: Choice) -> Markup:
    """Draw what each mixture gains on the targets over what it loses on the guards, or over its weight."""
    places = []
    for point in choice.points:
        targets, guards = choice.differences(point)
        across = sum(each.difference for each in guards) / len(guards) if guards else 1 - point.weights[0]
        places.append((across, sum(each.difference for each in targets) / len(targets)))
    chosen = places[choice.points.index(choice.chosen)]
    with chart_axes(CURVE_INCHES) as (figure, axes):
        joined = "-" if len(choice.first.weights) == 2 else ""
        axes.plot(*zip(*places, strict=True), color=SERIES, marker="o", markersize=4.0, linestyle=joined)
        axes.plot(*chosen, color=BETTER, marker="o", markersize=8.0, linestyle="", label="taken")
        axes.plot(*places[0], color=INK, marker="s", markersize=5.0, linestyle="", label="first model")
        axes.axhline(0.0, color=LINE, linewidth=0.8)
        has_guards = bool(choice.first.guards)
        xlabel = f"{choice.metric} on the guard sets, difference" if has_guards else "weight of the other models"
        axes.set(xlabel=xlabel, ylabel="gain on the targets")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4))
            axis.set_major_formatter(AxisTicks())
        axes.legend(loc="best")
        label = "Each mixture's gain on the target sets over its loss on the guard sets; the table has the numbers."
        return inline_svg(figure, name="mixtures", label=label)
