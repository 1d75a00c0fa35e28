"""What a leaderboard says: order, intervals, tests, and what cheaper forms of the vectors lose.

A system's mean counts each set the same. On each set every system is tested against the one with the highest mean
there, and each variant against exact search of the same model, by the paired randomisation test; p-values are of one
comparison each and not corrected for their number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from vembed.evaluation.evaluator import approximate_note
from vembed.evaluation.randomisation import randomisation_test
from vembed.evaluation.significance import RSUM_METRICS, mean_interval, recall_sum

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.benchmark.run import Entry, VariantResult
    from vembed.evaluation.benchmark.stored import Cost
    from vembed.evaluation.significance import RecallSum

CONFIDENCE = 0.95
RECALL = "recall@100"  # of each form of the vectors, beside the metric that systems are compared by

LEVEL = 0.05  # p-value below which a difference is called significant


@dataclass(frozen=True, slots=True)
class Standing:
    """One system on one set."""

    task: str  # name of the set
    value: float  # mean of the metric over its queries
    low: float
    high: float
    difference: float  # to the best on this set
    p_value: float | None  # of the test against the best; None for the best itself
    num_queries: int
    num_documents: int
    folder: str  # of the run, below the output
    notes: tuple[str, ...]  # what was left out or cut

    @property
    def is_behind(self) -> bool:
        """Whether the test says that the best on this set is better."""
        return self.p_value is not None and self.p_value < LEVEL


@dataclass(frozen=True, slots=True)
class Row:
    """One system: its mean over the sets with an interval, and each set."""

    system: str
    mean: float
    low: float
    high: float
    cells: tuple[Standing, ...]  # the sets that it was evaluated on
    is_whole: bool = True  # the mean of a system that lacks some sets is of another thing, and not shown

    def cell(self, task: str) -> Standing | None:
        """Return the system on one set, or None where it wasn't evaluated there."""
        return next((cell for cell in self.cells if cell.task == task), None)


@dataclass(frozen=True, slots=True)
class SumRow:
    """One system on one set in both directions."""

    system: str
    task: str
    forward: tuple[float, ...]  # R@1, R@5 and R@10 of the set in percent
    reverse: tuple[float, ...]  # the same of the reversed set
    total: RecallSum  # 600 at best


@dataclass(frozen=True, slots=True)
class VariantRow:
    """One form of one model's vectors on one set."""

    number: int  # in the drawings
    system: str
    task: str
    name: str  # of the form
    value: float  # mean of the metric
    difference: float  # to exact search
    p_value: float | None  # of the test against exact search; None for exact search itself
    recall: float  # mean of RECALL: what is right and among so many hits
    cost: Cost
    folder: str  # of the run, below the output
    notes: tuple[str, ...]  # beside those of exact search


@dataclass(frozen=True, slots=True)
class Board:
    """A whole leaderboard."""

    metric: str  # what systems are compared by
    rows: tuple[Row, ...]  # best mean first; behind them the systems that weren't evaluated on every set
    tasks: tuple[str, ...]  # names of the sets, in the order they were given
    variants: tuple[VariantRow, ...]  # set by set; exact search alone is no entry
    facts: tuple[tuple[str, str], ...]  # versions, machine
    command: str  # that makes this leaderboard again
    sums: tuple[SumRow, ...] = ()  # set by set, the highest first

    def variants_of(self, task: str) -> list[VariantRow]:
        """Return the forms tried on one set."""
        return [row for row in self.variants if row.task == task]

    def variant_notes_of(self, task: str) -> list[str]:
        """Return the notes on the forms tried on one set, each behind the form's number."""
        return [f"{row.number}: {note}" for row in self.variants_of(task) for note in row.notes]

    def cells_of(self, task: str) -> list[tuple[Row, Standing]]:
        """Return every system on one set, best first."""
        found = [(row, cell) for row in self.rows for cell in row.cells if cell.task == task]
        return sorted(found, key=lambda pair: -pair[1].value)

    def notes_of(self, task: str) -> list[str]:
        """Return the notes on one set, each behind the systems that it holds for where these aren't all."""
        systems: dict[str, list[str]] = {}
        for row, cell in self.cells_of(task):
            for note in cell.notes:
                systems.setdefault(note, []).append(row.system)
        num_systems = len(self.cells_of(task))
        return [note if len(names) == num_systems else f"{', '.join(names)}: {note}" for note, names in systems.items()]


