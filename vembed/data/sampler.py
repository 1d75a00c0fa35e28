"""The global batch of step t as a pure function of (seed, epoch, step): no state, no rank, no worker.

1. epoch = step // batches_per_epoch, batch = step % batches_per_epoch.
2. A `Mixture` of several sources says which of their rows the epoch takes; without one it takes every row once.
3. The batches of an epoch are arranged with one generator, PCG64(SeedSequence([seed, epoch])): at random, or as
   `arrangements.py` has it.
4. At random the batch is the slice [batch * batch_size, (batch + 1) * batch_size) of one permutation.

At random every record comes exactly once per epoch. The last batch of an epoch may be smaller; it is left out when
`drop_last` asks for that, and when it would hold a single record, which has no in-batch negatives.

Resumed runs rely on what is drawn here: another order of draws, or another generator, changes every run's batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.data.arrangements import AtRandom, shuffled
from vembed.errors import DataError
from vembed.plan.batch import epoch_layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.data.arrangements import Arrangement, EpochBatches


class GlobalSampler:
    """Order of the records over all steps of a run.

    Args:
        num_records: Records to draw from, at least 2.
        batch_size: Records of a global batch, over all devices.
        seed: Seed of the run, not negative.
        drop_last: Leave out the smaller last batch of an epoch. With fewer records than a batch it has no effect.
        arrangement: How records are put into batches; None is at random.
        mixture: Sources that share each epoch; None takes every record once.

    Attributes:
        num_records: As passed.
        batch_size: As passed.
        batches_per_epoch: Global batches of one epoch, at least 1.
        notes: How the records divide into batches where they don't divide evenly, one plain sentence each.

    Raises:
        DataError: There are fewer than 2 records.
        ValueError: An argument is not a whole number in its range.
    """

    def __init__(
        self,
        num_records: int,
        *,
        batch_size: int,
        seed: int,
        drop_last: bool = False,
        arrangement: Arrangement | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        self.num_records = _whole(num_records, name="num_records", least=0)
        self.batch_size = _whole(batch_size, name="batch_size", least=1)
        self._seed = _whole(seed, name="seed", least=0)
        if self.num_records < 2:
            msg = f"a batch needs at least 2 records to hold negatives; the data has {self.num_records}: add rows"
            raise DataError(msg)
        self.batches_per_epoch, self.notes = epoch_layout(self.num_records, self.batch_size, drop_last=drop_last)
        starts = np.arange(self.batches_per_epoch + 1, dtype=np.int64) * self.batch_size
        self._starts = np.minimum(starts, self.num_records)
        self._arrangement = AtRandom() if arrangement is None else arrangement
        self._mixture = mixture
        self._parts = [self._starts] if mixture is None else mixture.parts(self._starts)
        # One epoch is kept: arranging costs seconds for a million rows, and steps are asked for in order.
        self._cached_epoch = -1
        self._cached: EpochBatches

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the records of one global batch.

        Args:
            step: Global step, counted from 0 over all epochs.

        Returns:
            Row numbers, int64, read-only, `batch_size` of them or fewer.

        Raises:
            ValueError: The step is negative or not a whole number.
        """
        epoch, batch = divmod(_whole(step, name="step", least=0), self.batches_per_epoch)
        rows, starts = self._epoch(epoch)
        return rows[starts[batch] : starts[batch + 1]]

    def share(self, number: int, accumulated: int) -> float:
        """Return a batch's share of the rows of its optimizer step, above 0 and at most 1.

        Args:
            number: Of the batch, counted from 0 over all epochs.
            accumulated: Most batches of a step; the last step of an epoch takes those that are left.
        """
        epoch, batch = divmod(number, self.batches_per_epoch)
        _, starts = self._epoch(epoch)
        first = batch - batch % accumulated
        end = min(first + accumulated, self.batches_per_epoch)
        return float((starts[batch + 1] - starts[batch]) / (starts[end] - starts[first]))

    def arrangement_notes(self) -> tuple[str, ...]:
        """Return the effect of sources and arrangement in words, one plain sentence each."""
        of_sources = () if self._mixture is None else self._mixture.notes(self._starts, self.num_records)
        return (*of_sources, *self._arrangement.notes(self._epoch(0), int(self._starts[-1])))

    def _epoch(self, epoch: int) -> EpochBatches:
        if epoch != self._cached_epoch:
            # One generator serves all parts, in their order, and then shuffles the batches of the parts.
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
            parts = [
                self._arrangement.batches(rows, generator, starts)
                for rows, starts in zip(self._taken(epoch), self._parts, strict=True)
            ]
            self._cached = parts[0] if len(parts) == 1 else shuffled(parts, generator)
            self._cached.rows.setflags(write=False)
            self._cached_epoch = epoch
        return self._cached

    def _taken(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return the records of an epoch, for each part of its batches."""
        if self._mixture is None:
            return [np.arange(self.num_records)]
        counts = self._mixture.counts(self._starts, self.num_records)
        taken = self._mixture.rows(counts, seed=self._seed, epoch=epoch)
        return taken if self._mixture.single else [np.concatenate(taken)]


def _whole(value: int, *, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        msg = f"{name} must be a whole number of at least {least}, not {value!r}"
        raise ValueError(msg)
    return int(value)


SHARE_DIGITS = 12
"""Decimal digits of a source's share: machines round differently behind them, and all ranks must agree."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources of the training rows, which stand one after the other in the records.

    The rows of a source come in an endless stream, one random order of them after the other, and every epoch continues
    where the last one ended: no row comes again before all others of its source did. Nothing is remembered for that:
    an epoch takes `count` rows, so epoch e begins at element e * count of the stream.
    """

    names: tuple[str, ...]  # for people
    sizes: tuple[int, ...]  # rows of each source
    weights: tuple[float, ...]  # how much more often rows of a source come
    temperature: float = 1.0  # 1 draws in proportion to sizes; higher evens sources out
    single: bool = False  # every batch is of one source

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of each source in an epoch: weight x size^(1 / temperature), of the sum."""
        # As the temperature of multilingual models (T5, XLM-R): at 5, a source of 100 times the rows comes 2.5 times as
        # often, not 100 times; without an end to it, all come alike.
        # Sizes count relative to the largest: a power of them would be too large a number at a low temperature.
        raw = np.array(self.weights) * (np.array(self.sizes) / max(self.sizes)) ** (1 / self.temperature)
        shares: NDArray[np.float64] = np.round(raw / raw.sum(), SHARE_DIGITS)
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
        rows = []
        for source, (size, count) in enumerate(zip(self.sizes, counts.tolist(), strict=True)):
            begin = epoch * count
            # Pass n over a source has a permutation of its own. The epoch may begin and end in the middle of a pass,
            # so it computes count / size + 2 of them at most, whatever the number of the epoch.
            orders = []
            for number in range(begin // size, -(-(begin + count) // size)):
                sequence = np.random.SeedSequence([seed, number, source, size])
                orders.append(np.random.Generator(np.random.PCG64(sequence)).permutation(size))
            stream = np.concatenate(orders)
            rows.append(firsts[source] + stream[begin % size : begin % size + count])
        return rows

    def counts(self, starts: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
        """Return how many rows an epoch takes of each source.

        Args:
            starts: Of the batches.
            num_rows: Of an epoch of all sources, those that no batch holds included.
        """
        if self.single:
            return np.array([part[-1] for part in self.parts(starts)])
        return allot(self.shares, num_rows)

    def notes(self, starts: NDArray[np.int64], num_rows: int) -> tuple[str, ...]:
        """Return what an epoch takes of each source, in words."""
        counts = self.counts(starts, num_rows).tolist()
        batches = [""] * len(self.sizes)
        if self.single:
            batches = [f" in {len(part) - 1:,} of {len(starts) - 1:,} batches" for part in self.parts(starts)]
        return tuple(
            f"source {name}: {size:,} rows, weight {weight:g}: {count:,} rows of an epoch{where}, each "
            f"{count / size:.2f} times."
            for name, size, weight, count, where in zip(
                self.names, self.sizes, self.weights, counts, batches, strict=True
            )
        )


def allot(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return whole numbers in proportion to shares, at least 1 each, that add up to a total of at least that many."""
    wanted = shares * total
    counts = np.maximum(np.floor(wanted).astype(np.int64), 1)
    # Rounding down leaves fewer to hand out than there are sources; the minimum of 1 can take as many too much.
    while counts.sum() < total:
        counts[np.argmax(wanted - counts)] += 1
    while counts.sum() > total:
        counts[np.argmax(np.where(counts > 1, counts - wanted, -np.inf))] -= 1
    return counts
