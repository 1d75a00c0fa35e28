"""What any step must hold, for every loss: counted collectives, exact dropout, the same bits again, no idle weight."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engine_cases import make_case
from kit.ranks import RankPool
from loss_kinds import structure_for
from test_engine import CPU, assert_same_gradients, gradients
from test_engine_cost import equal_lengths
from test_engine_losses import LOSSES, NEGATIVES, make
from test_engine_ranks import Setting, assignment_of, expected_of, pools_of, step_on
from test_engine_vectors import step as vectors_step
from torch.distributed.tensor.debug import CommDebugMode

from vembed.gradcache.chunks import ChunkBudget, plan_chunks
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

QUICK = ("both directions", "hardest", "triplet")


def collectives_on(rank: int) -> dict[str, list[dict[str, int]]]:
    """Count the collectives of a step of few chunks and of many, for every loss."""
    few, many = (Setting(num_queries=3, negatives=(1, 0, 2), chunk_rows=rows) for rows in (100, 1))
    found = {
        loss: [step_on(rank, replace(setting, loss=loss), counts=True)[2] for setting in (few, many)] for loss in LOSSES
    }
    counted = []
    for rows in (100, 1):
        with CommDebugMode() as communication:
            vectors_step(rank, rows, 0.0, "uneven", "colbert")
        counted.append({str(name): number for name, number in communication.get_comm_counts().items()})
    return {**found, "multi-vector": counted}


@pytest.mark.slow
def test_collectives_are_constant_in_the_number_of_chunks_for_every_loss(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(collectives_on):
        for loss, (few, many) in answer.items():
            assert few == many, loss
            assert sum(few.values()) > 2, loss


def dropout_setting(loss: str) -> Setting:
    return Setting(loss=loss, dropout=0.1, assignment="uneven", chunk_rows=3, retain=0.4)


def in_one_graph(setting: Setting) -> tuple[float, dict[str, Tensor]]:
    """Encode the chunks of both ranks, each under the random numbers of its rank, in one graph."""
    case = make_case(dropout=setting.dropout, negatives=list(setting.negatives))
    loss = make(setting.loss, 1024)
    num_queries = case.structure.num_queries
    num_rows = num_queries + case.structure.num_documents
    rows: list[Tensor | None] = [None] * num_rows
    for rank, own in enumerate(assignment_of(num_rows, setting.assignment).slots):
        torch.manual_seed(5 + rank)
        for pool in pools_of(case, own):
            for chunk in plan_chunks(pool.features.lengths, ChunkBudget(setting.chunk_rows, 10**6)):
                z_RE = pool.encode(pool.collate(pool.features, chunk.rows, chunk.width))
                for z, slot in zip(z_RE, pool.slots[chunk.rows], strict=True):
                    rows[slot] = z
    z_NE = torch.stack([row for row in rows if row is not None])
    value = loss(z_NE[:num_queries], z_NE[num_queries:], structure_for(setting.loss, case.structure))
    value.backward()
    return value.item(), gradients(case.encoder, loss)


def dropout_on(rank: int, losses: Sequence[str]) -> list[tuple[float, dict[str, Any], bool]]:
    """Do a step with each loss, and again from the same state; say whether every bit was the same."""
    answers = []
    for loss in losses:
        (first, found, _), (again, after, _) = (step_on(rank, dropout_setting(loss)) for _ in range(2))
        same = first.loss == again.loss and all(torch.equal(found[name], after[name]) for name in found)
        answers.append((first.loss, found, same))
    return answers


@pytest.mark.parametrize("losses", [QUICK, pytest.param(LOSSES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_dropout_on_two_ranks_is_that_of_one_graph_and_the_same_bits_again(
    two_ranks: RankPool, losses: Sequence[str]
) -> None:
    answers = two_ranks.run(dropout_on, losses)
    for loss, *of_ranks in zip(losses, *answers, strict=True):
        value, expected = in_one_graph(dropout_setting(loss))
        for found_value, found, same in of_ranks:
            assert same, loss
            assert found_value == pytest.approx(value, rel=1e-11), loss
            assert_same_gradients(found, expected, 1e-9)
    without, _ = expected_of(Setting(loss=losses[0]))
    assert abs(answers[0][0][0] - without) > 1e-6, "dropout does act"


class SavedBytes:
    """Follows how much memory autograd holds, and the most that it held."""

    def __init__(self) -> None:
        self.present = self.peak = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is saved for backward inside the block."""
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor):
            yield


class _Saved:
    def __init__(self, tensor: Tensor, count: SavedBytes) -> None:
        self.tensor, self.count = tensor.detach(), count  # else an output that is saved would hold its own graph
        count.present += tensor.nbytes
        count.peak = max(count.peak, count.present)

    def __del__(self) -> None:
        self.count.present -= self.tensor.nbytes


def peak_of(num_queries: int, *, chunk_rows: int | None) -> int:
    case = equal_lengths(make_case(dropout=0.0, negatives=1, num_queries=num_queries))
    own, count = make("both directions", 8), SavedBytes()
    with count.counted():
        if chunk_rows is None:
            reference_step(case.pools, case.structure, own)
        else:
            options = EngineOptions(ChunkBudget(chunk_rows, 10**6), CPU)
            GradCacheEngine(own, options).step(case.pools, case.structure)
    assert count.present == 0
    return count.peak


def test_what_is_kept_for_backward_is_flat_in_the_batch_and_linear_in_the_chunk() -> None:
    small, large = (peak_of(size, chunk_rows=4) for size in (8, 64))
    assert 0 < large == small
    assert peak_of(64, chunk_rows=8) == pytest.approx(2 * small, rel=0.2)
    assert peak_of(64, chunk_rows=None) > 6 * peak_of(8, chunk_rows=None)


def of_four(rank: int) -> list[tuple[float, dict[str, Any]]]:
    """Spread rows over four ranks, unevenly, and do a step with every loss."""
    answers = []
    for loss in LOSSES:
        result, found, _ = step_on(
            rank, Setting(loss=loss, assignment="four", num_queries=len(NEGATIVES), chunk_rows=3)
        )
        answers.append((result.loss, found))
    return answers


@pytest.mark.slow
def test_four_ranks_have_the_gradients_of_one_shot() -> None:
    pool = RankPool(4)
    try:
        answers = pool.run(of_four)
    finally:
        pool.close()
    for index, loss in enumerate(LOSSES):
        value, expected = expected_of(Setting(loss=loss))
        for answer in answers:
            assert answer[index][0] == pytest.approx(value, rel=1e-11)
            assert_same_gradients(answer[index][1], expected, 1e-9)
    assert np.isfinite(answers[0][0][0])
