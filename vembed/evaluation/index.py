"""Find the nearest documents of every query with FAISS, by inner product.

Vectors are taken as they come: cosine similarity is the inner product of vectors that the encoder has normalised.
Memory: the exact search reads the vectors where they lie; an index holds them again. Everything else is slices.
Shape legend: D documents, Q queries, E embedding dim, k hits per query.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from vembed.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SLICE_ROWS = 16_384
"""Rows checked or added at a time: 50 MB at 768 dimensions."""

TRAIN_ROWS = 262_144
"""Most rows that an index is trained on; FAISS itself samples 256 per cluster."""

SHOWN_ROWS = 5
"""Rows that an error names."""


def search(
    document_vectors_DE: NDArray[np.float32],
    query_vectors_QE: NDArray[np.float32],
    *,
    k: int,
    factory: str = "Flat",
    tie_ranks_D: NDArray[np.int64] | None = None,
    query_batch: int = 1024,
    poll: Callable[[], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the k documents with the largest inner product for each query, best first.

    Args:
        k: Hits per query; clipped to D.
        tie_ranks_D: With "Flat", see `ExactIndex`.
        poll: Called before each batch of queries; it may raise, e.g. `PreemptedError`.

    Returns:
        Scores (Q, k) float32 and document rows (Q, k) int64. An approximate index that finds fewer than k documents
        fills up with row -1.

    Raises:
        NonFiniteError: A vector holds NaN or infinity.
        ConfigError: FAISS can't build the index for these documents.
        ValueError: The shapes don't fit, or k or query_batch is below 1.
    """
    _check_shapes(document_vectors_DE, query_vectors_QE)
    if k < 1 or query_batch < 1:
        raise ValueError(f"k is {k} and query_batch is {query_batch}; both are at least 1.")
    check_finite(document_vectors_DE, "document")
    check_finite(query_vectors_QE, "query")
    exact = factory == "Flat"
    index = ExactIndex(document_vectors_DE, tie_ranks_D) if exact else build_index(document_vectors_DE, factory)
    return search_index(index, query_vectors_QE, k=k, query_batch=query_batch, poll=poll)


