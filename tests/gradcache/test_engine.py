"""The engine equals the plain step: value and every gradient, in float64."""

from typing import Any

import pytest
import torch

from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, ReplayDriftError
from vembed.gradcache.reference import reference_step
from vembed.losses.infonce import InfoNCE

CPU = torch.device("cpu")


def gradients(*modules: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Take the gradients out of modules and clear them."""
    found = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"{index}.{name}"] = parameter.grad.clone()
            parameter.grad = None
    return found


def assert_same_gradients(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare ratio and cosine of each parameter whose norm is over 1e-9 of the largest; the rest is tiny in both."""
    assert ours.keys() == reference.keys()
    largest = max(gradient.norm().item() for gradient in reference.values())
    assert largest > 0
    compared = 0
    for name, expected in reference.items():
        if expected.norm() <= 1e-9 * largest:
            assert ours[name].norm() <= 1e-9 * largest, name
            continue
        ratio = (ours[name].norm() / expected.norm()).item()
        cosine = torch.nn.functional.cosine_similarity(ours[name].flatten(), expected.flatten(), dim=0).item()
        assert abs(ratio - 1) <= tolerance, (name, ratio)
        assert abs(cosine - 1) <= tolerance, (name, cosine)
        assert (ours[name] - expected).norm() <= tolerance * expected.norm(), name
        compared += 1
    assert compared > len(reference) / 2


def make_loss(*, bidirectional: bool = True) -> InfoNCE:
    return InfoNCE(temperature=0.1, learn_temperature=True, bidirectional=bidirectional, dtype=torch.float64)


BUDGETS = {
    "one chunk": ChunkBudget(10**6, 10**6),
    "uneven rows": ChunkBudget(4, 10**6),
    "tokens": ChunkBudget(10**6, 60),
    "one row each": ChunkBudget(1, 10**6),
    "buckets": ChunkBudget(4, 10**6, bucketed=True),
    "buckets of tokens": ChunkBudget(10**6, 90, bucketed=True),
}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
def test_gradients_equal_the_plain_step_whatever_the_chunks(
    case_maker: Any, budget: ChunkBudget, dropout: float, retain: float
) -> None:
    case, loss = case_maker(dropout=dropout, negatives=[0, 3, 1, 7, 0, 0, 2, 1, 1]), make_loss()
    assert dropout == 0 or any(m.p > 0 for m in case.encoder.modules() if isinstance(m, torch.nn.Dropout))
    torch.manual_seed(5)
    value = reference_step(case.pools, case.structure, loss, budget=budget)
    expected = gradients(case.encoder, loss)

    torch.manual_seed(5)
    result = GradCacheEngine(loss, EngineOptions(budget, CPU, retain=retain)).step(case.pools, case.structure)
    assert result.loss == pytest.approx(value.item(), rel=1e-12)
    assert "1.log_scale" in expected
    assert_same_gradients(gradients(case.encoder, loss), expected, 1e-10)
    assert result.replay_drift == 0


@pytest.mark.parametrize("negatives", [0, 1, 7])
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_equal_one_shot_over_the_whole_batch(
    case_maker: Any, negatives: int, towers: int, bidirectional: bool
) -> None:
    case, loss = case_maker(dropout=0.0, negatives=negatives, towers=towers), make_loss(bidirectional=bidirectional)
    value = reference_step(case.pools, case.structure, loss)
    expected = gradients(case.encoder, loss)
    result = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU)).step(case.pools, case.structure)
    assert result.num_chunks > 2
    assert result.loss == pytest.approx(value.item(), rel=1e-12)
    assert_same_gradients(gradients(case.encoder, loss), expected, 1e-10)


def test_the_comparison_itself_can_fail(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make_loss()
    reference_step(case.pools, case.structure, loss)
    expected = gradients(case.encoder, loss)
    doubled = {name: gradient * (2 if name == "1.log_scale" else 1) for name, gradient in expected.items()}
    with pytest.raises(AssertionError, match="log_scale"):
        assert_same_gradients(doubled, expected, 1e-10)


@pytest.mark.parametrize(("compiled", "key"), [(False, "use_gradient_cache: false"), (True, "set compile: false")])
def test_drift_monitor_fires_without_rng_replay(case_maker: Any, compiled: bool, key: str) -> None:
    case, loss = case_maker(dropout=0.1, negatives=1), make_loss()
    options = EngineOptions(ChunkBudget(4, 10**6), CPU, replay_rng=False, compiled=compiled)
    with pytest.raises(ReplayDriftError, match=key):
        GradCacheEngine(loss, options).step(case.pools, case.structure)


def test_without_dropout_there_is_no_drift_even_without_replay(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make_loss()
    options = EngineOptions(ChunkBudget(4, 10**6), CPU, replay_rng=False)
    assert GradCacheEngine(loss, options).step(case.pools, case.structure).replay_drift == 0


def test_drift_monitor_sees_a_module_that_changes_itself(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make_loss()

    class Counting(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            self.calls += 1
            return self.inner(inputs) * (1 + 0.01 * self.calls)

    (pool,) = case.pools
    pools = [type(pool)(Counting(pool.encode), pool.collate, pool.features, pool.slots)]
    with pytest.raises(ReplayDriftError):
        GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU)).step(pools, case.structure)


def test_gradient_scale_multiplies_every_gradient_and_not_the_loss(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make_loss()
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU))
    plain = engine.step(case.pools, case.structure)
    expected = {name: 1024 * gradient for name, gradient in gradients(case.encoder, loss).items()}
    scaled = engine.step(case.pools, case.structure, gradient_scale=1024.0)
    assert scaled.loss == plain.loss
    assert_same_gradients(gradients(case.encoder, loss), expected, 1e-12)


def test_gradients_add_up_over_steps_as_autograd_does(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make_loss()
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU))
    engine.step(case.pools, case.structure)
    engine.step(case.pools, case.structure)
    twice = gradients(case.encoder, loss)
    reference_step(case.pools, case.structure, loss)
    reference_step(case.pools, case.structure, loss)
    assert_same_gradients(twice, gradients(case.encoder, loss), 1e-10)


