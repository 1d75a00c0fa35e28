"""One table that decides how a bare transformer becomes a text encoder.

Tokenizer, features, padding and pooling must fit together: a causal model pooled at its first token gives the same
vector for every input. So they are decided together, by what the model's own config.json says about its attention, and
never by its name. A sentence-transformers folder says all of it itself and doesn't come here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModel, AutoModelForTextEncoding
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig

    from vembed.models.pooling import PoolingMode


@dataclass(frozen=True, slots=True)
class TextFamily:
    """What members of a family have in common.

    Attributes:
        name: For the plan.
        applies: Whether a model with this config belongs here.
        auto_class: The transformers class that loads the encoder part alone.
        pooling: The pooling that suits the attention.
        reason: Why, for the plan.
    """

    name: str
    applies: Callable[[PreTrainedConfig], bool]
    auto_class: type
    pooling: PoolingMode
    reason: str


def _has_encoder_half(config: PreTrainedConfig) -> bool:
    # Not by is_encoder_decoder: the half on its own is saved with false there, under the same model_type.
    return MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(config.model_type, "").endswith("EncoderModel")


def is_decoder_type(config: PreTrainedConfig) -> bool:
    """Return whether a model is of a type that is a decoder, whatever its own attention."""
    kind = config.model_type
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _is_causal(config: PreTrainedConfig) -> bool:
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", None) is False:
        return False
    if getattr(config, "is_decoder", False):
        return True
    return is_decoder_type(config)


FAMILIES: tuple[TextFamily, ...] = (
    TextFamily(
        "encoder half",
        _has_encoder_half,
        AutoModelForTextEncoding,
        "mean",
        "an encoder-decoder: its encoder sees both sides of each token, so all tokens are averaged",
    ),
    TextFamily(
        "decoder",
        _is_causal,
        AutoModel,
        "lasttoken",
        "attention is causal: only the last token has seen the whole text",
    ),
    TextFamily(
        "encoder",
        lambda config: True,  # noqa: ARG005
        AutoModel,
        "mean",
        "attention is bidirectional: all tokens are averaged",
    ),
)
"""The first family that applies."""


def family_of(config: PreTrainedConfig) -> TextFamily:
    """Return the family of a model by its config."""
    return next(family for family in FAMILIES if family.applies(config))


FLOAT32_ONLY = {"xlnet": "XLNet makes the weights of its attention in float32, whatever type is asked for"}
"""`model_type` of those that can't compute in another type than float32, and why."""


def refuse_type(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Refuse weights of a type that the model can't compute in.

    Raises:
        ConfigError: The transformer would end in an error of its own at the first text.
    """
    reason = FLOAT32_ONLY.get(config.model_type)
    if reason and dtype != torch.float32:
        wanted = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{name}: {reason}, so it can't compute with torch_dtype {wanted}; set torch_dtype: float32")
