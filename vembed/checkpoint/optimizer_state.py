"""Optimizer state as named tensors and JSON, so that it is stored without pickle and outlives parameter order.

torch numbers parameters by position and casts state to the parameter's dtype when it loads; here every tensor goes by
its parameter's name ("exp_avg/encoder.weight") and comes back bit for bit in the dtype that it had. Where several
processes hold a parameter together, its state is cut as it is, whether or not it was so when it was saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from vembed.checkpoint.format import JSON, InvalidCheckpointError
from vembed.checkpoint.tensors import SharedTensor, load_into, whole
from vembed.errors import ConfigError
from vembed.json_text import fit

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor
    from torch.optim import Optimizer

    from vembed.checkpoint.tensors import Saved


def pack_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """Return everything that an optimizer remembers.

    Args:
        optimizer: Any whose state per parameter is tensors, numbers, bools, strings and None: AdamW, SGD, Adafactor ...
        names: Parameter -> name, e.g. turned round from `model.named_parameters()`; may hold more than are optimized.

    Returns:
        Tensors by "state key/parameter name", not copied; and JSON with the optimizer's class, the groups
        (hyper-parameters, names), the shape of each parameter, the state that isn't tensors, and the tensors' keys.

    Raises:
        ValueError: A parameter has no name, or a value has a type that can't be stored.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, JSON] = {}
    groups: list[dict[str, JSON]] = []
    shapes: dict[str, JSON] = {}
    for group in optimizer.param_groups:
        members = [_name_of(parameter, names) for parameter in group["params"]]
        settings = {key: _storable(value, where=key) for key, value in group.items() if key != "params"}
        groups.append({"names": members, "settings": settings})
        for parameter, name in zip(group["params"], members, strict=True):
            shapes[name] = list(parameter.shape)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}/{name}"] = value.detach()
                else:
                    scalars[f"{key}/{name}"] = _storable(value, where=f"{key}/{name}")
    packed: dict[str, JSON] = {
        "class": type(optimizer).__name__,
        "groups": groups,
        "shapes": shapes,
        "scalars": scalars,
        "tensor_keys": sorted(tensors),
    }
    return tensors, packed


def unpack_optimizer(
    optimizer: Optimizer, names: Mapping[Tensor, str], *, tensors: Mapping[str, Saved], packed: Mapping[str, JSON]
) -> None:
    """Give an optimizer back what `pack_optimizer` took; whatever it remembers now is forgotten.

    Class, groups, names, shapes and keys are checked before anything changes. Each tensor goes to its parameter's
    device, but a step counter stays on the CPU where torch wants it there. The parameters' order may differ.

    Raises:
        ConfigError: Another class, other groups, names or shapes than this optimizer's.
        InvalidCheckpointError: Tensors are missing or don't belong.
    """
    saved_groups = cast("Sequence[Mapping[str, JSON]]", packed["groups"])
    _check_same(optimizer, names, packed=packed, saved_groups=saved_groups)
    expected = set(cast("Sequence[str]", packed["tensor_keys"]))
    if tensors.keys() != expected:
        raise InvalidCheckpointError(
            f"optimizer state: {_listed('Missing', expected - tensors.keys())}"
            f"{_listed('Not expected', tensors.keys() - expected)}"
        )
    state: dict[str, dict[str, object]] = {}  # parameter name -> key -> value
    for entries in (tensors, cast("Mapping[str, JSON]", packed["scalars"])):
        for entry, value in entries.items():
            key, name = entry.split("/", 1)
            state.setdefault(name, {})[key] = value
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        settings = cast("Mapping[str, JSON]", saved["settings"])
        if bent := [key for key in settings if key in group and _kind(settings[key]) != _kind(group[key])]:
            raise InvalidCheckpointError(f"optimizer: {_listed('Settings of another type', bent)}")
        for key, value in settings.items():
            # JSON has one kind of sequence; torch's own are tuples (betas).
            group[key] = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for parameter in group["params"]:
            # A parameter that never had a gradient has no state, before or after.
            if (remembered := state.get(names[parameter])) is not None:
                optimizer.state[parameter] = {
                    key: _placed(value, key=key, parameter=parameter, group=group) for key, value in remembered.items()
                }


