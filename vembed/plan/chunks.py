"""Encoder calls: how many tokens one sees, in training and in evaluation, and how much of a batch keeps its graph.

1. `choose_chunks` sizes a call before anything is kept: on a CPU small enough for its caches, on an accelerator large
   enough to keep it busy.
2. `plan_retention` gives what memory is left to graphs of the first pass: what is kept isn't encoded twice.
3. `evaluation_calls` sizes calls without graphs, which may be larger.

A row counts with the model's greatest length: the plan knows no batch. The engine cuts real batches by the same limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vembed.text import show_bytes

if TYPE_CHECKING:
    from vembed.plan.cost import Candidate
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

CPU_EVALUATION_ROWS = 256

EVALUATION_SECONDS = 0.08
"""Work of the largest calls of an evaluation at the peak of an accelerator. Items of unequal lengths come in quarters
of it, and even beside those the cost of launching doesn't count."""

EVALUATION_SHARE = 0.25
"""Of the memory beside weights and optimizer, what a call of an evaluation may take."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Limits of encoder calls, and of what keeps its graph."""

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
    config, model, checkpointed = problem.config, problem.sized(way), way.gradient_checkpointing
    on_cpu = problem.machine.device == "cpu"
    reasons: list[str] = []
    rows = config.gradient_cache_chunk_size
    if rows == "auto":
        rows = MOST_CHUNK_ROWS if on_cpu else ACCELERATOR_CHUNK_ROWS

    if config.gradient_cache_chunk_tokens != "auto":
        tokens = config.gradient_cache_chunk_tokens
    elif config.gradient_cache_chunk_size != "auto" and model.max_length is not None:
        tokens = rows * model.max_length  # the user thinks in rows: tokens must not cut their chunks shorter
    else:
        token_bytes = model.call_bytes_per_token(checkpointed=checkpointed)
        least = max(LEAST_CHUNK_TOKENS, model.max_length or 0)  # at least one row of the longest
        why = "; large, as each call gathers the weights anew" if way.resharding else ""
        if on_cpu:
            tokens = max(least, CPU_CHUNK_BYTES // token_bytes)
        elif way.resharding:
            # The fewer calls, the less goes over the links: only memory limits them.
            fitting = int(RESHARDING_SHARE * (room_bytes // token_bytes))
            tokens = max(least, min(problem.devices.memory_bytes // 4 // token_bytes, fitting))
        else:
            # Tokens a second at the peak, in the tower where they cost most. No call needs more than the batch has.
            widths = [tower.max_tokens or 1 for tower in model.towers]
            flops = [
                tower.forward_flops.of(1, width) / width for tower, width in zip(model.towers, widths, strict=True)
            ]
            speed = problem.peak_operations / max(1.0, *flops)
            busy, fitting = int(CALL_SECONDS * speed), int(CALL_SHARE * (room_bytes // token_bytes))
            tokens = max(least, min(busy, fitting, _batch_tokens(problem, model) or busy))
            why = f"; {1000 * tokens / speed:.1f} ms of the device at its peak"
        reasons.append(
            f"gradient_cache_chunk_tokens {tokens}: {show_bytes(tokens * token_bytes)} of activations at "
            f"{show_bytes(token_bytes)} a token{' (estimated)' if model.estimated else ''}{why}"
        )

    live = model.call_bytes(tokens, checkpointed=checkpointed)
    if config.use_gradient_cache is False:
        reasons.append("use_gradient_cache false: the batch is encoded in one call, memory grows with the batch")
        # Without a limit of length nothing says how long a batch is: one chunk's worth is assumed.
        whole = whole_batch_bytes(problem, way, call_tokens=None)
        return ChunkPlan(WHOLE_BATCH, WHOLE_BATCH, 1.0, None, 1.0, live if whole is None else whole, tuple(reasons))
    reasons.append(
        "gradient caching: memory is that of one chunk and of the kept graphs; only what isn't kept is encoded twice"
    )
    return ChunkPlan(rows, tokens, 0.0, None, 0.0, live, tuple(reasons))


def plan_retention(problem: PlanningProblem, way: Way, chunks: ChunkPlan, *, room_bytes: int) -> ChunkPlan:
    """Return the chunks with the part of a batch whose graphs are kept from the first pass.

    Args:
        room_bytes: Memory beside everything else that a step needs.
    """
    config, model = problem.config, problem.sized(way)
    if config.use_gradient_cache is False:
        return chunks
    whole = whole_batch_bytes(problem, way, call_tokens=chunks.tokens)
    if config.retain != "auto":
        share = float(config.retain)
        kept_bytes = 0 if whole is None else int(share * _kept_bytes(problem, way, model, chunks.tokens))
        reason = f"retain {share:g}: share of the batch that keeps its graphs and isn't encoded again; as set"
        live = whole if whole is not None and share == 1 else chunks.activation_bytes + kept_bytes
        reasons = (*chunks.reasons, reason)
        return replace(chunks, retain=share, kept_share=share, activation_bytes=live, reasons=reasons)

    token_bytes = model.kept_bytes_per_token(checkpointed=way.gradient_checkpointing, call_tokens=chunks.tokens)
    batch_tokens = _batch_tokens(problem, model)
    on_cpu = problem.machine.device == "cpu"
    # Kept graphs are gone when the first call is encoded again: they take its place. What counts on it is the timeline
    # of the step, which needs measured activations and a longest item. A CPU stays on the safe side: it kills the run.
    is_safe = not on_cpu and not model.estimated and batch_tokens is not None
    room = max(0, room_bytes + (token_bytes * chunks.tokens if is_safe else 0))
    part = ACCELERATOR_RETAINED_SHARE if problem.model.estimated else MEASURED_RETAINED_SHARE
    if on_cpu:
        part = CPU_RETAINED_SHARE
    fitting = int(part * room) // token_bytes

    # A batch of rows without a limit of length is as long as a sample says, or of unknown length.
    known = problem.sampled_tokens if batch_tokens is None else batch_tokens
    kept = fitting if known is None else min(fitting, known)
    why = f"{part:.0%} of {show_bytes(room)} to spare holds the activations of {fitting} tokens"
    why += f" at {show_bytes(token_bytes)} each"
    live = chunks.activation_bytes + kept * token_bytes
    if known is None:
        why += "; nothing says how long rows are, so memory is predicted for a batch that has so many"
    elif kept == known:
        source = "" if batch_tokens is not None else " by a sample of the data"
        why += f", and a batch of {problem.rows.local} rows has at most {known}{source}: nothing is encoded twice"
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
    model, checkpointed = problem.sized(way), way.gradient_checkpointing
    if model.max_length is None:
        if (tokens := problem.sampled_tokens) is None:
            return None
        call = tokens if call_tokens is None else min(call_tokens, tokens)
        token_bytes = model.kept_bytes_per_token(checkpointed=checkpointed, call_tokens=call)
        return model.call_bytes(call, checkpointed=checkpointed) + (tokens - call) * token_bytes
    # All calls keep their graphs, and one at a time takes more than it keeps: the worst of the towers counts.
    passing = 0.0
    for tower in model.towers:
        width, rows = tower.max_tokens or 1, problem.tower_rows(tower)
        if call_tokens is not None:
            rows = min(rows, max(1.0, call_tokens / width))
        kept = tower.kept(checkpointed=checkpointed).of(rows, width)
        passing = max(passing, tower.peak(rows, width, checkpointed=checkpointed) - kept)
    return model.cast_bytes + _kept_bytes(problem, way, model, call_tokens) + int(passing)


def num_calls(rows: float, width: int, call_tokens: int | None, most_rows: int = WHOLE_BATCH) -> int:
    """Return the encoder calls that rows of equal width need."""
    if rows <= 0:
        return 0
    return 1 if call_tokens is None else math.ceil(rows / max(1, min(most_rows, call_tokens // max(1, width))))


def _kept_bytes(problem: PlanningProblem, way: Way, model: ModelSize, call_tokens: int | None) -> int:
    """Return what all calls of a batch keep for their backward passes."""
    if model.max_length is None:
        call = call_tokens or math.inf
        token_bytes = model.kept_bytes_per_token(checkpointed=way.gradient_checkpointing, call_tokens=call)
        return token_bytes * (problem.sampled_tokens or 0)
    total = 0.0
    for tower in model.towers:
        width, rows = tower.max_tokens or 1, problem.tower_rows(tower)
        cost = tower.kept(checkpointed=way.gradient_checkpointing)
        total += cost.of(rows, width) + cost.per_call * (num_calls(rows, width, call_tokens) - 1)
    return int(total)


def _batch_tokens(problem: PlanningProblem, model: ModelSize) -> int | None:
    """Return the most padded tokens of a device's batch; None where items have no limit of length."""
    if model.max_length is None:
        return None
    return math.ceil(sum(problem.tower_rows(tower) * (tower.max_tokens or 1) for tower in model.towers))


def evaluation_calls(problem: PlanningProblem, chosen: Candidate) -> tuple[int, int | None, tuple[str, ...]]:
    """Return the most rows and padded tokens of an encoder call in evaluation, and why; None takes training's tokens.

    Small calls stay in the caches of a CPU, as in training.
    """
    asked = problem.config.eval_batch_size
    if problem.machine.device == "cpu":
        return CPU_EVALUATION_ROWS if asked == "auto" else asked, None, ()
    sizes, model = chosen.bytes_per_device, problem.sized(chosen.way)
    room = problem.limit_bytes(chosen.way) - sizes.parameters - sizes.gradients - sizes.optimizer - sizes.sharding
    # A call whose layers are computed again in the backward pass holds at least what one without a graph holds.
    token_bytes = model.call_bytes_per_token(checkpointed=model.checkpointable)
    work = min(tower.forward_flops.of(1, tower.max_tokens or 1) / (tower.max_tokens or 1) for tower in model.towers)
    tokens = call_tokens(room, token_bytes, work, problem.devices.tflops)
    if problem.config.use_gradient_cache is not False:
        tokens = max(tokens, chosen.chunks.tokens)  # a call that holds a graph fits, so one without does
    reason = (
        f"evaluation: an encoder call takes at most {tokens} tokens, {show_bytes(tokens * token_bytes)} without a graph"
    )
    return tokens if asked == "auto" else asked, tokens, (reason,)


def call_tokens(room_bytes: float, bytes_per_token: float, flops_per_token: float, tflops: float) -> int:
    """Return the padded tokens that keep an accelerator busy for a while and take no more than their share of memory.

    Args:
        room_bytes: Memory beside the weights.
        tflops: The device's peak, 10^12 operations a second.
    """
    fitting = EVALUATION_SHARE * room_bytes / bytes_per_token
    return max(1, int(min(fitting, EVALUATION_SECONDS * tflops * 1e12 / max(1.0, flops_per_token))))
