"""The leaderboard as a page and as JSON: ranking, sets, both directions, and the cost of the forms of the vectors."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from vembed.evaluation.judge import CONFIDENCE, LEVEL
from vembed.evaluation.leaderboard import RECALL
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

    from vembed.evaluation.benchmark.stored import Cost
    from vembed.evaluation.leaderboard import Board, Standing, SystemRow, VariantRow
    from vembed.pages.page import Block

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
INTERVAL = f"{100 * CONFIDENCE:g}% interval"
NAME_CHARACTERS = 40  # of a model's name in the words of a figure, whose legend has all of it


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
