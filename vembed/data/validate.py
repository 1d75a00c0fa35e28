"""Check rows one by one: every value that reaches a record has passed here.

A row is refused with a `Fault` (column, reason); what happens to it then is the policy of `problems.py`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vembed.batch import Composed, Image, pictures_in
from vembed.data.image_root import ImageRoot, PictureFault
from vembed.data.images import ImageError, item_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.batch import Item
    from vembed.data.columns import RowShape

GRADED = "graded scores need a graded loss; drop the column with column_mapping: {%s: null}"
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", re.ASCII)


class Fault(Exception):  # noqa: N818 - a verdict on one row that never leaves this room, not an error of the program
    """What is wrong with one row.

    Args:
        column: The column at fault.
        reason: Why, in words that follow the column's name.
        missing: The column is one that every row needs, and this row lacks it.
        escapes: A path leads out of the data: the row is never dropped.
    """

    def __init__(self, column: str, reason: str, *, missing: bool = False, escapes: bool = False) -> None:
        super().__init__(column, reason)
        self.column = column
        self.reason = reason
        self.missing = missing
        self.escapes = escapes


@dataclass(frozen=True, slots=True)
class Fields:
    """The checked content of one row, as in `Record`."""

    query: Item
    positives: list[Item]
    negatives: list[Item]
    label: str | int | None


@dataclass(frozen=True, slots=True)
class RowContext:
    """Where a row stands.

    Attributes:
        images: What its pictures are checked by.
        where: `file:line`, what bytes of a picture are called by.
        cells_are_text: The row comes from CSV or TSV: an empty cell of pictures, negatives or label means none, and a
            cell of negatives that holds a JSON list is that list.
    """

    images: ImageRoot
    where: str
    cells_are_text: bool = False


def check_row(row: Mapping[str, Any], shape: RowShape, context: RowContext) -> Fields:
    """Return the content of a row, every value checked.

    Args:
        row: Column name -> value. Where a text is expected, an item with a picture that was checked before may stand.
        shape: Which column is what.
        context: Where the row stands.

    Raises:
        Fault: A column is missing, of the wrong type, empty, or contradicts another.
    """
    query = _query(row, shape, context)
    positives = _positives(row, shape, context)
    negatives: list[Item] = []
    for column in shape.negatives:
        cell = row[column]
        negatives += _passages(_negatives_cell(cell) if context.cells_are_text else cell, column)
    if shape.negative_images is not None:
        cell = row[shape.negative_images]
        cell = _negatives_cell(cell) if context.cells_are_text else cell
        negatives += _pictures(cell, shape.negative_images, context)
    if negatives:
        _check_disjoint(positives, negatives, shape)
    cells_are_text = context.cells_are_text
    label = None if shape.label is None else _label(row[shape.label], shape.label, cells_are_text=cells_are_text)
    return Fields(query, positives, negatives, label)


def _query(row: Mapping[str, Any], shape: RowShape, context: RowContext) -> Item:
    first, *rest = _filled(row, "query", shape.query, shape.query_image)
    if first == shape.query_image:
        return _only_picture(row, first, context)
    query = row[first]
    if not rest and isinstance(query, (Image, Composed)):
        return query
    reason = text_fault(query)
    if reason:
        raise Fault(first, reason)
    text: str = query
    if not rest:
        return text
    (picture,) = rest
    if text == row[picture]:
        raise Fault(
            first,
            f"names the picture of {picture!r} instead of saying something of it: a query with a text and a picture is "
            f"both in one; drop the text with column_mapping: {{{first}: null}}",
        )
    return Composed(_only_picture(row, picture, context), text)


def _only_picture(row: Mapping[str, Any], column: str, context: RowContext) -> Image:
    pictures = _pictures(row[column], column, context)
    if len(pictures) != 1:
        raise Fault(column, f"expected one picture, got {len(pictures)}")
    return pictures[0]


def _positives(row: Mapping[str, Any], shape: RowShape, context: RowContext) -> list[Item]:
    columns = _filled(row, "positive", shape.positive, shape.positive_image)
    column = columns[0]
    if len(columns) > 1:
        raise Fault(
            column,
            f"holds a text and {columns[1]!r} a picture: two positives, or one of both? Empty one of them, or drop a "
            f"column with column_mapping: {{{columns[1]}: null}}; documents of both stand in a BEIR folder's corpus",
        )
    is_picture = column == shape.positive_image
    positives: list[Item] = []
    positives += _pictures(row[column], column, context) if is_picture else _passages(row[column], column)
    if not positives:
        raise Fault(column, "no positives")
    return positives


def _filled(row: Mapping[str, Any], name: str, text: str | None, picture: str | None) -> tuple[str, ...]:
    """Return which of a text's and a picture's column hold something; the only one that a row has may be empty."""
    if text is None and picture is None:
        raise Fault(name, "", missing=True)
    if text is None or picture is None:
        return (text or picture or "",)
    present = tuple(column for column in (text, picture) if not _is_absent(row[column]))
    if not present:
        raise Fault(text, f"holds nothing, nor does {picture!r}")
    return present


def _is_absent(value: object) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _pictures(value: object, column: str, context: RowContext) -> list[Image]:
    """Return the pictures of a cell: one, or a list of them; null, or an empty cell of CSV, is none."""
    if value is None or (context.cells_are_text and value == ""):
        return []
    cells = value if type(value) is list else [value]
    pictures: list[Image] = []
    for number, cell in enumerate(cells, start=1):
        place = f" (item {number} of {len(cells)})" if cells is value else ""
        try:
            pictures.append(context.images.image(cell, name=f"{context.where} {column}{place}"))
        except PictureFault as fault:
            raise Fault(column, f"{fault.reason}{place}", escapes=fault.escapes) from fault
    return pictures


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


def _passages(value: object, column: str) -> list[Item]:
    """Return the texts of a cell: a text, a passage {title, text}, or a list of them; null is no text."""
    if value is None:
        return []
    items = value if type(value) is list else [value]
    texts: list[Item] = []
    for number, item in enumerate(items, start=1):
        text = _passage_text(item, column) if isinstance(item, dict) else item
        reason = None if isinstance(text, (Image, Composed)) else text_fault(text)
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


def _check_disjoint(positives: Sequence[Item], negatives: Sequence[Item], shape: RowShape) -> None:
    wanted = {item.strip() for item in positives if isinstance(item, str)}
    for item in negatives:
        if isinstance(item, str) and item.strip() in wanted:
            raise Fault(shape.negatives[0], f"holds the row's own positive: {_clipped(item)}")
    pictures = [item for item in negatives if not isinstance(item, str)]
    if pictures and len(wanted) < len(positives):
        _check_disjoint_pictures(positives, pictures, shape.negative_images or shape.negatives[0])


def _check_disjoint_pictures(positives: Sequence[Item], negatives: Sequence[Image | Composed], column: str) -> None:
    """Compare by content: a file may have two names. Only rows whose negatives have pictures pay for it."""
    try:
        wanted = {item_id(item) for item in positives if not isinstance(item, str)}
        for item in negatives:
            if item_id(item) in wanted:
                (picture,) = pictures_in([item])
                raise Fault(column, f"holds the row's own positive: the picture {_clipped(picture.path)}")
    except ImageError as error:
        raise Fault(column, str(error)) from error


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
    if isinstance(value, (Image, Composed)):
        return "a picture"
    if isinstance(value, bool):
        return str(value).lower()
    names = {int: "the number", float: "the number", list: "a list", dict: "an object", bytes: "bytes"}
    name = names.get(type(value), type(value).__name__)
    return f"{name} {value!r:.40}" if isinstance(value, (int, float)) else name


def _clipped(text: str, limit: int = 60) -> str:
    text = text.strip()
    return repr(text if len(text) <= limit else text[:limit] + "...")
