"""The one way in: an encoder by its name, with its weights or for the plan without them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

from vembed.config.keys.model import ModelKeys
from vembed.errors import ConfigError
from vembed.models.files import ModelFiles, SkeletonFiles, saved_background
from vembed.registry import ENCODERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vembed.data.images import ImageLimits
    from vembed.models.encoder import Encoder

BUILTIN_PREFIX = "builtin:"

SOME_READ = {
    "attn_implementation": "attn_implementation",
    "pooling_method": "pooling_method",
    "projection_dim": "projection_dim",
    "topk_tokens": "topk_tokens",
    "pool_factor": "pool_factor",
    "query_length": "query_length",
    "query_expansion": "query_expansion",
    "bidirectional": "bidirectional",
    "max_seq_length": "max_seq_length",
    "query_prompt": "query_prompt or document_prompt",
    "document_prompt": "query_prompt or document_prompt",
    "pad_token": "pad_token",
    "model_revision": "model_revision",
    "image_background": "image_background",
    "image_tokens": "image_tokens",
    "max_image_size": "max_image_size",
}
"""Keys of the model that only some encoders have a use for (`Encoder.reads`), and what a message calls them."""

AnyEncoder = TypeVar("AnyEncoder", bound="type[Encoder]")


def register_encoder(encoder: AnyEncoder) -> AnyEncoder:
    """Let models be loaded by a class of your own; it is asked before ours. Usable as a decorator.

    Args:
        encoder: The class. It says itself which model names mean it: by `builtin`, `prefix` or `marker`.

    Raises:
        ConfigError: It says none of them, or its name is taken.
    """
    name = encoder.builtin or encoder.prefix.rstrip(":") or encoder.__name__.lower()
    if not encoder.builtin and not encoder.prefix and not encoder.marker:
        raise ConfigError(
            f"encoder {encoder.__name__}: no model name means it; state builtin, prefix or marker in the class"
        )
    ENCODERS.register(name, encoder, module=encoder.__module__)
    return encoder


def is_builtin(name: str) -> bool:
    """Return whether a model name asks for an encoder from scratch."""
    return name.startswith(BUILTIN_PREFIX)


def encoder_classes() -> Iterator[type[Encoder]]:
    """Yield all classes in the order in which they are asked for a model: plugins first."""
    plugins = ENCODERS.plugins()
    for name in (*plugins, *(name for name in ENCODERS.names() if name not in plugins)):
        yield ENCODERS.load(name)


def load_encoder(
    keys: ModelKeys,
    texts: Iterable[str] = (),
    *,
    image_limits: ImageLimits | None = None,
    load_in_4bit: bool = False,
    with_weights: bool = True,
) -> Encoder:
    """Load or build an encoder, on the CPU.

    Args:
        texts: Training texts, read only by models that train a tokenizer.
        with_weights: Without them parameters are made on the meta device, as far as the class can.

    Raises:
        ConfigError: There is no such model, or it needs what isn't allowed.
        MachineError: It can't be reached.
    """
    files = ModelFiles(keys, load_in_4bit=load_in_4bit) if with_weights else SkeletonFiles(keys, reads_items=True)
    encoder = _load(files, texts)
    if image_limits is not None:
        encoder.image_limits = image_limits
    if keys.gradient_checkpointing is True:
        try:
            encoder.enable_gradient_checkpointing()
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return encoder


def load_skeleton(keys: ModelKeys, *, device: str = "meta") -> Encoder:
    """Build an encoder without its weights.

    Args:
        keys: What the user said; the name may also be a JSON file with the shape of a model (`SkeletonFiles`).
        device: Where its parameters are; on another than "meta" they are random numbers.

    Raises:
        ConfigError: There is no such model, or it needs what isn't allowed.
        MachineError: Its description can't be reached.
    """
    encoder = _load(SkeletonFiles(keys, device=device), ())
    if device == "meta" and not all(parameter.is_meta for parameter in encoder.parameters()):
        encoder.to("meta")
    return encoder


def _load(files: ModelFiles, texts: Iterable[str]) -> Encoder:
    if is_builtin(files.name):
        own = _builtin_class(files.name)
    else:
        own = next(each for each in encoder_classes() if each.recognises(files))
    _refuse_idle_keys(own, files)
    encoder = own.load(files, texts)
    if files.keys.freeze_batch_norm and not encoder.batch_norms():
        raise ConfigError(f"{files.name} has no batch normalisation for freeze_batch_norm; leave it out")
    encoder.freeze_batch_norm = files.keys.freeze_batch_norm
    if "image" in encoder.modalities:
        wanted = files.keys.image_background
        encoder.image_background = saved_background(files) if wanted == "auto" else wanted
    return encoder


def _builtin_class(name: str) -> type[Encoder]:
    wanted = name.removeprefix(BUILTIN_PREFIX)
    if wanted in ENCODERS:
        own: type[Encoder] = ENCODERS.load(wanted)
        if own.builtin == wanted:
            return own
    names = [each.builtin for each in encoder_classes() if each.builtin]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.0)
    raise ConfigError(f"model_name: no built-in model {name!r}; did you mean {BUILTIN_PREFIX}{close[0]}?")


def _refuse_idle_keys(own: type[Encoder], files: ModelFiles) -> None:
    """Refuse what a model has no use for, instead of ignoring it."""
    given = [words for key, words in SOME_READ.items() if _is_idle(own, key, files.keys)]
    if files.load_in_4bit and "load_in_4bit" not in own.reads:
        given.append("load_in_4bit")
    if given:
        raise ConfigError(f"{files.name} has no use for {given[0]}; leave it out")


def _is_idle(own: type[Encoder], key: str, keys: ModelKeys) -> bool:
    return key not in own.reads and getattr(keys, key) != ModelKeys.model_fields[key].default
