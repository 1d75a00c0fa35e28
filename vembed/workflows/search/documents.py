"""The documents of an index: checked and written to ids.jsonl once, then read again as the items of a store.

Blocks are cut here, since many texts or a few pictures may stand in memory at a time. Equal inputs give equal bytes of
an index, and the last bits of a vector hang on the items that are encoded with it. So an item's id is a hash of its
whole block and its row there: where one document has changed, the store makes all vectors of the block anew.
"""

from __future__ import annotations

import hashlib
import json
from copy import copy
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vembed.batch import MODALITY_WORDS, Image, modality_of, modality_words, pictures_in
from vembed.errors import DataError
from vembed.vectors.encode import PICTURE_SLICE_ROWS, SLICE_ROWS
from vembed.workflows.search.format import line_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from vembed.data.corpus import Corpus, Document
    from vembed.models.encoder import Encoder
    from vembed.vectors.encode import ItemEncoder


class Written(NamedTuple):
    """Documents that stand in ids.jsonl."""

    num_pictures: int  # documents with a picture
    ends: list[int]  # rows behind the last one of each block
    hashes: list[int]  # of the rows and pictures of each block, 64 bits
    notes: tuple[str, ...]  # of the corpus

    @property
    def num_documents(self) -> int:
        """Number of rows."""
        return self.ends[-1]

    @property
    def ids(self) -> NDArray[np.int64]:
        """A hash of each document, its row in its block and all that stands beside it there, (n,)."""
        ends, hashes = np.array(self.ends), np.array(self.hashes, dtype=np.uint64)
        starts = np.concatenate([[0], ends[:-1]])
        rows = np.arange(self.num_documents) - np.repeat(starts, ends - starts)
        ids: NDArray[np.int64] = (np.repeat(hashes, ends - starts) + rows.astype(np.uint64)).view(np.int64)
        return ids


def write_documents(path: Path, corpus: Corpus, encode: ItemEncoder) -> Written:
    """Write each document's row on a line."""
    num_pictures = 0
    ends, hashes = [0], []
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for documents in _blocks(corpus):
            if encode.ranks.is_one:
                encode.poll()
            content = hashlib.sha256()
            for document in documents:
                _refuse_unfit(document, encode.encoder)
                line = json.dumps(_row(document), ensure_ascii=False) + "\n"
                file.write(line)
                content.update(line.encode())
                num_pictures += modality_of(document.item) != "text"
                for picture in pictures_in([document.item]):
                    content.update(_identity(picture))
            ends.append(ends[-1] + len(documents))
            hashes.append(int.from_bytes(content.digest()[:8], "little"))
    return Written(num_pictures, ends[1:], hashes, corpus.notes)


def _blocks(corpus: Corpus) -> Iterator[list[Document]]:
    """Yield the next documents: many texts, or as many pictures as may stand in memory."""
    documents: list[Document] = []
    num_pictures = 0
    for document in corpus:
        documents.append(document)
        num_pictures += len(list(pictures_in([document.item])))
        if len(documents) == SLICE_ROWS or num_pictures >= PICTURE_SLICE_ROWS:
            yield documents
            documents, num_pictures = [], 0
    if documents:
        yield documents


def _refuse_unfit(document: Document, encoder: Encoder) -> None:
    """Refuse a document that the model can't take."""
    taken, modality = encoder.modalities, modality_of(document.item)
    if modality not in taken:
        raise DataError(
            f"{encoder.name} takes {modality_words(taken)}, and document {document.id!r} is a "
            f"{MODALITY_WORDS[modality][0]}: choose a model for it, or leave such documents out"
        )
    pictures = list(pictures_in([document.item]))
    if len(pictures) > 1 and not encoder.several_pictures:
        raise DataError(
            f"{encoder.name} takes one picture in an item, and document {document.id!r} has {len(pictures)}: choose a "
            "vision-language model, or give each picture an id"
        )


def _identity(picture: Image) -> bytes:
    """Return what tells a picture from one that takes its place: the hash of its bytes, or the state of its file."""
    if picture.data is not None:
        return hashlib.sha256(picture.data).digest()
    try:
        state = Path(picture.path).stat()
    except OSError as error:
        raise DataError(
            f"{picture.path} can't be read: {error.strerror}; the corpus changed while it was read"
        ) from error
    return json.dumps([picture.path, state.st_size, state.st_mtime_ns]).encode()


def _row(document: Document) -> dict[str, str]:
    """Return what is kept of a document beside its vector."""
    row = {"id": document.id, "text": document.text}
    return row if isinstance(document.item, str) else {**row, "image": document.path}


class CorpusItems:
    """The documents of a corpus by row: it is read once more, from its beginning, as they are asked for.

    Raises:
        DataError: A document isn't what its line of ids.jsonl says: the corpus changed while it was read.
    """

    def __init__(self, path: Path, corpus: Corpus, written: Written) -> None:
        self.ids = written.ids
        self._path, self._corpus = path, copy(corpus)  # which counts while it is read, and another may be at it
        self._documents = self._read()
        self._next_row = 0

    def take(self, rows: NDArray[np.int64]) -> list[Document]:
        """Return the documents of some rows; those before the first were taken already, or nobody wants them."""
        documents = []
        for row in rows.tolist():
            documents.append(next(islice(self._documents, row - self._next_row, None)))
            self._next_row = row + 1
        return documents

    def finish(self) -> None:
        """Read the rest of a corpus that was begun, which checks it."""
        if self._next_row:
            for _ in self._documents:
                pass

    def _read(self) -> Iterator[Document]:
        with self._path.open(encoding="utf-8", newline="\n") as file:
            for document in self._corpus:
                if json.loads(file.readline() or "null") != _row(document):
                    raise DataError(
                        f"the corpus changed while it was read, at document {document.id!r}; encode it again"
                    )
                yield document
            if file.read(1):
                raise DataError("the corpus lost documents while it was read; encode it again")


class DocumentSpans:
    """The documents of a corpus of texts, for workers that read them in ids.jsonl: from which byte to which."""

    def __init__(self, path: Path, written: Written) -> None:
        self.ids = written.ids
        self._offsets = line_offsets(path)

    def take(self, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the bytes of a block as its one item."""
        return [(int(self._offsets[rows[0]]), int(self._offsets[rows[-1] + 1]))]
