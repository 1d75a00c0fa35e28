"""What a step does when memory runs out: gradients taken back, and less to hold in the next attempt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CPU_ALLOCATOR_MESSAGES = ("can't allocate memory", "not enough memory")
"""What torch's CPU allocator says; it raises a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, of the device or the host, ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in CPU_ALLOCATOR_MESSAGES)


class RepairNeeded(Exception):  # noqa: N818 - no error: the step is done again
    """Memory ran out on some rank, and every rank must do the step again with less.

    Args:
        rows: Rows of the largest encoder call of any rank.
        tokens: Padded tokens of the largest one.
        kept_graphs: Whether some rank kept graphs that it can do without.
    """

    def __init__(self, *, rows: int, tokens: int, kept_graphs: bool) -> None:
        super().__init__()
        self.rows = rows
        self.tokens = tokens
        self.kept_graphs = kept_graphs


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold in memory, the same on every rank."""

    rows: int  # most rows of one encoder call
    tokens: int  # most padded tokens of one encoder call
    retain: float  # share of the padded tokens whose graphs are kept
    ran_out: bool = False  # memory ran out once in a step that began with these limits

    def lowered(self, repair: RepairNeeded) -> StepLimits | None:
        """Return what the step tries next: no kept graphs, then half the largest chunk; None after a single row."""
        if repair.kept_graphs:
            return replace(self, retain=0.0)
        if repair.rows == 1:
            return None
        rows, tokens = min(self.rows, repair.rows) // 2, min(self.tokens, repair.tokens) // 2
        return replace(self, rows=max(1, rows), tokens=max(1, tokens), retain=0.0)

    def after_repair(self, helped: StepLimits) -> StepLimits:
        """Return what the next step begins with: the same limits once more, then what helped.

        Args:
            helped: The limits under which the step came through.
        """
        return replace(helped, ran_out=False) if self.ran_out else replace(self, ran_out=True)


class HeldGradients:
    """Gradients that were there before a step, put aside so that a failed attempt can be taken back.

    While they are aside, gradients of parameters below float32 are accumulated in float32: hundreds of chunks added up
    in bfloat16 would lose them.

    Args:
        widens: False where something else sees to the accumulation.
    """

    def __init__(self, parameters: Sequence[Tensor], *, widens: bool = True) -> None:
        self._parameters = parameters
        self._widens = widens
        self._held = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
            self._set_gradient_dtype(parameter, torch.promote_types(parameter.dtype, torch.float32))

    def put_back(self) -> None:
        """Drop what the step added."""
        for parameter, held in zip(self._parameters, self._held, strict=True):
            parameter.grad = None
            self._set_gradient_dtype(parameter, parameter.dtype)
            parameter.grad = held

    def add_back(self) -> None:
        """Add what was there before to what the step added, and round once to the parameter's type."""
        for parameter, held in zip(self._parameters, self._held, strict=True):
            gradient, parameter.grad = parameter.grad, None
            self._set_gradient_dtype(parameter, parameter.dtype)
            if gradient is not None:
                gradient = (gradient if held is None else gradient.add_(held)).to(parameter.dtype)
            parameter.grad = held if gradient is None else gradient

    def _set_gradient_dtype(self, parameter: Tensor, dtype: torch.dtype) -> None:
        if self._widens and parameter.dtype.itemsize < torch.float32.itemsize and hasattr(parameter, "grad_dtype"):
            parameter.grad_dtype = dtype
