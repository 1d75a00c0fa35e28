"""Several losses in one run: their weighted sum over the same batch, or one for each source of the data.

    L = sum over parts of weight L_part

Parts of a sum come one after the other: each has the tiles and the sums that it has alone, and the gradients of the
second and further ones wait once in memory of their own until they are added.

Where sources have losses of their own, every batch is of one source, and has that source's loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vembed.losses.base import BatchLoss
from vembed.losses.streamed import LossGradients, StreamedLoss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vembed.losses.base import BatchStructure
    from vembed.losses.streamed import Statistics, StreamedBatch


class SumLoss(StreamedLoss):
    """Several losses, each with a weight; streamed where all of them are."""

    def __init__(self, parts: Sequence[tuple[float, BatchLoss]]) -> None:
        super().__init__(mask_false_negatives=False, prefixes=None, tile_size=1)
        self.weights = tuple(weight for weight, _ in parts)
        self.parts = nn.ModuleList(part for _, part in parts)

    def forward(self, q: Any, d: Any, structure: BatchStructure) -> Tensor:
        """Return the weighted sum of the losses."""
        return torch.stack([weight * part(q, d, structure) for weight, part in self._weighted()]).sum()

    @property
    def streamed(self) -> StreamedLoss | None:
        """The sum itself, unless a part needs the whole batch at once."""
        return None if any(part.streamed is None for _, part in self._weighted()) else self

    @property
    def needs_statistics(self) -> bool:
        """True where any part needs them."""
        return any(part.needs_statistics for _, part in self._streamed())

    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Return those of the parts, in those of the first that needs any."""
        parts = [part.statistics(batch) if part.needs_statistics else None for _, part in self._streamed()]
        # The stage merges the parts alone; the fields of the first only show that there is something to merge.
        return replace(next(part for part in parts if part is not None), parts=tuple(parts))

    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return the weighted sums of losses and gradients."""
        of_parts = (None,) * len(self.weights) if statistics is None else statistics.parts
        total: LossGradients | None = None
        for number, ((weight, part), part_statistics) in enumerate(zip(self._streamed(), of_parts, strict=True)):
            result = part.gradients(batch, part_statistics, into if total is None else None)
            parameters = {f"parts.{number}.{name}": weight * slope for name, slope in result.parameters.items()}
            if total is None:  # the caller's memory is taken by the first part, and the others are added to it
                sides = result.dq_QE.mul_(weight), result.dd_DE.mul_(weight)
                total = LossGradients(weight * result.loss, *sides, parameters)
                continue
            sides = total.dq_QE.add_(result.dq_QE, alpha=weight), total.dd_DE.add_(result.dd_DE, alpha=weight)
            total = LossGradients(total.loss + weight * result.loss, *sides, total.parameters | parameters)
        assert total is not None
        return total

    def constrain(self) -> None:
        """Bring the parameters of all parts back into their bounds."""
        for _, part in self._weighted():
            part.constrain()

    @property
    def temperature(self) -> float | None:
        """The present temperature of the first part that has one."""
        return next((part.temperature for _, part in self._weighted() if part.temperature is not None), None)

    def _weighted(self) -> list[tuple[float, BatchLoss]]:
        parts = [part for part in self.parts if isinstance(part, BatchLoss)]
        return list(zip(self.weights, parts, strict=True))

    def _streamed(self) -> list[tuple[float, StreamedLoss]]:
        parts = [(weight, part.streamed) for weight, part in self._weighted()]
        return [(weight, part) for weight, part in parts if part is not None]


class SourceLosses(BatchLoss):
    """Several losses, of which each batch has one.

    Args:
        parts: The losses.
        of_source: Number of each source's loss among them; sources may share one, with its parameters.
    """

    def __init__(self, parts: Sequence[BatchLoss], of_source: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.of_source = tuple(of_source)
        self.multi_vector = parts[0].multi_vector  # type: ignore[misc]  # of a class elsewhere

    def chosen(self, structure: BatchStructure) -> tuple[str, BatchLoss]:
        """Return the loss of the batch's source."""
        assert structure.source is not None, "a batch of a run with a loss for each source says its own"
        number = self.of_source[structure.source]
        part = self.parts[number]
        assert isinstance(part, BatchLoss)
        return f"parts.{number}.", part

    def forward(self, q: Any, d: Any, structure: BatchStructure) -> Tensor:
        """Return the loss of the batch by that of its source."""
        loss: Tensor = self.chosen(structure)[1](q, d, structure)
        return loss

    def constrain(self) -> None:
        """Bring the parameters of all losses back into their bounds."""
        for part in self.parts:
            assert isinstance(part, BatchLoss)
            part.constrain()

    @property
    def temperature(self) -> float | None:
        """The present temperature of the first loss that has one."""
        temperatures = (part.temperature for part in self.parts if isinstance(part, BatchLoss))
        return next((temperature for temperature in temperatures if temperature is not None), None)
