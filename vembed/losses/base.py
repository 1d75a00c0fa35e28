"""Contract of a loss: embeddings and the structure of their batch in, a scalar out.

Shape legend: Q queries, D documents, E embedding dim, P (query, positive document) pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from vembed.data.columns import WEIGHT_COLUMN
from vembed.device import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.batch import ContrastiveBatch
    from vembed.losses.registry import LossSection
    from vembed.losses.streamed import StreamedLoss


@dataclass(frozen=True, slots=True)
class BatchStructure:
    """`ContrastiveBatch` as tensors, whole on every rank: all that a loss knows of a batch beside its embeddings."""

    positives_P2: Tensor  # (query row, document row), int64
    query_ids_Q: Tensor  # identity of each query's content, int64
    document_ids_D: Tensor
    query_groups_Q: Tensor  # the same identities numbered 0, 1, ...: rows with equal content share a number
    document_groups_D: Tensor
    classes_Q: Tensor | None = None  # 0, 1, ... and -1 for a row without a class, int64; None: no row has one
    listed_P2: Tensor | None = None  # (query row, document row) of pairs with a score, int64; None: there are none
    listed_scores_P: Tensor | None = None  # their scores, float64; higher is closer
    negatives_P2: Tensor | None = None  # (query row, document row): hard negatives of the row; None: none
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # by `ExtraColumn.name`: (Q,), int64 or float64
    weights_Q: Tensor | None = None  # how much each query's terms count, float64; None: all alike
    teacher_Q: Tensor | None = None  # a teacher's unit vectors of the queries, (Q, T) float32; None: no teacher
    teacher_D: Tensor | None = None  # and of the documents, (D, T)
    source: int | None = None  # number of the source that all rows are of; None where sources may be mixed

    @classmethod
    def of(
        cls, batch: ContrastiveBatch, device: torch.device | None = None, source: int | None = None
    ) -> BatchStructure:
        """Move a batch's structure to a device."""

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        def groups(ids: NDArray[np.int64]) -> Tensor:
            # Numbers without gaps index tables of groups; identities are 64-bit hashes of contents.
            return tensor(np.unique(ids, return_inverse=True)[1])

        # Weights of 1 are those of no column: kept as None, they cost losses no work and no rounding.
        weights_Q = batch.columns.get(WEIGHT_COLUMN.name)
        return cls(
            positives_P2=tensor(batch.positives_P2),
            query_ids_Q=tensor(batch.query_ids_Q),
            document_ids_D=tensor(batch.document_ids_D),
            query_groups_Q=groups(batch.query_ids_Q),
            document_groups_D=groups(batch.document_ids_D),
            classes_Q=None if batch.classes_Q is None else tensor(batch.classes_Q),
            listed_P2=None if batch.listed_P2 is None else tensor(batch.listed_P2),
            listed_scores_P=None if batch.listed_scores_P is None else tensor(batch.listed_scores_P),
            negatives_P2=None if batch.negatives_P2 is None else tensor(batch.negatives_P2),
            columns={name: tensor(values) for name, values in batch.columns.items()},
            weights_Q=None if weights_Q is None or (weights_Q == 1).all() else tensor(weights_Q),
            teacher_Q=None if batch.teacher_Q is None else tensor(batch.teacher_Q),
            teacher_D=None if batch.teacher_D is None else tensor(batch.teacher_D),
            source=source,
        )

    def to(self, device: torch.device) -> BatchStructure:
        """Return the same on a device."""

        def moved(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: moved(inner) for name, inner in value.items()}
            return to_device(value, device) if isinstance(value, Tensor) else value

        return BatchStructure(**{item.name: moved(getattr(self, item.name)) for item in fields(self)})

    @property
    def num_queries(self) -> int:
        """Q."""
        return len(self.query_ids_Q)

    @property
    def num_documents(self) -> int:
        """D."""
        return len(self.document_ids_D)


