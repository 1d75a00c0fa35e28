"""CoSENT: every pair is to be more similar than each pair of a lower grade, over the whole batch.

    L = log(1 + sum over pairs a, b with y_a > y_b of exp(s (S_b - S_a)))

S_a is the similarity of pair a, y_a its grade, s the scale. Where the data list pairs with grades, those are all pairs,
and what else is in the batch doesn't count. Otherwise positives have grade 1 and all other cells that aren't masked 0.

With pairs in groups of one grade, lowest first, and log-sum-exps n_g of s S and p_g of -s S over each group,

    L = log(1 + e^T)      T = log sum over g of exp(p_g + n_<g)      n_<g, p_>g: over the groups before and after

    dL/d(s S_a) = exp(s S_a + p_>g - log(1 + e^T)) - exp(-s S_a + n_<g - log(1 + e^T))        for a in group g

so that P pairs take O(P log P). With weights of rows, a pair of pairs counts as the product of both rows' weights, each
over the mean of all: the log of the weight is added to s S and to -s S of a row's pairs. Ranks share the logits of
listed pairs, each one a sum that one rank has. Positives and the other cells are two groups: one sweep over the tiles
finds n and p, which ranks merge, the second the gradients.

Source: Su, 2022, "CoSENT (I): a more effective sentence vector scheme than Sentence-BERT".
Shape legend: Q queries of this rank, P pairs, G groups, K prefixes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self, Unpack

import torch

from vembed.losses.base import to_device
from vembed.losses.listed import PairSweep
from vembed.losses.masks import positive_mask
from vembed.losses.prefixes import pair_similarity, weighted_similarities
from vembed.losses.statistics import LogSumExp, Statistics
from vembed.losses.streamed import LossGradients, StreamedLoss, empty_gradients, streamed_options, zero_gradients
from vembed.losses.weights import relative_weights, share_of

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.cells import Tile
    from vembed.losses.facts.cosent import CosentKeys
    from vembed.losses.streamed import StreamedBatch, StreamedOptions
    from vembed.losses.tiles import SimilarityTiles


class CosentLoss(StreamedLoss):
    """CoSENT over the listed pairs of a batch, or over its positives and all other cells."""

    def __init__(
        self,
        *,
        scale: float,
        **options: Unpack[StreamedOptions],
    ) -> None:
        super().__init__(**options)
        self.scale = scale

    @classmethod
    def from_keys(cls, keys: CosentKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(
            scale=keys.cosent_scale,
            **streamed_options(keys, common),
        )

    @staticmethod
    def similarity(q_NE: Tensor, d_NE: Tensor, dim: int | None) -> Tensor:
        """Return the similarity of each listed pair (N,); None takes embeddings as they are."""
        return pair_similarity(q_NE, d_NE, dim)

    def listed(self, structure: BatchStructure) -> tuple[Tensor, Tensor] | None:
        """Return the pairs that are compared (P, 2) and their grades; None compares positives and all other cells."""
        if structure.listed_P2 is None or structure.listed_scores_P is None:
            return None
        return structure.listed_P2, structure.listed_scores_P

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss over all pairs of pairs, by the whole matrix of similarities."""
        listed = self.listed(structure)
        if listed is not None:
            return self._of_pairs(q_QE, d_DE, *listed, _logs(structure, q_QE))
        losses = []
        for weight, similarity_QD in weighted_similarities(q_QE, d_DE, self.prefixes):
            logits_QD = self.scale * similarity_QD
            zero, weighed_Q1 = logits_QD.new_zeros(1), _logs(structure, logits_QD)[:, None]
            positive_QD = positive_mask(structure)
            negative_QD = ~positive_QD & ~self.masked(structure, similarity_QD, positive_QD)
            lower, higher = (logits_QD + weighed_Q1)[negative_QD], (weighed_Q1 - logits_QD)[positive_QD]
            gap = lower.logsumexp(dim=0) + higher.logsumexp(dim=0) if len(lower) and len(higher) else None
            losses.append(weight * (logits_QD.sum() * 0 if gap is None else torch.logaddexp(gap, zero[0])))
        return torch.stack(losses).sum()

    def _of_pairs(self, q_QE: Tensor, d_DE: Tensor, pairs_P2: Tensor, grades_P: Tensor, weights_Q: Tensor) -> Tensor:
        """Return the loss of listed pairs, by the whole matrix of pairs of them."""
        q_PE, d_PE = (side[rows] for side, rows in zip((q_QE, d_DE), pairs_P2.unbind(dim=1), strict=True))
        above_PP, weights_P = grades_P[:, None] > grades_P[None, :], weights_Q[pairs_P2[:, 0]]
        losses = []
        for weight, dim in zip(self.prefix_weights, self.prefix_dims, strict=True):
            logits_P = self.scale * self.similarity(q_PE, d_PE, dim)
            gaps_N = ((logits_P + weights_P)[None, :] - (logits_P - weights_P)[:, None])[above_PP]
            losses.append(weight * torch.cat([logits_P.new_zeros(1), gaps_N]).logsumexp(dim=0))
        return torch.stack(losses).sum()

    @property
    def needs_statistics(self) -> bool:
        """Each pair is compared with those of all ranks."""
        return True

    @torch.no_grad()
    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Return what ranks merge: the logits of listed pairs (K, P), or sums over both kinds of cells (2, K, 1)."""
        tiles = self.tiles(batch, scale=self.scale)
        rows = LogSumExp.empty(tiles.num_prefixes, tiles.cells.num_rows, like=tiles.zeros(), bounded=False)
        if (listed := self.listed(batch.structure)) is not None:
            sweep, count = self._sweep(batch), len(listed[0])
            own_A, logits_KA = self._own(sweep, batch), self.scale * sweep.similarities()
            columns = LogSumExp.empty(tiles.num_prefixes, count, like=tiles.zeros(), bounded=False)
            columns.max[:, own_A], columns.sum[:, own_A] = logits_KA, 1.0
            return Statistics(rows, columns, logits_KA, tiles)
        positive_KP = tiles.zeros(tiles.num_prefixes, len(tiles.cells.pair_rows))
        for strip in tiles.strips():
            for tile in strip:
                for prefix, logits_RC in enumerate(tiles.logits(tile)):
                    positive_KP[prefix, tile.pairs] = logits_RC.view(-1)[tile.pair_cells]
                    tiles.exclude(prefix, tile, logits_RC)
                    scratch_RC = tiles.room("scratch", tile.shape)
                    rows.add_logits((prefix, tile.rows), logits_RC, dim=1, scratch_RC=scratch_RC)
        weights_Q = self._own_logs(batch, tiles)
        higher_KP = weights_Q[tiles.cells.pair_rows] - positive_KP
        columns = LogSumExp.stack([_over_all(rows.value() + weights_Q), _over_all(higher_KP)])
        return Statistics(rows, columns, positive_KP, tiles)

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients from what all ranks know of the pairs."""
        if statistics is None or statistics.columns is None:
            raise ValueError("pairs are compared with those of all ranks: their statistics come first")
        if (listed := self.listed(batch.structure)) is None:
            return self._of_cells(batch, statistics, statistics.columns, into)
        return self._of_listed(batch, listed, statistics.columns, into)

    def _sweep(self, batch: StreamedBatch) -> PairSweep:
        return PairSweep(batch, self.similarity, dims=self.prefix_dims, tile_size=self.tile_size)

    def _own(self, sweep: PairSweep, batch: StreamedBatch) -> Tensor:
        """Return which listed pairs are of this rank's queries."""
        return to_device(torch.from_numpy(sweep.pairs.own_A), batch.q_QE.device)

    def _of_listed(
        self,
        batch: StreamedBatch,
        listed: tuple[Tensor, Tensor],
        columns: LogSumExp,
        into: tuple[Tensor, Tensor] | None,
    ) -> LossGradients:
        """Differentiate the listed pairs of this rank, each against those of all."""
        pairs_P2, grades_P = listed
        grades_G, groups_P = torch.unique(grades_P, return_inverse=True)
        logits_KP, weights_P = columns.value(), _logs(batch.structure, columns.sum)[pairs_P2[:, 0]]
        groups_P, weights_P = (to_device(each, batch.q_QE.device) for each in (groups_P, weights_P))
        loss_K, slopes_KP = _compare(logits_KP, groups_P, len(grades_G), weights_P)
        sweep, (dq_QE, dd_DE) = self._sweep(batch), zero_gradients(batch, into)
        slopes_KA = slopes_KP[:, self._own(sweep, batch)]
        for weight, slopes_A in zip(self.prefix_weights, slopes_KA, strict=True):
            slopes_A *= weight * self.scale
        sweep.backward(slopes_KA, dq_QE, dd_DE)
        return LossGradients(self._share(loss_K, batch), dq_QE, dd_DE, {})

    def _of_cells(
        self,
        batch: StreamedBatch,
        statistics: Statistics,
        columns: LogSumExp,
        into: tuple[Tensor, Tensor] | None,
    ) -> LossGradients:
        """Sweep the tiles again: positives against all other cells, of all ranks."""
        tiles = statistics.tiles
        lower_K, higher_K = columns.value().squeeze(2)
        loss_K = torch.logaddexp(lower_K + higher_K, torch.zeros_like(lower_K))
        weights_K = torch.stack([tiles.zeros().fill_(weight) for weight in self.prefix_weights])
        weights_Q = self._own_logs(batch, tiles)
        shifts_KQ = (weights_K.log() + higher_K - loss_K)[:, None] + weights_Q
        falls_KP = weights_Q[tiles.cells.pair_rows] - statistics.positive_logits_KP
        positive_slopes_KP = -(falls_KP + (weights_K.log() + lower_K - loss_K)[:, None]).exp()
        out = empty_gradients(tiles, batch, into)
        for strip in tiles.strips():
            for tile in strip:

                def differentiate(prefix: int, logits_RC: Tensor, tile: Tile = tile) -> None:
                    cells = logits_RC.view(-1)
                    tiles.exclude(prefix, tile, logits_RC)
                    logits_RC.add_(shifts_KQ[prefix, tile.rows, None]).exp_()
                    cells[tile.pair_cells] = positive_slopes_KP[prefix, tile.pairs]

                tiles.backward(tile, differentiate, out)
        tiles.finish(out)
        return LossGradients(self._share(loss_K, batch), out.dq_QE, out.dd_DE, {})

    def _own_logs(self, batch: StreamedBatch, tiles: SimilarityTiles) -> Tensor:
        """Return the log of the weight of each query of this rank over the mean of all, (Q,)."""
        own = slice(batch.queries.start, batch.queries.stop)
        return to_device(_logs(batch.structure, tiles.zeros())[own], tiles.device)

    def _share(self, loss_K: Tensor, batch: StreamedBatch) -> Tensor:
        """Return this rank's share of a loss that every rank has whole."""
        share = share_of(batch.structure, batch.queries)
        return torch.stack(
            [loss * (weight * share) for loss, weight in zip(loss_K, self.prefix_weights, strict=True)]
        ).sum()


