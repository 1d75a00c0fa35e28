"""A run, from its configuration to its verdict: config -> data -> plan -> model -> engine -> loop -> verdict.

In reading order:

1. `run_from_config`, the door of every command and of `vembed.train`: join the other processes, show the plan, refuse
   what would fail later.
2. `_open` and `_load_model`: read the data, make the plan, load model and loss. The result is a `Run`.
3. `Run`: the engine, the optimizer, checkpoints and evaluations, each made when it is first asked for.
4. `_train`: restore a checkpoint, open the batches (batches.py), run the loop (loop.py), judge the model (finish.py).

Every rank executes all of it. What one rank does for all goes through `ranks.from_first`, so that an error there ends
the others too instead of leaving them in a collective. Only this file, `open_batches`, the loop and the end know a
`Run`; everything below them is given the few things that it needs.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch

from vembed import collector_paused
from vembed.checkpoint.manager import CheckpointManager
from vembed.config.record import config_hash, dump_config, plain_values, shared_values
from vembed.data.picture_survey import what_is_read
from vembed.distributed.lock import FolderInUseError, hold_output
from vembed.distributed.runtime import start_runtime
from vembed.distributed.shards import reshard, total_norm
from vembed.distributed.signals import StopSignal
from vembed.distributed.watchdog import Watchdog
from vembed.errors import ConfigError, MachineError, PreemptedError
from vembed.files import home_path
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.memory import out_of_memory_advice
from vembed.models.adapters import has_adapters, narrow_frozen, takes_adapters
from vembed.models.hub import DTYPES
from vembed.plan.batch import step_batches
from vembed.plan.text import comparison, explain, explain_fully
from vembed.redact import redact
from vembed.text import plural
from vembed.training.batches import ask, batch_source, frozen_items, open_batches, pools_of, teacher_of
from vembed.training.callbacks import Callbacks, EndEvent
from vembed.training.compiling import compile_errors_explained, compile_layers
from vembed.training.data import build_sampler, load_data, look_nearer, measures_both_directions
from vembed.training.disk import DiskNeeds, free_bytes
from vembed.training.early import accepted_differences, paths_read, refuse_other_place
from vembed.training.evaluations import Evaluations
from vembed.training.finish import RunResult, finish_run, package_versions
from vembed.training.guard import NonFiniteGuard
from vembed.training.launcher import under_launcher
from vembed.training.loop import TrainingLoop
from vembed.training.model import build_alike, build_encoder, build_loss, refuse_batch_norm, start_alike
from vembed.training.optimizer import Optimizer, Schedule
from vembed.training.output import OutputFolder
from vembed.training.planning import as_begun, build_plan, check_decisions, read_back
from vembed.training.progress import RunClock, measured_step_seconds
from vembed.training.refresh import hard_batch_bytes, hard_sampler, mining_bytes, refuse_mining
from vembed.training.saving import PARTS, RunCheckpoints, RunState, check_shape
from vembed.training.stamp import refuse_other_run
from vembed.training.timing import peak_memory_bytes
from vembed.training.trackers import closing, open_trackers, read_rows, track_end, track_start
from vembed.vectors.encode import ItemEncoder
from vembed.vectors.items import HardVectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vembed.checkpoint.tensors import LoadedCheckpoint
    from vembed.config.schema import Config
    from vembed.data.run_data import RunData
    from vembed.data.sampler import GlobalSampler
    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.distributed.ranks import Ranks
    from vembed.distributed.runtime import Runtime
    from vembed.distributed.watchdog import LastWords
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder
    from vembed.plan.plan import Plan
    from vembed.training.trackers import Tracker
    from vembed.vectors.frozen import FrozenItems
    from vembed.vectors.teacher import Teacher

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
    """Train and judge the model that a configuration describes, or only plan it, or try one step.

    Args:
        mode: "train" trains; "plan" prints the plan and writes plan.json; "dry-run" does one step and writes nothing.
        command: Command line that repeats the run, for the report.
        sources: Key -> where the user set it, for messages.
        notes: First lines of the plan, about keys of other trainers.
        watchdog: Watches the other processes; made here unless the caller reports how this process ends.
        stop: Signals that this process takes already; None takes them while the loop runs.
        callbacks: Python callbacks of the caller.
        details: Also log every reason of the plan and every way to train.

    Returns:
        Verdict and results; None unless `mode` is "train".

    Raises:
        VembedError: Something that the user can fix; each class has an exit code.
    """
    if config.seeds is not None and mode == "train":
        raise ConfigError("seeds starts processes of its own: use vembed train, or call this once per seed with seed=N")
    watchdog, callbacks, clock = watchdog or Watchdog(), callbacks or Callbacks(), RunClock()
    with _errors_explained(watchdog), ExitStack() as stack, ExitStack() as starting:
        starting.enter_context(collector_paused())  # rows and imports are a million objects that it would visit

        # Config: the launcher's own settings go under those of the user. Then this process joins the others.
        written, (config, launcher, launcher_notes) = config, under_launcher(config, sources or {})
        output = OutputFolder(Path(config.output_dir))
        watchdog.exit_files.expect(output.path)
        runtime = start_runtime(
            deterministic=config.deterministic,
            timeout_seconds=config.nccl_timeout,
            num_processes=config.num_processes,
            plans_only=mode == "plan",
            watchdog=watchdog,
        )
        ranks = runtime.ranks

        # Before any other collective: ranks that differ in a key would meet in different ones, and wait.
        ranks.require_equal({**shared_values(config), **package_versions(), "callbacks": callbacks.names})

        # Data, plan, model.
        run = _open(config, runtime, output, mode, stack)
        run.command, run.callbacks, run.clock = command, callbacks, clock

        # Show the plan before anything is computed, and refuse what would fail later.
        needs, free = _disk_needs(run), free_bytes(output.path)
        started_by = {"started by": launcher} if launcher else {}
        facts = {"device": runtime.machine.device_name, **started_by, "disk": needs.line(free)}
        plan_text = _show_plan(run, run.plan.noting(*notes, *launcher_notes, first=True), facts, details=details)
        if mode == "dry-run":
            _dry_run(run)
            return None
        if run.checkpoint is not None:  # before any file of the run that it is of is replaced
            refuse_other_run(run.checkpoint, run.identity, elastic=config.resume_elastic)
        if mode == "plan":
            ranks.from_first(lambda: _write_plan_alone(run, written))
            return None
        may_adapt = takes_adapters(run.encoder) and not has_adapters(run.encoder)
        ranks.from_first(lambda: needs.refuse_small(free, output.path, config, may_adapt=may_adapt))
        ranks.from_first(lambda: _write_settings(run, written))
        starting.close()

        # Engine, loop, verdict.
        return _train(run, plan_text, stop)


def _open(config: Config, runtime: Runtime, output: OutputFolder, mode: Mode, stack: ExitStack) -> Run:
    """Find the checkpoint, read the data, make the plan and load the model.

    Args:
        stack: Closed at the end of the run; holds the lock of the output folder, train.log and this rank's log level.
    """
    ranks, watchdog, words, trains = runtime.ranks, runtime.watchdog, runtime.watchdog.words, mode == "train"
    if not ranks.is_first:  # the log lines are the first rank's
        logger = logging.getLogger("vembed")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.WARNING)
    if trains:
        ranks.from_first(lambda: stack.enter_context(hold_output(output.path)))
    checkpoint = find_checkpoint(config, runtime, output) if trains else None
    words.checkpoint = None if checkpoint is None else checkpoint.path

    # Data. The output folder is cleared only once the data turned out to be fit.
    words.doing = "reading the data"
    data = load_data(config)
    ranks.from_first(lambda: refuse_mining(config, data))
    if trains and checkpoint is None:
        reads = paths_read(config)
        ranks.from_first(lambda: output.start_fresh(overwrite=config.overwrite_output_dir, reads=reads))
    elif mode == "plan":
        ranks.from_first(output.refuse_other_files)
    if trains:
        watchdog.exit_files.own(output.path, is_main=ranks.is_first)
        if ranks.is_first:
            stack.enter_context(output.log_file())

    # Plan. A resumed run keeps the decisions that change what is trained, whatever machine it is on now.
    words.doing = "making the plan"
    plan = build_plan(config if checkpoint is None else as_begun(config, checkpoint), runtime, data)
    if checkpoint is not None:
        plan = read_back(plan, checkpoint, config)
    if data.judged is not None:
        step_seconds = measured_step_seconds(output, plan) or plan.guessed_step_seconds
        data, notes = look_nearer(data, ranks, run_seconds=step_seconds * plan.steps.total)
        plan = plan.noting(*data.leaks(), first=True).noting(*notes)
    sampler = build_sampler(config, data.records, plan.batch.total)

    # Model. Compiled layers fail at their first call, long after this: their errors are explained until the end.
    stack.enter_context(compile_errors_explained())
    words.doing = "loading the model"
    encoder, loss, sharded = _load_model(config, runtime, output, data, plan, keeps_initial=trains)
    readable = what_is_read(encoder.modalities)
    described = encoder.describe() | ({"reads": readable} if readable else {})
    plan = replace(plan, model=described).noting(*sampler.arrangement_notes())
    run = Run(
        config=config,
        runtime=runtime,
        output=output,
        data=data,
        plan=plan,
        encoder=encoder,
        loss=loss,
        sampler=sampler,
        sharded=sharded,
        checkpoint=checkpoint,
    )

    # What is encoded before step 1: items of hard batches, of frozen towers, of a teacher. The plan tells the cost.
    if config.batch_sampling == "hard":
        run.hard = HardVectors.of(encoder, data.records, output.hard_vectors, precision=plan.dtype)
        run.plan = run.plan.noting(run.hard.note(config.hard_refresh))
    run.frozen, run.teacher = frozen_items(run), teacher_of(run, data.records)
    if run.frozen is not None:
        run.plan = run.plan.noting(*run.frozen.notes)
    if run.teacher is not None:
        run.plan = run.plan.noting(run.teacher.note)
    words.doing = "beginning"
    return run


def _load_model(
    config: Config, runtime: Runtime, output: OutputFolder, data: RunData, plan: Plan, *, keeps_initial: bool
) -> tuple[Encoder, BatchLoss, ShardedEncoder | None]:
    """Load the encoder and the loss, equal on all ranks, and shard the encoder where the plan says so.

    Args:
        keeps_initial: Whether a model from scratch is written to the output folder, for a run that resumes.
    """
    ranks, device = runtime.ranks, runtime.device
    torch.manual_seed(config.seed)

    # The first rank reads the weights; the others build the same module without them and receive them. A model that
    # will be sharded goes to the devices block by block below; one that is only planned stays on the CPU.
    def build(with_weights: bool) -> Encoder:
        encoder = build_encoder(config, plan, output, data, keep=keeps_initial, with_weights=with_weights)
        narrow_frozen(encoder, autocast_dtype(plan))
        return encoder

    encoder = build_alike(build, ranks)
    if config.use_gradient_cache is not False:
        refuse_batch_norm(encoder)
    num_parameters = sum(parameter.numel() for parameter in encoder.parameters())
    ranks.require_equal({"training data": data.fingerprint, "parameters": str(num_parameters)})
    if plan.way.mode is None:
        start_alike(encoder, runtime, with_buffers=config.ddp_broadcast_buffers)

    # The loss may have parameters of its own: a learned temperature.
    loss = build_loss(config, plan, encoder).to(device)
    ranks.copy_from_first(loss.parameters())

    # Compile before sharding, while the layers are plain modules.
    if plan.compiles:
        compile_layers(encoder, strict=config.compile is True)
    if plan.way.mode is None or ranks.is_one:
        return encoder, loss, None
    from vembed.distributed.fsdp import shard_encoder  # a second of imports that a replicated run is spared

    sharded = shard_encoder(encoder, plan.way, ranks, device=device, compute_dtype=autocast_dtype(plan))
    return encoder, loss, sharded


@dataclass(kw_only=True)
class Run:
    """A run whose data are read, whose plan is made and whose model is loaded.

    The parts that the loop works with are properties, made when they are first asked for, and they keep what they see
    then. `_train` sets sampler, state, trackers and stop, in this order; ask for guard, engine or evaluations after it.
    """

    config: Config
    runtime: Runtime
    output: OutputFolder
    data: RunData
    plan: Plan
    encoder: Encoder
    loss: BatchLoss
    sampler: GlobalSampler  # which records make up which batch
    sharded: ShardedEncoder | None  # handle of an encoder that the ranks share; None where each has a copy
    checkpoint: LoadedCheckpoint | None  # to continue from; without its tensors once they are restored
    hard: HardVectors | None = None  # items that hard batches are chosen by
    frozen: FrozenItems | None = None  # items of towers that don't train: encoded once
    teacher: Teacher | None = None
    state: RunState = field(default_factory=RunState)
    command: str = ""  # command line that repeats the run
    clock: RunClock = field(default_factory=RunClock)
    callbacks: Callbacks = field(default_factory=Callbacks)
    stop: StopSignal = field(default_factory=StopSignal)
    trackers: list[Tracker] = field(default_factory=list)  # of the first rank; the others have none

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return self.runtime.ranks

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self.runtime.device

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type of mixed precision; None without."""
        return autocast_dtype(self.plan)

    @property
    def words(self) -> LastWords:
        """Words on where the run stands, for the message of whatever ends it."""
        return self.runtime.watchdog.words

    @cached_property
    def keys(self) -> dict[str, Any]:
        """Key -> value of the configuration, without secrets, for checkpoints, trackers and the report."""
        return plain_values(self.config)

    @cached_property
    def engine(self) -> GradCacheEngine:
        """Engine of the step: chunks, both passes, loss and reduction."""
        config, plan = self.config, self.plan
        engine = GradCacheEngine(
            self.loss,
            EngineOptions(
                budget=self._chunk_budget,
                device=self.device,
                retain=plan.chunks.retain,
                retain_tokens=plan.chunks.retain_tokens,
                autocast_dtype=self.autocast_dtype,
                loss_tf32=config.loss_precision == "tf32",
                # Without gradient caching the user wants one call per batch: nothing may cut it.
                oom_retry=config.oom_retry and config.use_gradient_cache is not False,
                compiled=plan.compiles,
                ranks=replace(self.ranks, bucket_bytes=plan.bucket_bytes),
            ),
            [parameter for parameter in self.encoder.parameters() if parameter.requires_grad],
            sharded=self.sharded,
        )
        engine.limits = self.state.step_limits or engine.limits  # a run that ran out of memory before stays careful
        return engine

    @cached_property
    def optimizer(self) -> Optimizer:
        """AdamW with the schedule of the plan, over the shards where the encoder is sharded."""
        plan = self.plan
        # An evaluation before this leaves whole weights in place of the shards, and those never get a gradient.
        reshard(self.encoder)
        schedule = Schedule(plan.batch.learning_rate, self.config.scheduler_type, plan.steps.warmup, plan.steps.total)
        scales = plan.dtype == "float16"
        return Optimizer(self.encoder, self.loss, self.config, schedule, loss_scaling=scales, ranks=self.ranks)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Parts that the run is made of, and how its work is spread; a checkpoint of another run is refused.

        All ranks must ask for it together, as a teacher's weights are hashed.
        """
        way = self.plan.way
        teacher = {} if self.teacher is None else self.teacher.identity(self.ranks, self.autocast_dtype)
        return {
            "strategy": way.strategy,
            "mode": way.mode,
            "sharding_factor": way.sharding_factor,
            "world_size": self.plan.world_size,
            "dtype": self.plan.dtype,
            "model_name": redact(self.config.model_name),
            "num_parameters": sum(parameter.numel() for parameter in self.encoder.parameters()),
            "base": self.encoder.trained.base,
            "data_fingerprint": self.data.fingerprint,
            **({"teacher": teacher} if teacher else {}),
        }

    @cached_property
    def checkpoints(self) -> RunCheckpoints:
        """Saves and restores the run; every checkpoint bears its identity, configuration and plan."""
        stamp = {
            **self.identity,
            "config_hash": config_hash(self.config),
            "config": self.keys,
            "plan": self.plan.to_json(),
        }
        manager = CheckpointManager(self.output.checkpoints, keep_last=self.config.save_total_limit, ranks=self.ranks)
        return RunCheckpoints(manager, self.encoder, self.loss, self.optimizer, stamp, self.words)

    @cached_property
    def guard(self) -> NonFiniteGuard:
        """Keeps NaN and infinity out of the weights; counts the steps skipped before the checkpoint too."""
        return NonFiniteGuard(
            self.config.nonfinite_policy,
            limit=self.config.max_skipped_steps,
            folder=self.output.path if self.ranks.is_first else None,
            skipped=self.state.skipped_steps,
            agree=self.ranks.agreement(self.device),
        )

    @cached_property
    def evaluations(self) -> Evaluations:
        """Evaluations before, during and after training."""
        return Evaluations(
            encode=self.item_encoder(self.stop.poll),
            dev=self.data.dev,
            test=self.data.test,
            further=self.data.further,
            overlaps=self.data.overlaps,
            folder=self.output.path / "evaluation",
            metric=self.config.metric_for_best_model,
            poll=self.stop.poll if self.ranks.is_one else self.stop.poll_alone,
            bm25_language=self.config.bm25_language if self.config.bm25 else None,
            both_directions=measures_both_directions(self.config, self.data),
            ranks=self.ranks,
        )

    def step_batches(self, step: int) -> range:
        """Return the numbers of the batches of an optimizer step; both are counted from 0 over all epochs."""
        per_epoch, accumulated = self.sampler.batches_per_epoch, self.plan.batch.accumulated
        return step_batches(step, batches_per_epoch=per_epoch, accumulated=accumulated)

    def item_encoder(self, poll: Callable[[], None] = lambda: None) -> ItemEncoder:
        """Return the encoder as evaluations and stores use it, on all ranks; `poll` may raise between calls."""
        plan = self.plan
        return ItemEncoder(
            self.encoder,
            replace(self._chunk_budget, rows=plan.eval_rows, tokens=plan.eval_tokens or plan.chunks.tokens),
            self.device,
            self.autocast_dtype,
            poll=poll,
            ranks=self.ranks,
            even_calls=self.sharded is not None,
        )

    def fresh_encoder(self) -> Encoder:
        """Build the encoder as it was before training, whole and on the CPU: trained shards are gathered into it."""
        return build_encoder(self.config, self.plan, self.output, self.data, keep=True)

    @property
    def _chunk_budget(self) -> ChunkBudget:
        chunks = self.plan.chunks
        return ChunkBudget(rows=chunks.rows, tokens=chunks.tokens, bucketed=self.device.type != "cpu")


def _train(run: Run, plan_text: str, stop: StopSignal | None) -> RunResult:
    """Train from the checkpoint, or from step 0, to the last step; then export, judge and report the model."""
    config, ranks, words = run.config, run.ranks, run.words

    # Hard batches are chosen by the starting model, whose weights those of a checkpoint replace next.
    words.doing = "choosing batches"
    if run.hard is not None and config.hard_refresh == "once":
        vectors_NE = run.hard.vectors(run.item_encoder())
        run.sampler = hard_sampler(config, run.data.records, run.plan.batch.total, vectors_NE)
    run.encoder.train()
    if run.checkpoint is not None:
        run.state = run.checkpoints.restore(run.checkpoint)
        # Its files are mapped, and a mapped file keeps its place on the disk, also when its folder is deleted later.
        run.checkpoint = replace(run.checkpoint, tensors={})
        run.checkpoints.manager.set_aside_after(run.state.step)
    if ranks.is_first:
        step = run.state.step
        run.trackers = open_trackers(config.report_to, run.output.path, resume_step=step, config=run.keys)

    with (
        closing(run.trackers),
        StopSignal() if stop is None else nullcontext(stop) as run.stop,
        run.stop.asking(ranks.agreement(run.device)),
    ):
        words.doing = "training"
        track_start(run.trackers, run.state.step, plan=plan_text)
        if run.state.step > 0:
            run.evaluations.require_baseline()  # the untrained model can't be measured any more
            run.clock.go_on(run.output.path / "evaluation")
        with open_batches(run) as batches:
            baseline = TrainingLoop(run, batches).train()

        words.doing = "finishing"
        result = finish_run(run, baseline)
        run.callbacks.notify(EndEvent(result), ranks)
        words.doing = "telling the trackers"  # uploading a large model takes long; no other rank waits for it
        track_end(run, result)
        if run.callbacks.failure is not None:
            raise run.callbacks.failure
        return result


def find_checkpoint(config: Config, runtime: Runtime, output: OutputFolder) -> LoadedCheckpoint | None:
    """Return the checkpoint to continue from, once it turns out to be of this configuration."""
    if config.resume == "never":
        return None

    def check(checkpoint: LoadedCheckpoint) -> None:
        check_shape(checkpoint)
        check_decisions(checkpoint)

    # A broken newest checkpoint is skipped for the one before it; one that is named must be whole.
    manager = CheckpointManager(output.checkpoints, keep_last=config.save_total_limit, ranks=runtime.ranks)
    source: Literal["auto"] | Path = "auto" if config.resume == "auto" else home_path(config.resume)
    checkpoint = manager.load(source, required=[*PARTS, "run", "updater"], check=check)
    if checkpoint is None:
        lost = len(read_rows(output.path / "metrics.jsonl")) if runtime.ranks.is_first else 0
        if lost:
            _log.warning("%s: no checkpoint of the %d steps that it tells of; they are done again", output.path, lost)
        return None
    refuse_other_place(checkpoint.path, output)
    saved = checkpoint.stamp["config"]
    assert isinstance(saved, dict)
    for difference in accepted_differences(checkpoint.path, saved, config):
        _log.info("resume: %s was %r and is %r now", difference.key, difference.old, difference.new)
    versions = package_versions()
    for package, before in checkpoint.packages.items():
        if (now := versions.get(package, before)) != before:
            _log.info(
                "resume: %s was %s and is %s now: numbers agree to rounding and no longer bit for bit",
                package, before, now,
            )  # fmt: skip
    _log.info("resume: continuing from %s", checkpoint.path)
    return checkpoint


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """Return the type of mixed precision; None without."""
    return DTYPES[plan.dtype] if plan.dtype in ("bfloat16", "float16") else None


def _dry_run(run: Run) -> None:
    """Do one step on the first batch and log what it took; weights stay as they are and nothing is written."""
    several_machines = run.ranks.world_size > run.runtime.local_world_size
    shared = next(folder for folder in run.output.path.resolve().parents if folder.is_dir())  # where all can read
    with TemporaryDirectory(prefix=".dry-run-", dir=shared if several_machines else None) as temporary:
        # A teacher is asked about this batch alone, and its answers stay out of the output folder.
        folder = Path(run.ranks.from_first(lambda: temporary))
        records = run.data.records.subset(run.sampler.rows(0))
        source = batch_source(run, ask(run, teacher_of(run, records, folder)))
        started = time.perf_counter()
        run.encoder.train()
        batch = source.batch(0)
        result = run.engine.step(pools_of(batch, run.encoder), batch.structure, assignment=batch.assignment)
        gradients = [parameter.grad for parameter in run.encoder.parameters() if parameter.grad is not None]
        norm = total_norm(gradients, run.ranks).item()
    _log.info(
        "dry run: one step of %d queries in %.2f s, %s, loss %.4f, gradient norm %.3g, peak memory %.2f GiB; "
        "nothing was written",
        batch.structure.num_queries,
        time.perf_counter() - started,
        plural(result.num_chunks, "chunk"),
        result.loss,
        norm,
        peak_memory_bytes(run.device) / (1 << 30),
    )


def _show_plan(run: Run, plan: Plan, facts: Mapping[str, str], *, details: bool) -> str:
    """Log the plan on one screen, with `details` all of it; return all of it."""
    data = {**run.data.read, **run.data.set_facts()}
    facts = {"model": run.config.model_name, **plan.model, **data, **facts}
    _log.info("%s", explain(plan, facts=facts, step_seconds=measured_step_seconds(run.output, plan)))
    full = explain_fully(plan, facts=facts)
    if details:
        _log.info("%s\n%s", full, comparison(run.plan))
    return full


def _write_settings(run: Run, written: Config) -> None:
    """Write the plan, and the configuration as the user wrote it: the launcher's share of it stands in the plan."""
    run.output.write("plan.json", json.dumps(run.plan.to_json(), indent=2) + "\n")
    run.output.write("config.yaml", dump_config(written))


