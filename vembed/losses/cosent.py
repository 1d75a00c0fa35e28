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

AnglE is CoSENT over the angles of listed pairs in the complex plane, which don't flatten where a cosine is near 1 or
-1. Numbers k and k + E/2 of an embedding are the real and the imaginary part of a complex number. With x of the query
and y of the document, both of unit length,

    S = |sum over k of Re(x_k conj(y_k)) + Im(x_k conj(y_k))|

Sources: Su, 2022, "CoSENT (I): a more effective sentence vector scheme than Sentence-BERT"; Li & Li, 2024, "AoE:
Angle-optimized Embeddings for Semantic Textual Similarity".
Shape legend: Q queries of this rank, P pairs, G groups, K prefixes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self, Unpack

import torch
from torch.nn.functional import normalize

from vembed.device import to_device
from vembed.errors import ConfigError
from vembed.losses.base import relative_weights, share_of
from vembed.losses.cells import positive_mask
from vembed.losses.listed import PairSweep
from vembed.losses.streamed import (
    CellLoss,
    LogSumExp,
    LossGradients,
    Statistics,
    Sweep,
    streamed_options,
    zero_gradients,
)
from vembed.losses.tiles import NORM_EPSILON, Prefixes, pair_similarity, weighted_similarities

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import AngleKeys, CosentKeys
    from vembed.losses.streamed import StreamedBatch, StreamedOptions, TileLogits
    from vembed.losses.tiles import SimilarityTiles


