"""What the three forms of a report share: computed once, so that they can't disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.report.comparison import forward_comparisons, recall_sums, reverse_comparisons
from vembed.evaluation.report.curves import OPTIONAL_CURVES, STEP_CURVES, Curve, dev_curve, step_curve
from vembed.evaluation.report.examples import Group, choose_examples, paired_values, shown_pictures
from vembed.evaluation.report.pictures import Thumbnails
from vembed.evaluation.report.ranks import Ranks, build_ranks
from vembed.evaluation.report.time_split import TimeSplit, split_time
from vembed.evaluation.text import count_text, finite, metric_text, one_line, plural, signed_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.report.comparison import Comparisons, RecallSums
    from vembed.evaluation.report.data import RunReport

MAX_EVALUATION_ROWS = 30
"""Most rows of the table of dev metrics; the curve and report.json have the rest."""

TITLES = {"improved": "Improved most", "worse": "Got worst", "lowest": "Lowest scores now"}
SYMBOLS = {"improved": "▲", "within noise": "≈", "worse": "▼"}


@dataclass(frozen=True, slots=True)
class Changes:
    """How the queries moved in the verdict's metric.

    Attributes:
        gains: Final minus baseline of each compared query.
        num_improved: Queries above zero.
        num_unchanged: Queries at zero.
        num_worse: Queries below zero.
        summary: The same in a sentence.
    """

    gains: tuple[float, ...]
    num_improved: int
    num_unchanged: int
    num_worse: int
    summary: str


@dataclass(frozen=True, slots=True)
class Content:
    """A report with everything that is derived from it.

    Attributes:
        report: What the trainer gave.
        metrics: All metrics of the direction that the verdict is on.
        reverse: The same of the other direction, or None where it isn't measured.
        sums: Recalls of both directions in one number, or None.
        dev_metric: Metric of the dev curve, or None without evaluations.
        evaluations: Dev metrics by step, the baseline included as step 0 where it is on the same set.
        dev: The dev curve, or None.
        marked_step: Step of the dev curve that is marked: the kept checkpoint's, or where that isn't known the highest.
        curves: Step curves that have values; of the optional ones those that vary.
        not_logged: Titles of the other step curves that have none.
        changes: How the queries moved.
        groups: Example queries.
        thumbnails: Small copies of the pictures of the examples.
        ranks: Recall at every cut-off, and the scores by judgement.
        reverse_ranks: The same of the other direction, or None.
        time: Where the time of the steps went, or None where it wasn't logged.
    """

    report: RunReport
    metrics: Comparisons
    reverse: Comparisons | None
    sums: RecallSums | None
    dev_metric: str | None
    evaluations: tuple[tuple[int, Mapping[str, float]], ...]
    dev: Curve | None
    marked_step: int | None
    curves: tuple[Curve, ...]
    not_logged: tuple[str, ...]
    changes: Changes
    groups: tuple[Group, ...]
    thumbnails: Thumbnails
    ranks: Ranks
    reverse_ranks: Ranks | None
    time: TimeSplit | None


def build_content(report: RunReport) -> Content:
    """Compute what all forms of the report show.

    Raises:
        ValueError: Baseline and final are over different queries.
    """
    metric = report.verdict.comparison.metric
    evaluations = _evaluations(report)
    dev_metric = _dev_metric(report.evaluations, metric)
    groups = choose_examples(report.task, report.baseline, report.final, metric)
    curves = {spec.title: step_curve(report.steps, spec) for spec in STEP_CURVES}
    optional = [step_curve(report.steps, spec) for spec in OPTIONAL_CURVES]
    dev = None if dev_metric is None else dev_curve(evaluations, dev_metric)
    metrics, reverse = forward_comparisons(report), reverse_comparisons(report)
    turned = report.reverse
    return Content(
        report=report,
        metrics=metrics,
        reverse=reverse,
        sums=recall_sums(metrics, reverse),
        dev_metric=dev_metric,
        evaluations=evaluations,
        dev=dev,
        marked_step=_marked_step(report, dev),
        curves=(
            *(curve for curve in curves.values() if curve is not None),
            *(curve for curve in optional if curve is not None and curve.varies),
        ),
        not_logged=tuple(title for title, curve in curves.items() if curve is None),
        changes=_changes(report, metric),
        groups=groups,
        thumbnails=Thumbnails.of(shown_pictures(groups), report.image_limits),
        ranks=build_ranks(report.task, report.baseline, report.final, report.bm25),
        reverse_ranks=None if turned is None else build_ranks(turned.task, turned.baseline, turned.final, None),
        time=split_time(report.steps),
    )


def _evaluations(report: RunReport) -> tuple[tuple[int, Mapping[str, float]], ...]:
    """Return the dev evaluations in step order, with the baseline as step 0 where it is on the same set."""
    rows = sorted(report.evaluations, key=lambda row: row[0])
    if rows and rows[0][0] > 0 and not report.dev_task:
        rows.insert(0, (0, report.baseline.metrics))
    return tuple(rows)


def _dev_metric(evaluations: Sequence[tuple[int, Mapping[str, float]]], preferred: str) -> str | None:
    """Return the verdict's metric where the evaluations have it, else the first that the last evaluation has."""
    if any(preferred in metrics for _, metrics in evaluations):
        return preferred
    return next((name for _, metrics in reversed(evaluations) for name in metrics), None)


