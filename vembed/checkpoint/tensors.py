"""One checkpoint's folder: written by all processes together, checked byte by byte, read back by any number of them.

    model.safetensors                        what every process holds whole, written by the first one
    model.rank-00001-of-00004.safetensors    the blocks that process 1 of 4 holds of tensors that are shared out

The header of a file of blocks says of each where it begins and in what whole shape: {"blocks": {name: [shape,
offsets]}}. So a file explains itself, no index has to be gathered, and whoever loads, with any number of processes,
reads the bytes that it needs and no others (files are memory-mapped).

Why not torch.distributed.checkpoint: its index is a pickle; its safetensors storage keeps tensors only, neither forces
files to disk nor hashes them, and has no moment at which a checkpoint is whole; and its plans travel as pickles, so
that a process whose disk is full leaves the others waiting.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from vembed.checkpoint.format import (
    STATE,
    FileEntry,
    IncompleteCheckpointError,
    InvalidCheckpointError,
    Manifest,
    package_versions,
    read_manifest,
    state_text,
    write_manifest,
)
from vembed.distributed.ranks import Ranks
from vembed.distributed.shards import Block, block_of, is_first_copy, is_shared, local_part
from vembed.errors import NonFiniteError
from vembed.files import disk_error, file_sha256, fsync_path, write_durably
from vembed.json_text import fit, parse_json, read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from vembed.checkpoint.format import JSON

ALONE: Final = Ranks()

_WEIGHT_PARTS: Final = ("model", "loss")
_BLOCKS: Final = "blocks"
_FILE_NAME: Final = re.compile(r"([a-z][a-z0-9_-]*)(\.rank-\d{5,}-of-\d{5,})?\.safetensors")


# Saved tensors


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor that was saved in blocks."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    pieces: tuple[tuple[Block, Tensor], ...]  # the blocks and what they hold, memory-mapped

    def read(self, block: Block) -> Tensor:
        """Return a part of it; pages of the files that lie outside are not read from the disk."""
        for piece, stored in self.pieces:
            if piece == block:  # as many processes as saved it: no copy
                return stored
        result = torch.empty(block.sizes, dtype=self.dtype)
        for piece, stored in self.pieces:
            begins = [max(mine, its) for mine, its in zip(block.offsets, piece.offsets, strict=True)]
            ends = [min(mine, its) for mine, its in zip(_ends(block), _ends(piece), strict=True)]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                result[_range(begins, ends, block.offsets)] = stored[_range(begins, ends, piece.offsets)]
        return result


Saved: TypeAlias = "torch.Tensor | SharedTensor"
"""A tensor of a checkpoint: whole in one file, or in blocks of several."""


def read_block(saved: Saved, block: Block) -> Tensor:
    """Return a part of a saved tensor, on the CPU; the block is of a whole of the same shape."""
    if isinstance(saved, SharedTensor):
        return saved.read(block)
    return saved[_range(block.offsets, _ends(block), (0,) * len(block.offsets))]


def whole(saved: Saved) -> Tensor:
    """Return all of a saved tensor, on the CPU."""
    return read_block(saved, Block.whole(tuple(saved.shape)))


@torch.no_grad()
def load_into(tensor: Tensor, saved: Saved) -> None:
    """Copy the saved values into a tensor, or this process's part of them; it keeps its device and dtype."""
    local_part(tensor).copy_(read_block(saved, block_of(tensor)))


def _ends(block: Block) -> list[int]:
    return [offset + size for offset, size in zip(block.offsets, block.sizes, strict=True)]


def _range(begins: Iterable[int], ends: Iterable[int], origin: Iterable[int]) -> tuple[slice, ...]:
    """Return an index of the cells from `begins` to `ends` in a tensor whose first cell is `origin`."""
    return tuple(slice(begin - base, end - base) for begin, end, base in zip(begins, ends, origin, strict=True))


