"""InfoNCE over in-batch negatives and hard negatives, with one or several positives per query.

Query to document, for each query i with positives P(i) and the documents N(i) that are neither positive nor masked:

    L_i = -log( sum over j in P(i) of exp(s S_ij)  /  sum over j in P(i) and N(i) of exp(s S_ij) )

S is the matrix of similarities, s the logit scale (1 / temperature). Hard negatives are documents like any other: they
join the in-batch negatives of every query. Document to query is the same over the columns of the documents that are
some query's positive; bidirectional training averages both. `supcon` gives each positive of a query a loss of its own
and averages them.

Streamed, with the log-sum-exps p_i over positives and n_i over negatives, L_i = softplus(n_i - p_i) and

    dL_i/d(s S_ij) = exp(s S_ij - log(e^p_i + e^n_i))                    for a negative,
                   = -exp(s S_ij - p_i) sigmoid(n_i - p_i)               for a positive,

which keeps its digits where p_i is far above n_i: 1 - softmax would cancel. Both directions come from the same tiles
in two sweeps, 4 products of Q x D x E. In one direction the rows of a block are complete after its last tile, so that
its logits are kept and the fourth product is saved (streamed.py, reach "row").

Source: van den Oord et al., 2018, "Representation Learning with Contrastive Predictive Coding"; the two directions as
in Radford et al., 2021 (CLIP); a sum over positives inside the logarithm as in Miech et al., 2020 (MIL-NCE); each
positive by itself as in Khosla et al., 2020, "Supervised Contrastive Learning".
Shape legend: Q queries of this rank, D documents of all ranks, K prefixes, R x C cells of a tile, P positive pairs,
G groups (rows or columns).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from vembed.device import to_device
from vembed.losses.base import document_shares, positive_counts, query_shares, share_of
from vembed.losses.cells import CellMap, named_mask, positive_mask
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


# Sums and slopes of tiles ---------------------------------------------------------------------------------------------


class Hardness(NamedTuple):
    """Factor exp(strength S) on some of a query's negatives; it isn't differentiated."""

    mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"]  # hard negatives: those of the query's row
    strength: float

    def penalties(self, similarity_QD: Tensor, structure: BatchStructure) -> Tensor:
        """Return what is added to the logits (Q, D) of a whole batch, positives aside: the definition."""
        named_QD = named_mask(structure)
        counts_QD = {
            "in_batch_negatives": ~named_QD,
            "hard_negatives": named_QD,
            "all_negatives": torch.ones_like(named_QD),
        }[self.mode]
        return self.strength * similarity_QD.detach() * counts_QD

    def raise_(self, logits_RC: Tensor, tile: Tile, scale: float) -> None:
        """Add strength S to the logits s S of a tile's negatives, in place."""
        factor, cells = 1.0 + self.strength / scale, logits_RC.view(-1)  # (s + strength) S from s S: one multiplication
        named_N = cells[tile.named]  # a copy, which is put back where all others are raised
        if self.mode == "hard_negatives":
            cells[tile.named] = named_N * factor
            return
        logits_RC.mul_(factor)
        if self.mode == "in_batch_negatives":
            cells[tile.named] = named_N


