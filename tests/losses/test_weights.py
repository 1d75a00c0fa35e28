"""A row's weight multiplies the terms of its query, in every loss, and the mean is over the sum of the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_cases import CASES, LossCase, masked_cells, plain
from streamed_cases import assert_equal, defined, over_ranks, random_case, streamed, unit_rows
from test_cosent import graded
from test_triplet import named

from vembed.losses.base import document_shares, query_shares
from vembed.losses.colbert import ColbertLoss
from vembed.losses.cosent import CosentLoss
from vembed.losses.in_batch_hard import InBatchHard
from vembed.losses.infonce import InfoNCE
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.tiles import Prefixes
from vembed.losses.triplet import TripletLoss

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.streamed import StreamedLoss

KINDS = ["one direction", "both directions", "hardest", "sigmoid", "triplet", "hardest triplet", "listed", "cosent"]


def make(kind: str, **options: Any) -> StreamedLoss:
    own = {"dtype": torch.float64, **options}
    softmax = {"temperature": 0.2, "learn_temperature": True, **own}
    made = {
        "one direction": lambda: InfoNCE(**softmax),
        "both directions": lambda: InfoNCE(**softmax, bidirectional=True),
        "hardest": lambda: InBatchHard(**softmax, bidirectional=True, hard_topk=2),
        "sigmoid": lambda: SigmoidLoss(init_logit_scale=1.6, init_logit_bias=-2.0, **own),
        "triplet": lambda: TripletLoss(margin=0.3, **options),
        "hardest triplet": lambda: TripletLoss(margin=0.3, negatives="hardest", **options),
        "listed": lambda: TripletLoss(margin=0.3, negatives="listed", **options),
        "cosent": lambda: CosentLoss(scale=5.0, **options),
    }
    return made[kind]()


def weighted(case: LossCase, seed: int = 0) -> LossCase:
    """Return a case whose rows count differently, and its second one not at all."""
    weights = np.random.default_rng(seed).uniform(0.1, 4.0, len(case.queries))
    weights[1:2] = 0.0
    return replace(case, weights=tuple(weights.tolist()))


@pytest.mark.parametrize("prefixes", [None, Prefixes.of([5, 1, 3], [3, 1, 2])], ids=["whole", "prefixes"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_equal_the_definition_on_any_ranks(kind: str, prefixes: Prefixes | None) -> None:
    loss = make(kind, prefixes=prefixes, tile_size=4)
    case = weighted(named(random_case(3, num_queries=13, num_documents=29, texts=25)))
    q_QE, d_DE = case.embeddings()
    expected = defined(loss, case, q_QE, d_DE)
    assert abs(expected.loss - defined(loss, replace(case, weights=None), q_QE, d_DE).loss) > 1e-4, "weights count"
    assert_equal(streamed(loss, case, q_QE, d_DE), expected)
    for sizes in ((7, 6), (5, 0, 8)):
        assert_equal(over_ranks(loss, case, q_QE, d_DE, sizes), expected)


def test_graded_pairs_and_rows_of_several_vectors_have_weights_too() -> None:
    case, loss = weighted(graded(7, 19, grades=4)), CosentLoss(scale=5.0, tile_size=3)
    q_QE, d_DE = case.embeddings()
    expected = defined(loss, case, q_QE, d_DE)
    assert abs(expected.loss - defined(loss, replace(case, weights=None), q_QE, d_DE).loss) > 1e-4
    assert_equal(streamed(loss, case, q_QE, d_DE), expected)
    assert_equal(over_ranks(loss, case, q_QE, d_DE, (3, 4)), expected)

    case, counts = weighted(plain(6, 9)), (np.arange(1, 7), np.arange(1, 10))
    late = ColbertLoss(temperature=0.2, bidirectional=True, learn_temperature=True, dtype=torch.float64, tile_size=7)
    q, d = (unit_rows(int(each.sum()), 5, seed=n) for n, each in enumerate(counts))
    assert_equal(streamed(late, case, q, d, counts), defined(late, case, q, d, counts))


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_the_weighted_mean_of_what_each_query_loses(name: str) -> None:
    case = weighted(CASES[name])
    assert case.weights is not None
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    of_queries = [_alone(case, row, q_QE, d_DE) for row in range(len(case.queries))]
    expected = sum(w * value for w, value in zip(case.weights, of_queries, strict=True)) / (sum(case.weights) or 1)
    found = InfoNCE(temperature=0.2, dtype=torch.float64)(q_QE, d_DE, case.structure)
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def _alone(case: LossCase, row: int, q_QE: Tensor, d_DE: Tensor) -> float:
    """Return what one query loses, by loops over its cells."""
    masked = masked_cells(case)
    cells = {j: (5.0 * (q_QE[row] @ d_DE[j])).exp().item() for j in range(len(d_DE)) if (row, j) not in masked}
    return -np.log(sum(value for j, value in cells.items() if (row, j) in case.positives) / sum(cells.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_weights_of_any_size_change_nothing(kind: str) -> None:
    known = named(random_case(5, num_queries=9, num_documents=17, texts=40))
    loss = make(kind, tile_size=4)
    q_QE, d_DE = known.embeddings()
    expected = streamed(loss, known, q_QE, d_DE)
    for weight in (1e-3, 7.0):
        assert_equal(streamed(loss, replace(known, weights=(weight,) * 9), q_QE, d_DE), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_in_which_no_row_counts_loses_nothing(kind: str) -> None:
    case, loss = replace(plain(4, 6), weights=(0.0,) * 4), make(kind)
    q_QE, d_DE = case.embeddings()
    found = streamed(loss, case, q_QE, d_DE)
    assert found.loss == 0
    assert not found.dq_QE.any()
    assert not found.dd_DE.any()


def test_a_document_counts_as_the_mean_of_its_queries() -> None:
    case = LossCase(("a", "b", "c"), ("x", "y", "hard"), ((0, 0), (1, 0), (2, 1)), weights=(1.0, 2.0, 3.0))
    assert query_shares(case.structure).tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert document_shares(case.structure).tolist() == pytest.approx([1.5 / 4.5, 3 / 4.5, 0])
