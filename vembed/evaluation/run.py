"""Turn the hits of any system into an evaluation result, under one set of rules.

1. The queries are those that have a text and at least one relevant document; the others are counted in the notes.
2. A document with the query's id and its content is the query itself and is dropped, unless the judgements name that
   pair. Where ids meet by chance, as in sets that number both sides from 1, the document is another and stays.
3. A document that the task excludes for a query is dropped, and where the task names a query's candidates, all others.
4. Hits stand in trec_eval's order and are cut to the depth; metrics are of the cut run.
5. Means are over all those queries; one that found nothing counts with 0.

A system asks for as many hits more than the depth as may be dropped, so that the run is full all the same.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from vembed.batch import content_id
from vembed.errors import DataError
from vembed.evaluation.metrics import DEFAULT_KS, score_run, trec_order, with_relevant
from vembed.evaluation.result import EvaluationResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vembed.batch import Item
    from vembed.data.judged import RetrievalData

DEFAULT_DEPTH = 100
"""Documents kept per query."""

MAX_DEPTH = 1000
"""Documents kept per query where a cut-off asks for more than the usual: each takes some 100 bytes of memory."""


class RunBuilder:
    """Collect the hits of one system on one task, query by query.

    Args:
        ks: Cut-offs of the metrics, to which the task's own are added.
        depth: Documents kept per query; at least the largest cut-off. The task's own cut-offs raise it.

    Attributes:
        query_ids: The queries to search, in the order of the task.
        hits_wanted: Hits per query that a system should offer to `add`.

    Raises:
        DataError: The task has no documents, or no query with a text and a relevant document.
        ValueError: A cut-off is larger than the depth.
    """

    def __init__(self, task: RetrievalData, *, ks: Sequence[int] = DEFAULT_KS, depth: int = DEFAULT_DEPTH) -> None:
        if not ks or min(ks) < 1 or max(ks) > depth:
            raise ValueError(
                f"ks is {tuple(ks)} and depth is {depth}; each cut-off lies between 1 and the depth: "
                f"set depth to {max(ks, default=DEFAULT_DEPTH)} or leave out the larger cut-offs."
            )
        judged = with_relevant(task.qrels)
        self.query_ids = [query_id for query_id in task.queries if query_id in judged]
        if not task.documents:
            raise DataError(f"{task.name}: the corpus has no documents; there is nothing to search.")
        if not self.query_ids:
            raise DataError(
                f"{task.name}: none of the {len(task.queries)} queries has a relevant document (grade 1 or more) among "
                f"the judgements of {len(task.qrels)} queries; check that both use the same query ids."
            )
        self._task = task
        self._ks = sorted({*ks, *task.cutoffs})
        self._depth = max(depth, *task.cutoffs) if task.cutoffs else depth
        most_excluded = max((len(documents) for documents in task.excluded.values()), default=0)
        self.hits_wanted = len(task.documents) if task.candidates else self._depth + 1 + most_excluded
        self._qrels = {query_id: judged[query_id] for query_id in self.query_ids}
        self._no_text = sum(query_id not in task.queries for query_id in judged)
        self._run: dict[str, tuple[tuple[str, float], ...]] = {}
        self._self_matches = 0
        self._namesakes = 0  # hits with the query's id that are other items

    def add(self, query_id: str, hits: Iterable[tuple[str, float]]) -> None:
        """Keep the best hits of one query."""
        ranked = trec_order(hits)
        if query_id not in self._qrels[query_id] and any(document_id == query_id for document_id, _ in ranked):
            if same_item(self._task.queries[query_id], self._task.documents[query_id]):
                self._self_matches += 1
                ranked = tuple(hit for hit in ranked if hit[0] != query_id)
            else:
                self._namesakes += 1
        self._run[query_id] = self._allowed(query_id, ranked)[: self._depth]

    def _allowed(self, query_id: str, ranked: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
        """Return the hits that the task lets this query rank."""
        excluded, candidates = self._task.excluded.get(query_id), self._task.candidates.get(query_id)
        if excluded:
            ranked = tuple(hit for hit in ranked if hit[0] not in excluded)
        if candidates is not None:
            ranked = tuple(hit for hit in ranked if hit[0] in candidates)
        return ranked

    def result(self, system: str, *, seconds: float, notes: Sequence[str] = ()) -> EvaluationResult:
        """Score what was added.

        Args:
            notes: What the system itself has to say, one sentence each; they follow the notes of the task.
        """
        per_query = score_run(self._run, self._qrels, self._ks)
        return EvaluationResult(
            task=self._task.name,
            system=system,
            metrics={metric: fmean(values.values()) for metric, values in per_query.items()},
            per_query=per_query,
            run=self._run,
            num_queries=len(self.query_ids),
            num_documents=len(self._task.documents),
            notes=(*self._task.notes, *notes, *self._notes()),
            seconds=seconds,
        )

    def _notes(self) -> list[str]:
        """Return one sentence for each rule that left something out."""
        num_documents = len(self._task.documents)
        irrelevant = sum(query_id not in self._qrels for query_id in self._task.queries)
        judged = {document_id for grades in self._qrels.values() for document_id in grades}
        absent = sum(document_id not in self._task.documents for document_id in judged)
        notes = []
        if irrelevant:
            notes.append(f"{counted(irrelevant, 'query has', 'queries have')} no relevant document: left out.")
        if self._no_text:
            notes.append(f"{counted(self._no_text, 'judged query has', 'judged queries have')} no text: left out.")
        if absent:
            notes.append(
                f"{counted(absent, 'judged document is', 'judged documents are')} not in the corpus: "
                "what is relevant there counts as missed."
            )
        if max(self._ks) > num_documents:
            notes.append(
                f"k = {max(self._ks)} is over the size of the corpus: at most {num_documents} documents are ranked."
            )
        if self._self_matches:
            words = counted(self._self_matches, "hit is", "hits are")
            notes.append(f"{words} the query itself (same id and content): dropped.")
        if self._namesakes:
            words = counted(self._namesakes, "hit has", "hits have")
            notes.append(f"{words} the id of the query and other content: kept, as another item.")
        return notes


TITLED_WORDS = 5
"""Words of a text from which it is taken for the end of another: a title stands before it there."""


def same_item(query: Item, document: Item) -> bool:
    """Return whether a document is the query itself: equal content, or one text behind a title that the other lacks.

    Below `TITLED_WORDS` words only equal texts count: a word may end any document.
    """
    if query == document:  # spares reading a picture that stands on both sides
        return True
    if isinstance(query, str) and isinstance(document, str):
        short, long = sorted((query.strip(), document.strip()), key=len)
        return short == long or (len(short.split()) >= TITLED_WORDS and long.endswith(f" {short}"))
    return content_id(query) == content_id(document)


def counted(number: int, one: str, many: str) -> str:
    """Return the number and the words that agree with it.

    Args:
        one: The words after 1, e.g. "query has".
        many: The words after any other number, e.g. "queries have".
    """
    return f"{number} {one if number == 1 else many}"
