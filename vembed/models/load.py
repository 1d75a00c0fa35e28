"""The one way in: from the keys of a model to an encoder, with its weights or, for the plan, without them.

1. `class_of` asks the classes of ENCODERS in order, plugins first; the first that recognises the model takes it.
2. A key that is set and that this class doesn't read is refused, not ignored.
3. The class loads the model from its files (`vembed.models.hub`).
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

from vembed import collector_paused
from vembed.batch import Image
from vembed.errors import ConfigError, DataError
from vembed.models.checked_files import unreadable
from vembed.models.formats import read_modules
from vembed.models.hub import ModelFiles, SkeletonFiles, saved_background
from vembed.models.keys import ModelKeys, model_names
from vembed.models.names import BUILTIN_PREFIX, is_builtin
from vembed.models.pictures import blank_png
from vembed.registry import ENCODERS
from vembed.text import one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vembed.batch import ImageLimits
    from vembed.models.encoder import Encoder

COMMON_KEYS = frozenset(
    {"model_name", "text_model_name", "image_model_name", "encoder_mode", "trust_remote_code", "allow_pickle"}
    | {"torch_dtype", "freeze_batch_norm", "gradient_checkpointing"}
)
"""Keys of the model that all classes read. Each other one is refused unless a class names it in `reads`, so that a new
key can't be ignored by accident."""

EncoderClass = TypeVar("EncoderClass", bound="type[Encoder]")


def register_encoder(encoder: EncoderClass) -> EncoderClass:
    """Let models be loaded by a class of your own; it is asked before ours. Usable as a decorator.

    Args:
        encoder: Its `builtin`, `prefix` or `marker` says which model names mean it.

    Raises:
        ConfigError: It states none of them, or its name is taken.
    """
    name = encoder.builtin or encoder.prefix.rstrip(":") or encoder.__name__.lower()
    if not encoder.builtin and not encoder.prefix and not encoder.marker:
        raise ConfigError(
            f"encoder {encoder.__name__}: no model name means it; state builtin, prefix or marker in the class"
        )
    ENCODERS.register(name, encoder, module=encoder.__module__)
    return encoder


def encoder_classes() -> Iterator[type[Encoder]]:
    """Yield all classes in the order in which they are asked for a model: plugins first."""
    plugins = ENCODERS.plugins()
    for name in (*plugins, *(name for name in ENCODERS.names() if name not in plugins)):
        yield ENCODERS.load(name)


def is_from_scratch(keys: ModelKeys) -> bool:
    """Return whether a model, or one of its two towers, starts from random weights."""
    return any(map(is_builtin, model_names(keys)))


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
        keys: The name may also be a JSON file with the shape of a model (`SkeletonFiles`).
        device: Where the parameters are; on others than "meta" they are random numbers.
        texts: For a model that makes its vocabulary of training texts; without any it truncates no text.

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
    """Load an encoder from its files, and set what all classes have in common.

    Raises:
        ConfigError: A key is set that the class doesn't read, or the files can't be used.
    """
    encoder_class = class_of(files)
    unread = unread_keys(encoder_class, files.keys)
    if files.load_in_4bit and "load_in_4bit" not in encoder_class.reads:
        unread.append("load_in_4bit")
    if unread:
        raise ConfigError(f"{in_words(unread[0])} has no effect with {files.name}; remove it")
    encoder = encoder_class.load(files, texts)
    if files.keys.freeze_batch_norm and not encoder.batch_norms():
        raise ConfigError(f"{files.name} has no batch normalisation for freeze_batch_norm; leave it out")
    encoder.freeze_batch_norm = files.keys.freeze_batch_norm
    if files.folder is not None and files.has_weights:
        # An item of each modality, so that files that no reader can use are named now and not at the first row.
        for modality, item in (("text", "a"), ("image", Image("a blank picture", blank_png()))):
            if modality not in encoder.modalities:
                continue
            try:
                encoder.featurize([item], "query")
            except ConfigError:
                raise
            except DataError as error:  # by the keys no such item fits, whatever the files
                raise ConfigError(f"{files.name}: {error}") from error
            except Exception as error:  # of a library, or of a template that a model brings along
                raise unreadable(files.name, modality, error) from error
    if "image" in encoder.modalities and "" in encoder.parts():  # towers of two models have their backgrounds by now
        wanted = files.keys.image_background
        encoder.image_background = saved_background(files) if wanted == "auto" else wanted
    return encoder