class SoftmaxSweep(Sweep):
    """Sums of exponentials over rows, and columns, and the slopes exp(logit + shift of the row, or column).

    The shifts and the slopes of the positive pairs are set by whoever completes the sums.
    """

    takes_kept_logits = True

    def __init__(self, tiles: SimilarityTiles, *, columns: bool, hardness: Hardness | None = None) -> None:
        super().__init__(tiles)
        self.reach = "batch" if columns else "row"
        self.hardness = hardness
        self.is_bounded = tiles.largest_logit <= BOUNDED_LOGIT and hardness is None
        like, num_prefixes, cells = tiles.zeros(), tiles.num_prefixes, tiles.cells
        self.rows = LogSumExp.empty(num_prefixes, cells.num_rows, like=like, bounded=self.is_bounded)
        self.columns: LogSumExp | None = None
        if columns:
            self.columns = LogSumExp.empty(num_prefixes, cells.num_columns, like=like, bounded=self.is_bounded)
        self.positives_KP = tiles.zeros(num_prefixes, len(cells.pair_rows))
        self.row_shifts_KQ = tiles.zeros(num_prefixes, cells.num_rows)
        self.column_shifts_KD: Tensor | None = None
        self.pair_slopes_KP = torch.zeros_like(self.positives_KP)

    def collect(self, part: TileLogits) -> None:
        """Add a tile to the sums. The matrix becomes its exponentials, or the raised logits where they may overflow."""
        matrix_RC, tile, prefix = part.logits_RC, part.tile, part.prefix
        self.positives_KP[prefix, tile.pairs] = part.positives_P
        if self.is_bounded:  # one exponential per cell serves rows, columns and, where it is kept, the slopes
            matrix_RC.exp_()
            self.rows.sum[prefix, tile.rows] += matrix_RC.sum(1)
            if self.columns is not None:
                self.columns.sum[prefix, tile.columns] += matrix_RC.sum(0)
            return
        scratch_RC = self.tiles.scratch("scratch", tile.shape)
        if self.columns is not None:
            self.columns.add_logits((prefix, tile.columns), matrix_RC, dim=0, scratch_RC=scratch_RC)
        if self.hardness is not None:  # the negatives of a query weigh more, those of a document don't
            self.hardness.raise_(matrix_RC, tile, self.tiles.scale)
        self.rows.add_logits((prefix, tile.rows), matrix_RC, dim=1, scratch_RC=scratch_RC)

    def slopes(self, part: TileLogits) -> Tensor:
        """Turn logits into exp(logit + shift), summed over both directions; -inf becomes 0."""
        matrix_RC, tile, prefix = part.logits_RC, part.tile, part.prefix
        rows_R1 = self.row_shifts_KQ[prefix, tile.rows, None]
        columns_C = None if self.column_shifts_KD is None else self.column_shifts_KD[prefix, tile.columns]
        if self.is_bounded:  # exp(l + r) + exp(l + c) = exp(l) (exp(r) + exp(c)): no further exponential of a matrix
            if not part.is_collected:
                matrix_RC.exp_()
            if columns_C is None:
                matrix_RC.mul_(rows_R1.exp())
            else:
                factors_RC = self.tiles.scratch("scratch", tile.shape)
                matrix_RC.mul_(torch.add(rows_R1.exp(), columns_C.exp(), out=factors_RC))
            return self.pair_slopes_KP[prefix, tile.pairs]
        by_column_RC = None
        if columns_C is not None:
            # Before hardness raises the logits: it weighs negatives of queries alone.
            by_column_RC = torch.add(matrix_RC, columns_C, out=self.tiles.scratch("scratch", tile.shape)).exp_()
        if self.hardness is not None and not part.is_collected:
            self.hardness.raise_(matrix_RC, tile, self.tiles.scale)
        matrix_RC.add_(rows_R1).exp_()
        if by_column_RC is not None:
            matrix_RC.add_(by_column_RC)
        return self.pair_slopes_KP[prefix, tile.pairs]


