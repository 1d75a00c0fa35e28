"""Which part of a tensor lies in this process, for tensors that several processes hold together.

The only place that looks into a DTensor's layout: everything above works with blocks, that is offsets and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor, cut along its dimensions.

    Attributes:
        shape: Of the whole tensor.
        offsets: Where the block begins in each dimension.
        sizes: How far it reaches from there; 0 in one dimension is an empty block.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

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
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return Block(tuple(tensor.shape), (0,) * tensor.ndim, (0,) * tensor.ndim)
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    for index, count, placement in zip(place, tensor.device_mesh.shape, tensor.placements, strict=True):
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
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return not any(
        index for index, placement in zip(place, tensor.placements, strict=True) if type(placement) is Replicate
    )


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the tensor's own memory and without a graph."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor.to_local()
