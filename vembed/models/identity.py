"""What tells one model from another: a hash of its weights, and what else its vectors depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.models.fingerprint import tensors_sha256

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.batch import Side
    from vembed.models.encoder import Encoder, Similarity


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model as an index of its vectors remembers it.

    Attributes:
        name: What it was loaded by: a hub id, or the absolute path of a folder.
        weights_sha256: `tensors_sha256` of its encoder's state, in the order of the names.
        dimension: E.
        similarity: How its embeddings are compared.
        prompts: Text before each side's items.
        max_length: Longest input in tokens, None where there is no limit.
    """

    name: str
    weights_sha256: str
    dimension: int
    similarity: Similarity
    prompts: Mapping[Side, str]
    max_length: int | None


def identify(encoder: Encoder, *, name: str) -> ModelIdentity:
    """Return the identity of an encoder.

    Args:
        encoder: On any device; its weights are read once.
        name: What it was loaded by.
    """
    return ModelIdentity(
        name=name,
        weights_sha256=tensors_sha256(sorted(encoder.state_dict().items())),
        dimension=encoder.dimension,
        similarity=encoder.similarity,
        prompts=encoder.prompts,
        max_length=encoder.max_length,
    )
