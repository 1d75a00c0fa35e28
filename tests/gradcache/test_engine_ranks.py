"""The engine on two processes: each encodes its part, both end with the gradients of the whole batch."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import Case, make_case
from kit.ranks import RankPool
from loss_kinds import KINDS, structure_for
from test_engine import CPU, assert_same_gradients, gradients
from test_engine_losses import NEGATIVES, make
from torch.distributed.tensor.debug import CommDebugMode

from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import ChunkBudget, Pool, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, ReplayDriftError, StepResult
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure, ContrastiveLoss


@dataclass(frozen=True)
class Setting:
    """One way to run the step on every rank."""

    loss: str = "both directions"
    towers: int = 1
    dropout: float = 0.0
    retain: float = 0.0
    chunk_rows: int = 4
    negatives: Any = tuple(NEGATIVES)
    assignment: str = "uneven"
    dealt: str = "rows"
    freeze: str = ""
    num_queries: int = 9


def assignment_of(num_rows: int, how: str) -> RowAssignment:
    """Split rows over two ranks, three or four; queries and their documents don't stay together."""
    rows = np.arange(num_rows)
    if how == "three":
        return RowAssignment(tuple(rows[np.isin(rows % 6, own)] for own in ([0], [1, 4], [2, 3, 5])))
    if how == "four":
        owners = np.array([0, 0, 0, 1, 2, 2, 3])[rows % 7]
        return RowAssignment(tuple(rows[owners == rank] for rank in range(4)))
    first = {"even": rows % 2 == 0, "uneven": rows % 4 == 1, "nearly all": rows > 0}[how]
    return RowAssignment((rows[first], rows[~first]))


def pools_of(case: Case, own: np.ndarray) -> list[Pool]:
    """Keep a rank's rows of each pool."""
    pools = []
    for pool in case.pools:
        mine = np.flatnonzero(np.isin(pool.slots, own))
        if len(mine):
            pools.append(Pool(pool.encode, pool.collate, pool.features.take(mine), pool.slots[mine]))
    return pools


def frozen(case: Case, which: str) -> Case:
    """Freeze a part of the encoder."""
    for name, parameter in case.encoder.named_parameters():
        if which and which in name:
            parameter.requires_grad_(requires_grad=False)
    return case


def step_on(
    rank: int, setting: Setting, *, replay: bool = True, counts: bool = False
) -> tuple[StepResult, dict[str, Any], dict[str, int]]:
    case = make_case(
        dropout=setting.dropout,
        negatives=setting.negatives if isinstance(setting.negatives, int) else list(setting.negatives),
        towers=setting.towers,
        num_queries=setting.num_queries,
    )
    frozen(case, setting.freeze)
    loss = make(setting.loss, 3)
    assignment = assignment_of(case.structure.num_queries + case.structure.num_documents, setting.assignment)
    options = EngineOptions(
        ChunkBudget(setting.chunk_rows, 10**6),
        CPU,
        retain=setting.retain,
        replay_rng=replay,
        ranks=Ranks.of_this_process(),
    )
    trainable = [parameter for parameter in case.encoder.parameters() if parameter.requires_grad]
    engine = GradCacheEngine(loss, options, trainable)
    torch.manual_seed(5 + rank)
    communication = CommDebugMode()
    with communication if counts else nullcontext():
        structure = structure_for(setting.loss, case.structure)
        result = engine.step(pools_of(case, assignment.slots[rank]), structure, assignment=assignment)
    counted = {str(name): number for name, number in communication.get_comm_counts().items()}
    return result, gradients(case.encoder, loss), counted


def expected_of(setting: Setting) -> tuple[float, dict[str, torch.Tensor]]:
    case = make_case(
        dropout=0.0,
        negatives=setting.negatives if isinstance(setting.negatives, int) else list(setting.negatives),
        towers=setting.towers,
        num_queries=setting.num_queries,
    )
    frozen(case, setting.freeze)
    loss = make(setting.loss, 1024)
    value = reference_step(case.pools, structure_for(setting.loss, case.structure), loss).item()
    return value, gradients(case.encoder, loss)


def assert_equals_one_shot(two_ranks: RankPool, setting: Setting) -> list[Any]:
    value, expected = expected_of(setting)
    answers = two_ranks.run(step_on, setting)
    for result, found, _ in answers:
        assert result.loss == pytest.approx(value, rel=1e-11)
        assert result.replay_drift == 0
        assert_same_gradients(found, expected, 1e-10)
    return answers


