"""Put a run together from its configuration: the only place that wires.

Everything below takes plain values; a key of the configuration is read here or in the plan and nowhere else.
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from vembed.checkpoint.manager import CheckpointManager
from vembed.config.dump import config_hash, dump_config, plain_values
from vembed.config.resume import resume_differences
from vembed.data.images import ImageLimits
from vembed.data.sampler import GlobalSampler
from vembed.data.sources import SourceOptions
from vembed.distributed.runtime import start_runtime
from vembed.errors import ConfigError, DataError
from vembed.evaluation.encode import ItemEncoder
from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.losses.registry import LOSSES, LossOptions
from vembed.models.huggingface import ModelOptions
from vembed.models.profile import model_size
from vembed.models.registry import is_builtin, load_encoder
from vembed.plan.explain import explain
from vembed.plan.plan import DataSize, Plan, make_plan
from vembed.training.batches import BatchSource
from vembed.training.checks import dry_run, refuse_batch_norm, refuse_nonfinite_weights
from vembed.training.evaluations import Evaluations
from vembed.training.finish import FinishParts, RunResult, finish_run
from vembed.training.guards import NonFiniteGuard, StopSignal
from vembed.training.inputs import DataPaths, RunData, load_run_data, record_texts
from vembed.training.optimizer import OptimizerOptions, Schedule, Updater
from vembed.training.output import OutputFolder
from vembed.training.saving import PARTS, RunCheckpoints
from vembed.training.state import RunState
from vembed.training.trackers.base import GuardedTracker, Tracker
from vembed.training.trackers.jsonl import JsonlTracker
from vembed.training.trackers.tensorboard import TensorBoardTracker
from vembed.training.trainer import Trainer, TrainerOptions, TrainerParts

if TYPE_CHECKING:
    from vembed.batch import Side
    from vembed.checkpoint.format import LoadedCheckpoint
    from vembed.config.schema import Config
    from vembed.data.splits import Role
    from vembed.distributed.runtime import Runtime
    from vembed.losses.base import ContrastiveLoss
    from vembed.models.encoder import Encoder

_log = logging.getLogger(__name__)

Mode = Literal["train", "plan", "dry-run"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTOCAST_DTYPES = ("bfloat16", "float16")
PLAN_READ_BACK = ("gradient_cache_chunk_size", "gradient_cache_chunk_tokens", "retain", "dtype")
"""Decisions that a resumed run takes from its checkpoint: they change rounding, or the machine may differ."""

SUGGESTED_SET = "builtin:stdlib-code"


@dataclass(frozen=True, slots=True)
class _Run:
    """What every part of a run is built from."""

    config: Config
    runtime: Runtime
    output: OutputFolder
    data: RunData
    encoder: Encoder
    loss: ContrastiveLoss
    sampler: GlobalSampler
    plan: Plan
    checkpoint: LoadedCheckpoint | None


def run_from_config(config: Config, *, mode: Mode = "train", command: str = "") -> RunResult | None:
    """Run what a configuration describes.

    Args:
        config: The configuration.
        mode: "train" runs it; "plan" only prints the plan and writes plan.json; "dry-run" does one step and writes
            nothing.
        command: The command line that repeats the run, for the report.

    Returns:
        What the run came to; None unless `mode` is "train".

    Raises:
        VembedError: Anything that is the user's to fix; each class has its exit code.
    """
    runtime = start_runtime(deterministic=config.deterministic)
    output = OutputFolder(Path(config.output_dir))
    checkpoint = _resume_point(config, output) if mode == "train" else None
    data = load_run_data(_data_paths(config))
    if mode == "train" and checkpoint is None:
        output.start_fresh(overwrite=config.overwrite_output_dir)
    elif mode == "plan":
        output.refuse_other_files()
    with ExitStack() as stack:
        if mode == "train":
            stack.enter_context(output.log_file())
        run = _assemble(config, runtime, output, data, checkpoint, mode)
        facts = {"model": config.model_name, **run.encoder.describe(), "device": runtime.machine.device_name}
        _log.info("%s", explain(run.plan, facts=facts))
        if mode == "dry-run":
            source = BatchSource(data.records, run.sampler, run.encoder, runtime.device)
            dry_run(source, _engine(run), run.encoder)
            return None
        if mode == "plan" and output.holds_run:
            _log.info("plan.json is not written: %s holds a run, whose plan stays", output.path)
            return None
        output.write("plan.json", json.dumps(run.plan.to_json(), indent=2) + "\n")
        output.write("config.yaml", dump_config(config))
        return None if mode == "plan" else _train(run, command)


def _assemble(
    config: Config,
    runtime: Runtime,
    output: OutputFolder,
    data: RunData,
    checkpoint: LoadedCheckpoint | None,
    mode: Mode,
) -> _Run:
    """Build the encoder, the loss and the plan."""
    torch.manual_seed(config.seed)
    encoder = _encoder(config, output, data, keep=mode == "train")
    refuse_nonfinite_weights(encoder)
    if config.use_gradient_cache is not False:
        refuse_batch_norm(encoder)
    encoder.to(runtime.device)
    loss = _loss(config).to(runtime.device)
    batch_size = config.global_batch_size or config.batch_size
    sampler = GlobalSampler(len(data.records), batch_size=batch_size, seed=config.seed, drop_last=config.drop_last)
    plan = _plan(config, runtime, data, encoder, sampler)
    if checkpoint is not None:
        plan = _read_back(plan, checkpoint)
    plan = replace(plan, model=encoder.describe())
    return _Run(config, runtime, output, data, encoder, loss, sampler, plan, checkpoint)


def _resume_point(config: Config, output: OutputFolder) -> LoadedCheckpoint | None:
    """Return the checkpoint to go on from, after checking that it is of this configuration."""
    if config.resume == "never":
        return None
    manager = CheckpointManager(output.checkpoints, keep_last=config.save_total_limit)
    source: Literal["auto"] | Path = "auto" if config.resume == "auto" else Path(config.resume)
    checkpoint = manager.load(source, required=[*PARTS, "run", "updater"])
    if checkpoint is None:
        return None
    if checkpoint.path.resolve().parent != output.checkpoints.resolve():
        raise ConfigError(
            f"resume: {checkpoint.path} is not in {output.checkpoints}, and a run goes on only beside its baseline and "
            f"its metrics.jsonl; set output_dir to the folder of the run that the checkpoint is of"
        )
    saved = checkpoint.stamp["config"]
    assert isinstance(saved, dict)
    differences = resume_differences(saved, config)
    refused = [difference for difference in differences if difference.kind == "refused"]
    if refused:
        listed = "".join(f"\n  {each.key}: {each.old!r} in the checkpoint, {each.new!r} now" for each in refused)
        raise ConfigError(
            f"{checkpoint.path} was trained with another configuration:{listed}\nSet these back, choose another "
            f"output_dir, or start anew with resume=never overwrite_output_dir=true"
        )
    for difference in differences:
        _log.info("resume: %s was %r and is %r now", difference.key, difference.old, difference.new)
    _log.info("resume: going on from %s", checkpoint.path)
    return checkpoint


def _data_paths(config: Config) -> DataPaths:
    if config.data_path is None:
        raise DataError(f"data_path is not set; --config_override data_path={SUGGESTED_SET} trains on a built-in set")

    def source(path: str, role: Role, split: str | None) -> tuple[str, SourceOptions]:
        options = SourceOptions(
            role=role,
            split=split,
            column_mapping=config.column_mapping,
            image_root=None if config.image_root is None else Path(config.image_root),
            image_limits=_image_limits(config),
            skip_invalid=config.skip_invalid_records,
            max_invalid=config.max_invalid_records,
        )
        return path, options

    dev, test = config.val_data_path, config.test_data_path
    return DataPaths(
        train=source(config.data_path, "train", config.data_split),
        dev=None if dev is None else source(dev, "validation", config.val_data_split),
        test=None if test is None else source(test, "test", config.test_data_split),
        needs_dev=config.eval_strategy != "no" or test is None,
        mode=config.retrieval_mode,
    )


def _image_limits(config: Config) -> ImageLimits:
    return ImageLimits(max_pixels=config.max_image_pixels)


def _encoder(config: Config, output: OutputFolder, data: RunData, *, keep: bool) -> Encoder:
    """Load the encoder. One that is built from scratch is kept: resuming needs the tokenizer that it trained."""
    prompts: dict[Side, str] = {}
    if config.query_prompt is not None:
        prompts["query"] = config.query_prompt
    if config.document_prompt is not None:
        prompts["document"] = config.document_prompt
    options = ModelOptions(
        name=config.model_name,
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
        dtype=DTYPES[config.torch_dtype],
        attn_implementation=None if config.attn_implementation == "auto" else config.attn_implementation,
        pooling=None if config.pooling_method == "auto" else config.pooling_method,
        max_length=None if config.max_seq_length == "auto" else config.max_seq_length,
        prompts=prompts,
        pad_token=config.pad_token,
        gradient_checkpointing=config.gradient_checkpointing,
        image_limits=_image_limits(config),
    )
    if not is_builtin(config.model_name):
        return load_encoder(options)
    if keep and output.initial_model.is_dir():
        kept = ModelOptions(
            name=str(output.initial_model),
            dtype=options.dtype,
            gradient_checkpointing=options.gradient_checkpointing,
            image_limits=options.image_limits,
        )
        encoder = load_encoder(kept)
        encoder.name = config.model_name
        return encoder
    encoder = load_encoder(options, record_texts(data.records))
    if keep:
        encoder.save(output.initial_model)
    return encoder


def _loss(config: Config) -> ContrastiveLoss:
    options = LossOptions(
        temperature=config.temperature,
        learn_temperature=config.learn_temperature,
        bidirectional=config.loss_bidirectional,
        mask_false_negatives=config.mask_false_negatives,
        dtype=DTYPES[config.torch_dtype],
    )
    try:
        return LOSSES[config.loss_type](options)
    except ValueError as error:
        raise ConfigError(f"temperature: {error}") from error


def _plan(config: Config, runtime: Runtime, data: RunData, encoder: Encoder, sampler: GlobalSampler) -> Plan:
    compute_dtype = DTYPES[config.torch_dtype]
    counts = data.counts
    size = DataSize(
        num_records=counts.num_records,
        steps_per_epoch=sampler.steps_per_epoch,
        documents_per_query=counts.num_documents / counts.num_records,
        notes=(*data.notes, *sampler.notes),
    )
    return make_plan(config, runtime.machine, model_size(encoder, compute_dtype=compute_dtype), size)


def _read_back(plan: Plan, checkpoint: LoadedCheckpoint) -> Plan:
    """Return the plan with the decisions that the checkpoint's run had taken."""
    saved = checkpoint.stamp["plan"]
    assert isinstance(saved, dict)
    decided: dict[str, Any] = {name: saved[name] for name in PLAN_READ_BACK}
    reasons = (*plan.reasons, f"resumed from step {checkpoint.step}: {', '.join(PLAN_READ_BACK)} are the checkpoint's")
    return replace(plan, **decided, reasons=reasons)


