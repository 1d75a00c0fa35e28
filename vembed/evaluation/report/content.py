"""What the three forms of a report share: computed once, so that they can't disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.report.curves import STEP_CURVES, Curve, dev_curve, step_curve
from vembed.evaluation.report.examples import Group, choose_examples, paired_values, shown_pictures
from vembed.evaluation.report.pictures import Thumbnails
from vembed.evaluation.report.ranks import Ranks, build_ranks
from vembed.evaluation.report.text import count_text, finite, metric_text, plural, signed_text
from vembed.evaluation.significance import Verdict, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.report.data import RunReport
    from vembed.evaluation.significance import Comparison

MAX_EVALUATION_ROWS = 30
"""Most rows of the table of dev metrics; the curve and report.json have the rest."""

TITLES = {"improved": "Improved most", "worse": "Got worst", "lowest": "Lowest scores now"}
SYMBOLS = {"improved": "▲", "within noise": "≈", "worse": "▼"}


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of all systems.

    Attributes:
        name: Name of the metric.
        baseline: Mean before training, or None.
        final: Mean after training, or None.
        bm25: Mean of BM25, or None.
        verdict: The paired comparison, or None where one of the two lacks the metric.
        is_headline: Stands in the first table.
    """

    name: str
    baseline: float | None
    final: float | None
    bm25: float | None
    verdict: Verdict | None
    is_headline: bool


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
        metrics: Rows of the metric table, the verdict's metric first, then the headline, then the rest.
        dev_metric: Metric of the dev curve, or None without evaluations.
        evaluations: Dev metrics by step, the baseline included as step 0 where it is on the same set.
        dev: The dev curve, or None.
        curves: Step curves that have values.
        not_logged: Titles of the step curves that have none.
        changes: How the queries moved.
        groups: Example queries.
        thumbnails: Small copies of the pictures of the examples.
        ranks: Recall at every cut-off, and the scores by judgement.
    """

    report: RunReport
    metrics: tuple[MetricRow, ...]
    dev_metric: str | None
    evaluations: tuple[tuple[int, Mapping[str, float]], ...]
    dev: Curve | None
    curves: tuple[Curve, ...]
    not_logged: tuple[str, ...]
    changes: Changes
    groups: tuple[Group, ...]
    thumbnails: Thumbnails
    ranks: Ranks


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
    return Content(
        report=report,
        metrics=metric_rows(report),
        dev_metric=dev_metric,
        evaluations=evaluations,
        dev=None if dev_metric is None else dev_curve(evaluations, dev_metric),
        curves=tuple(curve for curve in curves.values() if curve is not None),
        not_logged=tuple(title for title, curve in curves.items() if curve is None),
        changes=_changes(report, metric),
        groups=groups,
        thumbnails=Thumbnails.of(shown_pictures(groups), report.image_limits),
        ranks=build_ranks(report.task, report.baseline, report.final, report.bm25),
    )


def metric_rows(report: RunReport) -> tuple[MetricRow, ...]:
    """Return a row for each metric that the baseline or the final result has.

    The interval of each is a paired bootstrap over the queries; the verdict's own row repeats the verdict.
    """
    decisive = report.verdict.comparison.metric
    found = dict.fromkeys([*report.final.metrics, *report.baseline.metrics])
    names = dict.fromkeys([decisive, *(name for name in HEADLINE if name in found), *found])
    headline = {decisive, *HEADLINE} if any(name in found for name in HEADLINE) else set(names)
    return tuple(_metric_row(report, name, is_headline=name in headline) for name in names)


def _metric_row(report: RunReport, name: str, *, is_headline: bool) -> MetricRow:
    """Compare all systems in one metric.

    The means are the comparison's own where there is one: a mean summed in another order may round to another digit.
    """
    if name == report.verdict.comparison.metric:
        compared: Verdict | None = report.verdict
    elif name in report.baseline.per_query and name in report.final.per_query:
        compared = verdict(report.baseline, report.final, name)
    else:
        compared = None
    pair = compared.comparison if compared else None
    return MetricRow(
        name=name,
        baseline=pair.baseline if pair else report.baseline.metrics.get(name),
        final=pair.candidate if pair else report.final.metrics.get(name),
        bm25=report.bm25.metrics.get(name) if report.bm25 else None,
        verdict=compared,
        is_headline=is_headline,
    )


def row_decimals(row: MetricRow) -> int:
    """Return 3 decimals, or as many as keep the bound that decided from reading as zero, at most 6."""
    if row.verdict is None or row.verdict.word == "within noise":
        return 3
    bound = row.verdict.comparison.low if row.verdict.word == "improved" else row.verdict.comparison.high
    return next((decimals for decimals in (3, 4, 5) if round(bound, decimals)), 6)


def interval_text(comparison: Comparison, decimals: int = 3) -> str:
    """Return the interval of a difference, e.g. "+0.084 to +0.106"."""
    if comparison.num_queries < 2:
        return "none with 1 query"
    return f"{signed_text(comparison.low, decimals)} to {signed_text(comparison.high, decimals)}"


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


def notes(report: RunReport) -> tuple[str, ...]:
    """Return what was left out or clipped, each sentence once with the system it is about."""
    found = dict.fromkeys(report.task.notes)
    for result in (report.baseline, report.final, report.bm25):
        for note in result.notes if result else ():
            found.setdefault(note)
    return tuple(found)


def scope_text(report: RunReport) -> str:
    """Return what was evaluated in a line."""
    return (
        f"{report.task.name}: {plural(report.final.num_queries, 'query', 'queries')}, "
        f"{plural(report.final.num_documents, 'document')}"
    )


def evaluation_cell(metrics: Mapping[str, float], name: str) -> str:
    """Return one cell of the table of evaluations."""
    return metric_text(finite(metrics[name])) if name in metrics else metric_text(None)
