"""Mine: vectors, then candidates of each query, then the choice; block by block on disk, so that a kill costs little.

1. All ranks together encode queries and documents into a `VectorStore`.
2. For each block of queries its rank finds the nearest documents, drops the known ones, asks a teacher where there is
   one, chooses (`choose.py`), and writes what it chose as one file. The name of a file tells what it was made of.
3. All ranks read all files.

Each file is a pure function of vectors and settings: whoever is killed and starts again gets the same. Memory: the
items, an index other than Flat, and 16 bytes per negative; the vectors are mapped from disk.
"""

from __future__ import annotations

import logging
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import faiss
import numpy as np

from vembed.errors import ConfigError, MachineError
from vembed.files import disk_error, new_file
from vembed.mining.choose import RULES, choose, priorities, without_excluded
from vembed.vectors.encode import refuse_several_vectors
from vembed.vectors.index import ExactIndex, build_index, new_index, search_index
from vembed.vectors.provenance import SAMPLE_TEXTS, digest, model_key, vectors_key
from vembed.vectors.store import VectorStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Ragged, Side
    from vembed.mining.task import MiningTask
    from vembed.models.encoder import Encoder
    from vembed.vectors.encode import ItemEncoder
    from vembed.vectors.items import DistinctItems
    from vembed.vectors.keys import MiningKeys
    from vembed.vectors.provenance import Key

FORMAT = 3
"""Raised when the files change their meaning, or the choice its rules; files of other formats are made again."""

BLOCK_QUERIES = 4096
"""Queries of a file: what a kill costs is the search for them."""

PAIRS_BLOCK = 65_536
"""Pairs whose vectors are in memory at a time."""

SAMPLED_QUERIES = 4096
"""About so many queries keep the scores of their whole window, for the report."""

SECONDS_BETWEEN_LINES = 10.0

_log = logging.getLogger(__name__)


class Teacher(Protocol):
    """What scores pairs better than the model, to say which candidates answer the query after all."""

    @property
    def key(self) -> Key:
        """What its scores are made of."""

    def scores(
        self, task: MiningTask, queries_P: NDArray[np.int64], documents_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return a score for each pair of rows."""


@dataclass(frozen=True, eq=False)
class Mined:
    """The negatives of each distinct query, nearest first, and what the report needs of some queries.

    Shape legend: U queries, n negatives, S sampled queries, K candidates of the window.
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
        joined = {each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)}
        return cls(**{**joined, "refused_1R": joined["refused_1R"].sum(axis=0, keepdims=True)})


@dataclass(slots=True)
class Seconds:
    """Wall time by part of the work, in this process."""

    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started


def refuse_impossible(keys: MiningKeys, documents: DistinctItems, encoder: Encoder) -> None:
    """Refuse a mining that can't be done, before anything is encoded for it.

    Raises:
        ConfigError: No candidate is left, the encoder gives several vectors for an item, or FAISS has no such index.
        DataError: The encoder has no tower for a document.
    """
    if keys.mine_range_min >= min(keys.mine_range_max, len(documents)):
        raise ConfigError(
            f"mine_range_min {keys.mine_range_min} passes over all candidates: there are {len(documents)} documents, "
            f"and mine_range_max is {keys.mine_range_max}; lower it"
        )
    documents.require(encoder)
    refuse_several_vectors(encoder)
    new_index(keys.mine_index, encoder.dimension)


