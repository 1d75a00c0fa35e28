"""The loop: one optimizer step after the other, and between them evaluations, checkpoints, callbacks and signals.

A step (`Trainer.train_step`) does, on all ranks alike:

1. Take a batch. It follows from the seed and the batch's number alone; workers tokenize it ahead.
2. Add its gradients to `.grad`: pass 1 over its chunks, the loss over all ranks, pass 2, the sum over the ranks
   (gradcache/engine.py). With gradient accumulation 1 and 2 repeat: each batch has negatives of its own and counts by
   its rows, so that loss and gradient are the mean over the rows of the step. No step goes beyond its epoch.
3. Clip the gradients by their global norm.
4. Reject them, on all ranks or on none, where the loss or the norm isn't finite.
5. Step the optimizer.
6. Return the row of metrics.jsonl.

Invariant: whatever changes the course of a run (a signal, a bad number, the clock, a callback) is agreed on by all
ranks at the same point of the loop. A rank that decided alone would leave the others waiting in a collective.
"""

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
from vembed.evaluation.diagnosis import EARLY_STEPS, diagnose_start, finding_lines
from vembed.evaluation.report.curves import SOURCE_LOSS
from vembed.evaluation.report.speed import PARTS
from vembed.text import show_duration
from vembed.training.callbacks import EvaluationEvent, SaveEvent, StepEvent
from vembed.training.progress import LABEL_COLUMNS, Heartbeat, step_line
from vembed.training.timing import RankMeter, peak_memory_bytes, seconds_of_parts
from vembed.training.trackers import read_rows, tell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.distributed.ranks import Ranks
    from vembed.evaluation.results import EvaluationResult
    from vembed.gradcache.engine import StepResult
    from vembed.training.batches import Batches, PreparedBatch
    from vembed.training.run import Run

_log = logging.getLogger(__name__)


