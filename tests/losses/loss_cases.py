"""Batches whose structure is written out, and their false negatives by brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vembed.batch import ContrastiveBatch, content_id
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class LossCase:
    """A batch by its texts, with float64 embeddings of unit length."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    positives: tuple[tuple[int, int], ...]
    weights: tuple[float, ...] | None = field(default=None, kw_only=True)  # of the queries
    teacher: bool = field(default=False, kw_only=True)  # whether a teacher has vectors of all rows

    @property
    def batch(self) -> ContrastiveBatch:
        return ContrastiveBatch(
            queries=self.queries,
            documents=self.documents,
            positives_P2=np.array(self.positives, dtype=np.int64),
            query_ids_Q=np.array([content_id(query) for query in self.queries]),
            document_ids_D=np.array([content_id(document) for document in self.documents]),
            record_ids=tuple(range(len(self.queries))),
            columns={} if self.weights is None else {"weight": np.array(self.weights)},
            teacher_Q=_unit(len(self.queries), seed=8) if self.teacher else None,
            teacher_D=_unit(len(self.documents), seed=9) if self.teacher else None,
        )

    @property
    def structure(self) -> BatchStructure:
        return BatchStructure.of(self.batch)

    def embeddings(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return leaf tensors (Q, 5) and (D, 5)."""
        generator = torch.Generator().manual_seed(seed)
        q, d = (
            torch.randn(len(rows), 5, generator=generator, dtype=torch.float64)
            for rows in (self.queries, self.documents)
        )
        q, d = (torch.nn.functional.normalize(each, dim=-1) for each in (q, d))
        return q.requires_grad_(), d.requires_grad_()


def _unit(count: int, *, seed: int) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).normal(size=(count, 3))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def plain(num_queries: int, num_documents: int) -> LossCase:
    """One positive for each query, the further documents hard negatives, every text its own."""
    return LossCase(
        tuple(f"q{i}" for i in range(num_queries)),
        tuple(f"d{j}" for j in range(num_documents)),
        tuple((i, i) for i in range(num_queries)),
    )


@dataclass(frozen=True)
class NamedCase(LossCase):
    """A batch whose documents that are no positives are hard negatives, given to the queries in turn."""

    @property
    def hard(self) -> list[tuple[int, int]]:
        known = {document for _, document in self.positives}
        rest = [document for document in range(len(self.documents)) if document not in known]
        return [(place % len(self.queries), document) for place, document in enumerate(rest)]

    @property
    def batch(self) -> ContrastiveBatch:
        fields = {name: getattr(super(NamedCase, self).batch, name) for name in ContrastiveBatch.__dataclass_fields__}
        return ContrastiveBatch(**fields | {"negatives_P2": np.array(self.hard) if self.hard else None})


def named(case: LossCase) -> NamedCase:
    return NamedCase(case.queries, case.documents, case.positives)


@dataclass(frozen=True)
class GradedCase(LossCase):
    """A batch whose pairs have grades, not in the order of rows."""

    grades: tuple[tuple[int, int, float], ...] = ()

    @property
    def batch(self) -> ContrastiveBatch:
        fields = {name: getattr(super(GradedCase, self).batch, name) for name in ContrastiveBatch.__dataclass_fields__}
        pairs, scores = np.array([each[:2] for each in self.grades]), np.array([each[2] for each in self.grades])
        positives = np.array(self.positives, dtype=np.int64).reshape(-1, 2)
        return ContrastiveBatch(**fields | {"positives_P2": positives, "listed_P2": pairs, "listed_scores_P": scores})


def graded(num_queries: int, num_documents: int, *, grades: int, seed: int = 0) -> GradedCase:
    rng, case = np.random.default_rng(seed), plain(num_queries, num_documents)
    pairs = [(int(rng.integers(num_queries)), j, float(rng.integers(grades)) / 4) for j in range(num_documents)]
    return GradedCase(case.queries, case.documents, case.positives, tuple(pairs))


CASES = {
    "one positive": plain(4, 4),
    "hard negatives": plain(3, 8),
    "one query": plain(1, 3),
    "several positives": LossCase(
        ("q0", "q1", "q2"), ("a", "b", "hard", "c", "d", "e"), ((0, 0), (0, 1), (1, 3), (2, 4), (2, 5))
    ),
    "a document that two queries share": LossCase(("q0", "q1", "q2"), ("a", "b", "hard"), ((0, 0), (1, 0), (2, 1))),
    "a positive text that stands twice": LossCase(("q0", "q1", "q2"), ("a", " a ", "b"), ((0, 0), (1, 1), (2, 2))),
    "a query that stands twice": LossCase(("q0", "q0", "q1"), ("a", "b", "c", "hard"), ((0, 0), (1, 1), (2, 2))),
    "a document equal to a query": LossCase(("q0", "q1", "q2"), ("a", "b", "q0", "hard"), ((0, 0), (1, 1), (2, 2))),
    "a query that is its own positive": LossCase(("q0", "q1"), ("q0", "b", "hard"), ((0, 0), (1, 1))),
    "a hard negative that repeats a positive": LossCase(("q0", "q1"), ("a", "b", "a", "b", "c"), ((0, 0), (1, 1))),
    "a positive known by way of the other row": LossCase(
        ("same", "same", "q"), ("a", "b", "b", "c", "hard"), ((0, 0), (1, 1), (2, 3))
    ),
}


def masked_cells(case: LossCase) -> set[tuple[int, int]]:
    """Return the false negatives by brute force over texts."""
    cells = set()
    for i, query in enumerate(case.queries):
        for j, document in enumerate(case.documents):
            if (i, j) in case.positives:
                continue
            known = any(
                case.queries[a].strip() == query.strip() and case.documents[b].strip() == document.strip()
                for a, b in case.positives
            )
            if known or query.strip() == document.strip():
                cells.add((i, j))
    return cells


def log_scale(temperature: float) -> float:
    """Return what a learned temperature is stored as."""
    return math.log(1 / temperature)
