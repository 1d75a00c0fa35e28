"""The plan as text, printed before the first step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from vembed.plan.chunks import WHOLE_BATCH
from vembed.plan.memory import show_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.plan.plan import Plan


def explain(plan: Plan, *, facts: Mapping[str, str]) -> str:
    """Return the plan for people: what was decided, the arithmetic, the reasons.

    Args:
        plan: The plan.
        facts: Further facts by label, e.g. of the model.
    """
    epochs = plan.steps / plan.steps_per_epoch
    chunk = f"at most {plan.gradient_cache_chunk_tokens} padded tokens, {plan.gradient_cache_chunk_size} rows"
    rows = {
        **facts,
        "strategy": plan.strategy,
        "batch": f"{plan.global_batch_size} = {plan.batch_size} x {plan.world_size} process",
        "steps": f"{plan.steps} ({epochs:.3g} epochs of {plan.steps_per_epoch}), {plan.warmup_steps} of warmup",
        "chunk": "the whole batch" if plan.gradient_cache_chunk_tokens == WHOLE_BATCH else chunk,
        "dtype": plan.dtype,
    }
    parts = {**asdict(plan.bytes_per_device), "total": plan.bytes_per_device.total}
    width = max(map(len, [*rows, *parts]))
    lines = ["plan", *(f"  {label:<{width}}  {value}" for label, value in rows.items())]
    lines += ["memory of one process (activations estimated)"]
    lines += [f"  {part:<{width}}  {show_bytes(count):>10}" for part, count in parts.items()]
    lines += ["why", *(f"  - {reason}" for reason in plan.reasons)]
    return "\n".join(lines)
