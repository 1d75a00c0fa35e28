"""What a sharded step costs in collectives, and what it does when memory runs out or the passes differ."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import Case, Limited
from kit.ranks import RankPool
from sharded_cases import Sharded, assignment_of, case_of, engine_of, pools_of, step_on, whole_gradients
from test_engine import assert_same_gradients
from test_engine_fsdp import MODES, expected_of
from test_engine_losses import make

from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError
from vembed.gradcache.chunks import equal_calls, plan_calls
from vembed.gradcache.engine import ReplayDriftError

GATHERS, REDUCTIONS = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
UNITS = 3  # two layers and what they leave over


def counts_on(rank: int, settings: list[Sharded]) -> list[tuple[int, dict[str, int]]]:
    counted = []
    for setting in settings:
        result, _, counts = step_on(rank, setting, counts=True)
        counted.append((result.num_chunks, counts))
    return counted


@pytest.mark.slow
def test_collectives_of_each_mode_are_those_of_its_row_in_the_table(two_ranks: RankPool) -> None:
    settings = [Sharded(mode, chunk_rows=rows, assignment="even") for mode in (None, *MODES) for rows in (100, 1)]
    answers = two_ranks.run(counts_on, settings)
    assert [counts for _, counts in answers[0]] == [counts for _, counts in answers[1]]
    found = {(each.mode, each.chunk_rows): answer for each, answer in zip(settings, answers[0], strict=True)}
    for rows in (100, 1):
        _, plain = found[None, rows]
        # Of embeddings; on a CPU their gradients are added up in place, as gloo would do with a copy.
        assert (plain[GATHERS], plain.get(REDUCTIONS, 0)) == (1, 0)
        _, fast = found["fast", rows]
        assert (fast[GATHERS], fast[REDUCTIONS]) == (1 + UNITS, UNITS)
        # In place of the bucket of gradients goes word of what each rank has touched.
        assert sum(fast.values()) == sum(plain.values()) + 2 * UNITS
        calls, lean = found["lean", rows]
        assert 1 + UNITS <= lean[GATHERS] <= 1 + 3 * calls * UNITS + 1
        assert lean[REDUCTIONS] == UNITS
        calls, whole = found["sharded", rows]
        assert 1 + UNITS <= whole[GATHERS] <= 1 + 3 * calls * UNITS + 1
        assert whole[REDUCTIONS] <= calls * UNITS
    assert found["fast", 1][0] > found["fast", 100][0] + 3
    assert found["lean", 1][1][GATHERS] > found["lean", 100][1][GATHERS] + 3 * UNITS
    assert found["sharded", 1][1][REDUCTIONS] > found["sharded", 100][1][REDUCTIONS] + 3


def numbers_on(rank: int, retain: float) -> list[tuple[int, list[bool], list[int]]]:
    """Return for each pool the calls, which are retained and how many vectors each has a place for."""
    from vembed.gradcache.chunks import ChunkBudget

    case = case_of(Sharded(encoder="clip"))
    assignment = assignment_of(case, "uneven")
    pools = pools_of(case, assignment.slots[rank], spare=True)
    device = torch.device("cpu")
    calls = plan_calls(pools, assignment.positions(rank), ChunkBudget(2, 10**6), device, retain=retain)
    together = equal_calls(calls, pools, Ranks.of_this_process(), device)
    of_pools = [[call for call in together if call.pool is pool] for pool in pools]
    return [(len(own), [call.retained for call in own], [len(call.positions) for call in own]) for own in of_pools]


@pytest.mark.parametrize("retain", [0.0, 0.4, 1.0])
def test_all_ranks_make_the_calls_of_the_busiest_and_retain_those_of_the_barest(
    two_ranks: RankPool, retain: float
) -> None:
    first, second = two_ranks.run(numbers_on, retain)
    for few, many in zip(first, second, strict=True):
        assert few[:2] == many[:2]
        assert sum(few[2]) < sum(many[2])
        assert min(many[2]) > 0
        spare = len(few[2]) - int(np.count_nonzero(few[2]))
        assert spare > 0
        assert few[2][:spare] == [0] * spare  # in front of the rank's own
    assert any(any(retained) for _, retained, _ in first) == (retain > 0)


def limited_on(rank: int, setting: Sharded, where: str, most_rows: list[int]) -> Any:
    """Do two steps; return repairs and gradients of the second, or the error."""
    case: Case = case_of(setting)
    case.encoder = Limited(case.encoder, most_rows[rank], where)
    case.pools = [replace(pool, encode=case.encoder) for pool in case.pools]
    loss = make("both directions", 3)
    engine = engine_of(case, setting, loss)
    assignment = assignment_of(case, setting.assignment)
    pools = pools_of(case, assignment.slots[rank], spare=True)
    try:
        first = engine.step(pools, case.structure, assignment=assignment)
        whole_gradients(case.encoder, loss)
        second = engine.step(pools, case.structure, assignment=assignment)
    except MachineError as error:
        return str(error)
    found = whole_gradients(case.encoder, loss)
    return first.num_repairs, second.num_repairs, {name.replace("encoder.", "", 1): g for name, g in found.items()}


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_fast_repairs_a_step_that_ran_out_of_memory_on_one_rank(two_ranks: RankPool, where: str) -> None:
    setting = Sharded("fast", assignment="even", retain=0.5)
    _, expected = expected_of(setting)
    for first, second, found in two_ranks.run(limited_on, setting, where, [10**6, 2]):
        assert (first, second) == (2, 2), "no graph kept, then half the chunk; the next step begins as planned"
        assert_same_gradients(found, expected, 1e-10)


@pytest.mark.parametrize("mode", [pytest.param("lean", marks=pytest.mark.slow), "sharded"])
def test_modes_that_cannot_repair_say_which_chunk_to_use(two_ranks: RankPool, mode: Any) -> None:
    # In the only call of both ranks: a peer that was left alone would wait for the collective's timeout.
    setting = Sharded(mode, assignment="even", chunk_rows=100)
    for message in two_ranks.run(limited_on, setting, "forward", [10, 10]):
        assert "gradient_cache_chunk_size: 8 and gradient_cache_chunk_tokens: " in message
    for _, _, found in two_ranks.run(limited_on, replace(setting, chunk_rows=8), "forward", [10, 10]):
        assert_same_gradients(found, expected_of(setting)[1], 1e-10)


def drift_on(rank: int, setting: Sharded) -> str:
    try:
        step_on(rank, setting)
    except ReplayDriftError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("mode", ["fast", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])])
def test_drift_is_raised_on_every_rank(two_ranks: RankPool, mode: Any) -> None:
    for message in two_ranks.run(drift_on, Sharded(mode, dropout=0.1, replay=False)):
        assert "relative difference" in message
