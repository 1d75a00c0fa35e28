"""The plan as text, printed before the first step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from vembed.plan.chunks import WHOLE_BATCH
from vembed.plan.memory import show_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.plan.plan import Plan


ALWAYS_SHOWN = ("parameters", "gradients", "optimizer", "activations", "loss")


def explain(plan: Plan, *, facts: Mapping[str, str]) -> str:
    """Return the plan for people: what was decided, the arithmetic, the reasons.

    Args:
        plan: The plan.
        facts: Further facts by label, e.g. of the model.
    """
    epochs = plan.steps / plan.steps_per_epoch
    passes = f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"
    chunk = f"at most {plan.gradient_cache_chunk_tokens} padded tokens, {plan.gradient_cache_chunk_size} rows"
    rows = {
        **facts,
        "strategy": _strategy(plan),
        "batch": _batch(plan),
        "steps": f"{plan.steps} ({passes} of {plan.steps_per_epoch}), {plan.warmup_steps} of warmup",
        "chunk": "the whole batch" if plan.gradient_cache_chunk_tokens == WHOLE_BATCH else chunk,
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
    return "\n".join(lines)


def _strategy(plan: Plan) -> str:
    """Return how the work is spread, with all that belongs to it."""
    parts = [plan.strategy if plan.mode is None else f"{plan.strategy}, {plan.mode}, 1/{plan.sharding_factor} each"]
    parts += ["LoRA"] * (plan.use_lora and plan.strategy != "fsdp_lora")
    parts += ["gradient checkpointing"] * plan.gradient_checkpointing + ["CPU offload"] * plan.cpu_offload
    return ", ".join(parts)


def _batch(plan: Plan) -> str:
    processes = f"{plan.world_size} process{'es' if plan.world_size > 1 else ''}"
    accumulated = f", {plan.gradient_accumulation_steps} of them a step" if plan.gradient_accumulation_steps > 1 else ""
    if plan.global_batch_size == plan.batch_size * plan.world_size:
        return f"{plan.global_batch_size} = {plan.batch_size} x {processes}{accumulated}"
    return f"{plan.global_batch_size} over {processes}, at most {plan.batch_size} each{accumulated}"
