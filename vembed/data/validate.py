"""Check rows one by one: every value that reaches a record has passed here.

A row is refused with a `Fault` (column, reason); what happens to it then is the policy of `problems.py`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.data.columns import RowShape

GRADED = "graded scores need a graded loss; drop the column with column_mapping: {%s: null}"
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", re.ASCII)


class Fault(Exception):  # noqa: N818 - a verdict on one row that never leaves this room, not an error of the program
    """What is wrong with one row.

    Args:
        column: The column at fault.
        reason: Why, in words that follow the column's name.
        missing: The column is one that every row needs, and this row lacks it.
    """

    def __init__(self, column: str, reason: str, *, missing: bool = False) -> None:
        super().__init__(column, reason)
        self.column = column
        self.reason = reason
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Fields:
    """The checked content of one row, as in `Record`."""

    query: str
    positives: list[str]
    negatives: list[str]
    label: str | int | None


def check_row(row: Mapping[str, Any], shape: RowShape, *, cells_are_text: bool = False) -> Fields:
    """Return the content of a row, every value checked.

    Args:
        row: Column name -> value.
        shape: Which column is what.
        cells_are_text: The row comes from CSV or TSV: an empty cell of negatives or label means none, and a cell of
            negatives that holds a JSON list is that list.

    Raises:
        Fault: A column is missing, of the wrong type, empty, or contradicts another.
    """
    if shape.query is None:
        raise Fault("query", "", missing=True)
    if shape.positive is None:
        raise Fault("positive", "", missing=True)
    query = row[shape.query]
    reason = text_fault(query)
    if reason:
        raise Fault(shape.query, reason)
    positives = _passages(row[shape.positive], shape.positive)
    if not positives:
        raise Fault(shape.positive, "no positives")
    negatives: list[str] = []
    for column in shape.negatives:
        cell = row[column]
        negatives += _passages(_negatives_cell(cell) if cells_are_text else cell, column)
    if negatives:
        _check_disjoint(positives, negatives, shape.negatives[0])
    label = None if shape.label is None else _label(row[shape.label], shape.label, cells_are_text=cells_are_text)
    return Fields(query, positives, negatives, label)


def text_fault(value: object) -> str | None:
    """Return why a value is no usable text, or None when it is one."""
    if type(value) is not str:
        return f"expected text, got {_describe(value)}"
    if not value or value.isspace():
        return "blank text" if value else "empty text"
    if value.isascii():
        return "holds a NUL byte" if "\0" in value else None
    return encoding_fault(value)


def encoding_fault(text: str) -> str | None:
    """Return why a text can't be stored as UTF-8 or holds a NUL, or None; it may be empty."""
    if "\0" in text:
        return "holds a NUL byte"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Half a surrogate pair: a JSON escape cut in two, or bytes of a CSV cell that are not UTF-8.
        return f"not valid UTF-8 text (character {error.start + 1})"
    return None


def _passages(value: object, column: str) -> list[str]:
    """Return the texts of a cell: a text, a passage {title, text}, or a list of them; null is no text."""
    if value is None:
        return []
    items = value if type(value) is list else [value]
    texts = []
    for number, item in enumerate(items, start=1):
        text = _passage_text(item, column) if isinstance(item, dict) else item
        reason = text_fault(text)
        if reason:
            raise Fault(column, f"{reason} (item {number} of {len(items)})" if items is value else reason)
        texts.append(text)
    return texts


def _passage_text(passage: Mapping[str, object], column: str) -> str:
    title, text = passage.get("title"), passage.get("text")
    for name, part in (("title", title), ("text", text)):
        if part is not None and not isinstance(part, str):
            raise Fault(column, f"expected text in {name!r} of a passage, got {_describe(part)}")
    if title is None and text is None:
        raise Fault(column, "a passage needs 'text' (and may have 'title')")
    return f"{title or ''} {text or ''}".strip()


def _negatives_cell(cell: str) -> str | list[object] | None:
    """Return what a CSV cell of negatives holds; "[1]" and "[citation needed]" are texts, '["a", "b"]' is a list."""
    stripped = cell.strip()
    if not stripped:
        return None
    if not (stripped.startswith("[") and stripped.endswith("]")):
        return cell
    try:
        items = json.loads(stripped)
    except (ValueError, RecursionError):
        return cell
    is_list = not items or any(isinstance(item, (str, dict)) for item in items)
    return items if is_list else cell


def _check_disjoint(positives: list[str], negatives: list[str], column: str) -> None:
    wanted = {text.strip() for text in positives}
    for text in negatives:
        if text.strip() in wanted:
            raise Fault(column, f"holds the row's own positive: {_clipped(text)}")


def _label(value: object, column: str, *, cells_are_text: bool) -> str | int | None:
    if cells_are_text and isinstance(value, str):
        value = value.strip() or None
        if value is not None and _DECIMAL.fullmatch(value):
            _check_not_graded(float(value), column)
    if value is None:
        return None
    if isinstance(value, bool):
        raise Fault(column, f"a class label is a text or a whole number, not {_describe(value)}")
    if isinstance(value, float):
        _check_not_graded(value, column)
        value = int(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise Fault(column, "a whole number that doesn't fit 64 bits; write it as a text")
        return value
    if isinstance(value, str):
        reason = text_fault(value)
        if reason:
            raise Fault(column, f"{reason}; null means no label")
        return value
    raise Fault(column, f"a class label is a text or a whole number, not {_describe(value)}")


def _check_not_graded(value: float, column: str) -> None:
    if column == "score" or not (math.isfinite(value) and value.is_integer()):
        raise Fault(column, GRADED % column)


def _describe(value: object) -> str:
    """Return a value's type and beginning in a JSON writer's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    names = {int: "the number", float: "the number", list: "a list", dict: "an object", bytes: "bytes"}
    name = names.get(type(value), type(value).__name__)
    return f"{name} {value!r:.40}" if isinstance(value, (int, float)) else name


def _clipped(text: str, limit: int = 60) -> str:
    text = text.strip()
    return repr(text if len(text) <= limit else text[:limit] + "...")
