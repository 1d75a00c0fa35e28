"""Rows as every reader yields them, before any value is checked: a line and its columns, or why it can't be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Wanted: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
    """Given the columns of a columnar file, returns those to read; the function `list` returns them all."""


class Unreadable(str):
    """Reason why a row can't be read, in words; it stands in place of the row."""

    __slots__ = ()


RawRow: TypeAlias = tuple[int, dict[str, Any] | Unreadable]
"""(line counted from 1, column name -> value)."""

MAX_COLUMNS = 10_000
"""Most columns of a row."""


def row_of(value: object) -> dict[str, Any] | Unreadable:
    """Return a value of JSON, or a mapping that code yields, as a row; or why it is none."""
    if type(value) is not dict:  # the common type first: this runs for every row
        if not isinstance(value, Mapping):
            return Unreadable(f"expected a JSON object, got {type(value).__name__}")
        value = dict(value)
    if len(value) > MAX_COLUMNS:
        return Unreadable(f"{len(value):,} columns, and a row has at most {MAX_COLUMNS:,}")
    # Never in JSON, but code may yield it: `csv.DictReader` files surplus cells under None. Types are compared first,
    # which is fast; the others may be subclasses of str, as NumPy's texts are.
    if not {*map(type, value)} <= {str} and not all(isinstance(name, str) for name in value):
        return Unreadable("the name of a column is no text")
    return value


def repeated(names: Iterable[str]) -> str:
    """Return the first name that comes twice, an empty string where none does."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""
