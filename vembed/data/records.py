"""Records: one training row as a value, and millions of them as one compact, immutable table.

The table is Arrow with 64-bit offsets and one chunk per column, so that taking k rows costs O(k) however long it is.
A subset is a view: row numbers over the same Arrow memory (8 bytes a row).

A picture stands in the columns of texts as a reference, which begins with a NUL, as no valid text does: NUL `p` and a
path, or NUL `b`, a number and what to call it. The number counts into the table's blobs, where equal bytes are kept
once. A picture with a text is NUL `c`, the length of the picture's reference, that reference and the text. A table of
texts has no blobs and no references.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Composed, Image
from vembed.data.images import item_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item

BLOCK_ROWS = 8192
"""Rows that are Python objects at any one time while a table is written or walked."""

BLOB_BYTES = 16 * 2**20
"""Bytes of pictures that are Python objects at any one time while a table is written."""

_PATH, _BLOB, _COMPOSED = "\0p", "\0b", "\0c"


@dataclass(frozen=True, slots=True)
class Record:
    """One row of training data, checked."""

    query: Item  # what searches: a text, a picture, or both in one
    positives: tuple[Item, ...]  # what answers it; none only in a row that lists its pairs' scores
    negatives: tuple[Item, ...]
    label: str | int | None  # class of the row: rows of one class are positives of each other
    location: str  # `file:line` (`file:row` for Parquet and hub sets), counted from 1
    scores: tuple[float, ...] = ()  # of the positives, then of the negatives, where the data grade pairs; else none
    columns: Mapping[str, int | float] = field(default_factory=dict)  # numbers that the loss asked for, by name


@dataclass(frozen=True, slots=True)
class _Blobs:
    """The bytes of pictures: a chunked Arrow array of binary values."""

    values: Any

    def item(self, stored: str) -> Item:
        """Return what a stored text stands for: itself, a picture, or both."""
        if not stored.startswith("\0"):
            return stored
        if stored.startswith(_COMPOSED):
            length, _, rest = stored[len(_COMPOSED) :].partition(":")
            return Composed(self._image(rest[: int(length)]), rest[int(length) :])
        return self._image(stored)

    def _image(self, stored: str) -> Image:
        if stored.startswith(_PATH):
            return Image(stored[len(_PATH) :])
        number, _, name = stored[len(_BLOB) :].partition(":")
        return Image(name, self.values[int(number)].as_py())


class RecordTable:
    """An immutable, random-access sequence of records, backed by Arrow.

    Args:
        columns: One Arrow array per column of `RecordWriter`, all of one length.
        files: Names that the `file` column counts into.
        rows: Rows of `columns` that this table shows, in order; None shows all of them.
        blobs: Bytes of pictures; None where all items are texts.
    """

    def __init__(
        self,
        columns: dict[str, Any],
        files: tuple[str, ...],
        rows: NDArray[np.int64] | None = None,
        blobs: _Blobs | None = None,
    ) -> None:
        import pyarrow as pa

        self._table = pa.table(columns)
        self._columns = columns
        self._files = files
        self._blobs = blobs
        self._rows = np.arange(self._table.num_rows, dtype=np.int64) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return self._read(self._rows[index : index + 1] if index >= 0 else self._rows[[index]], index)[0]

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), BLOCK_ROWS):
            yield from self._read(self._rows[start : start + BLOCK_ROWS], start)

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[Record]:
        """Return the records at some positions, in the order asked for; positions may repeat.

        Args:
            indices: Positions, from 0 to `len(self) - 1`.

        Raises:
            IndexError: A position is outside the table.
        """
        return self._read(self._rows[self._checked(indices)], 0) if len(indices) else []

    def subset(self, rows: Sequence[int] | NDArray[np.int64]) -> RecordTable:
        """Return a view of some rows, in the order given; no text or picture is copied.

        Args:
            rows: Positions in this table, from 0 to `len(self) - 1`.

        Raises:
            IndexError: A position is outside the table.
        """
        return RecordTable(self._columns, self._files, self._rows[self._checked(rows)], self._blobs)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the content of all records in order; where they came from doesn't count.

        Raises:
            ImageError: A picture can't be read any more.
        """
        digest = hashlib.sha256()
        for record in self:
            row = (record.query, record.positives, record.negatives, record.label)
            digest.update(json.dumps(row, default=_content).encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def _checked(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        positions = np.asarray(indices, dtype=np.int64)
        outside = positions[(positions < 0) | (positions >= len(self))]
        if outside.size:
            msg = f"record {outside[0]} of {len(self)}"
            raise IndexError(msg)
        return positions

    def _read(self, rows: NDArray[np.int64], asked: int) -> list[Record]:
        if not rows.size:
            msg = f"record {asked} of {len(self)}"
            raise IndexError(msg)
        values = {name: column.to_pylist() for name, column in zip(self._columns, self._taken(rows), strict=True)}
        labels = [
            text if number is None else number
            for text, number in zip(values["label_text"], values["label_number"], strict=True)
        ]
        places = [f"{self._files[file]}:{line}" for file, line in zip(values["file"], values["line"], strict=True)]
        blobs = self._blobs
        if blobs is not None:
            values["query"] = [blobs.item(text) for text in values["query"]]
            for name in ("positives", "negatives"):
                values[name] = [[blobs.item(text) for text in texts] for texts in values[name]]
        return [
            Record(query, tuple(positives), tuple(negatives), label, place)
            for query, positives, negatives, label, place in zip(
                values["query"], values["positives"], values["negatives"], labels, places, strict=True
            )
        ]

    def _taken(self, rows: NDArray[np.int64]) -> list[Any]:
        import pyarrow as pa

        columns: list[Any] = self._table.take(pa.array(rows)).columns
        return columns


class RecordWriter:
    """Collect checked rows into a `RecordTable`; at most `BLOCK_ROWS` rows are Python objects at a time."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._buffers: dict[str, list[Any]] = {name: [] for name in _column_types()}
        self._chunks: dict[str, list[Any]] = {name: [] for name in self._buffers}
        self._num_rows = 0
        self._blobs = _BlobWriter()

    def __len__(self) -> int:
        return self._num_rows

    def add(
        self,
        query: Item,
        *,
        positives: Sequence[Item],
        negatives: Sequence[Item] = (),
        label: str | int | None = None,
        file: str,
        line: int,
    ) -> None:
        """Append one row; the caller has checked it.

        Args:
            query: As in `Record`.
            positives: As in `Record`.
            negatives: As in `Record`.
            label: As in `Record`.
            file: Name for people, without a line.
            line: Line or row in that file, counted from 1.
        """
        buffers = self._buffers
        stored = self._blobs.stored
        buffers["query"].append(stored(query))
        buffers["positives"].append([stored(item) for item in positives])
        buffers["negatives"].append([stored(item) for item in negatives])
        buffers["label_text"].append(label if isinstance(label, str) else None)
        buffers["label_number"].append(label if isinstance(label, int) else None)
        buffers["file"].append(self._files.setdefault(file, len(self._files)))
        buffers["line"].append(line)
        self._num_rows += 1
        if len(buffers["query"]) >= BLOCK_ROWS:
            self._flush()

    def finish(self) -> RecordTable:
        """Return the table and leave the writer empty; peak memory is the table plus a copy of its largest column."""
        import pyarrow as pa

        self._flush()
        columns = {}
        for name, kind in _column_types().items():
            chunks = self._chunks[name]
            columns[name] = pa.concat_arrays(chunks) if chunks else pa.array([], type=kind)
            chunks.clear()
        table = RecordTable(columns, tuple(self._files), blobs=self._blobs.finish())
        self._files, self._num_rows, self._blobs = {}, 0, _BlobWriter()
        return table

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._buffers["query"]:
            return
        for name, kind in _column_types().items():
            self._chunks[name].append(pa.array(self._buffers[name], type=kind))
            self._buffers[name].clear()


class _BlobWriter:
    """Turn items into what the columns hold, and keep the bytes of pictures aside, equal ones once."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._buffer: list[bytes] = []
        self._buffer_bytes = 0
        self._chunks: list[Any] = []
        self._has_pictures = False

    def stored(self, item: Item) -> str:
        """Return the text that stands for an item."""
        if isinstance(item, str):
            return item
        if isinstance(item, Composed):
            picture = self.stored(item.image)
            return f"{_COMPOSED}{len(picture)}:{picture}{item.text}"
        self._has_pictures = True
        if item.data is None:
            return f"{_PATH}{item.path}"
        digest = hashlib.sha256(item.data).digest()
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self._numbers)
            self._keep(item.data)
        return f"{_BLOB}{number}:{item.path}"

    def finish(self) -> _Blobs | None:
        """Return the bytes of all pictures, or None when every item was a text."""
        import pyarrow as pa

        self._flush()
        return _Blobs(pa.chunked_array(self._chunks, type=pa.large_binary())) if self._has_pictures else None

    def _keep(self, data: bytes) -> None:
        self._buffer.append(data)
        self._buffer_bytes += len(data)
        if self._buffer_bytes >= BLOB_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        self._chunks.append(pa.array(self._buffer, type=pa.large_binary()))
        self._buffer, self._buffer_bytes = [], 0


@dataclass(frozen=True, slots=True)
class LoadedRecords:
    """What reading a data source yields.

    Attributes:
        table: The valid records, in file order.
        notes: What was skipped, ignored or is unusual, one plain sentence each.
        num_invalid: Rows that were dropped for being invalid.
    """

    table: RecordTable
    notes: tuple[str, ...] = ()
    num_invalid: int = 0


def _column_types() -> dict[str, Any]:
    """Return Arrow's types, 64-bit offsets throughout: a column of a million long texts passes 2 GiB."""
    import pyarrow as pa

    texts = pa.large_list(pa.large_string())
    return {
        "query": pa.large_string(),
        "positives": texts,
        "negatives": texts,
        "label_text": pa.large_string(),
        "label_number": pa.int64(),
        "file": pa.int32(),
        "line": pa.int64(),
    }


def _content(item: Image | Composed) -> dict[str, int | str]:
    """Return what an item with a picture holds, for the fingerprint, in a form that no text has."""
    if isinstance(item, Composed):
        return {"image": item_id(item.image), "text": item.text}
    return {"image": item_id(item)}
