"""Checkpoints of a run: what goes in, and what must agree before it comes out again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vembed.checkpoint.stamp import check_stamp
from vembed.errors import ConfigError
from vembed.training.state import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from vembed.checkpoint.format import JSON, LoadedCheckpoint
    from vembed.checkpoint.manager import CheckpointManager
    from vembed.losses.base import ContrastiveLoss
    from vembed.models.encoder import Encoder
    from vembed.training.optimizer import Updater

PARTS = ("model", "loss", "optimizer")


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once."""
    persistent = module.state_dict(keep_vars=True)
    seen: set[int] = set()
    tensors = {}
    for name, tensor in persistent.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def load_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved tensors into a module.

    Raises:
        ConfigError: When they are another module's.
    """
    own = module_tensors(module)
    if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
        differing = sorted(
            name for name in own.keys() | tensors.keys()
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape
        )  # fmt: skip
        raise ConfigError(
            f"the checkpoint holds another model: {len(differing)} tensors differ, the first is {differing[0]}"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


@dataclass(frozen=True, slots=True)
class RunCheckpoints:
    """Saves and restores a run.

    Attributes:
        manager: The folder of checkpoints.
        encoder: Its weights are saved.
        loss: Its parameters too.
        updater: And the optimizer's state.
        identity: What the run is made of: a checkpoint of anything else isn't trained on.
        stamp: All that a checkpoint says of its run, `identity` included.
    """

    manager: CheckpointManager
    encoder: Encoder
    loss: ContrastiveLoss
    updater: Updater
    identity: Mapping[str, JSON]
    stamp: Mapping[str, JSON]

    def save(self, state: RunState, *, best: bool) -> None:
        """Save the present step. A disk that refuses is warned of by the manager, and training goes on."""
        tensors, packed = self.updater.state()
        parts = {"model": module_tensors(self.encoder), "loss": module_tensors(self.loss), "optimizer": tensors}
        content: dict[str, Any] = {"run": state.to_json(), "updater": packed}
        self.manager.save(state.step, tensors=parts, state=content, stamp=self.stamp, best=best)

    def restore(self, checkpoint: LoadedCheckpoint) -> RunState:
        """Go on from a checkpoint.

        Returns:
            Where the run stood.

        Raises:
            ConfigError: When it belongs to another run; the message shows each difference.
        """
        differences = check_stamp(
            {key: value for key, value in checkpoint.stamp.items() if key in self.identity}, self.identity
        )
        if differences:
            listed = "".join(f"\n  {difference}" for difference in differences)
            raise ConfigError(
                f"{checkpoint.path} belongs to another run:{listed}\nResume with what it was made of, choose another "
                f"output_dir, or start anew with resume=never overwrite_output_dir=true"
            )
        load_module(self.encoder, checkpoint.tensors["model"])
        load_module(self.loss, checkpoint.tensors["loss"])
        packed = checkpoint.state["updater"]
        run = checkpoint.state["run"]
        assert isinstance(packed, dict)
        assert isinstance(run, dict)
        self.updater.restore(checkpoint.tensors["optimizer"], packed)
        return RunState.from_json(run)

    def load_best(self) -> int | None:
        """Put the best checkpoint's weights into the encoder; return its step, or None when there is none."""
        best = self.manager.best()
        if best is None:
            return None
        loaded = self.manager.load(best, required=["model"])
        assert loaded is not None
        load_module(self.encoder, loaded.tensors["model"])
        return loaded.step
