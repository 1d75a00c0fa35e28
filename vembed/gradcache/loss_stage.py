"""The loss between the two passes: from the embeddings of all ranks to the gradient of each.

One gather brings the embeddings of all ranks to every rank. Losses that stream share the work: each rank sweeps the
tiles of its part of the queries, what the columns need is merged in between, and one reduce-scatter adds the gradients
up and hands every rank those of its own rows. Any other loss is computed by every rank over the whole batch, by
autograd: nothing is left to add up. Either way the number of collectives depends on nothing.

Shape legend: V vectors of this rank, N of all ranks, E dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vembed.losses.base import MultiVectors
from vembed.losses.statistics import LogSumExp
from vembed.losses.streamed import StreamedBatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.row_assignment import RowAssignment
    from vembed.losses.base import BatchLoss, BatchStructure
    from vembed.losses.statistics import Statistics
    from vembed.losses.streamed import StreamedLoss


@dataclass(frozen=True, slots=True)
class LossResult:
    """Loss and gradients of one batch."""

    loss: Tensor  # of the batch of all ranks, a scalar on the device
    # of the queries whose loss this rank computed, a scalar on the device; all of them where it isn't shared out
    rank_loss: Tensor
    u_VE: Tensor  # its gradient with respect to this rank's embeddings, scaled
    own: dict[str, Tensor]  # gradients of the loss's own parameters over the whole batch, by name, not scaled
    largest: Tensor  # largest |z| of the batch, a scalar on the device


class LossStage:
    """Computes a loss over the embeddings of all ranks."""

    def __init__(self, loss: BatchLoss, ranks: Ranks) -> None:
        self.loss = loss
        self.ranks = ranks

    def run(
        self,
        z_VE: Tensor,
        structure: BatchStructure,
        assignment: RowAssignment,
        *,
        counts_N: NDArray[np.int64] | None = None,
        gradient_scale: float = 1.0,
    ) -> LossResult:
        """Return the loss and its gradients.

        Args:
            z_VE: This rank's embeddings, in the order of the assignment.
            assignment: Which vectors are whose.
            counts_N: Vectors of each row, where rows have several.
            gradient_scale: Factor on `u_VE`.
        """
        z_NE = self._gathered(z_VE, assignment)
        streamed = self.loss.streamed if structure.num_queries >= self.ranks.world_size else None
        if streamed is not None:
            loss, rank_loss, u_VE, own = self._streamed(streamed, z_NE, structure, assignment)
        else:
            loss, u_NE, own = self._by_autograd(z_NE, structure, counts_N)
            rank_loss, u_VE = loss, u_NE if self.ranks.is_one else u_NE[self._own(assignment, u_NE.device)]
        return LossResult(loss, rank_loss, u_VE.mul_(gradient_scale), own, z_NE.abs().max())

    def _gathered(self, z_VE: Tensor, assignment: RowAssignment) -> Tensor:
        """Return the embeddings of all ranks in the order of [queries; documents]."""
        if self.ranks.is_one:
            return z_VE
        z_NE = torch.empty(assignment.num_rows, z_VE.shape[1], dtype=z_VE.dtype, device=z_VE.device)
        z_NE[torch.from_numpy(assignment.rank_order).to(z_VE.device, non_blocking=True)] = self.ranks.gather_rows(
            z_VE, assignment.counts
        )
        return z_NE

    def _own(self, assignment: RowAssignment, device: torch.device) -> Tensor:
        return torch.from_numpy(assignment.slots[self.ranks.rank]).to(device, non_blocking=True)

    def _by_autograd(
        self, z_NE: Tensor, structure: BatchStructure, counts_N: NDArray[np.int64] | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        embeddings = z_NE.detach().requires_grad_()
        own = {name: parameter for name, parameter in self.loss.named_parameters() if parameter.requires_grad}
        structure = structure.to(z_NE.device)
        if counts_N is None:
            sides = embeddings[: structure.num_queries], embeddings[structure.num_queries :]
            loss = self.loss(*sides, structure)
        else:
            loss = self.loss(*MultiVectors.sides(embeddings, counts_N, structure.num_queries), structure)
        # A loss may leave a parameter of its own out of this batch: then its gradient is zero.
        u_NE, *found = torch.autograd.grad(loss, [embeddings, *own.values()], materialize_grads=True)
        found = [each.contiguous() for each in found]
        # Every rank has computed them, perhaps rounded otherwise: the loss's weights must stay bit-equal on all.
        self.ranks.copy_from_first(found)
        return loss.detach(), u_NE, dict(zip(own, found, strict=True))

    def _streamed(
        self, streamed: StreamedLoss, z_NE: Tensor, structure: BatchStructure, assignment: RowAssignment
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        num_queries, ranks = structure.num_queries, self.ranks
        first, stop = (num_queries * each // ranks.world_size for each in (ranks.rank, ranks.rank + 1))
        batch = StreamedBatch(z_NE[first:stop], z_NE[num_queries:], structure, first)
        statistics = self._merged(streamed.statistics(batch)) if streamed.needs_statistics else None
        u_NE = torch.empty_like(z_NE) if ranks.is_one else torch.zeros_like(z_NE)
        found = streamed.gradients(batch, statistics, (u_NE[first:stop], u_NE[num_queries:]))
        if ranks.is_one:
            return found.loss, found.loss, u_NE, found.own
        numbers = torch.cat([found.loss.reshape(1), *(own.flatten().to(z_NE.dtype) for own in found.own.values())])
        loss, *own = ranks.sum_(numbers).split([1, *(own.numel() for own in found.own.values())])
        summed = {
            name: total.view_as(part).to(part.dtype) for (name, part), total in zip(found.own.items(), own, strict=True)
        }
        order = torch.from_numpy(assignment.rank_order).to(z_NE.device, non_blocking=True)
        rank_loss = found.loss * (num_queries / (stop - first))  # it was divided by all queries
        return loss.squeeze(), rank_loss, ranks.sum_own_rows(u_NE[order], assignment.counts), summed

    def _merged(self, statistics: Statistics) -> Statistics:
        """Merge the columns over ranks: the largest maximum first, then the sums that belong to it."""
        if self.ranks.is_one or statistics.columns is None:
            return statistics
        columns = statistics.columns.without_idle_maxima()
        top = self.ranks.max_(columns.max.clone())
        return replace(statistics, columns=LogSumExp(top, self.ranks.sum_(columns.rescaled(top))))
