"""Read the rows of a Parquet file, or of a file of Arrow as `datasets` saves it, a few at a time.

A small file may stand for much: a text that is stored once and repeated in every row, a billion nulls, pages that
unpack to a thousand times their size. Such a file is refused by its own figures, or by what its rows came to.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vembed.errors import DataError
from vembed.files import open_regular
from vembed.text import quoted, show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

BATCH_ROWS = 64
"""Rows that are Python objects at a time: each may hold pictures, or a text that is stored once."""

_STREAMED = {"buffer_size": 2**20, "pre_buffer": False}
"""Read each column a little ahead: by default Arrow holds whole row groups, gigabytes where they have pictures."""

MAX_COLUMNS = 10_000
MAX_ROW_BYTES = 256 * 2**20
"""Most bytes of the columns that are read of a row: four pictures of the largest size that is read."""

MAX_PAGE_RATIO, PAGE_FREE_BYTES = 200, 64 * 2**20
"""Most bytes out of the compressed pages of a row group for each byte of the file, beyond the first few."""

MAX_ROW_RATIO, ROW_FREE_BYTES = 1000, 2**29
"""Most bytes of all rows for each byte of the file, beyond the first few: a repeated text is stored once."""

MAX_ROWS_PER_BYTE, FREE_ROWS = 100, 1_000_000
"""Most rows for each byte of the file, beyond the first few: rows of nothing take no room."""

# What Arrow's values raise where Python has no such value: a date after the year 9999, bytes that are not UTF-8.
_NO_PYTHON_VALUE = (ArithmeticError, LookupError, TypeError, ValueError, NotImplementedError)


class _Unreadable(str):
    """Why a cell can't be a Python value."""

    __slots__ = ()


def parquet_rows(
    path: Path, wanted: Callable[[Sequence[str]], Sequence[str]]
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (row counted from 1, its columns or why it can't be read); columns that nobody wants are not read.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with open_regular(path) as handle, pq.ParquetFile(handle, **_STREAMED) as file:
            names = _wanted_columns(file.schema_arrow.names, wanted, path.name)
            size = os.fstat(handle.fileno()).st_size
            _refuse_bomb(file.metadata, size, path)
            num_bytes = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
                num_bytes += batch.nbytes
                if num_bytes > max(ROW_FREE_BYTES, MAX_ROW_RATIO * size):
                    raise DataError(
                        f"{path.name}:{number + 1}: the rows so far hold {show_bytes(num_bytes)}, over "
                        f"{MAX_ROW_RATIO:,} times the file's size; if that is meant, save them as JSONL"
                    )
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the operating system's error; Arrow's own, for a broken file, has no number
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path.name}:{number + 1}: can't be read as Parquet: {reason}") from error


def repeated(names: Iterable[str]) -> str:
    """Return the first name that stands twice, an empty string where none does."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def arrow_rows(
    path: Path, wanted: Callable[[Sequence[str]], Sequence[str]]
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield rows as `parquet_rows` does, of a file in Arrow's stream or file form; the system maps it.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    import pyarrow as pa

    number = num_bytes = 0
    with open_regular(path) as handle:
        size, is_file_form = os.fstat(handle.fileno()).st_size, handle.read(6) == b"ARROW1"
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source) if is_file_form else pa.ipc.open_stream(source)
            names = _wanted_columns(reader.schema.names, wanted, path.name)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file_form else reader
            for batch in batches:
                batch.validate(full=True)  # else broken offsets end the process
                num_bytes += batch.nbytes
                if num_bytes > max(ROW_FREE_BYTES, MAX_ROW_RATIO * size) or batch.num_rows > max(FREE_ROWS, size):
                    raise DataError(
                        f"{path.name}:{number + 1}: the rows so far hold over {MAX_ROW_RATIO:,} times the file"
                    )
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    part = batch.slice(start, BATCH_ROWS)
                    for row in _batch_rows(part.select(names)) if names else [{}] * part.num_rows:
                        number += 1
                        yield number, row
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path.name}:{number + 1}: can't be read as Arrow: {reason}") from error


def _wanted_columns(names: list[str], wanted: Callable[[Sequence[str]], Sequence[str]], name: str) -> list[str]:
    if len(names) > MAX_COLUMNS:
        raise DataError(f"{name}: {len(names):,} columns, and a row has at most {MAX_COLUMNS:,}")
    if len(set(names)) != len(names):
        raise DataError(f"{name}: the file names the column {quoted(repeated(names))} twice")
    return list(wanted(names))


def _refuse_bomb(metadata: Any, size: int, path: Path) -> None:
    """Refuse a file whose own figures say that it holds nothing, or the same, over and over."""
    if metadata.num_rows > max(FREE_ROWS, MAX_ROWS_PER_BYTE * size):
        raise DataError(f"{path}: {metadata.num_rows:,} rows in {size:,} bytes, as no set of texts or pictures has")
    for number in range(metadata.num_row_groups):
        # Of the group as a whole: what Arrow says of single columns ends the process where the file is broken.
        unpacked = metadata.row_group(number).total_byte_size
        if unpacked > max(PAGE_FREE_BYTES, MAX_PAGE_RATIO * size):
            raise DataError(
                f"{path}: its rows unpack to {show_bytes(unpacked)}, over {MAX_PAGE_RATIO} times the file's size; if "
                "that is meant, save them as JSONL"
            )


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    if batch.nbytes > MAX_ROW_BYTES and batch.num_rows > 1:
        for number in range(batch.num_rows):
            yield from _batch_rows(batch.slice(number, 1))
        return
    if batch.nbytes > MAX_ROW_BYTES:
        yield f"a row of over {MAX_ROW_BYTES // 2**20} MiB"
        return
    names = batch.schema.names
    columns = [_cells(column) for column in batch.columns]
    may_fail = any(isinstance(cell, _Unreadable) for cells in columns for cell in cells)
    for cells in zip(*columns, strict=True) if columns else [()] * batch.num_rows:
        row = dict(zip(names, cells, strict=True))
        unreadable = (
            next((item for item in row.items() if isinstance(item[1], _Unreadable)), None) if may_fail else None
        )
        yield row if unreadable is None else f"{unreadable[0]}: {unreadable[1]}"


def _cells(column: Any) -> list[Any]:
    """Return a column as Python values; of one that holds what Python has no value for, each cell by itself."""
    try:
        cells: list[Any] = column.to_pylist()
    except _NO_PYTHON_VALUE:
        return [_cell(value, column.type) for value in column]
    return cells


def _cell(value: Any, kind: Any) -> Any:
    try:
        return value.as_py()
    except _NO_PYTHON_VALUE as error:
        reason = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else f"can't be read: {error}"
        return _Unreadable(f"a value of type {kind} {reason}")
