"""The anatomy of an encoder: its towers, their layers and projections, by the names of modules and parameters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

TowerName: TypeAlias = Literal["text", "vision"]


@dataclass(frozen=True, slots=True)
class Tower:
    """What encodes one modality. All names are those of modules or parameters within the encoder."""

    name: TowerName
    parts: tuple[str, ...]
    projection: tuple[str, ...] = ()  # what maps it to the embedding space; empty where nothing does
    layers: str | None = None  # its list of transformer layers
    behind: tuple[str, ...] = ()  # what stands behind the layers, `projection` included
    period: int = 1  # layers after which their kinds come again, so that few stand for all; 0: no two are alike


def is_within(name: str, parts: Iterable[str]) -> bool:
    """Return whether a module or a parameter is one of the parts or belongs to one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def parameters_within(encoder: nn.Module, parts: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters of some parts by name."""
    return {name: parameter for name, parameter in encoder.named_parameters() if is_within(name, parts)}


def find_layers(encoder: nn.Module, parts: Sequence[str], *, depth: int | None) -> str | None:
    """Return the name of the list of layers among some parts: the longest list of modules of one class.

    Args:
        depth: How many layers there are, where the model's files say so; a list of another length is none of layers.
    """
    longest, found = 0, None
    for name, module in encoder.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not is_within(name, parts):
            continue
        alike = len({type(layer) for layer in module}) == 1 and next(module.parameters(), None) is not None
        if alike and len(module) > longest and depth in (None, len(module)):
            longest, found = len(module), name
    return found


def find_tower(
    encoder: nn.Module,
    name: TowerName,
    *,
    parts: tuple[str, ...],
    projection: tuple[str, ...] = (),
    depth: int | None = None,
    period: int = 1,
) -> Tower:
    """Return a tower whose modules are registered in the order in which they run, as transformers' are.

    Args:
        projection: What maps it to the embedding space; names that hold no parameter are left out.
        depth: How many layers it has, where the model's files say so.
        period: Layers after which their kinds come again; 0 where they don't.
    """
    parameters = list(parameters_within(encoder, parts))
    projection = tuple(part for part in projection if any(is_within(each, [part]) for each in parameters))
    layers = find_layers(encoder, parts, depth=depth)
    if layers is None:
        return Tower(name, parts, projection)
    last = max(place for place, each in enumerate(parameters) if is_within(each, [layers]))
    behind = tuple(each for each in parameters[last + 1 :] if not is_within(each, projection))
    return Tower(name, parts, projection, layers, (*behind, *projection), period)


def transformer_depth(config: Any) -> int | None:
    """Return the number of layers of a stack of transformers by its config, None where that doesn't say."""
    return getattr(config, "num_hidden_layers", None)


def transformer_period(config: Any) -> int:
    """Return after how many layers the kinds of a stack's layers come again."""
    kinds = list(getattr(config, "layer_types", None) or [])
    return next((period for period in range(1, len(kinds)) if kinds[period:] == kinds[:-period]), max(1, len(kinds)))


def layer_values(num_layers: int, hidden: int, num_heads: int, length: int) -> float:
    """Return the values that a token keeps for the backward pass in all layers of a transformer.

    A layer with hidden dim h and a heads keeps 17 h + 2.5 a T values of each token of a row of T tokens (dropout masks
    counted as half a value); the attention's share is that of a kernel that stores its weights.

    Source: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 2.
    """
    return num_layers * (17 * hidden + 2.5 * num_heads * length)


def copy_modules(module: nn.Module, lengths: Mapping[str, int]) -> nn.Module:
    """Copy a tree of modules; values of parameters and all that is no module are shared with the original.

    Args:
        lengths: Lists of modules by name, and how many of their first modules to copy.
    """
    made: dict[int, Any] = {}  # what two modules share stays one

    def parameter_of(original: nn.Parameter) -> nn.Parameter:
        if id(original) not in made:
            made[id(original)] = nn.Parameter(original.detach(), requires_grad=original.requires_grad)
        return made[id(original)]  # type: ignore[no-any-return]

    def module_of(original: nn.Module, name: str) -> nn.Module:
        if id(original) in made:
            return made[id(original)]  # type: ignore[no-any-return]
        copied = made[id(original)] = original.__class__.__new__(original.__class__)
        own = {key: copy.copy(each) if isinstance(each, dict) else each for key, each in vars(original).items()}
        copied.__dict__ = own
        own["_parameters"] |= {key: parameter_of(each) for key, each in own["_parameters"].items() if each is not None}
        children = list(own["_modules"].items())[: lengths.get(name)]
        own["_modules"] = {
            key: None if child is None else module_of(child, f"{name}.{key}" if name else key)
            for key, child in children
        }
        return copied

    return module_of(module, "")
