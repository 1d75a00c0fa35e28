"""Decide what the configuration left open, and say why."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vembed.plan.advice import Advice, advise
from vembed.plan.batching import BatchPlan, Steps, epoch_layout, plan_batch, plan_steps, step_batches
from vembed.plan.compiling import plan_compiling
from vembed.plan.devices import Devices
from vembed.plan.evaluation import evaluation_calls
from vembed.plan.hardware import cpu_memory_bytes
from vembed.plan.loading import Loading, plan_loading
from vembed.plan.memory import BatchRows, BytesPerDevice, LossTiles, ModelSize
from vembed.plan.packing import plan_packing
from vembed.plan.problem import FIT_FACTOR, FIT_SHARE, DataSize, PlanningProblem, Way
from vembed.plan.reserve import reserve_notes
from vembed.plan.strategy import choose
from vembed.redact import redact_value
from vembed.registry import plugin_lines
from vembed.text import show_bytes, show_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.config.schema import Config
    from vembed.losses.registry import RunLoss
    from vembed.plan.chunks import ChunkPlan
    from vembed.plan.cost_model import Candidate
    from vembed.plan.hardware import Machine
    from vembed.plan.keys import DistributedKeys, OptimisationKeys

CPU_TILE_SIZE = 1024
"""Side of a block of the similarity matrix: 4 MiB of float32, so that a few of them stay in a core's caches."""

ACCELERATOR_TILE_SIZE = 4096
"""The same on an accelerator: 64 MiB of float32, wide enough for its matrix units, few enough to launch."""

PLANNED_TOKENS = 2048
"""Length of the longest item that the prediction counts with where the model allows more and nobody says less."""

