"""The plan of a run: every decision that the configuration left open, and why it came out so.

`make_plan` asks the other files in turn: the batch, the way to train, encoder calls, steps, loading. What only follows
from those is decided here: the type that the encoder computes in, the tiles of the loss, packing and compilation.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vembed.errors import ConfigError
from vembed.plan.batch import epoch_layout, plan_batch, plan_loading, plan_steps, step_batches
from vembed.plan.chunks import evaluation_calls, num_calls
from vembed.plan.devices import OLDEST_TORCH, Devices, cpu_memory_bytes
from vembed.plan.memory import BatchRows, LossTiles
from vembed.plan.problem import FIT_FACTOR, FIT_SHARE, PlanningProblem, reserve
from vembed.plan.strategy import choose
from vembed.plan.text import decision_tree, oom_ladder, scaling_lines, zero_stages
from vembed.redact import redact_value
from vembed.registry import plugin_lines
from vembed.text import plural, show_bytes, show_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.config.schema import Config
    from vembed.losses.registry import RunLoss
    from vembed.plan.batch import BatchPlan, Steps
    from vembed.plan.chunks import ChunkPlan
    from vembed.plan.cost import Candidate
    from vembed.plan.devices import Machine
    from vembed.plan.keys import OptimisationKeys
    from vembed.plan.memory import BytesPerDevice, ModelSize
    from vembed.plan.problem import DataSize, Way

CPU_TILE_SIZE = 1024
"""Side of a block of the similarity matrix: 4 MiB of float32, so that a few of them stay in a core's caches."""

ACCELERATOR_TILE_SIZE = 4096
"""The same on an accelerator: 64 MiB of float32, wide enough for its matrix units, few enough to launch."""

PLANNED_TOKENS = 2048
"""Length of the longest item that the prediction counts with where the model allows more and nobody says less."""

SAMPLE_ERRORS = 4
"""Standard errors above the mean that the prediction counts with where the length of rows comes from a sample."""

SAVED_SHARE = 0.15
"""Of a step, what compiling saves by fusing what stands between the matrix products of a layer."""

GRAPHS_PER_TOWER = 3
"""Without gradients, with them, and for evaluation."""

SECONDS_PER_GRAPH = 60

LEAST_GAIN = 2
"""So many times the seconds of compiling must be saved, as both are guesses."""

PROVEN_ON: frozenset[str] = frozenset()
"""Devices by a part of their name, as "H100", whose compile rows of benchmarks/gpu_proof.py held: none was tried."""

