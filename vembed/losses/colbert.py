"""InfoNCE over MaxSim, for rows with several vectors: each vector of a query scores its best match in the document.

    S_ij = c_i sum over vectors v of q_i of max over vectors w of d_j of <v, w>        c_i = 1 / vectors of q_i, or 1

Loss, masks and temperature are those of InfoNCE. Only the best match gets a gradient; of several with equal products,
the first one. A tile is computed over blocks of documents of similar length, and the products of a block are dropped
once its maxima are taken. The tile keeps the index of each best match (the winner), so that the backward pass needs no
products of its own:

    dL/dv = sum over j of s c_i G_ij w(v, j)        dL/dw = sum over the v and j that it won of s c_i G_ij v

Memory beside the embeddings and their gradients: a block of `tile_size` x `tile_size` products, and 4 bytes for each
query vector and document of a strip of `tile_size` query vectors. Keeping the winners of all strips would take V x D
integers. Computing the products again in the backward pass would cost V x W x E operations, a hundred times as many as
the gradients themselves.

Source: Khattab & Zaharia, 2020, "ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction".
Shape legend: R x C queries and documents of a tile, B documents of a block with T vectors each, V query vectors, W
document vectors, E embedding dim, G = dL/dlogits, s the logit scale.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from vembed.device import to_device
from vembed.losses.infonce import SoftmaxLoss
from vembed.losses.keys import ColbertKeys
from vembed.losses.tiles import DEFAULT_TILE_SIZE, SimilarityTiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon, MultiVectors
    from vembed.losses.cells import CellMap, Tile
    from vembed.losses.streamed import StreamedBatch
    from vembed.losses.tiles import EmbeddingGradients


class ColbertLoss(SoftmaxLoss):
    """InfoNCE over MaxSim with a fixed or learned temperature.

    Args:
        mean: Divide a score by the number of the query's vectors.
    """

    multi_vector = ColbertKeys.multi_vector

    def __init__(
        self,
        *,
        temperature: float,
        mean: bool = True,
        learn_temperature: bool = False,
        bidirectional: bool = False,
        mask_false_negatives: bool = True,
        dtype: torch.dtype = torch.float32,
        tile_size: int = DEFAULT_TILE_SIZE,
    ) -> None:
        super().__init__(
            temperature=temperature,
            learn_temperature=learn_temperature,
            bidirectional=bidirectional,
            dtype=dtype,
            mask_false_negatives=mask_false_negatives,
            tile_size=tile_size,
        )
        self.mean = mean

    @classmethod
    def from_keys(cls, keys: ColbertKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(
            temperature=keys.temperature,
            mean=not keys.maxsim_sum,
            learn_temperature=keys.learn_temperature,
            bidirectional=keys.loss_bidirectional,
            mask_false_negatives=keys.mask_false_negatives,
            dtype=common.dtype,
            tile_size=common.tile_size,
        )

    def forward(self, q: MultiVectors, d: MultiVectors, structure: BatchStructure) -> Tensor:
        """Return the loss over the whole matrix of scores."""
        return self.loss_of_similarities([(1.0, maxsim(q, d, mean=self.mean))], structure)

    def make_tiles(self, batch: StreamedBatch, *, scale: float, longest: float = math.inf) -> MaxSimTiles:
        """Return the tiles of a batch."""
        cell_map = self.make_cell_map(batch)
        return MaxSimTiles(batch, cell_map, scale=scale, longest=longest, mean=self.mean, tile_size=self.tile_size)


def maxsim(q: MultiVectors, d: MultiVectors, *, mean: bool) -> Tensor:
    """Return the scores (Q, D) in plain autograd: the definition."""
    best_VD = torch.stack([(q.values_VE @ row.T).max(dim=1).values for row in d.rows()], dim=1)
    rows = best_VD.split(q.counts_R.tolist())
    return torch.stack([row.mean(dim=0) if mean else row.sum(dim=0) for row in rows])


class MaxSimTiles(SimilarityTiles):
    """MaxSim scores of tiles, and the backward pass from their gradients to the winning vectors."""

    def __init__(
        self, batch: StreamedBatch, cell_map: CellMap, *, scale: float, longest: float, mean: bool, tile_size: int
    ) -> None:
        assert batch.counts is not None, "MaxSim takes rows of several vectors"
        q_counts, self._d_counts = batch.counts
        row_vectors = int(q_counts.max(initial=1))
        # A sum over n vectors is bounded by n times the largest product, a mean by the product itself.
        longest *= 1 if mean else row_vectors
        super().__init__(
            batch.q_QE, batch.d_DE, cell_map, scale=scale, longest=longest, prefixes=None, tile_size=tile_size
        )
        self.row_vectors = row_vectors
        self._q_starts, self._d_starts = (np.concatenate([[0], np.cumsum(counts)]) for counts in batch.counts)
        # s c_i of each query vector: multiplied into the maxima, of which there are fewer than products.
        factors_Q = scale / q_counts if mean else np.full(len(q_counts), scale)
        self._factors_V = self._tensor(np.repeat(factors_Q, q_counts)).to(self.dtype)
        self._rows_V = self._tensor(np.repeat(np.arange(len(q_counts)), q_counts))
        self._blocks: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def plain_logits(self, tile: Tile, name: str = "logits") -> Tensor:
        """Return the logits of a tile (R, C) in scratch memory of that name, and keep the winners beside them."""
        vectors, (q_VE, d_WE) = self._vectors(tile), self._of(tile)
        logits_RC, winners_VC = self.scratch(name, tile.shape), self._winners(tile, name)
        starts_R = self._tensor(self._q_starts[tile.rows] - vectors.start)
        numbers_V = torch.arange(len(q_VE), device=q_VE.device)
        for columns_B, vectors_BT in self._blocks_of(tile.columns):
            products_VW = self.scratch("products", (len(q_VE), vectors_BT.numel()))
            torch.mm(q_VE, d_WE.index_select(0, vectors_BT.view(-1)).T, out=products_VW)
            best_VB, indices_VB = products_VW.view(-1, *vectors_BT.shape).max(dim=2)  # the first of equal ones
            winners_VC[:, columns_B] = vectors_BT.expand(len(q_VE), -1, -1).gather(2, indices_VB[:, :, None])[:, :, 0]
            best_VB *= self._factors_V[vectors, None]
            # Bags of consecutive rows: a sum over the vectors of each query that adds in one order on every device.
            logits_RC[:, columns_B] = embedding_bag(numbers_V, best_VB, starts_R, mode="sum")
        return logits_RC

    def backward_plain(self, tile: Tile, gradient_RC: Tensor, out: EmbeddingGradients, name: str = "logits") -> None:
        """Add dL/dlogits of a tile to the gradients of queries and winners, always in one order: no atomic sums."""
        vectors, (q_VE, d_WE) = self._vectors(tile), self._of(tile)
        winners_VC = self._winners(tile, name)
        slopes_VC = self.scratch("slopes", (len(q_VE), gradient_RC.shape[1]))
        torch.index_select(gradient_RC, 0, self._rows_V[vectors] - tile.rows.start, out=slopes_VC)
        slopes_VC.mul_(self._factors_V[vectors, None])
        # dL/dv: for each query vector one bag, its winners in all columns, weighed by the slopes of their cells.
        out.dq_QE[vectors] += embedding_bag(winners_VC, d_WE, mode="sum", per_sample_weights=slopes_VC)
        starts = self._d_starts[tile.columns.start : tile.columns.stop + 1]
        # dL/dw goes the other way: for each document vector one bag, the query vectors that it won. Sorted by winner,
        # the cells of a bag are neighbours. Sums and winners of a slice of columns take a quarter of a tile each.
        quarter = self.tile_size**2 // 4
        for columns in _slices(starts, most=quarter // q_VE.shape[1], most_rows=max(1, quarter // len(q_VE))):
            first, stop = (int(starts[edge] - starts[0]) for edge in (columns.start, columns.stop))
            won, order = winners_VC[:, columns].reshape(-1).sort(stable=True)
            bags = torch.searchsorted(won, torch.arange(first, stop, dtype=won.dtype, device=won.device))
            weights = slopes_VC[:, columns].reshape(-1)[order]
            # The position of a cell among those of all query vectors and columns, divided by the columns: its vector.
            winning = order.div_(columns.stop - columns.start, rounding_mode="floor")
            sums = embedding_bag(winning, q_VE, bags, mode="sum", per_sample_weights=weights)
            out.dd_DE[starts[0] + first : starts[0] + stop] += sums

    def _of(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the vectors of a tile's queries and documents, in the type of the logits."""
        first, stop = self._d_starts[[tile.columns.start, tile.columns.stop]]
        return self._q[self._vectors(tile)].to(self.dtype), self._d[first:stop].to(self.dtype)

    def _vectors(self, tile: Tile) -> slice:
        """Return the vectors of a tile's queries."""
        return slice(int(self._q_starts[tile.rows.start]), int(self._q_starts[tile.rows.stop]))

    def _winners(self, tile: Tile, name: str) -> Tensor:
        vectors = self._vectors(tile)
        shape = vectors.stop - vectors.start, tile.columns.stop - tile.columns.start
        return self.scratch(f"winners of {name}", shape, torch.int32)

    def _blocks_of(self, columns: slice) -> list[tuple[Tensor, Tensor]]:
        """Cut the documents of a tile into blocks of similar length, once for all strips.

        Returns:
            For the documents of each block their columns in the tile, (B,) int64, and their vectors, counted from the
            tile's first, (B, T) int32.
        """
        if columns.start in self._blocks:
            return self._blocks[columns.start]
        counts = self._d_counts[columns]
        starts = self._d_starts[columns] - self._d_starts[columns.start]
        # A block is as wide as its longest document: sorted by length, few of its vectors are repeated ones.
        order, first = np.argsort(counts, kind="stable"), 0
        blocks = self._blocks[columns.start] = []
        while first < len(order):
            widths = np.arange(1, len(order) - first + 1) * counts[order[first:]]  # with 1, 2, ... further documents
            stop = first + max(1, int(np.searchsorted(widths, self.tile_size, side="right")))
            columns_B = order[first:stop]
            # Shorter documents repeat their first vector: that changes no maximum, and of equal products the first
            # wins, which is the real one.
            steps_T = np.arange(counts[columns_B[-1]])
            vectors_BT = starts[columns_B, None] + np.where(steps_T < counts[columns_B, None], steps_T, 0)
            blocks.append((self._tensor(columns_B), self._tensor(vectors_BT.astype(np.int32))))
            first = stop
        return blocks

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self._q.device)


def _slices(starts: NDArray[np.int64], *, most: int, most_rows: int) -> Iterator[slice]:
    """Cut rows into slices of at most so many vectors and rows, and at least one row.

    Args:
        starts: Where the vectors of each row begin, and where the last row's end.
    """
    first = 0
    while first < len(starts) - 1:
        stop = max(first + 1, int(np.searchsorted(starts, starts[first] + most, side="right")) - 1)
        stop = min(stop, first + most_rows)
        yield slice(first, stop)
        first = stop
