"""Mixed precision casts each weight once in a step, and the gradients are those of a cast in each call."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engine_cases import make_case
from test_engine import CPU, gradients, make_loss
from torch.utils._python_dispatch import TorchDispatchMode

from vembed.batch import Features
from vembed.gradcache.chunks import ChunkBudget, Pool
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.passes import Passes
from vembed.losses.infonce import InfoNCE

if TYPE_CHECKING:
    from torch import Tensor


class Casts(TorchDispatchMode):
    """Counts how often each weight is cast to half precision."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {parameter.data_ptr(): name for name, parameter in module.named_parameters()}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            name = self.names.get(args[0].data_ptr())
            self.counts.update([name] if name else [])
        return result


def run(case: Any, *, retain: float = 0.0, rows: int = 4, checkpointed: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Take a step of the case in bfloat16 and return the casts and the gradients."""
    case.encoder.float()
    if checkpointed:
        for tower in case.encoder:
            tower.bert.activation_checkpointing_enable({"use_reentrant": False})
    options = EngineOptions(ChunkBudget(rows, 10**6), CPU, retain=retain, autocast_dtype=torch.bfloat16)
    loss = InfoNCE(temperature=0.1, learn_temperature=True)
    engine = GradCacheEngine(loss, options, list(case.encoder.parameters()))
    torch.manual_seed(3)
    with Casts(case.encoder) as casts:
        result = engine.step(case.pools, case.structure)
    assert result.num_chunks > 3
    assert result.replay_drift == 0
    return casts, gradients(case.encoder, loss)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("retain", [0.0, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_each_weight_is_cast_once_and_gradients_are_bit_equal_to_a_cast_in_each_call(
    monkeypatch: pytest.MonkeyPatch, retain: float, towers: int, checkpointed: bool
) -> None:
    def make() -> Any:
        return make_case(dropout=0.1, negatives=1, towers=towers)

    once, found = run(make(), retain=retain, checkpointed=checkpointed)
    monkeypatch.setattr(Passes, "shared_casts", lambda _: nullcontext())
    often, expected = run(make(), retain=retain, checkpointed=checkpointed)
    assert once.counts.keys() == often.counts.keys()
    assert len(once.counts) == towers * 2 * 6 * 2, "weight and bias of six products of each layer"
    assert set(once.counts.values()) == {1}
    assert min(often.counts.values()) > 3
    assert found.keys() == expected.keys()
    assert {name for name in found if not torch.equal(found[name], expected[name])} == set()


class Branches(torch.nn.Module):
    """Encodes rows by a weight of their own kind, as mixtures of experts do: a call needn't use all weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False) for _ in range(3)])

    def collate(self, features: Features, rows: Any, width: int) -> dict[str, Tensor]:
        return {name: torch.from_numpy(values[rows]) for name, values in features.per_row.items()}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        z = torch.zeros(len(inputs["kind"]), 8)
        for kind in inputs["kind"].unique().tolist():
            own = (inputs["kind"] == kind).nonzero().squeeze(1)
            z = z.index_copy(0, own, self.experts[kind](inputs["x"][own]).float())
        return z


def test_a_weight_that_a_call_without_a_graph_uses_first_has_its_gradient() -> None:
    case = make_case(dropout=0.0, negatives=1, num_queries=6)
    x = np.random.default_rng(0).standard_normal((18, 8)).astype(np.float32)
    features = Features({}, np.ones(18, dtype=np.int64), {"x": x, "kind": np.repeat([0, 1, 2], 6)})
    found = []
    for shared in (True, False):
        encoder = Branches()
        loss = make_loss()
        options = EngineOptions(ChunkBudget(3, 10**6), CPU, autocast_dtype=torch.bfloat16)
        engine = GradCacheEngine(loss, options, list(encoder.parameters()))
        if not shared:
            engine.passes.shared_casts = nullcontext  # type: ignore[method-assign]
        engine.step([Pool(encoder, encoder.collate, features, np.arange(18))], case.structure)
        found.append(gradients(encoder))
    assert len(found[0]) == 3
    assert all(torch.equal(found[0][name], found[1][name]) and found[1][name].any() for name in found[1])


def test_no_copy_of_a_weight_outlives_a_step_whether_it_ends_or_fails() -> None:
    case = make_case(dropout=0.0, negatives=1)
    for fails in (False, True):
        case.encoder.float()
        loss = InfoNCE(temperature=0.1)
        options = EngineOptions(ChunkBudget(4, 10**6), CPU, autocast_dtype=torch.bfloat16)
        engine = GradCacheEngine(loss, options, list(case.encoder.parameters()))
        left = [0] if fails else []

        def run_out(*_: object, left: list[int] = left) -> None:
            if left:
                left.pop()
                raise torch.OutOfMemoryError("once")

        hook = case.encoder[0].register_full_backward_pre_hook(run_out)
        result = engine.step(case.pools, case.structure)
        hook.remove()
        assert result.num_repairs == fails
        before = gradients(case.encoder)
        with torch.no_grad():
            for parameter in case.encoder.parameters():
                parameter.mul_(0.5)
        with Casts(case.encoder) as casts:
            engine.step(case.pools, case.structure)
        assert set(casts.counts.values()) == {1}, "the weights changed"
        assert any(not torch.equal(before[name], after) for name, after in gradients(case.encoder).items())
        assert not torch.is_autocast_enabled("cpu")
