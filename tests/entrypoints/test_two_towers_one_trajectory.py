"""One configuration of two towers, one trajectory: nothing of how a step is computed changes what is trained.

test_one_trajectory.py has the table of a text model. Here each axis is changed alone against a base run, then all
together; the last batch of each epoch is ragged, lengths are uneven, and every run has processes of its own.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
from kit.picture_models import write_picture_model
from kit.runs import Outcome, run_process, write_config, write_rows
from kit.several_ranks import run_ranks
from kit.text_models import edit_json

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NUM_ROWS, BATCH, STEPS = 37, 8, 30
"""37 = 4 x 8 + 5: every fifth step has 5 queries. 30 steps are 6 epochs."""

TWO = {"num_processes": 2}
AXES: dict[str, dict[str, Any]] = {
    "two replicated processes": TWO,
    "two processes, fast": TWO | {"use_fsdp": True, "fsdp_mode": "fast"},
    "two processes, lean": TWO | {"use_fsdp": True, "fsdp_mode": "lean"},
    "two processes, sharded": TWO | {"use_fsdp": True, "fsdp_mode": "sharded"},
    "small chunks": {"gradient_cache_chunk_size": 3, "retain": 0},
    "small chunks, all kept": {"gradient_cache_chunk_size": 3, "retain": 1},
    "another tile": {"loss_tile_size": 3},
    "all together": TWO
    | {"use_fsdp": True, "fsdp_mode": "lean", "gradient_cache_chunk_size": 2, "retain": 0.5, "loss_tile_size": 5},
}
COLOURS = ["red", "blue", "green", "white", "black", "brown", "grey", "pink", "gold", "teal"]
THINGS = ["fox", "tree", "car", "lamp", "river", "stone", "bird", "house", "boat", "hat"]


def captions() -> list[str]:
    """Return texts of 1 to 12 words."""
    chance = random.Random(3)
    lengths = [chance.choice([1, 2, 2, 3, 4, 6, 12]) for _ in range(NUM_ROWS)]
    return [" ".join(chance.choices(COLOURS + THINGS, k=length)) for length in lengths]


def clip_run(folder: Path) -> dict[str, Any]:
    rows = []
    for number, text in enumerate(captions()):
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number % 9, 24, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append({"query": f"{text} {number}", "positive_image": f"{number}.png"})
    model = write_picture_model(folder / "clip", "clip")
    config = json.loads((model / "config.json").read_text("utf-8"))
    towers = {name: config[name] | {"attention_dropout": 0.0} for name in ("text_config", "vision_config")}
    edit_json(model / "config.json", **towers)
    return {
        "model_name": str(model),
        "data_path": str(write_rows(folder / "train.jsonl", rows)),
        "test_data_path": str(write_rows(folder / "test.jsonl", rows[:8])),
        "loss_bidirectional": True,
    }


def launched(folder: Path, keys: dict[str, Any]) -> Outcome:
    start = run_ranks if keys["num_processes"] > 1 else run_process
    done = start(write_config(folder, keys))
    assert done.code == 0, done.err
    assert len(done.losses) == STEPS
    return done


@pytest.mark.parametrize(("dtype", "relative", "absolute"), [("float32", 1e-4, 1e-6), ("float64", 0.0, 1e-10)])
def test_losses_agree_whatever_is_changed_of_how_they_are_computed(
    tmp_path: Path, dtype: str, relative: float, absolute: float
) -> None:
    keys = clip_run(tmp_path) | {
        "torch_dtype": dtype,
        "global_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "temperature": 0.1,
        "learn_temperature": True,
        "eval_strategy": "no",
        "save_steps": None,
        "bm25": False,
        "report_to": "none",
    }
    base = launched(tmp_path / "base", keys | {"num_processes": 1})
    assert min(base.losses[-5:]) < 0.7 * base.losses[0], "it must learn something, or there is nothing to compare"
    differences = {}
    for name, changes in AXES.items():
        run = launched(tmp_path / name.replace(" ", "-"), keys | {"num_processes": 1} | changes)
        a, b = np.array(run.losses), np.array(base.losses)
        differences[name] = float((np.abs(a - b) - relative * np.abs(b)).max())
        plan = json.loads((run.folder / "plan.json").read_text("utf-8"))
        assert plan["world_size"] == changes.get("num_processes", 1)
        assert plan["mode"] == changes.get("fsdp_mode")
        if "gradient_cache_chunk_size" in changes:
            assert run.rows[0]["num_chunks"] > base.rows[0]["num_chunks"]
    print("beyond the relative tolerance:", {name: f"{value:.1e}" for name, value in differences.items()})
    assert all(value <= absolute for value in differences.values()), differences
