"""Read Parquet and Arrow files a few rows at a time, as columns that nobody wants are left alone.

A small file may stand for much: a text that is stored once and repeated in every row, a billion nulls, pages that
unpack to a thousand times their size. Such a file is refused by its own figures, or by what its rows came to.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vembed.data.raw_rows import MAX_COLUMNS, Unreadable, repeated
from vembed.errors import DataError
from vembed.files import open_regular
from vembed.text import quoted, show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from vembed.data.raw_rows import RawRow, Wanted

BATCH_ROWS = 64
"""Rows that are Python objects at a time: each may hold pictures, or a text that is stored once."""

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


def parquet_rows(path: Path, wanted: Wanted) -> Iterator[RawRow]:
    """Yield (row counted from 1, its columns or why it can't be read); columns that nobody wants are not read.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    import pyarrow.parquet as pq

    def parts() -> Iterator[Iterable[dict[str, Any] | Unreadable]]:
        # By default Arrow holds whole row groups, gigabytes where they have pictures: read columns a little ahead only.
        with open_regular(path) as handle, pq.ParquetFile(handle, buffer_size=2**20, pre_buffer=False) as file:
            names = _wanted_columns(file.schema_arrow.names, wanted, path.name)
            metadata, size = file.metadata, os.fstat(handle.fileno()).st_size
            if metadata.num_rows > max(FREE_ROWS, MAX_ROWS_PER_BYTE * size):
                raise DataError(
                    f"{path}: {metadata.num_rows:,} rows in {size:,} bytes, are too many for texts or pictures"
                )
            for group in range(metadata.num_row_groups):
                # Of the group as a whole: what Arrow says of single columns ends the process where the file is broken.
                unpacked = metadata.row_group(group).total_byte_size
                if unpacked > max(PAGE_FREE_BYTES, MAX_PAGE_RATIO * size):
                    raise DataError(
                        f"{path}: its rows unpack to {show_bytes(unpacked)}, over {MAX_PAGE_RATIO} times the file's "
                        "size; if that is meant, save them as JSONL"
                    )
            num_rows = num_bytes = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
                num_bytes += batch.nbytes
                if num_bytes > max(ROW_FREE_BYTES, MAX_ROW_RATIO * size):
                    raise DataError(
                        f"{path.name}:{num_rows + 1}: the rows so far hold {show_bytes(num_bytes)}, over "
                        f"{MAX_ROW_RATIO:,} times the file's size; if that is meant, save them as JSONL"
                    )
                num_rows += batch.num_rows
                yield _batch_rows(batch)

    return _counted_rows(parts(), path, "Parquet")


def arrow_rows(path: Path, wanted: Wanted) -> Iterator[RawRow]:
    """Yield rows as `parquet_rows` does, of a file in Arrow's stream or file form; the system maps it.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    import pyarrow as pa

    def parts() -> Iterator[Iterable[dict[str, Any] | Unreadable]]:
        with open_regular(path) as handle:
            size, is_file_form = os.fstat(handle.fileno()).st_size, handle.read(6) == b"ARROW1"
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source) if is_file_form else pa.ipc.open_stream(source)
            names = _wanted_columns(reader.schema.names, wanted, path.name)
            num_rows = num_bytes = 0
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file_form else reader:
                # Arrow trusts the offsets of a mapped file: broken ones lead outside of it and end the process. The
                # check reads every offset and text once, which the rows need anyway.
                batch.validate(full=True)
                num_bytes += batch.nbytes
                if num_bytes > max(ROW_FREE_BYTES, MAX_ROW_RATIO * size) or batch.num_rows > max(FREE_ROWS, size):
                    raise DataError(
                        f"{path.name}:{num_rows + 1}: the rows so far hold over {MAX_ROW_RATIO:,} times the file"
                    )
                num_rows += batch.num_rows
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    part = batch.slice(start, BATCH_ROWS)
                    # A batch without columns has no rows either.
                    yield _batch_rows(part.select(names)) if names else [{}] * part.num_rows

    return _counted_rows(parts(), path, "Arrow")


def _counted_rows(parts: Iterator[Iterable[dict[str, Any] | Unreadable]], path: Path, kind: str) -> Iterator[RawRow]:
    """Yield rows with their numbers, and turn Arrow's errors into one that names the row."""
    import pyarrow as pa

    number = 0
    try:
        for part in parts:
            for row in part:
                number += 1
                yield number, row
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the operating system's error; Arrow's own, for a broken file, has no number
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path.name}:{number + 1}: can't be read as {kind}: {reason}") from error


def _wanted_columns(names: list[str], wanted: Wanted, name: str) -> list[str]:
    if len(names) > MAX_COLUMNS:
        raise DataError(f"{name}: {len(names):,} columns, and a row has at most {MAX_COLUMNS:,}")
    if len(set(names)) != len(names):
        raise DataError(f"{name}: the file names the column {quoted(repeated(names))} twice")
    return list(wanted(names))


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | Unreadable]:
    """Yield the rows of a record batch; one with a value that has no Python form is unreadable."""
    if batch.nbytes > MAX_ROW_BYTES and batch.num_rows > 1:
        for number in range(batch.num_rows):  # one row at a time, which may be small
            yield from _batch_rows(batch.slice(number, 1))
        return
    if batch.nbytes > MAX_ROW_BYTES:
        yield Unreadable(f"a row of over {MAX_ROW_BYTES // 2**20} MiB")
        return
    names = batch.schema.names
    columns: list[list[Any]] = []
    has_unreadable = False
    for column in batch.columns:
        try:
            columns.append(column.to_pylist())
        except _NO_PYTHON_VALUE:
            has_unreadable = True
            columns.append([])
            for value in column:  # cell by cell, so that one bad cell costs its row only
                try:
                    columns[-1].append(value.as_py())
                except _NO_PYTHON_VALUE as error:
                    reason = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else f"can't be read: {error}"
                    columns[-1].append(Unreadable(f"a value of type {column.type} {reason}"))
    for cells in zip(*columns, strict=True) if columns else [()] * batch.num_rows:
        row = dict(zip(names, cells, strict=True))
        faults = (f"{name}: {cell}" for name, cell in row.items() if isinstance(cell, Unreadable))
        fault = next(faults, None) if has_unreadable else None
        yield row if fault is None else Unreadable(fault)
