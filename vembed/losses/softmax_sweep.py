"""InfoNCE over tiles: sums of exponentials, then slopes, without the Q x D matrix and without autograd.

A line is a row of the matrix (a query) or a column (a document). Slope: dL/dl of one cell with the logit l. With the
log-sum-exps p over a line's positives and n over its negatives, and its weight w (its share of the batch x the weight
of the prefix x 1/2 where both directions count),

    loss of a line           w softplus(n - p)
    slope of a negative      exp(l + shift),   shift = log w - log(e^p + e^n): one number for each line
    slope of a positive      -w exp(l - p) sigmoid(n - p)

The last keeps its digits where p is far above n: 1 - softmax would cancel. Where each positive has a loss of its own
(SupCon), the loss is w (log(e^p + e^n) - mean of the positives' l), and a positive's slope is
w exp(l - log(e^p + e^n)) - w / |P|. `focal_gamma` multiplies w by sigmoid(n - p)^gamma, which isn't differentiated.

`hardness` adds strength x S to the logits of a row's negatives, before n is summed. That term isn't differentiated, so
the slopes are the same formulas of the larger l; columns take l without it. Where both directions count, the slope of a
cell is the sum of the one from its row and the one from its column.

The calls come from streamed.py:

    one direction       for each block of rows: `collect` every tile -> `complete` the rows: their loss and shifts
                        -> `slopes` of every tile
    both directions     `collect` all tiles -> `statistics_to_merge`: ranks merge -> `complete` all rows, and the
                        columns from what ranks merged -> `slopes` of all tiles

Both directions come from the same tiles in two sweeps, 4 products of Q x D x E. In one direction the rows of a block
are complete after its last tile, so that its logits are kept where they fit, and needn't be computed again: 3 products
(reach "row").

Shape legend: Q queries of this rank, D documents of all ranks, E width of an embedding, K prefixes, R x C cells of a
tile, P positive pairs, N hard negatives of a tile's own queries, L lines.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import logsigmoid
from typing_extensions import override

from vembed.device import to_device
from vembed.losses.base import document_shares, positive_counts, share_of
from vembed.losses.streamed import LogSumExp, Sweep

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.cells import Tile
    from vembed.losses.infonce import Hardness, SoftmaxLoss
    from vembed.losses.streamed import Statistics, StreamedBatch, TileLogits
    from vembed.losses.tiles import SimilarityTiles

BOUNDED_LOGIT = 40.0
"""Largest |logit| for which sums of exponentials need no maximum in float32.

