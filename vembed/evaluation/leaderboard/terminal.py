"""The leaderboard as a compact table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.leaderboard.content import RECALL
from vembed.evaluation.leaderboard.text import (
    COST_NOTE,
    LEGEND,
    cell_text,
    latencies,
    mean_cells,
    stored_size,
    sum_cells,
)
from vembed.pages.text import clip, columns_of, metric_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.evaluation.leaderboard.content import Board

NAME_CHARACTERS = 44
TASK_CHARACTERS = 22


def render_terminal(board: Board) -> str:
    """Return the lines that end the command."""
    heads = ["", "system", board.metric, "95% interval", *(clip(task, TASK_CHARACTERS).short for task in board.tasks)]
    body = [
        [
            str(rank),
            clip(row.system, NAME_CHARACTERS).short,
            *mean_cells(row),
            *(cell_text(row.cell(task)) for task in board.tasks),
        ]
        for rank, row in enumerate(board.rows, start=1)
    ]
    blocks = [aligned([heads, *body], left={1}), LEGEND]
    if board.sums:
        heads = ["set", "system", "rsum", "95% interval"]
        lines = [
            [clip(row.task, TASK_CHARACTERS).short, clip(row.system, NAME_CHARACTERS).short, *sum_cells(row)[-2:]]
            for row in board.sums
        ]
        blocks += ["", aligned([heads, *lines], left={0, 1})]
    if board.variants:
        recall = [RECALL] if board.metric != RECALL else []
        heads = ["set", "system", "form", board.metric, *recall, "bytes/document", "ms/query", "p95", "p99"]
        lines = [
            [
                clip(row.task, TASK_CHARACTERS).short,
                clip(row.system, NAME_CHARACTERS).short,
                clip(row.name, NAME_CHARACTERS).short,
                metric_text(row.value),
                *([metric_text(row.recall)] if recall else []),
                stored_size(row.cost),
                *latencies(row.cost),
            ]
            for row in board.variants
        ]
        blocks += ["", aligned([heads, *lines], left={0, 1, 2}), COST_NOTE]
    return "\n".join(blocks)


def aligned(rows: Sequence[Sequence[str]], *, left: set[int]) -> str:
    """Return rows as lines of columns, two spaces apart, numbers at the right."""
    widths = [max(columns_of(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for column, (text, width) in enumerate(zip(row, widths, strict=True)):
            room = " " * (width - columns_of(text))
            cells.append(text + room if column in left else room + text)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
