"""What tells one model from another: a hash of its weights, and what else its vectors depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vembed.batch import Side  # noqa: TC001 - read by pydantic, as Mapping and Similarity are
from vembed.models.encoder import Similarity  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from vembed.models.encoder import Encoder


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model as an index of its vectors remembers it."""

    name: str  # what it was loaded by: a hub id, or the absolute path of a folder
    weights_sha256: str  # `tensors_sha256` of its encoder's state, in the order of the names
    dimension: int
    similarity: Similarity
    prompts: Mapping[Side, str]
    max_length: int | None  # longest input in tokens, None where there is no limit


def identify(encoder: Encoder, *, name: str) -> ModelIdentity:
    """Return the identity of an encoder, on any device; its weights are read once."""
    return ModelIdentity(
        name=name,
        weights_sha256=tensors_sha256(sorted(encoder.state_dict().items())),
        dimension=encoder.dimension,
        similarity=encoder.similarity,
        prompts=encoder.prompts,
        max_length=encoder.max_length,
    )


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]], *, sampled_values: int | None = None) -> str:
    """Return the SHA-256 (hex) over name, type, shape and bytes of tensors, the same on every device.

    Args:
        sampled_values: Hash an even sample of about so many values of each tensor instead of all of them.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        values = tensor.detach().reshape(-1)
        if sampled_values is not None:
            values = values[:: max(1, values.numel() // sampled_values)]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
