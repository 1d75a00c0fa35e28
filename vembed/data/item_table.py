"""Every distinct item of the records once, as an Arrow table: its text, its path, and the number of its bytes.

Equal bytes of pictures are kept once (`blobs.py`). A table of texts alone has no other column and no blobs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vembed.batch import MODALITY_WORDS, Composed, Image, pictures_in
from vembed.data.blobs import Blobs, BlobWriter
from vembed.data.images import item_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item

_Cells: TypeAlias = "str | tuple[str | None, str, int | None, tuple[str, ...] | None, tuple[int | None, ...] | None]"
"""A text; or of a picture its text (None without), its path, the number of its bytes (None where it is a file), and the
paths and numbers of the item's further pictures."""


BLOCK_ITEMS = 8192
"""Items that are Python objects at any one time while all of them are walked."""


@dataclass(frozen=True, eq=False)
class ItemTable:
    """Items by number."""

    columns: Any  # Arrow table of `text`, and of the other columns where there are pictures
    blobs: Blobs  # what `bytes` counts into

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """`content_id` of each item, computed when first asked for.

        Raises:
            ImageError: A picture can't be read any more.
        """
        every = np.arange(len(self.columns))
        return np.fromiter(map(item_id, self.walk(every)), np.int64, len(every))

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
        import pyarrow as pa

        distinct, places = np.unique(numbers, return_inverse=True)
        table = self.columns.take(pa.array(distinct))
        items: list[Item] = table["text"].to_pylist()
        if "path" in table.column_names:
            items = [
                self._item(*cells) for cells in zip(*(table[name].to_pylist() for name in _item_types()), strict=True)
            ]
        return [items[place] for place in places.tolist()]

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
    """Number distinct items, and collect them as columns; the bytes of pictures are kept aside, equal ones once."""

    def __init__(self) -> None:
        self._places: dict[_Cells, int] = {}
        self._known = _KnownItems()
        self._has_pictures = False
        self._chunks: dict[str, list[Any]] = {name: [] for name in _item_types()}
        self._blob_numbers: dict[bytes, int] = {}
        self._blobs = BlobWriter()

    def place(self, item: Item) -> int:
        """Return the place of an item in the present block."""
        cells: _Cells
        if isinstance(item, str):
            cells = item
        else:
            self._has_pictures = True
            first, *more = pictures_in([item])
            further = (
                (tuple(image.path for image in more), tuple(map(self._blob_number, more))) if more else (None, None)
            )
            text = item.text if isinstance(item, Composed) else None
            cells = (text, first.path, self._blob_number(first), *further)
        return self._places.setdefault(cells, len(self._places))

    def flush(self) -> NDArray[np.int64]:
        """Write the items of the block that are new; return the number of each item of the block."""
        block = list(self._places)
        numbers, new = self._known.numbers(block)
        cells = [block[place] for place in new.tolist()]
        types, alone = _item_types(), (None,) * 4
        rows = [each if isinstance(each, tuple) else (each, *alone) for each in cells] if self._has_pictures else ()
        columns = zip(*rows, strict=True) if rows else (cells, *[[None] * len(cells)] * 4)
        for (name, kind), column in zip(types.items(), columns, strict=True):
            self._chunks[name].append(filled(column, kind))
        self._places = {}
        return numbers

    def finish(self) -> ItemTable:
        """Return the items; the writer can't be used any more."""
        import pyarrow as pa

        del self._known  # memory is at its peak while columns are joined
        columns = {name: joined(self._chunks[name], kind) for name, kind in _item_types().items()}
        items = pa.table(columns if self._has_pictures else {"text": columns["text"]})
        return ItemTable(items, self._blobs.finish())

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


def _item_types() -> dict[str, Any]:
    import pyarrow as pa

    return {
        "text": pa.large_string(),
        "path": pa.large_string(),
        "bytes": pa.int64(),
        "further_paths": pa.large_list(pa.large_string()),
        "further_bytes": pa.large_list(pa.int64()),
    }


def filled(cells: Sequence[Any], kind: Any) -> Any:
    """Return cells as an Arrow array; nulls, which take no memory, where every cell is None."""
    import pyarrow as pa

    return pa.nulls(len(cells)) if cells.count(None) == len(cells) else pa.array(cells, type=kind)


def joined(chunks: list[Any], kind: Any) -> Any:
    """Return the chunks of a column as one array, and forget them."""
    import pyarrow as pa

    if not chunks:
        return pa.array([], type=kind)
    if any(not pa.types.is_null(chunk.type) for chunk in chunks):
        chunks[:] = [pa.nulls(len(chunk), kind) if pa.types.is_null(chunk.type) else chunk for chunk in chunks]
    joined = pa.concat_arrays(chunks)
    chunks.clear()
    return joined
