"""The self test passes where everything is right, and tells a wrong factor from rounding."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError
from vembed.workflows.doctor.self_test import TOLERANCE, SelfTest, check_this_rank, run_on_local_ranks, self_test

if TYPE_CHECKING:
    from kit.ranks import RankPool

CPU = torch.device("cpu")


def check_as(rank: int, broken: str) -> SelfTest:
    """Run the test on a rank, with one of the collectives broken."""
    names = {"factor": "sum_gradients", "collective": "sum_own_block"}
    if not broken:
        return check_this_rank(CPU)
    name = names[broken]
    right = getattr(Ranks, name)

    def halved(ranks: Ranks, parameters: list[torch.Tensor], **options: object) -> None:
        right(ranks, parameters, **options)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= ranks.world_size

    def rolled(ranks: Ranks, *arguments: object) -> torch.Tensor:
        return right(ranks, *arguments) + 1.0

    setattr(Ranks, name, halved if broken == "factor" else rolled)
    try:
        return check_this_rank(CPU)
    finally:
        setattr(Ranks, name, right)


def test_one_process_passes_alone() -> None:
    found = check_this_rank(CPU)
    assert found.passed
    assert found.num_chunks[0] > 3, "one chunk would prove nothing"


def test_two_processes_pass_and_each_encodes_only_its_part(two_ranks: RankPool) -> None:
    found = two_ranks.run(check_as, "")
    assert all(each.passed for each in found)
    assert all(each.gradient_error > 0 for each in found), "equal bits would mean that nothing was compared"
    assert max(each.num_chunks[0] for each in found) < check_this_rank(CPU).num_chunks[0]


def test_gradients_that_are_divided_by_the_processes_fail(two_ranks: RankPool) -> None:
    for each in two_ranks.run(check_as, "factor"):
        assert each.gradient_error == pytest.approx(0.5)
        assert not each.passed


def test_a_collective_that_gives_other_numbers_fails(two_ranks: RankPool) -> None:
    for each in two_ranks.run(check_as, "collective"):
        assert each.collective_error > TOLERANCE
        assert not each.passed


def place(device: torch.device) -> tuple[int, int, str]:
    ranks = Ranks.of_this_process()
    return ranks.rank, ranks.world_size, str(device)


def raise_on_the_second(device: torch.device) -> None:
    ranks = Ranks.of_this_process()
    if ranks.rank == 1:
        raise ValueError("no such thing")
    ranks.sum_(torch.ones(1))


def leave_without_a_word(device: torch.device) -> None:
    os._exit(7)


def wait_forever(device: torch.device) -> None:
    import time

    time.sleep(600)


@pytest.mark.slow
def test_fresh_processes_say_what_they_found_or_why_not() -> None:
    answers = run_on_local_ranks(place, world_size=2, backend="gloo")
    assert answers == [(0, 2, "cpu"), (1, 2, "cpu")]
    with pytest.raises(MachineError, match="process 1 of 2 failed: ValueError: no such thing"):
        run_on_local_ranks(raise_on_the_second, world_size=2, backend="gloo")
    with pytest.raises(MachineError, match="of 2 failed: it ended without a word"):
        run_on_local_ranks(leave_without_a_word, world_size=2, backend="gloo")
    with pytest.raises(MachineError, match="process 0, 1 of 2 said nothing in time"):
        run_on_local_ranks(wait_forever, world_size=2, backend="gloo", timeout_seconds=12)


@pytest.mark.slow
def test_the_self_test_in_fresh_processes_passes() -> None:
    found = self_test(world_size=2, backend="gloo")
    assert found.passed
    assert len(found.num_chunks) == 2