def test_the_step_leaves_the_random_generator_where_one_pass_leaves_it(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.1, negatives=1), make_loss()
    budget = ChunkBudget(4, 10**6)
    torch.manual_seed(3)
    reference_step(case.pools, case.structure, loss, budget=budget)
    after_one_pass = torch.get_rng_state()
    torch.manual_seed(3)
    GradCacheEngine(loss, EngineOptions(budget, CPU)).step(case.pools, case.structure)
    assert torch.equal(torch.get_rng_state(), after_one_pass)


def test_a_single_chunk_is_encoded_once_and_chunks_twice(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make_loss()
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    case.encoder[0].register_forward_hook(count)
    GradCacheEngine(loss, EngineOptions(ChunkBudget(10**6, 10**6), CPU)).step(case.pools, case.structure)
    assert calls == 1
    result = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU)).step(case.pools, case.structure)
    assert calls == 1 + 2 * result.num_chunks


def test_who_looks_on_sees_which_chunk_is_running(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), make_loss()
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU, retain=0.5))
    seen: list[Any] = []
    case.encoder[0].register_forward_hook(lambda *_: seen.append(engine.passes.running))
    count = engine.step(case.pools, case.structure).num_chunks
    first, second = seen[:count], seen[count:]
    assert [(each.doing, each.number, each.total) for each in first] == [
        ("encoding", number, count) for number in range(1, count + 1)
    ]
    assert 0 < len(second) < count, "some chunks are kept, some encoded again"
    assert [each.number for each in second] == list(range(count - len(second) + 1, count + 1)), "the kept ones first"
    assert {each.doing for each in second} == {"second pass over"}
    shares = [each.share for each in seen]
    assert shares[0] == 0.0
    assert shares == sorted(set(shares))
    assert shares[-1] < 1
    assert engine.passes.running is None


@pytest.mark.parametrize("retain", [0.0, 0.5])
def test_a_frozen_tower_counts_in_the_first_pass_alone(case_maker: Any, retain: float) -> None:
    case, loss = case_maker(dropout=0.0, negatives=3, towers=2), make_loss()
    case.encoder[1].requires_grad_(False)
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU, retain=retain))
    seen: list[Any] = []
    weight = next(case.encoder[0].parameters())
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(engine.passes.running))
    total = engine.step(case.pools, case.structure).num_chunks
    last = seen[-1]
    cost = 2 if retain == 0.5 else 3
    assert (last.number, last.total) == (len(seen), len(seen)), "only calls of the other tower are run again"
    assert len(seen) < total
    assert last.share == pytest.approx(1 - cost / (total + cost * len(seen)), abs=0.1)


def test_two_towers_that_fit_the_budget_together_are_encoded_once(case_maker: Any) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1, towers=2), make_loss()
    value = reference_step(case.pools, case.structure, loss)
    expected = gradients(case.encoder, loss)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for tower in case.encoder:
        tower.register_forward_hook(count)
    tokens = sum(len(pool.features) * int(pool.features.lengths.max()) for pool in case.pools)
    for budget, per_call in ((ChunkBudget(10**6, tokens), 1), (ChunkBudget(10**6, tokens - 1), 2)):
        calls = 0
        result = GradCacheEngine(loss, EngineOptions(budget, CPU)).step(case.pools, case.structure)
        assert (result.num_chunks, calls) == (2, 2 * per_call)
        assert result.loss == pytest.approx(value.item(), rel=1e-12)
        assert_same_gradients(gradients(case.encoder, loss), expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_follows_the_full_precision_gradient(case_maker: Any, dtype: torch.dtype) -> None:
    case, loss = case_maker(dropout=0.0, negatives=1), InfoNCE(temperature=0.1, learn_temperature=True)
    case.encoder.float()
    engine = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU))
    engine.step(case.pools, case.structure)
    expected = torch.cat([g.flatten() for g in gradients(case.encoder, loss).values()])
    mixed = GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU, autocast_dtype=dtype))
    result = mixed.step(case.pools, case.structure, gradient_scale=256.0)
    ours = torch.cat([g.flatten() for g in gradients(case.encoder, loss).values()]) / 256.0
    assert result.replay_drift == 0
    assert 0 < (ours - expected).norm() < 0.05 * expected.norm()
