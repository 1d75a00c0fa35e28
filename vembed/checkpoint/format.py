"""The checkpoint format: one folder per step, tensors in safetensors, everything else in JSON, no pickle.

    step-00001200/
        model.safetensors  optimizer.safetensors  ...    one file per part, and per process of what is shared out
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
import stat
from collections.abc import Mapping  # noqa: TC003 - the shape that a manifest is read as
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import vembed
from vembed.errors import MachineError
from vembed.files import write_durably
from vembed.json_text import fit, read_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""What state and stamps are made of."""

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"

STAMP_KEYS: Final = ("config_hash", "strategy", "world_size")
"""What every stamp holds, so that a resume can always be judged."""

_PACKAGES: Final = ("torch", "transformers", "numpy", "safetensors")
_STEP_NAME: Final = re.compile(r"step-([0-9]{8,18})")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,250}")
_PART_NAME: Final = re.compile(r"[a-z][a-z0-9_-]*")


class InvalidCheckpointError(MachineError):
    """A folder that isn't a whole checkpoint: something is missing, cut off or changed."""


class IncompleteCheckpointError(InvalidCheckpointError):
    """A whole checkpoint that lacks a part which the caller can't do without."""


class FutureCheckpointError(MachineError):
    """A checkpoint of a later format than this version of vembed reads."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one save writes.

    Raises:
        ValueError: A part's name can't be a file, a stamp key is missing, or a value isn't JSON.
    """

    step: int  # optimizer steps done
    best: bool  # whether no earlier checkpoint of the run has a better dev metric
    tensors: Mapping[str, Mapping[str, Tensor]]  # part ("model", "optimizer" ...) -> name -> tensor, on any device
    state: Mapping[str, JSON]  # the counters and numbers of the run
    stamp: Mapping[str, JSON]  # what the run is: `STAMP_KEYS`, and whatever else a resume compares

    def __post_init__(self) -> None:
        for part in self.tensors:
            if not _PART_NAME.fullmatch(part):
                raise ValueError(f"checkpoint part {part!r}: use lower-case letters, digits, '-' and '_'")
        if missing := [key for key in STAMP_KEYS if key not in self.stamp]:
            raise ValueError(f"checkpoint stamp: {', '.join(missing)} missing")
        _json_text(self.state, what="state")
        _json_text(self.stamp, what="stamp")

    @property
    def state_text(self) -> str:
        """What state.json holds."""
        return _json_text(self.state, what="state")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says of one file: its size in bytes and the SHA-256 of its content in hex digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says; the fields are its keys."""

    step: int
    best: bool
    stamp: Mapping[str, Any]
    packages: Mapping[str, str]  # package -> version that wrote it
    files: Mapping[str, FileEntry]  # every file but the manifest


def step_name(step: int) -> str:
    """Return the name of a step's folder, e.g. `step-00001200`."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step that a folder's name gives, or None when it isn't a checkpoint's name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def write_manifest(folder: Path, checkpoint: Checkpoint, files: Mapping[str, FileEntry]) -> None:
    """Write the manifest, the last file of a checkpoint; `files` are all the others, which are on disk.

    Raises:
        OSError: The disk refused.
    """
    ordered = {name: files[name] for name in sorted(files)}
    manifest = Manifest(checkpoint.step, checkpoint.best, checkpoint.stamp, _package_versions(), ordered)
    body = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    write_durably(folder / MANIFEST, json.dumps({**body, "checksum": _checksum(body)}, indent=1, allow_nan=False))


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check that every file has the size that it names; cheap.

    Raises:
        InvalidCheckpointError: No readable manifest, another step than the folder's name, a file missing or cut off.
        FutureCheckpointError: Written by a later version.
    """
    try:
        manifest = _parse_manifest(folder)
        for name, entry in manifest.files.items():
            status = (folder / name).stat()
            if not stat.S_ISREG(status.st_mode):
                raise InvalidCheckpointError(f"{folder / name}: no regular file")
            if status.st_size != entry.size:
                raise InvalidCheckpointError(f"{folder / name}: {status.st_size} bytes, the manifest says {entry.size}")
    except OSError as error:
        raise InvalidCheckpointError(f"{folder}: {error}") from error
    named = parse_step(folder.name)
    if named is not None and named != manifest.step:
        raise InvalidCheckpointError(f"{folder}: holds step {manifest.step}; the folder was renamed")
    return manifest


def _parse_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder, whose version must be known and whose checksum right."""
    path = folder / MANIFEST
    try:
        body = read_object(path)
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
        if unknown := body.keys() - {field.name for field in fields(Manifest)}:
            raise ValueError(f"unknown keys {sorted(unknown)}")
        manifest = fit(Manifest, body, where="manifest")
        if missing := [key for key in STAMP_KEYS if key not in manifest.stamp]:
            raise ValueError(f"its stamp holds no {', '.join(missing)}")
        if STATE not in manifest.files or not all(map(_FILE_NAME.fullmatch, manifest.files)):
            raise InvalidCheckpointError(f"{path}: names files that no checkpoint has")
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidCheckpointError(f"{path}: not a manifest ({error})") from error
    return manifest


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