@pytest.mark.parametrize(
    ("loss", "assignment"),
    [
        *((loss, "uneven") for loss in (*KINDS, "not streamed")),
        *((loss, how) for loss in ("both directions", "hardest", "not streamed") for how in ("even", "nearly all")),
    ],
)
def test_two_ranks_have_the_gradients_of_one_shot(two_ranks: RankPool, loss: str, assignment: str) -> None:
    answers = assert_equals_one_shot(two_ranks, Setting(loss=loss, assignment=assignment))
    assert sum(result.num_chunks for result, _, _ in answers) > 4
    assert answers[0][0].tokens + answers[1][0].tokens > max(answers[0][0].tokens, answers[1][0].tokens)


@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("negatives", [0, 1, 7])
def test_towers_retention_and_negatives_change_nothing_on_two_ranks(
    two_ranks: RankPool, towers: int, retain: float, negatives: int
) -> None:
    assert_equals_one_shot(two_ranks, Setting(towers=towers, retain=retain, negatives=negatives))


def test_a_frozen_tower_needs_no_gradient_on_any_rank(two_ranks: RankPool) -> None:
    setting = Setting(towers=2, freeze="1.bert")
    answers = assert_equals_one_shot(two_ranks, setting)
    assert not any(name.startswith("0.1.") for name in answers[0][1])


def test_fewer_queries_than_ranks_are_computed_by_all_of_them(two_ranks: RankPool) -> None:
    # One query has no negatives but its own hard ones.
    setting = Setting(num_queries=2, negatives=(3, 2), chunk_rows=2)
    assert_equals_one_shot(two_ranks, setting)


class Drawing(ContrastiveLoss):
    """A loss that doesn't stream and weighs its pairs at random, or by given weights."""

    def __init__(self, weights_P: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weights_P = weights_P

    def forward(self, q_QE: torch.Tensor, d_DE: torch.Tensor, structure: BatchStructure) -> torch.Tensor:
        rows, columns = structure.positives_P2.unbind(dim=1)
        if self.weights_P is None:
            self.weights_P = torch.rand(len(rows), dtype=torch.float64)
        return self.weights_P @ (q_QE[rows] - d_DE[columns]).square().sum(dim=1)


def test_a_loss_that_draws_random_numbers_draws_the_same_on_all_ranks(two_ranks: RankPool) -> None:
    answers = two_ranks.run(drawing_on)
    case, (weights_P, _, _, _) = make_case(dropout=0.0, negatives=1), answers[0]
    value = reference_step(case.pools, case.structure, Drawing(weights_P)).item()
    expected = gradients(case.encoder, Drawing())
    for drawn_P, loss, found, _ in answers:
        assert torch.equal(drawn_P, weights_P)
        assert loss == pytest.approx(value, rel=1e-11)
        assert_same_gradients(found, expected, 1e-10)
    assert answers[0][3] != answers[1][3], "the dropout of the next step is drawn by each rank for itself"


def drawing_on(rank: int) -> tuple[Any, float, Any, float]:
    case, loss = make_case(dropout=0.0, negatives=1), Drawing()
    assignment = assignment_of(case.structure.num_queries + case.structure.num_documents, "uneven")
    options = EngineOptions(ChunkBudget(4, 10**6), CPU, ranks=Ranks.of_this_process())
    engine = GradCacheEngine(loss, options, list(case.encoder.parameters()))
    torch.manual_seed(5 + rank)
    result = engine.step(pools_of(case, assignment.slots[rank]), case.structure, assignment=assignment)
    return loss.weights_P, result.loss, gradients(case.encoder, loss), torch.rand(1).item()


def test_drift_of_one_rank_is_raised_on_all_of_them(two_ranks: RankPool) -> None:
    for message in two_ranks.run(drift_on, Setting(dropout=0.1)):
        assert "relative difference" in message


def drift_on(rank: int, setting: Setting) -> str:
    try:
        step_on(rank, setting, replay=False)
    except ReplayDriftError as error:
        return str(error)
    return "nothing was raised"


def test_several_ranks_without_parameters_are_refused() -> None:
    options = EngineOptions(ChunkBudget(1, 1), CPU, ranks=Ranks(rank=0, world_size=2))
    with pytest.raises(ValueError, match="pass them"):
        GradCacheEngine(make("both directions", 3), options)
