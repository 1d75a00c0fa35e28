"""Make an index: a corpus in, a folder out that appears complete or not at all.

1. The corpus is read and checked to its end, and written as ids.jsonl: an invalid last row costs no encoding.
2. The texts are read back in slices, encoded, and the vectors appended to vectors.npy.
3. FAISS builds its index from the mapped file.
4. meta.json is written last, and the folder takes its name.

Memory: a slice of texts and vectors, the ids, and in step 3 what FAISS holds ("Flat": all vectors once).
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import faiss
import numpy as np

from vembed.checkpoint.files import fsync_path, write_durably
from vembed.errors import ConfigError, MachineError, NonFiniteError
from vembed.evaluation.encode import SLICE_ROWS
from vembed.evaluation.index import build_index, new_index
from vembed.search.format import DOCUMENTS_FILE, INDEX_FILE, META_FILE, VECTORS_FILE, IndexMeta, is_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from vembed.batch import Side
    from vembed.data.corpus import Corpus
    from vembed.evaluation.encode import ItemEncoder
    from vembed.models.identity import ModelIdentity

_log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0
DISK_MARGIN = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What an index is made of beside its corpus.

    Attributes:
        model: The encoder's identity.
        model_options: What the user said about the model.
        source: The corpus, for people.
        side: Which prompt the documents get.
        factory: FAISS index string; "Flat" is exact.
        overwrite: Whether an index that is there may be replaced.
    """

    model: ModelIdentity
    model_options: Mapping[str, str | int]
    source: str
    side: Side = "document"
    factory: str = "Flat"
    overwrite: bool = False


def write_index(output: Path, corpus: Corpus, encode: ItemEncoder, options: BuildOptions) -> IndexMeta:
    """Encode a corpus into a folder.

    The files are written into a hidden folder beside it. An index that is there stays until the new one is whole.

    Args:
        output: The folder; its parents are made.
        corpus: The documents.
        encode: The encoder.
        options: The rest.

    Raises:
        ConfigError: The folder holds something already, or FAISS can't build such an index.
        DataError: The corpus is broken.
        NonFiniteError: A vector holds NaN or infinity.
        MachineError: The disk is too small or refuses.
    """
    output = Path(output).resolve()
    refuse_taken(output, overwrite=options.overwrite)
    new_index(options.factory, options.model.dimension)  # a misspelt factory costs no encoding
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # what a kill left
        temporary.mkdir(parents=True)
        meta = _write_files(temporary, corpus, encode, options)
        _take_name(temporary, output)
    except OSError as error:
        raise MachineError(
            f"{output}: the index can't be written: {error}. Free some space, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def refuse_taken(output: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that holds something.

    Args:
        output: The folder.
        overwrite: Whether an index may stand there.

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
    num_documents = _write_documents(folder / DOCUMENTS_FILE, corpus, encode.poll)
    dim = options.model.dimension
    _require_disk(folder, 2 * num_documents * dim * 4)  # the vectors, and the index that holds them again
    before = encode.num_truncated[options.side]
    _write_vectors(folder, num_documents, encode, options.side)
    vectors_DE = np.load(folder / VECTORS_FILE, mmap_mode="r")
    faiss.write_index(build_index(vectors_DE, options.factory), str(folder / INDEX_FILE))
    for name in (DOCUMENTS_FILE, VECTORS_FILE, INDEX_FILE):
        fsync_path(folder / name)
    meta = IndexMeta(
        model=options.model,
        model_options=dict(options.model_options),
        source=options.source,
        side=options.side,
        factory=options.factory,
        num_documents=num_documents,
        num_truncated=encode.num_truncated[options.side] - before,
        notes=corpus.notes,
        file_bytes={name: (folder / name).stat().st_size for name in (DOCUMENTS_FILE, VECTORS_FILE, INDEX_FILE)},
    )
    write_durably(folder / META_FILE, meta.to_json())
    fsync_path(folder)
    return meta


def _write_documents(path: Path, corpus: Corpus, poll: Callable[[], None]) -> int:
    """Write {"id", "text"} of each document on a line, and return how many there are."""
    num_documents = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for document in corpus:
            if num_documents % SLICE_ROWS == 0:
                poll()
            file.write(json.dumps({"id": document.id, "text": document.text}, ensure_ascii=False) + "\n")
            num_documents += 1
    return num_documents


def _require_disk(folder: Path, num_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, int(DISK_MARGIN * num_bytes)
    if free < needed:
        raise MachineError(
            f"the disk of {folder.parent} has {free / 1e9:.1f} GB free, and vectors and index need {needed / 1e9:.1f} "
            f"GB; free some, or choose another folder"
        )


def _write_vectors(folder: Path, num_documents: int, encode: ItemEncoder, side: Side) -> None:
    """Append the vectors slice by slice: a plain write says that the disk is full, where a mapped page would crash."""
    started = last_line = time.perf_counter()
    done = 0
    with (folder / VECTORS_FILE).open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_documents, encode.encoder.dimension)}
        np.lib.format.write_array_header_1_0(file, header)
        for ids, texts in _slices(folder / DOCUMENTS_FILE):
            vectors_RE = encode(texts, side)
            _refuse_nonfinite(vectors_RE, ids)
            file.write(vectors_RE.astype("<f4", copy=False).tobytes())
            done += len(ids)
            now = time.perf_counter()
            if now - last_line > SECONDS_BETWEEN_LINES:
                _log.info(
                    "encoded %s of %s documents, %.0f a second", *_counts(done, num_documents), done / (now - started)
                )
                last_line = now
    assert done == num_documents


def _counts(*numbers: int) -> tuple[str, ...]:
    return tuple(f"{number:,}" for number in numbers)


def _slices(path: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (ids, texts) of the next documents."""
    with path.open(encoding="utf-8", newline="\n") as file:
        while lines := list(islice(file, SLICE_ROWS)):
            rows = [json.loads(line) for line in lines]
            yield [row["id"] for row in rows], [row["text"] for row in rows]


def _refuse_nonfinite(vectors_RE: NDArray[np.float32], ids: list[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors_RE).all(axis=1))
    if bad.size:
        raise NonFiniteError(
            f"the vector of document {ids[int(bad[0])]!r} holds NaN or infinity: the weights are damaged, or half "
            f"precision overflowed; encode without --bf16, or take an earlier checkpoint"
        )


def _take_name(temporary: Path, output: Path) -> None:
    """Let the new folder take its name; on failure the old one is as it was."""
    old = output.with_name(f".{output.name}.old")
    try:
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
            output.replace(old)  # no system renames a folder over one that holds files
        temporary.replace(output)
        fsync_path(output.parent)
    finally:
        if old.exists() and not output.exists():
            old.replace(output)
    shutil.rmtree(old, ignore_errors=True)
