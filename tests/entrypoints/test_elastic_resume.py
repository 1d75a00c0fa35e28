"""A run that continues with its work spread in another way: the same batches, the same numbers to rounding."""

from __future__ import annotations

import functools
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from kit.runs import Outcome, Site, run_process, write_config
from kit.several_ranks import exact, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

pytestmark = pytest.mark.slow

SPREAD: Mapping[str, Mapping[str, Any]] = {
    "single": {"num_processes": 1},
    "ddp": {"num_processes": 2, "use_fsdp": False},
    "fsdp": {"num_processes": 2, "use_fsdp": True, "fsdp_mode": "fast"},
}


def run(config: Path, *words: str) -> Outcome:
    """Run a configuration in as many processes as it asks for."""
    start = run_ranks if yaml.safe_load(config.read_text("utf-8"))["num_processes"] > 1 else run_process
    return start(config, *words)


def keys(site: Site, spread: str) -> dict[str, Any]:
    return exact(site, global_batch_size=16, save_steps=3, gradient_cache_chunk_size=6, **SPREAD[spread])


@pytest.fixture(scope="module")
def run_of(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a run of 8 steps that is spread in a way, with checkpoints of steps 6 and 8."""

    @functools.cache
    def run_spread(spread: str) -> Path:
        folder = tmp_path_factory.mktemp(spread)
        outcome = run(write_config(folder, keys(site, spread)))
        assert outcome.code == 0, outcome.err
        assert json.loads((folder / "out/plan.json").read_text())["strategy"].startswith(spread)
        return folder / "out"

    return run_spread


@pytest.mark.parametrize(
    ("before", "after"), [("ddp", "single"), ("single", "fsdp"), ("fsdp", "ddp"), ("fsdp", "single")]
)
def test_a_run_goes_on_with_its_work_spread_otherwise_when_that_is_allowed(
    site: Site, run_of: Callable[[str], Path], tmp_path: Path, before: str, after: str
) -> None:
    straight_run = run_of(before)
    names = {path.name for path in (straight_run / "checkpoints/step-00000006").iterdir()}
    shards = {name for name in names if "rank-" in name}
    assert bool(shards) == (before == "fsdp")
    shutil.copytree(straight_run, tmp_path / "out")
    plan = (tmp_path / "out/plan.json").read_bytes()
    resume = str(tmp_path / "out/checkpoints/step-00000006")
    config = write_config(tmp_path, keys(site, after) | {"resume": resume})
    refused = run(config)
    assert refused.code == 2
    assert "was saved with other processes or another strategy" in refused.err
    assert "resume_elastic=true" in refused.err
    assert (tmp_path / "out/plan.json").read_bytes() == plan, "nothing of the run is replaced"
    resumed = run(config, "--config_override", "resume_elastic=true")
    assert resumed.code == 0, resumed.err
    straight = [json.loads(line) for line in (straight_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in resumed.rows] == [row["step"] for row in straight] == list(range(1, 9))
    for row, expected in zip(resumed.rows, straight, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-9), row["step"]
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9), row["step"]


def test_a_sharded_run_that_is_spread_as_before_needs_no_leave_to_go_on(
    site: Site, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(run_of("fsdp"), tmp_path / "out")
    resume = str(tmp_path / "out/checkpoints/step-00000006")
    resumed = run(write_config(tmp_path, keys(site, "fsdp") | {"resume": resume}))
    assert resumed.code == 0, resumed.err
    straight = [json.loads(line) for line in (run_of("fsdp") / "metrics.jsonl").read_text().splitlines()]
    for name in ("step", "loss", "grad_norm"):
        assert [row[name] for row in resumed.rows] == [row[name] for row in straight], name
