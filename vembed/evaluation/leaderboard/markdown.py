"""The leaderboard as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.leaderboard.content import CONFIDENCE, settings
from vembed.evaluation.leaderboard.text import (
    LEGEND,
    SUM_HEADS,
    SUM_NOTE,
    cell_text,
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
from vembed.evaluation.pages import escape_markdown as escape
from vembed.evaluation.pages import fenced
from vembed.evaluation.report.markdown import pairs_table, table
from vembed.evaluation.text import count_text, metric_text

if TYPE_CHECKING:
    from vembed.evaluation.leaderboard.content import Board


def render_markdown(board: Board) -> str:
    """Return the document."""
    blocks = ["# Retrieval benchmark", escape(headline(board)), "## Leaderboard", _leaderboard(board), escape(LEGEND)]
    blocks.append("## Set by set")
    for task in board.tasks:
        blocks += [f"### {escape(task)}", _set(board, task), *_notes(board, task)]
    if board.sums:
        blocks += ["## Both directions", SUM_NOTE, _sums(board)]
    if board.variants:
        blocks.append("## Quality and cost")
        for task in board.tasks:
            blocks += [f"### {escape(task)}: forms of the vectors", _variants(board, task)]
    blocks += ["## How it was measured", pairs_table(list(settings(board).items()))]
    if board.command:
        blocks += ["## Reproduce", fenced(board.command)]
    return "\n\n".join(blocks) + "\n"


def _leaderboard(board: Board) -> str:
    share = f"{100 * CONFIDENCE:g}% interval"
    heads = ["Rank", "System", f"Mean {escape(board.metric)}", share, *(escape(task) for task in board.tasks)]
    body = [
        [
            str(rank),
            escape(row.system),
            *mean_cells(row),
            *(cell_text(row.cell(task)) for task in board.tasks),
        ]
        for rank, row in enumerate(board.rows, start=1)
    ]
    return table(heads, body, numeric={0, 2, 3, *range(4, len(heads))})


def _set(board: Board, task: str) -> str:
    heads = ["System", escape(board.metric), f"{100 * CONFIDENCE:g}% interval", "To the best", "p", "Reading"]
    body = [
        [
            escape(row.system),
            metric_text(cell.value),
            interval(cell.low, cell.high),
            difference_text(cell),
            escape(p_text(cell.p_value)),
            f"{mark(cell)} {reading(cell)}",
        ]
        for row, cell in board.cells_of(task)
    ]
    cell = board.cells_of(task)[0][1]
    scope = f"{count_text(cell.num_queries)} queries, {count_text(cell.num_documents)} documents."
    return f"{scope}\n\n{table(heads, body, numeric={1, 2, 3, 4})}"


def _notes(board: Board, task: str) -> list[str]:
    notes = board.notes_of(task)
    found = [f"- {escape(names)}: {escape(note)}" if names else f"- {escape(note)}" for names, note in notes]
    return ["\n".join(found)] if found else []


def _sums(board: Board) -> str:
    heads = ["Set", "System", *SUM_HEADS, "rsum", f"{100 * CONFIDENCE:g}% interval"]
    body = [[escape(row.task), escape(row.system), *sum_cells(row)] for row in board.sums]
    return table(heads, body, numeric=range(2, len(heads)))


def _variants(board: Board, task: str) -> str:
    heads = ["#", "Model", "Form", escape(board.metric), "To exact", "p", "Dims", "Bytes per document", "ms per query"]
    body = [
        [
            str(row.number),
            escape(row.system),
            escape(row.name),
            metric_text(row.value),
            difference_text(row),
            escape(p_text(row.p_value)),
            count_text(row.cost.dimension),
            size(row.cost.bytes_per_document),
            milliseconds(row.cost.milliseconds_per_query),
        ]
        for row in board.variants_of(task)
    ]
    notes = [f"- {row.number}: {escape(note)}" for row in board.variants_of(task) for note in row.notes]
    return "\n\n".join([table(heads, body, numeric={0, 3, 4, 5, 6, 7, 8}), *(["\n".join(notes)] if notes else [])])
