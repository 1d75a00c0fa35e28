"""A teacher's similarities as soft labels of the whole batch, mixed with InfoNCE.

    L = alpha L_infonce + (1 - alpha) L_teacher
    kl:   L_teacher = max(1, t)^2 mean over i of KL(softmax over j of T_ij / t || softmax over j of S_ij / t)
    mse:  L_teacher = mean over i, j of (S_ij - T_ij)^2

S are the model's similarities of queries and all documents, T those of the teacher's vectors, and t is
distillation_temperature.
Every cell counts: the teacher judges copies and false negatives itself. Both matrices are made tile by tile. Of a strip
of rows, which one rank has whole, the first sweep finds both softmaxes' sums and the second the slopes.

Source: Hinton et al., 2015, "Distilling the Knowledge in a Neural Network".
Shape legend: Q queries of this rank, D documents of all, R x C cells of a tile, K prefixes, T dims of the teacher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import torch

from vembed.losses.base import to_device
from vembed.losses.infonce import InfoNCE
from vembed.losses.prefixes import Prefixes, weighted_similarities
from vembed.losses.statistics import LogSumExp
from vembed.losses.streamed import LossGradients, StreamedLoss, empty_gradients
from vembed.losses.sum import SumLoss
from vembed.losses.tiles import DEFAULT_TILE_SIZE
from vembed.losses.weights import query_shares

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.cells import Tile
    from vembed.losses.facts.distillation import DistillationKeys
    from vembed.losses.statistics import Statistics
    from vembed.losses.streamed import StreamedBatch
    from vembed.losses.tiles import EmbeddingGradients, SimilarityTiles

Kind = Literal["kl", "mse"]


class TeacherLoss(StreamedLoss):
    """How far the similarities of the batch are from a teacher's."""

    def __init__(
        self,
        *,
        kind: Kind = "kl",
        temperature: float = 0.05,
        prefixes: Prefixes | None = None,
        tile_size: int = DEFAULT_TILE_SIZE,
    ) -> None:
        super().__init__(mask_false_negatives=False, prefixes=prefixes, tile_size=tile_size)
        self.kind = kind
        self.divisor = temperature if kind == "kl" else 1.0

    @property
    def factor(self) -> float:
        """What keeps gradients of temperatures over 1 as large as those of 1."""
        return max(1.0, self.divisor) ** 2

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss over the whole matrices."""
        teacher_QT, teacher_DT = (each.to(q_QE.dtype) for each in _teacher(structure))
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

    @torch.no_grad()
    def gradients(
        self,
        batch: StreamedBatch,
        statistics: Statistics | None = None,  # noqa: ARG002
        into: tuple[Tensor, Tensor] | None = None,
    ) -> LossGradients:
        """Return loss and gradients of this rank's queries."""
        tiles = self.tiles(batch, scale=1 / self.divisor)
        out, loss = empty_gradients(tiles, batch, into), tiles.zeros()
        teacher = tuple(to_device(each, tiles.device) for each in _teacher(batch.structure))
        sides = teacher[0][batch.queries.start : batch.queries.stop], teacher[1]
        weights_KQ = self.query_weights(batch, tiles, self.factor)
        for strip in tiles.strips():
            loss += self._strip(list(strip), tiles, sides, weights_KQ, out)
        tiles.finish(out)
        return LossGradients(loss, out.dq_QE, out.dd_DE, {})

    def _strip(
        self,
        strip: list[Tile],
        tiles: SimilarityTiles,
        sides: tuple[Tensor, Tensor],
        weights_KQ: Tensor,
        out: EmbeddingGradients,
    ) -> Tensor:
        """Add what the tiles of some rows give the gradients, and return their loss."""
        loss, rows = tiles.zeros(), strip[0].rows
        sums = LogSumExp.empty(1 + tiles.num_prefixes, rows.stop - rows.start, like=tiles.zeros(), bounded=False)
        for tile in strip if self.kind == "kl" else ():
            scratch_RC, targets_RC = tiles.room("scratch", tile.shape), self._targets(tile, tiles, sides)
            sums.add_logits((0, slice(None)), targets_RC, dim=1, scratch_RC=scratch_RC)
            for prefix, logits_RC in enumerate(tiles.logits(tile)):
                sums.add_logits((1 + prefix, slice(None)), logits_RC, dim=1, scratch_RC=scratch_RC)
        totals = sums.value() if self.kind == "kl" else sums.sum
        for tile in strip:

            def differentiate(prefix: int, logits_RC: Tensor, tile: Tile = tile) -> None:
                targets_RC, weights_R1 = self._targets(tile, tiles, sides), weights_KQ[prefix, rows, None]
                if self.kind == "kl":
                    targets_RC.sub_(totals[0, :, None])
                    logits_RC.sub_(totals[1 + prefix, :, None])
                    excess_RC = torch.sub(targets_RC, logits_RC, out=tiles.room("scratch", tile.shape))
                    loss.add_((excess_RC.mul_(targets_RC.exp_()).mul_(weights_R1)).sum())
                    logits_RC.exp_().sub_(targets_RC).mul_(weights_R1)
                    return
                logits_RC.sub_(targets_RC)
                each_R1 = weights_R1 / tiles.cells.num_columns
                loss.add_((logits_RC.square() * each_R1).sum())
                logits_RC.mul_(2 * each_R1)

            tiles.backward(tile, differentiate, out)
        return loss

    def _targets(self, tile: Tile, tiles: SimilarityTiles, sides: tuple[Tensor, Tensor]) -> Tensor:
        """Return the teacher's similarities of a tile over the temperature (R, C), in room of their own."""
        rows_RT, columns_CT = sides[0][tile.rows].to(tiles.dtype), sides[1][tile.columns].to(tiles.dtype)
        return torch.mm(rows_RT, columns_CT.T, out=tiles.room("teacher", tile.shape)).div_(self.divisor)


class DistillationLoss(SumLoss):
    """InfoNCE and a teacher's similarities, each with its share."""

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
        return cls([(weight, part) for weight, part in parts if weight > 0])


def _teacher(structure: BatchStructure) -> tuple[Tensor, Tensor]:
    """Return the teacher's vectors.

    Raises:
        ValueError: The batch has none.
    """
    if structure.teacher_Q is None or structure.teacher_D is None:
        raise ValueError("loss_type distillation needs a teacher's vectors, and this batch has none")
    return structure.teacher_Q, structure.teacher_D
