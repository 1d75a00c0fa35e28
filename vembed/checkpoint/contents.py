"""Write and read one checkpoint's folder, by all processes together: each has files of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from safetensors import SafetensorError

from vembed.checkpoint.format import (
    STATE,
    Checkpoint,
    FileEntry,
    IncompleteCheckpointError,
    InvalidCheckpointError,
    read_manifest,
    write_manifest,
)
from vembed.checkpoint.tensors import TensorFile, own_files, read_parts
from vembed.distributed.ranks import Ranks
from vembed.errors import NonFiniteError
from vembed.files import file_sha256, fsync_path, write_durably
from vembed.json_text import read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from vembed.checkpoint.format import JSON, Manifest
    from vembed.checkpoint.tensors import Saved

ALONE: Final = Ranks()

_WEIGHT_PARTS: Final = ("model", "loss")


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint whose every byte was checked; tensors are on the CPU."""

    path: Path
    step: int
    # Part -> name -> tensor, or the blocks that it was saved in (`whole` and `load_into` of tensors.py read both).
    # Memory-mapped: what is never read costs no memory.
    tensors: Mapping[str, Mapping[str, Saved]]
    state: Mapping[str, JSON]
    stamp: Mapping[str, JSON]
    packages: Mapping[str, str]


def write_checkpoint(folder: Path, checkpoint: Checkpoint, ranks: Ranks, *, prepare: Callable[[int], None]) -> int:
    """Write a checkpoint into a new folder, each file forced to disk, the manifest last.

    Every process must call it; an error on one is raised on all, so that they continue together.

    Args:
        folder: Must not exist; only a rename by the caller turns it into a checkpoint.
        prepare: Called on the first process, before anything is written, with the bytes that all of them will write.

    Returns:
        Bytes written by all.

    Raises:
        NonFiniteError: The model or the loss holds NaN or infinite weights; nothing was written.
        OSError: A disk refused.
    """
    files = own_files(checkpoint.tensors, rank=ranks.rank, world_size=ranks.world_size)

    def weigh() -> int:
        _refuse_nonfinite(checkpoint.step, files)
        return sum(file.num_bytes for file in files)

    def make_folder() -> None:
        prepare(num_bytes + len(checkpoint.state_text))
        folder.mkdir()

    def write_own() -> dict[str, FileEntry]:
        for file in files:
            file.write(folder)
        names = [file.name for file in files]
        if ranks.is_first:
            write_durably(folder / STATE, checkpoint.state_text)
            names.append(STATE)
        return {name: FileEntry((folder / name).stat().st_size, file_sha256(folder / name)) for name in names}

    def finish() -> int:
        write_manifest(folder, checkpoint, entries)
        fsync_path(folder)
        return sum(path.stat().st_size for path in folder.iterdir())

    num_bytes = sum(ranks.gather_objects(ranks.together(weigh)))
    ranks.from_first(make_folder)
    written = ranks.gather_objects(ranks.together(write_own))
    entries = {name: entry for own in written for name, entry in own.items()}
    return ranks.from_first(finish)


def _refuse_nonfinite(step: int, files: Sequence[TensorFile]) -> None:
    """Refuse weights that are NaN or infinite: a saved checkpoint can always be trained on.

    Raises:
        NonFiniteError: Names the first such tensors of the model and the loss.
    """
    bad = [
        f"{file.part}/{name}"
        for file in files
        if file.part in _WEIGHT_PARTS
        for name, tensor in file.tensors.items()
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all())
    ]
    if bad:
        shown = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        raise NonFiniteError(
            f"step {step}: {shown} holds NaN or infinite weights, so the checkpoint is not saved. "
            "The last saved one is whole: resume from it with a lower learning_rate or max_grad_norm."
        )


def validate(folder: Path, ranks: Ranks = ALONE) -> Manifest:
    """Check every byte of a checkpoint against its manifest; each process reads a share of the files.

    Raises:
        InvalidCheckpointError: Something is missing, cut off or changed; the message names the file.
        FutureCheckpointError: Written by a later version.
    """

    def check_own() -> Manifest:
        manifest = read_manifest(folder)
        try:
            for name in _shares(manifest.files, ranks.world_size)[ranks.rank]:
                if file_sha256(folder / name) != manifest.files[name].sha256:
                    raise InvalidCheckpointError(f"{folder / name}: the content has changed (SHA-256 differs)")
        except OSError as error:
            raise InvalidCheckpointError(f"{folder}: {error}") from error
        return manifest

    return ranks.together(check_own)


def _shares(files: Mapping[str, FileEntry], world_size: int) -> list[list[str]]:
    """Assign files to processes, the largest first, each to the one with the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for name in sorted(files, key=lambda each: (-files[each].size, each)):
        rank = load.index(min(load))
        shares[rank].append(name)
        load[rank] += files[name].size
    return shares


def accept(loaded: LoadedCheckpoint) -> None:
    """Find nothing wrong with the shape of a checkpoint."""


def read_checkpoint(
    folder: Path,
    manifest: Manifest,
    *,
    required: Collection[str],
    check: Callable[[LoadedCheckpoint], object] = accept,
    ranks: Ranks = ALONE,
) -> LoadedCheckpoint:
    """Read a checkpoint that was validated.

    Args:
        required: Parts or keys of the state that must be there.
        check: Raises `ValueError` where stamp or state hasn't the shape that the caller needs.

    Raises:
        IncompleteCheckpointError: One of the required is missing.
        InvalidCheckpointError: A file can't be read, or isn't what it should be.
    """

    def read() -> LoadedCheckpoint:
        try:
            state = read_object(folder / STATE)
            tensors = read_parts(folder, manifest.files)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise InvalidCheckpointError(f"{folder}: {error}") from error
        if missing := [name for name in required if name not in tensors and name not in state]:
            raise IncompleteCheckpointError(
                f"{folder}: holds no {', '.join(missing)}, so the run can't continue exactly where it stopped "
                f"(it holds {', '.join([*tensors, *state])}). Resume from another checkpoint, or set resume: never."
            )
        loaded = LoadedCheckpoint(folder, manifest.step, tensors, state, manifest.stamp, manifest.packages)
        try:
            check(loaded)
        except (ValueError, KeyError) as error:
            raise InvalidCheckpointError(f"{folder}: {error}") from error
        return loaded

    return ranks.together(read)