# Writing


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file that this process writes."""

    name: str  # in the checkpoint's folder
    part: str  # "model", "optimizer" ...
    tensors: Mapping[str, Tensor]  # on any device
    blocks: Mapping[str, Block] | None  # the part of the whole that each tensor is; None in a file of whole tensors

    def write(self, folder: Path) -> None:
        """Write the file and force it to disk.

        Raises:
            OSError: The disk refused; safetensors reports that with an exception of its own.
        """
        path = folder / self.name
        header = None
        if self.blocks is not None:
            header = {_BLOCKS: json.dumps({name: [block.shape, block.offsets] for name, block in self.blocks.items()})}
        on_cpu: dict[str, Tensor] = {}
        memories: set[int] = set()
        for name, tensor in self.tensors.items():
            plain = tensor.detach().to("cpu").contiguous()
            memory = plain.untyped_storage().data_ptr()
            # safetensors refuses two names for one memory, as tied weights have.
            on_cpu[name] = plain.clone() if memory in memories else plain
            memories.add(memory)
        try:
            save_file(on_cpu, path, header)
        except SafetensorError as error:
            if (refused := disk_error(error)) is None:
                raise
            raise refused from error
        # safetensors makes files for their owner only; a checkpoint is as readable as the folder that it lies in.
        path.chmod(path.parent.stat().st_mode & 0o666)
        fsync_path(path)


def write_checkpoint(
    folder: Path,
    *,
    step: int,
    best: bool,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, JSON],
    stamp: Mapping[str, JSON],
    ranks: Ranks,
    prepare: Callable[[int], None],
) -> None:
    """Write a checkpoint into a new folder, each file forced to disk, the manifest last.

    Every process must call it; an error on one is raised on all, so that they continue together.

    Args:
        folder: Must not exist; only a rename by the caller turns it into a checkpoint.
        step: Optimizer steps done.
        best: Whether no earlier checkpoint of the run has a better dev metric.
        tensors: Part ("model", "optimizer" ...) -> name -> tensor, on any device.
        state: Counters and numbers of the run.
        stamp: Identity of the run, with `STAMP_KEYS`.
        ranks: The processes.
        prepare: Called on the first process, before anything is written, with the bytes that all of them will write.

    Raises:
        ValueError: Parts, state or stamp can't be written.
        NonFiniteError: The model or the loss holds NaN or infinite weights; nothing was written.
        OSError: A disk refused.
    """
    text = state_text(state, stamp=stamp, parts=tensors)
    files = _files_of_rank(tensors, ranks)

    def weigh() -> int:
        _refuse_nonfinite(step, files)
        return sum(tensor.nbytes for file in files for tensor in file.tensors.values())

    def make_folder() -> None:
        prepare(num_bytes + len(text))
        folder.mkdir()

    def write_own() -> dict[str, FileEntry]:
        for file in files:
            file.write(folder)
        names = [file.name for file in files]
        if ranks.is_first:
            write_durably(folder / STATE, text)
            names.append(STATE)
        # Hashed from the disk's cache: a second pass in memory, and the only one that sees what was really written.
        return {name: FileEntry((folder / name).stat().st_size, file_sha256(folder / name)) for name in names}

    def finish() -> None:
        write_manifest(folder, Manifest(step, best, stamp, package_versions(), dict(sorted(entries.items()))))
        fsync_path(folder)

    # Each step begins when all processes have done the one before, so a failure anywhere leaves no manifest.
    num_bytes = sum(ranks.gather_objects(ranks.together(weigh)))
    ranks.from_first(make_folder)
    written = ranks.gather_objects(ranks.together(write_own))
    entries = {name: entry for of_rank in written for name, entry in of_rank.items()}
    ranks.from_first(finish)


def _files_of_rank(parts: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> list[TensorFile]:
    files = []
    for part, tensors in parts.items():
        if ranks.is_first:
            kept = {name: tensor for name, tensor in tensors.items() if not is_shared(tensor)}
            files.append(TensorFile(f"{part}.safetensors", part, kept, None))
        # Of a block's equal copies the first is written. Where there are more processes than rows some hold nothing,
        # but a tensor without any values must be in one file at least.
        blocks = {
            name: block_of(tensor)
            for name, tensor in tensors.items()
            if is_shared(tensor) and is_first_copy(tensor) and (block_of(tensor).numel > 0 or tensor.numel() == 0)
        }
        if blocks:
            name = f"{part}.rank-{ranks.rank:05d}-of-{ranks.world_size:05d}.safetensors"
            files.append(TensorFile(name, part, {entry: local_part(tensors[entry]) for entry in blocks}, blocks))
    return files


def _refuse_nonfinite(step: int, files: Sequence[TensorFile]) -> None:
    """Refuse weights that are NaN or infinite: a saved checkpoint can always be trained on."""
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


# Checking and reading


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint whose every byte was checked; tensors are on the CPU."""

    path: Path
    step: int
    # Part -> name -> tensor, or the blocks that it was saved in; `whole` and `load_into` read both. Memory-mapped: what
    # is never read costs no memory.
    tensors: Mapping[str, Mapping[str, Saved]]
    state: Mapping[str, JSON]
    stamp: Mapping[str, JSON]
    packages: Mapping[str, str]


