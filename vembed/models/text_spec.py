"""The decisions about a text model: attention, pooling, longest text and prompts.

Each is the user's word, else what sentence-transformers' files say, else that of the model's family. A family follows
from what config.json says of the attention, never from a name: tokenizer, padding and pooling must fit it. A causal
model pooled at its first token would give the same vector for every text.

Prompts are another matter. Many publishers ask for them on a page and put them in no file, so they are known here by
name and type together, and only count where neither the user nor a file says which.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import AutoModel, AutoModelForTextEncoding
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)

from vembed.errors import ConfigError
from vembed.models.formats import GENERAL_FILE, TRANSFORMER_FILE, TextSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from vembed.batch import Side
    from vembed.models.formats import TextFolder
    from vembed.models.hub import ModelFiles
    from vembed.models.keys import ModelKeys
    from vembed.models.pooling import PoolingMode

FALLBACK_MAX_LENGTH = 512
"""Tokens of the longest text where neither the tokenizer nor the config names it."""

FLOAT32_ONLY = {"xlnet": "XLNet makes the weights of its attention in float32, whatever type is asked for"}
"""model_type -> why such a model computes in no other dtype."""

REFUSED_TYPES = {
    "fnet": "FNet ignores the mask and mixes padding into every token: a text's vector would depend on its neighbours",
    "canine": "CANINE hashes characters: it has no embedding table that token ids could be checked against",
}
"""model_type -> why vembed doesn't run such a model, although transformers loads it."""

