"""Number formats: what is rounded, where, and that nothing vanishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engine_cases import make_case, random_batch
from test_engine import CPU
from test_engine_losses import Distances, make
from torch.nn.functional import normalize

from vembed.batch import Features
from vembed.distributed.ranks import Ranks
from vembed.distributed.runtime import start_runtime
from vembed.gradcache.chunks import ChunkBudget, Pool, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.loss_stage import LossStage
from vembed.losses.base import BatchStructure, ContrastiveLoss
from vembed.losses.infonce import InfoNCE
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.streamed import StreamedBatch, StreamedLoss

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.ranks import RankPool
    from torch import Tensor

SMALLEST_HALF = 2.0**-24
"""Below half of this, float16 is zero."""

LARGE = 65_536
OWN = 192
"""Queries of one of many ranks: its share of a large batch takes seconds."""


def unit_rows(count: int, dim: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64), dim=1).float()


def pairs(size: int) -> BatchStructure:
    rows = torch.arange(size)
    return BatchStructure(torch.stack([rows, rows], 1), rows, rows + size, rows, rows)


def large_share(loss: StreamedLoss, dim: int = 16) -> tuple[Any, Tensor, Tensor]:
    """Return what a rank with the first queries of a batch of 65,536 pairs finds, and its embeddings."""
    d_DE = unit_rows(LARGE, dim, seed=0)
    q_QE = normalize(d_DE[:OWN] + 0.2 * unit_rows(OWN, dim, seed=1), dim=1)
    return loss.gradients(StreamedBatch(q_QE, d_DE, pairs(LARGE))), q_QE, d_DE


@pytest.mark.slow
def test_at_65536_rows_no_gradient_underflows_and_all_agree_with_float64() -> None:
    found, q_QE, d_DE = large_share(InfoNCE(temperature=0.05))
    logits_QD = q_QE.double() @ d_DE.double().T / 0.05
    shares_QD = logits_QD.softmax(dim=1)
    slopes_QD = shares_QD / LARGE
    assert (slopes_QD.half() == 0).double().mean() > 0.9, "in float16 nearly all of dL/dS would be zero"
    own = torch.arange(OWN)
    slopes_QD[own, own] -= 1 / LARGE
    sampled = slice(OWN, LARGE, 997)  # documents that are negatives of everyone here
    expected_dd = slopes_QD[:, sampled].T @ q_QE.double() / 0.05
    expected_dq = slopes_QD @ d_DE.double() / 0.05
    assert expected_dd.abs().max() < 100 * SMALLEST_HALF
    for ours, expected in ((found.dq_QE, expected_dq), (found.dd_DE[sampled], expected_dd)):
        assert ours.dtype == torch.float32
        errors = (ours.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.max() < 1e-4
    assert (found.dd_DE.norm(dim=1) > 0).all()


@pytest.mark.slow
def test_at_65536_rows_the_sigmoid_loss_agrees_with_float64() -> None:
    found, q_QE, d_DE = large_share(SigmoidLoss(init_logit_scale=2.3, init_logit_bias=-10.0))
    scale = torch.tensor(2.3).exp().double()
    slopes_QD = (q_QE.double() @ d_DE.double().T * scale - 10.0).sigmoid() / LARGE
    assert (slopes_QD.half() == 0).double().mean() > 0.9
    own = torch.arange(OWN)
    slopes_QD[own, own] -= 1 / LARGE
    expected = slopes_QD @ d_DE.double() * scale
    assert ((found.dq_QE.double() - expected).norm(dim=1) < 1e-4 * expected.norm(dim=1)).all()


class Pull(ContrastiveLoss):
    """A gradient as small as that of a negative with an even share of the softmax, in a mean over 65,536 queries."""

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        return (q_QE.sum() + d_DE.sum()) / LARGE**2


def linear_gradient(
    layer: torch.nn.Linear,
    *,
    count: int,
    rows: int,
    autocast: torch.dtype | None = None,
    scale: float = 1.0,
    ranks: Ranks | None = None,
) -> Tensor:
    """Return the gradient of a layer's weight after one step over rows that all pull the same way."""
    ranks = ranks or Ranks()
    assignment = RowAssignment(tuple(np.arange(count)[rank :: ranks.world_size] for rank in range(ranks.world_size)))
    own = assignment.slots[ranks.rank]
    inputs = torch.from_numpy(np.random.default_rng(0).random((count, 8)) + 0.5)[own]

    def collate(features: Features, rows: Any, width: int) -> dict[str, Tensor]:
        return {"x": inputs[rows].to(layer.weight.dtype)}

    features = Features({}, np.ones(len(own), dtype=np.int64))
    pool = Pool(lambda chunk: layer(chunk["x"]), collate, features, own)
    structure = BatchStructure.of(random_batch(count // 2, [0] * (count // 2), np.random.default_rng(0)))
    options = EngineOptions(ChunkBudget(rows, 10**6), CPU, autocast_dtype=autocast, ranks=ranks)
    engine = GradCacheEngine(Pull(), options, [layer.weight])
    engine.step([pool], structure, assignment=assignment, gradient_scale=scale)
    assert layer.weight.grad is not None
    gradient, layer.weight.grad = layer.weight.grad.double() / scale, None
    return gradient


def new_layer(dtype: torch.dtype) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8, bias=False).to(dtype)


def test_the_loss_scale_lifts_what_float16_training_would_lose() -> None:
    truth = linear_gradient(new_layer(torch.float64), count=64, rows=64)
    assert 0 < truth.abs().max() < SMALLEST_HALF
    layer = new_layer(torch.float32)
    lost = linear_gradient(layer, count=64, rows=8, autocast=torch.float16)
    kept = linear_gradient(layer, count=64, rows=8, autocast=torch.float16, scale=2.0**16)
    assert (kept - truth).norm() < 0.01 * truth.norm()
    assert (lost - truth).norm() > 0.2 * truth.norm()


def test_2048_chunks_of_a_bfloat16_encoder_lose_no_more_than_one_rounding() -> None:
    truth = linear_gradient(new_layer(torch.bfloat16).double(), count=2048, rows=2048)
    layer = new_layer(torch.bfloat16)
    found = linear_gradient(layer, count=2048, rows=1)
    assert ((found - truth).abs() <= 2.0**-7 * truth.abs()).all()
    added_up = torch.zeros(8, 8, dtype=torch.bfloat16)
    for _ in range(2048):
        added_up += (truth / 2048).bfloat16()
    assert (added_up.double() - truth).norm() > 0.2 * truth.norm(), "bfloat16 sums of 2048 parts do lose digits"


def bfloat16_share_on(rank: int) -> tuple[torch.dtype, Tensor]:
    layer = new_layer(torch.bfloat16)
    gradient = linear_gradient(layer, count=256, rows=1, ranks=Ranks.of_this_process())
    return layer.weight.dtype, gradient


def test_two_ranks_add_a_bfloat16_encoder_up_in_float32_and_round_once(two_ranks: RankPool) -> None:
    truth = linear_gradient(new_layer(torch.bfloat16).double(), count=256, rows=256)
    for dtype, found in two_ranks.run(bfloat16_share_on):
        assert dtype == torch.bfloat16
        assert ((found - truth).abs() <= 2.0**-8 * truth.abs()).all()


@pytest.mark.parametrize("kind", ["one direction", "both directions", "prefixes", "sigmoid", "not streamed"])
def test_the_loss_stage_is_never_under_autocast(kind: str) -> None:
    structure = BatchStructure.of(random_batch(12, [1] * 12, np.random.default_rng(0)))
    z_NE = torch.randn(36, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for outside in (False, True):
        loss = make(kind, 8).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            results.append(LossStage(loss, Ranks()).run(z_NE, structure, RowAssignment.alone(36)))
    assert torch.equal(results[0].loss, results[1].loss)
    assert torch.equal(results[0].u_VE, results[1].u_VE)
    assert results[0].u_VE.dtype == torch.float32


def test_a_loss_by_autograd_sees_no_autocast_inside_the_step() -> None:
    seen = []

    class Looking(Distances):
        def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), q_QE.dtype))
            return super().forward(q_QE, d_DE, structure)

    case = make_case(dropout=0.0, negatives=1)
    case.encoder.float()
    in_encoder = []
    case.encoder[0].register_forward_hook(lambda *_: in_encoder.append(torch.is_autocast_enabled("cpu")))
    options = EngineOptions(ChunkBudget(4, 10**6), CPU, autocast_dtype=torch.bfloat16)
    GradCacheEngine(Looking().float(), options).step(case.pools, case.structure)
    assert seen == [(False, torch.float32)]
    assert all(in_encoder)


@pytest.fixture
def with_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("with_tf32")
def test_a_run_switches_tf32_off_for_products_and_convolutions() -> None:
    assert torch.backends.cuda.matmul.allow_tf32
    start_runtime(deterministic=False)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
