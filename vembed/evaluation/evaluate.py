"""Evaluate an encoder on a retrieval task: encode, search, score; in one direction, or documents asking queries too.

The hits of any system, BM25's too, become a result under the same rules (`RunBuilder`):

1. The queries are those that have a text and at least one relevant document; the others are counted in the notes.
2. A document with the query's id and its content is the query itself and is dropped, unless the judgements name that
   pair. Where ids meet by chance, as in sets that number both sides from 1, the document is another and stays.
3. A document that the task excludes for a query is dropped, and where the task names a query's candidates, all others.
4. Hits stand in trec_eval's order and are cut to the depth; metrics are of the cut run.
5. Means are over all those queries; one that found nothing counts with 0.

The same vectors give the same result, bit for bit: nothing here draws a random number. Of documents whose scores tie
exactly at the end of the list, exact search keeps those that come first in trec_eval's order; another index decides
itself.

In both directions a set is encoded once. The documents that ask in the reversed set are documents of the set, and they
search its judged queries. Their vectors are the same unless the encoder treats the two sides differently: by a prompt,
which shows in the features that it makes of an item. Only then is a side encoded again.
Shape legend: Q queries, D documents, E dimensions, P graded pairs, k hits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vembed.batch import Ragged, content_id
from vembed.errors import ConfigError, DataError
from vembed.evaluation.metrics import (
    DEFAULT_DEPTH,
    DEFAULT_KS,
    PAIR_MEASURES,
    RankedValues,
    pair_values_by_query,
    score_run,
    tie_ranks,
    trec_order,
    with_relevant,
)
from vembed.evaluation.results import EvaluationResult, approximate_note
from vembed.vectors.encode import rows_of, values_of
from vembed.vectors.index import check_finite, pair_scores, search, search_maxsim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Side
    from vembed.data.judged import RetrievalData
    from vembed.models.encoder import Encoder
    from vembed.vectors.encode import ItemEncoder, Vectors

    Encode: TypeAlias = Callable[[Sequence[Item], Side], Vectors]

EXACT = "Flat"

TITLED_WORDS = 5
"""Words of a text from which it is taken for the end of another: a title stands before it there."""

SAMPLE_ITEMS = 16
"""Items whose features are compared between the sides: a prompt shows in each."""

COUNTED_ITEMS = 1024
"""Items that are tokenized at a time to count those that are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Options of the search and of the metrics."""

    system: str  # name of what is evaluated, for people
    ks: tuple[int, ...] = DEFAULT_KS  # cut-offs of the metrics
    depth: int = DEFAULT_DEPTH  # documents kept per query; at least the largest cut-off
    index_factory: str = EXACT  # FAISS index string; "Flat" is exact
    poll: Callable[[], None] | None = None  # called between batches of queries; it may raise, e.g. `PreemptedError`


@dataclass(frozen=True, slots=True)
class EncodedTask:
    """A task with the vectors of its items, which the first of several ranks has alone.

    Rows stand in the order of the task's documents and of the builder's queries.
    """

    task: RetrievalData
    builder: RunBuilder  # empty
    documents: Vectors
    queries: Vectors
    seconds: float  # of encoding
    asking: NDArray[np.int64] | None = None  # rows of `queries` that are the builder's; None: all of them


def evaluate(encode: Encode, task: RetrievalData, options: EvaluationOptions) -> EvaluationResult:
    """Evaluate an encoder on one task.

    Args:
        encode: Turns texts of one side into vectors (rows, dim), float32, a row for each text in the given order;
            normalised where cosine similarity is meant.

    Raises:
        DataError: The task has nothing to search or to score.
        NonFiniteError: An embedding holds NaN or infinity.
        ConfigError: FAISS can't build the index.
        ValueError: The encoder returned another number of rows than it got texts, or a cut-off is over the depth.
    """
    return search_task(encode_task(encode, task, options), options)


def encode_task(encode: Encode, task: RetrievalData, options: EvaluationOptions) -> EncodedTask:
    """Encode the documents and the judged queries of a task.

    Raises:
        DataError: The task has nothing to search or to score.
        ValueError: The encoder returned another number of rows than it got texts, or a cut-off is over the depth.
    """
    builder = RunBuilder(task, ks=options.ks, depth=options.depth)
    started = time.perf_counter()
    documents = encoded(encode, list(task.documents.values()), "document")
    queries = encoded(encode, [task.queries[query_id] for query_id in builder.query_ids], "query")
    return EncodedTask(task, builder, documents, queries, time.perf_counter() - started)


def encoded(encode: Encode, items: Sequence[Item], side: Side) -> Vectors:
    """Return the vectors of items of one side.

    Raises:
        ValueError: The encoder returned another number of rows.
    """
    vectors = encode(items, side)
    if isinstance(vectors, Ragged):
        num_rows, shape = len(vectors.lengths), f"{len(vectors.lengths)} rows of vectors"
    else:
        num_rows, shape = (len(vectors) if vectors.ndim == 2 else -1), f"shape {vectors.shape}"
    if num_rows != len(items):
        raise ValueError(
            f"the encoder returned {shape} for {len(items)} {side} texts; "
            f"it must return ({len(items)}, dim): one row for each text."
        )
    return vectors


def encode_directions(
    encode: ItemEncoder, task: RetrievalData, options: EvaluationOptions, *, both: bool
) -> tuple[EncodedTask, ...]:
    """Encode a set for one direction or for both: the part that needs the encoder, which several ranks do together.

    Returns:
        One direction or both, that of the set itself first.

    Raises:
        DataError: The set has nothing to search or to score.
    """
    forward = encode_task(encode, task, options)
    if not both:
        return (forward,)
    started = time.perf_counter()  # of the reversed direction: encoding that both share counts for the first
    turned = task.reversed()
    builder = RunBuilder(turned, ks=options.ks, depth=options.depth)
    documents = list(task.documents.values())
    queries = [task.queries[query_id] for query_id in forward.builder.query_ids]
    # Only some documents ask: those of a relevant pair. `rows` picks them out of the vectors that are there already.
    if sides_agree(encode.encoder, documents):
        asking, rows = forward.documents, asking_rows(task, turned)
    else:
        asking, rows = encoded(encode, list(turned.queries.values()), "query"), None
    searched = forward.queries if sides_agree(encode.encoder, queries) else encoded(encode, queries, "document")
    return forward, EncodedTask(turned, builder, searched, asking, time.perf_counter() - started, rows)


def search_task(encoded_task: EncodedTask, options: EvaluationOptions) -> EvaluationResult:
    """Search and score an encoded task; of graded pairs, compare their order by similarity with that by grade.

    Raises:
        NonFiniteError: An embedding holds NaN or infinity.
        ConfigError: FAISS can't build the index.
    """
    if encoded_task.task.grades:
        return _score_graded_pairs(encoded_task, options.system)
    builder = encoded_task.builder
    started = time.perf_counter()
    queries = encoded_task.queries
    if encoded_task.asking is not None:
        queries = rows_of(queries, encoded_task.asking)
    tie_ranks_D = tie_ranks(list(encoded_task.task.documents))
    scores_Qk, rows_Qk = _search_vectors(
        encoded_task.documents, queries, options, k=builder.hits_wanted, tie_ranks_D=tie_ranks_D
    )
    seconds = encoded_task.seconds + time.perf_counter() - started
    builder.add_search(scores_Qk, rows_Qk)
    notes = [] if options.index_factory == EXACT else [approximate_note(options.index_factory)]
    return builder.result(options.system, seconds=seconds, notes=notes)


def _search_vectors(
    documents: Vectors, queries: Vectors, options: EvaluationOptions, *, k: int, tie_ranks_D: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Search rows of one vector with FAISS, and rows of several by exact MaxSim.

    Args:
        tie_ranks_D: Of exact search: which of equal scores are kept at the cut, the lowest ranks first.

    Returns:
        Scores (Q, k) float32 and document rows (Q, k) int64, best first.
    """
    factory, poll = options.index_factory, options.poll
    if isinstance(documents, Ragged) and isinstance(queries, Ragged):
        if factory != EXACT:
            raise ConfigError(f"{factory!r}: an index holds one vector per row, and these have several; use {EXACT!r}")
        return search_maxsim(documents, queries, k=k, tie_ranks_D=tie_ranks_D, poll=poll)
    assert not isinstance(documents, Ragged)
    assert not isinstance(queries, Ragged)
    return search(documents, queries, k=k, factory=factory, tie_ranks_D=tie_ranks_D, poll=poll)


