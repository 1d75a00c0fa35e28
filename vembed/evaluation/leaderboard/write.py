"""Write the leaderboard's three files, each of them whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.errors import MachineError
from vembed.evaluation.leaderboard.html import render_html
from vembed.evaluation.leaderboard.machine import render_json
from vembed.evaluation.leaderboard.markdown import render_markdown
from vembed.files import replace_text

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.evaluation.leaderboard.content import Board


def write_leaderboard(folder: Path, board: Board) -> None:
    """Write leaderboard.json, leaderboard.md and leaderboard.html.

    All three are rendered before the first is written. Files of an older leaderboard are replaced.

    Args:
        folder: Where they go.
        board: What to write.

    Raises:
        MachineError: The folder can't be written.
    """
    files = {
        "leaderboard.json": render_json(board),
        "leaderboard.md": render_markdown(board),
        "leaderboard.html": render_html(board),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_text(folder / name, text)
    except OSError as error:
        raise MachineError(f"{folder}: the leaderboard can't be written: {error}; free some space there") from error