Sums of 2^31 of them stay far from overflow (e^40 x 2^31 = 5e26), and w / sum, the factor that turns an exponential into
a slope, from underflow (1e-38) for weights w down to 1e-11. It is the second that a higher bound would break first.
"""


class SoftmaxSweep(Sweep):
    """Sums over the negatives of rows, and of columns if asked, and slopes exp(l + row shift) + exp(l + column shift).

    The shifts and the slopes of the positive pairs are set by whoever completes the sums: `InfoNCESweep`, or joint.py.
    """

    can_reuse_logits = True

    def __init__(self, tiles: SimilarityTiles, *, with_columns: bool, hardness: Hardness | None = None) -> None:
        super().__init__(tiles)
        self.reach = "batch" if with_columns else "row"
        self.hardness = hardness
        # Hardness adds to logits, which may then pass the bound.
        self.is_bounded = tiles.largest_logit <= BOUNDED_LOGIT and hardness is None
        like, num_prefixes, cell_map = tiles.zeros(), tiles.num_prefixes, tiles.cell_map
        # Sums over the negatives of each row (K, Q), and of each column (K, D).
        self.row_sums = LogSumExp.empty(num_prefixes, cell_map.num_rows, like=like, bounded=self.is_bounded)
        self.column_sums: LogSumExp | None = None
        if with_columns:
            self.column_sums = LogSumExp.empty(num_prefixes, cell_map.num_columns, like=like, bounded=self.is_bounded)
        self.positives_KP = tiles.zeros(num_prefixes, len(cell_map.pair_rows))  # logits of the positive pairs
        # Known once the sums are complete:
        self.row_shifts_KQ = tiles.zeros(num_prefixes, cell_map.num_rows)
        self.column_shifts_KD: Tensor | None = None
        self.pair_slopes_KP = torch.zeros_like(self.positives_KP)

    @override
    def collect(self, part: TileLogits) -> None:
        """Add the negatives of a tile to the sums: its positives and masked cells are -inf, and add 0.

        Overwrites `logits_RC`: with exp(logits) where they are bounded, else with the logits after hardness. `slopes`
        may go on from it (`is_collected`).
        """
        logits_RC, tile, prefix = part.logits_RC, part.tile, part.prefix
        self.positives_KP[prefix, tile.pairs] = part.positives_P
        if self.is_bounded:  # one exponential per cell serves rows, columns and, where it is kept, the slopes
            exps_RC = logits_RC.exp_()
            self.row_sums.sum[prefix, tile.rows] += exps_RC.sum(1)
            if self.column_sums is not None:
                self.column_sums.sum[prefix, tile.columns] += exps_RC.sum(0)
            return
        scratch_RC = self.tiles.scratch("scratch", tile.shape)
        # Columns before hardness: the negatives of a query weigh more, those of a document don't.
        if self.column_sums is not None:
            self.column_sums.add_logits((prefix, tile.columns), logits_RC, dim=0, scratch_RC=scratch_RC)
        if self.hardness is not None:
            _weigh_negatives_(self.hardness, logits_RC, tile, self.tiles.scale)
        self.row_sums.add_logits((prefix, tile.rows), logits_RC, dim=1, scratch_RC=scratch_RC)

    @override
    def slopes(self, part: TileLogits) -> Tensor:
        """Turn the logits l of a tile, or what `collect` left of them, into slopes; return the positives' slopes.

        The slope of a cell is exp(l + row shift) + exp(l + column shift). Positives and masked cells, -inf, become 0.
        """
        tile, prefix = part.tile, part.prefix
        row_shifts_R1 = self.row_shifts_KQ[prefix, tile.rows, None]
        column_shifts_C = None if self.column_shifts_KD is None else self.column_shifts_KD[prefix, tile.columns]
        if self.is_bounded:
            self._bounded_slopes_(part, row_shifts_R1, column_shifts_C)
        else:
            self._unbounded_slopes_(part, row_shifts_R1, column_shifts_C)
        return self.pair_slopes_KP[prefix, tile.pairs]

    def _bounded_slopes_(self, part: TileLogits, row_shifts_R1: Tensor, column_shifts_C: Tensor | None) -> None:
        # exp(l + r) + exp(l + c) = exp(l) (exp(r) + exp(c)): no further exponential of a matrix.
        exps_RC = part.logits_RC if part.is_collected else part.logits_RC.exp_()
        if column_shifts_C is None:
            exps_RC.mul_(row_shifts_R1.exp())
        else:
            factors_RC = self.tiles.scratch("scratch", part.tile.shape)
            exps_RC.mul_(torch.add(row_shifts_R1.exp(), column_shifts_C.exp(), out=factors_RC))

    def _unbounded_slopes_(self, part: TileLogits, row_shifts_R1: Tensor, column_shifts_C: Tensor | None) -> None:
        matrix_RC, column_slopes_RC = part.logits_RC, None
        if column_shifts_C is not None:  # before hardness, which weighs the negatives of queries alone
            # Logits are collected only where one direction counts.
            assert not part.is_collected, "a collected tile has its hardness already"
            scratch_RC = self.tiles.scratch("scratch", part.tile.shape)
            column_slopes_RC = torch.add(matrix_RC, column_shifts_C, out=scratch_RC).exp_()
        if self.hardness is not None and not part.is_collected:
            _weigh_negatives_(self.hardness, matrix_RC, part.tile, self.tiles.scale)
        matrix_RC.add_(row_shifts_R1).exp_()
        if column_slopes_RC is not None:
            matrix_RC.add_(column_slopes_RC)


class InfoNCESweep(SoftmaxSweep):
    """InfoNCE of one batch in one direction or both."""

    def __init__(self, loss: SoftmaxLoss, batch: StreamedBatch, tiles: SimilarityTiles) -> None:
        super().__init__(tiles, with_columns=loss.bidirectional, hardness=loss.hardness)
        structure = batch.structure
        direction_share = 0.5 if loss.bidirectional else 1.0
        self.focal_gamma = loss.focal_gamma
        self.row_weights_KQ = loss.query_weights(batch, tiles, direction_share)
        # Positives of each query and document, where each positive has a loss of its own.
        self.positive_counts_Q: Tensor | None = None
        self.positive_counts_D: Tensor | None = None
        if loss.positives_apart:
            counts_Q, counts_D = (to_device(side.to(tiles.dtype), tiles.device) for side in positive_counts(structure))
            self.positive_counts_Q, self.positive_counts_D = counts_Q[batch.rows], counts_D
        if loss.bidirectional:
            self.column_weights_KD = loss.weights_of(direction_share * document_shares(structure), tiles)
            self.rank_share = share_of(structure, batch.queries)

    @override
    def complete(self, rows: slice, merged: Statistics | None = None) -> None:
        """Turn the sums of some rows, and those of all columns, into loss, shifts and the slopes of the positives."""
        self._complete_rows(rows)
        if self.column_sums is not None:  # both directions: `rows` are all, so that no column is added twice
            assert merged is not None
            assert merged.columns is not None
            self._complete_columns(merged.columns)

    def _complete_rows(self, rows: slice) -> None:
        pairs = self.tiles.cell_map.pairs_of(rows)
        logits_KP, rows_P = self.positives_KP[:, pairs], self.tiles.cell_map.pair_rows[pairs] - rows.start
        terms = self._terms(
            negatives=self.row_sums[:, rows],
            # A rank has all pairs of its rows: nothing to merge.
            positives=LogSumExp.scattered(logits_KP, rows_P, rows.stop - rows.start),
            logits_KP=logits_KP,
            lines_P=rows_P,
            weights_KL=self.row_weights_KQ[:, rows],
            positive_counts_L=None if self.positive_counts_Q is None else self.positive_counts_Q[rows],
        )
        self.loss += terms.line_loss + terms.pair_loss
        self.row_shifts_KQ[:, rows] = terms.shifts_KL
        self.pair_slopes_KP[:, pairs] = terms.pair_slopes_KP

    def _complete_columns(self, sums: LogSumExp) -> None:
        negatives, positives = sums[0], sums[1]  # as `statistics_to_merge` stacks them
        terms = self._terms(
            negatives=negatives,
            positives=positives,
            logits_KP=self.positives_KP,
            lines_P=self.tiles.cell_map.pair_columns,
            weights_KL=self.column_weights_KD,
            positive_counts_L=self.positive_counts_D,
        )
        # Every rank has the same `line_loss`: each adds only its share, so that the sum over ranks counts it once.
        # `pair_loss` is of this rank's own pairs.
        self.loss += terms.line_loss * self.rank_share + terms.pair_loss
        self.column_shifts_KD = terms.shifts_KL
        self.pair_slopes_KP += terms.pair_slopes_KP

    def _terms(
        self,
        *,
        negatives: LogSumExp,
        positives: LogSumExp,
        logits_KP: Tensor,
        lines_P: Tensor,
        weights_KL: Tensor,
        positive_counts_L: Tensor | None,
    ) -> LineTerms:
        """Return the terms of some lines; with `positive_counts_L` each positive has a loss of its own."""
        n_KL, p_KL = negatives.value(), positives.value()
        if positive_counts_L is None:
            return terms_of_summed_positives(n_KL, p_KL, logits_KP, lines_P, weights_KL, self.focal_gamma)
        return terms_of_positives_apart(n_KL, p_KL, logits_KP, lines_P, weights_KL, positive_counts_L)


def _weigh_negatives_(hardness: Hardness, logits_RC: Tensor, tile: Tile, scale: float) -> None:
    """Add what `Hardness.added_logits` says to the logits of a tile, in place; positives and masked cells stay -inf."""
    flat_logits = logits_RC.view(-1)
    factor = 1.0 + hardness.strength / scale  # (s + strength) S from s S: one multiplication
    # A copy: in_batch_negatives multiplies the whole tile, and then puts the logits of the own negatives back.
    own_negatives_N = flat_logits[tile.own_negative_cells]
    if hardness.mode == "hard_negatives":
        flat_logits[tile.own_negative_cells] = own_negatives_N * factor
        return
    logits_RC.mul_(factor)
    if hardness.mode == "in_batch_negatives":
        flat_logits[tile.own_negative_cells] = own_negatives_N


# The formulas of the docstring, for lines whose sums are complete -----------------------------------------------------


class LineTerms(NamedTuple):
    """Loss of lines whose sums are complete, and what turns their logits into slopes."""

    line_loss: Tensor  # the part computed from the sums of whole lines; for columns it is equal on every rank
    pair_loss: Tensor  # the part that is a sum over this rank's positive pairs
    shifts_KL: Tensor
    pair_slopes_KP: Tensor


def terms_of_summed_positives(
    n_KL: Tensor, p_KL: Tensor, logits_KP: Tensor, lines_P: Tensor, weights_KL: Tensor, focal_gamma: float
) -> LineTerms:
    """Return the terms of lines with one loss for all of their positives, softplus(n - p).

    Args:
        n_KL: Log-sum-exp over the negatives of each line, on all ranks.
        p_KL: The same over its positives; -inf where it has none, and then it adds nothing.
        logits_KP: Logits of this rank's positive pairs.
        lines_P: Line of each of these pairs.
        weights_KL: Weight of each line in the loss.
        focal_gamma: Exponent of the negatives' share of a line, by which it is weighed; not differentiated.
    """
    gap_KL = line_gaps(n_KL, p_KL)
    weights_KL = focal_weights(weights_KL, gap_KL, focal_gamma)
    # softplus(gap). torch's own returns the gap itself above 20, which costs digits in float64.
    line_loss = (-logsigmoid(-gap_KL) * weights_KL).sum()
    shares_KP = (logits_KP - p_KL[:, lines_P]).exp()  # of each positive in the sum over its line's positives
    slopes_KP = -weights_KL[:, lines_P] * shares_KP * gap_KL[:, lines_P].sigmoid()
    return LineTerms(line_loss, line_loss.new_zeros(()), line_shifts(n_KL, p_KL, weights_KL), slopes_KP)


def terms_of_positives_apart(
    n_KL: Tensor, p_KL: Tensor, logits_KP: Tensor, lines_P: Tensor, weights_KL: Tensor, positive_counts_L: Tensor
) -> LineTerms:
    """Return the terms of lines whose loss is the mean over positives of log-sum-exp of all - logit of the positive.

    Args:
        positive_counts_L: Positives of each line on all ranks; the others are those of `terms_of_summed_positives`.
    """
    total_KL = torch.logaddexp(n_KL, p_KL)
    line_loss = torch.where(p_KL == -math.inf, 0.0, total_KL * weights_KL).sum()
    weights_KP = weights_KL[:, lines_P]
    pair_weights_KP = weights_KP / positive_counts_L[lines_P]
    pair_loss = -(pair_weights_KP * logits_KP).sum()
    slopes_KP = weights_KP * (logits_KP - total_KL[:, lines_P]).exp() - pair_weights_KP
    return LineTerms(line_loss, pair_loss, line_shifts(n_KL, p_KL, weights_KL), slopes_KP)


def line_gaps(n_KL: Tensor, p_KL: Tensor) -> Tensor:
    """Return n - p; -inf where a line has no positives, which makes its loss 0."""
    return torch.where(p_KL == -math.inf, -math.inf, n_KL - p_KL)  # NaN isn't -inf: it reaches the loss


def line_shifts(n_KL: Tensor, p_KL: Tensor, weights_KL: Tensor) -> Tensor:
    """Return log w - log(e^p + e^n); -inf where a line has no positives."""
    return torch.where(p_KL == -math.inf, -math.inf, weights_KL.log() - torch.logaddexp(n_KL, p_KL))


def focal_weights(weights_KL: Tensor, gap_KL: Tensor, focal_gamma: float) -> Tensor:
    """Return w x sigmoid(n - p)^gamma: sigmoid(n - p) is the negatives' share of a line's softmax."""
    # sigmoid keeps the digits that 1 - (share of the positives) would lose.
    return weights_KL * gap_KL.sigmoid().pow(focal_gamma) if focal_gamma else weights_KL
