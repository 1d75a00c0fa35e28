"""The checkpoint format: one folder per step, tensors in safetensors, everything else in JSON, no pickle.

    step-00001200/
        model.safetensors  optimizer.safetensors  ...    one file per part
        state.json                                       step, epoch, best metric, skipped steps ...
        manifest.json                                    written last: the run's stamp, size and SHA-256 of the rest

A folder is a checkpoint only when its manifest matches every file. The manifest carries a checksum of itself, so that
no single wrong byte anywhere goes unseen.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import vembed
from vembed.errors import MachineError, NonFiniteError
from vembed.files import file_sha256, fsync_path, write_durably

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""What state and stamps are made of."""

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
TENSOR_SUFFIX: Final = ".safetensors"

STAMP_KEYS: Final = ("config_hash", "strategy", "world_size")
"""What every stamp holds, so that a resume can always be judged."""

_WEIGHT_PARTS: Final = ("model", "loss")
_PACKAGES: Final = ("torch", "transformers", "numpy", "safetensors")
_STEP_NAME: Final = re.compile(r"step-(\d{8,})")
_PART_NAME: Final = re.compile(r"[a-z][a-z0-9_-]*")


class InvalidCheckpointError(MachineError):
    """A folder that isn't a whole checkpoint: something is missing, cut off or changed."""


class FutureCheckpointError(MachineError):
    """A checkpoint of a later format than this version of vembed reads."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one save writes.

    Attributes:
        step: Optimizer steps done.
        best: True when no earlier checkpoint of the run has a better dev metric.
        tensors: Part ("model", "optimizer", "loss", "rng" ...) -> name -> tensor, on any device.
        state: The counters and numbers of the run.
        stamp: What the run is: `config_hash`, `strategy`, `world_size`, and whatever else a resume compares.

    Raises:
        ValueError: A part's name can't be a file, a stamp key is missing, or a value isn't JSON.
    """

    step: int
    best: bool
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, JSON]
    stamp: Mapping[str, JSON]

    def __post_init__(self) -> None:
        for part in self.tensors:
            if not _PART_NAME.fullmatch(part):
                raise ValueError(f"checkpoint part {part!r}: use lower-case letters, digits, '-' and '_'")
        if missing := [key for key in STAMP_KEYS if key not in self.stamp]:
            raise ValueError(f"checkpoint stamp: {', '.join(missing)} missing")
        _json_text(self.state, what="state")
        _json_text(self.stamp, what="stamp")

    @property
    def num_bytes(self) -> int:
        """Bytes that the folder will hold, tensors and JSON; file headers are left to the caller's margin."""
        tensors = sum(t.numel() * t.element_size() for part in self.tensors.values() for t in part.values())
        return tensors + len(_json_text(self.state, what="state")) + len(_json_text(self.stamp, what="stamp"))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says of one file: its size in bytes and the SHA-256 of its content in hex digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says.

    Attributes:
        step: Optimizer steps done.
        best: Whether it was the best of its run when it was written.
        stamp: What the run is.
        packages: Package -> version that wrote it.
        files: File name -> size and SHA-256, every file but the manifest.
    """

    step: int
    best: bool
    stamp: Mapping[str, JSON]
    packages: Mapping[str, str]
    files: Mapping[str, FileEntry]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint whose every byte was checked; tensors are on the CPU.

    Attributes:
        path: Its folder.
        step: Optimizer steps done.
        tensors: Part -> name -> tensor. Memory-mapped: a part that is never read costs no memory.
        state: The counters and numbers of the run.
        stamp: What the run was.
        packages: Package -> version that wrote it.
    """

    path: Path
    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, JSON]
    stamp: Mapping[str, JSON]
    packages: Mapping[str, str]


