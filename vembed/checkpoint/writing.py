"""Write a checkpoint from all processes at once: each its own files, the first one what there is once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from vembed.checkpoint.format import STATE, Checkpoint, FileEntry, write_manifest
from vembed.checkpoint.tensors import TensorFile, own_files
from vembed.errors import NonFiniteError
from vembed.files import file_sha256, fsync_path, write_durably

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vembed.checkpoint.agreement import Team

_WEIGHT_PARTS: Final = ("model", "loss")


def write_checkpoint(folder: Path, checkpoint: Checkpoint, team: Team, *, prepare: Callable[[int], None]) -> int:
    """Write a checkpoint into a new folder, each file forced to disk, the manifest last.

    Every process must call it; an error on one is raised on all, so that they go on together.

    Args:
        folder: Must not exist; only a rename by the caller turns it into a checkpoint.
        checkpoint: What to write.
        team: The processes.
        prepare: Called on the first process, before anything is written, with the bytes that all of them will write.

    Returns:
        Bytes written by all.

    Raises:
        NonFiniteError: The model or the loss holds NaN or infinite weights; nothing was written.
        OSError: A disk refused.
    """
    files = own_files(checkpoint.tensors, rank=team.rank, world_size=team.world_size)

    def weigh() -> int:
        _refuse_nonfinite(checkpoint.step, files)
        return sum(file.num_bytes for file in files)

    def make_folder() -> None:
        prepare(num_bytes + len(checkpoint.state_text))
        folder.mkdir()

    def write_own() -> dict[str, list[int | str]]:
        for file in files:
            file.write(folder)
        names = [file.name for file in files]
        if team.leads:
            write_durably(folder / STATE, checkpoint.state_text)
            names.append(STATE)
        return {name: [(folder / name).stat().st_size, file_sha256(folder / name)] for name in names}

    def finish() -> int:
        write_manifest(folder, checkpoint, entries)
        fsync_path(folder)
        return sum(path.stat().st_size for path in folder.iterdir())

    num_bytes = sum(team.each(weigh).require())
    team.lead(make_folder)
    written = team.each(write_own).require()
    entries = {name: FileEntry(size, digest) for own in written for name, (size, digest) in own.items()}
    total: int = team.lead(finish)
    return total


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
