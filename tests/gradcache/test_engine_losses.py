"""The engine computes every loss with every key, streamed or not, as the plain step does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from loss_kinds import KINDS, build, structure_for
from test_engine import CPU, assert_same_gradients, gradients

from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import ChunkBudget, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.loss_stage import LossStage
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure, ContrastiveLoss

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("loss", [Distances(), build(("in_batch_hard", {}), 1024)], ids=["by autograd", "streamed"])
def test_threads_of_a_cpu_add_rows_up_in_one_order(loss: Any) -> None:
    """Rows that many terms name are added up in one order, so that a run that continues ends with the same weights."""
    queries, documents = torch.arange(1024), torch.arange(64)
    pairs_P2 = torch.stack([queries, queries % len(documents)], dim=1)
    structure = BatchStructure(pairs_P2, queries, documents + len(queries), queries, documents)
    z_NE = torch.randn(len(queries) + len(documents), 64, generator=torch.Generator().manual_seed(0))
    z_NE = torch.nn.functional.normalize(z_NE, dim=1)
    stage = LossStage(loss.float(), Ranks())
    first, *others = (stage.run(z_NE, structure, RowAssignment.alone(len(z_NE))).u_VE for _ in range(30))
    assert all(torch.equal(u_NE, first) for u_NE in others)
    assert not torch.are_deterministic_algorithms_enabled(), "it holds in the loss alone"
