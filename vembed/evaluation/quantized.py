"""FAISS indexes of fewer bits for each number, and the scores of what they find by the full vectors.

- int8: each dimension of the documents has a scale, its largest absolute value in the corpus / 127; a number is stored
  as round(x / scale), -127 to 127. Queries stay float32; the score is the inner product with the restored numbers.
- binary: one bit for each dimension of queries and documents, 1 where the number is above 0; the score is
  E - 2 * Hamming distance, the inner product of the signs.

Few bits find candidates in little memory; rescoring reads the full vectors of those alone, from memory or disk, and
ranks them as exact search would.

Shape legend: D documents, Q queries, E embedding dim, C candidates and k hits per query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import faiss
import numpy as np

from vembed.evaluation.index import SLICE_ROWS, build_index, search_index

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

Quantization: TypeAlias = Literal["int8", "binary"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

LARGEST = 127


def int8_scales(documents_DE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what one step of each dimension stands for, (E,); 1 for a dimension that is zero in every document."""
    largest_E = np.maximum(documents_DE.max(axis=0), -documents_DE.min(axis=0)) / np.float32(LARGEST)
    return np.where(largest_E > 0, largest_E, 1).astype(np.float32)


def int8_codes(vectors_NE: NDArray[np.float32], scales_E: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return the stored numbers, -127 to 127, (N, E)."""
    steps_NE: NDArray[np.float32] = np.rint(vectors_NE / scales_E)
    return np.clip(steps_NE, -LARGEST, LARGEST).astype(np.int8)


def sign_bits(vectors_NE: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return one bit for each dimension, 8 to a byte, (N, ceil(E / 8)); the last byte is filled up with zeros."""
    return np.packbits(vectors_NE > 0, axis=1)


def index_of(vectors_DE: NDArray[np.float32], factory: str) -> Any:
    """Return a FAISS index of the kind that a string names: one of `QUANTIZATIONS`, or FAISS's own.

    Raises:
        ConfigError: FAISS can't build it for these vectors.
    """
    few_bits: Quantization | None = next((each for each in QUANTIZATIONS if each == factory), None)
    return build_index(vectors_DE, factory) if few_bits is None else quantized_index(vectors_DE, few_bits)


def quantized_index(documents_DE: NDArray[np.float32], precision: Quantization) -> Any:
    """Return a FAISS index of few bits, document i under number i; the documents are read slice by slice."""
    return _int8_index(documents_DE) if precision == "int8" else _binary_index(documents_DE)


def _int8_index(documents_DE: NDArray[np.float32]) -> Any:
    """Build an index of one byte for each number, restored by FAISS when it is scored.

    FAISS restores byte b of a dimension as low + (b + 1/2) / 255 * span; with low = -127.5 steps and span = 255 steps
    that is b - 127 steps. Its type of signed bytes would round the query to whole numbers too.
    """
    scales_E = int8_scales(documents_DE)
    index = faiss.IndexScalarQuantizer(len(scales_E), faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.concatenate([-127.5 * scales_E, 255 * scales_E]), index.sq.trained)
    index.is_trained = True
    for start in range(0, len(documents_DE), SLICE_ROWS):
        index.add(int8_codes(documents_DE[start : start + SLICE_ROWS], scales_E) * scales_E)
    return index


def _binary_index(documents_DE: NDArray[np.float32]) -> Any:
    """Build an index of one bit for each number. The bits that fill up a byte are equal everywhere and never count."""
    index = faiss.IndexBinaryFlat(8 * -(-documents_DE.shape[1] // 8))
    for start in range(0, len(documents_DE), SLICE_ROWS):
        index.add(sign_bits(documents_DE[start : start + SLICE_ROWS]))
    return index


def search_quantized(
    index: Any, queries_QE: NDArray[np.float32], *, k: int, poll: Callable[[], None] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the k best rows for each query, of a `quantized_index` or any other of FAISS, as `search_index` does."""
    if not isinstance(index, faiss.IndexBinary):
        return search_index(index, queries_QE, k=k, poll=poll)
    distances_Qk, rows_Qk = search_index(index, sign_bits(queries_QE), k=k, poll=poll)
    return queries_QE.shape[1] - 2 * distances_Qk, rows_Qk


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
    for number, found_C in enumerate(candidates_QC):
        rows_C = np.sort(found_C[found_C >= 0])  # exact search takes the first of equal scores
        if not len(rows_C):
            continue
        wanted = min(k, len(rows_C))
        scores_1k, places_1k = faiss.knn(
            queries_QE[number : number + 1], documents_DE[rows_C], wanted, metric=faiss.METRIC_INNER_PRODUCT
        )
        scores_Qk[number, :wanted], rows_Qk[number, :wanted] = scores_1k[0], rows_C[places_1k[0]]
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
    return faiss.read_index_binary(str(path)) if factory == "binary" else faiss.read_index(str(path))
