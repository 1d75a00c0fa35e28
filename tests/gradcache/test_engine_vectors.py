"""Encoders that give a vector for each token: ragged embeddings through the cache, on one rank and on two."""

from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SmallBert, make_case
from kit.ranks import RankPool
from loss_kinds import LATE, build
from test_engine import CPU, assert_same_gradients, gradients
from test_engine_ranks import assignment_of

from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import ChunkBudget, Pool, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, StepResult
from vembed.losses.base import BatchStructure, MultiVectorLoss, MultiVectors


class TokenVectors(torch.nn.Module):
    """Every token's own vector instead of their mean."""

    def __init__(self, bert: SmallBert) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.bert.bert(inputs["ids"], attention_mask=inputs["mask"].long()).last_hidden_state
        return torch.nn.functional.normalize(hidden[inputs["mask"]], dim=-1)


class MaxSim(MultiVectorLoss):
    """Softmax over late-interaction scores: for each query token the best document token, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, q: MultiVectors, d: MultiVectors, structure: BatchStructure) -> torch.Tensor:
        scores = torch.stack(
            [torch.stack([(query @ other.T).amax(dim=1).sum() for other in d.rows()]) for query in q.rows()]
        )
        queries, documents = structure.positives_P2.unbind(dim=1)
        scores = scores * self.scale
        return (scores.logsumexp(dim=1)[queries] - scores[queries, documents]).mean()


def vectors_case(dropout: float) -> tuple[Any, TokenVectors]:
    case = make_case(dropout=dropout, negatives=[0, 2, 1, 0, 3], num_queries=5)
    encoder = TokenVectors(case.encoder[0])
    [pool] = case.pools
    features = pool.features
    case.pools = [Pool(encoder, pool.collate, features, pool.slots, num_vectors=features.lengths)]
    return case, encoder


def make(kind: str) -> Any:
    """Make a loss; the streamed ones in blocks of a few vectors."""
    return MaxSim() if kind == "not streamed" else build(kind, 24)


LOSSES = ["not streamed", *LATE]


def expected_of(dropout: float, kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Encode row by row in one graph."""
    case, encoder = vectors_case(dropout)
    [pool] = case.pools
    loss = make(kind)
    rows = [
        encoder(pool.collate(pool.features, np.array([row]), int(pool.features.lengths[row])))
        for row in np.argsort(pool.slots)
    ]
    counts = np.array([len(row) for row in rows])
    value = loss(*MultiVectors.sides(torch.cat(rows), counts, case.structure.num_queries), case.structure)
    value.backward()
    return value.item(), gradients(encoder, loss)


def step(rank: int, rows: int, retain: float, how: str | None, kind: str) -> tuple[StepResult, dict[str, torch.Tensor]]:
    case, encoder = vectors_case(0.0)
    [pool] = case.pools
    num_rows = case.structure.num_queries + case.structure.num_documents
    assignment, ranks = RowAssignment.alone(num_rows), Ranks()
    if how is not None:
        assignment, ranks = assignment_of(num_rows, how), Ranks.of_this_process()
        mine = np.flatnonzero(np.isin(pool.slots, assignment.slots[rank]))
        pool = Pool(encoder, pool.collate, pool.features.take(mine), pool.slots[mine], pool.num_vectors[mine])
    loss = make(kind)
    options = EngineOptions(ChunkBudget(rows, 10**6), CPU, retain=retain, ranks=ranks)
    engine = GradCacheEngine(loss, options, list(encoder.parameters()))
    return engine.step([pool], case.structure, assignment=assignment), gradients(encoder, loss)


@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("kind", LOSSES)
def test_ragged_vectors_have_the_gradients_of_one_shot(kind: str, rows: int, retain: float) -> None:
    value, expected = expected_of(0.0, kind)
    result, found = step(0, rows, retain, None, kind)
    assert result.loss == pytest.approx(value, rel=1e-11)
    assert result.replay_drift == 0
    assert {f"1.{name}" for name, _ in make(kind).named_parameters()} <= expected.keys()
    assert_same_gradients(found, expected, 1e-10)


@pytest.mark.parametrize("how", ["even", "uneven"])
@pytest.mark.parametrize("kind", LOSSES)
def test_ragged_vectors_have_the_gradients_of_one_shot_on_two_ranks(two_ranks: RankPool, kind: str, how: str) -> None:
    value, expected = expected_of(0.0, kind)
    for result, found in two_ranks.run(step, 2, 0.0, how, kind):
        assert result.loss == pytest.approx(value, rel=1e-11)
        assert_same_gradients(found, expected, 1e-10)


@pytest.mark.slow
def test_ragged_vectors_have_the_gradients_of_one_shot_on_three_ranks() -> None:
    pool = RankPool(3)
    try:
        for kind in LOSSES:
            value, expected = expected_of(0.0, kind)
            for result, found in pool.run(step, 2, 0.0, "three", kind):
                assert result.loss == pytest.approx(value, rel=1e-11)
                assert_same_gradients(found, expected, 1e-10)
    finally:
        pool.close()


def test_dropout_is_replayed_for_vectors() -> None:
    case, encoder = vectors_case(0.1)
    engine = GradCacheEngine(MaxSim(), EngineOptions(ChunkBudget(2, 10**6), CPU), list(encoder.parameters()))
    assert engine.step(case.pools, case.structure).replay_drift == 0
