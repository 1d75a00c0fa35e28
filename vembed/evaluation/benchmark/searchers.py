"""Search vectors in one of their cheaper forms, and say what a document and a query cost there.

- dims: the first m numbers of each vector, brought back to unit length.
- int8: each dimension of the documents has a scale, its largest absolute value in the corpus / 127; a number is stored
  as round(x / scale), -127 to 127. Queries stay float32; the score is the inner product with the restored numbers.
- binary: one bit for each dimension of queries and documents, 1 where the number is above 0; the score is
  E - 2 * Hamming distance, the inner product of the signs.
- index: any FAISS index string.

Shape legend: D documents, Q queries, E embedding dim, k hits per query.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from vembed.batch import Ragged
from vembed.evaluation.evaluator import EXACT
from vembed.evaluation.index import SLICE_ROWS, build_index, search_index
from vembed.evaluation.maxsim import search_maxsim

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from vembed.evaluation.benchmark.variants import Variant
    from vembed.evaluation.encode import Vectors

INT8_LARGEST = 127

TIMED_QUERIES = 100
"""Queries that are timed: a median over them is steady, and an exact search of a million documents takes seconds."""

WARM_UP_QUERIES = 5


@dataclass(frozen=True, slots=True)
class Searcher:
    """An index and what stands between it and the model's vectors."""

    index: Any  # FAISS index, float or binary
    prepare: Callable[[NDArray[np.float32]], NDArray[Any]]  # turns query vectors (Q, E) into what the index takes
    # turns what the index returns into scores, larger is better
    restore: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    bytes_per_document: float  # memory that the index takes for each document

    def search(
        self, query_vectors_QE: NDArray[np.float32], *, k: int, poll: Callable[[], None] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the k best documents, (Q, k) each; row -1 where fewer were found."""
        found_Qk, rows_Qk = search_index(self.index, self.prepare(query_vectors_QE), k=k, poll=poll)
        return self.restore(found_Qk), rows_Qk

    def median_milliseconds(
        self, query_vectors_QE: NDArray[np.float32], *, k: int, poll: Callable[[], None] | None = None
    ) -> tuple[float, int]:
        """Time the search of single queries on one thread.

        Args:
            query_vectors_QE: Query embeddings; evenly spaced ones of them are timed.

        Returns:
            Median wall time of one search in milliseconds, and how many queries it is over.
        """
        step = max(1, len(query_vectors_QE) // TIMED_QUERIES)
        prepared = self.prepare(np.ascontiguousarray(query_vectors_QE[::step][:TIMED_QUERIES]))
        k = min(k, self.index.ntotal)
        return _median_milliseconds(lambda row: self.index.search(prepared[row : row + 1], k), len(prepared), poll=poll)


@dataclass(frozen=True, slots=True)
class MaxSimSearcher:
    """The same for documents of several vectors each, compared by exact MaxSim."""

    documents: Ragged

    @property
    def bytes_per_document(self) -> float:
        """Memory that the vectors take for each document, on average."""
        return self.documents.values.nbytes / len(self.documents.lengths)

    def search(
        self, queries: Ragged, *, k: int, poll: Callable[[], None] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the k best documents, (Q, k) each."""
        return search_maxsim(self.documents, queries, k=k, poll=poll)

    def median_milliseconds(
        self, queries: Ragged, *, k: int, poll: Callable[[], None] | None = None
    ) -> tuple[float, int]:
        """Time the search of single queries, as `Searcher.median_milliseconds` does."""
        step = max(1, len(queries.lengths) // TIMED_QUERIES)
        rows = np.arange(len(queries.lengths))[::step][:TIMED_QUERIES]
        single = [queries.take(rows[place : place + 1]) for place in range(len(rows))]
        return _median_milliseconds(lambda row: self.search(single[row], k=k), len(rows), poll=poll)


def _median_milliseconds(
    search: Callable[[int], object], count: int, *, poll: Callable[[], None] | None
) -> tuple[float, int]:
    """Return the median time of searching each of some queries alone, on one thread of FAISS, and how many they are."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    times = []
    try:
        for row in range(min(WARM_UP_QUERIES, count)):
            search(row)
        for row in range(count):
            if poll is not None:
                poll()
            started = time.perf_counter()
            search(row)
            times.append(time.perf_counter() - started)
    finally:
        faiss.omp_set_num_threads(threads)
    return 1000.0 * median(times), len(times)


def build_searcher(document_vectors_DE: Vectors, variant: Variant) -> Any:
    """Build the index of a variant.

    Raises:
        ConfigError: FAISS can't build the index for these documents.
    """
    if isinstance(document_vectors_DE, Ragged):
        return MaxSimSearcher(document_vectors_DE)
    dimension = variant.dimension

    def shortened(vectors_NE: NDArray[np.float32]) -> NDArray[np.float32]:
        return vectors_NE if dimension is None else truncated(vectors_NE, dimension)

    documents_DE = shortened(document_vectors_DE)
    if variant.precision == "int8":
        return _int8_searcher(documents_DE, shortened)
    if variant.precision == "binary":
        return _binary_searcher(documents_DE, shortened)
    index = build_index((documents_DE,), variant.index)
    size = 4.0 * documents_DE.shape[1] if variant.index == EXACT else _written_bytes(index) / len(documents_DE)
    return Searcher(index, shortened, lambda scores: scores, size)


def truncated(vectors_NE: NDArray[np.float32], dimension: int) -> NDArray[np.float32]:
    """Return the first numbers of each vector, of unit length; a vector that is zero there stays zero."""
    kept_NM = vectors_NE[:, :dimension]
    norms_N1 = np.linalg.norm(kept_NM, axis=1, keepdims=True)
    return np.ascontiguousarray(kept_NM / np.maximum(norms_N1, np.finfo(np.float32).tiny), dtype=np.float32)


def int8_scales(documents_DE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what one step of each dimension stands for, (E,); 1 for a dimension that is zero in every document."""
    largest_E = np.maximum(documents_DE.max(axis=0), -documents_DE.min(axis=0)) / np.float32(INT8_LARGEST)
    return np.where(largest_E > 0, largest_E, 1).astype(np.float32)


def int8_codes(vectors_NE: NDArray[np.float32], scales_E: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return the stored numbers, -127 to 127, (N, E)."""
    steps_NE: NDArray[np.float32] = np.rint(vectors_NE / scales_E)
    return np.clip(steps_NE, -INT8_LARGEST, INT8_LARGEST).astype(np.int8)


def sign_bits(vectors_NE: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return one bit for each dimension, 8 to a byte, (N, ceil(E / 8)); the last byte is filled up with zeros."""
    return np.packbits(vectors_NE > 0, axis=1)


def _int8_searcher(
    documents_DE: NDArray[np.float32], shortened: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> Searcher:
    """Build an index of one byte for each number, restored by FAISS when it is scored.

    FAISS restores byte b of a dimension as low + (b + 1/2) / 255 * span; with low = -127.5 steps and span = 255 steps
    that is b - 127 steps. Its type of signed bytes would round the query to whole numbers too.
    """
    dim = documents_DE.shape[1]
    scales_E = int8_scales(documents_DE)
    index = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.concatenate([-127.5 * scales_E, 255 * scales_E]), index.sq.trained)
    index.is_trained = True
    for start in range(0, len(documents_DE), SLICE_ROWS):
        index.add(int8_codes(documents_DE[start : start + SLICE_ROWS], scales_E) * scales_E)
    return Searcher(index, shortened, lambda scores: scores, float(dim))


def _binary_searcher(
    documents_DE: NDArray[np.float32], shortened: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> Searcher:
    """Build an index of one bit for each number. The bits that fill up a byte are equal everywhere and never count."""
    dim = documents_DE.shape[1]
    size = -(-dim // 8)
    index = faiss.IndexBinaryFlat(8 * size)
    for start in range(0, len(documents_DE), SLICE_ROWS):
        index.add(sign_bits(documents_DE[start : start + SLICE_ROWS]))
    return Searcher(
        index, lambda queries_QE: sign_bits(shortened(queries_QE)), lambda distances: dim - 2 * distances, float(size)
    )


def _written_bytes(index: Any) -> int:
    """Return the size of an index as FAISS writes it, without holding a copy."""
    total = 0

    def count(part: bytes) -> int:
        nonlocal total
        total += len(part)
        return len(part)

    faiss.write_index(index, faiss.PyCallbackIOWriter(count))  # type: ignore[attr-defined]  # FAISS's stubs lack it
    return total
