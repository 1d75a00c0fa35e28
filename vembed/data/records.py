"""Records: one training row as a value, and millions of them as one compact, immutable table.

1. The item table holds every distinct item once: its text, its path, and the number of its bytes among the blobs.
2. A row holds numbers of items: that of its query, and lists of those of its positives and negatives. A document of a
   corpus that answers many queries therefore costs 8 bytes a row.
3. Both are Arrow with 64-bit offsets and one chunk per column, so that taking k rows costs O(k), however long the table
   is. A subset is a view: row numbers over the same Arrow memory (8 bytes a row).

Columns that no row fills (labels, scores, paths, bytes) take no memory.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from vembed.data.column_files import concatenated, mapped_columns
from vembed.data.columns import WEIGHT_COLUMN, ColumnsRead
from vembed.data.content_lines import json_lines
from vembed.data.item_table import ItemTable
from vembed.files import replace_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item, Ragged
    from vembed.data.columns import ExtraColumn

BLOCK_ROWS = 8192
"""Rows that are Python objects at any one time while a table is written or walked."""

MOST_JSON_BYTES = 1 << 24
"""Texts that are lines of JSON at any one time, while records are hashed."""

ItemColumn: TypeAlias = Literal["query", "positives", "negatives"]
"""The columns that hold items."""

SIZES_FILE = "sizes.json"
"""What of a table on disk its columns don't say."""

_SOURCE = "source"
"""The column of tables that were joined."""

ASKED = "asked:"
"""What the names of columns that the loss asked for begin with in the table, so that they may be any."""


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


