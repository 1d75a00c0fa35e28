"""What the loop works with, each part from the configuration and the plan."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.checkpoint.manager import CheckpointManager
from vembed.config.dump import config_hash, plain_values
from vembed.config.keys.teacher import teacher_gives_scores
from vembed.data.augment import Augmenter
from vembed.distributed.starting_weights import receive
from vembed.evaluation.encode import ItemEncoder
from vembed.gradcache.calls import Passes
from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.models.files import DTYPES
from vembed.plan.devices import Devices
from vembed.redact import redact
from vembed.training.batches import BatchSource
from vembed.training.epochs import EpochBatches
from vembed.training.evaluations import Evaluations
from vembed.training.frozen import FrozenItems, find_frozen
from vembed.training.guards import NonFiniteGuard
from vembed.training.hard_vectors import HardVectors
from vembed.training.loading import BatchLoader
from vembed.training.optimizer import Schedule, Updater
from vembed.training.saving import RunCheckpoints
from vembed.training.teacher import Asking, TeacherUse, find_teacher
from vembed.training.trackers.registry import open_trackers
from vembed.training.wiring.data import image_limits, measures_both_directions, prompted
from vembed.training.wiring.hard_batches import HardBatchWork, hard_batch_facts, hard_sampler
from vembed.training.wiring.mining import MiningWork, mining_facts
from vembed.training.wiring.model import teacher_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from vembed.checkpoint.contents import LoadedCheckpoint
    from vembed.config.schema import Config
    from vembed.data.records import RecordTable
    from vembed.data.sampler import GlobalSampler
    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.distributed.runtime import Runtime
    from vembed.gradcache.memory import StepLimits
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder
    from vembed.plan.plan import Plan
    from vembed.training.batches import Batches
    from vembed.training.epochs import EpochWork
    from vembed.training.guards import Agree, StopSignal
    from vembed.training.inputs import RunData
    from vembed.training.output import OutputFolder
    from vembed.training.state import RunState
    from vembed.training.stored import StoredVectors
    from vembed.training.teacher import Answers, Teacher
    from vembed.training.trackers.base import Tracker


AUTOCAST_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Run:
    """What every part of a run is built from."""

    config: Config
    runtime: Runtime
    output: OutputFolder
    data: RunData
    encoder: Encoder
    loss: BatchLoss
    sampler: GlobalSampler
    plan: Plan
    checkpoint: LoadedCheckpoint | None
    frozen: FrozenItems | None = None
    teacher: Teacher | None = None
    hard: HardVectors | None = None
    sharded: ShardedEncoder | None = None


def frozen_items(run: Run) -> FrozenItems | None:
    """Return which training items are encoded once, as a frozen tower makes the same of them in every epoch."""
    config, plan = run.config, run.plan
    is_only_planned = plan.way.mode is not None and run.sharded is None  # whole, it may not fit the device
    if config.embedding_cache == "never" or (is_only_planned and run.runtime.device.type != "cpu"):
        return None
    augmenter = Augmenter(config.image_augmentation, flip=config.image_flip, seed=config.seed)
    is_shared = config.embedding_cache != "auto"
    reason = "sources of data have prompts of their own" if prompted(config, run.encoder) else ""
    if reason := reason or ("mine_corpus brings further documents" if config.mine_corpus is not None else ""):
        return FrozenItems((), (f"embedding_cache has no effect: {reason}",) if is_shared else ())
    return find_frozen(
        run.encoder,
        run.data.records,
        Path(config.embedding_cache) if is_shared else run.output.frozen_embeddings,
        is_shared=is_shared,
        epochs=plan.steps.total / plan.steps.per_epoch,
        augments=augmenter.acts,
        precision=plan.dtype,
        passes=Passes(run.runtime.device, autocast_dtype(plan)),
        sharded=run.sharded,
    )


def with_hard_vectors(run: Run) -> Run:
    """Return the run with the items that hard batches are chosen by, if they are asked for; the plan says what."""
    if run.config.batch_sampling != "hard":
        return run
    hard = HardVectors.of(run.encoder, run.data.records, run.output.hard_vectors, precision=run.plan.dtype)
    return replace(run, hard=hard, plan=run.plan.noting(hard.note(run.config.hard_refresh)))


def with_hard_batches(run: Run) -> Run:
    """Return the run with the hard batches of the starting model, as which the encoder must still be.

    Those that are chosen anew while it trains come with the batches.
    """
    if run.hard is None or run.config.hard_refresh != "once":
        return run
    vectors_NE = run.hard.vectors(_item_encoder(run))
    return replace(run, sampler=hard_sampler(run.config, run.data.records, run.plan.batch.total, vectors_NE))


def teacher(run: Run, records: RecordTable, folder: Path | None = None) -> Teacher | None:
    """Return the model that the loss learns from, not asked yet.

    Args:
        records: What it is asked about.
        folder: Where what it says is kept; None is the run's place.
    """
    config, plan = run.config, run.plan
    if config.teacher_model_name is None:
        return None
    loss = config.loss_facts()
    return find_teacher(
        teacher_keys(config, config.teacher_model_name, config.teacher_revision),
        records,
        TeacherUse(loss.reads_teacher(config), teacher_gives_scores(config), loss.score_bounds),
        folder or (run.output.teacher if config.teacher_cache == "auto" else Path(config.teacher_cache)),
        limits=image_limits(config),
        devices=Devices.of(run.runtime.machine, plan.world_size),
    )


def said(run: Run, poll: Callable[[], None]) -> Answers | None:
    """Return what the teacher says of its records, asked now where no file says it."""
    if run.teacher is None:
        return None
    return run.teacher.answers(Asking(run.runtime.device, run.runtime.ranks, autocast_dtype(run.plan), poll))


def batch_source(run: Run, stored: StoredVectors | None = None, answers: Answers | None = None) -> BatchSource:
    """Return what makes the batches in this process."""
    config = run.config
    augmenter = Augmenter(config.image_augmentation, flip=config.image_flip, seed=config.seed)
    ranks = run.runtime.ranks
    return BatchSource(
        run.data.records,
        run.sampler,
        run.encoder,
        run.runtime.device,
        augmenter,
        rank=ranks.rank,
        world_size=ranks.world_size,
        stored=stored,
        answers=answers,
        counts_masked=config.mask_false_negatives
        and any("mask_false_negatives" in facts.keys.model_fields for facts in config.loss_facts().alone),
        prompted=prompted(config, run.encoder),
        tells_source=config.source_batches == "single" and len(config.data or ()) > 1,
    )


def start_alike(encoder: Encoder, runtime: Runtime, *, with_buffers: bool) -> None:
    """Bring an encoder to its device with the weights of the first rank.

    Args:
        with_buffers: Whether its buffers are the first rank's too; they are wherever a rank has none of its own.
    """
    is_empty = any(each.is_meta for each in (*encoder.parameters(), *encoder.buffers()))
    if not is_empty:
        encoder.to(runtime.device)  # which puts other tensors in the place of buffers
    tensors: list[Tensor] = list(encoder.parameters())
    if runtime.ranks.any(is_empty, runtime.device) or with_buffers:
        tensors += encoder.buffers()
    receive(tensors, runtime.ranks, runtime.device)


def batches(
    run: Run, encode: ItemEncoder, stored: StoredVectors | None = None, answers: Answers | None = None
) -> AbstractContextManager[Batches]:
    """Return what makes the batches: this process, or workers that run ahead; as the epochs' work changes them.

    Args:
        encode: What encodes items with the model as it stands.
    """
    plan, config, source = run.plan, run.config, batch_source(run, stored, answers)
    num_batches = plan.steps.total * plan.batch.accumulated
    works = _epoch_works(run, encode)

    def open_(source: BatchSource, end: int, level: int = 0) -> AbstractContextManager[Batches]:
        end = min(end, num_batches)
        if level < len(works):
            work, folder = works[level]

            def inner(changed: BatchSource, its_end: int) -> AbstractContextManager[Batches]:
                return open_(changed, min(end, its_end), level + 1)

            return EpochBatches(work, source, inner, folder, run.runtime.ranks)
        if source.records is not run.data.records:  # with what was mined, of which the teacher may know nothing yet
            asked = replace(run, teacher=teacher(run, source.records))
            source = replace(source, answers=said(asked, encode.poll))
        if not plan.loading.num_workers:
            return nullcontext(source)
        return BatchLoader(source, plan.loading, num_batches=end, pin_memory=config.dataloader_pin_memory)

    return open_(source, num_batches)


def _epoch_works(run: Run, encode: ItemEncoder) -> list[tuple[EpochWork, Path]]:
    """Return what changes the batches before some epochs, and where each keeps what it found."""
    config, data, output = run.config, run.data, run.output
    works: list[tuple[EpochWork, Path]] = []
    if config.mine != "never":
        works.append((MiningWork(config, data, encode, output.mining), output.mining))
    if run.hard is not None and config.hard_refresh != "once":
        folder, size = output.hard_vectors, run.plan.batch.total
        hard = HardBatchWork(config, data.records, data.fingerprint, encode, run.plan.dtype, folder, size)
        works.append((hard, folder))
    return works


def epoch_facts(output: OutputFolder) -> tuple[tuple[str, str], ...]:
    """Return what was computed before some epochs, for the report."""
    return (*mining_facts(output.mining), *hard_batch_facts(output.hard_vectors))


def build_engine(run: Run, limits: StepLimits | None = None) -> GradCacheEngine:
    """Return the engine.

    Args:
        limits: What running out of memory has left a resumed run with; None begins as planned.
    """
    engine = GradCacheEngine(
        run.loss,
        EngineOptions(
            budget=_budget(run),
            device=run.runtime.device,
            retain=run.plan.chunks.retain,
            retain_tokens=run.plan.chunks.retain_tokens,
            autocast_dtype=autocast_dtype(run.plan),
            loss_tf32=run.config.loss_precision == "tf32",
            # Without gradient caching the batch is one call by the user's word: nothing may cut it.
            oom_retry=run.config.oom_retry and run.config.use_gradient_cache is not False,
            ranks=replace(run.runtime.ranks, bucket_bytes=run.plan.bucket_bytes),
        ),
        [parameter for parameter in run.encoder.parameters() if parameter.requires_grad],
        sharded=run.sharded,
    )
    engine.limits = limits or engine.limits
    return engine


def _budget(run: Run) -> ChunkBudget:
    return ChunkBudget(
        rows=run.plan.chunks.rows,
        tokens=run.plan.chunks.tokens,
        bucketed=run.runtime.device.type != "cpu",
    )


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """Return the type of mixed precision, None without."""
    return DTYPES[plan.dtype] if plan.dtype in AUTOCAST_DTYPES else None


def build_updater(run: Run) -> Updater:
    """Return the optimizer with its schedule."""
    config, plan = run.config, run.plan
    schedule = Schedule(plan.batch.learning_rate, config.scheduler_type, plan.steps.warmup, plan.steps.total)
    scales = plan.dtype == "float16"
    return Updater(run.encoder, run.loss, config, schedule, loss_scaling=scales, ranks=run.runtime.ranks)


def run_identity(run: Run) -> dict[str, Any]:
    """Return what the run is made of, and how its work is spread: a checkpoint of anything else isn't trained on.

    All ranks call it.
    """
    taught = (
        {} if run.teacher is None else {"teacher": run.teacher.identity(run.runtime.ranks, autocast_dtype(run.plan))}
    )
    return {
        "strategy": run.plan.way.strategy,
        "mode": run.plan.way.mode,
        "sharding_factor": run.plan.way.sharding_factor,
        "world_size": run.plan.world_size,
        "dtype": run.plan.dtype,
        "model_name": redact(run.config.model_name),
        "num_parameters": sum(parameter.numel() for parameter in run.encoder.parameters()),
        "base": run.encoder.base,
        "data_fingerprint": run.data.fingerprint,
        **taught,
    }


def build_checkpoints(run: Run, updater: Updater) -> RunCheckpoints:
    """Return what saves and restores the run, with the stamp that each checkpoint bears."""
    stamp = {
        **run_identity(run),
        "config_hash": config_hash(run.config),
        "config": plain_values(run.config),
        "plan": run.plan.to_json(),
    }
    manager = CheckpointManager(run.output.checkpoints, keep_last=run.config.save_total_limit, ranks=run.runtime.ranks)
    return RunCheckpoints(manager, run.encoder, run.loss, updater, stamp, run.runtime.watchdog.words)


def build_evaluations(run: Run, stop: StopSignal) -> Evaluations:
    """Return what evaluates the run."""
    ranks = run.runtime.ranks
    return Evaluations(
        encode=replace(_item_encoder(run), poll=stop.poll),
        dev=run.data.dev,
        test=run.data.test,
        further=run.data.further,
        folder=run.output.path / "evaluation",
        metric=run.config.metric_for_best_model,
        poll=stop.poll if ranks.is_one else stop.poll_alone,
        with_bm25=run.config.bm25,
        both_directions=measures_both_directions(run.config, run.data),
        ranks=ranks,
    )


def build_guard(run: Run, state: RunState, agree: Agree) -> NonFiniteGuard:
    """Build what watches for steps that aren't finite; it counts those before the checkpoint too."""
    return NonFiniteGuard(
        run.config.nonfinite_policy,
        limit=run.config.max_skipped_steps,
        folder=run.output.path if run.runtime.ranks.is_first else None,
        skipped=state.skipped_steps,
        agree=agree,
    )


def _item_encoder(run: Run) -> ItemEncoder:
    """Return what encodes many items with the run's encoder."""
    training, plan = _budget(run), run.plan
    return ItemEncoder(
        run.encoder,
        replace(training, rows=plan.eval_rows, tokens=plan.eval_tokens or training.tokens),
        run.runtime.device,
        autocast_dtype(plan),
        ranks=run.runtime.ranks,
        even_calls=run.sharded is not None,
    )


def build_trackers(run: Run, step: int) -> list[Tracker]:
    """Return the trackers, cut back to a step; the first rank has them all."""
    if not run.runtime.ranks.is_first:
        return []
    config = run.config
    return open_trackers(config.report_to, run.output.path, resume_step=step, config=plain_values(config))
