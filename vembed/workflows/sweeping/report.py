"""The trials of a sweep in their order, as the table of a terminal and as a page.

A difference to the best trial is paired over the dev set's queries. All trials are compared with the same best one, so
the intervals are widened until all of them hold together at 95% (Bonferroni: each at 1 - 5% / (trials - 1)). They speak
of other queries, not of other training seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vembed.errors import DataError
from vembed.evaluation.judge import CONFIDENCE, verdict
from vembed.pages.charts import BETTER, LARGE_INCHES, LINE, SERIES, chart_axes, inline_svg
from vembed.pages.page import Cell, Figure, Note, Page, Section, SideBySide, Table, command_blocks, pairs_table
from vembed.pages.terminal import table_lines
from vembed.pages.text import capitalised, metric_text, signed_text
from vembed.text import plural
from vembed.workflows.sweeping.space import LOG_RATIO
from vembed.workflows.sweeping.trials import best_of, dev_metric, dev_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup
    from matplotlib.axes import Axes

    from vembed.evaluation.judge import Comparison
    from vembed.workflows.sweeping.trials import Outcome

Word: TypeAlias = Literal["best", "within noise", "worse", "shorter", "failed"]

IN_FULL: tuple[Word, ...] = ("best", "within noise", "worse")
"""Trials with all their steps and a result: what is compared with the best."""

MOST_MARKED = 6
"""Values of one key that all stand on its axis; of more only the lowest and the highest."""

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it

LIMITS = (
    "Differences are paired over the queries of the dev set, and their intervals hold together at 95%: each is widened "
    "for how many trials are compared with the best one. They speak of other queries, not of other training seeds; "
    "train the chosen values with the key seeds to see how much those change."
)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A trial in its place among the others."""

    outcome: Outcome
    word: Word
    to_best: Comparison | None = None  # the trial against the best one, on the same dev queries


def rank(outcomes: Sequence[Outcome], metric: str) -> list[Ranked]:
    """Return the trials, the best first: those of fewer steps behind, and those that failed last.

    Raises:
        DataError: Two trials were evaluated on different queries.
    """
    metric = dev_metric(outcomes, metric)
    finished = [outcome for outcome in outcomes if outcome.dev is not None]
    # A round of a halving sets max_steps: its result is that of a shorter training, no matter how good.
    short = [outcome for outcome in finished if "max_steps" in outcome.trial.overrides]
    full = [outcome for outcome in finished if "max_steps" not in outcome.trial.overrides]
    best = best_of(full, metric)
    ranked = []
    for outcome in sorted(full, key=lambda outcome: (-dev_value(outcome, metric), outcome is not best)):
        if outcome is best:
            ranked.append(Ranked(outcome, "best"))
            continue
        assert best is not None
        assert best.dev is not None
        assert outcome.dev is not None
        confidence = 1 - (1 - CONFIDENCE) / (len(full) - 1)
        try:
            against_best = verdict(best.dev, outcome.dev, metric, confidence=confidence)
        except ValueError as error:
            raise DataError(f"{outcome.folder} can't be compared with {best.folder}: {error}") from error
        word: Word = "worse" if against_best.word == "worse" else "within noise"
        ranked.append(Ranked(outcome, word, against_best.comparison))
    short.sort(key=lambda outcome: (-outcome.trial.steps, -dev_value(outcome, metric)))
    ranked += [Ranked(outcome, "shorter") for outcome in short]
    return [*ranked, *(Ranked(outcome, "failed") for outcome in outcomes if outcome.dev is None)]


def chosen_lines(ranked: Sequence[Ranked], metric: str, *, has_test: bool) -> list[str]:
    """Say which trial was chosen by what, and what its verdict is worth."""
    finished = [row for row in ranked if row.word in IN_FULL]
    if not finished:
        return ["no trial finished: nothing is chosen"]
    best = finished[0].outcome
    assert best.dev is not None
    equals = sum(row.word == "within noise" for row in finished)
    lines = [f"chosen by {metric} on the dev set {best.dev.task} alone: {best.trial.values}"]
    if equals:
        lines.append(f"noise explains its difference to {equals} of the {len(finished) - 1} others")
    lines.append(f"its verdict: {best.sentence}")
    lines += [f"caveat: {caveat}" for caveat in best.caveats]
    if has_test:
        lines.append(
            f"one of {len(ranked)} was chosen on the dev set, so its dev value flatters it; the test set had no "
            f"part in the choice"
        )
        if len(finished) > 1:
            lines.append(
                "the comparison shows the best trials on the test set too: it chooses nothing, and to take another "
                "trial for its test result would be a choice on the test set"
            )
    else:
        lines.append(
            f"the verdict is on the dev set that chose one of {len(ranked)}, which flatters it; give test_data_path "
            f"for one that counts"
        )
    lines.append(f"model: {best.folder / 'model'}")
    return lines