def side_vectors(
    items: DistinctItems, side: Side, encode: ItemEncoder, model: Key, folder: Path
) -> tuple[NDArray[np.float32], Key]:
    """Return the vectors of one side, (N, E), and what they are made of, the items among it."""
    sample = items.take(np.arange(0, len(items), max(1, len(items) // SAMPLE_TEXTS))[:SAMPLE_TEXTS])
    key = vectors_key(encode.encoder, model, sample, side, autocast_dtype=encode.autocast_dtype)
    store = VectorStore(folder, side, key, f"{side} vectors", "choose another output")
    vectors_NE = store.get(items, lambda lists: encode.stream(lists, side), encode.ranks)
    return vectors_NE, {**key, "items": items.digest}


def pair_scores(
    queries_UE: NDArray[np.float32],
    documents_DE: NDArray[np.float32],
    queries_P: NDArray[np.int64],
    documents_P: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Return the inner product of each pair of rows, (P,); mapped vectors are read `PAIRS_BLOCK` pairs at a time."""
    scores_P = np.empty(len(queries_P), dtype=np.float32)
    for start in range(0, len(scores_P), PAIRS_BLOCK):
        pairs = slice(start, start + PAIRS_BLOCK)
        np.einsum("pe,pe->p", queries_UE[queries_P[pairs]], documents_DE[documents_P[pairs]], out=scores_P[pairs])
    return scores_P


def shared_model_key(encode: ItemEncoder) -> Key:
    """Return what the encoder is, as the first rank sees it: where weights were received, configurations may differ."""
    return encode.ranks.gather_objects(model_key(encode.encoder))[0]


@dataclass(frozen=True, slots=True)
class Miner:
    """Mines hard negatives with one encoder."""

    encode: ItemEncoder
    keys: MiningKeys
    folder: Path  # of what a rerun reads back; all ranks must see it
    seed: int = 0
    teacher: Teacher | None = None
    seconds: Seconds = field(default_factory=Seconds)

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
        with self.seconds.part("encode documents"):
            documents_DE, documents_key = side_vectors(task.documents, "document", self.encode, model, self.folder)
        with self.seconds.part("encode queries"):
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
        search = _Search(task, queries_UE, documents_DE, index, self)
        last_line = started = time.perf_counter()
        for lap in range(0, len(missing), ranks.world_size):
            self.encode.poll()
            if lap + ranks.rank < len(missing):
                number = missing[lap + ranks.rank]
                _write(paths[number], search.block(number * BLOCK_QUERIES))
            if time.perf_counter() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.perf_counter()
                done = min(lap + ranks.world_size, len(missing)) * BLOCK_QUERIES
                _log.info("mined for %d queries, %.0f a second", done, done / (last_line - started))
        ranks.gather_objects(None)  # all wait: every block is written
        with self.seconds.part("read"):
            parts = [_read(path) for path in paths]
        found = [part for part in parts if part is not None]
        if len(found) < len(paths):
            raise MachineError(
                f"{self.folder} isn't seen by all processes: it must lie on a file system that all machines share"
            )
        return Mined.joined(found)

    def _index(self, documents_DE: NDArray[np.float32], key: Key) -> Any:
        """Return the index, built once and kept, so that a rerun searches the same."""
        if self.keys.mine_index == "Flat":
            return ExactIndex(documents_DE)
        path = self.folder / f"index-{digest([key, self.keys.mine_index])[:16]}.faiss"

        def build() -> None:
            if path.exists():
                return
            index = build_index(documents_DE, self.keys.mine_index)
            with _writing(self.folder), new_file(path) as temporary:
                faiss.write_index(index, str(temporary))

        with self.seconds.part("build index"):
            self.encode.ranks.from_first(build)
            index = faiss.read_index(str(path))
            _, _, settings = self.keys.mine_index.partition(":")
            if settings:  # the file doesn't hold all of them
                faiss.ParameterSpace().set_index_parameters(index, settings)  # type: ignore[arg-type]  # wrong stub
        return index


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds and chooses for one block of queries."""

    task: MiningTask
    queries_UE: NDArray[np.float32]
    documents_DE: NDArray[np.float32]
    index: Any
    miner: Miner

    def block(self, start: int) -> Mined:
        """Return what is mined for the queries from one on."""
        task, keys, seconds = self.task, self.miner.keys, self.miner.seconds
        own = np.arange(start, min(start + BLOCK_QUERIES, len(task.queries)))
        excluded, positives = task.excluded.take(own), task.positives.take(own)
        vectors_BE = np.asarray(self.queries_UE[own])
        most = int(excluded.lengths.max(initial=0))
        with seconds.part("search"):
            scores, rows = search_index(self.index, vectors_BE, k=keys.mine_range_max + most)
            scores, rows = without_excluded(scores, rows, self._is_excluded(rows, excluded), depth=keys.mine_range_max)
            scores, rows = scores[:, keys.mine_range_min :], rows[:, keys.mine_range_min :]
            has_none = positives.lengths == 0  # and so nothing that a negative could be below
            scores[has_none], rows[has_none] = -np.inf, -1
            of_positive, positive_P = np.repeat(np.arange(len(own)), positives.lengths), positives.values
            positive_scores_P = np.einsum("pe,pe->p", vectors_BE[of_positive], self.documents_DE[positive_P])
        judged, judged_positives_P = scores, positive_scores_P
        if self.miner.teacher is not None:
            with seconds.part("teacher"):
                judged, judged_positives_P = self._judged(own, rows, of_positive, positive_P)
        with seconds.part("choose"):
            return self._chosen(own, (scores, rows, judged), judged_positives_P, positives)

    def _chosen(
        self,
        own: NDArray[np.int64],
        candidates: tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]],
        positive_scores_P: NDArray[np.float32],
        positives: Ragged,
    ) -> Mined:
        task, keys = self.task, self.miner.keys
        scores, rows, judged = candidates
        has_any = positives.lengths > 0
        best, best_rows = np.full(len(own), -np.inf, dtype=np.float32), np.full(len(own), -1, dtype=np.int64)
        of_positive_P = np.repeat(np.arange(len(own)), positives.lengths)
        np.maximum.at(best, of_positive_P, positive_scores_P)
        is_best_P = positive_scores_P == best[of_positive_P]
        best_rows[of_positive_P[is_best_P]] = positives.values[is_best_P]
        order = priorities(task.queries.ids[own], task.documents.ids[rows], self.miner.seed)
        choice = choose(judged, best, order, keys)
        places, is_there = np.maximum(choice.places_Bn, 0), choice.places_Bn >= 0

        def chosen(values_BK: NDArray[Any], without: float) -> NDArray[Any]:
            return np.where(is_there, np.take_along_axis(values_BK, places, axis=1), values_BK.dtype.type(without))

        is_chosen = np.zeros(rows.shape, dtype=np.bool_)
        at, columns = np.nonzero(is_there)
        is_chosen[at, choice.places_Bn[at, columns]] = True
        sampled = own % max(1, len(task.queries) // SAMPLED_QUERIES) == 0
        sampled &= has_any
        no_teacher = self.miner.teacher is None
        return Mined(
            rows_Un=chosen(rows, -1),
            scores_Un=chosen(scores, np.nan),
            ranks_Un=np.where(is_there, places + 1 + keys.mine_range_min, 0).astype(np.int32),
            teacher_Un=np.full(places.shape, np.nan, np.float32) if no_teacher else chosen(judged, np.nan),
            positive_U=np.where(has_any, best, np.float32(np.nan)).astype(np.float32),
            refused_1R=np.array([[choice.refused.get(name, 0) for name in RULES]], dtype=np.int64),
            positive_rows_U=best_rows,
            sample_S=own[sampled],
            sample_scores_SK=judged[sampled],
            sample_chosen_SK=is_chosen[sampled],
        )

    def _is_excluded(self, rows_BK: NDArray[np.int64], excluded: Any) -> NDArray[np.bool_]:
        """Return which candidates the query must not get."""
        size = len(self.task.documents)
        known = np.repeat(np.arange(len(rows_BK)), excluded.lengths) * size + excluded.values
        return np.isin(np.arange(len(rows_BK))[:, None] * size + rows_BK, known) & (rows_BK >= 0)

    def _judged(
        self,
        own: NDArray[np.int64],
        rows_BK: NDArray[np.int64],
        of_positive_P: NDArray[np.int64],
        positive_P: NDArray[np.int64],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the teacher's scores of candidates and positives."""
        assert self.miner.teacher is not None
        at, columns = np.nonzero(rows_BK >= 0)
        queries = np.concatenate([own[at], own[of_positive_P]])
        found = self.miner.teacher.scores(self.task, queries, np.concatenate([rows_BK[at, columns], positive_P]))
        judged = np.full(rows_BK.shape, -np.inf, dtype=np.float32)
        judged[at, columns] = found[: len(at)]
        return judged, found[len(at) :]


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Tell what a disk refuses in the block, of which every statement writes to the folder."""
    try:
        yield
    except Exception as error:
        refused = error if isinstance(error, OSError) else disk_error(error)
        if refused is None:
            raise
        raise MachineError(f"{folder} can't be written: {refused}; free some space there") from error


def _write(path: Path, part: Mined) -> None:
    with _writing(path.parent), new_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **{each.name: getattr(part, each.name) for each in fields(part)})


def _read(path: Path) -> Mined | None:
    """Return what a file holds; None where there is none, or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Mined(**{each.name: arrays[each.name] for each in fields(Mined)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s can't be read, and is made again: %s", path, error)
        return None
