"""The part of an encoder that trains: all of it, some towers, or low-rank adapters beside frozen weights.

1. `freeze` and `add_adapters` decide what trains and put it down in `encoder.trained`, a frozen `TrainedPart`.
2. `narrow_frozen` rounds frozen matrices to bfloat16 once where mixed precision would do it in every call.
3. `changing_names` and `base_fingerprint` tell a checkpoint what to hold and which frozen weights it stands beside.
4. `save_trained` writes the adapters alone in peft's format, merges them for good, and writes an ordinary model.

An adapter adds scale * B A x to what a frozen linear layer makes of x. A is random and B starts at zero, so that the
model begins as the one that was loaded and the first step moves B alone.

Source: Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; for weights of 4 bits Dettmers et al.,
2023, "QLoRA: Efficient Finetuning of Quantized LLMs".
"""

from __future__ import annotations

import difflib
import re
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from vembed.distributed.shards import keep_asked_dtype
from vembed.errors import ConfigError
from vembed.models.encoder import TrainedPart
from vembed.models.hub import save_background, tensors_sha256
from vembed.models.plannable import is_within
from vembed.text import one_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from vembed.models.encoder import Encoder
    from vembed.models.keys import AdapterKeys
    from vembed.models.plannable import Tower

ADAPTER = "default"
"""peft's name for the one adapter."""

SAVED_PREFIX = "base_model.model."
"""Prefix of every tensor's name in a file of peft."""

SAMPLED_VALUES = 1024
"""Values of each frozen tensor that its fingerprint covers: any fine-tuning changes nearly all of them."""

_LOST = "; updates smaller than 1/256 of a bfloat16 weight are lost (torch_dtype float32 or use_lora keeps them)"
_LAST_LAYERS = re.compile(r"last_(\d+)_layers")


# --- A part of the encoder --------------------------------------------------------------------------------------------


def freeze(encoder: Encoder, trainable: str) -> None:
    """Leave only a part of an encoder to train; what was frozen before stays so.

    Args:
        encoder: The encoder; its frozen modules run in evaluation mode from now on.
        trainable: "all", "projection", "vision", "text", sums and differences of these, or "last_N_layers".

    Raises:
        ConfigError: It has no such part; the message says what it has.
    """
    # The untrained head of late interaction stands behind all towers, so it trains with any part.
    head = encoder.new_modules if encoder.multi_vector else ()
    added, _, removed = trainable.partition("-")
    if trainable != "all":
        parts = tuple(part for name in added.split("+") for part in _part(encoder, name))
        without = _part(encoder, removed) if removed else ()
        for name, parameter in encoder.named_parameters():
            if not is_within(name, head) and (not is_within(name, parts) or is_within(name, without)):
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in encoder.parameters()):
            raise ConfigError(f"trainable {trainable}: nothing of it in {encoder.name} can be trained; set it to all")
    names_head = trainable == "all" or "projection" in added
    words = trainable.replace("_", " ") + ("" if names_head else "".join(f" and {part}" for part in head))
    halves = (torch.bfloat16, torch.float16)
    loses = any(parameter.requires_grad and parameter.dtype in halves for parameter in encoder.parameters())
    words = f"{words}: {_counts(encoder)}{_LOST if loses else ''}"
    eval_only = encoder.trained.eval_only if trainable == "all" else _frozen_modules(encoder)
    encoder.trained = TrainedPart(words, eval_only, keeps_base=trainable != "all")
    encoder.train(encoder.training)


def _part(encoder: Encoder, name: str) -> tuple[str, ...]:
    """Return the modules and parameters that one name in `trainable` means."""
    towers = encoder.towers()
    if name == "all":
        return tuple(parameter for parameter, _ in encoder.named_parameters())
    if not name.startswith("last_"):
        if name == "projection":
            parts = [part for tower in towers for part in tower.projection]
        else:
            parts = [part for tower in towers if tower.name == name for part in tower.parts]
        if not parts:
            what = "projection" if name == "projection" else f"{name} tower"
            raise ConfigError(f"trainable: {encoder.name} has no {what}; it has {', '.join(_trainables(encoder))}")
        return tuple(parts)
    match = _LAST_LAYERS.fullmatch(name)
    assert match is not None, name  # the schema lets no other value through
    wanted, parts = int(match[1]), []
    for tower in towers:
        if tower.layers is None:
            raise ConfigError(
                f"trainable: the {tower.name} tower of {encoder.name} has no list of layers to count from the end; "
                f"it has {', '.join(_trainables(encoder))}"
            )
        depth = _depth(encoder, tower)
        if wanted > depth:
            raise ConfigError(
                f"trainable: the {tower.name} tower of {encoder.name} has {depth} layers, not {wanted}; "
                f"write last_{depth}_layers, or all"
            )
        # With the last layers trains what runs after them: final norm, pooler, projection.
        parts += [*(f"{tower.layers}.{index}" for index in range(depth - wanted, depth)), *tower.behind]
    return tuple(parts)