class Trainer:
    """Trains a run from its present step to the last one of its plan."""

    def __init__(self, run: Run, batches: Batches) -> None:
        self.run, self.batches = run, batches
        self.state = run.state
        run.optimizer.rate_override = run.state.learning_rate
        self._meter = RankMeter(run.ranks, run.device)
        self._heartbeat = Heartbeat(self._describe_progress)
        self._batch_started, self._batches_left = time.monotonic(), 0
        self._last_save = time.monotonic()
        self._last_saved_step: int | None = None  # whatever became of the save

    def train(self) -> EvaluationResult:
        """Train, and return the result of the untrained model on the verdict's set.

        Raises:
            PreemptedError: A signal came; a checkpoint of the present step is saved.
            NonFiniteError: The numbers went bad, and the policy is to stop.
            Exception: A callback raised it; a checkpoint of the present step is saved.
        """
        run, state, total = self.run, self.state, self.run.plan.steps.total
        try:
            with run.clock.evaluating(comes_at_end=True):
                baseline = run.evaluations.baseline()
            # A fresh run evaluates its step 0, which is never the best; a resumed one may have been stopped in this
            # evaluation.
            if self.evaluate_if_due():
                self.save(best=True)
            self.raise_callback_failure()

            ends_early = self.why_over()
            if ends_early:
                _log.info("%s", ends_early)
            first_step = total if ends_early else state.step
            hides_bar = not (run.ranks.is_first and sys.stderr.isatty())
            steps = tqdm(range(first_step, total), initial=first_step, total=total, unit="step", disable=hides_bar)
            with self._heartbeat.watching():
                for step in steps:
                    with self._heartbeat.step(step + 1):
                        row = self.train_step(step)
                    run.clock.add_step(row["step_seconds"])
                    self.log(row)
                    # In this order: callbacks may set the learning rate that the checkpoint keeps; the evaluation tells
                    # whether it is the best; a signal ends the run when all of the step is safe.
                    self.notify(StepEvent(state.step, total, row["loss"], row["learning_rate"], row))
                    is_best = self.evaluate_if_due()
                    ends_early = self.why_over()
                    if self.save_is_due() or is_best:
                        self.save(best=is_best, is_last=bool(ends_early) or state.step == total)
                    self.raise_callback_failure()
                    run.stop.poll()  # raises PreemptedError on all ranks once any of them got a signal
                    if ends_early and state.step < total:
                        _log.info("%s", ends_early)
                        break
        except PreemptedError:
            self.save(best=False)
            raise
        if self._last_saved_step != state.step:
            self.save(best=False, is_last=True)
        self.raise_callback_failure()
        return baseline

    def train_step(self, step: int) -> dict[str, float]:
        """Do one optimizer step, counted from 0, and return its row of metrics.jsonl."""
        run, state = self.run, self.state
        engine, optimizer = run.engine, run.optimizer
        batch_numbers = run.step_batches(step)  # one, or several with gradient accumulation
        started, totals = time.perf_counter(), StepTotals()

        for number in batch_numbers:
            # 1. Data. Near zero seconds while the workers keep up.
            waiting_since = time.perf_counter()
            batch = self.batches.batch(number)
            totals.data_seconds += time.perf_counter() - waiting_since

            # 2. Both passes, loss, and the sum over ranks: afterwards `.grad` holds the gradients of the whole batch.
            # Dropout depends on (seed, batch, rank) alone, so that a resumed run draws the same masks.
            self._batch_started, self._batches_left = time.monotonic(), batch_numbers[-1] - number
            torch.manual_seed(batch_seed(run.config.seed, number, rank=run.ranks.rank))
            result = engine.step(
                batch.pools,
                batch.structure,
                assignment=batch.assignment,
                # float16's loss scale, times this batch's share of the step's rows: the gradients of all batches add up
                # to the mean over rows.
                gradient_scale=optimizer.scale.value * batch.featured.step_share,
                continues=number > batch_numbers[0],
            )
            if result.num_repairs:  # memory ran out: a resumed run must cut its chunks alike
                state.step_limits = engine.limits
            totals.add(batch, result)
        totals.add_ranks(run.ranks, run.device)  # costs little here: the engine has just waited for the device

        # 3. Clip. The norm is that of all ranks, before clipping; reading it waits for the device.
        with engine.stopwatch.part("update"):
            grad_norm = optimizer.clip_gradients()

        # 4. Accept or reject, on all ranks alike. A float16 overflow is no fault of the run: a smaller scale cures it.
        learning_rate = optimizer.learning_rate(step)
        temperature = engine.loss.temperature  # before the update: the one that this loss was computed with
        if math.isfinite(totals.loss) and optimizer.scale.overflowed(grad_norm):
            _log.info("step %d: float16 overflow at scale %g; skipped", step + 1, optimizer.scale.value)
            accepted = False
        else:
            accepted = run.guard.accepts(
                step + 1,
                loss=totals.loss,
                grad_norm=grad_norm,
                record_ids=totals.record_ids,
                temperature=temperature,
                module_norms=optimizer.module_norms,  # computed only for the report of a bad step
            )

        # 5. Step. Rejected gradients are dropped; the weights stay as they were.
        if accepted:
            with engine.stopwatch.part("update"):
                optimizer.step(learning_rate)
        optimizer.zero_grad()
        optimizer.scale.update(overflowed=not math.isfinite(grad_norm))

        # 6. Count.
        state.step = step + 1
        state.skipped_steps = run.guard.skipped
        state.num_truncated += totals.truncated
        epoch = batch_numbers.stop / run.sampler.batches_per_epoch
        row = self._measure(totals, epoch, seconds=time.perf_counter() - started)
        row |= {"learning_rate": learning_rate, "grad_norm": grad_norm}
        return row if temperature is None else {**row, "temperature": temperature}

    def _measure(self, totals: StepTotals, epoch: float, *, seconds: float) -> dict[str, float]:
        """Read and reset the meters of a step, and return its row of metrics.jsonl.

        On CUDA, a part that the device hasn't finished yet is counted in the next row.
        """
        run = self.run
        parts = run.engine.stopwatch.read()
        times = seconds_of_parts(parts, step_seconds=seconds, data_seconds=totals.data_seconds, alone=run.ranks.is_one)
        self._meter.add(times, tokens=totals.rank_tokens, loss=_mean(totals.rank_losses, totals.queries))
        return {
            "epoch": epoch,
            "loss": totals.loss,
            **totals.loss_by_source,
            "samples_per_second": sum(totals.queries) / seconds,
            "tokens_per_second": totals.tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(run.device),
            "padding_ratio": totals.padded_tokens / max(1, totals.tokens),
            "replay_drift": totals.drift,
            "num_chunks": totals.chunks,
            "oom_repairs": totals.repairs,
            **times,
            **({} if totals.masked is None else {"masked_negatives": totals.masked}),
        }

    def log(self, row: Mapping[str, float]) -> None:
        """Send the row of a step to the trackers, and every `logging_steps` steps a line to the log.

        For that line the ranks exchange their numbers: all of them log at the same steps.
        """
        run, step, steps = self.run, self.state.step, self.run.plan.steps
        is_shown = step % run.config.logging_steps == 0 or step in (1, steps.total)
        # Reading is a collective: once per line, not once per step.
        by_rank, summary = self._meter.read() if is_shown else (None, {})
        tell(run.trackers, "log", step, {**row, **summary})
        if by_rank is not None:
            tell(run.trackers, "log_ranks", step, by_rank)
        if is_shown:
            _log.info("%s", step_line(row, steps, step, seconds_left=run.clock.seconds_left(steps, step)))
            self._heartbeat.reset()
        if step == EARLY_STEPS < steps.total and run.ranks.is_first:
            finding = diagnose_start(read_rows(run.output.path / "metrics.jsonl"))
            for label, text in () if finding is None else finding_lines(finding):
                _log.warning("%-*s  %s", LABEL_COLUMNS, label, text)

    def evaluate_if_due(self) -> bool:
        """Evaluate on the dev set if the plan says so and it isn't done yet; return whether the model is the best."""
        run, state, every = self.run, self.state, self.run.plan.steps.eval_every
        is_due = every is not None and (state.step % every == 0 or state.step == run.plan.steps.total)
        if not is_due or state.evaluated_step == state.step:
            return False
        with run.clock.evaluating(comes_again=True):
            result = run.evaluations.at_step(state.step)
        self._heartbeat.reset()
        tell(run.trackers, "log_evaluation", state.step, result.metrics)
        is_best = state.record(result.metrics, result.deciding(run.config.metric_for_best_model))
        self.notify(EvaluationEvent(state.step, result.metrics, is_best, tuple(state.evaluations)))
        return is_best

    def save_is_due(self) -> bool:
        """Return whether a checkpoint is due at the present step, by steps, epochs or the clock."""
        config, step = self.run.config, self.state.step
        if config.save_steps is not None and step % config.save_steps == 0:
            return True
        if config.save_strategy == "epoch" and step % self.run.plan.steps.per_epoch == 0:
            return True
        if config.save_minutes is None:
            return False
        is_due = time.monotonic() - self._last_save >= 60 * config.save_minutes
        return self.run.ranks.any(is_due, self.run.device)  # the clocks of the ranks may differ

    def save(self, *, best: bool, is_last: bool = False) -> None:
        """Save a checkpoint of the present step; where the disk refuses it, training continues."""
        folder = self.run.checkpoints.save(self.state, best=best, is_last=is_last)
        if folder is not None:  # the same on all ranks
            self.run.callbacks.notify(SaveEvent(self.state.step, folder), self.run.ranks)
        self._last_save, self._last_saved_step = time.monotonic(), self.state.step

    def notify(self, event: StepEvent | EvaluationEvent) -> None:
        """Tell the callbacks of an event, and keep their decisions in the state, which every checkpoint holds."""
        decision = self.run.callbacks.notify(event, self.run.ranks)
        if decision.stop is not None:
            self.state.stopped = decision.stop
        if decision.learning_rate is not None:
            self.state.learning_rate = self.run.optimizer.rate_override = decision.learning_rate

    def raise_callback_failure(self) -> None:
        """End the run where a callback failed, with a checkpoint of the present step."""
        failure = self.run.callbacks.failure
        if failure is None:
            return
        if self._last_saved_step != self.state.step:
            self.save(best=False)
        failure.add_note(
            f"raised by a callback; the run is saved at step {self.state.step}, and the same call continues"
        )
        raise failure

    def why_over(self) -> str:
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

        Runs on the heartbeat's thread: it reads what the loop replaces whole, and takes no lock.
        """
        call, part = self.run.engine.passes.running, self.run.engine.stopwatch.running
        if call is None:
            return PARTS["data_seconds" if part is None else f"{part}_seconds"][0]
        text = f"{call.doing} chunk {call.number:,} of {call.total:,}"
        if call.share == 0.0:
            return text
        batch_seconds = (time.monotonic() - self._batch_started) / call.share
        seconds_left = batch_seconds * (1 - call.share + self._batches_left)
        return f"{text}, about {show_duration(seconds_left)} left in this step"


SEED_STRIDE = 1_000_003
"""Batches of one seed. A run of more batches than this would draw the masks of the next seed, which does no harm."""

RANK_STRIDE = (1 << 53) + 2_654_435_761
"""Keeps ranks apart: 2^53 is above any seed times `SEED_STRIDE`, and 2,000 ranks fit into the 64 bits of a seed. A CPU
generator takes only the lower 32 bits; the golden section of 2^32 keeps ranks apart there too."""


def batch_seed(seed: int, number: int, *, rank: int) -> int:
    """Return the seed of the random numbers that a rank draws in a batch; distinct for up to 2,000 ranks."""
    return seed * SEED_STRIDE + number + rank * RANK_STRIDE


@dataclass(slots=True)
class StepTotals:
    """Sums over the batches of one optimizer step.

    `tokens`, `padded_tokens` and `truncated` are of this rank until `add_ranks`; `chunks` and `repairs` stay this
    rank's, and `drift` is the largest of all ranks.
    """

    losses: list[float] = field(default_factory=list)  # mean loss of each batch over all ranks
    rank_losses: list[float] = field(default_factory=list)  # the same over the queries of this rank
    sources: list[int | None] = field(default_factory=list)  # source of each batch; None where sources are mixed
    record_ids: list[int] = field(default_factory=list)  # of all ranks
    queries: list[int] = field(default_factory=list)  # of each batch, of all ranks
    tokens: int = 0  # without padding
    rank_tokens: int = 0  # the same of this rank alone
    padded_tokens: int = 0
    truncated: int = 0  # texts that were longer than the model takes
    chunks: int = 0  # encoder calls of pass 1 on this rank
    repairs: int = 0  # times that a batch ran out of memory and was done again
    drift: float = 0.0  # largest replay drift
    masked: int | None = None  # (query, document) pairs masked as copies; None where the loss masks none
    data_seconds: float = 0.0  # time that this rank waited for its batches

    def add(self, batch: PreparedBatch, result: StepResult) -> None:
        """Count a batch."""
        self.losses.append(result.loss)
        self.rank_losses.append(result.rank_loss)
        self.sources.append(batch.structure.source)
        self.record_ids += batch.featured.record_ids
        self.queries.append(batch.structure.num_queries)
        self.tokens += result.tokens
        self.rank_tokens += result.tokens
        self.padded_tokens += result.padded_tokens
        self.truncated += batch.num_truncated
        self.chunks += result.num_chunks
        self.repairs += result.num_repairs
        self.drift = max(self.drift, result.replay_drift)
        if batch.featured.num_masked is not None:
            self.masked = (self.masked or 0) + batch.featured.num_masked

    def add_ranks(self, ranks: Ranks, device: torch.device) -> None:
        """Sum over the ranks the counts that each keeps of its own rows."""
        if not ranks.is_one:
            counts = torch.tensor([self.tokens, self.padded_tokens, self.truncated], device=device)
            self.tokens, self.padded_tokens, self.truncated = map(int, ranks.sum_(counts).tolist())

    @property
    def loss(self) -> float:
        """Mean loss over the queries."""
        return _mean(self.losses, self.queries)

    @property
    def loss_by_source(self) -> dict[str, float]:
        """Mean loss over the queries of each source, by the name that metrics.jsonl gives it."""
        batches: dict[str, list[tuple[float, int]]] = {}
        for source, loss, queries in zip(self.sources, self.losses, self.queries, strict=True):
            if source is not None:
                batches.setdefault(f"{SOURCE_LOSS}{source + 1}", []).append((loss, queries))
        return {name: _mean(*zip(*pairs, strict=True)) for name, pairs in batches.items()}


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    # Divided by the largest, equal weights are exactly 1.0 each: the mean over batches of one size isn't rounded.
    most = max(weights)
    shares = [weight / most for weight in weights]
    return sum(value * share for value, share in zip(values, shares, strict=True)) / sum(shares)
