"""How many queries a step sees, how many steps that makes, and the learning rate that goes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.plan.memory import show_bytes

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.plan.devices import Devices
    from vembed.plan.memory import ModelSize

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


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a step sees.

    Attributes:
        batch_size: Queries of one device, at most.
        global_batch_size: Queries of all devices.
        gradient_accumulation_steps: Batches of an optimizer step.
        learning_rate: Peak.
        reasons: Why, one plain sentence each.
    """

    batch_size: int
    global_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    reasons: tuple[str, ...]

    @property
    def effective(self) -> int:
        """Queries of an optimizer step."""
        return self.global_batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True, slots=True)
class RecordSize:
    """What the batch's size depends on, of the training data.

    Attributes:
        num_records: Records.
        documents_per_query: Mean number of documents of a record.
        record_bytes: Host memory of a record's pictures as the encoder takes them.
    """

    num_records: int
    documents_per_query: float
    record_bytes: float = 0.0


def plan_batch(config: Config, devices: Devices, model: ModelSize, data: RecordSize, *, host_bytes: int) -> BatchPlan:
    """Decide the batch, accumulation and the learning rate.

    Args:
        config: The user's word; what isn't `auto` stands.
        devices: How many share a batch.
        model: Says how large an embedding is.
        data: What the batch is taken from.
        host_bytes: Memory of one machine's host.
    """
    reasons = []
    if config.global_batch_size is not None:
        per_device, together = math.ceil(config.global_batch_size / devices.count), config.global_batch_size
        if devices.count > 1:
            reasons.append(f"global_batch_size {together} over {devices.count} devices: at most {per_device} each")
    elif config.batch_size == "auto":
        per_device, why = _largest_batch(config, devices, model, data, host_bytes)
        together = per_device * devices.count
        reasons.append(why)
    else:
        per_device, together = config.batch_size, config.batch_size * devices.count
    steps, why = _accumulation(config)
    effective = together * steps
    reasons.append(
        f"effective batch: {per_device} x {devices.count} devices x {steps} accumulated = {effective}; {why}"
    )
    if config.global_batch_size is not None and per_device * devices.count != together:
        reasons[-1] = (
            f"effective batch: {together} over {devices.count} devices x {steps} accumulated = {effective}; {why}"
        )
    rate, rate_reasons = _learning_rate(config, effective)
    return BatchPlan(per_device, together, steps, rate, (*reasons, *rate_reasons))


def _accumulation(config: Config) -> tuple[int, str]:
    if config.gradient_accumulation_steps == "auto":
        return 1, "nothing is accumulated, as gradient caching takes the whole batch at once, with all its negatives"
    steps = config.gradient_accumulation_steps
    if steps == 1:
        return 1, "nothing is accumulated, as set"
    return steps, f"each batch has its own negatives only; batch_size x {steps} would have them all in the same memory"


def _learning_rate(config: Config, effective: int) -> tuple[float, tuple[str, ...]]:
    rate, reference = config.learning_rate, config.lr_reference_batch
    if config.lr_scaling == "none":
        return rate, ()
    ratio = effective / reference
    factor = ratio if config.lr_scaling == "linear" else math.sqrt(ratio)
    shown = f"{effective} / {reference}" if config.lr_scaling == "linear" else f"sqrt({effective} / {reference})"
    return rate * factor, (f"learning_rate {rate * factor:.4g}: {config.lr_scaling}, {rate:g} x {shown}",)


def _largest_batch(
    config: Config, devices: Devices, model: ModelSize, data: RecordSize, host_bytes: int
) -> tuple[int, str]:
    """Return the largest power of two for each device under every bound, and the arithmetic."""
    rows = 1 + data.documents_per_query
    embedding = 2 * rows * model.dimension * max(4, model.bytes_per_value)
    per_record = rows * ROW_BYTES + data.record_bytes
    bounds = {
        f"{MOST_QUERIES} in all": MOST_QUERIES,
        f"{data.num_records} records": data.num_records,
        f"embeddings and their gradients of {show_bytes(embedding)} a query in {show_bytes(devices.memory_bytes)} / "
        f"{EMBEDDINGS_SHARE}": int(devices.memory_bytes / EMBEDDINGS_SHARE / embedding),
        f"{show_bytes(per_record)} a record in {show_bytes(host_bytes)} of host memory / {HOST_SHARE}": int(
            host_bytes / HOST_SHARE / per_record * devices.nodes
        ),
    }
    if config.max_steps is None:
        passed = data.num_records * config.epochs
        name = f"{LEAST_STEPS} steps of the {passed} records of {config.epochs} epochs, but {LEAST_QUERIES} at least"
        bounds[name] = max(LEAST_QUERIES, passed // LEAST_STEPS)
    if config.use_gradient_cache is False:
        width = model.max_length or 1
        each = rows * model.towers[0].saved.of(1, width)
        free = devices.memory_bytes // 2
        name = f"activations of {show_bytes(each)} a query, not cached, in half of {show_bytes(devices.memory_bytes)}"
        bounds[name] = int(free / each) * devices.count
    least = -(-2 // devices.count)
    tightest = min(bounds, key=lambda name: bounds[name])
    most = max(least, bounds[tightest] // devices.count)
    per_device = 2 ** int(math.log2(most))
    listed = "; ".join(f"{name}: {bound}" for name, bound in bounds.items())
    return per_device, (
        f"batch_size auto: {per_device} a device, the largest power of two under {most} = {bounds[tightest]} "
        f"({tightest}) / {devices.count}; bounds of a whole batch: {listed}. Chunks keep activations the same whatever "
        f"the batch"
    )
