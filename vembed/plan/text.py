"""The plan in words: on one screen, in full, as a table of all strategies; and advice for what a user may do next.

The screen has a width and a number of lines, so that these texts are laid out here and are no `Page`: a page leaves
widths to its renderers. The report of a run shows plan.json as a page.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from vembed.plan.chunks import WHOLE_BATCH
from vembed.plan.cost import weigh
from vembed.plan.devices import GIB
from vembed.plan.memory import ADAM_STATES, BatchRows
from vembed.plan.problem import FIT_FACTOR, FIT_SHARE, MODES, Strategy, Way
from vembed.plan.strategy import DECIDING_KEYS, all_ways, choose
from vembed.redact import redact
from vembed.text import plural, show_bytes, show_count, show_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vembed.plan.cost import Candidate
    from vembed.plan.plan import Plan
    from vembed.plan.problem import PlanningProblem

ALWAYS_SHOWN = ("parameters", "gradients", "optimizer", "activations", "loss")
"""Parts of the memory that are shown though they are zero."""

SCREEN_COLUMNS, SCREEN_LINES = 100, 24
"""Of the short form, which any terminal shows whole."""

WHY_LINES, BAR_COLUMNS, INDENT = 3, 40, "  "

MODEL_FACTS = ("reads", "towers", "projections", "trains")
"""Of the facts that an encoder states, those that the short form shows."""


# One screen -----------------------------------------------------------------------------------------------------------


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
    rows.append(("strategy", f"{_strategy(plan)}; computes in {plan.dtype}"))
    rows += [("" if number else "why", reason) for number, reason in enumerate(plan.why[:WHY_LINES])]
    rows += _memory_rows(plan)
    rough = plan.rough_step_seconds
    if step_seconds is not None:
        whole = show_duration(step_seconds * plan.steps.total)
        time = f"about {whole} for all steps, from steps of {step_seconds:.3g} s measured in the run that lies there"
    elif rough is None:
        time = "unknown until a step is measured: the first lines of training tell the time left"
    else:
        whole = show_duration(rough * plan.steps.total)
        time = f"about {whole} by the device's rough figures; no step was measured"
    rows += [
        ("batch", f"{_batch(plan)}; encoder calls of {_chunk(plan)}"),
        ("steps", _steps(plan)),
        ("time", time),
    ]
    width = max(len(label) for label, _ in rows)
    lines = ["plan"]
    for label, value in rows:
        lines += _wrapped(f"{INDENT}{label:<{width}}  ", value)

    # Notes fill what is left of the screen but a last line; what the user asked for in vain comes first.
    noted: list[str] = []
    num_shown = 0
    room = max(4, SCREEN_LINES - len(lines) - 1)
    for note in sorted(plan.notes, key=lambda note: "no effect" not in note):
        block = _wrapped(f"{INDENT}{'' if noted else 'note':<{width}}  ", note, hanging=2)
        if len(noted) + len(block) > room:
            break
        noted += block
        num_shown += 1
    left = f"{plural(len(plan.notes) - num_shown, 'more note')}, " if num_shown < len(plan.notes) else ""
    reasons, compared = plural(len(plan.reasons), "reason"), len(plan.candidates)
    more = f"{left}{reasons} and {plural(compared, 'strategy', 'strategies')} compared: see {details}"
    return redact("\n".join([*lines, *noted, *_wrapped(f"{INDENT}{'more':<{width}}  ", more)]))


def _memory_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the memory of one process as a bar, # for the prediction and + for margin and reserve, and its parts."""
    total, usable = plan.bytes_per_device.total, FIT_SHARE * plan.memory_bytes
    needed = FIT_FACTOR * total + plan.reserved_bytes
    used, asked = (min(BAR_COLUMNS, round(BAR_COLUMNS * count / usable)) for count in (total, needed))
    bar = f"[{'#' * used}{'+' * (asked - used)}{'.' * (BAR_COLUMNS - asked)}]"
    fits = "fits" if plan.fits else "may not fit"
    yield "memory", f"{bar} {needed / GIB:.1f} of {usable / GIB:.1f} GiB usable: {fits}"
    sizes = ", ".join(f"{name} {size}" for name, size in _memory_parts(plan).items())
    yield "", f"# {show_bytes(total)} at the peak, if all items have full length, + margin and reserve ({sizes})"


