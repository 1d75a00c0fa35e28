"""The triplet loss over cosine similarities: a negative is to be farther from the query than its positive by a margin.

    L = mean over queries i, positives p in P(i), negatives j in N(i) of max(0, margin - S_ip + S_ij)

N(i) are the documents that are neither positive nor masked, and the mean is over the triplets that exceed 0
(batch-all); with `hardest` N(i) is the most similar of them, and the mean is over all pairs of a query and a positive;
with `listed` N(i) are the hard negatives of the query's own row, and the mean is over all such triplets.

All negatives: the first sweep over the tiles counts how many triplets of each positive pair exceed 0; ranks add the
counts up to their number V. The second has for each cell how many of its query's positives it comes too close to:

    dL/dS_ij = |{p in P(i): S_ij > S_ip - margin}| / V        dL/dS_ip = -|{j in N(i): S_ij > S_ip - margin}| / V

Hardest: one sweep finds the most similar negative of each query. It and listed negatives then make triplets of two
cells, whose logits and gradients need no tile.

Source: Hermans et al., 2017, "In Defense of the Triplet Loss for Person Re-Identification"; the most similar negative
for every positive as in Faghri et al., 2018, "VSE++".
Shape legend: Q queries of this rank, P its pairs of query and positive, T triplets, K prefixes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, Unpack

import numpy as np
import torch

from vembed.batch import ranges
from vembed.device import to_device
from vembed.losses.base import relative_weights
from vembed.losses.cells import CellMap, own_negatives_mask, positive_mask
from vembed.losses.streamed import (
    CellLoss,
    LossGradients,
    Statistics,
    Sweep,
    collect_rows,
    empty_gradients,
    streamed_options,
)
from vembed.losses.tiles import weighted_similarities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import TripletKeys
    from vembed.losses.streamed import StreamedBatch, StreamedOptions, TileLogits
    from vembed.losses.tiles import SimilarityTiles

Negatives = Literal["all", "hardest", "listed"]


# Triplets of this rank: rows of its queries, rows of all documents that are positives and negatives, and the weight of
# each triplet, all (T,). The weights of all ranks together are 1 or less.
_Triplets: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"


class TripletLoss(CellLoss):
    """The triplet loss with all negatives of the batch, the most similar one, or those of the row."""

    def __init__(
        self,
        *,
        margin: float,
        negatives: Negatives = "all",
        **options: Unpack[StreamedOptions],
    ) -> None:
        super().__init__(**options)
        self.margin = margin
        self.negatives = negatives

    @classmethod
    def from_keys(cls, keys: TripletKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(
            margin=keys.triplet_margin,
            negatives=keys.triplet_negatives,
            **streamed_options(keys, common),
        )

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss over all pairs of a positive and a document."""
        positive_QD = positive_mask(structure)
        queries_P, documents_P = positive_QD.nonzero(as_tuple=True)
        candidate_QD = ~positive_QD
        if self.negatives == "listed":
            candidate_QD &= own_negatives_mask(structure)
        weights_P = relative_weights(structure).to(q_QE.dtype)[queries_P]
        losses = []
        for weight, similarity_QD in weighted_similarities(q_QE, d_DE, self.prefixes):
            negative_PD = (candidate_QD & ~self.masked(structure, similarity_QD, positive_QD))[queries_P]
            others_PD = similarity_QD[queries_P].masked_fill(~negative_PD, -math.inf)
            if self.negatives == "hardest":
                others_PD = others_PD.max(dim=1, keepdim=True).values
            excess_PD = (self.margin - similarity_QD[queries_P, documents_P, None] + others_PD).relu()
            counted_PD = {
                "all": excess_PD > 0,
                "hardest": torch.ones_like(excess_PD, dtype=torch.bool),
                "listed": negative_PD,
            }[self.negatives]
            number = (counted_PD * weights_P[:, None]).sum()
            losses.append(weight * (excess_PD * weights_P[:, None]).sum() / _or_one(number))
        return torch.stack(losses).sum()

    @property
    def needs_statistics(self) -> bool:
        """The mean is over triplets that exceed 0, on all ranks."""
        return self.negatives == "all"

    def sweep(self, batch: StreamedBatch) -> TripletSweep:
        """Begin the counts of the triplets that exceed 0."""
        tiles = self.make_tiles(batch, scale=1.0)
        cell_map = tiles.cell_map
        # Every excess needs its positive, wherever it stands: before any tile is swept, block by block of pairs.
        pairs = cell_map.pair_rows, cell_map.pair_columns
        positives_KP = torch.stack([tiles.cell_logits(prefix, pairs) for prefix in range(tiles.num_prefixes)])
        weights_K = torch.tensor(self.prefix_weights, dtype=tiles.dtype, device=tiles.device)
        return TripletSweep(tiles, self.margin, positives_KP, self._relative_weights(batch, tiles), weights_K)

    def statistics_to_merge(self, sweep: TripletSweep) -> Statistics:
        """Return the number of this rank's triplets that exceed 0, by weight, (K,)."""
        weights_P = sweep.weights_Q[sweep.tiles.cell_map.pair_rows]
        return Statistics(sweep, sums=(sweep.counts_KP * weights_P).sum(dim=1))

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients: from the counts of all ranks, or from triplets of rows."""
        if self.needs_statistics:
            return super().gradients(batch, statistics, into)
        # Triplets (query, positive, negative) are as many as pairs, or as hard negatives: few enough to be listed.
        tiles = self.make_tiles(batch, scale=1.0)
        triplets_K = self._hardest(batch, tiles) if self.negatives == "hardest" else self._listed(batch, tiles)
        out, loss = empty_gradients(tiles, batch, into), tiles.zeros()
        for prefix, (weight, triplets) in enumerate(zip(self.prefix_weights, triplets_K, strict=True)):
            queries_T, positives_T, negatives_T, weights_T = triplets
            near, far = (queries_T, positives_T), (queries_T, negatives_T)
            excess_T = self.margin - tiles.cell_logits(prefix, near) + tiles.cell_logits(prefix, far)
            weights_T = weight * weights_T
            loss += excess_T.relu() @ weights_T
            # A triplet that exceeds 0 pulls its positive nearer by as much as it pushes its negative away.
            slopes_T = weights_T * (excess_T > 0)
            tiles.backward_cells(prefix, near, -slopes_T, out)
            tiles.backward_cells(prefix, far, slopes_T, out)
        tiles.finish(out)
        return LossGradients(loss, out.dq_QE, out.dd_DE, {})

    def _relative_weights(self, batch: StreamedBatch, tiles: SimilarityTiles) -> Tensor:
        """Return the weights of this rank's queries over the mean of all, (Q,)."""
        return to_device(relative_weights(batch.structure)[batch.rows].to(tiles.dtype), tiles.device)

    def _hardest(self, batch: StreamedBatch, tiles: SimilarityTiles) -> list[_Triplets]:
        """Return this rank's pairs with the query's most similar negative, by prefix."""
        cell_map, hardest = tiles.cell_map, MostSimilarSweep(tiles)
        for rows in tiles.row_blocks():
            collect_rows(hardest, rows)
        best_KQ, columns_KQ = hardest.best_KQ, hardest.columns_KQ
        # The mean is over the pairs of all ranks, whether or not their query has a negative: no collective is needed.
        queries_P = torch.unique(batch.structure.positives_P2, dim=0)[:, 0]
        number = relative_weights(batch.structure)[queries_P].sum().item()
        weights_KQ = self._relative_weights(batch, tiles) / (number or 1.0) * (best_KQ != -math.inf)
        rows_P, documents_P = cell_map.pair_rows, cell_map.pair_columns
        prefixes = zip(columns_KQ, weights_KQ, strict=True)
        return [(rows_P, documents_P, columns_Q[rows_P], weights_Q[rows_P]) for columns_Q, weights_Q in prefixes]

    def _listed(self, batch: StreamedBatch, tiles: SimilarityTiles) -> list[_Triplets]:
        """Return this rank's triplets of a positive and a hard negative, by prefix."""
        structure, device = batch.structure, batch.q_QE.device
        every = range(structure.num_queries)
        whole = CellMap(structure, every, mask_false_negatives=self.mask_false_negatives)
        own_N2 = np.zeros((0, 2), dtype=np.int64)
        if structure.negatives_P2 is not None:
            own_N2 = np.unique(structure.negatives_P2.cpu().numpy(), axis=0)
        negatives_N2 = own_N2[whole.are_negatives(own_N2)]
        # Sorted by query, the negatives of one are a range; each of its positives is paired with the whole range.
        starts_Q = np.searchsorted(negatives_N2[:, 0], np.arange(structure.num_queries + 1))
        queries_P, positives_P = whole.pair_rows.cpu().numpy(), whole.pair_columns.cpu().numpy()
        counts_P = np.diff(starts_Q)[queries_P]
        queries_T, positives_T = np.repeat(queries_P, counts_P), np.repeat(positives_P, counts_P)
        negatives_T = negatives_N2[ranges(starts_Q[queries_P], counts_P), 1]
        first, stop = np.searchsorted(queries_T, [batch.queries.start, batch.queries.stop])
        weights_T = relative_weights(structure)[torch.from_numpy(queries_T)]
        weights_T = (weights_T / _or_one(weights_T.sum()))[first:stop].to(tiles.dtype)
        columns = (queries_T - batch.queries.start, positives_T, negatives_T)
        queries, positives, negatives = (to_device(torch.from_numpy(rows[first:stop]), device) for rows in columns)
        triplets = (queries, positives, negatives, to_device(weights_T, device))
        return [triplets] * len(self.prefix_dims)


