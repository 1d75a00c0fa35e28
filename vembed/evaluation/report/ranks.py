"""How deep the relevant documents lie, and how far their scores stand apart from the others'.

Shape legend: K cut-offs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.metrics import with_relevant
from vembed.evaluation.pages import Table
from vembed.evaluation.text import count_text, metric_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.result import EvaluationResult

MAX_CUT = 100
"""Deepest cut-off of the recall curve."""

SHOWN_CUTS = (1, 3, 5, 10, 20, 50, 100)
"""Cut-offs that are put into words and tables."""


@dataclass(frozen=True, slots=True)
class ScoreSplit:
    """Scores of what one system retrieved, apart by judgement."""

    label: str  # "baseline" or "final"
    relevant: NDArray[np.float64]  # of documents judged relevant for their query (grade above 0)
    others: NDArray[np.float64]  # of all other retrieved documents
    num_non_finite: int  # scores left out because they are NaN or infinite

    @property
    def summary(self) -> str:
        """The two groups in a sentence."""
        parts = [
            f"{plural(len(scores), one, many)} with median {metric_text(float(np.median(scores)))}"
            for scores, one, many in (
                (self.relevant, "relevant document", "relevant documents"),
                (self.others, "other", "others"),
            )
            if len(scores)
        ]
        sentence = f"Retrieved: {' and '.join(parts)}." if parts else "Nothing with a score was retrieved."
        if self.num_non_finite:
            sentence += f" {plural(self.num_non_finite, 'score')} NaN or infinite, left out."
        return sentence


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the ranked lists of a report say beyond the metrics."""

    recalls_K: Mapping[str, NDArray[np.float64]]  # "baseline", "final", "BM25" -> mean recall@k; empty: nothing found
    splits: tuple[ScoreSplit, ...]  # baseline and final

    @property
    def depth(self) -> int:
        """The deepest cut-off."""
        return max((len(recall_K) for recall_K in self.recalls_K.values()), default=0)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cut-offs of `SHOWN_CUTS` that were measured."""
        return tuple(cut for cut in SHOWN_CUTS if cut <= self.depth)

    @property
    def scored(self) -> tuple[ScoreSplit, ...]:
        """The systems of which any score is finite."""
        return tuple(split for split in self.splits if len(split.relevant) or len(split.others))

    @property
    def reach(self) -> tuple[float, float]:
        """Lowest and highest score of all systems, at least one of which has a score."""
        parts = [part for split in self.scored for part in (split.relevant, split.others) if len(part)]
        return min(float(part.min()) for part in parts), max(float(part.max()) for part in parts)

    @property
    def table(self) -> Table:
        """Recall of each system at the cut-offs that are shown."""
        rows = [
            [label, *(metric_text(float(recall_K[cut - 1])) for cut in self.cuts)]
            for label, recall_K in self.recalls_K.items()
        ]
        return Table(["System", *(f"recall@{count_text(cut)}" for cut in self.cuts)], rows)

    @property
    def summary(self) -> str:
        """The recall curves in a sentence."""
        places = [cut for cut in (1, 10, 100) if cut in self.cuts]
        parts = [
            f"{label} " + ", ".join(f"{metric_text(float(recall_K[cut - 1]))} at {cut}" for cut in places)
            for label, recall_K in self.recalls_K.items()
        ]
        return f"Recall: {'; '.join(parts)}."


def build_ranks(
    task: RetrievalData, baseline: EvaluationResult, final: EvaluationResult, bm25: EvaluationResult | None
) -> Ranks:
    """Take the ranked lists apart by the judgements of the task; of graded pairs there are none."""
    if task.grades:
        return Ranks({}, ())
    systems = [("baseline", baseline), ("final", final), *([("BM25", bm25)] if bm25 else [])]
    depth = min(MAX_CUT, max((len(ranked) for _, result in systems for ranked in result.run.values()), default=0))
    judged = {query_id: _relevant(grades) for query_id, grades in with_relevant(task.qrels).items()}
    recalls_K = {label: _recall(result, judged, depth) for label, result in systems if depth and judged}
    return Ranks(recalls_K, tuple(_split(label, result, task) for label, result in systems[:2]))


def _relevant(grades: Mapping[str, int]) -> frozenset[str]:
    """Return the ids of the documents that count as relevant."""
    return frozenset(document_id for document_id, grade in grades.items() if grade > 0)


def _recall(result: EvaluationResult, judged: Mapping[str, frozenset[str]], depth: int) -> NDArray[np.float64]:
    """Return the mean recall at each cut-off, by trec_eval's rule: what wasn't found counts as missed."""
    evaluated = {query_id for values in result.per_query.values() for query_id in values}
    found_K = np.zeros(depth, dtype=np.float64)
    queries = [query_id for query_id in judged if query_id in evaluated]
    for query_id in queries:
        relevant = judged[query_id]
        for place, (document_id, _) in enumerate(result.run.get(query_id, ())[:depth]):
            if document_id in relevant:
                found_K[place] += 1 / len(relevant)
    return np.cumsum(found_K) / max(1, len(queries))


def _split(label: str, result: EvaluationResult, task: RetrievalData) -> ScoreSplit:
    """Sort the scores of every ranked list by the judgement of their documents."""
    relevant: list[float] = []
    others: list[float] = []
    for query_id, ranked in result.run.items():
        grades = task.qrels.get(query_id, {})
        for document_id, score in ranked:
            (relevant if grades.get(document_id, 0) > 0 else others).append(score)
    arrays = [np.array(scores, dtype=np.float64) for scores in (relevant, others)]
    finite = [scores[np.isfinite(scores)] for scores in arrays]
    lost = sum(len(scores) for scores in arrays) - sum(len(scores) for scores in finite)
    return ScoreSplit(label, finite[0], finite[1], lost)
