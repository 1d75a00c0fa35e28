"""Read the files of a model: sizes, types and shapes are checked before anything is allocated for what they say.

A folder may be half copied, hold pointers of Git LFS in place of its weights, or be bent by hand or on purpose. Every
failure is a ConfigError that names the file, what is wrong with it, and the cure.

What no check can see is a bit that turned over inside a number of the weights or a word of the vocabulary: neither
safetensors nor a tokenizer has a checksum.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from vembed.errors import ConfigError
from vembed.files import open_regular
from vembed.text import first_line, one_of, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

Module = TypeVar("Module", bound="nn.Module")
Settings = TypeVar("Settings")

MOST_BYTES = 64 * 2**20
"""Of a JSON file. The largest tokenizers have 35 MB, names of 20,000 classes in a config.json 2 MB."""

MOST_COUNT = 2**30
"""Of a number of tokens, rows or dimensions."""

TEXT, COUNT, FACTOR, FLAG = "a text", "a count", "a number of at least 1", "true or false"
NAMES, TEXTS, OBJECT = "a list of texts", "texts by name", "an object"
SIDES, NUMBERS, NUMBER = "sides in pixels", "a number for each channel", "a number"

MOST_SIDE = 8192
"""In pixels, of what a processor makes of a picture."""

MOST_AREA = 2**29
"""Of a picture in pixels, which some processors call the edge of its size."""

_SETTINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((COUNT,), "max_seq_length query_length document_length in_features out_features query_maxlen doc_maxlen"),
    ((COUNT,), "topk_tokens num_protected_tokens image_tokens length truncate_dim"),
    ((FLAG,), "do_lower_case include_prompt bias use_residual mask_punctuation do_query_expansion attend"),
    ((FLAG,), "attend_to_expansion_tokens attend_to_mask_tokens normalize_embeddings"),
    ((FLAG,), "pooling_mode_cls_token pooling_mode_mean_tokens pooling_mode_max_tokens pooling_mode_lasttoken"),
    ((FLAG,), "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens"),
    ((TEXT,), "default_prompt_name similarity_fn_name activation_function pooling model_type image_background"),
    ((TEXT,), "query_prefix document_prefix query_token_id doc_token_id strategy token"),
    ((TEXT,), "module_input_name module_output_name text_model_name image_model_name"),
    ((TEXT, NAMES), "pooling_mode"),
    ((NAMES,), "skiplist_words architectures"),
    ((TEXTS,), "prompts instructions markers"),
    ((FACTOR,), "pool_factor"),
    ((OBJECT,), "query_expansion late_interaction vembed"),
)
KINDS = {name: kinds for kinds, names in _SETTINGS for name in names.split()}
"""Setting of a JSON file that vembed reads -> what it may be, beside null. A name means the same in every file."""

PICTURE_KINDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_convert_rgb"), (FLAG,)),
    **dict.fromkeys(("image_mean", "image_std", "mean", "std"), (NUMBERS,)),
    **dict.fromkeys(("size", "crop_size"), (SIDES,)),
    "rescale_factor": (NUMBER,),
    "resample": (COUNT,),
}
"""The same for files that say how pictures are processed."""

CONFIG_KINDS = {
    name: KINDS[name] for name in ("model_type", "architectures", "module_input_name", "module_output_name")
}
"""The same for the config.json of a transformer or of an unknown module, all else in which is their library's."""


READERS = {
    "text": "tokenizer.json, tokenizer_config.json and chat_template.jinja",
    "image": "preprocessor_config.json, processor_config.json, open_clip_config.json and chat_template.jinja",
}
"""Files by which items of a modality are read, where a model has them."""


class BrokenFileError(ConfigError):
    """A file of a model that is damaged."""


def broken(path: Path | str, reason: object) -> BrokenFileError:
    """Return the error about a file that is damaged."""
    return BrokenFileError(f"{path} is broken: {reason}. Copy or download the model again")


