"""What a user may do next, with numbers: the decision tree, the steps when memory runs out, more devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vembed.plan.cost_model import weigh
from vembed.plan.memory import ADAM_STATES, BatchRows
from vembed.plan.problem import FIT_FACTOR, FIT_SHARE, Way, all_ways
from vembed.plan.strategy import DECIDING_KEYS, choose
from vembed.text import show_bytes, show_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.plan.cost_model import Candidate
    from vembed.plan.problem import Mode, PlanningProblem
    from vembed.plan.strategy import Choice


@dataclass(frozen=True, slots=True)
class Advice:
    """What a user may do next, in lines of text."""

    decision_tree: tuple[str, ...]  # the questions that lead to the strategy, answered
    oom_ladder: tuple[str, ...]  # what to do, in this order, when a step runs out of memory all the same
    zero_stages: tuple[str, ...]  # weights, gradients and optimizer state by what is sharded; empty in one process
    scaling: tuple[str, ...]  # what more or fewer devices would do


def advise(problem: PlanningProblem, choice: Choice) -> Advice:
    """Return what a user may do next."""
    tree = (_one_device(problem), _faster(problem, choice), _missing(problem, choice))
    return Advice(tree, _oom_ladder(problem, choice), _zero_lines(problem), tuple(_scaling(problem)))


def _oom_ladder(problem: PlanningProblem, choice: Choice) -> tuple[str, ...]:
    """Say what to do, in this order, when a step runs out of memory after all."""
    chosen = choice.chosen
    way, now = chosen.way, chosen.least_bytes
    steps = []
    if way.gradient_cache and now < chosen.bytes_per_device.total:
        steps.append(
            f"nothing to do: the step is done again in smaller chunks (oom_retry); with retain 0 it needs "
            f"{show_bytes(now)} instead of {show_bytes(chosen.bytes_per_device.total)}"
        )
    if not way.gradient_checkpointing and problem.model.checkpointable:
        steps.append(
            _change("gradient_checkpointing: true", weigh(problem, replace(way, gradient_checkpointing=True)), now)
        )
    if way.mode != "sharded" and problem.devices.count > 1 and not problem.config.load_in_4bit:
        key = "use_fsdp: true" if way.mode is None else "fsdp_mode: sharded"
        sharded = Way(
            "fsdp_lora" if way.use_lora else "fsdp", True, way.gradient_checkpointing, way.use_lora, "sharded",
            problem.devices.count,
        )  # fmt: skip
        steps.append(_change(key, weigh(problem, sharded), now))
    steps.append(_change("half the batch", weigh(_half_batch(problem), way), now))
    doubled = replace(problem, devices=replace(problem.devices, count=2 * problem.devices.count))
    if way.mode is None:
        steps.append(_change("twice the devices, the same batch over all", weigh(_half_batch(doubled), way), now))
    else:
        wider = replace(way, sharding_factor=2 * way.sharding_factor)
        steps.append(_change("twice the devices", weigh(doubled, wider), now))
    return tuple(f"{number}. {step}" for number, step in enumerate(steps, start=1))


def _zero_lines(problem: PlanningProblem) -> tuple[str, ...]:
    """Return the formulas of the ZeRO stages with this model's numbers; nothing on one device."""
    count, model = problem.devices.count, problem.model
    if count == 1:
        return ()
    plain = replace(problem, config=problem.config.model_copy(update={"use_lora": False}))
    held = model.num_parameters * model.bytes_per_value
    size = f"M = {show_count(model.num_parameters)} parameters x {model.bytes_per_value} bytes = {show_bytes(held)}"
    lines = [f"{size}, k = {ADAM_STATES} (AdamW), N = {count}, before activations"]
    stages = (
        ("DP M(1+1+k)", 2 + ADAM_STATES, Way("ddp")),
        ("ZeRO-1 M(1+1+k/N), fsdp fast", 2 + ADAM_STATES / count, _whole(count, "fast")),
        ("ZeRO-2 M(1+(1+k)/N), fsdp lean", 1 + (1 + ADAM_STATES) / count, _whole(count, "lean")),
        ("ZeRO-3 M(1+1+k)/N, fsdp sharded", (2 + ADAM_STATES) / count, _whole(count, "sharded")),
    )
    for name, factor, way in stages:
        sizes = weigh(plain, way).bytes_per_device
        here = sizes.parameters + sizes.gradients + sizes.optimizer
        same = abs(here - factor * held) < 0.01 * here
        differs = "" if same else f"; here {show_bytes(here)}, by what trains and in which type weights are gathered"
        lines.append(f"{name} = {show_bytes(factor * held)}{differs}")
    return tuple(lines)


