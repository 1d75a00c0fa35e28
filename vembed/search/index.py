"""Read an index back and ask it.

Memory: what FAISS holds, and 8 bytes a document; the texts stay on disk.
Shape legend: Q queries, E embedding dim, k hits per query.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from vembed.errors import ConfigError, DataError, NonFiniteError
from vembed.search.format import DOCUMENTS_FILE, INDEX_FILE, VECTORS_FILE, IndexMeta, read_meta

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.evaluation.evaluator import Encode
    from vembed.models.identity import ModelIdentity

BLOCK_BYTES = 1 << 24
LEAST_AGREEMENT = 0.98
"""Cosine of a document's vector with the stored one, below which the model is taken for another one. Half precision
keeps 0.999; another pooling, tokenizer or prompt falls far below."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found.

    Attributes:
        rank: From 1.
        id: The document's id.
        score: Inner product of query and document: the cosine, unless the model is one for dot products.
        text: The document.
    """

    rank: int
    id: str
    score: float
    text: str


class SearchIndex:
    """An index in memory, its texts on disk. Several threads may ask it.

    Args:
        folder: What `write_index` wrote.

    Attributes:
        meta: What it is.

    Raises:
        DataError: A file is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self.meta: IndexMeta = read_meta(folder)
        self._folder = folder
        self._index = self._read_faiss()
        self._file = (folder / DOCUMENTS_FILE).open("rb")
        self._offsets = _line_offsets(folder / DOCUMENTS_FILE)
        if len(self._offsets) != len(self) + 1:
            raise self._broken(DOCUMENTS_FILE, f"{len(self._offsets) - 1} lines for {len(self)} documents")

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.meta.num_documents

    def search(self, vectors_QE: NDArray[np.float32], k: int) -> list[list[Hit]]:
        """Return the documents with the largest inner product for each query, best first.

        Args:
            vectors_QE: Query embeddings, (Q, E), float32.
            k: Hits per query; clipped to the number of documents. An approximate index may find fewer.

        Raises:
            ValueError: k is below 1.
            NonFiniteError: A vector holds NaN or infinity.
        """
        if k < 1:
            raise ValueError(f"k is {k}; it is at least 1.")
        if not np.isfinite(vectors_QE).all():
            raise NonFiniteError("a query's vector holds NaN or infinity: the weights of the model are damaged")
        scores_Qk, rows_Qk = self._index.search(np.ascontiguousarray(vectors_QE), min(k, len(self)))
        return [
            [
                Hit(rank=rank, score=score, **self.document(row))
                for rank, (row, score) in enumerate(zip(rows.tolist(), scores.tolist(), strict=True), start=1)
                if row >= 0
            ]
            for rows, scores in zip(rows_Qk, scores_Qk, strict=True)
        ]

    def document(self, row: int) -> dict[str, str]:
        """Return id and text of a document."""
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        try:
            content = json.loads(os.pread(self._file.fileno(), stop - start, start))
            return {"id": str(content["id"]), "text": str(content["text"])}
        except (ValueError, KeyError, TypeError) as error:
            raise self._broken(DOCUMENTS_FILE, f"line {row + 1}: {error}") from error

    def check_model(self, model: ModelIdentity, encode: Encode) -> None:
        """Refuse a model other than the one that made the vectors.

        Args:
            model: The model that will encode queries.
            encode: Its encoder: the first document is encoded again, which shows another tokenizer or pooling.

        Raises:
            ConfigError: Weights, dimension or similarity differ, or the document's vector does.
        """
        own = self.meta.model
        if model.weights_sha256 != own.weights_sha256:
            raise ConfigError(
                f"{self._folder} was made by {own.name} with weights {own.weights_sha256[:12]}, and {model.name} has "
                f"weights {model.weights_sha256[:12]}: its vectors mean something else. Take that model with --model, "
                f"or encode the corpus again"
            )
        stored = np.load(self._folder / VECTORS_FILE, mmap_mode="r")[0]
        vector = encode([self.document(0)["text"]], self.meta.side)[0]
        same_shape = vector.shape == stored.shape and model.similarity == own.similarity
        if not same_shape or _cosine(vector, stored) < LEAST_AGREEMENT:
            raise ConfigError(
                f"{model.name} has the weights that {self._folder} was made with, but another vector for its first "
                f"document: its tokenizer, pooling, length or prompts have changed. Encode the corpus again"
            )

    def _read_faiss(self) -> Any:
        path = self._folder / INDEX_FILE
        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            raise self._broken(INDEX_FILE, str(error).rsplit(": ", 1)[-1]) from error
        if (index.ntotal, index.d) != (len(self), self.meta.model.dimension):
            raise self._broken(INDEX_FILE, f"{index.ntotal} vectors of {index.d} dimensions")
        return index

    def _broken(self, name: str, reason: str) -> DataError:
        return DataError(f"{self._folder / name} is broken: {reason}; encode the corpus again with --overwrite")


class Searcher:
    """An index with the model for its queries. Several threads may ask it.

    Args:
        index: The documents.
        encode: The model.

    Attributes:
        index: The documents.
    """

    def __init__(self, index: SearchIndex, encode: Encode) -> None:
        self.index = index
        self._encode = encode
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.index)

    def search(self, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
        """Return the best documents of each query, best first.

        Args:
            queries: Texts.
            k: Hits per query; clipped to the number of documents.
        """
        with self._lock:  # an encoder serves one call at a time
            vectors_QE = self._encode(queries, "query")
        return self.index.search(vectors_QE, k)


def _cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the cosine of two vectors; 1 where one of them is zero, which has no direction to differ in."""
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return 1.0 if lengths == 0.0 else float(one @ other) / lengths


def _line_offsets(path: Path) -> NDArray[np.int64]:
    """Return where each line starts, and behind the last one where the file ends."""
    parts = [np.zeros(1, dtype=np.int64)]
    with path.open("rb") as file:
        start = 0
        while block := file.read(BLOCK_BYTES):
            parts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + start + 1)
            start += len(block)
    return np.concatenate(parts)
