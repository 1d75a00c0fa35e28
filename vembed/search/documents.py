"""The documents of an index, as ids.jsonl keeps them: checked and written once, then read again in slices."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vembed.batch import MODALITY_WORDS, Image, modality_of, modality_words, pictures_in
from vembed.errors import DataError
from vembed.evaluation.encode import PICTURE_SLICE_ROWS, SLICE_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.data.corpus import Corpus, Document
    from vembed.evaluation.encode import ItemEncoder
    from vembed.models.encoder import Encoder


class Written(NamedTuple):
    """What stands in ids.jsonl."""

    num_documents: int
    num_pictures: int  # documents with a picture
    slices: list[str]  # SHA-256 of the rows and pictures of each slice


def write_documents(path: Path, corpus: Corpus, encode: ItemEncoder) -> Written:
    """Write each document's row on a line."""
    num_documents = num_pictures = 0
    slices = []
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for documents in _sliced(corpus):
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
            num_documents += len(documents)
            slices.append(content.hexdigest())
    return Written(num_documents, num_pictures, slices)


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


def read_slices(path: Path, corpus: Corpus) -> Iterator[list[Document]]:
    """Yield the next documents: many texts, or as many pictures as may stand in memory.

    Raises:
        DataError: A document isn't what its line of ids.jsonl says: the corpus changed while it was read.
    """
    with path.open(encoding="utf-8", newline="\n") as file:
        for documents in _sliced(corpus):
            for document in documents:
                if json.loads(file.readline() or "null") != _row(document):
                    raise DataError(
                        f"the corpus changed while it was read, at document {document.id!r}; encode it again"
                    )
            yield documents
        if file.read(1):
            raise DataError("the corpus lost documents while it was read; encode it again")


def _sliced(corpus: Corpus) -> Iterator[list[Document]]:
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
