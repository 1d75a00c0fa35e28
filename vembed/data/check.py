"""Check rows: every value that reaches a record has passed here, and every invalid row is counted by what is wrong.

1. `RowChecker` turns a row into a query, positives, negatives, a label and numbers, or refuses it with a `Fault`
   (column, reason). `block_of_texts` does the same for a block of rows that hold nothing but texts, in a fraction of
   the time; it leaves a block with anything unusual or wrong in it to `RowChecker`.
2. `ProblemLog` collects the refused rows. Without a budget any of them refuses the source, after all of it was read.
   With one, so many rows are dropped, counted and named, and one more refuses the source. A path that leads out of the
   data is never dropped.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from itertools import chain, islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vembed.batch import Composed, Image, pictures_in
from vembed.data.images import ImageError, ImageRoot, PictureFault, item_id, joined_pictures
from vembed.data.table_writer import ItemRows
from vembed.errors import DataError
from vembed.text import cut, plural, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from vembed.batch import Item
    from vembed.data.columns import ExtraColumn, LossNeeds, RowShape
    from vembed.data.keys import LabelKind

# --- Texts and ids: why a value is none, in words that follow the name of its column


def text_fault(value: object) -> str | None:
    """Return why a value is no usable text, or None when it is one."""
    if type(value) is not str:
        return f"expected text, got {describe(value)}"
    if not value or value.isspace():
        return "blank text" if value else "empty text"
    # A flag of the string itself, in no time: only other texts are encoded to see whether they can be.
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


def part_fault(value: object, *, needed: bool) -> str | None:
    """Return why a value can't be a document's title or text, or None; it may be empty, and missing unless needed."""
    if value is None:
        return "missing" if needed else None
    return encoding_fault(value) if isinstance(value, str) else f"expected text, got {type(value).__name__}"


def title_and_text(title: str | None, text: str | None) -> str:
    """Return a document as one text: its title, one space, its text."""
    return f"{title or ''} {text or ''}".strip()


def describe(value: object) -> str:
    """Return a value's type and beginning in a JSON writer's words."""
    if value is None:
        return "null"
    if isinstance(value, (Image, Composed)):
        return "a picture"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        noun = "the number" if type(value) in (int, float) else type(value).__name__
        return f"{noun} {value!r:.40}"
    names: dict[type, str] = {list: "a list", dict: "an object", bytes: "bytes", memoryview: "a picture"}
    return names.get(type(value), type(value).__name__)


# --- What is wrong with a source

MAX_LISTED = 20
MAX_LISTED_IN_NOTE = 3
MAX_PLACES = 3
"""Kinds of problems in an error, in a note, and rows of each kind that are named."""

MAX_KINDS = 1_000
"""Bounds the memory that a file with random mistakes takes."""

MOST_SHOWN = 2_000
"""Characters of what is listed of one row."""

_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b\d[\d,.]*")
"""Parts of a reason that differ from row to row: quoted values and numbers."""

_NOT_UTF8 = {
    ".csv": "not valid UTF-8",
    ".tsv": "not valid UTF-8",
    ".jsonl": "invalid UTF-8",  # the other words are of an escape that was cut in two
    ".txt": "invalid UTF-8",
}
"""End of the name of a file that iconv can read -> what the reason of a row that isn't UTF-8 begins with."""

_MISSING = "missing"
"""Beginning of the reason of a missing column; the rest of it differs from row to row."""


class Kind(NamedTuple):
    """The rows with which the same is wrong, but for what differs from row to row."""

    size: int
    first: list[tuple[str, str]]  # (`file:line`, reason) of the first few
    is_same: bool  # whether all have one reason to the letter

    def line(self, column: str, num_rows: int | None) -> str:
        """Return what is wrong in one line: "t.csv:3, 7, 9 and 41 more rows: query: empty text"."""
        where, reason = self.first[0]
        if self.size == num_rows and self.size > 1:
            where = f"all {num_rows:,} rows, the first {where}"
        elif self.size > 1:
            shown, last = [], ""
            for location, _ in self.first:  # a file is named once: "a.csv:3, 7, b.csv:1"
                file, colon, line = location.rpartition(":")
                shown.append(line if colon and file == last else location)
                last = file
            more = f" and {plural(self.size - len(self.first), 'more row')}" if self.size > len(self.first) else ""
            where = ", ".join(shown) + more + ("" if self.is_same else ", the first")
        return cut(f"{where}: {f'{cut(column)}: ' if column else ''}{reason}", MOST_SHOWN)


