"""The systems of a run side by side: every metric with an interval for each, in each direction that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.evaluation.directions import RSUM_METRICS, recall_sum
from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.significance import bootstrap_intervals, verdicts
from vembed.evaluation.text import count_text, metric_text, plural, signed_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.directions import RecallSum
    from vembed.evaluation.report.data import RunReport
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.significance import Comparison, Verdict

SystemKey: TypeAlias = Literal["baseline", "last", "final", "bm25"]


@dataclass(frozen=True, slots=True)
class System:
    """One column of the tables.

    Attributes:
        key: Which system.
        head: What its column is called.
        result: What was measured.
    """

    key: SystemKey
    head: str
    result: EvaluationResult


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of all systems.

    Attributes:
        name: Name of the metric.
        values: Mean of each system that has it.
        intervals: Lower and upper bound of each mean that has values by query.
        verdict: The paired comparison of baseline and final, or None where one of the two lacks the metric.
        is_headline: Stands in the first table.
    """

    name: str
    values: Mapping[SystemKey, float]
    intervals: Mapping[SystemKey, tuple[float, float]]
    verdict: Verdict | None
    is_headline: bool


@dataclass(frozen=True, slots=True)
class Comparisons:
    """All metrics in one direction.

    Attributes:
        direction: What searches what, in words.
        scope: Name and size of the set.
        systems: Columns, in the order in which they came about; BM25 last.
        rows: The verdict's metric first, then the headline, then the rest.
    """

    direction: str
    scope: str
    systems: tuple[System, ...]
    rows: tuple[MetricRow, ...]


@dataclass(frozen=True, slots=True)
class RecallSums:
    """The sum of recalls of both directions, for each system that has it.

    Attributes:
        systems: Columns, in order.
        by_system: The sums.
    """

    systems: tuple[System, ...]
    by_system: Mapping[SystemKey, RecallSum]


def forward_comparisons(report: RunReport) -> Comparisons:
    """Return the metrics of the direction that the verdict is on."""
    systems = _systems(report, report.baseline, report.last, report.final, report.bm25)
    crosses = report.reverse is not None
    return _comparisons(report.task, systems, report.verdict, shows_hits=crosses)


def reverse_comparisons(report: RunReport) -> Comparisons | None:
    """Return the metrics of the other direction, or None where it isn't measured."""
    reverse = report.reverse
    if reverse is None:
        return None
    systems = _systems(report, reverse.baseline, reverse.last, reverse.final, None)
    return _comparisons(reverse.task, systems, reverse.verdict, shows_hits=True)


def recall_sums(forward: Comparisons, reverse: Comparisons | None) -> RecallSums | None:
    """Return the sums of recalls, or None where one direction isn't measured or lacks a cut-off."""
    if reverse is None:
        return None
    others = {system.key: system.result for system in reverse.systems}
    systems = tuple(system for system in forward.systems if system.key in others)
    found = {system.key: recall_sum(system.result, others[system.key]) for system in systems}
    sums = {key: value for key, value in found.items() if value is not None}
    return RecallSums(systems, sums) if len(sums) == len(systems) else None


def _systems(
    report: RunReport,
    baseline: EvaluationResult,
    last: EvaluationResult | None,
    final: EvaluationResult,
    bm25: EvaluationResult | None,
) -> tuple[System, ...]:
    """Return the columns, each called by what it is and the step that it is of."""
    found: list[System] = [System("baseline", "Baseline", baseline)]
    if last is not None:
        found.append(System("last", _at_step("Last", report.last_step), last))
    found.append(System("final", _at_step("Final", report.kept_step), final))
    return (*found, *([System("bm25", "BM25", bm25)] if bm25 is not None else []))


def _at_step(name: str, step: int | None) -> str:
    return name if step is None else f"{name}, step {count_text(step)}"


