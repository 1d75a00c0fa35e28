"""What an evaluation yields: the one type between metrics, verdict and report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The retrieval quality of one model (or BM25) on one task."""

    task: str  # name of the task, for people
    system: str  # what was evaluated: a model's name, or "BM25"
    # Mean over the judged queries of each metric, e.g. `{"ndcg@10": 0.645, "recall@10": 0.783}`.
    metrics: Mapping[str, float]
    # The same per query: metric -> query id -> value. Same queries for every metric.
    per_query: Mapping[str, Mapping[str, float]] = field(repr=False)
    # query id -> (document id, score), best first; ties in the order that trec_eval gives them
    run: Mapping[str, Sequence[tuple[str, float]]] = field(repr=False)
    num_queries: int  # judged queries that the means are over
    num_documents: int  # documents searched
    # what was left out or clipped, one plain sentence each ("3 queries have no relevant document ...")
    notes: Sequence[str] = field(default_factory=tuple)
    seconds: float = 0.0  # wall time of encoding and searching

    def without(self, queries: Collection[str]) -> EvaluationResult:
        """Return the result on the other queries; the means of graded pairs are then true to first order."""
        per_query = {
            metric: {query: value for query, value in values.items() if query not in queries}
            for metric, values in self.per_query.items()
        }
        left = next(iter(per_query.values()), {})
        return replace(
            self,
            metrics={metric: fmean(values.values()) for metric, values in per_query.items() if values},
            per_query=per_query,
            run={query: hits for query, hits in self.run.items() if query in left},
            num_queries=len(left),
        )

    def deciding(self, metric: str) -> str:
        """Return the metric that decides here: the given one, or the first of a set that is measured otherwise."""
        return metric if metric in self.metrics else next(iter(self.metrics))
