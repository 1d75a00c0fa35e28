"""How much each query and document counts in a mean: the weights of rows, as shares that add up to 1.

A query's terms are multiplied by its row's weight, and what was a mean is a sum over the sum of the weights. A document
that is some query's positive counts as the mean of those queries does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure


def query_shares(structure: BatchStructure) -> Tensor:
    """Return the share of each query, (Q,) float64; zeros where no row of the batch counts."""
    return _shares(_weights(structure))


def document_shares(structure: BatchStructure) -> Tensor:
    """Return the share of each document among those that are some query's positive, (D,) float64."""
    queries_P, documents_P = torch.unique(structure.positives_P2, dim=0).unbind(dim=1)
    weights_P = _weights(structure)[queries_P]
    sums_D = weights_P.new_zeros(structure.num_documents).index_add_(0, documents_P, weights_P)
    counts_D = torch.bincount(documents_P, minlength=structure.num_documents)
    return _shares(sums_D / counts_D.clamp_min(1))


def positive_counts(structure: BatchStructure) -> tuple[Tensor, Tensor]:
    """Return how many positives each query has, and how many queries each document answers, float64."""
    queries_P, documents_P = torch.unique(structure.positives_P2, dim=0).unbind(dim=1)
    sides = ((queries_P, structure.num_queries), (documents_P, structure.num_documents))
    of_queries, of_documents = (torch.bincount(rows_P, minlength=count).double() for rows_P, count in sides)
    return of_queries, of_documents


def relative_weights(structure: BatchStructure) -> Tensor:
    """Return the weight of each query over their mean, (Q,) float64."""
    return query_shares(structure) * structure.num_queries


def share_of(structure: BatchStructure, queries: range) -> float:
    """Return the share of some queries together."""
    if structure.weights_Q is None:
        return len(queries) / structure.num_queries
    return query_shares(structure)[queries.start : queries.stop].sum().item()


def _weights(structure: BatchStructure) -> Tensor:
    if structure.weights_Q is not None:
        return structure.weights_Q
    return torch.ones(structure.num_queries, dtype=torch.float64, device=structure.positives_P2.device)


def _shares(weights_N: Tensor) -> Tensor:
    total = weights_N.sum()
    return weights_N / torch.where(total > 0, total, 1.0)
