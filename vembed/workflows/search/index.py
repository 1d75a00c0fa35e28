"""Read an index back: the nearest documents of a vector, and, with a model for the queries, of a text or picture.

Memory: what FAISS holds, and 8 bytes a document; texts and thumbnails stay on disk. Where documents have several
vectors, 8 bytes a document more: "Flat" maps the vectors and compares a query with all of them; another index finds
candidates for each vector of the query, and the mapped vectors of those alone are compared.

Damage is refused before it is searched: files that are read whole are hashed when the index is opened, the blocks of
the mapped ones when they are used (`Checksums`).

An index of few bits (int8, binary) finds more candidates than asked for, and the mapped vectors of these rank them.

Shape legend: Q queries, E embedding dim, k hits per query.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vembed.batch import Image, Ragged
from vembed.data.python_rows import items_of, refuse_other_modalities
from vembed.errors import ConfigError, NonFiniteError
from vembed.files import BROKEN_ARRAY
from vembed.text import first_line
from vembed.vectors.encode import rows_of, values_of
from vembed.vectors.index import QUANTIZATIONS, MaxSimIndex, read_faiss, rescore, search_index, search_maxsim
from vembed.vectors.store import HEADER_BYTES
from vembed.workflows.search.format import (
    DOCUMENTS_FILE,
    INDEX_FILE,
    OFFSETS_FILE,
    PROBE_FILE,
    PROBE_TEXT,
    STARTS_FILE,
    THUMBNAILS_FILE,
    VECTORS_FILE,
    Checksums,
    IndexMeta,
    line_offsets,
    read_meta,
)
from vembed.workflows.search.thumbnails import ThumbnailReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import ImageLimits, Item, Modality, Side
    from vembed.data.python_rows import ItemInput
    from vembed.evaluation.benchmark.variants import Timing
    from vembed.models.hub import ModelIdentity
    from vembed.vectors.encode import ItemEncoder, Vectors

LEAST_AGREEMENT = 0.98
"""Cosine of a document's vector with the stored one, below which the model is taken for another one. Half precision
keeps 0.999; another pooling, tokenizer or prompt falls far below."""

USUAL_RESCORED = 4
"""Candidates for each hit that the full vectors rank where an index is of few bits."""

CANDIDATES = 128
"""Nearest vectors that an approximate index is asked for, for each vector of a query; or 4 for each hit, if more."""


NUM_EXAMPLES = 3
LOOKED_AT = 12
"""Documents from which each example is chosen: one whose text is short enough to be shown whole, where there is one."""

EXAMPLE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found."""

    rank: int  # from 1
    id: str  # the document's id
    # inner product of query and document: the cosine, unless the model is one for dot products; MaxSim where they have
    # several vectors
    score: float
    text: str  # the document; of a picture, what the corpus says that it shows, or ""
    # path of the picture as the corpus names it; None of a text, "" of a picture without a path
    image: str | None = None
    row: int = -1  # its place in the index, from 0


class StoredDocument(NamedTuple):
    """Document of an index without its vector."""

    id: str  # the document's id
    text: str  # as in `Hit`
    image: str | None  # as in `Hit`


