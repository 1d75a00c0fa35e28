"""What a step does when memory runs out: gradients taken back, and less to hold in the next attempt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_ALLOCATORS: Final = (
    "out of memory",  # CUDA and its driver, HIP, XPU, MPS, Triton
    "ALLOC_FAILED",  # cuBLAS, hipBLAS, cuDNN before version 9
    "ALLOCATION_FAILED",  # cuDNN
    "Invalid buffer size",  # MPS, of a tensor larger than any may be
    "can't allocate memory",  # torch on the CPU, on Linux and on Windows
    "not enough memory",
    "bad_alloc",  # C++
)
"""What torch and the libraries under it say, in plain RuntimeErrors, where they find no memory for a call."""

_COLLECTIVES: Final = ("Failed to CUDA", "out of memory")
"""What NCCL says where it finds no memory for its buffers."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, of the device or the host, ran out in a call that can be repeated."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError) or _is_of_collective(error):
        return False
    return any(words in str(error) for words in _ALLOCATORS)


def out_of_memory_advice(error: BaseException) -> str | None:
    """Return what to do where memory ran out and no step can be done again; None after any other error.

    A collective that finds none is broken for good.
    """
    if not _is_of_collective(error):
        if not is_out_of_memory(error):
            return None
        first_line = str(error).partition("\n")[0] or type(error).__name__
        return (
            f"memory ran out outside of the encoder calls of a step, which alone can be done again ({first_line}): set "
            f"eval_batch_size or batch_size to a smaller number, or use_fsdp: true, or end other programs on the device"
        )
    if "shared memory segment" in str(error):
        return (
            "NCCL found no room for its buffers in the machine's shared memory: start the container with "
            "--shm-size=8g, or set NCCL_SHM_DISABLE=1, which is slower"
        )
    if any(words in str(error) for words in _COLLECTIVES):
        return (
            "NCCL found no memory for its buffers, and no process can continue: torch held the rest of the device. Set "
            "gradient_cache_chunk_tokens or batch_size to a smaller number, retain: 0, or end other programs on it"
        )
    return None


def free_cache(device: torch.device) -> None:
    """Give back what a device's allocator keeps, which is cut for larger chunks.

    Raises:
        RuntimeError: The device is broken for good, which no repair cures.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()


def _is_of_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "nccl" in str(error).lower()


class RepairNeeded(Exception):  # noqa: N818 - no error: the step is done again
    """Memory ran out on some rank, and every rank must do the step again with less.

    Args:
        rows: Rows of the largest encoder call of any rank.
        tokens: Padded tokens of the largest one.
        kept_graphs: Whether some rank kept graphs that it can do without.
    """

    def __init__(self, *, rows: int, tokens: int, kept_graphs: bool) -> None:
        super().__init__()
        self.rows = rows
        self.tokens = tokens
        self.kept_graphs = kept_graphs


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold in memory, the same on every rank."""

    rows: int  # most rows of one encoder call
    tokens: int  # most padded tokens of one encoder call
    retain: float  # share of the padded tokens whose graphs are kept
    ran_out: bool = False  # memory ran out once in a step that began with these limits

    def lowered(self, repair: RepairNeeded) -> StepLimits | None:
        """Return what the step tries next: no kept graphs, then half the largest chunk; None after a single row."""
        if repair.kept_graphs:
            return replace(self, retain=0.0)
        if repair.rows == 1:
            return None
        rows, tokens = min(self.rows, repair.rows) // 2, min(self.tokens, repair.tokens) // 2
        return replace(self, rows=max(1, rows), tokens=max(1, tokens), retain=0.0)

    def after_repair(self, helped: StepLimits) -> StepLimits:
        """Return what the next step begins with: the same limits once more, then what helped.

        Args:
            helped: The limits under which the step came through.
        """
        return replace(helped, ran_out=False) if self.ran_out else replace(self, ran_out=True)


class HeldGradients:
    """Gradients that were there before a step, put aside so that a failed attempt can be taken back.

    While they are aside, gradients of parameters below float32 are accumulated in float32: hundreds of chunks added up
    in bfloat16 would lose them.

    Args:
        widens: False where something else sees to the accumulation.
    """

    def __init__(self, parameters: Sequence[Tensor], *, widens: bool = True) -> None:
        self._parameters = parameters
        self._widens = widens
        self._held = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
            self._set_gradient_dtype(parameter, torch.promote_types(parameter.dtype, torch.float32))

    def put_back(self) -> None:
        """Drop what the step added."""
        for parameter, held in zip(self._parameters, self._held, strict=True):
            parameter.grad = None
            self._set_gradient_dtype(parameter, parameter.dtype)
            parameter.grad = held

    def add_back(self) -> None:
        """Add what was there before to what the step added, and round once to the parameter's type."""
        for parameter, held in zip(self._parameters, self._held, strict=True):
            gradient, parameter.grad = parameter.grad, None
            self._set_gradient_dtype(parameter, parameter.dtype)
            if gradient is not None:
                gradient = (gradient if held is None else gradient.add_(held)).to(parameter.dtype)
            parameter.grad = held if gradient is None else gradient

    def _set_gradient_dtype(self, parameter: Tensor, dtype: torch.dtype) -> None:
        if self._widens and parameter.dtype.itemsize < torch.float32.itemsize and hasattr(parameter, "grad_dtype"):
            parameter.grad_dtype = dtype
