"""An index with the model for its queries: what `open_index` returns and the commands ask."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import Ragged
from vembed.data.python_inputs import items_of, refuse_other_modalities
from vembed.vectors.encode import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vembed.batch import ImageLimits, Modality
    from vembed.data.python_inputs import ItemInput
    from vembed.evaluation.benchmark.searchers import Timing
    from vembed.vectors.encode import ItemEncoder, Vectors
    from vembed.workflows.search.index import Hit, SearchIndex

NUM_EXAMPLES = 3
LOOKED_AT = 12
"""Documents from which each example is chosen: one whose text is short enough to be shown whole, where there is one."""

EXAMPLE_CHARACTERS = 60


class Searcher:
    """An index with the model for its queries. Several threads may ask it."""

    def __init__(self, index: SearchIndex, encode: ItemEncoder, limits: ImageLimits) -> None:
        self.index = index
        self.limits = limits
        self._encode = encode
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.index)

    @property
    def takes(self) -> frozenset[Modality]:
        """What may be searched with: texts, pictures, or a picture with a text."""
        return self._encode.encoder.modalities

    def search(self, queries: Iterable[ItemInput], k: int = 10) -> list[list[Hit]]:
        """Return the best documents of each query, best first.

        Args:
            queries: Texts (str), or pictures as `EmbeddingModel.encode` takes them.

        Raises:
            DataError: A picture can't be used, or the model has no tower for a query.
            TypeError: A query is neither a text nor a picture.
        """
        return self.index.search(self._encoded(queries), k)

    def latency(self, queries: Iterable[ItemInput], k: int = 10) -> Timing:
        """Time the search of single queries as `vembed evaluate` does: on one thread, without encoding them.

        Few queries are searched again, until there are enough times for percentiles.

        Raises:
            DataError: As in `search`.
            TypeError: As in `search`.
            ValueError: There is no query.
        """
        from vembed.evaluation.benchmark.searchers import LEAST_TIMED, time_queries  # imports what a search never needs

        vectors = self._encoded(queries)
        count = len(vectors.lengths) if isinstance(vectors, Ragged) else len(vectors)
        if not count:
            raise ValueError("latency takes at least one query.")
        return time_queries(self.index, rows_of(vectors, np.resize(np.arange(count), max(count, LEAST_TIMED))), k=k)

    def _encoded(self, queries: Iterable[ItemInput]) -> Vectors:
        items = items_of(queries, self.limits)
        refuse_other_modalities(items, self.takes, self._encode.encoder.name)
        with self._lock:  # an encoder serves one call at a time
            return self._encode(items, "query")

    def like(self, row: int, k: int = 10) -> list[Hit]:
        """Return the documents that are nearest to a document, itself among them."""
        vector = self.index.vector(row)
        several = vector.ndim == 2
        (hits,) = self.index.search(Ragged(vector, np.array([0, len(vector)])) if several else vector[None], k)
        return hits

    def example_rows(self) -> list[int]:
        """Return a few documents from all over the corpus, the same for the same index."""
        step = max(1, len(self) // NUM_EXAMPLES)
        return list(range(step // 2, len(self), step))[:NUM_EXAMPLES]

    def example_queries(self) -> list[str]:
        """Return beginnings of texts and captions that a first query may be; none where the model takes no texts."""
        if "text" not in self.takes:
            return []
        examples: dict[str, None] = {}  # an ordered set
        for first in self.example_rows():
            rows = range(first, min(first + LOOKED_AT, len(self)))
            lines = [line for row in rows if (line := _line(self.index.document(row).text))]
            new = [line for line in lines if line not in examples]
            whole = next((line for line in new if len(line) <= EXAMPLE_CHARACTERS), None)
            if new:
                examples[whole or _beginning(new[0])] = None
        return list(examples)


def _line(text: str) -> str:
    """Return a text on one line; of a long one no more than is looked at."""
    return " ".join(text[: 8 * EXAMPLE_CHARACTERS].split())


def _beginning(line: str) -> str:
    """Return the first words of a line that is too long."""
    cut = line[:EXAMPLE_CHARACTERS]
    return (cut.rpartition(" ")[0] or cut).rstrip(" ,;:.-")
