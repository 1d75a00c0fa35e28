"""Tables of the leaderboard in Markdown, of cells that are escaped already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.pages import markdown_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def pairs_table(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    return markdown_pairs(pairs)


def table(heads: Sequence[str], body: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()) -> str:
    """Return a table of cells that are escaped already; columns of numbers are aligned right."""
    right = set(numeric)
    rule = ["---:" if column in right else "---" for column in range(len(heads))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *body))
