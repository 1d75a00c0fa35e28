"""The batch of a step, as the engine takes it: pools of tokenized rows and the structure of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.batch import ContrastiveBatch, Features
from vembed.data.collate import collate
from vembed.gradcache.engine import Pool
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.data.records import RecordTable
    from vembed.data.sampler import GlobalSampler
    from vembed.models.encoder import Encoder


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
    """

    records: RecordTable
    sampler: GlobalSampler
    encoder: Encoder
    device: torch.device

    def batch(self, step: int) -> PreparedBatch:
        """Return the batch of a step, counted from 0."""
        rows = self.sampler.rows(step)
        batch = collate(self.records.take(rows), rows.tolist())
        items = (*batch.queries, *batch.documents)
        pools = tuple(self._pools(items, num_queries=len(batch.queries)))
        return PreparedBatch(batch, pools, BatchStructure.of(batch, self.device))

    def _pools(self, items: Sequence[Item], *, num_queries: int) -> Iterator[Pool]:
        """Yield a pool for each modality: what shares a tower is packed together, queries and documents alike."""
        for _, slots in self.encoder.by_modality(items):
            sides: list[tuple[Side, NDArray[np.int64]]] = [
                ("query", slots[slots < num_queries]),
                ("document", slots[slots >= num_queries]),
            ]
            parts = [self.encoder.featurize([items[slot] for slot in own], side) for side, own in sides if len(own)]
            yield Pool(self.encoder, self.encoder.collate, Features.concat(parts), slots)
