"""A loss for each source of the data: every batch is of one source, and has that source's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from vembed.losses.base import BatchLoss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vembed.losses.base import BatchStructure


class SourceLosses(BatchLoss):
    """Several losses, of which each batch has one.

    Args:
        parts: The losses.
        of_source: Place of each source's loss among them; sources may share one, with its parameters.
    """

    def __init__(self, parts: Sequence[BatchLoss], of_source: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.of_source = tuple(of_source)
        self.multi_vector = parts[0].multi_vector  # type: ignore[misc]  # of a class elsewhere

    def chosen(self, structure: BatchStructure) -> tuple[str, BatchLoss]:
        """Return the loss of the batch's source."""
        assert structure.source is not None, "a batch of a run with a loss for each source says its own"
        place = self.of_source[structure.source]
        part = self.parts[place]
        assert isinstance(part, BatchLoss)
        return f"parts.{place}.", part

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
        found = (part.temperature for part in self.parts if isinstance(part, BatchLoss))
        return next((each for each in found if each is not None), None)
