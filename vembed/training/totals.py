"""What a step measured, added up over the batches that it accumulates and over the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vembed.evaluation.report.curves import SOURCE_LOSS

if TYPE_CHECKING:
    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.engine import StepResult
    from vembed.training.batches import PreparedBatch


@dataclass(slots=True)
class StepTotals:
    """The numbers of one optimizer step."""

    losses: list[float] = field(default_factory=list)  # of each batch, all ranks together
    sources: list[int | None] = field(default_factory=list)  # of each batch, where it is of one of several
    record_ids: list[int] = field(default_factory=list)
    num_queries: int = 0  # queries of all ranks
    tokens: int = 0  # real tokens; of this rank until `add_ranks`, then of all
    padded_tokens: int = 0  # the same with padding
    num_truncated: int = 0  # over-long texts that were cut, likewise
    num_chunks: int = 0  # encoder calls of the first pass on this rank
    num_repairs: int = 0  # how often a batch ran out of memory and was done again
    replay_drift: float = 0.0
    num_masked: int | None = None  # pairs of a query and a document masked as copies; None: none is masked
    data_seconds: float = 0.0  # how long this rank waited for its batches
    rank_tokens: int = 0  # real tokens of this rank
    rank_losses: list[float] = field(default_factory=list)  # of each batch, the queries whose loss this rank computed

    @property
    def loss(self) -> float:
        """Mean loss of the batches."""
        return sum(self.losses) / len(self.losses)

    @property
    def loss_by_source(self) -> dict[str, float]:
        """Mean loss of the batches of each source that has any, by the name of the measure."""
        found: dict[str, list[float]] = {}
        for source, loss in zip(self.sources, self.losses, strict=True):
            if source is not None:
                found.setdefault(f"{SOURCE_LOSS}{source + 1}", []).append(loss)
        return {name: sum(losses) / len(losses) for name, losses in found.items()}

    @property
    def rank_loss(self) -> float:
        """Mean loss of the batches over the queries whose loss this rank computed."""
        return sum(self.rank_losses) / len(self.rank_losses)

    @property
    def padding_ratio(self) -> float:
        """Padded tokens over real ones, at least 1."""
        return self.padded_tokens / max(1, self.tokens)

    def add(self, batch: PreparedBatch, result: StepResult) -> None:
        """Count a batch."""
        self.losses.append(result.loss)
        self.sources.append(batch.structure.source)
        self.record_ids += batch.featured.record_ids
        self.num_queries += batch.structure.num_queries
        self.rank_losses.append(result.rank_loss)
        self.rank_tokens += result.tokens
        self.tokens += result.tokens
        self.padded_tokens += result.padded_tokens
        self.num_truncated += batch.num_truncated
        self.num_chunks += result.num_chunks
        self.num_repairs += result.num_repairs
        self.replay_drift = max(self.replay_drift, result.replay_drift)
        if batch.featured.num_masked is not None:
            self.num_masked = (self.num_masked or 0) + batch.featured.num_masked

    def add_ranks(self, ranks: Ranks, device: torch.device) -> None:
        """Add up over the ranks what each of them counts for itself."""
        if ranks.is_one:
            return
        own = torch.tensor([self.tokens, self.padded_tokens, self.num_truncated], device=device)
        self.tokens, self.padded_tokens, self.num_truncated = map(int, ranks.sum_(own).tolist())
