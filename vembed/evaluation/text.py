"""How values become text that is safe to look at: visible characters, visible clipping, readable numbers."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from vembed.text import visible

NOT_AVAILABLE = "n/a"
"""What a number that is missing, NaN or infinite reads as."""

MINUS = "\N{MINUS SIGN}"

FULL_CHARACTERS = 3_000
"""Most characters shown of one text, its full form included: what keeps a page of examples small."""

ID_CHARACTERS = 1_000


def one_line(text: str) -> str:
    """Return the visible text with every run of white space as one space."""
    return " ".join(visible(text).split())


def capitalised(text: str) -> str:
    """Return a text with its first letter large, the others as they are."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, slots=True)
class Clipped:
    """A text in its short and its full form, both visible."""

    short: str  # one line of at most the asked length; ends in an ellipsis when something is missing
    full: str | None  # the text with its line breaks, or None when `short` says it all
    num_left_out: int  # characters of the original that even `full` leaves out


def clip(text: str, characters: int) -> Clipped:
    """Cut a text to a readable length at a word's end, and keep the full form beside it.

    Returns:
        Both forms; the full one holds at most `FULL_CHARACTERS`.
    """
    kept = text[:FULL_CHARACTERS]
    while len(visible(kept)) > FULL_CHARACTERS:
        kept = kept[: len(kept) * FULL_CHARACTERS // len(visible(kept))]
    line = one_line(kept)
    if len(line) <= characters and len(kept) == len(text):
        return Clipped(short=line, full=None, num_left_out=0)
    cut = line[:characters]
    word_end = cut.rfind(" ", characters * 4 // 5)
    short = (cut[:word_end] if word_end > 0 and len(line) > characters else cut).rstrip()
    return Clipped(short=f"{short}…", full=visible(kept), num_left_out=len(text) - len(kept))


def id_text(identifier: str) -> str:
    """Return an id on one line, cut where it is longer than any that people read."""
    return clip(identifier, ID_CHARACTERS).short


def finite(value: object) -> float:
    """Return a number as a float; anything that isn't a number is NaN."""
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # NumPy scalars have no common base: asking is the check
    except (TypeError, ValueError, OverflowError):
        return math.nan


def metric_text(value: float | None, decimals: int = 3) -> str:
    """Return a metric with a fixed number of decimals."""
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE
    return f"{value:.{decimals}f}".replace("-", MINUS)


def signed_text(value: float | None, decimals: int = 3) -> str:
    """Return a difference with its sign; what rounds to zero has none."""
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE
    rounded = round(value, decimals)
    return f"{rounded:+.{decimals}f}".replace("-", MINUS) if rounded else f"{0.0:.{decimals}f}"


def count_text(value: int) -> str:
    """Return a count with thousands separators."""
    return f"{value:,}"


def number_text(value: float) -> str:
    """Return a number of any size in about four significant digits, e.g. "1,234", "0.0125", "2e-5"."""
    if not math.isfinite(value):
        return NOT_AVAILABLE
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", MINUS)
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", MINUS)
    return f"{value:.4g}".replace("-", MINUS)


def bytes_text(value: float) -> str:
    """Return a number of bytes in the units of the plan, e.g. "1.5 GiB"."""
    if not math.isfinite(value):
        return NOT_AVAILABLE
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{number_text(float(f'{value / size:.3g}'))} {unit}"
    return f"{number_text(value)} B"


def plain(value: object) -> object:
    """Return a value as what JSON can hold: mappings, lists, texts, booleans, finite numbers and None.

    NaN and infinity become None; anything unknown becomes its text.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Set):
        return sorted((plain(entry) for entry in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, bool, int)) else str(value)


def value_text(key: str, value: object) -> str:
    """Return a setting as text: bytes in units, lists joined, nested values as compact JSON.

    Args:
        key: Name of the setting; one that ends in "bytes" gives its unit away.
    """
    simple = plain(value)
    if isinstance(simple, bool):
        return "true" if simple else "false"
    if simple is None:
        return "none" if value is None else NOT_AVAILABLE
    if isinstance(simple, (int, float)):
        if key.endswith("bytes"):
            return bytes_text(simple)
        return str(simple) if isinstance(simple, int) else f"{simple:g}"
    if isinstance(simple, list) and simple and not any(isinstance(entry, (dict, list)) for entry in simple):
        return ", ".join(value_text(key, entry) for entry in simple)
    return simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)


def columns_of(text: str) -> int:
    """Return the columns that a terminal gives a text: East Asian characters take two, combining ones none."""
    return sum(
        0
        if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf")
        else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )
