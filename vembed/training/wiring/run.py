"""Put a run together from its configuration, and run it."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import torch

from vembed.collector import collector_paused
from vembed.config.dump import dump_config, hashed_values, plain_values
from vembed.distributed.runtime import start_runtime
from vembed.distributed.watchdog import Watchdog
from vembed.errors import ConfigError, MachineError, PreemptedError
from vembed.gradcache.memory import out_of_memory_advice
from vembed.models.adapters.lora import has_adapters, takes_adapters
from vembed.models.adapters.narrow import narrow_frozen
from vembed.models.compiling import compile_errors_explained, compile_layers
from vembed.output_lock import FolderInUseError, hold_output
from vembed.plan.explain import explain, explain_fully
from vembed.plan.table import comparison
from vembed.training.callbacks import Callbacks, EndEvent
from vembed.training.checks import dry_run, refuse_batch_norm
from vembed.training.finish import FinishParts, RunResult, finish_run, package_versions
from vembed.training.guards import StopSignal
from vembed.training.output import OutputFolder
from vembed.training.progress import RunClock, measured_step_seconds
from vembed.training.saving import refuse_other_run
from vembed.training.space import DiskNeeds, free_bytes
from vembed.training.state import RunState
from vembed.training.tracking import closing, track_end, track_start
from vembed.training.trainer import Trainer
from vembed.training.wiring.data import build_sampler, load_data
from vembed.training.wiring.early import paths_read
from vembed.training.wiring.hard_batches import hard_batch_bytes
from vembed.training.wiring.launcher import under_launcher
from vembed.training.wiring.mining import mining_bytes, refuse_mining
from vembed.training.wiring.model import build_alike, build_encoder, build_loss
from vembed.training.wiring.parts import (
    Run,
    autocast_dtype,
    batch_source,
    batches,
    build_checkpoints,
    build_engine,
    build_evaluations,
    build_guard,
    build_trackers,
    build_updater,
    epoch_facts,
    frozen_items,
    run_identity,
    said,
    start_alike,
    teacher,
    with_hard_batches,
    with_hard_vectors,
)
from vembed.training.wiring.planning import build_plan, read_back
from vembed.training.wiring.resume_point import resume_point

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from vembed.checkpoint.contents import LoadedCheckpoint
    from vembed.config.schema import Config
    from vembed.distributed.runtime import Runtime
    from vembed.models.encoder import Encoder
    from vembed.plan.plan import Plan
    from vembed.training.batches import Batches
    from vembed.training.evaluations import Evaluations
    from vembed.training.inputs import RunData
    from vembed.training.saving import RunCheckpoints

_log = logging.getLogger(__name__)

Mode = Literal["train", "plan", "dry-run"]


def run_from_config(
    config: Config,
    *,
    mode: Mode = "train",
    command: str = "",
    sources: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    watchdog: Watchdog | None = None,
    stop: StopSignal | None = None,
    callbacks: Callbacks | None = None,
    details: bool = False,
) -> RunResult | None:
    """Run what a configuration describes.

    Args:
        mode: "train" runs it; "plan" only prints the plan and writes plan.json; "dry-run" does one step and writes
            nothing.
        command: The command line that repeats the run, for the report.
        sources: Key -> where the user set it, for messages.
        notes: What the plan says first: keys of other trainers, and what they come to here.
        watchdog: Of whoever reports how this process ends.
        stop: The signals that this process has been taking; None takes them while the loop runs.
        callbacks: What a Python caller wants to be told and asked.
        details: Whether every reason and all ways to train are shown below the plan.

    Returns:
        The verdict and results of the run; None unless `mode` is "train".

    Raises:
        VembedError: Anything that is the user's to fix; each class has its exit code.
    """
    watchdog = watchdog or Watchdog()
    if config.seeds is not None and mode == "train":
        raise ConfigError("seeds starts processes of its own: use vembed train, or call this once per seed with seed=N")
    try:
        calls = callbacks or Callbacks()
        return _run(config, mode, command, sources or {}, tuple(notes), watchdog, stop, calls, details=details)
    except PreemptedError as stopped:
        raise PreemptedError(f"{stopped}{watchdog.words}") from stopped
    except (RuntimeError, MemoryError) as error:
        advice = out_of_memory_advice(error)
        if advice is None:
            raise
        raise MachineError(f"{advice}{watchdog.words}") from error


def _run(
    config: Config,
    mode: Mode,
    command: str,
    sources: Mapping[str, str],
    notes: tuple[str, ...],
    watchdog: Watchdog,
    stop: StopSignal | None,
    callbacks: Callbacks,
    *,
    details: bool,
) -> RunResult | None:
    clock = RunClock()
    given, (config, launcher, asked) = config, under_launcher(config, sources)
    output = OutputFolder(Path(config.output_dir))
    watchdog.exit_files.expect(output.path)
    runtime = start_runtime(
        deterministic=config.deterministic,
        timeout_seconds=config.nccl_timeout,
        num_processes=config.num_processes,
        plans_only=mode == "plan",
        watchdog=watchdog,
    )
    runtime.ranks.require_equal({**hashed_values(config), **package_versions(), "callbacks": callbacks.names})
    with ExitStack() as stack, ExitStack() as starting:
        starting.enter_context(collector_paused())
        run = _open(config, runtime, output, mode, stack)
        needs, free = _disk_needs(run), free_bytes(output.path)
        started = {"started by": launcher} if launcher else {}
        facts = {"device": runtime.machine.device_name, **started, "disk": needs.line(free)}
        full = _tell_plan(run, run.plan.noting(*notes, *asked, first=True), facts, details=details)
        if mode == "dry-run":
            _dry_run(run)
            return None
        if run.checkpoint is not None:  # before any file of the checkpoint's run is replaced
            refuse_other_run(run.checkpoint, run_identity(run), elastic=config.resume_elastic)
        if mode == "plan":
            runtime.ranks.from_first(lambda: _write_plan(run, given))
            return None
        may_adapt = takes_adapters(run.encoder) and not has_adapters(run.encoder)
        runtime.ranks.from_first(lambda: needs.refuse_small(free, output.path, config, may_adapt=may_adapt))
        runtime.ranks.from_first(lambda: _write_settings(run, given))
        starting.close()
        return _train(run, command, full, stop, callbacks, clock)


def _open(config: Config, runtime: Runtime, output: OutputFolder, mode: Mode, stack: ExitStack) -> Run:
    """Take the output folder until `stack` is closed, find the checkpoint, read the data, and build the run's parts."""
    watchdog = runtime.watchdog
    if not runtime.ranks.is_first:
        stack.enter_context(_only_warnings())
    if mode == "train":
        runtime.ranks.from_first(lambda: stack.enter_context(hold_output(output.path)))
    checkpoint = resume_point(config, runtime, output) if mode == "train" else None
    watchdog.words.checkpoint = None if checkpoint is None else checkpoint.path
    watchdog.words.doing = "reading the data"
    data = load_data(config)
    runtime.ranks.from_first(lambda: refuse_mining(config, data))
    runtime.ranks.from_first(lambda: _claim(config, output, mode, is_fresh=checkpoint is None))
    if mode == "train":
        watchdog.exit_files.own(output.path, is_main=runtime.ranks.is_first)
        if runtime.ranks.is_first:
            stack.enter_context(output.log_file())
    stack.enter_context(compile_errors_explained())
    run = _assemble(config, runtime, output, data, checkpoint, mode)
    watchdog.words.doing = "beginning"
    return run


