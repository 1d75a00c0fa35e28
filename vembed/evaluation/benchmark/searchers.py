"""Search vectors in one of their cheaper forms, and say what a document and a query cost there.

- dims: the first m numbers of each vector, brought back to unit length.
- int8 and binary: fewer bits for each number (`vembed.vectors.index`).
- rescored: more candidates than asked for, found in one of these forms and ranked by the full vectors.
- index: any FAISS index string.

Shape legend: D documents, Q queries, E embedding dim, k hits per query.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import faiss
import numpy as np

from vembed.batch import Ragged
from vembed.evaluation.evaluator import EXACT
from vembed.vectors.encode import rows_of
from vembed.vectors.index import ExactIndex, build_index, quantized_index, rescore, search_index, search_maxsim

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from vembed.evaluation.benchmark.variants import Variant
    from vembed.vectors.encode import Vectors

TIMED_QUERIES = 1000
"""Most queries that are timed: the slowest hundredth of them is still ten."""

LEAST_TIMED, TIMED_SECONDS = 100, 5.0
"""Behind so many queries the timing ends once it has taken so long: exact search of a million documents takes 0.1 s."""

WARM_UP_QUERIES = 5


class Timing(NamedTuple):
    """Milliseconds in which half, 95 and 99 of 100 queries were searched, and how many there were."""

    p50: float
    p95: float
    p99: float
    num_timed: int


@dataclass(frozen=True, slots=True)
class Searcher:
    """An index and what stands between it and the model's vectors."""

    index: Any  # FAISS index, float or binary, or an `ExactIndex`
    shortened: Callable[[NDArray[np.float32]], NDArray[np.float32]]  # keeps the dimensions that the index has
    bytes_per_document: float  # memory that the index takes for each document
    rescored: int  # candidates for each hit that are ranked by the full vectors; 0 for none
    documents_DE: NDArray[np.float32]  # the full vectors

    @property
    def rescoring_bytes(self) -> float:
        """Bytes of each document that rescoring reads, which may lie on disk."""
        return 4.0 * self.documents_DE.shape[1] if self.rescored else 0.0

    def search(
        self, query_vectors_QE: NDArray[np.float32], *, k: int, poll: Callable[[], None] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the k best documents, (Q, k) each; row -1 where fewer were found."""
        wanted = k * max(1, self.rescored)
        scores, rows = search_index(self.index, self.shortened(query_vectors_QE), k=wanted, poll=poll)
        if self.rescored:
            return rescore(self.documents_DE, query_vectors_QE, rows, k=min(k, len(self.documents_DE)))
        return scores, rows


@dataclass(frozen=True, slots=True)
class MaxSimSearcher:
    """The same for documents of several vectors each, compared by exact MaxSim."""

    documents: Ragged
    tie_ranks_D: NDArray[np.int64] | None = None  # as `search_maxsim` takes them
    rescoring_bytes: float = 0.0

    @property
    def bytes_per_document(self) -> float:
        """Memory that the vectors take for each document, on average."""
        return self.documents.values.nbytes / len(self.documents.lengths)

    def search(
        self, queries: Ragged, *, k: int, poll: Callable[[], None] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the k best documents, (Q, k) each."""
        return search_maxsim(self.documents, queries, k=k, tie_ranks_D=self.tie_ranks_D, poll=poll)


def time_queries(searcher: Any, queries: Vectors, *, k: int, poll: Callable[[], None] | None = None) -> Timing:
    """Time the search of single queries, drawn evenly, on one thread of FAISS and after some that warm it up."""
    count = len(queries.lengths) if isinstance(queries, Ragged) else len(queries)
    drawn = np.random.default_rng(0).permutation(count)[:TIMED_QUERIES]
    single = [rows_of(queries, drawn[place : place + 1]) for place in range(len(drawn))]
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    times: list[float] = []
    try:
        for query in single[:WARM_UP_QUERIES]:
            searcher.search(query, k=k)
        for query in single:
            if poll is not None:
                poll()
            if len(times) >= LEAST_TIMED and sum(times) > TIMED_SECONDS:
                break
            started = time.perf_counter()
            searcher.search(query, k=k)
            times.append(time.perf_counter() - started)
    finally:
        faiss.omp_set_num_threads(threads)
    p50, p95, p99 = (1000.0 * np.percentile(times, (50, 95, 99))).tolist()
    return Timing(p50, p95, p99, len(times))


def build_searcher(document_vectors_DE: Vectors, variant: Variant, tie_ranks_D: NDArray[np.int64] | None = None) -> Any:
    """Build the index of a variant.

    Args:
        tie_ranks_D: Of exact search: which of equal scores are kept at the cut, the lowest ranks first.

    Raises:
        ConfigError: FAISS can't build the index for these documents.
    """
    if isinstance(document_vectors_DE, Ragged):
        return MaxSimSearcher(document_vectors_DE, tie_ranks_D)
    dimension = variant.dimension

    def shortened(vectors_NE: NDArray[np.float32]) -> NDArray[np.float32]:
        return vectors_NE if dimension is None else truncated(vectors_NE, dimension)

    documents_DE = shortened(document_vectors_DE)
    dim = documents_DE.shape[1]
    if variant.precision != "float32":
        index = quantized_index(documents_DE, variant.precision)
        size = float(index.code_size)
    elif variant.index == EXACT:
        index, size = ExactIndex(documents_DE, tie_ranks_D), 4.0 * dim
    else:
        index = build_index(documents_DE, variant.index)
        size = _written_bytes(index) / len(documents_DE)
    return Searcher(index, shortened, size, variant.rescored, document_vectors_DE)


def truncated(vectors_NE: NDArray[np.float32], dimension: int) -> NDArray[np.float32]:
    """Return the first numbers of each vector, of unit length; a vector that is zero there stays zero."""
    kept_NM = vectors_NE[:, :dimension]
    norms_N1 = np.linalg.norm(kept_NM, axis=1, keepdims=True)
    return np.ascontiguousarray(kept_NM / np.maximum(norms_N1, np.finfo(np.float32).tiny), dtype=np.float32)


def _written_bytes(index: Any) -> int:
    """Return the size of an index as FAISS writes it, without holding a copy."""
    total = 0

    def count(part: bytes) -> int:
        nonlocal total
        total += len(part)
        return len(part)

    faiss.write_index(index, faiss.PyCallbackIOWriter(count))  # type: ignore[attr-defined]  # FAISS's stubs lack it
    return total
