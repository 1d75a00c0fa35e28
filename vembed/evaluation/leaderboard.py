"""The leaderboard: several systems on several sets, in order, with intervals, tests, and what cheaper vectors lose.

A system's mean counts each set the same. On each set every system is tested against the one with the highest mean
there, and each form of the vectors against exact search of the same model, by Student's paired test. p-values are
corrected for their number (Holm), those of all systems on all sets together and those of all forms together, as
`vembed compare` does: two systems that differ there differ here.

`build_board` compares finished results, `board_page` shows them. Results come from evaluation/benchmark/.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from vembed.evaluation.judge import CONFIDENCE, LEVEL, RSUM_METRICS, holm, mean_interval, paired_p_value, recall_sum
from vembed.evaluation.results import approximate_note
from vembed.pages.charts import SERIES_COLOURS, SERIES_MARKERS, axis_labels, chart_axes, inline_svg, tick_text
from vembed.pages.page import (
    Cell,
    Facts,
    Figure,
    Heading,
    Note,
    NoteList,
    Page,
    Section,
    SideBySide,
    Span,
    Table,
    command_blocks,
    pairs_table,
)
from vembed.pages.text import (
    DASH,
    clip,
    count_text,
    metric_text,
    milliseconds_text,
    number_text,
    p_text,
    signed_text,
)
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from markupsafe import Markup

    from vembed.evaluation.benchmark.run import Entry
    from vembed.evaluation.benchmark.stored import Cost
    from vembed.evaluation.judge import Estimate
    from vembed.evaluation.results import EvaluationResult
    from vembed.pages.page import Block

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
INTERVAL = f"{100 * CONFIDENCE:g}% interval"
RECALL = "recall@100"  # of each form of the vectors, beside the metric that systems are compared by
NAME_CHARACTERS = 40  # of a model's name in the words of a figure, whose legend has all of it


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
        low, high = mean_interval([result], metric, confidence=CONFIDENCE)
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
        low, high = mean_interval([entry.result for entry in of_system], metric, confidence=CONFIDENCE)
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


def settings(board: Board) -> Mapping[str, str]:
    """Return how the numbers were made, for people."""
    return {
        "Intervals": f"{100 * CONFIDENCE:g}%, Student's t over queries",
        "Tests": "Student's paired t test, two-sided, corrected for the number of comparisons (Holm)",
        "Compared by": board.metric,
        "Query latency": "wall time of searching one query on one thread, after a warm-up, without encoding it",
        "Bytes per document": "vector or code; for an index all that FAISS writes, divided by the documents",
        **dict(board.facts),
    }


def board_page(board: Board) -> Page:
    """Return the leaderboard as a page."""
    sizes = [board.cells_of(task)[0][1] for task in board.tasks]
    facts = [
        ("Compared by", board.metric),
        ("Systems", count_text(len(board.rows))),
        ("Sets", count_text(len(board.tasks))),
        ("Queries", count_text(sum(size.num_queries for size in sizes))),
        ("Documents", count_text(sum(size.num_documents for size in sizes))),
    ]
    how = pairs_table("Settings and machine", list(settings(board).items()), "Settings and machine.")
    return Page(
        kind="Retrieval benchmark",
        title=board.rows[0].system if len(board.rows) == 1 else "Leaderboard",
        head=[Note(headline(board)), Facts(facts)],
        sections=[
            ranking_section(board),
            sets_section(board),
            *([sums_section(board)] if board.sums else []),
            *([costs_section(board)] if board.variants else []),
            Section("method", "How it was measured", [how, *command_blocks(board.command)]),
        ],
        document=board_document(board),
    )


def headline(board: Board) -> str:
    """Return the leaderboard in a sentence."""
    first, *others = board.rows
    if not first.is_whole:  # rows that are whole come first: there is none
        return f"No system was evaluated on all {len(board.tasks)} sets."
    over = "" if len(board.tasks) == 1 else f" over {len(board.tasks)} sets"
    sentence = f"{first.system}: {board.metric} {metric_text(first.mean)}{over}"
    if not others:
        return f"{sentence}; nothing to compare it with."
    even = [row for row in others if row.is_whole and not any(cell.is_behind for cell in row.cells)]
    if even:
        verb = "is" if len(even) == 1 else "are"
        count = f"{len(even)} of {plural(len(others), 'other system')}"
        return f"{sentence}; {count} {verb} not significantly below the best on any set."
    return f"{sentence}; every other system is significantly below the best on at least one set."


def ranking_section(board: Board) -> Section:
    """Return every system with its mean and its value on each set."""
    whole = [row for row in board.rows if row.is_whole]
    low, high = min((row.low for row in whole), default=0.0), max((row.high for row in whole), default=1.0)
    middle, reach = (low + high) / 2, (high - low) / 2  # one scale for the bars of all systems

    def mean(row: SystemRow) -> Cell:
        if not row.is_whole:
            return Cell(DASH, "not on every set")
        return Cell(metric_text(row.mean), _interval(row), Span(row.low, row.mean, row.high, reach, middle))

    def value(cell: Standing | None) -> Cell:
        if cell is None:
            return Cell(DASH, tone="muted")
        return Cell(f"{metric_text(cell.value)} {cell.mark}", tone=cell.tone, tone_meaning=cell.reading)

    table = Table(
        ["System", f"Mean {board.metric}", *board.tasks],
        [[row.system, mean(row), *(value(row.cell(task)) for task in board.tasks)] for row in board.rows],
        tones={0: "decisive"} if len(board.rows) > 1 else {},
        title="Ranking",
        caption=(
            f"★ best on the set; ≈ not significantly below it (corrected p ≥ {LEVEL}); ▼ significantly below it "
            f"(corrected p < {LEVEL})."
        ),
        legend=f"The bars go from {metric_text(low)} to {metric_text(high)}.",
        is_numbered=True,
    )
    counts = "Each set counts the same in the mean. " if len(board.tasks) > 1 else ""
    words = f"Means have {INTERVAL}s: how far a mean would move with other queries of the same kind."
    return Section("leaderboard", "Ranking", [Note(counts + words), table])


def sets_section(board: Board) -> Section:
    """Return the systems on each set, tested against the best there."""
    blocks: list[Block] = [
        Note(
            "Each system is compared with the best on the set, query by query, and p is of Student's paired test. With "
            "several comparisons p is corrected for their number (Holm), all sets together; a system is behind where "
            f"the corrected p is below {LEVEL}. Values have {INTERVAL}s."
        )
    ]
    for task in board.tasks:
        cells = board.cells_of(task)
        first = cells[0][1]
        p_heads = _p_heads([cell for _, cell in cells])
        table = Table(
            ["System", board.metric, "To the best", *p_heads, "Reading"],
            [
                [
                    row.system,
                    Cell(metric_text(cell.value), _interval(cell)),
                    _difference(cell),
                    *map(p_text, (cell.p_value, cell.p_value_corrected)[: len(p_heads)]),
                    Cell(f"{cell.mark} {cell.reading}", tone=cell.tone),
                ]
                for row, cell in cells
            ],
            text_columns=frozenset({0, 3 + len(p_heads)}),
            title=f"Systems on {task}",
            caption=f"{plural(first.num_queries, 'query', 'queries')}, {plural(first.num_documents, 'document')}.",
        )
        blocks += [Heading(task), table, *_muted_items(board.notes_of(task))]
    return Section("sets", "Set by set", blocks)


def sums_section(board: Board) -> Section:
    """Return the recalls of both directions and their sum."""
    with_set = len({row.task for row in board.sums}) > 1
    recalls = [f"{side} R@{k}" for side in ("Forward", "Reversed") for k in (1, 5, 10)]
    table = Table(
        ["System", *(["Set"] if with_set else []), *recalls, "rsum"],
        [
            [
                row.system,
                *([row.task] if with_set else []),
                *(metric_text(value, 1) for value in (*row.forward, *row.reverse)),
                Cell(
                    metric_text(row.total.value, 1),
                    f"{metric_text(row.total.low, 1)} to {metric_text(row.total.high, 1)}",
                ),
            ]
            for row in board.sums
        ],
        text_columns=frozenset({0, 1} if with_set else {0}),
        title="Both directions",
        caption="Recalls in percent; their sum, with its interval.",
    )
    words = (
        "R@k is the share of queries, in percent, that find a right one among the first k (hit@k); rsum adds up all "
        "six, 600 at best. Forward is the set as it was given, reversed its documents searching its queries."
    )
    return Section("both", "Both directions", [Note(words), table])


def costs_section(board: Board) -> Section:
    """Return the forms of the vectors on each set, drawn and with their numbers."""
    blocks: list[Block] = [
        Note(
            "A form of a model's vectors has fewer dimensions, fewer bits, or an index that looks at fewer documents. "
            "Latency is of one query at a time on one thread, after a warm-up, without encoding it: half, 95 and 99 of "
            "100 queries took no longer. Bytes behind a plus are those of full vectors that rescoring reads; they may "
            "lie on disk. Other forms of a model are compared with exact search over all dimensions in float32."
        )
    ]
    # A drawing for each set and cost, in which a model is a series; numbers lead from a mark to its row of the table.
    for task in board.tasks:
        series: dict[str, list[VariantRow]] = {}
        for row in board.variants_of(task):
            series.setdefault(row.system, []).append(row)
        figures = [
            cost_figure(board.metric, series, "bytes per document", lambda row: row.cost.bytes_per_document),
            cost_figure(board.metric, series, "milliseconds per query", lambda row: row.cost.milliseconds_per_query),
        ]
        notes = [f"{row.number}: {note}" for row in board.variants_of(task) for note in row.notes]
        blocks += [Heading(task), SideBySide(figures), costs_table(board, task), *_muted_items(notes)]
    return Section("costs", "Quality and cost", blocks)


def costs_table(board: Board, task: str) -> Table:
    """Return the forms of the vectors on one set, each with its quality and its cost."""
    rows = board.variants_of(task)
    p_head = _p_heads(rows)[-1]  # the p that decides alone: with both the last column would leave the page
    with_recall = board.metric != RECALL

    def sizes(cost: Cost) -> str:
        values = [cost.bytes_per_document, *([cost.rescoring_bytes] if cost.rescoring_bytes else [])]
        return " + ".join(number_text(float(f"{value:.4g}")) for value in values)

    def latency(cost: Cost) -> Cell:
        times = (cost.milliseconds_per_query, cost.milliseconds_p95, cost.milliseconds_p99)
        p50, p95, p99 = map(milliseconds_text, times)
        return Cell(p50, f"p95 {p95}, p99 {p99}")

    recall = [RECALL] if with_recall else []
    return Table(
        ["Form", "Model", board.metric, "To exact", p_head, *recall, "Dims", "Bytes per document", "ms per query"],
        [
            [
                row.name,
                row.system,
                metric_text(row.value),
                _difference(row),
                p_text(row.p_value_corrected),
                *([metric_text(row.recall)] if with_recall else []),
                count_text(row.cost.dimension),
                sizes(row.cost),
                latency(row.cost),
            ]
            for row in rows
        ],
        text_columns=frozenset({0, 1}),
        tones={position: "decisive" for position, row in enumerate(rows) if row.p_value is None},
        title=f"Quality and cost on {task}",
        is_numbered=True,
    )


def cost_figure(
    metric: str, series: Mapping[str, Sequence[VariantRow]], axis: str, cost: Callable[[VariantRow], float]
) -> Figure:
    """Return quality against one kind of cost, above 0, as a figure; series are the forms of a model."""
    fronts = []
    for system, rows in series.items():
        best = frontier([(cost(row), row.value) for row in rows])
        numbers = [str(row.number) for row in sorted(rows, key=cost) if (cost(row), row.value) in best]
        fronts.append(f"{clip(system, NAME_CHARACTERS).short} {', '.join(numbers)}")
    return Figure(
        f"{metric} against {axis}",
        partial(draw_cost, list(series.values()), cost, axis),
        "No other form of the same model beats these in both quality and cost (numbers as in the table, cheapest "
        f"first): {'; '.join(fronts)}. A line joins them.",
        series=list(series),
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, quality) that no other beats in both, cheapest first."""
    kept: list[tuple[float, float]] = []
    # By cost, of equal cost the best first: a point stays if it is better than all cheaper ones.
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or quality > kept[-1][1]:
            kept.append((cost, quality))
    return kept


