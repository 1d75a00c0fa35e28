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

Where a process is killed or stopped, or fails after a block, the stores stay, and the same command continues after
their last block; of another corpus they keep the blocks that it shares. Several processes encode each block together,
and the first one writes.

Memory: three blocks of documents (one is read ahead, one encoded, one written; of pictures a fourth, which is copied),
the vectors of two, the ids (of pictures twice), and in step 3 what FAISS holds ("Flat": all vectors once; where
documents have several, "Flat" makes no such index).
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.batch import Image, Ragged
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError, MachineError, NonFiniteError, PreemptedError
from vembed.files import clean_beside, disk_error, new_folder
from vembed.pages.text import bytes_text
from vembed.vectors.encode import Encoded, values_of
from vembed.vectors.index import QUANTIZATIONS, build_any_index, new_index, trained_clusters, write_faiss
from vembed.vectors.provenance import model_key, vectors_key
from vembed.vectors.store import BYTES, VECTORS, VectorStore
from vembed.vectors.store import OFFSETS_FILE as STORED_OFFSETS_FILE
from vembed.workflows.search.checksums import CHECKSUMS_FILE, write_checksums
from vembed.workflows.search.documents import CorpusItems, DocumentSpans, write_documents
from vembed.workflows.search.format import (
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
)
from vembed.workflows.search.tables import write_table
from vembed.workflows.search.thumbnails import FORMS, THUMBNAIL_BYTES, ThumbnailReader, make_thumbnails

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from vembed.batch import Item, Side
    from vembed.data.corpus import Corpus, Document
    from vembed.models.fingerprint import ModelIdentity
    from vembed.vectors.encode import ItemEncoder, Vectors
    from vembed.vectors.keys import Format
    from vembed.vectors.store import Encode, Items, Progress
    from vembed.workflows.search.documents import Written
    from vembed.workflows.search.ray_job import RayJob

_log = logging.getLogger(__name__)

DISK_MARGIN = 1.2
USUAL_THUMBNAIL_BYTES = 8_192
"""What the copy of a photograph takes, for the check of the disk."""

SECONDS_BETWEEN_LINES = 10.0
_ADVICE = "choose another folder"


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
            _publish(part, output, meta, options.form)
        encode.ranks.gather_objects(None)  # all wait: the first one may fail
    except PreemptedError:
        raise
    except Exception as error:
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


def _publish(part: Path, output: Path, meta: IndexMeta, form: Format) -> None:
    """Give the output its name."""
    folder = part / "index"
    if form != "index":
        write_table(folder, output, meta, form)
    else:
        with new_folder(output, keeps=is_others) as temporary:
            for name in (
                *meta.files,
                META_FILE,
                CHECKSUMS_FILE,
            ):  # they stay in the part too, until the output is whole
                _link(folder / name, temporary / name)
    shutil.rmtree(part, ignore_errors=True)


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
    if options.job is not None and num_pictures:
        raise ConfigError(f"--ray encodes texts, and {options.source} has {num_pictures:,} pictures; leave it out")
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
    key = ranks.from_first(
        lambda: vectors_key(encode.encoder, model_key(encode.encoder), side, autocast_dtype=encode.autocast_dtype)
    )
    store = VectorStore(folder.parent, "vectors", key, "vectors", _ADVICE)
    read_again = CorpusItems(folder / DOCUMENTS_FILE, corpus, written)
    items: Items = read_again
    encode_lists = _encoding(encode, side)
    if options.job is not None:
        items = DocumentSpans(folder / DOCUMENTS_FILE, written)
        encode_lists = _encoding_by_job(options.job, folder / DOCUMENTS_FILE, encode, side)
    with (
        closing(store.make(items, encode_lists, ranks, written.ends)) as blocks,
        closing(_copies(folder, written, corpus, encode)) as copies,
    ):
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
        return len(np.load(made / VECTORS.name, mmap_mode="r")), store.totals(items).num_truncated

    num_vectors, num_truncated = ranks.from_first(link)
    assert encode.encoder.multi_vector or num_vectors == written.num_documents
    if written.num_pictures:
        probes = values_of(encode(_probes(folder, encode), side))
        if ranks.is_first:
            np.save(folder / PROBE_FILE, probes.astype("<f4", copy=False))
    return num_vectors, num_truncated


def _encoding(encode: ItemEncoder, side: Side) -> Encode:
    """Return what encodes lists of documents."""

    def encoded(lists: Iterable[Sequence[Document]]) -> Generator[Encoded]:
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


def _encoding_by_job(job: RayJob, path: Path, encode: ItemEncoder, side: Side) -> Encode:
    """Return what has workers of Ray encode lists of one item, the bytes of their documents in a file."""

    def encoded(lists: Iterable[Sequence[tuple[int, int]]]) -> Generator[Encoded]:
        spans = [span for [span] in lists]
        with closing(job.stream(path, spans, side, encode.poll)) as stream, path.open("rb") as file:
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
            for copy in make_thumbnails([each.item for each in documents], corpus.limits, torch.get_num_threads()):
                if encode.ranks.is_one:
                    encode.poll()
                copies.append(copy)
            offsets = np.cumsum([0, *map(len, copies)])
            yield Encoded(Ragged(np.frombuffer(b"".join(copies), np.uint8)[:, None], offsets), 0)

    items = CorpusItems(folder / DOCUMENTS_FILE, corpus, written)
    key = {"forms": [list(form) for form in FORMS], "most bytes": THUMBNAIL_BYTES}
    store = VectorStore(folder.parent, "thumbnails", key, "thumbnails", _ADVICE, file=BYTES)
    yield from store.make(items, copied, Ranks(), written.ends)
    items.finish()
    _link(store.path(items) / BYTES.name, folder / THUMBNAILS_FILE)
    _link(store.path(items) / STORED_OFFSETS_FILE, folder / OFFSETS_FILE)


def _probes(folder: Path, encode: ItemEncoder) -> list[Item]:
    """Return items that tell the model by their vectors where there are pictures."""
    copies = ThumbnailReader(folder / THUMBNAILS_FILE, folder / OFFSETS_FILE)
    first = Image("the first thumbnail", copies.read(copies.first()))
    return [first, PROBE_TEXT] if "text" in encode.encoder.modalities else [first]
