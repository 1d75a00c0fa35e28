"""The norm of gradients of which each process may hold a part, and clipping by it.

What is sharded and what every process holds whole don't go through one operation, so each kind has its own; where
nothing is sharded this is exactly torch's own arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def whole_tensor(shard: DTensor) -> Tensor:
    """Return all of a tensor, on every process. Each must call it."""
    # Offloaded shards are on the CPU, where the processes of accelerators can't talk.
    return cast("DTensor", shard.to(shard.device_mesh.device_type)).full_tensor()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, a scalar, equal on all processes.

    Args:
        gradients: At least one, whole or shards. Where there are shards, every process must call it.
    """
    shards = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    if not shards:
        return nn.utils.get_total_norm(whole)
    norm = whole_tensor(cast("DTensor", nn.utils.get_total_norm(shards)))
    if not whole:
        return norm
    together: Tensor = torch.linalg.vector_norm(torch.stack([norm, nn.utils.get_total_norm(whole).to(norm)]))
    return together


def clip_gradients(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients so that their norm is no more than a limit, in place.

    Args:
        parameters: Those whose gradients are clipped, whole or shards.
        max_norm: The limit.
        norm: Their present norm, as `total_norm` returns it.
    """
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    nn.utils.clip_grads_with_norm_(whole, max_norm, norm)
    if len(whole) == len(parameters):
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's own
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            local = cast("DTensor", parameter.grad).to_local()
            local.mul_(factor.to(local.device, local.dtype))
