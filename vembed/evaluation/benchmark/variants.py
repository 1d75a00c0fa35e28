"""Cheaper forms of the same vectors: fewer dimensions, fewer bits, an index that looks at fewer documents; their cost.

- dims: the first m numbers of each vector, brought back to unit length.
- int8 and binary: fewer bits for each number (vectors/index.py).
- rescored: more candidates than asked for, found in one of these forms and ranked by the full vectors.
- index: any FAISS index string.

The reference is exact search over all dimensions in float32. Each number of dimensions is tried in float32 and in every
precision; each precision also on all dimensions; each index on all dimensions in float32. Forms of fewer dimensions or
bits are also tried with rescoring, which ranks some candidates for each hit by the full vectors.

Shape legend: D documents, Q queries, E embedding dim, M dimensions that are kept, k hits per query.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import faiss
import numpy as np

from vembed.batch import Ragged
from vembed.errors import ConfigError
from vembed.evaluation.benchmark.names import unique_folders
from vembed.evaluation.evaluate import EXACT
from vembed.vectors.encode import rows_of
from vembed.vectors.index import (
    ExactIndex,
    MaxSimIndex,
    build_index,
    new_index,
    quantized_index,
    rescore,
    search_index,
    trained_clusters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from vembed.models.encoder import Encoder
    from vembed.vectors.encode import Vectors

Precision: TypeAlias = Literal["float32", "int8", "binary"]

ADVISED_ROWS_PER_LIST = 39
"""Documents for each list below which FAISS's clustering itself warns."""

REFERENCE_NAME = "exact"


TIMED_QUERIES = 1000
"""Most queries that are timed: the slowest hundredth of them is still ten."""

LEAST_TIMED, TIMED_SECONDS = 100, 5.0
"""Behind so many queries the timing ends once it has taken so long: exact search of a million documents takes 0.1 s."""

WARM_UP_QUERIES = 5


# What is tried --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the vectors and one way to search them."""

    name: str  # for people: "exact", "64 dims", "64 dims, int8", "HNSW32"
    folder: str  # name of its folder; empty for the reference
    dimension: int | None = None  # leading dimensions that are kept, or None for all
    precision: Precision = "float32"  # what a number of a document is stored as
    index: str = EXACT  # FAISS index string
    rescored: int = 0  # candidates for each hit that are ranked by the full vectors; 0 for none

    @property
    def is_reference(self) -> bool:
        """True of exact search over the vectors as the model gave them."""
        return not self.folder


REFERENCE = Variant(name=REFERENCE_NAME, folder="")


def plan_variants(
    *,
    dims: Sequence[int] = (),
    precisions: Sequence[Precision] = (),
    indexes: Sequence[str] = (),
    rescored: Sequence[int] = (),
) -> tuple[Variant, ...]:
    """Return what to try, the reference first.

    Raises:
        ConfigError: When a number of dimensions or candidates is below 1, or nothing is there to rescore.
    """
    if dims and min(dims) < 1:
        raise ConfigError(f"--dims: a model keeps at least 1 dimension, got {min(dims)}")
    if rescored and min(rescored) < 1:
        raise ConfigError(f"--rescore: at least 1 candidate for each hit is ranked again, got {min(rescored)}")
    if rescored and not dims and not precisions:
        raise ConfigError("--rescore ranks the candidates of a cheaper form: add --quantize int8 binary, or --dims")
    forms: list[Variant] = []
    # dict.fromkeys drops repeated options and keeps their order.
    for dimension in (None, *sorted(set(dims), reverse=True)):
        for precision in dict.fromkeys(("float32", *precisions)):
            words = [] if dimension is None else [f"{dimension} dims"]
            words += [] if precision == "float32" else [precision]
            for factor in dict.fromkeys((0, *rescored)) if words else ():
                name = ", ".join([*words, *([f"{factor}x rescored"] if factor else [])])
                forms.append(Variant(name, name, dimension, precision, rescored=factor))
    forms += [Variant(index, index, index=index) for index in dict.fromkeys(indexes) if index != EXACT]
    folders = unique_folders([form.name for form in forms])
    return (REFERENCE, *(replace(form, folder=folder) for form, folder in zip(forms, folders, strict=True)))


def check_model(variants: Sequence[Variant], model: str, encoder: Encoder) -> None:
    """Refuse to keep more dimensions than a model has, and an index that can't hold its vectors.

    Raises:
        ConfigError: Names the dimensions that are too many, or the index.
    """
    dimension = encoder.dimension
    if encoder.multi_vector:
        if len(variants) > 1:
            raise ConfigError(
                f"--dims, --quantize, --index: {model} gives several vectors for each row, which are compared by exact "
                f"MaxSim; leave these options or this model out"
            )
        return
    asked = {variant.dimension or 0 for variant in variants}
    over = sorted(dim for dim in asked if dim > dimension)
    if over:
        raise ConfigError(
            f"--dims {','.join(str(dim) for dim in over)}: {model} has {dimension} dimensions; give at most "
            f"{dimension}, or leave this model out"
        )
    for variant in variants:
        new_index(variant.index, variant.dimension or dimension)


