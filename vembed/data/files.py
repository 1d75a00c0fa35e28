"""Read row files: JSONL, JSON, CSV, TSV, Parquet and tar shards become (line, row) pairs in bounded memory.

A row that can't be read is its reason, a plain sentence, in place of a dictionary: the caller's policy decides. What
makes the rest of the file unreadable is a `DataError` with file:line.
"""

from __future__ import annotations

import csv
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from vembed.data import lines as limits
from vembed.data.json_list import JsonList
from vembed.data.lines import first_character, lines, pieces, reading, too_long
from vembed.data.parquet import MAX_COLUMNS, parquet_rows, repeated
from vembed.data.tar_shards import shard_rows
from vembed.errors import DataError
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

RawRow: TypeAlias = tuple[int, "dict[str, Any] | str"]
"""(line counted from 1, the row's columns or why it can't be read)."""

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
SHARD_SUFFIX = ".tar"
ROW_SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES), ".parquet", SHARD_SUFFIX)
MAX_OBJECT_CHARACTERS = 512 * 2**20
"""Longest file that is one JSON object: it is read as a whole."""


def suffix_of(path: Path) -> str | None:
    """Return the suffix of `ROW_SUFFIXES` that a file name ends with, or None."""
    name = path.name.lower()
    return max((suffix for suffix in ROW_SUFFIXES if name.endswith(suffix)), key=len, default=None)


def holds_text_cells(path: Path) -> bool:
    """Return whether a file's cells are texts without a type (CSV, TSV)."""
    return (suffix_of(path) or "").startswith((".csv", ".tsv"))


def iter_rows(path: Path, wanted: Callable[[Sequence[str]], Sequence[str]]) -> Iterator[RawRow]:
    """Yield the rows of one file, in order.

    Args:
        wanted: Given the columns of a columnar file, says which to read.

    Raises:
        DataError: The file is empty, or can't be read on.
        MachineError: The operating system refuses to read it.
    """
    suffix = suffix_of(path) or ""
    with reading(path):
        if suffix == ".parquet":
            yield from parquet_rows(path, wanted)
        elif suffix == SHARD_SUFFIX:
            yield from shard_rows(path, json.JSONDecoder(object_pairs_hook=_unique_keys))
        elif suffix.startswith(".jsonl"):
            yield from jsonl_rows(path)
        elif suffix.startswith(".json"):
            yield from _json_rows(path)
        else:
            yield from _csv_rows(path, "excel-tab" if suffix.startswith(".tsv") else "excel")


def jsonl_rows(path: Path) -> Iterator[RawRow]:
    """Yield one row per line that is not blank; line numbers count the blank ones."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)
    for number, line in lines(path):
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
        value = json.JSONDecoder(object_pairs_hook=_unique_keys).decode(text)
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


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError(f"the key {quoted(repeated(key for key, _ in pairs))} stands twice in one object")
    return row


def _json_rows(path: Path) -> Iterator[RawRow]:
    """Yield the objects of a JSON list, each with the line that it begins on; or read the file as JSONL."""
    if first_character(path) != b"[":
        yield from jsonl_rows(path)
        return
    decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)
    for line, value in JsonList(pieces(path), decoder, path.name):
        yield line, _row_of(value)


def _csv_rows(path: Path, dialect: str) -> Iterator[RawRow]:
    """Yield CSV rows by the line that they begin on; the first row names the columns."""
    num_bytes = 0  # of the row that is being read

    def texts() -> Iterator[str]:
        nonlocal num_bytes
        for number, line in lines(path):
            num_bytes += len(line)
            if num_bytes > limits.MAX_LINE_BYTES:
                raise too_long(f"{path.name}:{number}", "row")
            # Bytes that are not UTF-8 become lone surrogates, which the row check refuses in the columns that matter.
            yield line.decode(errors="surrogateescape")

    with _csv_cell_limit(limits.MAX_LINE_BYTES):
        # Strict: a quote that is never closed is an error instead of one cell that swallows the rest of the file.
        reader = csv.reader(texts(), dialect, strict=True)
        header: list[str] | None = None
        while True:
            begin, num_bytes = reader.line_num + 1, 0
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                if header is None:
                    msg = f"{path.name}:{begin}: bad header: {error}"
                    raise DataError(msg) from error
                yield begin, f"bad quoting or cells: {error} (a quote inside a quoted cell is written twice)"
                continue
            if not cells or cells == [""]:
                continue
            if header is None:
                header = _header(cells, f"{path.name}:{begin}")
            elif len(cells) != len(header):
                yield begin, f"{len(cells)} cells for {len(header)} columns"
            else:
                yield begin, dict(zip(header, cells, strict=True))


def _header(cells: Sequence[str], where: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    if len(header) > MAX_COLUMNS:
        raise DataError(f"{where}: {len(header):,} columns, and a row has at most {MAX_COLUMNS:,}")
    if len(set(header)) != len(header):
        twice = repeated(header)
        raise DataError(f"{where}: the header names {quoted(twice) if twice else 'a column without a name'} twice")
    return header


@contextmanager
def _csv_cell_limit(limit: int) -> Iterator[None]:
    """Raise the csv module's process-wide limit of 128 KiB a cell, and put it back."""
    before = csv.field_size_limit(limit)
    try:
        yield
    finally:
        csv.field_size_limit(before)
