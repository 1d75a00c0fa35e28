"""A checkpoint of which every value is known: `frozen/` holds it as two processes wrote it in format 1.

The folder is never written again: a later version must load what an earlier one saved. A change of the format raises
FORMAT_VERSION, freezes a second folder beside this one and keeps loading the first.
"""

from math import prod
from pathlib import Path

import torch
from spread_cases import STAMP, Kind, Network, make, manager_of, names_of, restore, tensors_of, whole_tensors
from torch import Tensor
from torch.optim import Optimizer

from vembed.checkpoint.optimizer_state import pack_optimizer
from vembed.checkpoint.tensors import load_into

FROZEN = Path(__file__).with_name("frozen")
STEP = 3
STATE = {"epoch": 0.5, "best_metric": None, "skipped_steps": 2}


def known(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the values of a tensor, all exact in float32: eighths that begin at the length of its name."""
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape) / 8 + len(name)


def known_training(kind: Kind) -> tuple[Network, Optimizer]:
    """Return a network and its optimizer with the known values in them."""
    network, optimizer = make(kind)
    for name, tensor in tensors_of(network, optimizer)["model"].items():
        load_into(tensor, known(name, tuple(tensor.shape)))
    for parameter, name in names_of(network).items():
        optimizer.state[parameter] = {"step": torch.tensor(float(STEP))}
        for key in ("exp_avg", "exp_avg_sq"):
            moment = torch.empty_like(parameter, requires_grad=False)
            load_into(moment, known(f"{key}/{name}", tuple(parameter.shape)))
            optimizer.state[parameter][key] = moment
    return network, optimizer


def save_known(rank: int, folder: Path) -> None:
    """Save them, sharded over the processes that call it."""
    network, optimizer = known_training("sharded")
    tensors, packed = pack_optimizer(optimizer, names_of(network))
    manager_of(folder).save(
        STEP,
        tensors={"model": tensors_of(network, optimizer)["model"], "optimizer": tensors},
        state={**STATE, "optimizer": packed},
        stamp={**STAMP, "config": {"learning_rate": 0.01, "task_prompts": ["a", None]}},
        best=True,
    )


def load_known(rank: int, kind: Kind) -> dict[str, Tensor]:
    """Load the frozen checkpoint into a network of other values, and return this process's tensors of it, whole."""
    network, optimizer = make(kind)
    loaded = manager_of(FROZEN).load("auto", required=["model", "optimizer", "epoch"])
    assert loaded is not None
    restore(network, optimizer, loaded)
    return whole_tensors(network, optimizer)
