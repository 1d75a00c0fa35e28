"""The leaderboard for programs: every number unrounded."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from vembed.evaluation.leaderboard.content import CONFIDENCE, LEVEL, settings
from vembed.evaluation.text import plain

if TYPE_CHECKING:
    from vembed.evaluation.leaderboard.content import Board

SCHEMA_VERSION = 1
"""Raised when a key changes its meaning or goes away; a new key doesn't raise it."""


def render_json(board: Board) -> str:
    """Return leaderboard.json."""
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
                "sets": [_record(cell) for cell in row.cells],
            }
            for rank, row in enumerate(board.rows, start=1)
        ],
        "both_directions": [asdict(row) for row in board.sums],
        "variants": [{**asdict(row), "cost": asdict(row.cost)} for row in board.variants],
        "settings": dict(settings(board)),
        "command": board.command,
    }
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def _record(cell: object) -> dict[str, object]:
    """Return a cell with its interval in one entry."""
    record = asdict(cell)  # type: ignore[call-overload]
    record["interval"] = [record.pop("low"), record.pop("high")]
    return dict(record)
