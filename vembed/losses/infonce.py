"""InfoNCE over in-batch negatives and hard negatives, with one or several positives per query.

Query to document, for each query i with positives P(i) and the documents N(i) that are neither positive nor masked:

    L_i = -log( sum over j in P(i) of exp(s S_ij)  /  sum over j in P(i) and N(i) of exp(s S_ij) )

S is the matrix of similarities, s the logit scale (1 / temperature). Hard negatives are documents like any other: they
join the in-batch negatives of every query. Document to query is the same over the columns of the documents that are
some query's positive; bidirectional training averages both. `supcon` gives each positive of a query a loss of its own
and averages them.

Streamed, with the log-sum-exps p_i over positives and n_i over negatives, L_i = softplus(n_i - p_i). Slope: dL/dlogit
of one cell, whose logit is s S_ij:

    exp(s S_ij - log(e^p_i + e^n_i))                    of a negative,
    -exp(s S_ij - p_i) sigmoid(n_i - p_i)               of a positive,

which keeps its digits where p_i is far above n_i: 1 - softmax would cancel. With a loss of its own, a positive has
exp(s S_ij - log(e^p_i + e^n_i)) - 1 / |P(i)|. With weight w_i (share of the query x weight of the prefix) each slope is
times w_i. So one number of a row, its shift log w_i - log(e^p_i + e^n_i), turns the logits of all of its negatives into
slopes: exp(logit + shift).

The calls come from streamed.py:

    one direction       for each block of rows: `collect` every tile -> `complete` the rows: their loss and shifts
                        -> `slopes` of every tile
    both directions     `collect` all tiles -> `statistics_to_merge`: ranks merge -> `complete` all rows, and the
                        columns from what ranks merged -> `slopes` of all tiles

Both directions come from the same tiles in two sweeps, 4 products of Q x D x E. In one direction the rows of a block
are complete after its last tile, so that its logits are kept and the fourth product is saved (reach "row").

Source: van den Oord et al., 2018, "Representation Learning with Contrastive Predictive Coding"; the two directions as
in Radford et al., 2021 (CLIP); a sum over positives inside the logarithm as in Miech et al., 2020 (MIL-NCE); each
positive by itself as in Khosla et al., 2020, "Supervised Contrastive Learning".
Shape legend: Q queries of this rank (of all ranks in the definition), D documents of all ranks, K prefixes, R x C cells
of a tile, P positive pairs, L lines: rows of the matrix, or its columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from vembed.device import to_device
from vembed.losses.base import document_shares, positive_counts, query_shares, share_of
from vembed.losses.cells import CellMap, own_negatives_mask, positive_mask
from vembed.losses.keys import MAX_LOGIT_SCALE, MIN_LOGIT_SCALE
from vembed.losses.streamed import CellLoss, LogSumExp, Statistics, Sweep, streamed_options
from vembed.losses.tiles import longest_row, read_numbers, weighted_similarities

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.cells import Tile
    from vembed.losses.keys import InfoNCEKeys, SoftmaxKeys
    from vembed.losses.streamed import StreamedBatch, StreamedOptions, TileLogits
    from vembed.losses.tiles import SimilarityTiles

BOUNDED_LOGIT = 40.0
"""Largest |logit| at which exp(logit) and sums of 2^31 of them stay within float32, so that no maximum is needed."""


# The definition, over the whole matrix: read this first; tests hold the streamed path to it ---------------------------


class Hardness(NamedTuple):
    """Factor exp(strength S) on some of a query's negatives; it isn't differentiated."""

    mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"]  # hard negatives: of the query's own row
    strength: float

    def added_logits(self, similarity_QD: Tensor, structure: BatchStructure) -> Tensor:
        """Return strength x S on the negatives that the mode names, (Q, D), without gradient.

        The caller leaves positives out.
        """
        own_negatives_QD = own_negatives_mask(structure)
        is_weighed_QD = {
            "in_batch_negatives": ~own_negatives_QD,
            "hard_negatives": own_negatives_QD,
            "all_negatives": torch.ones_like(own_negatives_QD),
        }[self.mode]
        return self.strength * similarity_QD.detach() * is_weighed_QD

    def weigh_negatives_(self, logits_RC: Tensor, tile: Tile, scale: float) -> None:
        """Add the same to the logits s S of a tile, in place, where positives and masked cells are -inf and stay so."""
        flat_logits = logits_RC.view(-1)
        factor = 1.0 + self.strength / scale  # (s + strength) S from s S: one multiplication
        # Indexing copies: for in_batch_negatives these cells are restored after the whole tile was multiplied.
        own_negatives_N = flat_logits[tile.own_negative_cells]
        if self.mode == "hard_negatives":
            flat_logits[tile.own_negative_cells] = own_negatives_N * factor
            return
        logits_RC.mul_(factor)
        if self.mode == "in_batch_negatives":
            flat_logits[tile.own_negative_cells] = own_negatives_N


class SoftmaxLoss(CellLoss):
    """InfoNCE over similarities of any kind, with a fixed or learned temperature.

    Args:
        learn_temperature: Whether the logit scale is a parameter, kept within [1, 100].
        bidirectional: Whether the loss of document to query counts as much as that of query to document.
        dtype: Type of the learned logit scale.
        hardness: Negatives that count more, the more similar they are.
        focal_gamma: Exponent of the negatives' share of a query, by which its loss is weighed.
    """

    positives_apart: ClassVar[bool] = False
    """True gives each positive of a line a loss of its own, and takes their mean; False sums them in one logarithm."""

    def __init__(
        self,
        *,
        temperature: float,
        learn_temperature: bool = False,
        bidirectional: bool = False,
        dtype: torch.dtype = torch.float32,
        hardness: Hardness | None = None,
        focal_gamma: float = 0.0,
        **options: Unpack[StreamedOptions],
    ) -> None:
        super().__init__(**options)
        assert not (self.positives_apart and focal_gamma), (
            "focal_gamma with positives_apart: the streamed loss would compute another function than the definition"
        )
        log_scale = torch.tensor(math.log(1.0 / temperature), dtype=torch.promote_types(dtype, torch.float32))
        self.log_scale: Tensor
        self._fixed_temperature = None if learn_temperature else temperature
        if learn_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale, persistent=False)
        self.bidirectional, self.hardness, self.focal_gamma = bidirectional, hardness, focal_gamma

    def of_similarities(
        self, similarities_of_prefixes: Iterable[tuple[float, Tensor]], structure: BatchStructure
    ) -> Tensor:
        """Return the mean loss over queries, averaged with that over positive documents when bidirectional.

        Args:
            similarities_of_prefixes: Weight and whole matrix of similarities (Q, D) of each prefix.
        """
        positive_QD = positive_mask(structure)
        shares_Q, shares_D = query_shares(structure), document_shares(structure)
        losses = []
        for prefix_weight, similarity_QD in similarities_of_prefixes:
            masked_QD = self.masked(structure, similarity_QD, positive_QD)
            logits_QD = (similarity_QD * self.log_scale.exp()).masked_fill(masked_QD, -math.inf)
            query_logits_QD = logits_QD
            if self.hardness is not None:  # the negatives of a query weigh more, those of a document don't
                added_QD = self.hardness.added_logits(similarity_QD, structure)
                query_logits_QD = logits_QD + added_QD.masked_fill(positive_QD, 0.0)
            loss = self._direction(query_logits_QD, positive_QD, shares_Q)
            if self.bidirectional:
                loss = (loss + self._direction(logits_QD.T, positive_QD.T, shares_D)) / 2
            losses.append(prefix_weight * loss)
        return torch.stack(losses).sum()

    def _direction(self, logits_RC: Tensor, positive_RC: Tensor, shares_R: Tensor) -> Tensor:
        """Return the sum over rows of share x loss, a scalar.

        loss = logsumexp(all) - logsumexp(positives) (or - mean(positives) with `positives_apart`), times
        (1 - exp(-loss))^focal_gamma. Rows without positives add 0.
        """
        counted_R = positive_RC.any(dim=1)
        logits, positive = logits_RC[counted_R], positive_RC[counted_R]
        of_positives = logits.masked_fill(~positive, -math.inf).logsumexp(dim=1)
        if self.positives_apart:
            of_positives = logits.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1)
        losses = logits.logsumexp(dim=1) - of_positives
        if self.focal_gamma:
            # 1 - exp(-loss) = the negatives' share of the softmax, exact for tiny losses.
            losses = losses * (-torch.expm1(-losses.detach())).pow(self.focal_gamma)
        return (losses * shares_R[counted_R].to(losses.dtype)).sum()

    @torch.no_grad()
    def constrain(self) -> None:
        """Clamp a learned logit scale to [1, 100]."""
        if isinstance(self.log_scale, nn.Parameter):
            self.log_scale.clamp_(math.log(MIN_LOGIT_SCALE), math.log(MAX_LOGIT_SCALE))

    @property
    def temperature(self) -> float:
        """1 / logit scale; a learned one is read from its device."""
        return math.exp(-self.log_scale.item()) if self._fixed_temperature is None else self._fixed_temperature

    # From here on what streamed.py asks for: the sweep of a batch, its tiles, and what ranks merge.

    @property
    def needs_statistics(self) -> bool:
        """Columns need the sums of all ranks' queries, rows only those of their block."""
        return self.bidirectional

    def sweep(self, batch: StreamedBatch) -> InfoNCESweep:
        """Begin the sums of a batch."""
        return InfoNCESweep(self, batch, self.make_scaled_tiles(batch))

    def statistics_to_merge(self, sweep: SoftmaxSweep) -> Statistics:
        """Return the sums over each document's negatives and over its positives, (2, K, D)."""
        assert sweep.columns is not None
        cell_map = sweep.tiles.cell_map
        positives = LogSumExp.scattered(sweep.positives_KP, cell_map.pair_columns, cell_map.num_columns)
        return Statistics(sweep, LogSumExp.stack([sweep.columns.without_idle_maxima(), positives]))

    def parameter_gradients(self, sweep: Sweep, scale_gradient: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the gradient of the log scale."""
        return {"log_scale": scale_gradient.to(self.log_scale.dtype)}

    def make_cell_map(self, batch: StreamedBatch) -> CellMap:
        """Index the positives, excluded cells and, with hardness, the hard negatives of the queries' own rows."""
        return CellMap(
            batch.structure,
            batch.queries,
            mask_false_negatives=self.mask_false_negatives,
            device=batch.q_QE.device,
            with_own_negatives=self.hardness is not None,
        )

    def make_scaled_tiles(self, batch: StreamedBatch) -> SimilarityTiles:
        """Return the tiles of a batch; the scale and the bound of a logit are read from the device together."""
        # Prefixes are normalised, so that the scale alone bounds their logits.
        norms = () if self.prefixes is not None else (longest_row(batch.q_QE), longest_row(batch.d_DE))
        scale, *longest = read_numbers(self.log_scale.exp(), *norms)
        return self.make_tiles(batch, scale=scale, longest=math.prod(longest))


def softmax_options(keys: SoftmaxKeys, common: LossCommon) -> dict[str, Any]:
    """Return the arguments of InfoNCE over any negatives from the keys of a run."""
    return {
        "temperature": keys.temperature,
        "learn_temperature": keys.learn_temperature,
        "bidirectional": keys.loss_bidirectional,
        "dtype": common.dtype,
        **streamed_options(keys, common),
    }


class InfoNCE(SoftmaxLoss):
    """InfoNCE over the documents of the batch."""

    @classmethod
    def from_keys(cls, keys: InfoNCEKeys, common: LossCommon) -> InfoNCE:
        """Make the loss of a run; with `loss_directions` its subclass that has them in one softmax."""
        hardness = None
        if keys.hardness_mode != "none":
            hardness = Hardness(keys.hardness_mode, keys.hardness_strength)
        options = {**softmax_options(keys, common), "hardness": hardness, "focal_gamma": keys.focal_gamma}
        if keys.loss_directions is None:
            return cls(**options)
        from vembed.losses.joint import JointInfoNCE  # derived from this class

        return JointInfoNCE(directions=keys.loss_directions, **options)

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss over the whole matrix."""
        return self.of_similarities(weighted_similarities(q_QE, d_DE, self.prefixes), structure)


class SupCon(InfoNCE):
    """InfoNCE of each positive by itself, for rows of one class."""

    positives_apart = True

    @classmethod
    def from_keys(cls, keys: SoftmaxKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(**softmax_options(keys, common))


# Streamed: sums over tiles, then slopes -------------------------------------------------------------------------------


class SoftmaxSweep(Sweep):
    """Sums of exponentials over rows, and columns, and the slopes exp(logit + shift of the row, or column).

    The shifts and the slopes of the positive pairs are set by whoever completes the sums: `InfoNCESweep`, or joint.py.
    """

    can_reuse_logits = True

    def __init__(self, tiles: SimilarityTiles, *, columns: bool, hardness: Hardness | None = None) -> None:
        super().__init__(tiles)
        self.reach = "batch" if columns else "row"
        self.hardness = hardness
        # Hardness adds to logits, which may then pass the bound.
        self.is_bounded = tiles.largest_logit <= BOUNDED_LOGIT and hardness is None
        like, num_prefixes, cell_map = tiles.zeros(), tiles.num_prefixes, tiles.cell_map
        self.rows = LogSumExp.empty(num_prefixes, cell_map.num_rows, like=like, bounded=self.is_bounded)
        self.columns: LogSumExp | None = None
        if columns:
            self.columns = LogSumExp.empty(num_prefixes, cell_map.num_columns, like=like, bounded=self.is_bounded)
        self.positives_KP = tiles.zeros(num_prefixes, len(cell_map.pair_rows))  # logits of the positive pairs
        # Known once the sums are complete:
        self.row_shifts_KQ = tiles.zeros(num_prefixes, cell_map.num_rows)
        self.column_shifts_KD: Tensor | None = None
        self.pair_slopes_KP = torch.zeros_like(self.positives_KP)

    def collect(self, part: TileLogits) -> None:
        """Add a tile to the sums.

        Overwrites `logits_RC`: with exp(logits) where they are bounded, else with the logits after hardness. `slopes`
        may go on from it (`is_collected`).
        """
        logits_RC, tile, prefix = part.logits_RC, part.tile, part.prefix
        self.positives_KP[prefix, tile.pairs] = part.positives_P
        if self.is_bounded:  # one exponential per cell serves rows, columns and, where it is kept, the slopes
            exps_RC = logits_RC.exp_()
            self.rows.sum[prefix, tile.rows] += exps_RC.sum(1)
            if self.columns is not None:
                self.columns.sum[prefix, tile.columns] += exps_RC.sum(0)
            return
        scratch_RC = self.tiles.scratch("scratch", tile.shape)
        # Columns before hardness: the negatives of a query weigh more, those of a document don't.
        if self.columns is not None:
            self.columns.add_logits((prefix, tile.columns), logits_RC, dim=0, scratch_RC=scratch_RC)
        if self.hardness is not None:
            self.hardness.weigh_negatives_(logits_RC, tile, self.tiles.scale)
        self.rows.add_logits((prefix, tile.rows), logits_RC, dim=1, scratch_RC=scratch_RC)

    def slopes(self, part: TileLogits) -> Tensor:
        """Turn logits into exp(logit + shift), summed over both directions, and return the slopes of the positives.

        Positives and masked cells are -inf, which becomes 0.
        """
        matrix_RC, tile, prefix = part.logits_RC, part.tile, part.prefix
        pair_slopes_P = self.pair_slopes_KP[prefix, tile.pairs]
        row_shifts_R1 = self.row_shifts_KQ[prefix, tile.rows, None]
        column_shifts_C = None if self.column_shifts_KD is None else self.column_shifts_KD[prefix, tile.columns]
        if self.is_bounded:  # exp(l + r) + exp(l + c) = exp(l) (exp(r) + exp(c)): no further exponential of a matrix
            if not part.is_collected:
                matrix_RC.exp_()
            if column_shifts_C is None:
                matrix_RC.mul_(row_shifts_R1.exp())
            else:
                factors_RC = self.tiles.scratch("scratch", tile.shape)
                matrix_RC.mul_(torch.add(row_shifts_R1.exp(), column_shifts_C.exp(), out=factors_RC))
            return pair_slopes_P
        column_slopes_RC = None
        if column_shifts_C is not None:
            # Before hardness, which weighs negatives of queries alone. A collected matrix, where it is applied already,
            # never gets here with columns: both directions have reach "batch", which computes logits anew.
            scratch_RC = self.tiles.scratch("scratch", tile.shape)
            column_slopes_RC = torch.add(matrix_RC, column_shifts_C, out=scratch_RC).exp_()
        if self.hardness is not None and not part.is_collected:
            self.hardness.weigh_negatives_(matrix_RC, tile, self.tiles.scale)
        matrix_RC.add_(row_shifts_R1).exp_()
        if column_slopes_RC is not None:
            matrix_RC.add_(column_slopes_RC)
        return pair_slopes_P


class InfoNCESweep(SoftmaxSweep):
    """InfoNCE of one batch in one direction or both."""

    def __init__(self, loss: SoftmaxLoss, batch: StreamedBatch, tiles: SimilarityTiles) -> None:
        super().__init__(tiles, columns=loss.bidirectional, hardness=loss.hardness)
        structure = batch.structure
        direction_share = 0.5 if loss.bidirectional else 1.0
        self.focal_gamma = loss.focal_gamma
        self.row_weights_KQ = loss.query_weights(batch, tiles, direction_share)
        self.counts_Q: Tensor | None = None  # positives of each query, where each has a loss of its own
        self.counts_D: Tensor | None = None  # the same of each document
        if loss.positives_apart:
            counts_Q, counts_D = (to_device(side.to(tiles.dtype), tiles.device) for side in positive_counts(structure))
            self.counts_Q, self.counts_D = counts_Q[batch.rows], counts_D
        if loss.bidirectional:
            self.column_weights_KD = loss.weights_of(direction_share * document_shares(structure), tiles)
            self.rank_share = share_of(structure, batch.queries)

    def complete(self, rows: slice, merged: Statistics | None = None) -> None:
        """Turn the sums of some rows, and those of all columns, into loss, shifts and the slopes of the positives."""
        cell_map = self.tiles.cell_map
        pairs = cell_map.pairs_of(rows)
        logits_KP, rows_P = self.positives_KP[:, pairs], cell_map.pair_rows[pairs] - rows.start
        line_loss, pair_loss, shifts_KR, slopes_KP = self._terms(
            self.rows[:, rows],
            LogSumExp.scattered(logits_KP, rows_P, rows.stop - rows.start),  # a rank has all pairs of its rows
            logits_KP,
            rows_P,
            self.row_weights_KQ[:, rows],
            None if self.counts_Q is None else self.counts_Q[rows],
        )
        self.loss += line_loss + pair_loss
        self.row_shifts_KQ[:, rows] = shifts_KR
        self.pair_slopes_KP[:, pairs] = slopes_KP
        if merged is None or merged.columns is None:
            return
        negatives, positives = merged.columns[0], merged.columns[1]  # as `statistics_to_merge` stacks them
        line_loss, pair_loss, self.column_shifts_KD, slopes_KP = self._terms(
            negatives, positives, self.positives_KP, cell_map.pair_columns, self.column_weights_KD, self.counts_D
        )
        self.loss += line_loss * self.rank_share + pair_loss  # `line_loss` is equal on every rank
        self.pair_slopes_KP += slopes_KP

    def _terms(
        self,
        negatives: LogSumExp,
        positives: LogSumExp,
        logits_KP: Tensor,
        lines_P: Tensor,
        weights_KL: Tensor,
        counts_L: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return loss of lines, loss of pairs, shifts and slopes by the formula that the loss asks for."""
        n_KL, p_KL = negatives.value(), positives.value()
        if counts_L is None:
            return terms_of_summed_positives(n_KL, p_KL, logits_KP, lines_P, weights_KL, self.focal_gamma)
        return terms_of_single_positives(n_KL, p_KL, logits_KP, lines_P, weights_KL, counts_L)


# The formulas of the docstring, for lines whose sums are complete -----------------------------------------------------


def terms_of_summed_positives(
    n_KL: Tensor, p_KL: Tensor, logits_KP: Tensor, lines_P: Tensor, weights_KL: Tensor, focal_gamma: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, shifts and slopes of lines with one loss for all of their positives, softplus(n - p).

    Args:
        n_KL: Log-sum-exp over the negatives of each line, on all ranks.
        p_KL: The same over its positives; -inf where it has none, and then it adds nothing.
        logits_KP: Logits of this rank's positive pairs.
        lines_P: Line of each of these pairs.
        weights_KL: Weight of each line in the loss.
        focal_gamma: Exponent of the negatives' share of a line, by which it is weighed; not differentiated.

    Returns:
        The part of the loss that follows from whole lines: equal on every rank for columns. The part that is a sum over
        this rank's pairs, to be added on each rank: 0 here. The shifts (K, L). The slopes of the pairs (K, P).
    """
    weights_KL, gap_KL, _, shifts_KL = line_terms(n_KL, p_KL, weights_KL, focal_gamma)
    line_loss = (-logsigmoid(-gap_KL) * weights_KL).sum()
    shares_KP = (logits_KP - p_KL[:, lines_P]).exp()  # of each positive in the sum over its line's positives
    slopes_KP = -weights_KL[:, lines_P] * shares_KP * gap_KL[:, lines_P].sigmoid()
    return line_loss, line_loss.new_zeros(()), shifts_KL, slopes_KP


def terms_of_single_positives(
    n_KL: Tensor, p_KL: Tensor, logits_KP: Tensor, lines_P: Tensor, weights_KL: Tensor, counts_L: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same of lines whose loss is the mean over positives of log-sum-exp of all - logit of the positive.

    Args:
        counts_L: Positives of each line on all ranks; the others are those of `terms_of_summed_positives`.
    """
    _, _, total_KL, shifts_KL = line_terms(n_KL, p_KL, weights_KL)
    line_loss = torch.where(p_KL == -math.inf, 0.0, total_KL * weights_KL).sum()
    weights_KP = weights_KL[:, lines_P]
    pair_weights_KP = weights_KP / counts_L[lines_P]
    pair_loss = -(pair_weights_KP * logits_KP).sum()
    slopes_KP = weights_KP * (logits_KP - total_KL[:, lines_P]).exp() - pair_weights_KP
    return line_loss, pair_loss, shifts_KL, slopes_KP


def line_terms(
    n_KL: Tensor, p_KL: Tensor, weights_KL: Tensor, focal_gamma: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weights with the focal factor, the gaps n - p, the log-sum-exps of all, and the shifts, each (K, L).

    Gap and shift are -inf where a line has no positives: its loss and its slopes become 0 without a branch.
    """
    has_positives_KL = p_KL != -math.inf  # true for NaN, so that it reaches the loss
    gap_KL = torch.where(has_positives_KL, n_KL - p_KL, -math.inf)
    if focal_gamma:
        # sigmoid(n - p) = 1 - (share of the positives), without the cancellation of 1 - share.
        weights_KL = weights_KL * gap_KL.sigmoid().pow(focal_gamma)
    total_KL = torch.logaddexp(n_KL, p_KL)
    shifts_KL = torch.where(has_positives_KL, weights_KL.log() - total_KL, -math.inf)
    return weights_KL, gap_KL, total_KL, shifts_KL
