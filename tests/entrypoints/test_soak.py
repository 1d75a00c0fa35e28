"""The soak of benchmarks/ finds what it is there to find."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import ROOT, Site, run_here, write_config
from test_resume_run import BERT, stop_at

from vembed.training.optimizer import Optimizer

if TYPE_CHECKING:
    from types import ModuleType

STEP = "checkpoints/step-00000002"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


compare = load("soak_compare").compare


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders as two equal runs leave them, which differ in times and in the checkpoint before the last."""
    for number, folder in enumerate((tmp_path / "whole/out", tmp_path / "other/out")):
        for name in ("checkpoints/step-00000001", STEP, "model"):
            (folder / name).mkdir(parents=True)
            (folder / name / "model.safetensors").write_bytes(bytes(range(200)))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row(step, number)) + "\n" for step in (1, 2)))
        (folder / "train.log").write_text(f"at {number} o'clock")
    shutil.rmtree(tmp_path / "other/out/checkpoints/step-00000001")
    return tmp_path / "whole", tmp_path / "other"


def row(step: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 0.5, "step_seconds": seconds, "samples_per_second": 9.5 + seconds} | changes


def test_equal_runs_are_equal_beside_times_and_which_checkpoints_are_kept(folders: tuple[Path, Path]) -> None:
    found = compare(*folders)
    assert (found.divergences, found.leftovers) == ((), ())


@pytest.mark.parametrize("name", ["out/model/model.safetensors", f"out/{STEP}/model.safetensors"])
def test_a_flipped_bit_is_found(folders: tuple[Path, Path], name: str) -> None:
    content = bytearray((folders[1] / name).read_bytes())
    content[150] ^= 1
    (folders[1] / name).write_bytes(content)
    assert compare(*folders).divergences == (f"{name}: differs first at byte 150",)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(1, 0), row(2, 0, loss=0.5000001)], "[1]/loss is 0.5 undisturbed, 0.5000001 now"),
        ([row(1, 0), row(2, 0), row(2, 0)], " has 2 entries undisturbed, 3 now"),
        ([row(1, 0), row(2, 0, more=1)], "[1]/more is on one side only"),
        ([row(1, 0), row(2, 0, loss=None)], "[1]/loss is 0.5 undisturbed, None now"),
    ],
)
def test_a_changed_line_of_metrics_is_found(folders: tuple[Path, Path], rows: list[Any], said: str) -> None:
    (folders[1] / "out/metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    assert compare(*folders).divergences == (f"out/metrics.jsonl: {said}",)


def test_what_is_missing_and_what_was_left_over_is_found(folders: tuple[Path, Path]) -> None:
    shutil.rmtree(folders[1] / "out" / STEP)
    (folders[1] / "out/model").rename(folders[1] / "out/.model.old")
    (folders[1] / "out/checkpoints/.saving-step-00000003").mkdir()
    (folders[1] / "link").symlink_to("/nowhere")
    found = compare(*folders)
    assert found.divergences == (f"out/{STEP}/model.safetensors is missing", "out/model/model.safetensors is missing")
    left = ("link", "out/.model.old/model.safetensors", "out/checkpoints/.saving-step-00000003/")
    assert found.leftovers == left


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluated_step": 0, "evaluations": [[0, {}]]}, ""),
        ({"evaluated_step": 0, "skipped_steps": 1}, "/run/skipped_steps is 0 undisturbed, 1 now"),
        ({"evaluations": [[0, {}]]}, "/run/evaluations has 2 entries undisturbed, 1 now"),
    ],
)
def test_a_checkpoint_may_lack_the_evaluation_that_a_stop_came_before_and_nothing_else(
    folders: tuple[Path, Path], changes: dict[str, Any], said: str
) -> None:
    run = {"step": 2, "skipped_steps": 0, "evaluated_step": 2, "evaluations": [[0, {}], [2, {}]]}
    for folder, found in zip(folders, (run, run | changes), strict=True):
        (folder / "out" / STEP / "state.json").write_text(json.dumps({"run": found}))
    assert compare(*folders).divergences == ((f"out/{STEP}/state.json: {said}",) if said else ())


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_resume_that_forgets_the_optimizer_is_a_divergence(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    configs = []
    for name in ("whole", "other"):
        configs.append(write_config(tmp_path / name, site.keys(**BERT) | {"output_dir": "out"}))
        monkeypatch.chdir(tmp_path / name)
        assert name == "other" or run_here(Path("config.yaml")).code == 0
    stop_at(monkeypatch, Path("config.yaml"), 8)
    if is_broken:
        monkeypatch.setattr(Optimizer, "restore", lambda self, tensors, packed: None)
    assert run_here(Path("config.yaml")).code == 0
    for config in configs:
        config.unlink()
    found = compare(tmp_path / "whole", tmp_path / "other")
    assert found.leftovers == ()
    weights = [each for each in found.divergences if each.startswith("out/model/model.safetensors: differs first at")]
    assert bool(found.divergences) == bool(weights) == is_broken, found.divergences