def _engine(run: _Run) -> GradCacheEngine:
    return GradCacheEngine(
        run.loss,
        EngineOptions(
            budget=_budget(run),
            device=run.runtime.device,
            retain=run.plan.retain,
            autocast_dtype=_autocast_dtype(run.plan),
        ),
    )


def _budget(run: _Run) -> ChunkBudget:
    return ChunkBudget(
        rows=run.plan.gradient_cache_chunk_size,
        tokens=run.plan.gradient_cache_chunk_tokens,
        width_multiple=1 if run.runtime.device.type == "cpu" else 8,
    )


def _autocast_dtype(plan: Plan) -> torch.dtype | None:
    return DTYPES[plan.dtype] if plan.dtype in AUTOCAST_DTYPES else None


def _updater(run: _Run) -> Updater:
    config, plan = run.config, run.plan
    schedule = Schedule(config.learning_rate, config.scheduler_type, plan.warmup_steps, plan.steps)
    options = OptimizerOptions(
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
        loss_scaling=plan.dtype == "float16",
    )
    return Updater(run.encoder, run.loss, schedule, options)


def _checkpoints(run: _Run, updater: Updater) -> RunCheckpoints:
    identity: dict[str, Any] = {
        "strategy": run.plan.strategy,
        "world_size": run.plan.world_size,
        "model_name": run.config.model_name,
        "num_parameters": sum(parameter.numel() for parameter in run.encoder.parameters()),
        "data_fingerprint": run.data.fingerprint,
    }
    stamp = {
        **identity,
        "config_hash": config_hash(run.config),
        "config": plain_values(run.config),
        "plan": run.plan.to_json(),
    }
    manager = CheckpointManager(run.output.checkpoints, keep_last=run.config.save_total_limit)
    return RunCheckpoints(manager, run.encoder, run.loss, updater, identity, stamp)