def _wrapped(label: str, value: str, *, hanging: int = 0) -> list[str]:
    return textwrap.wrap(
        redact(value),  # whole, before a secret is cut in two
        SCREEN_COLUMNS,
        initial_indent=label,
        subsequent_indent=" " * (len(label) + hanging),
        break_on_hyphens=False,
        break_long_words=False,
    )


# In full --------------------------------------------------------------------------------------------------------------


def explain_fully(plan: Plan, *, facts: Mapping[str, str]) -> str:
    """Return the plan with every fact, the arithmetic of its memory and every reason.

    Args:
        facts: Further facts by label, e.g. of the model.
    """
    rows = {
        **facts,
        "strategy": _strategy(plan),
        "batch": _batch(plan),
        "steps": _steps(plan),
        "chunk": _chunk(plan),
        "dtype": plan.dtype,
    }
    parts = {**_memory_parts(plan), "total": show_bytes(plan.bytes_per_device.total)}
    width = max(map(len, [*rows, *parts]))
    source = "estimated by a formula" if any(way.estimated for way in plan.candidates) else "of a run without data"
    lines = [
        "plan",
        *(f"  {label:<{width}}  {value}" for label, value in rows.items()),
        f"memory of one process (activations {source})",
        *(f"  {part:<{width}}  {count:>10}" for part, count in parts.items()),
    ]
    if apart := plan.bytes_per_device.apart:
        lines.append(f"  the total is that of the worst moment: {show_bytes(apart)} of the parts aren't there then")
    lines += ["why", *(f"  - {reason}" for reason in plan.reasons)]
    return redact("\n".join(lines))


def _memory_parts(plan: Plan) -> dict[str, str]:
    """Return the bytes of one process by what they hold."""
    sizes = asdict(plan.bytes_per_device)
    del sizes["apart"]  # no part: what of the others isn't there at the worst moment
    return {name: show_bytes(count) for name, count in sizes.items() if count or name in ALWAYS_SHOWN}


def _strategy(plan: Plan) -> str:
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


def _steps(plan: Plan) -> str:
    epochs = plan.steps.total / plan.steps.per_epoch
    passes = f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"
    return f"{plan.steps.total} ({passes} of {plan.steps.per_epoch}), {plan.steps.warmup} of warmup"


def _chunk(plan: Plan) -> str:
    if plan.chunks.tokens == WHOLE_BATCH:
        return "the whole batch"
    return f"at most {plan.chunks.tokens} padded tokens, {plan.chunks.rows} rows"


# All strategies -------------------------------------------------------------------------------------------------------

HEADER = (
    "strategy", "weights", "grads", "adam", "activ.", "loss", "other", "total", "host", "fits", "retain", "speed",
    "scaling", "sent",
)  # fmt: skip

LEGEND = (
    "GiB on each device. loss: embeddings and blocks of the similarity matrix; other: buckets, what sharding gathers;",
    "total: the worst moment, when not all of these are there.",
    "retain: part of the batch that isn't encoded twice. speed: 1 is forward and backward once without waiting;",
    "scaling: what communication leaves of that; sent: GiB in a step. Speeds are rough. *: chosen.",
)


def comparison(plan: Plan) -> str:
    """Return the table of all strategies, then the decision tree, the ladder, and more devices."""
    rows: list[tuple[str, ...]] = [HEADER]
    for candidate in plan.candidates:
        sizes, way = candidate.bytes_per_device, candidate.way
        # Of shards that only some devices share one way is enough, unless it was chosen.
        is_usual = way.sharding_factor in (1, plan.world_size, plan.way.sharding_factor)
        if not is_usual and (way.mode != "sharded" or way.cpu_offload or way.gradient_checkpointing):
            continue
        name = str(way) if way.mode is None else f"{way}, 1/{way.sharding_factor} (ZeRO-{way.zero_stage})"
        counts = (
            sizes.parameters, sizes.gradients, sizes.optimizer, sizes.activations, sizes.loss + sizes.embeddings,
            sizes.reduction + sizes.sharding, sizes.total, candidate.host_bytes,
        )  # fmt: skip
        rows.append((
            f"{'*' if plan.recommends(candidate) else ' '} {name}",
            *(f"{count / GIB:.2f}" for count in counts),
            "yes" if candidate.fits else "no",
            f"{candidate.chunks.kept_share:.2f}" if way.gradient_cache else "all",
            f"{candidate.relative_speed:.2f}",
            f"{candidate.scaling_efficiency:.0%}",
            f"{candidate.communication_bytes / GIB:.2f}",
        ))  # fmt: skip
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    table = []
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        table.append("  ".join([row[0].ljust(widths[0]), *numbers]))
    blocks = {
        "strategies": (*table, *LEGEND),
        "ZeRO stages": plan.zero_stages,
        "decision tree": plan.decision_tree,
        "if a step still runs out of memory": plan.oom_ladder,
        "as devices are added, each with its batch": plan.scaling,
    }
    return "\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in blocks.items() if lines)


