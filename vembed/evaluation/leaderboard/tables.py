"""The tables of a leaderboard, for its page and for Markdown.

On the page an interval stands small under its number, a rank before its name, and marks have colours; in Markdown
intervals and ranks have columns of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from vembed.evaluation.leaderboard.charts import series_mark
from vembed.evaluation.leaderboard.content import CONFIDENCE, RECALL
from vembed.evaluation.leaderboard.text import (
    NOTHING,
    SUM_HEADS,
    cell_text,
    difference_text,
    interval,
    latencies,
    mark,
    mean_cells,
    p_text,
    reading,
    stored_size,
    sum_cells,
)
from vembed.pages.page import Cell, Table
from vembed.pages.text import clip, count_text, metric_text, one_line

if TYPE_CHECKING:
    from vembed.evaluation.leaderboard.content import Board, Row, Standing

NAME_CHARACTERS = 40  # of a model's name in the table of costs, whose legend has all of it
INTERVAL = f"{100 * CONFIDENCE:g}% interval"


def means_table(board: Board, *, page: bool) -> Table:
    """Return every system with its mean and its value on each set."""
    whole = [row for row in board.rows if row.is_whole]
    low, high = min((row.low for row in whole), default=0.0), max((row.high for row in whole), default=1.0)
    rows: list[list[str | Cell]] = []
    for rank, row in enumerate(board.rows, start=1):
        mean, bounds = mean_cells(row)
        values = [_value(row.cell(task), page=page) for task in board.tasks]
        if page:
            number = Cell(mean, bounds if row.is_whole else "")
            rows.append([_ranked(rank, row.system), number, _span(row, low, high), *values])
        else:
            rows.append([str(rank), row.system, mean, bounds, *values])
    mean, tasks = f"Mean {one_line(board.metric)}", [one_line(task) for task in board.tasks]
    if not page:
        return Table(["Rank", "System", mean, INTERVAL, *tasks], rows, words=frozenset({1}))
    heads = ["System", mean, f"From {metric_text(low)} to {metric_text(high)}", *tasks]
    return Table(heads, rows, frozenset({0, 2}), {0: "decisive"} if len(rows) > 1 else {})


def tests_table(board: Board, task: str, *, page: bool) -> Table:
    """Return every system on one set, tested against the best there."""
    rows: list[list[str | Cell]] = []
    for row, cell in board.cells_of(task):
        value, bounds = metric_text(cell.value), interval(cell.low, cell.high)
        tests = [difference_text(cell), p_text(cell.p_value)]
        if page:
            read = Markup('<span class="nowrap">{} {}</span>').format(_mark(cell), reading(cell))
            rows.append([one_line(row.system), Cell(value, bounds), *tests, read])
        else:
            rows.append([row.system, value, bounds, *tests, f"{mark(cell)} {reading(cell)}"])
    heads = ["System", one_line(board.metric), *([] if page else [INTERVAL]), "To the best", "p", "Reading"]
    return Table(heads, rows, words=frozenset({0, len(heads) - 1} if page else {0, 5}))


def sums_table(board: Board, *, page: bool) -> Table:
    """Return the recalls of both directions and their sum."""
    if not page:
        body = [[row.task, row.system, *sum_cells(row)] for row in board.sums]
        return Table(["Set", "System", *SUM_HEADS, "rsum", INTERVAL], body, words=frozenset({0, 1}))
    with_set = len({row.task for row in board.sums}) > 1
    rows: list[list[str | Cell]] = []
    for row in board.sums:
        *recalls, total, bounds = sum_cells(row)
        rows.append([one_line(row.system), *([one_line(row.task)] * with_set), *recalls, Cell(total, bounds)])
    heads = ["System", *(["Set"] * with_set), *SUM_HEADS, "rsum"]
    return Table(heads, rows, words=frozenset({0, 1} if with_set else {0}))


def costs_table(board: Board, task: str, *, page: bool) -> Table:
    """Return the forms of the vectors on one set, each with its quality and its cost."""
    found = board.variants_of(task)
    with_recall = board.metric != RECALL
    places = {system: place for place, system in enumerate(dict.fromkeys(row.system for row in found))}
    rows: list[list[str | Cell]] = []
    for row in found:
        numbers = [
            metric_text(row.value),
            difference_text(row),
            p_text(row.p_value),
            *([metric_text(row.recall)] if with_recall else []),
            count_text(row.cost.dimension),
            stored_size(row.cost),
        ]
        p50, p95, p99 = latencies(row.cost)
        if page:
            named = Markup('<span class="nowrap">{} {}</span>')
            name = named.format(swatch(places[row.system]), clip(row.system, NAME_CHARACTERS).short)
            rows.append([_ranked(row.number, row.name), name, *numbers, Cell(p50, f"p95 {p95}, p99 {p99}")])
        else:
            rows.append([str(row.number), row.system, row.name, *numbers, p50, p95, p99])
    recall = [RECALL] if with_recall else []
    heads = [one_line(board.metric), "To exact", "p", *recall, "Dims", "Bytes per document", "ms per query"]
    if not page:
        return Table([Markup("#"), "Model", "Form", *heads, "p95", "p99"], rows, words=frozenset({1, 2}))
    exact = {place: "decisive" for place, row in enumerate(found) if row.p_value is None}
    return Table(["Form", "Model", *heads], rows, frozenset({0, 1}), exact)


def swatch(position: int) -> Markup:
    """Return the mark that a model has in the drawings."""
    tone, character = series_mark(position)
    return Markup('<span class="swatch {}" aria-hidden="true">{}</span>').format(tone, character)


def _ranked(rank: int, name: str) -> Markup:
    return Markup('<span class="muted">{}.</span> {}').format(rank, one_line(name))


def _value(cell: Standing | None, *, page: bool) -> str:
    """Return a value and its mark, or a dash where the system wasn't evaluated."""
    if not page:
        return cell_text(cell)
    if cell is None:
        return Markup('<span class="muted">{}</span>').format(NOTHING)
    return Markup("<span>{} {}</span>").format(metric_text(cell.value), _mark(cell))


def _mark(cell: Standing) -> Markup:
    """Return the mark of a value in its colour, with its words for a screen reader."""
    tone = "best" if cell.p_value is None else "behind" if cell.is_behind else "even"
    form = Markup('<span class="mark-{}" title="{words}" role="img" aria-label="{words}">{}</span>')
    return form.format(tone, mark(cell), words=reading(cell))


def _span(row: Row, low: float, high: float) -> Markup:
    """Draw a mean and its interval on the axis that all rows share; the numbers stand beside it."""
    if not row.is_whole:
        return Markup('<span class="muted">not on every set</span>')
    left, middle, right = (3 + 154 * (value - low) / ((high - low) or 1.0) for value in (row.low, row.mean, row.high))
    return Markup(
        '<svg viewBox="0 0 160 16" class="span" aria-hidden="true"><line x1="3" x2="157" y1="8" y2="8" class="frame">'
        '</line><line x1="{:.2f}" x2="{:.2f}" y1="8" y2="8" class="span"></line><circle cx="{:.2f}" cy="8" r="3.2">'
        "</circle></svg>"
    ).format(left, right, middle)
