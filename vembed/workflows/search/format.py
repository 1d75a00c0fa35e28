"""The folder of an index: its files, its meta.json, and the hashes that are compared when the files are read.

    vectors.npy     (n, E) float32, row i is document i
    ids.jsonl       {"id", "text"} of document i on line i, with a picture {"id", "text", "image"}: its path
    index.faiss     a FAISS index by inner product, document i under number i
    meta.json       model, counts, sizes of the others
    checksums.json  the SHA-256 of each block of 4 MiB of each of them; written last

where the model gives several vectors for each document (format version 3)

    vectors.npy     (V, E) float32, all vectors of document 0, then those of document 1, ...
    offsets.npy     (n + 1,) int64, where the vectors of document i start
    index.faiss     the same of all vectors; there is none for "Flat", where every document is compared

and where there are pictures:

    thumbnails.bin  a small WebP copy of each, one after the other
    thumbnails.npy  (n + 1,) int64, where the copy of document i starts
    probe.npy       (1 or 2, E) float32, the vector of the first copy, and that of `PROBE_TEXT` where the model takes
                    texts, or all of their vectors: with the originals gone, they still tell whether a model is the one
                    of the vectors

Nothing in it depends on when or where it was made: equal inputs give equal bytes.

What is read whole when an index is opened (index.faiss, ids.jsonl, meta.json) is checked whole then. Of vectors and
thumbnails, which stay on disk, a block is checked when it is first used: opening an index that is larger than the
memory costs no more than before. Cost: 0.7 s for each GB that is read, 90 characters of checksums.json for 4 MiB.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

import vembed
from vembed.batch import Side  # noqa: TC001
from vembed.errors import ConfigError
from vembed.files import is_file
from vembed.models.hub import ModelIdentity  # noqa: TC001
from vembed.registry import INDEX_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

VECTORS_FILE = "vectors.npy"
DOCUMENTS_FILE = "ids.jsonl"
INDEX_FILE = "index.faiss"
META_FILE = "meta.json"
CHECKSUMS_FILE = "checksums.json"
THUMBNAILS_FILE = "thumbnails.bin"
OFFSETS_FILE = "thumbnails.npy"
PROBE_FILE = "probe.npy"
STARTS_FILE = "offsets.npy"
PICTURE_FILES = (THUMBNAILS_FILE, OFFSETS_FILE, PROBE_FILE)
_OWN_NAMES = (
    META_FILE,
    CHECKSUMS_FILE,
    VECTORS_FILE,
    DOCUMENTS_FILE,
    INDEX_FILE,
    STARTS_FILE,
    *PICTURE_FILES,
)
PROBE_TEXT = "a small red picture of 7 things"
COUNTED_BYTES = 1 << 24
"""Bytes of a file that are read at a time to count its lines."""

HASHED_BYTES = 1 << 22
"""Bytes of a block of checksums.json: part of the format, never changed."""

KIND = "vembed index"
FORMAT_VERSION = 2
SEVERAL_VERSION = 3
"""Of an index with several vectors for each document, which programs that know version 2 alone can't search."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexMeta:
    """Content of meta.json."""

    model: ModelIdentity  # the model that made the vectors
    # what the user said about the model beside its name; its queries need the same
    model_options: Mapping[str, bool | int | float | str]
    source: str  # the corpus, for people
    side: Side  # which prompt the documents got
    factory: str  # FAISS index string
    num_documents: Annotated[int, Field(ge=0)]  # n
    num_pictures: Annotated[int, Field(ge=0)]  # of them, those that are or have a picture
    num_truncated: int  # documents that were longer than the model takes and were cut
    notes: tuple[str, ...]  # what was skipped or is unusual, one plain sentence each
    file_bytes: Mapping[str, int]  # file name -> size
    num_vectors: Annotated[int, Field(ge=0)] | None = None  # of all documents together; None where each has one

    @property
    def files(self) -> tuple[str, ...]:
        """The files beside meta.json."""
        names = (VECTORS_FILE, DOCUMENTS_FILE, *(() if self.compares_all else (INDEX_FILE,)))
        names += () if self.num_vectors is None else (STARTS_FILE,)
        return (*names, *PICTURE_FILES) if self.num_pictures else names

    @property
    def compares_all(self) -> bool:
        """True where a query is compared with every document, by all their vectors: no FAISS index finds any first."""
        return self.num_vectors is not None and self.factory == "Flat"

    def to_json(self) -> str:
        """Return the text of meta.json."""
        several = self.num_vectors is not None
        version = SEVERAL_VERSION if several else FORMAT_VERSION
        head = {"kind": KIND, "format_version": version, "vembed_version": vembed.__version__}
        facts = {name: value for name, value in asdict(self).items() if several or name != "num_vectors"}
        return json.dumps({**head, **facts}, indent=2, ensure_ascii=False) + "\n"


def is_others(name: str) -> bool:
    """Return whether an entry of a folder is none that `vembed encode` writes, and replaces."""
    # A folder may change from an index to a table and back, so the names of all formats count.
    tables = (INDEX_FORMATS.load(form).entries for form in INDEX_FORMATS.names())
    return name not in _OWN_NAMES and not any(name in entries for entries in tables)