@lru_cache(maxsize=256)  # a file of a million bad lines has few reasons, and each costs as much as reading a line
def _in_general(reason: str) -> tuple[str, str]:
    """Return a reason as it is shown, and without what differs from row to row."""
    reason = cut(reason, MOST_SHOWN) or _MISSING
    return reason, _MISSING if reason.startswith(_MISSING) else _VARIABLE.sub("...", reason)


class ProblemLog:
    """Count the invalid rows of one source by what is wrong with them; keep the first few of each kind.

    Args:
        skips: Most invalid rows that may be dropped; None refuses the source for any.

    Attributes:
        kinds: By (column, reason without what differs from row to row), in the order met.
    """

    def __init__(self, skips: int | None = None) -> None:
        self._skips = skips
        self.kinds: dict[tuple[str, str], Kind] = {}
        self._num_never_dropped = 0
        self.count = 0

    @property
    def refused(self) -> bool:
        """True once the source is lost, so that its valid rows need not be kept."""
        return self.count > (self._skips or 0) or self._num_never_dropped > 0

    def lists_missing(self, column: str) -> bool:
        """Return whether the next row without a column will be shown, so that its reason is worth finding words for."""
        return (column, _MISSING) not in self.kinds

    def add(self, where: str, reason: str, *, column: str | None = None, may_drop: bool = True) -> None:
        """Note one invalid row.

        Args:
            where: `file:line`.
            reason: Empty for a missing column after the first row without it.
            column: The column at fault, None for the row as a whole.
            may_drop: Whether it may be dropped; False refuses the source.
        """
        # Memory stays bounded however many rows are wrong: a count for each kind, and the first three rows of it.
        self.count += 1
        self._num_never_dropped += not may_drop
        reason, general = _in_general(reason)
        name = (column or "", general)
        if name not in self.kinds and len(self.kinds) >= MAX_KINDS:
            name = ("", "other problems")
        known = self.kinds.get(name, Kind(0, [], is_same=True))
        is_same = known.is_same and (general == _MISSING or not known.first or known.first[0][1] == reason)
        first = known.first if len(known.first) >= MAX_PLACES else [*known.first, (where, reason)]
        self.kinds[name] = Kind(known.size + 1, first, is_same)

    def refuse_over_budget(self, source: str, num_rows: int | None = None) -> None:
        """Refuse the source when its invalid rows are over the budget.

        Args:
            num_rows: Of the source, valid or not.

        Raises:
            DataError: With the first problems, how many there are, and a cure.
        """
        if not self.refused:
            return
        encoding = ""
        for kind in self.kinds.values():
            where, reason = kind.first[0]
            file = where.rpartition(":")[0]
            suffix = PurePath(file).suffix
            if suffix in _NOT_UTF8 and reason.startswith(_NOT_UTF8[suffix]):
                encoding = f" (save {file} as UTF-8, e.g. iconv -f latin1 -t utf-8 {file} > new{suffix})"
                break
        if self._num_never_dropped:
            cure = "Fix the rows: skip_invalid_records doesn't cover a path that leads out of the data."
        elif self.count == num_rows:
            cure = f"Fix the rows{encoding}."
        elif self._skips is not None:
            cure = f"That is more than max_invalid_records: {self._skips}; fix the rows{encoding} or raise it."
        else:
            drop = f"skip_invalid_records: true, max_invalid_records: {self.count}"
            cure = f"Fix the rows{encoding}, or drop them with {drop}"
        raise DataError(f"{self.listing(source, num_rows)}\n{cure}")

    def notes(self) -> tuple[str, ...]:
        """Return a sentence about the rows that were dropped, or nothing."""
        if not self.count:
            return ()
        lines = [kind.line(column, None) for (column, _), kind in islice(self.kinds.items(), MAX_LISTED_IN_NOTE)]
        rest = "; ..." if len(self.kinds) > MAX_LISTED_IN_NOTE else ""
        return (f"{plural(self.count, 'invalid row')} dropped: {'; '.join(lines)}{rest}.",)

    def listing(self, source: str, num_rows: int | None = None) -> str:
        """Return what is wrong, a line for each kind, and how many rows there are."""
        lines = [f"{plural(self.count, 'invalid row')} in {source}:"]
        listed = list(islice(self.kinds.items(), MAX_LISTED))
        lines += [f"  {kind.line(column, num_rows)}" for (column, _), kind in listed]
        if (rest := self.count - sum(kind.size for _, kind in listed)) > 0:
            lines.append(f"  ... and {plural(rest, 'more row')}")
        return "\n".join(lines)


