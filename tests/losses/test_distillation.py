"""Distillation over the batch keeps its digits in float32 and mixes with InfoNCE; its definition is the contract's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from loss_cases import LossCase, plain
from streamed_cases import assert_equal, streamed, unit_rows

from vembed.config.load import load_config
from vembed.losses.base import LossCommon
from vembed.losses.distillation import TeacherLoss
from vembed.losses.infonce import InfoNCE
from vembed.losses.streamed import LossGradients
from vembed.losses.tiles import weighted_similarities

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.batch import ContrastiveBatch


@dataclass(frozen=True)
class TaughtCase(LossCase):
    """A batch with vectors of a teacher, and rows that count more than others."""

    @property
    def batch(self) -> ContrastiveBatch:
        teacher = [
            unit_rows(len(each), 7, seed=9, dtype=torch.float32).numpy() for each in (self.queries, self.documents)
        ]
        weights = torch.arange(len(self.queries)).remainder(3).double().numpy()
        return replace(super().batch, teacher_Q=teacher[0], teacher_D=teacher[1], columns={"weight": weights})


def taught(case: LossCase) -> TaughtCase:
    return TaughtCase(case.queries, case.documents, case.positives)


def looped(loss: Any, case: TaughtCase, q_QE: Tensor, d_DE: Tensor) -> LossGradients:
    """Return the loss cell by cell, and its gradients by autograd."""
    q, d = q_QE.detach().double().requires_grad_(), d_DE.detach().double().requires_grad_()
    batch = case.batch
    assert batch.teacher_Q is not None
    assert batch.teacher_D is not None
    teacher = torch.from_numpy(batch.teacher_Q).double() @ torch.from_numpy(batch.teacher_D).double().T
    weights, total = batch.columns["weight"], q.sum() * 0 + d.sum() * 0
    for weight, similarity in weighted_similarities(q, d, loss.prefixes):
        for row, counts in enumerate(weights / weights.sum()):
            if loss.kind == "mse":
                term = torch.stack([(s - t) ** 2 for s, t in zip(similarity[row], teacher[row], strict=True)]).mean()
            else:
                student, given = ((each[row] / loss.divisor).exp() for each in (similarity, teacher))
                shares = zip(given / given.sum(), student / student.sum(), strict=True)
                term = torch.stack([p * (p.log() - s.log()) for p, s in shares]).sum() * max(1, loss.divisor) ** 2
            total = total + weight * counts * term
    return LossGradients(total.detach(), *torch.autograd.grad(total, [q, d]), {})


def test_float32_keeps_its_digits_where_shares_are_sharp() -> None:
    case = taught(plain(40, 50))
    q_QE, d_DE = (unit_rows(count, 16, seed=count, dtype=torch.float32) for count in (40, 50))
    loss = TeacherLoss(temperature=0.01, tile_size=16)
    assert_equal(streamed(loss, case, q_QE, d_DE), looped(loss, case, q_QE, d_DE), 1e-4)


def test_alpha_is_the_share_of_infonce_and_without_a_teacher_nothing_is_learned() -> None:
    def built(*keys: str) -> Any:
        given = ["model_name=m", "loss_type=distillation", "teacher_model_name=t", "temperature=0.1", *keys]
        config = load_config(None, given).config
        return config.run_loss().build(config, LossCommon(torch.float64, 5, 3))

    case = taught(plain(6, 9))
    q_QE, d_DE = case.embeddings()
    found = streamed(built("distillation_alpha=0.3", "distillation_temperature=2.0"), case, q_QE, d_DE)
    task = streamed(InfoNCE(temperature=0.1, dtype=torch.float64), case, q_QE, d_DE)
    teacher = streamed(TeacherLoss(temperature=2.0), case, q_QE, d_DE)
    assert found.loss == pytest.approx((0.3 * task.loss + 0.7 * teacher.loss).item(), rel=1e-12)
    assert torch.allclose(found.dd_DE, 0.3 * task.dd_DE + 0.7 * teacher.dd_DE, rtol=0, atol=1e-12)
    alone = built("distillation_alpha=0", "distillation_loss_type=mse")
    assert [type(part) for part in alone.parts] == [TeacherLoss]
    with pytest.raises(ValueError, match="needs a teacher's vectors"):
        streamed(alone, plain(2, 3), *plain(2, 3).embeddings())
