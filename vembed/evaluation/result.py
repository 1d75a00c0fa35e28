"""What an evaluation yields: the one type between metrics, verdict and report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The retrieval quality of one model (or BM25) on one task.

    Attributes:
        task: Name of the task, for people.
        system: What was evaluated: a model's name, or "BM25".
        metrics: Mean over the judged queries of each metric, e.g. `{"ndcg@10": 0.645, "recall@10": 0.783}`.
        per_query: The same per query: metric -> query id -> value. Same queries for every metric.
        run: Query id -> (document id, score), best first; ties in the order that trec_eval gives them.
        num_queries: Judged queries that the means are over.
        num_documents: Documents searched.
        notes: What was left out or clipped, one plain sentence each ("3 queries have no relevant document ...").
        seconds: Wall time of encoding and searching.
    """

    task: str
    system: str
    metrics: Mapping[str, float]
    per_query: Mapping[str, Mapping[str, float]]
    run: Mapping[str, Sequence[tuple[str, float]]]
    num_queries: int
    num_documents: int
    notes: Sequence[str] = field(default_factory=tuple)
    seconds: float = 0.0