class ExactIndex:
    """Vectors that are searched as a "Flat" index searches its copy of them, bit for bit.

    Args:
        vectors_DE: In memory or mapped.
        tie_ranks_D: Which of equal scores at the cut are among the k best: those of the lowest ranks. None leaves it to
            FAISS, which follows no rule.
    """

    def __init__(self, vectors_DE: NDArray[np.float32], tie_ranks_D: NDArray[np.int64] | None = None) -> None:
        self._vectors_DE = np.ascontiguousarray(vectors_DE)
        self._tie_ranks_D = tie_ranks_D
        self.ntotal = len(vectors_DE)

    def search(self, queries_QE: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the k best vectors of each query."""
        more = int(self._tie_ranks_D is not None and k < self.ntotal)  # one score behind the cut tells of a tie there
        found: tuple[NDArray[np.float32], NDArray[np.int64]] = faiss.knn(
            queries_QE, self._vectors_DE, k + more, metric=faiss.METRIC_INNER_PRODUCT
        )
        if not more:
            return found
        scores_Qk, rows_Qk = found[0][:, :k], found[1][:, :k]
        for query in np.flatnonzero(found[0][:, k - 1] == found[0][:, k]).tolist():
            scores_Qk[query], rows_Qk[query] = self._ties_settled(queries_QE[query], k)
        return scores_Qk, rows_Qk

    def _ties_settled(self, query_E: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the k best of all vectors, (k,); of equal scores those of the lowest tie ranks."""
        assert self._tie_ranks_D is not None
        # Unlike a BLAS, einsum adds up every row in the same order, so that equal vectors have equal scores.
        scores_D = np.einsum("de,e->d", self._vectors_DE, query_E)
        last = np.partition(scores_D, -k)[-k]
        rows = np.flatnonzero(scores_D >= last)
        rows = rows[np.lexsort((self._tie_ranks_D[rows], -scores_D[rows]))[:k]]
        return scores_D[rows], rows


def search_index(
    index: Any,
    query_vectors: NDArray[Any],
    *,
    k: int,
    query_batch: int = 1024,
    poll: Callable[[], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the k best rows of a FAISS index for each query.

    Args:
        index: The index; a binary one gives distances instead of scores.

    Returns:
        Scores (Q, k) float32 and rows (Q, k) int64, -1 where fewer were found.
    """
    k = min(k, index.ntotal)
    num_queries = len(query_vectors)
    scores_Qk = np.empty((num_queries, k), dtype=np.float32)
    rows_Qk = np.empty((num_queries, k), dtype=np.int64)
    for start in range(0, num_queries, query_batch):
        if poll is not None:
            poll()
        part = slice(start, min(start + query_batch, num_queries))
        scores_Qk[part], rows_Qk[part] = index.search(query_vectors[part], k)
    return scores_Qk, rows_Qk


def build_index(vectors_DE: NDArray[np.float32], factory: str) -> Any:
    """Return a FAISS index of the vectors, row i under id i; they are read in slices.

    Args:
        factory: FAISS index string: "Flat" is exact, others ("HNSW32", "IVF64,Flat") are approximate and searched with
            FAISS's own defaults, or with what follows a colon ("IVF64,Flat:nprobe=8", "HNSW32:efSearch=128").

    Raises:
        ConfigError: FAISS can't build the index for these documents, or has no such search setting.
    """
    num_documents, dim = vectors_DE.shape
    try:
        index = _empty_index(factory, dim)
        if not index.is_trained:
            # Evenly spaced rows: the same at every run, and from all parts of a corpus that is sorted by topic.
            index.train(np.ascontiguousarray(vectors_DE[:: -(-num_documents // TRAIN_ROWS)]))
        for start in range(0, num_documents, SLICE_ROWS):
            index.add(vectors_DE[start : start + SLICE_ROWS])  # FAISS copies what isn't contiguous
    except RuntimeError as error:
        raise ConfigError(_unbuildable(factory, f"{num_documents} documents of {dim} dimensions", error)) from error
    return index


def new_index(factory: str, dim: int) -> Any:
    """Return an empty FAISS index.

    Raises:
        ConfigError: FAISS has no such index or search setting, or not for this dim.
    """
    try:
        return _empty_index(factory, dim)
    except RuntimeError as error:
        raise ConfigError(_unbuildable(factory, f"vectors of {dim} dimensions", error)) from error


def trained_clusters(index: str) -> tuple[int, int]:
    """Return the most inverted lists, and the most codes of a product quantizer, that an index string asks for."""
    factory = index.partition(":")[0]
    lists = max((int(number) for number in re.findall(r"IVF(\d+)", factory)), default=0)
    bits = [int(number or 8) for number in re.findall(r"PQ\d+(?:\+\d+)?(?:x(\d+))?", factory)]
    return lists, max((1 << min(bit, 32) for bit in bits), default=0)


def _empty_index(factory: str, dim: int) -> Any:
    """Return an empty index with its search settings."""
    name, _, search_settings = factory.partition(":")
    index = faiss.index_factory(dim, name, faiss.METRIC_INNER_PRODUCT)
    if search_settings:
        faiss.ParameterSpace().set_index_parameters(index, search_settings)  # type: ignore[arg-type]  # wrong stub
    return index


def _unbuildable(factory: str, what: str, error: RuntimeError) -> str:
    """Return the message about an index that FAISS refuses, its reason without the place in FAISS's code."""
    reason = str(error).rsplit(": ", 1)[-1]
    return (
        f"FAISS can't build the index {factory!r} for {what}: {reason}. "
        'Use "Flat" (exact), or e.g. "HNSW32" or "IVF64,Flat" for a large corpus.'
    )


def _check_shapes(documents_DE: NDArray[np.float32], queries_QE: NDArray[np.float32]) -> None:
    """Refuse arrays that aren't two tables of the same width, and an empty corpus."""
    if documents_DE.ndim != 2 or queries_QE.ndim != 2 or documents_DE.shape[1] != queries_QE.shape[1]:
        raise ValueError(
            f"document vectors have shape {documents_DE.shape} and query vectors {queries_QE.shape}; "
            "both are (rows, dim) with the same dim."
        )
    if documents_DE.size == 0:
        raise ValueError(f"document vectors have shape {documents_DE.shape}: there is nothing to search.")


def check_finite(vectors_NE: NDArray[np.float32], what: str) -> None:
    """Refuse NaN and infinity: FAISS would rank them somewhere, without a word.

    Args:
        what: "document" or "query", for the message.

    Raises:
        NonFiniteError: A vector holds NaN or infinity.
    """
    bad: list[int] = []
    for start in range(0, len(vectors_NE), SLICE_ROWS):
        finite_N = np.isfinite(vectors_NE[start : start + SLICE_ROWS]).all(axis=1)
        bad.extend((np.flatnonzero(~finite_N) + start).tolist())
    if bad:
        shown = ", ".join(str(row) for row in bad[:SHOWN_ROWS])
        more = ", ..." if len(bad) > SHOWN_ROWS else ""
        raise NonFiniteError(
            f"{len(bad)} of {len(vectors_NE)} {what} vectors hold NaN or infinity (rows {shown}{more}): the weights "
            "are damaged, or half precision overflowed. Encode in float32, or go back to an earlier checkpoint."
        )