def softmax_terms(
    negatives: LogSumExp,
    logits_KP: Tensor,
    groups_P: Tensor,
    weights_KG: Tensor,
    *,
    positives: LogSumExp | None = None,
    focal_gamma: float = 0.0,
    counts_G: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the softmax terms of one direction.

    Args:
        negatives: Sums over the negatives of each group, (K, G).
        logits_KP: Logits of this rank's positive pairs.
        groups_P: Their groups.
        weights_KG: Weight of each group in the loss.
        positives: Sums over the positives of each group on all ranks, (K, G); None: these pairs are all there are. A
            group without any doesn't count.
        focal_gamma: Exponent of the negatives' share of a group, by which the group is weighed; not differentiated.
        counts_G: Positives of each group on all ranks, for the mean of their losses; None takes them together.

    Returns:
        The loss as a weighted sum over the groups; what this rank's positive pairs add to it, where each positive has a
        loss of its own; the shifts (K, G): a negative's slope is exp(logit + shift), -inf where a group doesn't count;
        and dL/dlogit of each positive pair, (K, P).
    """
    if positives is None:
        positives = LogSumExp.of_groups(logits_KP, groups_P, weights_KG.shape[1])
    n_KG, p_KG = negatives.value(), positives.value()
    counts_KG = p_KG != -math.inf  # NaN counts, so that it reaches the loss
    gap_KG = torch.where(counts_KG, n_KG - p_KG, -math.inf)
    if focal_gamma:  # sigmoid(n - p) is 1 - p without cancellation
        weights_KG = weights_KG * gap_KG.sigmoid().pow(focal_gamma)
    # The slope of a negative is weight * exp(logit) / (sum of all): one number for each group turns a whole tile into
    # slopes. -inf for groups that don't count becomes a slope of 0 without a branch.
    total_KG, weights_KP = torch.logaddexp(n_KG, p_KG), weights_KG[:, groups_P]
    shifts_KG = torch.where(counts_KG, weights_KG.log() - total_KG, -math.inf)
    if counts_G is None:
        loss = (-logsigmoid(-gap_KG) * weights_KG).sum()
        shares_KP = (logits_KP - p_KG[:, groups_P]).exp()  # of each positive in the sum over its group's positives
        return loss, loss.new_zeros(()), shifts_KG, -weights_KP * shares_KP * gap_KG[:, groups_P].sigmoid()
    # Mean over positives of (log-sum-exp of everything - logit): the first part is the group's and counts once on all
    # ranks together, the second is a sum over pairs, of which every rank adds its own.
    pair_weights_KP = weights_KP / counts_G[groups_P]
    loss = torch.where(counts_KG, total_KG * weights_KG, 0.0).sum()
    pair_loss = -(pair_weights_KP * logits_KP).sum()
    return loss, pair_loss, shifts_KG, weights_KP * (logits_KP - total_KG[:, groups_P]).exp() - pair_weights_KP


class InfoNCESweep(SoftmaxSweep):
    """InfoNCE of one batch in one direction or both."""

    def __init__(self, loss: SoftmaxLoss, batch: StreamedBatch, tiles: SimilarityTiles) -> None:
        super().__init__(tiles, columns=loss.bidirectional, hardness=loss.hardness)
        structure = batch.structure
        direction_share = 0.5 if loss.bidirectional else 1.0
        self.focal_gamma = loss.focal_gamma
        self.row_weights_KQ = loss.query_weights(batch, tiles, direction_share)
        self.counts_Q: Tensor | None = None  # positives of each query, where each has a loss
        self.counts_D: Tensor | None = None
        if loss.positives_apart:
            counts_Q, counts_D = (to_device(side.to(tiles.dtype), tiles.device) for side in positive_counts(structure))
            self.counts_Q, self.counts_D = counts_Q[batch.rows], counts_D
        if loss.bidirectional:
            self.column_weights_KD = loss.weights_of(direction_share * document_shares(structure), tiles)
            self.rank_share = share_of(structure, batch.queries)

    def complete(self, rows: slice, merged: Statistics | None = None) -> None:
        """Turn the sums of some rows, and those of all columns, into loss, shifts and the slopes of the positives."""
        cells = self.tiles.cells
        pairs = cells.pairs_of(rows)
        loss, pair_loss, shifts_KR, slopes_KP = softmax_terms(
            self.rows[:, rows],
            self.positives_KP[:, pairs],
            cells.pair_rows[pairs] - rows.start,
            self.row_weights_KQ[:, rows],
            focal_gamma=self.focal_gamma,
            counts_G=None if self.counts_Q is None else self.counts_Q[rows],
        )
        self.loss += loss + pair_loss
        self.row_shifts_KQ[:, rows] = shifts_KR
        self.pair_slopes_KP[:, pairs] = slopes_KP
        if merged is None or merged.columns is None:
            return
        loss, pair_loss, self.column_shifts_KD, slopes_KP = softmax_terms(
            merged.columns[0],
            self.positives_KP,
            cells.pair_columns,
            self.column_weights_KD,
            positives=merged.columns[1],
            focal_gamma=self.focal_gamma,
            counts_G=self.counts_D,
        )
        self.loss += loss * self.rank_share + pair_loss  # every rank has all of the columns' loss
        self.pair_slopes_KP += slopes_KP


# Losses ---------------------------------------------------------------------------------------------------------------


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
    """True gives each positive of a group a loss of its own, and takes their mean; False sums them in one logarithm."""

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
        log_scale = torch.tensor(math.log(1.0 / temperature), dtype=torch.promote_types(dtype, torch.float32))
        self.log_scale: Tensor
        self._fixed_temperature = None if learn_temperature else temperature
        if learn_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale, persistent=False)
        self.bidirectional, self.hardness, self.focal_gamma = bidirectional, hardness, focal_gamma

    def of_similarities(self, weighted: Iterable[tuple[float, Tensor]], structure: BatchStructure) -> Tensor:
        """Return the mean loss over queries, averaged with that over positive documents when bidirectional.

        Args:
            weighted: Whole matrices of similarities (Q, D), each with its weight.
        """
        positive_QD = positive_mask(structure)
        shares_Q, shares_D = query_shares(structure), document_shares(structure)
        losses = []
        for weight, similarity_QD in weighted:
            masked_QD = self.masked(structure, similarity_QD, positive_QD)
            logits_QD = (similarity_QD * self.log_scale.exp()).masked_fill(masked_QD, -math.inf)
            raised_QD = logits_QD
            if self.hardness is not None:
                penalties_QD = self.hardness.penalties(similarity_QD, structure)
                raised_QD = logits_QD + penalties_QD.masked_fill(positive_QD, 0.0)
            loss = self._direction(raised_QD, positive_QD, shares_Q)
            if self.bidirectional:
                loss = (loss + self._direction(logits_QD.T, positive_QD.T, shares_D)) / 2
            losses.append(weight * loss)
        return torch.stack(losses).sum()

    def _direction(self, logits_RC: Tensor, positive_RC: Tensor, shares_R: Tensor) -> Tensor:
        """Return the mean over rows of log-sum-exp over all columns minus that over the positive ones.

        A row without positives counts 0.
        """
        counted_R = positive_RC.any(dim=1)
        logits, positive = logits_RC[counted_R], positive_RC[counted_R]
        of_positives = logits.masked_fill(~positive, -math.inf).logsumexp(dim=1)
        if self.positives_apart:
            of_positives = logits.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1)
        losses = logits.logsumexp(dim=1) - of_positives
        if self.focal_gamma:
            losses = losses * (-torch.expm1(-losses.detach())).pow(self.focal_gamma)
        return (losses * shares_R[counted_R].to(losses.dtype)).sum()

    @property
    def needs_statistics(self) -> bool:
        """Columns need the sums of all ranks' queries, rows only those of their block."""
        return self.bidirectional

    def sweep(self, batch: StreamedBatch) -> InfoNCESweep:
        """Begin the sums of a batch."""
        return InfoNCESweep(self, batch, self.scaled_tiles(batch))

    def shared(self, sweep: SoftmaxSweep) -> Statistics:
        """Return the sums over each document's negatives and over its positives, (2, K, D)."""
        assert sweep.columns is not None
        cells = sweep.tiles.cells
        positives = LogSumExp.of_groups(sweep.positives_KP, cells.pair_columns, cells.num_columns)
        return Statistics(sweep, LogSumExp.stack([sweep.columns.without_idle_maxima(), positives]))

    def parameter_gradients(self, sweep: Sweep, scale_gradient: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the gradient of the log scale."""
        return {"log_scale": scale_gradient.to(self.log_scale.dtype)}

    def cells(self, batch: StreamedBatch) -> CellMap:
        """Return the positives, excluded cells and, with hardness, the negatives of the queries' rows."""
        return CellMap(
            batch.structure,
            batch.queries,
            mask_false_negatives=self.mask_false_negatives,
            device=batch.q_QE.device,
            with_named=self.hardness is not None,
        )

    def scaled_tiles(self, batch: StreamedBatch) -> SimilarityTiles:
        """Return the tiles of a batch; the scale and the bound of a logit are read from the device together."""
        # Prefixes are normalised, so that the scale alone bounds their logits.
        rows = () if self.prefixes is not None else (longest_row(batch.q_QE), longest_row(batch.d_DE))
        scale, *norms = read_numbers(self.log_scale.exp(), *rows)
        return self.tiles(batch, scale=scale, longest=math.prod(norms))

    @torch.no_grad()
    def constrain(self) -> None:
        """Clamp a learned logit scale to [1, 100]."""
        if isinstance(self.log_scale, nn.Parameter):
            self.log_scale.clamp_(math.log(MIN_LOGIT_SCALE), math.log(MAX_LOGIT_SCALE))

    @property
    def temperature(self) -> float:
        """1 / logit scale; a learned one is read from its device."""
        return math.exp(-self.log_scale.item()) if self._fixed_temperature is None else self._fixed_temperature


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
    def from_keys(cls, keys: InfoNCEKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        hardness = None
        if keys.hardness_mode != "none":
            hardness = Hardness(keys.hardness_mode, keys.hardness_strength)
        options = {**softmax_options(keys, common), "hardness": hardness, "focal_gamma": keys.focal_gamma}
        if keys.loss_directions is None:
            return cls(**options)
        from vembed.losses.joint import JointInfoNCE  # derived from this class

        return cast("Self", JointInfoNCE(directions=keys.loss_directions, **options))

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
