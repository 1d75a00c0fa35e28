"""The systems of a run side by side: every metric with an interval for each, in each direction that is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.evaluation.directions import RSUM_METRICS, recall_sum
from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.pages import Cell, Table
from vembed.evaluation.report.charts import draw_interval
from vembed.evaluation.sets import worse_than_untrained
from vembed.evaluation.significance import mean_interval, verdict
from vembed.evaluation.text import count_text, metric_text, one_line, signed_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.directions import RecallSum
    from vembed.evaluation.report.data import RunReport
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.significance import Comparison, Verdict

SystemKey: TypeAlias = Literal["baseline", "last", "final", "bm25"]

SYMBOLS = {"improved": "▲", "within noise": "≈", "worse": "▼"}


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of all systems."""

    name: str
    values: Mapping[SystemKey, float]  # mean of each system that has it
    intervals: Mapping[SystemKey, tuple[float, float]]  # of each mean that has values by query
    verdict: Verdict | None  # baseline against final, paired; None where one of the two lacks the metric
    is_headline: bool  # stands in the first table


@dataclass(frozen=True, slots=True)
class Comparisons:
    """All metrics in one direction."""

    direction: str  # what searches what, in words
    scope: str  # name and size of the set
    results: Mapping[SystemKey, EvaluationResult]  # in the order in which they came about; BM25 last
    heads: Mapping[SystemKey, str]  # what the columns are called
    rows: tuple[MetricRow, ...]  # the verdict's metric first, then the headline, then the rest

    @property
    def headline(self) -> Table:
        """Table of the headline metrics."""
        return self._table([row for row in self.rows if row.is_headline])

    @property
    def further(self) -> Table:
        """Table of all other metrics."""
        return self._table([row for row in self.rows if not row.is_headline])

    @property
    def scale(self) -> str:
        """What the little drawings of the headline table are drawn against; empty where none has an interval."""
        reach = bars_reach([row for row in self.rows if row.is_headline])
        ends = f"{signed_text(-reach)} to {signed_text(reach)}"
        return f" Dots: the difference, on a scale from {ends}; lines: its interval." if reach > 0 else ""

    def _table(self, rows: Sequence[MetricRow]) -> Table:
        models = [key for key in self.results if key != "bm25"]
        others = [key for key in self.results if key == "bm25"]
        heads = ["Metric", *(self.heads[key] for key in models), "Difference", "Reading"]
        reach = bars_reach(rows)
        body: list[list[str | Cell]] = [
            [
                one_line(row.name),
                *(mean_cell(row, key) for key in models),
                difference_cell(row),
                reading_cell(row, reach=reach),
                *(mean_cell(row, key) for key in others),
            ]
            for row in rows
        ]
        decisive = self.rows[0].name
        return Table(
            [*heads, *(self.heads[key] for key in others)],
            body,
            words=frozenset({0, heads.index("Reading")}),
            tones={number: "decisive" for number, row in enumerate(rows) if row.name == decisive},
        )


def mean_cell(row: MetricRow, key: SystemKey) -> Cell:
    """Return the mean of a system with its interval."""
    decimals = verdict_decimals(row.verdict)
    return Cell(metric_text(row.values.get(key), decimals), bounds_text(row.intervals.get(key), decimals))


def difference_cell(row: MetricRow) -> Cell:
    """Return the difference of baseline and final with its interval."""
    if row.verdict is None:
        return Cell(metric_text(None))
    comparison, decimals = row.verdict.comparison, verdict_decimals(row.verdict)
    return Cell(signed_text(comparison.difference, decimals), difference_text(comparison, decimals))


def reading_cell(row: MetricRow, *, reach: float, called: str | None = None) -> Cell:
    """Return what the interval says, drawn and in a word.

    Args:
        called: Another word for the verdict.
    """
    drawing = draw_interval(row, reach=reach)
    if row.verdict is None:
        return Cell("not compared", drawing=drawing, tone="muted")
    word = row.verdict.word
    return Cell(f"{SYMBOLS[word]} {called or word}", drawing=drawing, tone=word.replace(" ", "-"))


def bars_reach(rows: Sequence[MetricRow]) -> float:
    """Return the largest bound of the table's intervals: what its little bars are drawn against."""
    compared = [row.verdict.comparison for row in rows if row.verdict]
    bounds = [abs(bound) for comparison in compared for bound in (comparison.low, comparison.high)]
    return max((bound for bound in bounds if math.isfinite(bound)), default=0.0)