SAMPLE_ERRORS = 4
"""Standard errors above the mean that the prediction counts with where the length of rows comes from a sample."""


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
    "num_workers": "loading.num_workers",
    "batches_ahead": "loading.batches_ahead",
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
    "decision_tree": "advice.decision_tree",
    "oom_ladder": "advice.oom_ladder",
    "zero_stages": "advice.zero_stages",
    "scaling": "advice.scaling",
    "model": "model",
}
"""Key of plan.json, in its order -> where the plan holds it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision of a run. What resuming needs of it is read back from the checkpoint."""

    way: Way  # how the work is spread
    chunks: ChunkPlan  # how a batch is cut, and which graphs are kept
    batch: BatchPlan
    steps: Steps
    loading: Loading
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
    advice: Advice
    model: Mapping[str, str] = field(default_factory=dict)  # facts about the model, for people
    why: tuple[str, ...] = ()  # of the reasons, those of the way
    notes: tuple[str, ...] = ()  # of the reasons, those that tell of the data and of keys without effect
    reserved_bytes: int = 0  # of one process, beside the prediction
    device_is_known: bool = False  # whether the speed figures are of this kind of device

    def noting(self, *said: str, first: bool = False) -> Plan:
        """Return the plan with further notes, before or behind what it says already."""
        if first:
            return replace(self, reasons=(*said, *self.reasons), notes=(*said, *self.notes))
        return replace(self, reasons=(*self.reasons, *said), notes=(*self.notes, *said))

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
        chosen = next((each for each in self.candidates if self.recommends(each)), None)
        if chosen is None:
            return 0.0
        return chosen.compute_seconds / max(chosen.scaling_efficiency, 1e-9) * self.batch.accumulated

    def with_decisions(self, decisions: Mapping[str, Any]) -> Plan:
        """Return the plan with other decisions, by their keys in plan.json."""
        parts: dict[str, dict[str, Any]] = {}
        for key, value in decisions.items():
            part, _, name = PLACES[key].rpartition(".")
            parts.setdefault(part, {})[name] = value
        own = parts.pop("", {})
        return replace(self, **own, **{part: replace(getattr(self, part), **new) for part, new in parts.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the contents of plan.json."""
        content = {key: attrgetter(place)(self) for key, place in PLACES.items()}
        content |= {key: list(value) for key, value in content.items() if isinstance(value, tuple)}
        content["model"] = dict(self.model)
        content["candidates"] = [each.to_json(recommended=self.recommends(each)) for each in self.candidates]
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
    model, length_notes = _limited(model, given=config.max_seq_length != "auto")
    drop_last, host_bytes = config.drop_last, cpu_memory_bytes()
    batch = plan_batch(config, config, devices, model, data, host_bytes=host_bytes, drop_last=drop_last)
    dtype, dtype_notes = compute_dtype(config, config.torch_dtype, machine)
    rows, num_pictures = _batch_rows(batch, devices, data)
    tiles, tile_notes = _loss_tiles(config, machine, model, data.teacher_dimension)
    sampled = _sampled_tokens(data.record_tokens, rows.num_queries)
    problem = PlanningProblem(config, machine, devices, model, rows, num_pictures, dtype, tiles, sampled)
    packing, packing_reason = plan_packing(config, machine, model)
    choice = choose(problem)
    chosen = choice.chosen
    eval_rows, eval_tokens, eval_notes = evaluation_calls(problem, chosen)
    steps, step_notes = plan_steps(config, config, batch, data.num_records, drop_last=drop_last)
    per_epoch, _ = epoch_layout(data.num_records, batch.total, drop_last=drop_last)
    batches = step_batches(steps.total - 1, batches_per_epoch=per_epoch, accumulated=batch.accumulated)
    reserved = problem.reserve(chosen.way)
    loading = plan_loading(config, machine, data, num_queries=rows.num_queries, num_processes=devices.per_node)
    compiles, compile_notes = plan_compiling(problem, chosen, num_batches=batches.stop)
    notes = (
        *plugin_lines(config.plugins),
        *data.notes,
        *length_notes,
        *tile_notes,
        *(step_notes if config.batch_sampling != "classes" else ()),  # batches of classes are made otherwise
    )
    return Plan(
        way=chosen.way,
        chunks=chosen.chunks,
        batch=batch,
        steps=steps,
        loading=loading,
        reasons=(
            *choice.reasons,
            *notes,
            *dtype_notes,
            *compile_notes,
            *batch.reasons,
            *_narrow_notes(problem, chosen.way),
            *_reduction_notes(config, devices.count, chosen.way),
            *chosen.chunks.reasons,
            packing_reason,
            *eval_notes,
            memory_sentence(chosen, devices.memory_bytes, sum(reserved.values()), machine.taken_bytes),
            *reserve_notes(reserved),
            loading.reason,
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
        candidates=choice.candidates,
        advice=advise(problem, choice),
        why=choice.reasons,
        notes=notes,
        reserved_bytes=sum(reserved.values()),
        device_is_known=devices.known,
    )


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


def memory_sentence(candidate: Candidate, memory_bytes: int, reserved: int, taken: int) -> str:
    """Return the arithmetic of whether a candidate fits; `taken` are the bytes that other programs hold beside it."""
    total = candidate.bytes_per_device.total
    needed = FIT_FACTOR * total + reserved
    arithmetic = (
        f"1.1 x {show_bytes(total)} + {show_bytes(reserved)} = {show_bytes(needed)} against 95% of "
        f"{show_bytes(memory_bytes)} = {show_bytes(FIT_SHARE * memory_bytes)}"
    )
    arithmetic += f" (other programs hold {show_bytes(taken)} beside it)" if taken else ""
    return f"memory: {arithmetic}: {'fits' if candidate.fits else 'may not fit; a smaller batch_size helps'}"


def _limited(model: ModelSize, *, given: bool) -> tuple[ModelSize, list[str]]:
    """Return the model for texts as long as they come.

    Args:
        given: Whether the user said how long.
    """
    longest = max((tower.max_tokens or 0 for tower in model.towers if tower.cuts), default=0)
    if model.max_length is None or given or longest <= PLANNED_TOKENS:
        return model, []
    note = (
        f"memory is predicted for texts of up to {PLANNED_TOKENS} of the {longest} tokens that the model takes; "
        f"max_seq_length says otherwise"
    )
    return model.limited(PLANNED_TOKENS), [note]


def _batch_rows(batch: BatchPlan, devices: Devices, data: DataSize) -> tuple[BatchRows, float]:
    """Return the rows of a step, and how many of one device's are pictures."""
    all_queries = min(batch.total, data.num_records)
    own = min(batch.per_device, math.ceil(all_queries / devices.count))
    documents = data.documents_per_query
    rows = BatchRows(own, math.ceil(own * documents), all_queries, math.ceil(all_queries * documents))
    return rows, min(rows.own, own * data.pictures_per_record)


def _sampled_tokens(record_tokens: Sequence[float], num_records: int) -> int | None:
    """Return the tokens that a batch has hardly ever more of, by those of sampled records; None without any."""
    if not record_tokens:
        return None
    error = statistics.pstdev(record_tokens) / math.sqrt(min(num_records, len(record_tokens)))
    return math.ceil(num_records * (statistics.mean(record_tokens) + SAMPLE_ERRORS * error))


def _narrow_notes(problem: PlanningProblem, way: Way) -> list[str]:
    """Say which weights are held in the type of mixed precision, and what is written."""
    count = problem.sized(way).narrowed
    if not count or problem.config.load_in_4bit:
        return []
    saved = count * (problem.model.bytes_per_value - problem.compute_bytes)
    note = (
        f"frozen weights: {show_count(count)} of linear layers are held in {problem.dtype}, {show_bytes(saved)} less: "
        f"mixed precision rounds them to it in every call anyway; model/ is written from the unrounded files"
    )
    return [note]


def _reduction_notes(keys: DistributedKeys, num_devices: int, way: Way) -> list[str]:
    """Say how the gradients of several devices are added up, and what that never needs."""
    notes = []
    if keys.ddp_find_unused_parameters:
        notes.append(
            "ddp_find_unused_parameters true: never needed; every trainable weight that a device didn't use counts as "
            "zero in the sum"
        )
    if num_devices > 1 and way.mode is None:
        start = "start as the first process has them" if keys.ddp_broadcast_buffers else "stay as each process has them"
        notes.append(f"gradients are added up once a step, in buckets of {keys.ddp_bucket_cap_mb} MiB; buffers {start}")
    return notes


def _loss_tiles(
    keys: Config, machine: Machine, model: ModelSize, teacher_dimension: int
) -> tuple[LossTiles, list[str]]:
    """Return the blocks of the similarity matrix; a Matryoshka loss holds one for each prefix beside the others."""
    prefixes, notes = keys.mrl_dims or (), []
    if prefixes and max(prefixes) < model.dimension:
        notes.append(
            f"mrl_dims: the whole vector of {model.dimension} dims is not among them, so only its first "
            f"{max(prefixes)} are trained"
        )
    if keys.loss_precision == "tf32" and machine.device != "cuda":
        notes.append(f"loss_precision tf32 has no effect on {machine.device_name}: only CUDA devices have TF32")
    size = keys.loss_tile_size
    if size == "auto":
        size = CPU_TILE_SIZE if machine.device == "cpu" else ACCELERATOR_TILE_SIZE
    tiles = _tiles_of(keys.run_loss(), keys, size, len(prefixes))
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
