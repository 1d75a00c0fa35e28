"""What a step costs, counted: floating point operations, AccumulateGrad calls, padded tokens, frozen parts."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import make_case
from test_engine import CPU, gradients, make_loss
from torch.utils.flop_counter import FlopCounterMode

from vembed.batch import Features, Ragged
from vembed.gradcache.chunks import ChunkBudget, Pool, plan_calls, plan_chunks
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step

ROWS = 4


def equal_lengths(case: Any) -> Any:
    """Give every row the same length, so that each chunk costs the same."""
    [pool] = case.pools
    rng = np.random.default_rng(0)
    ids = Ragged.from_rows([rng.integers(5, 60, 12) for _ in range(len(pool.slots))])
    case.pools = [Pool(pool.encode, pool.collate, Features({"input_ids": ids}, ids.lengths), pool.slots)]
    return case


def flops(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def freeze_all_but_biases(encoder: torch.nn.Module) -> None:
    """Train as adapters do: the weight matrices need no gradient, what flows through them does."""
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(requires_grad=name.endswith("bias"))


@pytest.mark.parametrize("weights", ["full", "frozen"])
@pytest.mark.parametrize("retain", [0.0, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_floating_point_operations_are_those_of_the_plain_step_and_one_forward_of_what_is_replayed(
    weights: str, retain: float
) -> None:
    case = equal_lengths(make_case(dropout=0.0, negatives=1, num_queries=16))  # 48 rows: 12 chunks of 4
    if weights == "frozen":
        freeze_all_but_biases(case.encoder)
    [pool] = case.pools
    chunks = plan_chunks(pool.features.lengths, ChunkBudget(ROWS, 10**6))
    assert len(chunks) == 12

    def forward() -> None:
        for chunk in chunks:
            pool.encode(pool.collate(pool.features, chunk.rows, chunk.width))

    loss = make_loss()
    plain = flops(lambda: reference_step(case.pools, case.structure, loss, budget=ChunkBudget(ROWS, 10**6)))
    one_forward = flops(forward)
    # The streamed loss stage does four products where autograd does three: that product isn't the encoder's.
    extra_product = 2 * case.structure.num_queries * case.structure.num_documents * 16
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(ROWS, 10**6), CPU, retain=retain))
    step = flops(lambda: engine.step(case.pools, case.structure))
    assert plain > 1.9 * one_forward
    assert step - extra_product == pytest.approx(plain + (1 - retain) * one_forward, rel=0.01)


class Accumulations:
    """Counts how often the gradient of each parameter is accumulated."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.counts: Counter[str] = Counter()
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in module.named_parameters()
        ]

    def _hook(self, name: str) -> Any:
        return lambda _: self.counts.update([name])


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_each_parameter_is_accumulated_once_for_each_chunk(rows: int) -> None:
    case = equal_lengths(make_case(dropout=0.0, negatives=1))
    counter = Accumulations(case.encoder)
    engine = GradCacheEngine(make_loss(), EngineOptions(ChunkBudget(rows, 10**6), CPU))
    result = engine.step(case.pools, case.structure)
    assert result.num_chunks == -(-27 // rows)
    assert set(counter.counts.values()) == {result.num_chunks}


def test_an_encoder_without_trainable_parts_is_encoded_once_and_the_other_is_exact() -> None:
    case = make_case(dropout=0.0, negatives=2, towers=2)
    case.encoder[0].requires_grad_(requires_grad=False)
    loss = make_loss()
    value = reference_step(case.pools, case.structure, loss)
    expected = gradients(case.encoder, loss)
    calls: Counter[int] = Counter()
    for index, tower in enumerate(case.encoder):
        tower.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(3, 10**6), CPU, retain=0.2))
    result = engine.step(case.pools, case.structure)
    found = gradients(case.encoder, loss)
    assert result.loss == pytest.approx(value.item(), rel=1e-12)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-14) for name in expected)
    chunks = [len(plan_chunks(pool.features.lengths, ChunkBudget(3, 10**6))) for pool in case.pools]
    assert calls[0] == chunks[0] > 2
    assert 1.5 * chunks[1] < calls[1] < 2 * chunks[1]  # a fifth of all is retained


@pytest.mark.parametrize(("share", "tokens", "kept"), [(1.0, 24, 2), (1.0, 23, 1), (0.2, 1000, 5), (1.0, 0, 0)])
def test_kept_graphs_stay_within_the_tokens_that_memory_has_room_for(share: float, tokens: int, kept: int) -> None:
    case = equal_lengths(make_case(dropout=0.0, negatives=1))
    calls = plan_calls(case.pools, np.arange(27), ChunkBudget(1, 10**6), CPU, retain=share, retain_tokens=tokens)
    assert {call.chunk.padded_tokens for call in calls} == {12}
    assert [call.retained for call in calls] == [False] * (27 - kept) + [True] * kept
