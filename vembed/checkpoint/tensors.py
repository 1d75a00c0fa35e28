"""The tensors of a checkpoint on disk: whole ones in one file per part, the rest in one file per part and process.

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
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from vembed.checkpoint.format import InvalidCheckpointError
from vembed.distributed.shards import Block, block_of, is_first_copy, is_shared, local_part
from vembed.files import disk_error, fsync_path
from vembed.json_text import fit, parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

TENSOR_SUFFIX: Final = ".safetensors"

_BLOCKS: Final = "blocks"
_FILE_NAME: Final = re.compile(r"([a-z][a-z0-9_-]*)(\.rank-\d{5,}-of-\d{5,})?\.safetensors")


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor that was saved in blocks."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    pieces: tuple[tuple[Block, Tensor], ...]  # the blocks and what they hold, memory-mapped

    def read(self, block: Block) -> Tensor:
        """Return a part of it; what lies outside is not read from the disk."""
        for piece, stored in self.pieces:
            if piece == block:
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
    """Give a tensor the saved values, or this process's part of them; it keeps its device and dtype."""
    local_part(tensor).copy_(read_block(saved, block_of(tensor)))


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file that this process writes."""

    name: str  # in the checkpoint's folder
    part: str  # what its tensors are of: "model", "optimizer" ...
    tensors: Mapping[str, Tensor]  # on any device
    blocks: Mapping[str, Block] | None  # the part of the whole that each tensor is; None in a file of whole tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors; the header is left to the caller's margin."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def write(self, folder: Path) -> None:
        """Write the file and force it to disk.

        Raises:
            OSError: The disk refused; safetensors reports that with an exception of its own.
        """
        path = folder / self.name
        header = None
        if self.blocks is not None:
            header = {_BLOCKS: json.dumps({name: [each.shape, each.offsets] for name, each in self.blocks.items()})}
        try:
            save_file(dict(_unshared(self.tensors)), path, header)
        except SafetensorError as error:
            if (refused := disk_error(error)) is None:
                raise
            raise refused from error
        # safetensors makes files for their owner only; a checkpoint is as readable as the folder that it lies in.
        path.chmod(path.parent.stat().st_mode & 0o666)
        fsync_path(path)


def own_files(parts: Mapping[str, Mapping[str, Tensor]], *, rank: int, world_size: int) -> list[TensorFile]:
    """Return what this process writes: whole tensors are the first one's, of a block's copies the first is written."""
    files = []
    for part, tensors in parts.items():
        if rank == 0:
            kept = {name: tensor for name, tensor in tensors.items() if not is_shared(tensor)}
            files.append(TensorFile(f"{part}{TENSOR_SUFFIX}", part, kept, None))
        blocks = {
            name: block_of(tensor)
            for name, tensor in tensors.items()
            if is_shared(tensor) and is_first_copy(tensor) and (block_of(tensor).numel > 0 or tensor.numel() == 0)
        }
        if blocks:
            name = f"{part}.rank-{rank:05d}-of-{world_size:05d}{TENSOR_SUFFIX}"
            files.append(TensorFile(name, part, {each: local_part(tensors[each]) for each in blocks}, blocks))
    return files


def read_parts(folder: Path, names: Collection[str]) -> dict[str, dict[str, Saved]]:
    """Open the tensors of a checkpoint; files without any are left out, and bytes are read when they are used.

    Raises:
        InvalidCheckpointError: The blocks of a tensor don't make up the whole.
        OSError: A file can't be read.
        SafetensorError: A file is no safetensors file.
        ValueError: A header isn't as this module writes it.
    """
    parts: dict[str, dict[str, Saved]] = {}
    pieces: dict[tuple[str, str], list[tuple[Block, Tensor]]] = {}
    for name in sorted(names):
        match = _FILE_NAME.fullmatch(name)
        if match is None:
            continue
        tensors = load_file(folder / name)
        part = parts.setdefault(match[1], {})
        if match[2] is None:
            part.update(tensors)
            continue
        for each, (whole_shape, offsets) in _read_blocks(folder / name).items():
            stored = tensors[each]
            block = Block(whole_shape, offsets, tuple(stored.shape))
            pieces.setdefault((match[1], each), []).append((block, stored))
    for (part_name, each), found in pieces.items():
        shape = found[0][0].shape
        if not _make_up([block for block, _ in found], shape):
            raise InvalidCheckpointError(f"{folder}: the files of {part_name}/{each} don't make up one tensor")
        parts[part_name][each] = SharedTensor(shape, found[0][1].dtype, tuple(found))
    return parts


def _read_blocks(path: Path) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return name -> (whole shape, offsets) of a file of blocks."""
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {})[_BLOCKS]
    return fit(dict[str, tuple[tuple[int, ...], tuple[int, ...]]], parse_json(text), where=f"{path.name}: blocks")


def _make_up(blocks: Sequence[Block], shape: tuple[int, ...]) -> bool:
    """Return whether blocks can be those of one tensor: inside it, no two at one place, and as many values."""
    places = {block.offsets for block in blocks if block.numel}
    inside = all(
        block.shape == shape
        and len(block.offsets) == len(block.sizes) == len(shape)
        and all(0 <= begin <= end <= side for begin, end, side in zip(block.offsets, _ends(block), shape, strict=True))
        for block in blocks
    )
    return (
        inside
        and len(places) == sum(block.numel > 0 for block in blocks)
        and sum(block.numel for block in blocks) == _size(shape)
    )


def _unshared(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors on the CPU, contiguous, tied ones copied: safetensors refuses two names for one memory."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        memory = plain.untyped_storage().data_ptr()
        yield name, plain.clone() if memory in seen else plain
        seen.add(memory)


def _ends(block: Block) -> list[int]:
    return [offset + size for offset, size in zip(block.offsets, block.sizes, strict=True)]


def _range(begins: Iterable[int], ends: Iterable[int], origin: Iterable[int]) -> tuple[slice, ...]:
    """Return an index of the cells from `begins` to `ends` in a tensor whose first cell is `origin`."""
    return tuple(slice(begin - base, end - base) for begin, end, base in zip(begins, ends, origin, strict=True))


def _size(shape: tuple[int, ...]) -> int:
    return Block.whole(shape).numel