class LossCommon(NamedTuple):
    """Facts of a run that a loss may need beside its keys."""

    dtype: torch.dtype  # of parameters of its own, at least float32
    dimension: int  # of the embeddings
    tile_size: int  # rows and columns of a tile, as the plan decided
    scores_are_cosines: bool = False  # listed scores are a teacher's cosines, not the data's or a cross-encoder's


class BatchLoss(nn.Module, ABC):
    """A loss over a whole batch, with or without parameters of its own.

    Attributes:
        keys: Its section: the keys of a configuration, and what other rooms must know of it. A plugin's loss names its
            own; those of ours stand in losses/keys.py, so that a configuration is checked without importing torch.
        multi_vector: Whether `forward` takes `MultiVectors`.
    """

    keys: ClassVar[type[LossSection]]
    multi_vector: ClassVar[bool] = False

    @classmethod
    def from_keys(cls, keys: Any, common: LossCommon) -> Self:  # noqa: ARG003
        """Make the loss of a run; here each key is the argument of the same name."""
        return cls(**{name: getattr(keys, name) for name in type(keys).model_fields})

    @abstractmethod
    def forward(self, q: Any, d: Any, structure: BatchStructure, /) -> Tensor:
        """Return the loss of the batch, a scalar, from its queries and its documents."""

    def chosen(self, structure: BatchStructure) -> tuple[str, BatchLoss]:  # noqa: ARG002
        """Return the loss of a batch, and what the names of its parameters begin with among this one's."""
        return "", self

    @property
    def streamed(self) -> StreamedLoss | None:
        """The loss itself where it computes gradients without autograd, tile by tile."""
        return None

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

        Returns:
            A scalar, the mean over what the loss averages.
        """


@dataclass(frozen=True, slots=True)
class MultiVectors:
    """Rows with several embedding vectors each, as encoders of late interaction give them."""

    values_VE: Tensor  # all vectors (V, E), row after row
    counts_R: Tensor  # vectors of each row, int64, on the CPU

    def rows(self) -> tuple[Tensor, ...]:
        """Return the vectors of each row, (count, E)."""
        rows: tuple[Tensor, ...] = self.values_VE.split(self.counts_R.tolist())
        return rows

    @classmethod
    def sides(
        cls, values_VE: Tensor, counts_N: NDArray[np.int64], num_queries: int
    ) -> tuple[MultiVectors, MultiVectors]:
        """Cut the vectors of [queries; documents] into both sides."""
        counts = torch.from_numpy(counts_N)  # they stay on the CPU: `split` needs numbers, and would wait for a device
        first = int(counts_N[:num_queries].sum())
        return cls(values_VE[:first], counts[:num_queries]), cls(values_VE[first:], counts[num_queries:])


class MultiVectorLoss(BatchLoss):
    """A loss over rows with several vectors each."""

    multi_vector = True

    @abstractmethod
    def forward(self, q: MultiVectors, d: MultiVectors, structure: BatchStructure) -> Tensor:
        """Return the loss of the batch, a scalar."""


# Weights of rows ------------------------------------------------------------------------------------------------------
#
# A query's terms are multiplied by its row's weight, and what was a mean becomes a sum over the sum of the weights. A
# document that is some query's positive counts as the mean of those queries does. Shares add up to 1 over the batch.


def query_shares(structure: BatchStructure) -> Tensor:
    """Return the share of each query, (Q,) float64; zeros where no row of the batch counts."""
    return _shares(_weights(structure))


def document_shares(structure: BatchStructure) -> Tensor:
    """Return the share of each document among those that are some query's positive, (D,) float64."""
    queries_P, documents_P = torch.unique(structure.positives_P2, dim=0).unbind(dim=1)  # a pair may be listed twice
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
    """Return the weight of each query, (Q,) float64."""
    if structure.weights_Q is not None:
        return structure.weights_Q
    return torch.ones(structure.num_queries, dtype=torch.float64, device=structure.positives_P2.device)


def _shares(weights_N: Tensor) -> Tensor:
    total = weights_N.sum()
    return weights_N / torch.where(total > 0, total, 1.0)