def draw_cost(
    series: Sequence[Sequence[VariantRow]],
    cost: Callable[[VariantRow], float],
    axis: str,
    *,
    name: str,
    label: str,
) -> Markup:
    """Draw quality against one kind of cost: a mark with its number for each form, a line through the best."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    with chart_axes((5.2, 3.3)) as (figure, axes):
        for position, rows in enumerate(series):
            colour = SERIES_COLOURS[position % len(SERIES_COLOURS)]
            marker = SERIES_MARKERS[position % len(SERIES_MARKERS)][0]
            points = [(cost(row), row.value) for row in rows]
            # A thin line through the forms that nothing beats, then all forms as marks over it.
            axes.plot(*zip(*frontier(points), strict=True), color=colour, linewidth=1.2, alpha=0.55)
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5.0, linestyle="")
            # Above the mark and below it in turn: numbers of two models would lie on each other.
            offset = (4, 4) if position % 2 == 0 else (4, -10)  # forms of two models often share a cost
            for row, (x, y) in zip(rows, points, strict=True):
                axes.annotate(
                    str(row.number), (x, y), textcoords="offset points", xytext=offset, fontsize=8.0, color=colour
                )
        costs = [cost(row) for rows in series for row in rows]
        ratio = max(costs) / min(costs)
        if ratio < 10:
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.xaxis.set_major_formatter(axis_labels())
        else:
            # Of less than two decades ticks at 1, 2 and 5 as well: powers of ten alone would be one or two.
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if ratio < 100 else (1.0,)))
            axes.xaxis.set_major_formatter(FuncFormatter(tick_text))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(axis)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(axis_labels())
        axes.margins(x=0.08, y=0.12)
        return inline_svg(figure, name=name, label=label)


def _interval(row: SystemRow | Standing) -> str:
    return f"{metric_text(row.low)} to {metric_text(row.high)}"


def _difference(row: Standing | VariantRow) -> str:
    """Return the difference to what a row is compared with, or a dash where that is the row itself."""
    return DASH if row.p_value is None else signed_text(row.difference)


def _p_heads(rows: Sequence[Standing | VariantRow]) -> list[str]:
    """Return the heads of a table's p-values; the corrected ones have a column where the correction changes any."""
    return ["p", "p (Holm)"] if any(row.p_value_corrected != row.p_value for row in rows) else ["p"]


def _muted_items(notes: Sequence[str]) -> list[Block]:
    return [NoteList([Note(note, muted=True) for note in notes])] if notes else []


def board_document(board: Board) -> dict[str, object]:
    """Return the leaderboard for programs, every number unrounded."""

    def standing(cell: Standing) -> dict[str, object]:
        record = asdict(cell)
        low, high = record.pop("low"), record.pop("high")  # one key for both, as in report.json
        return {**record, "interval": [low, high]}

    return {
        "schema_version": SCHEMA_VERSION,
        "metric": board.metric,
        "confidence": CONFIDENCE,
        "significance_level": LEVEL,
        "sets": list(board.tasks),
        "systems": [
            {
                "rank": rank,
                "system": row.system,
                "mean": row.mean if row.is_whole else None,
                "interval": [row.low, row.high] if row.is_whole else None,
                "sets": [standing(cell) for cell in row.cells],
            }
            for rank, row in enumerate(board.rows, start=1)
        ],
        "both_directions": [asdict(row) for row in board.sums],
        "variants": [asdict(row) for row in board.variants],
        "settings": dict(settings(board)),
        "command": board.command,
    }
