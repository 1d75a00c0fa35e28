"""The weighted sum of several losses over the same batch.

    L = sum over parts of weight L_part

Parts come one after the other: each has the tiles and the sums that it has alone, and the gradients of the second and
further ones wait once in memory of their own until they are added.
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
        """Whether any part does."""
        return any(part.needs_statistics for _, part in self._streamed())

    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Return those of the parts, in those of the first that needs any."""
        parts = [part.statistics(batch) if part.needs_statistics else None for _, part in self._streamed()]
        return replace(next(each for each in parts if each is not None), parts=tuple(parts))

    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return the weighted sums of losses and gradients."""
        known = (None,) * len(self.weights) if statistics is None else statistics.parts
        total: LossGradients | None = None
        for place, ((weight, part), each) in enumerate(zip(self._streamed(), known, strict=True)):
            found = part.gradients(batch, each, into if total is None else None)
            own = {f"parts.{place}.{name}": weight * gradient for name, gradient in found.own.items()}
            if total is None:
                sides = found.dq_QE.mul_(weight), found.dd_DE.mul_(weight)
                total = LossGradients(weight * found.loss, *sides, own)
                continue
            sides = total.dq_QE.add_(found.dq_QE, alpha=weight), total.dd_DE.add_(found.dd_DE, alpha=weight)
            total = LossGradients(total.loss + weight * found.loss, *sides, total.own | own)
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
        found = [(weight, part.streamed) for weight, part in self._weighted()]
        return [(weight, part) for weight, part in found if part is not None]
