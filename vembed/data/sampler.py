"""The global batch of step t as a pure function of (seed, epoch, step): no state, no rank, no worker.

1. epoch = step // steps_per_epoch, place = step % steps_per_epoch.
2. The order of an epoch is one permutation drawn from PCG64(SeedSequence([seed, epoch])).
3. The batch is the slice [place * batch_size, (place + 1) * batch_size) of that order.

Every record comes exactly once per epoch. The last batch of an epoch may be smaller; it is left out when `drop_last`
asks for that, and when it would hold a single record, which has no in-batch negatives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.errors import DataError
from vembed.plan.batching import epoch_layout

if TYPE_CHECKING:
    from numpy.typing import NDArray


class GlobalSampler:
    """Say which records make up each global batch.

    Args:
        num_records: Records to draw from, at least 2.
        batch_size: Records of a global batch, over all devices.
        seed: Seed of the run, not negative.
        drop_last: Leave out the smaller last batch of an epoch. With fewer records than a batch it has no effect.

    Attributes:
        num_records: As given.
        batch_size: As given.
        steps_per_epoch: Global batches of one epoch, at least 1.
        notes: How the records divide into batches where they don't divide evenly, one plain sentence each.

    Raises:
        DataError: There are fewer than 2 records.
        ValueError: An argument is not a whole number in its range.
    """

    def __init__(self, num_records: int, *, batch_size: int, seed: int, drop_last: bool = False) -> None:
        self.num_records = _whole(num_records, name="num_records", least=0)
        self.batch_size = _whole(batch_size, name="batch_size", least=1)
        self._seed = _whole(seed, name="seed", least=0)
        if self.num_records < 2:
            msg = f"a batch needs at least 2 records to hold negatives; the data has {self.num_records}: add rows"
            raise DataError(msg)
        self.steps_per_epoch, self.notes = epoch_layout(self.num_records, self.batch_size, drop_last=drop_last)
        self._cached_epoch = -1
        self._cached_order = np.empty(0, dtype=np.int64)

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the records of one global batch.

        Args:
            step: Global step, counted from 0 over all epochs.

        Returns:
            Row numbers, int64, read-only, `batch_size` of them or fewer at the end of an epoch.

        Raises:
            ValueError: The step is negative or not a whole number.
        """
        epoch, place = divmod(_whole(step, name="step", least=0), self.steps_per_epoch)
        if epoch != self._cached_epoch:
            self._cached_order = _permutation(self.num_records, seed=self._seed, epoch=epoch)
            self._cached_epoch = epoch
        return self._cached_order[place * self.batch_size : (place + 1) * self.batch_size]


def _permutation(num_records: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(num_records)
    order.setflags(write=False)
    return order


def _whole(value: int, *, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        msg = f"{name} must be a whole number of at least {least}, not {value!r}"
        raise ValueError(msg)
    return int(value)
