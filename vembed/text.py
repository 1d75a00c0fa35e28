"""Numbers as people read them, one function for each kind of number; and texts that are safe to look at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NEAR = 0.75
"""Similarity of two names, as difflib has it, from which one is taken for a misspelling of the other."""

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\ud800-\udfff]"
)
"""Control characters, reordering marks, invisible spaces, lone surrogates; joiners that scripts and emoji need stay."""


def visible(text: str) -> str:
    r"""Replace every character that can't be seen or encoded by its escape, e.g. an escape character by `\x1b`.

    Line feeds and tabs stay: they are layout, and HTML and Markdown treat them themselves.
    """
    return _INVISIBLE.sub(
        lambda match: f"\\x{code:02x}" if (code := ord(match.group())) < 0x100 else f"\\u{code:04x}", text
    )


def cut(text: str, most: int = 60) -> str:
    """Return a text for a message: visible, and cut where it has more than so many characters."""
    # Cut before it is made visible: escapes are longer, and a text of millions of characters would all be searched.
    return visible(text if len(text) <= most else f"{text[:most]}...")


def plural(count: int, noun: str, many: str | None = None) -> str:
    """Return a count with its noun: "1 row", "2,000 rows"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def one_of(words: Iterable[str]) -> str:
    """Return alternatives for a sentence: "a", "a or b", "a, b or c"; with a comma in "a, or 2 or more"."""
    *first, last = words
    comma = "," if " or " in last else ""
    return f"{', '.join(first)}{comma} or {last}" if first else last


def every(count: int, noun: str) -> str:
    """Return how often something comes: "every epoch", "every 3 epochs"."""
    return f"every {noun}" if count == 1 else f"every {plural(count, noun)}"


def quoted(text: str, most: int = 60) -> str:
    """Return a text for a message as `cut` does, in quotes."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or of one that says nothing what it is."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def show_bytes(count: float) -> str:
    """Return a number of bytes for people, e.g. "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def show_count(count: float) -> str:
    """Return a number of parameters for people, e.g. "8.14B", "20.9k"."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        # From 999.5 on three digits round up to 1e+03, so the next unit begins there.
        if count >= 0.9995 * limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


def show_duration(seconds: float) -> str:
    """Return a duration for people, e.g. "0:40", "1:02:05"."""
    # Rounded before it is split, or 59.6 seconds would read 0:60.
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
