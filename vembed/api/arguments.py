"""What a Python caller hands over and gets back in words: rows in memory as a file, errors that name arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vembed.data.python_inputs import is_table
from vembed.data.python_rows import write_rows
from vembed.errors import VembedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.batch import ImageLimits
    from vembed.data.python_rows import RowsInput

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
        for argument, path in (files or {}).items():
            text = re.sub(rf"{re.escape(path.name)}:(\d+)", rf"{argument}, row \1", text)
            text = text.replace(str(path), argument).replace(path.name, argument)
        for key, argument in (keys or {}).items():
            text = re.sub(rf"\b{key}\b", argument, text)
        if options:
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
