"""Memory of a device that no tensor of a step takes: the driver's, the libraries', and that of the process itself.

Rough figures: they are added to the prediction as they are. What the allocator loses between tensors is the factor of
FIT_FACTOR. Not measured on a GPU here; `torch.cuda.mem_get_info` beside `torch.cuda.memory_reserved` shows the truth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.text import show_bytes

if TYPE_CHECKING:
    from vembed.plan.problem import Way

MIB = 1 << 20

PROCESS_BYTES = 1536 * MIB
"""On a CPU: the interpreter with torch, transformers and datasets, the rows of a batch, and what the system needs."""

CONTEXT_BYTES = 640 * MIB
"""The driver's context with the kernels of a step. Source: pytorch/pytorch#86509, 274 MiB when kernels are loaded as
they are used, 636 MiB with all of them; training uses many, from several libraries."""

BLAS_BYTES = 2 * 32 * MIB
"""Workspaces of cuBLAS, one for the thread of forward and one for that of backward. Source: the cuBLAS documentation of
cublasSetWorkspace, 32 MiB on Hopper and newer, 4 MiB before."""

COMMUNICATOR_BYTES = 688 * MIB
"""Buffers of a group of processes that talk by NCCL. Source: NVIDIA/nccl#964, 688 MB for a group of more than two A100
that are joined by NVLink, 544 MB for one of two; other links take fewer channels, and less."""


def num_communicators(way: Way, num_devices: int) -> int:
    """Return the groups that a process talks in: that of all, and with replicated shards two of its own."""
    if num_devices == 1:
        return 0
    return 3 if way.mode is not None and way.sharding_factor < num_devices else 1


def reserve(device: str, way: Way, num_devices: int) -> dict[str, int]:
    """Return the bytes that a process keeps free on its device, by what needs them; a CPU's have no name.

    Args:
        device: "cpu" or an accelerator's type.
    """
    if device == "cpu":
        return {"": PROCESS_BYTES}
    parts = {"context of the driver": CONTEXT_BYTES, "workspaces of cuBLAS": BLAS_BYTES}
    count = num_communicators(way, num_devices)
    if count:
        parts[f"{count} communicator{'s' if count > 1 else ''} of NCCL"] = count * COMMUNICATOR_BYTES
    return parts


def reserve_notes(parts: dict[str, int]) -> list[str]:
    """Say what the reserve of an accelerator is for."""
    listed = ", ".join(f"{show_bytes(count)} {name}" for name, count in parts.items() if name)
    return [f"reserve: {show_bytes(sum(parts.values()))} ({listed})"] if listed else []
