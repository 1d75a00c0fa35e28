"""The plan as text, printed before the first step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from vembed.plan.chunks import WHOLE_BATCH
from vembed.redact import redact
from vembed.text import show_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.plan.plan import Plan


ALWAYS_SHOWN = ("parameters", "gradients", "optimizer", "activations", "loss")


def explain(plan: Plan, *, facts: Mapping[str, str]) -> str:
    """Return the plan for people: what was decided, the arithmetic, the reasons.

    Args:
        facts: Further facts by label, e.g. of the model.
    """
    epochs = plan.steps.total / plan.steps.per_epoch
    passes = f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"
    chunk = f"at most {plan.chunks.tokens} padded tokens, {plan.chunks.rows} rows"
    rows = {
        **facts,
        "strategy": _strategy(plan),
        "batch": _batch(plan),
        "steps": f"{plan.steps.total} ({passes} of {plan.steps.per_epoch}), {plan.steps.warmup} of warmup",
        "chunk": "the whole batch" if plan.chunks.tokens == WHOLE_BATCH else chunk,
        "dtype": plan.dtype,
    }
    sizes = asdict(plan.bytes_per_device)
    apart = sizes.pop("apart")
    parts = {name: show_bytes(count) for name, count in sizes.items() if count or name in ALWAYS_SHOWN}
    if apart:
        parts["never together"] = f"-{show_bytes(apart)}"
    parts["total"] = show_bytes(plan.bytes_per_device.total)
    width = max(map(len, [*rows, *parts]))
    lines = ["plan", *(f"  {label:<{width}}  {value}" for label, value in rows.items())]
    estimated = any(each.estimated for each in plan.candidates)
    lines += [
        f"memory of one process (activations {'estimated by a formula' if estimated else 'of a run without data'})"
    ]
    lines += [f"  {part:<{width}}  {count:>10}" for part, count in parts.items()]
    lines += ["why", *(f"  - {reason}" for reason in plan.reasons)]
    return redact("\n".join(lines))


def _strategy(plan: Plan) -> str:
    """Return how the work is spread, with all that belongs to it."""
    way = plan.way
    parts = [way.strategy if way.mode is None else f"{way.strategy}, {way.mode}, 1/{way.sharding_factor} each"]
    parts += ["LoRA"] * (way.use_lora and way.strategy != "fsdp_lora")
    parts += ["gradient checkpointing"] * way.gradient_checkpointing + ["CPU offload"] * way.cpu_offload
    return ", ".join(parts)


def _batch(plan: Plan) -> str:
    batch, processes = plan.batch, f"{plan.world_size} process{'es' if plan.world_size > 1 else ''}"
    accumulated = f", {batch.accumulated} of them a step" if batch.accumulated > 1 else ""
    if batch.total == batch.per_device * plan.world_size:
        return f"{batch.total} = {batch.per_device} x {processes}{accumulated}"
    return f"{batch.total} over {processes}, at most {batch.per_device} each{accumulated}"
