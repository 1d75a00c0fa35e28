"""Find the nearest documents of every query by inner product: exactly, with FAISS, from few bits, or by MaxSim.

- "Flat": `ExactIndex` compares a query with every document and reads the vectors where they lie.
- Any other FAISS string ("HNSW32", "IVF64,Flat:nprobe=8"): `build_index`.
- "int8": a byte for each number, with one scale per dimension, shared by all documents: the largest absolute value of
  that dimension in the corpus / 127. A number is stored as round(x / scale), -127 to 127. Queries stay float32. (The
  int8 codes that `EmbeddingModel.encode` returns have one scale per vector instead, which is dropped.)
- "binary": one bit for each dimension of queries and documents, 1 where the number is above 0; the score is
  E - 2 * Hamming distance, the inner product of the signs.
- Several vectors for each row: score(q, d) = sum over the vectors of q of the largest inner product with a vector of d
  (`MaxSimIndex`).

Few bits find candidates in little memory; `rescore` reads the full vectors of those alone, from memory or disk, and
ranks them as exact search would.

Vectors are taken as they come: cosine similarity is the inner product of vectors that the encoder has normalised.
Memory: the exact search and MaxSim read the vectors where they lie; an index holds them again. Everything else is
slices.

Sources: Khattab & Zaharia, 2020, "ColBERT", for MaxSim.
Shape legend: D documents, Q queries, E embedding dim, C candidates and k hits per query, V and W vectors of a batch of
queries and of a block of documents.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import faiss
import numpy as np

from vembed.batch import Ragged
from vembed.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.vectors.encode import Vectors

Quantization: TypeAlias = Literal["int8", "binary"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

SLICE_ROWS = 16_384
"""Rows checked or added at a time: 50 MB at 768 dimensions."""

TRAIN_ROWS = 262_144
"""Most rows that an index is trained on; FAISS itself samples 256 per cluster."""

SHOWN_ROWS = 5
"""Rows that an error names."""

LARGEST_CODE = 127
"""Largest absolute value of an int8 code; -128 stays unused, so that codes are symmetric."""

QUERY_VECTORS = 1024
DOCUMENT_VECTORS = 4096
"""Vectors that MaxSim multiplies at a time: 16 MiB of products, which malloc reuses. A row with more is a block of its
own."""

MERGED_DOCUMENTS = 2048
"""Documents whose MaxSim scores wait to be sorted together: with many hits wanted, sorting after each block takes
long."""

PAIRS_AT_ONCE = 8192
"""Pairs whose vectors are copied side by side, as taking rows by index copies them: 50 MB at 768 dimensions."""


# One vector for each row ----------------------------------------------------------------------------------------------


def search(
    document_vectors_DE: NDArray[np.float32],
    query_vectors_QE: NDArray[np.float32],
    *,
    k: int,
    factory: str = "Flat",
    tie_ranks_D: NDArray[np.int64] | None = None,
    query_batch: int = 1024,
    poll: Callable[[], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the k documents with the largest inner product for each query, best first.

    Args:
        k: Hits per query; clipped to D.
        factory: "Flat", or another string that `build_index` takes.
        tie_ranks_D: With "Flat", see `ExactIndex`.
        poll: Called before each batch of queries; it may raise, e.g. `PreemptedError`.

    Returns:
        Scores (Q, k) float32 and document rows (Q, k) int64. An approximate index that finds fewer than k documents
        fills up with row -1.

    Raises:
        NonFiniteError: A vector holds NaN or infinity.
        ConfigError: FAISS can't build the index for these documents.
        ValueError: The shapes don't fit, or k or query_batch is below 1.
    """
    shapes = document_vectors_DE.shape, query_vectors_QE.shape
    if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][1]:
        raise ValueError(
            f"document vectors have shape {shapes[0]} and query vectors {shapes[1]}; "
            "both are (rows, dim) with the same dim."
        )
    if document_vectors_DE.size == 0:
        raise ValueError(f"document vectors have shape {shapes[0]}: there is nothing to search.")
    if k < 1 or query_batch < 1:
        raise ValueError(f"k is {k} and query_batch is {query_batch}; both are at least 1.")
    check_finite(document_vectors_DE, "document")
    check_finite(query_vectors_QE, "query")
    is_exact = factory == "Flat"
    index = ExactIndex(document_vectors_DE, tie_ranks_D) if is_exact else build_index(document_vectors_DE, factory)
    return search_index(index, query_vectors_QE, k=k, query_batch=query_batch, poll=poll)


