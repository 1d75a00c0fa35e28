"""What a run of several ranks shares: what the first one makes, its errors, weights, small objects, agreement."""

import os
from typing import Any

import pytest
import torch
from kit.ranks import RankPool

from vembed.distributed.ranks import Ranks
from vembed.errors import DataError, MachineError, PreemptedError


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
