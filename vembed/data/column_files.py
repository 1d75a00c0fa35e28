"""Columns of a table: held in memory, or appended to files that the system maps, so that a table may exceed memory.

A column on disk is a file for each buffer of Arrow's layout, named by the column and what it holds:

    NAME.valid      a bit a cell, where any is null
    NAME.offsets    64-bit offsets of texts, bytes and lists
    NAME.values     numbers, or the bytes of all texts
    NAME.of.*       the cells of lists, a column of their own

A column without any value has no file.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


_NULLS_AT_ONCE = 65_536


class Column(Protocol):
    """Where the cells of a column go."""

    def append(self, cells: Any) -> None:
        """Append an Arrow array; one of the null type stands for nulls.

        Raises:
            OSError: The disk refused.
        """

    def finish(self) -> Any:
        """Return all cells as one Arrow array, of the null type where all are null; nothing can be appended then.

        Raises:
            OSError: The disk refused.
        """


def new_columns(types: Mapping[str, Any], folder: Path | None) -> dict[str, Column]:
    """Return columns of some Arrow types in memory, or with a folder on disk."""
    return {
        name: HeldColumn(kind) if folder is None else FileColumn(_path(folder, name), kind)
        for name, kind in types.items()
    }


def mapped_columns(types: Mapping[str, Any], folder: Path, length: int) -> dict[str, Any]:
    """Return columns on disk as Arrow arrays over their files; only what is read takes memory.

    Raises:
        OSError: A file is missing.
        ValueError: A file is too long or too short.
    """
    return {name: _mapped_column(_path(folder, name), kind, length) for name, kind in types.items()}


class HeldColumn:
    """A column in memory."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._chunks: list[Any] = []

    def append(self, cells: Any) -> None:
        """Keep an array."""
        self._chunks.append(cells)

    def finish(self) -> Any:
        """Join what was kept, and forget it."""
        import pyarrow as pa

        chunks, self._chunks = self._chunks, []
        if not chunks:
            return pa.array([], type=self._kind)
        if any(not pa.types.is_null(chunk.type) for chunk in chunks):
            chunks = [pa.nulls(len(chunk), self._kind) if pa.types.is_null(chunk.type) else chunk for chunk in chunks]
        return pa.concat_arrays(chunks)


class FileColumn:
    """A column on disk.

    Args:
        path: What its files' names begin with.
    """

    def __init__(self, path: Path, kind: Any) -> None:
        import pyarrow as pa

        self._path, self._kind = path, kind
        self._num_cells = self._num_valid = self._num_first_nulls = self._end = 0
        self._unpacked = np.empty(0, dtype=np.bool_)  # fewer than 8 cells, whose bits fill no byte yet
        self._valid = _file(path, "valid").open("wb")
        self._of = FileColumn(_file(path, "of"), kind.value_type) if pa.types.is_large_list(kind) else None
        self._values = None if self._of else _file(path, "values").open("wb")
        self._offsets = None if pa.types.is_primitive(kind) else _file(path, "offsets").open("wb")
        if self._offsets:
            self._offsets.write(bytes(8))

    def append(self, cells: Any) -> None:
        """Append to the files."""
        import pyarrow as pa

        is_null = pa.types.is_null(cells.type)
        if is_null and not self._num_valid:
            self._num_first_nulls += len(cells)  # written before the first value, which most columns don't have
            return
        nulls, self._num_first_nulls = self._num_first_nulls, 0
        for start in range(0, nulls, _NULLS_AT_ONCE):
            self._append(pa.nulls(min(_NULLS_AT_ONCE, nulls - start), self._kind))
        self._append(pa.nulls(len(cells), self._kind) if is_null else cells)

    def _append(self, cells: Any) -> None:
        self._num_cells += len(cells)
        self._num_valid += len(cells) - cells.null_count
        valid = np.concatenate([self._unpacked, cells.is_valid().to_numpy(zero_copy_only=False)])
        whole = len(valid) // 8 * 8
        self._valid.write(np.packbits(valid[:whole], bitorder="little").data)
        self._unpacked = valid[whole:]
        if self._offsets:
            self._append_parts(cells)
        elif self._values:
            self._values.write(np.ascontiguousarray(cells.fill_null(0).to_numpy()).data)

    def _append_parts(self, cells: Any) -> None:
        import pyarrow.compute as pc

        length = pc.list_value_length if self._of else pc.binary_length
        ends = self._end + np.cumsum(length(cells).fill_null(0).to_numpy(), dtype=np.int64)
        assert self._offsets is not None
        self._offsets.write(ends.data)
        self._end = int(ends[-1]) if len(ends) else self._end
        if self._of:
            self._of.append(cells.flatten())
        elif self._values and cells.null_count < len(cells):
            _, offsets, data = cells.buffers()
            first, last = np.frombuffer(offsets, np.int64)[[cells.offset, cells.offset + len(cells)]]
            self._values.write(memoryview(data)[first:last] if data else b"")

    def finish(self) -> Any:
        """Close the files, and map them."""
        self._valid.write(np.packbits(self._unpacked, bitorder="little").data)
        for file in (self._valid, self._offsets, self._values):
            if file:
                file.close()
        if self._of:
            self._of.finish()
        if self._num_valid == self._num_cells:
            _file(self._path, "valid").unlink()
        if not self._num_valid:
            for path in self._path.parent.glob(f"{self._path.name}.*"):
                path.unlink()
        return _mapped_column(self._path, self._kind, self._num_cells + self._num_first_nulls)


