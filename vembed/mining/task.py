"""What is mined from: the distinct queries and documents of the records, and what each query must not get.

Two texts or pictures of one content are one item, wherever they stand. Rows of one query share their positives: what
answers it in any row is never a negative in another.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import Ragged, modality_of
from vembed.data.table_writer import ItemWriter
from vembed.errors import DataError
from vembed.vectors.items import DistinctItems

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.table import ItemTable, RecordTable
    from vembed.models.encoder import Encoder
    from vembed.models.st_library import CrossEncoder

BLOCK_ITEMS = 8192
"""Documents of a corpus that are Python objects at a time."""


@dataclass(frozen=True, eq=False)
class MiningTask:
    """Queries, documents, and which of them belong together."""

    queries: DistinctItems  # U
    documents: DistinctItems  # D: of all rows and of the corpus
    query_of_record_N: NDArray[np.int64]
    positives: Ragged  # rows of the documents that answer each query, ascending
    excluded: Ragged  # rows that no query gets: its positives, its given negatives, itself

    @classmethod
    def of(cls, records: RecordTable, corpus: ItemTable | None = None) -> MiningTask:
        """Gather what is mined from.

        Args:
            corpus: Further documents.

        Raises:
            DataError: The rows have classes.
            ImageError: A picture can't be read.
        """
        items = records.items
        (_, query_numbers), positives, negatives = (
            records.numbers(column) for column in ("query", "positives", "negatives")
        )
        queries, documents = DistinctItems.of([(items, query_numbers)]), documents_to_mine(records, corpus)
        query_of_record = queries.rows_of(items.ids[query_numbers])

        def pairs(column: tuple[NDArray[np.int64], NDArray[np.int64]]) -> NDArray[np.int64]:
            at, numbers = column
            return np.stack([query_of_record[at], documents.rows_of(items.ids[numbers])])

        itself = np.stack([np.arange(len(queries)), documents.rows_of(queries.ids)])
        known = np.concatenate([pairs(positives), pairs(negatives), itself[:, itself[1] >= 0]], axis=1)
        return cls(
            queries,
            documents,
            query_of_record,
            _grouped(pairs(positives), len(queries), len(documents)),
            _grouped(known, len(queries), len(documents)),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over everything."""
        total = hashlib.sha256(f"{self.queries.digest} {self.documents.digest}".encode())
        for part in (self.positives, self.excluded):
            total.update(part.offsets.astype("<i8").tobytes())
            total.update(part.values.astype("<i8").tobytes())
        return total.hexdigest()

    def require(self, encoder: Encoder | CrossEncoder) -> None:
        """Refuse items that a model has no tower for.

        Raises:
            DataError: With what they are.
        """
        self.queries.require(encoder)
        self.documents.require(encoder)


def documents_to_mine(records: RecordTable, corpus: ItemTable | None) -> DistinctItems:
    """Return the documents of all rows and of the corpus.

    Raises:
        DataError: The rows have classes.
        ImageError: A picture can't be read.
    """
    if records.has_classes:
        raise DataError(
            "rows of one class answer each other's queries, so that mining would take right answers for hard "
            "negatives: leave the classes out (column_mapping: {label: null}), or don't mine"
        )
    parts = [(records.items, np.concatenate([records.numbers("positives")[1], records.numbers("negatives")[1]]))]
    if corpus is not None:
        parts.append((corpus, np.arange(len(corpus))))
    return DistinctItems.of(parts)


def corpus_items(items: Iterable[Item]) -> ItemTable:
    """Collect the documents of a corpus; those without a text are left out."""
    writer = ItemWriter()
    wanted = (item for item in items if modality_of(item) != "text" or str(item).strip())
    while block := list(islice(wanted, BLOCK_ITEMS)):
        writer.numbers(block)
    return writer.finish()


def _grouped(pairs_2P: NDArray[np.int64], num_groups: int, num_values: int) -> Ragged:
    """Return the distinct second numbers of each first number, ascending."""
    keys = np.unique(pairs_2P[0] * num_values + pairs_2P[1])
    firsts, seconds = np.divmod(keys, num_values)
    return Ragged(seconds, np.searchsorted(firsts, np.arange(num_groups + 1)))
