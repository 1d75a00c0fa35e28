"""Decide what the configuration left open, and say why."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vembed.plan.memory import BytesPerDevice, ModelSize, show_bytes, step_bytes

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.plan.hardware import Machine

CPU_CHUNK_BYTES = 128 << 20
"""Activations of one chunk on a CPU. Small chunks stay in its caches and cost no launch, so less padding wins."""

ACCELERATOR_CHUNK_BYTES = 2 << 30
"""The same on an accelerator, which wants large matrices; never over a quarter of its memory."""

WHOLE_BATCH = 2**31 - 1
"""Rows and tokens of a chunk that holds any batch: plain training."""

LEAST_CHUNK_TOKENS = 512
MOST_CHUNK_ROWS = 512
FIT_FACTOR, FIT_RESERVE_BYTES, FIT_SHARE = 1.1, int(1.5 * (1 << 30)), 0.95
"""A step fits when 1.1 x prediction + 1.5 GiB is at most 95% of the memory."""


@dataclass(frozen=True, slots=True)
class DataSize:
    """What the plan must know of the training data.

    Attributes:
        num_records: Records to train on.
        steps_per_epoch: Global batches of one epoch.
        documents_per_query: Mean number of documents of a record.
        notes: What was held out, skipped or is unusual, one plain sentence each.
    """

    num_records: int
    steps_per_epoch: int
    documents_per_query: float
    notes: tuple[str, ...] = ()


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
        steps: Optimizer steps of the run.
        steps_per_epoch: Optimizer steps of one epoch.
        warmup_steps: Steps of rising learning rate.
        eval_every: Steps from one evaluation to the next, None for none while training.
        bytes_per_device: Predicted peak of one process.
        fits: Whether that fits with reserve.
        memory_bytes: Memory of one process.
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
    steps: int
    steps_per_epoch: int
    warmup_steps: int
    eval_every: int | None
    bytes_per_device: BytesPerDevice
    fits: bool
    memory_bytes: int
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
    rows, tokens = _chunk_budget(config, machine, model, reasons)
    steps = config.max_steps or config.epochs * data.steps_per_epoch
    num_queries = min(batch_size, data.num_records)
    num_documents = math.ceil(num_queries * data.documents_per_query)
    live_tokens, retain = tokens, 0.0
    if config.use_gradient_cache is False:
        rows, tokens, retain = WHOLE_BATCH, WHOLE_BATCH, 1.0
        if model.max_length is not None:  # without a limit nothing says how long a batch is
            live_tokens = (num_queries + num_documents) * model.max_length
    sizes = step_bytes(model, chunk_tokens=live_tokens, num_queries=num_queries, num_documents=num_documents)
    fits = FIT_FACTOR * sizes.total + FIT_RESERVE_BYTES <= FIT_SHARE * machine.memory_bytes
    _explain_caching(config, reasons)
    _explain_memory(sizes, machine, reasons, fits=fits)
    return Plan(
        strategy="single",
        reasons=("single: one process on one device", *reasons),
        world_size=1,
        batch_size=batch_size,
        global_batch_size=batch_size,
        gradient_cache_chunk_size=rows,
        gradient_cache_chunk_tokens=tokens,
        retain=retain,
        dtype=dtype,
        steps=steps,
        steps_per_epoch=data.steps_per_epoch,
        warmup_steps=_warmup_steps(config, steps),
        eval_every=_eval_every(config, data.steps_per_epoch),
        bytes_per_device=sizes,
        fits=fits,
        memory_bytes=machine.memory_bytes,
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


def _chunk_budget(config: Config, machine: Machine, model: ModelSize, reasons: list[str]) -> tuple[int, int]:
    """Return the most rows and the most padded tokens of one encoder call."""
    rows = MOST_CHUNK_ROWS if config.gradient_cache_chunk_size == "auto" else config.gradient_cache_chunk_size
    if config.gradient_cache_chunk_tokens != "auto":
        return rows, config.gradient_cache_chunk_tokens
    if config.gradient_cache_chunk_size != "auto" and model.max_length is not None:
        return rows, rows * model.max_length  # the user thinks in rows: tokens must not cut their chunks shorter
    wanted = CPU_CHUNK_BYTES
    if machine.device != "cpu":
        wanted = min(ACCELERATOR_CHUNK_BYTES, machine.memory_bytes // 4)
    tokens = max(LEAST_CHUNK_TOKENS, model.max_length or 0, wanted // model.activation_bytes_per_token)
    reasons.append(
        f"gradient_cache_chunk_tokens {tokens}: {show_bytes(tokens * model.activation_bytes_per_token)} of "
        f"activations at {show_bytes(model.activation_bytes_per_token)} a token (estimated)"
    )
    return rows, tokens


def _explain_caching(config: Config, reasons: list[str]) -> None:
    if config.use_gradient_cache is False:
        reasons.append("use_gradient_cache false: the batch is encoded in one call, memory grows with the batch")
    else:
        reasons.append("gradient caching: batches of several chunks are encoded twice, memory is that of one chunk")


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