def _whole(count: int, mode: Mode) -> Way:
    return Way("fsdp", True, mode=mode, sharding_factor=count)


def _scaling(problem: PlanningProblem) -> Iterator[str]:
    """Yield what would be chosen on 1, 2, 4 ... devices, each with its present batch.

    The speed is in devices that never wait for each other and encode nothing twice.
    """
    most = max(8, 2 * problem.devices.count)
    count = 1
    while count <= most:
        chosen = choose(_on(problem, count)).chosen
        fits = "" if chosen.fits else " (too much)"
        nodes = max(1, count // problem.devices.per_node)
        where = f" on {nodes} machines" if nodes > 1 else ""
        yield (
            f"{count}{where}: {chosen.way}, {show_bytes(chosen.bytes_per_device.total)} each{fits}, speed "
            f"{count * chosen.relative_speed:.3g}, {chosen.scaling_efficiency:.0%} of each step computes"
        )
        count *= 2


def _on(problem: PlanningProblem, count: int) -> PlanningProblem:
    """Return the problem for another number of devices, each with its present batch."""
    rows, devices = problem.rows, problem.devices
    nodes = max(1, count // devices.per_node)
    config = problem.config.model_copy(update={"sharding_factor": "auto"})
    return replace(
        problem,
        config=config,
        devices=replace(devices, count=count, nodes=nodes),
        rows=BatchRows(rows.num_queries, rows.num_documents, count * rows.num_queries, count * rows.num_documents),
    )


def _half_batch(problem: PlanningProblem) -> PlanningProblem:
    rows = problem.rows
    halved = BatchRows(
        -(-rows.num_queries // 2), -(-rows.num_documents // 2), -(-rows.all_queries // 2), -(-rows.all_documents // 2)
    )
    return replace(problem, rows=halved, num_pictures=problem.num_pictures / 2)


def _one_device(problem: PlanningProblem) -> str:
    alone = _on(replace(problem, config=problem.config.model_copy(update=dict.fromkeys(DECIDING_KEYS, "auto"))), 1)
    full = [weigh(alone, way) for way in all_ways(alone) if not way.use_lora]
    fitting = [each for each in full if each.fits]
    if fitting:
        best = max(fitting, key=lambda each: each.relative_speed)
        return f"Does it fit on one device? Yes: {best.way} needs {show_bytes(best.least_bytes)}."
    least = min(full, key=lambda each: each.least_bytes)
    reserved = sum(alone.reserve(least.way).values())
    missing = FIT_FACTOR * least.least_bytes + reserved - FIT_SHARE * problem.devices.memory_bytes
    return (
        f"Does it fit on one device? No: even {least.way} needs {show_bytes(least.least_bytes)}, and with reserve "
        f"{show_bytes(missing)} are missing."
    )


def _faster(problem: PlanningProblem, choice: Choice) -> str:
    count, chosen = problem.devices.count, choice.chosen
    if count == 1:
        return "Must it be faster? More devices share the batch: --devices 4x24GB shows what they would do."
    speed = f"{count * chosen.relative_speed:.3g}"
    return (
        f"Must it be faster? {count} devices as {chosen.way} do the work of {speed} that never wait and encode "
        f"nothing twice; {1 - chosen.scaling_efficiency:.0%} of a step is communication."
    )


def _missing(problem: PlanningProblem, choice: Choice) -> str:
    chosen = choice.chosen
    limit = problem.limit_bytes(chosen.way)
    if chosen.fits:
        spare = limit - chosen.bytes_per_device.total
        return f"How much memory is missing? None: {show_bytes(max(0, spare))} are to spare, reserve left out."
    missing = chosen.least_bytes - limit
    return f"How much memory is missing? {show_bytes(max(0, missing))} on each device, with reserve."


def _change(key: str, candidate: Candidate, now: int) -> str:
    saved = now - candidate.least_bytes
    effect = f"{show_bytes(saved)} less" if saved > 0 else "which saves nothing"
    return f"{key}: {show_bytes(candidate.least_bytes)} a device, {effect}"