def is_index(folder: Path) -> bool:
    """Return whether a folder holds an index, whole or not."""
    try:
        content = json.loads((folder / META_FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


def read_meta(folder: Path) -> IndexMeta:
    """Read meta.json and check that the files beside it are whole.

    Raises:
        ConfigError: There is no index, it is of a later version, or a file is missing or cut.
    """
    path = folder / META_FILE
    if not is_file(path):
        raise ConfigError(f"{folder} holds no index: there is no {META_FILE}; make one with vembed encode")
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}; encode the corpus again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__} instead of an object; encode the corpus again")
    meta = parse_meta(content, path)
    Checksums(folder).check(META_FILE)
    # Sizes now, hashes when a file is used: a copy that was cut off is told at once and for nothing.
    for name in meta.files:
        size = meta.file_bytes.get(name, 0)
        actual = (folder / name).stat().st_size if is_file(folder / name) else None
        if actual != size:
            fault = "is missing" if actual is None else f"has {actual:,} bytes instead of {size:,}"
            raise ConfigError(f"{folder / name} {fault}; encode the corpus again with --overwrite")
    return meta


def parse_meta(content: dict[str, Any], path: Path) -> IndexMeta:
    """Return the content of meta.json.

    Args:
        path: Where it was read, for messages.

    Raises:
        ConfigError: It is broken, of a later version, or of something else.
    """
    if content.get("kind") != KIND:
        raise ConfigError(f"{path} belongs to something else than an index; make an index with vembed encode")
    # Version 3 adds `num_vectors` and files for it; an index of one vector for each document stays version 2, which
    # programs of before read.
    version = content.get("format_version")
    known = FORMAT_VERSION if content.setdefault("num_vectors", None) is None else SEVERAL_VERSION
    if version != known:
        made_by = f"vembed {content.get('vembed_version')}"
        raise ConfigError(
            f"{path}: format version {version} ({made_by}), but vembed {vembed.__version__} reads {known}; "
            f"update vembed, or encode the corpus again"
        )
    known_fields = {name: content[name] for name in IndexMeta.__dataclass_fields__ if name in content}
    try:
        # From text, so that a list is a tuple.
        return TypeAdapter(IndexMeta).validate_json(json.dumps(known_fields), strict=True)
    except ValidationError as error:
        (first, *_) = error.errors()
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is broken: {where}: {first['msg']}; encode the corpus again") from error


def line_offsets(path: Path) -> NDArray[np.int64]:
    """Return where each line starts, and behind the last one where the file ends."""
    parts = [np.zeros(1, dtype=np.int64)]
    with path.open("rb") as file:
        start = 0
        while block := file.read(COUNTED_BYTES):
            parts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + start + 1)
            start += len(block)
    return np.concatenate(parts)


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the hashes of some files of a folder beside them."""
    content = {"block_bytes": HASHED_BYTES, "sha256": {name: list(_hashes(folder / name)) for name in names}}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _hashes(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        while block := file.read(HASHED_BYTES):
            yield hashlib.sha256(block).hexdigest()


class Checksums:
    """Hashes of the files of an index. Several threads may check.

    Args:
        folder: One of an older version has none, and nothing of it is checked.

    Raises:
        ConfigError: checksums.json is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hashes: dict[str, list[str]] | None = None
        self._checked: set[tuple[str, int]] = set()
        path = folder / CHECKSUMS_FILE
        try:
            content = json.loads(path.read_bytes())
            self._hashes = content["sha256"]
            is_ours = content["block_bytes"] == HASHED_BYTES and isinstance(self._hashes, dict)
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is broken: {error}; encode the corpus again with --overwrite") from error
        if not is_ours:
            raise ConfigError(f"{path} is broken: it holds other blocks; encode the corpus again with --overwrite")

    def note_missing(self) -> None:
        """Say in the log that nothing is checked, where that is so."""
        if self._hashes is None:
            _log.warning(
                "%s has no %s, as it is of an older version: damage to its files goes unnoticed. Encode the corpus "
                "again with --overwrite to have them checked",
                self._folder,
                CHECKSUMS_FILE,
            )

    def check(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Compare the blocks of a file, or those that some bytes of it lie in, with their hashes; each block once.

        Raises:
            ConfigError: They are other bytes than were written, or can't be read.
        """
        if self._hashes is None:
            return
        path, hashes = self._folder / name, self._hashes.get(name)
        if not isinstance(hashes, list):
            raise ConfigError(
                f"{self._folder / CHECKSUMS_FILE} is broken: it has no hashes of {name}; encode the corpus again with "
                f"--overwrite"
            )
        end = len(hashes) if stop is None else -(-stop // HASHED_BYTES)
        # Two threads may hash one block; both find the same, and adding to a set is atomic.
        blocks = [block for block in range(start // HASHED_BYTES, end) if (name, block) not in self._checked]
        if not blocks:
            return
        try:
            with path.open("rb") as file:
                for block in blocks:
                    file.seek(block * HASHED_BYTES)
                    content = file.read(HASHED_BYTES)
                    if block >= len(hashes) or hashlib.sha256(content).hexdigest() != hashes[block]:
                        raise ConfigError(
                            f"{path} is damaged: its bytes from {block * HASHED_BYTES:,} on don't fit their hash in "
                            f"{CHECKSUMS_FILE}; encode the corpus again with --overwrite"
                        )
                    self._checked.add((name, block))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; encode the corpus again") from error
