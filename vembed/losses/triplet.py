"""The triplet loss over cosine similarities: a negative is to be farther from the query than its positive by a margin.

    L = mean over queries i, positives p in P(i), negatives j in N(i) of max(0, margin - S_ip + S_ij)

N(i) are the documents that are neither positive nor masked, and the mean is over the triplets that exceed 0
(batch-all); with `hardest` N(i) is the most similar of them, and the mean is over all pairs of a query and a positive;
with `listed` N(i) are the hard negatives of the query's own row, and the mean is over all such triplets.

All negatives: the first sweep over the tiles counts how many triplets of each positive pair exceed 0; ranks add the
counts up to their number V. The second has for each cell how many of its query's positives it comes too close to:

    dL/dS_ij = |{p in P(i): S_ij > S_ip - margin}| / V        dL/dS_ip = -|{j in N(i): S_ij > S_ip - margin}| / V

Hardest: one sweep finds the most similar negative of each query. It and listed negatives then are triplets of three
rows, differentiated by themselves, one number for each.

Source: Hermans et al., 2017, "In Defense of the Triplet Loss for Person Re-Identification"; the most similar negative
for every positive as in Faghri et al., 2018, "VSE++".
Shape legend: Q queries of this rank, P its pairs of query and positive, T triplets, K prefixes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, Unpack

import numpy as np
import torch

from vembed.batch import ranges
from vembed.losses.base import to_device
from vembed.losses.cells import CellMap
from vembed.losses.masks import named_mask, positive_mask
from vembed.losses.prefixes import pair_similarity, weighted_similarities
from vembed.losses.statistics import LogSumExp, Statistics
from vembed.losses.streamed import LossGradients, StreamedLoss, differentiated, empty_gradients, streamed_options
from vembed.losses.weights import relative_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.cells import Tile
    from vembed.losses.facts.triplet import TripletKeys
    from vembed.losses.streamed import StreamedBatch, StreamedOptions
    from vembed.losses.tiles import SimilarityTiles

Negatives = Literal["all", "hardest", "listed"]


class _Triplets(NamedTuple):
    """Triplets of this rank: rows of its queries and of all documents."""

    queries_T: Tensor
    positives_T: Tensor
    negatives_T: Tensor
    weights_T: Tensor  # how much each counts; together, on all ranks, 1 or less


class TripletLoss(StreamedLoss):
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
            candidate_QD &= named_mask(structure)
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

    @torch.no_grad()
    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Count the triplets that exceed 0: of each pair as `rows` (K, P), and of this rank as `columns` (K,)."""
        tiles = self.tiles(batch, scale=1.0)
        cells = tiles.cells
        q_PE, d_PE = batch.q_QE[cells.pair_rows].to(tiles.dtype), batch.d_DE[cells.pair_columns].to(tiles.dtype)
        positive_KP = torch.stack([pair_similarity(q_PE, d_PE, dim) for dim in self.prefix_dims])
        counts_KP = torch.zeros_like(positive_KP)
        for strip in tiles.strips():
            for tile in strip:
                for prefix, similarity_RC in enumerate(tiles.logits(tile)):
                    tiles.exclude(prefix, tile, similarity_RC)
                    for some, _, excess_PC in self._excess(tiles, tile, similarity_RC, positive_KP[prefix]):
                        counts_KP[prefix, some] += (excess_PC > 0).sum(dim=1)
        number_K = (counts_KP * self._own_weights(batch, tiles)[cells.pair_rows]).sum(dim=1)
        of_pairs, of_rank = (LogSumExp(torch.zeros_like(each), each) for each in (counts_KP, number_K))
        return Statistics(of_pairs, of_rank, positive_KP, tiles)

    def _excess(
        self, tiles: SimilarityTiles, tile: Tile, similarity_RC: Tensor, positive_P: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Return margin - S_ip + S_ij of the pairs in a tile's rows, some at a time, with their rows in it.

        Args:
            similarity_RC: Of a tile, -inf where it is excluded.
        """
        inside, height = tiles.cells.pairs_of(tile.rows), tile.shape[0]
        for start in range(inside.start, inside.stop, height):
            some = slice(start, min(start + height, inside.stop))
            rows_P = tiles.cells.pair_rows[some] - tile.rows.start
            yield some, rows_P, similarity_RC[rows_P].add_((self.margin - positive_P[some])[:, None])

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients: from the counts of all ranks, or from triplets of rows."""
        if not self.needs_statistics:
            return self._of_triplets(batch, into)
        if statistics is None or statistics.columns is None:
            raise ValueError("the mean over triplets that exceed 0 needs the statistics of all ranks first")
        tiles, counts_KP = statistics.tiles, statistics.rows.sum
        number_K = _or_one(statistics.columns.rescaled(tiles.zeros(tiles.num_prefixes)))
        shares_K = torch.stack([weight / each for weight, each in zip(self.prefix_weights, number_K, strict=True)])
        weights_KQ = shares_K[:, None] * self._own_weights(batch, tiles)
        out, loss = empty_gradients(tiles, batch, into), tiles.zeros()
        for strip in tiles.strips():
            for tile in strip:

                def differentiate(prefix: int, similarity_RC: Tensor, tile: Tile = tile) -> None:
                    weights_R, positive_P = weights_KQ[prefix, tile.rows], statistics.positive_logits_KP[prefix]
                    violations_RC = tiles.room("violations", tile.shape).zero_()
                    tiles.exclude(prefix, tile, similarity_RC)
                    for _, rows_P, excess_PC in self._excess(tiles, tile, similarity_RC, positive_P):
                        loss.add_(excess_PC.relu_().sum(dim=1) @ weights_R[rows_P])
                        violations_RC.index_add_(0, rows_P, excess_PC.sign_())
                    torch.mul(violations_RC, weights_R[:, None], out=similarity_RC)
                    weights_P = weights_KQ[prefix, tiles.cells.pair_rows[tile.pairs]]
                    similarity_RC.view(-1)[tile.pair_cells] = -weights_P * counts_KP[prefix, tile.pairs]

                tiles.backward(tile, differentiate, out)
        tiles.finish(out)
        return LossGradients(loss, out.dq_QE, out.dd_DE, {})

    def _of_triplets(self, batch: StreamedBatch, into: tuple[Tensor, Tensor] | None) -> LossGradients:
        """Differentiate triplets (query, positive, negative), as many as pairs or as hard negatives."""
        tiles = self.tiles(batch, scale=1.0)
        triplets_K = self._hardest(batch, tiles) if self.negatives == "hardest" else self._listed(batch, tiles)

        def excess(q_QE: Tensor, d_DE: Tensor) -> Tensor:
            losses = []
            for weight, dim, triplets in zip(self.prefix_weights, self.prefix_dims, triplets_K, strict=True):
                q_TE = q_QE[triplets.queries_T]
                near_T, far_T = (pair_similarity(q_TE, d_DE[each], dim) for each in triplets[1:3])
                losses.append((self.margin - near_T + far_T).relu() @ triplets.weights_T * weight)
            return torch.stack(losses).sum()

        return differentiated(excess, tiles, batch, into)

    def _own_weights(self, batch: StreamedBatch, tiles: SimilarityTiles) -> Tensor:
        """Return the weights of this rank's queries over the mean of all, (Q,)."""
        own = slice(batch.queries.start, batch.queries.stop)
        return to_device(relative_weights(batch.structure)[own].to(tiles.dtype), tiles.device)

    def _hardest(self, batch: StreamedBatch, tiles: SimilarityTiles) -> list[_Triplets]:
        """Return this rank's pairs with the query's most similar negative, by prefix."""
        cells = tiles.cells
        best_KQ = tiles.zeros(tiles.num_prefixes, cells.num_rows).fill_(-math.inf)
        columns_KQ = torch.zeros_like(best_KQ, dtype=torch.int64)
        for strip in tiles.strips():
            for tile in strip:
                for prefix, similarity_RC in enumerate(tiles.logits(tile)):
                    tiles.exclude(prefix, tile, similarity_RC)
                    found_R, places_R = similarity_RC.max(dim=1)
                    best_R, columns_R = best_KQ[prefix, tile.rows], columns_KQ[prefix, tile.rows]
                    better_R = (found_R > best_R) | found_R.isnan()
                    best_R.copy_(torch.where(better_R, found_R, best_R))
                    columns_R.copy_(torch.where(better_R, places_R + tile.columns.start, columns_R))
        queries_P = torch.unique(batch.structure.positives_P2, dim=0)[:, 0]
        number = relative_weights(batch.structure)[queries_P].sum().item()
        weights_KQ = self._own_weights(batch, tiles) / (number or 1.0) * (best_KQ != -math.inf)
        rows_P, documents_P = cells.pair_rows, cells.pair_columns
        found_K = zip(columns_KQ, weights_KQ, strict=True)
        return [_Triplets(rows_P, documents_P, columns_Q[rows_P], each_Q[rows_P]) for columns_Q, each_Q in found_K]

    def _listed(self, batch: StreamedBatch, tiles: SimilarityTiles) -> list[_Triplets]:
        """Return this rank's triplets of a positive and a hard negative, by prefix."""
        structure, device = batch.structure, batch.q_QE.device
        every = range(structure.num_queries)
        whole = CellMap(structure, every, mask_false_negatives=self.mask_false_negatives)
        named_N2 = np.zeros((0, 2), dtype=np.int64)
        if structure.negatives_P2 is not None:
            named_N2 = np.unique(structure.negatives_P2.cpu().numpy(), axis=0)
        negatives_N2 = named_N2[whole.are_negatives(named_N2)]
        starts_Q = np.searchsorted(negatives_N2[:, 0], np.arange(structure.num_queries + 1))
        queries_P, positives_P = whole.pair_rows.cpu().numpy(), whole.pair_columns.cpu().numpy()
        counts_P = np.diff(starts_Q)[queries_P]
        queries_T, positives_T = np.repeat(queries_P, counts_P), np.repeat(positives_P, counts_P)
        negatives_T = negatives_N2[ranges(starts_Q[queries_P], counts_P), 1]
        first, stop = np.searchsorted(queries_T, [batch.queries.start, batch.queries.stop])
        weights_T = relative_weights(structure)[torch.from_numpy(queries_T)]
        weights_T = (weights_T / _or_one(weights_T.sum()))[first:stop].to(tiles.dtype)
        columns = (queries_T - batch.queries.start, positives_T, negatives_T)
        queries, positives, negatives = (to_device(torch.from_numpy(each[first:stop]), device) for each in columns)
        own = _Triplets(queries, positives, negatives, to_device(weights_T, device))
        return [own] * len(self.prefix_dims)


def _or_one(number: Tensor) -> Tensor:
    """Return a sum of weights as what can be divided by."""
    return torch.where(number > 0, number, 1.0)