def _comparisons(task: RetrievalData, systems: Sequence[System], decided: Verdict, *, shows_hits: bool) -> Comparisons:
    """Compare all systems in every metric that baseline or final has; the verdict's own row repeats the verdict."""
    results = {system.key: system.result for system in systems}
    baseline, final = results["baseline"], results["final"]
    decisive = decided.comparison.metric
    found = dict.fromkeys([*final.metrics, *baseline.metrics])
    leading = [*HEADLINE, *(RSUM_METRICS if shows_hits else ())]
    names = list(dict.fromkeys([decisive, *(name for name in leading if name in found), *found]))
    headline = {decisive, *leading} if any(name in found for name in leading) else set(names)
    paired = [name for name in names if name in baseline.per_query and name in final.per_query and name != decisive]
    judged = {decisive: decided, **verdicts(baseline, final, paired)}
    intervals = {key: _intervals(result, names) for key, result in results.items()}
    rows = tuple(
        MetricRow(
            name=name,
            values=_values(results, judged.get(name), name),
            intervals={key: bounds[name] for key, bounds in intervals.items() if name in bounds},
            verdict=judged.get(name),
            is_headline=name in headline,
        )
        for name in names
    )
    scope = f"{task.name}: {plural(final.num_queries, 'query', 'queries')}, {plural(final.num_documents, 'document')}"
    return Comparisons(task.direction, scope, tuple(systems), rows)


def _values(
    results: Mapping[SystemKey, EvaluationResult], compared: Verdict | None, name: str
) -> dict[SystemKey, float]:
    """Return the means of one metric.

    Those of baseline and final are the comparison's own where there is one: a mean summed in another order may round to
    another digit.
    """
    values = {key: result.metrics[name] for key, result in results.items() if name in result.metrics}
    if compared is not None:
        values |= {"baseline": compared.comparison.baseline, "final": compared.comparison.candidate}
    return values


def _intervals(result: EvaluationResult, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the interval of each metric that a system has by query, for more than one query."""
    known = [name for name in names if len(result.per_query.get(name, ())) > 1]
    return bootstrap_intervals(result, known)


def row_decimals(row: MetricRow) -> int:
    """Return 3 decimals, or as many as keep the bound that decided from reading as zero, at most 6."""
    if row.verdict is None or row.verdict.word == "within noise":
        return 3
    bound = row.verdict.comparison.low if row.verdict.word == "improved" else row.verdict.comparison.high
    return next((decimals for decimals in (3, 4, 5) if round(bound, decimals)), 6)


def difference_text(comparison: Comparison, decimals: int = 3) -> str:
    """Return the interval of a difference, e.g. "+0.084 to +0.106"."""
    if comparison.num_queries < 2:
        return "none with 1 query"
    return f"{signed_text(comparison.low, decimals)} to {signed_text(comparison.high, decimals)}"


def bounds_text(bounds: tuple[float, float] | None, decimals: int = 3) -> str:
    """Return the interval of a mean, e.g. "0.763 to 0.797", or nothing where there is none."""
    if bounds is None:
        return ""
    return " to ".join(metric_text(bound, decimals) for bound in bounds)


def share_text(report: RunReport) -> str:
    """Return the confidence of the verdict, e.g. "95%"."""
    return f"{100 * report.verdict.comparison.confidence:g}%"


def systems_note(report: RunReport) -> str:
    """Say which checkpoint is which."""
    if report.kept_step is None:
        return ""
    kept = f"step {count_text(report.kept_step)}"
    if report.last is not None and report.last_step is not None:
        last = f"the model after step {count_text(report.last_step)}, with which training ended"
        return f"Final is the checkpoint of {kept}, the best on the dev set, which model/ holds. Last is {last}."
    if best_dev_step(report) == report.kept_step:
        return f"Final is the model of {kept}, the last and also the best on the dev set; model/ holds it."
    return f"Final is the model of {kept}, the last; model/ holds it."


def best_dev_step(report: RunReport) -> int | None:
    """Return the trained step with the highest dev metric, the earliest of equal ones; None where none has it."""
    metric = report.verdict.comparison.metric
    values = [(metrics[metric], -step) for step, metrics in report.evaluations if step > 0 and metric in metrics]
    return -max(values)[1] if values else None
