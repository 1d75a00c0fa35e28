"""Decide what the configuration left open, and say why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vembed.config.plugins import plugin_lines
from vembed.plan.advice import decision_tree, oom_ladder, scaling, zero_lines
from vembed.plan.batching import BatchPlan, RecordSize, plan_batch
from vembed.plan.devices import Devices
from vembed.plan.epoch import epoch_layout
from vembed.plan.hardware import cpu_memory_bytes
from vembed.plan.loading import Loading, plan_loading
from vembed.plan.memory import BatchRows, BytesPerDevice, LossTiles, ModelSize, show_bytes
from vembed.plan.problem import FIT_FACTOR, FIT_RESERVE_BYTES, FIT_SHARE, PlanningProblem, Way
from vembed.plan.strategy import Choice, choose
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.plan.cost_model import Candidate
    from vembed.plan.hardware import Machine
    from vembed.plan.problem import Mode, Strategy

CPU_TILE_SIZE = 1024
"""Side of a block of the similarity matrix: 4 MiB of float32, so that a few of them stay in a core's caches."""

ACCELERATOR_TILE_SIZE = 4096
"""The same on an accelerator: 64 MiB of float32, wide enough for its matrix units, few enough to launch."""

PLANNED_TOKENS = 2048
"""Length of the longest item that the prediction counts with where the model allows more and nobody says less."""


