"""How texts go through a transformer: by the user's word, else sentence-transformers' files, else the family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from transformers import AutoModelForTextEncoding

from vembed.errors import ConfigError
from vembed.models.families import family_of, known_prompts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from vembed.batch import Side
    from vembed.config.keys.model import ModelKeys
    from vembed.models.pooling import PoolingMode
    from vembed.models.sentence_transformers_format import Dense, SentenceTransformersFolder

FALLBACK_MAX_LENGTH = 512
"""Where neither the tokenizer nor the config of a model names a longest input."""


@dataclass(frozen=True, slots=True)
class TextSpec:
    """How texts go through a transformer."""

    pooling: tuple[PoolingMode, ...]  # several are concatenated
    max_length: int  # in tokens, special ones included
    prompts: Mapping[Side, str] = field(default_factory=lambda: {"query": "", "document": ""})
    include_prompt: bool = True  # whether the tokens of the prompt are pooled too
    normalize: bool = True
    lower_case: bool = False
    origin: Mapping[str, str] = field(default_factory=dict)  # decision -> file or key that it was read from


def check_dense(dense: list[Dense], backbone: PreTrainedModel, spec: TextSpec, name: str) -> None:
    """Refuse dense layers that don't take what comes before them: pooling_method may have been overridden."""
    width = int(backbone.config.get_text_config().hidden_size) * len(spec.pooling)
    for layer in dense:
        if layer.linear.in_features != width:
            raise ConfigError(
                f"{name}: a Dense layer takes {layer.linear.in_features} values, pooling {' + '.join(spec.pooling)} "
                f"leaves {width}; leave pooling_method out"
            )
        width = layer.linear.out_features


def decide_spec(
    keys: ModelKeys,
    described: SentenceTransformersFolder | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    known: bool = True,
) -> TextSpec:
    """Decide pooling, length and prompts: the user's word, else sentence-transformers' files, else the family.

    Args:
        known: Whether prompts that a model is known by are put before texts.
    """
    if described is not None:
        spec = TextSpec(
            pooling=described.pooling,
            max_length=0,
            include_prompt=described.include_prompt,
            normalize=described.normalize,
            lower_case=described.lower_case,
            origin={"pooling": "modules.json", "similarity": "modules.json"},
        )
    else:
        family = family_of(config)
        if getattr(config, "is_encoder_decoder", False) and family.auto_class is not AutoModelForTextEncoding:
            raise ConfigError(
                f"{keys.model_name} is an encoder-decoder ({config.model_type}) whose encoder half transformers "
                f"doesn't load alone; its output would be the decoder's. Take an encoder, a decoder or a T5-like model"
            )
        spec = TextSpec(pooling=(family.pooling,), max_length=0, origin={"pooling": f"{family.name}: {family.reason}"})
    max_length, length_origin = _max_length(keys, described, config, tokenizer)
    by_name = known_prompts(keys.model_name, config, keys.encoder_mode) if known else ("", {})
    prompts, prompt_origin = _prompts(keys, described, *by_name)
    origin = {**spec.origin, "max_seq_length": length_origin, **prompt_origin}
    spec = replace(spec, max_length=max_length, prompts=prompts)
    wanted = asked_pooling(keys)
    if wanted is not None:
        spec = replace(spec, pooling=(wanted,))
        origin["pooling"] = "pooling_method"
    return replace(spec, origin=origin)


def asked_pooling(keys: ModelKeys) -> PoolingMode | None:
    """Return the pooling that the user wants for tokens; None where the model decides, or where nothing is pooled.

    Raises:
        ConfigError: It is one of picture encoders alone.
    """
    method = keys.pooling_method
    if method == "head":
        raise ConfigError(f"{keys.model_name} pools tokens; pooling_method head is for picture encoders")
    if method == "auto" or method == "none":
        return None
    return "lasttoken" if method == "last_token" else method


def _prompts(
    keys: ModelKeys, described: SentenceTransformersFolder | None, family: str, known: Mapping[Side, str]
) -> tuple[dict[Side, str], dict[str, str]]:
    """Return each side's prompt, and where those that the user didn't give were found."""
    in_files = {} if described is None else described.prompts
    given: dict[Side, str | None] = {"query": keys.query_prompt, "document": keys.document_prompt}
    prompts: dict[Side, str] = {}
    origin = {}
    for side, wanted in given.items():
        prompts[side] = in_files.get(side, known.get(side, "")) if wanted is None else wanted
        if wanted is None and prompts[side]:
            by_name = f"known for {family}; {side}_prompt: '' turns it off"
            origin[f"{side}_prompt"] = "config_sentence_transformers.json" if side in in_files else by_name
    return prompts, origin


def _max_length(
    keys: ModelKeys,
    described: SentenceTransformersFolder | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[int, str]:
    """Return the longest input and where it was read: no longer than what a text's neighbours don't change."""
    length, origin = _named_length(keys, described, config, tokenizer)
    steady = _steady_length(config)
    if steady is None or length <= steady:
        return length, origin
    if origin == "max_seq_length":
        raise ConfigError(
            f"max_seq_length {length}: above {steady} tokens {keys.model_name} turns its positions by the longest text "
            f"of a call, so that a text's vector would change with its neighbours; set max_seq_length: {steady} or less"
        )
    return steady, "config.json: above it a text's vector would change with its neighbours"


def _steady_length(config: PreTrainedConfig) -> int | None:
    """Return the tokens above which the longest text of a call changes the rotary positions of all; None: never."""
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    of_layers = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    limits = []
    for each in of_layers:
        if each.get("rope_type") == "dynamic":
            limits.append(int(text_config.max_position_embeddings))
        elif each.get("rope_type") == "longrope":
            limits.append(int(each["original_max_position_embeddings"]))
    return min(limits, default=None)


def _named_length(
    keys: ModelKeys,
    described: SentenceTransformersFolder | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[int, str]:
    """Return the longest input that a key or a file names, and where it was read."""
    offset, limit = position_offset(config), position_limit(config)
    if keys.max_seq_length != "auto":
        if limit is not None and keys.max_seq_length > limit:
            raise ConfigError(
                f"max_seq_length {keys.max_seq_length} is over the {limit} positions that {keys.model_name} was built "
                f"with"
            )
        return keys.max_seq_length, "max_seq_length"
    if described is not None and described.max_length is not None:
        if limit is not None and offset and described.max_length > limit:
            return limit, "config.json"  # the file forgot the positions that this family loses
        return described.max_length, "sentence_bert_config.json"
    candidates = {"tokenizer_config.json": tokenizer.model_max_length, "config.json": limit}
    known = {file: length for file, length in candidates.items() if length is not None and length < 1_000_000}
    if not known:
        return FALLBACK_MAX_LENGTH, "no file names one"
    file = min(known, key=lambda name: known[name])
    return known[file], file


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the tokens of the longest text that a model has positions for; None where it doesn't say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if positions is None or positions < 1 else positions - position_offset(config)


def position_offset(config: PreTrainedConfig) -> int:
    """Return how many positions RoBERTa-like models lose: theirs start behind the padding id."""
    roberta_like = {
        *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod"),
        *("mpnet", "longformer", "data2vec-text", "ibert", "luke"),
    }
    if config.model_type not in roberta_like:
        return 0
    pad = getattr(config, "pad_token_id", None)
    return (pad if isinstance(pad, int) else 1) + 1
