"""The checkpoint format: one folder per step, tensors in safetensors, everything else in JSON, no pickle.

    step-00001200/
        model.safetensors  optimizer.safetensors  ...    one file per part, and per process of what is shared out
        state.json                                       step, epoch, best metric, skipped steps ...
        manifest.json                                    written last: the run's stamp, size and SHA-256 of the rest

A folder is a checkpoint only when its manifest matches every file. The manifest carries a checksum of itself, so that
no single wrong byte anywhere goes unseen. Nothing here imports torch: commands look for checkpoints before they do.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
import stat
from collections.abc import Mapping  # noqa: TC003 - the shape that a manifest is read as
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import vembed
from vembed.errors import ConfigError, MachineError
from vembed.files import write_durably
from vembed.json_text import fit, read_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""The values that state and stamps are made of."""

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
LATEST: Final = "LATEST"
BEST: Final = "BEST"

STAMP_KEYS: Final = ("config_hash", "strategy", "world_size")
"""Keys of every stamp, so that a resume can always be judged."""

DISK_MARGIN: Final = 1.2
"""Free disk that a save asks for, as a multiple of its bytes."""

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
class FileEntry:
    """Size in bytes and SHA-256 in hex digits of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json; the fields are its keys."""

    step: int  # optimizer steps done
    best: bool  # no earlier checkpoint of the run has a better dev metric
    stamp: Mapping[str, Any]  # identity of the run: `STAMP_KEYS`, and whatever else a resume compares
    packages: Mapping[str, str]  # package -> version that wrote it
    files: Mapping[str, FileEntry]  # every file but the manifest


def step_name(step: int) -> str:
    """Return the name of a step's folder, e.g. `step-00001200`."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step that a folder's name gives, or None when it isn't a checkpoint's name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a folder, ascending; a file of such a name counts, and turns out to be broken."""
    if not folder.is_dir():
        return []
    steps = (parse_step(path.name) for path in folder.iterdir())
    return sorted(step for step in steps if step is not None)


def free_disk_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write to the disk of a folder."""
    return shutil.disk_usage(folder).free


def refuse_other_folder(path: Path) -> None:
    """Refuse a path that is no checkpoint, and name the newest one nearby.

    Raises:
        ConfigError: It is none.
    """
    if path.is_dir() and (parse_step(path.name) is not None or (path / MANIFEST).exists()):
        return
    for near in (path, path / "checkpoints", path.parent):
        if steps := steps_in(near):
            raise ConfigError(
                f"resume: {path} is not a checkpoint; the newest one nearby is {near / step_name(steps[-1])}"
            )
    raise ConfigError(f"resume: {path} is not a checkpoint; name a step-... folder, or use --resume auto")


def state_text(state: Mapping[str, JSON], *, stamp: Mapping[str, JSON], parts: Iterable[str]) -> str:
    """Return the content of state.json, once everything that a save writes is known to be writable.

    Raises:
        ValueError: A part's name can't be a file, a stamp key is missing, or a value isn't JSON (NaN and infinity are
            not).
    """
    for part in parts:
        if not _PART_NAME.fullmatch(part):
            raise ValueError(f"checkpoint part {part!r}: use lower-case letters, digits, '-' and '_'")
    if missing := [key for key in STAMP_KEYS if key not in stamp]:
        raise ValueError(f"checkpoint stamp: {', '.join(missing)} missing")
    texts = {}
    for name, content in (("stamp", stamp), ("state", state)):
        try:
            texts[name] = json.dumps(content, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"checkpoint {name} can't be written as JSON: {error}") from error
    return texts["state"]


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute and write a checkpoint."""
    return {"vembed": vembed.__version__, **{package: importlib.metadata.version(package) for package in _PACKAGES}}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a checkpoint; the files that it names are on disk.

    Raises:
        OSError: The disk refused.
    """
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
            if not stat.S_ISREG(status.st_mode):  # whoever reads a pipe would wait for ever
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
        # Names are joined to the folder and read, so none may lead out of it.
        if STATE not in manifest.files or not all(map(_FILE_NAME.fullmatch, manifest.files)):
            raise InvalidCheckpointError(f"{path}: names files that no checkpoint has")
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidCheckpointError(f"{path}: not a manifest ({error})") from error
    return manifest


def _checksum(body: Mapping[str, object]) -> str:
    """Return the SHA-256 of a manifest's content, whatever its layout."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
