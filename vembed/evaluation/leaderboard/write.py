"""Write the leaderboard's three files, each of them whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from vembed.evaluation.leaderboard.charts import draw_cost
from vembed.evaluation.leaderboard.content import CONFIDENCE, LEVEL, settings
from vembed.evaluation.leaderboard.tables import costs_table, means_table, sums_table, swatch, tests_table
from vembed.evaluation.leaderboard.text import COST_NOTE, LEGEND, SUM_NOTE, headline
from vembed.evaluation.pages import html_environment, markdown_environment, write_pages
from vembed.pages.text import count_text, one_line, plain

if TYPE_CHECKING:
    from pathlib import Path

    from markupsafe import Markup

    from vembed.evaluation.leaderboard.content import Board, VariantRow

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it


def write_leaderboard(folder: Path, board: Board) -> None:
    """Write leaderboard.json, leaderboard.md and leaderboard.html.

    All three are rendered before the first is written. Files of an older leaderboard are replaced.

    Raises:
        MachineError: The folder can't be written.
    """
    files = {
        "leaderboard.json": render_json(board),
        "leaderboard.md": render_markdown(board),
        "leaderboard.html": render_html(board),
    }
    write_pages(folder, files, "leaderboard")


def render_json(board: Board) -> str:
    """Return the leaderboard for programs: every number unrounded."""
    document = {
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
                "sets": [_with_interval(asdict(cell)) for cell in row.cells],
            }
            for rank, row in enumerate(board.rows, start=1)
        ],
        "both_directions": [asdict(row) for row in board.sums],
        "variants": [{**asdict(row), "cost": asdict(row.cost)} for row in board.variants],
        "settings": dict(settings(board)),
        "command": board.command,
    }
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def _with_interval(record: dict[str, object]) -> dict[str, object]:
    """Return a cell with its interval in one entry."""
    low, high = record.pop("low"), record.pop("high")
    return {**record, "interval": [low, high]}


def render_markdown(board: Board) -> str:
    """Return the leaderboard as Markdown."""
    return markdown_environment().get_template("leaderboard.md.jinja").render(_shared(board, page=False))


def render_html(board: Board) -> str:
    """Return the leaderboard as one self-contained page."""
    sizes = [board.cells_of(task)[0][1] for task in board.tasks]
    facts = [
        ("Compared by", one_line(board.metric)),
        ("Systems", count_text(len(board.rows))),
        ("Sets", count_text(len(board.tasks))),
        ("Queries", count_text(sum(cell.num_queries for cell in sizes))),
        ("Documents", count_text(sum(cell.num_documents for cell in sizes))),
    ]
    template = html_environment().get_template("leaderboard.html.jinja")
    return template.render(
        _shared(board, page=True), key_facts=facts, drawings=partial(_drawings, board), swatch=swatch
    )


def _shared(board: Board, *, page: bool) -> dict[str, object]:
    """Return what the page and the Markdown file both tell."""
    return {
        "board": board,
        "headline": headline(board),
        "means": means_table(board, page=page),
        "legend": LEGEND,
        "interval": f"{100 * CONFIDENCE:g}%",
        "tests": partial(tests_table, board, page=page),
        "sums": sums_table(board, page=page),
        "sum_note": SUM_NOTE,
        "cost_note": COST_NOTE,
        "costs": partial(costs_table, board, page=page),
        "settings": list(settings(board).items()),
    }


def _drawings(board: Board, place: int) -> list[tuple[str, Markup]]:
    """Return title and drawing of quality against each cost on the set at a place."""
    rows = board.variants_of(board.tasks[place])
    series = [[row for row in rows if row.system == system] for system in dict.fromkeys(row.system for row in rows)]

    def stored(row: VariantRow) -> float:
        return row.cost.bytes_per_document

    def searched(row: VariantRow) -> float:
        return row.cost.milliseconds_per_query

    found = []
    for axis, word, cost in (("bytes per document", "bytes", stored), ("milliseconds per query", "latency", searched)):
        title = f"{one_line(board.metric)} against {axis}"
        label = f"{title}; the table has the numbers."
        found.append((title, draw_cost(series, cost, axis=axis, name=f"{word}{place}", label=label)))
    return found
