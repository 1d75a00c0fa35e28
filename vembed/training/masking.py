"""Count what the loss leaves out of a batch's negatives, from the identities alone: no queries x documents matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.batch import ContrastiveBatch


def count_masked(batch: ContrastiveBatch) -> int:
    """Return how many (query, document) pairs of a batch are false negatives that the loss masks.

    A document is masked for a query when it repeats the content of a positive of that query, or of an equal one, or the
    query itself; explicit positives aren't counted. Pairs are counted by content, times how often each content stands
    in the batch: what `false_negative_mask` marks, in O(P log P) for P positive pairs.
    """
    query_ids, query_rows, query_counts = _contents(batch.query_ids_Q)
    document_ids, document_rows, document_counts = _contents(batch.document_ids_D)
    positives_P2 = np.unique(batch.positives_P2, axis=0)
    known = np.stack([query_rows[positives_P2[:, 0]], document_rows[positives_P2[:, 1]]], axis=1)
    _, same_queries, same_documents = np.intersect1d(query_ids, document_ids, assume_unique=True, return_indices=True)
    itself = np.stack([same_queries, same_documents], axis=1)
    related = np.unique(np.concatenate([known, itself]), axis=0)
    return int((query_counts[related[:, 0]] * document_counts[related[:, 1]]).sum()) - len(positives_P2)


def _contents(ids_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct contents, which of them each row has, and how many rows have each."""
    contents, rows_N, counts = np.unique(ids_N, return_inverse=True, return_counts=True)
    return contents, rows_N.reshape(-1), counts
