"""Tensors that several processes hold together: which part lies in this one, the whole, the norm of gradients.

The only file that looks into a DTensor's layout: everything above works with blocks, that is offsets and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor, cut along its dimensions."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where the block begins in each dimension
    sizes: tuple[int, ...]  # how far it reaches from there; 0 in one dimension is an empty block

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Block:
        """Return the block that is all of a tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements of the block."""
        return prod(self.sizes)


def is_shared(tensor: Tensor) -> bool:
    """Return whether several processes hold a tensor together."""
    return isinstance(tensor, DTensor)


def block_of(tensor: Tensor) -> Block:
    """Return the part of a tensor that this process holds: all of it where the tensor is an ordinary one.

    Raises:
        ValueError: The tensor is spread in a way that isn't a block per process.
    """
    if not isinstance(tensor, DTensor):
        return Block.whole(tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Block(tuple(tensor.shape), (0,) * tensor.ndim, (0,) * tensor.ndim)
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    for index, count, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        # By class: a strided shard is a Shard too, and its parts are no blocks.
        if type(placement) is Shard:
            # As torch.chunk cuts: equal parts rounded up, so that the last ones are short or empty.
            dim, part = placement.dim, -(-sizes[placement.dim] // count)
            begin = min(index * part, sizes[dim])
            offsets[dim], sizes[dim] = offsets[dim] + begin, min(part, sizes[dim] - begin)
        elif type(placement) is not Replicate:
            raise ValueError(f"a tensor placed as {tensor.placements} is not made of one block per process")
    return Block(tuple(tensor.shape), tuple(offsets), tuple(sizes))


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether this process has the first of the equal copies of its block; for ordinary tensors it has."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return not any(
        index for index, placement in zip(coordinate, tensor.placements, strict=True) if type(placement) is Replicate
    )


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the tensor's own memory and without a graph."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor.to_local()


def whole_tensor(shard: DTensor) -> Tensor:
    """Return all of a tensor, on every process. Each must call it."""
    # Offloaded shards are on the CPU, where the processes of accelerators can't talk.
    return cast("DTensor", shard.to(shard.device_mesh.device_type)).full_tensor()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, a scalar, equal on all processes.

    Where there are shards, every process must call it; without any this is exactly torch's own arithmetic.
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
