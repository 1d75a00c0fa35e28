"""The one way in: an encoder by its name."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.models import ngram_bag, tiny_clip
from vembed.models.dual import DUAL_FAMILIES, load_dual_encoder
from vembed.models.huggingface import ModelFiles, ModelOptions, load_text_encoder
from vembed.models.ngram_bag import NgramBag, NgramBagConfig
from vembed.models.open_clip_encoder import OPEN_CLIP_PREFIX, is_open_clip_folder, load_open_clip
from vembed.models.sentence_transformers_pictures import names_picture_model, refuse_other_pipeline
from vembed.models.tiny_clip import TinyClip, TinyClipConfig
from vembed.models.tiny_transformer import build_tiny_transformer
from vembed.models.vision import VISION_FAMILIES, load_vision_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vembed.models.encoder import Encoder

BUILTIN_PREFIX = "builtin:"

BUILTIN_MODELS: dict[str, Callable[[ModelOptions, Iterable[str]], Encoder]] = {
    "tiny-clip": lambda options, texts: TinyClip(  # noqa: ARG005
        TinyClipConfig(), name=options.name, image_limits=options.image_limits
    ).to(options.dtype),
    "ngram-bag": lambda options, texts: NgramBag(NgramBagConfig(), name=options.name).to(options.dtype),  # noqa: ARG005
    "tiny-transformer": lambda options, texts: build_tiny_transformer(texts, name=options.name, dtype=options.dtype),
}
"""Encoders that are trained from scratch, by the name behind `builtin:`."""

HUGGING_FACE_OPTIONS = frozenset({"attn_implementation", "model_revision", "load_in_4bit"})
"""What a model with an image tower takes of the options that are otherwise a text encoder's."""


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
    folder = Path(options.name)
    if (folder / ngram_bag.CONFIG_FILE).is_file():
        _refuse_text_options(options)
        return NgramBag.load(folder, dtype=options.dtype)
    if (folder / tiny_clip.CONFIG_FILE).is_file():
        _refuse_text_options(options)
        return TinyClip.load(folder, dtype=options.dtype, image_limits=options.image_limits)
    if options.name.startswith(OPEN_CLIP_PREFIX) or is_open_clip_folder(folder):
        _refuse_text_options(options)
        return load_open_clip(options)
    return load_from_hugging_face(options, ModelFiles(options))


def load_from_hugging_face(options: ModelOptions, files: ModelFiles) -> Encoder:
    """Load by what the files say: sentence-transformers' description first, else the model_type of config.json."""
    described = files.read("modules.json") is not None
    if described and not names_picture_model(files):
        return load_text_encoder(options, files)
    config = files.config("")
    if config.model_type not in DUAL_FAMILIES and config.model_type not in VISION_FAMILIES:
        return load_text_encoder(options, files)
    _refuse_text_options(options, allowed=HUGGING_FACE_OPTIONS)
    load = load_dual_encoder if config.model_type in DUAL_FAMILIES else load_vision_encoder
    encoder = load(options, files, config)
    if described:
        refuse_other_pipeline(encoder, files)
    return encoder


def _build(options: ModelOptions, texts: Iterable[str]) -> Encoder:
    kind = builtin_kind(options.name)
    _refuse_text_options(options)
    return BUILTIN_MODELS[kind](options, texts)


def builtin_kind(name: str) -> str:
    """Return which built-in model a name means, e.g. "tiny-clip".

    Raises:
        ConfigError: There is none of that name; the message has the nearest one.
    """
    kind = name.removeprefix(BUILTIN_PREFIX)
    if kind not in BUILTIN_MODELS:
        close = difflib.get_close_matches(kind, BUILTIN_MODELS, n=1, cutoff=0.0)
        raise ConfigError(f"model_name: no built-in model {name!r}; did you mean {BUILTIN_PREFIX}{close[0]}?")
    return kind


def _refuse_text_options(options: ModelOptions, *, allowed: frozenset[str] = frozenset()) -> None:
    """Refuse what a model has no use for, instead of ignoring it."""
    given = {
        "attn_implementation": options.attn_implementation,
        "pooling_method": options.pooling,
        "max_seq_length": options.max_length,
        "query_prompt or document_prompt": options.prompts or None,
        "pad_token": options.pad_token,
        "model_revision": options.revision,
        "load_in_4bit": options.load_in_4bit or None,
    }
    for key, value in given.items():
        if value is not None and key not in allowed:
            raise ConfigError(f"{options.name} has no use for {key}; leave it out")
