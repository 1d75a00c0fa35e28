"""Whole runs of two processes that share one copy of the weights: the same numbers as one process has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from kit.runs import Outcome, Site, run_process, write_config
from kit.several_ranks import exact, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CACHED = {"gradient_cache_chunk_size": 4, "retain": 0.5, "max_steps": 4, "eval_steps": 2}


@pytest.fixture(scope="module")
def alone(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    keys = exact(site, num_processes=1, batch_size=32, **CACHED)
    return run_process(write_config(tmp_path_factory.mktemp("alone"), keys))


@pytest.mark.parametrize("mode", ["fast", "lean", "sharded"])
def test_a_sharded_run_trains_evaluates_and_writes_the_model_of_one_process(
    site: Site, tmp_path: Path, alone: Outcome, mode: str
) -> None:
    keys = exact(site, num_processes=2, use_fsdp=True, fsdp_mode=mode, **CACHED)
    done = run_ranks(write_config(tmp_path, keys))
    assert (alone.code, done.code) == (0, 0), done.err
    plan = json.loads((done.folder / "plan.json").read_text("utf-8"))
    assert (plan["strategy"], plan["mode"], plan["world_size"]) == ("fsdp", mode, 2)
    assert done.losses == pytest.approx(alone.losses, abs=1e-9)
    norms, expected = ([row["grad_norm"] for row in each.rows] for each in (done, alone))
    assert norms == pytest.approx(expected, rel=1e-8)
    assert all(row["replay_drift"] == 0 for row in done.rows)
    assert done.last_line == alone.last_line
    assert {path.name for path in (done.folder / "model").iterdir()} == {
        path.name for path in (alone.folder / "model").iterdir()
    }


def test_adapters_mixed_precision_checkpointing_and_workers_go_together_with_sharding(
    site: Site, tmp_path: Path
) -> None:
    keys = site.keys(
        num_processes=2, use_fsdp=True, fsdp_mode="lean", use_lora=True, gradient_checkpointing=True, bf16=True,
        num_workers=1, learning_rate=0.02, **CACHED | {"retain": 0},
    )  # fmt: skip
    done = run_ranks(write_config(tmp_path, keys))
    assert done.code == 0, done.err
    assert len(done.losses) == 4
    assert all(row["replay_drift"] == 0 and row["grad_norm"] > 0 for row in done.rows)
