"""Arguments of Python callers: checked, rows in memory written into a file, and named in errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch

from vembed.batch import ImageLimits
from vembed.data.python_inputs import is_table
from vembed.data.python_rows import write_rows
from vembed.distributed.runtime import prepare_device
from vembed.errors import ConfigError, MachineError, VembedError
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.api.keys import LoadKeys
    from vembed.batch import Side
    from vembed.data.python_rows import RowsInput

SIDES = ("query", "document")

_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")


@contextmanager
def errors_name_arguments(
    files: Mapping[str, Path] | None = None, keys: Mapping[str, str] | None = None, options: Iterable[str] = ()
) -> Iterator[None]:
    """Let errors within the block name what a Python caller wrote.

    Args:
        files: Argument -> the file that its rows were written into; may fill within the block.
        keys: Key of the configuration -> the argument that it was given by.
        options: Options of the command line, with underscores, that are arguments of the call.
    """
    try:
        yield
    except VembedError as error:
        text = str(error)
        # The file of rows in memory is ours: a line of it is a row of the argument, counted from 1.
        for argument, path in (files or {}).items():
            text = re.sub(rf"{re.escape(path.name)}:(\d+)", rf"{argument}, row \1", text)
            text = text.replace(str(path), argument).replace(path.name, argument)
        # Whole words alone: `data_path` stands within val_data_path.
        for key, argument in (keys or {}).items():
            text = re.sub(rf"\b{key}\b", argument, text)
        if options:
            # Messages of the command line name options; one that the call lacks stays, as that of another program.
            text = re.sub(r"(\w+) \(--[a-z-]+\)", r"\1", text).replace("vembed encode", "vembed.build_index")
            text = _OPTION.sub(lambda match: _argument(match, {*options}), text)
        error.args = (text, *error.args[1:])
        raise


def _argument(match: re.Match[str], options: set[str]) -> str:
    """Return how a call writes an option; one that it doesn't have stays, such as that of another program."""
    name = match[1].replace("-", "_")
    if name not in options:
        return match[0]
    return "overwrite=True" if name == "overwrite" else name


@contextmanager
def path_of(data: RowsInput | str | Path, limits: ImageLimits) -> Iterator[str]:
    """Give the path of data: their own, or that of a file of rows in memory, which is there within the block.

    Args:
        data: A path; or dictionaries in any iterable, or a table. Texts count as rows that hold a text alone.

    Raises:
        TypeError: They are neither.
        DataError: There are no rows, or one holds what rows can't.
    """
    if isinstance(data, (str, Path)):
        yield str(data)
        return
    files: dict[str, Path] = {}
    with errors_name_arguments(files), TemporaryDirectory(prefix="vembed-rows-") as folder:
        files["data"] = write_rows(_rows(data), Path(folder), "data", limits)
        yield str(files["data"])


def _rows(data: Any) -> Any:
    """Return texts as rows, with their numbers as ids; tables and dictionaries as they are."""
    if is_table(data) or isinstance(data, (Mapping, bytes)) or not isinstance(data, Iterable):
        return data
    return ({"_id": str(n), "text": row} if isinstance(row, str) else row for n, row in zip(count(), data))


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


def image_limits(options: LoadKeys) -> ImageLimits:
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


def checked_side(side: str | None) -> Side:
    """Return the side, which is that of queries or that of documents.

    Raises:
        ValueError: It is neither, or missing.
    """
    if side is None:
        raise ValueError(
            'say which side the rows are: "query" or "document"; many models put another prompt before each'
        )
    if side not in SIDES:
        near = difflib.get_close_matches(str(side), SIDES, n=1, cutoff=0.0)[0]
        raise ValueError(f"there is no side {side!r}; did you mean {near!r}?")
    return cast("Side", side)
