"""What ranks exchange: rows in rank order, sums that are sums, what the first one makes, its errors, agreement."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.ranks import RankPool
from torch.distributed.tensor.debug import CommDebugMode

from vembed.distributed.ranks import Ranks
from vembed.errors import DataError, MachineError, PreemptedError

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


def idle_weights(rank: int) -> list[bool]:
    one, other, nobodys, halves = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(4))
    halves.data = halves.data.bfloat16()
    (one if rank == 0 else other).grad = torch.zeros(2, 3)
    Ranks.of_this_process().sum_gradients([one, nobodys, other, halves])
    return [parameter.grad is not None for parameter in (one, nobodys, other, halves)]


def test_what_no_ranks_rows_touched_has_no_gradient_as_on_one_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(idle_weights) == [[True, False, True, False]] * 2, "AdamW would let the weight decay"


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


def made_by_first(rank: int) -> tuple[int, list[str]]:
    ranks = Ranks.of_this_process()
    pid = ranks.from_first(os.getpid)
    nothing = ranks.from_first(lambda: None)
    return pid, [str(nothing), str(os.getpid() == pid)]


def test_the_first_rank_makes_and_all_have_it(two_ranks: RankPool) -> None:
    (one, own), (other, others) = two_ranks.run(made_by_first)
    assert one == other
    assert own == ["None", "True"]
    assert others == ["None", "False"]


def failing(rank: int, kind: type[Exception]) -> tuple[str, str, int]:
    ranks = Ranks.of_this_process()

    def fail() -> None:
        raise kind(f"made by rank {rank}")

    try:
        ranks.from_first(fail)
    except Exception as error:  # noqa: BLE001 - the test looks at whatever it is
        return type(error).__name__, str(error), ranks.from_first(lambda: 7)
    return "", "", 0


class TwoPartError(DataError):
    """Made of two arguments, as a plugin's own may be: pickling it by its message alone fails."""

    def __init__(self, message: str, more: str = "") -> None:
        super().__init__(f"{message}{more}")
        self.args = (message, more, "a third")


def test_an_error_that_does_not_survive_pickling_reaches_the_others_by_its_words(two_ranks: RankPool) -> None:
    first, other = two_ranks.run(failing, TwoPartError)
    assert first[0] == "TwoPartError"
    assert other == ("DataError", str(TwoPartError("made by rank 0")), 7)


@pytest.mark.parametrize("kind", [DataError, PreemptedError])
def test_an_error_of_the_first_rank_is_raised_on_all_and_none_hangs(two_ranks: RankPool, kind: type[Exception]) -> None:
    assert two_ranks.run(failing, kind) == [(kind.__name__, "made by rank 0", 7)] * 2


def test_an_error_that_is_not_ours_keeps_its_kind_at_the_first_and_its_words_elsewhere(two_ranks: RankPool) -> None:
    first, other = two_ranks.run(failing, ZeroDivisionError)
    assert first == ("ZeroDivisionError", "made by rank 0", 7)
    assert other == (MachineError.__name__, "the first process failed: ZeroDivisionError: made by rank 0", 7)


def exchange(rank: int) -> dict[str, Any]:
    ranks = Ranks.of_this_process()
    weights = [torch.full((2, 3), float(rank)), torch.tensor(rank, dtype=torch.int64)]
    ranks.copy_from_first(weights)
    agree = ranks.agreement(torch.device("cpu"))
    return {
        "weights": [weight.tolist() for weight in weights],
        "objects": ranks.gather_objects({"rank": rank}),
        "rows": ranks.rows_at_first(torch.arange(2 * (rank + 1)).reshape(-1, 2) + 10 * rank, [1, 2]).tolist(),
        "agree": [agree(True), agree(rank == 0), agree(rank == 1), agree(False)],
        "first": ranks.is_first,
    }


def test_weights_objects_rows_and_verdicts_reach_whom_they_should(two_ranks: RankPool) -> None:
    first, other = two_ranks.run(exchange)
    for each in (first, other):
        assert each["weights"] == [[[0.0] * 3] * 2, 0]
        assert each["objects"] == [{"rank": 0}, {"rank": 1}]
        assert each["agree"] == [True, False, False, False]
    assert first["rows"] == [[0, 1], [10, 11], [12, 13]]
    assert other["rows"] == []
    assert (first["first"], other["first"]) == (True, False)


def test_alone_everything_is_the_identity() -> None:
    ranks = Ranks()
    assert ranks.is_first
    assert ranks.from_first(lambda: 3) == 3
    assert ranks.gather_objects("x") == ["x"]
    assert ranks.agreement(torch.device("cpu"))(True)
    rows = torch.ones(2, 2)
    ranks.copy_from_first([rows])
    assert ranks.rows_at_first(rows, [2]) is rows
    with pytest.raises(DataError, match="mine"):
        ranks.from_first(_raise_data_error)


def _raise_data_error() -> None:
    raise DataError("mine")