class AllProblems(ProblemLog):
    """Drop all invalid rows whatever their number, for a check of the data."""

    @property
    def refused(self) -> bool:
        """False: the source is never lost."""
        return False


# --- Row by row

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)

MOST_DIGITS = 64
"""Length of a cell of CSV up to which a whole number is read as one: Python refuses to read thousands of digits."""


class Fault(Exception):  # noqa: N818 - a verdict on one row that never leaves this room, not an error of the program
    """Reason to refuse one row.

    Args:
        column: The column at fault; empty for the row as a whole.
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
            cell of positives, negatives or pictures that holds a JSON list is that list; and a number is written as a
            text, as that of a label may be in any file.
        loss: What the rows are trained with, None where they aren't.
        unclear: Gets the numbers among the labels that may say several things.
        note_list: Called with the column of each cell that was read as a JSON list.
    """

    def __init__(
        self,
        images: ImageRoot,
        *,
        cells_are_text: bool = False,
        label_kind: LabelKind = "auto",
        loss: LossNeeds | None = None,
        unclear: UnclearLabels | None = None,
        note_list: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._images = images
        self._cells_are_text = cells_are_text
        self._label_kind = label_kind
        self._loss = loss
        self._unclear = unclear or UnclearLabels()
        self._note_list = note_list

    def check(self, row: Mapping[str, Any], shape: RowShape, where: str) -> Fields:
        """Return the content of a row, every value checked.

        Args:
            row: Column name -> value. Where a text is expected, an item with a picture, checked before, may stand.

        Raises:
            Fault: A column is missing, of the wrong type, empty, or contradicts another.
        """
        # In this order, so that a row with several faults is refused for the first that a reader of it would see.
        query = self._query(row, shape, where)
        positives = self._positives(row, shape, where)
        negatives = self._negatives(row, shape, where, positives)
        columns = (
            {} if self._loss is None else {column.name: self._number(row, column, at) for column, at in shape.extra}
        )
        cell = None if shape.label is None else row[shape.label]
        if self._cells_are_text and isinstance(cell, str):
            cell = cell.strip() or None
        if shape.label is None or cell is None:
            return Fields(query, positives, negatives, columns=columns)
        if self._label_kind == "auto" and self._is_unclear(cell, shape.label, (query, *positives), where):
            return Fields(query, positives, negatives, columns=columns)
        if self._label_kind not in {"pair", "grade"}:
            return Fields(query, positives, negatives, _class_label(cell, shape.label), columns=columns)

        if self._loss is not None and not {"pairs", "lists"} & set(self._loss.takes):
            raise Fault(
                shape.label,
                f"loss_type {self._loss.name} doesn't take listed pairs and would ignore this score; give these "
                f"rows a loss that does, such as cosent, or drop it with column_mapping: {{{shape.label}: null}}",
            )
        grades = _json_list(cell) if self._cells_are_text and isinstance(cell, str) else cell
        if type(grades) is list and self._label_kind == "grade":  # one for each document, as a teacher writes them
            if len(grades) != (count := len(positives) + len(negatives)):
                raise Fault(shape.label, f"lists {len(grades)} grades for the {count} documents of the row")
            listed = tuple(self._score(grade, shape.label) for grade in grades)
            return Fields(query, positives, negatives, scores=listed, columns=columns)
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

    def _query(self, row: Mapping[str, Any], shape: RowShape, where: str) -> Item:
        """Return the query: a text, pictures as one item, or a text and pictures as one item."""
        first, *rest = _filled(row, "query", shape.query, shape.query_image)
        text = ""
        if first != shape.query_image:
            query = row[first]
            if not rest and isinstance(query, (Image, Composed)):
                return query
            if reason := text_fault(query):
                raise Fault(first, reason)
            text = str(query)
            if not rest:
                return text
            if text == row[rest[0]]:
                raise Fault(
                    first,
                    f"names the picture of {rest[0]!r} instead of saying something of it: a query with a text and a "
                    f"picture is both in one; drop the text with column_mapping: {{{first}: null}}",
                )
        column = (first, *rest)[-1]
        items = self._pictures(self._cell(row[column], column, pictures=True), column, where)
        pictures = [image for item in items for image in pictures_in([item])]
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
                f"a column with column_mapping: {{{columns[1]}: null}}; put documents that have both into the "
                "corpus of a BEIR folder",
            )
        is_picture = column == shape.positive_image
        cell = self._cell(row[column], column, pictures=is_picture)
        positives = [*(self._pictures(cell, column, where) if is_picture else _passages(cell, column))]
        if not positives:
            raise Fault(column, "no positives")
        title = None if shape.title is None else row[shape.title]
        if reason := part_fault(title, needed=False):
            raise Fault(shape.title or "", reason)
        return [title_and_text(title, item) if title and isinstance(item, str) else item for item in positives]

    def _negatives(
        self, row: Mapping[str, Any], shape: RowShape, where: str, positives: Sequence[Item]
    ) -> Sequence[Item]:
        def cell(column: str, *, pictures: bool = False) -> Any:
            value = row[column]
            is_blank = self._cells_are_text and not value.strip()
            return None if is_blank else self._cell(value, column, pictures=pictures)

        negatives = [item for column in shape.negatives for item in _passages(cell(column), column)]
        if shape.negative_images is not None:
            negatives += self._pictures(cell(shape.negative_images, pictures=True), shape.negative_images, where)
        if not negatives:
            return negatives

        # A row whose negative is its own positive would be pushed away from what it is pulled to.
        wanted = {item.strip() for item in positives if isinstance(item, str)}
        for item in negatives:
            if isinstance(item, str) and item.strip() in wanted:
                raise Fault(shape.negatives[0], f"holds the row's own positive: {quoted(item.strip())}")
        pictures = [item for item in negatives if not isinstance(item, str)]
        if pictures and len(wanted) < len(positives):
            # By content, as a file may have two names: it reads the pictures, and only such rows pay for it.
            column = shape.negative_images or shape.negatives[0]
            try:
                ids = {item_id(item) for item in positives if not isinstance(item, str)}
                for item in pictures:
                    if item_id(item) in ids:
                        picture = next(pictures_in([item]))
                        raise Fault(column, f"holds the row's own positive: the picture {quoted(picture.path)}")
            except ImageError as error:
                raise Fault(column, str(error)) from error
        return negatives

    def _cell(self, value: object, column: str, *, pictures: bool) -> object:
        """Return a cell of items; one of CSV that is '["a"]' is a list, "[1]" or "[citation needed]" a text."""
        if not (self._cells_are_text and isinstance(value, str)):
            return value
        items = _json_list(value)
        # A picture is a path or an object, and a list of those that make one item; of numbers nothing is an item.
        kinds = (str, dict, list) if pictures else (str, dict)
        if items is None or (items and not any(isinstance(item, kinds) for item in items)):
            return value
        self._note_list(column)
        return items

    def _pictures(self, value: object, column: str, where: str) -> list[Image | Composed]:
        """Return the items of a cell: a picture or a list of items, each a picture or a list of those that make one.

        Null, or an empty cell of CSV, is none.
        """
        if value is None or (self._cells_are_text and value == ""):
            return []
        cells = value if type(value) is list else [value]
        pictures: list[Image | Composed] = []
        for number, cell in enumerate(cells, start=1):
            number_in = f" (item {number} of {len(cells)})" if cells is value else ""
            try:
                pictures.append(self._images.item(cell, name=f"{where} {column}{number_in}"))
            except PictureFault as fault:
                raise Fault(column, f"{fault.reason}{number_in}", escapes=fault.escapes) from fault
        return pictures

    def _number(self, row: Mapping[str, Any], column: ExtraColumn, source: str | None) -> int | float:
        """Return the number of a column that the loss asks for."""
        assert self._loss is not None
        cell = None if source is None else row[source]
        if cell is None or (self._cells_are_text and not cell.strip()):
            if column.required:
                needed = self._loss.reason_for(column)
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
        # 1.0 beside two texts may be a class, a truth or a grade, and training on the wrong one fails without a word.
        # Whole numbers beside a picture are the classes of products and species; fractions are grades anywhere.
        number = _truth_or_number(cell)
        of_texts = all(isinstance(item, str) for item in items)
        is_truth = isinstance(number, bool)
        graded = number is not None and (is_truth or column == "score" or not float(number).is_integer())
        if number is None or not (of_texts or graded):
            return False
        self._unclear.add(column, number, "two texts" if of_texts else "a picture", where)
        return True

    def _score(self, cell: object, column: str) -> float:
        """Return what a label says as the score of a pair."""
        number = _truth_or_number(cell)
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

    def refuse_any(self) -> None:
        """Refuse the source when there are any.

        Raises:
            DataError: With the numbers, the first one's line, and the choices.
        """
        if not self._numbers:
            return
        column, beside, where = self._first
        numbers = sorted(self._numbers)
        shown = [str(number).lower() if isinstance(number, bool) else f"{number:.6g}" for number in numbers]
        last = ", ..." if len(shown) > 5 else f" and {shown[-1]}" * (len(shown) > 1)
        listed = ", ".join(shown[:5] if len(shown) > 5 else shown[:-1] or shown) + last
        raise DataError(
            f"{where}: {column} holds {listed} beside {beside}, which can mean three things. Set label_kind:\n"
            "  class  it names the row's class, a number or a text; rows of one class are positives of each other\n"
            "  pair   1: query and document belong together, 0: they don't (for losses that take listed pairs)\n"
            "  grade  how close query and document are, higher is closer (for losses that take listed pairs)\n"
            f"or leave it out with column_mapping: {{{column}: null}}"
        )


