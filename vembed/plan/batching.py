"""How many queries a step sees, how many steps that makes, and the learning rate that goes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.plan.loading import ROW_BYTES
from vembed.text import plural, show_bytes

if TYPE_CHECKING:
    from vembed.evaluation.keys import EvaluationKeys
    from vembed.plan.devices import Devices
    from vembed.plan.keys import BatchKeys, OptimisationKeys
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


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a step sees."""

    per_device: int  # queries of one device, at most
    total: int  # queries of all devices
    accumulated: int  # most batches of an optimizer step, each with its own negatives
    learning_rate: float  # peak, scaled as asked
    reasons: tuple[str, ...]  # one plain sentence each


@dataclass(frozen=True, slots=True)
class Steps:
    """Optimizer steps of a run."""

    total: int
    per_epoch: int
    warmup: int  # of rising learning rate
    eval_every: int | None  # steps from one evaluation to the next; None for none while training


def plan_batch(
    batch_keys: BatchKeys,
    optimisation_keys: OptimisationKeys,
    devices: Devices,
    model: ModelSize,
    data: DataSize,
    *,
    host_bytes: int,
    drop_last: bool,
) -> BatchPlan:
    """Decide the batch, accumulation and the learning rate; what the user set stands."""
    reasons = []
    if batch_keys.global_batch_size is not None:
        per_device, together = math.ceil(batch_keys.global_batch_size / devices.count), batch_keys.global_batch_size
        if devices.count > 1:
            reasons.append(f"global_batch_size {together} over {devices.count} devices: at most {per_device} each")
    elif batch_keys.batch_size == "auto":
        bounds = _bounds(
            optimisation_keys, devices, model, data, host_bytes, cached=batch_keys.use_gradient_cache is not False
        )
        per_device, why = _largest_batch(bounds, devices.count)
        together = per_device * devices.count
        reasons.append(why)
    else:
        per_device, together = batch_keys.batch_size, batch_keys.batch_size * devices.count
    num_batches, _ = epoch_layout(data.num_records, together, drop_last=drop_last)
    accumulated, why = _accumulation(batch_keys, num_batches)
    effective = together * accumulated
    even = batch_keys.global_batch_size is None or per_device * devices.count == together
    across = f"{devices.count} device{'s' if devices.count > 1 else ''}"
    size = f"{per_device} x {across}" if even else f"{together} over {across}"
    reasons.append(f"effective batch: {size} x {accumulated} accumulated = {effective}; {why}")
    rate, rate_reasons = _learning_rate(batch_keys, optimisation_keys.learning_rate, effective)
    return BatchPlan(per_device, together, accumulated, rate, (*reasons, *rate_reasons))


def plan_steps(
    optimisation_keys: OptimisationKeys,
    evaluation_keys: EvaluationKeys,
    batch: BatchPlan,
    num_records: int,
    *,
    drop_last: bool,
) -> tuple[Steps, tuple[str, ...]]:
    """Return the steps of the run, and what to tell the user about them."""
    num_batches, notes = epoch_layout(num_records, batch.total, drop_last=drop_last)
    per_epoch = math.ceil(num_batches / batch.accumulated)
    total = optimisation_keys.max_steps or optimisation_keys.epochs * per_epoch
    warmup = optimisation_keys.warmup_steps
    if warmup is None:
        warmup = math.ceil(optimisation_keys.warmup_ratio * total)
    eval_every = {"no": None, "epoch": per_epoch, "steps": evaluation_keys.eval_steps}[evaluation_keys.eval_strategy]
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
    epoch, place = divmod(step, math.ceil(batches_per_epoch / accumulated))
    first, end = epoch * batches_per_epoch + place * accumulated, (epoch + 1) * batches_per_epoch
    return range(first, min(first + accumulated, end))


def _accumulation(keys: BatchKeys, num_batches: int) -> tuple[int, str]:
    """Return the most batches of a step, of an epoch of so many, and why."""
    if keys.gradient_accumulation_steps == "auto":
        return 1, "nothing is accumulated, as gradient caching takes the whole batch at once, with all its negatives"
    if keys.gradient_accumulation_steps == 1:
        return 1, "nothing is accumulated, as set"
    steps = min(keys.gradient_accumulation_steps, num_batches)
    why = f"each batch has its own negatives only; batch_size x {steps} would have them all in the same memory"
    if steps < keys.gradient_accumulation_steps:
        why += f"; gradient_accumulation_steps is {keys.gradient_accumulation_steps}, but no step goes beyond an epoch"
    if left := num_batches % steps:
        why += f"; the last step of an epoch takes the {plural(left, 'batch', 'batches')} left"
    return steps, why


def _learning_rate(keys: BatchKeys, rate: float, effective: int) -> tuple[float, tuple[str, ...]]:
    reference = keys.lr_reference_batch
    if keys.lr_scaling == "none":
        return rate, ()
    ratio = effective / reference
    factor = ratio if keys.lr_scaling == "linear" else math.sqrt(ratio)
    shown = f"{effective} / {reference}" if keys.lr_scaling == "linear" else f"sqrt({effective} / {reference})"
    return rate * factor, (f"learning_rate {rate * factor:.4g}: {keys.lr_scaling}, {rate:g} x {shown}",)


def _bounds(
    keys: OptimisationKeys, devices: Devices, model: ModelSize, data: DataSize, host_bytes: int, *, cached: bool
) -> dict[str, int]:
    """Return what bounds a batch of all devices: arithmetic in words -> most queries."""
    rows = 1 + data.documents_per_query
    embedding = 2 * model.values_of(1, data.documents_per_query) * max(4, model.bytes_per_value)
    per_record = rows * ROW_BYTES + data.pictures_per_record * data.picture_bytes
    device, host = show_bytes(devices.memory_bytes), show_bytes(host_bytes)
    bounds = {
        f"{MOST_QUERIES} in all": MOST_QUERIES,
        f"{data.num_records} records": data.num_records,
        f"embeddings and their gradients of {show_bytes(embedding)} a query in {device} / {EMBEDDINGS_SHARE}": int(
            devices.memory_bytes / EMBEDDINGS_SHARE / embedding
        ),
        f"{show_bytes(per_record)} a record in {host} of host memory / {HOST_SHARE}": int(
            host_bytes / HOST_SHARE / per_record * devices.nodes
        ),
    }
    if keys.max_steps is None:
        epochs, passed = keys.epochs, data.num_records * keys.epochs
        name = f"{LEAST_STEPS} steps of the {passed} records of {epochs} epochs, but {LEAST_QUERIES} at least"
        bounds[name] = max(LEAST_QUERIES, passed // LEAST_STEPS)
    if not cached:
        each = rows * model.towers[0].saved.of(1, model.max_length or 1)
        name = f"activations of {show_bytes(each)} a query, not cached, in half of {device}"
        bounds[name] = int(devices.memory_bytes // 2 / each) * devices.count
    return bounds


def _largest_batch(bounds: dict[str, int], num_devices: int) -> tuple[int, str]:
    """Return the largest power of two for each device under every bound, and the arithmetic."""
    tightest = min(bounds, key=lambda name: bounds[name])
    most = max(-(-2 // num_devices), bounds[tightest] // num_devices)
    per_device = 2 ** int(math.log2(most))
    listed = "; ".join(f"{name}: {bound}" for name, bound in bounds.items())
    return per_device, (
        f"batch_size auto: {per_device} a device, the largest power of two under {most} = {bounds[tightest]} "
        f"({tightest}) / {num_devices}; bounds of a whole batch: {listed}. Chunks keep activations the same whatever "
        f"the batch"
    )
