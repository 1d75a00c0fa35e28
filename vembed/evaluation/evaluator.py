"""Evaluate an encoder on a retrieval task: encode, search, score.

The same vectors give the same result, bit for bit: nothing here draws a random number. Of documents whose scores tie
exactly at the end of the list, exact search keeps those that come first in trec_eval's order; another index decides
itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vembed.batch import Ragged
from vembed.errors import ConfigError
from vembed.evaluation.graded_values import measured, pair_similarities, query_values
from vembed.evaluation.metrics import DEFAULT_KS, tie_ranks, trec_order
from vembed.evaluation.result import EvaluationResult
from vembed.evaluation.run import DEFAULT_DEPTH, RunBuilder
from vembed.vectors.encode import rows_of, values_of
from vembed.vectors.index import check_finite, search, search_maxsim

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.data.retrieval import RetrievalData
    from vembed.vectors.encode import Vectors

    Encode: TypeAlias = Callable[[Sequence[Item], Side], Vectors]

EXACT = "Flat"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """How to search and what to score."""

    system: str  # name of what is evaluated, for people
    ks: tuple[int, ...] = DEFAULT_KS  # cut-offs of the metrics
    depth: int = DEFAULT_DEPTH  # documents kept per query; at least the largest cut-off
    index_factory: str = EXACT  # FAISS index string; "Flat" is exact
    poll: Callable[[], None] | None = None  # called between batches of queries; it may raise, e.g. `PreemptedError`


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


def search_task(given: EncodedTask, options: EvaluationOptions) -> EvaluationResult:
    """Search and score an encoded task.

    Raises:
        NonFiniteError: An embedding holds NaN or infinity.
        ConfigError: FAISS can't build the index.
    """
    if given.task.grades:
        return _graded_result(given, options)
    builder = given.builder
    started = time.perf_counter()
    queries = given.queries if given.asking is None else rows_of(given.queries, given.asking)
    document_ids = list(given.task.documents)
    scores_Qk, rows_Qk = search_vectors(
        given.documents,
        queries,
        k=builder.hits_wanted,
        factory=options.index_factory,
        tie_ranks_D=tie_ranks(document_ids),
        poll=options.poll,
    )
    seconds = given.seconds + time.perf_counter() - started
    add_hits(builder, document_ids, scores_Qk, rows_Qk)
    notes = [] if options.index_factory == EXACT else [approximate_note(options.index_factory)]
    return builder.result(options.system, seconds=seconds, notes=notes)


def _graded_result(given: EncodedTask, options: EvaluationOptions) -> EvaluationResult:
    """Compare the order of graded pairs by similarity with that by grade.

    Returns:
        Its run has each query's own documents, by similarity.
    """
    task, query_ids = given.task, given.builder.query_ids
    place_of = {document_id: place for place, document_id in enumerate(task.documents)}
    for side, vectors in (("query", given.queries), ("document", given.documents)):
        check_finite(values_of(vectors), side)
    pairs = [
        (row, place_of[one], grade) for row, query in enumerate(query_ids) for one, grade in task.grades[query].items()
    ]
    query_P, document_P = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    similarity_P = pair_similarities(given.queries, given.documents, query_P, document_P)
    found = measured(task.kind, np.array([grade for _, _, grade in pairs]), similarity_P)
    values = {name: query_values(*each, query_P, len(query_ids)) for name, each in found.items()}
    hits: dict[str, list[tuple[str, float]]] = {query_id: [] for query_id in query_ids}
    document_ids = list(task.documents)
    for row, document, similarity in zip(query_P.tolist(), document_P.tolist(), similarity_P.tolist(), strict=True):
        hits[query_ids[row]].append((document_ids[document], similarity))
    return EvaluationResult(
        task=task.name,
        system=options.system,
        metrics={name: value for name, (value, _) in found.items()},
        per_query={name: dict(zip(query_ids, own.tolist(), strict=True)) for name, own in values.items()},
        run={query_id: trec_order(own) for query_id, own in hits.items()},
        num_queries=len(query_ids),
        num_documents=len(document_ids),
        notes=task.notes,
        seconds=given.seconds,
    )


def search_vectors(
    documents: Vectors,
    queries: Vectors,
    *,
    k: int,
    factory: str = EXACT,
    tie_ranks_D: NDArray[np.int64] | None = None,
    poll: Callable[[], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Search rows of one vector with FAISS, and rows of several by exact MaxSim.

    Args:
        tie_ranks_D: Of exact search: which of equal scores are kept at the cut, the lowest ranks first.

    Returns:
        Scores (Q, k) float32 and document rows (Q, k) int64, best first.

    Raises:
        NonFiniteError: A vector holds NaN or infinity.
        ConfigError: FAISS can't build the index, or rows of several vectors are to be searched with one.
    """
    if isinstance(documents, Ragged) and isinstance(queries, Ragged):
        if factory != EXACT:
            raise ConfigError(f"{factory!r}: an index holds one vector per row, and these have several; use {EXACT!r}")
        return search_maxsim(documents, queries, k=k, tie_ranks_D=tie_ranks_D, poll=poll)
    assert not isinstance(documents, Ragged)
    assert not isinstance(queries, Ragged)
    return search(documents, queries, k=k, factory=factory, tie_ranks_D=tie_ranks_D, poll=poll)


def add_hits(
    builder: RunBuilder, document_ids: Sequence[str], scores_Qk: NDArray[np.float32], rows_Qk: NDArray[np.int64]
) -> None:
    """Give a builder what a search found.

    Args:
        rows_Qk: Rows of the hits; -1 is an approximate index's way of saying that it found fewer.
    """
    for query_id, scores_k, rows_k in zip(builder.query_ids, scores_Qk, rows_Qk, strict=True):
        found_k = rows_k >= 0
        hits = zip(rows_k[found_k].tolist(), scores_k[found_k].tolist(), strict=True)
        builder.add(query_id, ((document_ids[row], score) for row, score in hits))


def approximate_note(factory: str) -> str:
    """Return the note of a search that may miss documents."""
    return f'Searched with the FAISS index "{factory}", which may miss documents.'


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
