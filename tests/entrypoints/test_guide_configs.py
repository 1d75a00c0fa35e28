"""The guide's configurations of vision-language models train end to end, on a small model of the real class."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kit.picture_models import picture
from kit.runs import ROOT, Outcome, run_process
from kit.several_ranks import run_ranks
from transformers import AutoModel

import vembed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

STEPS = 24
SMALL = {
    "model_name": "builtin:tiny-qwen3-vl",
    "data_path": "builtin:shapes",
    "global_batch_size": 16,
    "max_steps": STEPS,
    "warmup_steps": 0,
    "eval_strategy": "no",
    "bm25": "false",
    "report_to": "none",
    "logging_steps": 1,
}


def trained(folder: Path, name: str, *, count: int = 1, **changes: Any) -> Outcome:
    """Run one of the guide's configurations, changed in what makes it small."""
    folder.mkdir()
    config = folder / "config.yaml"
    shutil.copy(ROOT / "configs" / name, config)
    keys = {**SMALL, "output_dir": str(folder / "out"), "num_processes": count, **changes}
    words = ["--config_override", *(f"{key}={value}" for key, value in keys.items())]
    done = run_process(config, *words) if count == 1 else run_ranks(config, *words, count=count)
    assert done.code == 0, done.err
    assert len(done.losses) == STEPS
    assert np.mean(done.losses[-4:]) < 0.9 * np.mean(done.losses[:2]), "it learns"
    assert all(row["replay_drift"] == 0 for row in done.rows)
    return done


def assert_reloads(done: Outcome) -> None:
    """Load the model that was written, by vembed and by transformers."""
    items = [picture(0), "a red circle", picture(1, (64, 64))]
    z = vembed.load(done.folder / "model").encode(items, side="document")
    assert np.linalg.norm(z, axis=1) == pytest.approx(1.0)
    assert abs(z[0] @ z[2]) < 1 - 1e-4
    assert type(AutoModel.from_pretrained(done.folder / "model")).__name__ == "Qwen3VLModel"


def test_the_2b_example_trains_with_gradient_caching(tmp_path: Path) -> None:
    done = trained(tmp_path / "one", "qwen3_vl_2b_gradcache.yaml", learning_rate=5e-4)
    plan = json.loads((done.folder / "plan.json").read_text("utf-8"))
    assert plan["gradient_cache_chunk_size"] == 8
    assert min(row["num_chunks"] for row in done.rows) >= 16 / 8 * 2
    assert_reloads(done)


def test_the_8b_example_trains_alike_on_one_process_and_on_two_that_share_its_weights(tmp_path: Path) -> None:
    name = "qwen3_vl_8b_fsdp_lora.yaml"
    alone = trained(tmp_path / "one", name, use_fsdp="false", learning_rate=3e-3)
    shared = trained(tmp_path / "two", name, count=2, learning_rate=3e-3)
    plan = json.loads((shared.folder / "plan.json").read_text("utf-8"))
    assert (plan["strategy"], plan["world_size"], plan["use_lora"]) == ("fsdp_lora", 2, True)
    assert shared.losses == pytest.approx(alone.losses, rel=1e-3)
    assert_reloads(alone)
    assert_reloads(shared)