def _score_graded_pairs(encoded_task: EncodedTask, system: str) -> EvaluationResult:
    """Measure graded pairs; the run of the result has the documents of each query's pairs, by similarity."""
    task, query_ids, document_ids = encoded_task.task, encoded_task.builder.query_ids, list(encoded_task.task.documents)
    # A search checks its vectors itself; here nothing is searched, and NaN would be sorted somewhere.
    for side, vectors in (("query", encoded_task.queries), ("document", encoded_task.documents)):
        check_finite(values_of(vectors), side)
    row_of = {document_id: row for row, document_id in enumerate(document_ids)}
    pairs = [
        (query_row, row_of[document_id], grade)
        for query_row, query_id in enumerate(query_ids)
        for document_id, grade in task.grades[query_id].items()
    ]
    query_P, document_P = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    grade_P = np.array([grade for _, _, grade in pairs], dtype=np.float64)
    similarity_P = pair_scores(encoded_task.queries, encoded_task.documents, query_P, document_P)
    similarities, grades = RankedValues(similarity_P), RankedValues(grade_P)
    metrics, per_query = {}, {}
    for name, (value, influence) in PAIR_MEASURES[task.kind].items():
        metrics[name] = value(similarities, grades, np.ones(len(grade_P)))
        influence_P = influence(similarities, grades)
        values_Q = pair_values_by_query(metrics[name], influence_P, query_P, len(query_ids))
        per_query[name] = dict(zip(query_ids, values_Q.tolist(), strict=True))
    # The "ranking" of a query is its own few pairs: what a page or run.trec shows of such a set.
    hits: dict[str, list[tuple[str, float]]] = {query_id: [] for query_id in query_ids}
    for (query_row, document_row, _), similarity in zip(pairs, similarity_P.tolist(), strict=True):
        hits[query_ids[query_row]].append((document_ids[document_row], similarity))
    return EvaluationResult(
        task=task.name,
        system=system,
        metrics=metrics,
        per_query=per_query,
        run={query_id: trec_order(ranked) for query_id, ranked in hits.items()},
        num_queries=len(query_ids),
        num_documents=len(document_ids),
        notes=task.notes,
        seconds=encoded_task.seconds,
    )


