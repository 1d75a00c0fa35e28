"""What a plan is made for, and the ways of training that it weighs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from vembed.plan.reserve import reserve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.config.schema import Config
    from vembed.plan.devices import Devices
    from vembed.plan.hardware import Machine
    from vembed.plan.memory import BatchRows, LossTiles, ModelSize, TowerSize

FIT_FACTOR, FIT_SHARE = 1.1, 0.95
"""A step fits when 1.1 x prediction + reserve is at most 95% of the memory."""

FULL_PRECISION_SLOWDOWN = 8.0
"""How much slower an accelerator computes in float32 than in half precision."""

Strategy = Literal["single", "ddp", "ddp_gradcache", "fsdp", "fsdp_lora"]
Mode = Literal["fast", "lean", "sharded"]

MODES: tuple[Mode, ...] = ("fast", "lean", "sharded")
ZERO_STAGES = {None: 0, "fast": 1, "lean": 2, "sharded": 3}
VALUE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class DataSize:
    """What the plan must know of the training data."""

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
        """Whether each encoder call gathers the weights anew."""
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
    """What a plan is made for."""

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
        return int((FIT_SHARE * self.devices.memory_bytes - sum(self.reserve(way).values())) / FIT_FACTOR)

    def reserve(self, way: Way) -> dict[str, int]:
        """Return the bytes that stay free on each device, by what needs them."""
        return reserve(self.machine.device, way, self.devices.count)

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
        slow = self.machine.device != "cpu" and self.compute_bytes > 2
        return self.devices.tflops * 1e12 / (FULL_PRECISION_SLOWDOWN if slow else 1)

    def sized(self, way: Way) -> ModelSize:
        """Return the size of what is trained that way; where only LoRA's size is known it is the model's own."""
        model = self.model.adapted or self.model if way.use_lora else self.model
        if way.mode is None or self.gather_bytes(model) == model.bytes_per_value:
            return model
        return replace(model, towers=tuple(tower.sharded(self.compute_bytes) for tower in model.towers))

    def tower_rows(self, tower: TowerSize) -> float:
        """Return how many rows of one device pass through a tower."""
        if tower.items == "pictures":
            return self.num_pictures
        return self.rows.own - self.num_pictures if tower.items == "texts" else self.rows.own


def all_ways(problem: PlanningProblem) -> Iterator[Way]:
    """Yield every way that the devices and the model allow, the plainest first."""
    adapted = problem.model.adapted is not None or problem.config.use_lora is True
    lora = (False, True) if adapted else (False,)
    recompute = (False, True) if problem.model.checkpointable else (False,)
    count = problem.devices.count
    for use_lora in lora:
        for checkpointed in recompute:
            for cached in (False, True):
                strategy: Strategy = "single" if count == 1 else "ddp_gradcache" if cached else "ddp"
                yield Way(strategy, cached, checkpointed, use_lora)
    if problem.config.load_in_4bit:
        return  # weights of 4 bits can't be sharded
    for factor in (each for each in range(count, 1, -1) if count % each == 0):
        for use_lora in lora:
            sharded: Strategy = "fsdp_lora" if use_lora else "fsdp"
            # Sharded gradients are added up in the type of the weights, chunk by chunk: half precision would lose them.
            modes = MODES if use_lora or problem.model.bytes_per_value >= VALUE_BYTES["float32"] else MODES[:-1]
            for checkpointed in recompute:
                for mode in modes:
                    yield Way(sharded, True, checkpointed, use_lora, mode, factor)
            offloaded = modes[-1] if problem.config.fsdp_mode == "auto" else problem.config.fsdp_mode
            for checkpointed in recompute if offloaded in modes else ():
                yield Way(sharded, True, checkpointed, use_lora, offloaded, factor, cpu_offload=True)
