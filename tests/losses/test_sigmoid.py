"""The sigmoid loss equals its definition, in value and in every gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_cases import CASES, MASKED, LossCase, masked_cells, plain

from vembed.losses.sigmoid import SigmoidLoss

LOG_SCALE, BIAS = 1.3, -2.5


def sigmoid(**options: Any) -> SigmoidLoss:
    given = {"init_logit_scale": LOG_SCALE, "init_logit_bias": BIAS, "dtype": torch.float64, **options}
    return SigmoidLoss(**given)


def slow_sigmoid(case: LossCase, q_QE: Any, d_DE: Any, own: tuple[Any, Any], *, mask: bool) -> torch.Tensor:
    """Return the loss pair by pair: log of a probability, no softplus."""
    left_out = masked_cells(case) if mask else set()
    log_scale, bias = own
    terms = []
    for i in range(len(case.queries)):
        for j in range(len(case.documents)):
            if (i, j) in left_out:
                continue
            logit = log_scale.exp() * sum(q_QE[i, e] * d_DE[j, e] for e in range(q_QE.shape[1])) + bias
            sign = 1 if (i, j) in case.positives else -1
            terms.append(-torch.log(1 / (1 + torch.exp(-sign * logit))))
    return torch.stack(terms).sum() / len(case.queries)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_the_slow_definition(name: str, mask: bool) -> None:
    case, loss = CASES[name], sigmoid(mask_false_negatives=mask)
    q_QE, d_DE = case.embeddings()
    value = loss(q_QE, d_DE, case.structure)
    found = torch.autograd.grad(value, [q_QE, d_DE, loss.log_scale, loss.bias])
    own = tuple(torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (LOG_SCALE, BIAS))
    slow = slow_sigmoid(case, q_QE, d_DE, own, mask=mask)
    assert value.item() == pytest.approx(slow.item(), rel=1e-12)
    for ours, reference in zip(found, torch.autograd.grad(slow, [q_QE, d_DE, *own]), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", MASKED)
def test_the_mask_lowers_the_loss_where_there_are_false_negatives(name: str) -> None:
    case = CASES[name]
    q_QE, d_DE = case.embeddings()
    masked, unmasked = (sigmoid(mask_false_negatives=mask)(q_QE, d_DE, case.structure) for mask in (True, False))
    assert masked < unmasked


def test_scale_and_bias_are_trained_and_saved() -> None:
    loss = sigmoid()
    assert sorted(loss.state_dict()) == ["bias", "log_scale"]
    assert all(parameter.requires_grad for parameter in loss.parameters())
    assert loss.temperature == pytest.approx(math.exp(-LOG_SCALE))
    single = SigmoidLoss(init_logit_scale=1.0, init_logit_bias=-10.0, dtype=torch.bfloat16)
    assert (single.log_scale.dtype, single.bias.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(("pushed_to", "expected"), [(-3.0, 1.0), (9.0, 0.01), (math.log(7.0), 1 / 7)])
def test_constrain_clamps_the_scale_and_leaves_the_bias(pushed_to: float, expected: float) -> None:
    loss = sigmoid()
    with torch.no_grad():
        loss.log_scale.fill_(pushed_to)
        loss.bias.fill_(-40.0)
    loss.constrain()
    assert loss.temperature == pytest.approx(expected, rel=1e-12)
    assert loss.bias.item() == -40.0


def test_logits_far_out_give_finite_loss_and_gradients() -> None:
    case = plain(3, 4)
    q_QE, d_DE = (each.detach().float().requires_grad_() for each in case.embeddings())
    for bias in (-100.0, 100.0):
        loss = SigmoidLoss(init_logit_scale=math.log(100), init_logit_bias=bias)
        value = loss(q_QE, d_DE, case.structure)
        assert value.isfinite()
        assert all(each.isfinite().all() for each in torch.autograd.grad(value, [q_QE, d_DE]))
