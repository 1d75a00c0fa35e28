"""Tensors that several processes hold together: which part lies in this one, the whole, the norm of gradients.

The only file that looks into a DTensor's layout: everything above works with blocks, that is offsets and sizes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

    from vembed.distributed.ranks import Ranks


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


def is_shared(tensor: Tensor) -> TypeIs[DTensor]:
    """Return whether several processes hold a tensor together."""
    made_by = sys.modules.get("torch.distributed.tensor")  # half a second to import, and before that there is none
    return made_by is not None and isinstance(tensor, made_by.DTensor)


def block_of(tensor: Tensor) -> Block:
    """Return the part of a tensor that this process holds: all of it where the tensor is an ordinary one.

    Raises:
        ValueError: The tensor is spread in a way that isn't a block per process.
    """
    if not is_shared(tensor):
        return Block.whole(tuple(tensor.shape))
    from torch.distributed.tensor import Replicate, Shard

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
    if not is_shared(tensor):
        return True
    from torch.distributed.tensor import Replicate

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return not any(
        index for index, placement in zip(coordinate, tensor.placements, strict=True) if type(placement) is Replicate
    )


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the tensor's own memory and without a graph."""
    if not is_shared(tensor):
        return tensor.detach()
    return tensor.to_local()


def whole_tensor(shard: DTensor) -> Tensor:
    """Return all of a tensor, on every process. Each must call it."""
    # Offloaded shards are on the CPU, where the processes of accelerators can't talk.
    return cast("DTensor", shard.to(shard.device_mesh.device_type)).full_tensor()


def total_norm(gradients: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Return the L2 norm of all gradients together, a scalar on the device, equal on all processes.

    Where there are shards, every process must call it; without any this is exactly torch's own arithmetic.
    """
    shards = [gradient for gradient in gradients if is_shared(gradient)]
    whole = [gradient for gradient in gradients if not is_shared(gradient)]
    if not shards:
        return nn.utils.get_total_norm(whole)
    assert not ranks.is_one, "the norm of shards is that of all ranks"
    # Each part is squared where it lies: offloaded ones on the CPU, where the processes of accelerators can't talk.
    counted = [gradient for gradient in shards if is_first_copy(gradient)]  # equal copies once
    square = ranks.sum_(_squared_norm(counted).to(shards[0].device_mesh.device_type))
    square += _squared_norm(whole).to(square.device)
    return square.sqrt().to(torch.promote_types(shards[0].dtype, torch.float32))


def _squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the squared L2 norm of this process's parts of gradients, a scalar in float64: squares overflow sooner."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm([local_part(gradient) for gradient in gradients])
    return torch.stack(norms).double().square().sum()


def clip_gradients(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients so that their norm is no more than a limit, in place.

    Args:
        parameters: Those whose gradients are clipped, whole or shards.
        max_norm: The limit.
        norm: Their present norm, as `total_norm` returns it.
    """
    whole = [parameter for parameter in parameters if not is_shared(parameter)]
    nn.utils.clip_grads_with_norm_(whole, max_norm, norm)
    parts = [
        local_part(parameter.grad) for parameter in parameters if is_shared(parameter) and parameter.grad is not None
    ]
    if parts:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's own
        torch._foreach_mul_(parts, factor.to(parts[0].device))


def keep_asked_dtype(block: nn.Module) -> None:
    """Let a layer of open_clip continue naming the type of its weights, not that in which they are held or gathered.

    Its text tower asks the first layer, and would round the residual stream to bfloat16, which autocast doesn't.
    """
    if hasattr(block, "get_weight_dtype"):
        dtype = block.get_weight_dtype()  # type: ignore[operator]
        block.get_weight_dtype = lambda: dtype  # type: ignore[assignment]


def reshard(encoder: nn.Module) -> None:
    """Make the shards an encoder's parameters again, after an evaluation that left whole weights in their places."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    if sharding is None:
        return  # nothing was sharded yet
    for unit in encoder.modules():
        if isinstance(unit, sharding.FSDPModule):
            unit.reshard()


def full_tensors(encoder: nn.Module, ranks: Ranks) -> Iterator[tuple[str, Tensor | None]]:
    """Yield name and value of every entry of an encoder's state, one whole tensor at a time.

    All ranks must go through it to its end, side by side.

    Yields:
        Names in the order of `state_dict`; the tensor, on the CPU, on rank 0 and None elsewhere.
    """
    reshard(encoder)
    for name, value in encoder.state_dict().items():
        whole = whole_tensor(value) if is_shared(value) else value  # a collective: on all ranks, though one keeps it
        yield name, whole.detach().cpu() if ranks.is_first else None
