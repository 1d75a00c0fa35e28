"""Mine hard negatives: documents that a model ranks high for a query and that nobody called relevant.

1. `MiningTask` gathers the distinct queries and documents of the records, and what each query must not get. Rows of one
   query share their positives: what answers it in any row is never a negative in another.
2. All ranks together encode queries and documents into a `VectorStore`.
3. For each block of queries its rank finds the nearest documents, drops the known ones, asks a teacher where there is
   one, chooses by the rules, and writes the block as one file. The name of a file tells what it was made of.
4. All ranks read all files.

Each file is a pure function of vectors and settings: whoever is killed and starts again gets the same. Memory: the
items, an index other than Flat, and 16 bytes per negative; the vectors are mapped from disk.

No file of training data is read here, no model is loaded, and nothing trains.
Shape legend: U distinct queries, D documents, B queries of a block, K candidates of each (best first), n negatives of
each, P pairs, E numbers per vector.
"""

from __future__ import annotations

import hashlib
import logging
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Ragged, texts_of
from vembed.errors import ConfigError, DataError, MachineError
from vembed.files import disk_error, new_file
from vembed.vectors.encode import refuse_several_vectors
from vembed.vectors.index import (
    ExactIndex,
    build_index,
    new_index,
    pair_scores,
    read_faiss,
    rescore,
    search_index,
    trained_clusters,
    write_faiss,
)
from vembed.vectors.items import DistinctItems
from vembed.vectors.provenance import digest, model_key, vectors_key
from vembed.vectors.store import VectorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Side
    from vembed.data.table import ItemTable, RecordTable
    from vembed.distributed.ranks import Ranks
    from vembed.models.encoder import Encoder
    from vembed.models.st_library import CrossEncoder
    from vembed.vectors.encode import ItemEncoder
    from vembed.vectors.keys import MiningKeys
    from vembed.vectors.provenance import Key

FORMAT = 4
"""Raised when the files change their meaning, or the choice its rules; files of other formats are made again."""

RULES = ("relative margin", "absolute margin", "lowest score", "highest score")
"""Rules that may leave a candidate out, in the order in which they are asked."""

BLOCK_QUERIES = 4096
"""Queries of a file: what a kill costs is the search for them."""

TEXTS_BLOCK = 4096
"""Pairs of texts that a cross-encoder scores before it looks whether it is to stop."""

SAMPLED_QUERIES = 4096
"""About so many queries keep the scores of their whole window, for the report."""

SECONDS_BETWEEN_LINES = 10.0

_log = logging.getLogger(__name__)