def _tell_plan(run: Run, noted: Plan, facts: Mapping[str, str], *, details: bool) -> str:
    """Print the plan on one screen, and the rest with `details`; return all of it."""
    facts = {"model": run.config.model_name, **run.encoder.describe(), **run.data.read, **facts}
    _log.info("%s", explain(noted, facts=facts, step_seconds=measured_step_seconds(run.output, noted)))
    full = explain_fully(noted, facts=facts)
    if details:
        _log.info("%s\n%s", full, comparison(run.plan))
    return full


def _dry_run(run: Run) -> None:
    """Do one step; a teacher is asked about its batch alone."""
    with TemporaryDirectory() as own:
        folder = Path(run.runtime.ranks.from_first(lambda: own))
        first_batch = run.data.records.subset(run.sampler.rows(0))
        answers = said(replace(run, teacher=teacher(run, first_batch, folder)), poll=lambda: None)
        dry_run(batch_source(run, answers=answers), build_engine(run), run.encoder)


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Leave the telling to the first rank, for as long as the block lasts."""
    logger = logging.getLogger("vembed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _claim(config: Config, output: OutputFolder, mode: Mode, *, is_fresh: bool) -> None:
    """Make the output folder ready, or refuse it."""
    if mode == "train" and is_fresh:
        output.start_fresh(overwrite=config.overwrite_output_dir, reads=paths_read(config))
    elif mode == "plan":
        output.refuse_other_files()


def _disk_needs(run: Run) -> DiskNeeds:
    """Count what the run will write."""
    own = run.frozen is not None and run.config.embedding_cache == "auto"
    embeddings = sum(side.num_bytes for side in run.frozen.sides) if own and run.frozen is not None else 0
    if run.teacher is not None and run.config.teacher_cache == "auto":
        embeddings += run.teacher.num_bytes
    if run.hard is not None:
        embeddings += hard_batch_bytes(run.config, run.hard, run.plan.steps.total / run.plan.steps.per_epoch)
    embeddings += mining_bytes(run.config, run.data, run.encoder.dimension)
    return DiskNeeds.of(run.encoder, run.loss, run.plan, run.config, run.output, embeddings=embeddings)


def _write_plan(run: Run, given: Config) -> None:
    """Leave the plan in the output folder, unless it is a run's."""
    if run.output.holds_run:
        _log.info("plan.json is not written: %s holds a run, whose plan stays", run.output.path)
        return
    try:
        with hold_output(run.output.path):
            _write_settings(run, given)
    except FolderInUseError as error:
        _log.info("plan.json is not written: %s", error)