class TripletSweep(Sweep):
    """Counts of the triplets that exceed 0, and the slopes that follow from their number in the whole batch."""

    reach = "batch"

    def __init__(
        self, tiles: SimilarityTiles, margin: float, positives_KP: Tensor, weights_Q: Tensor, weights_K: Tensor
    ) -> None:
        super().__init__(tiles)
        self.margin, self.positives_KP, self.weights_Q, self.weights_K = margin, positives_KP, weights_Q, weights_K
        self.counts_KP = torch.zeros_like(positives_KP)

    def collect(self, part: TileLogits) -> None:
        """Count the negatives of a tile that come too close to each positive."""
        for pairs, _, excess_PC in self._excess(part):
            self.counts_KP[part.prefix, pairs] += (excess_PC > 0).sum(dim=1)

    def complete(self, rows: slice, merged: Statistics | None = None) -> None:  # noqa: ARG002
        """Divide the weights by the number of triplets that exceed 0 on all ranks."""
        assert merged is not None
        assert merged.sums is not None
        self.weights_KQ = (self.weights_K / _or_one(merged.sums))[:, None] * self.weights_Q

    def slopes(self, part: TileLogits) -> Tensor:
        """Add the excess of a tile, and turn a cell into the number of positives that it comes too close to."""
        similarity_RC, tile, weights_Q = part.logits_RC, part.tile, self.weights_KQ[part.prefix]
        # Of integers up to the positives of a query, which float32 adds up exactly: `index_add_` needs no order.
        violations_RC = self.tiles.scratch("violations", tile.shape).zero_()
        for _, rows_P, excess_PC in self._excess(part):
            self.loss += excess_PC.relu_().sum(dim=1) @ weights_Q[tile.rows][rows_P]
            violations_RC.index_add_(0, rows_P, excess_PC.sign_())
        torch.mul(violations_RC, weights_Q[tile.rows, None], out=similarity_RC)
        return -weights_Q[self.tiles.cell_map.pair_rows[tile.pairs]] * self.counts_KP[part.prefix, tile.pairs]

    def _excess(self, part: TileLogits) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield margin - S_ip + S_ij of the pairs in a tile's rows, at most a tile of them at a time.

        Each comes with the numbers of its pairs and their rows in the tile.
        """
        tile, cell_map = part.tile, self.tiles.cell_map
        # A query with several positives has its row several times here: as many rows at a time as the tile has.
        inside, height = cell_map.pairs_of(tile.rows), tile.shape[0]
        for start in range(inside.start, inside.stop, height):
            pairs = slice(start, min(start + height, inside.stop))
            rows_P = cell_map.pair_rows[pairs] - tile.rows.start
            margins_P1 = (self.margin - self.positives_KP[part.prefix, pairs])[:, None]
            yield pairs, rows_P, part.logits_RC[rows_P].add_(margins_P1)


class MostSimilarSweep(Sweep):
    """The most similar negative of each query; it is only collected."""

    def __init__(self, tiles: SimilarityTiles) -> None:
        super().__init__(tiles)
        self.best_KQ = tiles.zeros(tiles.num_prefixes, tiles.cell_map.num_rows).fill_(-math.inf)
        self.columns_KQ = torch.zeros_like(self.best_KQ, dtype=torch.int64)

    def collect(self, part: TileLogits) -> None:
        """Compare the largest cell of each row with the largest so far; NaN wins."""
        largest_R, indices_R = part.logits_RC.max(dim=1)  # of equal ones the first; a row of -inf keeps -inf
        best_R = self.best_KQ[part.prefix, part.tile.rows]
        columns_R = self.columns_KQ[part.prefix, part.tile.rows]
        better_R = (largest_R > best_R) | largest_R.isnan()
        best_R.copy_(torch.where(better_R, largest_R, best_R))
        columns_R.copy_(torch.where(better_R, indices_R + part.tile.columns.start, columns_R))


def _or_one(number: Tensor) -> Tensor:
    """Return a sum of weights as what can be divided by."""
    return torch.where(number > 0, number, 1.0)
