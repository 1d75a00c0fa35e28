"""Choose a mixture of models on sets: the one that wins most where it is to, among those that lose nothing elsewhere.

1. Every mixture of a grid is evaluated on the target sets and the guard sets; results that are there are read.
2. The first model is the one whose quality on the guard sets is kept: a mixture that is worse there, by a paired 95%
   interval, is out.
3. Of the others the one with the highest mean metric over the target sets is taken.

The sets that choose must not be those that are reported later: the best of many is flattered by chance. The page of the
choice (`merge_page`) has the gain and loss of each mixture beside the first model, and the one that was taken.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.evaluation.benchmark.names import model_labels
from vembed.evaluation.benchmark.stored import read_stored, task_key, write_stored
from vembed.evaluation.evaluate import EvaluationOptions, evaluate
from vembed.evaluation.judge import compare, guard_verdict
from vembed.pages.charts import BETTER, INK, LARGE_INCHES, LINE, SERIES, chart_axes, inline_svg, set_ticks
from vembed.pages.page import Cell, Figure, Note, Page, Section, SideBySide, Table, command_blocks, pairs_table
from vembed.pages.text import metric_text, signed_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from markupsafe import Markup

    from vembed.data.judged import RetrievalData
    from vembed.evaluation.judge import Comparison
    from vembed.evaluation.results import EvaluationResult
    from vembed.plugins.merge.command import MergeOptions
    from vembed.plugins.merge.weights import Mixture
    from vembed.vectors.encode import ItemEncoder

MOST_POINTS = 200
"""Mixtures that a grid may have: each one encodes every set."""

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it

LIMITS = (
    "These sets chose the mixture, so that its numbers here flatter it. Evaluate the merged model on sets that had no "
    "part in the choice (vembed evaluate) before you rely on it."
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """A mixture and its results."""

    weights: tuple[float, ...]  # one for each model
    targets: tuple[EvaluationResult, ...]
    guards: tuple[EvaluationResult, ...]

    def mean(self, metric: str) -> float:
        """Return the mean metric over the target sets."""
        return fmean(result.metrics[metric] for result in self.targets)


@dataclass(frozen=True)
class Choice:
    """All mixtures, and the one to take."""

    metric: str
    points: tuple[Point, ...]  # the first model alone comes first

    # Found once: each question of a loss is a paired test on every guard set.
    @cached_property
    def chosen(self) -> Point:
        """The best on the target sets of those that lose on no guard set; the first model, where it is as good."""
        kept = [point for point in self.points if not self.loses(point)]
        return max(kept, key=lambda point: point.mean(self.metric))  # the first of equals

    @property
    def first(self) -> Point:
        """The first model alone."""
        return self.points[0]

    @property
    def most(self) -> Point:
        """The mixture that wins most on the target sets, whatever it loses."""
        return max(self.points, key=lambda point: point.mean(self.metric))

    @property
    def share_kept(self) -> float | None:
        """Gain of the chosen one over the first model, as a share of the most that any gains; None where none gains."""
        gain = self.most.mean(self.metric) - self.first.mean(self.metric)
        return (self.chosen.mean(self.metric) - self.first.mean(self.metric)) / gain if gain > 0 else None

    def loses(self, point: Point) -> bool:
        """Return True for a mixture that is worse than the first model on a guard set."""
        pairs = zip(self.first.guards, point.guards, strict=True)
        return any(guard_verdict(before, after, self.metric).word == "worse" for before, after in pairs)

    def differences(self, point: Point) -> tuple[list[Comparison], list[Comparison]]:
        """Return a mixture beside the first model, on each target set and each guard set."""
        sides = ((self.first.targets, point.targets), (self.first.guards, point.guards))
        targets, guards = (
            [compare(before, after, self.metric) for before, after in zip(*side, strict=True)] for side in sides
        )
        return targets, guards


def grid(num_models: int, steps: int) -> list[tuple[float, ...]]:
    """Return every mixture in steps of 1 / steps, the first model alone first.

    Raises:
        ConfigError: They are too many.
    """
    # Stars and bars: a mixture is a row of `steps` stars cut by `num_models - 1` bars, a model's weight its stars.
    length = steps + num_models - 1
    cuts = ((-1, *bars, length) for bars in combinations(range(length), num_models - 1))
    counts = sorted((tuple(end - start - 1 for start, end in pairwise(edges)) for edges in cuts), reverse=True)
    if len(counts) > MOST_POINTS:
        raise ConfigError(
            f"{num_models} models in steps of 1/{steps} are {len(counts)} mixtures, each evaluated on all sets; "
            f"--steps {steps // 2} makes fewer"
        )
    return [tuple(count / steps for count in mixture) for mixture in counts]


def choose(
    options: MergeOptions,
    mixture: Mixture,
    encode: ItemEncoder,
    sets: Sequence[RetrievalData],
    *,
    identities: Sequence[str],
    folder: Path,
    poll: Callable[[], None],
) -> Choice:
    """Evaluate every mixture of a grid on sets, and choose one.

    Args:
        encode: Of the mixture's encoder.
        sets: The target sets, then the guard sets.
        identities: Hash of each model's weights, in the order of the mixture.
        folder: Where results are kept, for a start that continues after a stop.

    Raises:
        ConfigError: The grid has too many mixtures.
    """
    points, system = [], "mixture"
    for weights in grid(len(identities), options.steps):
        results = []
        for task in sets:
            key = {
                **task_key(task, with_texts=True),
                "models": list(identities),
                "weights": list(weights),
                "method": options.method,
                "precision": str(encode.autocast_dtype or "as loaded"),
            }
            path = folder / shown_weights(weights) / task.name.replace("/", "-")
            # A result is taken again only for the same weights, method, precision and content of the set.
            stored, _ = read_stored(path, key, system=system)
            if stored is None:
                mixture.take(weights, options.method)
                result = evaluate(encode, task, EvaluationOptions(system=system, poll=poll))
                write_stored(path, result, None, key)
            else:
                result, _ = stored
            results.append(result)
        num_targets = len(options.targets)
        points.append(Point(weights, tuple(results[:num_targets]), tuple(results[num_targets:])))
        numbers = "  ".join(f"{result.task} {result.metrics[options.metric]:.4f}" for result in results)
        _log.info("%s  %s", shown_weights(weights), numbers)
    return Choice(options.metric, tuple(points))


def shown_weights(weights: Sequence[float]) -> str:
    """Return weights for people and for folders, e.g. 0.3+0.7."""
    return "+".join(f"{weight:.4g}" for weight in weights)


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
