"""Runs tested against one of them on the sets that they share, query by query, and put into sentences.

1. Sets are the same when their content has one hash; where a run recorded none, when queries and documents agree.
2. The verdict of a run is on the mean over the shared test sets, each counting the same; guard sets stand beside it.
3. p-values come from Student's paired test and are corrected for their number (Holm): those of the verdicts together,
   and in the table of each metric those of all runs on all sets together. Intervals are 95% each, not corrected.
4. Of the first set the queries that changed most are kept, with the document that each model put first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.batch import ImageLimits
from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys, listed
from vembed.data.read import DataSource
from vembed.data.run_data import content_hash, load_run_data
from vembed.errors import ConfigError, VembedError
from vembed.evaluation.judge import LEVEL, holm, mean_interval, mean_verdict, paired_p_value, verdict
from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.report.comparison import MetricRow, difference_text, verdict_decimals
from vembed.evaluation.report.examples import Example, changed_queries, example_of, paired_values, picture_captions
from vembed.pages.html import notebook_frame
from vembed.pages.text import one_line, p_text, signed_text
from vembed.redact import redact
from vembed.text import plural
from vembed.workflows.comparison.runs import (
    Run,
    RunCost,
    config_differences,
    cost_of,
    data_differences,
    data_sentence,
    environment_differences,
    read_runs,
    unknown_keys,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vembed.evaluation.judge import Verdict
    from vembed.evaluation.results import EvaluationResult
    from vembed.workflows.comparison.runs import SetResult

PairWord: TypeAlias = Literal["better", "worse", "no difference", "not compared"]

UNTRAINED = "untrained model"

MOST_CHANGES, FEWEST_CHANGES = 5, 1
"""Queries shown of each kind, for two runs and for very many."""

SHOWN_IN_ALL = 40
"""Queries shown on a page of many runs, about."""


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
        """Return the reading of the corrected test."""
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


@dataclass(frozen=True, slots=True)
class Changes:
    """Queries that a run wins and loses against the baseline."""

    run: str
    # Queries with the document that the run put first, and the same of the baseline. The largest gains come first.
    won: tuple[tuple[Example, Example], ...]
    lost: tuple[tuple[Example, Example], ...]
    num_won: int
    num_lost: int
    num_queries: int


@dataclass(frozen=True)
class RunComparison:
    """Differences between runs, and a verdict on each of them against the first, the baseline."""

    metric: str
    runs: tuple[Run, ...]  # the baseline first
    verdicts: tuple[PairVerdict, ...]  # of each run but the baseline
    tables: tuple[SetTable, ...]  # of each set of the baseline
    config: Mapping[str, tuple[str, ...]]  # settings that differ -> value in each run
    data: Mapping[str, tuple[str, ...]]  # the same of counts, sources and hashes of the data
    data_sentence: str
    environment: Mapping[str, tuple[str, ...]]  # the same of versions and hardware
    costs: tuple[RunCost, ...]  # of each run
    changes: tuple[Changes, ...]  # on the set of the baseline's verdict
    task: RetrievalData | None  # of the changes; None where it can't be read any more
    notes: tuple[str, ...]  # what is odd about the runs, one sentence each
    changes_note: str
    image_limits: ImageLimits
    command: str

    @property
    def baseline(self) -> Run:
        """The run that the others are compared with."""
        return self.runs[0]

    @property
    def headline(self) -> str:
        """The verdicts in a sentence."""
        if len(self.verdicts) == 1:
            return self.verdicts[0].sentence
        words = [verdict.word for verdict in self.verdicts]
        lost = words.count("not compared")
        counts = [
            f"{words.count('better')} better than {one_line(self.baseline.name)}",
            f"{words.count('worse')} worse",
            f"{words.count('no difference')} without a difference that can be told",
            *([f"{lost} not compared"] if lost else []),
        ]
        return f"Of {plural(len(self.verdicts), 'run')}, {', '.join(counts)}."

    @cached_property
    def html(self) -> str:
        """The comparison as one self-contained page."""
        from vembed.pages.html import render_html
        from vembed.workflows.comparison.page import comparison_page

        return render_html(comparison_page(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.headline}>"

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that keeps its style apart."""
        return notebook_frame(self.html, title=repr(self))


