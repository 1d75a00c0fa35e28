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

    def numbers(self, items: Sequence[Item]) -> NDArray[np.int64]:
        """Return the number of each item, and write those that are new."""
        are_texts = set(map(type, items)) <= {str}
        every: Sequence[Any] = items if are_texts else [self._cells(item) for item in items]
        distinct = list(dict.fromkeys(every))
        numbers, new = self._known.numbers(distinct)
        cells = distinct if len(new) == len(distinct) else [distinct[place] for place in new.tolist()]
        alone = (None,) * 4
        rows = () if are_texts else [each if isinstance(each, tuple) else (each, *alone) for each in cells]
        columns = zip(*rows, strict=True) if rows else (cells, *[[None] * len(cells)] * 4)
        for (name, kind), column in zip(_item_types().items(), columns, strict=True):
            self._columns[name].append(filled(column, kind))
        if len(distinct) == len(every):
            return numbers
        number_of = dict(zip(distinct, numbers.tolist(), strict=True))
        return np.fromiter(map(number_of.__getitem__, every), np.int64, len(every))

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
        return ItemTable.of({name: column.finish() for name, column in self._columns.items()}, self._blobs.finish())

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
    """Tell which items were met before, in 16 bytes each instead of a dictionary's 150.

    An item is known by a 64-bit keyed hash: two of 10 million share one with a probability of 3 in a million. Hashes
    stand in sorted runs; a run joins the one before it when that is less than twice as long, so that runs stay few.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # hashes, numbers
        self._count = 0

    def numbers(self, items: Sequence[_Cells]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of each of some distinct items, and the places of the new ones."""
        hashes = np.fromiter(map(hash, items), np.int64, len(items))
        order = np.argsort(hashes)  # sorted needles are found ten times as fast
        hashes = hashes[order]
        numbers = np.full(len(items), -1, dtype=np.int64)
        for run_hashes, run_numbers in self._runs:
            at = np.minimum(np.searchsorted(run_hashes, hashes), len(run_hashes) - 1)
            same = run_hashes[at] == hashes
            numbers[order[same]] = run_numbers[at[same]]
        new = np.flatnonzero(numbers < 0)
        is_new = numbers[order] < 0
        numbers[new] = np.arange(self._count, self._count + len(new))
        self._count += len(new)
        self._add(hashes[is_new], numbers[order][is_new])
        return numbers, new

    def _add(self, hashes: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        while self._runs and len(self._runs[-1][0]) < 2 * len(hashes):
            earlier_hashes, earlier_numbers = self._runs.pop()
            hashes = np.concatenate([earlier_hashes, hashes])
            order = np.argsort(hashes, kind="stable")
            hashes, numbers = hashes[order], np.concatenate([earlier_numbers, numbers])[order]
        if len(hashes):
            self._runs.append((hashes, numbers))


def json_texts(texts: Any) -> Any:
    """Return texts of an Arrow array as `json.dumps` writes them; only those that need escapes are Python objects."""
    import pyarrow as pa
    import pyarrow.compute as pc

    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    characters = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    escaped = np.flatnonzero((characters - 32 > 94) | (characters == ord('"')) | (characters == ord("\\")))
    needs = np.diff(np.searchsorted(escaped, ends - ends[0])) > 0
    quote, nothing = (pa.scalar(each, pa.large_string()) for each in ('"', ""))
    whole = pc.binary_join_element_wise(quote, texts, quote, nothing)
    if not needs.any():
        return whole
    mask = pa.array(needs)
    return pc.replace_with_mask(whole, mask, pa.array(map(json.dumps, texts.filter(mask).to_pylist()), whole.type))


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
