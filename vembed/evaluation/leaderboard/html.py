"""The leaderboard as one self-contained HTML page, in the look of the run report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.leaderboard.charts import draw_cost, series_mark
from vembed.evaluation.leaderboard.content import CONFIDENCE, settings
from vembed.evaluation.leaderboard.style import LEADERBOARD_STYLE
from vembed.evaluation.leaderboard.text import (
    LEGEND,
    NOTHING,
    SUM_HEADS,
    SUM_NOTE,
    difference_text,
    headline,
    interval,
    mark,
    mean_cells,
    milliseconds,
    p_text,
    reading,
    size,
    sum_cells,
)
from vembed.evaluation.report.html_parts import (
    MAIN_ID,
    Column,
    long_block,
    pairs_table,
    section,
    stacked_row,
    stacked_table,
    whole_page,
    with_bounds,
)
from vembed.evaluation.report.markup import Html, element, join
from vembed.evaluation.text import clip, count_text, metric_text, one_line, plural

if TYPE_CHECKING:
    from vembed.evaluation.leaderboard.content import Board, Cell, Row, VariantRow


NAME_CHARACTERS = 40
"""Most characters of a model's name in the table of costs, whose legend has all of it."""


def render_html(board: Board) -> str:
    """Return the page."""
    sections = [_overview(board), _leaderboard(board), _sets(board)]
    sections += [_sums(board)] if board.sums else []
    sections += [_costs(board)] if board.variants else []
    title = one_line(board.rows[0].system) if len(board.rows) == 1 else "Leaderboard"
    return whole_page(
        f"Retrieval benchmark: {one_line(board.rows[0].system)}",
        element("header", element("p", "Retrieval benchmark", class_="kind"), element("h1", title)),
        element("main", join([*sections, _method(board)], "\n"), id=MAIN_ID, tabindex=-1),
        style=LEADERBOARD_STYLE,
    )


def _overview(board: Board) -> Html:
    """Return the leaderboard in a sentence, key facts and the way to the sections."""
    sizes = [board.cells_of(task)[0][1] for task in board.tasks]
    facts = [
        ("Compared by", one_line(board.metric)),
        ("Systems", count_text(len(board.rows))),
        ("Sets", count_text(len(board.tasks))),
        ("Queries", count_text(sum(cell.num_queries for cell in sizes))),
        ("Documents", count_text(sum(cell.num_documents for cell in sizes))),
    ]
    links = [("leaderboard", "Leaderboard"), ("sets", "Set by set")]
    links += [("both", "Both directions")] if board.sums else []
    links += [("costs", "Quality and cost")] if board.variants else []
    links += [("method", "How it was measured")]
    return join(
        [
            element("p", headline(board), class_="lead"),
            element(
                "dl",
                *(element("div", element("dt", label), element("dd", value)) for label, value in facts),
                class_="facts",
            ),
            element(
                "nav",
                element("ul", *(element("li", element("a", text, href=f"#{target}")) for target, text in links)),
                aria_label="Sections",
            ),
        ]
    )


def _ranked(rank: int, name: str) -> Html:
    """Return a name behind its place."""
    return join([element("span", f"{rank}.", class_="muted"), f" {name}"])


def _leaderboard(board: Board) -> Html:
    """Return the table of means."""
    whole = [row for row in board.rows if row.is_whole]
    low, high = min((row.low for row in whole), default=0.0), max((row.high for row in whole), default=1.0)
    columns = [
        Column("System", is_number=False),
        Column(f"Mean {one_line(board.metric)}"),
        Column(f"From {metric_text(low)} to {metric_text(high)}", is_number=False),
        *(Column(one_line(task)) for task in board.tasks),
    ]
    rows = []
    for rank, row in enumerate(board.rows, start=1):
        mean, bounds = mean_cells(row)
        cells = [
            with_bounds(mean, bounds if row.is_whole else ""),
            _span(row, low, high) if row.is_whole else element("span", "not on every set", class_="muted"),
            *(_valued(row.cell(task)) for task in board.tasks),
        ]
        is_first = rank == 1 and len(board.rows) > 1
        rows.append(
            stacked_row(columns, _ranked(rank, one_line(row.system)), cells, tone="decisive" if is_first else None)
        )
    lead = "Each set counts the same in the mean. " if len(board.tasks) > 1 else ""
    return section(
        "leaderboard",
        "Leaderboard",
        element(
            "p",
            f"{lead}The small numbers are {100 * CONFIDENCE:g}% intervals: how far a mean would move with other "
            "queries of the same kind.",
        ),
        stacked_table(LEGEND, columns, rows, label="Leaderboard"),
    )


