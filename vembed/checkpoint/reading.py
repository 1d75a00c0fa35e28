"""Read a checkpoint back: every byte is checked, by all processes together, before any of it is used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from vembed.checkpoint.agreement import Team
from vembed.checkpoint.format import STATE, InvalidCheckpointError, LoadedCheckpoint, read_manifest
from vembed.checkpoint.tensors import read_parts
from vembed.files import file_sha256

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from vembed.checkpoint.format import FileEntry, Manifest

ALONE = Team()


def validate(folder: Path, team: Team = ALONE) -> Manifest:
    """Check every byte of a checkpoint against its manifest; each process reads a share of the files.

    Raises:
        InvalidCheckpointError: Something is missing, cut off or changed; the message names the file.
        FutureCheckpointError: Written by a later version.
    """

    def check_own() -> Manifest:
        manifest = read_manifest(folder)
        try:
            for name in _shares(manifest.files, team.world_size)[team.rank]:
                if file_sha256(folder / name) != manifest.files[name].sha256:
                    raise InvalidCheckpointError(f"{folder / name}: the content has changed (SHA-256 differs)")
        except OSError as error:
            raise InvalidCheckpointError(f"{folder}: {error}") from error
        return manifest

    return team.own(check_own)


def read_checkpoint(
    folder: Path, manifest: Manifest, *, required: Collection[str], team: Team = ALONE
) -> LoadedCheckpoint:
    """Read a checkpoint that was validated.

    Args:
        folder: Its folder.
        manifest: What `validate` returned.
        required: Parts or keys of the state that must be there.
        team: The processes that read it.

    Raises:
        InvalidCheckpointError: One of them is missing, or a file can't be read.
    """

    def read() -> LoadedCheckpoint:
        try:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            tensors = read_parts(folder, manifest.files)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InvalidCheckpointError(f"{folder}: {error}") from error
        if missing := [name for name in required if name not in tensors and name not in state]:
            raise InvalidCheckpointError(
                f"{folder}: holds no {', '.join(missing)}, so the run can't go on exactly where it stopped "
                f"(it holds {', '.join([*tensors, *state])}). Resume from another checkpoint, or set resume: never."
            )
        return LoadedCheckpoint(folder, manifest.step, tensors, state, manifest.stamp, manifest.packages)

    return team.own(read)


def _shares(files: Mapping[str, FileEntry], world_size: int) -> list[list[str]]:
    """RowAssignment files to processes, the largest first, each to the one with the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for name in sorted(files, key=lambda each: (-files[each].size, each)):
        rank = load.index(min(load))
        shares[rank].append(name)
        load[rank] += files[name].size
    return shares