def compare_runs(
    folders: Sequence[Path | str],
    output: Path | None = None,
    baseline: Path | str | None = None,
    *,
    metric: str | None = None,
    command: str = "",
) -> RunComparison:
    """Compare runs and write compare.html, compare.md and compare.json.

    Args:
        folders: Output folders of runs, or patterns such as "runs/*"; finished or not.
        output: Where to write; None writes nothing.
        baseline: The run that the others are compared with; None takes the first finished one.
        metric: What runs are compared by; None takes what the baseline chose its checkpoint by.
        command: That makes this comparison again, without secrets.

    Raises:
        ConfigError: There are fewer than two runs, one isn't a run or is the output, or the baseline can't be compared
            with.
        MachineError: The output can't be written.
    """
    runs, notes = read_runs(folders, baseline)
    if output is not None and output.resolve() in {run.folder.resolve() for run in runs}:
        raise ConfigError(f"the output {redact(str(output))} is a run that is compared; choose another folder")
    if len(runs) < 2:
        only = runs[0]
        report = only.folder / "report" / "report.html"
        raise ConfigError(
            f"comparing takes at least two runs, and there is one: {redact(str(only.folder))}"
            + (f"; {redact(str(report))} says what training did to it" if report.is_file() else "")
        )
    runs, more = _baseline_first(runs, is_named=baseline is not None)
    first, others = runs[0], runs[1:]
    if first.is_finished:
        final = first.sets[0].final
        if metric is not None and metric not in final.per_query:
            known = ", ".join(sorted(final.per_query))
            raise ConfigError(f"{first.name} has no metric {metric} by query; it has: {known}")
        # What chose the baseline's checkpoint; a set of graded pairs decides by a metric of its own.
        metric = metric or final.deciding(first.metric)
    metric = metric or first.metric
    changes, task, changes_note = _changes(first, others, metric)
    tables = set_tables(first, others, metric)
    pixels = first.config.get("max_image_pixels")
    comparison = RunComparison(
        metric=metric,
        runs=tuple(runs),
        verdicts=tuple(pair_verdicts(first, others, metric, tables)),
        tables=tuple(tables),
        config=config_differences(runs),
        data=data_differences(runs),
        data_sentence=data_sentence(runs),
        environment=environment_differences(runs),
        costs=tuple(map(cost_of, runs)),
        changes=tuple(changes),
        task=task,
        notes=(*notes, *more, *(f"{run.name}: {note}" for run in runs for note in run.notes), *unknown_keys(runs)),
        changes_note=changes_note,
        image_limits=ImageLimits(max_pixels=pixels) if isinstance(pixels, int) else ImageLimits(),
        command=command,
    )
    if output is not None:
        from vembed.pages.write import write_page
        from vembed.workflows.comparison.page import comparison_page

        write_page(output, comparison_page(comparison), name="compare")
    return comparison


def _baseline_first(runs: list[Run], *, is_named: bool) -> tuple[list[Run], list[str]]:
    """Put the baseline first: the run that was named, or the first finished one.

    Raises:
        ConfigError: The named one hasn't finished.
    """
    first = runs[0]
    if first.is_finished:
        return runs, []
    if is_named:  # another run in its place would answer another question
        raise ConfigError(
            f"--baseline {redact(str(first.folder))} can't be compared with: {first.notes[-1]} Resume it first, with "
            f"the command that started it, or name another run"
        )
    other = next((run for run in runs if run.is_finished), None)
    if other is None:
        return runs, ["No run has finished: there are no results to compare yet."]
    note = f"{first.name} hasn't finished, so {other.name} is the baseline."
    return [other, *(run for run in runs if run is not other)], [note]


