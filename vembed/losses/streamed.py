"""Losses that stream over tiles: statistics first, where one is needed, then the gradients.

`forward` of such a loss is its definition in plain autograd, whole matrix and all. `statistics` and `gradients` compute
the same in the memory of a tile; together they read numbers from the device once, whatever the tiles. Neither knows of
ranks: a rank passes its queries and the documents of all, merges the columns of the statistics over ranks, and adds up
losses and document gradients.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch

from vembed.losses.base import BatchLoss, to_device
from vembed.losses.cells import CellMap
from vembed.losses.filters import FalseNegativeFilter, TileFilter
from vembed.losses.masks import false_negative_mask
from vembed.losses.prefixes import Prefixes
from vembed.losses.tiles import DEFAULT_TILE_SIZE, EmbeddingGradients, SimilarityTiles
from vembed.losses.weights import query_shares

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.config.keys.loss import CellKeys
    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.statistics import Statistics


class StreamedBatch(NamedTuple):
    """What a streamed loss sees."""

    q_QE: Tensor  # embeddings of this rank's queries (Q, E)
    d_DE: Tensor  # embeddings of the documents of all ranks (D, E)
    # Positives and identities of the whole batch, all ranks; best on the CPU, where they are read
    structure: BatchStructure
    first_query: int = 0  # number of this rank's first query in `structure`
    # Vectors of each of these queries and documents, which stand row after row above; None: one each
    counts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    every_q_QE: Tensor | None = None  # embeddings of the queries of all ranks; None: `q_QE` are all there are

    @property
    def queries(self) -> range:
        """Which queries of `structure` are this rank's."""
        count = len(self.q_QE) if self.counts is None else len(self.counts[0])
        return range(self.first_query, self.first_query + count)


class LossGradients(NamedTuple):
    """A rank's share of the loss and of its gradients: summed over ranks they are those of the batch."""

    loss: Tensor  # a scalar
    dq_QE: Tensor  # dL/d(queries of this rank), complete
    dd_DE: Tensor  # dL/d(documents of all ranks), of this rank's queries
    own: dict[str, Tensor]  # gradients of the loss's own parameters, by name


class StreamedOptions(TypedDict, total=False):
    """What every loss over the cells of the matrix is told."""

    mask_false_negatives: bool
    prefixes: Prefixes | None
    tile_size: int
    negative_filter: FalseNegativeFilter | None


def streamed_options(keys: CellKeys, common: LossCommon) -> StreamedOptions:
    """Return what the keys of a run say of them."""
    return {
        "mask_false_negatives": keys.mask_false_negatives,
        "prefixes": Prefixes.of_keys(keys),
        "tile_size": common.tile_size,
        "negative_filter": FalseNegativeFilter.of_keys(keys),
    }


class StreamedLoss(BatchLoss):
    """A loss over the similarity matrix that never holds it, of rows with one vector or several."""

    memory = "tiles"

    def __init__(
        self,
        *,
        mask_false_negatives: bool = True,
        prefixes: Prefixes | None = None,
        tile_size: int = DEFAULT_TILE_SIZE,
        negative_filter: FalseNegativeFilter | None = None,
    ) -> None:
        super().__init__()
        self.mask_false_negatives = mask_false_negatives
        self.negative_filter = negative_filter
        self.prefixes = prefixes
        self.tile_size = tile_size

    @property
    def streamed(self) -> StreamedLoss | None:
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
        tiles = SimilarityTiles(
            batch.q_QE,
            batch.d_DE,
            self.cells(batch),
            scale=scale,
            longest=longest,
            prefixes=self.prefixes,
            tile_size=self.tile_size,
        )
        if self.negative_filter is not None:
            tiles.filter = TileFilter(self.negative_filter, batch, tiles, self.prefix_dims)
        return tiles

    def masked(self, structure: BatchStructure, similarity_QD: Tensor, positive_QD: Tensor) -> Tensor:
        """Return which cells are neither positive nor negative, bool (Q, D), for the definition of a loss."""
        masked_QD = torch.zeros_like(positive_QD)
        if self.mask_false_negatives:
            masked_QD = false_negative_mask(structure, positive_QD)
        if self.negative_filter is not None:
            masked_QD = masked_QD | self.negative_filter.found(structure, similarity_QD, positive_QD)
        return masked_QD

    def cells(self, batch: StreamedBatch) -> CellMap:
        """Return which cells of this rank's queries are positives, and which are no negatives."""
        masks, device = self.mask_false_negatives, batch.q_QE.device
        return CellMap(batch.structure, batch.queries, mask_false_negatives=masks, device=device)

    def query_weights(self, batch: StreamedBatch, tiles: SimilarityTiles, share: float = 1.0) -> Tensor:
        """Return what each of this rank's queries counts in each prefix, (K, Q), all ranks' adding up to `share`."""
        own = slice(batch.queries.start, batch.queries.stop)
        return self.weights_of(share * query_shares(batch.structure)[own], tiles)

    def weights_of(self, shares_G: Tensor, tiles: SimilarityTiles) -> Tensor:
        """Return the weight of each prefix times some shares, (K, G), on the device of the tiles."""
        weights_KG = torch.stack([weight * shares_G for weight in self.prefix_weights]).to(tiles.dtype)
        return to_device(weights_KG, tiles.device)

    @property
    def prefix_weights(self) -> tuple[float, ...]:
        """Weight of each prefix; 1 without prefixes."""
        return (1.0,) if self.prefixes is None else self.prefixes.weights

    @property
    def prefix_dims(self) -> tuple[int | None, ...]:
        """Length of each prefix; None is the embedding as it is."""
        return (None,) if self.prefixes is None else self.prefixes.dims


def zero_gradients(batch: StreamedBatch, into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return gradients of zero of both sides, in memory of the caller where it gives some."""
    dq_QE, dd_DE = into or (
        torch.empty_like(side, dtype=torch.promote_types(side.dtype, torch.float32))
        for side in (batch.q_QE, batch.d_DE)
    )
    return dq_QE.zero_(), dd_DE.zero_()


def empty_gradients(
    tiles: SimilarityTiles, batch: StreamedBatch, into: tuple[Tensor, Tensor] | None
) -> EmbeddingGradients:
    """Return gradients of zero, with room for the moments of prefixes."""
    moments = (tiles.zeros(tiles.num_prefixes, count) for count in (tiles.cells.num_rows, tiles.cells.num_columns))
    return EmbeddingGradients(*zero_gradients(batch, into), *moments)


def differentiated(
    value: Callable[[Tensor, Tensor], Tensor],
    tiles: SimilarityTiles,
    batch: StreamedBatch,
    into: tuple[Tensor, Tensor] | None,
) -> LossGradients:
    """Return a function of some rows of the embeddings and its gradients, by autograd.

    Args:
        value: Returns a scalar from queries (Q, E) and documents (D, E), in the type of the gradients.
    """
    out = empty_gradients(tiles, batch, into)
    with torch.enable_grad():
        q_QE, d_DE = (side.detach().to(tiles.dtype).requires_grad_() for side in (batch.q_QE, batch.d_DE))
        loss = value(q_QE, d_DE)
        dq_QE, dd_DE = torch.autograd.grad(loss, [q_QE, d_DE])
    out.dq_QE.copy_(dq_QE)
    out.dd_DE.copy_(dd_DE)
    return LossGradients(loss.detach(), out.dq_QE, out.dd_DE, {})
