"""The batch: how many queries a step sees, how many steps that makes, and who makes the batches ahead."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.text import plural, show_bytes

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.plan.devices import Devices, Machine
    from vembed.plan.memory import ModelSize
    from vembed.plan.problem import DataSize

MOST_QUERIES = 65_536
"""Of `batch_size: auto`, over all devices: beyond it the loss stage grows and published gains don't."""

LEAST_STEPS = 200
"""Optimizer steps of a run that `batch_size: auto` leaves; with fewer the learning rate can't rise and fall."""

LEAST_QUERIES = 64
"""Of `batch_size: auto`, over all devices, where there are that many records: negatives are worth more than steps."""

EMBEDDINGS_SHARE, HOST_SHARE = 20, 8
"""One part in so many of a device's memory is for embeddings, of the host's for the batch itself."""

ROW_BYTES = 4096
"""Host memory of a row of text on its way through a step: tokens, lengths, ids."""

MOST_WORKERS = 8
BATCHES_PER_WORKER = 2
"""One that is being made, and one that waits."""

MEMORY_SHARE = 8
"""Batches ahead take at most one part in so many of the machine's memory, beside the first of each worker."""


# Queries --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Queries of a step, and the learning rate that goes with them."""

    per_device: int  # queries of one device, at most
    total: int  # queries of all devices
    accumulated: int  # most batches of an optimizer step, each with its own negatives
    learning_rate: float  # peak, scaled as asked
    reasons: tuple[str, ...]  # one plain sentence each


def plan_batch(config: Config, devices: Devices, model: ModelSize, data: DataSize, *, host_bytes: int) -> BatchPlan:
    """Decide the batch, accumulation and the learning rate; what the user set stands.

    Args:
        host_bytes: Memory of one machine.
    """
    reasons = []
    if config.global_batch_size is not None:
        total = config.global_batch_size
        per_device = math.ceil(total / devices.count)
        if devices.count > 1:
            reasons.append(f"global_batch_size {total} over {devices.count} devices: at most {per_device} each")
    elif config.batch_size == "auto":
        per_device, why = _auto_batch(config, devices, model, data, host_bytes)
        total = per_device * devices.count
        reasons.append(why)
    else:
        per_device, total = config.batch_size, config.batch_size * devices.count

    # Batches of an optimizer step. Gradient caching makes accumulation needless: it has all negatives in one batch.
    num_batches, _ = epoch_layout(data.num_records, total, drop_last=config.drop_last)
    accumulated = 1
    if config.gradient_accumulation_steps == "auto":
        why = "nothing is accumulated, as gradient caching takes the whole batch at once, with all its negatives"
    elif config.gradient_accumulation_steps == 1:
        why = "nothing is accumulated, as set"
    else:
        asked = config.gradient_accumulation_steps
        accumulated = min(asked, num_batches)
        why = (
            f"each batch has its own negatives only; batch_size x {accumulated} would have them all in the same memory"
        )
        if accumulated < asked:
            why += f"; gradient_accumulation_steps is {asked}, but no step goes beyond an epoch"
        if left := num_batches % accumulated:
            why += f"; the last step of an epoch takes the {plural(left, 'batch', 'batches')} left"
    effective = min(total * accumulated, data.num_records)  # no step goes beyond an epoch
    across = f"{devices.count} device{'s' if devices.count > 1 else ''}"
    is_even = per_device * devices.count == total
    size = f"{per_device} x {across}" if is_even else f"{total} over {across}"
    asked = total * accumulated
    whole = f"{asked}" if asked == effective else f"{asked}, of which an epoch has {effective}"
    reasons.append(f"effective batch: {size} x {accumulated} accumulated = {whole}; {why}")

    # The noise of a gradient falls with the root of its batch: `linear` follows SGD's rule (Goyal et al., 2017), `sqrt`
    # the one for Adam (Malladi et al., 2022).
    rate, reference = config.learning_rate, config.lr_reference_batch
    if config.lr_scaling != "none":
        ratio = effective / reference
        factor = ratio if config.lr_scaling == "linear" else math.sqrt(ratio)
        shown = f"{effective} / {reference}" if config.lr_scaling == "linear" else f"sqrt({effective} / {reference})"
        reasons.append(f"learning_rate {rate * factor:.4g}: {config.lr_scaling}, {rate:g} x {shown}")
        rate *= factor
    return BatchPlan(per_device, total, accumulated, rate, tuple(reasons))


