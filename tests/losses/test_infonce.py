"""InfoNCE equals its definition, in value and in every gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import CASES, MASKED, LossCase, log_scale, plain

from vembed.losses.base import BatchStructure
from vembed.losses.infonce import InfoNCE
from vembed.losses.keys import InfoNCEKeys
from vembed.section import rules_of

TEMPERATURE = 0.2


def infonce(**options: Any) -> InfoNCE:
    return InfoNCE(**{"temperature": TEMPERATURE, "dtype": torch.float64, **options})


@pytest.mark.parametrize("name", MASKED)
def test_the_mask_changes_value_and_gradient_where_there_are_false_negatives(name: str) -> None:
    case = CASES[name]
    q_QE, d_DE = case.embeddings()
    masked = infonce()(q_QE, d_DE, case.structure)
    unmasked = infonce(mask_false_negatives=False)(q_QE, d_DE, case.structure)
    assert masked < unmasked
    gradients = [torch.autograd.grad(value, d_DE)[0] for value in (masked, unmasked)]
    assert not torch.allclose(*gradients)


@pytest.mark.parametrize("name", [name for name in CASES if name not in MASKED])
def test_the_mask_changes_nothing_without_false_negatives(name: str) -> None:
    case = CASES[name]
    values = [infonce(mask_false_negatives=mask)(*case.embeddings(), case.structure) for mask in (True, False)]
    assert torch.equal(*values)


def test_a_copy_of_the_only_other_document_leaves_no_loss_and_no_gradient() -> None:
    case = LossCase(("q0", "q1"), ("a", "a"), ((0, 0), (1, 1)))
    q_QE, d_DE = case.embeddings()
    value = infonce(bidirectional=True)(q_QE, d_DE, case.structure)
    gradients = torch.autograd.grad(value, [q_QE, d_DE])
    assert value.item() == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_hard_negatives_are_negatives_of_every_query() -> None:
    case = plain(3, 4)
    q_QE, d_DE = case.embeddings()
    (gradient,) = torch.autograd.grad(infonce()(q_QE, d_DE, case.structure), q_QE)
    moved = d_DE.detach().clone()
    moved[3] = -moved[3]
    (other,) = torch.autograd.grad(infonce()(q_QE, moved, case.structure), q_QE)
    assert ((gradient - other).norm(dim=-1) > 1e-6).all()


def test_hard_negatives_have_no_row_in_the_document_direction() -> None:
    case = plain(2, 3)
    q_QE, d_DE = case.embeddings()
    logits_QD = q_QE @ d_DE.T / TEMPERATURE
    forward = torch.nn.functional.cross_entropy(logits_QD, torch.arange(2))
    backward = torch.nn.functional.cross_entropy(logits_QD.T[:2], torch.arange(2))
    value = infonce(bidirectional=True)(q_QE, d_DE, case.structure)
    assert value.item() == pytest.approx(((forward + backward) / 2).item(), rel=1e-12)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("name", ["several positives", "a positive known by way of the other row"])
def test_gradcheck(name: str, bidirectional: bool) -> None:
    case, loss = CASES[name], infonce(learn_temperature=True, bidirectional=bidirectional)

    def value(q_QE: torch.Tensor, d_DE: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(loss, {"log_scale": scale}, (q_QE, d_DE, case.structure))

    scale = torch.tensor(log_scale(TEMPERATURE), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (*case.embeddings(), scale))


def test_the_gradient_of_a_learned_temperature_equals_finite_differences() -> None:
    case, step = CASES["several positives"], 1e-5
    loss = infonce(learn_temperature=True, bidirectional=True)
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    loss(q_QE, d_DE, case.structure).backward()
    values = [
        infonce(temperature=math.exp(-(log_scale(TEMPERATURE) + sign * step)), bidirectional=True)(
            q_QE, d_DE, case.structure
        ).item()
        for sign in (1, -1)
    ]
    assert loss.log_scale.grad is not None
    assert loss.log_scale.grad.item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-7)
    assert abs(loss.log_scale.grad.item()) > 1e-3


def test_a_fixed_temperature_has_no_parameter_and_is_not_saved() -> None:
    loss = infonce()
    assert list(loss.parameters()) == []
    assert loss.state_dict() == {}
    assert loss.temperature == pytest.approx(TEMPERATURE)
    loss.constrain()
    assert loss.temperature == pytest.approx(TEMPERATURE)
    assert list(infonce(learn_temperature=True).state_dict()) == ["log_scale"]


@pytest.mark.parametrize(("pushed_to", "expected"), [(-3.0, 1.0), (9.0, 0.01), (math.log(7.0), 1 / 7)])
def test_constrain_clamps_the_logit_scale_to_1_and_100(pushed_to: float, expected: float) -> None:
    loss = infonce(learn_temperature=True)
    with torch.no_grad():
        loss.log_scale.fill_(pushed_to)
    loss.constrain()
    assert loss.temperature == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("temperature", [0.009, 1.01])
def test_a_learned_temperature_outside_its_bounds_is_refused_and_a_fixed_one_is_not(temperature: float) -> None:
    keys = InfoNCEKeys(temperature=temperature, learn_temperature=True)
    broken = [text for rule in rules_of(InfoNCEKeys) if (text := rule.violation(keys))]
    assert len(broken) == 1
    assert f"starts between 0.01 and 1.0, got {temperature}" in broken[0]
    assert infonce(temperature=temperature).temperature == pytest.approx(temperature)


@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_a_learned_temperature_may_start_at_its_bounds(temperature: float) -> None:
    assert infonce(temperature=temperature, learn_temperature=True).temperature == pytest.approx(temperature)


def test_a_learned_temperature_is_at_least_float32() -> None:
    assert InfoNCE(temperature=0.05, learn_temperature=True, dtype=torch.bfloat16).log_scale.dtype == torch.float32
    assert infonce(learn_temperature=True).log_scale.dtype == torch.float64


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_order_of_rows_does_not_matter(name: str, bidirectional: bool) -> None:
    case, loss = CASES[name], infonce(bidirectional=bidirectional)
    q_QE, d_DE = case.embeddings()
    rng = np.random.default_rng(4)
    queries, documents = rng.permutation(len(case.queries)), rng.permutation(len(case.documents))
    moved = LossCase(
        tuple(case.queries[row] for row in queries),
        tuple(case.documents[row] for row in documents),
        tuple(sorted((int(np.argsort(queries)[i]), int(np.argsort(documents)[j])) for i, j in case.positives)),
    )
    value = loss(q_QE, d_DE, case.structure)
    other = loss(q_QE[queries], d_DE[documents], moved.structure)
    assert other.item() == pytest.approx(value.item(), rel=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(other, [q_QE, d_DE]), torch.autograd.grad(value, [q_QE, d_DE]), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-13)


def test_the_order_of_the_pairs_does_not_matter() -> None:
    case = CASES["several positives"]
    shuffled = replace(case, positives=tuple(reversed(case.positives)))
    assert torch.equal(infonce()(*case.embeddings(), case.structure), infonce()(*case.embeddings(), shuffled.structure))


@pytest.mark.parametrize("scale", [1e-30, 0.0])
def test_vanishing_embeddings_give_the_loss_of_chance(scale: float) -> None:
    case = plain(4, 4)
    q_QE, d_DE = (each.detach() * scale for each in case.embeddings())
    assert infonce()(q_QE, d_DE, case.structure).item() == pytest.approx(math.log(4))


def test_the_sharpest_temperature_overflows_nowhere_in_float32() -> None:
    case = plain(4, 6)
    q_QE, d_DE = (each.detach().float().requires_grad_() for each in case.embeddings())
    value = InfoNCE(temperature=0.001, bidirectional=True)(q_QE, d_DE, case.structure)
    gradients = torch.autograd.grad(value, [q_QE, d_DE])
    assert value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_structure_of_a_batch() -> None:
    case = CASES["a positive known by way of the other row"]
    structure = BatchStructure.of(case.batch, torch.device("cpu"))
    assert (structure.num_queries, structure.num_documents) == (3, 5)
    assert structure.positives_P2.tolist() == [list(pair) for pair in case.positives]
    assert structure.query_ids_Q.tolist() == case.batch.query_ids_Q.tolist()
    assert structure.document_ids_D.tolist() == case.batch.document_ids_D.tolist()
    for groups, texts in ((structure.query_groups_Q, case.queries), (structure.document_groups_D, case.documents)):
        assert groups.dtype == torch.int64
        assert sorted(set(groups.tolist())) == list(range(len(set(texts))))
        for a, first in enumerate(texts):
            for b, second in enumerate(texts):
                assert (groups[a] == groups[b]).item() == (first == second)
