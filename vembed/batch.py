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

Background: TypeAlias = Literal["white", "black", "none"]
"""What stands behind transparent parts; with none a picture keeps its mode, for the model's own library to convert."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Most pixels and bytes of a picture."""

    max_pixels: int = 89_478_485  # width x height, 3 to 8 bytes each; Pillow caps GIF, TIFF and WEBP at twice that
    max_bytes: int = 64 * 2**20  # most bytes of the encoded file


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Random change of a picture when it is decoded; equal values give equal pixels.

    That of a run has the run's seed, from which each picture gets one of its own (data/augment.py).
    """

    strength: Strength  # "none" leaves the pixels alone
    flip: bool  # whether half of the pictures are mirrored, left to right
    seed: int

    @property
    def acts(self) -> bool:
        """True where a picture may be changed."""
        return self.flip or self.strength != "none"


@dataclass(frozen=True, slots=True)
class Image:
    """A picture that nobody has decoded yet: a checked file, or its encoded bytes."""

    path: str  # the file, resolved and inside the data's root; for bytes, what to call it in messages
    data: bytes | memoryview | None = field(default=None, hash=False)  # the encoded file, where a set holds bytes
    augmentation: Augmentation | None = None  # in training batches; `content_id` doesn't depend on it

    def __reduce__(self) -> tuple[type[Image], tuple[str, bytes | None, Augmentation | None]]:
        """Let other processes have a picture that lies in memory, too: a view of bytes can't be pickled."""
        return Image, (self.path, None if self.data is None else bytes(self.data), self.augmentation)

    def read(self) -> bytes:
        """Return the encoded file.

        Raises:
            OSError: It can't be read.
        """
        return Path(self.path).read_bytes() if self.data is None else bytes(self.data)


@dataclass(frozen=True, slots=True)
class Composed:
    """Pictures and a text that are one item: "this shirt, but in red", or several pages."""

    images: tuple[Image, ...]  # at least one
    text: str  # "" where the pictures say all

    def __post_init__(self) -> None:
        """Refuse what has no picture, or a picture that stands for several."""
        given: object = self.images
        if isinstance(given, Image) or not given:
            raise TypeError("Composed takes a tuple of at least one picture and a text: Composed((picture,), text)")


Item: TypeAlias = str | Image | Composed
"""What a query or a document is before a tokenizer or an image processor sees it."""

Modality: TypeAlias = Literal["text", "image", "image+text"]
"""What an item is made of: which tower of an encoder it goes through, or both."""

MODALITY_WORDS: Mapping[Modality, tuple[str, str]] = {
    "text": ("text", "texts"),
    "image": ("picture", "pictures"),
    "image+text": ("picture with a text", "pictures with a text"),
}
"""What one item and what many items of a modality are called in a sentence."""

Side: TypeAlias = Literal["query", "document"]
"""Which prompt an item gets, and which tower where a model has two."""


def modality_of(item: Item) -> Modality:
    """Return whether an item is a text, a picture, or both."""
    if isinstance(item, str):
        return "text"
    return "image+text" if isinstance(item, Composed) and item.text else "image"


def modality_words(modalities: Iterable[Modality]) -> str:
    """Return modalities for a sentence, e.g. "pictures and texts"."""
    return " and ".join(MODALITY_WORDS[each][1] for each in sorted(modalities))


def pictures_in(items: Iterable[Item]) -> Iterator[Image]:
    """Yield the pictures of items, in order."""
    for item in items:
        if isinstance(item, Composed):
            yield from item.images
        elif not isinstance(item, str):
            yield item


def content_id(item: Item) -> int:
    """Return the identity of an item's content: the first 8 bytes of a SHA-256, signed, equal on every machine.

    Of a text, white space at both ends doesn't count; of a picture the encoded bytes count.

    Raises:
        OSError: A picture can't be read.
    """
    if isinstance(item, str):
        return _signed_digest(item.strip().encode())
    if isinstance(item, Composed):
        pictures = [content_id(image) for image in item.images]
        # One picture without a text is that picture, however it is written.
        if len(pictures) == 1 and not item.text:
            return pictures[0]
        kind = b"\0image+text" if len(pictures) == 1 else b"\0images+text"
        return _signed_digest(kind + np.array([*pictures, content_id(item.text)], dtype="<i8").tobytes())
    if item.data is not None:
        return _signed_digest(item.data)
    status = Path(item.path).stat()
    return _file_id(item.path, status.st_size, status.st_mtime_ns)


def text_ids(texts: Iterable[str]) -> NDArray[np.int64]:
    """Return `content_id` of each text."""
    # A digest is four int64, of which the first is the id: every fourth number of all digests, one after the other.
    sha256 = hashlib.sha256
    digests = b"".join([sha256(text.strip().encode()).digest() for text in texts])
    return np.frombuffer(digests, "<i8")[::4].astype(np.int64)