def _depth(encoder: Encoder, tower: Tower) -> int:
    return 0 if tower.layers is None else len(list(encoder.get_submodule(tower.layers).children()))


def _trainables(encoder: Encoder) -> list[str]:
    """Return the values of `trainable` that an encoder has a part for."""
    towers = encoder.towers()
    values = ["all", *(tower.name for tower in towers)]
    if any(tower.projection for tower in towers):
        values.append("projection")
    shallowest = min(_depth(encoder, tower) for tower in towers)
    return [*values, f"last_1_layers to last_{shallowest}_layers"] if shallowest else values


def _counts(encoder: nn.Module) -> str:
    """Return how many of the parameters train, e.g. "1,024 of 4,096 parameters (25%)"."""
    sizes = [
        (parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1), parameter.requires_grad)  # 4 bits: 2 a byte
        for parameter in encoder.parameters()
    ]
    total, trained = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    return f"{trained:,} of {total:,} parameters ({100 * trained / total:.3g}%)"


def _frozen_modules(encoder: nn.Module) -> tuple[nn.Module, ...]:
    """Return the largest modules that hold parameters and none that trains."""
    frozen: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        trains = [parameter.requires_grad for parameter in module.parameters()]
        if trains and not any(trains):
            frozen.append(module)
        elif any(trains):
            for child in module.children():
                visit(child)

    visit(encoder)
    return tuple(frozen)


# --- Adapters ---------------------------------------------------------------------------------------------------------


class _Host(NamedTuple):
    """A network that peft changes."""

    network: nn.Module
    prefix: str  # its name in the encoder, with a dot
    folder: str  # where its adapters are saved, within the folder of all
    model: str  # what it was loaded by


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
    wanted = keys.lora_towers.split("+")
    towers = [tower for tower in encoder.towers() if tower.name in wanted or "all" in wanted]
    if not towers and wanted != ["projection"]:
        has = ", ".join(tower.name for tower in encoder.towers())
        raise ConfigError(f"lora_towers: {encoder.name} has no {wanted[0]} tower; it has {has}: write all")
    targets = _targets(encoder, hosts, towers, keys)
    alpha = 2 * keys.lora_r if keys.lora_alpha is None else keys.lora_alpha

    encoder.requires_grad_(requires_grad=False)
    for host in hosts:
        # peft knows layers by their names within its network. Networks without any must stay as they are.
        layers = [target.removeprefix(host.prefix) for target in targets if target.startswith(host.prefix)]
        if layers:
            config = LoraConfig(
                r=keys.lora_r,
                lora_alpha=alpha,  # type: ignore[arg-type]
                lora_dropout=keys.lora_dropout,
                target_modules=layers,
                # GPT-2's layers hold (in, out) instead of (out, in), and peft must transpose the product.
                fan_in_fan_out=all(isinstance(host.network.get_submodule(name), Conv1D) for name in layers),
            )
            inject_adapter_in_model(config, host.network, ADAPTER)

    # Modules without pretrained weights, such as a new projection, train in full: a low-rank change of random numbers
    # is of little use.
    inside = [part for tower in towers for part in tower.parts]
    # One head of late interaction stands behind all towers.
    new = [part for part in encoder.new_modules if encoder.multi_vector or is_within(part, inside)]
    for name, parameter in encoder.named_parameters():
        if is_within(name, new):
            parameter.requires_grad_(True)
        if parameter.requires_grad:  # small, and in bfloat16 most of their updates would be rounded away
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))

    # A frozen layer under adapters keeps its dropout, as it regularises them; a tower without any drops nothing.
    still = [part for tower in encoder.towers() if tower not in towers for part in tower.parts]
    frozen = set(_frozen_modules(encoder))
    eval_only = tuple(module for name, module in encoder.named_modules() if module in frozen and is_within(name, still))

    names = " and the ".join(tower.name for tower in towers)
    places = [f"the {names} tower{'s' * (len(towers) > 1)}"] if towers else []
    places += ["the projection"] if "projection" in wanted else []
    words = f"rank {keys.lora_r}, scale {alpha / keys.lora_r:g}, on {', '.join(_leaves(targets))}"
    beside = f" and {', '.join(new)}" if new else ""
    left_out = f"; adapter/ holds the adapters alone, model/ {' and '.join(new)} too" if new else ""
    words = f"LoRA adapters ({words} of {' and '.join(places)}){beside}: {_counts(encoder)}{left_out}"
    encoder.trained = TrainedPart(words, eval_only, keeps_base=True)
    encoder.train(encoder.training)


