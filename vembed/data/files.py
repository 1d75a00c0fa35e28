"""Read row files: JSONL, JSON, CSV, TSV and Parquet become (line, row) pairs in constant memory.

A row that can't be read is its reason, a plain sentence, in place of a dictionary: the caller's policy decides. What
makes the rest of the file unreadable is a `DataError` with file:line.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

from vembed.errors import DataError, MachineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

RawRow: TypeAlias = tuple[int, "dict[str, Any] | str"]
"""(line counted from 1, the row's columns or why it can't be read)."""

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
ROW_SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES), ".parquet")
MAX_LINE_BYTES = 64 * 2**20
"""Longest line or cell: a binary file without line ends must not be read into memory whole."""

PARQUET_ROWS, PARQUET_PICTURE_ROWS = 4096, 64
"""Rows that are Python objects at a time, without and with bytes of pictures among them."""

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


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
    with _reading(path):
        if suffix == ".parquet":
            yield from _parquet_rows(path, wanted)
        elif suffix.startswith(".jsonl"):
            yield from jsonl_rows(path)
        elif suffix.startswith(".json"):
            yield from _json_rows(path)
        else:
            yield from _csv_rows(path, "excel-tab" if suffix.startswith(".tsv") else "excel")


def jsonl_rows(path: Path) -> Iterator[RawRow]:
    """Yield one row per line that is not blank; line numbers count the blank ones."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)
    for number, line in _lines(path):
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
    with _reading(path):
        for number, line in _lines(path):
            try:
                yield number, {"text": line.decode().strip()}
            except UnicodeDecodeError as error:
                yield number, f"invalid UTF-8 at byte {error.start + 1} of the line"


def json_object(path: Path) -> dict[str, Any]:
    """Return the one JSON object that a file holds, read as a whole.

    Raises:
        DataError: It is no JSON, or no object.
        MachineError: The operating system refuses to read the file.
    """
    with _reading(path):
        text = _decoded(b"".join(line for _, line in _lines(path)), path.name)
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


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        msg = f"{name}:{data.count(10, 0, error.start) + 1}: invalid UTF-8"
        raise DataError(msg) from error


def _parsed(decode: Callable[[str], Any], text: str) -> dict[str, Any] | str:
    try:
        value = decode(text)
    except json.JSONDecodeError as error:
        return f"bad JSON: {error.msg} at character {error.pos + 1}"
    except ValueError as error:
        return f"bad JSON: {error}"
    except RecursionError:
        return "bad JSON: nested too deeply"
    return value if type(value) is dict else f"expected a JSON object, got {type(value).__name__}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        msg = f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object"
        raise ValueError(msg)
    return row


def _json_rows(path: Path) -> Iterator[RawRow]:
    """Yield the objects of a JSON list, each with the line that it begins on; or read the file as JSONL."""
    first = next((line.lstrip() for _, line in _lines(path) if line.strip()), b"")
    if not first.startswith(b"["):
        yield from jsonl_rows(path)
        return
    yield from _json_list(_decoded(b"".join(line for _, line in _lines(path)), path.name), path.name)


def _json_list(text: str, name: str) -> Iterator[RawRow]:
    def broken(reason: str) -> DataError:
        return DataError(f"{name}:{text.count(chr(10), 0, position) + 1}: bad JSON: {reason}")

    decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)
    position = _skip_space(text, text.index("[") + 1)
    line, counted = 1, 0
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            position = error.pos
            raise broken(error.msg) from error
        except (ValueError, RecursionError) as error:
            raise broken(str(error)) from error
        yield line, value if type(value) is dict else f"expected a JSON object, got {type(value).__name__}"
        position = _skip_space(text, position)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
            if text[position : position + 1] == "]":
                raise broken("a comma before the end of the list")
        elif text[position : position + 1] != "]":
            raise broken("expected ',' or ']' after an object")
    if text[position + 1 :].strip():
        raise broken("text after the end of the list")


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


def _csv_rows(path: Path, dialect: str) -> Iterator[RawRow]:
    """Yield CSV rows by the line that they begin on; the first row names the columns."""
    # Bytes that are not UTF-8 become lone surrogates, which the row check refuses in the columns that matter.
    lines = (line.decode(errors="surrogateescape") for _, line in _lines(path))
    with _csv_cell_limit(MAX_LINE_BYTES):
        # Strict: a quote that is never closed is an error instead of one cell that swallows the rest of the file.
        reader = csv.reader(lines, dialect, strict=True)
        header: list[str] | None = None
        while True:
            begin = reader.line_num + 1
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
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        msg = f"{where}: the header names {'a column without a name' if not twice else repr(twice)} twice"
        raise DataError(msg)
    return header


@contextmanager
def _csv_cell_limit(limit: int) -> Iterator[None]:
    """Raise the csv module's process-wide limit of 128 KiB a cell, and put it back."""
    before = csv.field_size_limit(limit)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_rows(path: Path, wanted: Callable[[Sequence[str]], Sequence[str]]) -> Iterator[RawRow]:
    """Yield Parquet rows, counted from 1; columns that nobody wants are not read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            names = list(wanted(schema.names))
            has_bytes = any(_holds_bytes(schema.field(name).type) for name in names)
            size = PARQUET_PICTURE_ROWS if has_bytes else PARQUET_ROWS
            for batch in file.iter_batches(batch_size=size, columns=names):
                columns = [column.to_pylist() for column in batch.columns]
                for cells in zip(*columns, strict=True) if columns else [()] * batch.num_rows:
                    number += 1
                    yield number, dict(zip(batch.schema.names, cells, strict=True))
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the operating system's error; Arrow's own, for a broken file, has no number
        msg = f"{path.name}:{number + 1}: can't be read as Parquet: {str(error).splitlines()[0]}"
        raise DataError(msg) from error


def _holds_bytes(kind: Any) -> bool:
    """Return whether an Arrow type holds binary values, itself or inside."""
    import pyarrow as pa

    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or any(_holds_bytes(part) for part in inner)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line with its end), without a byte order mark."""
    number = 0
    try:
        with _open(path) as handle:
            while line := handle.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = _without_bom(line, path)
                if len(line) > MAX_LINE_BYTES:
                    msg = f"{path.name}:{number}: a line of over {MAX_LINE_BYTES // 2**20} MiB; is this a text file?"
                    raise DataError(msg)
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        msg = f"{path.name}:{number + 1}: the gzip data is truncated or broken: {error}"
        raise DataError(msg) from error


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _without_bom(line: bytes, path: Path) -> bytes:
    if line.startswith(UTF16_BOMS):
        msg = f"{path.name}:1: the file is UTF-16; save it as UTF-8"
        raise DataError(msg)
    return line.removeprefix(UTF8_BOM)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        msg = f"can't read {path}: {error.strerror or error}"
        raise MachineError(msg) from error
