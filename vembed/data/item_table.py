"""Every distinct item of the records once, as an Arrow table: its text, its path, and the number of its bytes.

Equal bytes of pictures are kept once (`blobs.py`). A table of texts alone has no other column and no blobs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vembed.batch import MODALITY_WORDS, Composed, Image, pictures_in, text_ids
from vembed.data.blobs import BlobWriter, JoinedBlobs, mapped_blobs
from vembed.data.column_files import filled, mapped_columns, new_columns, of_one_type
from vembed.data.content_lines import json_texts
from vembed.data.images import item_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.blobs import Blobs, Spans

_Cells: TypeAlias = "str | tuple[str | None, str, int | None, tuple[str, ...] | None, tuple[int | None, ...] | None]"
"""A text; or of a picture its text (None without), its path, the number of its bytes (None where it is a file), and the
paths and numbers of the item's further pictures."""


BLOCK_ITEMS = 8192
"""Items that are Python objects at any one time while all of them are walked."""


@dataclass(frozen=True, eq=False)
class ItemTable:
    """Items by number."""

    columns: Any  # Arrow table of `text`, and of the other columns where there are pictures
    blobs: Blobs | Spans | JoinedBlobs  # what `bytes` counts into
    known_ids: NDArray[np.int64] | None = None  # `ids`, where they were computed before

    @classmethod
    def of(
        cls, columns: dict[str, Any], blobs: Blobs | Spans | JoinedBlobs, known_ids: NDArray[np.int64] | None = None
    ) -> ItemTable:
        """Make a table of all columns of items."""
        import pyarrow as pa

        has_pictures = columns["path"].null_count < len(columns["path"])
        return cls(pa.table(columns if has_pictures else {"text": columns["text"]}), blobs, known_ids)

    @classmethod
    def mapped(cls, folder: Path, num_items: int, num_blobs: int, shards: Sequence[str]) -> ItemTable:
        """Read what an `ItemWriter` and `keep_ids` wrote.

        Raises:
            OSError: A file is missing.
            ValueError: A file is too long or too short.
        """
        import pyarrow as pa

        columns = mapped_columns(_item_types() | {"id": pa.int64()}, folder, num_items)
        ids = columns.pop("id").to_numpy()
        return cls.of(columns, mapped_blobs(folder, num_blobs, shards), ids)

    def keep_ids(self, folder: Path) -> ItemTable:
        """Return the table with its ids, which are on disk from now on."""
        import pyarrow as pa

        column = new_columns({"id": pa.int64()}, folder)["id"]
        column.append(pa.array(self.ids))
        return replace(self, known_ids=column.finish().to_numpy())

    @property
    def has_files(self) -> bool:
        """Whether pictures lie in files of their own."""
        if "path" not in self.columns.column_names:
            return False
        if self.columns["bytes"].null_count > self.columns["path"].null_count:
            return True
        return any(None in numbers for numbers in self.columns["further_bytes"].drop_null().to_pylist())

    @classmethod
    def joined(cls, parts: Sequence[ItemTable]) -> ItemTable:
        """Return the items of several tables, one after the other; texts and paths stay where they are."""
        import pyarrow as pa
        import pyarrow.compute as pc

        names = next((part.columns.column_names for part in parts if "path" in part.columns.column_names), ["text"])
        chunks: dict[str, list[Any]] = {name: [] for name in names}
        first_blob = 0
        for part in parts:
            for name in names:
                column = pa.nulls(len(part.columns))
                if name in part.columns.column_names:
                    column = part.columns[name]
                    column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which copies
                if name == "bytes" and column.null_count < len(column):
                    column = pc.add(column, first_blob)
                if name == "further_bytes" and column.null_count < len(column):
                    moved = pc.add(column.values, first_blob)
                    column = pa.LargeListArray.from_arrays(column.offsets, moved, mask=column.is_null())
                chunks[name].append(column)
            first_blob += len(part.blobs)
        columns = pa.table({name: pa.chunked_array(of_one_type(chunks[name])) for name in names})
        return cls(columns, JoinedBlobs([part.blobs for part in parts]), np.concatenate([part.ids for part in parts]))

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """`content_id` of each item, computed when first asked for.

        Raises:
            ImageError: A picture can't be read any more.
        """
        if self.known_ids is not None:
            return self.known_ids
        if "path" in self.columns.column_names:
            every = np.arange(len(self.columns))
            return np.fromiter(map(item_id, self.walk(every)), np.int64, len(every))
        batches = self.columns.to_batches(max_chunksize=BLOCK_ITEMS)
        return np.concatenate([np.empty(0, np.int64), *(text_ids(batch["text"].to_pylist()) for batch in batches)])

    @cached_property
    def modalities(self) -> NDArray[np.int8]:
        """Place in `MODALITY_WORDS` of each item's modality."""
        import pyarrow.compute as pc

        text, image, both = map(tuple(MODALITY_WORDS).index, ("text", "image", "image+text"))
        if "path" not in self.columns.column_names:
            return np.full(len(self.columns), text, dtype=np.int8)
        is_picture = self.columns["path"].is_valid().to_numpy()
        has_text = pc.fill_null(pc.not_equal(self.columns["text"], ""), False).to_numpy()
        return np.where(is_picture, np.where(has_text, both, image), text).astype(np.int8)

    @cached_property
    def text_bytes(self) -> NDArray[np.int64]:
        """Bytes of the text of each item; 0 where it has none."""
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = self.columns["text"].cast(pa.large_string())  # without any text the column has no type
        lengths: NDArray[np.int64] = pc.fill_null(pc.binary_length(texts), 0).to_numpy()
        return lengths

    def walk(self, numbers: NDArray[np.int64]) -> Iterator[Item]:
        """Yield the items of some numbers."""
        for start in range(0, len(numbers), BLOCK_ITEMS):
            yield from self.at(numbers[start : start + BLOCK_ITEMS])

    def at(self, numbers: NDArray[np.int64]) -> list[Item]:
        """Return the items of some numbers, in that order; numbers may repeat."""
        distinct, places = np.unique(numbers, return_inverse=True)
        items = self._items_of(self._rows_at(distinct))
        return [items[place] for place in places.tolist()]

    def json_at(self, numbers: NDArray[np.int64]) -> Any:
        """Return the items of some numbers as texts of JSON, in that order, as an Arrow array.

        Raises:
            ImageError: A picture can't be read any more.
        """
        import pyarrow as pa

        if self.columns.column_names == ["text"] and self.columns["text"].num_chunks == 1:
            return json_texts(self.columns["text"].chunk(0).take(pa.array(numbers)))
        distinct, places = np.unique(numbers, return_inverse=True)
        table = self._rows_at(distinct)
        if "path" in table.column_names:
            texts = pa.array([json.dumps(item, default=_content) for item in self._items_of(table)], pa.large_string())
        else:
            texts = json_texts(pa.concat_arrays([pa.array([], pa.large_string()), *table["text"].chunks]))
        return texts.take(pa.array(places))

    def _rows_at(self, distinct: NDArray[np.int64]) -> Any:
        """Return the rows of some ascending numbers as a table."""
        import pyarrow as pa

        starts, batches = self._batches
        cuts = np.searchsorted(distinct, starts)
        own = [distinct[begin:end] - start for begin, end, start in zip(cuts[:-1], cuts[1:], starts[:-1], strict=True)]
        taken = [batch.take(pa.array(each)) for batch, each in zip(batches, own, strict=True) if len(each)]
        return pa.Table.from_batches(taken, self.columns.schema)

    def _items_of(self, table: Any) -> list[Item]:
        if "path" not in table.column_names:
            texts: list[Item] = table["text"].to_pylist()
            return texts
        return [self._item(*cells) for cells in zip(*(table[name].to_pylist() for name in _item_types()), strict=True)]

    @cached_property
    def _batches(self) -> tuple[NDArray[np.int64], list[Any]]:
        """Where each part of the columns begins, with their end, and the parts: `take` of a whole would copy it."""
        batches = self.columns.to_batches()
        return np.cumsum([0, *map(len, batches)]), batches

    def _item(
        self, text: Any, path: str | None, number: int | None, paths: list[str] | None, numbers: list[int | None] | None
    ) -> Item:
        if path is None:
            return str(text)
        image = self._image(path, number)
        further = tuple(map(self._image, paths or (), numbers or ()))
        return image if text is None else Composed((image, *further), text)

    def _image(self, path: str, number: int | None) -> Image:
        return Image(path) if number is None else Image(path, self.blobs[number])