def _filled(row: Mapping[str, Any], name: str, text: str | None, picture: str | None) -> tuple[str, ...]:
    """Return which of a text's and a picture's column hold something; the only one that a row has may be empty."""

    def is_empty(value: object) -> bool:
        return value is None or value == [] or (isinstance(value, str) and not value.strip())

    if text is None and picture is None:
        raise Fault(name, "", missing=True)
    if text is None or picture is None:
        return (text or picture or "",)
    filled = tuple(column for column in (text, picture) if not is_empty(row[column]))
    if not filled:
        raise Fault(text, f"holds nothing, nor does {picture!r}")
    return filled


def _passages(value: object, column: str) -> list[Item]:
    """Return the texts of a cell: a text, a passage {title, text}, or a list of them; null is no text."""
    if value is None:
        return []
    items = value if type(value) is list else [value]
    texts: list[Item] = []
    for number, item in enumerate(items, start=1):
        text = item
        if isinstance(item, dict):
            title, text = item.get("title"), item.get("text")
            for name, part in (("title", title), ("text", text)):
                if part is not None and not isinstance(part, str):
                    raise Fault(column, f"expected text in {name!r} of a passage, got {describe(part)}")
            if title is None and text is None:
                raise Fault(column, "a passage needs 'text' (and may have 'title')")
            text = title_and_text(title, text)
        if not isinstance(text, (Image, Composed)) and (reason := text_fault(text)):
            raise Fault(column, f"{reason} (item {number} of {len(items)})" if items is value else reason)
        texts.append(text)
    return texts


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


