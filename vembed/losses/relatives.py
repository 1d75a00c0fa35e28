"""Which queries, and which documents, belong together: they don't compete with each other.

Queries belong together that have one content or share a positive by content; documents that one query has, as positives
or hard negatives of its row, and with masks those of equal content. A batch in which one side stands for both says so
to a `CellMap`: what belongs together are its positives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.batch import ranges
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Pairs = NDArray[np.int64]
    """(left, right), sorted and without repeats, (N, 2)."""


def among_queries(structure: BatchStructure, *, masks: bool) -> BatchStructure:
    """Return a batch whose documents are its queries, and whose positives belong together.

    Args:
        masks: Whether a shared positive makes two queries belong together; each belongs to itself.
    """
    related_N2 = np.repeat(np.arange(structure.num_queries), 2).reshape(-1, 2)
    if masks:
        queries_P, documents_P = _numpy(structure.positives_P2).T
        contents_P = _numpy(structure.document_groups_D)[documents_P]
        shared_N2 = _joined(_pairs(queries_P, contents_P), _pairs(contents_P, queries_P))
        related_N2 = np.unique(np.concatenate([related_N2, shared_N2]), axis=0)
    return replace(
        _bare(structure, related_N2), document_ids_D=structure.query_ids_Q, document_groups_D=structure.query_groups_Q
    )


def among_documents(structure: BatchStructure) -> tuple[BatchStructure, NDArray[np.int64]]:
    """Return a batch whose queries are the documents that answer one, which belong to its positives, and these."""
    positives_P2 = _numpy(structure.positives_P2)
    owned_N2 = positives_P2
    if structure.negatives_P2 is not None:
        owned_N2 = np.concatenate([positives_P2, _numpy(structure.negatives_P2)])
    wanted_W, rows_P = np.unique(positives_P2[:, 1], return_inverse=True)
    related_N2 = _joined(_pairs(rows_P, positives_P2[:, 0]), _pairs(owned_N2[:, 0], owned_N2[:, 1]))
    groups_W = np.unique(_numpy(structure.document_groups_D)[wanted_W], return_inverse=True)[1]
    changed = replace(
        _bare(structure, related_N2),
        query_ids_Q=structure.document_ids_D.cpu()[torch.from_numpy(wanted_W)],
        query_groups_Q=torch.from_numpy(groups_W),
    )
    return changed, wanted_W


def _bare(structure: BatchStructure, positives_P2: Pairs) -> BatchStructure:
    """Return the identities of a batch with other positives and nothing else, on the CPU."""
    return BatchStructure(
        positives_P2=torch.from_numpy(positives_P2),
        query_ids_Q=structure.query_ids_Q.cpu(),
        document_ids_D=structure.document_ids_D.cpu(),
        query_groups_Q=structure.query_groups_Q.cpu(),
        document_groups_D=structure.document_groups_D.cpu(),
    )


def _pairs(left_N: NDArray[np.int64], right_N: NDArray[np.int64]) -> Pairs:
    return np.unique(np.stack([left_N, right_N], axis=1), axis=0)


def _joined(first: Pairs, second: Pairs) -> Pairs:
    """Return (a, c) for which some b has (a, b) and (b, c).

    Rows of one class have the same list of b, which is followed once: a class of n takes n squared steps.
    """
    lefts_A, starts_A, sizes_A = np.unique(first[:, 0], return_index=True, return_counts=True)
    places: dict[bytes, int] = {}
    lists = (first[start : start + size, 1].tobytes() for start, size in zip(starts_A, sizes_A, strict=True))
    of_each_A = np.array([places.setdefault(each, a) for a, each in enumerate(lists)], dtype=np.int64)
    models_M, model_of_A = np.unique(of_each_A, return_inverse=True)
    steps = ranges(starts_A[models_M], sizes_A[models_M])
    owner = np.repeat(np.arange(len(models_M)), sizes_A[models_M])
    begins, ends = (np.searchsorted(second[:, 0], first[steps, 1], side) for side in ("left", "right"))
    found = _pairs(np.repeat(owner, ends - begins), second[ranges(begins, ends - begins), 1])
    first_of_M, stop_of_M = (np.searchsorted(found[:, 0], np.arange(len(models_M)), side) for side in ("left", "right"))
    counts_A = (stop_of_M - first_of_M)[model_of_A]
    return np.stack([np.repeat(lefts_A, counts_A), found[ranges(first_of_M[model_of_A], counts_A), 1]], axis=1)


def _numpy(values: Tensor) -> NDArray[np.int64]:
    array: NDArray[np.int64] = values.cpu().numpy()
    return array
