"""The leaderboard in numbers: systems on sets, in order, with intervals, tests, and what cheaper vectors lose.

A system's mean counts each set the same. On each set every system is tested against the one with the highest mean
there, and each form of the vectors against exact search of the same model, by Student's paired test. p-values are
corrected for their number (Holm), those of all systems on all sets together and those of all forms together, as
`vembed compare` does: two systems that differ there differ here.

Results come from evaluation/benchmark/, and leaderboard_page.py shows them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from vembed.evaluation.judge import LEVEL, RSUM_METRICS, holm, mean_interval, paired_p_value, recall_sum
from vembed.evaluation.results import approximate_note

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.benchmark.run import Entry
    from vembed.evaluation.benchmark.stored import Cost
    from vembed.evaluation.judge import Estimate
    from vembed.evaluation.results import EvaluationResult

RECALL = "recall@100"  # of each form of the vectors, beside the metric that systems are compared by


@dataclass(frozen=True, slots=True)
class Standing:
    """One system on one set."""

    task: str  # name of the set
    value: float  # mean of the metric over its queries
    low: float
    high: float
    difference: float  # to the best on this set
    p_value: float | None  # of the test against the best; None for the best itself
    p_value_corrected: float | None  # for the number of systems and sets
    num_queries: int
    num_documents: int
    folder: str  # of the run, below the output
    notes: tuple[str, ...]  # what was left out or cut

    @property
    def is_behind(self) -> bool:
        """True where the corrected test says that the best on this set is better."""
        return self.p_value_corrected is not None and self.p_value_corrected < LEVEL

    @property
    def reading(self) -> str:
        """The result of the test in words."""
        if self.p_value is None:
            return "best"
        return "behind the best" if self.is_behind else "not significantly below the best"

    @property
    def mark(self) -> str:
        """The result of the test as one character."""
        return "★" if self.p_value is None else "▼" if self.is_behind else "≈"

    @property
    def tone(self) -> str:
        """The result of the test as a tone of the page."""
        return "improved" if self.p_value is None else "worse" if self.is_behind else "within-noise"


@dataclass(frozen=True, slots=True)
class SystemRow:
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
    total: Estimate  # rsum, 600 at best


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
    p_value_corrected: float | None  # for the number of forms
    recall: float  # mean of RECALL: what is right and among so many hits
    cost: Cost
    folder: str  # of the run, below the output
    notes: tuple[str, ...]  # beside those of exact search


@dataclass(frozen=True, slots=True)
class Board:
    """A whole leaderboard."""

    metric: str  # what systems are compared by
    rows: tuple[SystemRow, ...]  # best mean first; behind them the systems that weren't evaluated on every set
    tasks: tuple[str, ...]  # names of the sets, in the order they were given
    variants: tuple[VariantRow, ...]  # set by set; exact search alone is no entry
    facts: tuple[tuple[str, str], ...]  # versions, machine
    command: str  # that makes this leaderboard again
    sums: tuple[SumRow, ...] = ()  # set by set, the highest first

    def variants_of(self, task: str) -> list[VariantRow]:
        """Return the forms tried on one set."""
        return [row for row in self.variants if row.task == task]

    def cells_of(self, task: str) -> list[tuple[SystemRow, Standing]]:
        """Return every system on one set, best first."""
        cells = [(row, cell) for row in self.rows for cell in row.cells if cell.task == task]
        return sorted(cells, key=lambda pair: -pair[1].value)

    def notes_of(self, task: str) -> list[str]:
        """Return the notes on one set, each behind the systems that it holds for.

        They are left out where they are all systems, and where the note begins with the one that it is of.
        """
        systems: dict[str, list[str]] = {}
        cells = self.cells_of(task)
        for row, cell in cells:
            for note in cell.notes:
                systems.setdefault(note, []).append(row.system)
        return [
            note
            if len(names) == len(cells) or note.startswith(f"{', '.join(names)} ")
            else f"{', '.join(names)}: {note}"
            for note, names in systems.items()
        ]


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
    # A system that is on most sets gives their order: word matching comes first and passes some over.
    tasks = tuple(dict.fromkeys(entry.task for entry in sorted(entries, key=lambda entry: -num_sets[entry.system])))
    by_key = {(entry.system, entry.task): entry for entry in entries}

    def value(entry: Entry) -> float:
        return entry.result.metrics[metric]

    best = {task: max((entry for entry in entries if entry.task == task), key=value) for task in tasks}
    # All tests of systems are one family, whatever set they are on: the board is read as a whole.
    others = [entry for entry in entries if entry is not best[entry.task]]
    tests = _corrected_tests([(best[entry.task].result, entry.result) for entry in others], metric)
    tests_by_key = {(entry.system, entry.task): test for entry, test in zip(others, tests, strict=True)}

    # The interval is of the value alone; what decides is the paired test, in which the queries' difficulty cancels.
    def standing(entry: Entry) -> Standing:
        result, best_here = entry.result, best[entry.task]
        low, high = mean_interval([result], metric)
        p_value, p_value_corrected = tests_by_key.get((entry.system, entry.task), (None, None))
        return Standing(
            task=entry.task,
            value=value(entry),
            low=low,
            high=high,
            difference=value(entry) - value(best_here),
            p_value=p_value,
            p_value_corrected=p_value_corrected,
            num_queries=result.num_queries,
            num_documents=result.num_documents,
            folder=entry.folder,
            notes=tuple(result.notes),
        )

    rows = []
    for system in dict.fromkeys(entry.system for entry in entries):
        of_system = [by_key[system, task] for task in tasks if (system, task) in by_key]
        low, high = mean_interval([entry.result for entry in of_system], metric)
        mean = fmean(map(value, of_system))
        cells = tuple(map(standing, of_system))
        rows.append(SystemRow(system, mean, low, high, cells, is_whole=len(of_system) == len(tasks)))
    # A system that lacks a set may have had the easy ones: it stands behind all that have them all.
    rows.sort(key=lambda row: (not row.is_whole, -row.mean))
    in_order = [by_key[row.system, task] for task in tasks for row in rows if (row.system, task) in by_key]
    return Board(
        metric=metric,
        rows=tuple(rows),
        tasks=tasks,
        variants=_variant_rows(in_order, metric),
        facts=tuple(facts),
        command=command,
        sums=_sums(by_key, tasks),
    )


def _sums(by_key: Mapping[tuple[str, str], Entry], tasks: Sequence[str]) -> tuple[SumRow, ...]:
    """Return the sum of recalls of each system on each set that was searched in both directions."""

    def percent(entry: Entry) -> tuple[float, ...]:
        return tuple(100 * entry.result.metrics[name] for name in RSUM_METRICS)

    rows = []
    # An entry of the reversed direction names the set that it reverses.
    for (system, _), entry in by_key.items():
        forward = by_key.get((system, entry.reverse_of))
        total = None if forward is None else recall_sum(forward.result, entry.result)
        if forward is not None and total is not None:
            rows.append(SumRow(system, forward.task, percent(forward), percent(entry), total))
    return tuple(sorted(rows, key=lambda row: (tasks.index(row.task), -row.total.value)))


def _variant_rows(entries: Sequence[Entry], metric: str) -> tuple[VariantRow, ...]:
    """Return the forms of all models set by set, numbered on each, tested against exact search of the same model.

    Args:
        entries: In the order of the sets.
    """
    forms = [(entry, form) for entry in entries if len(entry.variants) > 1 for form in entry.variants]
    tested = [(entry.result, form.result) for entry, form in forms if not form.variant.is_reference]
    tests = iter(_corrected_tests(tested, metric))
    numbers: Counter[str] = Counter()
    rows = []
    for entry, form in forms:
        numbers[entry.task] += 1
        p_value, p_value_corrected = (None, None) if form.variant.is_reference else next(tests)
        value = form.result.metrics[metric]
        # Notes of exact search stand with the set already, and the form's name has its index.
        known = {*entry.result.notes, approximate_note(form.variant.index)}
        rows.append(
            VariantRow(
                number=numbers[entry.task],
                system=entry.system,
                task=entry.task,
                name=form.variant.name,
                value=value,
                difference=value - entry.result.metrics[metric],
                p_value=p_value,
                p_value_corrected=p_value_corrected,
                recall=form.result.metrics[RECALL],
                cost=form.cost,
                folder=form.folder,
                notes=tuple(note for note in form.result.notes if note not in known),
            )
        )
    return tuple(rows)


def _corrected_tests(
    pairs: Sequence[tuple[EvaluationResult, EvaluationResult]], metric: str
) -> list[tuple[float, float]]:
    """Return the p-value of each pair's paired test, and the same corrected for the number of pairs."""
    p_values = [paired_p_value([pair], metric) for pair in pairs]
    return list(zip(p_values, holm(p_values), strict=True))
