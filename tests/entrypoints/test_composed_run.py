"""Whole runs of composed towers: trained, stopped and resumed, written, exported; on one process and on two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.picture_models import picture, write_picture_model
from kit.runs import Outcome, Site, assert_same_run, run_keys, write_config, write_rows
from kit.several_ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModel

import vembed
from vembed.entrypoints import export

NAMES = ("red fox", "blue tree", "green car", "white lamp", "black river", "brown stone", "grey bird", "pink house")


@pytest.fixture(scope="module")
def keys(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run of 6 steps in which texts search pictures, by a BERT beside a ViT without dropout."""
    root = tmp_path_factory.mktemp("composed")
    files = {}
    for split, first in (("train", 0), ("dev", 100), ("test", 200)):
        rows = []
        for number in range(32 if split == "train" else 8):
            image = root / f"{split}-{number}.png"
            image.write_bytes(picture(first + number).read())
            rows.append({"query": f"a {NAMES[number % 8]} {number}", "positive_image": image.name})
        files[split] = write_rows(root / f"{split}.jsonl", rows)
    vit = write_picture_model(root / "vit", "vit")
    config = json.loads((vit / "config.json").read_text())
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (vit / "config.json").write_text(json.dumps(config | dropout))
    return site.keys(
        model_name=None,
        text_model_name=str(site.bert_without_dropout),
        image_model_name=str(vit),
        projection_dim=16,
        data_path=str(files["train"]),
        val_data_path=str(files["dev"]),
        test_data_path=str(files["test"]),
        max_steps=6,
        eval_steps=3,
        save_steps=3,
        gradient_cache_chunk_size=6,
        retain=0,
    )


