"""Make an index: a corpus in, a folder out that appears complete or not at all.

1. The corpus is read and checked to its end, and written as ids.jsonl: an invalid last row costs no encoding.
2. It is read again in slices: documents are encoded and the vectors appended to vectors.npy, and of each picture a
   small copy is kept. A document that is no longer what it was in step 1 ends the work.
3. FAISS builds its index from the mapped file.
4. meta.json is written last, and the folder takes its name.

Memory: three slices of documents (one is read ahead, one encoded, one written), the vectors of two, the ids, and in
step 3 what FAISS holds ("Flat": all vectors once; where documents have several, "Flat" makes no such index).
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import deque
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import faiss
import numpy as np
import torch

from vembed.batch import MODALITY_WORDS, Image, Ragged, modality_of, modality_words, pictures_in
from vembed.errors import ConfigError, DataError, MachineError, NonFiniteError
from vembed.evaluation.encode import PICTURE_SLICE_ROWS, SLICE_ROWS, values_of
from vembed.evaluation.index import build_index, new_index
from vembed.files import new_folder
from vembed.search.format import (
    DOCUMENTS_FILE,
    INDEX_FILE,
    META_FILE,
    OFFSETS_FILE,
    PROBE_FILE,
    PROBE_TEXT,
    STARTS_FILE,
    THUMBNAILS_FILE,
    VECTORS_FILE,
    IndexMeta,
    is_index,
)
from vembed.search.thumbnails import ThumbnailWriter, make_thumbnails

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.data.corpus import Corpus, Document
    from vembed.evaluation.encode import ItemEncoder, Vectors
    from vembed.models.fingerprint import ModelIdentity

_log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0
DISK_MARGIN = 1.2
USUAL_THUMBNAIL_BYTES = 8_192
"""What the copy of a photograph takes, for the check of the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What an index is made of beside its corpus."""

    model: ModelIdentity  # the encoder's identity
    model_options: Mapping[str, str | float]  # what the user said about the model
    source: str  # the corpus, for people
    side: Side = "document"  # which prompt the documents get
    factory: str = "Flat"  # FAISS index string; "Flat" is exact
    overwrite: bool = False  # whether an index that is there may be replaced


def write_index(output: Path, corpus: Corpus, encode: ItemEncoder, options: BuildOptions) -> IndexMeta:
    """Encode a corpus into a folder.

    The files are written into a hidden folder beside it. An index that is there stays until the new one is whole.

    Raises:
        ConfigError: The folder holds something already, or FAISS can't build such an index.
        DataError: The corpus is broken.
        NonFiniteError: A vector holds NaN or infinity.
        MachineError: The disk is too small or refuses.
    """
    output = Path(output).resolve()
    refuse_taken(output, overwrite=options.overwrite)
    new_index(options.factory, options.model.dimension)  # a misspelt factory costs no encoding
    try:
        with new_folder(output) as temporary:
            meta = _write_files(temporary, corpus, encode, options)
    except OSError as error:
        raise MachineError(
            f"{output}: the index can't be written: {error}. Free some space, or choose another folder"
        ) from error
    return meta


def refuse_taken(output: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that holds something.

    Raises:
        ConfigError: It holds an index and `overwrite` is false, or other files.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"{output} is a file; name a folder for the index")
    if is_index(output):
        if not overwrite:
            raise ConfigError(f"{output} holds an index; replace it with --overwrite, or choose another folder")
    elif any(output.iterdir()):
        raise ConfigError(f"{output} holds other files than an index; choose a folder of its own")


def _write_files(folder: Path, corpus: Corpus, encode: ItemEncoder, options: BuildOptions) -> IndexMeta:
    num_documents, num_pictures = _write_documents(folder / DOCUMENTS_FILE, corpus, encode)
    dim, several = options.model.dimension, encode.encoder.multi_vector
    # The vectors, the index that holds them again, and the copies; of several vectors at least one each.
    _require_disk(folder, 2 * num_documents * dim * 4 + num_pictures * USUAL_THUMBNAIL_BYTES)
    before = encode.num_truncated[options.side]
    num_vectors = _write_vectors(folder, (num_documents, num_pictures), corpus, encode, options.side)
    num_truncated = encode.num_truncated[options.side] - before
    meta = IndexMeta(
        model=options.model,
        model_options=dict(options.model_options),
        source=options.source,
        side=options.side,
        factory=options.factory,
        num_documents=num_documents,
        num_pictures=num_pictures,
        num_truncated=num_truncated,
        notes=corpus.notes,
        file_bytes={},
        num_vectors=num_vectors if several else None,
    )
    if not meta.compares_all:
        _require_disk(folder, num_vectors * dim * 4)
        vectors_VE = np.load(folder / VECTORS_FILE, mmap_mode="r")
        faiss.write_index(build_index((vectors_VE,), options.factory), str(folder / INDEX_FILE))
    meta = replace(meta, file_bytes={name: (folder / name).stat().st_size for name in meta.files})
    (folder / META_FILE).write_text(meta.to_json(), encoding="utf-8")
    return meta


def _write_documents(path: Path, corpus: Corpus, encode: ItemEncoder) -> tuple[int, int]:
    """Write each document's row on a line, and return how many there are, and how many of them have a picture."""
    num_documents = num_pictures = 0
    taken = encode.encoder.modalities
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for document in corpus:
            if num_documents % SLICE_ROWS == 0:
                encode.poll()
            modality = modality_of(document.item)
            if modality not in taken:
                raise DataError(
                    f"{encode.encoder.name} takes {modality_words(taken)}, and document {document.id!r} is a "
                    f"{MODALITY_WORDS[modality][0]}: choose a model for it, or leave such documents out"
                )
            count = len(list(pictures_in([document.item])))
            if count > 1 and not encode.encoder.several_pictures:
                raise DataError(
                    f"{encode.encoder.name} takes one picture in an item, and document {document.id!r} has {count}: "
                    "choose a vision-language model, or give each picture an id"
                )
            file.write(json.dumps(_row(document), ensure_ascii=False) + "\n")
            num_documents += 1
            num_pictures += modality != "text"
    return num_documents, num_pictures


