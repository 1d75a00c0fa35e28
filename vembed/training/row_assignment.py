"""Which rank encodes which rows of a batch: shares of equal cost, from nothing but the batch itself.

The loss runs over the whole batch, so that queries and their documents need not stay together. Every rank holds the
records and deals alike; nothing is exchanged.

1. The rows of each modality are dealt apart: they cost differently, and sharded models need like calls on all ranks.
2. Sorted by estimated cost, they go out in laps of a row for each rank; in each lap the longest one goes to the rank
   that has least so far.
3. What is left over for the last lap of one modality goes to the ranks that the one before left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import Composed, Image
from vembed.gradcache.row_assignment import RowAssignment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item

CHARACTERS_PER_TOKEN = 4
"""Of English texts. Only the proportion between rows counts, and where a text is cut."""


def estimated_costs(items: Sequence[Item], max_length: int | None) -> NDArray[np.int64]:
    """Return what items of one modality cost beside each other, before anything is tokenized or decoded.

    Args:
        items: n items.
        max_length: Longest text in tokens; None where there is no limit.

    Returns:
        (n,): characters of a text as far as it is read; pictures cost alike.
    """
    longest = np.iinfo(np.int64).max if max_length is None else max_length * CHARACTERS_PER_TOKEN
    lengths = [len(_text(item)) for item in items]
    return np.minimum(np.array(lengths, dtype=np.int64), longest)


def assign_rows(groups: Sequence[NDArray[np.int64]], costs_N: NDArray[np.int64], world_size: int) -> RowAssignment:
    """RowAssignment the rows of a batch.

    Args:
        groups: Rows of each modality; together every row once.
        costs_N: Estimated cost of each row, compared within a group only.
        world_size: Ranks.

    Returns:
        Counts differ by at most one in every group and over all.
    """
    if world_size == 1:
        return RowAssignment.alone(len(costs_N))
    owners_N = np.empty(len(costs_N), dtype=np.int64)
    first = 0
    for rows in groups:
        order = rows[np.argsort(-costs_N[rows], kind="stable")]
        num_left = len(order) % world_size
        loads = np.zeros(world_size, dtype=np.int64)
        for lap in order[: len(order) - num_left].reshape(-1, world_size):
            ranks = np.argsort(loads, kind="stable")
            owners_N[lap] = ranks
            loads[ranks] += costs_N[lap]
        owners_N[order[len(order) - num_left :]] = (first + np.arange(num_left)) % world_size
        first = (first + num_left) % world_size
    return RowAssignment(tuple(np.flatnonzero(owners_N == rank) for rank in range(world_size)))


def _text(item: Item) -> str:
    if isinstance(item, Composed):
        return item.text
    return "" if isinstance(item, Image) else item
