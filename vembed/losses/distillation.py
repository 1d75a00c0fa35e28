"""A teacher's similarities as soft labels of the whole batch, mixed with InfoNCE.

    L = alpha L_infonce + (1 - alpha) L_teacher
    kl:   L_teacher = max(1, t)^2 mean over i of KL(softmax over j of T_ij / t || softmax over j of S_ij / t)
    mse:  L_teacher = mean over i, j of (S_ij - T_ij)^2

S are the model's similarities of queries and all documents, T those of the teacher's vectors, t is
distillation_temperature. Every cell counts: the teacher judges copies and false negatives itself. The factor keeps
gradients of temperatures over 1 as large as those of 1.

Both matrices are made tile by tile. One rank has all columns of its rows, so that the sums of both softmaxes are
complete after the tiles of a row block, which are then computed again for the slopes (softmax(S / t) - softmax(T / t)).

Source: Hinton et al., 2015, "Distilling the Knowledge in a Neural Network".
Shape legend: Q queries of this rank, D documents of all, R x C cells of a tile, K prefixes, T dims of the teacher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import torch

from vembed.device import to_device
from vembed.losses.base import query_shares
from vembed.losses.combined import SumLoss
from vembed.losses.infonce import InfoNCE
from vembed.losses.streamed import CellLoss, LogSumExp, Sweep
from vembed.losses.tiles import DEFAULT_TILE_SIZE, Prefixes, weighted_similarities

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.cells import Tile
    from vembed.losses.keys import DistillationKeys
    from vembed.losses.streamed import Statistics, StreamedBatch, TileLogits
    from vembed.losses.tiles import SimilarityTiles


class TeacherLoss(CellLoss):
    """Distance of the similarities of the batch from a teacher's."""

    def __init__(
        self,
        *,
        kind: Literal["kl", "mse"] = "kl",
        temperature: float = 0.05,
        prefixes: Prefixes | None = None,
        tile_size: int = DEFAULT_TILE_SIZE,
    ) -> None:
        super().__init__(mask_false_negatives=False, prefixes=prefixes, tile_size=tile_size)
        self.kind = kind
        self.divisor = temperature if kind == "kl" else 1.0
        self.factor = max(1.0, self.divisor) ** 2

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss over the whole matrices."""
        teacher_QT, teacher_DT = (side.to(q_QE.dtype) for side in _teacher(structure))
        teacher_QD = teacher_QT @ teacher_DT.T / self.divisor
        shares_Q, losses = query_shares(structure).to(q_QE.dtype), []
        for weight, similarity_QD in weighted_similarities(q_QE, d_DE, self.prefixes):
            logits_QD = similarity_QD / self.divisor
            if self.kind == "kl":
                log_t, log_s = teacher_QD.log_softmax(dim=1), logits_QD.log_softmax(dim=1)
                terms_Q = self.factor * (log_t.exp() * (log_t - log_s)).sum(1)
            else:
                terms_Q = (logits_QD - teacher_QD).square().mean(1)
            losses.append(weight * (shares_Q * terms_Q).sum())
        return torch.stack(losses).sum()

    def sweep(self, batch: StreamedBatch) -> Sweep:
        """Begin the sums of a batch."""
        tiles = self.make_tiles(batch, scale=1 / self.divisor)
        kind = KLSweep if self.kind == "kl" else SquaredErrorSweep
        return kind(tiles, batch, self.query_weights(batch, tiles, self.factor), self.divisor)


class SquaredErrorSweep(Sweep):
    """Squared differences from a teacher's similarities, cell by cell."""

    every_cell = True

    def __init__(self, tiles: SimilarityTiles, batch: StreamedBatch, weights_KQ: Tensor, divisor: float) -> None:
        super().__init__(tiles)
        teacher_Q, self.teacher_DT = (to_device(side, tiles.device) for side in _teacher(batch.structure))
        self.teacher_QT = teacher_Q[batch.rows]
        self.weights_KQ, self.divisor = weights_KQ, divisor

    def targets(self, tile: Tile) -> Tensor:
        """Return the teacher's similarities of a tile over the temperature (R, C), in memory of their own."""
        dtype = self.tiles.dtype
        rows_RT, columns_CT = self.teacher_QT[tile.rows].to(dtype), self.teacher_DT[tile.columns].to(dtype)
        return torch.mm(rows_RT, columns_CT.T, out=self.tiles.scratch("teacher", tile.shape)).div_(self.divisor)

    def slopes(self, part: TileLogits) -> None:
        """Add (S - T)^2 of a tile, and turn its logits into 2 (S - T), times the weight of a cell."""
        # The mean over documents is in the weight: a cell's is that of its query over the number of columns.
        errors_RC = part.logits_RC.sub_(self.targets(part.tile))
        weights_R1 = self.weights_KQ[part.prefix, part.tile.rows, None] / self.tiles.cell_map.num_columns
        self.loss += (errors_RC.square() * weights_R1).sum()
        errors_RC.mul_(2 * weights_R1)


