"""Find the format of a file of rows by its suffix, and read its rows with `iter_rows`.

A format is a `RowFormat` in the table `FORMATS` (vembed/registry.py), where a plugin adds its own by `register_format`.
Rows are (line, columns) pairs, read a few at a time, so that memory doesn't grow with the file. A row that can't be
read is an `Unreadable`, a plain sentence, in place of a dictionary: the caller's policy decides. What makes the rest of
the file unreadable is a `DataError` with file:line.

Each format is read in a file of its own: json_lines.py (JSONL), json_lists.py, text_tables.py (CSV, TSV),
arrow_files.py (Parquet, Arrow), tar_shards.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vembed.data.arrow_files import arrow_rows, parquet_rows
from vembed.data.json_lines import jsonl_rows
from vembed.data.json_lists import json_rows
from vembed.data.lines import numbered_lines, os_errors_named
from vembed.data.raw_rows import RawRow, Unreadable, row_of
from vembed.data.tar_shards import shard_rows
from vembed.data.text_tables import table_rows
from vembed.errors import ConfigError, DataError
from vembed.registry import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from vembed.data.raw_rows import Wanted

    PluginRows: TypeAlias = Callable[[Path], Iterable[tuple[int, dict[str, Any] | str]]]

SHARD_SUFFIX = ".tar"

NAMED_SUFFIXES = (".txt", ".txt.gz")
"""Read only where a path names the file itself: in a folder of rows, a .txt file may be a note or a licence."""


class RowFormat(NamedTuple):
    """Reader of one kind of file."""

    rows: Callable[[Path, Wanted], Iterator[RawRow]]
    cells_are_text: bool = False  # cells are texts without a type, as in CSV


def register_format(suffix: str) -> Callable[[PluginRows], PluginRows]:
    """Read files whose names end with a suffix, as rows; a decorator of the function that reads one file.

    The function takes the file's path and yields (line counted from 1, row) in order. A row is a dictionary with the
    columns of docs/data.md, or a text that says why it can't be read; columns, values and invalid rows are treated as
    those of JSONL. It raises `DataError` with file:line where it can't read on; a `ValueError` or `EOFError` of a
    decoder, or an `OSError` of the system, is told with the file's name. Such files work wherever rows are read: as
    training data, judged sets and corpora. `vembed.testing.formats.FormatContract` has the tests of a format.

    Args:
        suffix: In lower case, with its dot: ".xml".

    Raises:
        ConfigError: The suffix is taken, or is none.
    """
    if not suffix.startswith("."):
        raise ConfigError(f"data format {suffix!r}: a suffix begins with a dot, as '.xml' does")

    def register(function: PluginRows) -> PluginRows:
        def rows(path: Path, _: Wanted) -> Iterator[RawRow]:
            line = 0
            try:
                for line, row in function(path):
                    yield line, Unreadable(row) if isinstance(row, str) else row_of(row)
            except (ValueError, EOFError) as error:  # of Python's decoders; any other error is a fault of the code
                reason = str(error) or type(error).__name__
                raise DataError(f"{path.name}:{line}: can't be read on as {suffix}: {reason}") from error

        FORMATS.register(suffix[1:], RowFormat(rows), module=function.__module__)
        return function

    return register


def row_suffixes() -> tuple[str, ...]:
    """Return the suffixes of files that are rows wherever they lie, our own first."""
    return tuple(f".{name}" for name in FORMATS.names() if f".{name}" not in NAMED_SUFFIXES)


def suffix_of(path: Path) -> str | None:
    """Return the longest known suffix that a file name ends with, such as ".jsonl.gz"; None where none is known."""
    name = path.name.lower()
    return max((f".{suffix}" for suffix in FORMATS.names() if name.endswith(f".{suffix}")), key=len, default=None)


def format_of(path: Path) -> RowFormat:
    """Return the format of a file; one of an unknown suffix is read as a table of text, as .txt is."""
    suffix = suffix_of(path) or ".txt"
    loaded: RowFormat = FORMATS.load(suffix.removeprefix("."))
    return loaded


def iter_rows(path: Path, wanted: Wanted = list) -> Iterator[RawRow]:
    """Yield the rows of one file, in order.

    Args:
        wanted: Given the columns of a columnar file, says which to read; the default reads all.

    Raises:
        DataError: The file can't be read on, or is an empty shard.
        MachineError: The operating system refuses to read it.
    """
    with os_errors_named(path):
        yield from format_of(path).rows(path, wanted)


# The entries of FORMATS (vembed/registry.py), which names them by suffix. Only columnar files can leave columns unread.
JSONL = RowFormat(lambda path, _: jsonl_rows(numbered_lines(path)))
JSON = RowFormat(lambda path, _: json_rows(path))
TABLE = RowFormat(lambda path, _: table_rows(path), cells_are_text=True)
PARQUET = RowFormat(parquet_rows)
ARROW = RowFormat(arrow_rows)
TAR = RowFormat(lambda path, _: shard_rows(path))