def unreadable(name: str, modality: str, error: Exception) -> BrokenFileError:
    """Return the error about a model whose tokenizer, template or image processor fails at an ordinary item."""
    return BrokenFileError(
        f"{name}: no {modality} can be read by it ({type(error).__name__}: {first_line(error)}). One of its "
        f"{READERS[modality]} is broken. Copy or download the model again"
    )


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a small file.

    Raises:
        ConfigError: It is no regular file, larger than any such file, or the system refuses.
    """
    try:
        with open_regular(path) as file:
            # Before reading: JSON takes several times its size in memory once it is parsed.
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise broken(path, f"it has over {MOST_BYTES // 2**20} MiB")
            return file.read()
    except OSError as error:
        raise broken(path, error.strerror) from error


def read_json(path: Path, kind: type = dict, settings: Mapping[str, tuple[str, ...]] = CONFIG_KINDS) -> Any:
    """Return what a JSON file of a model holds.

    Args:
        kind: dict or list.
        settings: What settings in it, and in objects in it, may be.

    Raises:
        ConfigError: It is broken, holds something else, or a setting that vembed reads is of another kind.
    """
    try:
        loaded = json.loads(read_bytes(path).decode())
    except (ValueError, RecursionError) as error:
        raise broken(path, "nested too deeply" if isinstance(error, RecursionError) else error) from error
    if not isinstance(loaded, kind):
        wanted = "an object" if kind is dict else "a list"
        raise broken(path, f"it must hold {wanted}, and holds a {type(loaded).__name__}")
    if isinstance(loaded, dict):
        _check_settings(path, loaded, settings)
    return loaded


def _check_settings(path: Path, content: dict[str, Any], settings: Mapping[str, tuple[str, ...]]) -> None:
    for name, value in content.items():
        kinds = settings.get(name, ())
        if value is not None and kinds and not any(_is_of(value, kind) for kind in kinds):
            raise broken(path, f"{name} must be {one_of(kinds)}, and is {quoted(str(value))}")
        # A config.json has objects of its library's own, in which our names may mean something else.
        if isinstance(value, dict) and TEXTS not in kinds and settings is not CONFIG_KINDS:
            _check_settings(path, value, settings)


def _is_of(value: Any, kind: str) -> bool:
    """Return whether a value of a JSON file is of one of the kinds above."""
    # By type() and not isinstance: to Python, JSON's true is an integer too.
    if kind == COUNT:
        return type(value) is int and 0 <= value <= MOST_COUNT
    if kind == FACTOR:
        return type(value) in (int, float) and 1 <= value <= MOST_COUNT
    if kind == OBJECT:
        return isinstance(value, dict)
    if kind == SIDES:
        if not isinstance(value, dict):
            sides = value if isinstance(value, list) else [value]
            return all(_is_of(side, COUNT) and side <= MOST_SIDE for side in sides)
        return all(
            side is None or (_is_of(side, COUNT) and 0 < side <= (MOST_AREA if name.endswith("_edge") else MOST_SIDE))
            for name, side in value.items()
        )
    if kind == NUMBERS:
        return isinstance(value, list) and len(value) in (1, 3) and all(_is_of(number, NUMBER) for number in value)
    if kind == NUMBER:
        return type(value) in (int, float) and abs(value) < MOST_COUNT
    if kind == TEXTS:
        return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if kind == NAMES:
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    return isinstance(value, bool if kind == FLAG else str)


def read_settings(path: Path, kind: type[Settings], *, beside: frozenset[str] = frozenset()) -> Settings:
    """Return the settings of a model of ours as the dataclass that they were written from.

    Args:
        beside: Names in the file that are no fields.

    Raises:
        ConfigError: A setting is unknown, or not what its field may be.
    """
    from pydantic import TypeAdapter, ValidationError  # here, as most models' files need no pydantic

    content = {name: value for name, value in read_json(path).items() if name not in beside}
    unknown = sorted(content.keys() - {field.name for field in fields(kind)})  # type: ignore[arg-type]
    if unknown:
        raise broken(path, f"{quoted(unknown[0])} is no setting of such a model")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise broken(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@contextmanager
def opened_weights(path: Path) -> Iterator[Any]:
    """Open a file of safetensors, which maps it: its header is checked against its length, and no tensor is read.

    Raises:
        ConfigError: It is missing, cut, or no such file.
    """
    if not path.is_file():
        raise broken(path, "there is no such file" if not os.path.lexists(path) else "it is no regular file")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise broken(path, f"{first_line(error)} ({path.stat().st_size:,} bytes)") from error


def load_tensors(path: Path, *names: str) -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors, or those of some names that it must hold.

    Raises:
        ConfigError: The file is damaged, or holds no tensor of such a name.
    """
    with opened_weights(path) as file:
        there = file.keys()
        if missing := [name for name in names if name not in there]:
            raise broken(path, f"it holds no {missing[0]}, but {quoted(', '.join(there), 200)}")
        return {name: file.get_tensor(name) for name in names or there}


