"""The one way in: an encoder by its name."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.models import ngram_bag
from vembed.models.huggingface import ModelOptions, load_text_encoder
from vembed.models.ngram_bag import NgramBag, NgramBagConfig
from vembed.models.tiny_transformer import build_tiny_transformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vembed.models.encoder import Encoder

BUILTIN_PREFIX = "builtin:"

BUILTIN_MODELS: dict[str, Callable[[ModelOptions, Iterable[str]], Encoder]] = {
    "ngram-bag": lambda options, texts: NgramBag(NgramBagConfig(), name=options.name).to(options.dtype),  # noqa: ARG005
    "tiny-transformer": lambda options, texts: build_tiny_transformer(texts, name=options.name, dtype=options.dtype),
}
"""Encoders that are trained from scratch, by the name behind `builtin:`."""


def is_builtin(name: str) -> bool:
    """Return whether a model name asks for an encoder from scratch."""
    return name.startswith(BUILTIN_PREFIX)


def load_encoder(options: ModelOptions, texts: Iterable[str] = ()) -> Encoder:
    """Load or build an encoder.

    Args:
        options: What the user said about the model.
        texts: Training texts, read only by built-in models that train a tokenizer.

    Returns:
        The encoder, on the CPU, in training mode's default state.

    Raises:
        ConfigError: When there is no such model, or it needs what isn't allowed.
        MachineError: When it can't be reached.
    """
    encoder = _load(options, texts)
    if options.gradient_checkpointing:
        try:
            encoder.enable_gradient_checkpointing()
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return encoder


def _load(options: ModelOptions, texts: Iterable[str]) -> Encoder:
    if is_builtin(options.name):
        return _build(options, texts)
    if (Path(options.name) / ngram_bag.CONFIG_FILE).is_file():
        _refuse_text_options(options)
        return NgramBag.load(Path(options.name), dtype=options.dtype)
    return load_text_encoder(options)


def _build(options: ModelOptions, texts: Iterable[str]) -> Encoder:
    kind = options.name.removeprefix(BUILTIN_PREFIX)
    if kind not in BUILTIN_MODELS:
        close = difflib.get_close_matches(kind, BUILTIN_MODELS, n=1, cutoff=0.0)
        raise ConfigError(f"model_name: no built-in model {options.name!r}; did you mean {BUILTIN_PREFIX}{close[0]}?")
    _refuse_text_options(options)
    return BUILTIN_MODELS[kind](options, texts)


def _refuse_text_options(options: ModelOptions) -> None:
    """Refuse what a built-in model has no use for, instead of ignoring it."""
    given = {
        "attn_implementation": options.attn_implementation,
        "pooling_method": options.pooling,
        "max_seq_length": options.max_length,
        "query_prompt or document_prompt": options.prompts or None,
        "pad_token": options.pad_token,
        "model_revision": options.revision,
    }
    for key, value in given.items():
        if value is not None:
            raise ConfigError(f"{options.name} has no use for {key}; leave it out")
