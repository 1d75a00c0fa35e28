"""Who encodes what: the rows of a batch, spread over the ranks.

The loss runs over the global batch, so that which rank encodes which row can't change it; queries and their documents
need not stay together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """The rows of each rank."""

    # for each rank its rows of [queries; documents], ascending, int64; together each row exactly once
    slots: tuple[NDArray[np.int64], ...]

    @classmethod
    def alone(cls, num_rows: int) -> RowAssignment:
        """Give every row to the only rank."""
        return cls((np.arange(num_rows, dtype=np.int64),))

    @property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [len(own) for own in self.slots]

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return sum(self.counts)

    @property
    def rank_order(self) -> NDArray[np.int64]:
        """The rows as a gather puts them: those of rank 0 first."""
        return np.concatenate(self.slots)

    def places(self, rank: int) -> NDArray[np.int64]:
        """Return the place of each row among those of a rank, (N,); -1 for the rows of others."""
        places = np.full(self.num_rows, -1, dtype=np.int64)
        places[self.slots[rank]] = np.arange(len(self.slots[rank]))
        return places

    def block_places(self) -> NDArray[np.int64]:
        """Return the place of each row of the batch, (N,), where each rank has a block as large as the largest."""
        places = np.empty(self.num_rows, dtype=np.int64)
        for rank, own in enumerate(self.slots):
            places[own] = rank * max(self.counts) + np.arange(len(own))
        return places

    def of_vectors(self, counts_N: NDArray[np.int64]) -> RowAssignment:
        """Return the assignment of the vectors, where row i has `counts_N[i]` of them and row i + 1 follows row i."""
        starts_N = np.cumsum(counts_N) - counts_N
        return RowAssignment(tuple(ranges(starts_N[own], counts_N[own]) for own in self.slots))
