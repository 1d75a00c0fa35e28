"""How many tokens one encoder call sees, and how much of a batch keeps its graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vembed.text import show_bytes

if TYPE_CHECKING:
    from vembed.plan.memory import ModelSize
    from vembed.plan.problem import PlanningProblem, Way

CPU_CHUNK_BYTES = 128 << 20
"""Activations of one chunk on a CPU. Small chunks stay in its caches and cost no launch, so less padding wins."""

CALL_SECONDS = 0.02
"""Seconds of compute of a call at an accelerator's peak: enough that launching its kernels costs little beside it."""

CALL_SHARE = 0.25
"""Most of an accelerator's spare memory that a call takes."""

WHOLE_BATCH = 2**31 - 1
"""Rows and tokens of a chunk that holds any batch: plain training."""

LEAST_CHUNK_TOKENS = 512
MOST_CHUNK_ROWS = 512
ACCELERATOR_CHUNK_ROWS = 16_384  # short rows are cut by their tokens alone

RESHARDING_SHARE = 0.5
"""Of the spare memory, what a call takes that gathers the weights anew: few, large calls gather seldom."""

CPU_RETAINED_SHARE, ACCELERATOR_RETAINED_SHARE = 0.25, 0.5
"""Most of the spare memory that `retain: auto` takes. The prediction is a formula; a CPU that runs out kills the run,
an accelerator that runs out is repaired, and both share their memory with others."""

MEASURED_RETAINED_SHARE = 0.9
"""The same on an accelerator where the activations are those of the model's own operations and not of a formula."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a batch is cut."""

    rows: int  # most rows of one encoder call
    tokens: int  # most padded tokens of one encoder call
    retain: float  # share of the batch whose graphs are kept, at most
    retain_tokens: int | None  # most padded tokens whose graphs are kept; None where only the share limits
    kept_share: float  # share of a batch of longest items that is kept under both limits
    activation_bytes: int  # activations that live at once, at most
    reasons: tuple[str, ...]  # why, one plain sentence each


def choose_chunks(problem: PlanningProblem, way: Way, *, room_bytes: int) -> ChunkPlan:
    """Return the chunks of a batch, before anything is retained.

    Args:
        room_bytes: Memory beside everything but activations.
    """
    model, checkpointed = problem.sized(way), way.gradient_checkpointing
    rows, tokens, reasons = _budget(problem, way, room_bytes)
    if problem.config.use_gradient_cache is False:
        whole = "use_gradient_cache false: the batch is encoded in one call, memory grows with the batch"
        # Without a limit of length nothing says how long a batch is: one chunk's worth is assumed.
        live = whole_batch_bytes(problem, way, call_tokens=None)
        if live is None:
            live = model.call_bytes(tokens, checkpointed=checkpointed)
        return ChunkPlan(WHOLE_BATCH, WHOLE_BATCH, 1.0, None, 1.0, live, (*reasons, whole))
    caching = (
        "gradient caching: memory is that of one chunk and of the kept graphs; only what isn't kept is encoded twice"
    )
    live = model.call_bytes(tokens, checkpointed=checkpointed)
    return ChunkPlan(rows, tokens, 0.0, None, 0.0, live, (*reasons, caching))


def plan_retention(problem: PlanningProblem, way: Way, chunks: ChunkPlan, *, room_bytes: int) -> ChunkPlan:
    """Return the chunks with the part of a batch whose graphs are kept from the first pass.

    Args:
        room_bytes: Memory beside everything else that a step needs.
    """
    config, model = problem.config, problem.sized(way)
    if config.use_gradient_cache is False:
        return chunks
    batch_tokens = _batch_tokens(problem, model)
    whole = whole_batch_bytes(problem, way, call_tokens=chunks.tokens)
    if config.retain != "auto":
        share = float(config.retain)
        kept_bytes = 0 if whole is None else int(share * _kept_bytes(problem, way, model, chunks.tokens))
        reason = f"retain {share:g}: share of the batch that keeps its graphs and isn't encoded again; as set"
        live = whole if whole is not None and share == 1 else chunks.activation_bytes + kept_bytes
        reasons = (*chunks.reasons, reason)
        return replace(chunks, retain=share, kept_share=share, activation_bytes=live, reasons=reasons)
    each = model.kept_bytes_per_token(checkpointed=way.gradient_checkpointing, call_tokens=chunks.tokens)
    # Kept graphs are gone when the first call is encoded again: they take its place. What counts on it is the timeline
    # of the step, which needs measured activations and a longest item. A CPU stays on the safe side: it kills the run.
    is_safe = problem.machine.device != "cpu" and not model.estimated and batch_tokens is not None
    part, room = _retained_part(problem), max(0, room_bytes + (each * chunks.tokens if is_safe else 0))
    fitting = int(part * room) // each
    known = problem.sampled_tokens if batch_tokens is None else batch_tokens
    kept = fitting if known is None else min(fitting, known)
    why = f"{part:.0%} of {show_bytes(room)} to spare holds the activations of {fitting} tokens"
    why += f" at {show_bytes(each)} each"
    live = chunks.activation_bytes + kept * each
    if known is None:
        why += "; nothing says how long rows are, so memory is predicted for a batch that has so many"
    elif kept == known:
        source = "" if batch_tokens is not None else " by a sample of the data"
        why += f", and a batch of {problem.rows.own} rows has at most {known}{source}: nothing is encoded twice"
        live = min(live, whole or live)
    most = fitting if batch_tokens is None else kept  # a sample limits nothing: longer rows may come
    return replace(
        chunks,
        retain=1.0,
        retain_tokens=most,
        kept_share=0.0 if known is None else kept / max(1, known),
        activation_bytes=live,
        reasons=(
            *chunks.reasons,
            f"retain: at most {most} tokens of a batch keep their graphs and aren't encoded again; {why}",
        ),
    )


