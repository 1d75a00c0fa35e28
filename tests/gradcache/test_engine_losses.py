"""The engine computes every loss, streamed or not, as the plain step does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine import CPU, assert_same_gradients, gradients

from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.angle import AngleLoss
from vembed.losses.base import BatchLoss, BatchStructure, ContrastiveLoss
from vembed.losses.cosent import CosentLoss
from vembed.losses.cosine_mse import CosineMseLoss
from vembed.losses.in_batch_hard import InBatchHard
from vembed.losses.infonce import InfoNCE
from vembed.losses.margin_mse import MarginMseLoss
from vembed.losses.prefixes import Prefixes
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.spread_out import SpreadOutLoss
from vembed.losses.sum import SumLoss
from vembed.losses.triplet import TripletLoss

NEGATIVES = [0, 3, 1, 7, 0, 0, 2, 1, 1]
PREFIXES = Prefixes.of([4, 16, 32], [1, 1, 2])


class Distances(ContrastiveLoss):
    """A loss that doesn't stream: squared distances of the positive pairs, times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, q_QE: torch.Tensor, d_DE: torch.Tensor, structure: BatchStructure) -> torch.Tensor:
        rows, columns = structure.positives_P2.unbind(dim=1)
        return self.factor * (q_QE[rows] - d_DE[columns]).square().sum(dim=1).mean()


def make(kind: str, tile_size: int) -> BatchLoss:
    common: dict[str, Any] = {"dtype": torch.float64, "tile_size": tile_size}
    infonce = {"temperature": 0.1, "learn_temperature": True, **common}
    sigmoid = {"init_logit_scale": 2.0, "init_logit_bias": -3.0, **common}
    made: dict[str, BatchLoss] = {
        "one direction": InfoNCE(**infonce),
        "both directions": InfoNCE(**infonce, bidirectional=True),
        "prefixes": InfoNCE(**infonce, bidirectional=True, prefixes=PREFIXES),
        "hardest": InBatchHard(**infonce, hard_topk=3, bidirectional=True, prefixes=PREFIXES),
        "sigmoid": SigmoidLoss(**sigmoid),
        "sigmoid with prefixes": SigmoidLoss(**sigmoid, prefixes=PREFIXES),
        "triplet": TripletLoss(margin=0.2, prefixes=PREFIXES, tile_size=tile_size),
        "hardest triplet": TripletLoss(margin=0.2, negatives="hardest", tile_size=tile_size),
        "listed triplet": TripletLoss(margin=0.2, negatives="listed", tile_size=tile_size),
        "cosent": CosentLoss(scale=20.0, prefixes=PREFIXES, tile_size=tile_size),
        "listed angles": AngleLoss(scale=20.0, tile_size=tile_size),
        "listed margins": MarginMseLoss(prefixes=PREFIXES, tile_size=tile_size),
        "listed sum": SumLoss(
            [(1.0, InfoNCE(**infonce)), (0.3, SpreadOutLoss(tile_size=tile_size)), (2.0, CosineMseLoss())]
        ),
        "not streamed": Distances(),
    }
    return made[kind]


LOSSES = [
    *("one direction", "both directions", "prefixes", "sigmoid", "sigmoid with prefixes", "not streamed"),
    *("hardest", "triplet", "hardest triplet", "listed triplet", "cosent"),
    *("listed angles", "listed margins", "listed sum"),
]


def structure_for(kind: str, structure: BatchStructure) -> BatchStructure:
    """Return a batch as a loss of that kind learns from: with scores of each query and the next three documents."""
    if kind not in ("listed angles", "listed margins", "listed sum"):
        return structure
    rows = torch.arange(structure.num_queries)
    pairs_P2 = torch.stack([torch.stack([rows, (rows + step) % structure.num_documents], dim=1) for step in range(3)])
    pairs_P2 = torch.cat([structure.positives_P2, pairs_P2.flatten(0, 1)]).unique(dim=0)
    grades_P = torch.linspace(-1, 1, len(pairs_P2), dtype=torch.float64).mul(7).sin()
    return replace(structure, listed_P2=pairs_P2, listed_scores_P=grades_P)


@pytest.mark.parametrize("tile_size", [3, 1024])
@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_equal_the_plain_step_for_every_loss(case_maker: Any, kind: str, tile_size: int) -> None:
    case, loss = case_maker(dropout=0.0, negatives=NEGATIVES, towers=2), make(kind, tile_size)
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
    assert_same_gradients(found, expected, 1e-9)


def test_a_frozen_parameter_of_the_loss_gets_no_gradient_and_the_other_does(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make("sigmoid", 1024)
    loss.bias.requires_grad_(requires_grad=False)
    GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU)).step(case.pools, case.structure)
    assert loss.bias.grad is None
    assert loss.log_scale.grad is not None
