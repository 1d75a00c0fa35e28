"""A small network that one process has, or two have between them, and its checkpoints; what the ranks of a pool run."""

import functools
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from vembed.checkpoint.tensors import LoadedCheckpoint, TensorFile, load_into
from vembed.distributed.ranks import Ranks
from vembed.errors import VembedError

Kind = Literal["whole", "sharded", "replicated shards"]

STAMP: dict[str, Any] = {"config_hash": "c0ffee", "strategy": "fsdp", "world_size": 2}


class Network(nn.Module):
    """Dimensions that two don't divide, one row alone, a scalar, a buffer, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(3, 5)
        self.tied = self.first
        self.norm = nn.LayerNorm(5)
        self.last = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) * self.scale  # type: ignore[no-any-return]


@functools.cache
def mesh_of(kind: Kind) -> DeviceMesh:
    if kind == "sharded":
        return init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def make(kind: Kind) -> tuple[Network, Optimizer]:
    network = Network()
    if kind != "whole":
        fully_shard(network, mesh=mesh_of(kind), ignored_params={network.scale})
    matrices = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return network, torch.optim.AdamW(groups, lr=0.01, fused=True)


def train(network: Network, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        network(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        network.seen += 1


def names_of(network: Network) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in network.named_parameters()}


def tensors_of(network: Network, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return what is saved; each weight under one of its names."""
    model = {name: each.detach() for name, each in network.state_dict().items() if not name.startswith("tied")}
    return {"model": model, "optimizer": pack_optimizer(optimizer, names_of(network))[0]}


def whole_tensors(network: Network, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor of the training by name, put together from all ranks."""
    return {
        f"{part}/{name}": (each.full_tensor() if isinstance(each, DTensor) else each).clone()
        for part, tensors in tensors_of(network, optimizer).items()
        for name, each in tensors.items()
    }


def manager_of(folder: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, ranks=Ranks.of_this_process(), **options)


def save(manager: CheckpointManager, step: int, network: Network, optimizer: Optimizer, *, best: bool = False) -> Any:
    state = {"optimizer": pack_optimizer(optimizer, names_of(network))[1]}
    return manager.save(step, tensors=tensors_of(network, optimizer), state=state, stamp=STAMP, best=best)


def restore(network: Network, optimizer: Optimizer, loaded: LoadedCheckpoint) -> None:
    for name, tensor in tensors_of(network, optimizer)["model"].items():
        load_into(tensor, loaded.tensors["model"][name])
    packed: Any = loaded.state["optimizer"]
    unpack_optimizer(optimizer, names_of(network), tensors=loaded.tensors["optimizer"], packed=packed)


def train_and_save(rank: int, folder: Path, kind: Kind) -> list[dict[str, Tensor]]:
    """Train for three steps, save, and return what was saved and where two more steps lead."""
    network, optimizer = make(kind)
    train(network, optimizer, range(3))
    assert save(manager_of(folder), 3, network, optimizer, best=True)
    saved = whole_tensors(network, optimizer)
    train(network, optimizer, range(3, 5))
    return [saved, whole_tensors(network, optimizer)]


def load_and_train(rank: int, folder: Path, kind: Kind) -> list[dict[str, Tensor]]:
    """Load into a network that was trained otherwise, and return what it then holds and where two steps lead."""
    network, optimizer = make(kind)
    train(network, optimizer, range(10, 11))
    loaded = manager_of(folder).load("auto")
    assert loaded is not None
    restore(network, optimizer, loaded)
    found = whole_tensors(network, optimizer)
    train(network, optimizer, range(3, 5))
    return [found, whole_tensors(network, optimizer)]


def outcome(call: Any) -> Any:
    """Return what a call comes to on this rank, as text: the same on all ranks is the point."""
    try:
        return str(call())
    except VembedError as error:
        return f"{type(error).__name__}: {error}"


def what_loads(rank: int, folder: Path, source: str = "auto") -> tuple[Any, Any]:
    """Return what loading and looking for the best come to."""
    manager = manager_of(folder)

    def load() -> int | None:
        loaded = manager.load("auto" if source == "auto" else folder / source)
        return None if loaded is None else loaded.step

    return outcome(load), outcome(lambda: manager.best() and manager.best().name)  # type: ignore[union-attr]


def save_where_one_fails(rank: int, folder: Path, kind: Kind, failing: int) -> list[Any]:
    """Save three times while one rank's disk refuses, a fourth time when it no longer does, and return each outcome."""
    network, optimizer = make(kind)
    train(network, optimizer, range(1))
    manager = manager_of(folder)
    write = TensorFile.write

    def refuse(file: TensorFile, target: Path) -> None:
        raise OSError(28, f"no space for {file.name}")

    try:
        if rank == failing:
            TensorFile.write = refuse  # type: ignore[method-assign]
        found = [outcome(functools.partial(save, manager, step, network, optimizer)) for step in (1, 2, 3)]
    finally:
        TensorFile.write = write  # type: ignore[method-assign]
    return [*found, outcome(lambda: save(manager, 4, network, optimizer).name)]


def save_nan_of_one_rank(rank: int, folder: Path, value: float) -> str:
    """Save shards of which only the second rank's last row isn't finite."""
    network, optimizer = make("sharded")
    with torch.no_grad():
        local = network.first.weight.to_local()
        if rank == 1:
            local[-1, -1] = value
    return str(outcome(lambda: save(manager_of(folder), 1, network, optimizer).name))


def save_with_free_bytes(rank: int, folder: Path, free: list[int]) -> list[Any]:
    """Save with given numbers of free bytes, which only the first rank may look up."""
    network, optimizer = make("sharded")
    train(network, optimizer, range(1))

    asked = iter(free)

    def look_up(path: Path) -> int:
        assert rank == 0
        return next(asked)

    manager = manager_of(folder, free_bytes=look_up)
    return [save(manager, step, network, optimizer) is not None for step in range(len(free))]


def set_aside(rank: int, folder: Path, step: int) -> list[str]:
    return [path.name for path in manager_of(folder).set_aside_after(step)]


def folder_of_own(rank: int, folders: list[Path]) -> Any:
    """Load from a folder that each rank has another one of."""
    return outcome(lambda: manager_of(folders[rank]).load("auto"))
