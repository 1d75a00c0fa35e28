"""The batch of a step, as the engine takes it: pools of tokenized rows and the structure of the batch.

It is made in two parts. `BatchSource.features` does all that costs time, on the CPU: it decodes and tokenizes. It is a
function of (seed, epoch, step) alone, so it may run ahead in another process. `BatchSource.prepared` does what must
happen in this one: the encoder and the device come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vembed.batch import Features
from vembed.data.collate import collate
from vembed.gradcache.engine import Pool
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from vembed.batch import ContrastiveBatch, Item, Side
    from vembed.data.augment import Augmenter
    from vembed.data.records import RecordTable
    from vembed.data.sampler import GlobalSampler
    from vembed.models.encoder import Encoder


class Batches(Protocol):
    """Where the loop gets its batches from."""

    @property
    def device(self) -> torch.device:
        """Where the structure goes."""

    def batch(self, step: int) -> PreparedBatch:
        """Return the batch of a step, counted from 0.

        Raises:
            DataError: A picture can't be read any more.
        """


@dataclass(frozen=True, slots=True)
class FeaturedBatch:
    """A batch as features, without an encoder and without a device.

    Attributes:
        batch: The rows.
        parts: Features of the rows of one modality each, and where those belong in [queries; documents], int64.
    """

    batch: ContrastiveBatch
    parts: tuple[tuple[Features, NDArray[np.int64]], ...]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Everything that a step needs.

    Attributes:
        batch: The rows.
        pools: The same, as features; what goes through one tower shares a pool, so that it packs tighter.
        structure: Positives and identities on the device.
    """

    batch: ContrastiveBatch
    pools: tuple[Pool, ...]
    structure: BatchStructure

    @property
    def num_truncated(self) -> int:
        """Over-long texts that were cut."""
        return sum(pool.features.num_truncated for pool in self.pools)


@dataclass(frozen=True, slots=True)
class BatchSource:
    """Makes the batch of any step from nothing but the step's number.

    Attributes:
        records: Training records.
        sampler: Which records make up which step.
        encoder: Tokenizes them.
        device: Where the structure goes.
        augmenter: Says how their pictures are changed.
    """

    records: RecordTable
    sampler: GlobalSampler
    encoder: Encoder
    device: torch.device
    augmenter: Augmenter

    def batch(self, step: int) -> PreparedBatch:
        """Return the batch of a step, counted from 0.

        Raises:
            DataError: A picture can't be read any more.
        """
        return self.prepared(self.features(step))

    def features(self, step: int) -> FeaturedBatch:
        """Decode and tokenize the rows of a step.

        Raises:
            DataError: A picture can't be read any more.
        """
        rows = self.sampler.rows(step).tolist()
        epoch = step // self.sampler.steps_per_epoch
        records = [
            self.augmenter.record(record, row=row, epoch=epoch)
            for record, row in zip(self.records.take(rows), rows, strict=True)
        ]
        batch = collate(records, rows)
        items = (*batch.queries, *batch.documents)
        return FeaturedBatch(batch, tuple(self._parts(items, num_queries=len(batch.queries))))

    def prepared(self, featured: FeaturedBatch) -> PreparedBatch:
        """Give features to the encoder, and the structure to the device."""
        pools = tuple(Pool(self.encoder, self.encoder.collate, *part) for part in featured.parts)
        return PreparedBatch(featured.batch, pools, BatchStructure.of(featured.batch, self.device))

    def _parts(self, items: Sequence[Item], *, num_queries: int) -> Iterator[tuple[Features, NDArray[np.int64]]]:
        """Yield a part for each modality: what shares a tower is packed together, queries and documents alike."""
        for _, slots in self.encoder.by_modality(items):
            sides: list[tuple[Side, NDArray[np.int64]]] = [
                ("query", slots[slots < num_queries]),
                ("document", slots[slots >= num_queries]),
            ]
            parts = [self.encoder.featurize([items[slot] for slot in own], side) for side, own in sides if len(own)]
            yield Features.concat(parts), slots