def asking_rows(task: RetrievalData, turned: RetrievalData) -> NDArray[np.int64]:
    """Return the rows of a set's documents that ask in the reversed set, in its order."""
    return np.array([row for row, name in enumerate(task.documents) if name in turned.queries], dtype=np.int64)


def sides_agree(encoder: Encoder, items: Sequence[Item]) -> bool:
    """Return whether an encoder makes the same features of items whether they are queries or documents.

    Args:
        items: Items of one side of a set; a few of each modality are looked at.
    """

    def is_equal(one: Features, other: Features) -> bool:
        if one.columns.keys() != other.columns.keys() or one.per_row.keys() != other.per_row.keys():
            return False
        arrays = [(one.lengths, other.lengths)]
        for name, column in one.columns.items():
            arrays += [(column.values, other.columns[name].values), (column.offsets, other.columns[name].offsets)]
        arrays += [(values, other.per_row[name]) for name, values in one.per_row.items()]
        return all(np.array_equal(mine, theirs) for mine, theirs in arrays)

    for _, rows in encoder.by_modality(items):
        # Spread over the set: the first items of a file may be alike, e.g. all too short to hold a prompt.
        sample = [items[row] for row in rows[:: max(1, len(rows) // SAMPLE_ITEMS)][:SAMPLE_ITEMS]]
        if not is_equal(encoder.featurize(sample, "query"), encoder.featurize(sample, "document")):
            return False
    return True


def count_truncated(encoder: Encoder, items: Sequence[Item], side: Side) -> int:
    """Return how many texts are longer than an encoder takes; nothing is encoded, and pictures are passed over."""
    texts = [item for item in items if isinstance(item, str)]
    return sum(
        encoder.featurize(texts[start : start + COUNTED_ITEMS], side).num_truncated
        for start in range(0, len(texts), COUNTED_ITEMS)
    )


class RunBuilder:
    """Hits of one system on one task, collected query by query; the rules are those of this file's head.

    Args:
        ks: Cut-offs of the metrics, to which the task's own are added.
        depth: Documents kept per query; at least the largest cut-off. The task's own cut-offs raise it.

    Attributes:
        query_ids: The queries to search, in the order of the task.
        hits_wanted: Hits per query that a system should offer to `add`: as many more than the depth as may be dropped,
            so that the run is full all the same.

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
        # One more for the query itself (rule 2), and the longest list of rule 3. Candidates may rank anywhere: where a
        # task names them, all documents are asked for.
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
        # Rule 2: the query itself as a document, unless the judgements name that pair.
        if query_id not in self._qrels[query_id] and any(document_id == query_id for document_id, _ in ranked):
            if same_item(self._task.queries[query_id], self._task.documents[query_id]):
                self._self_matches += 1
                ranked = tuple(hit for hit in ranked if hit[0] != query_id)
            else:
                self._namesakes += 1
        # Rule 3. Metrics are of what is left: documents below move up.
        excluded, candidates = self._task.excluded.get(query_id), self._task.candidates.get(query_id)
        if excluded:
            ranked = tuple(hit for hit in ranked if hit[0] not in excluded)
        if candidates is not None:
            ranked = tuple(hit for hit in ranked if hit[0] in candidates)
        self._run[query_id] = ranked[: self._depth]

    def add_search(self, scores_Qk: NDArray[np.float32], rows_Qk: NDArray[np.int64]) -> None:
        """Keep the best hits of all queries.

        Args:
            rows_Qk: Rows of the documents; -1 is an approximate index's way of saying that it found fewer.
        """
        document_ids = list(self._task.documents)
        for query_id, scores_k, rows_k in zip(self.query_ids, scores_Qk, rows_Qk, strict=True):
            is_hit_k = rows_k >= 0
            hits = zip(rows_k[is_hit_k].tolist(), scores_k[is_hit_k].tolist(), strict=True)
            self.add(query_id, ((document_ids[row], score) for row, score in hits))

    def result(self, system: str, *, seconds: float, notes: Sequence[str] = ()) -> EvaluationResult:
        """Score what was added.

        Args:
            notes: What the system itself has to say, one sentence each; they follow the notes of the task.
        """
        # Queries that were never added are scored as well, with 0 (rule 5).
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
