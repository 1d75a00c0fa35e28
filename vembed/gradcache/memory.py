"""What a step does when memory runs out: gradients taken back, and the next smaller chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vembed.gradcache.chunking import ChunkBudget

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


def smaller(budget: ChunkBudget, *, rows: int, tokens: int) -> ChunkBudget | None:
    """Return a budget of half the largest chunk; None when that was a single row.

    Args:
        budget: The present one.
        rows: Most rows that a chunk had.
        tokens: Most padded tokens that a chunk had.
    """
    if rows == 1:
        return None
    return ChunkBudget(
        rows=max(1, min(budget.rows, rows) // 2),
        tokens=max(1, min(budget.tokens, tokens) // 2),
        width_multiple=budget.width_multiple,
    )


class HeldGradients:
    """Gradients that were there before a step, put aside so that a failed attempt can be taken back.

    While they are aside, gradients of parameters below float32 are accumulated in float32: hundreds of chunks added up
    in bfloat16 would lose them.

    Args:
        parameters: The encoder's trainable parameters.
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
