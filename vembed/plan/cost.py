"""The price of each way to train on one device: bytes at the worst moment of a step, seconds, and what is sent.

Bytes: weights, gradients and optimizer by what is sharded; then the activations and the loss, at the moments of a step.
Activations and gradients don't add up: a tower has no gradients before its first backward, and where calls are encoded
again no retained graph is left. What counts is the largest of these moments:

1. The loss: the graphs of all retained calls, and the blocks of the similarity matrix.
2. The backward of retained calls, tower after tower: what is left of the graphs, what the backward takes beyond, and
   the gradients that are there by then.
3. Each call that is encoded again: its own graph, its backward, and the gradients that are there by then.
4. The end of a backward: the table of a vocabulary gets a fresh gradient as large as itself, and the gradients of all
   copies of weights wait to be added to those of the weights.
5. The reduction over ranks: all gradients, and a copy of those that one collective takes.

Embeddings and their gradients are there from the loss to the end of the last backward, and the copies of weights that
mixed precision makes to the end of the step.

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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.plan.chunks import ChunkPlan
    from vembed.plan.memory import ModelSize, TowerSize
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


# The worst moment of a step -------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of the backward passes: activations and gradients that are alive."""

    activations: float  # bytes of graphs, and of what a backward takes beyond
    gradients: float  # share of the gradients that are there, 0 to 1
    fresh: bool = False  # the largest tensor that trains has a fresh gradient beside the accumulated one


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations of a step."""

    kept: float  # bytes of the graphs of all retained calls, as the loss finds them
    moments: tuple[Moment, ...]  # those of the backward passes
    copies: int  # bytes of copies of weights; they are there at every moment

    @property
    def most(self) -> int:
        """Bytes that are alive at once, at most."""
        return self.copies + int(max([self.kept, *(moment.activations for moment in self.moments)]))


def activation_moments(
    loads: Sequence[tuple[TowerSize, float, int]], chunks: ChunkPlan, *, checkpointed: bool
) -> Activations:
    """Return the activations of a step at its worst moments.

    Args:
        loads: Each tower, the rows that it encodes on one device, and the tokens of a row; in the order in which the
            towers are called: pictures before texts.
        chunks: Of these the limits of a call and of what keeps its graph.
        checkpointed: Whether layers are recomputed.
    """
    towers = [_Calls(tower, rows, width, chunks, checkpointed=checkpointed) for tower, rows, width in loads if rows]
    rows, tokens = sum(calls.rows for calls in towers), sum(calls.tokens for calls in towers)
    retain, most = chunks.retain * tokens, math.inf if chunks.retain_tokens is None else chunks.retain_tokens
    if rows <= chunks.rows and tokens <= chunks.tokens:
        retain = most = tokens  # what fits one call is never encoded again
    for calls in reversed(towers):  # the last calls are kept, up to the first that isn't
        calls.retain_last(retain, most)
        retain, most = retain - calls.retained_tokens, most - calls.retained_tokens
        if calls.retained < calls.count:
            break

    trainable = {calls.tower.name: calls.tower.num_trainable for calls in towers}
    with_gradients: set[str] = set()  # towers that have theirs

    def share() -> float:
        return sum(trainable.get(name, 0) for name in with_gradients) / max(1, sum(trainable.values()))

    # Retained graphs go back first, the last call of the last tower first: its graph is freed as gradients come.
    # Further calls are full ones and differ only in what is left of the graphs, so that the first of them is the worst.
    kept = alive = sum(calls.kept for calls in towers)
    moments: list[Moment] = []
    for calls in reversed(towers):
        tower = calls.tower
        if calls.retained and tower.num_trainable:
            saved, beyond = calls.costs(calls.last)
            moments += [Moment(alive + beyond, share()), Moment(alive - saved + tower.cast_bytes, share())]
            with_gradients |= {tower.name, *tower.through}
            moments.append(Moment(alive - saved, share()))
            if calls.retained > 1:
                full, beyond = calls.costs(calls.full)
                moments.append(Moment(alive - saved + beyond, share()))
                moments.append(Moment(alive - saved - full + tower.cast_bytes, share(), fresh=True))
        alive -= calls.kept

    # The others are encoded again from the first one on, each with its graph alone. Two are enough: the first meets no
    # gradients of its tower, every other one meets them.
    for calls in towers:
        tower, number = calls.tower, calls.count - calls.retained
        if not number or not tower.num_trainable:
            continue
        replayed = [calls.full] * min(2, number)
        if number <= 2 and not calls.retained:
            replayed[-1] = calls.last
        for rows in replayed:
            saved, beyond = calls.costs(rows)
            moments.append(Moment(saved + beyond, share()))
            moments.append(Moment(tower.cast_bytes, share(), fresh=tower.name in with_gradients))
            with_gradients |= {tower.name, *tower.through}
    return Activations(kept, tuple(moments), sum(calls.tower.cast_bytes for calls in towers))


class _Calls:
    """The calls of one tower: full ones, and a last one of the rows that are left."""

    def __init__(self, tower: TowerSize, rows: float, width: int, chunks: ChunkPlan, *, checkpointed: bool) -> None:
        self.tower, self.rows, self._width, self._checkpointed = tower, rows, width, checkpointed
        self.full = min(rows, max(1, min(chunks.rows, chunks.tokens // width)))  # rows of a full call
        self.count = math.ceil(rows / self.full)
        self.last = rows - (self.count - 1) * self.full  # rows of the last call
        self.retained = 0  # calls

    @property
    def tokens(self) -> float:
        """Padded tokens of all calls."""
        return self.rows * self._width

    @property
    def retained_tokens(self) -> float:
        """Padded tokens of the retained calls."""
        return self._retained_rows * self._width

    @property
    def kept(self) -> float:
        """Bytes of the graphs of the retained calls."""
        if not self.retained:
            return 0.0
        cost = self.tower.kept(checkpointed=self._checkpointed)
        return cost.of(self._retained_rows, self._width) + (self.retained - 1) * cost.per_call

    @property
    def _retained_rows(self) -> float:
        return self.last + (self.retained - 1) * self.full if self.retained else 0.0

    def retain_last(self, wanted: float, most: float) -> None:
        """Keep the graphs of the last calls: up to the one that comes nearest to the tokens wanted, and to the most."""
        last, full = self.last * self._width, self.full * self._width
        if last / 2 <= wanted and last <= most:
            further = min((wanted - last) / full + 0.5, (most - last) / full)
            self.retained = min(self.count, 1 + max(0, math.floor(further)))

    def costs(self, rows: float) -> tuple[float, float]:
        """Return the bytes that a call of so many rows keeps, and what its backward takes beyond."""
        saved = self.tower.kept(checkpointed=self._checkpointed).of(rows, self._width)
        return saved, max(0.0, self.tower.passing(rows, self._width, checkpointed=self._checkpointed))


def peak_of_step(
    parts: BytesPerDevice, activations: Activations, *, tables: int, fresh: int, held: bool = False
) -> BytesPerDevice:
    """Return what is alive at the worst moment of a step, by part.

    Args:
        parts: Each part at its own worst, activations left out.
        activations: Those at the moments of the step.
        tables: Of `loss`, the embeddings and their gradients: they stay until the last backward.
        fresh: Bytes of the fresh gradient of the largest tensor that trains.
        held: Whether the gradients of earlier batches are there from the start, as with accumulation.
    """
    states = replace(parts, gradients=0, activations=activations.copies, reduction=0)
    before = parts.gradients if held else 0
    # The loss: all of it, and the retained graphs.
    moments = [replace(states, gradients=before, activations=activations.copies + int(activations.kept))]
    # Behind it, its blocks and the gathered embeddings are gone.
    behind = replace(states, loss=min(tables, parts.loss), embeddings=0)
    moments += [
        replace(
            behind,
            gradients=before + int(parts.gradients * moment.gradients),
            activations=activations.copies + int(moment.activations) + fresh * moment.fresh,
        )
        for moment in activations.moments
    ]
    # A tensor is never split over buckets, so that one of them has room for the largest.
    reduced = max(parts.reduction, fresh) if parts.reduction else 0
    moments.append(replace(behind, gradients=before + parts.gradients, reduction=reduced))
    return max(moments, key=lambda moment: moment.total)


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
