"""The loop: one optimizer step after the other, and between them evaluations, checkpoints, callbacks and signals.

`train` evaluates the untrained model, then repeats: a step, its log line, callbacks, evaluation, checkpoint, signals.
`train_step` counts steps from 0; `state.step` counts the steps done, as logs and checkpoints do.

A step (`TrainingLoop.train_step`) does, on all ranks alike:

1. Take a batch. It follows from the seed and the batch's number alone; workers tokenize it ahead.
2. Add its gradients to `.grad`: pass 1 over its chunks, the loss over all ranks, pass 2, the sum over the ranks
   (gradcache/engine.py). With gradient accumulation 1 and 2 repeat: each batch has negatives of its own and counts by
   its rows, so that loss and gradient are the mean over the rows of the step. No step goes beyond its epoch.
3. Clip the gradients by their global norm.
4. Reject them, on all ranks or on none, where the loss or the norm isn't finite.
5. Step the optimizer.
6. Count the step, and return its row of metrics.jsonl.

Invariant: whatever changes the course of a run (a signal, a bad number, the clock, a callback) is agreed on by all
ranks at the same point of the loop. A rank that decided alone would leave the others waiting in a collective.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from vembed.errors import PreemptedError
from vembed.evaluation.diagnosis import EARLY_STEPS, diagnose_start, finding_lines
from vembed.evaluation.step_rows import PART_NAMES
from vembed.text import show_duration
from vembed.training.batches import pools_of
from vembed.training.callbacks import EvaluationEvent, SaveEvent, StepEvent
from vembed.training.progress import LABEL_COLUMNS, Heartbeat, step_line
from vembed.training.step_totals import StepTotals
from vembed.training.timing import RankMeter, peak_memory_bytes, seconds_of_parts
from vembed.training.trackers import read_rows, tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.evaluation.results import EvaluationResult
    from vembed.training.batches import Batches
    from vembed.training.run import Run

_log = logging.getLogger(__name__)


class TrainingLoop:
    """Trains a run from its present step to the last one of its plan."""

    def __init__(self, run: Run, batches: Batches) -> None:
        self.run, self.batches = run, batches
        self.state = run.state
        self._meter = RankMeter(run.ranks, run.device)  # this rank's times between two log lines, to compare ranks
        self._heartbeat = Heartbeat(self._describe_progress)  # says where a step is that takes long
        # For the heartbeat's thread: when the present batch began, and how many batches of its step follow.
        self._batch_progress = (time.monotonic(), 0)
        self._waits_for_data = False  # for the same thread
        # Of the last attempt, even one that the disk refused:
        self._last_save_time = time.monotonic()
        self._last_save_step: int | None = None
        # The latest step whose checkpoint is on disk: callbacks hear of each once, also across a preemption or resume.
        self._saved_step = None if run.checkpoint is None else run.state.step

    def train(self) -> EvaluationResult:
        """Train, and return the result of the untrained model, which the verdict compares the kept model with.

        It is that on the test set, or on the dev set where there is no test set.

        Raises:
            PreemptedError: A signal came; a checkpoint of the present step is saved, unless the disk refuses it.
            NonFiniteError: Loss or gradients went bad, and the policy is to stop or its limit of skipped steps is used
                up; or weights did, which are never saved.
            ReplayDriftError: The two passes of a step computed different embeddings.
            DataError: A picture can't be read any more.
            MachineError: Out of memory with nothing left to try, the third save in a row failed, or the disk refuses
                metrics.jsonl.
            Exception: A callback raised it (on other ranks a MachineError that names the callback); the present step
                is saved as after a signal.
        """
        run, state, total = self.run, self.state, self.run.plan.steps.total
        try:
            with run.clock.evaluating(comes_at_end=True):
                baseline = run.evaluations.baseline()
            # Due at step 0 of a fresh run, whose model is never the best; also where a resumed run was stopped in the
            # middle of an evaluation, which is then done again.
            if self._evaluate_if_due():
                self._save(best=True)
            self._raise_callback_failure()

            stop_reason = self._stop_reason()  # a resumed run may have been stopped before
            shows_bar = run.ranks.is_first and sys.stderr.isatty()
            bar = tqdm(initial=state.step, total=total, unit="step", disable=not shows_bar)
            with bar, self._heartbeat.watching():
                while state.step < total and not stop_reason:
                    with self._heartbeat.step(state.step + 1):
                        row = self.train_step(state.step)
                    run.clock.add_step(row["step_seconds"])
                    self.log(row)
                    # In this order: callbacks may set the learning rate that the checkpoint keeps; the evaluation tells
                    # whether it is the best; a signal ends the run when all of the step is safe.
                    self._notify(StepEvent(state.step, total, row["loss"], row["learning_rate"], row))
                    is_best = self._evaluate_if_due()
                    stop_reason = self._stop_reason()
                    if self._save_is_due() or is_best:
                        self._save(best=is_best, is_last=bool(stop_reason) or state.step == total)
                    self._raise_callback_failure()
                    run.stop.poll()  # raises PreemptedError on all ranks once any of them got a signal
                    bar.update()
            if stop_reason and state.step < total:
                _log.info("%s", stop_reason)
        except PreemptedError:
            # A whole checkpoint of this step is left as it is; one that the disk refused is tried again. It is still
            # the best one where its evaluation said so; the untrained model never is.
            self._save(best=state.best_metric is not None and state.best_step == state.step)
            # The signal decides how the run ends; an error of a callback, perhaps in this very save, must be told.
            if run.callbacks.failure is not None and run.ranks.is_first:
                _log.warning("a callback failed before the run stopped", exc_info=run.callbacks.failure)
            raise
        if self._last_save_step != state.step:  # whatever save_strategy says, the last step has a checkpoint
            self._save(best=False, is_last=True)
        self._raise_callback_failure()
        return baseline

    def train_step(self, step: int) -> dict[str, float]:
        """Do one optimizer step, counted from 0, and return its row of metrics.jsonl."""
        run, state = self.run, self.state
        engine, optimizer = run.engine, run.optimizer
        batch_numbers = run.step_batches(step)  # one, or several with gradient accumulation
        started, totals = time.monotonic(), StepTotals()

        for number in batch_numbers:
            # 1. Data. Near zero seconds while the workers keep up.
            waiting_since, self._waits_for_data = time.monotonic(), True
            batch = self.batches.batch(number)
            pools = pools_of(batch, run.encoder)
            self._waits_for_data = False
            totals.data_seconds += time.monotonic() - waiting_since

            # 2. Both passes, loss, and the sum over ranks: the gradients of this batch, of all ranks, go to `.grad`.
            self._batch_progress = (time.monotonic(), batch_numbers[-1] - number)
            # Dropout depends on (seed, batch, rank) alone, so that a resumed run draws the same masks.
            torch.manual_seed(batch_seed(run.config.seed, number, rank=run.ranks.rank))
            # A batch counts by its share of the step's rows, so that `.grad` ends as the gradient of their mean loss.
            # In float16 it is multiplied by the loss scale too, which `clip_gradients` divides out.
            gradient_scale = optimizer.scale.value * batch.step_share
            result = engine.step(
                pools,
                batch.structure,
                assignment=batch.assignment,
                gradient_scale=gradient_scale,
                continues=number > batch_numbers[0],  # the same step: running out of memory counts once in it
            )
            if result.num_repairs:  # memory ran out: a resumed run must begin with these limits
                state.step_limits = engine.limits
            totals.add(batch, result)
        totals.add_ranks(run.ranks, run.device)  # costs little here: the engine has just waited for the device

        # 3. Clip. The norm is that of all ranks, before clipping; reading it waits for the device.
        with engine.stopwatch.part("update"):
            grad_norm = optimizer.clip_gradients()

        # 4. Accept or reject, on all ranks alike: each has the loss and the norm of the whole step, equal up to
        # rounding, and the guard asks all ranks. A float16 overflow is no fault of the run: a smaller scale cures it.
        # It needs no asking, as the norm is of gradients already summed over the ranks: infinite on one, it is on all.
        temperature = engine.loss.temperature  # before the update: the one that this loss was computed with
        if math.isfinite(totals.loss) and optimizer.scale.overflowed(grad_norm):
            _log.info("step %d: float16 overflow at scale %g; skipped", step + 1, optimizer.scale.value)
            accepted = False
        else:
            accepted = run.guard.accepts(
                step + 1,
                loss=totals.loss,
                grad_norm=grad_norm,
                rows=lambda: run.data.records.locations(totals.record_ids),
                temperature=temperature,
                module_norms=optimizer.module_norms,  # computed only for the report of a bad step
            )

        # 5. Step. Rejected gradients are dropped; the weights stay as they were.
        # The rate that a callback has set stands in for the schedule's, in a resumed run too.
        learning_rate = optimizer.schedule.learning_rate(step) if state.learning_rate is None else state.learning_rate
        if accepted:
            with engine.stopwatch.part("update"):
                optimizer.step(learning_rate)
        optimizer.zero_grad()
        # Every norm that isn't finite counts here, also one at the least scale, which the guard has judged.
        optimizer.scale.update(overflowed=not math.isfinite(grad_norm))

        # 6. Count.
        state.step = step + 1
        state.skipped_steps = run.guard.skipped
        state.num_truncated += totals.num_truncated
        epoch = batch_numbers.stop / run.sampler.batches_per_epoch
        row = self._measure(totals, epoch, seconds=time.monotonic() - started)
        row |= {"learning_rate": learning_rate, "grad_norm": grad_norm}
        if temperature is not None:
            row["temperature"] = temperature
        return row

    def _measure(self, totals: StepTotals, epoch: float, *, seconds: float) -> dict[str, float]:
        """Return what the row of a step says of loss, speed and memory; the stopwatch begins anew.

        On CUDA, a part that the device hasn't finished yet is counted in the next row.
        """
        run = self.run
        parts = run.engine.stopwatch.read()
        times = seconds_of_parts(parts, step_seconds=seconds, data_seconds=totals.data_seconds, alone=run.ranks.is_one)
        self._meter.add(times, tokens=totals.rank_tokens, loss=totals.rank_loss)
        row = {
            "epoch": epoch,
            "loss": totals.loss,
            **totals.loss_by_source,
            "samples_per_second": sum(totals.num_queries) / seconds,
            "tokens_per_second": totals.tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(run.device),
            "padding_ratio": totals.padded_tokens / max(1, totals.tokens),  # 1.0 without padding
            "replay_drift": totals.replay_drift,
            "num_chunks": totals.num_chunks,
            "oom_repairs": totals.num_repairs,
            **times,
        }
        if totals.num_masked is not None:
            row["masked_negatives"] = totals.num_masked
        return row

    def log(self, row: Mapping[str, float]) -> None:
        """Send the row of a step to the trackers, and every `logging_steps` steps a line to the log.

        For that line the ranks exchange their numbers: all of them log at the same steps.
        """
        run, done, steps = self.run, self.state.step, self.run.plan.steps
        if done % run.config.logging_steps == 0 or done in (1, steps.total):
            by_rank, spread = self._meter.read()  # a collective: once per line, not once per step
            tell(run.trackers, "log", done, {**row, **spread})
            tell(run.trackers, "log_ranks", done, by_rank)
            _log.info("%s", step_line(row, steps, done, seconds_left=run.clock.seconds_left(steps, done)))
            self._heartbeat.reset()
        else:
            tell(run.trackers, "log", done, row)
        if done == EARLY_STEPS < steps.total and run.ranks.is_first:
            self._warn_of_bad_start()

    def _warn_of_bad_start(self) -> None:
        """Warn, after the first steps, of a run that can't learn anything."""
        # From the file, which also has the rows of earlier processes of this run.
        finding = diagnose_start(read_rows(self.run.output.path / "metrics.jsonl"))
        if finding is not None:
            for label, text in finding_lines(finding):
                _log.warning("%-*s  %s", LABEL_COLUMNS, label, text)

    def _evaluate_if_due(self) -> bool:
        """Evaluate on the dev set if that is due and isn't done yet; return whether the model is the best.

        It is due every `eval_every` steps and after the last one: without it the last model could never be the best.
        """
        run, state, every = self.run, self.state, self.run.plan.steps.eval_every
        is_last = state.step == run.plan.steps.total or state.stopped is not None  # a callback may end the run earlier
        is_due = every is not None and (state.step % every == 0 or is_last)
        if not is_due or state.evaluated_step == state.step:
            return False
        with run.clock.evaluating(comes_again=True):
            result = run.evaluations.at_step(state.step)
        self._heartbeat.reset()
        tell(run.trackers, "log_evaluation", state.step, result.metrics)
        is_best = state.record(result.metrics, result.deciding(run.config.metric_for_best_model))
        self._notify(EvaluationEvent(state.step, result.metrics, is_best, tuple(state.evaluations)))
        return is_best

    def _save_is_due(self) -> bool:
        """Return whether a checkpoint is due at the present step, by steps, epochs or the clock."""
        config, done = self.run.config, self.state.step
        if config.save_steps is not None and done % config.save_steps == 0:
            return True
        if config.save_strategy == "epoch" and done % self.run.plan.steps.per_epoch == 0:
            return True
        if config.save_minutes is None:
            return False
        is_due = time.monotonic() - self._last_save_time >= 60 * config.save_minutes
        return self.run.ranks.any(is_due, self.run.device)  # the clocks of the ranks may differ

    def _save(self, *, best: bool, is_last: bool = False) -> None:
        """Save a checkpoint of the present step, unless a whole one is there; callbacks hear of a new one.

        Where the disk refuses it, training continues.

        Args:
            best: Whether no trained model so far has a better dev metric.
            is_last: Whether training ends here: the save leaves room for the model, and a refusal is only warned of.

        Raises:
            NonFiniteError: The weights hold NaN or infinity.
            MachineError: The disk refused for the third time in a row, and it isn't the last save.
        """
        folder = self.run.checkpoints.save(self.state, best=best, is_last=is_last)
        if folder is not None and self._saved_step != self.state.step:  # the same on all ranks
            self._saved_step = self.state.step
            self.run.callbacks.notify(SaveEvent(self.state.step, folder), self.run.ranks)
        self._last_save_time, self._last_save_step = time.monotonic(), self.state.step

    def _notify(self, event: StepEvent | EvaluationEvent) -> None:
        """Tell the callbacks of an event, and keep their decisions in the state, which every checkpoint holds."""
        decision = self.run.callbacks.notify(event, self.run.ranks)
        if decision.stop is not None:
            self.state.stopped = decision.stop
        if decision.learning_rate is not None:
            self.state.learning_rate = decision.learning_rate

    def _raise_callback_failure(self) -> None:
        """End the run where a callback failed, with a checkpoint of the present step if the disk takes it."""
        failure, step = self.run.callbacks.failure, self.state.step
        if failure is None:
            return
        if self._last_save_step != step:
            self._save(best=False)
        if self._saved_step == step:
            failure.add_note(f"raised by a callback; the run is saved at step {step}, and the same call continues")
        else:
            failure.add_note(
                f"raised by a callback; the disk refused the checkpoint of step {step}, and the same call continues "
                f"from the checkpoint before it, if there is one"
            )
        raise failure

    def _stop_reason(self) -> str:
        """Return why training ends before its last step: a callback, or a dev metric that stands still. Else ""."""
        state, patience = self.state, self.run.config.early_stopping_patience
        if state.stopped is not None:
            return f"stopped at step {state.step} by a callback: {state.stopped}"
        if patience is None or state.stale_evaluations < patience:
            return ""
        return (
            f"stopped early: {patience} evaluations without a better dev metric than {state.best_metric:.4f} at step "
            f"{state.best_step}"
        )

    def _describe_progress(self) -> str:
        """Return where a slow step stands, e.g. "encoding chunk 3 of 40, about 2:10 left in this step".

        Runs on the heartbeat's thread: it reads only what the loop replaces whole, and takes no lock.
        """
        call, part = self.run.engine.passes.running, self.run.engine.stopwatch.running
        if self._waits_for_data:
            return PART_NAMES["data_seconds"]
        if call is None:  # outside the encoder; without a part, the program most likely waits for the device to finish
            return "waiting for the device" if part is None else PART_NAMES[f"{part}_seconds"]
        text = f"{call.doing} chunk {call.number:,} of {call.total:,}"
        if call.share == 0.0:
            return text
        batch_started, batches_left = self._batch_progress
        batch_seconds = (time.monotonic() - batch_started) / call.share
        seconds_left = batch_seconds * (1 - call.share + batches_left)
        return f"{text}, about {show_duration(seconds_left)} left in this step"


# Random numbers of a batch --------------------------------------------------------------------------------------------

SEED_STRIDE = 1_000_003
"""Distance between the seeds of the first batches of two runs whose seeds are neighbours. A run of more batches than
this draws masks that the next seed's run draws too, which does no harm."""

RANK_STRIDE = (1 << 53) + 2_654_435_761
"""Keeps ranks apart: 2^53 is above any seed times `SEED_STRIDE`, and 2,000 ranks fit into the 64 bits of a seed. A CPU
generator takes only the lower 32 bits; there the second summand, a prime next to 2^32 divided by the golden ratio,
keeps them apart."""


def batch_seed(seed: int, number: int, *, rank: int) -> int:
    """Return the seed of the random numbers that a rank draws in a batch.

    Args:
        seed: Of the run, below 2^32.
        number: Of the batch, counted from 0 over all epochs.
        rank: Below 2,000; seeds of different ranks differ.
    """
    return seed * SEED_STRIDE + number + rank * RANK_STRIDE
