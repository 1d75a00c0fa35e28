"""The engine computes every loss with every key, streamed or not, as the plain step does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_kinds import KINDS, build, structure_for
from test_engine import CPU, assert_same_gradients, gradients

from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure, ContrastiveLoss

NEGATIVES = [0, 3, 1, 7, 0, 0, 2, 1, 1]


class Distances(ContrastiveLoss):
    """A loss that doesn't stream: squared distances of the positive pairs, times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, q_QE: torch.Tensor, d_DE: torch.Tensor, structure: BatchStructure) -> torch.Tensor:
        rows, columns = structure.positives_P2.unbind(dim=1)
        return self.factor * (q_QE[rows] - d_DE[columns]).square().sum(dim=1).mean()


def make(kind: str, tile_size: int) -> Any:
    return Distances() if kind == "not streamed" else build(kind, tile_size)


LOSSES = [
    *("one direction", "both directions", "prefixes", "sigmoid", "sigmoid with prefixes", "not streamed"),
    *("hardest", "triplet", "hardest triplet", "listed triplet", "cosent"),
    *("listed angles", "listed margins", "listed sum"),
]
"""Kinds that what no loss changes is tested with."""


@pytest.mark.parametrize("kind", [*KINDS, "not streamed"])
def test_gradients_equal_the_plain_step_for_every_loss(case_maker: Any, kind: str) -> None:
    case, loss = case_maker(dropout=0.0, negatives=NEGATIVES, towers=2), make(kind, 3)
    structure = structure_for(kind, case.structure)
    value = reference_step(case.pools, structure, loss)
    expected = gradients(case.encoder, loss)
    own = {f"1.{name}" for name, _ in loss.named_parameters()}
    assert own <= expected.keys()
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU, retain=0.3))
    result = engine.step(case.pools, structure, gradient_scale=8.0)
    assert result.num_chunks > 4
    assert result.loss == pytest.approx(value.item(), rel=1e-11)
    found = {name: gradient / 8.0 for name, gradient in gradients(case.encoder, loss).items()}
    assert_same_gradients(found, expected, 1e-10)


def test_a_frozen_parameter_of_the_loss_gets_no_gradient_and_the_other_does(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make("sigmoid", 1024)
    loss.bias.requires_grad_(requires_grad=False)
    GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU)).step(case.pools, case.structure)
    assert loss.bias.grad is None
    assert loss.log_scale.grad is not None
