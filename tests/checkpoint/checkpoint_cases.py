"""A small run to save: tensors that tell their step, and the folders it leaves."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.tensors import LoadedCheckpoint, whole

STAMP: dict[str, Any] = {"config_hash": "c0ffee", "strategy": "single", "world_size": 1, "model": "tiny"}


def tensors_of(step: int, *, rows: int = 4) -> dict[str, dict[str, Tensor]]:
    """Return the parts of a checkpoint; every value is the step."""
    return {
        "model": {"weight": torch.full((rows, 8), float(step)), "half": torch.full((3,), step, dtype=torch.bfloat16)},
        "optimizer": {"exp_avg/weight": torch.full((rows, 8), step / 7), "step/weight": torch.tensor(float(step))},
        "rng": {"cpu": torch.full((5,), step % 256, dtype=torch.uint8)},
    }


def save_step(manager: CheckpointManager, step: int, *, best: bool = False, rows: int = 4) -> Path | None:
    """Save a step of the small run."""
    return manager.save(
        step, tensors=tensors_of(step, rows=rows), state={"epoch": step / 10, "skipped": 0}, stamp=STAMP, best=best
    )


def assert_is_step(
    loaded: LoadedCheckpoint | None, step: int, expected: dict[str, dict[str, Tensor]] | None = None
) -> None:
    """Fail unless a checkpoint is, bit for bit, the one that `save_step` saved, or holds what is expected."""
    assert loaded is not None
    assert (loaded.step, loaded.state, loaded.stamp) == (step, {"epoch": step / 10, "skipped": 0}, STAMP)
    expected = expected or tensors_of(step)
    assert loaded.tensors.keys() == expected.keys()
    for part, tensors in expected.items():
        assert loaded.tensors[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded.tensors[part][name].dtype == tensor.dtype
            assert torch.equal(whole(loaded.tensors[part][name]), tensor), (part, name)


def names_in(folder: Path) -> list[str]:
    """Return everything in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


def flip_byte(path: Path, position: int) -> None:
    """Change one bit of a file, size and times of its folder aside."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def seal(manifest: Path, body: dict[str, Any]) -> None:
    """Write a manifest with its own checksum."""
    body = {key: value for key, value in body.items() if key != "checksum"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    manifest.write_text(json.dumps({**body, "checksum": hashlib.sha256(text.encode()).hexdigest()}))


def reseal(folder: Path, **changes: Any) -> None:
    """Change a manifest, and make its sizes and checksums right again, as far as it can be read."""
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes()) | changes
    for name, entry in body["files"].items():
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            entry.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    seal(path, body)
