"""What batches of hard negatives are chosen by: a vector of each training row, as a model sees it.

A row's vector is the sum of those of its query and of its first positive, each of unit length. The starting model's are
encoded before step 1, whatever step a run continues from, and kept on disk for as long as the run is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import MODALITY_WORDS
from vembed.data.clusters import BLOCK_ROWS, TINY, whole_numbers
from vembed.errors import ConfigError
from vembed.text import every
from vembed.vectors.items import ItemVectors, StoredSide, distinct_items
from vembed.vectors.provenance import model_key

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Side
    from vembed.data.table import ItemColumn, RecordTable
    from vembed.models.encoder import Encoder
    from vembed.vectors.encode import ItemEncoder

COLUMNS: tuple[tuple[Side, ItemColumn], ...] = (("query", "query"), ("document", "positives"))


@dataclass(frozen=True, slots=True)
class HardVectors:
    """The items that are encoded."""

    sides: tuple[StoredSide, ...]
    records: RecordTable

    @classmethod
    def of(cls, encoder: Encoder, records: RecordTable, folder: Path, *, precision: str) -> HardVectors:
        """Collect the distinct queries and positives; all ranks call it while the encoder is as it was loaded.

        Raises:
            ConfigError: The encoder gives several vectors for a row.
        """
        if encoder.multi_vector:
            raise ConfigError(
                f"batch_sampling hard compares one vector of each row, and {encoder.name} gives several; set "
                f"batch_sampling to random or no_duplicates"
            )
        items = distinct_items(records, [column for _, column in COLUMNS])
        words = {"what": "vectors that hard batches are chosen by", "advice": "set batch_sampling to random"}
        key = {**model_key(encoder), "precision": precision}
        return cls(tuple(StoredSide.of(part, encoder, key, folder, **words) for part in items), records)

    @property
    def num_bytes(self) -> int:
        """What the vectors take on disk."""
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
        """Return the vector of each row, from disk where it is known, else encoded now, on all ranks.

        Raises:
            DataError: A picture can't be read any more.
            MachineError: The vectors can't be written.
            NonFiniteError: A vector holds NaN or infinity.
        """
        stored = ItemVectors.get(self.sides, lambda: encode, encode.ranks)
        rows_NE = np.zeros((len(self.records), encode.encoder.dimension), dtype=np.int16)
        numbers = {side: _first_items(self.records, column) for side, column in COLUMNS}
        for start in range(0, len(rows_NE), BLOCK_ROWS):
            sums = np.zeros((len(rows_NE[start : start + BLOCK_ROWS]), rows_NE.shape[1]), dtype=np.float32)
            for side, _ in COLUMNS:
                rows, items = numbers[side]
                first, last = np.searchsorted(rows, [start, start + BLOCK_ROWS])
                self._add(sums, rows[first:last] - start, items[first:last], side, stored)
            rows_NE[start : start + BLOCK_ROWS] = whole_numbers(sums)
        return rows_NE

    def _add(
        self,
        sums: NDArray[np.float32],
        rows: NDArray[np.int64],
        items: NDArray[np.int64],
        side: Side,
        stored: ItemVectors,
    ) -> None:
        """Add the vectors of items of one side to those of their rows, by kind."""
        modalities = self.records.items.modalities[items]
        for number, modality in enumerate(MODALITY_WORDS):
            own = modalities == number
            if own.any():
                vectors = stored.of_kind(modality, side, self.records.items.ids[items[own]])
                lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
                sums[rows[own]] += vectors / np.maximum(lengths, TINY)


def _first_items(records: RecordTable, column: ItemColumn) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows that have an item in a column, and the number of the first one of each."""
    rows, items = records.numbers(column)
    rows, first = np.unique(rows, return_index=True)
    return rows, items[first]