def _valued(cell: Cell | None) -> Html:
    """Return a value and its mark, or a dash where the system wasn't evaluated."""
    if cell is None:
        return element("span", NOTHING, class_="muted")
    return element("span", metric_text(cell.value), " ", _mark(cell))


def _span(row: Row, low: float, high: float) -> Html:
    """Draw a mean and its interval on the axis that all rows share; the numbers stand beside it."""
    width = (high - low) or 1.0
    x = [3 + 154 * (value - low) / width for value in (row.low, row.mean, row.high)]
    return element(
        "svg",
        element("line", x1=3, x2=157, y1=8, y2=8, class_="frame"),
        element("line", x1=f"{x[0]:.2f}", x2=f"{x[2]:.2f}", y1=8, y2=8, class_="span"),
        element("circle", cx=f"{x[1]:.2f}", cy=8, r=3.2),
        viewBox="0 0 160 16",
        class_="span",
        aria_hidden="true",
    )


def _mark(cell: Cell) -> Html:
    """Return the mark of a cell in its colour, with its words for a screen reader."""
    tone = "best" if cell.p_value is None else "behind" if cell.is_behind else "even"
    return element("span", mark(cell), class_=f"mark-{tone}", title=reading(cell), role="img", aria_label=reading(cell))


def _sets(board: Board) -> Html:
    """Return a table of tests for each set."""
    lead = (
        "p says how often swapping the values of a system and of the best on the set at random, query by query, gives "
        "a difference at least as large: below 0.05, chance is a poor explanation. It is not corrected for the number "
        "of systems."
    )
    parts = [element("p", lead)]
    for task in board.tasks:
        pairs = board.cells_of(task)
        scope = (
            f"{plural(pairs[0][1].num_queries, 'query', 'queries')}, {plural(pairs[0][1].num_documents, 'document')}."
        )
        columns = [
            Column("System", is_number=False),
            *(Column(name) for name in (one_line(board.metric), "To the best", "p")),
            Column("Reading", is_number=False),
        ]
        rows = [_set_row(columns, row, cell) for row, cell in pairs]
        parts += [element("h3", one_line(task)), stacked_table(scope, columns, rows, label=one_line(task))]
        notes = board.notes_of(task)
        parts += _bullets(
            [f"{one_line(names)}: {one_line(note)}" if names else one_line(note) for names, note in notes]
        )
    return section("sets", "Set by set", *parts)


def _bullets(notes: list[str]) -> list[Html]:
    """Return notes as a list, or nothing where there are none."""
    return [element("ul", *(element("li", note) for note in notes), class_="small muted")] if notes else []


def _set_row(columns: list[Column], row: Row, cell: Cell) -> Html:
    """Return one system on one set."""
    cells = [
        with_bounds(metric_text(cell.value), interval(cell.low, cell.high)),
        difference_text(cell),
        p_text(cell.p_value),
        element("span", _mark(cell), " ", reading(cell), class_="nowrap"),
    ]
    return stacked_row(columns, one_line(row.system), cells)


