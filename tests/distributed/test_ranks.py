"""What ranks exchange: rows in rank order, sums that are sums, buckets that miss nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.ranks import RankPool
from torch.distributed.tensor.debug import CommDebugMode

from vembed.distributed.ranks import Ranks

COUNTS = [3, 5]


def rows_of(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count * 2, dtype=torch.float64).reshape(count, 2) + 100 * rank


def gather(rank: int, counts: list[int]) -> torch.Tensor:
    return Ranks.of_this_process().gather_rows(rows_of(rank, counts[rank]), counts)


@pytest.mark.parametrize("counts", [[3, 5], [4, 4], [0, 2], [5, 0]])
def test_rows_of_all_ranks_come_in_rank_order_whatever_their_counts(two_ranks: RankPool, counts: list[int]) -> None:
    expected = torch.cat([rows_of(rank, count) for rank, count in enumerate(counts)])
    for gathered in two_ranks.run(gather, counts):
        assert torch.equal(gathered, expected)


def parameters_of(rank: int, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Give parameters of odd sizes; every third has a gradient on rank 0 only."""
    parameters = []
    for index, dtype in enumerate(dtypes):
        parameter = torch.nn.Parameter(torch.zeros(index + 1, 3, dtype=dtype))
        if index % 3 or rank == 0:
            parameter.grad = torch.full_like(parameter, float(index + 10 * rank))
        parameters.append(parameter)
    return parameters


def sum_gradients(rank: int, dtypes: list[torch.dtype], bucket_bytes: int) -> tuple[list[Any], int]:
    parameters = parameters_of(rank, dtypes)
    with CommDebugMode() as communication:
        replace(Ranks.of_this_process(), bucket_bytes=bucket_bytes).sum_gradients(parameters)
    return [parameter.grad for parameter in parameters], communication.get_total_counts()


@pytest.mark.parametrize(("bucket_bytes", "collectives"), [(1, 7), (10**6, 1)])
def test_gradients_add_up_in_buckets_and_a_missing_one_counts_as_zero(
    two_ranks: RankPool, bucket_bytes: int, collectives: int
) -> None:
    dtypes = [torch.float32] * 7
    for gradients, counted in two_ranks.run(sum_gradients, dtypes, bucket_bytes):
        for index, gradient in enumerate(gradients):
            expected = index + (index + 10 if index % 3 else 0)
            assert torch.equal(gradient, torch.full((index + 1, 3), float(expected)))
        assert counted == collectives


def test_each_type_has_its_own_bucket_and_keeps_its_type(two_ranks: RankPool) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float64]
    for gradients, counted in two_ranks.run(sum_gradients, dtypes, 10**6):
        assert [gradient.dtype for gradient in gradients] == dtypes
        assert counted == 3


def merged(rank: int) -> tuple[list[float], list[float], bool, bool]:
    ranks = Ranks.of_this_process()
    x = torch.tensor([1.0 + rank, 5.0 - rank])
    cpu = torch.device("cpu")
    return (
        ranks.sum_(x.clone()).tolist(),
        ranks.max_(x.clone()).tolist(),
        ranks.any(rank == 1, cpu),
        ranks.any(False, cpu),
    )


def test_sums_maxima_and_flags_are_those_of_all_ranks(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(merged):
        assert answer == ([3.0, 9.0], [2.0, 5.0], True, False)


def test_one_rank_needs_no_process_group() -> None:
    ranks = Ranks.of_this_process()
    parameter = torch.nn.Parameter(torch.ones(2))
    ranks.sum_gradients([parameter])
    assert ranks.is_one
    assert parameter.grad is None
    assert torch.equal(ranks.gather_rows(rows_of(0, 3), [3]), rows_of(0, 3))
    assert ranks.any(True, torch.device("cpu"))
