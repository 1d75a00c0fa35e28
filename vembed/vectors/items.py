"""Distinct items of training records and corpora, their vectors as batches read them, and those of hard batches.

Items are known by `content_id`: texts or pictures of one content are one item, wherever they stand, and are encoded
once. `distinct_items` sorts the items of the records by kind and side, since a tower may be frozen for pictures only,
and a prompt may stand before queries only.

Importing this file brings no torch: a run collects the documents of its corpus before it loads any.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, get_args

import numpy as np

from vembed.batch import MODALITY_WORDS, Modality, Side, modality_of, modality_words
from vembed.data.arrangements import BLOCK_ROWS, TINY, whole_numbers
from vembed.data.table import TEXT, ItemColumn
from vembed.data.table_writer import ItemWriter
from vembed.errors import ConfigError, DataError
from vembed.text import every

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.table import ItemTable, RecordTable
    from vembed.distributed.ranks import Ranks
    from vembed.models.encoder import Encoder
    from vembed.models.st_library import CrossEncoder
    from vembed.vectors.encode import Encoded, ItemEncoder
    from vembed.vectors.provenance import Key
    from vembed.vectors.store import VectorStore

BLOCK_ITEMS = 8192
"""Documents of a corpus that are Python objects at a time."""


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
        # Two numbers may have one content, as a document in the records and in the corpus: the first of them stays, and
        # np.unique's order by id becomes the order of the tables again.
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
        # A content behind the last one is looked up at the last, which differs from it.
        nearest = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
        return np.where(sorted_ids[nearest] == ids, order[nearest], -1)

    @property
    def pictured(self) -> NDArray[np.int64]:
        """Rows of the items that hold a picture, ascending."""
        parts = [rows[table.modalities[numbers] != TEXT] for table, rows, numbers in self._by_table(self.numbers_N)]
        return np.sort(np.concatenate(parts))

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


def corpus_items(items: Iterable[Item]) -> ItemTable:
    """Collect the documents of a corpus as a table; those without a text are left out."""
    writer = ItemWriter()
    wanted = (item for item in items if modality_of(item) != "text" or str(item).strip())
    while block := list(islice(wanted, BLOCK_ITEMS)):
        writer.numbers(block)
    return writer.finish()


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
                # By content, not by number: the set and the order of a side don't hang on how files cut the rows.
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
        from vembed.vectors.provenance import preprocessing_digest
        from vembed.vectors.store import VectorStore

        name = f"{items.modality.replace('+', '-')}-{items.side}"
        preprocessing = preprocessing_digest(encoder, items.modality, items.side)
        key = {**key, "preprocessing": preprocessing, "side": items.side}
        what = f"{what} of {MODALITY_WORDS[items.modality][1]} ({items.side})"
        return cls(items, VectorStore(folder, name, key, what, advice, shared=True), encoder.dimension)

    @property
    def num_bytes(self) -> int:
        """Size of the vectors."""
        return 4 * len(self.items) * self.dimension

    def get(self, encoder: Callable[[], ItemEncoder], ranks: Ranks) -> NDArray[np.float32]:
        """Return the vectors, (N, E); `encoder` is called, and may load its model, only if one is missing."""

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


HARD_COLUMNS: tuple[tuple[Side, ItemColumn], ...] = (("query", "query"), ("document", "positives"))
"""Sides and columns whose items place a row among the others when batches are hard."""


@dataclass(frozen=True, slots=True)
class HardVectors:
    """Vectors that batches of hard negatives are chosen by: one of each training row, as a model sees it.

    A row's vector is the sum of those of its query and of its first positive, each of unit length. The starting model's
    are encoded before step 1, whatever step a run continues from, and kept on disk for as long as the run is.
    """

    sides: tuple[StoredSide, ...]  # the items that are encoded
    records: RecordTable

    @classmethod
    def of(cls, encoder: Encoder, records: RecordTable, folder: Path, *, precision: str) -> HardVectors:
        """Collect the distinct queries and positives; all ranks call it while the encoder is as it was loaded.

        Raises:
            ConfigError: The encoder gives several vectors for a row.
        """
        from vembed.vectors.provenance import model_key

        if encoder.multi_vector:
            raise ConfigError(
                f"batch_sampling hard compares one vector of each row, and {encoder.name} gives several; set "
                f"batch_sampling to random or no_duplicates"
            )
        items = distinct_items(records, [column for _, column in HARD_COLUMNS])
        words = {"what": "vectors that hard batches are chosen by", "advice": "set batch_sampling to random"}
        key = {**model_key(encoder), "precision": precision}
        return cls(tuple(StoredSide.of(part, encoder, key, folder, **words) for part in items), records)

    @property
    def num_bytes(self) -> int:
        """Size of the vectors on disk."""
        return sum(side.num_bytes for side in self.sides)

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return self.sides[0].dimension

    def note(self, refresh: int | str) -> str:
        """Say what is encoded, and when: "once", or every so many epochs."""
        count = sum(len(side.items) for side in self.sides)
        when = "before step 1 the starting model"
        if isinstance(refresh, int):
            when = f"before epoch 1 and {every(refresh, 'epoch')} the model as it then is"
        return (
            f"batch_sampling hard: {when} encodes {count:,} distinct queries and positives; rows whose vectors lie "
            f"close together share a batch."
        )

    def vectors(self, encode: ItemEncoder) -> NDArray[np.int16]:
        """Return the vector of each row as whole numbers, (N, E), from disk where it is known, else encoded now.

        All ranks call it.

        Raises:
            DataError: A picture can't be read any more.
            MachineError: The vectors can't be written.
            NonFiniteError: A vector holds NaN or infinity.
        """
        stored = ItemVectors.get(self.sides, lambda: encode, encode.ranks)
        table = self.records.items
        first_items = {}
        for side, column in HARD_COLUMNS:
            rows, items = self.records.numbers(column)  # rows ascend, so the first of each is its first item
            rows, first = np.unique(rows, return_index=True)
            first_items[side] = rows, items[first]
        vectors_NE = np.zeros((len(self.records), encode.encoder.dimension), dtype=np.int16)
        # In blocks of rows: the mapped vectors of all items may be larger than the memory, these are 2 bytes a number.
        for start in range(0, len(vectors_NE), BLOCK_ROWS):
            sums_BE = np.zeros((len(vectors_NE[start : start + BLOCK_ROWS]), vectors_NE.shape[1]), dtype=np.float32)
            for side, (rows, items) in first_items.items():
                block = slice(*np.searchsorted(rows, [start, start + BLOCK_ROWS]))
                rows_B, items_B = rows[block] - start, items[block]
                for number, modality in enumerate(MODALITY_WORDS):
                    is_kind_B = table.modalities[items_B] == number
                    if is_kind_B.any():
                        kind_KE = stored.of_kind(modality, side, table.ids[items_B[is_kind_B]])
                        lengths = np.linalg.norm(kind_KE, axis=1, keepdims=True)
                        sums_BE[rows_B[is_kind_B]] += kind_KE / np.maximum(lengths, TINY)
            vectors_NE[start : start + BLOCK_ROWS] = whole_numbers(sums_BE)
        return vectors_NE
