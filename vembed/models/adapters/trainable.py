"""Freeze a part of an encoder: no gradient, no optimizer state, and no dropout in what is frozen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from vembed.errors import ConfigError
from vembed.models.encoder import TrainedPart
from vembed.models.plannable import is_within

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from vembed.models.encoder import Encoder
    from vembed.models.plannable import Tower

_HALVES = {torch.bfloat16, torch.float16}
_LOST = "; updates smaller than 1/256 of a bfloat16 weight are lost (torch_dtype float32 or use_lora keeps them)"
_LAST_LAYERS = re.compile(r"last_(\d+)_layers")


def freeze(encoder: Encoder, trainable: str) -> None:
    """Leave only a part of an encoder to train; what was frozen before stays so.

    Args:
        encoder: The encoder; its frozen modules run in evaluation mode from now on.
        trainable: "all", "projection", "vision", "text", sums and differences of these, or "last_N_layers".

    Raises:
        ConfigError: It has no such part; the message says what it has.
    """
    if trainable != "all":
        trains = _choice(encoder, trainable)
        for name, parameter in encoder.named_parameters():
            if not trains(name):
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in encoder.parameters()):
            raise ConfigError(f"trainable {trainable}: nothing of it in {encoder.name} can be trained; set it to all")
    has_head = trainable == "all" or "projection" in trainable.partition("-")[0]
    beside = "" if has_head else "".join(f" and {part}" for part in _new_head(encoder))
    words = trainable.replace("_", " ") + beside
    half = any(each.requires_grad and each.dtype in _HALVES for each in encoder.parameters())
    words = f"{words}: {counts(encoder)}{_LOST if half else ''}"
    eval_only = encoder.trained.eval_only if trainable == "all" else frozen_modules(encoder)
    encoder.trained = TrainedPart(words, eval_only, keeps_base=trainable != "all")
    encoder.train(encoder.training)


def counts(encoder: nn.Module) -> str:
    """Return how many of the parameters train, e.g. "1,024 of 4,096 parameters (25%)"."""
    sizes = [
        (parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1), parameter.requires_grad)  # 4 bits: 2 a byte
        for parameter in encoder.parameters()
    ]
    total, trained = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    return f"{trained:,} of {total:,} parameters ({100 * trained / total:.3g}%)"


def frozen_modules(encoder: nn.Module) -> tuple[nn.Module, ...]:
    """Return the largest modules that hold parameters and none that trains."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        trains = [parameter.requires_grad for parameter in module.parameters()]
        if trains and not any(trains):
            found.append(module)
        elif any(trains):
            for child in module.children():
                visit(child)

    visit(encoder)
    return tuple(found)


def _choice(encoder: Encoder, trainable: str) -> Callable[[str], bool]:
    """Return what says by its name whether a parameter trains."""
    added, _, removed = trainable.partition("-")
    parts = tuple(part for name in added.split("+") for part in _parts(encoder, name))
    without, head = _parts(encoder, removed) if removed else (), _new_head(encoder)
    return lambda name: is_within(name, head) or (is_within(name, parts) and not is_within(name, without))


def _parts(encoder: Encoder, name: str) -> tuple[str, ...]:
    """Return the modules and parameters of a part."""
    towers = encoder.towers()
    if name == "all":
        return tuple(each for each, _ in encoder.named_parameters())
    if name.startswith("last_"):
        return _last_layers(encoder, towers, name)
    if name == "projection":
        parts = tuple(part for tower in towers for part in tower.projection)
    else:
        parts = tuple(part for tower in towers for part in tower.parts if tower.name == name)
    if not parts:
        what = "projection" if name == "projection" else f"{name} tower"
        raise ConfigError(f"trainable: {encoder.name} has no {what}; it has {', '.join(possible(encoder))}")
    return parts


def _new_head(encoder: Encoder) -> tuple[str, ...]:
    """Return the untrained head of late interaction, which stands behind all towers and trains with any of them."""
    return encoder.new_modules if encoder.multi_vector else ()


def _last_layers(encoder: Encoder, towers: tuple[Tower, ...], trainable: str) -> tuple[str, ...]:
    """Return the last layers of each tower and what stands behind them."""
    match = _LAST_LAYERS.fullmatch(trainable)
    assert match is not None, trainable  # the schema knows no other value
    wanted, parts = int(match[1]), []
    for tower in towers:
        if tower.layers is None:
            raise ConfigError(
                f"trainable: the {tower.name} tower of {encoder.name} has no list of layers to count from the end; "
                f"it has {', '.join(possible(encoder))}"
            )
        depth = _depth(encoder, tower)
        if wanted > depth:
            raise ConfigError(
                f"trainable: the {tower.name} tower of {encoder.name} has {depth} layers, not {wanted}; "
                f"write last_{depth}_layers, or all"
            )
        parts += [f"{tower.layers}.{place}" for place in range(depth - wanted, depth)]
        parts += tower.behind
    return tuple(parts)


def _depth(encoder: Encoder, tower: Tower) -> int:
    """Return the number of layers of a tower, 0 where it has no list of them."""
    return 0 if tower.layers is None else len(list(encoder.get_submodule(tower.layers).children()))


def possible(encoder: Encoder) -> list[str]:
    """Return the values of `trainable` that an encoder has a part for."""
    towers = encoder.towers()
    found = ["all", *(tower.name for tower in towers)]
    if any(tower.projection for tower in towers):
        found.append("projection")
    shallowest = min(_depth(encoder, tower) for tower in towers)
    return [*found, f"last_1_layers to last_{shallowest}_layers"] if shallowest else found