def validate(folder: Path, ranks: Ranks = ALONE) -> Manifest:
    """Check every byte of a checkpoint against its manifest; each process reads a share of the files.

    Raises:
        InvalidCheckpointError: Something is missing, cut off or changed; the message names the file.
        FutureCheckpointError: Written by a later version.
    """

    def check_share() -> Manifest:
        manifest = read_manifest(folder)
        # Shares of about equal bytes: the largest files first, each to the process with the fewest bytes so far.
        loads = [0] * ranks.world_size
        mine = []
        for name, entry in sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
            rank = loads.index(min(loads))
            loads[rank] += entry.size
            if rank == ranks.rank:
                mine.append(name)
        try:
            for name in mine:
                if file_sha256(folder / name) != manifest.files[name].sha256:
                    raise InvalidCheckpointError(f"{folder / name}: the content has changed (SHA-256 differs)")
        except OSError as error:
            raise InvalidCheckpointError(f"{folder}: {error}") from error
        return manifest

    return ranks.together(check_share)


def accept(loaded: LoadedCheckpoint) -> None:
    """Take a checkpoint of any shape."""


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
        folder: The checkpoint.
        manifest: As `validate` returned it.
        required: Parts or keys of the state that must be there.
        check: Raises `ValueError` where stamp or state hasn't the shape that the caller needs.
        ranks: The processes, all of which call it.

    Raises:
        IncompleteCheckpointError: One of the required is missing.
        InvalidCheckpointError: A file can't be read, or isn't what it should be.
    """

    def read() -> LoadedCheckpoint:
        try:
            state = read_object(folder / STATE)
            tensors = _read_parts(folder, manifest.files)
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


def _read_parts(folder: Path, names: Collection[str]) -> dict[str, dict[str, Saved]]:
    """Open the tensors of a checkpoint; files without any are left out, and bytes are read when they are used."""
    parts: dict[str, dict[str, Saved]] = {}
    pieces: dict[tuple[str, str], list[tuple[Block, Tensor]]] = {}
    for file_name in sorted(names):
        match = _FILE_NAME.fullmatch(file_name)
        if match is None:
            continue
        stored = load_file(folder / file_name)
        part = parts.setdefault(match[1], {})
        if match[2] is None:
            part.update(stored)
            continue
        with safe_open(folder / file_name, framework="pt") as file:
            header = (file.metadata() or {})[_BLOCKS]
        shape_and_offsets = fit(
            dict[str, tuple[tuple[int, ...], tuple[int, ...]]], parse_json(header), where=f"{file_name}: blocks"
        )
        for name, (shape, offsets) in shape_and_offsets.items():
            block = Block(shape, offsets, tuple(stored[name].shape))
            pieces.setdefault((match[1], name), []).append((block, stored[name]))
    for (part_name, name), blocks in pieces.items():
        shape = blocks[0][0].shape
        if not _make_up([block for block, _ in blocks], shape):
            raise InvalidCheckpointError(f"{folder}: the files of {part_name}/{name} don't make up one tensor")
        parts[part_name][name] = SharedTensor(shape, blocks[0][1].dtype, tuple(blocks))
    return parts


def _make_up(blocks: Sequence[Block], shape: tuple[int, ...]) -> bool:
    """Return whether blocks can be those of one tensor: inside it, no two at one offset, and as many values.

    Two that overlap without sharing an offset would pass; the hashes have shown that the files are as they were saved.
    """
    filled = [block for block in blocks if block.numel]
    return (
        all(block.shape == shape and len(block.offsets) == len(block.sizes) == len(shape) for block in blocks)
        and all(
            0 <= begin <= end <= side
            for block in blocks
            for begin, end, side in zip(block.offsets, _ends(block), shape, strict=True)
        )
        and len({block.offsets for block in filled}) == len(filled)
        and sum(block.numel for block in filled) == prod(shape)
    )
