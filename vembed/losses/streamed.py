"""Losses that stream over tiles: statistics first, where one is needed, then the gradients.

`forward` of such a loss is its definition in plain autograd, whole matrix and all. `statistics` and `gradients` compute
the same in the memory of a tile; together they read numbers from the device once, whatever the tiles. Neither knows of
ranks: a rank passes its queries and the documents of all, merges the columns of the statistics over ranks, and adds up
losses and document gradients.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch

from vembed.losses.base import ContrastiveLoss
from vembed.losses.cells import CellMap
from vembed.losses.tiles import EmbeddingGradients, SimilarityTiles

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure
    from vembed.losses.prefixes import Prefixes
    from vembed.losses.statistics import Statistics


class StreamedBatch(NamedTuple):
    """What a streamed loss sees."""

    q_QE: Tensor  # embeddings of this rank's queries (Q, E)
    d_DE: Tensor  # embeddings of the documents of all ranks (D, E)
    # Positives and identities of the whole batch, all ranks; best on the CPU, where they are read
    structure: BatchStructure
    first_query: int = 0  # number of this rank's first query in `structure`


class LossGradients(NamedTuple):
    """A rank's share of the loss and of its gradients: summed over ranks they are those of the batch."""

    loss: Tensor  # a scalar
    dq_QE: Tensor  # dL/d(queries of this rank), complete
    dd_DE: Tensor  # dL/d(documents of all ranks), of this rank's queries
    own: dict[str, Tensor]  # gradients of the loss's own parameters, by name


class StreamedLoss(ContrastiveLoss):
    """A loss over the similarity matrix that never holds it."""

    memory = "tiles"

    def __init__(self, *, mask_false_negatives: bool, prefixes: Prefixes | None, tile_size: int) -> None:
        super().__init__()
        self.mask_false_negatives = mask_false_negatives
        self.prefixes = prefixes
        self.tile_size = tile_size

    @property
    def streamed(self) -> StreamedLoss:
        """The loss itself."""
        return self

    @property
    def needs_statistics(self) -> bool:
        """Whether `gradients` must be told the statistics of all ranks."""
        return False

    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Sweep the tiles once; only for losses that need it."""
        raise NotImplementedError(f"{type(self).__name__} needs no statistics")

    @abstractmethod
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients, computed without autograd.

        Args:
            statistics: What `statistics` returned, its columns merged over ranks; None where the loss needs none.
            into: Where to write dq (Q, E) and dd (D, E), of the type of the gradients; None makes them.
        """

    def tiles(self, batch: StreamedBatch, *, scale: float, longest: float = math.inf) -> SimilarityTiles:
        """Return the tiles of a batch.

        Args:
            longest: Largest |q| times largest |d|, for losses that ask how large a logit can be.
        """
        rows = range(batch.first_query, batch.first_query + len(batch.q_QE))
        masks, device = self.mask_false_negatives, batch.q_QE.device
        return SimilarityTiles(
            batch.q_QE,
            batch.d_DE,
            CellMap(batch.structure, rows, mask_false_negatives=masks, device=device),
            scale=scale,
            longest=longest,
            prefixes=self.prefixes,
            tile_size=self.tile_size,
        )

    @property
    def prefix_weights(self) -> tuple[float, ...]:
        """Weight of each prefix; 1 without prefixes."""
        return (1.0,) if self.prefixes is None else self.prefixes.weights


def empty_gradients(
    tiles: SimilarityTiles, batch: StreamedBatch, into: tuple[Tensor, Tensor] | None
) -> EmbeddingGradients:
    """Return gradients of zero, in memory of the caller where it gives some."""
    dq_QE, dd_DE = into or (
        torch.empty_like(batch.q_QE, dtype=tiles.dtype),
        torch.empty_like(batch.d_DE, dtype=tiles.dtype),
    )
    shape = (tiles.num_prefixes, len(batch.q_QE)), (tiles.num_prefixes, len(batch.d_DE))
    return EmbeddingGradients(dq_QE.zero_(), dd_DE.zero_(), tiles.zeros(*shape[0]), tiles.zeros(*shape[1]))
