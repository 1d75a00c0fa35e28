"""What a softmax over tiles takes: sums of exponentials, the terms of one direction, the slopes of a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from vembed.losses.masks import named_mask
from vembed.losses.statistics import LogSumExp, Statistics
from vembed.losses.tiles import BOUNDED_LOGIT

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure
    from vembed.losses.cells import Tile
    from vembed.losses.tiles import SimilarityTiles


class Sums:
    """The sums of a sweep, as they grow."""

    def __init__(self, tiles: SimilarityTiles, *, columns: bool, hardness: Hardness | None = None) -> None:
        self.tiles, self._cells, self._hardness = tiles, tiles.cells, hardness
        self.bounded = tiles.largest_logit <= BOUNDED_LOGIT and hardness is None
        self.rows = self._empty(self._cells.num_rows)
        self.columns = self._empty(self._cells.num_columns) if columns else None
        self.positive_logits_KP = tiles.zeros(tiles.num_prefixes, len(self._cells.pair_rows))

    def _empty(self, count: int) -> LogSumExp:
        return LogSumExp.empty(self.tiles.num_prefixes, count, like=self.tiles.zeros(), bounded=self.bounded)

    def add(self, prefix: int, tile: Tile, logits_RC: Tensor) -> None:
        """Add a tile. It comes out with -inf where it is excluded and raised, or exponentiated when bounded."""
        cells = logits_RC.view(-1)
        self.positive_logits_KP[prefix, tile.pairs] = cells[tile.pair_cells]
        self.tiles.exclude(prefix, tile, logits_RC)
        if self.bounded:
            logits_RC.exp_()
        for sums, where, dim in ((self.columns, tile.columns, 0), (self.rows, tile.rows, 1)):
            if dim == 1 and self._hardness is not None:
                self._hardness.raised(logits_RC, tile, self.tiles.scale)
            if sums is None:
                continue
            if self.bounded:
                sums.sum[prefix, where] += logits_RC.sum(dim)
            else:
                scratch_RC = self.tiles.room("scratch", tile.shape)
                sums.add_logits((prefix, where), logits_RC, dim=dim, scratch_RC=scratch_RC)

    def finished(self) -> Statistics:
        """Return what ranks merge."""
        columns = None
        if self.columns is not None:
            cells = self._cells
            positives = LogSumExp.of_groups(self.positive_logits_KP, cells.pair_columns, cells.num_columns)
            columns = LogSumExp.stack([self.columns.without_idle_maxima(), positives])
        return Statistics(self.rows, columns, self.positive_logits_KP, self.tiles)


class Terms(NamedTuple):
    """What one direction comes to. A group is a row, or a column."""

    loss: Tensor  # its weighted sum, without what follows
    own_loss: Tensor  # what of it this rank's positive pairs add
    # What to add to a logit so that its exponential is the gradient; -inf where a group doesn't count
    shifts_KG: Tensor
    pair_gradients_KP: Tensor  # gradient of each positive pair's logit


def terms(
    negatives: LogSumExp,
    positives: LogSumExp,
    pairs: tuple[Tensor, Tensor],
    weights_KG: Tensor,
    *,
    focal_gamma: float = 0.0,
    counts_G: Tensor | None = None,
) -> Terms:
    """Return the loss of one direction and its slopes.

    Args:
        negatives: Sums over the negatives of each group, (K, G).
        positives: Sums over its positives, (K, G). A group without any doesn't count.
        pairs: Logits (K, P) and groups (P,) of this rank's positive pairs.
        weights_KG: How much each group counts.
        focal_gamma: Power of the share of the negatives that weighs each group, without a gradient.
        counts_G: Positives of each group on all ranks, for the mean of their losses; None takes them together.
    """
    n_KG, p_KG = negatives.value(), positives.value()
    counts_KG = p_KG != -math.inf  # NaN counts, so that it reaches the loss
    gap_KG = torch.where(counts_KG, n_KG - p_KG, -math.inf)
    if focal_gamma:
        weights_KG = weights_KG * gap_KG.sigmoid().pow(focal_gamma)
    logits_KP, groups_P = pairs
    total_KG, weights_KP = torch.logaddexp(n_KG, p_KG), weights_KG[:, groups_P]
    shifts_KG = torch.where(counts_KG, weights_KG.log() - total_KG, -math.inf)
    if counts_G is None:
        of_pairs_KP = (logits_KP - p_KG[:, groups_P]).exp() * gap_KG[:, groups_P].sigmoid()
        losses_KG = -logsigmoid(-gap_KG) * weights_KG
        return Terms(losses_KG.sum(), losses_KG.new_zeros(()), shifts_KG, -weights_KP * of_pairs_KP)
    each_KP = weights_KP / counts_G[groups_P]
    return Terms(
        loss=torch.where(counts_KG, total_KG * weights_KG, 0.0).sum(),
        own_loss=-(each_KP * logits_KP).sum(),
        shifts_KG=shifts_KG,
        pair_gradients_KP=weights_KP * (logits_KP - total_KG[:, groups_P]).exp() - each_KP,
    )


class Hardness(NamedTuple):
    """How much more a query's hard negatives count: exp(strength S) times, without a gradient of the factor."""

    mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"]  # hard negatives: those of its own row
    strength: float

    def raised(self, logits_RC: Tensor, tile: Tile, scale: float) -> Tensor:
        """Add strength S to the logits of a tile's negatives, in place, where it counts; the logits are scale S."""
        factor, cells = 1.0 + self.strength / scale, logits_RC.view(-1)
        named_N = cells[tile.named]
        if self.mode == "hard_negatives":
            cells[tile.named] = named_N * factor
            return logits_RC
        logits_RC.mul_(factor)
        if self.mode == "in_batch_negatives":
            cells[tile.named] = named_N
        return logits_RC

    def penalties(self, similarity_QD: Tensor, structure: BatchStructure) -> Tensor:
        """Return what is added to the logits (Q, D) of a whole batch, positives aside: the definition."""
        named_QD = named_mask(structure)
        counted_QD = {
            "in_batch_negatives": ~named_QD,
            "hard_negatives": named_QD,
            "all_negatives": torch.ones_like(named_QD),
        }[self.mode]
        return self.strength * similarity_QD.detach() * counted_QD