def sweep_page(
    ranked: Sequence[Ranked], metric: str, *, has_test: bool, facts: Mapping[str, str], command: str
) -> Page:
    """Return the page of a sweep.

    Args:
        metric: Decides on the dev set.
        has_test: The verdicts are on another set than the choice.
        facts: Configuration, what was asked for, and overrides.
    """
    figure = Figure(
        f"{metric} on the dev set over what was tried",
        partial(draw_trials, ranked, metric),
        "The dev metric of each trial over the values that were tried; the table has the numbers.",
    )
    folders = [(trial.outcome.trial.name, trial.outcome.trial.values) for trial in ranked]
    return Page(
        kind="Sweep",
        title=f"{plural(len(ranked), 'trial')} over {', '.join(tried_keys(ranked))}",
        head=[Note(f"{capitalised(line)}.") for line in chosen_lines(ranked, metric, has_test=has_test)],
        sections=[
            Section("trials", "Trials", [SideBySide([figure]), trials_table(ranked, metric), Note(LIMITS, muted=True)]),
            Section(
                "method",
                "How it was tried",
                [
                    pairs_table("Settings", list(facts.items()), "Method and configuration."),
                    pairs_table(
                        "Folders",
                        folders,
                        "The folder of each trial below trials/, which holds a run with its own report.",
                    ),
                    *command_blocks(command),
                ],
            ),
        ],
        document=sweep_document(ranked, metric, facts, command),
    )


def tried_keys(ranked: Sequence[Ranked]) -> list[str]:
    """Return the keys that were tried, in the order in which they were named."""
    return list(dict.fromkeys(key for trial in ranked for key in trial.outcome.trial.choice))


def trials_table(ranked: Sequence[Ranked], metric: str) -> Table:
    """Return the trials with their values, the best first, and the difference of each to the best."""
    keys = tried_keys(ranked)
    rows: list[list[str | Cell]] = []
    for number, trial in enumerate(ranked, start=1):
        outcome, comparison = trial.outcome, trial.to_best
        start = [str(number), *(outcome.trial.shown.get(key, "") for key in keys)]
        # A failed trial keeps its row, so that nobody looks for it; its reason stands in full below the table.
        if outcome.dev is None:
            rows.append([*start, "", "", f"failed: {outcome.error}", ""])
            continue
        difference: str | Cell = ""
        if comparison is not None:
            bounds = f"{signed_text(comparison.low, 4)} to {signed_text(comparison.high, 4)}"
            difference = Cell(signed_text(comparison.difference, 4), bounds)
        word = f"after {outcome.trial.steps} steps" if trial.word == "shorter" else trial.word
        rows.append([*start, metric_text(dev_value(outcome, metric), 4), difference, word, str(outcome.kept_step)])
    return Table(
        ["#", *keys, f"{metric} (dev)", "Difference (interval)", "Beside the best", "Step"],
        rows,
        text_columns=frozenset({*range(len(keys) + 1), len(keys) + 3}),
        tones={row: "chosen" for row, trial in enumerate(ranked) if trial.word == "best"},
        title="Trials",
        caption=(
            "Each trial, the best first: dev metric, difference to the best with its interval, and the step whose "
            "model it kept."
        ),
    )


def terminal_lines(ranked: Sequence[Ranked], metric: str) -> list[str]:
    """Return the table for a terminal, and in full why trials failed."""
    failures = [
        f"failed: {trial.outcome.trial.values}: {trial.outcome.error} ({trial.outcome.next_try})"
        for trial in ranked
        if trial.word == "failed"
    ]
    return [*table_lines(trials_table(ranked, metric)), *failures]


def sweep_document(ranked: Sequence[Ranked], metric: str, facts: Mapping[str, str], command: str) -> dict[str, Any]:
    """Return the sweep for programs, every number unrounded."""

    def numbers(trial: Ranked) -> dict[str, Any]:
        outcome, comparison = trial.outcome, trial.to_best
        return {
            "trial": outcome.trial.name,
            "values": outcome.trial.shown,
            "word": trial.word,
            "steps": outcome.trial.steps or None,
            "kept_step": outcome.kept_step if outcome.dev is not None else None,
            "dev": dev_value(outcome, metric) if outcome.dev is not None else None,
            "difference": None if comparison is None else comparison.difference,
            "low": None if comparison is None else comparison.low,
            "high": None if comparison is None else comparison.high,
            "verdict": outcome.sentence or None,
            "error": outcome.error or None,
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "metric": metric,
        "trials": [numbers(trial) for trial in ranked],
        "chosen": next((trial.outcome.trial.name for trial in ranked if trial.word == "best"), None),
        "facts": dict(facts),
        "command": command,
    }


