"""What every loss sees: embeddings, and the structure of the batch as tensors.

Shape legend: Q queries, D documents, E embedding dim, P (query, positive document) pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vembed.batch import ContrastiveBatch


@dataclass(frozen=True, slots=True)
class BatchStructure:
    """Who is whose positive, and which rows are the same thing.

    Attributes:
        positives_P2: Pairs (query row, document row), int64.
        query_ids_Q: Identity of each query's content, int64.
        document_ids_D: Identity of each document's content, int64.
        query_groups_Q: The same identities numbered 0, 1, ...: rows with equal content share a number.
        document_groups_D: Likewise for documents.
    """

    positives_P2: Tensor
    query_ids_Q: Tensor
    document_ids_D: Tensor
    query_groups_Q: Tensor
    document_groups_D: Tensor

    @classmethod
    def of(cls, batch: ContrastiveBatch, device: torch.device | None = None) -> BatchStructure:
        """Move a batch's structure to a device."""
        arrays = (
            batch.positives_P2,
            batch.query_ids_Q,
            batch.document_ids_D,
            np.unique(batch.query_ids_Q, return_inverse=True)[1],
            np.unique(batch.document_ids_D, return_inverse=True)[1],
        )
        return cls(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))

    @property
    def num_queries(self) -> int:
        """Q."""
        return len(self.query_ids_Q)

    @property
    def num_documents(self) -> int:
        """D."""
        return len(self.document_ids_D)


class ContrastiveLoss(nn.Module, ABC):
    """A loss over the embeddings of a whole batch, with or without parameters of its own."""

    @abstractmethod
    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss of the batch.

        Args:
            q_QE: Query embeddings (Q, E), at least float32.
            d_DE: Document embeddings (D, E), at least float32.
            structure: Positives and identities.

        Returns:
            A scalar, the mean over what the loss averages.
        """

    def constrain(self) -> None:
        """Bring the loss's own parameters back into their bounds; called after each optimizer step."""

    @property
    def temperature(self) -> float | None:
        """The present temperature, for logs; None where the loss has none."""
        return None
