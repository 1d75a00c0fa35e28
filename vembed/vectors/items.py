"""Distinct items of training records and corpora, and their vectors as batches read them.

Items are known by `content_id`: texts or pictures of one content are one item, wherever they stand, and are encoded
once. `distinct_items` sorts the items of the records by kind and side, since a tower may be frozen for pictures only,
and a prompt may stand before queries only.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np

from vembed.batch import MODALITY_WORDS, Composed, Image, Modality, Side, modality_of, modality_words
from vembed.data.table import ItemColumn
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.table import ItemTable, RecordTable
    from vembed.distributed.ranks import Ranks
    from vembed.models.cross_encoder import CrossEncoder
    from vembed.models.encoder import Encoder
    from vembed.vectors.encode import Encoded, ItemEncoder
    from vembed.vectors.provenance import Key
    from vembed.vectors.store import VectorStore

_PROBE_TEXTS = (
    "",
    "A",
    "The quick brown fox jumps over 13 lazy dogs.",
    "naïve Größe 東京 🦊\tx_y(z)",
    "a long text " * 2000,
)


@dataclass(frozen=True, eq=False)
class DistinctItems:
    """Items of different content, by row; they lie in one table, or in the records' and a corpus's."""

    ids: NDArray[np.int64]  # content of each, (N,)
    numbers_N: NDArray[np.int64]  # where each lies: numbers of the second table follow those of the first
    tables: tuple[ItemTable, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[ItemTable, NDArray[np.int64]]]) -> DistinctItems:
        """Return the items under some numbers of one table or two, each content once, in the order of the tables."""
        offset, numbers, ids = 0, [], []
        for table, used in parts:
            distinct = np.unique(used)
            numbers.append(distinct + offset)
            ids.append(table.ids[distinct])
            offset += len(table)
        all_ids = np.concatenate(ids)
        _, first = np.unique(all_ids, return_index=True)
        first.sort()
        return cls(all_ids[first], np.concatenate(numbers)[first], tuple(table for table, _ in parts))

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: NDArray[np.int64]) -> list[Item]:
        """Return the items of some rows."""
        items: list[Item] = [""] * len(rows)
        for table, positions, numbers in self._by_table(self.numbers_N[rows]):
            for position, item in zip(positions.tolist(), table.at(numbers), strict=True):
                items[position] = item
        return items

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each content, -1 where it isn't here."""
        order, sorted_ids = self._sorted
        nearest = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
        return np.where(sorted_ids[nearest] == ids, order[nearest], -1)

    def require(self, model: Encoder | CrossEncoder) -> None:
        """Refuse items that a model has no tower for.

        Raises:
            DataError: With what they are.
        """
        for table, _, numbers in self._by_table(self.numbers_N):
            for kind in np.unique(table.modalities[numbers]).tolist():
                modality = tuple(MODALITY_WORDS)[kind]
                if modality not in model.modalities:
                    raise DataError(
                        f"{model.name} takes {modality_words(model.modalities)}, and the data hold "
                        f"{MODALITY_WORDS[modality][1]}: choose a model for them"
                    )

    def _by_table(self, numbers: NDArray[np.int64]) -> Iterable[tuple[ItemTable, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield each table with the positions of the numbers that lie in it, and those numbers from its own start."""
        offset = 0
        for table in self.tables:
            positions = np.flatnonzero((numbers >= offset) & (numbers < offset + len(table)))
            yield table, positions, numbers[positions] - offset
            offset += len(table)

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = np.argsort(self.ids)
        return order, self.ids[order]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over all contents in order."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class SideItems:
    """Distinct items of one kind and side among training records, ids ascending."""

    modality: Modality
    side: Side
    items: DistinctItems
    num_uses: int  # of them in the records, repeated ones counted again

    def __len__(self) -> int:
        return len(self.items)

    @property
    def counted(self) -> str:
        """Number and kind in words: "6 pictures (document)"."""
        return f"{len(self)} {MODALITY_WORDS[self.modality][1]} ({self.side})"

    def sample(self, count: int) -> list[Item]:
        """Return at most so many of the items, evenly spaced."""
        return self.items.take(np.arange(0, len(self), max(1, -(-len(self) // count))))


def distinct_items(records: RecordTable, columns: Sequence[ItemColumn] = get_args(ItemColumn)) -> list[SideItems]:
    """Return the distinct items of some columns of records, the first of them queries, by kind and side."""
    queries, *documents = (records.numbers(column)[1] for column in columns)
    sides: dict[Side, NDArray[np.int64]] = {"query": queries, "document": np.concatenate(documents)}
    table = records.items
    parts = []
    for modality in sorted(MODALITY_WORDS):
        kind = tuple(MODALITY_WORDS).index(modality)
        for side, numbers in sides.items():
            used = numbers[table.modalities[numbers] == kind]
            if len(used):
                ids, first = np.unique(table.ids[used], return_index=True)
                parts.append(SideItems(modality, side, DistinctItems(ids, used[first], (table,)), len(used)))
    return parts


@dataclass(frozen=True, slots=True)
class StoredSide:
    """Distinct items of one kind and side, and the store of their vectors."""

    items: SideItems
    store: VectorStore
    dimension: int

    @classmethod
    def of(cls, items: SideItems, encoder: Encoder, key: Key, folder: Path, *, what: str, advice: str) -> StoredSide:
        """Return the items as an encoder will encode them.

        Args:
            encoder: It may be without its weights.
            key: The model and its precision.
            what: The vectors, for messages: "embeddings of a frozen tower".
            advice: What else the user can do when they can't be written.
        """
        # These bring torch, and rows are checked (mining/task.py) before it is imported.
        from vembed.models.plannable import without_image_limits
        from vembed.vectors.provenance import features_digest
        from vembed.vectors.store import VectorStore

        with without_image_limits(encoder):
            preprocessing = features_digest(encoder, _probes(items.modality), items.side)
        name = f"{items.modality.replace('+', '-')}-{items.side}"
        key = {**key, "preprocessing": preprocessing, "side": items.side}
        what = f"{what} of {MODALITY_WORDS[items.modality][1]} ({items.side})"
        return cls(items, VectorStore(folder, name, key, what, advice, shared=True), encoder.dimension)

    @property
    def num_bytes(self) -> int:
        """Size of the vectors."""
        return 4 * len(self.items) * self.dimension

    def get(self, encoder: Callable[[], ItemEncoder], ranks: Ranks) -> NDArray[np.float32]:
        """Return the vectors, (N, E); the encoder is called for only if one is missing."""

        def encode(lists: Iterable[Sequence[Item]]) -> Generator[Encoded]:
            yield from encoder().stream(lists, self.items.side)

        return self.store.get(self.items.items, encode, ranks)


@dataclass(frozen=True, slots=True)
class ItemVectors:
    """Vectors of training items by content, mapped from disk: what batches read."""

    tables: Mapping[tuple[Modality, Side], tuple[DistinctItems, NDArray[np.float32]]]  # items and vectors (N, E)

    @classmethod
    def get(cls, sides: Sequence[StoredSide], encoder: Callable[[], ItemEncoder], ranks: Ranks) -> ItemVectors:
        """Read the vectors of all sides, encoding what isn't on disk; all ranks must call it.

        Raises:
            DataError: A picture can't be read any more.
            MachineError: The vectors can't be written.
            NonFiniteError: A vector holds NaN or infinity.
        """
        return cls(
            {(part.items.modality, part.items.side): (part.items.items, part.get(encoder, ranks)) for part in sides}
        )

    def holds(self, modality: Modality) -> bool:
        """Return whether items of a kind are here, on either side."""
        return any(kind == modality for kind, _ in self.tables)

    def of_kind(self, modality: Modality, side: Side, ids_B: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors of items of one kind, all of which are here, (B, E)."""
        items, vectors_NE = self.tables[modality, side]
        rows_B = items.rows_of(ids_B)
        assert (rows_B >= 0).all(), "all items of the training records were encoded"
        return np.asarray(vectors_NE[rows_B])

    def take(self, items: Sequence[Item], ids_B: NDArray[np.int64], side: Side) -> NDArray[np.float32]:
        """Return the vectors of items of any kinds, (B, E)."""
        kinds = np.array([modality_of(item) for item in items])
        vectors = {kind: self.of_kind(kind, side, ids_B[kinds == kind]) for kind in np.unique(kinds).tolist()}
        vectors_BE = np.empty((len(items), next(iter(vectors.values())).shape[1]), dtype=np.float32)
        for kind, vectors_KE in vectors.items():
            vectors_BE[kinds == kind] = vectors_KE
        return vectors_BE


@cache
def _probes(modality: Modality) -> tuple[Item, ...]:
    """Return items that show a changed tokenizer, prompt, limit or image processor, whatever the data are."""
    if modality == "text":
        return _PROBE_TEXTS
    import PIL.Image

    content = io.BytesIO()
    across, down = np.meshgrid(np.arange(96, dtype=np.uint8), np.arange(64, dtype=np.uint8))
    PIL.Image.fromarray(np.stack([2 * across, 3 * down, across ^ down], axis=2)).save(content, "PNG")
    picture = Image("probe.png", data=content.getvalue())
    return (picture,) if modality == "image" else (Composed((picture,), _PROBE_TEXTS[0]),)