def _marked_step(report: RunReport, dev: Curve | None) -> int | None:
    """Return the step of the dev curve to mark."""
    if dev is None:
        return None
    if report.kept_step is None:
        return int(dev.steps_N[dev.values_N.argmax()])
    return report.kept_step if report.kept_step in dev.steps_N else None


def _changes(report: RunReport, metric: str) -> Changes:
    """Count the queries that moved up, down or not at all."""
    pairs = paired_values(report.baseline, report.final, metric)
    gains = tuple(after - before for before, after in pairs.values())
    improved, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    unchanged = len(gains) - improved - worse
    summary = (
        f"Of {plural(len(gains), 'query', 'queries')}, {count_text(improved)} improved, {count_text(unchanged)} "
        f"stayed the same and {count_text(worse)} got worse in {metric}."
    )
    left_out = len(report.final.per_query[metric]) - len(gains)
    if left_out:
        summary += f" {plural(left_out, 'query has', 'queries have')} no finite value in both results, left out."
    if gains:
        summary += f" Largest gain {signed_text(max(0.0, *gains))}, largest loss {signed_text(min(0.0, *gains))}."
    return Changes(gains, improved, unchanged, worse, summary)


def evaluation_rows(content: Content) -> tuple[tuple[int, Mapping[str, float]], ...]:
    """Return at most `MAX_EVALUATION_ROWS` evaluations, evenly spread, first and last included."""
    rows = content.evaluations
    if len(rows) <= MAX_EVALUATION_ROWS:
        return rows
    last = MAX_EVALUATION_ROWS - 1
    return tuple(rows[round(index * (len(rows) - 1) / last)] for index in range(MAX_EVALUATION_ROWS))


def dev_metric_names(content: Content) -> tuple[str, ...]:
    """Return the metrics that the table of evaluations shows: the dev metric, then the headline, at most six."""
    found = dict.fromkeys(name for _, metrics in content.report.evaluations for name in metrics)
    names = dict.fromkeys([content.dev_metric or "", *(name for name in HEADLINE if name in found), *found])
    return tuple(name for name in names if name in found)[:6]


def dev_note(content: Content) -> str:
    """Say which set the dev metrics are on, and where step 0 comes from."""
    report = content.report
    where = report.dev_task or report.task.name
    start = (
        "step 0 is the baseline" if content.evaluations and content.evaluations[0][0] == 0 else "no step 0 was given"
    )
    return f"On {where}; {start}."


def mark_note(content: Content) -> str:
    """Say which point of the dev curve is marked."""
    if content.marked_step is None or content.dev is None or len(content.dev.values_N) < 2:
        return ""
    if content.report.kept_step is None:
        return f"The large dot is the highest, step {count_text(content.marked_step)}."
    return f"The large dot is step {count_text(content.marked_step)}, the checkpoint that was kept."


def reverse_lines(content: Content) -> tuple[str, ...]:
    """Return what the verdict's block says of the other direction, or nothing where it isn't measured."""
    reverse = content.report.reverse
    if reverse is None:
        return ()
    lines = [f"Reversed, {reverse.task.direction}: {one_line(reverse.verdict.sentence)}"]
    if content.sums is not None:
        before, after = (content.sums.by_system[key].value for key in ("baseline", "final"))
        lines.append(f"Both directions: rsum {metric_text(before, 1)} → {metric_text(after, 1)} of 600")
    return tuple(lines)


def notes(report: RunReport) -> tuple[str, ...]:
    """Return what was left out or clipped, each sentence once with the system it is about."""
    found, reverse = dict.fromkeys(report.task.notes), report.reverse
    for result in (report.baseline, report.final, report.bm25):
        for note in result.notes if result else ():
            found.setdefault(note)
    for result in (reverse.baseline, reverse.final) if reverse else ():
        found |= dict.fromkeys(f"Reversed: {note}" for note in result.notes)
    return tuple(found)


def scope_text(report: RunReport) -> str:
    """Return what was evaluated in a line."""
    return (
        f"{report.task.name}: {plural(report.final.num_queries, 'query', 'queries')}, "
        f"{plural(report.final.num_documents, 'document')}"
    )


def tells_speed(content: Content) -> bool:
    """Return whether anything is known of how the training ran."""
    report = content.report
    return content.time is not None or report.findings is not None or bool(report.performance)


def evaluation_cell(metrics: Mapping[str, float], name: str) -> str:
    """Return one cell of the table of evaluations."""
    return metric_text(finite(metrics[name])) if name in metrics else metric_text(None)