class ItemWriter:
    """Number distinct items, and collect them as columns; the bytes of pictures are kept aside, equal ones once.

    Args:
        folder: Where the columns go; None keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._known = _KnownItems()
        self._columns = new_columns(_item_types(), folder)
        self._blob_numbers: dict[bytes, int] = {}
        self._blobs = BlobWriter(folder)
        self._ids: list[NDArray[np.int64]] | None = []  # None once there is a picture

    def numbers(self, items: Sequence[Item]) -> NDArray[np.int64]:
        """Return the number of each item, and write those that are new."""
        are_texts = set(map(type, items)) <= {str}
        every: Sequence[Any] = items if are_texts else [self._cells(item) for item in items]
        hashes = np.fromiter(map(hash, every), np.int64, len(every))
        in_order = np.sort(hashes)
        if (in_order[1:] != in_order[:-1]).all():
            numbers, new = self._known.numbers(hashes)
        else:
            _, first, places = np.unique(hashes, return_index=True, return_inverse=True)
            order = np.argsort(first)
            own, new = self._known.numbers(hashes[first[order]])
            numbers, new = own[np.argsort(order)][places], first[order][new]
        self._append(every if len(new) == len(every) else [every[place] for place in new.tolist()], are_texts=are_texts)
        return numbers

    def _append(self, cells: Sequence[Any], *, are_texts: bool) -> None:
        import pyarrow as pa

        kinds, columns = _item_types(), [pa.nulls(len(cells))] * 5
        if are_texts:
            columns[0] = pa.array(cells, kinds["text"])
        elif cells:
            rows = [each if isinstance(each, tuple) else (each, *[None] * 4) for each in cells]
            columns = list(map(filled, zip(*rows, strict=True), kinds.values()))
        for column, chunk in zip(self._columns.values(), columns, strict=True):
            column.append(chunk)
        if not are_texts:
            self._ids = None
        elif self._ids is not None:
            self._ids.append(text_ids(cells))

    def _cells(self, item: Item) -> _Cells:
        if isinstance(item, str):
            return item
        first, *more = pictures_in([item])
        further = (tuple(image.path for image in more), tuple(map(self._blob_number, more))) if more else (None, None)
        text = item.text if isinstance(item, Composed) else None
        return (text, first.path, self._blob_number(first), *further)

    def finish(self) -> ItemTable:
        """Return the items; the writer can't be used any more."""
        del self._known  # memory is at its peak while columns are joined
        columns = {name: column.finish() for name, column in self._columns.items()}
        ids = None if self._ids is None else np.concatenate([np.empty(0, np.int64), *self._ids])
        return ItemTable.of(columns, self._blobs.finish(), ids)

    def _blob_number(self, image: Image) -> int | None:
        if image.data is None:
            return None
        digest = hashlib.sha256(image.data).digest()
        number = self._blob_numbers.get(digest)
        if number is None:
            number = self._blob_numbers[digest] = len(self._blob_numbers)
            self._blobs.add(image.data)
        return number


