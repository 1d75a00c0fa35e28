"""Which block of a tensor a process holds: as torch itself cuts, for any shape, on one mesh and on two crossed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vembed.distributed.shards import Block, block_of, is_first_copy, is_shared, local_part

if TYPE_CHECKING:
    from rank_pool import RankPool

SHAPES = [(1,), (2,), (5,), (7, 3), (1, 4), (4, 1, 2)]


def blocks_of_rank(rank: int) -> list[Any]:
    """Return, for each way of placing each shape, the block, its values and whether it is written here."""
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    crossed = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found = []
    for shape in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        ways = [(line, [Shard(dim)]) for dim in range(len(shape))]
        ways += [(line, [Replicate()]), (crossed, [Replicate(), Shard(0)]), (crossed, [Shard(0), Shard(0)])]
        for mesh, placements in ways:
            tensor = distribute_tensor(whole, mesh, placements)
            assert is_shared(tensor)
            block = block_of(tensor)
            sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
            assert block == Block(shape, tuple(offsets), tuple(sizes)), (shape, placements)
            assert tuple(local_part(tensor).shape) == block.sizes
            part = whole[tuple(slice(o, o + s) for o, s in zip(block.offsets, block.sizes, strict=True))]
            assert torch.equal(local_part(tensor), part)
            found.append((is_first_copy(tensor), block.numel, whole.numel()))
    sums = DTensor.from_local(torch.ones(2), line, [Partial()])
    with pytest.raises(ValueError, match="not made of one block per process"):
        block_of(sums)
    return found


def test_blocks_are_cut_as_torch_cuts_and_each_value_is_written_once(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(blocks_of_rank)
    assert len(first) > 20
    for (mine, own, size), (theirs, other, _) in zip(first, second, strict=True):
        assert mine
        assert own + (other if theirs else 0) == size


def test_an_ordinary_tensor_is_one_block_and_written_in_the_memory_that_it_has() -> None:
    tensor = torch.nn.Parameter(torch.zeros(2, 3))
    assert not is_shared(tensor)
    assert is_first_copy(tensor)
    assert block_of(tensor) == Block((2, 3), (0, 0), (2, 3))
    local_part(tensor).fill_(4.0)
    assert tensor.sum() == 24.0