class CosentLoss(CellLoss):
    """CoSENT over the listed pairs of a batch, or over its positives and all other cells."""

    def __init__(self, *, scale: float, **options: Unpack[StreamedOptions]) -> None:
        super().__init__(**options)
        self.scale = scale

    @classmethod
    def from_keys(cls, keys: CosentKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(scale=keys.cosent_scale, **streamed_options(keys, common))

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
        losses = []
        if (listed := self.listed(structure)) is not None:
            pairs_P2, grades_P = listed
            q_PE, d_PE = (side[rows] for side, rows in zip((q_QE, d_DE), pairs_P2.unbind(dim=1), strict=True))
            above_PP, weights_P = grades_P[:, None] > grades_P[None, :], _logs(structure, q_QE)[pairs_P2[:, 0]]
            for weight, dim in zip(self.prefix_weights, self.prefix_dims, strict=True):
                logits_P = self.scale * self.similarity(q_PE, d_PE, dim)
                gaps_N = ((logits_P + weights_P)[None, :] - (logits_P - weights_P)[:, None])[above_PP]
                losses.append(weight * torch.cat([logits_P.new_zeros(1), gaps_N]).logsumexp(dim=0))
            return torch.stack(losses).sum()
        for weight, similarity_QD in weighted_similarities(q_QE, d_DE, self.prefixes):
            logits_QD = self.scale * similarity_QD
            zero, weighed_Q1 = logits_QD.new_zeros(1), _logs(structure, logits_QD)[:, None]
            positive_QD = positive_mask(structure)
            negative_QD = ~positive_QD & ~self.masked(structure, similarity_QD, positive_QD)
            # Rows of weight 0 are left out: their log is -inf, and a log-sum-exp of nothing else has no gradient.
            counts_Q1 = weighed_Q1 > -math.inf
            lower = (logits_QD + weighed_Q1)[negative_QD & counts_Q1]
            higher = (weighed_Q1 - logits_QD)[positive_QD & counts_Q1]
            gap = lower.logsumexp(dim=0) + higher.logsumexp(dim=0) if len(lower) and len(higher) else None
            losses.append(weight * (logits_QD.sum() * 0 if gap is None else torch.logaddexp(gap, zero[0])))
        return torch.stack(losses).sum()

    @property
    def needs_statistics(self) -> bool:
        """Each pair is compared with those of all ranks."""
        return True

    @torch.no_grad()
    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Return the logits of listed pairs (K, P), or sums over both kinds of cells (2, K, 1), for ranks to merge."""
        if (listed := self.listed(batch.structure)) is None:
            return super().statistics(batch)
        pairs = self._pair_sweep(batch)
        logits_KA = self.scale * pairs.similarities()
        # Every logit is a sum that one rank has and the others have empty.
        logits = LogSumExp.empty(len(logits_KA), len(listed[0]), like=logits_KA, bounded=False)
        inside_A = self._numbers(pairs, batch)
        logits.max[:, inside_A], logits.sum[:, inside_A] = logits_KA, 1.0
        return Statistics(columns=logits)

    def sweep(self, batch: StreamedBatch) -> CosentSweep:
        """Begin the sums over positives and over all other cells."""
        tiles = self.make_tiles(batch, scale=self.scale)
        logs_Q = to_device(_logs(batch.structure, tiles.zeros())[batch.rows], tiles.device)
        weights_K = torch.tensor(self.prefix_weights, dtype=tiles.dtype, device=tiles.device)
        return CosentSweep(tiles, logs_Q, weights_K, share_of(batch.structure, batch.queries))

    def statistics_to_merge(self, sweep: CosentSweep) -> Statistics:
        """Return the sums over the lower cells and over the positives of this rank, (2, K, 1)."""
        lower_KQ = sweep.rows.value() + sweep.logs_Q
        higher_KP = sweep.logs_Q[sweep.tiles.cell_map.pair_rows] - sweep.positives_KP
        return Statistics(sweep, LogSumExp.stack([_over_all(lower_KQ), _over_all(higher_KP)]))

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients from the sums, or the logits of listed pairs, of all ranks."""
        if (listed := self.listed(batch.structure)) is None:
            return super().gradients(batch, statistics, into)
        if statistics is None or statistics.columns is None:
            raise ValueError("pairs are compared with those of all ranks: their statistics come first")
        pairs_P2, grades_P = listed
        # Every rank compares all pairs, which are single numbers, and differentiates those of its queries.
        grades_G, groups_P = torch.unique(grades_P, return_inverse=True)
        logits_KP = statistics.columns.value()
        logs_P = _logs(batch.structure, logits_KP)[pairs_P2[:, 0]]
        groups_P, logs_P = (to_device(values, batch.q_QE.device) for values in (groups_P, logs_P))
        loss_K, slopes_KP = _compare(logits_KP, groups_P, len(grades_G), logs_P)
        weights_K = torch.tensor(self.prefix_weights, dtype=loss_K.dtype, device=loss_K.device)
        pairs, (dq_QE, dd_DE) = self._pair_sweep(batch), zero_gradients(batch, into)
        slopes_KA = slopes_KP[:, self._numbers(pairs, batch)] * (self.scale * weights_K)[:, None]
        pairs.backward(slopes_KA, dq_QE, dd_DE)
        return LossGradients((loss_K * weights_K).sum() * share_of(batch.structure, batch.queries), dq_QE, dd_DE, {})

    def _pair_sweep(self, batch: StreamedBatch) -> PairSweep:
        return PairSweep(batch, self.similarity, dims=self.prefix_dims, tile_size=self.tile_size)

    def _numbers(self, pairs: PairSweep, batch: StreamedBatch) -> Tensor:
        """Return the numbers of this rank's pairs among the batch's listed ones."""
        return to_device(torch.from_numpy(pairs.pairs.numbers_A), batch.q_QE.device)


class AngleLoss(CosentLoss):
    """CoSENT over the angles of the listed pairs of a batch."""

    @staticmethod
    def similarity(q_NE: Tensor, d_NE: Tensor, dim: int | None) -> Tensor:
        """Return the similarity of the angles of pairs (N,), 0 to sqrt(2); None takes rows as they are."""
        if dim is not None:
            q_NE, d_NE = (normalize(side[:, :dim], dim=-1, eps=NORM_EPSILON) for side in (q_NE, d_NE))
        # Re + Im of x conj(y) = a c + b d + b c - a d for x = a + ib and y = c + id: linear in (a, b).
        real, imaginary = d_NE.chunk(2, dim=1)
        turned_NE = torch.cat([real - imaginary, real + imaginary], dim=1)
        return (q_NE * turned_NE).sum(dim=1).abs()

    @classmethod
    def from_keys(cls, keys: AngleKeys, common: LossCommon) -> Self:  # type: ignore[override]
        """Make the loss of a run.

        Raises:
            ConfigError: A length is odd: its numbers can't be taken two by two.
        """
        odd = [dim for dim in keys.mrl_dims or [common.dimension] if dim % 2]
        if odd:
            raise ConfigError(f"loss_type angle takes the numbers of an embedding two by two, and {odd[0]} is odd")
        return cls(scale=keys.angle_scale, prefixes=Prefixes.of_keys(keys), tile_size=common.tile_size)

    def listed(self, structure: BatchStructure) -> tuple[Tensor, Tensor]:
        """Return the listed pairs and their grades; a batch without any has no loss."""
        return super().listed(structure) or (structure.positives_P2[:0], structure.positives_P2.new_zeros(0))


class CosentSweep(Sweep):
    """Positives against all other cells of the batch: two sums, and then every slope.

    Args:
        logs_Q: Log of the weight of each of this rank's queries over the mean of all.
        weights_K: Weight of each prefix.
        share: This rank's share of a loss that every rank has whole.
    """

    reach = "batch"

    def __init__(self, tiles: SimilarityTiles, logs_Q: Tensor, weights_K: Tensor, share: float) -> None:
        super().__init__(tiles)
        self.logs_Q, self.weights_K, self.share = logs_Q, weights_K, share
        cell_map = tiles.cell_map
        self.rows = LogSumExp.empty(tiles.num_prefixes, cell_map.num_rows, like=tiles.zeros(), bounded=False)
        self.positives_KP = tiles.zeros(tiles.num_prefixes, len(cell_map.pair_rows))

    def collect(self, part: TileLogits) -> None:
        """Add the cells of a tile to the sums of their rows."""
        self.positives_KP[part.prefix, part.tile.pairs] = part.positives_P
        scratch_RC = self.tiles.scratch("scratch", part.tile.shape)
        self.rows.add_logits((part.prefix, part.tile.rows), part.logits_RC, dim=1, scratch_RC=scratch_RC)

    def complete(self, rows: slice, merged: Statistics | None = None) -> None:  # noqa: ARG002
        """Compare both sums of all ranks."""
        assert merged is not None
        assert merged.columns is not None
        # The whole loss is two numbers for each prefix, which every rank has after merging.
        lower_K, higher_K = merged.columns.value().squeeze(2)
        loss_K = torch.logaddexp(lower_K + higher_K, torch.zeros_like(lower_K))
        self.loss = (loss_K * self.weights_K).sum() * self.share
        self.row_shifts_KQ = (self.weights_K.log() + higher_K - loss_K)[:, None] + self.logs_Q
        falls_KP = self.logs_Q[self.tiles.cell_map.pair_rows] - self.positives_KP
        self.pair_slopes_KP = -(falls_KP + (self.weights_K.log() + lower_K - loss_K)[:, None]).exp()

    def slopes(self, part: TileLogits) -> Tensor:
        """Turn logits into exp(logit + shift of the row)."""
        part.logits_RC.add_(self.row_shifts_KQ[part.prefix, part.tile.rows, None]).exp_()
        slopes_P: Tensor = self.pair_slopes_KP[part.prefix, part.tile.pairs]
        return slopes_P


def _logs(structure: BatchStructure, like: Tensor) -> Tensor:
    """Return the log of the weight of each query over their mean, (Q,), in a type, where the structure is."""
    return relative_weights(structure).log().to(like.dtype)


def _over_all(logits_KN: Tensor) -> LogSumExp:
    """Return the sum over all of a prefix, (K, 1)."""
    groups_N = torch.zeros(logits_KN.shape[1], dtype=torch.int64, device=logits_KN.device)
    return LogSumExp.scattered(logits_KN, groups_N, 1)


def _compare(logits_KP: Tensor, groups_P: Tensor, count: int, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of pairs (K,) and its slopes by their logits (K, P).

    Args:
        groups_P: Number of each pair's grade among the grades, 0 the lowest.
        count: How many grades there are.
        weights_P: Log of each pair's weight.
    """
    lower_KP, higher_KP = weights_P + logits_KP, weights_P - logits_KP
    lower_KG, higher_KG = (LogSumExp.scattered(side, groups_P, count).value() for side in (lower_KP, higher_KP))
    # Sums over all lower and all higher grades: running sums over grades, shifted by one as a grade isn't compared with
    # itself. A matrix of all pairs of pairs would take P squared numbers.
    nothing_K1 = torch.full_like(lower_KG[:, :1], -math.inf)
    before_KG = torch.cat([nothing_K1, lower_KG.logcumsumexp(dim=1)[:, :-1]], dim=1)
    after_KG = torch.cat([higher_KG.flip(1).logcumsumexp(dim=1).flip(1)[:, 1:], nothing_K1], dim=1)
    gap_K = (before_KG + higher_KG).logsumexp(dim=1)
    loss_K = torch.logaddexp(gap_K, torch.zeros_like(gap_K))
    as_lower_KP = (lower_KP + after_KG[:, groups_P] - loss_K[:, None]).exp()
    return loss_K, as_lower_KP - (before_KG[:, groups_P] + higher_KP - loss_K[:, None]).exp()