def make_module(make: Callable[[], Module], device: torch.device, folder: Path | str) -> Module:
    """Make a module on a device.

    Raises:
        ConfigError: Its settings are of no module, such as a shape that no tensor has.
    """
    try:
        with device:
            return make()
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{folder}: its settings describe an impossible model: {first_line(error)}. Copy or download it again"
        ) from error


def load_module(make: Callable[[], Module], path: Path) -> Module:
    """Make a module on the CPU with the weights of a file, which must be those of all its parameters and no others.

    It is made without memory first, so that a shape that the file doesn't hold is refused before it is allocated.

    Raises:
        ConfigError: The file is damaged, or holds other tensors.
    """
    module = make_module(make, torch.device("meta"), path.parent)
    load_weights(module, path)
    return module


def load_weights(module: nn.Module, path: Path) -> None:
    """Load the weights of a file into a module; one without memory gets it on the CPU once the file fits.

    Raises:
        ConfigError: The file is damaged, or holds other tensors.
    """
    wanted = module.state_dict()
    with opened_weights(path) as file:
        there = file.keys()
        for name in sorted(wanted.keys() ^ set(there)):
            raise broken(
                path, f"it holds no {name}" if name in wanted else f"it holds {quoted(name)}, which no layer has"
            )
        # Shapes and types come from the header: nothing is read or allocated before all of them fit.
        for name, tensor in wanted.items():
            held = file.get_slice(name)
            shape, floating = tuple(held.get_shape()), held.get_dtype().startswith(("F", "BF"))
            if shape != tuple(tensor.shape) or floating != tensor.is_floating_point():
                raise broken(
                    path,
                    f"{name} is {held.get_dtype()} {shape}, and the model's settings mean {tuple(tensor.shape)} of "
                    f"{str(tensor.dtype).removeprefix('torch.')}",
                )
        if any(tensor.is_meta for tensor in wanted.values()):
            module.to_empty(device="cpu")
        module.load_state_dict({name: file.get_tensor(name) for name in there})


LIBRARY_FILES = frozenset(
    {"config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"}
    | {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "generation_config.json"}
    | {"model.safetensors.index.json", "open_clip_config.json", "sentence_bert_config.json"}
)
"""Objects of JSON that libraries read of a folder. Of tokenizer.json they alone read the up to 35 MB."""

NO_WEIGHTS = frozenset({"I16", "I32", "U16", "U32"})
"""Types of safetensors that weights never have, unless they are quantized."""


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """Refuse a folder with a damaged file before a library reads it, whose own words seldom name the file.

    Args:
        weights: Whether they are read; a plan needs none.

    Raises:
        ConfigError: A file isn't whole.
    """
    if not folder.is_dir():
        return
    # Settings first: they say whether weights may be integers, that is quantized.
    quantized = False
    for path in sorted(folder.iterdir(), key=lambda path: (path.suffix != ".json", path.name)):
        if path.name in LIBRARY_FILES:
            is_of_pictures = path.name.endswith(("processor_config.json", "open_clip_config.json"))
            content = read_json(path, dict, PICTURE_KINDS if is_of_pictures else CONFIG_KINDS)
            quantized = quantized or "quantization_config" in content
        elif path.name in ("tokenizer.json", "chat_template.jinja") and not path.is_file():
            raise broken(path, "it is no regular file")
        elif weights and path.name.endswith(".safetensors"):
            with opened_weights(path) as file:
                for name in () if quantized else file.keys():
                    if (dtype := file.get_slice(name).get_dtype()) in NO_WEIGHTS:
                        raise broken(path, f"{name} has the type {dtype}, which weights never have")
