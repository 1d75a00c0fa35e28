"""Steps of the engine on rows that lie end to end: those of padded rows, on one rank and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import make_loss, trainable_of
from packing_cases import PAD, SHAPES, build, largest_difference

from vembed.batch import ContrastiveBatch, Features, Ragged
from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import ChunkBudget, Pool, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from kit.ranks import RankPool

    from vembed.models.text import TextEncoder

PAIRS = 9
BUDGET = ChunkBudget(rows=5, tokens=48)
KINDS = ("bert", "modernbert", "qwen3")


def batch() -> tuple[Features, BatchStructure]:
    """Nine queries with a document each, of 1 to 40 tokens."""
    random = np.random.default_rng(2)
    ids = Ragged.from_rows([random.integers(PAD + 1, 60, 1 + 7 * row % 40) for row in range(2 * PAIRS)])
    numbers = np.arange(PAIRS, dtype=np.int64)
    pairs = ContrastiveBatch(
        queries=("",) * PAIRS,
        documents=("",) * PAIRS,
        positives_P2=np.stack([numbers, numbers], axis=1),
        query_ids_Q=numbers,
        document_ids_D=numbers + 100,
        record_ids=tuple(range(PAIRS)),
    )
    return Features({"input_ids": ids}, ids.lengths), BatchStructure.of(pairs)


def pool_of(encoder: TextEncoder, slots: np.ndarray | None = None) -> Pool:
    features, _ = batch()
    slots = np.arange(len(features)) if slots is None else slots
    return Pool(encoder, encoder.collate, features.take(slots), slots, packs=encoder.packs)


def step(kind: str, *, packed: bool, retain: float = 0.0, budget: ChunkBudget = BUDGET, **changes: Any) -> Any:
    """Do one step of the engine; return the result, and the gradients by parameter."""
    encoder, loss = build(kind, **changes).train(), make_loss()
    if packed:
        encoder.pack()
    torch.manual_seed(5)
    engine = GradCacheEngine(
        loss, EngineOptions(budget, torch.device("cpu"), retain=retain), list(encoder.parameters())
    )
    result = engine.step([pool_of(encoder)], batch()[1])
    found = {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}
    return result, {**found, "log_scale": loss.log_scale.grad}


@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_end_to_end_is_that_of_padded_rows_without_padding_or_drift(kind: str, retain: float) -> None:
    padded, expected = step(kind, packed=False, retain=retain)
    packed, found = step(kind, packed=True, retain=retain)
    assert packed.loss == pytest.approx(padded.loss, rel=1e-12)
    assert packed.replay_drift == 0
    assert packed.padded_tokens == packed.tokens == padded.tokens < padded.padded_tokens
    assert packed.num_chunks < padded.num_chunks
    assert largest_difference(expected, found) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_calls_filled_up_as_on_an_accelerator_change_nothing(kind: str) -> None:
    _, expected = step(kind, packed=False)
    filled, found = step(kind, packed=True, budget=ChunkBudget(5, 300, bucketed=True))
    assert filled.padded_tokens > filled.tokens
    assert filled.replay_drift == 0
    assert largest_difference(expected, found) <= 1e-10


@pytest.mark.parametrize("kind", SHAPES)
def test_dropout_is_replayed_and_equals_the_plain_step_over_the_same_calls(kind: str) -> None:
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "embedding_dropout")
    changes = dict.fromkeys((*names, "mlp_dropout", "dropout"), 0.1)
    result, found = step(kind, packed=True, retain=0.3, **changes)
    assert result.replay_drift == 0
    encoder, loss = build(kind, **changes).train(), make_loss()
    encoder.pack()
    torch.manual_seed(5)
    value = reference_step([pool_of(encoder)], batch()[1], loss, budget=BUDGET)
    assert result.loss == pytest.approx(value.item(), rel=1e-12)
    expected = {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}
    assert largest_difference({**expected, "log_scale": loss.log_scale.grad}, found) <= 1e-10
    assert result.loss != pytest.approx(step(kind, packed=True)[0].loss, rel=1e-6)


def step_of_a_rank(rank: int, kind: str, budget: ChunkBudget, assignment: RowAssignment) -> Any:
    """Do one step on this rank's rows; return the result, and the gradients by parameter."""
    encoder, loss = build(kind).train(), make_loss()
    encoder.pack()
    options = EngineOptions(budget, torch.device("cpu"), ranks=Ranks.of_this_process())
    engine = GradCacheEngine(loss, options, list(trainable_of(encoder).values()))
    result = engine.step([pool_of(encoder, assignment.slots[rank])], batch()[1], assignment=assignment)
    found = {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}
    return result.loss, result.replay_drift, {**found, "log_scale": loss.log_scale.grad}


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_two_ranks_end_with_the_gradients_of_one(two_ranks: RankPool, kind: str) -> None:
    _, expected = step(kind, packed=False)
    rows = np.arange(2 * PAIRS)
    uneven = RowAssignment((rows[:4], rows[4:]))
    for loss, drift, found in two_ranks.run(step_of_a_rank, kind, BUDGET, uneven):
        assert loss == pytest.approx(step(kind, packed=True)[0].loss, rel=1e-12)
        assert drift == 0
        assert largest_difference(expected, found) <= 1e-10


def test_a_call_that_no_loss_sees_holds_one_row_and_no_more_tokens_than_that() -> None:
    from vembed.gradcache.chunks import Retention, equal_calls, plan_calls

    encoder = build("bert")
    encoder.pack()
    pool = pool_of(encoder)
    calls = plan_calls([pool], np.arange(2 * PAIRS), BUDGET, Retention(0.0), torch.device("cpu"))

    class Others(Ranks):
        """Ranks of which another one makes two calls more."""

        def max_(self, numbers: torch.Tensor) -> torch.Tensor:
            return numbers + torch.tensor([2, 0])

    spare = equal_calls(calls, [pool], Others(), torch.device("cpu"))[:2]
    assert [(len(call.chunk.rows), call.chunk.padded_tokens, call.is_spare) for call in spare] == [(1, 1, True)] * 2
    assert encoder(encoder.collate(pool.features, spare[0].chunk.rows, spare[0].chunk.width)).shape == (1, 32)
