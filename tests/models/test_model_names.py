"""What the name of a model leads to: a folder, the model of a run, or the hub."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from vembed.errors import ConfigError
from vembed.models.hub import ModelFiles
from vembed.models.keys import ModelKeys
from vembed.models.names import locate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output folder of a run that has a model."""
    folder = tmp_path / "runs" / "first"
    (folder / "model").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "model" / "config.json").write_text("{}")
    return folder


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as refused:
        locate(name)
    return str(refused.value)


def test_a_run_stands_for_its_model_wherever_files_are_read(run: Path) -> None:
    model = run / "model"
    assert locate(str(run)).note == f"{run} is a run: its model is {model}"
    assert locate(str(model)) == (str(model), None)
    for name in (run, model):
        files = ModelFiles(ModelKeys(model_name=str(name)))
        assert (files.name, files.folder, files.keys.model_name) == (str(model), model, str(model))


def test_a_run_without_a_model_is_refused(run: Path) -> None:
    (run / "model" / "config.json").unlink()
    (run / "model").rmdir()
    assert refusal(str(run)).startswith(f"{run} is a run that has not finished: it has no model/ yet")


def test_a_path_that_leads_nowhere_is_told_as_a_path(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(f"{run}/modle") == (
        f"there is no folder {run}/modle (did you mean {run}/model?); name that of a model, or of a run"
    )
    assert refusal(str(tmp_path / "run" / "first" / "model")).startswith(
        f"there is no folder {tmp_path}/run/first/model (did you mean {run}/model?)"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("./nowhere", "../nowhere", "runs/first/zzzz", "runs/zzzz", "~/nowhere"):
        assert refusal(name) == f"there is no folder {name}; name that of a model, or of a run"
    assert (
        refusal("runs/frst")
        == "there is no folder runs/frst (did you mean runs/first?); name that of a model, or of a run"
    )
    with pytest.raises(ConfigError, match="there is no folder /no/such/folder; name that"):
        ModelFiles(ModelKeys(model_name="/no/such/folder"))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        ("bge-base-en-v1.5", "BAAI/bge-base-en-v1.5"),
        ("clip-ViT-B-32", "sentence-transformers/clip-ViT-B-32"),
        ("clip-vit-base-patch32", "openai/clip-vit-base-patch32"),
        ("Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-0.6B"),
    ],
)
def test_a_well_known_name_without_its_owner_gets_it(name: str, known: str) -> None:
    assert refusal(name) == f"{name} is no folder, and a name of the hub has an owner; did you mean {known}?"


@pytest.mark.parametrize(
    "name",
    [
        "bert-base-uncased",
        "owner/model",
        "builtin:static",
        "open_clip:hf-hub:owner/name",
        "a/text + b/picture",
        "runs/x",
        "google/model",
    ],
)
def test_other_names_are_left_to_the_hub_and_to_families(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "google").mkdir()  # a well-known owner, whose models may lie here too
    assert locate(name) == (name, None)


def test_names_are_judged_without_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, vembed.models.names; sys.exit('torch' in sys.modules)"], check=True
    )