# The task -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MiningTask:
    """Queries, documents, and which of them belong together."""

    queries: DistinctItems  # U
    documents: DistinctItems  # D: of all rows and of the corpus
    query_of_record_N: NDArray[np.int64]
    positives: Ragged  # rows of the documents that answer each query, ascending
    excluded: Ragged  # rows that no query gets: its positives, its given negatives, itself

    @classmethod
    def of(cls, records: RecordTable, corpus: ItemTable | None = None) -> MiningTask:
        """Gather the queries and documents of some records.

        Args:
            corpus: Further documents.

        Raises:
            DataError: The rows have classes.
            ImageError: A picture can't be read.
        """
        items = records.items
        (_, query_numbers), positives, negatives = (
            records.numbers(column) for column in ("query", "positives", "negatives")
        )
        queries, documents = DistinctItems.of([(items, query_numbers)]), documents_to_mine(records, corpus)
        query_of_record = queries.rows_of(items.ids[query_numbers])

        def pairs(column: tuple[NDArray[np.int64], NDArray[np.int64]]) -> NDArray[np.int64]:
            """Return (query row, document row) of each item of a column, (2, P)."""
            records_P, numbers_P = column
            return np.stack([query_of_record[records_P], documents.rows_of(items.ids[numbers_P])])

        def grouped(pairs_2P: NDArray[np.int64]) -> Ragged:
            """Return the distinct documents of each query, ascending."""
            # One number per pair sorts and dedups both columns at once: U * D stays far below 2**63.
            keys = np.unique(pairs_2P[0] * len(documents) + pairs_2P[1])
            query_rows, document_rows = np.divmod(keys, len(documents))
            return Ragged(document_rows, np.searchsorted(query_rows, np.arange(len(queries) + 1)))

        # A query that is also a document somewhere would be its own nearest neighbour.
        itself = np.stack([np.arange(len(queries)), documents.rows_of(queries.ids)])
        known = np.concatenate([pairs(positives), pairs(negatives), itself[:, itself[1] >= 0]], axis=1)
        return cls(queries, documents, query_of_record, grouped(pairs(positives)), grouped(known))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over everything."""
        total = hashlib.sha256(f"{self.queries.digest} {self.documents.digest}".encode())
        for part in (self.positives, self.excluded):
            total.update(part.offsets.astype("<i8").tobytes())
            total.update(part.values.astype("<i8").tobytes())
        return total.hexdigest()

    def require(self, model: Encoder | CrossEncoder) -> None:
        """Refuse items that a model has no tower for.

        Raises:
            DataError: With what they are.
        """
        self.queries.require(model)
        self.documents.require(model)


def documents_to_mine(records: RecordTable, corpus: ItemTable | None) -> DistinctItems:
    """Return the documents of all rows and of the corpus.

    Raises:
        DataError: The rows have classes.
        ImageError: A picture can't be read.
    """
    if records.has_classes:
        raise DataError(
            "rows of one class answer each other's queries, so that mining would take right answers for hard "
            "negatives: leave the classes out (column_mapping: {label: null}), or don't mine"
        )
    parts = [(records.items, np.concatenate([records.numbers("positives")[1], records.numbers("negatives")[1]]))]
    if corpus is not None:
        parts.append((corpus, np.arange(len(corpus))))
    return DistinctItems.of(parts)


def refuse_impossible(keys: MiningKeys, documents: DistinctItems, encoder: Encoder) -> None:
    """Refuse a mining that can't be done, before anything is encoded for it.

    Raises:
        ConfigError: No candidate is left, the encoder gives several vectors for an item, or FAISS has no such index or
            can't train it on so few documents.
        DataError: The encoder has no tower for a document.
    """
    if keys.mine_range_min >= min(keys.mine_range_max, len(documents)):
        raise ConfigError(
            f"mine_range_min {keys.mine_range_min} skips all candidates: there are {len(documents)} documents, "
            f"and mine_range_max is {keys.mine_range_max}; lower it"
        )
    if (least := max(trained_clusters(keys.mine_index))) > len(documents):
        raise ConfigError(
            f"mine_index {keys.mine_index} is trained on at least {least:,} documents, and there are "
            f"{len(documents):,}; take fewer clusters, or Flat or HNSW32"
        )
    documents.require(encoder)
    refuse_several_vectors(encoder)
    new_index(keys.mine_index, encoder.dimension)


# Vectors and scores ---------------------------------------------------------------------------------------------------


def shared_model_key(encode: ItemEncoder) -> Key:
    """Return the key of the model as the first rank sees it: where weights were received, configurations may differ."""
    return encode.ranks.gather_objects(model_key(encode.encoder))[0]


def side_vectors(
    items: DistinctItems, side: Side, encode: ItemEncoder, model: Key, folder: Path
) -> tuple[NDArray[np.float32], Key]:
    """Return the vectors of one side, (N, E), and what they are made of, the items among it. All ranks call it."""
    key = vectors_key(encode.encoder, model, side, autocast_dtype=encode.autocast_dtype)
    store = VectorStore(folder, side, key, f"{side} vectors", "choose another output")
    vectors_NE = store.get(items, lambda lists: encode.stream(lists, side), encode.ranks)
    return vectors_NE, {**key, "items": items.digest}


@dataclass(frozen=True, eq=False)
class Teacher:
    """A better judge of pairs than the model: it tells which candidates answer the query after all."""

    key: Key  # everything that its scores depend on
    # rows of queries and of documents of a task (P,) -> a score for each pair (P,)
    scores: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


def encoder_teacher(encode: ItemEncoder, task: MiningTask, folder: Path) -> Teacher:
    """Return a model with one vector for each item as a teacher: its scores are their inner products.

    It encodes all items of the task, or reads what was encoded before; all ranks must call it.
    """
    task.require(encode.encoder)
    refuse_several_vectors(encode.encoder)
    model = shared_model_key(encode)
    documents_DE, documents_key = side_vectors(task.documents, "document", encode, model, folder)
    queries_UE, queries_key = side_vectors(task.queries, "query", encode, model, folder)
    key = {"queries": queries_key, "documents": documents_key}
    return Teacher(key, partial(pair_scores, queries_UE, documents_DE))


def cross_encoder_teacher(model: CrossEncoder, task: MiningTask, *, ranks: Ranks, poll: Callable[[], None]) -> Teacher:
    """Return a cross-encoder, which reads query and document together, as a teacher.

    Its scores lie between 0 and 1, as margins need them. They raise a `MachineError` where one isn't finite.

    Args:
        ranks: The processes that ask it.
        poll: Called now and then where one alone asks; may raise to stop.

    Raises:
        DataError: The data hold more than texts.
    """
    task.require(model)

    def scores(queries_P: NDArray[np.int64], documents_P: NDArray[np.int64]) -> NDArray[np.float32]:
        parts = [np.zeros(0, dtype=np.float32)]
        for start in range(0, len(queries_P), TEXTS_BLOCK):
            if ranks.is_one:  # several have different numbers of pairs, and agree on stopping after each block
                poll()
            block = slice(start, start + TEXTS_BLOCK)
            queries = texts_of(task.queries.take(queries_P[block]))
            documents = texts_of(task.documents.take(documents_P[block]))
            logits_B = model.scores(list(zip(queries, documents, strict=True)))
            parts.append(logits_B.sigmoid().cpu().numpy())
        scores_P = np.concatenate(parts)
        if not np.isfinite(scores_P).all():
            raise MachineError(f"{model.name} gives scores that aren't finite")
        return scores_P

    return Teacher(dict(model.key()), scores)


# The choice: a pure function of scores and settings -------------------------------------------------------------------


def without_excluded(
    scores_BK: NDArray[np.float32], rows_BK: NDArray[np.int64], is_excluded_BK: NDArray[np.bool_], *, depth: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the first candidates that aren't excluded; where a query has fewer, row -1 and score -inf fill up."""
    is_out = is_excluded_BK | (rows_BK < 0)
    # A stable sort by "is out" moves the others to the front and keeps their order.
    order = np.argsort(is_out, axis=1, kind="stable")[:, :depth]
    is_out = np.take_along_axis(is_out, order, axis=1)
    scores = np.where(is_out, np.float32(-np.inf), np.take_along_axis(scores_BK, order, axis=1))
    return scores, np.where(is_out, -1, np.take_along_axis(rows_BK, order, axis=1))


