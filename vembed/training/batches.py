"""The batch of a step, as the engine takes it: pools of tokenized rows and the structure of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import ContrastiveBatch, Features
from vembed.data.collate import collate
from vembed.gradcache.engine import Pool
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    import torch

    from vembed.data.records import RecordTable
    from vembed.data.sampler import GlobalSampler
    from vembed.models.encoder import Encoder


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Everything that a step needs.

    Attributes:
        batch: The rows.
        pools: The same, tokenized; queries and documents of one encoder share a pool, so that they pack tighter.
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
        features = Features.concat(
            [self.encoder.featurize(batch.queries, "query"), self.encoder.featurize(batch.documents, "document")]
        )
        slots = np.arange(len(features), dtype=np.int64)
        pool = Pool(self.encoder, self.encoder.collate, features, slots)
        return PreparedBatch(batch, (pool,), BatchStructure.of(batch, self.device))
