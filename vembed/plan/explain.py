"""The plan as text: on one screen before the first step, and in full with `--plan --details`."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from vembed.plan.chunks import WHOLE_BATCH
from vembed.plan.hardware import GIB
from vembed.plan.problem import FIT_FACTOR, FIT_SHARE
from vembed.redact import redact
from vembed.text import plural, show_bytes, show_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vembed.plan.plan import Plan


ALWAYS_SHOWN = ("parameters", "gradients", "optimizer", "activations", "loss")

SCREEN_COLUMNS, SCREEN_LINES = 100, 24
"""Of the short form, which any terminal shows whole."""

WHY_LINES, BAR_COLUMNS, INDENT = 3, 40, "  "

MODEL_FACTS = ("reads", "towers", "projections", "trains")
"""Of the facts that an encoder states, those that the short form shows."""


def explain(
    plan: Plan,
    *,
    facts: Mapping[str, str],
    details: str = "--plan --details, or plan.json",
    step_seconds: float | None = None,
) -> str:
    """Return the plan on one screen: what was decided, why, what it needs.

    Args:
        facts: Further facts by label, e.g. of the data.
        details: Where the rest is to be seen.
        step_seconds: Measured time of a step of such a run, where there is one.
    """
    hidden = plan.model.keys() - MODEL_FACTS
    rows = [(label, value) for label, value in facts.items() if label not in hidden]
    rows += [*_way(plan), *_memory(plan), *_work(plan, step_seconds)]
    width = max(len(label) for label, _ in rows)
    lines = ["plan"]
    for label, value in rows:
        lines += _wrapped(f"{INDENT}{label:<{width}}  ", value)
    noted: list[str] = []
    shown = 0
    room = max(4, SCREEN_LINES - len(lines) - 1)
    for note in sorted(plan.notes, key=lambda note: "no effect" not in note):  # what the user asked for in vain first
        block = _wrapped(f"{INDENT}{'' if noted else 'note':<{width}}  ", note, hanging=2)
        if len(noted) + len(block) > room:
            break
        noted += block
        shown += 1
    left = f"{plural(len(plan.notes) - shown, 'more note')}, " if shown < len(plan.notes) else ""
    reasons, ways = plural(len(plan.reasons), "reason"), plural(len(plan.candidates), "way")
    more = f"{left}{reasons} and {ways} compared: see {details}"
    return redact("\n".join([*lines, *noted, *_wrapped(f"{INDENT}{'more':<{width}}  ", more)]))


def explain_fully(plan: Plan, *, facts: Mapping[str, str]) -> str:
    """Return the plan with every fact, the arithmetic of its memory and every reason.

    Args:
        facts: Further facts by label, e.g. of the model.
    """
    rows = {
        **facts,
        "strategy": strategy_text(plan),
        "batch": _batch(plan),
        "steps": _steps(plan),
        "chunk": _chunk(plan),
        "dtype": plan.dtype,
    }
    parts, apart = _parts(plan)
    parts["total"] = show_bytes(plan.bytes_per_device.total)
    width = max(map(len, [*rows, *parts]))
    lines = ["plan", *(f"  {label:<{width}}  {value}" for label, value in rows.items())]
    estimated = any(each.estimated for each in plan.candidates)
    lines += [
        f"memory of one process (activations {'estimated by a formula' if estimated else 'of a run without data'})"
    ]
    lines += [f"  {part:<{width}}  {count:>10}" for part, count in parts.items()]
    if apart:
        lines.append(f"  the total is that of the worst moment: {show_bytes(apart)} of the parts aren't there then")
    lines += ["why", *(f"  - {reason}" for reason in plan.reasons)]
    return redact("\n".join(lines))


def _wrapped(label: str, value: str, *, hanging: int = 0) -> list[str]:
    return textwrap.wrap(
        redact(value),  # whole, before a secret is cut in two
        SCREEN_COLUMNS,
        initial_indent=label,
        subsequent_indent=" " * (len(label) + hanging),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _parts(plan: Plan) -> tuple[dict[str, str], int]:
    """Return the bytes of one process by what they hold, and how many of them are never there at the worst moment."""
    sizes = asdict(plan.bytes_per_device)
    apart: int = sizes.pop("apart")
    return {name: show_bytes(count) for name, count in sizes.items() if count or name in ALWAYS_SHOWN}, apart


def _way(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the way that was chosen, and why in a few lines."""
    yield "way", f"{strategy_text(plan)}; computes in {plan.dtype}"
    for number, reason in enumerate(plan.why[:WHY_LINES]):
        yield "" if number else "why", reason


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    total, usable = plan.bytes_per_device.total, FIT_SHARE * plan.memory_bytes
    needed = FIT_FACTOR * total + plan.reserved_bytes
    used, asked = (min(BAR_COLUMNS, round(BAR_COLUMNS * count / usable)) for count in (total, needed))
    bar = f"[{'#' * used}{'+' * (asked - used)}{'.' * (BAR_COLUMNS - asked)}]"
    reads = "fits" if plan.fits else "may not fit"
    yield "memory", f"{bar} {needed / GIB:.1f} of {usable / GIB:.1f} GiB usable: {reads}"
    sizes = ", ".join(f"{name} {size}" for name, size in _parts(plan)[0].items())
    yield "", f"# {show_bytes(total)} at the peak, if all items have full length, + margin and reserve ({sizes})"