def choose(
    scores_BK: NDArray[np.float32],
    positive_B: NDArray[np.float32],
    priorities_BK: NDArray[np.uint64],
    keys: MiningKeys,
) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Choose among candidates of the window.

    Args:
        scores_BK: The scores that the rules look at: the model's or a teacher's; -inf where there is no candidate.
        positive_B: The same of each query's best positive.
        priorities_BK: The lowest ones are taken where `mine_sampling` is random.

    Returns:
        Columns of the candidates that are taken, nearest first, -1 where there are too few, (B, n), n no larger than
        the window; and how many candidates of the window each rule left out first, by its name.
    """
    positive_B1, num_candidates = positive_B[:, None], scores_BK.shape[1]
    relative, absolute = keys.mine_relative_margin, keys.mine_absolute_margin
    kept_by_rule = (  # in the order of RULES; None where a rule isn't asked
        None if relative is None else scores_BK <= relative_limits(positive_B1, relative),
        None if absolute is None else scores_BK <= positive_B1 - np.float32(absolute),
        None if keys.mine_min_score is None else scores_BK >= np.float32(keys.mine_min_score),
        None if keys.mine_max_score is None else scores_BK <= np.float32(keys.mine_max_score),
    )
    allowed_BK = np.isfinite(scores_BK)
    refused = {}
    for name, kept_BK in zip(RULES, kept_by_rule, strict=True):
        if kept_BK is not None:
            refused[name] = int((allowed_BK & ~kept_BK).sum())
            allowed_BK = allowed_BK & kept_BK
    # Candidates stand nearest first, so "top" ranks them by column. Those that aren't allowed come last either way.
    columns_BK = np.broadcast_to(np.arange(num_candidates, dtype=np.uint64), scores_BK.shape)
    ranked = np.where(
        allowed_BK, priorities_BK if keys.mine_sampling == "random" else columns_BK, np.iinfo(np.uint64).max
    )
    taken = np.argsort(ranked, axis=1, kind="stable")[:, : keys.mine_negatives]
    # Behind the last column stands "none", which sorting leaves at the end.
    taken = np.where(np.take_along_axis(allowed_BK, taken, axis=1), taken, num_candidates)
    taken.sort(axis=1)
    return np.where(taken < num_candidates, taken, -1), refused


def relative_limits(positive: NDArray[np.float32], margin: float) -> NDArray[np.float32]:
    """Return the highest scores that a relative margin keeps; below a negative positive it goes further down."""
    size = np.where(np.isfinite(positive), np.abs(positive), 0)
    return (positive - np.float32(margin) * size).astype(np.float32)


def priorities(query_ids_B: NDArray[np.int64], document_ids_BK: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """Return random numbers that depend on the contents of query and document and on the seed alone (splitmix64).

    So neither the order of the rows nor the block that a query is in changes what is drawn for it.
    """

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    mixed = mix(query_ids_B.view(np.uint64)[:, None] + np.uint64(seed))
    return mix(mixed ^ document_ids_BK.view(np.uint64))


# The work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Mined:
    """Negatives of each distinct query, nearest first, and what the report needs of some queries.

    Shape legend: U queries, n negatives, R rules, S sampled queries, K candidates of the window.
    """

    rows_Un: NDArray[np.int64]  # documents; -1 where there are fewer
    scores_Un: NDArray[np.float32]  # the model's
    ranks_Un: NDArray[np.int32]  # 1 is the nearest document that isn't known to answer the query; 0 where there is none
    teacher_Un: NDArray[np.float32]  # the teacher's scores; NaN without
    positive_U: NDArray[np.float32]  # score of the best positive, the teacher's where there is one; NaN without any
    positive_rows_U: NDArray[np.int64]  # that positive among the documents; -1 without any
    refused_1R: NDArray[np.int64]  # candidates that each of `RULES` left out
    sample_S: NDArray[np.int64]  # which queries are sampled
    sample_scores_SK: NDArray[np.float32]  # its candidates' scores that rules looked at, -inf where there are fewer
    sample_chosen_SK: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: list[Mined]) -> Mined:
        """Return the parts as one, in order."""
        arrays = {column.name: np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)}
        return cls(**{**arrays, "refused_1R": arrays["refused_1R"].sum(axis=0, keepdims=True)})


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of the block to a part of the work."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Miner:
    """Miner of hard negatives with one encoder."""

    encode: ItemEncoder
    keys: MiningKeys
    folder: Path  # of what a rerun reads back; all ranks must see it
    seed: int = 0
    teacher: Teacher | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # wall time by part of the work, in this process

    def mine(self, task: MiningTask) -> Mined:
        """Return the negatives of every query; all ranks must call it.

        Raises:
            ConfigError: The encoder gives several vectors for an item, or FAISS can't build the index.
            DataError: The encoder has no tower for an item.
            MachineError: The folder can't be written.
            NonFiniteError: A vector holds NaN or infinity.
        """
        refuse_impossible(self.keys, task.documents, self.encode.encoder)
        task.require(self.encode.encoder)
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        model = shared_model_key(self.encode)
        with timed(self.seconds, "encode documents"):
            documents_DE, documents_key = side_vectors(task.documents, "document", self.encode, model, self.folder)
        with timed(self.seconds, "encode queries"):
            queries_UE, queries_key = side_vectors(task.queries, "query", self.encode, model, self.folder)
        index = self._index(documents_DE, documents_key)
        ranks = self.encode.ranks
        key = {
            "format": FORMAT,
            "queries": queries_key,
            "documents": documents_key,
            "task": task.digest,
            "settings": self.keys.mining(),
            "seed": self.seed,
            "teacher": None if self.teacher is None else self.teacher.key,
        }
        name = digest(key)[:16]
        paths = [self.folder / f"chosen-{start:010}-{name}.npz" for start in range(0, len(task.queries), BLOCK_QUERIES)]
        missing = ranks.from_first(lambda: [number for number, path in enumerate(paths) if _read(path) is None])
        if 0 < len(missing) < len(paths):
            _log.info("%d of %d blocks of queries were mined before", len(paths) - len(missing), len(paths))
        last_line = started = time.perf_counter()
        # Ranks take one block each per lap, and all poll at its beginning: they stop at the same point.
        for lap in range(0, len(missing), ranks.world_size):
            self.encode.poll()
            if lap + ranks.rank < len(missing):
                number = missing[lap + ranks.rank]
                first = number * BLOCK_QUERIES
                block_B = np.arange(first, min(first + BLOCK_QUERIES, len(task.queries)))
                part = self._mine_block(block_B, task, np.asarray(queries_UE[block_B]), documents_DE, index)
                with _writing(self.folder), new_file(paths[number]) as temporary, temporary.open("wb") as file:
                    np.savez(file, **{column.name: getattr(part, column.name) for column in fields(part)})
            if time.perf_counter() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.perf_counter()
                done = min(lap + ranks.world_size, len(missing)) * BLOCK_QUERIES
                _log.info("mined for %d queries, %.0f a second", done, done / (last_line - started))
        ranks.gather_objects(None)  # all wait: every block is written
        with timed(self.seconds, "read"):
            parts = [part for part in map(_read, paths) if part is not None]
        # All wait: whoever has its answer may delete the folder.
        if not all(ranks.gather_objects(len(parts) == len(paths))):
            raise MachineError(
                f"{self.folder} isn't seen by all processes: it must lie on a file system that all machines share"
            )
        return Mined.joined(parts)

    def _index(self, documents_DE: NDArray[np.float32], key: Key) -> Any:
        """Return the index, built once and kept: HNSW differs from build to build, and a rerun searches the same."""
        if self.keys.mine_index == "Flat":
            return ExactIndex(documents_DE)
        path = self.folder / f"index-{digest([key, self.keys.mine_index])[:16]}.faiss"

        def build() -> None:
            if path.exists():
                return
            index = build_index(documents_DE, self.keys.mine_index)
            with _writing(self.folder), new_file(path) as temporary:
                write_faiss(index, temporary)

        with timed(self.seconds, "build index"):
            self.encode.ranks.from_first(build)
            return read_faiss(path, self.keys.mine_index)

    def _candidates(
        self,
        excluded: Ragged,
        queries_BE: NDArray[np.float32],
        documents_DE: NDArray[np.float32],
        index: Any,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and documents of the window (B, K), best first; where a query has fewer, -inf and row -1.

        Args:
            excluded: The documents that each query must not get.
        """
        keys, size = self.keys, len(documents_DE)
        # So many more hits than wanted that the window is full once the known documents have been dropped.
        wanted = keys.mine_range_max + int(excluded.lengths.max(initial=0))
        scores, rows = search_index(index, queries_BE, k=wanted)
        if keys.mine_index != "Flat":
            # Scores of PQ, SQ or PCA are estimates, and the rules compare them with those of the positives.
            scores, rows = rescore(documents_DE, queries_BE, rows, k=rows.shape[1])
        # Known pairs as single numbers, position * D + document, so that one isin serves the whole block.
        position_B = np.arange(len(queries_BE))
        known = np.repeat(position_B, excluded.lengths) * size + excluded.values
        is_excluded = np.isin(position_B[:, None] * size + rows, known) & (rows >= 0)
        scores, rows = without_excluded(scores, rows, is_excluded, depth=keys.mine_range_max)
        return scores[:, keys.mine_range_min :], rows[:, keys.mine_range_min :]

    def _mine_block(
        self,
        block_B: NDArray[np.int64],
        task: MiningTask,
        queries_BE: NDArray[np.float32],
        documents_DE: NDArray[np.float32],
        index: Any,
    ) -> Mined:
        """Search, judge and choose the negatives of a block of queries.

        Args:
            block_B: Rows of the queries, ascending.
        """
        keys, num_queries = self.keys, len(block_B)
        positives = task.positives.take(block_B)
        # Positives stand flat: P pairs of a position in the block and a document.
        position_P, positive_P = np.repeat(np.arange(num_queries), positives.lengths), positives.values
        has_positive = positives.lengths > 0
        with timed(self.seconds, "search"):
            scores, rows = self._candidates(task.excluded.take(block_B), queries_BE, documents_DE, index)
            # Without a positive there is nothing that a negative could be below.
            scores[~has_positive], rows[~has_positive] = -np.inf, -1
            positive_scores_P = np.einsum("pe,pe->p", queries_BE[position_P], documents_DE[positive_P])
        judged = scores  # the scores that the rules look at
        if self.teacher is not None:
            with timed(self.seconds, "teacher"):
                positions, columns = np.nonzero(rows >= 0)
                answers = self.teacher.scores(
                    np.concatenate([block_B[positions], block_B[position_P]]),
                    np.concatenate([rows[positions, columns], positive_P]),
                )
                judged = np.full(rows.shape, -np.inf, dtype=np.float32)
                judged[positions, columns] = answers[: len(positions)]
                positive_scores_P = answers[len(positions) :]
        with timed(self.seconds, "choose"):
            # The best positive of each query; of several equal ones the last.
            best, best_rows = np.full(num_queries, -np.inf, np.float32), np.full(num_queries, -1, np.int64)
            np.maximum.at(best, position_P, positive_scores_P)
            is_best_P = positive_scores_P == best[position_P]
            best_rows[position_P[is_best_P]] = positive_P[is_best_P]
            # rows is -1 where there is no candidate: it takes the last document's id, and no rule allows it.
            order = priorities(task.queries.ids[block_B], task.documents.ids[rows], self.seed)
            columns_Bn, refused = choose(judged, best, order, keys)

            is_there = columns_Bn >= 0
            columns = np.maximum(columns_Bn, 0)

            def chosen(values_BK: NDArray[Any], without: float) -> NDArray[Any]:
                return np.where(is_there, np.take_along_axis(values_BK, columns, axis=1), values_BK.dtype.type(without))

            is_chosen = np.zeros(rows.shape, dtype=np.bool_)
            positions, _ = np.nonzero(is_there)
            is_chosen[positions, columns_Bn[is_there]] = True
            is_sampled = (block_B % max(1, len(task.queries) // SAMPLED_QUERIES) == 0) & has_positive
            no_teacher = np.full(columns_Bn.shape, np.nan, np.float32)
            return Mined(
                rows_Un=chosen(rows, -1),
                scores_Un=chosen(scores, np.nan),
                ranks_Un=np.where(is_there, columns + 1 + keys.mine_range_min, 0).astype(np.int32),
                teacher_Un=no_teacher if self.teacher is None else chosen(judged, np.nan),
                positive_U=np.where(has_positive, best, np.float32(np.nan)).astype(np.float32),
                positive_rows_U=best_rows,
                refused_1R=np.array([[refused.get(name, 0) for name in RULES]], dtype=np.int64),
                sample_S=block_B[is_sampled],
                sample_scores_SK=judged[is_sampled],
                sample_chosen_SK=is_chosen[is_sampled],
            )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Report what a disk refuses in the block, of which every statement writes to the folder."""
    try:
        yield
    except Exception as error:
        refused = error if isinstance(error, OSError) else disk_error(error)
        if refused is None:
            raise
        raise MachineError(f"{folder} can't be written: {refused}; free some space there") from error


def _read(path: Path) -> Mined | None:
    """Return the block of a file; None where there is none, or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Mined(**{column.name: arrays[column.name] for column in fields(Mined)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s can't be read, and is made again: %s", path, error)
        return None
