"""Vectors of the items of the training records, each item encoded once, before the first step.

1. `distinct_items` finds the distinct items, by kind and side.
2. `StoredSide.encoded` encodes those that no file holds yet, on all ranks, block after block (`VectorStore`).
3. `StoredVectors` is what batches read: files that are mapped into memory.

A file is true while the weights, the model's settings, what tokenizer or image processor make of a probe, the side and
the precision are those of its key. Items are known by `content_id`: what looks the same is one item.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, get_args

import numpy as np

from vembed.batch import MODALITY_WORDS, Composed, Image, Modality, Side, modality_of
from vembed.data.records import ItemColumn
from vembed.evaluation.index import check_finite
from vembed.evaluation.provenance import features_digest
from vembed.evaluation.vector_store import VectorStore
from vembed.models.probe import any_picture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.item_table import ItemTable
    from vembed.data.records import RecordTable
    from vembed.distributed.ranks import Ranks
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


@dataclass(frozen=True, slots=True)
class DistinctItems:
    """The distinct items of one kind and side among records."""

    modality: Modality
    side: Side
    ids_U: NDArray[np.int64]  # their identities, ascending
    numbers_U: NDArray[np.int64]  # of each, in `items`
    num_uses: int  # how many items there are, repeated ones counted again
    items: ItemTable

    @property
    def counted(self) -> str:
        """How many there are, e.g. "6 pictures (document)"."""
        return f"{len(self.ids_U)} {MODALITY_WORDS[self.modality][1]} ({self.side})"

    def sample(self, count: int) -> list[Item]:
        """Return some of the items, at most so many."""
        return self.items.at(self.numbers_U[:: max(1, -(-len(self.numbers_U) // count))])


def distinct_items(records: RecordTable, columns: Sequence[ItemColumn] = get_args(ItemColumn)) -> list[DistinctItems]:
    """Return the distinct items of some columns of records, the first of them queries, by kind and side."""
    queries, *documents = (records.numbers(column)[1] for column in columns)
    sides: dict[Side, NDArray[np.int64]] = {"query": queries, "document": np.concatenate(documents)}
    table, found = records.items, []
    for modality in sorted(MODALITY_WORDS):
        place = tuple(MODALITY_WORDS).index(modality)
        for side, numbers in sides.items():
            own = numbers[table.modalities[numbers] == place]
            if len(own):
                ids_U, first_U = np.unique(table.ids[own], return_index=True)
                found.append(DistinctItems(modality, side, ids_U, own[first_U], len(own), table))
    return found


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where vectors are kept, and how messages speak of them."""

    folder: Path
    what: str  # "embeddings of a frozen tower"
    advice: str  # what else the user can do when they can't be written


@dataclass(frozen=True, slots=True)
class StoredSide:
    """The distinct items of one kind and side, and where their vectors are kept."""

    items: DistinctItems
    dimension: int  # E
    store: VectorStore

    @classmethod
    def of(cls, items: DistinctItems, encoder: Encoder, key: Key, place: StorePlace) -> StoredSide:
        """Return the items as an encoder will encode them.

        Args:
            encoder: It may be without its weights.
            key: The model and its precision.
        """
        with any_picture(encoder):
            preprocessing = features_digest(encoder, _probes(items.modality), items.side)
        store = VectorStore(
            place.folder,
            f"{items.modality.replace('+', '-')}-{items.side}",
            {**key, "preprocessing": preprocessing, "side": items.side},
            f"{place.what} of {MODALITY_WORDS[items.modality][1]} ({items.side})",
            place.advice,
        )
        return cls(items, encoder.dimension, store)

    @property
    def num_bytes(self) -> int:
        """Size of the vectors."""
        return 4 * len(self.items.ids_U) * self.dimension

    def encoded(self, encoder: Callable[[], ItemEncoder], ranks: Ranks) -> VectorTable:
        """Return the vectors, from disk where they are still true, else encoded now.

        Args:
            encoder: Returns what encodes them, on all ranks; called where something is to be encoded.

        Raises:
            DataError: A picture can't be read any more.
            MachineError: The vectors can't be written.
            NonFiniteError: A vector holds NaN or infinity.
        """
        side, truncated = self.items.side, 0

        def make(rows: NDArray[np.int64]) -> NDArray[np.float32]:
            nonlocal truncated
            encode = encoder()
            before = encode.num_truncated[side]
            vectors_NE = encode.table(self.items.items.at(self.items.numbers_U[rows]), side)
            truncated += encode.num_truncated[side] - before
            if ranks.is_first:  # the others have no vectors
                check_finite(vectors_NE, side)
            return vectors_NE

        table = self.store.table(self.items.ids_U, self.dimension, make, ranks)
        num_truncated = sum(ranks.gather_objects(truncated))
        if num_truncated:
            _log.info("%s: %d were longer than the model takes and were cut", self.store.what, num_truncated)
        return table


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
