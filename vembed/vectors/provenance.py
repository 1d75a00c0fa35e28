"""Say what vectors and numbers were made of, so that a rerun knows what is still true.

Every part of a key is a hash or a setting. Two keys are equal exactly when items went through the same weights with the
same settings; where they differ, the names of the parts that do are the reason that people are told. The items are no
part of it: each is known by its own hash, so that one changed text costs the encoding of one text.
"""

from __future__ import annotations

import hashlib
import io
import json
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import PIL.Image

from vembed.batch import Composed, Image, modality_of
from vembed.distributed.shards import is_shared, whole_tensor
from vembed.models.hub import tensors_sha256
from vembed.models.plannable import without_image_limits
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from vembed.batch import Item, Modality, Side
    from vembed.models.encoder import Encoder

Key: TypeAlias = "dict[str, Any]"
"""Parts by name; JSON can hold it."""

PROBE_TEXTS = (
    "",
    "A",
    "The quick brown fox jumps over 13 lazy dogs.",
    "naïve Größe 東京 🦊\tx_y(z)",
    "a long text " * 2000,
)
"""Texts that are tokenized to see whether the tokenizer is the same: nothing, case, accents, other scripts, an emoji,
white space, and more than a model takes."""

_UNSTABLE_SETTINGS = ("_name_or_path", "transformers_version")
"""Settings of a model's configuration that say where and by what it was read, not what it computes."""


def digest(value: object) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def items_digest(items: Iterable[Item]) -> str:
    """Return the SHA-256 of items and their order; where one ends and the next begins counts."""
    total = hashlib.sha256()
    for item in items:
        _update(total, item)
    return total.hexdigest()


def item_id(item: Item) -> int:
    """Return the identity of an item's exact bytes: the first 8 bytes of a SHA-256, signed."""
    total = hashlib.sha256()
    _update(total, item)
    return int.from_bytes(total.digest()[:8], "little", signed=True)


def _update(total: hashlib._Hash, item: Item) -> None:
    total.update(modality_of(item).encode())
    parts: tuple[str | Image, ...] = (item.text, *item.images) if isinstance(item, Composed) else (item,)
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part.read()
        total.update(len(content).to_bytes(8, "little"))  # so that ("ab", "c") isn't ("a", "bc")
        total.update(content)


def model_key(encoder: Encoder, *, frozen_only: bool = False) -> Key:
    """Return the identity of an encoder: its weights and settings. All ranks that share its weights call it.

    Args:
        frozen_only: Leave out parameters that are trained: what they are today doesn't matter to frozen parts.

    Returns:
        "weights", the hash of all parameters and buffers, and "encoder", the hash of its settings.
    """
    parameters = (pair for pair in encoder.named_parameters() if not (frozen_only and pair[1].requires_grad))
    tensors = chain(parameters, encoder.named_buffers())
    # Sharded weights are gathered tensor by tensor: one at a time is whole in memory.
    weights = tensors_sha256((name, whole_tensor(tensor) if is_shared(tensor) else tensor) for name, tensor in tensors)
    return {"weights": weights, "encoder": digest(_settings(encoder))}


def vectors_key(encoder: Encoder, model: Key, side: Side, *, autocast_dtype: torch.dtype | None) -> Key:
    """Return what the vectors of one side are made of, beside the items themselves.

    Args:
        model: The encoder's `model_key`.
    """
    kinds = {modality: preprocessing_digest(encoder, modality, side) for modality in sorted(encoder.modalities)}
    return {
        **model,
        "preprocessing": digest(kinds),
        "precision": str(autocast_dtype or "as loaded"),
        "side": side,
    }


def changed_parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts in which two keys differ, in order."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _settings(encoder: Encoder) -> Key:
    """Return the settings of an encoder and of every network in it that has a configuration."""

    def without_secret(value: str) -> str:
        """Return a text, or its hash where it holds a secret: keys are written to disk, and still tell texts apart."""
        return value if redact(value) == value else digest(value)

    # Networks of one configuration, as the two towers of a shared encoder, count once.
    configurations = []
    for module in encoder.modules():
        to_dict = getattr(getattr(module, "config", None), "to_dict", None)
        if callable(to_dict):
            settings = {key: value for key, value in to_dict().items() if key not in _UNSTABLE_SETTINGS}
            configurations.append(json.dumps(settings, sort_keys=True, default=str))
    return {
        "class": type(encoder).__name__.removeprefix("FSDP"),  # which torch puts before the name of a sharded one
        "dimension": encoder.dimension,
        "max_length": encoder.max_length,
        "described": {name: without_secret(value) for name, value in encoder.describe().items()},
        "configurations": sorted(set(configurations)),
        **({} if encoder.normalisation is None else {"normalisation": str(encoder.normalisation)}),
    }


def preprocessing_digest(encoder: Encoder, modality: Modality, side: Side) -> str:
    """Return the hash of what an encoder makes of fixed probes of one modality.

    Fixed ones, not a sample of the user's items: a changed item would otherwise read as a changed tokenizer.
    """
    with without_image_limits(encoder):
        return features_digest(encoder, _probes(modality), side)


def features_digest(encoder: Encoder, items: Sequence[Item], side: Side) -> str:
    """Return the hash of what tokenizer and image processor make of items: prompts, cutting, sizes show in it."""
    total = hashlib.sha256()
    for _, rows in encoder.by_modality(items):
        features = encoder.featurize([items[row] for row in rows], side)
        columns = {name: column.values for name, column in features.columns.items()}
        offsets = {f"{name} offsets": column.offsets for name, column in features.columns.items()}
        # With name, type and shape, so that no two different sets of columns run into the same bytes.
        for name, values in sorted((columns | offsets | dict(features.per_row)).items()):
            total.update(f"{name} {values.dtype} {values.shape}\n".encode())
            total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()


@cache
def _probes(modality: Modality) -> tuple[Item, ...]:
    """Return items that show a changed tokenizer, prompt, limit or image processor, whatever the data are."""
    if modality == "text":
        return PROBE_TEXTS
    # Three different gradients, wider than high: resizing, cropping, channel order and normalisation all show.
    content = io.BytesIO()
    across, down = np.meshgrid(np.arange(96, dtype=np.uint8), np.arange(64, dtype=np.uint8))
    PIL.Image.fromarray(np.stack([2 * across, 3 * down, across ^ down], axis=2)).save(content, "PNG")
    picture = Image("probe.png", data=content.getvalue())
    return (picture,) if modality == "image" else (Composed((picture,), PROBE_TEXTS[0]),)