@pytest.fixture(scope="module")
def done(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run of the BERT and the ViT, from start to end."""
    outcome = run_keys(tmp_path_factory.mktemp("done"), keys)
    assert outcome.code == 0, outcome.err
    return outcome


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted((folder / "model").rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def resumed(done: Path, folder: Path, keys: dict[str, Any]) -> Outcome:
    """Go on from step 3 of a finished run, as after a kill."""
    shutil.copytree(done, folder / "out")
    shutil.rmtree(folder / "out/checkpoints/step-00000006")
    return run_keys(folder, keys)


@pytest.mark.slow
def test_a_run_names_both_and_leaves_towers_that_load_by_themselves(
    keys: dict[str, Any], done: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert done.losses[-1] < done.losses[0]
    assert all(row["num_chunks"] > 1 for row in done.rows)
    log = " ".join((done.folder / "train.log").read_text("utf-8").split())
    assert "bert0 (texts) + vit (pictures)" in log
    assert "32 (texts) and 32 (pictures) to 16 dims" in log
    card = (done.folder / "model/README.md").read_text("utf-8")
    assert "Fine-tuned from bert0 + vit with vembed." in card
    assert keys["text_model_name"] not in card
    for part in ("text", "image"):
        AutoModel.from_pretrained(done.folder / "model" / part)
    capsys.readouterr()
    code = export.main([str(done.folder), "--output", str(done.folder.parent / "mine")], program="vembed export")
    assert code == 0
    model, again = (vembed.load(done.folder.parent / name) for name in ("out", "mine"))
    assert np.abs(model.encode(["a red fox"], side="query") - again.encode(["a red fox"], side="query")).max() < 1e-6
    words = [str(done.folder), "--output", str(done.folder.parent / "other"), "--format", "sentence-transformers"]
    assert export.main(words, program="vembed export") == 2
    assert "no library but vembed runs" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_is_the_one_that_never_stopped(keys: dict[str, Any], done: Outcome, tmp_path: Path) -> None:
    again = resumed(done.folder, tmp_path, keys)
    assert again.code == 0, again.err
    assert_same_run(done.folder, again.folder)
    one, other = weights_of(done.folder), weights_of(again.folder)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("what", [{"trainable": "text"}, {"use_lora": True, "lora_r": 2, "learning_rate": 1e-2}])
def test_a_frozen_tower_and_adapters_resume_too(keys: dict[str, Any], tmp_path: Path, what: dict[str, Any]) -> None:
    done = run_keys(tmp_path / "done", keys | what)
    assert done.code == 0, done.err
    held = load_file(done.folder / "checkpoints/step-00000006/model.safetensors")
    assert any(name.startswith("projections.text.") for name in held)
    assert any(name.startswith("image.") for name in held) == ("use_lora" in what)
    base, left = load_file(f"{keys['image_model_name']}/model.safetensors"), weights_of(done.folder)
    kept = {name: f"image/{name}" for name in base if f"image/{name}" in left}
    assert len(kept) > 0.9 * len(base)
    same = all(torch.equal(left[name], base[own]) for own, name in kept.items())
    assert same == ("trainable" in what), "LiT: the image tower stays bit for bit"
    again = resumed(done.folder, tmp_path / "again", keys | what)
    assert again.code == 0, again.err
    other = weights_of(again.folder)
    assert all(torch.equal(tensor, other[name]) for name, tensor in left.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"use_fsdp": False}, {"use_fsdp": True}, {"use_fsdp": True, "fsdp_mode": "sharded", "use_lora": True}]
)
def test_two_processes_follow_the_trajectory_of_one(keys: dict[str, Any], tmp_path: Path, how: dict[str, Any]) -> None:
    common = {**keys, "torch_dtype": "float64", "global_batch_size": 16, "batch_size": None}
    common |= {"use_lora": how.get("use_lora", False), "lora_r": 2 if "use_lora" in how else None}
    common = {key: value for key, value in common.items() if value is not None}
    one = run_keys(tmp_path / "one", common)
    two = run_ranks(write_config(tmp_path / "two", common | how | {"num_processes": 2}))
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert two.losses == pytest.approx(one.losses, rel=1e-6 if "use_lora" in how else 1e-10)
    left, right = weights_of(one.folder), weights_of(two.folder)
    assert left.keys() == right.keys()
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 1e-6


@pytest.mark.slow
def test_a_text_tower_from_scratch_resumes_with_its_tokenizer(keys: dict[str, Any], tmp_path: Path) -> None:
    own = keys | {"text_model_name": "builtin:tiny-transformer"}
    done = run_keys(tmp_path / "done", own)
    assert done.code == 0, done.err
    assert "builtin:tiny-transformer (texts) + vit (pictures)" in " ".join(
        (done.folder / "train.log").read_text("utf-8").split()
    )
    again = resumed(done.folder, tmp_path / "again", own)
    assert again.code == 0, again.err
    assert_same_run(done.folder, again.folder)


@pytest.mark.slow
def test_the_tower_that_no_data_reach_is_told(keys: dict[str, Any], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Path(keys["data_path"]).read_text("utf-8").splitlines()]
    names = [row["positive_image"] for row in rows]
    pairs = [{"query_image": one, "positive_image": two} for one, two in zip(names[::2], names[1::2], strict=True)]
    path = write_rows(tmp_path / "pairs.jsonl", pairs)
    own = keys | {
        "data_path": str(path),
        "val_data_path": str(path),
        "test_data_path": None,
        "retrieval_mode": "i2i",
        "encoder_mode": "composed",
        "eval_strategy": "no",
        "eval_steps": None,
        "image_root": keys["data_path"].rpartition("/")[0],
        "max_steps": 2,
        "save_steps": None,
    }
    outcome = run_keys(tmp_path, {key: value for key, value in own.items() if value is not None}, "--plan", "--details")
    assert outcome.code == 0, outcome.err
    assert outcome.flat.count("stays as it was loaded") == 1
    said = outcome.flat.partition("the text tower (")[2]
    # 19,872 of the BERT, whose files hold no pooler, and 16 x 32 + 16 of its projection.
    assert said.startswith("20,400 parameters) stays as it was loaded: the training data hold no texts.")
