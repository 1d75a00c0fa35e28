"""The anatomy of an encoder: its towers, their layers and projections, by the names of modules and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

TowerName: TypeAlias = Literal["text", "vision"]


@dataclass(frozen=True, slots=True)
class Tower:
    """What encodes one modality. All names are those of modules or parameters within the encoder.

    Attributes:
        name: Which one.
        parts: What it consists of.
        projection: What maps it to the embedding space; empty where nothing does.
        layers: Its list of transformer layers, None where there is none.
        behind: What stands behind the layers, `projection` included.
    """

    name: TowerName
    parts: tuple[str, ...]
    projection: tuple[str, ...] = ()
    layers: str | None = None
    behind: tuple[str, ...] = ()


def is_within(name: str, parts: Iterable[str]) -> bool:
    """Return whether a module or a parameter is one of the parts or belongs to one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def parameters_within(encoder: nn.Module, parts: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters of some parts by name."""
    return {name: parameter for name, parameter in encoder.named_parameters() if is_within(name, parts)}


def find_layers(encoder: nn.Module, parts: Sequence[str], *, depth: int | None) -> str | None:
    """Return the name of the list of layers among some parts: the longest list of modules of one class.

    Args:
        encoder: What holds the parts.
        parts: Where to look.
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
) -> Tower:
    """Return a tower whose modules are registered in the order in which they run, as transformers' are.

    Args:
        encoder: What holds the tower.
        name: Which one it is.
        parts: What it consists of.
        projection: What maps it to the embedding space; names that hold no parameter are left out.
        depth: How many layers it has, where the model's files say so.
    """
    parameters = list(parameters_within(encoder, parts))
    projection = tuple(part for part in projection if any(is_within(each, [part]) for each in parameters))
    layers = find_layers(encoder, parts, depth=depth)
    if layers is None:
        return Tower(name, parts, projection)
    last = max(place for place, each in enumerate(parameters) if is_within(each, [layers]))
    behind = tuple(each for each in parameters[last + 1 :] if not is_within(each, projection))
    return Tower(name, parts, projection, layers, (*behind, *projection))
