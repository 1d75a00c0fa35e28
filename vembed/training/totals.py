"""What a step measured, added up over the batches that it accumulates and over the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.batch import ContrastiveBatch
    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.engine import StepResult
    from vembed.training.batches import PreparedBatch


@dataclass(slots=True)
class StepTotals:
    """The numbers of one optimizer step."""

    losses: list[float] = field(default_factory=list)  # of each batch, all ranks together
    record_ids: list[int] = field(default_factory=list)
    num_queries: int = 0  # queries of all ranks
    tokens: int = 0  # real tokens; of this rank until `add_ranks`, then of all
    padded_tokens: int = 0  # the same with padding
    num_truncated: int = 0  # over-long texts that were cut, likewise
    num_chunks: int = 0  # encoder calls of the first pass on this rank
    num_repairs: int = 0  # how often a batch ran out of memory and was done again
    replay_drift: float = 0.0
    num_masked: int = 0  # pairs of a query and a document that are no negatives
    data_seconds: float = 0.0  # how long this rank waited for its batches
    rank_tokens: int = 0  # real tokens of this rank
    rank_losses: list[float] = field(default_factory=list)  # of each batch, the queries whose loss this rank computed

    @property
    def loss(self) -> float:
        """Mean loss of the batches."""
        return sum(self.losses) / len(self.losses)

    @property
    def rank_loss(self) -> float:
        """Mean loss of the batches over the queries whose loss this rank computed."""
        return sum(self.rank_losses) / len(self.rank_losses)

    @property
    def padding_ratio(self) -> float:
        """Padded tokens over real ones, at least 1."""
        return self.padded_tokens / max(1, self.tokens)

    def add(self, batch: PreparedBatch, result: StepResult, *, counts_masked: bool) -> None:
        """Count a batch."""
        self.losses.append(result.loss)
        self.record_ids += batch.batch.record_ids
        self.num_queries += len(batch.batch.queries)
        self.rank_losses.append(result.rank_loss)
        self.rank_tokens += result.tokens
        self.tokens += result.tokens
        self.padded_tokens += result.padded_tokens
        self.num_truncated += batch.num_truncated
        self.num_chunks += result.num_chunks
        self.num_repairs += result.num_repairs
        self.replay_drift = max(self.replay_drift, result.replay_drift)
        if counts_masked:
            self.num_masked += count_masked(batch.batch)

    def add_ranks(self, ranks: Ranks, device: torch.device) -> None:
        """Add up over the ranks what each of them counts for itself."""
        if ranks.is_one:
            return
        own = torch.tensor([self.tokens, self.padded_tokens, self.num_truncated], device=device)
        self.tokens, self.padded_tokens, self.num_truncated = map(int, ranks.sum_(own).tolist())


def count_masked(batch: ContrastiveBatch) -> int:
    """Return how many (query, document) pairs of a batch are false negatives that the loss masks.

    A document is masked for a query when it repeats the content of a positive of that query, or of an equal one, or the
    query itself; explicit positives aren't counted. Pairs are counted by content, times how often each content stands
    in the batch: what `false_negative_mask` marks, in O(P log P) for P positive pairs.
    """
    query_ids, query_rows, query_counts = _contents(batch.query_ids_Q)
    document_ids, document_rows, document_counts = _contents(batch.document_ids_D)
    positives_P2 = np.unique(batch.positives_P2, axis=0)
    known = np.stack([query_rows[positives_P2[:, 0]], document_rows[positives_P2[:, 1]]], axis=1)
    _, same_queries, same_documents = np.intersect1d(query_ids, document_ids, assume_unique=True, return_indices=True)
    itself = np.stack([same_queries, same_documents], axis=1)
    related = np.unique(np.concatenate([known, itself]), axis=0)
    return int((query_counts[related[:, 0]] * document_counts[related[:, 1]]).sum()) - len(positives_P2)


def _contents(ids_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct contents, which of them each row has, and how many rows have each."""
    contents, rows_N, counts = np.unique(ids_N, return_inverse=True, return_counts=True)
    return contents, rows_N.reshape(-1), counts