def _signed_digest(content: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


@functools.lru_cache(maxsize=1_000_000)
def _file_id(path: str, num_bytes: int, mtime_ns: int) -> int:  # noqa: ARG001 - they tell the cache of a change
    """Hash a file once in a process, and again when it is written over: a picture comes back in every epoch."""
    return _signed_digest(Path(path).read_bytes())


@dataclass(frozen=True, slots=True)
class ContrastiveBatch:
    """A batch of queries and the flat list of all their positives and hard negatives.

    Any number of documents per query. A document that stands in the batch twice has two rows and one id; the loss masks
    by id, so that a copy of a positive is never a negative.

    Ids are `content_id`; positives and listed pairs are (query row, document row), int64, sorted by query row. A query
    has a positive, or stands in a listed pair.
    """

    queries: tuple[Item, ...]  # Q
    documents: tuple[Item, ...]  # D, positives and hard negatives mixed
    positives_P2: NDArray[np.int64]
    query_ids_Q: NDArray[np.int64]
    document_ids_D: NDArray[np.int64]
    record_ids: tuple[int, ...]  # rows of the training records, in batch order: what a report of a bad batch names
    classes_Q: NDArray[np.int64] | None = None  # 0, 1, ... as classes first occur, -1 without; None: no row has one
    listed_P2: NDArray[np.int64] | None = None  # pairs whose score is known; None: no row has any
    listed_scores_P: NDArray[np.float64] | None = None  # their scores; higher is closer
    negatives_P2: NDArray[np.int64] | None = None  # (query row, document row): hard negatives of the row; None: none
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # numbers that the loss asked for, each (Q,)
    teacher_Q: NDArray[np.float32] | None = None  # a teacher's unit vectors of the queries, (Q, T); None: no teacher
    teacher_D: NDArray[np.float32] | None = None  # and of the documents, (D, T)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of unequal length in one flat array: no padding is stored or moved."""

    values: NDArray[Any]  # all rows one after the other, (total, ...)
    offsets: NDArray[np.int64]  # row i is values[offsets[i]:offsets[i + 1]]; one more entry than there are rows

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any] | NDArray[Any]], dtype: type[np.generic] = np.int32) -> Ragged:
        """Pack n rows, each a sequence of numbers or of equal shapes of numbers."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        # The first row that tells the shape of an element: any array does, and a list that isn't empty.
        known = next((row for row in rows if isinstance(row, np.ndarray) or len(row)), ())
        element_shape = known.shape[1:] if isinstance(known, np.ndarray) else np.shape(known[0]) if known else ()
        values = np.empty((int(offsets[-1]), *element_shape), dtype=dtype)
        for index, row in enumerate(rows):
            if len(row):  # an empty list has no shape that could fit
                values[offsets[index] : offsets[index + 1]] = row
        return cls(values, offsets)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Join one or more parts, row after row."""
        lengths = np.concatenate([part.lengths for part in parts])
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        # A part of empty lists doesn't know the shape of an element, and couldn't be joined with one that does.
        filled = [part.values for part in parts if len(part.values)] or [parts[0].values]
        return Ragged(np.concatenate(filled), offsets)

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
        """Return the rows as a rectangle (n, width, ...), short rows filled at the right."""
        rectangle = np.full((len(self.offsets) - 1, width, *self.values.shape[1:]), fill, dtype=self.values.dtype)
        # A mask is filled row by row from the left, which is the order of the flat values.
        rectangle[np.arange(width) < self.lengths[:, None]] = self.values
        return rectangle


@dataclass(frozen=True, slots=True)
class Features:
    """Inputs that a tokenizer made of n items: ragged, on the CPU, ready to be cut into chunks."""

    columns: Mapping[str, Ragged]  # encoder inputs by name, one ragged row per item
    lengths: NDArray[np.int64]  # cost of each item in tokens, (n,): what the chunk budget counts
    per_row: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # inputs with one entry per item, (n, ...)
    num_truncated: int = 0  # items that were longer than the encoder takes and were cut

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
        return Features(
            columns={name: Ragged.concat([part.columns[name] for part in parts]) for name in parts[0].columns},
            lengths=np.concatenate([part.lengths for part in parts]),
            per_row={name: np.concatenate([part.per_row[name] for part in parts]) for name in parts[0].per_row},
            num_truncated=sum(part.num_truncated for part in parts),
        )


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return start, start + 1, ... for each start, as many as its count, one after the other."""
    # One arange over all, shifted range by range; `before` is where each range begins in the result.
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
    """Return the pictures and the texts of items that must be one of each.

    Raises:
        TypeError: One is a text or a picture alone, or has several: the caller sorted them wrongly.
    """
    composed = [item for item in items if isinstance(item, Composed) and len(item.images) == 1]
    if len(composed) != len(items):
        raise TypeError(f"{len(items) - len(composed)} of {len(items)} items aren't a picture with a text, as expected")
    return [item.images[0] for item in composed], [item.text for item in composed]
