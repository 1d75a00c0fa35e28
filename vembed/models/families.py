"""What families of text encoders have in common: one table for bare transformers, one for the prompts of known models.

Tokenizer, features, padding and pooling must fit together: a causal model pooled at its first token gives the same
vector for every input. So they are decided together, by what the model's own config.json says about its attention, and
never by its name. A sentence-transformers folder says all of it itself.

Prompts are another matter: many publishers ask for them on a page, and no file of the model holds them. They are known
by the model's name and type together, and only used where neither the user nor a file says which.
"""

from __future__ import annotations

import copy
import re
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

    from vembed.batch import Side
    from vembed.models.files import ModelFiles
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


def is_causal(config: PreTrainedConfig) -> bool:
    """Return whether a token sees none behind it."""
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
        is_causal,
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


def checked_config(files: ModelFiles, subfolder: str) -> PreTrainedConfig:
    """Return the config of a transformer for texts, of a decoder made bidirectional where the user wants that.

    Raises:
        ConfigError: It can't be made so, or can't compute in the wanted type.
    """
    config = files.config(subfolder)
    refuse_type(files.name, config, files.dtype)
    return made_bidirectional(files.name, config) if files.keys.bidirectional else config


BIDIRECTIONAL_TYPES = frozenset(
    {"gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
"""Types of decoders whose tokens see both sides where their config says so (tests/models/test_bidirectional.py)."""


def made_bidirectional(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a decoder each of whose tokens sees those behind it too.

    Raises:
        ConfigError: It is no decoder, or of a type for which that isn't tested.
    """
    kind = config.model_type
    if not is_decoder_type(config):
        raise ConfigError(f"{name}: bidirectional is for decoders, and {kind} models are none; leave it out")
    if kind not in BIDIRECTIONAL_TYPES:
        known = ", ".join(sorted(BIDIRECTIONAL_TYPES))
        raise ConfigError(f"{name}: bidirectional isn't tested for {kind} models; leave it out, or take one of {known}")
    if not is_causal(config):
        return config
    if kind == "gemma3_text":  # made anew, as half of its window comes to lie behind each token
        return type(config).from_dict({**config.to_dict(), "use_bidirectional_attention": True})
    made = copy.deepcopy(config)
    made.is_causal = False
    return made


@dataclass(frozen=True, slots=True)
class PromptFamily:
    """Models whose publisher asks for prompts."""

    name: str  # for the plan
    models: str  # their names without the owner, in lower case: a regular expression
    types: frozenset[str]  # `model_type` of their configs
    query: str
    document: str = ""
    mode: str = ""  # `encoder_mode` that stands for the name


_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"

PROMPT_FAMILIES: tuple[PromptFamily, ...] = (
    PromptFamily(
        "E5",
        r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?",
        frozenset({"bert", "xlm-roberta"}),
        "query: ",
        "passage: ",
        mode="e5",
    ),
    PromptFamily(
        "E5-instruct",
        r"multilingual-e5-large-instruct|e5-mistral-7b-instruct",
        frozenset({"xlm-roberta", "mistral"}),
        f"{_WEB_SEARCH} ",
    ),
    PromptFamily(
        "English BGE",
        r"bge-(small|base|large)-en(-v1\.5)?",
        frozenset({"bert"}),
        "Represent this sentence for searching relevant passages: ",
        mode="bge",
    ),
    PromptFamily(
        "Nomic",
        r"nomic-embed-text-v[0-9.]+(-moe|-unsupervised)?|modernbert-embed-(base|large)",
        frozenset({"nomic_bert", "modernbert"}),
        "search_query: ",
        "search_document: ",
    ),
    PromptFamily("Qwen3-Embedding", r"qwen3-embedding-[0-9.]+b", frozenset({"qwen3"}), _WEB_SEARCH),
    PromptFamily(
        "EmbeddingGemma",
        r"embeddinggemma-[0-9]+m",
        frozenset({"gemma3_text"}),
        "task: search result | query: ",
        "title: none | text: ",
    ),
)
"""Prompts for retrieval as the publishers' pages give them."""


def known_prompts(name: str, config: PreTrainedConfig, mode: str = "auto") -> tuple[str, dict[Side, str]]:
    """Return the family and the prompts that a model is known by; "" and none where it isn't.

    Args:
        name: Hub id or folder, of which the last part counts.
        mode: `encoder_mode`, which names the family where the name has no word of it, as bge-base-zh has.
    """
    last = name.rstrip("/").rpartition("/")[2].lower()
    for family in PROMPT_FAMILIES:
        named = re.fullmatch(family.models, last) or (mode == family.mode and mode not in last)
        if config.model_type in family.types and named:
            return family.name, {"query": family.query, "document": family.document}
    return "", {}


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
