"""Hold rows out for validation, without a text or picture on both sides and without regard to the order of the rows.

1. Rows that share a query or a positive are linked; linked rows form a component.
2. Components are ordered by their smallest content hash.
3. Components are taken whole, in that order, while they fit; one that is too large is passed over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vembed.data.problems import plural
from vembed.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.data.records import RecordTable

MIN_TRAIN_ROWS = 2
FIX = "give val_data_path, or set eval_strategy: no"


class HeldOut(NamedTuple):
    """A split of a table's rows."""

    train_rows: NDArray[np.int64]  # ascending
    held_out_rows: NDArray[np.int64]  # to validate on, ascending
    notes: tuple[str, ...]  # what was held out, one plain sentence each


def hold_out(table: RecordTable, *, fraction: float = 0.05, limit: int = 1000) -> HeldOut:
    """Split off rows for validation: the same content gives the same split, whatever the order of the rows.

    No text or picture that is a query or a positive on one side is a query or a positive on the other.

    Args:
        fraction: Largest share of the rows to hold out, above 0 and below 1.

    Raises:
        DataError: Nothing can be held out, or too little would be left to train on.
        ImageError: A picture can't be read any more.
        ValueError: An argument is outside its range.
    """
    if not 0 < fraction < 1 or limit < 1:
        msg = f"fraction must lie between 0 and 1, and limit be at least 1: {fraction}, {limit}"
        raise ValueError(msg)
    num_rows = len(table)
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    budget = min(limit, math.floor(round(fraction * num_rows, 9)), num_rows - MIN_TRAIN_ROWS)
    if budget < 1:
        msg = f"{plural(num_rows, 'record')} are too few to hold {fraction:.0%} out for validation: {FIX}"
        raise DataError(msg)
    component_of, smallest_hash = _components(table)
    chosen = _choose(component_of, smallest_hash, budget)
    if not chosen.any():
        msg = (
            f"no rows can be held out for validation: every group of rows that share a query or a positive has over "
            f"{plural(budget, 'row')} ({fraction:.0%} of {num_rows:,}): {FIX}"
        )
        raise DataError(msg)
    count = int(chosen.sum())
    notes = [f"{count:,} of {num_rows:,} rows held out for validation by content hash; no text is on both sides."]
    if count < budget:
        notes.append(f"That is {budget - count:,} fewer than asked for: rows that share a text stay together.")
    return HeldOut(np.flatnonzero(~chosen), np.flatnonzero(chosen), tuple(notes))


def _components(table: RecordTable) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the component of each row, numbered from 0, and the smallest content hash of each component."""
    rows, hashes = _row_hashes(table)
    _, first, text_of = np.unique(hashes, return_index=True, return_inverse=True)
    parent = list(range(len(table)))
    # Most texts stand in one row only; what is left to join is the repeated ones.
    first_rows = rows[first][text_of]
    repeated = np.flatnonzero(first_rows != rows)
    for row, other in zip(rows[repeated].tolist(), first_rows[repeated].tolist(), strict=True):
        a, b = _root(parent, row), _root(parent, other)
        parent[max(a, b)] = min(a, b)
    roots = np.array([_root(parent, row) for row in range(len(parent))], dtype=np.int64)
    _, component_of = np.unique(roots, return_inverse=True)
    smallest = np.full(int(component_of.max()) + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(smallest, component_of[rows], hashes)
    return component_of.astype(np.int64), smallest


def _row_hashes(table: RecordTable) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return (row, content hash) of every query and positive, as two flat arrays."""
    queries, positives = table.numbers("query"), table.numbers("positives")
    rows, items = (np.concatenate(parts) for parts in zip(queries, positives, strict=True))
    return rows, table.items.ids[items].view(np.uint64)


def _root(parent: list[int], row: int) -> int:
    while parent[row] != row:
        parent[row] = parent[parent[row]]  # halve the path: later look-ups are short
        row = parent[row]
    return row


def _choose(component_of: NDArray[np.int64], smallest: NDArray[np.uint64], budget: int) -> NDArray[np.bool_]:
    """Return which rows to hold out: whole components by their smallest hash, never more than `budget` rows."""
    sizes = np.bincount(component_of, minlength=len(smallest))
    taken = np.zeros(len(smallest), dtype=np.bool_)
    left = budget
    for component in np.argsort(smallest, kind="stable").tolist():
        if sizes[component] <= left:
            taken[component] = True
            left -= int(sizes[component])
            if not left:
                break
    return taken[component_of]
