"""Check rows one by one: every value that reaches a record has passed here.

A row is refused with a `Fault` (column, reason); what happens to it then is the policy of `problems.py`.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.batch import Composed, Image, pictures_in
from vembed.data.images import ImageError, ImageRoot, PictureFault, item_id, joined_pictures
from vembed.data.texts import describe, part_fault, text_fault, title_and_text
from vembed.errors import DataError
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.batch import Item
    from vembed.data.columns import ExtraColumn, LossNeeds, RowShape
    from vembed.data.keys import LabelKind


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)

MOST_DIGITS = 64
"""Length of a cell of CSV up to which a whole number is read as one: Python refuses to read thousands of digits."""


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


class Fields(NamedTuple):
    """The checked content of one row, as in `Record`."""

    query: Item
    positives: Sequence[Item]
    negatives: Sequence[Item]
    label: str | int | None = None
    scores: Sequence[float] = ()
    columns: Mapping[str, int | float] | None = None


class RowChecker:
    """Check the rows of one file.

    Args:
        cells_are_text: The file is CSV or TSV: an empty cell of pictures, negatives, label or a number means none; a
            cell of negatives that holds a JSON list is that list; and a number is written as a text, as that of a
            label may be in any file.
        loss: What the rows are trained with, None where they aren't.
        unclear: Gets the numbers among the labels that may say several things.
    """

    def __init__(
        self,
        images: ImageRoot,
        *,
        cells_are_text: bool = False,
        label_kind: LabelKind = "auto",
        loss: LossNeeds | None = None,
        unclear: UnclearLabels | None = None,
    ) -> None:
        self._images = images
        self._cells_are_text = cells_are_text
        self._label_kind = label_kind
        self._loss = loss
        self._unclear = unclear or UnclearLabels()

    def check(self, row: Mapping[str, Any], shape: RowShape, where: str) -> Fields:
        """Return the content of a row, every value checked.

        Args:
            row: Column name -> value. Where a text is expected, an item with a picture, checked before, may stand.

        Raises:
            Fault: A column is missing, of the wrong type, empty, or contradicts another.
        """
        query = self._query(row, shape, where)
        positives = self._positives(row, shape, where)
        negatives = self._negatives(row, shape, where)
        if negatives:
            _check_disjoint(positives, negatives, shape)
        columns = {} if self._loss is None else {each.name: self._number(row, each, at) for each, at in shape.extra}
        cell = None if shape.label is None else row[shape.label]
        if self._cells_are_text and isinstance(cell, str):
            cell = cell.strip() or None
        if shape.label is None or cell is None:
            return Fields(query, positives, negatives, columns=columns)
        if self._label_kind in {"pair", "grade"}:
            if self._loss is not None and not {"pairs", "lists"} & set(self._loss.takes):
                raise Fault(
                    shape.label,
                    f"loss_type {self._loss.name} doesn't take listed pairs and would ignore this score; give these "
                    f"rows a loss that does, such as cosent, or drop it with column_mapping: {{{shape.label}: null}}",
                )
            if (scores := self._listed_scores(cell, shape.label, len(positives) + len(negatives))) is not None:
                return Fields(query, positives, negatives, scores=scores, columns=columns)
            score = self._score(cell, shape.label)
            if negatives and self._label_kind == "grade":
                raise Fault(
                    shape.label,
                    "a row with one grade has no negatives: give a list, one grade for each positive and then for each "
                    "negative, or each of them a row",
                )
            scores = (*[score] * len(positives), *[0.0] * len(negatives))
            if score <= 0:  # as in judgements of retrieval: not relevant
                positives, negatives = [], [*positives, *negatives]
            return Fields(query, positives, negatives, scores=scores, columns=columns)
        if self._label_kind == "auto" and self._is_unclear(cell, shape.label, (query, *positives), where):
            return Fields(query, positives, negatives, columns=columns)
        return Fields(query, positives, negatives, _class_label(cell, shape.label), columns=columns)

    def _query(self, row: Mapping[str, Any], shape: RowShape, where: str) -> Item:
        first, *rest = _filled(row, "query", shape.query, shape.query_image)
        if first == shape.query_image:
            return self._pictures_in_one(row, first, where)
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
                f"names the picture of {picture!r} instead of saying something of it: a query with a text and a "
                f"picture is both in one; drop the text with column_mapping: {{{first}: null}}",
            )
        return self._pictures_in_one(row, picture, where, text)

    def _pictures_in_one(self, row: Mapping[str, Any], column: str, where: str, text: str = "") -> Image | Composed:
        """Return the pictures of a cell as one item, with a text or without."""
        pictures = [image for each in self._pictures(row[column], column, where) for image in pictures_in([each])]
        if not pictures:
            raise Fault(column, "expected a picture, or a list of them, got none")
        return joined_pictures(pictures, text)

    def _positives(self, row: Mapping[str, Any], shape: RowShape, where: str) -> list[Item]:
        columns = _filled(row, "positive", shape.positive, shape.positive_image)
        column = columns[0]
        if len(columns) > 1:
            raise Fault(
                column,
                f"holds a text and {columns[1]!r} a picture: two positives, or one of both? Empty one of them, or drop "
                f"a column with column_mapping: {{{columns[1]}: null}}; documents of both stand in a BEIR folder's "
                "corpus",
            )
        positives: list[Item] = []
        is_picture = column == shape.positive_image
        positives += self._pictures(row[column], column, where) if is_picture else _passages(row[column], column)
        if not positives:
            raise Fault(column, "no positives")
        title = None if shape.title is None else row[shape.title]
        if reason := part_fault(title, needed=False):
            raise Fault(shape.title or "", reason)
        return [title_and_text(title, item) if title and isinstance(item, str) else item for item in positives]

    def _negatives(self, row: Mapping[str, Any], shape: RowShape, where: str) -> list[Item]:
        def cell(column: str) -> Any:
            return _negatives_cell(row[column]) if self._cells_are_text else row[column]

        negatives = [item for column in shape.negatives for item in _passages(cell(column), column)]
        if shape.negative_images is not None:
            negatives += self._pictures(cell(shape.negative_images), shape.negative_images, where)
        return negatives

    def _pictures(self, value: object, column: str, where: str) -> list[Image | Composed]:
        """Return the items of a cell: a picture or a list of items, each a picture or a list of those that make one.

        Null, or an empty cell of CSV, is none.
        """
        if value is None or (self._cells_are_text and value == ""):
            return []
        cells = value if type(value) is list else [value]
        pictures: list[Image | Composed] = []
        for number, cell in enumerate(cells, start=1):
            place = f" (item {number} of {len(cells)})" if cells is value else ""
            try:
                pictures.append(self._images.item(cell, name=f"{where} {column}{place}"))
            except PictureFault as fault:
                raise Fault(column, f"{fault.reason}{place}", escapes=fault.escapes) from fault
        return pictures

    def _number(self, row: Mapping[str, Any], column: ExtraColumn, source: str | None) -> int | float:
        """Return the number of a column that the loss asks for."""
        assert self._loss is not None
        cell = None if source is None else row[source]
        if cell is None or (self._cells_are_text and not cell.strip()):
            if column.required:
                needed = f"loss_type {self._loss.name} needs it: {column.meaning}"
                raise Fault(source or column.name, f"empty; {needed}" if source else needed, missing=source is None)
            return column.typed(column.default)
        number = _number_in(cell, cells_are_text=self._cells_are_text)
        if number is None or not column.takes(number):
            shown = f"{cell!r:.60}" if isinstance(cell, str) else describe(cell)
            needed = f"loss_type {self._loss.name} needs {column.expected} ({column.meaning})"
            fix = "" if column.required else f"; leave it out with column_mapping: {{{source}: null}}"
            raise Fault(source or column.name, f"{needed}, got {shown}{fix}")
        return column.typed(number)

    def _is_unclear(self, cell: object, column: str, items: Sequence[Item], where: str) -> bool:
        """Return whether a label may say something else than a class, and note it then."""
        number = self._truth_or_number(cell)
        of_texts = all(isinstance(item, str) for item in items)
        is_truth = isinstance(number, bool)
        graded = number is not None and (is_truth or column == "score" or not float(number).is_integer())
        if number is None or not (of_texts or graded):
            return False
        self._unclear.add(column, number, "two texts" if of_texts else "a picture", where)
        return True

    def _score(self, cell: object, column: str) -> float:
        """Return what a label says as the score of a pair."""
        number = self._truth_or_number(cell)
        shown = repr(cell) if isinstance(cell, str) else describe(cell)
        if self._label_kind == "pair" and number not in {0, 1}:
            raise Fault(column, f"with label_kind: pair it is 1 (the two belong together) or 0, not {shown:.60}")
        if number is None or not math.isfinite(number):
            raise Fault(column, f"with label_kind: grade it is a number, higher is closer, not {shown:.60}")
        low, high = (-math.inf, math.inf) if self._loss is None else self._loss.score_bounds
        if not low <= number <= high:
            assert self._loss is not None
            raise Fault(
                column,
                f"loss_type {self._loss.name} takes scores from {low:g} to {high:g}, not {shown:.60}: divide all of "
                f"them by one number (0 to 5 by 5), or set loss_type to cosent, which reads their order alone",
            )
        return float(number)

    def _listed_scores(self, cell: object, column: str, count: int) -> tuple[float, ...] | None:
        """Return the numbers of a label that lists one for each document; None where it is no list."""
        grades = _json_list(cell) if self._cells_are_text and isinstance(cell, str) else cell
        if type(grades) is not list or self._label_kind != "grade":
            return None
        if len(grades) != count:
            raise Fault(column, f"lists {len(grades)} grades for the {count} documents of the row")
        return tuple(self._score(each, column) for each in grades)

    @staticmethod
    def _truth_or_number(cell: object) -> bool | int | float | None:
        """Return the number of a label, or true and false as such; files of any kind may write both as texts."""
        if isinstance(cell, str) and cell.strip().lower() in ("true", "false"):
            return cell.strip().lower() == "true"
        return cell if isinstance(cell, bool) else _number_in(cell, cells_are_text=True)


class UnclearLabels:
    """Numbers that stand as labels, possibly as texts, and may be classes, the truth of pairs, or grades.

    The first few are kept.
    """

    def __init__(self) -> None:
        self._first = ("", "", "")  # column, what it stands beside, file:line
        self._numbers: set[int | float] = set()

    def add(self, column: str, number: int | float, beside: str, where: str) -> None:
        """Note the label of a row at `file:line`."""
        if not self._numbers:
            self._first = (column, beside, where)
        if len(self._numbers) < 6:
            self._numbers.add(number)

    def check(self) -> None:
        """Refuse the source when there are any.

        Raises:
            DataError: With the numbers, the first one's place, and the choices.
        """
        if not self._numbers:
            return
        column, beside, where = self._first
        found = [str(each).lower() if isinstance(each, bool) else f"{each:.6g}" for each in sorted(self._numbers)]
        last = ", ..." if len(found) > 5 else f" and {found[-1]}" * (len(found) > 1)
        numbers = ", ".join(found[:5] if len(found) > 5 else found[:-1] or found) + last
        raise DataError(
            f"{where}: {column} holds {numbers} beside {beside}, which may say three things. Set label_kind:\n"
            "  class  it names the row's class, a number or a text; rows of one class are positives of each other\n"
            "  pair   1: query and document belong together, 0: they don't (for losses that take listed pairs)\n"
            "  grade  how close query and document are, higher is closer (for losses that take listed pairs)\n"
            f"or leave it out with column_mapping: {{{column}: null}}"
        )


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


def _passage_text(passage: Mapping[str, Any], column: str) -> str:
    title, text = passage.get("title"), passage.get("text")
    for name, part in (("title", title), ("text", text)):
        if part is not None and not isinstance(part, str):
            raise Fault(column, f"expected text in {name!r} of a passage, got {describe(part)}")
    if title is None and text is None:
        raise Fault(column, "a passage needs 'text' (and may have 'title')")
    return title_and_text(title, text)


def _negatives_cell(cell: str) -> str | list[object] | None:
    """Return what a CSV cell of negatives holds; "[1]" and "[citation needed]" are texts, '["a", "b"]' is a list."""
    if not cell.strip():
        return None
    items = _json_list(cell)
    is_list = items is not None and (not items or any(isinstance(item, (str, dict)) for item in items))
    return items if is_list else cell


def _json_list(cell: str) -> list[object] | None:
    """Return the JSON list that a CSV cell holds, None where it holds something else."""
    stripped = cell.strip()
    if not (stripped.startswith("[") and stripped.endswith("]")):
        return None
    try:
        items: list[object] = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    return items


def _check_disjoint(positives: Sequence[Item], negatives: Sequence[Item], shape: RowShape) -> None:
    wanted = {item.strip() for item in positives if isinstance(item, str)}
    for item in negatives:
        if isinstance(item, str) and item.strip() in wanted:
            raise Fault(shape.negatives[0], f"holds the row's own positive: {quoted(item.strip())}")
    pictures = [item for item in negatives if not isinstance(item, str)]
    if pictures and len(wanted) < len(positives):
        _check_disjoint_pictures(positives, pictures, shape.negative_images or shape.negatives[0])


def _check_disjoint_pictures(positives: Sequence[Item], negatives: Sequence[Image | Composed], column: str) -> None:
    """Compare by content: a file may have two names. Only rows whose negatives have pictures pay for it."""
    try:
        wanted = {item_id(item) for item in positives if not isinstance(item, str)}
        for item in negatives:
            if item_id(item) in wanted:
                picture = next(pictures_in([item]))
                raise Fault(column, f"holds the row's own positive: the picture {quoted(picture.path)}")
    except ImageError as error:
        raise Fault(column, str(error)) from error


def _number_in(cell: object, *, cells_are_text: bool) -> int | float | None:
    """Return the number of a cell, possibly not finite; None where it holds none. CSV writes numbers as texts."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return cell if abs(cell) < 2**63 or isinstance(cell, float) else math.inf
    if not (cells_are_text and isinstance(cell, str) and _NUMBER.fullmatch(cell.strip())):
        return None
    is_whole = cell.strip().lstrip("+-").isdecimal() and len(cell) < MOST_DIGITS
    return int(cell) if is_whole else float(cell)


def _class_label(value: object, column: str) -> str | int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise Fault(column, "a whole number that doesn't fit 64 bits; write it as a text")
        return value
    if isinstance(value, str):
        reason = text_fault(value)
        if reason:
            raise Fault(column, f"{reason}; null means no label")
        return value
    raise Fault(column, f"a class label is a text or a whole number, not {describe(value)}")