def step_name(step: int) -> str:
    """Return the name of a step's folder, e.g. `step-00001200`."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step that a folder's name gives, or None when it isn't a checkpoint's name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def refuse_nonfinite(checkpoint: Checkpoint) -> None:
    """Refuse weights that are NaN or infinite: a saved checkpoint can always be trained on.

    Raises:
        NonFiniteError: Names the first such tensors of the model and the loss.
    """
    bad = [
        f"{part}/{name}"
        for part in _WEIGHT_PARTS
        for name, tensor in checkpoint.tensors.get(part, {}).items()
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all())
    ]
    if bad:
        shown = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        raise NonFiniteError(
            f"step {checkpoint.step}: {shown} holds NaN or infinite weights, so the checkpoint is not saved. "
            "The last saved one is whole: resume from it with a lower learning_rate or max_grad_norm."
        )


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> int:
    """Write a checkpoint into a new folder, each file forced to disk, the manifest last.

    Args:
        folder: Must not exist; only a rename by the caller turns it into a checkpoint.
        checkpoint: What to write.

    Returns:
        Bytes written.

    Raises:
        OSError: The disk refused.
    """
    folder.mkdir()
    for part, tensors in checkpoint.tensors.items():
        _write_tensors(folder / f"{part}{TENSOR_SUFFIX}", tensors)
    write_durably(folder / STATE, _json_text(checkpoint.state, what="state"))
    files = {path.name: FileEntry(path.stat().st_size, file_sha256(path)) for path in sorted(folder.iterdir())}
    manifest = Manifest(checkpoint.step, checkpoint.best, checkpoint.stamp, _package_versions(), files)
    body = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    write_durably(folder / MANIFEST, json.dumps({**body, "checksum": _checksum(body)}, indent=1, allow_nan=False))
    fsync_path(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check that every file has the size that it names; cheap.

    Raises:
        InvalidCheckpointError: No readable manifest, another step than the folder's name, a file missing or cut off.
        FutureCheckpointError: Written by a later version.
    """
    try:
        manifest = _parse_manifest(folder, (folder / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest.files.items():
            size = (folder / name).stat().st_size
            if size != entry.size:
                raise InvalidCheckpointError(f"{folder / name}: {size} bytes, the manifest says {entry.size}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidCheckpointError(f"{folder}: {error}") from error
    named = parse_step(folder.name)
    if named is not None and named != manifest.step:
        raise InvalidCheckpointError(f"{folder}: holds step {manifest.step}; the folder was renamed")
    return manifest


def validate(folder: Path) -> Manifest:
    """Check every byte of a checkpoint against its manifest.

    Raises:
        InvalidCheckpointError: Something is missing, cut off or changed; the message names the file.
        FutureCheckpointError: Written by a later version.
    """
    manifest = read_manifest(folder)
    try:
        for name, entry in manifest.files.items():
            if file_sha256(folder / name) != entry.sha256:
                raise InvalidCheckpointError(f"{folder / name}: the content has changed (SHA-256 differs)")
    except OSError as error:
        raise InvalidCheckpointError(f"{folder}: {error}") from error
    return manifest


def read_checkpoint(folder: Path, manifest: Manifest, *, required: Collection[str]) -> LoadedCheckpoint:
    """Read a checkpoint that was validated.

    Args:
        folder: Its folder.
        manifest: What `validate` returned.
        required: Parts or keys of the state that must be there.

    Raises:
        InvalidCheckpointError: One of them is missing, or a file can't be read.
    """
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        tensors = {
            name.removesuffix(TENSOR_SUFFIX): load_file(folder / name)
            for name in manifest.files
            if name.endswith(TENSOR_SUFFIX)
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise InvalidCheckpointError(f"{folder}: {error}") from error
    if missing := [name for name in required if name not in tensors and name not in state]:
        raise InvalidCheckpointError(
            f"{folder}: holds no {', '.join(missing)}, so the run can't go on exactly where it stopped "
            f"(it holds {', '.join([*tensors, *state])}). Resume from another checkpoint, or set resume: never."
        )
    return LoadedCheckpoint(folder, manifest.step, tensors, state, manifest.stamp, manifest.packages)


def _parse_manifest(folder: Path, text: str) -> Manifest:
    """Return the manifest of a text whose version is known and whose checksum is right."""
    path = folder / MANIFEST
    try:
        body = json.loads(text)
        version, checksum = body["format_version"], body.pop("checksum", "")
        # The version comes first: a later format may compute its checksum otherwise.
        if version > FORMAT_VERSION:
            raise FutureCheckpointError(
                f"{path}: format version {version}, but vembed {vembed.__version__} reads up to {FORMAT_VERSION}. "
                "Upgrade vembed, or name an older checkpoint with --resume PATH."
            )
        if version != FORMAT_VERSION or checksum != _checksum(body):
            raise InvalidCheckpointError(f"{path}: the content has changed (version or checksum is wrong)")
        del body["format_version"]
        body["files"] = {name: FileEntry(**entry) for name, entry in body["files"].items()}
        manifest = Manifest(**body)
        if STATE not in manifest.files or any("/" in name or name.startswith(".") for name in manifest.files):
            raise InvalidCheckpointError(f"{path}: names files that no checkpoint has")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidCheckpointError(f"{path}: not a manifest ({error})") from error
    return manifest


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one part and force it to disk.

    Raises:
        OSError: The disk refused; safetensors reports that with an exception of its own.
    """
    try:
        save_file(dict(_unshared(tensors)), path)
    except SafetensorError as error:
        if "I/O error" not in str(error):
            raise
        raise OSError(f"{path.name}: {error}") from error
    # safetensors makes files for their owner only; a checkpoint is as readable as the folder that it lies in.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync_path(path)


def _unshared(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors on the CPU, contiguous, tied ones copied: safetensors refuses two names for one memory."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        memory = plain.untyped_storage().data_ptr()
        yield name, plain.clone() if memory in seen else plain
        seen.add(memory)


def _package_versions() -> dict[str, str]:
    """Return the versions of what computes and writes a checkpoint."""
    versions = {"vembed": vembed.__version__}
    for package in _PACKAGES:
        versions[package] = importlib.metadata.version(package)
    return versions


def _checksum(body: Mapping[str, object]) -> str:
    """Return the SHA-256 of a manifest's content, whatever its layout."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _json_text(value: Mapping[str, JSON], *, what: str) -> str:
    """Return JSON text.

    Raises:
        ValueError: A value is NaN, infinite or of a type that JSON doesn't have.
    """
    try:
        return json.dumps(value, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint {what} can't be written as JSON: {error}") from error