def build_board(
    entries: Sequence[Entry], metric: str, *, facts: Sequence[tuple[str, str]] = (), command: str = ""
) -> Board:
    """Compare finished results.

    Args:
        entries: Systems on sets; one that can't take a set, such as word matching on pictures, isn't on it.
        command: Without secrets.

    Raises:
        ValueError: A result lacks the metric, or there is none.
    """
    num_sets = Counter(entry.system for entry in entries)
    # Whoever is on most sets gives their order: word matching comes first and passes some over.
    tasks = tuple(dict.fromkeys(entry.task for entry in sorted(entries, key=lambda entry: -num_sets[entry.system])))
    systems = dict.fromkeys(entry.system for entry in entries)
    by_place = {(entry.system, entry.task): entry for entry in entries}

    def value(entry: Entry) -> float:
        return entry.result.metrics[metric]

    best = {task: max((entry for entry in entries if entry.task == task), key=value) for task in tasks}
    rows = []
    for system in systems:
        own = [by_place[system, task] for task in tasks if (system, task) in by_place]
        low, high = mean_interval([entry.result for entry in own], metric, confidence=CONFIDENCE)
        mean = fmean(value(entry) for entry in own)
        cells = tuple(_cell(entry, best[entry.task], metric) for entry in own)
        rows.append(Row(system, mean, low, high, cells, is_whole=len(own) == len(tasks)))
    rows.sort(key=lambda row: (not row.is_whole, -row.mean))
    order = [row.system for row in rows]
    return Board(
        metric=metric,
        rows=tuple(rows),
        tasks=tasks,
        variants=tuple(
            row
            for task in tasks
            for row in _variant_rows([by_place[name, task] for name in order if (name, task) in by_place], metric)
        ),
        facts=tuple(facts),
        command=command,
        sums=_sums(by_place, tasks),
    )


def _sums(by_place: Mapping[tuple[str, str], Entry], tasks: Sequence[str]) -> tuple[SumRow, ...]:
    """Return the sum of recalls of each system on each set that was searched in both directions."""

    def percent(entry: Entry) -> tuple[float, ...]:
        return tuple(100 * entry.result.metrics[name] for name in RSUM_METRICS)

    found = []
    for (system, _), entry in by_place.items():
        forward = by_place.get((system, entry.reverse_of))
        total = None if forward is None else recall_sum(forward.result, entry.result)
        if forward is not None and total is not None:
            found.append(SumRow(system, forward.task, percent(forward), percent(entry), total))
    return tuple(sorted(found, key=lambda row: (tasks.index(row.task), -row.total.value)))


def _cell(entry: Entry, best: Entry, metric: str) -> Standing:
    """Return one system on one set, tested against the best there."""
    result = entry.result
    low, high = mean_interval([result], metric, confidence=CONFIDENCE)
    return Standing(
        task=entry.task,
        value=result.metrics[metric],
        low=low,
        high=high,
        difference=result.metrics[metric] - best.result.metrics[metric],
        p_value=None if entry is best else randomisation_test(result, best.result, metric),
        num_queries=result.num_queries,
        num_documents=result.num_documents,
        folder=entry.folder,
        notes=tuple(result.notes),
    )


def _variant_rows(entries: Sequence[Entry], metric: str) -> list[VariantRow]:
    """Return the forms of all models on one set, numbered through."""
    found = [(entry, each) for entry in entries if len(entry.variants) > 1 for each in entry.variants]
    return [_variant_row(number, entry, each, metric) for number, (entry, each) in enumerate(found, start=1)]


def _variant_row(number: int, entry: Entry, each: VariantResult, metric: str) -> VariantRow:
    """Return one form, tested against exact search."""
    value = each.result.metrics[metric]
    known = {*entry.result.notes, approximate_note(each.variant.index)}
    return VariantRow(
        number=number,
        system=entry.system,
        task=entry.task,
        name=each.variant.name,
        value=value,
        difference=value - entry.result.metrics[metric],
        p_value=None if each.variant.is_reference else randomisation_test(each.result, entry.result, metric),
        recall=each.result.metrics[RECALL],
        cost=each.cost,
        folder=each.folder,
        notes=tuple(note for note in each.result.notes if note not in known),
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, quality) that no other beats in both, cheapest first."""
    kept: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or quality > kept[-1][1]:
            kept.append((cost, quality))
    return kept


def settings(board: Board) -> Mapping[str, str]:
    """Return how the numbers were made, for people."""
    return {
        "Intervals": f"{100 * CONFIDENCE:g}%, Student's t over queries",
        "Tests": "paired randomisation, two-sided, 10,000 permutations or all of them up to 14 queries, seed 0",
        "Compared by": board.metric,
        "Query latency": "wall time of searching one query on one thread, after a warm-up, without encoding it",
        "Bytes per document": "vector or code; for an index all that FAISS writes, divided by the documents",
        **dict(board.facts),
    }