class RecordTable:
    """An immutable, random-access sequence of records, backed by Arrow.

    Args:
        columns: One Arrow array per column of `RecordWriter`, all of one length.
        items: What the columns count into.
        files: Names that the `file` column counts into.
        rows: Rows of `columns` that this table shows, in order; None shows all of them.
        folder: Where the table lies, for facts of it that take long to compute; None where it is in memory.
        part: What tells the table from others that lie there.

    Attributes:
        folder: As given.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        items: ItemTable,
        files: tuple[str, ...],
        rows: NDArray[np.int64] | None = None,
        folder: Path | None = None,
        part: str = "",
    ) -> None:
        self._columns = columns
        self._items = items
        self._files = files
        self._rows = np.arange(len(columns["query"]), dtype=np.int64) if rows is None else rows
        self.folder = folder
        self._part = part

    @classmethod
    def mapped(cls, folder: Path, columns: Sequence[ExtraColumn] = ()) -> RecordTable:
        """Return what a `RecordWriter` with these columns wrote into a folder; only what is read takes memory.

        Raises:
            OSError: A file is missing.
            ValueError: A file is broken, too long or too short.
        """
        sizes = json.loads((folder / SIZES_FILE).read_text("utf-8"))
        items = ItemTable.mapped(folder, sizes["items"], sizes["blobs"], sizes["shards"])
        rows = mapped_columns(column_types(columns), folder, sizes["rows"])
        return cls(rows, items, tuple(sizes["files"]), folder=folder)

    @classmethod
    def joined(cls, tables: Sequence[RecordTable]) -> RecordTable:
        """Return the records of several sources, one after the other; a class of one is no class of another."""
        import pyarrow as pa
        import pyarrow.compute as pc

        parts, files = [], list[str]()
        first_item = 0
        for number, table in enumerate(tables):
            part = {name: column.take(pa.array(table._rows)) for name, column in table._columns.items()}
            part["query"] = pc.add(part["query"], first_item)
            for name in ("positives", "negatives"):
                cells = pc.add(part[name].flatten(), first_item)
                part[name] = pa.LargeListArray.from_arrays(part[name].offsets, cells)
            texts, numbers = (part[name].cast(pa.large_string()) for name in ("label_text", "label_number"))
            own, colon = (pa.scalar(word, pa.large_string()) for word in (str(number), ":"))
            part["label_text"] = pc.binary_join_element_wise(own, pc.coalesce(texts, numbers), colon)
            part["label_number"] = pa.nulls(len(table))
            part["file"] = pc.add(part["file"], len(files)).cast(pa.int32())
            part[_SOURCE] = pa.repeat(pa.scalar(number, pa.int64()), len(table))
            first_item += len(table._items.columns)
            files += table._files
            parts.append(part)
        columns = {name: concatenated([part[name] for part in parts]) for name in parts[0]}
        items = ItemTable.joined([table._items for table in tables])
        folders = [table.folder for table in tables]
        if None in folders:
            return cls(columns, items, tuple(files))
        held = [(str(table.folder), table._digest_of_rows()) for table in tables]
        return cls(columns, items, tuple(files), folder=folders[0], part=json.dumps(held))

    @cached_property
    def sources(self) -> NDArray[np.int64]:
        """Number of each record's source; 0 for all where there is one."""
        import pyarrow as pa

        if _SOURCE not in self._columns:
            return np.zeros(len(self), dtype=np.int64)
        numbers: NDArray[np.int64] = self._columns[_SOURCE].take(pa.array(self._rows)).to_numpy()
        return numbers

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        rows = self._rows[index : index + 1] if index >= 0 else self._rows[[index]]
        if not rows.size:
            raise _outside(index, len(self))
        return self._read(rows)[0]

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), BLOCK_ROWS):
            yield from self._read(self._rows[start : start + BLOCK_ROWS])

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[Record]:
        """Return the records at some positions, in the order asked for; positions may repeat.

        Raises:
            IndexError: A position is negative or beyond the table.
        """
        return self._read(self._rows[self._checked(indices)])

    def subset(self, rows: Sequence[int] | NDArray[np.int64]) -> RecordTable:
        """Return a view of the records at some positions, in the order given; no text or picture is copied.

        Raises:
            IndexError: A position is negative or beyond the table.
        """
        return RecordTable(
            self._columns, self._items, self._files, self._rows[self._checked(rows)], self.folder, self._part
        )

    def with_columns(self, columns: Sequence[ExtraColumn]) -> RecordTable:
        """Return the records with further columns, every row with the default."""
        import pyarrow as pa

        types, count = column_types(columns), len(self._columns["query"])
        more = {f"{ASKED}{each.name}": pa.scalar(each.typed(each.default)) for each in columns}
        added = {name: pa.repeat(value.cast(types[name]), count) for name, value in more.items()}
        return RecordTable({**self._columns, **added}, self._items, self._files, self._rows)

    def with_items(self, items: ItemTable) -> RecordTable:
        """Return the records with further items behind theirs, which no record names yet."""
        return RecordTable(self._columns, ItemTable.joined([self._items, items]), self._files, self._rows)

    def with_negatives(self, numbers: Ragged, *, replace: bool) -> RecordTable:
        """Return the records with further negatives.

        Args:
            numbers: Those of each record, as numbers in `items`.
            replace: Whether the negatives that the records have are dropped.
        """
        import pyarrow as pa

        columns = {name: column.take(pa.array(self._rows)) for name, column in self._columns.items()}
        counts = [] if replace else [np.diff(columns["negatives"].offsets.to_numpy())]
        values = [] if replace else [columns["negatives"].flatten().to_numpy()]
        rows = np.concatenate([np.repeat(np.arange(len(self)), each) for each in (*counts, numbers.lengths)])
        joined_values = np.concatenate([*values, numbers.values])[np.argsort(rows, kind="stable")]
        offsets = np.searchsorted(np.sort(rows), np.arange(len(self) + 1))
        columns["negatives"] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(joined_values))
        return RecordTable(columns, self._items, self._files)

    @property
    def items(self) -> ItemTable:
        """Every item of the records, and of those that this is a subset of."""
        return self._items

    def numbers(self, column: ItemColumn) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (position of the record, number in `items`) of all items of a column, in order."""
        import pyarrow as pa

        cells = self._columns[column].take(pa.array(self._rows))
        if column == "query":
            return np.arange(len(self)), cells.to_numpy()
        return np.repeat(np.arange(len(self)), np.diff(cells.offsets.to_numpy())), cells.flatten().to_numpy()

    @cached_property
    def listed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(position of the record, score) of all pairs that have one: of its positives, then of its negatives."""
        import pyarrow.compute as pc

        cells = self.column("scores")
        if cells.null_count == len(cells):
            return np.empty(0, dtype=np.int64), np.empty(0)
        counts = pc.fill_null(pc.list_value_length(cells), 0).to_numpy()
        return np.repeat(np.arange(len(counts)), counts), cells.flatten().to_numpy()

    @property
    def has_classes(self) -> bool:
        """Whether any record has a class."""
        import pyarrow as pa

        rows = pa.array(self._rows)
        return any(self._columns[name].take(rows).null_count < len(self) for name in ("label_text", "label_number"))

    def column(self, name: str) -> Any:
        """Return a column of `RecordWriter` as an Arrow array, a cell for each record."""
        import pyarrow as pa

        return self._columns[name].take(pa.array(self._rows))

    @cached_property
    def classes(self) -> tuple[NDArray[np.int64], list[str | int]]:
        """The number of each record's class, -1 without one, and the classes by number."""
        names, numbers_N = list[str | int](), np.full(len(self), -1, dtype=np.int64)
        for name in ("label_text", "label_number"):
            labels = self.column(name)
            if labels.null_count < len(labels):
                coded = labels.dictionary_encode()
                numbers = coded.indices.fill_null(-1).to_numpy().astype(np.int64)
                numbers_N = np.where(numbers >= 0, numbers + len(names), numbers_N)
                names += coded.dictionary.to_pylist()
        return numbers_N, names

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the content of all records in order; where they came from doesn't count.

        Raises:
            ImageError: A picture can't be read any more.
        """
        if self.folder is None:
            return self._content_hash()
        kept = self.folder / f"fingerprint-{self._digest_of_rows()}"
        with suppress(OSError):
            return kept.read_text("ascii")
        fingerprint = self._content_hash()
        with suppress(OSError):  # it is computed again then
            replace_text(kept, fingerprint, shared=True)
        return fingerprint

    def _digest_of_rows(self) -> str:
        """Return what tells these rows from others of the same folder."""
        return hashlib.sha256(self._part.encode() + self._rows.tobytes()).hexdigest()[:32]

    def _content_hash(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, len(self), BLOCK_ROWS):
            for lines in self._json_lines(self._rows[start : start + BLOCK_ROWS]):
                _, offsets, data = lines.buffers()
                digest.update(memoryview(data)[: np.frombuffer(offsets, np.int64)[len(lines)]])
        return digest.hexdigest()

    def _json_lines(self, rows: NDArray[np.int64]) -> Iterator[Any]:
        """Yield arrays of [query, positives, negatives, label] of rows as JSON, with scores and numbers if any."""
        taken = self._taken(rows)
        query, *lists = (taken.pop(name) for name in get_args(ItemColumn))
        numbers = np.concatenate([query.to_numpy(), *(each.flatten().to_numpy() for each in lists)])
        if len(rows) > 1 and self._items.text_bytes[numbers].sum() > MOST_JSON_BYTES:
            yield from self._json_lines(rows[: len(rows) // 2])
            yield from self._json_lines(rows[len(rows) // 2 :])
        else:
            yield json_lines(self._items.json_at(numbers), lists, _json_endings(taken))

    def _taken(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        import pyarrow as pa

        wanted = pa.array(rows)
        return {name: column.take(wanted) for name, column in self._columns.items() if name != _SOURCE}

    def _checked(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        positions = np.asarray(indices, dtype=np.int64)
        outside = positions[(positions < 0) | (positions >= len(self))]
        if outside.size:
            raise _outside(int(outside[0]), len(self))
        return positions

    def _read(self, rows: NDArray[np.int64]) -> list[Record]:
        taken = self._taken(rows)
        lists = [taken.pop("positives"), taken.pop("negatives")]
        flat = [taken.pop("query").to_numpy(), *(column.flatten().to_numpy() for column in lists)]
        items = self._items.at(np.concatenate(flat))
        positives, negatives = (
            _cut(items, start, column.offsets.to_numpy())
            for start, column in zip((len(rows), len(rows) + len(flat[1])), lists, strict=True)
        )
        places = zip(taken.pop("file").to_pylist(), taken.pop("line").to_pylist(), strict=True)
        return [
            Record(items[row], positives[row], negatives[row], label, f"{self._files[file]}:{line}", scores, columns)
            for row, ((file, line), (label, scores, columns)) in enumerate(zip(places, _others(taken), strict=True))
        ]


@dataclass(frozen=True, slots=True)
class LoadedRecords:
    """What reading a data source yields."""

    table: RecordTable
    notes: tuple[str, ...] = ()  # what was skipped, ignored or is unusual, one plain sentence each
    num_invalid: int = 0  # rows that were dropped for being invalid
    columns: ColumnsRead = field(default_factory=ColumnsRead)  # what they were read from


def column_types(columns: Sequence[ExtraColumn]) -> dict[str, Any]:
    """Return the Arrow type of each column of a row; items are their numbers in the item table."""
    import pyarrow as pa

    return {
        "query": pa.int64(),
        "positives": pa.large_list(pa.int64()),
        "negatives": pa.large_list(pa.int64()),
        "label_text": pa.large_string(),
        "label_number": pa.int64(),
        "scores": pa.large_list(pa.float64()),
        "file": pa.int32(),
        "line": pa.int64(),
        **{f"{ASKED}{column.name}": pa.int64() if column.kind == "int" else pa.float64() for column in columns},
    }


def _others(taken: Mapping[str, Any]) -> Iterator[tuple[str | int | None, tuple[float, ...], dict[str, int | float]]]:
    """Yield label, scores and asked numbers of rows."""
    texts, numbers, scores = (taken[name].to_pylist() for name in ("label_text", "label_number", "scores"))
    asked = {name.removeprefix(ASKED): cells.to_pylist() for name, cells in taken.items() if name.startswith(ASKED)}
    for row, (text, number, own) in enumerate(zip(texts, numbers, scores, strict=True)):
        yield text if number is None else number, tuple(own or ()), {name: cells[row] for name, cells in asked.items()}


def _json_endings(taken: Mapping[str, Any]) -> str | list[str]:
    """Return what the line of each row ends with, or of all: its label; and scores and numbers where there are any."""
    import pyarrow.compute as pc

    labels = [taken[name] for name in ("label_text", "label_number", "scores")]
    asked = {name.removeprefix(ASKED): cells for name, cells in taken.items() if name.startswith(ASKED)}
    weights = asked.pop(WEIGHT_COLUMN.name, None)
    once = weights is None or pc.all(pc.equal(weights, WEIGHT_COLUMN.default)).as_py()
    if once and not asked and all(cells.null_count == len(cells) for cells in labels):
        return "null]\n"
    same, endings = (WEIGHT_COLUMN.name, WEIGHT_COLUMN.default), list[str]()  # as without the column
    for label, scores, numbers in _others(taken):
        columns = {name: number for name, number in numbers.items() if (name, number) != same}
        endings.append(json.dumps((label, scores, columns) if scores or columns else (label,))[1:] + "\n")
    return endings


def _cut(items: Sequence[Item], start: int, offsets: NDArray[np.int64]) -> list[tuple[Item, ...]]:
    """Cut a stretch of items into rows."""
    ends = (start + offsets).tolist()
    return [tuple(items[begin:end]) for begin, end in pairwise(ends)]


def _outside(index: int, count: int) -> IndexError:
    return IndexError(f"record {index} of {count}")
