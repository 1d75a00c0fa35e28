"""The price of each way to train on one device: bytes at the worst moment of a step, seconds, and what is sent.

Bytes: weights, gradients and optimizer by what is sharded; then the activations and the loss, at the moments of a step
(peak.py).

Seconds are rough: operations at a usual share of the device's peak, then bytes over the slowest link, one after the
other. They order the strategies; they promise no throughput.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vembed.plan.chunks import choose_chunks, num_calls, plan_retention, whole_batch_bytes
from vembed.plan.devices import HOST_LINK
from vembed.plan.memory import ADAM_STATES, BytesPerDevice, gathered_bytes, loss_bytes
from vembed.plan.peak import activation_moments, peak_of_step

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


def weigh(problem: PlanningProblem, way: Way) -> Candidate:
    """Return the price of training that way."""
    model = problem.sized(way)
    states, host_bytes = state_bytes(problem, way, model)
    loss, gathered = loss_bytes(model, problem.rows, problem.tiles), gathered_bytes(model, problem.rows)
    limit = problem.limit_bytes(way)

    # What states and loss leave is for activations: first those of one call, then as many kept graphs as fit.
    room = limit - states.total - loss - gathered
    bare = choose_chunks(problem, way, room_bytes=room)
    chunks = plan_retention(problem, way, bare, room_bytes=room - bare.activation_bytes)
    activations, keeps_all = chunks.activation_bytes, chunks.kept_share == 1
    if not way.gradient_cache and not keeps_all:  # plain training keeps all graphs, whether they fit or not
        activations = whole_batch_bytes(problem, way, call_tokens=chunks.tokens) or activations
    parts = replace(states, activations=activations, loss=loss, embeddings=gathered)
    kept = chunks if way.gradient_cache else replace(chunks, retain=1.0, retain_tokens=None)
    sizes = least = _at_worst(problem, way, parts, kept)
    if way.gradient_cache:  # what a step that ran out of memory can fall back to
        small = choose_chunks(problem, way, room_bytes=0)
        least = _at_worst(problem, way, replace(parts, activations=small.activation_bytes), small)

    compute = _compute_seconds(problem, way, model, kept=chunks.kept_share if way.gradient_cache else 1.0)
    sent, waiting = _communication(problem, way, model, chunks)
    plain = _compute_seconds(problem, None, problem.model, kept=1.0)
    return Candidate(
        way=way,
        bytes_per_device=sizes,
        least_bytes=min(least.total, sizes.total),  # a batch that is smaller than a small call takes less
        host_bytes=host_bytes,
        fits=sizes.total <= limit and (way.gradient_cache or keeps_all),
        chunks=chunks,
        relative_speed=plain / (compute + waiting),
        communication_bytes=sent,
        scaling_efficiency=compute / (compute + waiting),
        estimated=model.estimated,
        compute_seconds=compute,
    )


# Weights, gradients and optimizer -------------------------------------------------------------------------------------


def state_bytes(problem: PlanningProblem, way: Way, model: ModelSize) -> tuple[BytesPerDevice, int]:
    """Return what one device holds beside activations and loss, and the shards that lie in its host's memory instead.

    With M bytes of weights, N devices that share a copy and AdamW's k = 2 states, full fine-tuning in float32 takes
    M (2 + k) replicated, M (2 + k / N) fast, M (1 + (1 + k) / N) lean, M (2 + k) / N sharded (ZeRO 0 to 3; Rajbhandari
    et al., 2020). Below are the differences: what trains, the type that weights are gathered in, and what passes.
    """
    # Adapters train in float32 beside any base; frozen weights may lie in 4 bits, or in the type of the products.
    value = max(GRADIENT_BYTES, model.bytes_per_value) if way.use_lora else model.bytes_per_value
    frozen = FOUR_BIT_BYTES if problem.config.load_in_4bit and way.use_lora else model.bytes_per_value
    trained = model.num_trainable * value
    narrowed = 0 if problem.config.load_in_4bit else model.narrowed
    weights = int((model.num_parameters - model.num_trainable - narrowed) * frozen) + trained
    weights += narrowed * problem.compute_bytes

    if way.mode is None:
        reduction = 0
        if problem.devices.count > 1:
            # A bucket's copy in float32 is still there while that of the next is made; all gradients are at most two.
            reduction = min(2 * problem.config.ddp_bucket_cap_mb << 20, 2 * model.num_trainable * GRADIENT_BYTES)
        return BytesPerDevice(weights, trained, ADAM_STATES * trained, 0, 0, reduction=reduction), 0

    factor = way.sharding_factor
    shard, optimizer = weights // factor, ADAM_STATES * trained // factor
    summed = model.num_trainable * max(GRADIENT_BYTES, value)  # whole gradients; they are summed in float32 at least
    block, outside = max(tower.largest_block for tower in model.towers), model.outside_blocks
    # Two blocks are whole at once, the one that computes and the next, and what no block holds for a whole pass.
    gathered = outside * model.bytes_per_value + 2 * block * problem.gather_bytes(model)
    passing = gathered + min(block + outside, model.num_trainable) * GRADIENT_BYTES  # and their gradients
    if way.mode == "fast":  # all weights and gradients whole; their shards beside them
        weights, gradients, sharding = _whole_bytes(problem, model), summed, shard + summed // factor
    elif way.mode == "lean":  # gradients whole
        weights, gradients, sharding = shard, summed, gathered + summed // factor
    else:
        weights, gradients, sharding = shard, summed // factor, passing
    if not way.cpu_offload:
        return BytesPerDevice(weights, gradients, optimizer, 0, 0, sharding=sharding), 0

    # All shards move to the host, where the optimizer steps. What is whole during a step stays on the device.
    host_bytes = shard + summed // factor + optimizer
    if way.mode == "fast":
        return BytesPerDevice(weights, gradients, 0, 0, 0), host_bytes
    return BytesPerDevice(0, 0 if way.mode == "sharded" else gradients, 0, 0, 0, sharding=passing), host_bytes


def _whole_bytes(problem: PlanningProblem, model: ModelSize) -> int:
    """Return the bytes of weights that are gathered: blocks in the type of the products, the rest in their own."""
    outside = model.outside_blocks
    return (model.num_parameters - outside) * problem.gather_bytes(model) + outside * model.bytes_per_value


def _at_worst(problem: PlanningProblem, way: Way, parts: BytesPerDevice, chunks: ChunkPlan) -> BytesPerDevice:
    """Take off what is never there at the same time. An estimate by formula stays on the safe side: all adds up."""
    model = problem.sized(way)
    sampled = math.ceil((problem.sampled_tokens or 0) / max(1, problem.rows.local))
    loads = [(tower, problem.tower_rows(tower), tower.max_tokens or sampled) for tower in model.towers]
    if model.estimated or not all(width for _, _, width in loads):
        return parts
    loads.sort(key=lambda load: load[0].items != "pictures")  # the engine encodes pictures first
    activations = activation_moments(loads, chunks, checkpointed=way.gradient_checkpointing)
    parts = replace(parts, activations=activations.most)
    value = max(GRADIENT_BYTES, model.bytes_per_value)
    # Where gradients are sharded at once, those of what blocks leave over come whole, when activations are gone:
    # `fresh` counts them then, so that `sharding` mustn't count them all the time.
    late = min(model.outside_blocks, model.num_trainable) * GRADIENT_BYTES if way.mode == "sharded" else 0
    worst = peak_of_step(
        replace(parts, sharding=parts.sharding - late),
        activations,
        tables=2 * model.values_of(problem.rows.num_queries, problem.rows.num_documents) * value,
        fresh=late if way.mode == "sharded" else value * max(tower.largest_tensor for tower in model.towers),
        held=problem.config.gradient_accumulation_steps not in ("auto", 1),
    )
    # The worst moment may hold more than the parts: gradients of earlier batches, or a fresh one of the largest tensor.
    more = max(0, worst.total - parts.total)
    return replace(parts, gradients=parts.gradients + more, apart=max(0, parts.total - worst.total))


# Seconds and what is sent ---------------------------------------------------------------------------------------------


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
            operations += forward  # nothing goes back through it
            continue
        passes = 2 + tower.num_trainable / max(1, tower.num_parameters) + (1 - kept)
        operations += forward * (passes + (way is not None and way.gradient_checkpointing))
    return max(operations, 1.0) / (problem.peak_operations * PEAK_SHARE)


def _communication(problem: PlanningProblem, way: Way, model: ModelSize, chunks: ChunkPlan) -> tuple[int, float]:
    """Return the bytes that one device sends in a step, and the seconds that it waits for them.

    Of n devices, a ring sends (n - 1) / n of what it gathers or scatters, and twice that of what it adds up everywhere.
    """
    devices, factor = problem.devices, way.sharding_factor
    if devices.count == 1:
        return 0, 0.0
    gradients = model.num_trainable * GRADIENT_BYTES
    among_all = (devices.count - 1) / devices.count
    # Embeddings of all rows are gathered, and their gradients added up, in float32.
    embeddings = 2 * model.values_of(problem.rows.all_queries, problem.rows.all_documents) * 4 * among_all
    if way.mode is None:
        everywhere = embeddings + 2 * gradients * among_all
        return int(everywhere), everywhere / devices.bandwidth(devices.count) / 1e9

    among_shards, replicas = (factor - 1) / factor, devices.count // factor
    calls = [
        num_calls(problem.tower_rows(tower), tower.max_tokens or 1, chunks.tokens, chunks.rows)
        for tower in model.towers
    ]
    weights: float = _whole_bytes(problem, model)
    if way.resharding:  # in each pass of each call: forward, forward again of what isn't kept, backward
        weights = 0.0
        for tower, count in zip(model.towers, calls, strict=True):
            passes = 3 - chunks.kept_share if tower.num_trainable else 1
            weights += count * passes * tower.num_parameters * problem.gather_bytes(model)
    reductions = max(1, *calls) if way.mode == "sharded" else 1  # only whole gradients can wait for the last call
    nearby = (weights + reductions * gradients) * among_shards
    everywhere = embeddings + 2 * gradients / factor * (replicas - 1) / replicas  # the shards of replicas are added up
    waiting = everywhere / devices.bandwidth(devices.count) + nearby / devices.bandwidth(max(2, factor))
    if way.cpu_offload:
        shards = model.num_parameters * model.bytes_per_value / factor
        waiting += (shards * reductions * 3 + 2 * gradients / factor) / HOST_LINK
    return int(everywhere + nearby), waiting / 1e9
