"""Runs tested against the baseline on the sets that they share, query by query.

1. Sets are the same when their content has one hash; where a run recorded none, when queries and documents agree.
2. The verdict of a run is on the mean over the shared test sets, each counting the same; guard sets stand beside it.
3. p-values come from Student's paired test and are corrected for their number (Holm): those of the verdicts together,
   and in the table of each metric those of all runs on all sets together. Intervals are 95% each, not corrected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.report.comparison import MetricRow, difference_text, verdict_decimals
from vembed.evaluation.significance import compare, holm, judged, mean_interval, mean_verdict, paired_p_value
from vembed.pages.text import one_line, p_text, signed_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.comparison.runs import Run, SetResult
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.significance import Verdict

LEVEL = 0.05
"""Corrected p-value below which one run is called better than another."""

PairWord: TypeAlias = Literal["better", "worse", "no difference", "not compared"]

UNTRAINED = "untrained model"


@dataclass(frozen=True, slots=True)
class Line:
    """A run, or the untrained model, on one set in one metric."""

    name: str
    row: MetricRow  # its mean as "final" with an interval; against the baseline where that can be
    p_value: float | None  # None: not tested
    corrected: float | None
    why_not: str = ""  # why it isn't compared with the baseline

    @property
    def word(self) -> PairWord:
        """What the corrected test says."""
        if self.row.verdict is None or self.corrected is None:
            return "not compared"
        return _word(self.row.verdict, self.corrected)


@dataclass(frozen=True, slots=True)
class SetTable:
    """Every run on one set of the baseline."""

    name: str
    metric: str  # what decides here: that of the comparison, or of a set of graded pairs its own
    key: str  # of the baseline's set
    role: str
    content: str  # hash; empty where it wasn't recorded
    num_queries: int
    num_documents: int
    lines: dict[str, list[Line]]  # metric -> the untrained models, the baseline, the other runs
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """A run beside the baseline, in one sentence."""

    run: str
    word: PairWord
    verdict: Verdict | None  # the numbers; None where nothing could be compared
    p_value: float | None
    corrected: float | None
    sentence: str


def set_tables(baseline: Run, others: Sequence[Run], metric: str) -> list[SetTable]:
    """Return a table for each set of the baseline."""
    tables = [_set_table(each, baseline, others, each.final.deciding(metric)) for each in baseline.sets]
    for name in dict.fromkeys(name for table in tables for name in table.lines):
        tested = [
            (lines, place)
            for table in tables
            for lines in [table.lines.get(name, [])]
            for place, line in enumerate(lines)
            if line.p_value is not None
        ]
        corrected = holm([lines[place].p_value or 0.0 for lines, place in tested])
        for (lines, place), value in zip(tested, corrected, strict=True):
            lines[place] = replace(lines[place], corrected=value)
    return tables


def pair_verdicts(baseline: Run, others: Sequence[Run], metric: str, tables: Sequence[SetTable]) -> list[PairVerdict]:
    """Return a verdict for each run beside the baseline, on the mean over the test sets that both have.

    Sets that are measured by another metric than the first, as graded pairs are, stand beside it.
    """
    tests = [each for each in baseline.sets if each.role != "guard"]
    metric = tests[0].final.deciding(metric) if tests else metric
    found: list[tuple[Run, list[tuple[EvaluationResult, EvaluationResult]], str]] = []
    for run in others:
        pairs, reasons = [], []
        for each in (each for each in tests if each.final.deciding(metric) == metric):
            partner, why_not = match(each, run, metric)
            if partner is None:
                reasons.append(why_not)
            else:
                pairs.append((each.final, partner.final))
        if not tests:
            reasons.append(f"{one_line(baseline.name)} has no result on a test set.")
        found.append((run, pairs, " ".join(dict.fromkeys(reasons))))
    p_values = [paired_p_value(pairs, metric) for _, pairs, _ in found if pairs]
    corrected = iter(zip(p_values, holm(p_values), strict=True))
    return [
        _pair_verdict(baseline, run, pairs, metric, next(corrected), len(p_values), tables)
        if pairs
        else PairVerdict(run.name, "not compared", None, None, None, f"{one_line(run.name)} isn't compared: {reason}")
        for run, pairs, reason in found
    ]


def match(baseline: SetResult, run: Run, metric: str) -> tuple[SetResult | None, str]:
    """Return a run's result on the content of a baseline's set, or None and why there is none."""
    if not run.is_finished:
        return None, "it hasn't finished."
    by_content = [each for each in run.sets if each.content and each.content == baseline.content]
    by_name = [each for each in run.sets if each.name == baseline.name or each.key == baseline.key]
    found = next(iter(by_content), None) or next(iter(by_name), None)
    if found is None:
        return None, f"it wasn't measured on {one_line(baseline.name)}."
    if found.content and baseline.content and found.content != baseline.content:
        return None, (
            f"its set {one_line(found.name)} has other content than the baseline's {one_line(baseline.name)} "
            f"(hash {found.content[:12]} and {baseline.content[:12]}); evaluate both on one set: vembed evaluate."
        )
    if metric not in found.final.per_query:
        return None, f"it has no {metric} by query on {one_line(found.name)}; it has {_known(found.final)}."
    if found.final.per_query[metric].keys() != baseline.final.per_query[metric].keys():
        return None, f"its set {one_line(found.name)} has other queries than the baseline's."
    if found.final.num_documents != baseline.final.num_documents:
        counts = " and ".join(plural(each.num_documents, "document") for each in (found.final, baseline.final))
        return None, f"its set {one_line(found.name)} has another corpus than the baseline's: {counts}."
    return found, ""


def _known(result: EvaluationResult) -> str:
    return ", ".join(sorted(result.per_query)[:5]) or "none"


def _set_table(own: SetResult, baseline: Run, others: Sequence[Run], metric: str) -> SetTable:
    partners = [(run, *match(own, run, metric)) for run in others]
    names = [name for name in dict.fromkeys([metric, *HEADLINE]) if name in own.final.per_query]
    notes = []
    if any(partner is not None and not (partner.content and own.content) for _, partner, _ in partners):
        notes.append(
            "Not every run recorded the content of this set: it is taken as the same because queries and the number of "
            "documents agree."
        )
    lines: dict[str, list[Line]] = {}
    for name in names:
        untrained = _untrained_lines(
            own, [(baseline.name, own), *((run.name, each) for run, each, _ in partners)], name
        )
        lines[name] = [*untrained, _line(baseline.name, own.final, None, name)]
        lines[name] += [_partner_line(run, partner, own, name, why_not) for run, partner, why_not in partners]
    final = own.final
    return SetTable(
        own.name, metric, own.key, own.role, own.content, final.num_queries, final.num_documents, lines, tuple(notes)
    )


def _partner_line(run: Run, partner: SetResult | None, own: SetResult, metric: str, why_not: str) -> Line:
    if partner is not None and metric in partner.final.per_query:
        return _line(run.name, partner.final, own.final, metric)
    if partner is not None:
        return Line(run.name, _row(run.name, None, None, metric), None, None, f"it has no {metric}.")
    return Line(run.name, _row(run.name, None, None, metric), None, None, why_not)


def _untrained_lines(own: SetResult, runs: Sequence[tuple[str, SetResult | None]], metric: str) -> list[Line]:
    """Return the untrained model's line, one for each that gives other numbers; it isn't tested."""
    distinct: dict[tuple[tuple[str, float], ...], tuple[EvaluationResult, list[str]]] = {}
    for name, each in runs:
        untrained = None if each is None else each.untrained
        values = {} if untrained is None else untrained.per_query.get(metric, {})
        if untrained is not None and values.keys() == own.final.per_query[metric].keys():
            distinct.setdefault(tuple(sorted(values.items())), (untrained, []))[1].append(name)
    lines = []
    for result, names in distinct.values():
        label = UNTRAINED if len(distinct) == 1 else f"{UNTRAINED} of {', '.join(names)}"
        lines.append(Line(label, _row(label, result, own.final, metric), None, None))
    return lines


def _line(name: str, result: EvaluationResult, against: EvaluationResult | None, metric: str) -> Line:
    p_value = None if against is None else paired_p_value([(against, result)], metric)
    return Line(name, _row(name, result, against, metric), p_value, p_value)


def _row(name: str, result: EvaluationResult | None, against: EvaluationResult | None, metric: str) -> MetricRow:
    has_interval = result is not None and len(result.per_query[metric]) > 1
    return MetricRow(
        name=name,
        values={} if result is None else {"final": result.metrics[metric]},
        intervals={"final": mean_interval([result], metric)} if result is not None and has_interval else {},
        verdict=None if result is None or against is None else judged(compare(against, result, metric)),
        is_headline=True,
    )


def _word(verdict: Verdict, corrected: float) -> PairWord:
    if verdict.word == "within noise" or corrected >= LEVEL:
        return "no difference"
    return "better" if verdict.word == "improved" else "worse"


def _pair_verdict(
    baseline: Run,
    run: Run,
    pairs: Sequence[tuple[EvaluationResult, EvaluationResult]],
    metric: str,
    p_values: tuple[float, float],
    num_tests: int,
    tables: Sequence[SetTable],
) -> PairVerdict:
    first = pairs[0]
    verdict = judged(compare(*first, metric)) if len(pairs) == 1 else mean_verdict(pairs, metric)
    p_value, corrected = p_values
    word = _word(verdict, corrected)
    one, other = one_line(run.name), one_line(baseline.name)
    said = {
        "better": f"{one} is better than {other}",
        "worse": f"{one} is worse than {other}",
        "no difference": f"No difference between {one} and {other} can be told",
    }[word]
    sentence = f"{said}: {numbers_text(verdict, corrected, num_tests)}"
    lost = _guards_lost(run, tables)
    if lost:
        sentence += f"; worse on {plural(len(lost), 'guard set')} ({', '.join(lost)})"
    return PairVerdict(run.name, word, verdict, p_value, corrected, f"{sentence}.")


def numbers_text(verdict: Verdict, corrected: float, num_tests: int) -> str:
    """Return a difference with all that judges it, e.g. "ndcg@10 +0.012 (95% interval +0.002 to +0.022, p 0.02)"."""
    found, decimals = verdict.comparison, verdict_decimals(verdict)
    queries = plural(found.num_queries, "query", "queries")
    difference = f"{found.metric} {signed_text(found.difference, decimals)}"
    if found.num_queries < 2:
        return f"{difference} ({queries}: too few for an interval)"
    interval = f"{100 * found.confidence:g}% interval {difference_text(found, decimals)}"
    tests = f"p {p_text(corrected)}" + (f" corrected for {num_tests} comparisons" if num_tests > 1 else "")
    return f"{difference} ({interval}, {tests}, {queries})"


def _guards_lost(run: Run, tables: Sequence[SetTable]) -> list[str]:
    """Return the guard sets on which a run is worse than the baseline, as their tables say."""
    return [
        one_line(table.name)
        for table in tables
        if table.role == "guard"
        and any(line.name == run.name and line.word == "worse" for line in table.lines.get(table.metric, []))
    ]
