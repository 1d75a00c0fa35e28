"""One ordinary safetensors file from a checkpoint that several processes wrote, without ever holding it whole.

Tensors are read and written one at a time: the memory it takes is that of the largest one, on any machine, whatever the
number of processes that trained. safetensors' own writer wants all of them at once, so the file is put together here:
eight bytes for the length of the header, the header, the bytes of each tensor.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import torch

from vembed.checkpoint.reading import validate
from vembed.checkpoint.tensors import read_parts, whole
from vembed.errors import ConfigError
from vembed.files import fsync_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vembed.checkpoint.tensors import Saved

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT: Final = 8


def consolidate(checkpoint: Path, output: Path, *, part: str = "model") -> int:
    """Write a part of a checkpoint as one safetensors file; every byte of the checkpoint is checked first.

    Args:
        checkpoint: A step's folder, written by any number of processes.
        output: The file; one that is there is replaced when the new one is whole.
        part: "model", "optimizer" or "loss".

    Returns:
        Bytes written.

    Raises:
        ConfigError: The checkpoint has no such part.
        InvalidCheckpointError: It is broken.
        OSError: The disk refused.
    """
    parts = read_parts(checkpoint, validate(checkpoint).files)
    if part not in parts:
        raise ConfigError(f"{checkpoint} holds no {part}; it holds {', '.join(parts)}")
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        num_bytes = _write(temporary, parts[part])
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(output.parent)
    return num_bytes


def _write(path: Path, tensors: Mapping[str, Saved]) -> int:
    # Wide types first, as safetensors has them: then each tensor lies at a multiple of its own width.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        saved = tensors[name]
        begin, end = end, end + torch.Size(saved.shape).numel() * saved.dtype.itemsize
        header[name] = {"dtype": _DTYPES[saved.dtype], "shape": list(saved.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            file.write(whole(tensors[name]).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    fsync_path(path)
    return 8 + len(text) + end