def draw_trials(ranked: Sequence[Ranked], metric: str, *, name: str, label: str) -> Markup:
    """Draw the dev metric over the one key that was tried, or a line for each trial through an axis for each key."""
    # All steps or none: a shorter training lies lower for its steps, not for its values.
    shown = [trial for trial in ranked if trial.word in IN_FULL] or [row for row in ranked if row.word == "shorter"]
    keys, values = tried_keys(ranked), [dev_value(trial.outcome, metric) for trial in shown]
    texts = {key: [trial.outcome.trial.shown[key] for trial in shown] for key in keys}
    with chart_axes(LARGE_INCHES) as (figure, axes):
        if len(keys) == 1:
            _draw_points(axes, texts[keys[0]], values)
            axes.set(xlabel=keys[0], ylabel=f"{metric} (dev)")
        else:
            _draw_lines(axes, texts, values)
            axes.set_xticks(range(len(keys) + 1), [*map(_short, keys), f"{metric} (dev)"])
        return inline_svg(figure, name=name, label=label)


def _draw_points(axes: Axes, texts: Sequence[str], values: Sequence[float]) -> None:
    """Draw a point for each trial, the best first among them; values that are no numbers stand in their order."""
    from matplotlib.ticker import NullLocator

    numbers = _numbers(texts)
    names = list(dict.fromkeys(texts))
    # Words have no distance: they stand one apart, without a line between them.
    across = numbers or [float(names.index(text)) for text in texts]
    points = sorted(zip(across, values, strict=True))
    axes.plot(*zip(*points, strict=True), color=SERIES, marker="o", markersize=4.5, linestyle="-" if numbers else "")
    axes.plot(across[0], values[0], color=BETTER, marker="o", markersize=8.0, linestyle="", label="chosen")
    if numbers is not None and min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_RATIO:
        axes.set_xscale("log")
    if len(names) <= MOST_MARKED:
        axes.set_xticks([across[texts.index(name)] for name in names], [_short(name) for name in names], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(loc="best")


def _draw_lines(axes: Axes, texts: Mapping[str, Sequence[str]], values: Sequence[float]) -> None:
    """Draw parallel coordinates: each axis from its lowest value to its highest, the last one is the metric."""
    # Every axis has its own scale from 0 to 1, so that keys of any size stand beside each other.
    columns = [_heights(axes, position, texts[key]) for position, key in enumerate(texts)]
    low, high = min(values), max(values)
    columns.append([(value - low) / (high - low) if high > low else 0.5 for value in values])
    for end, value in ((0.0, low), (1.0, high)) if high > low else ((0.5, low),):
        _write_value(axes, f"{value:.3f}", len(texts), end)
    across = range(len(texts) + 1)
    # The best last, so that no other line covers it.
    for rank, line in reversed(list(enumerate(zip(*columns, strict=True)))):
        colour, width = (BETTER, 2.6) if rank == 0 else (SERIES, 1.1)
        axes.plot(across, line, color=colour, linewidth=width, alpha=1.0 if rank == 0 else 0.55)
    for position in across:
        axes.axvline(position, color=LINE, linewidth=0.8)
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(texts) + 0.3)
    axes.set_ylim(-0.15, 1.15)


def _heights(axes: Axes, position: int, texts: Sequence[str]) -> list[float]:
    """Write the values of one key along its axis, and return the height of each trial on it."""
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
    # Names of many values would lie on each other.
    for name in heights if len(heights) <= MOST_MARKED else (lowest, highest):
        _write_value(axes, name, position, heights[name])
    return [heights[text] for text in texts]


def _write_value(axes: Axes, text: str, position: int, height: float) -> None:
    """Write a value beside its axis, where few lines pass: above its height, or below the lowest one."""
    is_above = height > 0.0
    axes.annotate(
        _short(text),
        (position, height),
        xytext=(0, 4 if is_above else -4),
        textcoords="offset points",
        ha="center",
        va="bottom" if is_above else "top",
    )


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """Return values as numbers; None where one isn't a finite one."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _short(text: str) -> str:
    return text if len(text) <= 18 else f"{text[:17]}…"
