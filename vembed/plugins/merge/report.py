"""The report of a merge: gain and loss of each mixture beside the first model, and the one that was taken."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vembed.evaluation.benchmark.names import model_labels
from vembed.pages.charts import BETTER, INK, LARGE_INCHES, LINE, SERIES, chart_axes, inline_svg, set_ticks
from vembed.pages.page import Cell, Figure, Note, Page, Section, SideBySide, Table, command_blocks, pairs_table
from vembed.pages.text import metric_text, signed_text
from vembed.plugins.merge.choose import shown_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from vembed.evaluation.judge import Comparison
    from vembed.plugins.merge.choose import Choice, Point

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it

LIMITS = (
    "These sets chose the mixture, so that its numbers here flatter it. Evaluate the merged model on sets that had no "
    "part in the choice (vembed evaluate) before you rely on it."
)


def merge_page(choice: Choice, models: Sequence[str], facts: Mapping[str, str], command: str) -> Page:
    """Return the report of a merge.

    Args:
        models: In the order of the weights.
        facts: Method, settings and versions.
    """
    has_guards = bool(choice.first.guards)
    title = "Gain and cost of each mixture" if has_guards else "Gain of each mixture"
    words = (
        f"Gain on the target sets over {'the loss on the guard sets' if has_guards else 'the weight of the others'}."
    )
    figure = Figure(title, partial(draw_mixtures, choice), words)
    numbered = [(f"model {number}", name) for number, name in enumerate(models, start=1)]
    return Page(
        kind="Merged model",
        title=" + ".join(model_labels(models)),
        head=[Note(merge_headline(choice)), Note(LIMITS, muted=True)],
        sections=[
            Section("mixtures", "Mixtures", [SideBySide([figure]), mixtures_table(choice)]),
            Section(
                "method",
                "How it was merged",
                [
                    pairs_table("Models", numbered, "The models, in the order of the weights."),
                    pairs_table("Settings", list(facts.items()), "Method and versions."),
                    *command_blocks(command),
                ],
            ),
        ],
        document=merge_document(choice, models, facts, command),
    )


def merge_headline(choice: Choice) -> str:
    """Return the chosen weights, and the metric before and after on each set."""
    if choice.chosen is choice.first:
        has_gain = choice.share_kept is not None
        reason = "no mixture that keeps the guard sets wins anything" if has_gain else "none wins on the target sets"
        return f"The first model alone is the best of {len(choice.points)} mixtures: {reason}."
    kept = "" if choice.share_kept is None else f", {100 * choice.share_kept:.0f}% of the most that any mixture gains"
    return f"{taken_text(choice)}{kept}."


def taken_text(choice: Choice) -> str:
    """Return the chosen weights with the metric before and after, e.g. "Weights 0.7, 0.3: ndcg@10 on a 0.5 -> 0.6"."""
    before, after = ((*point.targets, *point.guards) for point in (choice.first, choice.chosen))
    sets = [
        f"{new.task} {metric_text(old.metrics[choice.metric])} -> {metric_text(new.metrics[choice.metric])}"
        for old, new in zip(before, after, strict=True)
    ]
    return f"Weights {shown_weights(choice.chosen.weights)}: {choice.metric} on {', '.join(sets)}"


def mixtures_table(choice: Choice) -> Table:
    """Return each mixture beside the first model on every set."""

    def reading(point: Point) -> str:
        if point is choice.chosen:
            return "taken"
        return "loses on a guard set" if choice.loses(point) else "not taken"

    def cell(comparison: Comparison) -> Cell:
        text = f"{metric_text(comparison.candidate)} ({signed_text(comparison.difference)})"
        return Cell(text, f"{signed_text(comparison.low)} to {signed_text(comparison.high)}")

    targets = [f"{result.task} (target)" for result in choice.first.targets]
    guards = [f"{result.task} (guard)" for result in choice.first.guards]
    heads = ["Weights", *targets, *guards, "Reading"]
    return Table(
        heads,
        [
            [
                shown_weights(point.weights),
                *(cell(comparison) for side in choice.differences(point) for comparison in side),
                reading(point),
            ]
            for point in choice.points
        ],
        text_columns=frozenset({0, len(heads) - 1}),
        tones={choice.points.index(choice.chosen): "chosen"},
        title="Mixtures",
        caption="Each mixture beside the first model: metric, difference, and its 95% interval.",
    )


def merge_document(choice: Choice, models: Sequence[str], facts: Mapping[str, str], command: str) -> dict[str, object]:
    """Return the report for programs, every number unrounded."""

    def numbers(comparison: Comparison) -> dict[str, float]:
        return {
            "value": comparison.candidate,
            "difference": comparison.difference,
            "low": comparison.low,
            "high": comparison.high,
        }

    def mixture(point: Point) -> dict[str, object]:
        targets, guards = choice.differences(point)
        return {
            "weights": list(point.weights),
            "targets": [numbers(comparison) for comparison in targets],
            "guards": [numbers(comparison) for comparison in guards],
            "loses": choice.loses(point),
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "models": list(models),
        "metric": choice.metric,
        "targets": [result.task for result in choice.first.targets],
        "guards": [result.task for result in choice.first.guards],
        "chosen": list(choice.chosen.weights),
        "share_of_gain": choice.share_kept,
        "points": [mixture(point) for point in choice.points],
        "facts": dict(facts),
        "command": command,
    }


def draw_mixtures(choice: Choice, *, name: str, label: str) -> Markup:
    """Draw the mean gain of each mixture on the targets over its loss on the guards, or over the others' weight."""
    # Without guard sets nothing can be lost; the weight of the others then shows where the gain begins and ends.
    points = []
    for point in choice.points:
        targets, guards = choice.differences(point)
        across = sum(item.difference for item in guards) / len(guards) if guards else 1 - point.weights[0]
        points.append((across, sum(item.difference for item in targets) / len(targets)))
    chosen = points[choice.points.index(choice.chosen)]
    with chart_axes(LARGE_INCHES) as (figure, axes):
        # Mixtures of two models lie on a path from one to the other; those of more models don't.
        line = "-" if len(choice.first.weights) == 2 else ""
        axes.plot(*zip(*points, strict=True), color=SERIES, marker="o", markersize=4.0, linestyle=line)
        axes.plot(*chosen, color=BETTER, marker="o", markersize=8.0, linestyle="", label="taken")
        axes.plot(*points[0], color=INK, marker="s", markersize=5.0, linestyle="", label="first model")
        axes.axhline(0.0, color=LINE, linewidth=0.8)
        xlabel = (
            f"{choice.metric} on the guard sets, difference" if choice.first.guards else "weight of the other models"
        )
        axes.set(xlabel=xlabel, ylabel="gain on the targets")
        for axis in (axes.xaxis, axes.yaxis):
            set_ticks(axis)
        axes.legend(loc="best")
        return inline_svg(figure, name=name, label=label)
