"""The weights that training starts from: the first process reads them, the others get them from it.

1. The first process loads its model, and tells the others what is in it: `Outline`.
2. Each of the others builds the same model on the meta device, which takes no memory, and fits it to the outline. Where
   that can't be, as a model looks at its values while it is built, the process loads it whole instead.
3. `receive` gives a tensor memory on the device and the first process's values. A sharded model does so block by block,
   so that no device ever holds more than a block beside its shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vembed.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without its values."""

    # Shape, type and whether it trains, by name: of parameters and buffers, those that no file holds included.
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]]
    modules: Mapping[str, bool]  # every module, and whether it is in training mode

    @classmethod
    def of(cls, model: nn.Module) -> Outline:
        """Return the outline of a model."""
        facts = {
            name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in _tensors(model).items()
        }
        return cls(facts, {name: module.training for name, module in model.named_modules()})

    def fit(self, model: nn.Module) -> str:
        """Make a model on the meta device one of this outline; return why it can't be, nothing where it is now.

        What the first process has left out, as a head without weights, is left out; types and modes become the same.
        """
        for name, _ in list(model.named_modules()):
            # A module that the outline lacks goes, unless its parent has gone with it.
            parent, _, leaf = name.rpartition(".")
            if name not in self.modules and (parent in self.modules or not parent):
                setattr(model.get_submodule(parent), leaf, None)
        tensors = _tensors(model)
        differing = sorted(tensors.keys() ^ self.tensors.keys()) or [
            name for name, tensor in tensors.items() if tuple(tensor.shape) != self.tensors[name][0]
        ]
        if differing:
            return f"{differing[0]} differs in this process"
        for name, module in model.named_modules():
            # A plain attribute has no values here, and nothing would send it any.
            stray = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
            if stray:
                return f"{name}.{stray[0]} is a tensor but no buffer, so it can't be received".lstrip(".")
        for name, tensor in tensors.items():
            _, dtype, trains = self.tensors[name]
            tensor.data = tensor.data.to(dtype)
            tensor.requires_grad_(trains)
        for name, module in model.named_modules():
            module.training = self.modules[name]
        return ""


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def receive(tensors: Iterable[Tensor], ranks: Ranks, device: torch.device) -> None:
    """Move tensors to the device, with the values that they have on the first rank; all ranks call it alike.

    A tensor stays the same object, wherever it is in use, also where it gets its memory only now.
    """
    for tensor in tensors:
        if tensor.is_meta:
            # A meta tensor can't get memory by `.data`; the swap keeps the object that tied modules share.
            there = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, there)
        else:
            tensor.data = tensor.data.to(device)
        ranks.copy_from_first([tensor])
