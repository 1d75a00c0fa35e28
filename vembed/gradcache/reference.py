"""The plain step: one graph over the whole batch, one backward. Slow and obvious; tests compare the engine with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.gradcache.chunks import Chunk, ChunkBudget, plan_chunks
from vembed.losses.base import MultiVectors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vembed.gradcache.engine import Pool
    from vembed.losses.base import BatchLoss, BatchStructure


def reference_step(
    pools: Sequence[Pool],
    structure: BatchStructure,
    loss: BatchLoss,
    *,
    budget: ChunkBudget | None = None,
) -> Tensor:
    """Add the gradients of one batch by ordinary autograd and return the loss.

    Args:
        budget: None encodes each pool in one call. A budget encodes it in the engine's chunks, still in one graph: with
            dropout, masks depend on how rows are grouped, so only equal chunks draw equal masks.
    """
    num_rows = structure.num_queries + structure.num_documents
    rows: list[Tensor | None] = [None] * num_rows
    for pool in pools:
        lengths = pool.features.lengths
        chunks = (
            plan_chunks(lengths, budget, packed=pool.packs)
            if budget is not None
            else [Chunk(rows=torch.arange(len(lengths)).numpy(), width=int(lengths.max()))]
        )
        for chunk in chunks:
            z = pool.encode(pool.collate(pool.features, chunk.rows, chunk.width))
            counts = np.ones(len(chunk.rows), int) if pool.num_vectors is None else pool.num_vectors[chunk.rows]
            # Spare rows repeat the last one: what they would write is that row's already.
            num_real = len(chunk.rows) - chunk.num_spare
            vectors_of_rows = z.split(counts.tolist())[:num_real]
            for slot, vectors in zip(pool.slots[chunk.rows[:num_real]], vectors_of_rows, strict=True):
                rows[slot] = vectors
    known = [row for row in rows if row is not None]
    z_VE = torch.cat(known)
    if loss.multi_vector:
        counts_N = np.array([len(row) for row in known])
        value: Tensor = loss(*MultiVectors.sides(z_VE, counts_N, structure.num_queries), structure)
    else:
        value = loss(z_VE[: structure.num_queries], z_VE[structure.num_queries :], structure)
    value.backward()
    return value.detach()
