"""Make an index: a corpus in, a folder or a table out that appears complete or not at all.

1. The corpus is read and checked to its end, and written as ids.jsonl: an invalid last row costs no encoding.
2. It is read again in slices: documents are encoded and the vectors appended to vectors.npy, and of each picture a
   small copy is kept. A document that is no longer what it was in step 1 ends the work.
3. FAISS builds its index from the mapped file.
4. meta.json is written last, and the folder takes its name.

All this happens in a hidden folder beside the output, `.NAME.part`. Where a process is killed or stopped, or fails
after a slice, the folder stays, and the same command continues after the last slice (`vembed.search.journal`), or from
the first one whose documents have changed. Several processes encode each slice together, and the first one writes.

Memory: three slices of documents (one is read ahead, one encoded, one written), the vectors of two, the ids, and in
step 3 what FAISS holds ("Flat": all vectors once; where documents have several, "Flat" makes no such index).
"""

from __future__ import annotations

import logging
import shutil
from collections import deque
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.batch import Image, Ragged
from vembed.errors import ConfigError, MachineError, NonFiniteError, PreemptedError
from vembed.evaluation.directions import count_truncated
from vembed.evaluation.encode import SLICE_ROWS, values_of
from vembed.evaluation.index import new_index, trained_clusters
from vembed.evaluation.provenance import SAMPLE_TEXTS, model_key, vectors_key
from vembed.evaluation.quantized import QUANTIZATIONS, index_of, write_faiss
from vembed.files import disk_error, new_folder
from vembed.pages.text import bytes_text
from vembed.search.documents import Written, read_slices, write_documents
from vembed.search.format import (
    DOCUMENTS_FILE,
    HEADER_BYTES,
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
    write_vectors_header,
)
from vembed.search.journal import Journal
from vembed.search.progress import Progress
from vembed.search.ray_job import slice_spans
from vembed.search.tables import write_table
from vembed.search.thumbnails import ThumbnailReader, make_thumbnails

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vembed.batch import Item, Side
    from vembed.data.corpus import Corpus, Document
    from vembed.evaluation.encode import ItemEncoder, Vectors
    from vembed.evaluation.provenance import Key
    from vembed.models.fingerprint import ModelIdentity
    from vembed.search.journal import Entry
    from vembed.search.output import Format
    from vembed.search.ray_job import RayJob

_log = logging.getLogger(__name__)

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
    form: Format = "index"  # the folder of an index, or a table of its rows
    job: RayJob | None = None  # who encodes the texts; None is this process and its ranks