# Advice ---------------------------------------------------------------------------------------------------------------


def decision_tree(problem: PlanningProblem, chosen: Candidate) -> Iterator[str]:
    """Yield the questions that lead to the strategy with their answers."""
    unset = problem.config.model_copy(update=dict.fromkeys(DECIDING_KEYS, "auto"))
    alone = _on(replace(problem, config=unset), 1)
    full = [weigh(alone, way) for way in all_ways(alone) if not way.use_lora]
    if fitting := [candidate for candidate in full if candidate.fits]:
        best = max(fitting, key=lambda candidate: candidate.relative_speed)
        yield f"Does it fit on one device? Yes: {best.way} needs {show_bytes(best.least_bytes)}."
    else:
        least = min(full, key=lambda candidate: candidate.least_bytes)
        needed = FIT_FACTOR * least.least_bytes + alone.reserved_bytes(least.way)
        missing = needed - FIT_SHARE * problem.devices.memory_bytes
        yield (
            f"Does it fit on one device? No: even {least.way} needs {show_bytes(least.least_bytes)}, and with reserve "
            f"{show_bytes(missing)} are missing."
        )

    count = problem.devices.count
    if count == 1:
        yield "Must it be faster? More devices share the batch: --devices 4x24GB shows what they would do."
    else:
        yield (
            f"Must it be faster? {count} devices as {chosen.way} do the work of {count * chosen.relative_speed:.3g} "
            f"that never wait and encode nothing twice; {1 - chosen.scaling_efficiency:.0%} of a step is communication."
        )

    limit = problem.limit_bytes(chosen.way)
    if chosen.fits:
        spare = max(0, limit - chosen.bytes_per_device.total)
        yield f"How much memory is missing? None: {show_bytes(spare)} are to spare, reserve left out."
    else:
        missing = max(0, chosen.least_bytes - limit)
        yield f"How much memory is missing? {show_bytes(missing)} on each device, with reserve."


def oom_ladder(problem: PlanningProblem, chosen: Candidate) -> Iterator[str]:
    """Yield what to do, in this order, when a step runs out of memory after all; numbered from 1."""
    count = problem.devices.count
    way, now = chosen.way, chosen.least_bytes
    changes: dict[str, Candidate] = {}  # what is changed -> what it costs then
    if not way.gradient_checkpointing and problem.model.checkpointable:
        changes["gradient_checkpointing: true"] = weigh(problem, replace(way, gradient_checkpointing=True))
    if way.mode != "sharded" and count > 1 and not problem.config.load_in_4bit:
        key = "use_fsdp: true" if way.mode is None else "fsdp_mode: sharded"
        strategy: Strategy = "fsdp_lora" if way.use_lora else "fsdp"
        sharded = Way(strategy, True, way.gradient_checkpointing, way.use_lora, "sharded", count)
        changes[key] = weigh(problem, sharded)
    halved, doubled = _half_batch(problem), _on(problem, 2 * count)
    changes["half the batch"] = weigh(halved, way)
    if way.mode is None:  # each device has half the rows, and the embeddings of as many as before
        rows = replace(problem.rows, num_queries=halved.rows.num_queries, num_documents=halved.rows.num_documents)
        shared = replace(doubled, rows=rows, num_pictures=halved.num_pictures)
        changes["twice the devices, the same batch over all"] = weigh(shared, way)
    else:
        wider = replace(way, sharding_factor=2 * way.sharding_factor)
        changes["twice the devices"] = weigh(doubled, wider)

    first = 1
    if way.gradient_cache and now < chosen.bytes_per_device.total:
        yield (
            f"1. nothing to do: the step is done again in smaller chunks (oom_retry); with retain 0 it needs "
            f"{show_bytes(now)} instead of {show_bytes(chosen.bytes_per_device.total)}"
        )
        first = 2
    for number, (change, candidate) in enumerate(changes.items(), start=first):
        saved = now - candidate.least_bytes
        effect = f"{show_bytes(saved)} less" if saved > 0 else "which saves nothing"
        yield f"{number}. {change}: {show_bytes(candidate.least_bytes)} a device, {effect}"


