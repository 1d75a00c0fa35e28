"""Decide what the configuration left open, and say why."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vembed.plan.chunks import ChunkPlan, plan_chunks, plan_retention
from vembed.plan.loading import plan_loading
from vembed.plan.memory import BytesPerDevice, LossTiles, ModelSize, show_bytes, step_bytes

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.plan.hardware import Machine

CPU_TILE_SIZE = 1024
"""Side of a block of the similarity matrix: 4 MiB of float32, so that a few of them stay in a core's caches."""

ACCELERATOR_TILE_SIZE = 4096
"""The same on an accelerator: 64 MiB of float32, wide enough for its matrix units, few enough to launch."""

FIT_FACTOR, FIT_RESERVE_BYTES, FIT_SHARE = 1.1, int(1.5 * (1 << 30)), 0.95
"""A step fits when 1.1 x prediction + 1.5 GiB is at most 95% of the memory."""


@dataclass(frozen=True, slots=True)
class DataSize:
    """What the plan must know of the training data.

    Attributes:
        num_records: Records to train on.
        steps_per_epoch: Global batches of one epoch.
        documents_per_query: Mean number of documents of a record.
        pictures_per_record: Mean number of pictures of a record.
        picture_bytes: Memory of one picture as the encoder takes it.
        notes: What was held out, skipped or is unusual, one plain sentence each.
    """

    num_records: int
    steps_per_epoch: int
    documents_per_query: float
    notes: tuple[str, ...] = ()
    pictures_per_record: float = 0.0
    picture_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision of a run. What resuming needs of it is read back from the checkpoint.

    Attributes:
        strategy: How the work is spread: "single".
        reasons: Why each decision came out so, one plain sentence each.
        world_size: Processes.
        batch_size: Queries of one process.
        global_batch_size: Queries of a step.
        gradient_cache_chunk_size: Most rows of one encoder call.
        gradient_cache_chunk_tokens: Most padded tokens of one encoder call.
        retain: Share of the chunks whose graphs are kept; 1 is plain training.
        dtype: What the encoder computes in.
        loss_tile_size: Rows and columns of the blocks in which the similarity matrix is computed.
        steps: Optimizer steps of the run.
        steps_per_epoch: Optimizer steps of one epoch.
        warmup_steps: Steps of rising learning rate.
        eval_every: Steps from one evaluation to the next, None for none while training.
        bytes_per_device: Predicted peak of one process.
        fits: Whether that fits with reserve.
        memory_bytes: Memory of one process.
        num_workers: Processes that make batches ahead; 0: they are made when they are needed.
        batches_ahead: Most batches that wait or are being made there.
    """

    strategy: str
    reasons: tuple[str, ...]
    world_size: int
    batch_size: int
    global_batch_size: int
    gradient_cache_chunk_size: int
    gradient_cache_chunk_tokens: int
    retain: float
    dtype: str
    loss_tile_size: int
    steps: int
    steps_per_epoch: int
    warmup_steps: int
    eval_every: int | None
    bytes_per_device: BytesPerDevice
    fits: bool
    memory_bytes: int
    num_workers: int = 0
    batches_ahead: int = 0
    model: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of plan.json."""
        content = asdict(self)
        sizes = content.pop("bytes_per_device")
        content["reasons"] = list(self.reasons)
        content["candidates"] = [
            {
                "strategy": self.strategy,
                "bytes_per_device": {**sizes, "total": self.bytes_per_device.total},
                "fits": self.fits,
                "relative_speed": 1.0,
                "estimated": True,
            }
        ]
        return content


