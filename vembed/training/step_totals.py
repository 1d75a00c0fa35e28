"""Sums over the batches of a step: of all ranks for its row of metrics.jsonl, of this rank to compare the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vembed.evaluation.step_rows import SOURCE_LOSS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.engine import StepResult
    from vembed.training.batches import FeaturedBatch


@dataclass(slots=True)
class StepTotals:
    """Sums over the batches of one optimizer step."""

    # Of all ranks, batch by batch:
    losses: list[float] = field(default_factory=list)  # mean over the queries of each batch
    num_queries: list[int] = field(default_factory=list)
    sources: list[int | None] = field(default_factory=list)  # None where a batch mixes sources
    record_ids: list[int] = field(default_factory=list)
    # Of all ranks, over the step; the first three are set by `add_ranks`:
    tokens: int = 0  # without padding
    padded_tokens: int = 0  # with padding
    num_truncated: int = 0  # texts that were longer than the model takes
    num_masked: int | None = None  # (query, document) pairs masked as copies; None where the loss masks none
    replay_drift: float = 0.0  # the largest
    # Of this rank:
    # Mean over this rank's queries of each batch; over all queries where the loss isn't streamed.
    rank_losses: list[float] = field(default_factory=list)
    rank_tokens: int = 0
    rank_padded_tokens: int = 0  # with padding
    rank_truncated: int = 0
    num_chunks: int = 0  # encoder calls of pass 1
    num_repairs: int = 0  # times that a batch ran out of memory and was done again
    data_seconds: float = 0.0  # spent waiting for batches

    def add(self, batch: FeaturedBatch, result: StepResult) -> None:
        """Count a batch."""
        self.losses.append(result.loss)
        self.num_queries.append(batch.structure.num_queries)
        self.sources.append(batch.structure.source)
        self.record_ids += batch.record_ids
        self.rank_losses.append(result.rank_loss)
        self.rank_tokens += result.tokens
        self.rank_padded_tokens += result.padded_tokens
        self.rank_truncated += batch.num_truncated
        self.num_chunks += result.num_chunks
        self.num_repairs += result.num_repairs
        if not math.isnan(self.replay_drift):  # NaN stays: `max` would drop it, and the row would say that all agreed
            drift = result.replay_drift
            self.replay_drift = drift if math.isnan(drift) else max(self.replay_drift, drift)
        if batch.num_masked is not None:
            self.num_masked = (self.num_masked or 0) + batch.num_masked

    def add_ranks(self, ranks: Ranks, device: torch.device) -> None:
        """Add up over the ranks what each of them counted of its own rows."""
        counts = [self.rank_tokens, self.rank_padded_tokens, self.rank_truncated]
        if not ranks.is_one:
            counts = [int(count) for count in ranks.sum_(torch.tensor(counts, device=device)).tolist()]
        self.tokens, self.padded_tokens, self.num_truncated = counts

    @property
    def loss(self) -> float:
        """Mean loss over the queries."""
        return _weighted_mean(self.losses, self.num_queries)

    @property
    def rank_loss(self) -> float:
        """Mean loss over the queries whose loss this rank computed.

        Ranks share the queries of a batch evenly, up to one, so its batches weigh as they do for all ranks.
        """
        return _weighted_mean(self.rank_losses, self.num_queries)

    @property
    def loss_by_source(self) -> dict[str, float]:
        """Mean loss over the queries of each source, by the name that metrics.jsonl gives it."""
        losses: dict[str, list[float]] = {}
        counts: dict[str, list[int]] = {}
        for source, loss, count in zip(self.sources, self.losses, self.num_queries, strict=True):
            if source is not None:
                name = f"{SOURCE_LOSS}{source + 1}"
                losses.setdefault(name, []).append(loss)
                counts.setdefault(name, []).append(count)
        return {name: _weighted_mean(losses[name], counts[name]) for name in losses}


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    # Over the largest weight, equal weights are exactly 1.0: the loss of one batch stays as it is, to the last bit.
    most = max(weights)
    shares = [weight / most for weight in weights]
    return sum(value * share for value, share in zip(values, shares, strict=True)) / sum(shares)
