"""The format on disk doesn't change: a folder that an earlier version wrote loads, and the same is written today."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import names_in
from frozen_cases import FROZEN, STATE, STEP, known, load_known, save_known
from kit.ranks import RankPool
from safetensors import safe_open
from spread_cases import Kind
from torch import Tensor

from vembed.checkpoint.manager import CheckpointManager

FOLDER = FROZEN / f"step-{STEP:08d}"


def assert_known(tensors: dict[str, Tensor]) -> None:
    assert len(tensors) >= 20
    for name, tensor in tensors.items():
        part, _, leaf = name.partition("/")
        is_count = part == "optimizer" and leaf.startswith("step/")
        expected = torch.tensor(float(STEP)) if is_count else known(leaf, tuple(tensor.shape))
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("kind", ["sharded", "whole"])
def test_a_checkpoint_of_an_earlier_version_loads_bit_for_bit_on_two_processes(two_ranks: RankPool, kind: Kind) -> None:
    for tensors in two_ranks.run(load_known, kind):
        assert_known(tensors)


def test_it_loads_on_one_process_with_its_state_and_stamp() -> None:
    before = names_in(FROZEN)
    assert_known(load_known(0, "whole"))
    loaded = CheckpointManager(FROZEN).load(FOLDER)
    assert loaded is not None
    assert {key: loaded.state[key] for key in STATE} == STATE
    assert loaded.stamp["config"] == {"learning_rate": 0.01, "task_prompts": ["a", None]}
    assert CheckpointManager(FROZEN).best() == FOLDER
    assert names_in(FROZEN) == before, "a reader changes nothing"


def contents(path: Path) -> Any:
    """Return what a file holds, without what versions of packages change."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return file.metadata(), {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
    if path.suffix != ".json":
        return path.read_bytes()
    content = json.loads(path.read_bytes())
    if path.name == "state.json":
        for group in content["optimizer"]["groups"]:
            assert group.pop("settings")["lr"] == 0.01  # torch adds settings of its own from time to time
        return list(content.items())
    assert len(content.pop("checksum")) == 64
    for entry in content["files"].values():
        assert [(key, type(value)) for key, value in entry.items()] == [("size", int), ("sha256", str)]
    return list((content | {"files": list(content["files"]), "packages": list(content["packages"])}).items())


def test_the_same_files_are_written_today(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_known, tmp_path)
    assert names_in(tmp_path) == names_in(FROZEN) == ["BEST", "LATEST", FOLDER.name]
    assert names_in(tmp_path / FOLDER.name) == names_in(FOLDER)
    assert len(names_in(FOLDER)) == 8
    for path in (tmp_path / FOLDER.name).iterdir():
        assert contents(path) == contents(FOLDER / path.name), path.name
    for pointer in ("BEST", "LATEST"):
        assert contents(tmp_path / pointer) == contents(FROZEN / pointer)