def make_plan(config: Config, machine: Machine, model: ModelSize, data: DataSize) -> Plan:
    """Decide the chunk budget, precision and number of steps of a run in one process.

    Args:
        config: The user's word; what isn't `auto` stands.
        machine: Cores, memory, device.
        model: Size of the encoder.
        data: Size of the training data.

    Returns:
        The plan.
    """
    reasons = list(data.notes)
    batch_size = config.global_batch_size or config.batch_size
    dtype = _dtype(config, machine, reasons)
    steps = config.max_steps or config.epochs * data.steps_per_epoch
    num_queries = min(batch_size, data.num_records)
    num_documents = math.ceil(num_queries * data.documents_per_query)
    num_rows = num_queries + num_documents
    tiles = _loss_tiles(config, machine, model, reasons)
    chunks = plan_chunks(config, machine, model, num_rows=num_rows)
    sizes = step_bytes(
        model, chunk_tokens=chunks.live_tokens, num_queries=num_queries, num_documents=num_documents, tiles=tiles
    )
    chunks, sizes = _retained(config, machine, model, chunks, sizes, num_rows)
    reasons += chunks.reasons
    fits = FIT_FACTOR * sizes.total + FIT_RESERVE_BYTES <= FIT_SHARE * machine.memory_bytes
    _explain_memory(sizes, machine, reasons, fits=fits)
    loading = plan_loading(config, machine, data, num_queries=num_queries)
    reasons.append(loading.reason)
    return Plan(
        strategy="single",
        reasons=("single: one process on one device", *reasons),
        world_size=1,
        batch_size=batch_size,
        global_batch_size=batch_size,
        gradient_cache_chunk_size=chunks.rows,
        gradient_cache_chunk_tokens=chunks.tokens,
        retain=chunks.retain,
        dtype=dtype,
        loss_tile_size=tiles.size,
        steps=steps,
        steps_per_epoch=data.steps_per_epoch,
        warmup_steps=_warmup_steps(config, steps),
        eval_every=_eval_every(config, data.steps_per_epoch),
        bytes_per_device=sizes,
        fits=fits,
        memory_bytes=machine.memory_bytes,
        num_workers=loading.num_workers,
        batches_ahead=loading.batches_ahead,
    )


def _dtype(config: Config, machine: Machine, reasons: list[str]) -> str:
    if config.fp16:
        return "float16"
    if config.bf16 is True:
        return "bfloat16"
    if config.bf16 == "auto" and machine.fast_bf16 and config.torch_dtype == "float32":
        reasons.append(f"bf16: {machine.device_name} computes faster in bfloat16; weights stay float32")
        return "bfloat16"
    return config.torch_dtype


def _loss_tiles(config: Config, machine: Machine, model: ModelSize, reasons: list[str]) -> LossTiles:
    """Return the blocks of the similarity matrix; a Matryoshka loss holds one for each prefix beside the others."""
    prefixes = config.mrl_dims or ()
    if prefixes and max(prefixes) < model.dimension:
        reasons.append(
            f"mrl_dims: the whole vector of {model.dimension} dims is not among them, so only its first "
            f"{max(prefixes)} are trained"
        )
    count = 2 if not prefixes else 2 + len(prefixes)
    if config.loss_tile_size != "auto":
        return LossTiles(config.loss_tile_size, count)
    return LossTiles(CPU_TILE_SIZE if machine.device == "cpu" else ACCELERATOR_TILE_SIZE, count)


def _retained(
    config: Config, machine: Machine, model: ModelSize, chunks: ChunkPlan, sizes: BytesPerDevice, num_rows: int
) -> tuple[ChunkPlan, BytesPerDevice]:
    """Return chunks and sizes with the graphs that are kept."""
    room = (FIT_SHARE * machine.memory_bytes - FIT_RESERVE_BYTES) / FIT_FACTOR - sizes.total
    kept = plan_retention(config, machine, model, chunks, num_rows=num_rows, room_bytes=int(room))
    return kept, replace(sizes, activations=kept.live_tokens * model.activation_bytes_per_token)


def _explain_memory(sizes: BytesPerDevice, machine: Machine, reasons: list[str], *, fits: bool) -> None:
    needed = FIT_FACTOR * sizes.total + FIT_RESERVE_BYTES
    arithmetic = (
        f"1.1 x {show_bytes(sizes.total)} + 1.5 GiB = {show_bytes(needed)} against 95% of "
        f"{show_bytes(machine.memory_bytes)} = {show_bytes(FIT_SHARE * machine.memory_bytes)}"
    )
    reasons.append(f"memory: {arithmetic}: {'fits' if fits else 'may not fit; a smaller batch_size helps'}")


def _warmup_steps(config: Config, steps: int) -> int:
    return config.warmup_steps if config.warmup_steps is not None else math.ceil(config.warmup_ratio * steps)


def _eval_every(config: Config, steps_per_epoch: int) -> int | None:
    return {"no": None, "epoch": steps_per_epoch, "steps": config.eval_steps}[config.eval_strategy]
