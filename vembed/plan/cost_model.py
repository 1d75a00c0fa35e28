"""What each way of training costs on one device: bytes, seconds, and what goes over the wires.

Seconds are rough: operations at a usual share of the device's peak, then bytes over the slowest link, one after the
other. They order the ways; they promise no throughput.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vembed.plan.chunks import choose_chunks, num_calls, plan_retention, whole_batch_bytes
from vembed.plan.devices import HOST_LINK
from vembed.plan.memory import ADAM_STATES, BytesPerDevice, gathered_bytes, loss_bytes
from vembed.plan.peak_timeline import Cut, Load, activation_moments, peak_of_step

if TYPE_CHECKING:
    from vembed.plan.chunks import ChunkPlan
    from vembed.plan.memory import ModelSize
    from vembed.plan.problem import PlanningProblem, Way

PEAK_SHARE = 0.4
"""Of a device's peak operations, what training an encoder usually reaches."""

FOUR_BIT_BYTES = 0.5625
"""Of a weight held in 4 bits with its scales."""

GRADIENT_BYTES = 4
"""Of a gradient while it is summed over devices: at least float32."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way of training with its price."""

    way: Way
    bytes_per_device: BytesPerDevice  # predicted peak of one device
    least_bytes: int  # the same with as few graphs kept, and as small calls, as this way allows
    host_bytes: int  # shards of one device that live in the host's memory
    fits: bool  # whether the prediction fits with reserve
    chunks: ChunkPlan
    relative_speed: float  # 1 is forward and backward once, on these devices, with nothing to wait for
    communication_bytes: int  # what one device sends in a step
    scaling_efficiency: float  # share of a step that isn't spent waiting for other devices
    estimated: bool  # whether the activations come from a formula
    compute_seconds: float  # of a step, without waiting

    def to_json(self, *, recommended: bool) -> dict[str, Any]:
        """Return an entry of plan.json's candidates."""
        way, sizes = asdict(self.way), asdict(self.bytes_per_device)
        sizes["apart"] = -sizes["apart"]  # so that the parts add up to the total
        return {
            "strategy": way.pop("strategy"),
            "bytes_per_device": {**sizes, "total": self.bytes_per_device.total},
            "fits": self.fits,
            "relative_speed": round(self.relative_speed, 4),
            "estimated": self.estimated,
            "recommended": recommended,
            **way,
            "zero_stage": self.way.zero_stage,
            "retain": round(self.chunks.kept_share, 4),
            "least_bytes": self.least_bytes,
            "host_bytes": self.host_bytes,
            "communication_bytes": self.communication_bytes,
            "scaling_efficiency": round(self.scaling_efficiency, 4),
        }


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of one device beside activations and loss."""

    parameters: int
    gradients: int
    optimizer: int
    reduction: int = 0
    sharding: int = 0
    host: int = 0


def weigh(problem: PlanningProblem, way: Way) -> Candidate:
    """Return the price of training that way."""
    model = problem.sized(way)
    states = _states(problem, way, model)
    loss, gathered = loss_bytes(model, problem.rows, problem.tiles), gathered_bytes(model, problem.rows)
    fixed = states.parameters + states.gradients + states.optimizer + states.reduction + states.sharding
    limit = problem.limit_bytes(way)
    room = limit - fixed - loss - gathered
    bare = choose_chunks(problem, way, room_bytes=room)
    chunks = plan_retention(problem, way, bare, room_bytes=room - bare.activation_bytes)
    activations, keeps_all = chunks.activation_bytes, chunks.kept_share == 1
    if not way.gradient_cache and not keeps_all:
        activations = whole_batch_bytes(problem, way, call_tokens=chunks.tokens) or activations
    parts = BytesPerDevice(
        states.parameters, states.gradients, states.optimizer, activations, loss, gathered, states.reduction,
        states.sharding,
    )  # fmt: skip
    keep_all = Cut(chunks.rows, chunks.tokens, 1.0, None, way.gradient_checkpointing)
    kept = Cut(chunks.rows, chunks.tokens, chunks.retain, chunks.retain_tokens, way.gradient_checkpointing)
    sizes = _at_worst(problem, way, parts, kept if way.gradient_cache else keep_all)
    least = sizes
    if way.gradient_cache:
        small = choose_chunks(problem, way, room_bytes=0)
        cut = replace(kept, rows=small.rows, tokens=small.tokens, retain=small.retain, retain_tokens=None)
        least = _at_worst(problem, way, replace(parts, activations=small.activation_bytes), cut)
    compute = _compute_seconds(problem, way, model, kept=chunks.kept_share if way.gradient_cache else 1.0)
    sent, waiting = _communication(problem, way, model, chunks)
    plain = _compute_seconds(problem, None, problem.model, kept=1.0)
    return Candidate(
        way=way,
        bytes_per_device=sizes,
        least_bytes=least.total,
        host_bytes=states.host,
        fits=sizes.total <= limit and (way.gradient_cache or keeps_all),
        chunks=chunks,
        relative_speed=plain / (compute + waiting),
        communication_bytes=sent,
        scaling_efficiency=compute / (compute + waiting),
        estimated=model.estimated,
        compute_seconds=compute,
    )


def _at_worst(problem: PlanningProblem, way: Way, parts: BytesPerDevice, cut: Cut) -> BytesPerDevice:
    """Take off what is never there at the same time. An estimate by formula stays on the safe side: all adds up."""
    model = problem.sized(way)
    sampled = math.ceil((problem.sampled_tokens or 0) / max(1, problem.rows.own))
    loads = [Load(tower, problem.tower_rows(tower), tower.max_tokens or sampled) for tower in model.towers]
    if model.estimated or not all(load.width for load in loads):
        return parts
    loads.sort(key=lambda load: load.tower.items != "pictures")
    value = max(GRADIENT_BYTES, model.bytes_per_value)
    # Where gradients are sharded at once, those of what blocks leave over come whole, when activations are gone.
    late = min(model.outside_blocks, model.num_trainable) * GRADIENT_BYTES if way.mode == "sharded" else 0
    activations = activation_moments(loads, cut)
    parts = replace(parts, activations=activations.most)
    worst = peak_of_step(
        replace(parts, sharding=parts.sharding - late),
        activations,
        tables=2 * model.values_of(problem.rows.num_queries, problem.rows.num_documents) * value,
        fresh=late if way.mode == "sharded" else value * max(tower.largest_tensor for tower in model.towers),
        held=problem.config.gradient_accumulation_steps not in ("auto", 1),
    )
    return replace(parts, apart=parts.total - worst.total)


def _states(problem: PlanningProblem, way: Way, model: ModelSize) -> _States:
    """Return the bytes of weights, gradients and optimizer, by what is sharded."""
    value = max(GRADIENT_BYTES, model.bytes_per_value) if way.use_lora else model.bytes_per_value
    frozen = FOUR_BIT_BYTES if problem.config.load_in_4bit and way.use_lora else model.bytes_per_value
    trained = model.num_trainable * value
    narrowed = 0 if problem.config.load_in_4bit else model.narrowed
    weights = int((model.num_parameters - model.num_trainable - narrowed) * frozen) + trained
    weights += narrowed * problem.compute_bytes
    factor, many = way.sharding_factor, problem.devices.count > 1
    if way.mode is None:
        reduced = (
            min(2 * problem.config.ddp_bucket_cap_mb << 20, 2 * model.num_trainable * GRADIENT_BYTES) if many else 0
        )
        return _States(weights, trained, ADAM_STATES * trained, reduction=reduced)
    shard, optimizer = weights // factor, ADAM_STATES * trained // factor
    summed = model.num_trainable * max(GRADIENT_BYTES, value)
    block, outside = max(tower.largest_block for tower in model.towers), model.outside_blocks
    whole = _whole_bytes(problem, model)
    gathered = outside * model.bytes_per_value + 2 * block * problem.gather_bytes(model)
    passing = gathered + min(block + outside, model.num_trainable) * GRADIENT_BYTES
    device = {
        "fast": _States(whole, summed, optimizer, sharding=shard + summed // factor),
        "lean": _States(shard, summed, optimizer, sharding=gathered + summed // factor),
        "sharded": _States(shard, summed // factor, optimizer, sharding=passing),
    }[way.mode]
    if not way.cpu_offload:
        return device
    host = shard + summed // factor + optimizer
    if way.mode == "fast":
        return replace(device, optimizer=0, sharding=0, host=host)
    kept = 0 if way.mode == "sharded" else device.gradients
    return replace(device, parameters=0, gradients=kept, optimizer=0, sharding=passing, host=host)


def _whole_bytes(problem: PlanningProblem, model: ModelSize) -> int:
    """Return the bytes of weights that are gathered: blocks in the type of the products, the rest in their own."""
    outside = model.outside_blocks
    return (model.num_parameters - outside) * problem.gather_bytes(model) + outside * model.bytes_per_value


def _compute_seconds(problem: PlanningProblem, way: Way | None, model: ModelSize, *, kept: float) -> float:
    """Return the seconds that one device computes in a step; without a way that of plain training.

    A forward pass is F operations. Backward through frozen weights is another F, and the weights' own gradients F times
    the part that trains; what isn't kept and what is checkpointed is encoded once more: (4 - kept) F for full
    fine-tuning, (3 - kept) F with adapters.
    """
    operations = 0.0
    for tower in model.towers:
        rows, width = problem.tower_rows(tower), tower.max_tokens or 1
        forward = tower.forward_flops.of(rows, width)
        if not tower.num_trainable:
            operations += forward
            continue
        passes = 2 + tower.num_trainable / max(1, tower.num_parameters) + (1 - kept)
        operations += forward * (passes + (way is not None and way.gradient_checkpointing))
    return max(operations, 1.0) / (problem.peak_operations * PEAK_SHARE)


def _communication(problem: PlanningProblem, way: Way, model: ModelSize, chunks: ChunkPlan) -> tuple[int, float]:
    """Return the bytes that one device sends in a step, and the seconds that it waits for them."""
    devices, factor = problem.devices, way.sharding_factor
    if devices.count == 1:
        return 0, 0.0
    gradients = model.num_trainable * GRADIENT_BYTES
    among_all = (devices.count - 1) / devices.count
    embeddings = 2 * model.values_of(problem.rows.all_queries, problem.rows.all_documents) * 4 * among_all
    if way.mode is None:
        everywhere, nearby = embeddings + 2 * gradients * among_all, 0.0
    else:
        among_shards, replicas = (factor - 1) / factor, devices.count // factor
        reductions = _max_calls(problem, model, chunks) if way.mode == "sharded" else 1
        nearby = (_gathered_weights(problem, way, model, chunks) + reductions * gradients) * among_shards
        everywhere = embeddings + 2 * gradients / factor * (replicas - 1) / replicas
    waiting = everywhere / devices.bandwidth(devices.count) + nearby / devices.bandwidth(max(2, factor))
    if way.cpu_offload:
        shards = model.num_parameters * model.bytes_per_value / factor
        waiting += (shards * reductions * 3 + 2 * gradients / factor) / HOST_LINK
    return int(everywhere + nearby), waiting / 1e9


def _gathered_weights(problem: PlanningProblem, way: Way, model: ModelSize, chunks: ChunkPlan) -> float:
    """Return the bytes of weights that a step gathers: once, or for each pass of each call."""
    if not way.resharding:
        return _whole_bytes(problem, model)
    total = 0.0
    for tower in model.towers:
        calls = num_calls(problem.tower_rows(tower), tower.max_tokens or 1, chunks.tokens, chunks.rows)
        passes = 3 - chunks.kept_share if tower.num_trainable else 1
        total += calls * passes * tower.num_parameters * problem.gather_bytes(model)
    return total


def _max_calls(problem: PlanningProblem, model: ModelSize, chunks: ChunkPlan) -> int:
    rows = [(problem.tower_rows(tower), tower.max_tokens or 1) for tower in model.towers]
    return max(1, *(num_calls(number, width, chunks.tokens, chunks.rows) for number, width in rows))
