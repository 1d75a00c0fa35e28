"""Streamed losses equal their definition, whatever the tiles, the ranks, the masks and the temperature."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from loss_cases import plain
from streamed_cases import assert_equal, defined, over_ranks, random_case, streamed, unit_rows
from torch.utils.flop_counter import FlopCounterMode

from vembed.losses import streamed as streaming
from vembed.losses.base import BatchStructure
from vembed.losses.in_batch_hard import InBatchHard
from vembed.losses.infonce import InfoNCE
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.softmax_sweep import BOUNDED_LOGIT
from vembed.losses.streamed import LogSumExp, StreamedBatch, StreamedLoss
from vembed.losses.tiles import Prefixes
from vembed.plan.memory import LOSS_STRIP_TILES

WARM, COLD = 0.2, 0.012
"""Temperatures below and above the bound up to which logits are exponentiated without a maximum."""

LOSSES: dict[str, dict[str, Any]] = {
    "one direction": {},
    "both directions": {"bidirectional": True},
    "one direction, cold": {"temperature": COLD},
    "both directions, cold": {"temperature": COLD, "bidirectional": True},
    "sigmoid": {"sigmoid": True},
    "hardest": {"hard_topk": 2},
    "hardest, both directions": {"hard_topk": 3, "bidirectional": True},
}


def make(kind: str, **options: Any) -> StreamedLoss:
    given = {**LOSSES[kind], "dtype": torch.float64, **options}
    if given.pop("sigmoid", False):
        return SigmoidLoss(**{"init_logit_scale": 1.6, "init_logit_bias": -2.0, **given})
    loss = InBatchHard if "hard_topk" in given else InfoNCE
    return loss(**{"temperature": WARM, "learn_temperature": True, **given})


def test_the_temperatures_lie_on_both_sides_of_the_bound() -> None:
    assert 1 / WARM < BOUNDED_LOGIT < 1 / COLD


@pytest.mark.parametrize("kind", LOSSES)
def test_random_batches_with_many_repeats_equal_the_definition(kind: str) -> None:
    for seed in range(8):
        case = random_case(seed, num_queries=13, num_documents=29, texts=25)
        loss = make(kind, tile_size=4 + 2 * seed)
        q_QE, d_DE = case.embeddings(seed)
        assert_equal(streamed(loss, case, q_QE, d_DE), defined(loss, case, q_QE, d_DE))


def test_ranks_with_and_without_bounded_logits_merge() -> None:
    """Rank 0 has short queries, rank 1 long ones: one exponentiates as it is, the other subtracts a maximum."""
    case = plain(6, 8)
    loss = make("both directions", tile_size=3, temperature=1.0)
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    q_QE = q_QE * torch.tensor([1.0, 1.0, 1.0, 80.0, 80.0, 80.0], dtype=torch.float64)[:, None]
    assert_equal(over_ranks(loss, case, q_QE, d_DE, (3, 3)), defined(loss, case, q_QE, d_DE))


@pytest.mark.parametrize("prefixes", [None, Prefixes.of([2, 5])])
@pytest.mark.parametrize("kind", LOSSES)
def test_zero_vectors_have_the_gradient_of_the_definition(kind: str, prefixes: Prefixes | None) -> None:
    case = plain(4, 6)
    q_QE, d_DE = (each.detach() for each in case.embeddings())
    q_QE[1] = 0.0
    d_DE[2, :2] = 0.0  # the first prefix only
    loss = make(kind, prefixes=prefixes, tile_size=3)
    found, expected = streamed(loss, case, q_QE, d_DE), defined(loss, case, q_QE, d_DE)
    assert found.loss.isfinite()
    largest = expected.dq_QE.abs().max()  # of a zero vector's prefix: 1e12, where epsilon is its norm
    assert (largest > 1e9) == (prefixes is not None)
    assert_equal(found, expected)


@pytest.mark.parametrize(("temperature", "noise"), [(0.05, 0.3), (0.02, 1.2)])
def test_small_gradients_keep_their_digits_in_float32(temperature: float, noise: float) -> None:
    case = plain(6, 6)
    q64_QE = unit_rows(6, 32, seed=0)
    d64_DE = torch.nn.functional.normalize(q64_QE + noise * unit_rows(6, 32, seed=1), dim=-1)
    q_QE, d_DE = q64_QE.float(), d64_DE.float()
    loss = InfoNCE(temperature=temperature, bidirectional=True)
    in_double = InfoNCE(temperature=temperature, bidirectional=True, dtype=torch.float64)
    exact = defined(in_double, case, q_QE.double(), d_DE.double())
    assert 1e-9 < exact.loss < 1e-5
    found, naive = streamed(loss, case, q_QE, d_DE), defined(loss, case, q_QE, d_DE)
    scale = exact.dq_QE.norm()
    assert (found.dq_QE - exact.dq_QE).norm() < 1e-4 * scale < (naive.dq_QE - exact.dq_QE).norm()
    assert found.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4)


def test_long_embeddings_are_never_exponentiated_without_a_maximum() -> None:
    case = plain(4, 6)
    q_QE, d_DE = (30 * unit_rows(count, 8, seed=count, dtype=torch.float32) for count in (4, 6))
    loss = InfoNCE(temperature=1.0, bidirectional=True, tile_size=3)  # logits up to 900
    expected = defined(InfoNCE(temperature=1.0, bidirectional=True, dtype=torch.float64), case, q_QE, d_DE)
    assert_equal(streamed(loss, case, q_QE, d_DE), expected, 1e-4)


def flops(loss: StreamedLoss, num_queries: int, num_documents: int, dim: int) -> int:
    case = plain(num_queries, num_documents)
    q_QE, d_DE = (unit_rows(count, dim, seed=0) for count in (num_queries, num_documents))
    with FlopCounterMode(display=False) as counter:
        streamed(loss, case, q_QE, d_DE)
    return counter.get_total_flops()


@pytest.mark.parametrize("tile_size", [16, 1000])
@pytest.mark.parametrize(
    ("kind", "products"),
    [
        ("both directions", 4),
        ("both directions, cold", 4),
        ("one direction", 3),
        ("one direction, cold", 3),
        ("sigmoid", 3),
        ("hardest", 1),
        ("hardest, both directions", 1),
    ],
)
def test_the_matrix_products_are_as_many_as_the_formula_says(kind: str, products: int, tile_size: int) -> None:
    one = 2 * 50 * 70 * 24
    assert flops(make(kind, tile_size=tile_size), 50, 70, 24) == products * one


@pytest.mark.parametrize(("kind", "products"), [("both directions", 4), ("one direction", 4), ("sigmoid", 3)])
def test_prefixes_cost_no_more_than_the_longest_of_them(kind: str, products: int) -> None:
    prefixes = Prefixes.of([4, 8, 16])
    assert flops(make(kind, tile_size=16, prefixes=prefixes), 50, 70, 24) == products * 2 * 50 * 70 * 16


def test_a_matrix_too_wide_for_a_strip_is_swept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    case, loss = plain(50, 70), make("one direction", tile_size=16)
    q_QE, d_DE = (unit_rows(count, 24, seed=count) for count in (50, 70))
    kept = streamed(loss, case, q_QE, d_DE)
    monkeypatch.setattr(streaming, "STRIP_TILES", 2)
    assert flops(loss, 50, 70, 24) == 4 * 2 * 50 * 70 * 24
    assert_equal(streamed(loss, case, q_QE, d_DE), kept, 1e-14)


def test_the_plan_knows_how_much_a_strip_keeps() -> None:
    assert streaming.STRIP_TILES == LOSS_STRIP_TILES


def test_nothing_of_the_size_of_the_matrix_is_allocated() -> None:
    num_queries, num_documents = 300, 500  # 150,000 cells
    structure = BatchStructure.of(plain(num_queries, num_documents).batch)
    q_QE, d_DE = (unit_rows(count, 8, seed=0) for count in (num_queries, num_documents))
    for kind in ("both directions", "both directions, cold", "sigmoid", "hardest, both directions"):
        loss, largest = make(kind, tile_size=64), _LargestTensor()
        with largest:
            batch = StreamedBatch(q_QE, d_DE, structure)
            loss.gradients(batch, loss.statistics(batch) if loss.needs_statistics else None)
        assert 64 * 64 <= largest.numel <= 8 * num_documents + 64 * 64
    with largest:
        loss(q_QE, d_DE, structure)
    assert largest.numel == num_queries * num_documents, "the definition does hold the matrix"


class _LargestTensor(torch.overrides.TorchFunctionMode):
    """Notes the largest tensor that a torch function returns."""

    numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_lengths_are_sorted_with_their_weights_and_weights_become_shares() -> None:
    assert Prefixes.of([8, 2, 4], [1, 3, 4]) == Prefixes((2, 4, 8), (3 / 8, 4 / 8, 1 / 8))
    assert Prefixes.of([8, 2]) == Prefixes((2, 8), (0.5, 0.5))


@pytest.mark.parametrize(
    ("dims", "weights"), [([], None), ([2, 2], None), ([0, 2], None), ([2, 4], [1.0]), ([2, 4], [1.0, 0.0])]
)
def test_what_cannot_be_trained_is_refused(dims: list[int], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match="prefixes"):
        Prefixes.of(dims, weights)


LIKE = torch.zeros((), dtype=torch.float64)


def summed(logits_RC: torch.Tensor, widths: tuple[int, ...]) -> LogSumExp:
    """Sum rows tile by tile."""
    sums = LogSumExp.empty(1, len(logits_RC), like=LIKE, bounded=False)
    for tile in logits_RC.split(widths, dim=1):
        sums.add_logits((0, slice(None)), tile, dim=1, scratch_RC=torch.empty_like(tile))
    return sums


def test_ranks_merge_in_any_order_and_by_way_of_a_common_maximum() -> None:
    logits_RC = 50 * torch.randn(5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits_RC[2, :4] = -math.inf  # nothing of this row on the first rank
    parts = [summed(each, (each.shape[1],)) for each in logits_RC.split((4, 7, 1), dim=1)]
    expected = logits_RC.logsumexp(1)
    for first, second, third in itertools.permutations(parts):
        assert torch.allclose(first.merge(second).merge(third).value()[0], expected, rtol=1e-13, atol=0)
    top = torch.stack([part.max for part in parts]).amax(0)
    total = torch.stack([part.rescaled(top) for part in parts]).sum(0)
    assert torch.allclose(LogSumExp(top, total).value()[0], expected, rtol=1e-13, atol=0)


def test_a_bounded_sum_of_nothing_does_not_hide_tiny_logits_of_another_rank() -> None:
    nothing = LogSumExp.empty(1, 1, like=LIKE.float(), bounded=True)
    tiny = LogSumExp(torch.tensor([[-150.0]]), torch.tensor([[1.0]]))
    assert nothing.merge(tiny).value().item() == -math.inf, "or this test shows nothing"
    assert nothing.without_idle_maxima().merge(tiny).value().item() == pytest.approx(-150.0)
    assert torch.equal(tiny.without_idle_maxima().value(), tiny.value())


def test_nothing_merges_with_nothing_to_nothing_and_with_something_to_that() -> None:
    for bounded in (True, False):
        empty = LogSumExp.empty(1, 2, like=LIKE, bounded=bounded)
        assert (empty.value() == -math.inf).all()
        assert (empty.merge(LogSumExp.empty(1, 2, like=LIKE, bounded=False)).value() == -math.inf).all()
        some = summed(torch.tensor([[-800.0, -801.0], [4.0, -math.inf]], dtype=torch.float64), (2,))
        assert torch.allclose(some.merge(LogSumExp.empty(1, 2, like=LIKE, bounded=False)).value(), some.value())
    one = summed(torch.full((1, 3), -math.inf, dtype=torch.float64), (2, 1))
    assert one.value().item() == -math.inf
