"""A network with what a run's checkpoints need of it, whole or sharded; what the ranks of a pool run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from vembed.checkpoint.manager import CheckpointManager
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError, VembedError
from vembed.losses.infonce import InfoNCE
from vembed.models.encoder import TrainedPart
from vembed.plan.keys import OptimisationKeys
from vembed.training.optimizer import Optimizer, Schedule
from vembed.training.saving import RunCheckpoints, RunState, gather_encoder
from vembed.training.stamp import refuse_other_run

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

KEYS = OptimisationKeys(weight_decay=0.1, adam_beta2=0.99, max_grad_norm=None)
SCHEDULE = Schedule(0.01, "constant", 0, 100)


class Network(nn.Module):
    """Two layers that two processes can't halve; with a base, only the second one trains."""

    def __init__(self, *, keeps_base: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trained = TrainedPart(keeps_base=keeps_base, base="fingerprint of the frozen weights")
        self.first = nn.Linear(3, 5)
        self.head = nn.Linear(5, 3)
        self.first.requires_grad_(not keeps_base)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))  # type: ignore[no-any-return]


class Run:
    """What a run saves, and where: one for each rank, or one alone."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, sharded: bool, keeps_base: bool = False) -> None:
        self.network = Network(keeps_base=keeps_base)
        if sharded:
            fully_shard(self.network, reshard_after_forward=False)
        self.loss = InfoNCE(temperature=0.1, learn_temperature=True)
        encoder: Any = self.network
        self.optimizer = Optimizer(encoder, self.loss, KEYS, SCHEDULE, loss_scaling=False)
        manager = CheckpointManager(folder, ranks=Ranks.of_this_process())
        stamp = {"config_hash": "c0ffee", **identity}
        self.checkpoints = RunCheckpoints(manager, encoder, self.loss, self.optimizer, stamp)

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
            (self.network(x).square().mean() * self.loss.log_scale).backward()
            for module in [self.network] if hasattr(self.network, "reshard") else []:
                module.reshard()
            self.optimizer.step(self.optimizer.schedule.learning_rate(step))
            self.optimizer.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        """Return the weights of the network, put together from all ranks."""
        with torch.no_grad():
            self.network(torch.ones(1, 3))  # leaves a sharded network unsharded, as an evaluation does
        encoder: Any = self.network
        whole = gather_encoder(encoder, Ranks.of_this_process(), self.fresh)
        return {} if whole is None else {name: each.clone() for name, each in whole.state_dict().items()}

    def fresh(self) -> Any:
        return Network(keeps_base=self.network.trained.keeps_base)


def identity_of(**changes: Any) -> dict[str, Any]:
    return {"strategy": "fsdp", "mode": "fast", "sharding_factor": 2, "world_size": 2, "dtype": "float32",
            "model_name": "net"} | changes  # fmt: skip


def save(rank: int, folder: Path, identity: dict[str, Any], sharded: bool, keeps_base: bool) -> list[dict[str, Tensor]]:
    """Train, save the best at step 2 and the last at step 3, and return the weights of both."""
    run = Run(folder, identity, sharded=sharded, keeps_base=keeps_base)
    found = []
    for step in (2, 3):
        run.train(range(step - 1, step))
        run.checkpoints.save(RunState(step=step), best=step == 2)
        found.append(run.whole())
    return found


def resume(rank: int, folder: Path, identity: dict[str, Any], sharded: bool, keeps_base: bool, elastic: bool) -> Any:
    """Resume from the newest checkpoint, and load the best; return the weights of both, or the error."""
    run = Run(folder, identity, sharded=sharded, keeps_base=keeps_base)
    run.train(range(40, 41))
    loaded = run.checkpoints.manager.load("auto")
    assert loaded is not None
    try:
        refuse_other_run(loaded, identity, elastic=elastic)
    except ConfigError as error:
        return str(error)
    state = run.checkpoints.restore(loaded)
    assert state.step == 3
    newest = run.whole()
    with torch.no_grad():
        run.network(torch.ones(1, 3))  # the best is loaded after an evaluation
    assert run.checkpoints.load_best() == 2
    return [run.whole(), newest]


def gather_what_fails(rank: int, folder: Path) -> str:
    """Gather where the first rank can't build the encoder anew."""
    run = Run(folder, identity_of(), sharded=True)

    def fail() -> Any:
        raise ConfigError("the hub is gone")

    encoder: Any = run.network
    try:
        gather_encoder(encoder, Ranks.of_this_process(), fail)
    except VembedError as error:
        return f"{type(error).__name__}: {error}"
    return "gathered"
