"""Unfinished log-sum-exps: any order of merging gives the log-sum-exp of everything."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from vembed.losses.streamed import LogSumExp

LIKE = torch.zeros((), dtype=torch.float64)


def summed(logits_RC: torch.Tensor, widths: tuple[int, ...]) -> LogSumExp:
    """Sum rows tile by tile."""
    sums = LogSumExp.empty(1, len(logits_RC), like=LIKE, bounded=False)
    for tile in logits_RC.split(widths, dim=1):
        sums.add_logits((0, slice(None)), tile, dim=1, scratch_RC=torch.empty_like(tile))
    return sums


@pytest.mark.parametrize("spread", [1.0, 100.0, 1000.0])
def test_tiles_merge_to_the_log_sum_exp_of_the_row(spread: float) -> None:
    logits_RC = spread * torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = logits_RC.logsumexp(1)
    for widths in ((12,), (1, 11), (5, 5, 2), (1,) * 12):
        assert torch.allclose(summed(logits_RC, widths).value()[0], expected, rtol=1e-13, atol=0)


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


def test_a_bounded_sum_merges_with_one_that_has_a_maximum() -> None:
    bounded = LogSumExp.empty(1, 2, like=LIKE, bounded=True)
    bounded.sum[0] += torch.tensor([3.0, 5.0], dtype=torch.float64).exp()
    other = summed(torch.tensor([[700.0], [2.0]], dtype=torch.float64), (1,))
    expected = torch.tensor([[3.0, 700.0], [5.0, 2.0]], dtype=torch.float64).logsumexp(1)
    assert torch.allclose(bounded.merge(other).value()[0], expected)


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


def test_groups_are_summed_each_on_its_own_and_an_absent_one_is_empty() -> None:
    logits_KP = torch.tensor([[1.0, 900.0, 3.0, 901.0], [0.0, -5.0, 2.0, -900.0]], dtype=torch.float64)
    sums = LogSumExp.scattered(logits_KP, torch.tensor([2, 0, 2, 0]), 4)
    for prefix, row in enumerate(logits_KP):
        expected = torch.stack([row[[1, 3]].logsumexp(0), row[[0, 2]].logsumexp(0)])
        assert torch.allclose(sums.value()[prefix, [0, 2]], expected)
        assert (sums.value()[prefix, [1, 3]] == -math.inf).all()


def test_not_a_number_stays_one() -> None:
    logits_RC = torch.tensor([[1.0, math.nan], [1.0, 2.0]], dtype=torch.float64)
    value = summed(logits_RC, (1, 1)).merge(summed(logits_RC, (2,))).value()[0]
    assert value.isnan().tolist() == [True, False]


def test_stacking_and_picking_are_inverse() -> None:
    one, other = (summed(torch.randn(3, 4, dtype=torch.float64), (4,)) for _ in range(2))
    both = LogSumExp.stack([one, other])
    assert torch.equal(both[1].value(), other.value())
    assert torch.equal(both[0, 0].sum, one.sum[0])
