"""Which block of a tensor a process holds: as torch itself cuts, for any shape, on one mesh and on two crossed ones."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from kit.ranks import RankPool
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from vembed.distributed.fsdp import _mesh
from vembed.distributed.ranks import Ranks
from vembed.distributed.shards import Block, block_of, clip_gradients, is_first_copy, is_shared, local_part, total_norm
from vembed.training.optimizer import Optimizer

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


class Collectives(TorchDispatchMode):
    """Notes the type of device of every tensor that torch's own collectives get."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # for what it is made of
        if function.namespace in ("c10d", "_c10d_functional"):
            self.devices += [each.device.type for each in args if isinstance(each, torch.Tensor)]
        return function(*args, **(kwargs or {}))


class Noted(Ranks):
    """Ranks that only note where the tensors of their collectives are."""

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        DEVICES.append(x.device.type)
        return x


DEVICES: list[str] = []


def offloaded_on(rank: int) -> list[tuple[list[str], list[str]]]:
    """Take norms of shards in the host's memory; the group's device, which can't take CPU tensors, is `meta`."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    shards = [distribute_tensor(torch.ones(shape), mesh, [Shard(0)]) for shape in SHAPES]
    parameters = [torch.nn.Parameter(shard) for shard in shards]
    mesh._device_type = "meta"
    updater = Optimizer.__new__(Optimizer)
    updater._ranks = Noted(rank, 2)
    updater._names = {}
    for number, (parameter, shard) in enumerate(zip(parameters, shards, strict=True)):
        parameter.grad = shard
        updater._names[parameter] = f"module {number // 2}.weight"
    found = []
    card = SimpleNamespace(device_count=lambda: 2)
    for norms in (lambda: total_norm(shards, updater._ranks), updater.module_norms):
        DEVICES.clear()
        with (
            Collectives() as collectives,
            patch.object(device_mesh, "_get_device_handle", lambda _: card),
            patch.object(torch.Tensor, "item", lambda _: 1.0),
        ):
            norms()
        found.append((collectives.devices, [*DEVICES]))
    return found


def test_no_collective_of_a_norm_gets_a_tensor_of_the_host_where_the_group_is_of_accelerators(
    two_ranks: RankPool,
) -> None:
    for total, modules in two_ranks.run(offloaded_on):
        assert total == ([], ["meta"])
        assert modules == ([], ["meta"] * 3)


def norms_on(rank: int) -> list[tuple[float, float, float]]:
    """Return the norm of shards and whole tensors, that of the same tensors whole, and that after clipping."""
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    crossed = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found = []
    for mesh, placements in ((line, [Shard(0)]), (crossed, [Replicate(), Shard(0)])):
        torch.manual_seed(0)
        whole = [torch.randn(shape) for shape in SHAPES]
        expected = torch.nn.utils.get_total_norm(whole)
        parameters = []
        for number, values in enumerate(whole):
            tensor = values if number == 0 else distribute_tensor(values, mesh, placements)
            parameter = torch.nn.Parameter(torch.zeros_like(tensor))
            parameter.grad = tensor.clone()
            parameters.append(parameter)
        ranks = Ranks.of_this_process()
        norm = total_norm([cast("torch.Tensor", each.grad) for each in parameters], ranks)
        clip_gradients(parameters, 0.5, norm)
        after = total_norm([cast("torch.Tensor", each.grad) for each in parameters], ranks)
        found.append((norm.item(), expected.item(), after.item()))
    return found


def test_the_norm_of_shards_is_that_of_the_whole_and_clipping_brings_it_down(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(norms_on)
    assert first == second
    for norm, expected, after in first:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)


def timeouts_on(rank: int) -> list[timedelta]:
    """Return the timeouts of the groups of a mesh of copies and shards, made in a run with a timeout of its own."""
    world, device = cast("dist.ProcessGroup", dist.group.WORLD), torch.device("cpu")
    before = world._get_backend(device).options._timeout
    dist.set_timeout(timedelta(seconds=77))
    try:
        groups = _mesh(device, 1, 2).get_all_groups()
        return [group._get_backend(device).options._timeout for group in groups]
    finally:
        dist.set_timeout(before)


def test_the_groups_of_copies_and_of_shards_wait_as_long_as_the_run(two_ranks: RankPool) -> None:
    assert two_ranks.run(timeouts_on) == [[timedelta(seconds=77)] * 2] * 2
