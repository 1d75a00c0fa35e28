"""The triplet loss in batches without triplets, with NaN and in half precision; its definition is the contract's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import LossCase, masked_cells, plain
from streamed_cases import assert_equal, random_case, streamed, unit_rows

from vembed.batch import ContrastiveBatch
from vembed.losses.base import BatchStructure
from vembed.losses.streamed import LossGradients, StreamedBatch
from vembed.losses.tiles import Prefixes, weighted_similarities
from vembed.losses.triplet import TripletLoss

KINDS = ["all", "hardest", "listed"]


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


def make(negatives: str, **options: Any) -> TripletLoss:
    given: dict[str, Any] = {"margin": 0.3, "negatives": negatives, "tile_size": 3, **options}
    return TripletLoss(**given)


def looped(loss: TripletLoss, case: NamedCase, q_QE: torch.Tensor, d_DE: torch.Tensor) -> LossGradients:
    """Return the loss triplet by triplet, and its gradients by autograd."""
    masked = masked_cells(case) if loss.mask_false_negatives else set()
    q, d = q_QE.detach().double().requires_grad_(), d_DE.detach().double().requires_grad_()
    total = q.sum() * 0 + d.sum() * 0
    for weight, similarity in weighted_similarities(q, d, loss.prefixes):
        terms = []
        for i, positive in sorted(set(case.positives)):
            others = [j for j in range(len(d)) if (i, j) not in masked and (i, j) not in case.positives]
            if loss.negatives == "listed":
                others = [j for j in others if (i, j) in case.hard]
            if loss.negatives == "hardest":
                others = sorted(others, key=lambda j, i=i, row=similarity: row[i, j].item())[-1:]
                terms += [] if others else [torch.zeros((), dtype=torch.float64)]
            terms += [(loss.margin - similarity[i, positive] + similarity[i, j]).clamp(min=0) for j in others]
        if loss.negatives == "all":
            terms = [term for term in terms if term > 0]
        if terms:
            total = total + weight * torch.stack(terms).mean()
    return LossGradients(total.detach(), *torch.autograd.grad(total, [q, d]), {})


def whole(loss: TripletLoss, case: NamedCase, q_QE: torch.Tensor, d_DE: torch.Tensor) -> LossGradients:
    q, d = q_QE.detach().requires_grad_(), d_DE.detach().requires_grad_()
    value = loss(q, d, case.structure)
    return LossGradients(value.detach(), *torch.autograd.grad(value, [q, d]), {})


def test_the_comparison_can_fail() -> None:
    case = named(random_case(3, num_queries=13, num_documents=29, texts=25))
    q_QE, d_DE = case.embeddings()
    for kind, other in zip(KINDS, KINDS[1:] + KINDS[:1], strict=True):
        with pytest.raises(AssertionError, match="loss"):
            assert_equal(streamed(make(kind), case, q_QE, d_DE), looped(make(other), case, q_QE, d_DE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_without_negatives_or_without_positive_adds_nothing(kind: str) -> None:
    alone = named(LossCase(("q0", "q1"), ("a", "a"), ((0, 0), (1, 1))))
    found = streamed(make(kind), alone, *alone.embeddings())
    assert found.loss == 0
    assert (found.dq_QE == 0).all()
    without = named(LossCase(("q0", "q1", "q2"), ("a", "b", "c", "d"), ((0, 0), (2, 1))))
    q_QE, d_DE = without.embeddings()
    found = streamed(make(kind), without, q_QE, d_DE)
    assert (found.dq_QE[1] == 0).all()
    assert_equal(found, looped(make(kind), without, q_QE, d_DE))


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_reaches_the_loss(kind: str) -> None:
    case = named(plain(4, 6))
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    d_DE[5, 2] = math.nan
    assert streamed(make(kind), case, q_QE, d_DE).loss.isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_accumulated_in_float32(kind: str) -> None:
    case = named(plain(70, 90))
    q_QE, d_DE = (unit_rows(count, 64, seed=seed, dtype=torch.bfloat16) for seed, count in enumerate((70, 90)))
    loss = make(kind, tile_size=32, prefixes=Prefixes.of([16, 64]))
    found = streamed(loss, case, q_QE, d_DE)
    assert (found.loss.dtype, found.dq_QE.dtype, found.dd_DE.dtype) == (torch.float32,) * 3
    assert_equal(found, whole(loss, case, q_QE.double(), d_DE.double()), 2e-5)


def test_all_negatives_without_the_counts_of_all_ranks_are_refused() -> None:
    case = named(plain(3, 3))
    batch = StreamedBatch(*(each.detach() for each in case.embeddings()), BatchStructure.of(case.batch))
    with pytest.raises(ValueError, match="statistics of all ranks"):
        make("all").gradients(batch)


def test_gradients_are_written_where_the_caller_says() -> None:
    case = named(plain(5, 7))
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    for kind in KINDS:
        loss, table = make(kind), torch.full((12, 5), 9.0, dtype=torch.float64)
        batch = StreamedBatch(q_QE, d_DE, case.structure)
        known = loss.statistics(batch) if loss.needs_statistics else None
        assert loss.gradients(batch, known, (table[:5], table[5:])).dq_QE.data_ptr() == table.data_ptr()
        expected = looped(loss, case, q_QE, d_DE)
        assert torch.allclose(table, torch.cat([expected.dq_QE, expected.dd_DE]), rtol=0, atol=1e-12)
