"""How many tokens one encoder call sees, and how much of a batch keeps its graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vembed.plan.memory import show_bytes

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.plan.hardware import Machine
    from vembed.plan.memory import ModelSize

CPU_CHUNK_BYTES = 128 << 20
"""Activations of one chunk on a CPU. Small chunks stay in its caches and cost no launch, so less padding wins."""

ACCELERATOR_CHUNK_BYTES = 2 << 30
"""The same on an accelerator, which wants large matrices; never over a quarter of its memory."""

WHOLE_BATCH = 2**31 - 1
"""Rows and tokens of a chunk that holds any batch: plain training."""

LEAST_CHUNK_TOKENS = 512
MOST_CHUNK_ROWS = 512

CPU_RETAINED_SHARE, ACCELERATOR_RETAINED_SHARE = 0.25, 0.5
"""Most of the spare memory that `retain: auto` takes. The prediction is a formula; a CPU that runs out kills the run,
an accelerator that runs out is repaired, and both share their memory with others."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a batch is cut.

    Attributes:
        rows: Most rows of one encoder call.
        tokens: Most padded tokens of one encoder call.
        retain: Share of the batch whose graphs are kept.
        live_tokens: Tokens whose activations live at once, at most.
        reasons: Why, one plain sentence each.
    """

    rows: int
    tokens: int
    retain: float
    live_tokens: int
    reasons: tuple[str, ...]


def plan_chunks(config: Config, machine: Machine, model: ModelSize, *, num_rows: int) -> ChunkPlan:
    """Return the chunks of a batch, before anything is retained.

    Args:
        config: The user's word; what isn't `auto` stands.
        machine: Memory and device.
        model: Size of the encoder.
        num_rows: Queries and documents of a batch.
    """
    rows, tokens, reasons = _budget(config, machine, model)
    if config.use_gradient_cache is False:
        # Without a limit of length nothing says how long a batch is: one chunk's worth is assumed.
        live = tokens if model.max_length is None else num_rows * model.max_length
        whole = "use_gradient_cache false: the batch is encoded in one call, memory grows with the batch"
        return ChunkPlan(WHOLE_BATCH, WHOLE_BATCH, 1.0, live, (*reasons, whole))
    caching = "gradient caching: memory is that of one chunk and of the graphs that are kept; the rest is encoded twice"
    return ChunkPlan(rows, tokens, 0.0, tokens, (*reasons, caching))


def plan_retention(
    config: Config, machine: Machine, model: ModelSize, chunks: ChunkPlan, *, num_rows: int, room_bytes: int
) -> ChunkPlan:
    """Return the chunks with the share of a batch whose graphs are kept from the first pass.

    Args:
        config: The user's word.
        machine: Device.
        model: Size of the encoder.
        chunks: The chunks of `plan_chunks`.
        num_rows: Queries and documents of a batch.
        room_bytes: Memory beside everything else that a step needs.
    """
    if config.use_gradient_cache is False:
        return chunks
    if config.retain != "auto":
        share, why = float(config.retain), "as set"
    elif model.max_length is None:
        share, why = 0.0, "nothing says how long a row may be"
    else:
        part = CPU_RETAINED_SHARE if machine.device == "cpu" else ACCELERATOR_RETAINED_SHARE
        batch_bytes = num_rows * model.max_length * model.activation_bytes_per_token
        # Rounded down to hundredths, so that the number in the plan is the number that is used.
        share = int(100 * min(1.0, max(0, room_bytes) * part / batch_bytes)) / 100
        why = (
            f"{part:.0%} of {show_bytes(max(0, room_bytes))} to spare against {show_bytes(batch_bytes)} of activations "
            f"in a batch of {num_rows} rows of {model.max_length} tokens"
        )
    kept_tokens = 0 if model.max_length is None else int(share * num_rows * model.max_length)
    reason = f"retain {share:g}: share of the batch that keeps its graphs and isn't encoded again; {why}"
    live = chunks.live_tokens + kept_tokens
    return replace(chunks, retain=share, live_tokens=live, reasons=(*chunks.reasons, reason))


def _budget(config: Config, machine: Machine, model: ModelSize) -> tuple[int, int, tuple[str, ...]]:
    """Return the most rows and the most padded tokens of one encoder call, and why."""
    rows = MOST_CHUNK_ROWS if config.gradient_cache_chunk_size == "auto" else config.gradient_cache_chunk_size
    if config.gradient_cache_chunk_tokens != "auto":
        return rows, config.gradient_cache_chunk_tokens, ()
    if config.gradient_cache_chunk_size != "auto" and model.max_length is not None:
        return rows, rows * model.max_length, ()  # the user thinks in rows: tokens must not cut their chunks shorter
    wanted = CPU_CHUNK_BYTES
    if machine.device != "cpu":
        wanted = min(ACCELERATOR_CHUNK_BYTES, machine.memory_bytes // 4)
    tokens = max(LEAST_CHUNK_TOKENS, model.max_length or 0, wanted // model.activation_bytes_per_token)
    reason = (
        f"gradient_cache_chunk_tokens {tokens}: {show_bytes(tokens * model.activation_bytes_per_token)} of "
        f"activations at {show_bytes(model.activation_bytes_per_token)} a token (estimated)"
    )
    return rows, tokens, (reason,)
