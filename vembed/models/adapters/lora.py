"""Low-rank adapters beside frozen weights, by peft: put in, written in peft's own format, merged for good.

An adapter adds scale * B A x to what a frozen linear layer makes of x; A is random, B starts at zero, so that the model
begins as the one that was loaded and the first step moves B alone.

Source: Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

import difflib
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from vembed.errors import ConfigError
from vembed.models.adapters.quantized import forget_quantization, plain_layer, weight_dtype
from vembed.models.adapters.trainable import counts, frozen_modules
from vembed.models.encoder import TrainedPart
from vembed.models.plannable import is_within

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from vembed.models.encoder import Encoder
    from vembed.models.keys import AdapterKeys
    from vembed.models.plannable import Tower

ADAPTER = "default"
"""peft's name for the one adapter."""

SAVED_PREFIX = "base_model.model."
"""What peft puts before the name of each tensor in a file."""


def add_adapters(encoder: Encoder, keys: AdapterKeys) -> None:
    """Freeze an encoder and put adapters beside its linear layers, float32 at least.

    Args:
        encoder: On any device, the meta device included; towers without adapters run in evaluation mode from now on.

    Raises:
        ConfigError: It has no such tower or layers, or none that can have adapters.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    hosts = _hosts(encoder)
    towers = _towers(encoder, keys)
    targets = _targets(encoder, hosts, towers, keys)
    alpha = 2 * keys.lora_r if keys.lora_alpha is None else keys.lora_alpha
    encoder.requires_grad_(requires_grad=False)
    for host in hosts:
        own = [target.removeprefix(host.prefix) for target in targets if target.startswith(host.prefix)]
        config = LoraConfig(
            r=keys.lora_r,
            lora_alpha=alpha,  # type: ignore[arg-type]
            lora_dropout=keys.lora_dropout,
            target_modules=own,
            fan_in_fan_out=all(isinstance(host.network.get_submodule(target), Conv1D) for target in own),
        )
        if own:
            inject_adapter_in_model(config, host.network, ADAPTER)
    inside = [part for tower in towers for part in tower.parts]
    # One head of late interaction stands behind all towers.
    new = [part for part in encoder.new_modules if encoder.multi_vector or is_within(part, inside)]
    for name, parameter in encoder.named_parameters():
        if is_within(name, new):
            parameter.requires_grad_(True)
    for parameter in encoder.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    still = [part for tower in encoder.towers() if tower not in towers for part in tower.parts]
    frozen = set(frozen_modules(encoder))
    eval_only = tuple(module for name, module in encoder.named_modules() if module in frozen and is_within(name, still))
    leaves = ", ".join(sorted({target.rpartition(".")[2] for target in targets}))
    words = f"rank {keys.lora_r}, scale {alpha / keys.lora_r:g}, on {leaves}"
    beside = f" and {', '.join(new)}" if new else ""
    left_out = f"; adapter/ holds the adapters alone, model/ {' and '.join(new)} too" if new else ""
    words = f"LoRA adapters ({words} of {_listed(towers, keys)}){beside}: {counts(encoder)}{left_out}"
    encoder.trained = TrainedPart(words, eval_only, keeps_base=True)
    encoder.train(encoder.training)


class _Host(NamedTuple):
    """A network that peft changes."""

    network: nn.Module
    prefix: str  # its name in the encoder, with a dot
    folder: str  # where its adapters are saved, within the folder of all
    model: str  # what it was loaded by


def _hosts(encoder: Encoder) -> list[_Host]:
    """Return the networks that may get adapters, at least one."""
    names = {module: f"{name}." for name, module in encoder.named_modules()}
    found = [(folder, part.name, part.adapter_host()) for folder, part in encoder.parts().items()]
    hosts = [_Host(host, names[host], folder, model) for folder, model, host in found if host is not None]
    if not hosts:
        raise ConfigError(
            f"use_lora: {encoder.name} has no transformer layers to put adapters beside; set use_lora to false"
        )
    return hosts


def takes_adapters(encoder: Encoder) -> bool:
    """Return whether an encoder has transformer layers to put adapters beside."""
    return any(part.adapter_host() is not None for part in encoder.parts().values())


def _towers(encoder: Encoder, keys: AdapterKeys) -> list[Tower]:
    """Return the towers that get adapters in their layers."""
    wanted = keys.lora_towers.split("+")
    towers = [tower for tower in encoder.towers() if tower.name in wanted or "all" in wanted]
    if not towers and wanted != ["projection"]:
        has = ", ".join(tower.name for tower in encoder.towers())
        raise ConfigError(f"lora_towers: {encoder.name} has no {wanted[0]} tower; it has {has}: write all")
    return towers


def _projections(encoder: Encoder, keys: AdapterKeys) -> list[str]:
    """Return the projections that get adapters."""
    if "projection" not in keys.lora_towers.split("+"):
        return []
    found = [part for tower in encoder.towers() for part in tower.projection]
    if not found:
        raise ConfigError(f"lora_towers {keys.lora_towers}: {encoder.name} has no projection; leave it out")
    return found


def _listed(towers: Sequence[Tower], keys: AdapterKeys) -> str:
    named = [f"the {' and the '.join(tower.name for tower in towers)} tower{'s' * (len(towers) > 1)}"] if towers else []
    return " and ".join([*named, *(["the projection"] if "projection" in keys.lora_towers else [])])


def _targets(encoder: Encoder, hosts: Sequence[_Host], towers: Sequence[Tower], keys: AdapterKeys) -> list[str]:
    """Return the layers that get adapters, by their full names."""
    projections = _projections(encoder, keys)
    inside = [*(part for tower in towers for part in tower.parts), *projections]
    linear = [name for host in hosts for name in _linear_layers(host) if is_within(name, inside)]
    if keys.lora_target_modules != "auto":
        return _named(encoder, hosts, linear, keys.lora_target_modules)
    if projections and not any(is_within(name, projections) for name in linear):
        raise ConfigError(
            f"lora_towers {keys.lora_towers}: the projection of {encoder.name} has no linear layer that can get an "
            f"adapter; leave it out"
        )
    for tower in towers:
        if tower.layers is None:
            raise ConfigError(
                f"lora_target_modules: the {tower.name} tower of {encoder.name} has no list of transformer layers to "
                f"take them from; name the linear layers, such as [{_leaves(linear)[0] if linear else 'fc'}]"
            )
    layers = [tower.layers for tower in towers if tower.layers is not None]
    return [name for name in linear if is_within(name, [*layers, *projections])]


def _linear_layers(host: _Host) -> Iterator[str]:
    """Yield the linear layers that a forward pass calls."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, its weight the other way round

    past = _read_past(host.network)
    for name, module in host.network.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not is_within(name, past):
            yield host.prefix + name