def check_sizes(variants: Sequence[Variant], task: str, num_documents: int) -> None:
    """Refuse an index that a set is too small to train.

    Raises:
        ConfigError: Names the index and one that the set can train.
    """
    for variant in variants:
        lists, codes = trained_clusters(variant.index)
        if max(lists, codes) <= num_documents:
            continue
        if lists > num_documents:
            # The largest power of two of lists that each get as many documents as FAISS advises.
            fitting = 1 << (max(1, num_documents // ADVISED_ROWS_PER_LIST).bit_length() - 1)
            advice = f"use {variant.index.replace(f'IVF{lists}', f'IVF{fitting}')}"
        else:
            advice = "use fewer bits for each code, or an index that isn't trained, e.g. HNSW32"
        raise ConfigError(
            f"--index {variant.index}: it is trained on at least {max(lists, codes)} documents, {task} has "
            f"{num_documents}; {advice}, or leave this set out"
        )


def size_note(variant: Variant, num_documents: int) -> str | None:
    """Return a sentence where an index can be trained, but on fewer documents than FAISS advises."""
    lists, codes = trained_clusters(variant.index)
    wanted = ADVISED_ROWS_PER_LIST * max(lists, codes)
    if wanted <= num_documents:
        return None
    return (
        f"FAISS advises {wanted} documents to train {variant.index}, and there are {num_documents}: "
        "its clusters are rough."
    )


# Searching it ---------------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Milliseconds in which half, 95 and 99 of 100 queries were searched, and how many there were."""

    p50: float
    p95: float
    p99: float
    num_timed: int


@dataclass(frozen=True, slots=True)
class Searcher:
    """A way to search the vectors of a set, and the memory that it takes."""

    # Queries (Q, E), or several vectors of each; k; poll -> scores and rows of the k best documents, (Q, k) each; row
    # -1 where fewer were found.
    search: Callable[..., tuple[NDArray[np.float32], NDArray[np.int64]]]
    bytes_per_document: float  # memory that an index takes for each document
    rescoring_bytes: float = 0.0  # of each document that rescoring reads, which may lie on disk


def time_queries(searcher: Any, queries: Vectors, *, k: int, poll: Callable[[], None] | None = None) -> Timing:
    """Time the search of single queries, drawn evenly, on one thread of FAISS and after some that warm it up."""
    count = len(queries.lengths) if isinstance(queries, Ragged) else len(queries)
    # One query at a time, as a user asks: FAISS is several times faster per query on a batch. They are cut out before
    # the clock starts, and one thread makes the numbers of machines with different cores comparable.
    drawn = np.random.default_rng(0).permutation(count)[:TIMED_QUERIES]
    single = [rows_of(queries, drawn[place : place + 1]) for place in range(len(drawn))]
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    times: list[float] = []
    try:
        for query in single[:WARM_UP_QUERIES]:
            searcher.search(query, k=k)
        for query in single:
            if poll is not None:
                poll()
            if len(times) >= LEAST_TIMED and sum(times) > TIMED_SECONDS:
                break
            started = time.perf_counter()
            searcher.search(query, k=k)
            times.append(time.perf_counter() - started)
    finally:
        faiss.omp_set_num_threads(threads)
    p50, p95, p99 = (1000.0 * np.percentile(times, (50, 95, 99))).tolist()
    return Timing(p50, p95, p99, len(times))


def build_searcher(
    document_vectors_DE: Vectors, variant: Variant, tie_ranks_D: NDArray[np.int64] | None = None
) -> Searcher:
    """Build the index of a variant; documents of several vectors each are compared by exact MaxSim.

    Args:
        tie_ranks_D: Of exact search: which of equal scores are kept at the cut, the lowest ranks first.

    Raises:
        ConfigError: FAISS can't build the index for these documents.
        NonFiniteError: One of several vectors of a document holds NaN or infinity.
    """
    if isinstance(document_vectors_DE, Ragged):
        ragged = document_vectors_DE
        bytes_per_document = ragged.values.nbytes / len(ragged.lengths)
        return Searcher(MaxSimIndex(ragged, tie_ranks_D).search, bytes_per_document)
    full_DE, dimension = document_vectors_DE, variant.dimension

    def shortened(vectors_NE: NDArray[np.float32]) -> NDArray[np.float32]:
        return vectors_NE if dimension is None else truncated(vectors_NE, dimension)

    documents_DE = shortened(full_DE)
    dim = documents_DE.shape[1]
    if variant.precision != "float32":
        index = quantized_index(documents_DE, variant.precision)
        size = float(index.code_size)
    elif variant.index == EXACT:
        index, size = ExactIndex(documents_DE, tie_ranks_D), 4.0 * dim
    else:
        index = build_index(documents_DE, variant.index)
        size = _written_bytes(index) / len(documents_DE)

    def search(
        queries_QE: NDArray[np.float32], *, k: int, poll: Callable[[], None] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        scores, rows = search_index(index, shortened(queries_QE), k=k * max(1, variant.rescored), poll=poll)
        if not variant.rescored:
            return scores, rows
        return rescore(full_DE, queries_QE, rows, k=min(k, len(full_DE)))

    return Searcher(search, size, 4.0 * full_DE.shape[1] if variant.rescored else 0.0)


def truncated(vectors_NE: NDArray[np.float32], dimension: int) -> NDArray[np.float32]:
    """Return the first numbers of each vector, of unit length; a vector that is zero there stays zero."""
    kept_NM = vectors_NE[:, :dimension]
    norms_N1 = np.linalg.norm(kept_NM, axis=1, keepdims=True)
    return np.ascontiguousarray(kept_NM / np.maximum(norms_N1, np.finfo(np.float32).tiny), dtype=np.float32)


def _written_bytes(index: Any) -> int:
    """Return the size of an index as FAISS writes it, without holding a copy."""
    # FAISS tells no index its size: the writer is given a sink that counts.
    total = 0

    def count(part: bytes) -> int:
        nonlocal total
        total += len(part)
        return len(part)

    faiss.write_index(index, faiss.PyCallbackIOWriter(count))  # type: ignore[attr-defined]  # FAISS's stubs lack it
    return total