def _sums(board: Board) -> Html:
    """Return the recalls of both directions and their sum."""
    columns = [
        Column("System", is_number=False),
        *([Column("Set", is_number=False)] if len({row.task for row in board.sums}) > 1 else []),
        *(Column(head) for head in SUM_HEADS),
        Column("rsum"),
    ]
    rows = []
    for row in board.sums:
        *recalls, total, bounds = sum_cells(row)
        where = [one_line(row.task)] if columns[1].head == "Set" else []
        rows.append(stacked_row(columns, one_line(row.system), [*where, *recalls, with_bounds(total, bounds)]))
    table = stacked_table("Recalls in percent; their sum, with its interval.", columns, rows, label="Both directions")
    return section("both", "Both directions", element("p", SUM_NOTE), table)


def _costs(board: Board) -> Html:
    """Return drawings and tables of quality against cost, set by set."""
    lead = (
        "Each number is one form of a model's vectors: fewer dimensions, fewer bits, or an index that looks at fewer "
        "documents. The line joins the forms that no other form of the same model beats in both quality and cost. "
        "Latency is the search of one query on one thread, the median; encoding the query is not in it."
    )
    parts = [element("p", lead)]
    for place, task in enumerate(board.tasks):
        rows = board.variants_of(task)
        parts += [element("h3", one_line(task)), _cost_figures(board, rows, place=place), _cost_table(board, rows)]
        parts += _bullets([f"{row.number}: {one_line(note)}" for row in rows for note in row.notes])
    return section("costs", "Quality and cost", *parts)


def _cost_figures(board: Board, rows: list[VariantRow], *, place: int) -> Html:
    """Return both drawings of one set and their legend."""
    systems = list(dict.fromkeys(row.system for row in rows))
    series = [[row for row in rows if row.system == system] for system in systems]
    metric = one_line(board.metric)
    figures = [
        element(
            "figure",
            element("p", f"{metric} against {what}", class_="title"),
            draw_cost(
                series,
                cost,
                axis=what,
                name=f"{word}{place}",
                label=f"{metric} against {what}; the table has the numbers.",
            ),
            class_="card",
        )
        for what, word, cost in (
            ("bytes per document", "bytes", lambda row: row.cost.bytes_per_document),
            ("milliseconds per query", "latency", lambda row: row.cost.milliseconds_per_query),
        )
    ]
    legend = [element("li", _swatch(position), one_line(system)) for position, system in enumerate(systems)]
    return join([element("ul", *legend, class_="legend across"), element("div", *figures, class_="grid two")])


def _swatch(position: int) -> Html:
    """Return the mark that a model has in the drawings."""
    tone, character = series_mark(position)
    return element("span", character, class_=f"swatch {tone}", aria_hidden="true")


def _cost_table(board: Board, rows: list[VariantRow]) -> Html:
    """Return the numbers behind the drawings."""
    names = [one_line(board.metric), "To exact", "p", "Dims", "Bytes per document", "ms per query"]
    columns = [
        Column("Form", is_number=False),
        Column("Model", is_number=False),
        *(Column(name) for name in names),
    ]
    systems = {system: place for place, system in enumerate(dict.fromkeys(row.system for row in rows))}
    body = []
    for row in rows:
        name = clip(row.system, NAME_CHARACTERS).short
        cells = [
            element("span", _swatch(systems[row.system]), " ", name, class_="nowrap"),
            metric_text(row.value),
            difference_text(row),
            p_text(row.p_value),
            count_text(row.cost.dimension),
            size(row.cost.bytes_per_document),
            milliseconds(row.cost.milliseconds_per_query),
        ]
        tone = "decisive" if row.p_value is None else None
        body.append(stacked_row(columns, _ranked(row.number, one_line(row.name)), cells, tone=tone))
    caption = "Exact search over all dimensions in float32 is what the other forms of a model are compared with."
    return stacked_table(caption, columns, body, label="Quality and cost")


def _method(board: Board) -> Html:
    """Return settings, machine and command."""
    parts = [pairs_table("Settings and machine.", list(settings(board).items()), label="Settings and machine")]
    if board.command:
        parts += [element("h3", "Reproduce"), long_block(board.command, label="Command")]
    return section("method", "How it was measured", *parts)