class ExactIndex:
    """Vectors that are searched as a "Flat" index searches its copy of them, bit for bit.

    Args:
        vectors_DE: In memory or mapped.
        tie_ranks_D: Which of equal scores at the cut are among the k best: those of the lowest ranks. None leaves it to
            FAISS, which follows no rule.
    """

    def __init__(self, vectors_DE: NDArray[np.float32], tie_ranks_D: NDArray[np.int64] | None = None) -> None:
        self._vectors_DE = np.ascontiguousarray(vectors_DE)
        self._tie_ranks_D = tie_ranks_D
        self.ntotal = len(vectors_DE)

    def search(self, queries_QE: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the k best vectors of each query, (Q, k) each."""
        # One score behind the cut tells whether there is a tie at the cut. Only then is the query swept again.
        more = int(self._tie_ranks_D is not None and k < self.ntotal)
        hits: tuple[NDArray[np.float32], NDArray[np.int64]] = faiss.knn(
            queries_QE, self._vectors_DE, k + more, metric=faiss.METRIC_INNER_PRODUCT
        )
        if not more:
            return hits
        scores_Qk, rows_Qk = hits[0][:, :k], hits[1][:, :k]
        assert self._tie_ranks_D is not None
        for query in np.flatnonzero(hits[0][:, k - 1] == hits[0][:, k]).tolist():
            # Unlike a BLAS, einsum adds up every row in the same order, so that equal vectors have equal scores.
            scores_D = np.einsum("de,e->d", self._vectors_DE, queries_QE[query])
            last = np.partition(scores_D, -k)[-k]
            rows = np.flatnonzero(scores_D >= last)
            rows = rows[np.lexsort((self._tie_ranks_D[rows], -scores_D[rows]))[:k]]
            scores_Qk[query], rows_Qk[query] = scores_D[rows], rows
        return scores_Qk, rows_Qk


def search_index(
    index: Any,
    queries_QE: NDArray[np.float32],
    *,
    k: int,
    query_batch: int = 1024,
    poll: Callable[[], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the k best rows of an index for each query, best first.

    Args:
        index: An `ExactIndex`, or what `build_index`, `build_any_index` or `read_faiss` returned.
        poll: Called before each batch of queries; it may raise.

    Returns:
        Scores (Q, k) float32 and rows (Q, k) int64, -1 where fewer were found.
    """
    k = min(k, index.ntotal)
    num_queries = len(queries_QE)
    scores_Qk = np.empty((num_queries, k), dtype=np.float32)
    rows_Qk = np.empty((num_queries, k), dtype=np.int64)
    for start in range(0, num_queries, query_batch):
        if poll is not None:
            poll()
        part = slice(start, min(start + query_batch, num_queries))
        if isinstance(index, faiss.IndexBinary):
            distances, rows_Qk[part] = index.search(sign_bits(queries_QE[part]), k)
            # Each of the H differing signs turns a +1 of the inner product into a -1: E - 2 H.
            scores_Qk[part] = queries_QE.shape[1] - 2 * distances.astype(np.float32)
        else:
            scores_Qk[part], rows_Qk[part] = index.search(queries_QE[part], k)
    return scores_Qk, rows_Qk


# FAISS's own indexes --------------------------------------------------------------------------------------------------


def build_index(vectors_DE: NDArray[np.float32], factory: str) -> Any:
    """Return a FAISS index of the vectors, row i under id i; they are read in slices.

    Args:
        factory: FAISS index string: "Flat" is exact, others ("HNSW32", "IVF64,Flat") are approximate and searched with
            FAISS's own defaults, or with what follows a colon ("IVF64,Flat:nprobe=8", "HNSW32:efSearch=128").

    Raises:
        ConfigError: FAISS can't build the index for these documents, or has no such search setting.
    """
    num_documents, dim = vectors_DE.shape
    try:
        index = _empty_index(factory, dim)
        if not index.is_trained:
            # Evenly spaced rows: the same at every run, and from all parts of a corpus that is sorted by topic.
            index.train(np.ascontiguousarray(vectors_DE[:: -(-num_documents // TRAIN_ROWS)]))
        for start in range(0, num_documents, SLICE_ROWS):
            index.add(vectors_DE[start : start + SLICE_ROWS])  # FAISS copies what isn't contiguous
    except RuntimeError as error:
        raise ConfigError(_unbuildable(factory, f"{num_documents} documents of {dim} dimensions", error)) from error
    return index


def new_index(factory: str, dim: int) -> Any:
    """Return an empty FAISS index, so that a misspelt string costs no encoding.

    Raises:
        ConfigError: FAISS has no such index or search setting, or not for this dim.
    """
    try:
        return _empty_index(factory, dim)
    except RuntimeError as error:
        raise ConfigError(_unbuildable(factory, f"vectors of {dim} dimensions", error)) from error


def trained_clusters(factory: str) -> tuple[int, int]:
    """Return the most inverted lists, and the most codes of a product quantizer, that an index string asks for.

    k-means needs as many documents as it has clusters: "IVF64,PQ8x4" gives (64, 2**4), "HNSW32" (0, 0).
    """
    name = factory.partition(":")[0]
    lists = max((int(number) for number in re.findall(r"IVF(\d+)", name)), default=0)
    # "PQ8", "PQ8x4", "PQ8+16": the number behind x is the bits of a code, 8 if there is none.
    bits = [int(number or 8) for number in re.findall(r"PQ\d+(?:\+\d+)?(?:x(\d+))?", name)]
    return lists, max((1 << min(bit, 32) for bit in bits), default=0)


def _set_search_settings(index: Any, factory: str) -> None:
    """Set what stands behind the colon of an index string."""
    if settings := factory.partition(":")[2]:
        faiss.ParameterSpace().set_index_parameters(index, settings)  # type: ignore[arg-type]  # wrong stub


def _empty_index(factory: str, dim: int) -> Any:
    index = faiss.index_factory(dim, factory.partition(":")[0], faiss.METRIC_INNER_PRODUCT)
    _set_search_settings(index, factory)
    return index


def _unbuildable(factory: str, what: str, error: RuntimeError) -> str:
    # FAISS's message begins with the C++ function, file and line, and ends with the reason.
    reason = str(error).rsplit(": ", 1)[-1]
    return (
        f"FAISS can't build the index {factory!r} for {what}: {reason}. "
        'Use "Flat" (exact), or e.g. "HNSW32" or "IVF64,Flat" for a large corpus.'
    )


# Few bits for each number ---------------------------------------------------------------------------------------------


def build_any_index(vectors_DE: NDArray[np.float32], factory: str) -> Any:
    """Return an index of the kind that a string names: one of `QUANTIZATIONS`, or one of FAISS's own.

    Raises:
        ConfigError: FAISS can't build it for these vectors.
    """
    few_bits: Quantization | None = next((name for name in QUANTIZATIONS if name == factory), None)
    return build_index(vectors_DE, factory) if few_bits is None else quantized_index(vectors_DE, few_bits)


def quantized_index(documents_DE: NDArray[np.float32], precision: Quantization) -> Any:
    """Return a FAISS index of few bits, document i under number i; the documents are read slice by slice.

    int8 takes E bytes for each document, binary ceil(E / 8).
    """
    slices = range(0, len(documents_DE), SLICE_ROWS)
    if precision == "binary":
        # The bits that fill up the last byte are 0 everywhere, so they never add to a distance.
        bits = faiss.IndexBinaryFlat(8 * -(-documents_DE.shape[1] // 8))
        for start in slices:
            bits.add(sign_bits(documents_DE[start : start + SLICE_ROWS]))
        return bits
    scales_E = scales_per_dimension(documents_DE)
    # FAISS restores byte b of a dimension as low + (b + 1/2) / 255 * span. With low = -127.5 steps and span = 255 steps
    # that is b - 127 steps: the code. Its type of signed bytes would round the query to whole numbers too.
    index = faiss.IndexScalarQuantizer(len(scales_E), faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.concatenate([-127.5 * scales_E, 255 * scales_E]), index.sq.trained)
    index.is_trained = True
    for start in slices:
        # The rounding is ours: FAISS is given values in the middle of its steps, and can't round them elsewhere.
        index.add(codes_per_dimension(documents_DE[start : start + SLICE_ROWS], scales_E) * scales_E)
    return index


def scales_per_dimension(documents_DE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the value of one int8 step of each dimension, (E,); 1 for a dimension that is zero in every document."""
    largest_E = np.maximum(documents_DE.max(axis=0), -documents_DE.min(axis=0)) / np.float32(LARGEST_CODE)
    return np.where(largest_E > 0, largest_E, 1).astype(np.float32)


def codes_per_dimension(vectors_NE: NDArray[np.float32], scales_E: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return int8 codes by the scale of each dimension, -127 to 127, (N, E)."""
    steps_NE: NDArray[np.float32] = np.rint(vectors_NE / scales_E)
    return np.clip(steps_NE, -LARGEST_CODE, LARGEST_CODE).astype(np.int8)


def sign_bits(vectors_NE: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return one bit for each dimension, 8 to a byte, (N, ceil(E / 8)); the last byte is filled up with zeros."""
    return np.packbits(vectors_NE > 0, axis=1)


def rescore(
    documents_DE: NDArray[np.float32], queries_QE: NDArray[np.float32], candidates_QC: NDArray[np.int64], *, k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the k best of each query's candidates by the inner product of the full vectors, best first.

    Args:
        documents_DE: In memory or mapped; the candidates alone are read.
        candidates_QC: Rows of documents; -1 is none.

    Returns:
        Scores (Q, k) float32 and rows (Q, k) int64; row -1 where there were fewer candidates.
    """
    scores_Qk = np.full((len(queries_QE), k), -np.inf, dtype=np.float32)
    rows_Qk = np.full((len(queries_QE), k), -1, dtype=np.int64)
    for number, candidates_C in enumerate(candidates_QC):
        # Ascending rows, as exact search takes the first of equal scores; and a mapped file is read in one direction.
        rows_C = np.sort(candidates_C[candidates_C >= 0])
        if not len(rows_C):
            continue
        wanted = min(k, len(rows_C))
        scores_1k, positions_1k = faiss.knn(
            queries_QE[number : number + 1], documents_DE[rows_C], wanted, metric=faiss.METRIC_INNER_PRODUCT
        )
        scores_Qk[number, :wanted], rows_Qk[number, :wanted] = scores_1k[0], rows_C[positions_1k[0]]
    return scores_Qk, rows_Qk


def write_faiss(index: Any, path: Path) -> None:
    """Write an index into a file."""
    write = faiss.write_index_binary if isinstance(index, faiss.IndexBinary) else faiss.write_index
    write(index, str(path))


def read_faiss(path: Path, factory: str) -> Any:
    """Read an index that was built as `factory` says.

    Raises:
        RuntimeError: It can't be read.
    """
    index = faiss.read_index_binary(str(path)) if factory == "binary" else faiss.read_index(str(path))
    _set_search_settings(index, factory)  # the file doesn't hold all of them
    return index


# Several vectors for each row -----------------------------------------------------------------------------------------


def search_maxsim(
    documents: Ragged,
    queries: Ragged,
    *,
    k: int,
    tie_ranks_D: NDArray[np.int64] | None = None,
    poll: Callable[[], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the k documents with the largest MaxSim score for each query, best first.

    Args and errors are those of `MaxSimIndex`, which serves several searches.
    """
    return MaxSimIndex(documents, tie_ranks_D).search(queries, k=k, poll=poll)


class MaxSimIndex:
    """Documents of several vectors each, which are searched exactly where they lie; they are checked once.

    Args:
        documents: Vectors of each document, values (all vectors, E), at least one vector a row.
        tie_ranks_D: Of equal scores the document of the lowest rank stands first; None: that of the first row.

    Raises:
        NonFiniteError: A vector holds NaN or infinity.
        ValueError: There is no document, or one has no vector.
    """

    def __init__(self, documents: Ragged, tie_ranks_D: NDArray[np.int64] | None = None) -> None:
        _check_rows(documents, "document")
        self.ntotal = len(documents.lengths)
        if not self.ntotal:
            raise ValueError("there are no documents to search.")
        self._documents = documents
        self._tie_ranks_D = np.arange(self.ntotal) if tie_ranks_D is None else tie_ranks_D

    def search(
        self, queries: Ragged, k: int, *, poll: Callable[[], None] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the k documents with the largest MaxSim score for each query, best first.

        The corpus is swept once in blocks of whole documents for a batch of queries, so that memory is one block of
        products and k hits per query, whatever the size of the corpus.

        Args:
            k: Hits per query; clipped to D.
            poll: Called before each batch of queries; it may raise.

        Returns:
            Scores (Q, k) float32 and document rows (Q, k) int64.

        Raises:
            NonFiniteError: A query's vector holds NaN or infinity.
            ValueError: A query has no vector, or k is below 1.
        """
        _check_rows(queries, "query")
        if k < 1:
            raise ValueError(f"k is {k}; it is at least 1.")
        num_queries, k = len(queries.lengths), min(k, self.ntotal)
        scores_Qk = np.empty((num_queries, k), dtype=np.float32)
        rows_Qk = np.empty((num_queries, k), dtype=np.int64)
        for batch in _blocks(queries, QUERY_VECTORS):
            if poll is not None:
                poll()
            # The best k so far (fewer at first), joined by the scores of `waiting` blocks, which begin at document
            # `first`.
            best = np.empty((batch.stop - batch.start, 0), dtype=np.float32)
            best_rows, waiting, first = np.empty(best.shape, dtype=np.int64), [], 0
            for block in _blocks(self._documents, DOCUMENT_VECTORS):
                waiting.append(_maxsim(queries, batch, self._documents, block))
                if block.stop - first < MERGED_DOCUMENTS and block.stop < self.ntotal:
                    continue
                best = np.concatenate([best, *waiting], axis=1)
                numbers = np.broadcast_to(np.arange(first, block.stop), (len(best), block.stop - first))
                best_rows, waiting, first = np.concatenate([best_rows, numbers], axis=1), [], block.stop
                # A full sort by (score, tie rank), so that the answer doesn't depend on where blocks end.
                order = np.lexsort((self._tie_ranks_D[best_rows], -best), axis=1)[:, :k]
                best = np.take_along_axis(best, order, axis=1)
                best_rows = np.take_along_axis(best_rows, order, axis=1)
            scores_Qk[batch], rows_Qk[batch] = best, best_rows
        return scores_Qk, rows_Qk


def _check_rows(rows: Ragged, side: str) -> None:
    # np.reduceat would give an empty row the first product of the next one.
    if (rows.lengths == 0).any():
        raise ValueError(f"{side} row {int(np.argmin(rows.lengths))} has no vector: each has at least one.")
    check_finite(rows.values, side)


def _blocks(rows: Ragged, most_vectors: int) -> Iterator[slice]:
    """Yield slices of rows that hold at most so many vectors together, and at least one row."""
    start, num_rows = 0, len(rows.lengths)
    while start < num_rows:
        stop = int(np.searchsorted(rows.offsets, rows.offsets[start] + most_vectors, side="right")) - 1
        stop = max(start + 1, min(stop, num_rows))
        yield slice(start, stop)
        start = stop


def _maxsim(queries: Ragged, batch: slice, documents: Ragged, block: slice) -> NDArray[np.float32]:
    """Return the scores of a block of documents for a batch of queries, (queries, documents)."""

    def vectors_and_starts(rows: Ragged, part: slice) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        first, last = rows.offsets[part.start], rows.offsets[part.stop]
        return rows.values[first:last], rows.offsets[part] - first

    q_VE, q_starts = vectors_and_starts(queries, batch)
    d_WE, d_starts = vectors_and_starts(documents, block)
    # No row is padded to the longest: one product of all vectors, reduced between the starts of the rows.
    largest_VD = np.maximum.reduceat(q_VE @ d_WE.T, d_starts, axis=1)
    scores: NDArray[np.float32] = np.add.reduceat(largest_VD, q_starts, axis=0)
    return scores


def pair_scores(
    queries: Vectors, documents: Vectors, query_P: NDArray[np.int64], document_P: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the score of each pair of rows, (P,): inner product, or MaxSim where rows have several vectors."""
    if isinstance(queries, Ragged) and isinstance(documents, Ragged):
        q, d = (np.split(side.values, side.offsets[1:-1]) for side in (queries, documents))
        rows = zip(query_P.tolist(), document_P.tolist(), strict=True)
        return np.array([(q[one] @ d[other].T).max(axis=1).sum() for one, other in rows], dtype=np.float32)
    assert not isinstance(queries, Ragged)
    assert not isinstance(documents, Ragged)
    scores_P = np.empty(len(query_P), dtype=np.float32)
    for start in range(0, len(scores_P), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        np.einsum("pe,pe->p", queries[query_P[part]], documents[document_P[part]], out=scores_P[part])
    return scores_P


def check_finite(vectors_NE: NDArray[np.float32], what: str) -> None:
    """Refuse NaN and infinity: FAISS would rank them somewhere, without a word.

    Args:
        what: "document" or "query", for the message.

    Raises:
        NonFiniteError: A vector holds NaN or infinity.
    """
    bad: list[int] = []
    for start in range(0, len(vectors_NE), SLICE_ROWS):
        finite_N = np.isfinite(vectors_NE[start : start + SLICE_ROWS]).all(axis=1)
        bad.extend((np.flatnonzero(~finite_N) + start).tolist())
    if bad:
        shown = ", ".join(str(row) for row in bad[:SHOWN_ROWS])
        more = ", ..." if len(bad) > SHOWN_ROWS else ""
        raise NonFiniteError(
            f"{len(bad)} of {len(vectors_NE)} {what} vectors hold NaN or infinity (rows {shown}{more}): the weights "
            "are damaged, or half precision overflowed. Encode in float32, or go back to an earlier checkpoint."
        )
