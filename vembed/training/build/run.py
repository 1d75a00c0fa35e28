"""Put a run together from its configuration, and run it."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from vembed.checkpoint.manager import CheckpointManager
from vembed.config.dump import dump_config, plain_values
from vembed.config.resume import resume_differences
from vembed.data.sampler import GlobalSampler
from vembed.distributed.runtime import start_runtime
from vembed.errors import ConfigError
from vembed.plan.explain import explain
from vembed.training.build.data import data_paths, image_limits
from vembed.training.build.model import build_encoder, build_loss
from vembed.training.build.parts import (
    Run,
    batch_source,
    batches,
    build_checkpoints,
    build_engine,
    build_evaluations,
    build_trackers,
    build_updater,
)
from vembed.training.build.planning import build_plan, read_back
from vembed.training.checks import dry_run, refuse_batch_norm, refuse_nonfinite_weights
from vembed.training.finish import FinishParts, RunResult, finish_run
from vembed.training.guards import NonFiniteGuard, StopSignal
from vembed.training.inputs import RunData, load_run_data
from vembed.training.output import OutputFolder
from vembed.training.saving import PARTS
from vembed.training.state import RunState
from vembed.training.trainer import Trainer, TrainerOptions, TrainerParts

if TYPE_CHECKING:
    from vembed.checkpoint.format import LoadedCheckpoint
    from vembed.config.schema import Config
    from vembed.distributed.runtime import Runtime


_log = logging.getLogger(__name__)

Mode = Literal["train", "plan", "dry-run"]


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
    data = load_run_data(data_paths(config))
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
            dry_run(batch_source(run), build_engine(run), run.encoder)
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
) -> Run:
    """Build the encoder, the loss and the plan."""
    torch.manual_seed(config.seed)
    encoder = build_encoder(config, output, data, keep=mode == "train")
    refuse_nonfinite_weights(encoder)
    if config.use_gradient_cache is not False:
        refuse_batch_norm(encoder)
    encoder.to(runtime.device)
    batch_size = config.global_batch_size or config.batch_size
    sampler = GlobalSampler(len(data.records), batch_size=batch_size, seed=config.seed, drop_last=config.drop_last)
    plan = build_plan(config, runtime, data, encoder, sampler)
    if checkpoint is not None:
        plan = read_back(plan, checkpoint)
    plan = replace(plan, model=encoder.describe())
    loss = build_loss(config, plan, encoder).to(runtime.device)
    return Run(config, runtime, output, data, encoder, loss, sampler, plan, checkpoint)


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


def _train(run: Run, command: str) -> RunResult:
    """Run the loop from where it stands, and finish."""
    config = run.config
    run.encoder.train()
    updater = build_updater(run)
    checkpoints = build_checkpoints(run, updater)
    state = RunState() if run.checkpoint is None else checkpoints.restore(run.checkpoint)
    if run.checkpoint is not None:
        checkpoints.manager.set_aside_after(state.step)
    trackers = build_trackers(run, state.step)
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
        counts_masked=config.mask_false_negatives,
    )
    with StopSignal() as stop:
        evaluations = build_evaluations(run, stop)
        if state.step > 0:
            evaluations.require_baseline()
        try:
            with batches(run) as source:
                engine = build_engine(run, state.smaller_chunk)
                parts = TrainerParts(run.plan, source, engine, updater, evaluations, checkpoints, trackers, guard, stop)
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
            image_limits=image_limits(config),
            device_name=run.runtime.machine.device_name,
            command=command,
        )
        return finish_run(finish, state, baseline)
