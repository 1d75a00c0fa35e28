"""Collect checked rows into a table of records, in memory or on disk."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.data.column_files import filled, new_columns
from vembed.data.item_table import ItemWriter
from vembed.data.records import ASKED, BLOCK_ROWS, SIZES_FILE, RecordTable, column_types

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vembed.batch import Item
    from vembed.data.columns import ExtraColumn


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
        self._block: dict[str, list[Any]] = {name: [] for name in self._types}
        self._columns = new_columns(self._types, self._folder)
        self._num_rows = 0
        self._items = ItemWriter(self._folder)

    def __len__(self) -> int:
        return self._num_rows

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
        place, block = self._items.place, self._block
        block["query"].append(place(query))
        block["positives"].append([place(item) for item in positives])
        block["negatives"].append([place(item) for item in negatives])
        block["label_text"].append(label if isinstance(label, str) else None)
        block["label_number"].append(label if isinstance(label, int) else None)
        block["scores"].append(scores or None)
        block["file"].append(self._files.setdefault(file, len(self._files)))
        block["line"].append(line)
        for name, number in (columns or {}).items():
            block[f"{ASKED}{name}"].append(number)
        self._num_rows += 1
        if len(block["query"]) >= BLOCK_ROWS:
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

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._block["query"]:
            return
        numbers = self._items.flush()
        for name, kind in self._types.items():
            cells = self._block[name]
            if name == "query":
                chunk = pa.array(numbers[cells])
            elif name in {"positives", "negatives"}:
                offsets = np.cumsum([0, *map(len, cells)])
                places = np.fromiter(chain.from_iterable(cells), np.int64, offsets[-1])
                chunk = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(numbers[places]))
            else:
                chunk = filled(cells, kind)
            self._columns[name].append(chunk)
            cells.clear()
