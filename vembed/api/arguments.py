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
from vembed.data.python_rows import is_table, write_rows
from vembed.distributed.runtime import prepare_device
from vembed.errors import ConfigError, MachineError, VembedError
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.api.keys import LoadKeys
    from vembed.batch import Side
    from vembed.data.python_rows import RowsInput

SIDES = ("query", "document")


@contextmanager
def errors_name_arguments(words: Mapping[str, str], rows: Mapping[str, Path] | None = None) -> Iterator[None]:
    """Let errors within the block name what a Python caller wrote.

    Messages name keys of the configuration and options of the command line. Some 75 of them, in seven rooms, can end
    in a Python call: one table of words for each call is less than an argument in every message.

    Args:
        words: Key, option or command in a message -> what the call has in its place. Only whole words are replaced:
            `data_path` stands within val_data_path.
        rows: Argument -> the file that its rows in memory were written into; may fill within the block.
    """
    try:
        yield
    except VembedError as error:
        text = str(error)
        # The file of rows is ours, and nothing to the caller: its line n is row n of the argument.
        for argument, path in (rows or {}).items():
            text = text.replace(f"{path.parent}/{path.name}", path.name)
            text = re.sub(rf"{re.escape(path.name)}:(\d+)", rf"{argument}, row \1", text).replace(path.name, argument)
        # In one pass, so that no word is looked for in what another one has become.
        if words:
            text = re.sub(rf"(?<![\w-])({'|'.join(map(re.escape, words))})(?![\w-])", lambda m: words[m[0]], text)
        error.args = (text, *error.args[1:])
        raise


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
    rows: Any = data
    if isinstance(rows, Iterable) and not isinstance(rows, (Mapping, bytes)) and not is_table(rows):
        # Texts become rows with their numbers as ids, dictionaries stay as they are.
        rows = ({"_id": str(n), "text": row} if isinstance(row, str) else row for n, row in zip(count(), rows))
    files: dict[str, Path] = {}
    with errors_name_arguments({}, files), TemporaryDirectory(prefix="vembed-rows-") as folder:
        files["data"] = write_rows(rows, Path(folder), "data", limits)
        yield str(files["data"])


def refuse_unknown(options: Mapping[str, object], known: type, function: str) -> None:
    """Refuse an argument that nothing reads, as Python does where it can.

    Raises:
        TypeError: There is one.
    """
    # Options are a TypedDict, which Python doesn't check at run time; a misspelt one would be ignored.
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
    # torch.device takes any number; only a tensor there tells whether the device exists and works.
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