def _write_settings(run: Run, given: Config) -> None:
    """Write the plan, and the configuration as the user gave it: what a launcher added stands in the plan."""
    run.output.write("plan.json", json.dumps(run.plan.to_json(), indent=2) + "\n")
    run.output.write("config.yaml", dump_config(given))


def _assemble(
    config: Config,
    runtime: Runtime,
    output: OutputFolder,
    data: RunData,
    checkpoint: LoadedCheckpoint | None,
    mode: Mode,
) -> Run:
    """Make the plan, and build the encoder and the loss as it says."""
    runtime.watchdog.words.doing = "making the plan"
    plan = build_plan(config, runtime, data)
    if checkpoint is not None:
        plan = read_back(plan, checkpoint, config)
    torch.manual_seed(config.seed)
    runtime.watchdog.words.doing = "loading the model"

    def build(with_weights: bool) -> Encoder:
        encoder = build_encoder(config, plan, output, data, keep=mode == "train", with_weights=with_weights)
        narrow_frozen(encoder, autocast_dtype(plan))
        return encoder

    encoder = build_alike(build, runtime.ranks)
    if config.use_gradient_cache is not False:
        refuse_batch_norm(encoder)
    num_parameters = sum(parameter.numel() for parameter in encoder.parameters())
    runtime.ranks.require_equal({"training data": data.fingerprint, "parameters": str(num_parameters)})
    shards = plan.way.mode is not None and not runtime.ranks.is_one
    if plan.way.mode is None:  # else its parts go to their devices one by one; what is only planned stays on the CPU
        start_alike(encoder, runtime, with_buffers=config.ddp_broadcast_buffers)
    sampler = build_sampler(config, data.records, plan.batch.total)
    loss = build_loss(config, plan, encoder).to(runtime.device)
    runtime.ranks.copy_from_first(loss.parameters())
    if plan.compiles:  # before sharding, while the layers are plain modules
        compile_layers(encoder, strict=config.compile is True)
    sharded = None
    if shards:
        from vembed.distributed.fsdp import shard_encoder  # a replicated run is spared a second of imports

        dtype = autocast_dtype(plan)
        sharded = shard_encoder(encoder, plan.way, runtime.ranks, device=runtime.device, compute_dtype=dtype)
    plan = replace(plan, model=encoder.describe()).noting(*sampler.arrangement_notes())
    run = Run(config, runtime, output, data, encoder, loss, sampler, plan, checkpoint, sharded=sharded)
    run = with_hard_vectors(run)
    run = replace(run, frozen=frozen_items(run), teacher=teacher(run, run.data.records))
    notes = () if run.frozen is None else run.frozen.notes
    notes = notes if run.teacher is None else (*notes, run.teacher.note)
    return replace(run, plan=run.plan.noting(*notes))