def zero_stages(problem: PlanningProblem) -> Iterator[str]:
    """Yield the formulas of the ZeRO stages with this model's numbers; nothing on one device.

    M bytes of weights, k states of the optimizer, N devices. Source: ZeRO (Rajbhandari et al., 2020).
    """
    count, model = problem.devices.count, problem.model
    if count == 1:
        return
    one_batch = {"use_lora": False, "gradient_accumulation_steps": 1}  # the formulas count one gradient of each weight
    plain = replace(problem, config=problem.config.model_copy(update=one_batch))
    held = model.num_parameters * model.bytes_per_value
    size = f"M = {show_count(model.num_parameters)} parameters x {model.bytes_per_value} bytes = {show_bytes(held)}"
    yield f"{size}, k = {ADAM_STATES} (AdamW), N = {count}, before activations"
    fast, lean, sharded = (Way("fsdp", True, mode=mode, sharding_factor=count) for mode in MODES)
    stages = (
        ("DP M(1+1+k)", 2 + ADAM_STATES, Way("ddp")),
        ("ZeRO-1 M(1+1+k/N), fsdp fast", 2 + ADAM_STATES / count, fast),
        ("ZeRO-2 M(1+(1+k)/N), fsdp lean", 1 + (1 + ADAM_STATES) / count, lean),
        ("ZeRO-3 M(1+1+k)/N, fsdp sharded", (2 + ADAM_STATES) / count, sharded),
    )
    for name, factor, way in stages:
        sizes = weigh(plain, way).bytes_per_device
        here = sizes.parameters + sizes.gradients + sizes.optimizer
        same = abs(here - factor * held) < 0.01 * here
        differs = "" if same else f"; here {show_bytes(here)}, by what trains and in which type weights are gathered"
        yield f"{name} = {show_bytes(factor * held)}{differs}"


def scaling_lines(problem: PlanningProblem) -> Iterator[str]:
    """Yield what would be chosen on 1, 2, 4 ... devices, each with its present batch: most of the work of a plan.

    The speed is in devices that never wait for each other and encode nothing twice.
    """
    most = max(8, 2 * problem.devices.count)
    count = 1
    while count <= most:
        spread = _on(problem, count)
        chosen = choose(spread)[0]
        fits = "" if chosen.fits else " (too much)"
        where = f" on {spread.devices.nodes} machines" if spread.devices.nodes > 1 else ""
        yield (
            f"{count}{where}: {chosen.way}, {show_bytes(chosen.bytes_per_device.total)} each{fits}, speed "
            f"{count * chosen.relative_speed:.3g}, {chosen.scaling_efficiency:.0%} of each step computes"
        )
        count *= 2


def _on(problem: PlanningProblem, count: int) -> PlanningProblem:
    """Return the problem for another number of devices, each with its present batch."""
    rows, devices = problem.rows, problem.devices
    nodes = math.ceil(count / devices.per_node)
    return replace(
        problem,
        config=problem.config.model_copy(update={"sharding_factor": "auto"}),  # which may not divide that number
        devices=replace(devices, count=count, nodes=nodes),
        rows=BatchRows(rows.num_queries, rows.num_documents, count * rows.num_queries, count * rows.num_documents),
    )


def _half_batch(problem: PlanningProblem) -> PlanningProblem:
    rows = problem.rows
    counts = (rows.num_queries, rows.num_documents, rows.all_queries, rows.all_documents)
    halved = BatchRows(*(-(-count // 2) for count in counts))
    return replace(problem, rows=halved, num_pictures=problem.num_pictures / 2)