def set_tables(baseline: Run, others: Sequence[Run], metric: str) -> list[SetTable]:
    """Return a table for each set of the baseline."""
    tables = [_set_table(result, baseline, others, result.final.deciding(metric)) for result in baseline.sets]
    # All runs on all sets in one metric are one family of tests; another metric of the same rankings is no further
    # chance to win, but a table of its own that is read by itself.
    for name in dict.fromkeys(name for table in tables for name in table.lines):
        tested = [
            (lines, row)
            for table in tables
            for lines in [table.lines.get(name, [])]
            for row, line in enumerate(lines)
            if line.p_value is not None
        ]
        corrected = holm([lines[row].p_value or 0.0 for lines, row in tested])
        for (lines, row), value in zip(tested, corrected, strict=True):
            lines[row] = replace(lines[row], corrected=value)
    return tables


def _set_table(result: SetResult, baseline: Run, others: Sequence[Run], metric: str) -> SetTable:
    partners = [(run, *match(result, run, metric)) for run in others]
    notes = []
    if any(partner is not None and not (partner.content and result.content) for _, partner, _ in partners):
        notes.append(
            "Not every run recorded the content of this set: it is taken as the same because queries and the number of "
            "documents agree."
        )
    final, lines = result.final, {}
    for name in [name for name in dict.fromkeys([metric, *HEADLINE]) if name in final.per_query]:
        measured = [(baseline.name, result), *((run.name, partner) for run, partner, _ in partners)]
        lines[name] = [*_untrained_lines(result, measured, name), _line(baseline.name, final, None, name)]
        for run, partner, why_not in partners:
            if partner is not None and name in partner.final.per_query:
                lines[name].append(_line(run.name, partner.final, final, name))
            else:
                reason = why_not if partner is None else f"it has no {name}."
                lines[name].append(Line(run.name, _row(run.name, None, None, name), None, None, reason))
    return SetTable(
        name=result.name,
        metric=metric,
        key=result.key,
        role=result.role,
        content=result.content,
        num_queries=final.num_queries,
        num_documents=final.num_documents,
        lines=lines,
        notes=tuple(notes),
    )


def _untrained_lines(result: SetResult, runs: Sequence[tuple[str, SetResult | None]], metric: str) -> list[Line]:
    """Return the untrained model's line, one for each that gives other numbers; it isn't tested."""
    # Runs of one model began with the same numbers, to the last digit: values are their own key.
    distinct: dict[tuple[tuple[str, float], ...], tuple[EvaluationResult, list[str]]] = {}
    for name, partner in runs:
        untrained = None if partner is None else partner.untrained
        values = {} if untrained is None else untrained.per_query.get(metric, {})
        if untrained is not None and values.keys() == result.final.per_query[metric].keys():
            distinct.setdefault(tuple(sorted(values.items())), (untrained, []))[1].append(name)
    lines = []
    for untrained, names in distinct.values():
        label = UNTRAINED if len(distinct) == 1 else f"{UNTRAINED} of {', '.join(names)}"
        lines.append(Line(label, _row(label, untrained, result.final, metric), None, None))
    return lines


def _line(name: str, result: EvaluationResult, against: EvaluationResult | None, metric: str) -> Line:
    p_value = None if against is None else paired_p_value([(against, result)], metric)
    return Line(name, _row(name, result, against, metric), p_value, p_value)


def _row(name: str, result: EvaluationResult | None, against: EvaluationResult | None, metric: str) -> MetricRow:
    has_interval = result is not None and len(result.per_query[metric]) > 1  # one query has no spread
    return MetricRow(
        name=name,
        values={} if result is None else {"final": result.metrics[metric]},
        intervals={"final": mean_interval([result], metric)} if result is not None and has_interval else {},
        verdict=None if result is None or against is None else verdict(against, result, metric),
    )


