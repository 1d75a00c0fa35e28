"""Vectors of the items of the training records, each item encoded once, before the first step.

1. `DistinctItems` walks the records once and remembers where each distinct item is.
2. `StoredSide.encoded` encodes those that no file holds yet, on all ranks, block after block (`VectorStore`).
3. `StoredVectors` is what batches read: files that are mapped into memory.

A file is true while the weights, the model's settings, what tokenizer or image processor make of a probe, the side and
the precision are those of its key. Items are known by `content_id`: what looks the same is one item.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, get_args

import numpy as np

from vembed.batch import MODALITY_WORDS, Composed, Image, Modality, Side, content_id, modality_of
from vembed.evaluation.index import check_finite
from vembed.evaluation.provenance import features_digest
from vembed.evaluation.vector_store import VectorStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.records import Record, RecordTable
    from vembed.evaluation.encode import ItemEncoder
    from vembed.evaluation.provenance import Key
    from vembed.evaluation.vector_store import VectorTable
    from vembed.models.encoder import Encoder

_PROBE_TEXTS = (
    "",
    "A",
    "The quick brown fox jumps over 13 lazy dogs.",
    "naïve Größe 東京 🦊\tx_y(z)",
    "a long text " * 2000,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DistinctItems:
    """The distinct items of records."""

    # where each identity was found first, by kind and side: number of the record, place among its items
    first: dict[tuple[Modality, Side], dict[int, tuple[int, int]]] = field(default_factory=dict)
    # how many items there are, repeated ones counted again
    uses: Counter[tuple[Modality, Side]] = field(default_factory=Counter)

    @classmethod
    def of(cls, records: Iterable[Record]) -> DistinctItems:
        """Walk all records once."""
        items = cls()
        for row, record in enumerate(records):
            for place, item in enumerate(items_of(record)):
                kind: tuple[Modality, Side] = modality_of(item), "query" if place == 0 else "document"
                items.uses[kind] += 1
                items.first.setdefault(kind, {}).setdefault(content_id(item), (row, place))
        return items

    @property
    def kinds(self) -> list[tuple[Modality, Side]]:
        """What kinds of items there are, on which side."""
        sides = get_args(Side)
        return sorted(self.first, key=lambda kind: (kind[0], sides.index(kind[1])))

    def sample(self, kind: tuple[Modality, Side], records: RecordTable) -> Item:
        """Return an item of a kind and side."""
        return _take(records, np.array([next(iter(self.first[kind].values()))]))[0]


@dataclass(frozen=True, slots=True)
class StoredSide:
    """The distinct items of one kind and side, and what their vectors are made of."""

    modality: Modality
    side: Side
    ids_U: NDArray[np.int64]  # their identities, ascending
    # where each was found first: number of the record, place among its query, positives and negatives
    places_U2: NDArray[np.int64]
    dimension: int  # E
    store: VectorStore

    @classmethod
    def of(
        cls, items: DistinctItems, kind: tuple[Modality, Side], encoder: Encoder, key: Key, place: StorePlace
    ) -> StoredSide:
        """Return the items of one kind and side as an encoder will encode them.

        Args:
            key: The model and its precision.
        """
        (modality, side), first = kind, items.first[kind]
        ids_U = np.sort(np.fromiter(first, dtype=np.int64, count=len(first)))
        places_U2 = np.array([first[identity] for identity in ids_U.tolist()], dtype=np.int64)
        preprocessing = features_digest(encoder, _probes(modality), side)
        store = VectorStore(
            place.folder,
            f"{modality.replace('+', '-')}-{side}",
            {**key, "preprocessing": preprocessing, "side": side},
            f"{place.what} of {MODALITY_WORDS[modality][1]} ({side})",
            place.advice,
        )
        return cls(modality, side, ids_U, places_U2, encoder.dimension, store)

    @property
    def num_bytes(self) -> int:
        """Size of the vectors."""
        return 4 * len(self.ids_U) * self.dimension

    def encoded(self, records: RecordTable, encode: ItemEncoder) -> VectorTable:
        """Return the vectors, from disk where they are still true, else encoded now.

        Args:
            encode: Encodes them, on all ranks; its weights may be sharded.

        Raises:
            DataError: A picture can't be read any more.
            MachineError: The vectors can't be written.
            NonFiniteError: A vector holds NaN or infinity.
        """

        def make(rows: NDArray[np.int64]) -> NDArray[np.float32]:
            vectors_NE = encode.table(_take(records, self.places_U2[rows]), self.side)
            if encode.ranks.is_first:  # the others have no vectors
                check_finite(vectors_NE, self.side)
            return vectors_NE

        before = encode.num_truncated[self.side]
        table = self.store.table(self.ids_U, self.dimension, make, encode.ranks)
        num_truncated = sum(encode.ranks.gather_objects(encode.num_truncated[self.side] - before))
        if num_truncated:
            _log.info("%s: %d were longer than the model takes and were cut", self.store.what, num_truncated)
        return table


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where vectors are kept, and how messages speak of them."""

    folder: Path
    what: str  # "embeddings of a frozen tower"
    advice: str  # what else the user can do when they can't be written


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Vectors that batches read."""

    tables: Mapping[tuple[Modality, Side], VectorTable]

    def holds(self, modality: Modality) -> bool:
        """Return whether items of a kind are here, on either side."""
        return any(kind == modality for kind, _ in self.tables)

    def take(self, items: Sequence[Item], ids_N: NDArray[np.int64], side: Side) -> NDArray[np.float32]:
        """Return the vectors of items of the training records, of any kinds, (N, E)."""
        kinds = np.array([modality_of(item) for item in items])
        found = [(kinds == kind, self.tables[kind, side]) for kind in np.unique(kinds).tolist()]
        vectors_NE = np.empty((len(items), found[0][1].blocks[0].shape[1]), dtype=np.float32)
        for own, table in found:
            vectors_NE[own] = table.take(ids_N[own])
        return vectors_NE


def items_of(record: Record) -> tuple[Item, ...]:
    """Return the items of a record: its query, its positives, its negatives."""
    return (record.query, *record.positives, *record.negatives)


def _take(records: RecordTable, places_N2: NDArray[np.int64]) -> list[Item]:
    """Return the items at some places of the records."""
    rows, places = places_N2[:, 0], places_N2[:, 1].tolist()
    return [items_of(record)[place] for record, place in zip(records.take(rows), places, strict=True)]


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
