"""The few types that every room speaks.

Shape legend: Q queries, D documents, P (query, positive document) pairs.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray


Strength: TypeAlias = Literal["none", "light", "strong"]
"""How much training pictures are changed."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """How a picture is changed when it is decoded; equal values give equal pixels.

    Attributes:
        strength: How much.
        flip: Whether it may be mirrored, left to right.
        seed: Of every number that is drawn.
    """

    strength: Strength
    flip: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Image:
    """A picture that nobody has decoded yet: a checked file, or its encoded bytes.

    Attributes:
        path: The file, resolved and inside the data's root; for bytes, what to call it in messages.
        data: The encoded file itself, where the data set holds bytes instead of paths.
        augmentation: How decoding changes it, in training batches; None leaves it as it is. The identity of its content
            is that of the encoded file either way.
    """

    path: str
    data: bytes | None = None
    augmentation: Augmentation | None = None

    def read(self) -> bytes:
        """Return the encoded file.

        Raises:
            OSError: It can't be read.
        """
        return Path(self.path).read_bytes() if self.data is None else self.data


@dataclass(frozen=True, slots=True)
class Composed:
    """A picture and a text that are one item: "this shirt, but in red".

    Attributes:
        image: The picture.
        text: The text.
    """

    image: Image
    text: str


Item: TypeAlias = str | Image | Composed
"""What a query or a document is before a tokenizer or an image processor sees it."""

Modality: TypeAlias = Literal["text", "image", "image+text"]
"""What an item is made of: which tower of an encoder it goes through, or both."""

Side: TypeAlias = Literal["query", "document"]
"""Which prompt an item gets, and which tower where a model has two."""


def modality_of(item: Item) -> Modality:
    """Return whether an item is a text, a picture, or both."""
    if isinstance(item, str):
        return "text"
    return "image+text" if isinstance(item, Composed) else "image"


def pictures_in(items: Iterable[Item]) -> Iterator[Image]:
    """Yield the picture of each item that has one, in order."""
    for item in items:
        if isinstance(item, Composed):
            yield item.image
        elif not isinstance(item, str):
            yield item


def content_id(item: Item) -> int:
    """Return the identity of an item's content, equal on every machine and in every process.

    Args:
        item: A text, whose leading and trailing white space doesn't count, or a picture, whose encoded bytes count; of
            an item that is both, both count.

    Returns:
        A signed 64-bit integer, the first 8 bytes of a SHA-256.

    Raises:
        OSError: A picture can't be read.
    """
    if isinstance(item, str):
        return _signed_digest(item.strip().encode())
    if isinstance(item, Composed):
        parts = (content_id(item.image), content_id(item.text))
        return _signed_digest(b"\0image+text" + np.array(parts, dtype="<i8").tobytes())
    return _signed_digest(item.data) if item.data is not None else _file_id(item.path)


def _signed_digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


@functools.lru_cache(maxsize=1_000_000)
def _file_id(path: str) -> int:
    """Hash a file once in a process: a picture comes back in every epoch."""
    return _signed_digest(Path(path).read_bytes())


@dataclass(frozen=True, slots=True)
class ContrastiveBatch:
    """A batch of queries and the flat list of all their positives and hard negatives.

    Any number of documents per query. A document that stands in the batch twice has two rows and one id; the loss masks
    by id, so that a copy of a positive is never a negative.

    Attributes:
        queries: Q items.
        documents: D items, positives and hard negatives mixed.
        positives_P2: Pairs (query row, document row), int64, sorted by query row; every query has at least one.
        query_ids_Q: `content_id` of each query, int64.
        document_ids_D: `content_id` of each document, int64.
        record_ids: Manifest rows that the batch was made of, in batch order: what a report of a bad batch names.
    """

    queries: tuple[Item, ...]
    documents: tuple[Item, ...]
    positives_P2: NDArray[np.int64]
    query_ids_Q: NDArray[np.int64]
    document_ids_D: NDArray[np.int64]
    record_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of unequal length in one flat array: no padding is stored or moved.

    Attributes:
        values: All rows one after the other.
        offsets: Row i is `values[offsets[i]:offsets[i + 1]]`; int64, one more entry than there are rows.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | NDArray[Any]], dtype: type[np.generic] = np.int32) -> Ragged:
        """Pack rows.

        Args:
            rows: n sequences of numbers.
            dtype: Type of the packed values.
        """
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.empty(int(offsets[-1]), dtype=dtype)
        for index, row in enumerate(rows):
            values[offsets[index] : offsets[index + 1]] = row
        return cls(values, offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each row, (n,)."""
        return np.diff(self.offsets)

    def take(self, rows: NDArray[np.int64]) -> Ragged:
        """Return the named rows, in that order."""
        lengths = self.lengths[rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(self.values[ranges(self.offsets[rows], lengths)], offsets)

    def padded(self, width: int, fill: float) -> NDArray[Any]:
        """Return the rows as a rectangle (n, width), short rows filled at the right."""
        rectangle = np.full((len(self.offsets) - 1, width), fill, dtype=self.values.dtype)
        rectangle[np.arange(width) < self.lengths[:, None]] = self.values
        return rectangle


@dataclass(frozen=True, slots=True)
class Features:
    """What a tokenizer made of n items: ragged, on the CPU, ready to be cut into chunks.

    Attributes:
        columns: Encoder inputs by name, one ragged row per item.
        lengths: Cost of each item in tokens, (n,): what the chunk budget counts.
        per_row: Further inputs with one entry per item, (n, ...).
        num_truncated: Items that were longer than the encoder takes and were cut.
    """

    columns: Mapping[str, Ragged]
    lengths: NDArray[np.int64]
    per_row: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    num_truncated: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: NDArray[np.int64]) -> Features:
        """Return the named rows, in that order."""
        return Features(
            columns={name: column.take(rows) for name, column in self.columns.items()},
            lengths=self.lengths[rows],
            per_row={name: values[rows] for name, values in self.per_row.items()},
        )

    @staticmethod
    def concat(parts: Sequence[Features]) -> Features:
        """Join features of the same encoder, row after row."""
        columns = {}
        for name in parts[0].columns:
            ragged = [part.columns[name] for part in parts]
            lengths = np.concatenate([column.lengths for column in ragged])
            offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
            columns[name] = Ragged(np.concatenate([column.values for column in ragged]), offsets)
        return Features(
            columns=columns,
            lengths=np.concatenate([part.lengths for part in parts]),
            per_row={name: np.concatenate([part.per_row[name] for part in parts]) for name in parts[0].per_row},
            num_truncated=sum(part.num_truncated for part in parts),
        )


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return start, start + 1, ... for each start, as many as its count, one after the other."""
    before = np.cumsum(counts) - counts
    found: NDArray[np.int64] = np.arange(counts.sum(), dtype=np.int64) + np.repeat(starts - before, counts)
    return found


def texts_of(items: Sequence[Item]) -> list[str]:
    """Return items that must be texts.

    Raises:
        TypeError: One is, or has, a picture: the caller sorted them wrongly.
    """
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) != len(items):
        raise TypeError(f"{len(items) - len(texts)} of {len(items)} items are pictures where texts are expected")
    return texts


def parts_of(items: Sequence[Item]) -> tuple[list[Image], list[str]]:
    """Return the pictures and the texts of items that must be both.

    Raises:
        TypeError: One is a text or a picture alone: the caller sorted them wrongly.
    """
    composed = [item for item in items if isinstance(item, Composed)]
    if len(composed) != len(items):
        raise TypeError(f"{len(items) - len(composed)} of {len(items)} items aren't pictures with a text, as expected")
    return [item.image for item in composed], [item.text for item in composed]