class _KnownItems:
    """Tell which items were met before, in 16 to 32 bytes each instead of a dictionary's 150.

    An item is known by a 64-bit keyed hash: two of 10 million share one with a probability of 3 in a million. A table,
    at most half full, holds its number at the place that the hash names, or at the next one that was free.
    """

    def __init__(self) -> None:
        self._hashes = np.empty(BLOCK_ITEMS, np.int64)  # by number; the last are free
        self._table = np.full(2 * BLOCK_ITEMS, -1, np.int32)  # -1 where no number stands
        self._count = 0

    def numbers(self, hashes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of each of some distinct items, and the places of the new ones."""
        places = self._places(hashes)
        numbers = self._table[places].astype(np.int64)
        new = np.flatnonzero(numbers < 0)
        numbers[new] = np.arange(self._count, self._count + len(new))
        self._count += len(new)
        known, places, size = numbers[new], places[new], 1 << (self._count - 1).bit_length()
        is_full = self._count > len(self._hashes)
        if is_full:
            self._hashes = np.concatenate([self._hashes, np.empty(size - len(self._hashes), np.int64)])
        self._hashes[known] = hashes[new]
        if is_full:
            self._table = np.full(2 * size, -1, np.int32 if size < 2**31 else np.int64)
            known, places = np.arange(self._count), self._hashes[: self._count] & (2 * size - 1)
        while len(known):
            self._table[places] = known
            known = known[self._table[places] != known]  # where two were to stand, one does
            places = self._places(self._hashes[known])
        return numbers, new

    def _places(self, hashes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the number of each item stands, or is to stand."""
        last = len(self._table) - 1
        places, left = hashes & last, np.arange(len(hashes))
        at = places
        while len(left):
            found = self._table[at]
            left = left[(found >= 0) & (self._hashes[found] != hashes[left])]
            places[left] = at = (places[left] + 1) & last
        return places


def _content(item: Image | Composed) -> dict[str, Any]:
    """Return what an item with a picture holds, for the fingerprint, in a form that no text has."""
    if isinstance(item, Composed) and len(item.images) > 1:
        return {"images": [item_id(image) for image in item.images], "text": item.text}
    if isinstance(item, Composed):
        return {"image": item_id(item.images[0]), "text": item.text}
    return {"image": item_id(item)}


def _item_types() -> dict[str, Any]:
    import pyarrow as pa

    return {
        "text": pa.large_string(),
        "path": pa.large_string(),
        "bytes": pa.int64(),
        "further_paths": pa.large_list(pa.large_string()),
        "further_bytes": pa.large_list(pa.int64()),
    }