class KLSweep(SquaredErrorSweep):
    """Divergence of the softmax of a row from the teacher's."""

    reach = "row"

    def __init__(self, tiles: SimilarityTiles, batch: StreamedBatch, weights_KQ: Tensor, divisor: float) -> None:
        super().__init__(tiles, batch, weights_KQ, divisor)
        count, like = tiles.cell_map.num_rows, tiles.zeros()
        self.teacher_rows = LogSumExp.empty(1, count, like=like, bounded=False)
        self.rows = LogSumExp.empty(tiles.num_prefixes, count, like=like, bounded=False)
        self.teacher_totals_Q, self.totals_KQ = tiles.zeros(count), tiles.zeros(tiles.num_prefixes, count)

    def collect(self, part: TileLogits) -> None:
        """Add a tile of both matrices to the sums of their rows."""
        tile, scratch_RC = part.tile, self.tiles.scratch("scratch", part.tile.shape)
        if part.prefix == 0:  # the teacher's rows are the same for all prefixes
            self.teacher_rows.add_logits((0, tile.rows), self.targets(tile), dim=1, scratch_RC=scratch_RC)
        self.rows.add_logits((part.prefix, tile.rows), part.logits_RC, dim=1, scratch_RC=scratch_RC)

    def complete(self, rows: slice, merged: Statistics | None = None) -> None:  # noqa: ARG002
        """Take the logarithm of the sums of some rows."""
        self.teacher_totals_Q[rows] = self.teacher_rows[0, rows].value()
        self.totals_KQ[:, rows] = self.rows[:, rows].value()

    def slopes(self, part: TileLogits) -> None:
        """Add t (log t - log s) of a tile, and turn its logits into s - t, times the weight of the row."""
        log_s_RC, tile = part.logits_RC, part.tile
        weights_R1 = self.weights_KQ[part.prefix, tile.rows, None]
        log_t_RC = self.targets(tile).sub_(self.teacher_totals_Q[tile.rows, None])
        log_s_RC.sub_(self.totals_KQ[part.prefix, tile.rows, None])
        terms_RC = torch.sub(log_t_RC, log_s_RC, out=self.tiles.scratch("scratch", tile.shape))
        # In place from here on: log t becomes t in the teacher's memory, log s the slope in that of the logits.
        t_RC = log_t_RC.exp_()
        self.loss += terms_RC.mul_(t_RC).mul_(weights_R1).sum()
        log_s_RC.exp_().sub_(t_RC).mul_(weights_R1)


class DistillationLoss(SumLoss):
    """InfoNCE, and similarities of the batch as those of teacher_model_name."""

    @classmethod
    def from_keys(cls, keys: DistillationKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        teacher = TeacherLoss(
            kind=keys.distillation_loss_type,
            temperature=keys.distillation_temperature,
            prefixes=Prefixes.of_keys(keys),
            tile_size=common.tile_size,
        )
        alpha = keys.distillation_alpha
        parts = [(alpha, InfoNCE.from_keys(keys, common)), (1 - alpha, teacher)]
        # A part without weight would still cost its sweeps.
        return cls([(weight, part) for weight, part in parts if weight > 0])


def _teacher(structure: BatchStructure) -> tuple[Tensor, Tensor]:
    """Return the teacher's vectors of queries and documents.

    Raises:
        ValueError: The batch has none.
    """
    if structure.teacher_Q is None or structure.teacher_D is None:
        raise ValueError("loss_type distillation needs a teacher's vectors, and this batch has none")
    return structure.teacher_Q, structure.teacher_D
