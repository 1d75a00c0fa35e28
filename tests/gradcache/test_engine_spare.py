"""Spare rows: they are encoded, and nothing of them is left."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import make_case
from test_engine import CPU, assert_same_gradients, gradients, make_loss
from test_engine_vectors import MaxSim, vectors_case

from vembed.gradcache.chunks import ChunkBudget, Pool
from vembed.gradcache.engine import EngineOptions, GradCacheEngine


def with_spares(pool: Pool, rows: list[int]) -> Pool:
    """Append rows of a pool again, without a place."""
    every = np.concatenate([np.arange(len(pool.slots)), rows])
    return Pool(
        pool.encode,
        pool.collate,
        pool.features.take(every),
        np.concatenate([pool.slots, np.full(len(rows), -1)]),
        None if pool.num_vectors is None else pool.num_vectors[every],
    )


def step(case: Any, loss: Any, retain: float) -> Any:
    options = EngineOptions(ChunkBudget(4, 10**6), CPU, retain=retain)
    engine = GradCacheEngine(loss, options, list(case.encoder.parameters()))
    return engine.step(case.pools, case.structure), gradients(case.encoder, loss)


@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("vectors", [False, True])
def test_spare_rows_change_neither_loss_nor_gradients_nor_drift(vectors: bool, retain: float) -> None:
    case = vectors_case(0.0)[0] if vectors else make_case(dropout=0.0, negatives=1)
    make = MaxSim if vectors else make_loss
    expected_result, expected = step(case, make(), retain)
    case.pools = [with_spares(pool, [0, 3, 3, 3, 5, 1]) for pool in case.pools]
    result, found = step(case, make(), retain)
    assert result.num_chunks > expected_result.num_chunks
    assert result.tokens == expected_result.tokens
    assert result.loss == pytest.approx(expected_result.loss, rel=1e-12)
    assert result.replay_drift == 0
    assert_same_gradients(found, expected, 1e-10)


@pytest.mark.parametrize("retain", [0.0, 1.0])
def test_a_pool_of_spare_rows_alone_is_encoded(retain: float) -> None:
    case = make_case(dropout=0.0, negatives=1, towers=2)
    _, expected = step(case, make_loss(), retain)
    spare = replace(case.pools[1], features=case.pools[1].features.take(np.array([2])), slots=np.array([-1]))
    seen = []
    spare = replace(spare, encode=lambda inputs: seen.append(len(inputs["ids"])) or case.pools[1].encode(inputs))
    case.pools = [spare, *case.pools]
    result, found = step(case, make_loss(), retain)
    assert seen == [1] * (1 if retain else 2)
    assert result.replay_drift == 0
    assert_same_gradients(found, expected, 1e-10)


def test_drift_of_own_rows_beside_spare_ones_is_seen() -> None:
    case = make_case(dropout=0.1, negatives=1)
    case.pools = [with_spares(pool, [0, 3]) for pool in case.pools]
    options = EngineOptions(ChunkBudget(4, 10**6), CPU, replay_rng=False)
    engine = GradCacheEngine(make_loss(), options, list(case.encoder.parameters()))
    torch.manual_seed(0)
    with pytest.raises(Exception, match="relative difference"):
        engine.step(case.pools, case.structure)
