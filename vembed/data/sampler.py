"""The global batch of step t as a pure function of (seed, epoch, step): no state, no rank, no worker.

1. epoch = step // batches_per_epoch, place = step % batches_per_epoch.
2. The batches of an epoch are arranged with one generator, PCG64(SeedSequence([seed, epoch])): at random, or as
   `arrangements.py` has it.
3. At random the batch is the slice [place * batch_size, (place + 1) * batch_size) of one permutation.

At random every record comes exactly once per epoch. The last batch of an epoch may be smaller; it is left out when
`drop_last` asks for that, and when it would hold a single record, which has no in-batch negatives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.data.arrangements import AtRandom, shuffled
from vembed.errors import DataError
from vembed.plan.batch import epoch_layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.data.arrangements import Arrangement, EpochBatches
    from vembed.data.mixture import Mixture


class GlobalSampler:
    """Say which records make up each global batch.

    Args:
        num_records: Records to draw from, at least 2.
        batch_size: Records of a global batch, over all devices.
        seed: Seed of the run, not negative.
        drop_last: Leave out the smaller last batch of an epoch. With fewer records than a batch it has no effect.
        arrangement: How records are put into batches; None is at random.
        mixture: Sources that share each epoch; None takes every record once.

    Attributes:
        num_records: As given.
        batch_size: As given.
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
        epoch, place = divmod(_whole(step, name="step", least=0), self.batches_per_epoch)
        rows, starts = self._epoch(epoch)
        return rows[starts[place] : starts[place + 1]]

    def share(self, number: int, accumulated: int) -> float:
        """Return a batch's share of the rows of its optimizer step, above 0 and at most 1.

        Args:
            number: Of the batch, counted from 0 over all epochs.
            accumulated: Most batches of a step; the last step of an epoch takes those that are left.
        """
        epoch, place = divmod(number, self.batches_per_epoch)
        _, starts = self._epoch(epoch)
        first = place - place % accumulated
        end = min(first + accumulated, self.batches_per_epoch)
        return float((starts[place + 1] - starts[place]) / (starts[end] - starts[first]))

    def arrangement_notes(self) -> tuple[str, ...]:
        """Say what comes of sources and arrangement, one plain sentence each."""
        of_sources = () if self._mixture is None else self._mixture.notes(self._starts, self.num_records)
        taken = sum(map(len, self._taken(0)))
        return (*of_sources, *self._arrangement.notes(self._epoch(0), taken))

    def _epoch(self, epoch: int) -> EpochBatches:
        if epoch != self._cached_epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
            taken = self._taken(epoch)
            parts = [
                self._arrangement.batches(rows, generator, starts)
                for rows, starts in zip(taken, self._parts, strict=True)
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