BIDIRECTIONAL_TYPES = frozenset(
    {"gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
"""Decoders whose tokens see both sides where their config says so (tests/models/test_attention_masks.py)."""

ROBERTA_LIKE = frozenset(
    {"roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod", "mpnet", "longformer"}
    | {"data2vec-text", "ibert", "luke"}
)
"""Models whose positions begin behind the padding id: they lose that many."""

TABLE_OF_POSITIONS = ROBERTA_LIKE | frozenset(
    {"albert", "bert", "convbert", "distilbert", "electra", "ernie", "gpt2", "mobilebert"}
)
"""Models with a row of a table for each position, which run no longer text; others reckon positions, or have none."""


# --- Attention and pooling --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextFamily:
    """Models of one kind of attention."""

    name: str  # for the plan
    auto_class: type  # class of transformers that loads the encoder part alone
    pooling: PoolingMode
    reason: str  # for the plan


ENCODER_HALF = TextFamily(
    "encoder half",
    AutoModelForTextEncoding,
    "mean",
    "an encoder-decoder: its encoder sees both sides of each token, so all tokens are averaged",
)
DECODER = TextFamily(
    "decoder", AutoModel, "lasttoken", "attention is causal: only the last token has seen the whole text"
)
ENCODER = TextFamily("encoder", AutoModel, "mean", "attention is bidirectional: all tokens are averaged")


def family_of(config: PreTrainedConfig) -> TextFamily:
    """Return the family of a model by its config."""
    # Not by is_encoder_decoder: the half on its own is saved with false there, under the same model_type.
    if MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(config.model_type, "").endswith("EncoderModel"):
        return ENCODER_HALF
    return DECODER if is_causal(config) else ENCODER


def is_decoder_type(config: PreTrainedConfig) -> bool:
    """Return whether models of this type are decoders, whatever the attention of this one."""
    kind = config.model_type
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def is_causal(config: PreTrainedConfig) -> bool:
    """Return whether a token sees none behind it."""
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", None) is False:
        return False
    return bool(getattr(config, "is_decoder", False)) or is_decoder_type(config)


def is_pair_scorer(config: PreTrainedConfig) -> bool:
    """Return whether the head in a folder of transformers makes it a cross-encoder: it classifies, with a single score.

    sentence-transformers notes its cross-encoders of several scores too, in the config itself.
    """
    classifies = any(head.endswith("ForSequenceClassification") for head in config.architectures or ())
    return classifies and (config.num_labels == 1 or hasattr(config, "sentence_transformers"))


def checked_config(files: ModelFiles, subfolder: str) -> PreTrainedConfig:
    """Return the config of a transformer for texts; that of a decoder made bidirectional where the user wants it.

    Raises:
        ConfigError: vembed doesn't run its type, it can't be made so, or it can't compute in the wanted dtype.
    """
    config = files.config(subfolder)
    if config.model_type in REFUSED_TYPES:
        raise ConfigError(f"{files.name}: {REFUSED_TYPES[config.model_type]}; take another model")
    reason = FLOAT32_ONLY.get(config.model_type)
    if reason and files.dtype != torch.float32:
        wanted = str(files.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{files.name}: {reason}, so it can't compute with torch_dtype {wanted}; set torch_dtype: float32"
        )
    return made_bidirectional(files.name, config) if files.keys.bidirectional else config


def made_bidirectional(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a decoder whose tokens see those behind them too.

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
    if kind == "gemma3_text":  # built anew: the config halves its window, to reach as far on each side
        return type(config).from_dict({**config.to_dict(), "use_bidirectional_attention": True})
    bidirectional = copy.deepcopy(config)
    bidirectional.is_causal = False
    return bidirectional


def asked_pooling(keys: ModelKeys) -> PoolingMode | None:
    """Return the pooling of tokens that the user wants, None where the model decides or nothing is pooled.

    Raises:
        ConfigError: It is one of picture encoders alone.
    """
    method = keys.pooling_method
    if method == "head":
        raise ConfigError(f"{keys.model_name} pools tokens; pooling_method head is for picture encoders")
    if method == "auto" or method == "none":
        return None
    return "lasttoken" if method == "last_token" else method


# --- The whole decision -----------------------------------------------------------------------------------------------


def decide_spec(
    keys: ModelKeys,
    folder: TextFolder | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    known_by_name: bool = True,
) -> tuple[TextSpec, dict[Side, str]]:
    """Decide how texts go through a transformer, and which prompts stand before them.

    Args:
        folder: sentence-transformers' description of the model, None without one.
        known_by_name: Prompts of PROMPT_FAMILIES count.
    """
    if folder is not None:
        spec = folder.spec
    else:
        family = family_of(config)
        if getattr(config, "is_encoder_decoder", False) and family is not ENCODER_HALF:
            raise ConfigError(
                f"{keys.model_name} is an encoder-decoder ({config.model_type}) whose encoder half transformers "
                f"doesn't load alone; its output would be the decoder's. Take an encoder, a decoder or a T5-like model"
            )
        spec = TextSpec(pooling=(family.pooling,), origin={"pooling": f"{family.name}: {family.reason}"})
    max_length, origin_of_length = _decide_length(keys, spec.max_length, config, tokenizer)
    origin = {**spec.origin, "max_seq_length": origin_of_length}

    # An empty prompt of the user's means none; only None leaves the choice to the files, and then to the name.
    name, known = known_prompts(keys.model_name, config, keys.encoder_mode) if known_by_name else ("", {})
    in_files: Mapping[Side, str] = {} if folder is None else folder.prompts
    asked: dict[Side, str | None] = {"query": keys.query_prompt, "document": keys.document_prompt}
    prompts: dict[Side, str] = {}
    for side, prompt in asked.items():
        prompts[side] = in_files.get(side, known.get(side, "")) if prompt is None else prompt
        if prompt is None and prompts[side]:
            by_name = f"known for {name}; {side}_prompt: '' turns it off"
            origin[f"{side}_prompt"] = GENERAL_FILE if side in in_files else by_name

    pooling = asked_pooling(keys)
    if pooling is not None:
        spec, origin["pooling"] = replace(spec, pooling=(pooling,)), "pooling_method"
    return replace(spec, max_length=max_length, origin=origin), prompts


# --- The longest text -------------------------------------------------------------------------------------------------


def _decide_length(
    keys: ModelKeys, described: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, str]:
    """Return the tokens of the longest text, and the key or the file that names them.

    Args:
        described: What sentence-transformers' files say, 0 where they leave it to the tokenizer.
    """
    limit, steady = position_limit(config), _steady_length(config)
    if keys.max_seq_length != "auto":
        length, origin = keys.max_seq_length, "max_seq_length"
        if limit is not None and length > limit:
            raise ConfigError(
                f"max_seq_length {length} is over the {limit} positions that {keys.model_name} was built with"
            )
    elif described:
        length, origin = described, TRANSFORMER_FILE
        has_table = (
            config.model_type in TABLE_OF_POSITIONS
            and getattr(config, "position_embedding_type", "absolute") == "absolute"  # ALiBi, in code of its own
        )
        if limit is not None and has_table and length > limit:
            length, origin = limit, "config.json"  # most often the file forgot the positions that RoBERTa loses
    else:
        candidates = {"tokenizer_config.json": tokenizer.model_max_length, "config.json": limit}
        # transformers writes 1e30 for "no limit".
        named = {file: length for file, length in candidates.items() if length is not None and length < 1_000_000}
        origin = min(named, key=lambda file: named[file], default="no file names one")
        length = named.get(origin, FALLBACK_MAX_LENGTH)
    if steady is None or length <= steady:
        return length, origin
    if origin == "max_seq_length":
        raise ConfigError(
            f"max_seq_length {length}: above {steady} tokens {keys.model_name} scales its positions by the longest "
            f"text of a call, so a text's vector would depend on the other texts; set max_seq_length: {steady} or less"
        )
    return steady, "config.json: above it a text's vector would change with its neighbours"


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the tokens that a model has positions for, None where it doesn't say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if positions is None or positions < 1 else positions - position_offset(config)


def position_offset(config: PreTrainedConfig) -> int:
    """Return how many positions a model loses to its padding id: 0 for most, pad + 1 for RoBERTa-like ones."""
    if config.model_type not in ROBERTA_LIKE:
        return 0
    pad = getattr(config, "pad_token_id", None)
    return (pad if isinstance(pad, int) else 1) + 1


def position_padding_id(config: PreTrainedConfig) -> int | None:
    """Return the padding id that the positions of RoBERTa-like models begin behind; None where they begin at 0."""
    offset = position_offset(config)
    return offset - 1 if offset else None


def _steady_length(config: PreTrainedConfig) -> int | None:
    """Return the tokens above which the longest text of a call changes the rotary positions of all; None: never."""
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    by_kind = [kind for kind in parameters.values() if isinstance(kind, dict)]  # of each kind of layer
    limits = []
    for rope in by_kind or [parameters]:
        if rope.get("rope_type") == "dynamic":
            limits.append(int(text_config.max_position_embeddings))
        elif rope.get("rope_type") == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
    return min(limits, default=None)


# --- Prompts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptFamily:
    """Models whose publisher asks for prompts."""

    name: str  # for the plan
    models: str  # their names without the owner, in lower case: a regular expression
    types: frozenset[str]  # model_types of their configs
    query: str
    document: str = ""
    mode: str = ""  # `encoder_mode` that stands for the name


_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_BGE = "Represent this sentence for searching relevant passages: "

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
    PromptFamily("English BGE", r"bge-(small|base|large)-en(-v1\.5)?", frozenset({"bert"}), _BGE, mode="bge"),
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
        name: Hub id or folder; the last part counts.
        mode: `encoder_mode`. It stands for the name unless that holds its word: bge-base-zh takes no English prompt.
    """
    last = name.rstrip("/").rpartition("/")[2].lower()
    for family in PROMPT_FAMILIES:
        named = re.fullmatch(family.models, last) or (mode == family.mode and mode not in last)
        if config.model_type in family.types and named:
            return family.name, {"query": family.query, "document": family.document}
    return "", {}
