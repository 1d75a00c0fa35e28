"""Whole runs of which a part of the model trains: adapters beside a frozen base, frozen layers, weights in bfloat16."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.runs import Outcome, Site, assert_same_run, evaluation, run_keys, write_config
from kit.several_ranks import run_ranks
from safetensors.torch import load_file, save_file

from vembed.checkpoint.format import read_manifest, write_manifest

if TYPE_CHECKING:
    from pathlib import Path

LORA = {
    "use_lora": True,
    "lora_r": 4,
    "lora_dropout": 0.1,
    "learning_rate": 1e-2,
    "max_steps": 6,
    "save_steps": 3,
    "eval_strategy": "no",
    "eval_steps": None,
    "val_data_path": None,
    "gradient_cache_chunk_size": 6,
    "retain": 0,
}


@pytest.fixture(scope="module")
def lora(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run with adapters, from start to end."""
    outcome = run_keys(tmp_path_factory.mktemp("lora"), site.keys(**LORA))
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.mark.slow
def test_a_run_keeps_adapters_in_its_checkpoints_and_leaves_a_merged_model(site: Site, lora: Outcome) -> None:
    assert lora.losses[-1] < lora.losses[0]
    assert all(row["num_chunks"] > 1 for row in lora.rows)
    held = load_file(lora.folder / "checkpoints/step-00000006/model.safetensors")
    assert all(".lora_A." in name or ".lora_B." in name for name in held)
    layers = 2 * (4 * (32 + 32) + (32 + 64) + (64 + 32))  # query, key, value, output; up; down
    assert sum(tensor.numel() for tensor in held.values()) == 4 * layers
    optimizer = load_file(lora.folder / "checkpoints/step-00000006/optimizer.safetensors")
    assert sum(tensor.numel() for name, tensor in optimizer.items() if name.startswith("exp_avg/")) == 4 * layers
    base, merged = load_file(site.bert / "model.safetensors"), load_file(lora.folder / "model/model.safetensors")
    assert merged.keys() == base.keys()
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert changed == {name.replace(".lora_A.default", "").removeprefix("backbone.") for name in held if "_A" in name}
    assert json.loads((lora.folder / "adapter/adapter_config.json").read_text())["r"] == 4
    plan = json.loads((lora.folder / "plan.json").read_text())
    assert plan["model"]["trains"].startswith("LoRA adapters (rank 4, scale 2, on dense, key, query, value of the text")


@pytest.mark.slow
def test_what_was_evaluated_is_the_model_that_is_left(lora: Outcome) -> None:
    import vembed

    test = lora.folder.parent / "again"
    config = json.loads((lora.folder / "checkpoints/step-00000006/manifest.json").read_text())["stamp"]["config"]
    vembed.evaluate(str(lora.folder / "model"), config["test_data_path"], output=test)
    (found,) = test.rglob("metrics.json")
    again = json.loads(found.read_text())["metrics"]
    metrics = evaluation(lora.folder, "final")["metrics"]
    assert {name: again[name] for name in metrics} == pytest.approx(metrics, abs=1e-6)
    assert metrics != evaluation(lora.folder, "baseline")["metrics"]


@pytest.mark.slow
def test_a_base_that_is_rounded_in_memory_leaves_a_model_of_float32_sums(site: Site, tmp_path: Path) -> None:
    import vembed

    keys = site.keys(**LORA | {"lora_target_modules": ["query"], "bf16": True, "num_processes": 2})
    done = run_ranks(write_config(tmp_path, keys))
    assert done.code == 0, done.err
    plan = json.loads((done.folder / "plan.json").read_text())
    assert any(reason.startswith("frozen weights: ") for reason in plan["reasons"])
    base, merged = load_file(site.bert / "model.safetensors"), load_file(done.folder / "model/model.safetensors")
    factors = load_file(done.folder / "adapter/adapter_model.safetensors")
    for name, tensor in merged.items():
        first = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
        delta = 2.0 * factors[first.replace("lora_A", "lora_B")] @ factors[first] if first in factors else None
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, base[name]) == (delta is None)
        assert delta is None or torch.allclose(tensor, base[name] + delta, rtol=1e-6, atol=1e-8)
    manifest = json.loads((done.folder / "checkpoints/step-00000006/manifest.json").read_text())
    data = manifest["stamp"]["config"]["test_data_path"]
    vembed.evaluate(str(done.folder / "model"), data, output=tmp_path / "again")
    (found,) = (tmp_path / "again").rglob("metrics.json")
    again, metrics = json.loads(found.read_text())["metrics"], evaluation(done.folder, "final")["metrics"]
    assert {name: again[name] for name in metrics} == pytest.approx(metrics, abs=0.05), "float32 beside mixed precision"


def stopped_after_three(lora: Outcome, folder: Path) -> Path:
    """Copy a run and take away what it did after its first checkpoint."""
    shutil.copytree(lora.folder, folder / "out")
    shutil.rmtree(folder / "out/checkpoints/step-00000006")
    shutil.rmtree(folder / "out/model")
    return folder / "out"


@pytest.mark.slow
def test_a_resumed_run_with_adapters_is_the_run_that_was_never_stopped(
    site: Site, lora: Outcome, tmp_path: Path
) -> None:
    folder = stopped_after_three(lora, tmp_path)
    resumed = run_keys(tmp_path, site.keys(**LORA))
    assert resumed.code == 0, resumed.err
    assert "resume: continuing from" in resumed.out
    assert_same_run(lora.folder, folder)


