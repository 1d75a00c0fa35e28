"""What a softmax over tiles takes: sums of exponentials, the terms of one direction, the slopes of a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from vembed.losses.statistics import LogSumExp, Statistics
from vembed.losses.tiles import BOUNDED_LOGIT

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.cells import Tile
    from vembed.losses.tiles import SimilarityTiles


class Sums:
    """The sums of a sweep, as they grow."""

    def __init__(self, tiles: SimilarityTiles, *, columns: bool) -> None:
        self.tiles, self._cells = tiles, tiles.cells
        self.bounded = tiles.largest_logit <= BOUNDED_LOGIT
        self.rows = self._empty(self._cells.num_rows)
        self.columns = self._empty(self._cells.num_columns) if columns else None
        self.positive_logits_KP = tiles.zeros(tiles.num_prefixes, len(self._cells.pair_rows))

    def _empty(self, count: int) -> LogSumExp:
        return LogSumExp.empty(self.tiles.num_prefixes, count, like=self.tiles.zeros(), bounded=self.bounded)

    def add(self, prefix: int, tile: Tile, logits_RC: Tensor) -> None:
        """Add a tile. It comes out with -inf where it is excluded, or all of it exponentiated when bounded."""
        cells = logits_RC.view(-1)
        self.positive_logits_KP[prefix, tile.pairs] = cells[tile.pair_cells]
        self.tiles.exclude(prefix, tile, logits_RC)
        if self.bounded:
            logits_RC.exp_()
        for sums, where, dim in ((self.rows, tile.rows, 1), (self.columns, tile.columns, 0)):
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

    loss: Tensor  # its weighted sum
    # What to add to a logit so that its exponential is the gradient; -inf where a group doesn't count
    shifts_KG: Tensor
    pair_gradients_KP: Tensor  # gradient of each positive pair's logit


def terms(negatives: LogSumExp, positives: LogSumExp, pairs: tuple[Tensor, Tensor], weights_KG: Tensor) -> Terms:
    """Return the loss of one direction and its slopes.

    Args:
        negatives: Sums over the negatives of each group, (K, G).
        positives: Sums over its positives, (K, G). A group without any doesn't count.
        pairs: Logits (K, P) and groups (P,) of this rank's positive pairs.
        weights_KG: How much each group counts.
    """
    n_KG, p_KG = negatives.value(), positives.value()
    counts_KG = p_KG != -math.inf  # NaN counts, so that it reaches the loss
    gap_KG = torch.where(counts_KG, n_KG - p_KG, -math.inf)
    logits_KP, groups_P = pairs
    of_pairs_KP = (logits_KP - p_KG[:, groups_P]).exp() * gap_KG[:, groups_P].sigmoid()
    return Terms(
        loss=(-logsigmoid(-gap_KG) * weights_KG).sum(),
        shifts_KG=torch.where(counts_KG, weights_KG.log() - torch.logaddexp(n_KG, p_KG), -math.inf),
        pair_gradients_KP=-weights_KG[:, groups_P] * of_pairs_KP,
    )


@dataclass(frozen=True, slots=True)
class Slopes:
    """What turns the logits of one tile into their gradients."""

    row_shifts_R: Tensor  # shift of each row
    column_shifts_C: Tensor | None  # shift of each column; None with one direction
    pair_gradients_P: Tensor  # gradients of the positive cells

    def apply(self, tiles: SimilarityTiles, tile: Tile, matrix_RC: Tensor, *, exponentials: bool) -> None:
        """Turn a tile into dL/dlogits, in place.

        Args:
            matrix_RC: Its logits, -inf where excluded, or their exponentials.
        """
        rows_R1, columns_C = self.row_shifts_R[:, None], self.column_shifts_C
        if exponentials and columns_C is None:
            matrix_RC.mul_(rows_R1.exp())
        elif exponentials and columns_C is not None:
            matrix_RC.mul_(torch.add(rows_R1.exp(), columns_C.exp(), out=tiles.room("scratch", tile.shape)))
        elif columns_C is None:
            matrix_RC.add_(rows_R1).exp_()
        else:
            by_column_RC = torch.add(matrix_RC, columns_C, out=tiles.room("scratch", tile.shape)).exp_()
            matrix_RC.add_(rows_R1).exp_().add_(by_column_RC)
        matrix_RC.view(-1)[tile.pair_cells] = self.pair_gradients_P
