"""What a checkpoint must hold of an encoder of which only a part trains, and what tells its frozen rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.models.adapters.lora import has_adapters, merge_adapters, save_adapter
from vembed.models.files import save_background
from vembed.models.fingerprint import tensors_sha256
from vembed.models.plannable import is_within

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from vembed.models.encoder import Encoder

SAMPLED_VALUES = 1024
"""Values of each frozen tensor that its fingerprint covers: any fine-tuning changes nearly all of them."""


def changing_names(module: nn.Module) -> frozenset[str] | None:
    """Return the tensors that training changes; None where a checkpoint should hold everything.

    Returns:
        Names of the parameters that train and of the buffers of modules that do, as in its state_dict.
    """
    trained = getattr(module, "trained", None)
    if trained is None or not trained.keeps_base:
        return None
    eval_only = set(trained.eval_only)
    still = [name for name, each in module.named_modules() if each in eval_only]
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    stored = module.state_dict(keep_vars=True)
    names |= {name for name, _ in module.named_buffers() if name in stored and not is_within(name, still)}
    return frozenset(names)


def narrowed_bytes(module: nn.Module) -> int:
    """Return the bytes that frozen weights take less here than in a file."""
    trained = getattr(module, "trained", None)
    return 0 if trained is None else int(trained.narrowed_bytes)


def base_fingerprint(encoder: Encoder) -> str | None:
    """Return a hash of the weights that checkpoints leave out; None where they hold everything.

    It covers the name, type and shape of each and an even sample of its values, so that it costs well under a second
    where hashing every byte would take as long as reading the model.
    """
    held = changing_names(encoder)
    if held is None:
        return None
    frozen = (each for each in sorted(encoder.named_parameters()) if each[0] not in held)
    return tensors_sha256(frozen, sampled_values=SAMPLED_VALUES)


def save_trained(encoder: Encoder, model: Path, adapter: Path) -> None:
    """Write an encoder as an ordinary model; adapters are written beside it first and then merged for good.

    Args:
        encoder: At the end of its training: it can't continue afterwards.
        adapter: Folder of the adapters alone, in peft's format; written where there are any.
    """
    if has_adapters(encoder):
        save_adapter(encoder, adapter)
        merge_adapters(encoder)
    encoder.save(model)
    save_background(encoder, model)