def _evaluations(run: _Run, stop: StopSignal) -> Evaluations:
    budget = replace(_budget(run), rows=run.config.eval_batch_size)
    encode = ItemEncoder(run.encoder, budget, run.runtime.device, _autocast_dtype(run.plan), poll=stop.poll)
    return Evaluations(
        encode=encode,
        dev=run.data.dev,
        test=run.data.test,
        folder=run.output.path / "evaluation",
        metric=run.config.metric_for_best_model,
        poll=stop.poll,
        with_bm25=run.config.bm25,
    )


def _trackers(run: _Run, step: int) -> list[Tracker]:
    jsonl = JsonlTracker(run.output.path / "metrics.jsonl")
    jsonl.cut_back(step)
    trackers: list[Tracker] = [jsonl]
    if run.config.report_to == "tensorboard":
        board = TensorBoardTracker(run.output.path / "tensorboard", resume_step=step)
        trackers.append(GuardedTracker(board, name="tensorboard"))
    return trackers


def _train(run: _Run, command: str) -> RunResult:
    """Run the loop from where it stands, and finish."""
    config = run.config
    run.encoder.train()
    updater = _updater(run)
    checkpoints = _checkpoints(run, updater)
    state = RunState() if run.checkpoint is None else checkpoints.restore(run.checkpoint)
    if run.checkpoint is not None:
        checkpoints.manager.set_aside_after(state.step)
    trackers = _trackers(run, state.step)
    guard = NonFiniteGuard(
        config.nonfinite_policy, limit=config.max_skipped_steps, folder=run.output.path, skipped=state.skipped_steps
    )
    options = TrainerOptions(
        seed=config.seed,
        metric=config.metric_for_best_model,
        patience=config.early_stopping_patience,
        save_steps=config.save_steps,
        save_seconds=None if config.save_minutes is None else 60 * config.save_minutes,
        logging_steps=config.logging_steps,
    )
    source = BatchSource(run.data.records, run.sampler, run.encoder, run.runtime.device)
    with StopSignal() as stop:
        evaluations = _evaluations(run, stop)
        if state.step > 0:
            evaluations.require_baseline()
        parts = TrainerParts(run.plan, source, _engine(run), updater, evaluations, checkpoints, trackers, guard, stop)
        try:
            baseline = Trainer(parts, state, options).run()
        finally:
            for tracker in trackers:
                tracker.close()
        finish = FinishParts(
            output=run.output,
            evaluations=evaluations,
            checkpoints=checkpoints,
            plan=run.plan,
            config=plain_values(config),
            data_facts=run.data.facts(),
            image_limits=_image_limits(config),
            device_name=run.runtime.machine.device_name,
            command=command,
        )
        return finish_run(finish, state, baseline)