def _logs(structure: BatchStructure, like: Tensor) -> Tensor:
    """Return the log of the weight of each query over their mean, (Q,), in a type, where the structure is."""
    return relative_weights(structure).log().to(like.dtype)


def _over_all(logits_KN: Tensor) -> LogSumExp:
    """Return the sum over all of a prefix, (K, 1)."""
    groups_N = torch.zeros(logits_KN.shape[1], dtype=torch.int64, device=logits_KN.device)
    return LogSumExp.of_groups(logits_KN, groups_N, 1)


def _compare(logits_KP: Tensor, groups_P: Tensor, count: int, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of pairs (K,) and its slopes by their logits (K, P).

    Args:
        groups_P: Number of each pair's grade among the grades, 0 the lowest.
        count: How many grades there are.
        weights_P: Log of each pair's weight.
    """
    lower_KP, higher_KP = weights_P + logits_KP, weights_P - logits_KP
    lower_KG, higher_KG = (LogSumExp.of_groups(each, groups_P, count).value() for each in (lower_KP, higher_KP))
    nothing_K1 = torch.full_like(lower_KG[:, :1], -math.inf)
    before_KG = torch.cat([nothing_K1, lower_KG.logcumsumexp(dim=1)[:, :-1]], dim=1)
    after_KG = torch.cat([higher_KG.flip(1).logcumsumexp(dim=1).flip(1)[:, 1:], nothing_K1], dim=1)
    gap_K = (before_KG + higher_KG).logsumexp(dim=1)
    loss_K = torch.logaddexp(gap_K, torch.zeros_like(gap_K))
    as_lower_KP = (lower_KP + after_KG[:, groups_P] - loss_K[:, None]).exp()
    return loss_K, as_lower_KP - (before_KG[:, groups_P] + higher_KP - loss_K[:, None]).exp()