def write_index(output: Path, corpus: Corpus, encode: ItemEncoder, options: BuildOptions) -> IndexMeta:
    """Encode a corpus into a folder or a table; on several ranks all must call this.

    What is there stays until the new one is whole, and is replaced then. Where it fails, the slices that are whole are
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
    part = output.with_name(f".{output.name}.part")
    if encode.ranks.is_first:
        _drop_published(part, output)
    try:
        meta = _write_files(part, corpus, encode, options)
        if encode.ranks.is_first:
            _publish(part, output, meta, options.form)
        encode.ranks.gather_objects(None)  # all wait: the first one may fail
    except PreemptedError:
        raise
    except Exception as error:
        if encode.ranks.is_first and Journal.holds_slices(part):
            _log.warning("what is encoded is kept in %s, and the same command continues", part)
        elif encode.ranks.is_first:
            shutil.rmtree(part, ignore_errors=True)
        refused = error if isinstance(error, OSError) else disk_error(error)
        if refused is None:
            raise
        raise MachineError(
            f"{output}: the index can't be written: {refused}. Free some space, or choose another folder"
        ) from error
    return meta


def _drop_published(part: Path, output: Path) -> None:
    """Delete what a kill left after its files had become the output: links to them, which must not be written to."""
    shutil.rmtree(output.with_name(f".{output.name}.tmp"), ignore_errors=True)  # links of an output that never was
    if part.exists() and any(path.stat().st_nlink > 1 for path in part.iterdir()):
        shutil.rmtree(part)


def _publish(part: Path, output: Path, meta: IndexMeta, form: Format) -> None:
    """Give the output its name."""
    if form != "index":
        write_table(part, output, meta, form)
    else:
        with new_folder(output, keeps=is_others) as temporary:
            for name in (*meta.files, META_FILE):  # they stay in the part too, until the output is whole
                try:
                    (temporary / name).hardlink_to(part / name)
                except OSError:  # a file system without links
                    shutil.copyfile(part / name, temporary / name)
    shutil.rmtree(part, ignore_errors=True)


def _write_files(folder: Path, corpus: Corpus, encode: ItemEncoder, options: BuildOptions) -> IndexMeta:
    ranks = encode.ranks
    if ranks.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    written = ranks.from_first(lambda: write_documents(folder / DOCUMENTS_FILE, corpus, encode))
    num_documents, num_pictures = written.num_documents, written.num_pictures
    if options.job is not None and num_pictures:
        raise ConfigError(f"--ray encodes texts, and {options.source} has {num_pictures:,} pictures; leave it out")
    dim, several = options.model.dimension, encode.encoder.multi_vector
    if not several and (least := max(trained_clusters(options.factory))) > num_documents:
        raise ConfigError(
            f"--index {options.factory} is trained on at least {least:,} documents, and {options.source} has "
            f"{num_documents:,}; take fewer clusters, or Flat or HNSW32"
        )
    # The vectors, the index or table that holds them again, and the copies; of several vectors at least one each.
    there = ranks.from_first(lambda: _size(folder, (VECTORS_FILE, THUMBNAILS_FILE, INDEX_FILE)))
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
        notes=ranks.from_first(lambda: corpus.notes),
        file_bytes={},
        num_vectors=num_vectors if several else None,
    )
    if ranks.is_first:
        if not meta.compares_all and options.form == "index":
            _require_disk(folder, num_vectors * dim * 4)
            vectors_VE = np.load(folder / VECTORS_FILE, mmap_mode="r")
            write_faiss(index_of(vectors_VE, options.factory), folder / INDEX_FILE)
        names = [name for name in meta.files if options.form == "index" or name != INDEX_FILE]  # no table holds it
        meta = replace(meta, file_bytes={name: (folder / name).stat().st_size for name in names})
        (folder / META_FILE).write_text(meta.to_json(), encoding="utf-8")
    return meta


def _size(folder: Path, names: Sequence[str]) -> int:
    return sum(path.stat().st_size for name in names if (path := folder / name).exists())


def _require_disk(folder: Path, num_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, int(DISK_MARGIN * num_bytes)
    if free < needed:
        raise MachineError(
            f"the disk of {folder.parent} has {bytes_text(free)} free, and vectors and index need "
            f"{bytes_text(needed)}; free some, or choose another folder"
        )


def _write_vectors(
    folder: Path, written: Written, corpus: Corpus, encode: ItemEncoder, options: BuildOptions
) -> tuple[int, int]:
    """Append the vectors slice by slice: a plain write says that the disk is full, where a mapped page would crash.

    Returns:
        How many vectors there are, and how many texts were cut.
    """
    num_documents, num_pictures = written.num_documents, written.num_pictures
    ranks, side = encode.ranks, options.side
    files = {VECTORS_FILE: HEADER_BYTES, **({THUMBNAILS_FILE: 0} if num_pictures else {})}
    key = ranks.from_first(lambda: _key(corpus, encode, options))
    journal = Journal(folder, key, files, written.slices) if ranks.is_first else None
    num_done = ranks.from_first(lambda: len(journal.done) if journal else 0)
    before, num_cut = encode.num_truncated[side], 0
    if num_done and ranks.is_first:
        _log.info("resuming after what an earlier start encoded")
    progress = Progress(num_documents)
    slices = read_slices(folder / DOCUMENTS_FILE, corpus)
    for documents in islice(slices, num_done):
        num_cut += count_truncated(encode.encoder, [each.item for each in documents], side) if ranks.is_first else 0
        progress.skip(len(documents))
    under_way: deque[list[Document]] = deque()

    def items() -> Iterator[list[Item]]:
        for documents in slices:
            under_way.append(documents)
            yield [document.item for document in documents]

    if options.job is None:
        found = encode.stream(items(), side)
    else:
        spans = slice_spans(folder / DOCUMENTS_FILE, SLICE_ROWS)[num_done:]
        found = options.job.stream(folder / DOCUMENTS_FILE, spans, encode, side)
    with closing(found):
        for vectors, _ in found:
            documents = next(slices) if options.job else under_way.popleft()
            if journal is not None:
                _refuse_nonfinite(vectors, documents)
                copies = list(_copies(documents, corpus, encode)) if num_pictures else []
                parts = [
                    values_of(vectors).astype("<f4", copy=False).tobytes(),
                    *([b"".join(copies)] * (len(files) - 1)),
                ]
                lengths = vectors.lengths.tolist() if isinstance(vectors, Ragged) else None
                journal.append(parts, len(documents), lengths, [len(copy) for copy in copies])
            progress.add(len(documents))
    rest = next(slices, None)  # reads the corpus to its end, which checks it
    assert rest is None
    assert progress.done == num_documents
    num_cut += sum(ranks.gather_objects(encode.num_truncated[side] - before))
    if journal is not None:
        journal.close()
    num_vectors = ranks.from_first(lambda: _finish(folder, journal.done, encode) if journal else 0)
    assert encode.encoder.multi_vector or num_vectors == num_documents
    if num_pictures:
        probes = values_of(encode(_probes(folder, encode), side))
        if ranks.is_first:
            np.save(folder / PROBE_FILE, probes.astype("<f4", copy=False))
    return num_vectors, num_cut


def _key(corpus: Corpus, encode: ItemEncoder, options: BuildOptions) -> Key:
    """Return what the bytes of the vectors are made of, beside their documents."""
    sample = [document.item for document in islice(corpus, SAMPLE_TEXTS)]
    return vectors_key(
        encode.encoder, model_key(encode.encoder), sample, options.side, autocast_dtype=encode.autocast_dtype
    )


def _finish(folder: Path, done: Sequence[Entry], encode: ItemEncoder) -> int:
    """Write where vectors and copies start, and return how many vectors there are."""
    lengths = [length for entry in done for length in entry.lengths or ()]
    num_vectors = sum(lengths) if encode.encoder.multi_vector else sum(entry.num_documents for entry in done)
    with (folder / VECTORS_FILE).open("r+b") as file:
        write_vectors_header(file, num_vectors, encode.encoder.dimension)
    if encode.encoder.multi_vector:
        np.save(folder / STARTS_FILE, np.cumsum([0, *lengths], dtype="<i8"))
    copies = [length for entry in done for length in entry.copy_lengths]
    if copies:
        np.save(folder / OFFSETS_FILE, np.cumsum([0, *copies], dtype="<i8"))
    return num_vectors


def _copies(documents: Sequence[Document], corpus: Corpus, encode: ItemEncoder) -> Iterator[bytes]:
    """Yield a small copy of each document's pictures."""
    for copy in make_thumbnails([each.item for each in documents], corpus.limits, torch.get_num_threads()):
        if encode.ranks.is_one:
            encode.poll()
        yield copy


def _probes(folder: Path, encode: ItemEncoder) -> list[Item]:
    """Return items that tell the model by their vectors where there are pictures."""
    copies = ThumbnailReader(folder / THUMBNAILS_FILE, folder / OFFSETS_FILE)
    first = Image("the first thumbnail", copies.read(copies.first()))
    return [first, PROBE_TEXT] if "text" in encode.encoder.modalities else [first]


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
