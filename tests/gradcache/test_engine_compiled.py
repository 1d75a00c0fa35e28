"""Sharded encoders whose layers are compiled have the gradients of one shot, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sharded_cases
import torch
from kit import ranks
from sharded_cases import Sharded, step_on
from test_engine import assert_same_gradients
from test_engine_fsdp import expected_of
from torch._dynamo.utils import counters

from vembed.distributed.fsdp import transformer_blocks

if TYPE_CHECKING:
    from engine_cases import Case
    from kit.ranks import RankPool


def compiled_step_on(rank: int, setting: Sharded) -> tuple[Any, dict[str, torch.Tensor], int, dict[str, int]]:
    """Do a step with layers that are compiled before they are sharded; return what was compiled, too."""
    plain = sharded_cases.case_of

    def compiled(setting: Sharded) -> Case:
        case = plain(setting)
        for layer in transformer_blocks(case.encoder):
            layer.compile(dynamic=True, fullgraph=True, backend="aot_eager")
        return case

    torch._dynamo.reset()
    counters.clear()
    sharded_cases.case_of = compiled
    try:
        with torch._dynamo.config.patch(recompile_limit=64):
            result, found, _ = step_on(rank, setting)
    finally:
        sharded_cases.case_of = plain
    return result, found, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Sharded("fast", retain=0.5),
        Sharded("lean", encoder="clip", assignment="queries apart"),
        Sharded("lean", encoder="open_clip", assignment="queries apart"),
        Sharded("sharded", encoder="lora"),
        Sharded("sharded", checkpointing=True),
    ],
    ids=["fast", "lean clip", "lean open_clip", "sharded lora", "sharded checkpointing"],
)
def test_sharding_and_compiling_go_together(
    two_ranks: RankPool, setting: Sharded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_SECONDS", 400)  # two compilers on a busy machine
    value, expected = expected_of(setting)
    for result, found, num_graphs, breaks in two_ranks.run(compiled_step_on, setting):
        assert num_graphs > 0
        assert not breaks
        assert result.loss == pytest.approx(value, rel=1e-11)
        assert result.replay_drift <= 1e-12
        assert_same_gradients(found, expected, 1e-10)