def _auto_batch(config: Config, devices: Devices, model: ModelSize, data: DataSize, host_bytes: int) -> tuple[int, str]:
    """Return the largest power of two for each device under every bound, and the arithmetic."""
    rows = 1 + data.documents_per_query
    # Embeddings and their gradients, in float32 at least; only these grow with a batch that is encoded in chunks.
    vector_bytes = 2 * model.values_of(1, data.documents_per_query) * max(4, model.bytes_per_value)
    record_bytes = rows * ROW_BYTES + data.pictures_per_record * data.picture_bytes
    device, host = show_bytes(devices.memory_bytes), show_bytes(host_bytes)
    # Queries of a whole batch: arithmetic in words -> at most so many.
    bounds = {
        f"{MOST_QUERIES} in all": MOST_QUERIES,
        f"{data.num_records} records": data.num_records,
        f"embeddings and their gradients of {show_bytes(vector_bytes)} a query in {device} / {EMBEDDINGS_SHARE}": int(
            devices.memory_bytes / EMBEDDINGS_SHARE / vector_bytes
        ),
        f"{show_bytes(record_bytes)} a record in {host} of host memory / {HOST_SHARE}": int(
            host_bytes / HOST_SHARE / record_bytes * devices.nodes
        ),
    }
    if config.max_steps is None:
        epochs, passed = config.epochs, data.num_records * config.epochs
        name = f"{LEAST_STEPS} steps of the {passed} records of {epochs} epochs, but {LEAST_QUERIES} at least"
        bounds[name] = max(LEAST_QUERIES, passed // LEAST_STEPS)
    chunked = "Chunks keep activations the same whatever the batch"
    if config.use_gradient_cache is False:
        pictures = min(rows, data.pictures_per_record)
        num_items = {"pictures": pictures, "texts": rows - pictures, "all": rows}  # of a query, by who encodes them
        sampled = statistics.mean(data.record_tokens) / rows if data.record_tokens else 1  # tokens, where without limit
        query_bytes = sum(
            num_items[tower.items] * tower.saved.of(1, tower.max_tokens or sampled) for tower in model.towers
        )
        chunked = "Activations grow with the batch, which is encoded in one call"
        name = f"activations of {show_bytes(query_bytes)} a query, not cached, in half of {device}"
        bounds[name] = int(devices.memory_bytes // 2 / query_bytes) * devices.count
    tightest = min(bounds, key=lambda name: bounds[name])
    most = max(-(-2 // devices.count), bounds[tightest] // devices.count)  # 2 queries in all: one has no negatives
    per_device = 2 ** int(math.log2(most))
    listed = "; ".join(f"{name}: {bound}" for name, bound in bounds.items())
    return per_device, (
        f"batch_size auto: {per_device} a device, the largest power of two under {most} = {bounds[tightest]} "
        f"({tightest}) / {devices.count}; bounds of a whole batch: {listed}. {chunked}"
    )


# Steps ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Steps:
    """Optimizer steps of a run."""

    total: int
    per_epoch: int
    warmup: int  # of rising learning rate
    eval_every: int | None  # steps from one evaluation to the next; None for none while training


def plan_steps(config: Config, batch: BatchPlan, num_records: int) -> tuple[Steps, tuple[str, ...]]:
    """Return the steps of the run, and what to tell the user about them."""
    num_batches, notes = epoch_layout(num_records, batch.total, drop_last=config.drop_last)
    per_epoch = math.ceil(num_batches / batch.accumulated)
    total = config.max_steps or config.epochs * per_epoch
    warmup = config.warmup_steps
    if warmup is None:
        warmup = math.ceil(config.warmup_ratio * total)
    eval_every = {"no": None, "epoch": per_epoch, "steps": config.eval_steps}[config.eval_strategy]
    return Steps(total, per_epoch, warmup, eval_every), notes


def epoch_layout(num_records: int, batch_size: int, *, drop_last: bool) -> tuple[int, tuple[str, ...]]:
    """Return the batches of an epoch, and what to tell the user where the records don't divide evenly.

    Args:
        num_records: Records, at least 2.
        batch_size: Records of a batch, over all devices.
        drop_last: Leave out the smaller last batch. With fewer records than a batch it has no effect.
    """
    steps, tail = divmod(num_records, batch_size)
    if steps == 0:
        return 1, (f"{num_records:,} records are fewer than a batch of {batch_size:,}: each step takes all of them.",)
    if tail == 0:
        return steps, ()
    if drop_last:
        return steps, (f"The last {tail:,} records of each epoch's order are left out (drop_last).",)
    if tail == 1:
        return steps, (
            "The last record of each epoch's order is left out: a batch of one record has no in-batch negatives.",
        )
    return steps + 1, (f"The last batch of each epoch has {tail:,} records instead of {batch_size:,}.",)


def step_batches(step: int, *, batches_per_epoch: int, accumulated: int) -> range:
    """Return the numbers of the batches of an optimizer step; the last step of an epoch takes those that are left.

    Args:
        step: Counted from 0 over all epochs, as the batches are.
    """
    epoch, step_of_epoch = divmod(step, math.ceil(batches_per_epoch / accumulated))
    first, end = epoch * batches_per_epoch + step_of_epoch * accumulated, (epoch + 1) * batches_per_epoch
    return range(first, min(first + accumulated, end))


# Loading --------------------------------------------------------------------------------------------------------------


def plan_loading(
    config: Config, machine: Machine, data: DataSize, *, num_queries: int, host_bytes: int, num_processes: int = 1
) -> tuple[int, int, str]:
    """Decide the number of data workers: the cores that don't compute, where there are pictures or an accelerator.

    Args:
        num_queries: Records of a batch on one device.
        host_bytes: Memory of the machine.
        num_processes: Processes that share the machine's memory.

    Returns:
        The number of workers, 0 where the training process makes the batches; the most batches that wait or are being
        made in workers; the reason in one plain sentence.
    """
    if data.pictures_per_record:  # beside which texts are nothing
        batch_bytes, content = round(num_queries * data.pictures_per_record * data.picture_bytes), "pixels"
    else:
        batch_bytes, content = round(num_queries * (1 + data.documents_per_query) * ROW_BYTES), "tokens"
    budget = host_bytes // (MEMORY_SHARE * num_processes)

    if config.num_workers != "auto":
        num_workers, why = config.num_workers, "as set"
        if num_workers > machine.num_cores:
            why += f", more than the {machine.num_cores} cores"
    elif not data.pictures_per_record and machine.device == "cpu":
        num_workers, why = 0, "no pictures to decode"  # and tokenizing would take its threads from training
    elif sys.platform != "linux":
        num_workers, why = 0, "data workers need Linux"  # they are forked, and share the rows so
    else:
        spare = max(0, machine.num_cores - machine.num_busy_cores)
        num_workers = min(MOST_WORKERS, spare)
        cores = f"{plural(machine.num_cores, 'core')} less {machine.num_busy_cores} that training keeps busy"
        work = "decode" if data.pictures_per_record else "tokenize"
        why = f"{cores} leave {spare}, of which at most {MOST_WORKERS} {work}"
    if config.num_workers == "auto" and num_workers * batch_bytes > budget:
        num_workers = budget // batch_bytes
        why += f"; {num_workers} whose batches of {show_bytes(batch_bytes)} take at most {show_bytes(budget)}"
    if not num_workers:
        return 0, 0, f"num_workers 0: {why}"

    # A second batch for each worker hides the time between two of them, where memory allows it.
    has_room = BATCHES_PER_WORKER * num_workers * batch_bytes <= budget
    per_worker = (BATCHES_PER_WORKER if has_room else 1) if config.prefetch_factor == "auto" else config.prefetch_factor
    ahead = per_worker * num_workers
    amount = f"up to {ahead} batches ahead, {show_bytes(ahead * batch_bytes)} of {content}"
    return num_workers, ahead, f"num_workers {num_workers}: {why}; {amount}"
