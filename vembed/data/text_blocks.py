"""Read rows of JSONL that hold nothing but texts block by block, in a fraction of the time that rows take one by one.

A block with anything unusual or wrong in it is left to the code that looks at each row and words the errors
(`files.py`, `validate.py`). What is read here comes out as it would there.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.data.table_writer import ItemRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.data.columns import RowShape

_SPREAD = 0x1E3779B97F4A7C15
"""Odd multiplier of a hash: it tells the texts of one row from those of another."""


def block_of_texts(rows: Sequence[dict[str, Any]], shape: RowShape) -> ItemRows | None:
    """Return the texts of rows of one shape, checked; None where there is anything else, or anything wrong."""
    others = (shape.query_image, shape.positive_image, shape.negative_images, shape.title, shape.label)
    asked = (source is not None or column.required for column, source in shape.extra)
    if shape.query is None or shape.positive is None or any(others) or any(asked):
        return None
    columns = [[row[name] for row in rows] for name in (shape.query, shape.positive, *shape.negatives)]
    if {*map(type, columns[0])} != {str}:
        return None
    found = _even(columns) or _uneven(columns)
    return found if found is not None and found.num_positives.all() and _is_usable(found) else None


def _even(columns: Sequence[list[Any]]) -> ItemRows | None:
    """Return rows that all have as many positives and negatives; None where they don't."""
    parts, widths = [], []
    for column in columns:
        kinds = {*map(type, column)}
        sizes = {1} if kinds == {str} else {*map(len, column)} if kinds == {list} else {0, 1}
        if len(sizes) > 1:
            return None
        widths.append(sizes.pop())
        flat = column if kinds == {str} else list(chain.from_iterable(column))
        parts += [flat[place :: widths[-1]] for place in range(widths[-1])]
    texts: list[Any] = [None] * (len(parts) * len(columns[0]))
    for place, part in enumerate(parts):
        texts[place :: len(parts)] = part
    return ItemRows(texts, *(np.full(len(columns[0]), size) for size in (widths[1], sum(widths[2:]))))


def _uneven(columns: Sequence[list[Any]]) -> ItemRows | None:
    """Return rows whose documents are texts, lists of any length or missing; None where a cell is anything else."""
    documents = [_cells(column) for column in columns[1:]]
    if None in documents:
        return None
    cells = [list(zip(columns[0], strict=True)), *filter(None, documents)]
    _, num_positives, *more = (np.fromiter(map(len, column), np.int64, len(column)) for column in cells)
    texts = list(chain.from_iterable(chain.from_iterable(zip(*cells, strict=True))))
    return ItemRows(texts, num_positives, sum(more, start=np.zeros(len(columns[0]), np.int64)))


def _cells(column: list[Any]) -> Sequence[Sequence[Any]] | None:
    """Return the cells of a column as sequences, each with one text or those of a list; null has none."""
    kinds = {*map(type, column)}
    if kinds == {str}:
        return list(zip(column, strict=True))
    if kinds == {list}:
        return column
    if not kinds <= {str, list, type(None)}:
        return None
    return [cell if type(cell) is list else () if cell is None else (cell,) for cell in column]


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
    columns, hashes = rows.columns, np.fromiter(map(hash, stripped), np.int64, len(texts))
    positives, negatives = hashes[columns == 1], hashes[columns == 2]
    if len(positives) == len(rows.num_positives):
        return not (np.repeat(positives, rows.num_negatives) == negatives).any()
    places = [np.repeat(np.arange(len(counts)), counts) * _SPREAD for counts in rows[1:]]
    return not len(np.intersect1d(positives ^ places[0], negatives ^ places[1]))