def forward_comparisons(report: RunReport) -> Comparisons:
    """Return the metrics of the direction that the verdict is on."""
    results = _measured(baseline=report.baseline, last=report.last, final=report.final, bm25=report.bm25)
    return _comparisons(report, report.task, results, report.verdict)


def reverse_comparisons(report: RunReport) -> Comparisons | None:
    """Return the metrics of the other direction, or None where it isn't measured."""
    reverse = report.reverse
    if reverse is None:
        return None
    results = _measured(baseline=reverse.baseline, last=reverse.last, final=reverse.final, bm25=None)
    return _comparisons(report, reverse.task, results, reverse.verdict)


def recall_sums(forward: Comparisons, reverse: Comparisons | None) -> dict[SystemKey, RecallSum]:
    """Return the sum of both directions' recalls of each system; empty where one isn't measured or lacks a cut-off."""
    if reverse is None:
        return {}
    shared = [key for key in forward.results if key in reverse.results]
    found = {key: recall_sum(forward.results[key], reverse.results[key]) for key in shared}
    sums = {key: value for key, value in found.items() if value is not None}
    return sums if len(sums) == len(shared) else {}


def sum_table(sums: Mapping[SystemKey, RecallSum], heads: Mapping[SystemKey, str], *, head: str) -> Table:
    """Return the sums of recalls as a table of one row, whose first column has the given head."""
    cells = [Cell(metric_text(found.value, 1), bounds_text((found.low, found.high), 1)) for found in sums.values()]
    return Table([head, *(heads[key] for key in sums)], [["rsum", *cells]])


def _measured(**results: EvaluationResult | None) -> dict[SystemKey, EvaluationResult]:
    """Return the systems that were measured, by key."""
    keys: tuple[SystemKey, ...] = ("baseline", "last", "final", "bm25")
    return {key: result for key in keys if (result := results[key]) is not None}


def _at_step(name: str, step: int | None) -> str:
    return name if step is None else f"{name}, step {count_text(step)}"


def _comparisons(
    report: RunReport, task: RetrievalData, results: Mapping[SystemKey, EvaluationResult], decided: Verdict
) -> Comparisons:
    """Compare all systems in every metric that baseline or final has; the verdict's own row repeats the verdict."""
    baseline, final = results["baseline"], results["final"]
    decisive = decided.comparison.metric
    found = dict.fromkeys([*final.metrics, *baseline.metrics])
    leading = [*HEADLINE, *(RSUM_METRICS if report.reverse is not None else ())]
    names = list(dict.fromkeys([decisive, *(name for name in leading if name in found), *found]))
    headline = {decisive, *leading} if any(name in found for name in leading) else set(names)
    paired = [name for name in names if name in baseline.per_query and name in final.per_query and name != decisive]
    judged = {decisive: decided, **{name: verdict(baseline, final, name) for name in paired}}
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
    heads: dict[SystemKey, str] = {
        "baseline": "Baseline",
        "last": _at_step("Last", report.last_step),
        "final": _at_step("Final", report.kept_step),
        "bm25": "BM25",
    }
    return Comparisons(task.direction, scope, results, heads, rows)


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
    return {name: mean_interval([result], name) for name in known}


def verdict_decimals(found: Verdict | None) -> int:
    """Return 3 decimals, or as many as keep the bound that decided from reading as zero, at most 6."""
    if found is None or found.word == "within noise":
        return 3
    bound = found.comparison.low if found.word == "improved" else found.comparison.high
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


def systems_note(report: RunReport) -> str:
    """Say which checkpoint is which."""
    if report.kept_step is None:
        return ""
    kept = f"step {count_text(report.kept_step)}"
    is_lost = worse_than_untrained(report.evaluations, report.verdict.comparison.metric, report.kept_step)
    best = "the best trained one on the dev set, where the untrained model did better" if is_lost else ""
    if report.last is not None and report.last_step is not None:
        last = f"the model after step {count_text(report.last_step)}, with which training ended"
        return (
            f"Final is the checkpoint of {kept}, {best or 'the best on the dev set'}; model/ holds it. Last is {last}."
        )
    if is_lost or best_dev_step(report) == report.kept_step:
        return f"Final is the model of {kept}, the last and also {best or 'the best on the dev set'}; model/ holds it."
    return f"Final is the model of {kept}, the last; model/ holds it."


def best_dev_step(report: RunReport) -> int | None:
    """Return the trained step with the highest dev metric, the earliest of equal ones; None where none has it."""
    metric = report.verdict.comparison.metric
    values = [(metrics[metric], -step) for step, metrics in report.evaluations if step > 0 and metric in metrics]
    return -max(values)[1] if values else None
