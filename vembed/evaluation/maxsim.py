"""Find the nearest documents where rows have several vectors: exact MaxSim over the whole corpus.

    score(q, d) = sum over the vectors of q of the largest inner product with a vector of d

The corpus is swept once in blocks of whole documents for a batch of queries, so that memory is one block of products
and k hits per query, whatever the size of the corpus. Among equal scores documents are kept by their tie ranks.

Source: Khattab & Zaharia, 2020, "ColBERT".
Shape legend: Q queries, D documents, k hits per query, V and W vectors of a batch of queries and a block of documents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.index import check_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from vembed.batch import Ragged

QUERY_VECTORS = 1024
DOCUMENT_VECTORS = 4096
"""Vectors multiplied at a time: 16 MiB of products, which malloc reuses. A row with more is a block of its own."""

MERGED_DOCUMENTS = 2048
"""Documents whose scores wait to be sorted together: with many hits wanted, sorting after each block takes long."""


def search_maxsim(
    documents: Ragged,
    queries: Ragged,
    *,
    k: int,
    tie_ranks_D: NDArray[np.int64] | None = None,
    poll: Callable[[], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the k documents with the largest MaxSim score for each query, best first.

    Args:
        documents: Vectors of each document, values (all vectors, E), at least one vector a row.
        tie_ranks_D: Of equal scores the document of the lowest rank stands first; None: that of the first row.

    Returns:
        Scores (Q, k) float32 and document rows (Q, k) int64.

    Raises:
        NonFiniteError: A vector holds NaN or infinity.
        ValueError: A row has no vector, or k is below 1.
    """
    for side, rows in (("document", documents), ("query", queries)):
        if (rows.lengths == 0).any():
            raise ValueError(f"{side} row {int(np.argmin(rows.lengths))} has no vector: each has at least one.")
        check_finite(rows.values, side)
    num_queries, num_documents = len(queries.lengths), len(documents.lengths)
    if k < 1 or num_documents == 0:
        raise ValueError(f"k is {k} and there are {num_documents} documents; both are at least 1.")
    k = min(k, num_documents)
    tie_ranks_D = np.arange(num_documents) if tie_ranks_D is None else tie_ranks_D
    scores_Qk = np.empty((num_queries, k), dtype=np.float32)
    rows_Qk = np.empty((num_queries, k), dtype=np.int64)
    for batch in _blocks(queries, QUERY_VECTORS):
        if poll is not None:
            poll()
        best = np.empty((batch.stop - batch.start, 0), dtype=np.float32)
        found_rows, waiting, first = np.empty(best.shape, dtype=np.int64), [], 0
        for block in _blocks(documents, DOCUMENT_VECTORS):
            waiting.append(_scores(queries, batch, documents, block))
            if block.stop - first < MERGED_DOCUMENTS and block.stop < num_documents:
                continue
            best = np.concatenate([best, *waiting], axis=1)
            numbers = np.broadcast_to(np.arange(first, block.stop), (len(best), block.stop - first))
            found_rows, waiting, first = np.concatenate([found_rows, numbers], axis=1), [], block.stop
            order = np.lexsort((tie_ranks_D[found_rows], -best), axis=1)[:, :k]
            best = np.take_along_axis(best, order, axis=1)
            found_rows = np.take_along_axis(found_rows, order, axis=1)
        scores_Qk[batch], rows_Qk[batch] = best, found_rows
    return scores_Qk, rows_Qk


def _blocks(rows: Ragged, most_vectors: int) -> Iterator[slice]:
    """Yield slices of rows that hold at most so many vectors together, and at least one row."""
    start, num_rows = 0, len(rows.lengths)
    while start < num_rows:
        stop = int(np.searchsorted(rows.offsets, rows.offsets[start] + most_vectors, side="right")) - 1
        stop = max(start + 1, min(stop, num_rows))
        yield slice(start, stop)
        start = stop


def _scores(queries: Ragged, batch: slice, documents: Ragged, block: slice) -> NDArray[np.float32]:
    """Return the scores of a block of documents for a batch of queries, (queries, documents)."""
    q_VE, q_starts = _part(queries, batch)
    d_WE, d_starts = _part(documents, block)
    largest_VD = np.maximum.reduceat(q_VE @ d_WE.T, d_starts, axis=1)
    scores: NDArray[np.float32] = np.add.reduceat(largest_VD, q_starts, axis=0)
    return scores


def _part(rows: Ragged, part: slice) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the vectors of some rows, and where each row's begin among them."""
    first, last = rows.offsets[part.start], rows.offsets[part.stop]
    return rows.values[first:last], rows.offsets[part] - first
