"""Collect checked rows into a table of records, in memory or on disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vembed.data.column_files import filled, new_columns
from vembed.data.item_table import ItemWriter
from vembed.data.records import ASKED, BLOCK_ROWS, SIZES_FILE, RecordTable, column_types

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.columns import ExtraColumn


class ItemRows(NamedTuple):
    """The items of some rows."""

    items: Sequence[Item]  # of each row its query, its positives and its negatives
    num_positives: NDArray[np.int64]
    num_negatives: NDArray[np.int64]

    @property
    def columns(self) -> NDArray[np.int64]:
        """0 for each item that is a query, 1 for a positive, 2 for a negative."""
        widths = np.stack([np.ones_like(self.num_positives), self.num_positives, self.num_negatives], axis=1)
        return np.repeat(np.tile(np.arange(3), len(widths)), widths.ravel())


class RecordWriter:
    """Collect checked rows into a `RecordTable`; at most `BLOCK_ROWS` rows are Python objects at a time.

    Args:
        columns: The columns of numbers that every row has beside its items.
        folder: Where the table goes, whole once `finish` returns; None keeps it in memory. It exists and is empty.

    Raises:
        OSError: The disk of the folder refused; of every method.
    """

    def __init__(self, columns: Sequence[ExtraColumn] = (), folder: Path | None = None) -> None:
        self._types = column_types(columns)
        self._folder = folder
        self._start()

    def _start(self) -> None:
        self._files: dict[str, int] = {}
        self._columns = new_columns(self._types, self._folder)
        self._num_rows = 0
        self._items = ItemWriter(self._folder)
        self._begin_block()

    def _begin_block(self) -> None:
        self._flat: list[Item] = []
        self._block: dict[str, list[Any]] = {name: [] for name in self._types if name != "query"}

    def __len__(self) -> int:
        return self._num_rows + len(self._block["line"])

    def add(
        self,
        query: Item,
        *,
        positives: Sequence[Item],
        negatives: Sequence[Item] = (),
        label: str | int | None = None,
        scores: Sequence[float] = (),
        columns: Mapping[str, int | float] | None = None,
        file: str,
        line: int,
    ) -> None:
        """Append one row, its values as in `Record`; the caller has checked it.

        Args:
            scores: Of the positives, then of the negatives.
            columns: One number for each column that the writer was made with.
            file: Name for people, without a line.
            line: Line or row in that file, counted from 1.
        """
        block = self._block
        self._flat += (query, *positives, *negatives)
        block["positives"].append(len(positives))
        block["negatives"].append(len(negatives))
        block["label_text"].append(label if isinstance(label, str) else None)
        block["label_number"].append(label if isinstance(label, int) else None)
        block["scores"].append(scores or None)
        block["file"].append(self._files.setdefault(file, len(self._files)))
        block["line"].append(line)
        for name, number in (columns or {}).items():
            block[f"{ASKED}{name}"].append(number)
        if len(block["line"]) >= BLOCK_ROWS:
            self._flush()

    def finish(self) -> RecordTable:
        """Return the table and leave the writer empty; one on disk can't be used any more.

        Peak memory is the table plus a copy of its largest column, or on disk a few thousand rows.
        """
        self._flush()
        columns = {name: column.finish() for name, column in self._columns.items()}
        items, files = self._items.finish(), tuple(self._files)
        if self._folder is None:
            self._start()
            return RecordTable(columns, items, files)
        sizes = {
            "rows": self._num_rows,
            "items": len(items.columns),
            "blobs": len(items.blobs),
            "shards": [file.path for file in items.blobs.files],
            "files": files,
        }
        (self._folder / SIZES_FILE).write_text(json.dumps(sizes), "utf-8")
        return RecordTable(columns, items.keep_ids(self._folder), files, folder=self._folder)

    def add_texts(self, rows: ItemRows, columns: Mapping[str, int | float], *, file: str, first: int) -> None:
        """Append rows of texts, which stand in lines of a file from `first` on and have the same numbers."""
        import pyarrow as pa

        self._flush()
        count = len(rows.num_positives)
        numbers: dict[str, int | float] = {"file": self._files.setdefault(file, len(self._files))}
        numbers |= {f"{ASKED}{name}": number for name, number in columns.items()}
        cells = {name: pa.repeat(pa.scalar(number, self._types[name]), count) for name, number in numbers.items()}
        cells |= dict.fromkeys(("label_text", "label_number", "scores"), pa.nulls(count))
        self._write(rows, {**cells, "line": pa.array(np.arange(first, first + count))})

    def _flush(self) -> None:
        """Write the rows that were added one by one."""
        counts = [np.array(self._block.pop(name), dtype=np.int64) for name in ("positives", "negatives")]
        others = {name: filled(cells, self._types[name]) for name, cells in self._block.items()}
        if len(counts[0]):
            self._write(ItemRows(self._flat, *counts), others)
        self._begin_block()

    def _write(self, rows: ItemRows, others: Mapping[str, Any]) -> None:
        """Append rows, with the cells of all columns that hold no items."""
        import pyarrow as pa

        numbers, column_of = self._items.numbers(rows.items), rows.columns
        query, *lists = (pa.array(numbers[column_of == column]) for column in range(3))
        chunks = {"query": query, **others}
        for name, values, counts in zip(("positives", "negatives"), lists, rows[1:], strict=True):
            chunks[name] = pa.LargeListArray.from_arrays(pa.array(np.cumsum([0, *counts.tolist()])), values)
        for name, column in self._columns.items():
            column.append(chunks[name])
        self._num_rows += len(rows.num_positives)