@pytest.mark.slow
def test_adapters_that_another_machine_chose_are_planned_for_where_the_run_goes_on(
    site: Site, lora: Outcome, tmp_path: Path
) -> None:
    """With `auto` no plan gives so small a model adapters; one for less memory and a larger model does."""
    folder = stopped_after_three(lora, tmp_path)
    manifest = read_manifest(folder / "checkpoints/step-00000003")
    assert isinstance(manifest.stamp["config"], dict)
    stamp = manifest.stamp | {"config": manifest.stamp["config"] | {"use_lora": "auto"}}
    write_manifest(folder / "checkpoints/step-00000003", replace(manifest, stamp=stamp))
    resumed = run_keys(tmp_path, site.keys(**LORA | {"use_lora": "auto"}))
    assert resumed.code == 0, resumed.err
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["use_lora"] is True
    (chosen,) = [candidate for candidate in plan["candidates"] if candidate["recommended"]]
    assert chosen["use_lora"] is True
    assert resumed.losses[3:] == lora.losses[3:]


@pytest.mark.slow
def test_a_checkpoint_is_refused_by_another_base(site: Site, lora: Outcome, tmp_path: Path) -> None:
    """The base isn't in the checkpoint: the run reads it again, where it may have changed."""
    stopped_after_three(lora, tmp_path)
    weights = load_file(site.bert / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in weights.items()}
    weights["encoder.layer.1.output.dense.weight"] *= 1.01
    save_file(weights, site.bert / "model.safetensors", metadata={"format": "pt"})
    try:
        refused = run_keys(tmp_path, site.keys(**LORA))
    finally:
        save_file(before, site.bert / "model.safetensors", metadata={"format": "pt"})
    assert refused.code == 2
    assert "belongs to another run" in refused.err
    assert "base" in refused.err
    assert run_keys(tmp_path, site.keys(**LORA)).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {**LORA, "torch_dtype": "bfloat16"},
        {**LORA, "use_lora": False, "lora_r": None, "lora_dropout": None, "torch_dtype": "bfloat16"},
        {**LORA, "use_lora": False, "lora_r": None, "lora_dropout": None, "trainable": "last_1_layers"},
        {**LORA, "gradient_checkpointing": True},
        {**LORA, "model_name": "builtin:tiny-transformer"},
    ],
    ids=["adapters on bfloat16", "all in bfloat16", "last layer", "checkpointed adapters", "adapters from scratch"],
)
def test_other_ways_to_train_a_part_run_to_their_end(site: Site, tmp_path: Path, keys: dict[str, Any]) -> None:
    outcome = run_keys(tmp_path, site.keys(**keys))
    assert outcome.code == 0, outcome.err
    assert outcome.losses[-1] < outcome.losses[0]
    weights = load_file(outcome.folder / "model/model.safetensors")
    expected = torch.bfloat16 if keys.get("torch_dtype") else torch.float32
    assert {tensor.dtype for tensor in weights.values()} == {expected}
    held = load_file(outcome.folder / "checkpoints/step-00000006/model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == ({expected} if not keys["use_lora"] else {torch.float32})
    assert run_keys(tmp_path, site.keys(**keys)).code == 0, "a finished run may be run again"


def test_a_part_that_the_model_has_not_is_refused_before_training(site: Site, tmp_path: Path) -> None:
    outcome = run_keys(tmp_path, site.keys(trainable="vision"))
    assert outcome.code == 2
    assert "has no vision tower; it has all, text, last_1_layers to last_2_layers" in outcome.err
    assert not (tmp_path / "out/checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {**LORA, "lora_dropout": 0.0},
        {**LORA, "lora_dropout": 0.0, "use_fsdp": True},
        {**LORA, "use_lora": False, "lora_r": None, "lora_dropout": None, "trainable": "last_1_layers"},
    ],
    ids=["adapters", "sharded adapters", "last layer"],
)
def test_two_processes_train_a_part_as_one_does(site: Site, tmp_path: Path, keys: dict[str, Any]) -> None:
    keys = {**keys, "model_name": str(site.bert_without_dropout), "max_grad_norm": None}
    one = run_keys(tmp_path / "one", site.keys(**{**keys, "use_fsdp": None}))
    assert one.code == 0, one.err
    both = run_ranks(write_config(tmp_path / "two", site.keys(**keys, num_processes=2, batch_size=8)))
    assert both.code == 0, both.err
    assert both.losses == pytest.approx(one.losses, rel=1e-4)
    plan = json.loads((both.folder / "plan.json").read_text())
    assert plan["world_size"] == 2
    assert plan["strategy"].startswith("fsdp") == bool(keys.get("use_fsdp"))
    weights = [load_file(each.folder / "model/model.safetensors") for each in (one, both)]
    assert weights[0].keys() == weights[1].keys()
    base = load_file(site.bert_without_dropout / "model.safetensors")
    for name, tensor in weights[0].items():
        assert (weights[1][name] - tensor).abs().max() < 1e-3, name
        assert torch.equal(weights[1][name], base[name]) == torch.equal(tensor, base[name]), name
    assert (both.folder / "adapter").is_dir() == bool(keys["use_lora"])