@dataclass(frozen=True, slots=True)
class Slopes:
    """What turns the logits of one tile into their gradients."""

    row_shifts_R: Tensor  # shift of each row
    column_shifts_C: Tensor | None  # shift of each column; None with one direction
    pair_gradients_P: Tensor  # gradients of the positive cells
    hardness: Hardness | None = None  # where the logits of rows are still to be raised

    def apply(self, tiles: SimilarityTiles, tile: Tile, matrix_RC: Tensor, *, exponentials: bool) -> None:
        """Turn a tile into dL/dlogits, in place.

        Args:
            matrix_RC: Its logits, -inf where excluded, or their exponentials.
        """
        rows_R1, columns_C = self.row_shifts_R[:, None], self.column_shifts_C
        by_column_RC = None
        if not exponentials and columns_C is not None:
            by_column_RC = torch.add(matrix_RC, columns_C, out=tiles.room("scratch", tile.shape)).exp_()
        if self.hardness is not None:
            self.hardness.raised(matrix_RC, tile, tiles.scale)
        if exponentials and columns_C is None:
            matrix_RC.mul_(rows_R1.exp())
        elif exponentials and columns_C is not None:
            matrix_RC.mul_(torch.add(rows_R1.exp(), columns_C.exp(), out=tiles.room("scratch", tile.shape)))
        else:
            matrix_RC.add_(rows_R1).exp_()
        if by_column_RC is not None:
            matrix_RC.add_(by_column_RC)
        matrix_RC.view(-1)[tile.pair_cells] = self.pair_gradients_P
