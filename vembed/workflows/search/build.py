"""Make an index: a corpus in, a folder or a table out that appears complete or not at all.

1. The corpus is read and checked to its end, and written as ids.jsonl: an invalid last row costs no encoding.
2. It is read again in blocks, and a store of vectors encodes what it doesn't hold. Where there are pictures, another
   store keeps a small copy of each, block by block in turn with the vectors: while the device encodes, the host copies.
   A document that is no longer what it was in step 1 ends the work.
3. FAISS builds its index from the mapped file.
4. meta.json and the hashes of all files are written last, and the folder takes its name.

All this happens in a hidden folder beside the output:

    .NAME.part/vectors/      `VectorStore`s, or while they grow `.vectors.*.part`
    .NAME.part/thumbnails/
    .NAME.part/index/        files of the output, those of the stores among them as links; made anew at each start

Blocks are cut here, since many texts or a few pictures may stand in memory at a time. Equal inputs give equal bytes of
an index, and the last bits of a vector hang on the items that are encoded with it. So an item's id is a hash of its
whole block and its row there: where one document has changed, the store makes all vectors of the block anew.

Where a process is killed or stopped, or fails after a block, the stores stay, and the same command continues after
their last block; of another corpus they keep the blocks that it shares. Several processes encode each block together,
and the first one writes.

Memory: three blocks of documents (one is read ahead, one encoded, one written; of pictures a fourth, which is copied),
the vectors of two, the ids (of pictures twice), and in step 3 what FAISS holds ("Flat": all vectors once; where
documents have several, "Flat" makes no such index).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections import deque
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from vembed.batch import MODALITY_WORDS, Image, Ragged, modality_of, modality_words, pictures_in
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError, DataError, MachineError, NonFiniteError, PreemptedError
from vembed.files import clean_beside, disk_error, new_folder
from vembed.pages.text import bytes_text
from vembed.vectors.encode import PICTURE_SLICE_ROWS, SLICE_ROWS, Encoded, values_of
from vembed.vectors.index import QUANTIZATIONS, build_any_index, new_index, trained_clusters, write_faiss
from vembed.vectors.provenance import model_key, vectors_key
from vembed.vectors.store import BYTES, VECTORS, VectorStore
from vembed.vectors.store import OFFSETS_FILE as STORED_OFFSETS_FILE
from vembed.workflows.search.format import (
    CHECKSUMS_FILE,
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
    is_others,
    line_offsets,
    write_checksums,
)
from vembed.workflows.search.tables import write_table
from vembed.workflows.search.thumbnails import FORMS, THUMBNAIL_BYTES, ThumbnailReader, make_thumbnails

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.data.documents import Corpus, Document
    from vembed.models.encoder import Encoder
    from vembed.models.hub import ModelIdentity
    from vembed.vectors.encode import ItemEncoder, Vectors
    from vembed.vectors.store import Encode, Items, Progress

_log = logging.getLogger(__name__)

DISK_MARGIN = 1.2
USUAL_THUMBNAIL_BYTES = 8_192
"""Of the copy of a photograph, as a rule: what the check of the disk reckons with."""

SECONDS_BETWEEN_LINES = 10.0
_ADVICE = "choose another folder"


# The documents --------------------------------------------------------------------------------------------------------


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
        # uint64 wraps around without a word: a sum of hash and row stays a hash.
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


# The index ------------------------------------------------------------------------------------------------------------


class EncodeTexts(Protocol):
    """A way to encode the texts of a corpus elsewhere than in this process, such as on workers of a cluster."""

    def __call__(
        self,
        make: Callable[[], ItemEncoder],
        documents: Path,
        spans: list[tuple[int, int]],
        side: Side,
        poll: Callable[[], None],
    ) -> Generator[Encoded]:
        """Yield the vectors of one block of documents after the other.

        Args:
            make: Loads the model and returns its encoder; it can be pickled, to be called on a worker.
            documents: ids.jsonl, a row for each document with its `text`. A worker needs a folder that it sees.
            spans: Bytes of that file from which each block begins to where it ends. What a process would encode at a
                time is a block, so that the vectors are the same.
            side: Prompt of the texts.
            poll: To be called while vectors are awaited; may raise, and is then to be left at once.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Settings of an index beside its corpus."""

    model: ModelIdentity  # the encoder's identity
    model_options: Mapping[str, str | float]  # what the user said about the model
    source: str  # the corpus, for people
    side: Side = "document"  # which prompt the documents get
    factory: str = "Flat"  # FAISS index string; "Flat" is exact
    form: str = "index"  # the folder of an index, or a name of INDEX_FORMATS: a table of its rows
    encode_texts: EncodeTexts | None = None  # what encodes; None is this process and its ranks
    make_encoder: Callable[[], ItemEncoder] | None = None  # its `make`
    encoded_by: str = "--ray"  # the option that says so, for messages


def write_index(output: Path, corpus: Corpus, encode: ItemEncoder, options: BuildOptions) -> IndexMeta:
    """Encode a corpus into a folder or a table; on several ranks all must call this.

    What is there stays until the new one is whole, and is replaced then. Where it fails, the blocks that are whole are
    kept for the next call.

    Raises:
        ConfigError: FAISS can't build such an index, or a table can't hold what the model gives.
        DataError: The corpus is broken.
        NonFiniteError: A vector holds NaN or infinity.
        MachineError: The disk is too small or refuses.
    """
    output = Path(output).resolve()
    if encode.encoder.multi_vector and options.form != "index":
        raise ConfigError(
            f"a {options.form} table holds one vector for each document, and this model gives several; make an index "
            "of its vectors: leave --format out, and choose an --output without .parquet"
        )
    if options.factory not in QUANTIZATIONS:
        new_index(options.factory, options.model.dimension)  # a misspelt factory costs no encoding
    part = _part(output)
    try:
        meta = _write_files(part, corpus, encode, options)
        if encode.ranks.is_first:
            files = part / "index"
            if options.form != "index":
                write_table(files, output, meta, options.form)
            else:
                with new_folder(output, keeps=is_others) as temporary:
                    # Links: the files stay in the part too, until the output is whole.
                    for name in (*meta.files, META_FILE, CHECKSUMS_FILE):
                        _link(files / name, temporary / name)
            shutil.rmtree(part, ignore_errors=True)
        encode.ranks.gather_objects(None)  # all wait: the first one may fail
    except PreemptedError:
        raise
    except Exception as error:
        # Encoding is dear: as long as a whole block is there, the part stays for the next start.
        if encode.ranks.is_first and _stored_bytes(part):
            _log.warning("what is encoded is kept in %s, and the same command continues", part)
        elif encode.ranks.is_first:
            shutil.rmtree(part, ignore_errors=True)
        known = error.__cause__ if isinstance(error, MachineError) else error  # the store has said it in its words
        refused = known if isinstance(known, OSError) else disk_error(error)
        if refused is None:
            raise
        raise MachineError(
            f"{output}: the index can't be written: {refused}. Free some space, or choose another folder"
        ) from error
    return meta


def clean_killed(output: Path) -> None:
    """Remove what a start that was killed once its output was whole has left beside it."""
    clean_beside(output, keeps=is_others)
    shutil.rmtree(_part(output), ignore_errors=True)


def _part(output: Path) -> Path:
    return output.with_name(f".{output.name}.part")


def _link(path: Path, name: Path) -> None:
    """Give a file another name."""
    try:
        name.hardlink_to(path)
    except OSError:  # a file system without links
        shutil.copyfile(path, name)


def _write_files(part: Path, corpus: Corpus, encode: ItemEncoder, options: BuildOptions) -> IndexMeta:
    ranks, folder = encode.ranks, part / "index"
    if ranks.is_first:
        # A kill may have left links to files of the output here: they go away, and are never written to.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in part.iterdir():
            if path.is_file():  # of an earlier version
                path.unlink()
    written = ranks.from_first(lambda: write_documents(folder / DOCUMENTS_FILE, corpus, encode))
    num_documents, num_pictures = written.num_documents, written.num_pictures
    if options.encode_texts is not None and num_pictures:
        raise ConfigError(
            f"{options.encoded_by} encodes texts, and {options.source} has {num_pictures:,} pictures; leave it out"
        )
    dim, several = options.model.dimension, encode.encoder.multi_vector
    if not several and (least := max(trained_clusters(options.factory))) > num_documents:
        raise ConfigError(
            f"--index {options.factory} is trained on at least {least:,} documents, and {options.source} has "
            f"{num_documents:,}; take fewer clusters, or Flat or HNSW32"
        )
    # The vectors, the index or table that holds them again, and the copies; of several vectors at least one each.
    there = ranks.from_first(lambda: _stored_bytes(part))
    _require_disk(folder, 2 * num_documents * dim * 4 + num_pictures * USUAL_THUMBNAIL_BYTES - there)
    num_vectors, num_truncated = _write_vectors(folder, written, corpus, encode, options)
    meta = IndexMeta(
        model=options.model,
        model_options=dict(options.model_options),
        source=options.source,
        side=options.side,
        factory=options.factory,
        num_documents=num_documents,
        num_pictures=num_pictures,
        num_truncated=num_truncated,
        notes=written.notes,
        file_bytes={},
        num_vectors=num_vectors if several else None,
    )
    if ranks.is_first:
        if not meta.compares_all and options.form == "index":
            _require_disk(folder, num_vectors * dim * 4)
            vectors_VE = np.load(folder / VECTORS_FILE, mmap_mode="r")
            write_faiss(build_any_index(vectors_VE, options.factory), folder / INDEX_FILE)
        names = [name for name in meta.files if options.form == "index" or name != INDEX_FILE]  # no table holds it
        meta = replace(meta, file_bytes={name: (folder / name).stat().st_size for name in names})
        (folder / META_FILE).write_text(meta.to_json(), encoding="utf-8")
        if options.form == "index":
            write_checksums(folder, (*meta.files, META_FILE))
    return meta


def _stored_bytes(part: Path) -> int:
    """Return the bytes of vectors and thumbnails in the stores of a part, of unfinished ones too."""
    paths = (path for file in (VECTORS, BYTES) for path in part.glob(f"*/{file.name}") if path.parent.name != "index")
    return sum(path.stat().st_size for path in paths)


def _require_disk(folder: Path, num_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, int(DISK_MARGIN * num_bytes)
    if free < needed:
        raise MachineError(
            f"the disk of {folder.parent.parent} has {bytes_text(free)} free, and vectors and index need "
            f"{bytes_text(needed)}; free some, or choose another folder"
        )


def _write_vectors(
    folder: Path, written: Written, corpus: Corpus, encode: ItemEncoder, options: BuildOptions
) -> tuple[int, int]:
    """Fill the stores of vectors and thumbnails, and give their files the names that they have in an index.

    Returns:
        How many vectors there are, and how many texts were cut.
    """
    ranks, side = encode.ranks, options.side
    # Of the first rank: where weights were received, the configurations of the others may differ.
    key = ranks.from_first(
        lambda: vectors_key(encode.encoder, model_key(encode.encoder), side, autocast_dtype=encode.autocast_dtype)
    )
    store = VectorStore(folder.parent, "vectors", key, "vectors", _ADVICE)
    read_again = CorpusItems(folder / DOCUMENTS_FILE, corpus, written)
    items: Items = read_again
    encode_lists = _encoding(encode, side)
    if options.encode_texts is not None:
        items = DocumentSpans(folder / DOCUMENTS_FILE, written)
        encode_lists = _encoding_elsewhere(options, folder / DOCUMENTS_FILE, encode)
    with (
        closing(store.make(items, encode_lists, ranks, written.ends)) as blocks,
        closing(_copies(folder, written, corpus, encode)) as copies,
    ):
        # Each generator stands before its first block after one step. From there on they take turns, block by block:
        # while the device encodes what was just handed to it, the host makes the copies of the same block.
        num_kept = next(blocks).num_rows
        next(copies, None)
        if num_kept and ranks.is_first:
            _log.info("resuming after what an earlier start encoded")
        last_line = time.perf_counter()
        for progress, _ in zip_longest(blocks, copies):
            if progress is not None and time.perf_counter() - last_line > SECONDS_BETWEEN_LINES:
                done, of = (f"{number:,}" for number in (progress.num_rows, written.num_documents))
                _log.info("encoded %s of %s documents, %.0f a second", done, of, progress.rate)
                last_line = time.perf_counter()
    read_again.finish()

    def link() -> tuple[int, int]:
        made = store.path(items)
        _link(made / VECTORS.name, folder / VECTORS_FILE)
        if encode.encoder.multi_vector:
            _link(made / STORED_OFFSETS_FILE, folder / STARTS_FILE)
        return len(np.load(made / VECTORS.name, mmap_mode="r")), store.totals(items)[0]

    num_vectors, num_truncated = ranks.from_first(link)
    assert encode.encoder.multi_vector or num_vectors == written.num_documents
    if written.num_pictures:
        # The first copy, not the first picture: the originals may be gone when the index is opened. All ranks encode.
        small = ThumbnailReader(folder / THUMBNAILS_FILE, folder / OFFSETS_FILE)
        items_of_probes: list[Item] = [Image("the first thumbnail", small.read(small.first())), PROBE_TEXT]
        takes_texts = "text" in encode.encoder.modalities
        probes = values_of(encode(items_of_probes if takes_texts else items_of_probes[:1], side))
        if ranks.is_first:
            np.save(folder / PROBE_FILE, probes.astype("<f4", copy=False))
    return num_vectors, num_truncated


def _encoding(encode: ItemEncoder, side: Side) -> Encode:
    """Return what encodes lists of documents."""

    def encoded(lists: Iterable[Sequence[Document]]) -> Generator[Encoded]:
        # The encoder reads up to two lists ahead of the vectors that it yields; an error needs the names of these.
        under_way: deque[Sequence[Document]] = deque()

        def items() -> Generator[list[Item]]:
            for documents in lists:
                under_way.append(documents)
                yield [document.item for document in documents]

        with closing(encode.stream(items(), side)) as stream:
            for result in stream:
                documents = under_way.popleft()
                if (bad := _first_nonfinite(result.vectors)) is not None:
                    raise _nonfinite(documents[bad].id)
                yield result

    return encoded


def _encoding_elsewhere(options: BuildOptions, path: Path, encode: ItemEncoder) -> Encode:
    """Return what has lists of one item encoded, the bytes of their documents in a file."""
    encode_texts, make = options.encode_texts, options.make_encoder
    assert encode_texts is not None
    assert make is not None

    def encoded(lists: Iterable[Sequence[tuple[int, int]]]) -> Generator[Encoded]:
        spans = [span for [span] in lists]
        with closing(encode_texts(make, path, spans, options.side, encode.poll)) as stream, path.open("rb") as file:
            for (start, stop), result in zip(spans, stream, strict=True):
                if (bad := _first_nonfinite(result.vectors)) is not None:
                    file.seek(start)
                    raise _nonfinite(json.loads(file.read(stop - start).splitlines()[bad])["id"])
                yield result

    return encoded


def _first_nonfinite(vectors: Vectors) -> int | None:
    """Return the first item with a vector that holds NaN or infinity."""
    bad = np.flatnonzero(~np.isfinite(values_of(vectors)).all(axis=1))
    if not bad.size:
        return None
    if isinstance(vectors, Ragged):
        return int(np.searchsorted(vectors.offsets, bad[0], side="right")) - 1
    return int(bad[0])


def _nonfinite(name: str) -> NonFiniteError:
    return NonFiniteError(
        f"the vector of document {name!r} holds NaN or infinity: the weights are damaged, or "
        f"half precision overflowed; encode without --bf16, or take an earlier checkpoint"
    )


def _copies(folder: Path, written: Written, corpus: Corpus, encode: ItemEncoder) -> Generator[Progress]:
    """Keep a small copy of each document's pictures on the first rank, block by block, then link the files."""
    if not (written.num_pictures and encode.ranks.is_first):
        return

    def copied(lists: Iterable[Sequence[Document]]) -> Generator[Encoded]:
        for documents in lists:
            copies = []
            pictured = [document.item for document in documents]
            for small in make_thumbnails(pictured, corpus.limits, torch.get_num_threads()):
                if encode.ranks.is_one:
                    encode.poll()
                copies.append(small)
            # To the store a copy is an item of as many "vectors" of one number as it has bytes.
            offsets = np.cumsum([0, *map(len, copies)])
            yield Encoded(Ragged(np.frombuffer(b"".join(copies), np.uint8)[:, None], offsets), 0)

    items = CorpusItems(folder / DOCUMENTS_FILE, corpus, written)
    key = {"forms": [list(form) for form in FORMS], "most bytes": THUMBNAIL_BYTES}
    store = VectorStore(folder.parent, "thumbnails", key, "thumbnails", _ADVICE, file=BYTES)
    # A store of one rank: the others don't decode pictures for copies, and don't wait for them either.
    yield from store.make(items, copied, Ranks(), written.ends)
    items.finish()
    _link(store.path(items) / BYTES.name, folder / THUMBNAILS_FILE)
    _link(store.path(items) / STORED_OFFSETS_FILE, folder / OFFSETS_FILE)
