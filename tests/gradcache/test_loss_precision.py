"""`loss_precision: tf32`: what it costs in digits, and that nothing but the loss sees it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_cases import make_case
from test_engine import CPU
from test_engine_losses import make
from test_engine_precision import pairs, unit_rows
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from vembed.gradcache import loss_stage
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.loss_stage import LossStage, tf32_products
from vembed.losses.infonce import InfoNCE
from vembed.losses.streamed import StreamedBatch

CUDA = torch.device("cuda")


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to the 10 binary digits behind the first that TF32 keeps, halves away from zero as the hardware does."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


class Tf32Products(TorchDispatchMode):
    """Rounds the factors of every float32 matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name().startswith("aten::addmm") and args[1].dtype == torch.float32:
            self.count += 1
            args = (args[0], to_tf32(args[1]), to_tf32(args[2]), *args[3:])
        return function(*args, **(kwargs or {}))


def test_tf32_rounds_to_eleven_digits() -> None:
    x = unit_rows(64, 64, seed=0)
    errors = ((to_tf32(x) - x) / x).abs()
    assert 0.9 * 2.0**-11 < errors.max() <= 2.0**-11


@pytest.mark.parametrize("bidirectional", [False, True])
def test_at_a_temperature_of_a_fiftieth_tf32_errs_by_what_the_key_says(bidirectional: bool) -> None:
    """Documents come in groups of eight that are hard to tell apart; no GPU is asked, its rounding is emulated."""
    groups_DE = unit_rows(64, 768, seed=2).repeat_interleave(8, dim=0)
    d_DE = normalize(groups_DE + 0.3 * unit_rows(512, 768, seed=0), dim=1)
    q_QE = normalize(d_DE + 0.3 * unit_rows(512, 768, seed=1), dim=1)
    found = {}
    for dtype in (torch.float64, torch.float32, "tf32"):
        z_type = torch.float64 if dtype == torch.float64 else torch.float32
        loss = InfoNCE(temperature=0.02, bidirectional=bidirectional, dtype=z_type)
        batch = StreamedBatch(q_QE.to(z_type), d_DE.to(z_type), pairs(512))
        with Tf32Products() if dtype == "tf32" else nullcontext():
            result = loss.gradients(batch, loss.statistics(batch) if bidirectional else None)
        found[dtype] = result.loss, torch.cat([result.dq_QE, result.dd_DE])
    value, expected = found[torch.float64]
    assert value > 0.1
    errors = {dtype: float((u_NE - expected).norm() / expected.norm()) for dtype, (_, u_NE) in found.items()}
    assert errors[torch.float32] < 5e-5
    assert 1e-3 < errors["tf32"] < 3e-3
    assert (found["tf32"][0] - value).abs() < 1e-5 * value


@pytest.mark.parametrize("kind", ["both directions", "not streamed"])
@pytest.mark.parametrize("wanted", [False, True])
def test_only_the_loss_sees_tf32(monkeypatch: pytest.MonkeyPatch, kind: str, wanted: bool) -> None:
    monkeypatch.setattr(loss_stage, "tf32_products", lambda _: tf32_products(CUDA))  # a flag, which needs no device
    case, loss = make_case(dropout=0.0, negatives=1), make(kind, 8)
    seen: dict[str, set[bool]] = {"encoder": set(), "loss": set()}

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            where = "loss" if in_loss else "encoder"
            seen[where].add(torch.backends.cuda.matmul.allow_tf32)
            return function(*args, **(kwargs or {}))

    in_loss: list[bool] = []
    for name in ("_streamed", "_by_autograd"):
        inner = getattr(LossStage, name)

        def marked(*args: Any, inner: Any = inner) -> Any:
            in_loss.append(True)
            try:
                return inner(*args)
            finally:
                in_loss.pop()

        monkeypatch.setattr(LossStage, name, marked)
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU, loss_tf32=wanted))
    with Watching():
        engine.step(case.pools, case.structure)
    assert seen == {"encoder": {False}, "loss": {wanted}}


def test_tf32_is_put_back_after_an_error_and_never_set_for_a_cpu() -> None:
    def fails() -> None:
        with tf32_products(CUDA):
            assert torch.backends.cuda.matmul.allow_tf32
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            raise ValueError("in the loss")

    with pytest.raises(ValueError, match="in the loss"):
        fails()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    with tf32_products(CPU):
        assert not torch.backends.cuda.matmul.allow_tf32
