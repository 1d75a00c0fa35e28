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
    from numpy.typing import NDArray

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

    def to(self, device: torch.device) -> BatchStructure:
        """Return the same on a device."""
        tensors = (
            self.positives_P2,
            self.query_ids_Q,
            self.document_ids_D,
            self.query_groups_Q,
            self.document_groups_D,
        )
        return BatchStructure(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    @property
    def num_queries(self) -> int:
        """Q."""
        return len(self.query_ids_Q)

    @property
    def num_documents(self) -> int:
        """D."""
        return len(self.document_ids_D)


class BatchLoss(nn.Module, ABC):
    """A loss over a whole batch, with or without parameters of its own."""

    def constrain(self) -> None:
        """Bring the loss's own parameters back into their bounds; called after each optimizer step."""

    @property
    def temperature(self) -> float | None:
        """The present temperature, for logs; None where the loss has none."""
        return None


class ContrastiveLoss(BatchLoss):
    """A loss over rows with one embedding each."""

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


@dataclass(frozen=True, slots=True)
class MultiVectors:
    """Rows with several embedding vectors each, as encoders of late interaction give them.

    Attributes:
        values_VE: All vectors (V, E), row after row.
        counts_R: Vectors of each row, int64, on the CPU.
    """

    values_VE: Tensor
    counts_R: Tensor

    def rows(self) -> tuple[Tensor, ...]:
        """Return the vectors of each row, (count, E)."""
        rows: tuple[Tensor, ...] = self.values_VE.split(self.counts_R.tolist())
        return rows

    @classmethod
    def sides(
        cls, values_VE: Tensor, counts_N: NDArray[np.int64], num_queries: int
    ) -> tuple[MultiVectors, MultiVectors]:
        """Cut the vectors of [queries; documents] into both sides.

        Args:
            values_VE: Vectors of all rows.
            counts_N: Vectors of each row.
            num_queries: Rows that are queries.
        """
        counts = torch.from_numpy(counts_N)
        first = int(counts_N[:num_queries].sum())
        return cls(values_VE[:first], counts[:num_queries]), cls(values_VE[first:], counts[num_queries:])


class MultiVectorLoss(BatchLoss):
    """A loss over rows with several vectors each."""

    @abstractmethod
    def forward(self, q: MultiVectors, d: MultiVectors, structure: BatchStructure) -> Tensor:
        """Return the loss of the batch, a scalar.

        Args:
            q: Queries.
            d: Documents.
            structure: Positives and identities.
        """
