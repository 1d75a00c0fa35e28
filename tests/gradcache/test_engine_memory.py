"""Out of memory: the same step again in smaller chunks, and nothing of the first attempt left."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from engine_cases import make_case
from rank_pool import RankPool
from test_engine import CPU, assert_same_gradients, gradients, make_loss

from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError
from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, StepResult
from vembed.gradcache.memory import is_out_of_memory, smaller
from vembed.gradcache.row_assignment import RowAssignment

NEGATIVES = [0, 3, 1, 7, 0, 0, 2, 1, 1]


class Limited(torch.nn.Module):
    """An encoder whose memory ends at a number of rows, in the forward pass or in the backward pass."""

    def __init__(self, encoder: torch.nn.Module, most_rows: int, where: str) -> None:
        super().__init__()
        self.encoder, self.most_rows, self.where = encoder, most_rows, where
        self.calls = 0

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        z: torch.Tensor = self.encoder(inputs)
        if len(z) <= self.most_rows:
            return z
        if self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if z.requires_grad:
            z.register_hook(self._fail)
        return z

    def _fail(self, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def limited_case(dropout: float, most_rows: int, where: str) -> tuple[Any, Limited]:
    case = make_case(dropout=dropout, negatives=NEGATIVES)
    encoder = Limited(case.encoder[0], most_rows, where)
    [pool] = case.pools
    case.pools = [type(pool)(encoder, pool.collate, pool.features, pool.slots)]
    return case, encoder


def run(case: Any, budget: ChunkBudget, retain: float = 0.0) -> tuple[StepResult, dict[str, torch.Tensor], Any]:
    loss = make_loss()
    engine = GradCacheEngine(loss, EngineOptions(budget, CPU, retain=retain), list(case.encoder.parameters()))
    torch.manual_seed(3)
    result = engine.step(case.pools, case.structure)
    return result, gradients(case.encoder, loss), engine


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("retain", [0.0, 0.6])
def test_the_repaired_step_is_bit_equal_to_one_that_began_with_the_smaller_budget(where: str, retain: float) -> None:
    case, encoder = limited_case(0.1, 5, where)
    result, found, engine = run(case, ChunkBudget(16, 10**6), retain)
    assert result.num_repairs > 0
    assert engine.budget.rows in (3, 4, 5)
    assert engine.retain == 0
    encoder.most_rows = 10**6
    expected_result, expected, _ = run(case, engine.budget)
    assert expected_result.num_repairs == 0
    assert result.loss == expected_result.loss
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_dropout_a_repair_changes_only_rounding(where: str) -> None:
    case, encoder = limited_case(0.0, 5, where)
    _, found, _ = run(case, ChunkBudget(16, 10**6))
    encoder.most_rows = 10**6
    _, expected, _ = run(case, ChunkBudget(16, 10**6))
    assert_same_gradients(found, expected, 1e-12)


def test_gradients_of_an_earlier_step_survive_a_repair() -> None:
    case, encoder = limited_case(0.0, 5, "backward")
    parameter = next(case.encoder.parameters())
    parameter.grad = torch.full_like(parameter, 2.0)
    _, found, _ = run(case, ChunkBudget(16, 10**6))
    encoder.most_rows = 10**6
    _, expected, _ = run(case, ChunkBudget(16, 10**6))
    name = next(iter(found))
    assert torch.allclose(found[name] - 2.0, expected[name], atol=1e-12)


def test_later_steps_keep_the_smaller_budget() -> None:
    case, encoder = limited_case(0.0, 5, "forward")
    _, _, engine = run(case, ChunkBudget(16, 10**6))
    encoder.calls = 0
    result = engine.step(case.pools, case.structure)
    assert result.num_repairs == 0
    assert encoder.calls == 2 * result.num_chunks


def test_a_single_row_that_does_not_fit_ends_with_advice() -> None:
    case, _ = limited_case(0.0, 0, "forward")
    with pytest.raises(MachineError, match=r"single row of \d+ tokens.*gradient_checkpointing"):
        run(case, ChunkBudget(16, 10**6))


def hungry_loss(most_calls: int) -> Any:
    """Return a loss whose memory ends, as often as that."""
    loss = make_loss()
    statistics = loss.statistics
    calls = []

    def failing(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) <= most_calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return statistics(batch)

    loss.statistics = failing
    return loss


def test_a_loss_that_does_not_fit_beside_kept_graphs_is_tried_again_without_them() -> None:
    case, _ = limited_case(0.0, 10**6, "forward")
    _, expected, _ = run(case, ChunkBudget(4, 10**6))
    case.encoder.zero_grad()
    loss = hungry_loss(1)
    options = EngineOptions(ChunkBudget(4, 10**6), CPU, retain=0.5)
    engine = GradCacheEngine(loss, options, list(case.encoder.parameters()))
    assert engine.step(case.pools, case.structure).num_repairs == 1
    assert engine.retain == 0
    assert_same_gradients(gradients(case.encoder, loss), expected, 1e-10)


def loss_out_of_memory_on(rank: int) -> str:
    case, encoder = limited_case(0.0, 10**6, "forward")
    num_rows = case.structure.num_queries + case.structure.num_documents
    rows = torch.arange(num_rows).numpy()
    assignment = RowAssignment((rows[::2], rows[1::2]))
    [pool] = case.pools
    pools = [type(pool)(encoder, pool.collate, pool.features.take(assignment.slots[rank]), assignment.slots[rank])]
    options = EngineOptions(ChunkBudget(4, 10**6), CPU, retain=0.5, ranks=Ranks.of_this_process())
    engine = GradCacheEngine(hungry_loss(1), options, list(case.encoder.parameters()))
    try:
        engine.step(pools, case.structure, assignment=assignment)
    except MachineError as error:
        return str(error)
    return ""


def test_a_loss_that_does_not_fit_by_itself_ends_with_advice_about_the_loss(two_ranks: RankPool) -> None:
    case, _ = limited_case(0.0, 10**6, "forward")
    options = EngineOptions(ChunkBudget(4, 10**6), CPU)
    engine = GradCacheEngine(hungry_loss(10**6), options, list(case.encoder.parameters()))
    with pytest.raises(MachineError, match=r"in the loss over \d+ embeddings.*set loss_tile_size"):
        engine.step(case.pools, case.structure)
    for rank, message in enumerate(two_ranks.run(loss_out_of_memory_on)):
        assert f"on rank {rank} in the loss over" in message
        assert "set retain: 0, or set loss_tile_size to a smaller number, or lower batch_size" in message


def test_repair_can_be_switched_off() -> None:
    case, _ = limited_case(0.0, 5, "forward")
    options = EngineOptions(ChunkBudget(16, 10**6), CPU, oom_retry=False)
    engine = GradCacheEngine(make_loss(), options, list(case.encoder.parameters()))
    with pytest.raises(MachineError, match="set oom_retry"):
        engine.step(case.pools, case.structure)


def test_other_errors_are_not_taken_for_memory() -> None:
    case, encoder = limited_case(0.0, 5, "forward")

    def broken(_: Any) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    encoder.forward = broken
    with pytest.raises(RuntimeError, match="mat1"):
        run(case, ChunkBudget(16, 10**6))
    assert not is_out_of_memory(RuntimeError("mat1"))


def test_budgets_halve_until_a_row_is_left() -> None:
    budget = ChunkBudget(2**31 - 1, 2**31 - 1, width_multiple=8)
    sizes = []
    rows, tokens = 9, 90
    while (shrunk := smaller(budget, rows=rows, tokens=tokens)) is not None:
        sizes.append((shrunk.rows, shrunk.tokens))
        budget, rows, tokens = shrunk, shrunk.rows, shrunk.tokens
    assert sizes == [(4, 45), (2, 22), (1, 11)]
    assert budget.width_multiple == 8


def repair_on(rank: int, failing_rank: int, where: str) -> tuple[int, int, dict[str, torch.Tensor]]:
    case, encoder = limited_case(0.0, 3 if rank == failing_rank else 10**6, where)
    num_rows = case.structure.num_queries + case.structure.num_documents
    rows = torch.arange(num_rows).numpy()
    assignment = RowAssignment((rows[::2], rows[1::2]))
    [pool] = case.pools
    own = assignment.slots[rank]
    case.pools = [type(pool)(encoder, pool.collate, pool.features.take(own), own)]
    options = EngineOptions(ChunkBudget(8, 10**6), CPU, ranks=Ranks.of_this_process())
    loss = make_loss()
    engine = GradCacheEngine(loss, options, list(case.encoder.parameters()))
    result = engine.step(case.pools, case.structure, assignment=assignment)
    return result.num_repairs, engine.budget.rows, gradients(case.encoder, loss)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_on_one_rank_repairs_all_alike(two_ranks: RankPool, where: str) -> None:
    case, _ = limited_case(0.0, 10**6, where)
    _, expected, _ = run(case, ChunkBudget(8, 10**6))
    for num_repairs, rows, found in two_ranks.run(repair_on, 1, where):
        assert num_repairs == 2
        assert rows == 2
        assert_same_gradients(found, expected, 1e-9)


REAL = """
import resource, sys
sys.path[:0] = {path!r}
import torch
from engine_cases import make_case
from test_engine import make_loss, CPU
from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine

class Hungry(torch.nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
    def forward(self, inputs):
        z = self.encoder(inputs)
        torch.empty(len(z) * 2**26, dtype=torch.uint8).zero_()  # 64 MB for each row
        return z

case = make_case(dropout=0.0, negatives=1)
[pool] = case.pools
pool = type(pool)(Hungry(case.encoder[0]), pool.collate, pool.features, pool.slots)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 6 * 2**26, used + 6 * 2**26))  # room for 5 rows
engine = GradCacheEngine(make_loss(), EngineOptions(ChunkBudget(18, 10**6), CPU), list(case.encoder.parameters()))
result = engine.step([pool], case.structure)
print(result.num_repairs, engine.budget.rows)
"""


@pytest.mark.slow
def test_a_real_allocation_that_fails_is_repaired() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", REAL.format(path=sys.path)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    num_repairs, rows = map(int, answer.stdout.split())
    assert num_repairs > 0
    assert 1 < rows <= 5
