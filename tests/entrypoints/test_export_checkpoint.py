"""`vembed export RUN --checkpoint STEP`: what a checkpoint holds as a model, whether or not its run has ended."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.runs import Site, run_keys, steps_saved
from safetensors.torch import load_file, save_file
from test_export import export

from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.tensors import whole

if TYPE_CHECKING:
    from kit.runs import Outcome


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_checkpoint_of_a_run_that_has_not_ended_becomes_a_model(finished: Outcome, tmp_path: Path) -> None:
    shutil.copytree(finished.folder / "checkpoints", tmp_path / "run/checkpoints")
    newest = steps_saved(finished.folder)[-1]
    code, out, err = export(tmp_path / "run", "--checkpoint", str(newest), "--output", tmp_path / "model")
    assert code == 0, err
    assert "read back by vembed" in out
    assert f"not of step {newest}" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"], "nothing stays beside it"
    loaded = CheckpointManager(tmp_path / "run/checkpoints").load("auto")
    assert loaded is not None
    assert loaded.step == newest
    saved, exported = loaded.tensors["model"], weights(tmp_path / "model")
    assert exported
    assert all(torch.equal(whole(saved[f"backbone.{name}"]), tensor) for name, tensor in exported.items())


def test_a_step_without_a_checkpoint_and_a_folder_without_any_are_refused(finished: Outcome, tmp_path: Path) -> None:
    code, _, err = export(finished.folder, "--checkpoint", "3", "--output", tmp_path / "model")
    assert code == 2
    assert "has no checkpoint of step 3; it has: " + ", ".join(map(str, steps_saved(finished.folder))) in err
    code, _, err = export(finished.folder / "model", "--checkpoint", "16", "--output", tmp_path / "model")
    assert code == 2
    assert "has no checkpoints; name the output folder of a run" in err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_the_model_of_a_checkpoint_costs_one_line_and_leaves_nothing(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def full(path: Path, *words: Any, **options: Any) -> int:
        if ".model.checkpoint" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, *words, **options)

    monkeypatch.setattr(Path, "write_text", full)
    newest = steps_saved(finished.folder)[-1]
    code, _, err = export(finished.folder, "--checkpoint", str(newest), "--output", tmp_path / "model")
    assert code == 5
    assert f"the model of step {newest} can't be written: [Errno 28] No space left on device" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_adapters_are_merged_into_the_model_that_they_were_trained_beside_and_no_other(
    site: Site, tmp_path: Path
) -> None:
    shutil.copytree(site.bert, tmp_path / "bert")
    keys = {"model_name": str(tmp_path / "bert"), "use_lora": True, "lora_r": 4, "learning_rate": 1e-2, "max_steps": 4,
            "eval_strategy": "no", "eval_steps": None, "val_data_path": None}  # fmt: skip
    run = run_keys(tmp_path / "lora", site.keys(**keys))
    assert run.code == 0, run.err
    assert export(run.folder, "--checkpoint", "4", "--output", tmp_path / "model")[0] == 0
    kept, exported = weights(run.folder / "model"), weights(tmp_path / "model")
    assert kept.keys() == exported.keys()
    assert all(torch.equal(kept[name], exported[name]) for name in kept)
    base = weights(tmp_path / "bert")
    assert any(not torch.equal(base[name], exported[name]) for name in base)
    changed = {name: tensor + 1 for name, tensor in base.items()}
    save_file(changed, tmp_path / "bert/model.safetensors", {"format": "pt"})
    code, _, err = export(run.folder, "--checkpoint", "4", "--output", tmp_path / "other")
    assert code == 2
    assert "is no longer the model that it was trained beside" in err
