"""Whether the layers of an encoder are compiled: what that saves against what it takes. Seconds are rough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.plan.chunks import num_calls
from vembed.text import show_bytes

if TYPE_CHECKING:
    from vembed.plan.cost_model import Candidate
    from vembed.plan.problem import PlanningProblem

SAVED_SHARE = 0.15
"""Of a step, by fusing what stands between the matrix products of a layer."""

GRAPHS_PER_TOWER = 3
"""Without gradients, with them, and for evaluation."""

SECONDS_PER_GRAPH = 60

LEAST_GAIN = 2
"""So many times the seconds of compiling must be saved, as both are guesses."""

PROVEN_ON: frozenset[str] = frozenset()
"""Devices by a part of their name, as "H100", whose compile rows of benchmarks/gpu_proof.py held: none was tried."""


def plan_compiling(problem: PlanningProblem, chosen: Candidate, *, num_batches: int) -> tuple[bool, tuple[str, ...]]:
    """Return whether layers are compiled, and why.

    Args:
        num_batches: Of the whole run.

    Raises:
        ConfigError: They are to be and can't.
    """
    asked = problem.config.compile
    if asked is False or (asked == "auto" and problem.machine.device != "cuda"):
        return False, ()
    obstacle = _obstacle(problem, chosen)
    if obstacle and asked is True:
        raise ConfigError(f"compile: {obstacle}; set compile to auto or false")
    if obstacle:
        return False, (f"compile: off, as {obstacle}",)
    graphs = GRAPHS_PER_TOWER * sum(tower.largest_block < tower.num_parameters for tower in problem.model.towers)
    saved, taken = SAVED_SHARE * chosen.compute_seconds * num_batches, graphs * SECONDS_PER_GRAPH
    compiles = asked is True or saved >= LEAST_GAIN * taken
    copies, room = _copies(problem, chosen), problem.limit_bytes(chosen.way) - chosen.bytes_per_device.total
    is_proven = any(name in problem.machine.device_name for name in PROVEN_ON)
    if compiles and asked == "auto" and not is_proven:
        note = (
            f"compile: off, as compiled layers aren't proven on {problem.machine.device_name} yet (docs/gpu.md); "
            f"compile: true takes about {taken:,} s and may save about {saved:,.0f} s"
        )
        return False, (note,)
    if compiles and copies > room:
        held = f"kept calls of compiled layers hold {show_bytes(copies)} of weights in {problem.dtype}"
        spare = f"{show_bytes(max(0, room))} are to spare"
        if asked is True:
            return True, (f"compile: on, as set; {held}, and {spare}: set retain: 0",)
        return False, (f"compile: off, as {held}, and {spare}; retain: 0 makes room",)
    word = "on, as set" if asked is True else "on" if compiles else "off"
    note = (
        f"compile: {word}: {graphs} kinds of graphs take about {taken:,} s to compile and save about {saved:,.0f} s "
        f"({SAVED_SHARE:.0%} of {num_batches:,} steps of about {chosen.compute_seconds:.2g} s)"
    )
    return compiles, (note,)


def _copies(problem: PlanningProblem, chosen: Candidate) -> int:
    """Return the bytes of weights that the kept calls hold beside the copy of the step.

    Mixed precision casts a weight once a step; a compiled layer does so in each call, and keeps it with its graph.
    """
    chunks = chosen.chunks
    if chosen.way.gradient_checkpointing:
        return 0
    total = 0
    for tower in problem.sized(chosen.way).towers:
        kept = chunks.kept_share * problem.tower_rows(tower)
        calls = num_calls(kept, tower.max_tokens or 1, chunks.tokens, chunks.rows)
        total += max(0, calls - 1) * tower.cast_bytes
    return total


def _obstacle(problem: PlanningProblem, chosen: Candidate) -> str:
    """Say why the layers can't be compiled; empty where they can."""
    config, half = problem.config, ("bfloat16", "float16")
    if all(tower.largest_block == tower.num_parameters for tower in problem.model.towers):
        return "the model has no list of equal layers"
    if config.load_in_4bit:
        return "weights of 4 bits have kernels of their own"
    # torch refuses to trace a weight whose gradient is of another type.
    if chosen.way.mode is not None and problem.dtype in half:
        return f"sharded layers hold weights in {problem.dtype} beside gradients in float32"
    if config.torch_dtype in half and not chosen.way.use_lora:
        return f"weights in {config.torch_dtype} have gradients in float32"
    return ""
