"""The planning problem: all numbers that a plan is made from, a way to train, and the memory that stays free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.plan.devices import Devices, Machine
    from vembed.plan.memory import BatchRows, LossTiles, ModelSize, TowerSize

FIT_FACTOR, FIT_SHARE = 1.1, 0.95
"""A step fits when 1.1 x prediction + reserve is at most 95% of the memory."""

FULL_PRECISION_SLOWDOWN = 8.0
"""Time of a product in float32 over its time in half precision, on an accelerator."""

Strategy = Literal["single", "ddp", "ddp_gradcache", "fsdp", "fsdp_lora"]
Mode = Literal["fast", "lean", "sharded"]

MODES: tuple[Mode, ...] = ("fast", "lean", "sharded")
ZERO_STAGES = {None: 0, "fast": 1, "lean": 2, "sharded": 3}
VALUE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class DataSize:
    """Sizes of the training data."""

    num_records: int
    documents_per_query: float  # mean of a record
    notes: tuple[str, ...] = ()  # what was held out, skipped or is unusual, one plain sentence each
    pictures_per_record: float = 0.0  # mean
    picture_bytes: int = 0  # host memory of one picture as the encoder takes it
    teacher_dimension: int = 0  # of the teacher's vectors that the loss reads; 0 where it reads none
    record_tokens: tuple[float, ...] = ()  # of sampled records, where the model has no limit of length


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train."""

    strategy: Strategy
    gradient_cache: bool = False  # a part of the batch is encoded twice, as not all of its graphs are kept
    gradient_checkpointing: bool = False  # activations are computed again in the backward pass
    use_lora: bool = False  # adapters train beside a frozen base
    mode: Mode | None = None  # what stays whole during a step; None where nothing is sharded
    sharding_factor: int = 1  # devices that share one copy of the model
    cpu_offload: bool = False  # shards live in the host's memory

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO that the mode corresponds to; 0 where nothing is sharded."""
        return ZERO_STAGES[self.mode]

    @property
    def resharding(self) -> bool:
        """True where each encoder call gathers the weights anew."""
        return self.mode in ("lean", "sharded")

    def __str__(self) -> str:
        parts: list[str] = [self.strategy if self.mode is None else f"{self.strategy} {self.mode}"]
        if self.strategy == "single" and self.gradient_cache:
            parts.append("gradient caching")
        if self.use_lora and self.strategy != "fsdp_lora":
            parts.append("LoRA")
        if self.gradient_checkpointing:
            parts.append("checkpointing")
        if self.cpu_offload:
            parts.append("offload")
        return " + ".join(parts)


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """Configuration, devices and sizes that a plan is made for."""

    config: Config
    machine: Machine  # the device of one process
    devices: Devices  # all of them
    model: ModelSize
    rows: BatchRows  # of a step
    num_pictures: float  # of those of one device, how many are pictures
    dtype: str  # what the encoder computes in
    tiles: LossTiles  # blocks of the similarity matrix
    sampled_tokens: int | None = None  # of a device's batch, by a sample of the data, where items have no limit

    def limit_bytes(self, way: Way) -> int:
        """Return the most that the prediction for one device may be."""
        return int((FIT_SHARE * self.devices.memory_bytes - self.reserved_bytes(way)) / FIT_FACTOR)

    def reserved_bytes(self, way: Way) -> int:
        """Return the bytes that stay free on each device."""
        return sum(reserve(self.machine.device, way, self.devices.count).values())

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value that the encoder computes with."""
        return min(VALUE_BYTES[self.dtype], self.model.bytes_per_value)

    def gather_bytes(self, model: ModelSize) -> int:
        """Return the bytes of a gathered weight of a block; frozen ones below adapters are held in half precision."""
        return self.compute_bytes if self.machine.narrow_gathers or model.narrowed else model.bytes_per_value

    @property
    def peak_operations(self) -> float:
        """Operations a second of one device at its peak, in the type that the encoder computes with."""
        # `tflops` is an accelerator's figure in half precision; a CPU's is one for all types.
        slow = self.machine.device != "cpu" and self.compute_bytes > 2
        return self.devices.tflops * 1e12 / (FULL_PRECISION_SLOWDOWN if slow else 1)

    def sized(self, way: Way) -> ModelSize:
        """Return the size of what is trained that way; where only LoRA's size is known it is the model's own."""
        model = self.model.adapted or self.model if way.use_lora else self.model
        if way.mode is None or self.gather_bytes(model) == model.bytes_per_value:
            return model
        # Blocks that are gathered in half precision need no copies in it.
        return replace(model, towers=tuple(tower.sharded(self.compute_bytes) for tower in model.towers))

    def tower_rows(self, tower: TowerSize) -> float:
        """Return how many rows of one device pass through a tower."""
        if tower.items == "pictures":
            return self.num_pictures
        return self.rows.local - self.num_pictures if tower.items == "texts" else self.rows.local


# The reserve ----------------------------------------------------------------------------------------------------------
# Memory of a device that no tensor of a step takes: the driver's, the libraries', and that of the process itself. Rough
# figures: they are added to the prediction as they are, and what the allocator loses between tensors is FIT_FACTOR.
# `torch.cuda.mem_get_info` beside `torch.cuda.memory_reserved` shows the truth of a GPU; none of these was taken so.

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


def reserve(device: str, way: Way, num_devices: int) -> dict[str, int]:
    """Return the bytes that a process keeps free on its device, by what needs them; a CPU's have no name.

    Args:
        device: "cpu" or an accelerator's type.
    """
    if device == "cpu":
        return {"": PROCESS_BYTES}
    parts = {"context of the driver": CONTEXT_BYTES, "workspaces of cuBLAS": BLAS_BYTES}
    if num_devices > 1:
        # All processes form a group. Shards that are replicated add two: those that share a copy of the model, and
        # those that hold the same shard.
        count = 3 if way.mode is not None and way.sharding_factor < num_devices else 1
        parts[f"{count} communicator{'s' if count > 1 else ''} of NCCL"] = count * COMMUNICATOR_BYTES
    return parts