def unread_keys(encoder_class: type[Encoder], keys: ModelKeys) -> list[str]:
    """Return the keys that are set and that a class doesn't read."""
    rare = [key for key in ModelKeys.model_fields if key not in COMMON_KEYS and key not in encoder_class.reads]
    return [key for key in rare if getattr(keys, key) != default_of(key)]


def default_of(key: str) -> object:
    """Return the value of a model key that nobody sets."""
    return ModelKeys.model_fields[key].default


def in_words(key: str) -> str:
    """Return a key for a message; a model that takes one prompt takes both."""
    return "query_prompt or document_prompt" if key in ("query_prompt", "document_prompt") else key


def class_of(files: ModelFiles) -> type[Encoder]:
    """Return the class that a model's name and files mean, and hold `encoder_mode` against it.

    Raises:
        ConfigError: There is no such model, or its files are of another family than `encoder_mode`.
    """
    keys, name = files.keys, files.name
    # Two names are one mode; a name of a built-in model or of a library decides alone. Else the files do, and the mode,
    # which older configurations state, is only held against what they say.
    mode = "composed" if keys.text_model_name is not None else keys.encoder_mode
    by_name = None if keys.text_model_name is not None else _class_by_name(name)
    encoder_class = by_name or next(candidate for candidate in encoder_classes() if candidate.recognises(files))
    if mode == "auto" or (by_name is not None and mode in by_name.modes):
        return encoder_class
    if by_name is not None:
        raise ConfigError(f"encoder_mode {mode}: {name} is of another family; leave encoder_mode out")
    model_types = encoder_class.modes.get(mode)
    if model_types is not None and (not model_types or _model_type(files) in model_types):
        return encoder_class
    if mode == "composed":
        raise ConfigError(
            f"encoder_mode composed: {name} is one model; name two by text_model_name and image_model_name, or "
            f"leave encoder_mode out"
        )
    model_type = _model_type(files)
    # A class without modes, such as that of models that sentence-transformers runs, has none to recommend.
    classes = encoder_classes() if encoder_class.modes else ()
    modes = (mode_and_types for candidate in classes for mode_and_types in candidate.modes.items())
    fitting = sorted({other_mode for other_mode, types in modes if model_type in types})
    advice = f"write {one_of(fitting)}, or leave encoder_mode out" if fitting else "leave encoder_mode out"
    raise ConfigError(f"encoder_mode {mode}: the files of {name} say {model_type or 'no model_type'}; {advice}")


def _class_by_name(name: str) -> type[Encoder] | None:
    """Return the class that the beginning of a name means, whatever the files; None where it means none.

    Raises:
        ConfigError: There is no such built-in model.
    """
    if not is_builtin(name):
        return next((cls for cls in encoder_classes() if cls.prefix and name.startswith(cls.prefix)), None)
    wanted = name.removeprefix(BUILTIN_PREFIX)
    if wanted in ENCODERS:
        encoder_class: type[Encoder] = ENCODERS.load(wanted)
        if encoder_class.builtin == wanted:
            return encoder_class
    names = [encoder_class.builtin for encoder_class in encoder_classes() if encoder_class.builtin]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.0)
    raise ConfigError(f"model_name: no built-in model {name!r}; did you mean {BUILTIN_PREFIX}{close[0]}?")


def _model_type(files: ModelFiles) -> str:
    """Return the model_type of config.json, "" where no file says one."""
    modules = read_modules(files)
    subfolder = modules[0]["path"] if modules else ""
    has_config = bool(files.shape) or files.read(f"{subfolder}/config.json".removeprefix("/")) is not None
    return str(files.config(subfolder).model_type) if has_config else ""