def _read_past(network: nn.Module) -> list[str]:
    """Return the modules of which an attention reads the weights past their layers."""
    found = []
    for name, module in network.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found.append(name)
        elif getattr(module, "q_bias", None) is not None and not getattr(module, "qkv_bias_separate", False):
            found.append(f"{name}.qkv")  # timm's, where the biases of one matrix are kept apart
    return found


def _named(encoder: Encoder, hosts: Sequence[_Host], linear: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the layers that the user named, by the last parts of their names."""
    found = []
    for target in wanted:
        matching = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not matching:
            _refuse_target(encoder, hosts, linear, target)
        found += matching
    return sorted(set(found))


def _refuse_target(encoder: Encoder, hosts: Sequence[_Host], linear: Sequence[str], target: str) -> None:
    leaves = _leaves(linear)
    near = difflib.get_close_matches(target, leaves, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(leaves)}"
    modules = [named for host in hosts for named in host.network.named_modules()]
    kinds = {type(module).__name__ for name, module in modules if f".{name}".endswith(f".{target}")}
    if kinds & {"MultiheadAttention", "NonDynamicallyQuantizableLinear"}:
        raise ConfigError(
            f"lora_target_modules: {target} of {encoder.name} belongs to torch's MultiheadAttention, which reads its "
            f"weights past the layer, so that an adapter would never be used; take {', '.join(leaves)}"
        )
    if any(f".{name}".endswith(f".{target}") for host in hosts for name in _read_past(host.network)):
        raise ConfigError(
            f"lora_target_modules: {target} of {encoder.name} is a layer past which its attention reads the weights, "
            f"so that an adapter would never be used; take {', '.join(leaves)}"
        )
    if kinds:
        raise ConfigError(
            f"lora_target_modules: {target} of {encoder.name} is {' or '.join(sorted(kinds))} or outside of "
            f"lora_towers; adapters stand beside linear layers of those towers: {hint}"
        )
    raise ConfigError(f"lora_target_modules: {encoder.name} has no linear layer {target}; {hint}")


def _leaves(names: Sequence[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def adapter_layers(encoder: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield peft's layers by their names."""
    for name, module in encoder.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            yield name, module


def has_adapters(encoder: nn.Module) -> bool:
    """Return whether adapters stand beside an encoder's layers."""
    return next(adapter_layers(encoder), None) is not None


def save_adapter(encoder: Encoder, folder: Path) -> None:
    """Write the adapters alone, as `peft.PeftModel.from_pretrained` reads them; those of each part in its subfolder."""
    for host in _hosts(encoder):
        if has_adapters(host.network):
            _save_adapter(host, folder / host.folder)


def _save_adapter(host: _Host, folder: Path) -> None:
    config: Any = copy(host.network.peft_config[ADAPTER])  # type: ignore[index]
    config.base_model_name_or_path = host.model
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tensors = {}
    for name, layer in adapter_layers(host.network):
        for factor in ("lora_A", "lora_B"):
            weight = getattr(layer, factor)[ADAPTER].weight
            tensors[f"{SAVED_PREFIX}{name}.{factor}.weight"] = weight.detach().cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def merge_adapters(encoder: Encoder) -> None:
    """Add the adapters to the weights beside them, for good: afterwards the encoder is an ordinary one.

    The sum is taken in the type of the adapters and rounded once, to that of the weights; weights of 4 bits become
    those that they stand for.

    Args:
        encoder: With adapters; it can't continue training them.
    """
    for host in _hosts(encoder):
        _merge(host.network)
    encoder.trained = replace(encoder.trained, keeps_base=False, eval_only=())


def _merge(network: nn.Module) -> None:
    dtype = weight_dtype(network)
    for name, layer in list(adapter_layers(network)):
        base = plain_layer(layer.get_base_layer(), dtype)
        delta = layer.get_delta_weight(ADAPTER)
        wide = torch.promote_types(base.weight.dtype, delta.dtype)
        base.weight.data = (base.weight.to(wide) + delta.to(wide)).to(base.weight.dtype)
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, base)
    if hasattr(network, "peft_config"):
        del network.peft_config
    forget_quantization(network)