def match(baseline: SetResult, run: Run, metric: str) -> tuple[SetResult | None, str]:
    """Return a run's result on the content of a baseline's set, or None and why there is none."""
    if not run.is_finished:
        return None, "it hasn't finished."
    # By content first: a renamed file is the same set, and a file of the same name may be another one.
    by_content = (result for result in run.sets if result.content and result.content == baseline.content)
    by_name = (result for result in run.sets if result.name == baseline.name)
    by_place = (result for result in run.sets if result.key == baseline.key)
    partner = next(chain(by_content, by_name, by_place), None)
    if partner is None:
        return None, f"it wasn't measured on {one_line(baseline.name)}."
    name = one_line(partner.name)
    if partner.content and baseline.content and partner.content != baseline.content:
        return None, (
            f"its set {name} has other content than the baseline's {one_line(baseline.name)} "
            f"(hash {partner.content[:12]} and {baseline.content[:12]}); evaluate both on one set: vembed evaluate."
        )
    if metric not in partner.final.per_query:
        known = ", ".join(sorted(partner.final.per_query)[:5]) or "none"
        return None, f"it has no {metric} by query on {name}; it has {known}."
    if partner.final.per_query[metric].keys() != baseline.final.per_query[metric].keys():
        return None, f"its set {name} has other queries than the baseline's."
    if partner.final.num_documents != baseline.final.num_documents:
        counts = " and ".join(plural(result.final.num_documents, "document") for result in (partner, baseline))
        return None, f"its set {name} has another corpus than the baseline's: {counts}."
    return partner, ""


def pair_verdicts(baseline: Run, others: Sequence[Run], metric: str, tables: Sequence[SetTable]) -> list[PairVerdict]:
    """Return a verdict for each run beside the baseline, on the mean over the test sets that both have.

    Sets that are measured by another metric than the first, as graded pairs are, stand beside it.
    """
    tests = [result for result in baseline.sets if result.role != "guard"]
    metric = tests[0].final.deciding(metric) if tests else metric
    # All pairs are collected before the first sentence: Holm's correction depends on how many tests there are.
    matched: list[tuple[Run, list[tuple[EvaluationResult, EvaluationResult]], str]] = []
    for run in others:
        pairs, reasons = [], []
        for result in tests:
            if result.final.deciding(metric) != metric:
                continue
            partner, why_not = match(result, run, metric)
            if partner is None:
                reasons.append(why_not)
            else:
                pairs.append((result.final, partner.final))
        if not tests:
            reasons.append(f"{one_line(baseline.name)} has no result on a test set.")
        matched.append((run, pairs, " ".join(dict.fromkeys(reasons))))
    p_values = [paired_p_value(pairs, metric) for _, pairs, _ in matched if pairs]
    corrected = iter(zip(p_values, holm(p_values), strict=True))
    verdicts = []
    for run, pairs, reason in matched:
        if not pairs:
            sentence = f"{one_line(run.name)} isn't compared: {reason}"
            verdicts.append(PairVerdict(run.name, "not compared", None, None, None, sentence))
            continue
        decided = mean_verdict(pairs, metric)
        p_value, value = next(corrected)
        sentence = _pair_sentence(baseline, run, decided, value, len(p_values), tables)
        verdicts.append(PairVerdict(run.name, _word(decided, value), decided, p_value, value, sentence))
    return verdicts


def _word(verdict: Verdict, corrected: float) -> PairWord:
    if verdict.word == "within noise" or corrected >= LEVEL:
        return "no difference"
    return "better" if verdict.word == "improved" else "worse"


def _pair_sentence(
    baseline: Run, run: Run, verdict: Verdict, corrected: float, num_tests: int, tables: Sequence[SetTable]
) -> str:
    """Return how a run compares, with all that judges it, and the guard sets that it loses on."""
    one, other = one_line(run.name), one_line(baseline.name)
    word = _word(verdict, corrected)
    start = f"No difference between {one} and {other} can be told" if word == "no difference" else ""
    start = start or f"{one} is {word} than {other}"
    comparison, decimals = verdict.comparison, verdict_decimals(verdict)
    queries = plural(comparison.num_queries, "query", "queries")
    interval = f"{100 * comparison.confidence:g}% interval {difference_text(comparison, decimals)}"
    tests = f"p {p_text(corrected)}" + (f" corrected for {num_tests} comparisons" if num_tests > 1 else "")
    judges = f"{interval}, {tests}, {queries}" if comparison.num_queries > 1 else f"{queries}: too few for an interval"
    # A guard set is lost where its table says so, which corrects for the number of tests there.
    lost = [
        one_line(table.name)
        for table in tables
        if table.role == "guard"
        and any(line.name == run.name and line.word == "worse" for line in table.lines.get(table.metric, []))
    ]
    guards = f"; worse on {plural(len(lost), 'guard set')} ({', '.join(lost)})" if lost else ""
    return f"{start}: {comparison.metric} {signed_text(comparison.difference, decimals)} ({judges}){guards}."