def _train(
    run: Run, command: str, shown_plan: str, stop: StopSignal | None, callbacks: Callbacks, clock: RunClock
) -> RunResult:
    """Run the loop from where it stands, and finish."""
    words = run.runtime.watchdog.words
    words.doing = "choosing batches"
    run = with_hard_batches(run)
    run.encoder.train()
    updater = build_updater(run)
    checkpoints = build_checkpoints(run, updater)
    state = RunState() if run.checkpoint is None else checkpoints.restore(run.checkpoint)
    if run.checkpoint is not None:
        checkpoints.manager.set_aside_after(state.step)
    trackers = build_trackers(run, state.step)
    ranks = run.runtime.ranks
    agree = ranks.agreement(run.runtime.device)
    with closing(trackers), StopSignal() if stop is None else nullcontext(stop) as stop, stop.asking(agree):
        words.doing = "training"
        track_start(trackers, state.step, plan=shown_plan)
        evaluations = build_evaluations(run, stop)
        if state.step > 0:
            evaluations.require_baseline()
            clock.go_on(run.output.path / "evaluation")
        with _open_batches(run, evaluations) as source:
            trainer = Trainer(
                state=state,
                plan=run.plan,
                source=source,
                engine=build_engine(run, state.step_limits),
                updater=updater,
                evaluations=evaluations,
                checkpoints=checkpoints,
                trackers=trackers,
                guard=build_guard(run, state, agree),
                stop=stop,
                ranks=ranks,
                output_keys=run.config,
                evaluation_keys=run.config,
                seed=run.config.seed,
                callbacks=callbacks,
                clock=clock,
            )
            baseline = trainer.run()
        words.doing = "finishing"
        finish = _finish_parts(run, evaluations, checkpoints, command, clock)
        result = finish_run(finish, state, baseline)
        callbacks.ask(EndEvent(result), ranks)
        words.doing = "telling the trackers"  # of a large model this takes long; no other rank waits
        track_end(trackers, result, finish, step=state.step, log_model=run.config.log_model)
        if callbacks.failure is not None:
            raise callbacks.failure
        return result


def _open_batches(run: Run, evaluations: Evaluations) -> AbstractContextManager[Batches]:
    """Compute what batches carry beside their rows (vectors of frozen parts, a teacher's answers), and open them."""
    words = run.runtime.watchdog.words
    stored = None if run.frozen is None else run.frozen.stored(evaluations.encode)
    words.doing = "asking the teacher" if run.teacher else words.doing
    answers = said(run, evaluations.encode.poll)
    words.doing = "training"
    return batches(run, evaluations.encode, stored, answers)


def _finish_parts(
    run: Run, evaluations: Evaluations, checkpoints: RunCheckpoints, command: str, clock: RunClock
) -> FinishParts:
    """Collect what the end of a run reads."""
    return FinishParts(
        output=run.output,
        evaluations=evaluations,
        checkpoints=checkpoints,
        fresh=lambda: build_encoder(run.config, run.plan, run.output, run.data, keep=True),
        ranks=run.runtime.ranks,
        plan=run.plan,
        config=plain_values(run.config),
        data=replace(run.data, more_facts=epoch_facts(run.output)),
        max_image_pixels=run.config.max_image_pixels,
        machine=run.runtime.machine,
        command=command,
        clock=clock,
    )
