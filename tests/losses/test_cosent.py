"""CoSENT of positives equals double loops over pairs; batches without an order, large scales, half precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import CASES, LossCase, masked_cells, plain
from streamed_cases import assert_equal, over_ranks, streamed, unit_rows

from vembed.batch import ContrastiveBatch
from vembed.losses.cosent import CosentLoss
from vembed.losses.streamed import LossGradients, StreamedBatch
from vembed.losses.tiles import Prefixes, weighted_similarities

PREFIXES = {"whole": None, "weighted": Prefixes.of([5, 1, 3], [3, 1, 2])}


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


def unrelated(case: GradedCase) -> GradedCase:
    """Return the same without positives, as where all grades are 0 or less."""
    return GradedCase(case.queries, case.documents, (), case.grades)


def graded(num_queries: int, num_documents: int, *, grades: int, seed: int = 0) -> GradedCase:
    rng, case = np.random.default_rng(seed), plain(num_queries, num_documents)
    pairs = [(int(rng.integers(num_queries)), j, float(rng.integers(grades)) / 4) for j in range(num_documents)]
    return GradedCase(case.queries, case.documents, case.positives, tuple(pairs))


def make(**options: Any) -> CosentLoss:
    given: dict[str, Any] = {"scale": 20.0, "tile_size": 3, **options}
    return CosentLoss(**given)


def looped(loss: CosentLoss, case: LossCase, q_QE: torch.Tensor, d_DE: torch.Tensor) -> LossGradients:
    """Return the loss pair of pairs by pair of pairs, and its gradients by autograd."""
    masked = masked_cells(case) if loss.mask_false_negatives else set()
    cells = [(i, j, float((i, j) in case.positives)) for i in range(len(q_QE)) for j in range(len(d_DE))]
    pairs = list(case.grades) if isinstance(case, GradedCase) else [each for each in cells if each[:2] not in masked]
    q, d = q_QE.detach().double().requires_grad_(), d_DE.detach().double().requires_grad_()
    total = q.sum() * 0 + d.sum() * 0
    for weight, similarity in weighted_similarities(q, d, loss.prefixes):
        terms = [
            (loss.scale * (similarity[low[:2]] - similarity[high[:2]])).exp()
            for high in pairs
            for low in pairs
            if high[2] > low[2]
        ]
        total = total + weight * torch.log(1 + sum(terms, start=total * 0))
    return LossGradients(total.detach(), *torch.autograd.grad(total, [q, d]), {})


def whole(loss: CosentLoss, case: LossCase, q_QE: torch.Tensor, d_DE: torch.Tensor) -> LossGradients:
    q, d = q_QE.detach().requires_grad_(), d_DE.detach().requires_grad_()
    value = loss(q, d, case.structure)
    return LossGradients(value.detach(), *torch.autograd.grad(value, [q, d]), {})


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_positives_against_all_other_cells_equal_the_loops(prefixes: str, mask: bool) -> None:
    for case in CASES.values():
        loss = make(prefixes=PREFIXES[prefixes], mask_false_negatives=mask, tile_size=2)
        q_QE, d_DE = case.embeddings()
        expected = looped(loss, case, q_QE, d_DE)
        assert_equal(whole(loss, case, q_QE, d_DE), expected)
        assert_equal(streamed(loss, case, q_QE, d_DE), expected)


@pytest.mark.parametrize("sizes", [(13,), (7, 6), (5, 0, 8)])
def test_grades_have_an_order_in_a_batch_without_positives(sizes: tuple[int, ...]) -> None:
    case, loss = unrelated(graded(13, 29, grades=4)), make()
    q_QE, d_DE = case.embeddings()
    expected = looped(loss, case, q_QE, d_DE)
    assert expected.loss > 0
    assert_equal(over_ranks(loss, case, q_QE, d_DE, sizes), expected)


def test_the_comparison_can_fail() -> None:
    case = graded(5, 17, grades=4)
    q_QE, d_DE = case.embeddings()
    ungraded = LossCase(case.queries, case.documents, case.positives)
    for other, loss in ((ungraded, make()), (case, make(scale=19.9))):
        with pytest.raises(AssertionError, match="loss"):
            assert_equal(streamed(make(), case, q_QE, d_DE), looped(loss, other, q_QE, d_DE))


def test_without_lower_cells_there_is_no_loss() -> None:
    case = LossCase(("q0", "q1"), ("a", "a"), ((0, 0), (1, 1)))
    for found in (streamed(make(), case, *case.embeddings()), whole(make(), case, *case.embeddings())):
        assert found.loss == 0
        assert (found.dq_QE == 0).all()
        assert (found.dd_DE == 0).all()


def test_not_a_number_reaches_the_loss() -> None:
    for case in (plain(4, 6), graded(4, 6, grades=3)):
        q_QE, d_DE = (each.detach() for each in case.embeddings())
        d_DE[5, 2] = math.nan
        assert streamed(make(), case, q_QE, d_DE).loss.isnan()


@pytest.mark.parametrize("scale", [20.0, 1000.0])
def test_float32_overflows_nowhere_and_keeps_its_digits(scale: float) -> None:
    for case in (plain(40, 50), graded(40, 50, grades=5)):
        q_QE, d_DE = (unit_rows(count, 16, seed=seed, dtype=torch.float32) for seed, count in enumerate((40, 50)))
        loss = make(scale=scale, tile_size=16)
        found = streamed(loss, case, q_QE, d_DE)
        assert_equal(found, whole(loss, case, q_QE.double(), d_DE.double()), 2e-5 * scale / 20)


def test_half_precision_is_accumulated_in_float32() -> None:
    for case in (plain(70, 90), graded(70, 90, grades=5)):
        q_QE, d_DE = (unit_rows(count, 64, seed=seed, dtype=torch.bfloat16) for seed, count in enumerate((70, 90)))
        loss = make(tile_size=32, prefixes=Prefixes.of([16, 64]))
        found = streamed(loss, case, q_QE, d_DE)
        assert (found.loss.dtype, found.dq_QE.dtype, found.dd_DE.dtype) == (torch.float32,) * 3
        assert_equal(found, whole(loss, case, q_QE.double(), d_DE.double()), 2e-5)


def test_statistics_of_all_ranks_come_first_and_gradients_go_where_the_caller_says() -> None:
    for case in (plain(5, 7), graded(5, 7, grades=3)):
        q_QE, d_DE = (each.detach() for each in case.embeddings())
        loss, table = make(), torch.full((12, 5), 9.0, dtype=torch.float64)
        batch = StreamedBatch(q_QE, d_DE, case.structure)
        with pytest.raises(ValueError, match="statistics"):
            loss.gradients(batch)
        loss.gradients(batch, loss.statistics(batch), (table[:5], table[5:]))
        expected = looped(loss, case, q_QE, d_DE)
        assert torch.allclose(table, torch.cat([expected.dq_QE, expected.dd_DE]), rtol=0, atol=1e-10)