PLACES = {
    "strategy": "way.strategy",
    "reasons": "reasons",
    "world_size": "world_size",
    "batch_size": "batch.per_device",
    "global_batch_size": "batch.total",
    "gradient_cache_chunk_size": "chunks.rows",
    "gradient_cache_chunk_tokens": "chunks.tokens",
    "retain": "chunks.retain",
    "retain_tokens": "chunks.retain_tokens",
    "packing": "packing",
    "dtype": "dtype",
    "loss_tile_size": "loss_tile_size",
    "steps": "steps.total",
    "steps_per_epoch": "steps.per_epoch",
    "warmup_steps": "steps.warmup",
    "eval_every": "steps.eval_every",
    "fits": "fits",
    "memory_bytes": "memory_bytes",
    "num_workers": "num_workers",
    "batches_ahead": "batches_ahead",
    "gradient_accumulation_steps": "batch.accumulated",
    "gradient_cache": "way.gradient_cache",
    "mode": "way.mode",
    "sharding_factor": "way.sharding_factor",
    "use_lora": "way.use_lora",
    "gradient_checkpointing": "way.gradient_checkpointing",
    "compile": "compiles",
    "cpu_offload": "way.cpu_offload",
    "learning_rate": "batch.learning_rate",
    "bucket_bytes": "bucket_bytes",
    "candidates": "candidates",
    "decision_tree": "decision_tree",
    "oom_ladder": "oom_ladder",
    "zero_stages": "zero_stages",
    "scaling": "scaling",
    "model": "model",
}
"""Key of plan.json, in its order -> attributes of `Plan` that lead to it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision of a run. What resuming needs of it is read back from the checkpoint."""

    way: Way  # how the work is spread
    chunks: ChunkPlan  # how a batch is cut, and which graphs are kept
    batch: BatchPlan
    steps: Steps
    num_workers: int  # processes that make batches; 0 makes them in the training process
    batches_ahead: int  # most batches that wait or are being made in workers
    reasons: tuple[str, ...]  # why each decision came out so, one plain sentence each
    world_size: int  # processes
    dtype: str  # what the encoder computes in
    compiles: bool  # whether its repeated layers are compiled
    loss_tile_size: int  # rows and columns of the blocks in which the similarity matrix is computed
    packing: bool  # whether the rows of an encoder call lie end to end instead of being padded
    bucket_bytes: int  # gradients that one collective adds up
    eval_rows: int  # most rows of an encoder call in evaluation
    eval_tokens: int | None  # most padded tokens of one; None: as in training
    bytes_per_device: BytesPerDevice  # predicted peak of one process
    fits: bool  # with reserve
    memory_bytes: int  # of one process
    candidates: tuple[Candidate, ...]  # every way of training that was weighed
    decision_tree: tuple[str, ...]  # the questions that lead to the strategy, answered
    oom_ladder: tuple[str, ...]  # next steps, in this order, when a step runs out of memory all the same
    zero_stages: tuple[str, ...]  # weights, gradients and optimizer state by what is sharded; empty in one process
    scaling: tuple[str, ...]  # speed and memory with more or fewer devices
    model: Mapping[str, str] = field(default_factory=dict)  # facts about the model, for people
    why: tuple[str, ...] = ()  # of the reasons, those of the way
    notes: tuple[str, ...] = ()  # of the reasons, those that tell of the data and of keys without effect
    reserved_bytes: int = 0  # of one process, beside the prediction
    device_is_known: bool = False  # whether the speed figures are of this kind of device

    def noting(self, *notes: str, first: bool = False) -> Plan:
        """Return the plan with further notes, before or behind what it says already."""
        if first:
            return replace(self, reasons=(*notes, *self.reasons), notes=(*notes, *self.notes))
        return replace(self, reasons=(*self.reasons, *notes), notes=(*self.notes, *notes))

    def recommends(self, candidate: Candidate) -> bool:
        """Return whether a candidate is what the plan chose."""
        return candidate.way == self.way

    @property
    def rough_step_seconds(self) -> float | None:
        """Seconds of a step by rough figures of the device; None where it isn't a known one."""
        return (self.guessed_step_seconds or None) if self.device_is_known else None

    @property
    def guessed_step_seconds(self) -> float:
        """Seconds of a step by figures of the device, or of a general one where it isn't known; 0 where nothing is."""
        chosen = next((candidate for candidate in self.candidates if self.recommends(candidate)), None)
        if chosen is None:
            return 0.0
        return chosen.compute_seconds / max(chosen.scaling_efficiency, 1e-9) * self.batch.accumulated

    def with_decisions(self, decisions: Mapping[str, Any]) -> Plan:
        """Return the plan with other decisions, by their keys in plan.json."""
        parts: dict[str, dict[str, Any]] = {}
        for key, value in decisions.items():
            part, _, name = PLACES[key].rpartition(".")
            parts.setdefault(part, {})[name] = value
        of_plan = parts.pop("", {})
        return replace(self, **of_plan, **{part: replace(getattr(self, part), **new) for part, new in parts.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the contents of plan.json."""
        content = {key: attrgetter(path)(self) for key, path in PLACES.items()}
        content |= {key: list(value) for key, value in content.items() if isinstance(value, tuple)}
        content["model"] = dict(self.model)
        content["candidates"] = [
            candidate.to_json(recommended=self.recommends(candidate)) for candidate in self.candidates
        ]
        if self.rough_step_seconds is not None:
            content["rough_step_seconds"] = self.rough_step_seconds
        return {key: redact_value(value) for key, value in content.items()}


def make_plan(
    config: Config, machine: Machine, model: ModelSize, data: DataSize, *, devices: Devices | None = None
) -> Plan:
    """Decide how a run is trained.

    Args:
        devices: All devices of the run; None is the machine's one.

    Raises:
        ConfigError: A key asks for what these devices or this model can't do.
    """
    devices = devices or Devices.of(machine)
    host_bytes = cpu_memory_bytes()
    notes = [*plugin_lines(config.plugins), *data.notes]
    if machine.has_old_torch:  # pip refuses such a one, but a container may bring its own
        oldest = ".".join(map(str, OLDEST_TORCH))
        note = (
            f"torch {machine.torch_version} is older than {oldest}, the oldest that vembed runs with: the plan counts "
            f"on that, and the run may stop; upgrade torch"
        )
        notes.insert(0, note)

    # The sizes of the problem: rows as long as they may come, a batch, its rows, the type of values, the loss.
    longest = max((tower.max_tokens or 0 for tower in model.towers if tower.cuts), default=0)
    if model.max_length is not None and config.max_seq_length == "auto" and longest > PLANNED_TOKENS:
        model = model.limited(PLANNED_TOKENS)
        notes.append(
            f"memory is predicted for texts of up to {PLANNED_TOKENS} of the {longest} tokens that the model takes; "
            f"max_seq_length says otherwise"
        )
    batch = plan_batch(config, devices, model, data, host_bytes=host_bytes)
    dtype, dtype_notes = compute_dtype(config, config.torch_dtype, machine)
    tiles, tile_notes = _loss_tiles(config, machine, model, data.teacher_dimension)
    notes += tile_notes
    rows, num_pictures, sampled_tokens = _rows_of_step(batch, devices, data)
    problem = PlanningProblem(config, machine, devices, model, rows, num_pictures, dtype, tiles, sampled_tokens)

    # The decisions.
    packing, packing_reason = plan_packing(config, machine, model)
    chosen, candidates, why = choose(problem)
    held_bytes = chosen.host_bytes * devices.per_node
    if machine.torch_version and held_bytes > FIT_SHARE * host_bytes:  # without a version it is another machine's host
        notes.append(
            f"cpu_offload: the shards of {plural(devices.per_node, 'device')} take {show_bytes(held_bytes)} of the "
            f"host's memory, which is {show_bytes(host_bytes)}: the system may kill the run"
        )
    eval_rows, eval_tokens, eval_notes = evaluation_calls(problem, chosen)
    steps, step_notes = plan_steps(config, batch, data.num_records)
    if config.batch_sampling != "classes":  # batches of classes are made otherwise
        notes += step_notes
    if config.warmup_steps is not None and steps.warmup >= steps.total:
        notes.append(
            f"warmup_steps {steps.warmup} is not smaller than the {plural(steps.total, 'step')} of the run, so the "
            f"learning rate never reaches its peak"
        )
    num_workers, batches_ahead, loading_reason = plan_loading(
        config, machine, data, num_queries=rows.num_queries, host_bytes=host_bytes, num_processes=devices.per_node
    )
    per_epoch, _ = epoch_layout(data.num_records, batch.total, drop_last=config.drop_last)
    last_step = step_batches(steps.total - 1, batches_per_epoch=per_epoch, accumulated=batch.accumulated)
    compiles, compile_notes = plan_compiling(problem, chosen, num_batches=last_step.stop)

    reserved = reserve(machine.device, chosen.way, devices.count)
    reserved_bytes = sum(reserved.values())
    named = ", ".join(f"{show_bytes(count)} {name}" for name, count in reserved.items() if name)
    return Plan(
        way=chosen.way,
        chunks=chosen.chunks,
        batch=batch,
        steps=steps,
        num_workers=num_workers,
        batches_ahead=batches_ahead,
        reasons=(
            *why,
            *notes,
            *dtype_notes,
            *compile_notes,
            *batch.reasons,
            *_weight_notes(problem, chosen.way),
            *chosen.chunks.reasons,
            packing_reason,
            *eval_notes,
            _memory_sentence(chosen, devices.memory_bytes, reserved_bytes, machine.taken_bytes),
            *([f"reserve: {show_bytes(reserved_bytes)} ({named})"] if named else []),
            loading_reason,
        ),
        world_size=devices.count,
        dtype=dtype,
        compiles=compiles,
        loss_tile_size=tiles.size,
        packing=packing,
        bucket_bytes=config.ddp_bucket_cap_mb << 20,
        eval_rows=eval_rows,
        eval_tokens=eval_tokens,
        bytes_per_device=chosen.bytes_per_device,
        fits=chosen.fits,
        memory_bytes=devices.memory_bytes,
        candidates=candidates,
        decision_tree=tuple(decision_tree(problem, chosen)),
        oom_ladder=tuple(oom_ladder(problem, chosen)),
        zero_stages=tuple(zero_stages(problem)),
        scaling=tuple(scaling_lines(problem)),
        why=why,
        notes=tuple(notes),
        reserved_bytes=reserved_bytes,
        device_is_known=devices.known,
    )


def _rows_of_step(batch: BatchPlan, devices: Devices, data: DataSize) -> tuple[BatchRows, float, int | None]:
    """Return the rows of a step, the pictures among those of one device, and their tokens by a sample."""
    all_queries = min(batch.total, data.num_records)
    num_queries = min(batch.per_device, math.ceil(all_queries / devices.count))
    documents = data.documents_per_query
    rows = BatchRows(num_queries, math.ceil(num_queries * documents), all_queries, math.ceil(all_queries * documents))
    num_pictures = min(rows.local, num_queries * data.pictures_per_record)
    if not data.record_tokens:
        return rows, num_pictures, None
    # By chance a batch's mean lies above the sample's, by the error of the smaller of both: by 4 errors in about one
    # batch of 30,000.
    error = statistics.pstdev(data.record_tokens) / math.sqrt(min(num_queries, len(data.record_tokens)))
    sampled_tokens = math.ceil(num_queries * (statistics.mean(data.record_tokens) + SAMPLE_ERRORS * error))
    return rows, num_pictures, sampled_tokens


def compute_dtype(keys: OptimisationKeys, torch_dtype: str, machine: Machine) -> tuple[str, tuple[str, ...]]:
    """Return what the encoder computes in, and the reason where that was open."""
    if keys.fp16:
        return "float16", ()
    if keys.bf16 is True:
        return "bfloat16", ()
    if keys.bf16 == "auto" and machine.fast_bf16 and torch_dtype == "float32":
        return "bfloat16", (f"bf16: {machine.device_name} computes faster in bfloat16; weights stay float32",)
    if keys.bf16 == "auto" and machine.device == "cuda" and torch_dtype == "float32":
        return torch_dtype, (f"bf16: {machine.device_name} only emulates it, slowly; fp16: true may be faster",)
    return torch_dtype, ()


def _memory_sentence(candidate: Candidate, memory_bytes: int, reserved: int, taken: int) -> str:
    """Return the arithmetic of whether a candidate fits; `taken` are the bytes that other programs hold beside it."""
    total = candidate.bytes_per_device.total
    needed = FIT_FACTOR * total + reserved
    arithmetic = (
        f"1.1 x {show_bytes(total)} + {show_bytes(reserved)} = {show_bytes(needed)} against 95% of "
        f"{show_bytes(memory_bytes)} = {show_bytes(FIT_SHARE * memory_bytes)}"
    )
    arithmetic += f" (other programs hold {show_bytes(taken)} beside it)" if taken else ""
    return f"memory: {arithmetic}: {'fits' if candidate.fits else 'may not fit; a smaller batch_size helps'}"


def _weight_notes(problem: PlanningProblem, way: Way) -> list[str]:
    """Say which weights lie in the type of mixed precision, and how gradients of several devices are added up."""
    config, notes = problem.config, []
    narrowed = problem.sized(way).narrowed
    if narrowed and not config.load_in_4bit:
        saved = narrowed * (problem.model.bytes_per_value - problem.compute_bytes)
        notes.append(
            f"frozen weights: {show_count(narrowed)} of linear layers are held in {problem.dtype}, {show_bytes(saved)} "
            f"less: mixed precision rounds them to it in every call anyway; model/ is written from the unrounded files"
        )
    if config.ddp_find_unused_parameters:
        notes.append(
            "ddp_find_unused_parameters true: never needed; a weight that a device didn't use counts as zero in the "
            "sum, and one that none used stays as it is"
        )
    if problem.devices.count > 1 and way.mode is None:
        broadcast = config.ddp_broadcast_buffers
        start = "start as the first process has them" if broadcast else "stay as each process has them"
        notes.append(
            f"gradients are added up once a step, in buckets of {config.ddp_bucket_cap_mb} MiB; buffers {start}"
        )
    return notes


# The loss -------------------------------------------------------------------------------------------------------------


def _loss_tiles(
    config: Config, machine: Machine, model: ModelSize, teacher_dimension: int
) -> tuple[LossTiles, list[str]]:
    """Return the blocks of the similarity matrix; a Matryoshka loss holds one for each prefix beside the others."""
    prefixes, notes = config.mrl_dims or (), []
    if prefixes and max(prefixes) < model.dimension:
        notes.append(
            f"mrl_dims: the whole vector of {model.dimension} dims is not among them, so only its first "
            f"{max(prefixes)} are trained"
        )
    if config.loss_precision == "tf32" and machine.device != "cuda":
        notes.append(f"loss_precision tf32 has no effect on {machine.device_name}: only CUDA devices have TF32")
    size = config.loss_tile_size
    if size == "auto":
        size = CPU_TILE_SIZE if machine.device == "cpu" else ACCELERATOR_TILE_SIZE
    tiles = _tiles_of(config.run_loss(), config, size, len(prefixes))
    return replace(tiles, teacher=teacher_dimension), notes


def _tiles_of(loss: RunLoss, config: Config, size: int, num_prefixes: int) -> LossTiles:
    """Return the blocks of a loss; of several those of each."""
    if several := loss.several:
        of_sources = tuple(_tiles_of(one, config, size, num_prefixes) for one in several)
        return LossTiles(size, 0, parts=of_sources, at_once=False)  # a batch has the loss of its source
    parts = []
    for section, _ in loss.terms:
        keys = section.of(config)
        blocks, strip = keys.tile_blocks
        tiles = LossTiles(size, blocks + num_prefixes, keys.memory, strip, keys.numbers_kept, copies=keys.query_copies)
        parts.append(tiles)
    return parts[0] if len(parts) == 1 else LossTiles(size, 0, parts=tuple(parts), at_once=True)


# Packing and compiling ------------------------------------------------------------------------------------------------


def plan_packing(config: Config, machine: Machine, model: ModelSize) -> tuple[bool, str]:
    """Return whether the rows of an encoder call lie end to end, and why.

    Raises:
        ConfigError: The user wants it and the model can't.
    """
    if config.packing is False:
        return False, "packing false: the rows of a call are padded to the longest; as set"
    if model.why_not_packed:
        if config.packing is True:
            raise ConfigError(f"packing true: {model.why_not_packed}; set packing: auto")
        return False, f"packing false: {model.why_not_packed}"
    if machine.device != "cpu":
        as_set = "; as set" if config.packing is True else ""
        return True, f"packing true: the rows of a call lie end to end instead of being padded to the longest{as_set}"
    if config.packing is True:
        return True, (
            "packing true: as set; on a CPU attention weighs all pairs of a call's tokens: a slow reference, which "
            "takes more memory than predicted, as the prediction is of padded rows"
        )
    return False, "packing false: a CPU has no fast operator for rows that lie end to end, so they are padded"


def plan_compiling(problem: PlanningProblem, chosen: Candidate, *, num_batches: int) -> tuple[bool, tuple[str, ...]]:
    """Return whether the layers of an encoder are compiled, and why: what that saves against what it takes.

    Args:
        num_batches: Of the whole run.

    Raises:
        ConfigError: They are to be and can't.
    """
    asked = problem.config.compile
    if asked is False or (asked == "auto" and problem.machine.device != "cuda"):
        return False, ()
    obstacle = _compile_obstacle(problem, chosen)
    if obstacle and asked is True:
        raise ConfigError(f"compile: {obstacle}; set compile to auto or false")
    if obstacle:
        return False, (f"compile: off, as {obstacle}",)

    # Seconds, both of them guesses.
    graphs = GRAPHS_PER_TOWER * sum(tower.largest_block < tower.num_parameters for tower in problem.model.towers)
    saved, taken = SAVED_SHARE * chosen.compute_seconds * num_batches, graphs * SECONDS_PER_GRAPH
    compiles = asked is True or saved >= LEAST_GAIN * taken
    is_proven = any(name in problem.machine.device_name for name in PROVEN_ON)
    if compiles and asked == "auto" and not is_proven:
        note = (
            f"compile: off, as compiled layers aren't proven on {problem.machine.device_name} yet (docs/devices.md); "
            f"compile: true takes about {taken:,} s and may save about {saved:,.0f} s"
        )
        return False, (note,)

    # Memory. Mixed precision casts a weight once a step; a compiled layer does so in each call, and keeps the copy with
    # its graph. All kept calls but one hold weights beside the copy of the step, which the prediction counts.
    copies, chunks = 0, chosen.chunks
    if not chosen.way.gradient_checkpointing:
        for tower in problem.sized(chosen.way).towers:
            kept_rows = chunks.kept_share * problem.tower_rows(tower)
            calls = num_calls(kept_rows, tower.max_tokens or 1, chunks.tokens, chunks.rows)
            copies += max(0, calls - 1) * tower.cast_bytes
    room = problem.limit_bytes(chosen.way) - chosen.bytes_per_device.total
    if compiles and copies > room:
        held = f"kept calls of compiled layers hold {show_bytes(copies)} of weights in {problem.dtype}"
        spare = f"{show_bytes(max(0, room))} are to spare"
        if asked is True:
            return True, (f"compile: on, as set; {held}, and {spare}: set retain: 0",)
        return False, (f"compile: off, as {held}, and {spare}; retain: 0 makes room",)

    word = "on, as set" if asked is True else "on" if compiles else "off"
    note = (
        f"compile: {word}: {graphs} kinds of graphs take about {taken:,} s to compile and save about {saved:,.0f} s "
        f"({SAVED_SHARE:.0%} of {num_batches:,} batches of about {chosen.compute_seconds:.2g} s)"
    )
    return compiles, (note,)


def _compile_obstacle(problem: PlanningProblem, chosen: Candidate) -> str:
    """Say why the layers can't be compiled; empty where they can."""
    config, half = problem.config, ("bfloat16", "float16")
    if all(tower.largest_block == tower.num_parameters for tower in problem.model.towers):
        return "the model has no list of equal layers"
    if config.load_in_4bit:
        return "weights of 4 bits have kernels of their own"
    # torch refuses to trace a weight whose gradient is of another type.
    if chosen.way.mode is not None and problem.dtype in half:
        return f"sharded layers hold weights in {problem.dtype} beside gradients in float32"
    if config.torch_dtype in half and not chosen.way.use_lora:
        return f"weights in {config.torch_dtype} have gradients in float32"
    return ""