def _mapped_column(path: Path, kind: Any, length: int) -> Any:
    import pyarrow as pa

    parts = _file(path, "offsets"), _file(path, "values")
    if not any(part.exists() for part in parts):
        return pa.nulls(length)
    valid = _mapped(_file(path, "valid"), -(-length // 8)) if _file(path, "valid").exists() else None
    if pa.types.is_primitive(kind):
        return pa.Array.from_buffers(kind, length, [valid, _mapped(parts[1], length * kind.bit_width // 8)])
    offsets = _mapped(parts[0], 8 * (length + 1))
    end = int(np.frombuffer(offsets, np.int64)[-1])
    if not pa.types.is_large_list(kind):
        return pa.Array.from_buffers(kind, length, [valid, offsets, _mapped(parts[1], end)])
    of = _mapped_column(_file(path, "of"), kind.value_type, end)
    of = pa.nulls(end, kind.value_type) if pa.types.is_null(of.type) else of
    return pa.Array.from_buffers(kind, length, [valid, offsets], children=[of])


def _mapped(path: Path, num_bytes: int) -> Any:
    """Map a file whose size is known."""
    import pyarrow as pa

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != num_bytes:
            raise ValueError(f"{path}: {size:,} bytes, expected {num_bytes:,}")
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def _path(folder: Path, name: str) -> Path:
    """Return what the files of a column begin with: a name may hold any character."""
    return folder / quote(name, safe="")


def _file(path: Path, part: str) -> Path:
    return path.with_name(f"{path.name}.{part}")


def filled(cells: Sequence[Any], kind: Any) -> Any:
    """Return cells as an Arrow array; nulls, which take no memory, where every cell is None."""
    import pyarrow as pa

    return pa.nulls(len(cells)) if cells.count(None) == len(cells) else pa.array(cells, type=kind)


def concatenated(parts: Sequence[Any]) -> Any:
    """Return the parts of a column as one array; nulls, which have no type, take that of the others."""
    import pyarrow as pa

    return pa.concat_arrays(of_one_type(parts))


def of_one_type(parts: Sequence[Any]) -> list[Any]:
    """Return the parts of a column; nulls, which have no type, take that of the others."""
    import pyarrow as pa

    kind = next((part.type for part in parts if not pa.types.is_null(part.type)), pa.null())
    return [part.cast(kind) if pa.types.is_null(part.type) else part for part in parts]
