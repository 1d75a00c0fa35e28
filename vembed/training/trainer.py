"""The loop: train from the present step to the last one, and leave a model, a verdict and a report."""

from __future__ import annotations

import logging
import math
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from vembed.errors import PreemptedError
from vembed.evaluation.report.time_split import PARTS
from vembed.text import show_duration
from vembed.training.callbacks import Callbacks, EvaluationEvent, SaveEvent, StepEvent
from vembed.training.guards import StepFacts
from vembed.training.memory import peak_memory_bytes
from vembed.training.progress import Heartbeat, step_line
from vembed.training.timing import RankMeter, seconds_of_parts
from vembed.training.totals import StepTotals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.config.keys.evaluation import EvaluationKeys
    from vembed.config.keys.output import OutputKeys
    from vembed.distributed.ranks import Ranks
    from vembed.evaluation.result import EvaluationResult
    from vembed.gradcache.engine import GradCacheEngine
    from vembed.plan.plan import Plan
    from vembed.training.batches import Batches
    from vembed.training.evaluations import Evaluations
    from vembed.training.guards import NonFiniteGuard, StopSignal
    from vembed.training.optimizer import Updater
    from vembed.training.progress import RunClock
    from vembed.training.saving import RunCheckpoints
    from vembed.training.state import RunState
    from vembed.training.trackers.base import Tracker

_log = logging.getLogger(__name__)

SEED_STRIDE = 1_000_003
"""Batches of runs with neighbouring seeds must not share a generator seed: a prime beyond any number of batches."""

RANK_STRIDE = (1 << 53) + 2_654_435_761
"""Nor must ranks, or all would draw the same dropout masks: beyond any seed times `SEED_STRIDE`. A CPU's generator
takes the lower 32 bits of a seed alone; the golden section of 2^32 puts the ranks far apart there too."""


def batch_seed(seed: int, number: int, *, rank: int) -> int:
    """Return the seed of the random numbers that a rank draws in a batch.

    Args:
        rank: Which rank; up to 2,000 of them have seeds of their own.
    """
    return seed * SEED_STRIDE + number + rank * RANK_STRIDE