class SearchIndex:
    """An index in memory, its texts and thumbnails on disk. Several threads may ask it.

    Args:
        rescored: As in `open_index`.
        place: What messages call the index, where the folder was unpacked from a table.

    Raises:
        ConfigError: There is nothing to rescore, or a file is missing or damaged.
        NonFiniteError: Several vectors of each document are compared with all queries, and one holds NaN or infinity.
    """

    def __init__(self, folder: Path, *, rescored: int | None = None, place: Path | None = None) -> None:
        self.meta: IndexMeta = read_meta(folder)
        self._place = place or folder
        self._checksums = Checksums(folder)
        if self._place == folder:  # else it was made a moment ago
            self._checksums.note_missing()
        for name in self.meta.files:
            if name == VECTORS_FILE and not self.meta.compares_all:
                self._checksums.check(name, stop=HEADER_BYTES)  # of the rest a block where it is used
            elif name != THUMBNAILS_FILE:
                self._checksums.check(name)
        if rescored is not None and self.meta.num_vectors is not None:
            raise ConfigError(
                f"{self._place} has several vectors of each document, and all of them rank it already; leave --rescore "
                "(rescored) out"
            )
        few_bits = self.meta.factory in QUANTIZATIONS
        self._rescored = (USUAL_RESCORED if few_bits else 0) if rescored is None else rescored
        self._folder = folder
        self._index: Any = None if self.meta.compares_all else self._read_faiss()
        self._file = (folder / DOCUMENTS_FILE).open("rb")
        self._offsets = line_offsets(folder / DOCUMENTS_FILE)
        if len(self._offsets) != len(self) + 1:
            raise self._broken(DOCUMENTS_FILE, f"{len(self._offsets) - 1} lines for {len(self)} documents")
        num_vectors, dim = self.meta.num_vectors or len(self), self.meta.model.dimension
        self._vectors = self._array(VECTORS_FILE, "<f4", (num_vectors, dim))
        self._documents = self._read_documents()
        self._maxsim = MaxSimIndex(self._documents) if self.meta.compares_all else None
        self._thumbnails: ThumbnailReader | None = None
        if self.meta.num_pictures:
            self._thumbnails = ThumbnailReader(
                folder / THUMBNAILS_FILE,
                folder / OFFSETS_FILE,
                num_documents=len(self),
                check=partial(self._checksums.check, THUMBNAILS_FILE),
            )

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.meta.num_documents

    def search(self, vectors: Vectors, k: int) -> list[list[Hit]]:
        """Return the documents with the largest inner product, or MaxSim score, for each query, best first.

        Args:
            vectors: Of the queries; several of each where the documents have several.
            k: Hits per query; clipped to the number of documents. An approximate index may find fewer.

        Raises:
            ValueError: k is below 1.
            NonFiniteError: A vector holds NaN or infinity.
        """
        if k < 1:
            raise ValueError(f"k is {k}; it is at least 1.")
        if not np.isfinite(values_of(vectors)).all():
            raise NonFiniteError("a query's vector holds NaN or infinity: the weights of the model are damaged")
        if isinstance(vectors, Ragged):
            if self._maxsim is None:
                return [
                    self._hits(*self._by_candidates(vectors.take(np.array([row])), k))
                    for row in range(len(vectors.lengths))
                ]
            scores_Qk, rows_Qk = self._maxsim.search(vectors, k)
        else:
            q_QE, k = np.ascontiguousarray(vectors), min(k, len(self))
            scores_Qk, rows_Qk = search_index(self._index, q_QE, k=k * max(1, self._rescored))
            if self._rescored:
                self._check_vectors(np.unique(rows_Qk[rows_Qk >= 0]))
                scores_Qk, rows_Qk = rescore(self._vectors, q_QE, rows_Qk, k=k)
        return [self._hits(scores, rows) for scores, rows in zip(scores_Qk, rows_Qk, strict=True)]

    def _hits(self, scores: NDArray[np.float32], rows: NDArray[np.int64]) -> list[Hit]:
        """Return the documents that were found, best first; row -1 is none."""
        return [
            Hit(rank=rank, score=score, row=row, **self.document(row)._asdict())
            for rank, (row, score) in enumerate(zip(rows.tolist(), scores.tolist(), strict=True), start=1)
            if row >= 0
        ]

    def _by_candidates(self, query: Ragged, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the best among the documents of the vectors that are nearest to a query's."""
        # FAISS finds vectors, not documents: those of the query's vectors together name the documents that MaxSim, over
        # all of their vectors, then ranks. Searching a document's offsets maps a vector back to it.
        nearest = min(max(CANDIDATES, 4 * k), self._index.ntotal)
        _, vector_rows = search_index(self._index, np.ascontiguousarray(query.values), k=nearest)
        vector_rows = vector_rows[vector_rows >= 0]  # FAISS fills up with -1
        candidates = np.unique(np.searchsorted(self._documents.offsets, vector_rows, side="right") - 1)
        if not len(candidates):
            return np.zeros(0, dtype=np.float32), candidates
        self._check_vectors(candidates)
        scores_1k, rows_1k = search_maxsim(self._documents.take(candidates), query, k=k)
        return scores_1k[0], candidates[rows_1k[0]]

    def document(self, row: int) -> StoredDocument:
        """Return what is kept of a document."""
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        try:
            # pread has no position of its own, so that several threads share the file.
            content = json.loads(os.pread(self._file.fileno(), stop - start, start))
            image = content.get("image")
            return StoredDocument(str(content["id"]), str(content["text"]), None if image is None else str(image))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._broken(DOCUMENTS_FILE, f"line {row + 1}: {error}") from error

    def thumbnail(self, row: int) -> bytes:
        """Return a small WebP copy of a document's picture; no bytes where it has none."""
        return b"" if self._thumbnails is None else self._thumbnails.read(row)

    def vector(self, row: int) -> NDArray[np.float32]:
        """Return the vector of a document, (E,), or where it has several all of them, (vectors, E)."""
        self._check_vectors(np.array([row]))
        if self.meta.num_vectors is None:
            return np.array(self._vectors[row])
        return self._documents.take(np.array([row])).values

    def _check_vectors(self, rows: NDArray[np.int64]) -> None:
        """Refuse damage to the vectors of some documents."""
        # A block of 4 MiB is hashed once per process, so that only its first document pays.
        row_bytes = 4 * self.meta.model.dimension
        for row in rows.tolist():
            first, last = (row, row + 1) if self.meta.num_vectors is None else self._documents.offsets[row : row + 2]
            self._checksums.check(
                VECTORS_FILE, HEADER_BYTES + int(first) * row_bytes, HEADER_BYTES + int(last) * row_bytes
            )

    def _array(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return an array of the folder, mapped."""
        try:
            array: NDArray[Any] = np.load(self._folder / name, mmap_mode="r", allow_pickle=False)
        except BROKEN_ARRAY as error:
            raise self._broken(name, first_line(error)) from error
        if array.dtype != dtype or array.shape != shape:
            raise self._broken(name, f"it holds {array.dtype} {array.shape} instead of {np.dtype(dtype)} {shape}")
        return array

    def check_model(self, model: ModelIdentity, encode: Callable[[Sequence[Item], Side], Vectors]) -> None:
        """Refuse a model other than the one that made the vectors.

        Args:
            encode: Its encoder. The first document is encoded again, which shows another tokenizer or pooling; where
                there are pictures, the first thumbnail and a text.

        Raises:
            ConfigError: Weights, dimension or similarity differ, or the document's vector does.
        """
        own = self.meta.model
        if model.weights_sha256 != own.weights_sha256:
            raise ConfigError(
                f"{self._place} was made by {own.name} with weights {own.weights_sha256[:12]}, and {model.name} has "
                f"weights {model.weights_sha256[:12]}: its vectors mean something else. Take that model with --model, "
                f"or encode the corpus again"
            )
        items, stored_NE = self._probes()
        vectors_NE = values_of(encode(items, self.meta.side))
        same_kind = vectors_NE.shape == stored_NE.shape and model.similarity == own.similarity
        if not same_kind or any(
            _cosine(vector, stored) < LEAST_AGREEMENT for vector, stored in zip(vectors_NE, stored_NE, strict=True)
        ):
            raise ConfigError(
                f"{model.name} has the weights that {self._place} was made with, but another vector for its first "
                f"document: its tokenizer, image processor, pooling, length or prompts have changed. Encode the corpus "
                f"again"
            )

    def _probes(self) -> tuple[list[Item], NDArray[np.float32]]:
        """Return items, and the vectors that the model of the index has for them."""
        if self._thumbnails is None:
            return [self.document(0).text], np.atleast_2d(self.vector(0))
        try:
            stored_NE = np.load(self._folder / PROBE_FILE, allow_pickle=False)
        except BROKEN_ARRAY as error:
            raise self._broken(PROBE_FILE, first_line(error)) from error
        items: list[Item] = [Image("the first thumbnail", self.thumbnail(self._thumbnails.first())), PROBE_TEXT]
        return items[: len(stored_NE)], stored_NE

    def _read_faiss(self) -> Any:
        path = self._folder / INDEX_FILE
        try:
            index = read_faiss(path, self.meta.factory)
        except (RuntimeError, MemoryError) as error:
            raise self._broken(INDEX_FILE, str(error).rsplit(": ", 1)[-1]) from error
        dim = self.meta.model.dimension
        # A binary index counts bits, filled up to whole bytes.
        bits = 8 * -(-dim // 8) if self.meta.factory == "binary" else dim
        if (index.ntotal, index.d) != (self.meta.num_vectors or len(self), bits):
            raise self._broken(INDEX_FILE, f"{index.ntotal} vectors of {index.d} dimensions")
        return index

    def _read_documents(self) -> Ragged:
        """Return the vectors of each document, mapped."""
        if self.meta.num_vectors is None:
            return Ragged(self._vectors, np.arange(1, dtype=np.int64))
        starts = np.array(self._array(STARTS_FILE, "<i8", (len(self) + 1,)))
        if starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] != self.meta.num_vectors:
            raise self._broken(
                STARTS_FILE, f"it doesn't cut {self.meta.num_vectors} vectors into {len(self)} documents"
            )
        return Ragged(self._vectors, starts)

    def _broken(self, name: str, reason: str) -> ConfigError:
        return ConfigError(f"{self._place}: {name} is broken: {reason}; encode the corpus again with --overwrite")


def _cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the cosine of two vectors; 1 where one of them is zero, which has no direction to differ in."""
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return 1.0 if lengths == 0.0 else float(one @ other) / lengths


# With a model for the queries -----------------------------------------------------------------------------------------


class Searcher:
    """An index with the model for its queries. Several threads may ask it."""

    def __init__(self, index: SearchIndex, encode: ItemEncoder, limits: ImageLimits) -> None:
        self.index = index
        self.limits = limits
        self._encode = encode
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.index)

    @property
    def takes(self) -> frozenset[Modality]:
        """Kinds of queries: texts, pictures, or a picture with a text."""
        return self._encode.encoder.modalities

    def search(self, queries: Iterable[ItemInput], k: int = 10) -> list[list[Hit]]:
        """Return the best documents of each query, best first.

        Args:
            queries: Texts (str), or pictures as `EmbeddingModel.encode` takes them.

        Raises:
            DataError: A picture can't be used, or the model has no tower for a query.
            TypeError: A query is neither a text nor a picture.
        """
        return self.index.search(self._encoded(queries), k)

    def latency(self, queries: Iterable[ItemInput], k: int = 10) -> Timing:
        """Time the search of single queries as `vembed evaluate` does: on one thread, without encoding them.

        Few queries are searched again, until there are enough times for percentiles.

        Raises:
            DataError: As in `search`.
            TypeError: As in `search`.
            ValueError: There is no query.
        """
        from vembed.evaluation.benchmark.variants import LEAST_TIMED, time_queries  # imports what a search never needs

        vectors = self._encoded(queries)
        count = len(vectors.lengths) if isinstance(vectors, Ragged) else len(vectors)
        if not count:
            raise ValueError("latency takes at least one query.")
        return time_queries(self.index, rows_of(vectors, np.resize(np.arange(count), max(count, LEAST_TIMED))), k=k)

    def _encoded(self, queries: Iterable[ItemInput]) -> Vectors:
        items = items_of(queries, self.limits)
        refuse_other_modalities(items, self.takes, self._encode.encoder.name)
        with self._lock:  # an encoder serves one call at a time
            return self._encode(items, "query")

    def like(self, row: int, k: int = 10) -> list[Hit]:
        """Return the documents that are nearest to a document, itself among them."""
        vector = self.index.vector(row)
        several = vector.ndim == 2
        (hits,) = self.index.search(Ragged(vector, np.array([0, len(vector)])) if several else vector[None], k)
        return hits

    def example_rows(self) -> list[int]:
        """Return a few documents from all over the corpus, the same for the same index."""
        step = max(1, len(self) // NUM_EXAMPLES)
        return list(range(step // 2, len(self), step))[:NUM_EXAMPLES]

    def example_queries(self) -> list[str]:
        """Return beginnings of texts and captions that a first query may be; none where the model takes no texts."""
        if "text" not in self.takes:
            return []
        examples: dict[str, None] = {}  # an ordered set
        for first in self.example_rows():
            rows = range(first, min(first + LOOKED_AT, len(self)))
            # On one line; of a text of megabytes no more than is looked at.
            lines = [" ".join(self.index.document(row).text[: 8 * EXAMPLE_CHARACTERS].split()) for row in rows]
            new = [line for line in lines if line and line not in examples]
            whole = next((line for line in new if len(line) <= EXAMPLE_CHARACTERS), None)
            if new:
                cut = new[0][:EXAMPLE_CHARACTERS]
                examples[whole or (cut.rpartition(" ")[0] or cut).rstrip(" ,;:.-")] = None
        return list(examples)
