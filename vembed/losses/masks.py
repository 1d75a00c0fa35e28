"""Which cells of the similarity matrix are positives, and which say nothing.

A document that repeats the content of a query's positive, or of a positive of another row with the same query, is no
negative for that query: pushing it away would push the positive away. The same holds for a document that repeats the
query itself. Identity is by content, since embeddings of equal texts differ under dropout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure


def positive_mask(structure: BatchStructure) -> Tensor:
    """Return which document is an explicit positive of which query, bool (Q, D)."""
    positives_P2 = structure.positives_P2
    mask_QD = torch.zeros(structure.num_queries, structure.num_documents, dtype=torch.bool, device=positives_P2.device)
    mask_QD[positives_P2[:, 0], positives_P2[:, 1]] = True
    return mask_QD


def named_mask(structure: BatchStructure) -> Tensor:
    """Return which document is a hard negative of which query's own row, bool (Q, D)."""
    shape, device = (structure.num_queries, structure.num_documents), structure.positives_P2.device
    mask_QD = torch.zeros(shape, dtype=torch.bool, device=device)
    if structure.negatives_P2 is not None:
        mask_QD[structure.negatives_P2.unbind(dim=1)] = True
    return mask_QD


def false_negative_mask(structure: BatchStructure, positive_QD: Tensor) -> Tensor:
    """Return which cells must count neither as positive nor as negative, bool (Q, D)."""
    query_groups_Q, document_groups_D = structure.query_groups_Q, structure.document_groups_D
    known = torch.zeros(
        structure.num_queries, structure.num_documents, dtype=torch.bool, device=positive_QD.device
    )  # (query group, document group): no more groups than rows
    pair_queries, pair_documents = structure.positives_P2.unbind(dim=1)
    known[query_groups_Q[pair_queries], document_groups_D[pair_documents]] = True
    relevant_QD = known[query_groups_Q][:, document_groups_D]
    itself_QD = structure.query_ids_Q[:, None] == structure.document_ids_D[None, :]
    return (relevant_QD | itself_QD) & ~positive_QD