def _write_plan_alone(run: Run, written: Config) -> None:
    """Write the plan into the output folder, unless a run stands there or writes there now."""
    if run.output.holds_run:
        _log.info("plan.json is not written: %s holds a run, whose plan stays", run.output.path)
        return
    try:
        with hold_output(run.output.path):
            _write_settings(run, written)
    except FolderInUseError as error:
        _log.info("plan.json is not written: %s", error)


def _disk_needs(run: Run) -> DiskNeeds:
    """Count the bytes that the run will write."""
    config, steps = run.config, run.plan.steps
    embeddings = mining_bytes(config, run.data, run.encoder.dimension)
    if run.frozen is not None and config.embedding_cache == "auto":
        embeddings += sum(side.num_bytes for side in run.frozen.sides)
    if run.teacher is not None and config.teacher_cache == "auto":
        embeddings += run.teacher.num_bytes
    if run.hard is not None:
        embeddings += hard_batch_bytes(config, run.hard, steps.total / steps.per_epoch)
    return DiskNeeds.of(run.encoder, run.loss, run.plan, config, run.output, embeddings=embeddings)


@contextmanager
def _errors_explained(watchdog: Watchdog) -> Iterator[None]:
    """Add to what ends the run where it stood and what was saved; give advice where memory ran out."""
    try:
        yield
    except PreemptedError as error:
        raise PreemptedError(f"{error}{watchdog.words}") from error
    except (RuntimeError, MemoryError) as error:
        advice = out_of_memory_advice(error)
        if advice is None:
            raise
        raise MachineError(f"{advice}{watchdog.words}") from error