def _row(document: Document) -> dict[str, str]:
    """Return what is kept of a document beside its vector."""
    row = {"id": document.id, "text": document.text}
    return row if isinstance(document.item, str) else {**row, "image": document.path}


def _require_disk(folder: Path, num_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, int(DISK_MARGIN * num_bytes)
    if free < needed:
        raise MachineError(
            f"the disk of {folder.parent} has {free / 1e9:.1f} GB free, and vectors and index need {needed / 1e9:.1f} "
            f"GB; free some, or choose another folder"
        )


def _write_vectors(folder: Path, counts: tuple[int, int], corpus: Corpus, encode: ItemEncoder, side: Side) -> int:
    """Append the vectors slice by slice: a plain write says that the disk is full, where a mapped page would crash.

    Returns:
        How many vectors there are.
    """
    num_documents, num_pictures = counts
    progress = _Progress(num_documents)
    keeping = _Copies(folder, corpus, encode) if num_pictures else nullcontext()
    under_way: deque[list[Document]] = deque()

    def items() -> Iterator[list[Item]]:
        for documents in _slices(folder / DOCUMENTS_FILE, corpus):
            under_way.append(documents)
            yield [document.item for document in documents]

    streaming = closing(encode.stream(items(), side))
    lengths: list[NDArray[np.int64]] = []
    with (folder / VECTORS_FILE).open("wb") as file, keeping as copies, streaming as found:
        _write_header(file, num_documents, encode.encoder.dimension)
        for vectors in found:
            documents = under_way.popleft()
            _refuse_nonfinite(vectors, documents)
            file.write(values_of(vectors).astype("<f4", copy=False).tobytes())
            if isinstance(vectors, Ragged):
                lengths.append(vectors.lengths)
            if copies is not None:
                copies.add([document.item for document in documents])
            progress.add(len(documents))
        assert progress.done == num_documents
        if copies is not None:
            copies.finish(side)
        if not lengths:
            return num_documents
        starts = np.concatenate([[0], *lengths]).cumsum()
        np.save(folder / STARTS_FILE, starts.astype("<i8", copy=False))
        file.seek(0)
        _write_header(file, int(starts[-1]), encode.encoder.dimension)
        return int(starts[-1])


def _write_header(file: BinaryIO, num_vectors: int, dim: int) -> None:
    """Write what numpy's files begin with; it is of one length whatever the number of vectors."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (num_vectors, dim)})


class _Copies:
    """Keep a small copy of each picture, and what tells the model by them."""

    def __init__(self, folder: Path, corpus: Corpus, encode: ItemEncoder) -> None:
        self._folder = folder
        self._limits = corpus.limits
        self._encode = encode
        self._first = b""
        self._file = (folder / THUMBNAILS_FILE).open("wb")
        self._writer = ThumbnailWriter(self._file)

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, items: Sequence[Item]) -> None:
        """Copy the pictures of the next documents."""
        self._writer.add(self._polled(items))

    def finish(self, side: Side) -> None:
        """Write the last two files."""
        self._writer.write_offsets(self._folder / OFFSETS_FILE)
        probes: list[Item] = [Image("the first thumbnail", self._first)]
        if "text" in self._encode.encoder.modalities:
            probes.append(PROBE_TEXT)
        np.save(self._folder / PROBE_FILE, values_of(self._encode(probes, side)).astype("<f4", copy=False))

    def _polled(self, items: Sequence[Item]) -> Iterator[bytes]:
        for copy in make_thumbnails(items, self._limits, torch.get_num_threads()):
            self._encode.poll()
            self._first = self._first or copy
            yield copy


class _Progress:
    """Say every few seconds how far the encoding has come."""

    def __init__(self, num_documents: int) -> None:
        self._num_documents = num_documents
        self._started = self._last_line = time.perf_counter()
        self.done = 0

    def add(self, num_documents: int) -> None:
        """Count the next documents."""
        self.done += num_documents
        now = time.perf_counter()
        if now - self._last_line > SECONDS_BETWEEN_LINES:
            done, of = (f"{number:,}" for number in (self.done, self._num_documents))
            _log.info("encoded %s of %s documents, %.0f a second", done, of, self.done / (now - self._started))
            self._last_line = now


def _slices(path: Path, corpus: Corpus) -> Iterator[list[Document]]:
    """Yield the next documents: many texts, or as many pictures as may stand in memory.

    Raises:
        DataError: A document isn't what its line of ids.jsonl says: the corpus changed while it was read.
    """
    documents: list[Document] = []
    num_pictures = 0
    with path.open(encoding="utf-8", newline="\n") as file:
        for document in corpus:
            if json.loads(file.readline() or "null") != _row(document):
                raise DataError(f"the corpus changed while it was read, at document {document.id!r}; encode it again")
            documents.append(document)
            num_pictures += len(list(pictures_in([document.item])))
            if len(documents) == SLICE_ROWS or num_pictures >= PICTURE_SLICE_ROWS:
                yield documents
                documents, num_pictures = [], 0
        if file.read(1):
            raise DataError("the corpus lost documents while it was read; encode it again")
    if documents:
        yield documents


def _refuse_nonfinite(vectors: Vectors, documents: Sequence[Document]) -> None:
    bad = np.flatnonzero(~np.isfinite(values_of(vectors)).all(axis=1))
    if bad.size:
        first = int(bad[0])
        if isinstance(vectors, Ragged):
            first = int(np.searchsorted(vectors.offsets, first, side="right")) - 1
        raise NonFiniteError(
            f"the vector of document {documents[first].id!r} holds NaN or infinity: the weights are damaged, or "
            f"half precision overflowed; encode without --bf16, or take an earlier checkpoint"
        )
