"""Gradients around the chunks of a step: where they add up, and how those of all ranks come together.

Replicated, every rank holds every weight: gradients add up in `.grad` and are summed over the ranks once. Sharded, the
encoder gathers its weights and reduces its gradients itself (distributed/fsdp.py). The step doesn't tell them apart.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from vembed.errors import MachineError
from vembed.gradcache.memory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.distributed.ranks import Ranks


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
        # Held by reference: the step accumulates into fresh tensors, so that nothing is copied to be taken back.
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


class Gradients(Protocol):
    """Gradients of one attempt at a step; what was in `.grad` before comes back with either end."""

    @property
    def needs_equal_calls(self) -> bool:
        """True where all ranks must make the same encoder calls; then an attempt can't be abandoned."""

    def begin(self) -> None:
        """Get ready for the chunks."""

    def finish(self) -> None:
        """Add up what the chunks of all ranks left, and add it to what was there before."""

    def abandon(self) -> None:
        """Drop what the chunks left, on all ranks alike."""


class ReplicatedGradients:
    """Gradients of an encoder that every rank has a copy of.

    Args:
        parameters: Its trainable parameters, in the same order on every rank.
    """

    needs_equal_calls = False

    def __init__(self, parameters: Sequence[Tensor], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._held: HeldGradients | None = None

    def begin(self) -> None:
        """Put the gradients of earlier steps aside."""
        self._held = HeldGradients(self._parameters)

    def finish(self) -> None:
        """Sum over the ranks, once."""
        assert self._held is not None
        # Before earlier steps' are added: those are summed over the ranks already, and would count once for each rank.
        self._ranks.sum_gradients(self._parameters)
        self._held.add_back()

    def abandon(self) -> None:
        """Put the gradients of earlier steps back."""
        assert self._held is not None
        self._held.put_back()


class ShardedGradients:
    """Gradients of an encoder that is sharded over the ranks."""

    def __init__(self, encoder: ShardedEncoder) -> None:
        self._encoder = encoder
        self._held: HeldGradients | None = None

    @property
    def needs_equal_calls(self) -> bool:
        """True where each encoder call is a collective."""
        return self._encoder.needs_equal_calls

    def begin(self) -> None:
        """Put the shards' gradients of earlier steps aside, and gather what is whole during the step."""
        self._encoder.reshard()
        # FSDP itself accumulates in float32, and the type of a shard's gradient is fixed.
        self._held = HeldGradients(self._encoder.parameters, widens=False)
        with self._explained("gathers the weights"):
            self._encoder.begin()

    def finish(self) -> None:
        """Reduce what isn't reduced yet."""
        assert self._held is not None
        with self._explained("adds up the gradients"):
            self._encoder.finish()
        self._held.add_back()

    def abandon(self) -> None:
        """Let go of the weights and gradients that the attempt left."""
        assert self._held is not None
        with self._explained("clears the gradients of a failed attempt"):
            self._encoder.abandon()
        self._held.put_back()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            smaller_mode = {"fast": "lean", "lean": "sharded"}.get(self._encoder.mode)
            cure = f"set fsdp_mode: {smaller_mode}" if smaller_mode else "set cpu_offload: true, or take more devices"
            raise MachineError(f"out of memory where fsdp_mode {self._encoder.mode} {what}: {cure}") from error
