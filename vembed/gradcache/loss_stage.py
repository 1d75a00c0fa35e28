"""The loss between the two passes: from the embeddings of all ranks to the gradient of each.

One gather brings the embeddings of all ranks to every rank. Losses that stream share the work: each rank sweeps the
tiles of its part of the queries, what the columns need is merged in between, and one reduce-scatter adds the gradients
up and hands every rank those of its own rows. Any other loss is computed by every rank over the whole batch, by
autograd: nothing is left to add up. Either way the number of collectives depends on nothing.

Memory, beside what the loss holds of the similarities: the embeddings of all ranks and their gradients once each, and
this rank's own. Neither order, padding nor the largest number makes a further copy.

Shape legend: V vectors of this rank, N of all ranks, B >= N of equal blocks for each rank, E dim.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from vembed.device import to_device
from vembed.gradcache.passes import RngState
from vembed.losses.base import MultiVectors, share_of
from vembed.losses.streamed import Hardest, LogSumExp, StreamedBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.chunks import RowAssignment
    from vembed.losses.base import BatchLoss, BatchStructure
    from vembed.losses.streamed import Statistics, StreamedLoss


@dataclass(frozen=True, slots=True)
class LossResult:
    """Loss and gradients of one batch."""

    loss: Tensor  # of the batch of all ranks, a scalar on the device
    # of the queries whose loss this rank computed, a scalar on the device; all of them where it isn't shared out
    rank_loss: Tensor
    u_VE: Tensor  # its gradient with respect to this rank's embeddings, scaled
    parameters: dict[str, Tensor]  # gradients of the loss's own parameters over the whole batch, by name, not scaled
    largest: Tensor  # largest |z| of the batch, a scalar on the device


class LossStage:
    """Computes a loss over the embeddings of all ranks.

    Args:
        tf32: Whether its products of float32 matrices use TF32 where the device has it.
    """

    def __init__(self, loss: BatchLoss, ranks: Ranks, *, tf32: bool = False) -> None:
        self.loss = loss
        self.ranks = ranks
        self.tf32 = tf32

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
        positions_N, room_BE = None, z_VE
        if not self.ranks.is_one:
            # Blocks have the size of the largest rank's, so that one gather and one reduce-scatter carry uneven ranks.
            # The order of [queries; documents] is restored in front, the padding of the blocks is left behind it.
            positions_N = to_device(torch.from_numpy(assignment.block_positions()), z_VE.device)
            gathered_BE = self.ranks.gather_blocks(z_VE, max(assignment.counts))
            room_BE = torch.empty_like(gathered_BE)
            torch.index_select(gathered_BE, 0, positions_N, out=room_BE[: assignment.num_rows])
            del gathered_BE  # as large as all embeddings: it must not live beside their gradients
        z_NE = room_BE[: assignment.num_rows]
        largest: Tensor = torch.linalg.vector_norm(z_NE, math.inf)  # |z| itself would be a copy of all embeddings
        prefix, chosen = self.loss.chosen(structure)
        # With fewer queries than ranks some rank would have none to share the work with.
        streamed = chosen.streamed if structure.num_queries >= self.ranks.world_size else None
        precise = torch.autocast(z_NE.device.type, enabled=False)  # a caller's would round products of the loss
        tf32 = tf32_products(z_NE.device) if self.tf32 else nullcontext()
        with precise, tf32, sums_in_one_order(z_NE.device):
            if streamed is not None:
                loss, rank_loss, u_NE, gradients = self._streamed(streamed, z_NE, structure, counts_N)
            else:
                loss, u_NE, gradients = self._by_autograd(chosen, z_NE, structure, counts_N)
                rank_loss = loss
        if positions_N is None:
            u_VE = u_NE
        elif streamed is not None:  # the embeddings have been read: their memory takes the gradients
            u_VE = self.ranks.sum_own_block(room_BE.index_copy_(0, positions_N, u_NE))[: len(z_VE)]
        else:  # every rank has the gradients of the whole batch: it picks those of its rows, in their order
            u_VE = u_NE[to_device(torch.from_numpy(assignment.slots[self.ranks.rank]), u_NE.device)]
        # Names are those of the loss of the run. Losses of other sources have no part in this batch: their parameters
        # get zeros, so that every rank and every step reduces and updates the same list.
        named = {f"{prefix}{name}": gradient for name, gradient in gradients.items()}
        for name, parameter in self.loss.named_parameters() if prefix else ():
            if parameter.requires_grad:
                named.setdefault(name, torch.zeros_like(parameter))
        return LossResult(loss, rank_loss, u_VE.mul_(gradient_scale), named, largest)

    def _by_autograd(
        self, chosen: BatchLoss, z_NE: Tensor, structure: BatchStructure, counts_N: NDArray[np.int64] | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        embeddings = z_NE.detach().requires_grad_()
        parameters = {name: parameter for name, parameter in chosen.named_parameters() if parameter.requires_grad}
        structure = structure.to(z_NE.device)
        sides: tuple[Any, Any] = embeddings[: structure.num_queries], embeddings[structure.num_queries :]
        if counts_N is not None:
            sides = MultiVectors.sides(embeddings, counts_N, structure.num_queries)
        with nullcontext() if self.ranks.is_one else RngState.capture(z_NE.device).replayed():
            if not self.ranks.is_one:
                # Dropout has left every rank with random numbers of its own, and the loss must be one on all of them.
                seed = torch.randint(2**62, (1,), device=z_NE.device)
                self.ranks.copy_from_first([seed])
                torch.manual_seed(int(seed))
            loss = chosen(*sides, structure)
        # A loss may leave a parameter of its own out of this batch: then its gradient is zero.
        u_NE, *slopes = torch.autograd.grad(loss, [embeddings, *parameters.values()], materialize_grads=True)
        slopes = [slope.contiguous() for slope in slopes]
        # Every rank has computed them, perhaps rounded otherwise: the loss's weights must stay bit-equal on all.
        self.ranks.copy_from_first(slopes)
        return loss.detach(), u_NE, dict(zip(parameters, slopes, strict=True))

    def _streamed(
        self, streamed: StreamedLoss, z_NE: Tensor, structure: BatchStructure, counts_N: NDArray[np.int64] | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss, that of this rank's queries, and this rank's share of the gradients of all embeddings."""
        num_queries, ranks = structure.num_queries, self.ranks
        # The work is shared out by queries, whoever encoded them: the rows that two ranks sweep differ by one at most.
        first, stop = (num_queries * edge // ranks.world_size for edge in (ranks.rank, ranks.rank + 1))
        counts, queries, documents = None, slice(first, stop), slice(num_queries, None)
        if counts_N is not None:  # rows of several vectors, one row after the other
            counts = counts_N[queries], counts_N[documents]
            ends = np.concatenate([[0], np.cumsum(counts_N)])
            queries, documents = slice(ends[first], ends[stop]), slice(ends[num_queries], None)
        batch = StreamedBatch(
            z_NE[queries], z_NE[documents], structure, first, counts, z_NE[:num_queries] if counts is None else None
        )
        statistics = self._merged(streamed.statistics(batch)) if streamed.needs_statistics else None
        # The loss writes the gradients of its queries and of all documents; queries of other ranks must stay zero.
        u_NE = torch.empty_like(z_NE) if ranks.is_one else torch.zeros_like(z_NE)
        share = streamed.gradients(batch, statistics, (u_NE[queries], u_NE[documents]))
        if ranks.is_one:
            return share.loss, share.loss, u_NE, share.parameters
        # One collective for the loss and all of its parameters: they are a few numbers, of which latency is the cost.
        flat = [gradient.flatten().to(z_NE.dtype) for gradient in share.parameters.values()]
        loss, *sums = ranks.sum_(torch.cat([share.loss.reshape(1), *flat])).split([1, *map(len, flat)])
        summed = {
            name: total.view_as(gradient).to(gradient.dtype)
            for (name, gradient), total in zip(share.parameters.items(), sums, strict=True)
        }
        rank_loss = share.loss / (share_of(structure, range(first, stop)) or 1.0)  # it was divided by all queries
        return loss.squeeze(), rank_loss, u_NE, summed

    def _merged(self, statistics: Statistics) -> Statistics:
        """Merge the columns over ranks: the largest maximum first, then the sums that belong to it.

        The largest logits of columns, where the loss keeps them, are gathered, and the largest of all remain.
        """
        if self.ranks.is_one:
            return statistics
        if statistics.parts:
            return replace(statistics, parts=tuple(part and self._merged(part) for part in statistics.parts))
        if statistics.sums is not None:
            statistics = replace(statistics, sums=self.ranks.sum_(statistics.sums))
        if statistics.columns is None:
            return statistics
        # (max, sum) can't be added up as they are: ranks agree on the largest maximum, rescale their sums to it and add
        # these. A rank with nothing in a column would outweigh tiny logits of another by its maximum of 0.
        columns = statistics.columns.without_idle_maxima()
        top = self.ranks.max_(columns.max.clone())
        merged = replace(statistics, columns=LogSumExp(top, self.ranks.sum_(columns.rescaled(top))))
        if (hardest := statistics.column_hardest) is None:
            return merged
        lists = (self.ranks.gather_blocks(side[None], 1) for side in (hardest.logits, hardest.positions))
        return replace(merged, column_hardest=Hardest.merged(list(map(Hardest, *lists))))


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Let products of float32 matrices use TF32 within the block, on a CUDA device."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32  # `fp32_precision` alone makes torch refuse every product, as the other switch differs
    matmul.allow_tf32 = before or device.type == "cuda"
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@contextmanager
def sums_in_one_order(device: torch.device) -> Iterator[None]:
    """Let a CPU add rows up in one order within the block, so that equal steps are equal to the bit.

    Its threads would add to a row of the result in the order in which they come to it: in `index_put_`, and so in the
    gradient of every `x[rows]`. A GPU has `deterministic: true` for that, which costs time there and none here.
    """
    mode, memory = torch.get_deterministic_debug_mode(), cast("Any", torch.utils.deterministic)
    fills = memory.fill_uninitialized_memory
    if device.type == "cpu":
        torch.set_deterministic_debug_mode(max(mode, 1))  # 1 warns where an operator has no fixed order, 2 refuses it
        memory.fill_uninitialized_memory = False  # it is written before it is read
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills
