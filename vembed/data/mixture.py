"""How the rows of several sources share an epoch.

Rows of a source come in a stream of random orders, one after the other, and every epoch continues where the last one
ended: no row comes again before all others of its source did. What an epoch holds is still a function of (seed, epoch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_DIGITS = 12
"""Of a share: what differs behind them is how machines round, and ranks must agree."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sources of the training rows, which stand one after the other in the records."""

    names: tuple[str, ...]  # for people
    sizes: tuple[int, ...]  # rows of each
    weights: tuple[float, ...]  # how much more often rows of a source come
    temperature: float = 1.0  # 1 draws in proportion to sizes; higher evens sources out
    single: bool = False  # whether every batch is of one source

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of each source in an epoch: weight x size^(1 / temperature), of the sum."""
        raw = np.array(self.weights) * np.array(self.sizes, dtype=np.float64) ** (1 / self.temperature)
        shares: NDArray[np.float64] = np.round(raw / raw.sum(), _DIGITS)
        return shares

    def parts(self, starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the batches of an epoch as parts that are filled apart: one of all sources, or one of each source.

        Args:
            starts: First row of each batch, and the end of the last one.

        Returns:
            As `starts`, of each part; a last, smaller batch is one of the largest source.

        Raises:
            DataError: There are fewer batches than sources, or a source has fewer rows than a batch.
        """
        if not self.single:
            return [starts]
        num_batches, batch_size = len(starts) - 1, int(starts[1])
        if num_batches < len(self.sizes):
            raise DataError(
                f"source_batches single: an epoch of {num_batches} batches has none for some of {len(self.sizes)} "
                f"sources; lower the batch size, or set source_batches to mixed"
            )
        for name, size in zip(self.names, self.sizes, strict=True):
            if size < batch_size:
                raise DataError(
                    f"source_batches single: {name} has {size:,} rows to train on, fewer than a batch of "
                    f"{batch_size:,}; lower the batch size to {size:,}, or set source_batches to mixed"
                )
        counts = allot(self.shares, num_batches)
        ends = [np.arange(count + 1, dtype=np.int64) * batch_size for count in counts.tolist()]
        ends[int(counts.argmax())][-1] -= num_batches * batch_size - int(starts[-1])
        return ends

    def rows(self, counts: NDArray[np.int64], *, seed: int, epoch: int) -> list[NDArray[np.int64]]:
        """Return the rows that an epoch takes of each source."""
        firsts = np.cumsum(self.sizes) - np.array(self.sizes)
        found = []
        for source, (size, count) in enumerate(zip(self.sizes, counts.tolist(), strict=True)):
            begin = epoch * count
            passes = range(begin // size, -(-(begin + count) // size))
            stream = np.concatenate([_order(size, seed, source, number) for number in passes])
            found.append(firsts[source] + stream[begin % size : begin % size + count])
        return found

    def counts(self, starts: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
        """Return how many rows an epoch takes of each source.

        Args:
            starts: Of the batches.
            num_rows: Of an epoch of all sources, those that no batch holds included.
        """
        parts = self.parts(starts)
        return np.array([part[-1] for part in parts]) if self.single else allot(self.shares, num_rows)

    def notes(self, starts: NDArray[np.int64], num_rows: int) -> tuple[str, ...]:
        """Say what an epoch takes of each source."""
        sizes, counts = self.sizes, self.counts(starts, num_rows).tolist()
        batches = [f" in {len(part) - 1:,} of {len(starts) - 1:,} batches" for part in self.parts(starts)]
        return tuple(
            f"source {name}: {size:,} rows, weight {weight:g}: {count:,} rows of an epoch{where}, each "
            f"{count / size:.2f} times."
            for name, size, weight, count, where in zip(
                self.names, sizes, self.weights, counts, batches if self.single else [""] * len(sizes), strict=True
            )
        )


def allot(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return whole numbers in proportion to shares, at least 1 each, that add up to a total of at least that many."""
    wanted = shares * total
    counts = np.maximum(np.floor(wanted).astype(np.int64), 1)
    while counts.sum() < total:
        counts[np.argmax(wanted - counts)] += 1
    while counts.sum() > total:
        counts[np.argmax(np.where(counts > 1, counts - wanted, -np.inf))] -= 1
    return counts


def source_of(rows: NDArray[np.int64], sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of each row's source, where the sources stand one after the other."""
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


def _order(size: int, seed: int, source: int, number: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, source, size]))).permutation(size)
