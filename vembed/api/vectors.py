"""Forms of vectors that callers ask for: shorter, of unit length, in fewer bits; and how vectors are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.models.encoder import Similarity

Quantized: TypeAlias = Literal["int8", "binary"]

_LARGEST = 127


def form_of(
    vectors_NE: NDArray[np.float32],
    similarity: Similarity,
    *,
    normalize: bool,
    dims: int | None,
    quantize: Quantized | None,
) -> NDArray[Any]:
    """Return vectors in the form that a caller asked for.

    - dims: the first of their numbers; where the model compares by cosine they get unit length again.
    - int8: each vector is scaled so that its largest number is 127 or -127. Their cosines are those of the vectors to
      about 0.01, so no scale need be kept.
    - binary: one bit for each number, 1 above 0, eight to a byte. E - 2 x Hamming distance is their inner product.

    Raises:
        ConfigError: The lengths of the vectors count, and int8 would lose them.
        ValueError: There are fewer numbers than `dims`, no such quantization, or bits that don't fill bytes.
    """
    size = vectors_NE.shape[1]
    if dims is not None and not 1 <= dims <= size:
        raise ValueError(f"dims is {dims}; the model's vectors have {size} numbers, and 1 to {size} can be kept")
    if quantize not in (None, "int8", "binary"):
        raise ValueError(f"quantize is {quantize!r}; it is 'int8', 'binary' or None")
    if quantize == "int8" and similarity == "dot" and not normalize:
        raise ConfigError(
            "quantize='int8' keeps the direction of a vector and loses its length, which counts for a model that "
            "compares by dot product; add normalize=True if the cosine will do"
        )
    if quantize == "binary" and (dims or size) % 8:
        raise ValueError(f"quantize='binary' packs 8 numbers into a byte: {dims or size} is no multiple of 8; set dims")
    short_NE = vectors_NE[:, :dims]
    if normalize or (dims is not None and similarity == "cosine"):
        short_NE = unit_length(short_NE)
    if quantize == "binary":
        return np.packbits(short_NE > 0, axis=1)
    if quantize == "int8":
        largest_N = np.abs(short_NE).max(axis=1, keepdims=True, initial=np.finfo(np.float32).tiny)
        codes_NE: NDArray[np.int8] = np.rint(short_NE / largest_N * _LARGEST).astype(np.int8)
        return codes_NE
    return np.ascontiguousarray(short_NE)


def unit_length(vectors_NE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors of length 1; one of zeros stays as it is."""
    lengths_N = np.linalg.norm(vectors_NE, axis=1, keepdims=True)
    return (vectors_NE / np.where(lengths_N == 0, 1, lengths_N)).astype(np.float32, copy=False)


class Scoring(str):
    """How a model's vectors are compared: the word "cosine" or "dot", and the function that does it."""

    __slots__ = ()

    def __call__(self, queries: Any, documents: Any) -> NDArray[np.float32]:
        """Return the score of every query for every document.

        Args:
            queries: Vectors (Q, E) as `encode` gives them, quantized ones and tensors too; or a single one (E,).
            documents: Vectors (D, E) of the same form, or a single one.

        Returns:
            (Q, D) float32, higher is closer.
        """
        q_QE, d_DE = (_floats(each) for each in (queries, documents))
        if self == "cosine" or any(np.asarray(each).dtype in (np.int8, np.uint8) for each in (queries, documents)):
            q_QE, d_DE = unit_length(q_QE), unit_length(d_DE)
        return q_QE @ d_DE.T


def _floats(vectors: Any) -> NDArray[np.float32]:
    """Return vectors as floats; of packed bits each is 1 or -1."""
    array = np.atleast_2d(np.asarray(vectors))
    if array.dtype == np.uint8:
        return 2 * np.unpackbits(array, axis=1).astype(np.float32) - 1
    return array.astype(np.float32)