def _hosts(encoder: Encoder) -> list[_Host]:
    """Return the networks that may get adapters, at least one."""
    names = {module: f"{name}." for name, module in encoder.named_modules()}
    parts = [(folder, part.name, part.adapter_host()) for folder, part in encoder.parts().items()]
    hosts = [_Host(network, names[network], folder, name) for folder, name, network in parts if network is not None]
    if not hosts:
        raise ConfigError(
            f"use_lora: {encoder.name} has no transformer layers to put adapters beside; set use_lora to false"
        )
    return hosts


def takes_adapters(encoder: Encoder) -> bool:
    """Return whether an encoder has transformer layers to put adapters beside."""
    return any(part.adapter_host() is not None for part in encoder.parts().values())


def _targets(encoder: Encoder, hosts: Sequence[_Host], towers: Sequence[Tower], keys: AdapterKeys) -> list[str]:
    """Return the layers that get adapters, by their full names."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    projections: list[str] = []
    if "projection" in keys.lora_towers.split("+"):
        projections = [part for tower in encoder.towers() for part in tower.projection]
        if not projections:
            raise ConfigError(f"lora_towers {keys.lora_towers}: {encoder.name} has no projection; leave it out")
    inside = [*(part for tower in towers for part in tower.parts), *projections]
    linear = []  # layers that a forward pass calls
    for host in hosts:
        read_past = _read_past(host.network)
        linear += [
            host.prefix + name
            for name, module in host.network.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
            and not is_within(name, read_past)
            and is_within(host.prefix + name, inside)
        ]
    if keys.lora_target_modules != "auto":
        named = []
        for target in keys.lora_target_modules:
            matching = [name for name in linear if f".{name}".endswith(f".{target}")]
            if not matching:
                _refuse_target(encoder, hosts, linear, target)
            named += matching
        return sorted(set(named))
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
    # "auto" spares the head behind the layers, which is small, and the patch embedding before them.
    layers = [tower.layers for tower in towers if tower.layers is not None]
    return [name for name in linear if is_within(name, [*layers, *projections])]


def _read_past(network: nn.Module) -> list[str]:
    """Return the linear layers that are never called, since their attention reads the weights past them.

    An adapter beside such a layer would never be used, and nothing would say so.
    """
    names = []
    for name, module in network.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            names.append(name)
        elif getattr(module, "q_bias", None) is not None and not getattr(module, "qkv_bias_separate", False):
            names.append(f"{name}.qkv")  # timm's, where the biases of one matrix are kept apart
    return names


def _refuse_target(encoder: Encoder, hosts: Sequence[_Host], linear: Sequence[str], target: str) -> None:
    """Say why a name in `lora_target_modules` means no layer, and what would."""
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
            f"lora_target_modules: {target} of {encoder.name} is {one_of(sorted(kinds))} or outside of "
            f"lora_towers; an adapter needs a linear layer of those towers: {hint}"
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


# --- Frozen weights in fewer bits -------------------------------------------------------------------------------------


def narrow_frozen(encoder: Encoder, autocast_dtype: torch.dtype | None) -> int:
    """Hold frozen matrices in bfloat16 where mixed precision computes in it: half the memory, and the same numbers.

    Autocast rounds the weight of a linear layer to bfloat16 in every call; one that doesn't train is rounded once
    instead, and no call holds a copy of it any more. Only linear layers within the lists of transformer layers are:
    autocast rounds neither norms nor embeddings, biases are small, and what stands behind the layers may compute in
    float32. So every embedding and every gradient stays the same to the last bit. Only the copy in memory is rounded;
    what is written is built from the model's files again.

    Args:
        encoder: On any device, the meta device included, after `freeze` or `add_adapters`.
        autocast_dtype: Type of mixed precision, None without. With any other type nothing changes.

    Returns:
        Number of values that were rounded.
    """
    if autocast_dtype is not torch.bfloat16 or not encoder.trained.keeps_base:
        return 0
    from transformers.pytorch_utils import Conv1D

    count = 0
    for tower in encoder.towers():
        for layer in () if tower.layers is None else encoder.get_submodule(tower.layers).children():
            keep_asked_dtype(layer)
            for module in layer.modules():
                # Autocast leaves float64 alone, and weights of half precision are narrow already.
                if (
                    isinstance(module, nn.Linear | Conv1D)
                    and module.weight.dtype is torch.float32
                    and not module.weight.requires_grad
                ):
                    module.weight.data = module.weight.data.to(autocast_dtype)
                    count += module.weight.numel()
    narrowed_bytes = count * (torch.float32.itemsize - autocast_dtype.itemsize)
    encoder.trained = replace(encoder.trained, narrowed_bytes=narrowed_bytes)
    return count


def narrowed_bytes(module: nn.Module) -> int:
    """Return the bytes that frozen weights take less here than in a file."""
    trained = getattr(module, "trained", None)
    return 0 if trained is None else int(trained.narrowed_bytes)


def _is_quantized(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Linear4bit"  # by name, since bitsandbytes is seldom installed


def _plain_layer(layer: Any, dtype: torch.dtype) -> Any:
    """Return a linear layer itself, or where its weights have 4 bits an ordinary one with those they stand for."""
    if not _is_quantized(layer):
        return layer
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(layer)
    # On the meta device, as torch would fill a new layer with random numbers first.
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    return plain.train(layer.training)


# --- Checkpoints and the end of training ------------------------------------------------------------------------------


def changing_names(module: nn.Module) -> frozenset[str] | None:
    """Return the tensors that training changes; None where a checkpoint should hold everything.

    Returns:
        Names of the parameters that train and of the buffers of modules that do, as in its state_dict.
    """
    trained = getattr(module, "trained", None)
    if trained is None or not trained.keeps_base:
        return None
    eval_only = set(trained.eval_only)
    still = [name for name, child in module.named_modules() if child in eval_only]
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    stored = module.state_dict(keep_vars=True)  # buffers that aren't persistent are made anew, not loaded
    # Statistics of batch normalisation move without a gradient wherever a module is in training mode.
    names |= {name for name, _ in module.named_buffers() if name in stored and not is_within(name, still)}
    return frozenset(names)


def base_fingerprint(encoder: Encoder) -> str | None:
    """Return a hash of the weights that checkpoints leave out; None where they hold everything.

    It covers the name, type and shape of each and an even sample of its values, so that it costs well under a second
    where hashing every byte would take as long as reading the model.
    """
    changing = changing_names(encoder)
    if changing is None:
        return None
    frozen = ((name, tensor) for name, tensor in sorted(encoder.named_parameters()) if name not in changing)
    return tensors_sha256(frozen, sampled_values=SAMPLED_VALUES)


def save_trained(encoder: Encoder, model: Path, adapter: Path) -> None:
    """Write an encoder as an ordinary model; adapters are written beside it first and then merged for good.

    Args:
        encoder: At the end of its training: it can't continue afterwards.
        adapter: Folder of the adapters alone, in peft's format; written where there are any.
    """
    # `peft.PeftModel.from_pretrained` reads the adapters; those of each part are in its subfolder.
    for host in _hosts(encoder) if has_adapters(encoder) else ():
        layers = list(adapter_layers(host.network))
        if not layers:
            continue
        config: Any = copy(host.network.peft_config[ADAPTER])  # type: ignore[index]
        config.base_model_name_or_path = host.model
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)  # a set otherwise, in another order each time
        folder = adapter / host.folder
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        tensors = {}
        for name, layer in layers:
            for factor in ("lora_A", "lora_B"):
                weight = getattr(layer, factor)[ADAPTER].weight
                tensors[f"{SAVED_PREFIX}{name}.{factor}.weight"] = weight.detach().cpu().contiguous()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    if has_adapters(encoder):
        merge_adapters(encoder)
    encoder.save(model)
    save_background(encoder, model)


@torch.no_grad()
def merge_adapters(encoder: Encoder) -> None:
    """Add the adapters to the weights beside them, for good: afterwards the encoder is an ordinary one.

    The sum is taken in the type of the adapters and rounded once, to that of the weights; weights of 4 bits become
    those that they stand for.

    Args:
        encoder: With adapters; it can't continue training them.
    """
    for host in _hosts(encoder):
        network: Any = host.network
        dtype = next(
            weight.dtype for weight in network.parameters() if weight.is_floating_point() and not weight.requires_grad
        )
        for name, layer in list(adapter_layers(network)):
            base = _plain_layer(layer.get_base_layer(), dtype)
            delta = layer.get_delta_weight(ADAPTER)  # scale * B A, transposed where the layer is
            # In the wider type of both, so that only the sum is rounded, and not the delta before it.
            wide = torch.promote_types(base.weight.dtype, delta.dtype)
            base.weight.data = (base.weight.to(wide) + delta.to(wide)).to(base.weight.dtype)
            _replace_layer(network, name, base)
        if hasattr(network, "peft_config"):
            del network.peft_config
        if not getattr(network, "is_quantized", False):
            continue
        # Layers without adapters have 4 bits still; and transformers would write the model's description as of 4 bits.
        for name, layer in list(network.named_modules()):
            if _is_quantized(layer):
                _replace_layer(network, name, _plain_layer(layer, dtype))
        network.is_quantized = False
        for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit"):
            if hasattr(network, name):
                delattr(network, name)
        if hasattr(network.config, "quantization_config"):
            del network.config.quantization_config
    encoder.trained = replace(encoder.trained, keeps_base=False, eval_only=())


def _replace_layer(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(parent), leaf, layer)