def check_packed(packed: Mapping[str, JSON]) -> None:
    """Refuse JSON that `pack_optimizer` can't have returned.

    Raises:
        ValueError: A value is of another type, or names don't belong together.
        KeyError: A key is missing.
    """
    shapes = fit(dict[str, list[int]], packed["shapes"], where="state.json: optimizer['shapes']")
    for group in fit(list[dict[str, Any]], packed["groups"], where="state.json: optimizer['groups']"):
        fit(dict[str, Any], group["settings"], where="state.json: optimizer['groups']['settings']")
        names = fit(list[str], group["names"], where="state.json: optimizer['groups']['names']")
        if unknown := set(names) - shapes.keys():
            raise ValueError(f"state.json: optimizer: {_listed('No shape of', unknown)}")
    keys = fit(list[str], packed["tensor_keys"], where="state.json: optimizer['tensor_keys']")
    scalars = fit(dict[str, str | int | float | None], packed["scalars"], where="state.json: optimizer['scalars']")
    if strange := [key for key in (*keys, *scalars) if key.partition("/")[2] not in shapes]:
        raise ValueError(f"state.json: optimizer: {_listed('State of no parameter', strange)}")


def _placed(value: object, *, key: str, parameter: Tensor, group: Mapping[str, object]) -> object:
    """Return a copy of a state value where and as the optimizer wants it."""
    if not isinstance(value, torch.Tensor | SharedTensor):
        return value
    if key == "step":  # AdamW counts steps on the CPU unless a kernel on the device reads the count
        on_cpu = not group.get("capturable") and not group.get("fused")
        return whole(value).to("cpu" if on_cpu else parameter.device, copy=True)
    # Moments have their parameter's shape. They are cut like it and laid out like it, transposed where it is: a fused
    # kernel goes through both in the order of memory. Adafactor's rows and columns are whole on every process.
    if tuple(value.shape) == tuple(parameter.shape):
        moment = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        load_into(moment, value)
        return moment
    return whole(value).to(parameter.device, copy=True)


def _check_same(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    *,
    packed: Mapping[str, JSON],
    saved_groups: Sequence[Mapping[str, JSON]],
) -> None:
    """Refuse state of another optimizer, with what differs."""
    if packed["class"] != type(optimizer).__name__:
        raise ConfigError(
            f"optimizer: the checkpoint holds {packed['class']}, this run uses {type(optimizer).__name__}"
        )
    if len(saved_groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"optimizer: the checkpoint holds {len(saved_groups)} parameter groups, "
            f"this run has {len(optimizer.param_groups)}"
        )
    shapes = cast("Mapping[str, Sequence[int]]", packed["shapes"])
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        here = {_name_of(parameter, names): list(parameter.shape) for parameter in group["params"]}
        there = {name: list(shapes[name]) for name in cast("Sequence[str]", saved["names"])}
        if here != there:
            differing = [name for name in here if name in there and here[name] != there[name]]
            raise ConfigError(
                f"optimizer: parameter group {number} differs. {_listed('Only in the checkpoint', there.keys() - here)}"
                f"{_listed('Only in this run', here.keys() - there)}{_listed('Other shape', differing)}"
                "Resume with the model, trainable and LoRA settings of the checkpoint, or set resume: never."
            )


def _listed(heading: str, names: Collection[str]) -> str:
    """Return "heading: a, b, c and 4 more. ", or nothing when there are no names."""
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{heading}: {', '.join(sorted(names)[:3])}{more}. "


def _kind(value: object) -> object:
    """Return the type of a hyper-parameter as JSON tells types apart, to refuse one of another."""
    if isinstance(value, list | tuple):
        return [_kind(item) for item in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def _name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    if parameter not in names:
        raise ValueError(f"an optimized parameter of shape {tuple(parameter.shape)} has no name")
    return names[parameter]


def _storable(value: object, *, where: str) -> JSON:
    """Return a hyper-parameter or a scalar of the state as JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_storable(item, where=where) for item in value]
    raise ValueError(f"optimizer: {where} is a {type(value).__name__}; only numbers, strings and tuples can be stored")
