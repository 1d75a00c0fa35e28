"""The one way in: an encoder by its name, with its weights or for the plan without them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

from vembed.collector import collector_paused
from vembed.config.keys.model import ModelKeys, model_names
from vembed.errors import ConfigError
from vembed.models.files import ModelFiles, SkeletonFiles, saved_background
from vembed.models.sentence_transformers_format import MODULES_FILE
from vembed.registry import ENCODERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
    "projection_layers": "projection_layers",
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


def is_from_scratch(keys: ModelKeys) -> bool:
    """Return whether a model, or a tower of one, starts from random weights and perhaps a tokenizer of its own."""
    return any(map(is_builtin, model_names(keys)))


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
    encoder = load_from(files, texts)
    if image_limits is not None:
        encoder.image_limits = image_limits
    if keys.gradient_checkpointing is True:
        try:
            encoder.enable_gradient_checkpointing()
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return encoder


def load_skeleton(keys: ModelKeys, *, device: str = "meta", texts: Sequence[str] = ()) -> Encoder:
    """Build an encoder without its weights.

    Args:
        keys: What the user said; the name may also be a JSON file with the shape of a model (`SkeletonFiles`).
        device: Where its parameters are; on another than "meta" they are random numbers.
        texts: What a model that makes its vocabulary of its training texts makes one of here; without any, such a model
            cuts no texts.

    Raises:
        ConfigError: There is no such model, or it needs what isn't allowed.
        MachineError: Its description can't be reached.
    """
    encoder = load_from(SkeletonFiles(keys, device=device), texts)
    if device == "meta" and not all(parameter.is_meta for parameter in encoder.parameters()):
        encoder.to("meta")
    return encoder


@collector_paused()
def load_from(files: ModelFiles, texts: Iterable[str]) -> Encoder:
    """Load an encoder from its files, by the class that they mean."""
    own = class_of(files)
    _refuse_idle_keys(own, files)
    encoder = own.load(files, texts)
    if files.keys.freeze_batch_norm and not encoder.batch_norms():
        raise ConfigError(f"{files.name} has no batch normalisation for freeze_batch_norm; leave it out")
    encoder.freeze_batch_norm = files.keys.freeze_batch_norm
    if "image" in encoder.modalities and not own.reads_by_parts:
        wanted = files.keys.image_background
        encoder.image_background = saved_background(files) if wanted == "auto" else wanted
    return encoder


def class_of(files: ModelFiles) -> type[Encoder]:
    """Return the class that a model's name, its files and `encoder_mode` mean.

    Raises:
        ConfigError: There is no such model, or its files say another family than `encoder_mode`.
    """
    keys = files.keys
    mode = "composed" if keys.text_model_name is not None else keys.encoder_mode
    if keys.text_model_name is None and (own := _class_of_prefix(files.name)) is not None:
        if mode != "auto" and mode not in own.modes:
            raise ConfigError(f"encoder_mode {mode}: {files.name} is of another family; leave encoder_mode out")
        return own
    if mode == "auto":
        return next(each for each in encoder_classes() if each.recognises(files))
    for own in encoder_classes():
        if (
            mode in own.modes
            and own.recognises(files)
            and (not own.modes[mode] or _model_type(files) in own.modes[mode])
        ):
            return own
    if mode == "composed":
        raise ConfigError(
            f"encoder_mode composed: {files.name} is one model; name two by text_model_name and image_model_name, or "
            f"leave encoder_mode out"
        )
    found = _model_type(files)
    fitting = sorted({name for each in encoder_classes() for name, types in each.modes.items() if found in types})
    advice = f"write {' or '.join(fitting)}, or leave encoder_mode out" if fitting else "leave encoder_mode out"
    raise ConfigError(f"encoder_mode {mode}: the files of {files.name} say {found or 'no model_type'}; {advice}")


def _model_type(files: ModelFiles) -> str:
    """Return the model_type of config.json, "" where no file says one."""
    modules = files.read_json(MODULES_FILE, list)
    subfolder = str(modules[0].get("path", "")) if modules and isinstance(modules[0], dict) else ""
    has_config = bool(files.shape) or files.read(f"{subfolder}/config.json".removeprefix("/")) is not None
    return str(files.config(subfolder).model_type) if has_config else ""


def _class_of_prefix(name: str) -> type[Encoder] | None:
    """Return the class that the beginning of a name means, whatever its files; None where it means none."""
    if is_builtin(name):
        return _builtin_class(name)
    return next((each for each in encoder_classes() if each.prefix and name.startswith(each.prefix)), None)


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
    given = [SOME_READ[key] for key in idle_keys(own, files.keys)]
    if files.load_in_4bit and "load_in_4bit" not in own.reads:
        given.append("load_in_4bit")
    if given:
        raise ConfigError(f"{files.name} has no use for {given[0]}; leave it out")


def idle_keys(own: type[Encoder], keys: ModelKeys) -> list[str]:
    """Return the keys that are set and that a class has no use for."""
    return [key for key in SOME_READ if key not in own.reads and getattr(keys, key) != default_of(key)]


def default_of(key: str) -> object:
    """Return the value of a key of the model that nobody sets."""
    return ModelKeys.model_fields[key].default