def _truth_or_number(cell: object) -> bool | int | float | None:
    """Return the number of a label, or true and false as such; files of any kind may write both as texts."""
    if isinstance(cell, str) and cell.strip().lower() in ("true", "false"):
        return cell.strip().lower() == "true"
    return cell if isinstance(cell, bool) else _number_in(cell, cells_are_text=True)


def _number_in(cell: object, *, cells_are_text: bool) -> int | float | None:
    """Return the number of a cell, possibly not finite; None where it holds none. CSV writes numbers as texts."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return cell if abs(cell) < 2**63 or isinstance(cell, float) else math.inf
    # Not `float(cell)`, which also takes "nan", "1_000" and digits of other scripts.
    if not (cells_are_text and isinstance(cell, str) and _NUMBER.fullmatch(cell.strip())):
        return None
    is_whole = cell.strip().lstrip("+-").isdecimal() and len(cell) < MOST_DIGITS
    return int(cell) if is_whole else float(cell)


def _class_label(value: object, column: str) -> str | int:
    # Parquet and pandas write a column of whole numbers with gaps as floats: 7.0 is the class 7.
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


# --- Documents: an id, a title, a text, a picture


def checked_id(value: object, column: str, known: Container[str]) -> str:
    """Return the id of a row.

    Raises:
        Fault: It is no text or whole number, or is among the known ones.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise Fault(column, "missing, or neither a text nor a whole number")
    name = str(value)
    if reason := encoding_fault(name) or (f"{quoted(name)} is given twice" if name in known else None):
        raise Fault(column, reason)
    return name


def document_text(row: Mapping[str, Any], column: str | None, *, needed: bool) -> str:
    """Return the column `title` of a row, one space, and its text; either may be empty.

    Raises:
        Fault: One is no text, or the text is missing where it is needed.
    """
    title, text = row.get("title"), row.get(column) if column else None
    for name, reason in (("title", part_fault(title, needed=False)), (column, part_fault(text, needed=needed))):
        if reason is not None:
            raise Fault(name or "", reason)
    return title_and_text(title, text)


