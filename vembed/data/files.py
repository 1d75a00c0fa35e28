"""Read row files: JSONL, JSON, CSV, TSV, Parquet, Arrow and tar shards become (line, row) pairs, in bounded memory.

A row that can't be read is its reason, a plain sentence, in place of a dictionary: the caller's policy decides. What
makes the rest of the file unreadable is a `DataError` with file:line.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

from vembed.data.json_list import JsonList
from vembed.data.lines import first_character, line_blocks, lines, pieces, reading
from vembed.data.parquet import MAX_COLUMNS, arrow_rows, parquet_rows, repeated
from vembed.data.tables import table_form, table_rows
from vembed.data.tar_shards import shard_rows
from vembed.errors import DataError
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from vembed.data.lines import LineBlock
    from vembed.data.tables import TableForm

RawRow: TypeAlias = tuple[int, "dict[str, Any] | str"]
"""(line counted from 1, the row's columns or why it can't be read)."""

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
SHARD_SUFFIX = ".tar"
ROW_SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES), ".parquet", ".arrow", SHARD_SUFFIX)
NAMED_SUFFIXES = (".txt", ".txt.gz")
"""Of tables that are read where their file is named; one in a folder may be anything."""

MAX_OBJECT_CHARACTERS = 512 * 2**20
"""Longest file that is one JSON object: it is read as a whole."""


def suffix_of(path: Path) -> str | None:
    """Return the suffix that a file name ends with, of `ROW_SUFFIXES` or of a text that may be a table; or None."""
    name = path.name.lower()
    return max((suffix for suffix in (*ROW_SUFFIXES, *NAMED_SUFFIXES) if name.endswith(suffix)), key=len, default=None)


def holds_text_cells(path: Path) -> bool:
    """Return whether a file's cells are texts without a type (CSV, TSV and their like)."""
    return (suffix_of(path) or "").startswith((".csv", ".tsv", ".txt"))


def iter_rows(
    path: Path, wanted: Callable[[Sequence[str]], Sequence[str]], form: TableForm | None = None
) -> Iterator[RawRow]:
    """Yield the rows of one file, in order.

    Args:
        wanted: Given the columns of a columnar file, says which to read.
        form: Of a table of text; None tells it from the file.

    Raises:
        DataError: The file is empty, or can't be read on.
        MachineError: The operating system refuses to read it.
    """
    suffix = suffix_of(path) or ""
    with reading(path):
        if suffix == ".parquet":
            yield from parquet_rows(path, wanted)
        elif suffix == ".arrow":
            yield from arrow_rows(path, wanted)
        elif suffix == SHARD_SUFFIX:
            yield from shard_rows(path, json.JSONDecoder(object_pairs_hook=unique_keys))
        elif suffix.startswith(".jsonl"):
            yield from jsonl_rows(lines(path))
        elif suffix.startswith(".json"):
            yield from _json_rows(path)
        else:
            yield from table_rows(path, form or table_form(path))


def jsonl_blocks(path: Path) -> Iterator[LineBlock]:
    """Yield the lines of a file of JSONL in blocks.

    Raises:
        DataError: The file can't be read on.
        MachineError: The operating system refuses to read it.
    """
    with reading(path):
        yield from line_blocks(path)


def jsonl_rows(numbered: Iterable[tuple[int, bytes]]) -> Iterator[RawRow]:
    """Yield one row per line that is not blank."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    for number, line in numbered:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            yield number, f"invalid UTF-8 at byte {error.start + 1} of the line"
            continue
        if not text.strip():
            continue
        yield number, _parsed(decoder.decode, text)


def text_rows(path: Path) -> Iterator[RawRow]:
    """Yield the lines of a text file (possibly .gz) as rows of one column `text`, without white space at their ends.

    Raises:
        DataError: The file can't be read on.
        MachineError: The operating system refuses to read it.
    """
    with reading(path):
        for number, line in lines(path):
            try:
                yield number, {"text": line.decode().strip()}
            except UnicodeDecodeError as error:
                yield number, f"invalid UTF-8 at byte {error.start + 1} of the line"


def json_object(path: Path) -> dict[str, Any]:
    """Return the one JSON object that a file holds, read as a whole.

    Raises:
        DataError: It is no JSON, no object, or too long.
        MachineError: The operating system refuses to read the file.
    """
    with reading(path):
        parts, left = [], MAX_OBJECT_CHARACTERS
        for piece in pieces(path):
            parts.append(piece)
            left -= len(piece)
            if left < 0:
                raise DataError(f"{path.name}: over {MAX_OBJECT_CHARACTERS:,} characters in one JSON object")
        text = "".join(parts)
    try:
        value = json.JSONDecoder(object_pairs_hook=unique_keys).decode(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path.name}:{error.lineno}: bad JSON: {error.msg} at character {error.colno}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{path.name}: bad JSON: {reason}") from error
    if type(value) is not dict:
        raise DataError(f"{path.name}: expected a JSON object, got {type(value).__name__}")
    return value


def _parsed(decode: Callable[[str], Any], text: str) -> dict[str, Any] | str:
    try:
        value = decode(text)
    except json.JSONDecodeError as error:
        return f"bad JSON: {error.msg} at character {error.pos + 1}"
    except ValueError as error:
        return f"bad JSON: {error}"
    except RecursionError:
        return "bad JSON: nested too deeply"
    return _row_of(value)


def _row_of(value: object) -> dict[str, Any] | str:
    """Return a value of JSON as a row, or why it is none."""
    if type(value) is not dict:
        return f"expected a JSON object, got {type(value).__name__}"
    return value if len(value) <= MAX_COLUMNS else f"{len(value):,} columns, and a row has at most {MAX_COLUMNS:,}"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary.

    Raises:
        ValueError: A key stands twice.
    """
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError(f"the key {quoted(repeated(key for key, _ in pairs))} stands twice in one object")
    return row


def _json_rows(path: Path) -> Iterator[RawRow]:
    """Yield the objects of a JSON list, each with the line that it begins on; or read the file as JSONL."""
    if first_character(path) != b"[":
        yield from jsonl_rows(lines(path))
        return
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    for line, value in JsonList(pieces(path), decoder, path.name):
        yield line, _row_of(value)
