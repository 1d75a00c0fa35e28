"""Batches of rows that are hard negatives of each other: those whose vectors lie close together.

1. Each epoch the rows are halved again and again, down to batches: two random rows, the second far from the first, span
   a direction, and rows are split by where they lie along it. Other directions make other batches in the next epoch.
2. In a batch, a row that is nearer to an earlier one than a cap is its duplicate rather than its negative: such rows
   change places among each other, and what still is too near after some rounds is left out of the epoch.

Vectors are whole numbers so small that every product of two is exact in float32, in whatever order a machine adds: all
ranks and all machines cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.data.arrangements import LEAST_ROWS, EpochBatches, shuffled
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

SCALE = 1024
"""Length of a vector as whole numbers: sums of products of two differences of such stay below 2^24."""

FAR_CANDIDATES = 64
"""Rows among which the one farthest from the first is looked for."""

ROUNDS = 4
"""Of changing places."""

TINY = float(np.finfo(np.float32).tiny)

BLOCK_ROWS = 65_536
"""Rows that are multiplied at a time."""


def whole_numbers(vectors_NE: NDArray[np.float32]) -> NDArray[np.int16]:
    """Return vectors of unit length, or none at all, as whole numbers."""
    precise = vectors_NE.astype(np.float64)
    lengths = np.sqrt(np.square(precise).sum(axis=1, keepdims=True))
    whole: NDArray[np.int16] = np.rint(SCALE * precise / np.maximum(lengths, TINY)).astype(np.int16)
    return whole


@dataclass(frozen=True, slots=True)
class HardBatches:
    """Rows whose vectors lie close together, up to a cap."""

    vectors_NE: NDArray[np.int16]  # of every record, as `whole_numbers` makes them
    cap: float  # cosine similarity above which two rows share no batch

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return clusters of rows, in random order."""
        order = generator.permutation(rows)[: starts[-1]]
        stack = [(0, len(starts) - 1)]
        while stack:
            first, last = stack.pop()
            if last - first > 1:
                middle = (first + last) // 2
                part = order[starts[first] : starts[last]]
                part[:] = part[self._along_a_direction(part, generator)]
                stack += [(first, middle), (middle, last)]
        kept = self._spread(order, starts, generator)
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(kept)])
        return shuffled([EpochBatches(order[kept], ends[starts])], generator)

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:
        """Say how near the rows of a batch are."""
        sizes = np.diff(first.starts)
        sample = range(0, len(sizes), max(1, len(sizes) // 50))
        near = np.mean([self._nearest(first.rows[first.starts[each] : first.starts[each + 1]]) for each in sample])
        left = num_rows - len(first.rows)
        more = f"; {plural(left, 'row')} too near to another are left out of the first epoch" if left else ""
        mean = f"the nearest other row of a row's batch has a mean cosine similarity of {near:.2f}"
        return (f"batch_sampling hard: {mean}{more}.",)

    def _float(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.vectors_NE[rows].astype(np.float32)

    def _along_a_direction(self, rows: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        """Return the order of rows along a random direction."""
        one = self._float(rows[:1])[0]
        others = self._float(rows[generator.integers(len(rows), size=FAR_CANDIDATES)])
        direction = others[np.argmin(others @ one)] - one
        along = np.concatenate(
            [self._float(rows[start : start + BLOCK_ROWS]) @ direction for start in range(0, len(rows), BLOCK_ROWS)]
        )
        return np.argsort(along, kind="stable")

    def _spread(
        self, order: NDArray[np.int64], starts: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Move rows that are too near to another, in place; return which places to keep."""
        found = dict(self._too_near(order, starts, range(len(starts) - 1)))
        for _ in range(ROUNDS):
            moved = generator.permutation(np.concatenate([np.zeros(0, dtype=np.int64), *found.values()]))
            order[moved] = order[np.roll(moved, 1)]
            found = dict(self._too_near(order, starts, sorted(found)))
        kept = np.ones(len(order), dtype=np.bool_)
        for batch, places in found.items():
            room = int(starts[batch + 1] - starts[batch]) - LEAST_ROWS
            kept[places[: max(0, room)]] = False
        return kept

    def _too_near(
        self, order: NDArray[np.int64], starts: NDArray[np.int64], suspects: Iterable[int]
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield batches and the places in them of rows that are too near to an earlier row."""
        for batch in suspects:
            begin, end = int(starts[batch]), int(starts[batch + 1])
            vectors = self._float(order[begin:end])
            near = np.triu(vectors @ vectors.T > self.cap * SCALE**2, 1)
            late: list[int] = []
            for place in np.flatnonzero(near.any(axis=0)).tolist():
                if np.delete(near[:, place], late).any():
                    late.append(place)
            if late:
                yield batch, begin + np.array(late, dtype=np.int64)

    def _nearest(self, rows: NDArray[np.int64]) -> float:
        vectors = self._float(rows)
        products = vectors @ vectors.T - 2 * SCALE**2 * np.eye(len(rows), dtype=np.float32)
        return float(products.max(axis=1).mean() / SCALE**2)