def whole_batch_bytes(problem: PlanningProblem, way: Way, *, call_tokens: int | None) -> int | None:
    """Return the activations of a device's batch with all graphs kept; None where nothing says how long items are.

    Where items have no limit of length, the batch is as long as a sample of the data says.

    Args:
        call_tokens: Padded tokens of an encoder call; None encodes each tower's items in one.
    """
    model = problem.sized(way)
    checkpointed = way.gradient_checkpointing
    if model.max_length is None:
        if (tokens := problem.sampled_tokens) is None:
            return None
        call = tokens if call_tokens is None else min(call_tokens, tokens)
        each = model.kept_bytes_per_token(checkpointed=checkpointed, call_tokens=call)
        return model.call_bytes(call, checkpointed=checkpointed) + (tokens - call) * each
    passing = 0.0
    for tower in model.towers:
        width, rows = tower.max_tokens or 1, problem.tower_rows(tower)
        if call_tokens is not None:
            rows = min(rows, max(1.0, call_tokens / width))
        passing = max(
            passing,
            tower.peak(rows, width, checkpointed=checkpointed) - tower.kept(checkpointed=checkpointed).of(rows, width),
        )
    return model.cast_bytes + _kept_bytes(problem, way, model, call_tokens) + int(passing)


def num_calls(rows: float, width: int, call_tokens: int | None, most_rows: int = WHOLE_BATCH) -> int:
    """Return the encoder calls that rows of equal width need."""
    if rows <= 0:
        return 0
    return 1 if call_tokens is None else math.ceil(rows / max(1, min(most_rows, call_tokens // max(1, width))))


def _kept_bytes(problem: PlanningProblem, way: Way, model: ModelSize, call_tokens: int | None) -> int:
    """Return what all calls of a batch keep for their backward passes."""
    if model.max_length is None:
        each = model.kept_bytes_per_token(checkpointed=way.gradient_checkpointing, call_tokens=call_tokens or math.inf)
        return each * (problem.sampled_tokens or 0)
    total = 0.0
    for tower in model.towers:
        width, rows = tower.max_tokens or 1, problem.tower_rows(tower)
        cost = tower.kept(checkpointed=way.gradient_checkpointing)
        total += cost.of(rows, width) + cost.per_call * (num_calls(rows, width, call_tokens) - 1)
    return int(total)


def _batch_tokens(problem: PlanningProblem, model: ModelSize) -> int | None:
    if model.max_length is None:
        return None
    return math.ceil(sum(problem.tower_rows(tower) * (tower.max_tokens or 1) for tower in model.towers))


def _retained_part(problem: PlanningProblem) -> float:
    if problem.machine.device == "cpu":
        return CPU_RETAINED_SHARE
    return ACCELERATOR_RETAINED_SHARE if problem.model.estimated else MEASURED_RETAINED_SHARE


def _budget(problem: PlanningProblem, way: Way, room_bytes: int) -> tuple[int, int, tuple[str, ...]]:
    """Return the most rows and the most padded tokens of one encoder call, and why."""
    config, model = problem.config, problem.sized(way)
    on_cpu = problem.machine.device == "cpu"
    rows = config.gradient_cache_chunk_size
    if rows == "auto":
        rows = MOST_CHUNK_ROWS if on_cpu else ACCELERATOR_CHUNK_ROWS
    if config.gradient_cache_chunk_tokens != "auto":
        return rows, config.gradient_cache_chunk_tokens, ()
    if config.gradient_cache_chunk_size != "auto" and model.max_length is not None:
        return rows, rows * model.max_length, ()  # the user thinks in rows: tokens must not cut their chunks shorter
    each = model.call_bytes_per_token(checkpointed=way.gradient_checkpointing)
    wanted = CPU_CHUNK_BYTES // each if on_cpu else _accelerator_tokens(problem, way, room_bytes // each)
    tokens = max(LEAST_CHUNK_TOKENS, model.max_length or 0, wanted)
    reason = (
        f"gradient_cache_chunk_tokens {tokens}: {show_bytes(tokens * each)} of activations at {show_bytes(each)} a "
        f"token{' (estimated)' if model.estimated else ''}"
    )
    if way.resharding:
        reason += "; large, as each call gathers the weights anew"
    elif not on_cpu:
        reason += f"; {1000 * tokens / _tokens_a_second(problem, model):.1f} ms of the device at its peak"
    return rows, tokens, (reason,)


def _accelerator_tokens(problem: PlanningProblem, way: Way, room_tokens: int) -> int:
    """Return the padded tokens of a call that keeps an accelerator busy, and no more than a part of what fits.

    Args:
        room_tokens: Tokens of which the activations fill the spare memory.
    """
    model = problem.sized(way)
    if way.resharding:
        each = model.call_bytes_per_token(checkpointed=way.gradient_checkpointing)
        return min(problem.devices.memory_bytes // 4 // each, int(RESHARDING_SHARE * room_tokens))
    busy = int(CALL_SECONDS * _tokens_a_second(problem, model))
    return min(busy, int(CALL_SHARE * room_tokens), _batch_tokens(problem, model) or busy)


def _tokens_a_second(problem: PlanningProblem, model: ModelSize) -> float:
    """Return the tokens that a device encodes at its peak, in the tower where they cost most."""
    widths = [tower.max_tokens or 1 for tower in model.towers]
    costs = [tower.forward_flops.of(1, width) / width for tower, width in zip(model.towers, widths, strict=True)]
    return problem.peak_operations / max(1.0, *costs)
