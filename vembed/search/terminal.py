"""Hits as lines of a terminal: nothing wider than it, nothing that could steer it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.pages.text import columns_of, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.search.index import Hit

INDENT = 4
ELLIPSIS = "…"


def hit_lines(hits: Sequence[Hit], *, width: int) -> list[str]:
    """Return two lines for each hit: rank, score and id; and the beginning of its text, or a picture's path."""
    lines = []
    for hit in hits:
        lines.append(clip_to_width(f"{hit.rank:>{INDENT - 2}}  {hit.score:7.4f}  {one_line(hit.id)}", width))
        # Far fewer characters than this fit: a text of megabytes need not be looked at whole.
        text = one_line(hit.text[: 8 * width])
        if hit.image is not None:
            path = "" if hit.image == hit.id else one_line(hit.image)
            text = ": ".join(part for part in (path, text) if part) or "(picture)"
        lines.append(f"{' ' * INDENT}{clip_to_width(text, width - INDENT) or '(no text)'}")
    return lines


def clip_to_width(text: str, width: int) -> str:
    """Cut a line to a number of terminal columns; an ellipsis says that something is missing.

    Args:
        width: Columns, at least 1; characters of East Asian scripts take two, combining marks none.
    """
    columns = 0
    fits = 0
    for number, character in enumerate(text):
        columns += columns_of(character)
        if columns > width:
            return text[:fits].rstrip() + ELLIPSIS
        if columns <= width - 1:
            fits = number + 1
    return text
