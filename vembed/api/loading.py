"""How a model is named, and what may be said about it when it is loaded."""

from __future__ import annotations

import difflib
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from vembed.batch import ImageLimits
from vembed.distributed.runtime import prepare_device
from vembed.errors import ConfigError, MachineError
from vembed.files import home_path, is_folder
from vembed.models.names import MODEL_FOLDER, is_builtin, is_run, locate
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")


class LoadOptions(TypedDict, total=False):
    """What may be said about a model, under the names of the configuration; what is left out its own files say."""

    model_revision: str | None  # branch, tag or commit of a hub model
    trust_remote_code: bool  # run code that the model brings along; needs `model_revision` to be a commit
    allow_pickle: bool  # read pickled weights, with weights_only
    attn_implementation: str | None  # "sdpa", "eager" or "flash_attention_2"
    pooling_method: str | None  # "mean", "cls", "last_token", or "none": a vector of each token
    projection_dim: int | None  # dimension of the vectors of a model that is new to late interaction
    topk_tokens: int | None  # most vectors that an item keeps
    pool_factor: float | None  # vectors of a document that become one
    query_length: int | None  # tokens of a query in late interaction
    query_expansion: bool | None  # whether queries are filled up to that length
    bidirectional: bool  # let each token of a decoder see those behind it
    max_seq_length: int | None  # longest input in tokens
    query_prompt: str | None  # text before each query
    document_prompt: str | None  # text before each document
    pad_token: str | None  # padding token, for tokenizers without one
    image_background: str | None  # behind transparent parts of pictures: "white", "black" or "none"
    image_tokens: int | None  # most tokens of a picture of a vision-language model
    max_image_size: int | None  # its pictures larger than a square of this side are shrunk
    max_image_pixels: int | None  # a picture whose header says more is refused before it is decoded
    device: str | None  # "cpu", "cuda", "cuda:1"; the default is the one that training would take
    bf16: bool  # encode in bfloat16 mixed precision


def refuse_unknown(options: Mapping[str, object], known: type, function: str) -> None:
    """Refuse an argument that nothing reads, as Python does where it can.

    Raises:
        TypeError: There is one.
    """
    names = known.__annotations__
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
            raise TypeError(f"{function}() has no argument {name!r}; did you mean {near!r}?")


def image_limits(options: LoadOptions) -> ImageLimits:
    """Return the caps on each picture."""
    pixels = options.get("max_image_pixels")
    if pixels is None:
        return ImageLimits()
    if pixels < 1:
        raise ConfigError(f"max_image_pixels is {pixels}; it is at least 1")
    return ImageLimits(max_pixels=pixels)


def device_named(name: str) -> torch.device:
    """Return a device that works, by its name.

    Raises:
        MachineError: It can't be used here.
    """
    prepare_device()
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = first_line(error)
        raise MachineError(f"device {name!r} can't be used: {reason}") from error
    return device


def locate_model(path_or_name: str | Path) -> tuple[str, Path | None]:
    """Return what a model is loaded by, and the run that it is of.

    The output folder of a run stands for its model; a folder is named by its absolute path.

    Returns:
        A hub id or a path; and the output folder of the run, None for a model that is not in one.

    Raises:
        ConfigError: There is no such folder, the run has no model yet, or the name is of a model to train from scratch.
    """
    name = str(path_or_name)
    if is_builtin(name):
        raise ConfigError(
            f"{name} is a model to be trained from scratch; train it, then name the output folder of the run"
        )
    located = locate(name)
    if not is_folder(located.name):
        if isinstance(path_or_name, Path) or os.path.lexists(home_path(name)):
            raise ConfigError(f"there is no folder {name}; name that of a model, or of a run")
        return name, None
    if located.run is not None:
        _log.info("%s", located.note)
        run = located.run.resolve()
        return str(run / MODEL_FOLDER), run
    folder = Path(located.name).resolve()
    return str(folder), folder.parent if folder.name == MODEL_FOLDER and is_run(folder.parent) else None