def _work(plan: Plan, step_seconds: float | None) -> Iterator[tuple[str, str]]:
    yield "batch", f"{_batch(plan)}; encoder calls of {_chunk(plan)}"
    yield "steps", _steps(plan)
    yield "time", _time(plan, step_seconds)


def _time(plan: Plan, step_seconds: float | None) -> str:
    """Return how long the steps take: from a measured one, else by rough figures of a known device."""
    if step_seconds is not None:
        whole = show_duration(step_seconds * plan.steps.total)
        return f"about {whole} for all steps, from steps of {step_seconds:.3g} s measured in the run that lies there"
    if (rough := plan.rough_step_seconds) is None:
        return "unknown until a step is measured: the first lines of training tell the time left"
    return f"about {show_duration(rough * plan.steps.total)} by the device's rough figures; no step was measured"


def _steps(plan: Plan) -> str:
    epochs = plan.steps.total / plan.steps.per_epoch
    passes = f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"
    return f"{plan.steps.total} ({passes} of {plan.steps.per_epoch}), {plan.steps.warmup} of warmup"


def _chunk(plan: Plan) -> str:
    if plan.chunks.tokens == WHOLE_BATCH:
        return "the whole batch"
    return f"at most {plan.chunks.tokens} padded tokens, {plan.chunks.rows} rows"


def strategy_text(plan: Plan) -> str:
    """Return how the work is spread, with all that belongs to it."""
    way = plan.way
    parts = [way.strategy if way.mode is None else f"{way.strategy}, {way.mode}, 1/{way.sharding_factor} each"]
    parts += ["gradient caching"] * (way.strategy == "single" and way.gradient_cache)
    parts += ["LoRA"] * (way.use_lora and way.strategy != "fsdp_lora")
    parts += ["gradient checkpointing"] * way.gradient_checkpointing + ["CPU offload"] * way.cpu_offload
    return ", ".join(parts)


def _batch(plan: Plan) -> str:
    batch, processes = plan.batch, f"{plan.world_size} process{'es' if plan.world_size > 1 else ''}"
    accumulated = f", {batch.accumulated} of them a step" if batch.accumulated > 1 else ""
    if batch.total == batch.per_device * plan.world_size:
        return f"{batch.total} = {batch.per_device} x {processes}{accumulated}"
    return f"{batch.total} over {processes}, at most {batch.per_device} each{accumulated}"