def document_item(images: ImageRoot, row: Mapping[str, Any], column: str, where: str, text: str) -> Image | Composed:
    """Return the picture of a row, or the pictures of a list, with a text or without as one item.

    Raises:
        Fault: A picture is refused.
    """
    try:
        return images.item(row[column], name=where, text=text)
    except PictureFault as fault:
        raise Fault(column, fault.reason, escapes=fault.escapes) from fault


# --- A block of rows at once

_SPREAD = 0x1E3779B97F4A7C15
"""Odd multiplier of a hash: it tells the texts of one row from those of another."""


def block_of_texts(rows: Sequence[dict[str, Any]], shape: RowShape) -> ItemRows | None:
    """Return the texts of rows of one shape, checked; None where there is anything else, or anything wrong.

    What is read here comes out as `RowChecker` would return it. All loops over rows run in C: `map`, `zip`, slices.
    """
    others = (shape.query_image, shape.positive_image, shape.negative_images, shape.title, shape.label)
    asked = (source is not None or column.required for column, source in shape.extra)
    if shape.query is None or shape.positive is None or any(others) or any(asked):
        return None
    columns = [[row[name] for row in rows] for name in (shape.query, shape.positive, *shape.negatives)]
    if {*map(type, columns[0])} != {str}:
        return None
    texts = _even(columns) or _uneven(columns)
    return texts if texts is not None and texts.num_positives.all() and _is_usable(texts) else None


def _even(columns: Sequence[list[Any]]) -> ItemRows | None:
    """Return rows that all have as many positives and negatives; None where they don't."""
    parts, widths = [], []
    for column in columns:
        kinds = {*map(type, column)}
        sizes = {1} if kinds == {str} else {*map(len, column)} if kinds == {list} else {0, 1}
        if len(sizes) > 1:
            return None
        widths.append(sizes.pop())
        # Column by column, then woven: texts[n::width] is the n-th item of every row.
        flat = column if kinds == {str} else list(chain.from_iterable(column))
        parts += [flat[number :: widths[-1]] for number in range(widths[-1])]
    texts: list[Any] = [None] * (len(parts) * len(columns[0]))
    for number, part in enumerate(parts):
        texts[number :: len(parts)] = part
    return ItemRows(texts, *(np.full(len(columns[0]), size) for size in (widths[1], sum(widths[2:]))))


def _uneven(columns: Sequence[list[Any]]) -> ItemRows | None:
    """Return rows whose documents are texts, lists of any length or missing; None where a cell is anything else."""
    cells: list[Sequence[Sequence[Any]]] = [list(zip(columns[0], strict=True))]
    for column in columns[1:]:  # each cell becomes a sequence: of one text, of those of a list, or of none
        kinds = {*map(type, column)}
        if not kinds <= {str, list, type(None)}:
            return None
        if kinds == {str}:
            cells.append(list(zip(column, strict=True)))
        elif kinds == {list}:
            cells.append(column)
        else:
            cells.append([cell if type(cell) is list else () if cell is None else (cell,) for cell in column])
    _, num_positives, *more = (np.fromiter(map(len, column), np.int64, len(column)) for column in cells)
    texts = list(chain.from_iterable(chain.from_iterable(zip(*cells, strict=True))))
    return ItemRows(texts, num_positives, sum(more, start=np.zeros(len(columns[0]), np.int64)))


def _is_usable(rows: ItemRows) -> bool:
    """Return whether all items are usable texts, and no row has one of its positives among its negatives."""
    texts: Sequence[Any] = rows.items
    try:
        stripped, joined = list(map(str.strip, texts)), "".join(texts)
        if not joined.isascii():
            joined.encode()
    except (TypeError, UnicodeEncodeError):  # no text, or half of a surrogate pair
        return False
    if not all(stripped) or "\0" in joined:
        return False
    # Positives and negatives are compared by hash, with that of the row mixed in where rows differ in width. Two texts
    # of one hash only send the block to the slow path, which compares the texts.
    columns, hashes = rows.columns, np.fromiter(map(hash, stripped), np.int64, len(texts))
    positives, negatives = hashes[columns == 1], hashes[columns == 2]
    if len(positives) == len(rows.num_positives):
        return not (np.repeat(positives, rows.num_negatives) == negatives).any()
    of_row = [np.repeat(np.arange(len(counts)), counts) * _SPREAD for counts in rows[1:]]
    return not len(np.intersect1d(positives ^ of_row[0], negatives ^ of_row[1]))