@dataclass(kw_only=True)
class Trainer:
    """Runs the steps of a plan, from where the run stands."""

    state: RunState
    plan: Plan
    source: Batches
    engine: GradCacheEngine
    updater: Updater
    evaluations: Evaluations
    checkpoints: RunCheckpoints
    trackers: Sequence[Tracker]
    guard: NonFiniteGuard
    stop: StopSignal
    ranks: Ranks
    output_keys: OutputKeys  # when it logs and saves
    evaluation_keys: EvaluationKeys  # what chooses the best checkpoint, and when to stop early
    seed: int
    clock: RunClock
    callbacks: Callbacks = field(default_factory=Callbacks)

    def __post_init__(self) -> None:
        self._heartbeat = Heartbeat(self._doing)
        self._batch_began, self._batches_left = time.monotonic(), 0
        self.updater.own_rate = self.state.learning_rate
        self._meter = RankMeter(self.ranks, self.source.device)
        self._last_save = time.monotonic()
        self._last_saved: int | None = None  # step, whatever became of its save

    def run(self) -> EvaluationResult:
        """Train from the present step to the last one.

        Returns:
            The result of the untrained model on the verdict's set.

        Raises:
            PreemptedError: A signal came; a checkpoint of the present step is saved.
            NonFiniteError: The numbers went bad, and the policy is to stop.
            Exception: What a callback has raised; a checkpoint of the present step is saved.
        """
        state = self.state
        try:
            with self.clock.evaluating(comes_at_end=True):
                baseline = self.evaluations.baseline()
            if self._evaluate_if_due():  # the one that the run was stopped in
                self._save(best=True)
            self._raise_failure()
            with self._heartbeat.watching():
                self._run_steps()
        except PreemptedError:
            self._save(best=False)
            raise
        if self._last_saved != state.step:
            self._save(best=False, is_last=True)
        self._raise_failure()
        return baseline

    def _ask(self, event: StepEvent | EvaluationEvent) -> None:
        """Tell the callbacks, and keep what they decide in the state, which every checkpoint has."""
        decision = self.callbacks.ask(event, self.ranks)
        if decision.stop is not None:
            self.state.stopped = decision.stop
        if decision.learning_rate is not None:
            self.state.learning_rate = self.updater.own_rate = decision.learning_rate

    def _raise_failure(self) -> None:
        """End the run where a callback failed, with a checkpoint of the present step."""
        failure = self.callbacks.failure
        if failure is None:
            return
        if self._last_saved != self.state.step:
            self._save(best=False)
        failure.add_note(
            f"raised by a callback; the run is saved at step {self.state.step}, and the same call continues"
        )
        raise failure

    def _is_over(self) -> bool:
        """Return whether a callback, or a dev metric that stands still, has ended the training."""
        if self.state.stopped is None:
            return self._stops_early()
        _log.info("stopped at step %d by a callback: %s", self.state.step, self.state.stopped)
        return True

    def _run_steps(self) -> None:
        for step in self._steps():
            with self._heartbeat.step(step + 1):
                measured = self._train_step(step)
            self._log(measured)
            self._ask(
                StepEvent(self.state.step, self.plan.steps.total, measured["loss"], measured["learning_rate"], measured)
            )
            is_best = self._evaluate_if_due()
            if self._saves_at(self.state.step) or is_best:
                self._save(best=is_best, is_last=self.state.step == self.plan.steps.total)
            self._raise_failure()
            self.stop.poll()
            if self._is_over():
                break

    def _steps(self) -> tqdm[int]:
        """Return the steps still to do, counted from 0, with a progress bar on a terminal."""
        first = self.state.step if not self._is_over() else self.plan.steps.total
        steps = range(first, self.plan.steps.total)
        total = self.plan.steps.total
        hidden = not (self.ranks.is_first and sys.stderr.isatty())
        return tqdm(steps, initial=first, total=total, unit="step", disable=hidden)

    def _train_step(self, step: int) -> Mapping[str, float]:
        """Do one step, tokenizing included, whatever becomes of its gradients, and return what it measured."""
        started = time.perf_counter()
        state = self.state
        totals = self._accumulate(step)
        with self.engine.stopwatch.part("update"):
            grad_norm = self.updater.gradient_norm()
        learning_rate = self.updater.learning_rate(step)
        temperature = self.engine.loss.temperature
        facts = StepFacts(step + 1, totals.loss, grad_norm, totals.record_ids, temperature, self.updater.module_norms)
        if math.isfinite(totals.loss) and self.updater.overflowed(grad_norm):
            _log.info("step %d: float16 overflow at scale %g; skipped", step + 1, self.updater.gradient_scale)
            self.updater.discard()
        elif self.guard.accepts(facts):
            with self.engine.stopwatch.part("update"):
                self.updater.update(step)
        else:
            self.updater.discard()
        state.step = step + 1
        state.skipped_steps = self.guard.skipped
        state.num_truncated += totals.num_truncated
        measured = self._measured(totals, seconds=time.perf_counter() - started)
        own = {} if temperature is None else {"temperature": temperature}
        return {**measured, "learning_rate": learning_rate, "grad_norm": grad_norm, **own}

    def _accumulate(self, step: int) -> StepTotals:
        """Add up the gradients of the batches of a step, each with negatives of its own; their mean is left."""
        state = self.state
        count = self.plan.batch.accumulated
        totals = StepTotals()
        for number in range(step * count, (step + 1) * count):
            asked = time.perf_counter()
            batch = self.source.batch(number)
            self._batch_began, self._batches_left = time.monotonic(), (step + 1) * count - number - 1
            totals.data_seconds += time.perf_counter() - asked
            torch.manual_seed(batch_seed(self.seed, number, rank=self.ranks.rank))
            scale = self.updater.gradient_scale / count
            result = self.engine.step(
                batch.pools,
                batch.structure,
                assignment=batch.assignment,
                gradient_scale=scale,
                continues=number > step * count,
            )
            if result.num_repairs:
                state.step_limits = self.engine.limits
            totals.add(batch, result)
        totals.add_ranks(self.ranks, self.source.device)
        return totals

    def _measured(self, totals: StepTotals, *, seconds: float) -> Mapping[str, float]:
        """Return the row of metrics.jsonl."""
        parts = self.engine.stopwatch.read()
        times = seconds_of_parts(parts, step_seconds=seconds, data_seconds=totals.data_seconds, alone=self.ranks.is_one)
        self._meter.add(times, tokens=totals.rank_tokens, loss=totals.rank_loss)
        return {
            "epoch": self.state.step / self.plan.steps.per_epoch,
            "loss": totals.loss,
            **totals.loss_by_source,
            "samples_per_second": totals.num_queries / seconds,
            "tokens_per_second": totals.tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(self.source.device),
            "padding_ratio": totals.padding_ratio,
            "replay_drift": totals.replay_drift,
            "num_chunks": totals.num_chunks,
            "oom_repairs": totals.num_repairs,
            **times,
            **({} if totals.num_masked is None else {"masked_negatives": totals.num_masked}),
        }

    def _log(self, metrics: Mapping[str, float]) -> None:
        """Send the numbers of the present step to the trackers and, now and then, to the log."""
        step = self.state.step
        self.clock.add_step(metrics["step_seconds"])
        is_shown = step % self.output_keys.logging_steps == 0 or step in (1, self.plan.steps.total)
        reading = self._meter.read() if is_shown else None
        for tracker in self.trackers:
            tracker.log(step, metrics if reading is None else {**metrics, **reading.summary})
            if reading is not None:
                tracker.log_ranks(step, reading.by_rank)
        if is_shown:
            left = self.clock.seconds_left(self.plan.steps, step)
            _log.info("%s", step_line(metrics, self.plan.steps, step, seconds_left=left))
            self._heartbeat.spoken()

    def _doing(self) -> str:
        """Return what a step that takes long is at, and how long it will take yet where that can be told."""
        call, part = self.engine.passes.running, self.engine.stopwatch.running
        if call is None:
            return PARTS["data_seconds" if part is None else f"{part}_seconds"][0]
        said = f"{call.doing} chunk {call.number:,} of {call.total:,}"
        if call.share == 0.0:
            return said
        batch = (time.monotonic() - self._batch_began) / call.share
        return f"{said}, about {show_duration(batch * (1 - call.share + self._batches_left))} left in this step"

    def _evaluate_if_due(self) -> bool:
        """Evaluate on the dev set when the plan says so and it isn't done; return whether it was the best so far."""
        state, every = self.state, self.plan.steps.eval_every
        if every is None or state.evaluated_step == state.step:
            return False
        if state.step % every != 0 and state.step != self.plan.steps.total:
            return False
        with self.clock.evaluating(comes_again=True):
            result = self.evaluations.at_step(state.step)
        self._heartbeat.spoken()
        for tracker in self.trackers:
            tracker.log_evaluation(state.step, result.metrics)
        is_best = state.record(result.metrics, result.deciding(self.evaluation_keys.metric_for_best_model))
        self._ask(EvaluationEvent(state.step, result.metrics, is_best, tuple(state.evaluations)))
        return is_best

    def _stops_early(self) -> bool:
        """Return whether the dev metric has stood still for as long as the user would wait."""
        patience = self.evaluation_keys.early_stopping_patience
        if patience is None or self.state.stale_evaluations < patience:
            return False
        _log.info(
            "stopped early: %d evaluations without a better dev metric than %.4f at step %d",
            patience,
            self.state.best_metric,
            self.state.best_step,
        )
        return True

    def _saves_at(self, step: int) -> bool:
        every, minutes = self.output_keys.save_steps, self.output_keys.save_minutes
        if every is not None and step % every == 0:
            return True
        if self.output_keys.save_strategy == "epoch" and step % self.plan.steps.per_epoch == 0:
            return True
        if minutes is None:
            return False
        due = time.monotonic() - self._last_save >= 60 * minutes  # the clocks of the ranks may differ
        return self.ranks.any(due, self.source.device)

    def _save(self, *, best: bool, is_last: bool = False) -> None:
        folder = self.checkpoints.save(self.state, best=best, is_last=is_last)
        if folder is not None:  # of all ranks or of none
            self.callbacks.ask(SaveEvent(self.state.step, folder), self.ranks)
        self._last_save, self._last_saved = time.monotonic(), self.state.step