@dataclass(frozen=True, slots=True)
class DataSize:
    """What the plan must know of the training data.

    Attributes:
        num_records: Records to train on.
        documents_per_query: Mean number of documents of a record.
        pictures_per_record: Mean number of pictures of a record.
        picture_bytes: Memory of one picture as the encoder takes it.
        notes: What was held out, skipped or is unusual, one plain sentence each.
    """

    num_records: int
    documents_per_query: float
    notes: tuple[str, ...] = ()
    pictures_per_record: float = 0.0
    picture_bytes: int = 0
    longest_tokens: int | None = None

    def records(self) -> RecordSize:
        """Return what the batch's size depends on."""
        return RecordSize(
            self.num_records, self.documents_per_query, record_bytes=self.pictures_per_record * self.picture_bytes
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision of a run. What resuming needs of it is read back from the checkpoint.

    Attributes:
        strategy: How the work is spread: "single", "ddp", "ddp_gradcache", "fsdp" or "fsdp_lora".
        reasons: Why each decision came out so, one plain sentence each.
        world_size: Processes.
        batch_size: Queries of one process.
        global_batch_size: Queries of a step.
        gradient_cache_chunk_size: Most rows of one encoder call.
        gradient_cache_chunk_tokens: Most padded tokens of one encoder call.
        retain: Share of the chunks whose graphs are kept, at most; 1 is plain training.
        retain_tokens: Most padded tokens whose graphs are kept; None where only the share limits.
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
        gradient_accumulation_steps: Batches, each with its own negatives, whose gradients make one optimizer step.
        gradient_cache: Whether a part of the batch may be encoded twice, as its graphs may not all fit.
        mode: What sharding keeps whole during a step: "fast", "lean" or "sharded"; None where nothing is sharded.
        sharding_factor: Devices that share one copy of the model.
        use_lora: Whether adapters train beside a frozen base.
        gradient_checkpointing: Whether activations are computed again in the backward pass.
        cpu_offload: Whether shards live in the host's memory.
        learning_rate: Peak, scaled as asked.
        bucket_bytes: Gradients that one collective adds up.
        candidates: Every way of training that was weighed.
        decision_tree: The questions that lead to the strategy, answered.
        oom_ladder: What to do, in this order, when a step runs out of memory all the same.
        zero_stages: Weights, gradients and optimizer state by what is sharded; empty in one process.
        scaling: What more or fewer devices would do.
        model: Facts about the model, for people.
    """

    strategy: Strategy
    reasons: tuple[str, ...]
    world_size: int
    batch_size: int
    global_batch_size: int
    gradient_cache_chunk_size: int
    gradient_cache_chunk_tokens: int
    retain: float
    retain_tokens: int | None
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
    gradient_accumulation_steps: int = 1
    gradient_cache: bool = True
    mode: Mode | None = None
    sharding_factor: int = 1
    use_lora: bool = False
    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    learning_rate: float = 0.0
    bucket_bytes: int = 128 << 20
    candidates: tuple[Candidate, ...] = ()
    decision_tree: tuple[str, ...] = ()
    oom_ladder: tuple[str, ...] = ()
    zero_stages: tuple[str, ...] = ()
    scaling: tuple[str, ...] = ()
    model: dict[str, str] = field(default_factory=dict)

    def recommends(self, candidate: Candidate) -> bool:
        """Return whether a candidate is what the plan chose."""
        return candidate.way == Way(
            self.strategy,
            self.gradient_cache,
            self.gradient_checkpointing,
            self.use_lora,
            self.mode,
            self.sharding_factor,
            self.cpu_offload,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the contents of plan.json."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content.pop("bytes_per_device")
        content |= {name: list(value) for name, value in content.items() if isinstance(value, tuple)}
        content["model"] = dict(self.model)
        content["candidates"] = [each.to_json(recommended=self.recommends(each)) for each in self.candidates]
        return content


def make_plan(
    config: Config, machine: Machine, model: ModelSize, data: DataSize, *, devices: Devices | None = None
) -> Plan:
    """Decide how a run is trained.

    Args:
        config: The user's word; what isn't `auto` stands.
        machine: Cores, memory, device of one process.
        model: Size of the encoder.
        data: Size of the training data.
        devices: All devices of the run; None is the machine's one.

    Returns:
        The plan.

    Raises:
        ConfigError: A key asks for what these devices or this model can't do.
    """
    devices = devices or Devices.of(machine)
    reasons = [*plugin_lines(config.plugins), *data.notes]
    model = _limited(config, model, data, reasons)
    batch = plan_batch(config, devices, model, data.records(), host_bytes=cpu_memory_bytes())
    dtype = compute_dtype(config, machine, reasons)
    rows, num_pictures = _batch_rows(batch, devices, data)
    tiles = _loss_tiles(config, machine, model, reasons)
    problem = PlanningProblem(config, machine, devices, model, rows, num_pictures, dtype, tiles)
    choice = choose(problem)
    steps = _steps(config, batch, data.num_records)
    loading = plan_loading(config, machine, data, num_queries=rows.num_queries)
    reasons += (*steps.notes, *batch.reasons, *_reduction_notes(problem, choice.chosen.way))
    reasons += (*choice.chosen.chunks.reasons, memory_sentence(choice.chosen, devices.memory_bytes), loading.reason)
    return _assembled(problem, choice, batch, steps, loading, (*choice.reasons, *reasons))


def _assembled(
    problem: PlanningProblem,
    choice: Choice,
    batch: BatchPlan,
    steps: _Steps,
    loading: Loading,
    reasons: tuple[str, ...],
) -> Plan:
    """Put the decisions together."""
    chosen, way, chunks = choice.chosen, choice.chosen.way, choice.chosen.chunks
    return Plan(
        strategy=way.strategy,
        reasons=reasons,
        world_size=problem.devices.count,
        batch_size=batch.batch_size,
        global_batch_size=batch.global_batch_size,
        gradient_cache_chunk_size=chunks.rows,
        gradient_cache_chunk_tokens=chunks.tokens,
        retain=chunks.retain,
        retain_tokens=chunks.retain_tokens,
        dtype=problem.dtype,
        loss_tile_size=problem.tiles.size,
        steps=steps.all,
        steps_per_epoch=steps.per_epoch,
        warmup_steps=_warmup_steps(problem.config, steps.all),
        eval_every=_eval_every(problem.config, steps.per_epoch),
        bytes_per_device=chosen.bytes_per_device,
        fits=chosen.fits,
        memory_bytes=problem.devices.memory_bytes,
        num_workers=loading.num_workers,
        batches_ahead=loading.batches_ahead,
        gradient_cache=way.gradient_cache,
        mode=way.mode,
        sharding_factor=way.sharding_factor,
        use_lora=way.use_lora,
        gradient_checkpointing=way.gradient_checkpointing,
        cpu_offload=way.cpu_offload,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        learning_rate=batch.learning_rate,
        bucket_bytes=problem.config.ddp_bucket_cap_mb << 20,
        candidates=choice.candidates,
        decision_tree=decision_tree(problem, choice),
        oom_ladder=oom_ladder(problem, choice),
        zero_stages=zero_lines(problem),
        scaling=tuple(scaling(problem)),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Optimizer steps of the run and of an epoch, and what to tell about them."""

    all: int
    per_epoch: int
    notes: tuple[str, ...]


def _steps(config: Config, batch: BatchPlan, num_records: int) -> _Steps:
    num_batches, notes = epoch_layout(num_records, batch.global_batch_size, drop_last=config.drop_last)
    accumulated = batch.gradient_accumulation_steps
    steps = config.max_steps or math.ceil(config.epochs * num_batches / accumulated)
    return _Steps(steps, math.ceil(num_batches / accumulated), notes)


def memory_sentence(candidate: Candidate, memory_bytes: int) -> str:
    """Return the arithmetic of whether a candidate fits."""
    total = candidate.bytes_per_device.total
    needed = FIT_FACTOR * total + FIT_RESERVE_BYTES
    arithmetic = (
        f"1.1 x {show_bytes(total)} + 1.5 GiB = {show_bytes(needed)} against 95% of "
        f"{show_bytes(memory_bytes)} = {show_bytes(FIT_SHARE * memory_bytes)}"
    )
    return f"memory: {arithmetic}: {'fits' if candidate.fits else 'may not fit; a smaller batch_size helps'}"


def _limited(config: Config, model: ModelSize, data: DataSize, reasons: list[str]) -> ModelSize:
    """Return the model for items as long as they come."""
    longest = model.max_length
    if longest is None:
        return model
    if config.max_seq_length != "auto":
        return model  # the encoder's own limit, counted already
    if data.longest_tokens is not None:
        return model.limited(max(1, data.longest_tokens))
    if longest <= PLANNED_TOKENS:
        return model
    reasons.append(
        f"memory is predicted for items of up to {PLANNED_TOKENS} of the {longest} tokens that the model takes; "
        f"max_seq_length says otherwise"
    )
    return model.limited(PLANNED_TOKENS)


def _batch_rows(batch: BatchPlan, devices: Devices, data: DataSize) -> tuple[BatchRows, float]:
    """Return the rows of a step, and how many of one device's are pictures."""
    all_queries = min(batch.global_batch_size, data.num_records)
    own = min(batch.batch_size, math.ceil(all_queries / devices.count))
    documents = data.documents_per_query
    rows = BatchRows(own, math.ceil(own * documents), all_queries, math.ceil(all_queries * documents))
    return rows, min(rows.own, own * data.pictures_per_record)


def _reduction_notes(problem: PlanningProblem, way: Way) -> list[str]:
    """Say how the gradients of several devices are added up, and what that never needs."""
    config, devices, notes = problem.config, problem.devices, []
    if config.ddp_find_unused_parameters:
        notes.append(
            "ddp_find_unused_parameters true: never needed; every trainable weight that a device didn't use counts as "
            "zero in the sum"
        )
    if devices.count > 1 and way.mode is None:
        start = (
            "start as the first process has them" if config.ddp_broadcast_buffers else "stay as each process has them"
        )
        notes.append(
            f"gradients are added up once a step, in buckets of {config.ddp_bucket_cap_mb} MiB; buffers {start}"
        )
    return notes


def compute_dtype(config: Config, machine: Machine, reasons: list[str]) -> str:
    """Return what the encoder computes in, and add the reason where that was open."""
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
    size = CPU_TILE_SIZE if machine.device == "cpu" else ACCELERATOR_TILE_SIZE
    if config.loss_tile_size != "auto":
        size = config.loss_tile_size
    return LossTiles(size, count, LOSSES.load(config.loss_type).memory)


def _warmup_steps(config: Config, steps: int) -> int:
    return config.warmup_steps if config.warmup_steps is not None else math.ceil(config.warmup_ratio * steps)


def _eval_every(config: Config, steps_per_epoch: int) -> int | None:
    return {"no": None, "epoch": steps_per_epoch, "steps": config.eval_steps}[config.eval_strategy]