def _changes(baseline: Run, others: Sequence[Run], metric: str) -> tuple[Sequence[Changes], RetrievalData | None, str]:
    """Return the queries that changed most on the set of the baseline's verdict."""
    if not baseline.is_finished:
        return (), None, ""
    result = baseline.sets[0]
    partners = [(run.name, partner) for run in others if (partner := match(result, run, metric)[0]) is not None]
    if not partners:
        return (), None, ""
    task, why_not = load_task(baseline, result)
    # A set that has changed or gone still names its queries: their ids stand where their texts would.
    if task is not None and task.grades:
        return (), task, ""  # nothing is searched: no model put a document first
    shown = task or RetrievalData(result.name, {}, {}, {})
    return find_changes(result, partners, shown, metric), task, why_not


def find_changes(
    baseline: SetResult, partners: Sequence[tuple[str, SetResult]], task: RetrievalData, metric: str
) -> list[Changes]:
    """Return the most changed queries of each run."""
    # Two kinds for each run: a page of many runs shows fewer of each, so that it stays one page.
    shown = max(FEWEST_CHANGES, min(MOST_CHANGES, SHOWN_IN_ALL // (2 * max(1, len(partners)))))
    captions = picture_captions(task)

    def first(query: str, values: tuple[float, float], against: EvaluationResult, result: EvaluationResult) -> Example:
        """Return a query with the document that the second model put first."""
        example = example_of(query, task, (against, result), values, captions)
        return replace(example, hits=example.hits[:1], missed=())

    changes = []
    for name, partner in partners:
        before, after = baseline.final, partner.final
        pairs = paired_values(before, after, metric)
        won, lost = changed_queries(pairs)
        most_won, most_lost = (
            tuple(
                # The pair turned around gives the baseline's first document, with the same query and captions.
                (first(query, pairs[query], before, after), first(query, pairs[query][::-1], after, before))
                for query in queries[:shown]
            )
            for queries in (won, lost)
        )
        changes.append(Changes(name, most_won, most_lost, len(won), len(lost), len(pairs)))
    return changes


def load_task(run: Run, result: SetResult) -> tuple[RetrievalData | None, str]:
    """Read the set of a run's verdict again, for its texts and pictures.

    Returns:
        The set, or None and why it can't be shown.
    """
    config = run.config
    try:
        keys = DataKeys.model_validate({name: config[name] for name in DataKeys.model_fields if name in config})
        if result.key == "test" and keys.test_data_path:
            source = DataSource(listed(keys.test_data_path)[0], "test", keys, split=keys.test_data_split)
            task = source.judged(takes_pairs=True)
        elif keys.val_data_path is not None:
            source = DataSource(keys.val_data_path, "validation", keys, split=keys.val_data_split)
            task = source.judged(takes_pairs=True)
        else:  # the run held rows of its training data out; the same seed and keys hold out the same ones
            divides = config.get("eval_strategy") != "no"
            data = load_run_data(keys, needs_dev=True, divides=divides)
            held_out = data.test or data.dev
            assert held_out is not None
            task = held_out
        if result.content and content_hash(task) != result.content:
            return None, "The texts aren't shown: the set has changed since the run."
    except (VembedError, ValueError, OSError) as error:
        reason = redact(str(error).strip().partition("\n")[0])
        return None, f"The texts aren't shown, as the set can't be read any more: {reason}"
    if not task.queries.keys() >= result.final.per_query[next(iter(result.final.per_query))].keys():
        # A run of an older version has no hash: its queries must at least be there.
        return None, "The texts aren't shown: the set has changed since the run."
    return task, ""
