"""Losses over pairs with scores: batches without pairs or positives, odd lengths, the scores of a teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from contract import EVERY_KIND, Batch, by_loops
from loss_cases import plain
from loss_kinds import build
from streamed_cases import assert_equal, defined, over_ranks, streamed

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.losses.base import LossCommon
from vembed.losses.listed import ListedPairs

LISTED = [kind for kind, (name, _) in EVERY_KIND.items() if name in ("angle", "cosine_mse", "margin_mse", "kl")]


@pytest.mark.parametrize("kind", LISTED)
def test_a_batch_without_listed_pairs_has_no_loss(kind: str) -> None:
    loss, batch = build(kind, 5), Batch.of(kind)
    case: Any = replace(batch, structure=replace(batch.structure, listed_P2=None, listed_scores_P=None))
    for compute in (streamed, defined):
        found = compute(loss, case, batch.q_QE, batch.d_DE)
        assert found.loss == 0
        assert not found.dq_QE.any()
        assert not found.dd_DE.any()


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (3, 0, 5)])
def test_grades_have_an_order_in_a_batch_without_positives(sizes: tuple[int, ...]) -> None:
    """As where all grades are 0 or less."""
    batch = Batch.of("listed cosent")
    structure = replace(batch.structure, positives_P2=torch.empty(0, 2, dtype=torch.int64))
    case: Any = replace(batch, structure=structure)
    expected = by_loops(EVERY_KIND["listed cosent"], case)
    assert expected.loss > 0
    assert_equal(over_ranks(build("listed cosent", 3), case, batch.q_QE, batch.d_DE, sizes), expected)


@pytest.mark.parametrize(("dims", "keys"), [(7, []), (8, ["mrl_dims=[8, 3]"])])
def test_odd_lengths_have_no_angles(dims: int, keys: list[str]) -> None:
    config = load_config(None, ["model_name=m", "loss_type=angle", "label_kind=grade", *keys]).config
    with pytest.raises(ConfigError, match="is odd"):
        config.run_loss().build(config, LossCommon(torch.float32, dims, 16))


def test_a_student_of_cosines_keeps_the_margins_of_its_teacher_by_default() -> None:
    config = load_config(None, ["model_name=m", "loss_type=kl", "teacher_model_name=t"]).config
    loss = config.run_loss().build(config, LossCommon(torch.float64, 8, 16, scores_are_cosines=True))
    cosines = torch.tensor([0.8, 0.2, 0.1], dtype=torch.float64)
    pairs_P2 = torch.tensor([[0, 0], [0, 1], [0, 2]])
    structure = replace(plain(1, 3).structure, listed_P2=pairs_P2, listed_scores_P=cosines)

    def slope_at(student: Any) -> torch.Tensor:
        own = torch.tensor(student, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(loss.of_similarities(own, ListedPairs.of(structure), structure), [own])
        return slope.abs().max()

    assert slope_at([0.8, 0.2, 0.1]) < 1e-12
    assert slope_at([0.7, 0.65, 0.64]) > 1
