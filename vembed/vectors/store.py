"""Vectors of items on disk: encoded once, checked by content, continued after the last whole block when killed.

    NAME/vectors.npy   (N, E) float32, row i is item i
    NAME/ids.npy       (N,) int64, the content of each item
    NAME/blocks.jsonl  the key (what the vectors are made of), then one line per block: its rows, bytes and SHA-256
    .NAME.*.part/      the same files while they grow

1. If key, items and hashes are the wanted ones, the file is mapped into memory as it is.
2. Otherwise it is made block by block. Rows that a folder of the same key holds are copied: those of a smaller set, or
   of this set up to a damaged block. All ranks together encode the rest.
3. The first rank appends a block, forces it to disk, and only then appends its line. A kill therefore leaves whole
   blocks and at most the beginning of one more, which the next start cuts off.
4. With the last block in place the part is renamed to NAME. NAME never changes again, only another folder can take its
   name, so a process that has mapped it keeps what it mapped.

A block is encoded by itself, so a resumed file has the bytes of one that was never interrupted.

Cost: every start reads the vectors once to hash them. Memory: two blocks on the first rank, 12 bytes per item on all.
Shape legend: N items, E numbers per vector, B rows per block.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import chain, count
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeAlias

import numpy as np

from vembed.errors import MachineError
from vembed.evaluation.index import check_finite
from vembed.evaluation.provenance import changed_parts, digest
from vembed.files import fsync_path

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.distributed.ranks import Ranks
    from vembed.evaluation.encode import Encoded
    from vembed.evaluation.provenance import Key

VECTORS_FILE, IDS_FILE, BLOCKS_FILE = "vectors.npy", "ids.npy", "blocks.jsonl"

FORMAT = 1
"""Raised when the files change their meaning; vectors of other formats are encoded again."""

BLOCK_ROWS = 16_384
"""Rows per block: 50 MB at 768 dimensions. A kill loses the encoding of one block."""

FREE_SHARE = 1.1
"""Free disk space to ask for, as a multiple of what is still to be written."""

_log = logging.getLogger(__name__)


class Items(Protocol):
    """Items by row, each known by its content."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """The content of each item, (N,)."""

    def take(self, rows: NDArray[np.int64]) -> Sequence[Any]:
        """Return the items of some rows, which ascend from call to call."""


Encode: TypeAlias = "Callable[[Iterable[Sequence[Any]]], Generator[Encoded]]"
"""Yields the vectors of one list of items after the other. All ranks run it on the same lists; the first rank's vectors
are kept. It is started only if something is missing, so it may load its model inside."""


class Totals(NamedTuple):
    """Sums over the blocks of a set."""

    num_truncated: int  # items longer than the model takes, which were cut
    seconds: float  # wall time of encoding


@dataclass(frozen=True, slots=True)
class VectorStore:
    """Vectors of one kind in a folder, which several runs may share."""

    folder: Path  # made with the first block
    name: str  # of the set
    key: Key  # what the vectors are made of, beside the items
    what: str  # for messages: "the teacher's vectors"
    advice: str  # for messages: what to do if the disk is full, beside freeing space
    shared: bool = False  # whether sets of other keys and items stay: their hashes become part of the name

    def get(self, items: Items, encode: Encode, ranks: Ranks) -> NDArray[np.float32]:
        """Return the vectors of one item or more, (N, E), mapped from disk; encode what isn't there.

        All ranks call it, with the same items.

        Raises:
            MachineError: The disk is full or refuses, or a process doesn't see the folder.
            NonFiniteError: A vector holds NaN or infinity. Its block isn't kept.
        """
        path = self.path(items)
        part: _Part | None = None  # only on the first rank, and only if something is missing

        def survey() -> list[_Saved] | None:
            """Open a part, and return the folders to copy rows from; None if all vectors are there."""
            nonlocal part
            saved, wanted = _read_blocks(path, self.key), _hash(items.ids)
            if saved.items == wanted and saved.num_rows == len(items.ids):
                _log.info("%s: %d unchanged, read from %s", self.what, saved.num_rows, path)
                return None
            siblings = set(self.folder.glob(f"{self._stem}-*")) - {path} if self.shared else set()
            with self._writing():
                part = _Part(path, self.key, items.ids)
            reason = saved.reason or ("changed: items" if saved.items not in ("", wanted) else "")
            again = f" again ({reason})" if reason else ""
            missing = len(items.ids) - part.num_rows
            _log.info("%s: making %d of %d%s: %s", self.what, missing, len(items.ids), again, path)
            sources = [saved, *(_read_blocks(sibling, self.key) for sibling in sorted(siblings))]
            return [source for source in sources if source.num_rows]

        sources = ranks.from_first(survey)
        try:
            if sources is not None:
                self._fill(part, items, encode, ranks, sources)
                with self._writing():
                    ranks.from_first(lambda: part.publish(path) if part else None)
        finally:
            if part is not None:
                part.close()
        # Without this, a folder on a disk of one machine would be reported by numpy, on another machine.
        sees = ranks.gather_objects((path / VECTORS_FILE).is_file())
        if not all(sees):
            raise MachineError(
                f"{path}: process 0 sees this folder and process {sees.index(False)} doesn't; it must be on a file "
                f"system that all machines share, or {self.advice}"
            )
        vectors_NE: NDArray[np.float32] = np.load(path / VECTORS_FILE, mmap_mode="r")
        return vectors_NE

    def path(self, items: Items) -> Path:
        """Return the folder of a set."""
        return self.folder / (f"{self._stem}-{_hash(items.ids)[:16]}" if self.shared else self.name)

    def totals(self, items: Items) -> Totals:
        """Return what encoding a set took, in all runs together."""
        blocks = _read_lines(self.path(items))[1:]
        return Totals(sum(block["num_truncated"] for block in blocks), sum(block["seconds"] for block in blocks))

    @property
    def num_bytes(self) -> int:
        """Bytes of vectors of this key on disk, of unfinished sets too."""
        return sum(path.stat().st_size for path in self.folder.glob(f"*{self._stem}*/{VECTORS_FILE}"))

    @property
    def _stem(self) -> str:
        return f"{self.name}-{digest(self.key)[:16]}" if self.shared else self.name

    def _fill(self, part: _Part | None, items: Items, encode: Encode, ranks: Ranks, sources: Sequence[_Saved]) -> None:
        """Append the missing blocks. All ranks encode; the first one has the part and writes."""
        num_items = len(items.ids)
        num_done = ranks.from_first(lambda: part.num_rows if part else 0)
        source_N, row_N = _find_rows(items.ids, sources)
        tables = [np.load(source.folder / VECTORS_FILE, mmap_mode="r") for source in sources]
        starts = range(num_done, num_items, BLOCK_ROWS)
        to_encode = [start + np.flatnonzero(source_N[start : start + BLOCK_ROWS] < 0) for start in starts]
        num_encoded = num_cut = 0
        began = last = time.perf_counter()
        # One stream over all blocks, so the encoder works on the next one while this one is hashed and written.
        with closing(encode(items.take(rows) for rows in to_encode if len(rows))) as stream:
            for start, rows in zip(starts, to_encode, strict=True):
                encoded = next(stream) if len(rows) else None
                num_truncated = sum(ranks.gather_objects(encoded.num_truncated if encoded else 0))
                num_encoded, num_cut = num_encoded + len(rows), num_cut + num_truncated
                if part is None:
                    continue
                block = slice(start, min(start + BLOCK_ROWS, num_items))
                encoded_KE = encoded.table if encoded else tables[0][:0]
                block_BE = _merge(encoded_KE, rows - start, tables, source_N[block], row_N[block])
                check_finite(block_BE, self.name)
                if start == num_done:  # E is known from here on
                    self._require_space((num_items - num_done) * block_BE.shape[1] * 4)
                now = time.perf_counter()
                with self._writing():
                    part.append(block_BE, num_truncated=num_truncated, seconds=now - last)
                last, rate = now, num_encoded / (now - began)
                _log.info("%s: %d of %d, %.0f a second", self.what, part.num_rows, num_items, rate)
        if num_cut:
            _log.info("%s: %d were longer than the model takes and were cut", self.what, num_cut)

    def _require_space(self, num_bytes: int) -> None:
        free, wanted = shutil.disk_usage(self.folder).free, FREE_SHARE * num_bytes
        if free < wanted:
            raise MachineError(
                f"{self.folder}: {wanted / 1e9:.1f} GB are needed to keep {self.what}, {free / 1e9:.1f} GB are free. "
                f"Free some space, or {self.advice}."
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Say what to do if the disk refuses. Encoding stays outside: its errors are about items."""
        try:
            yield
        except OSError as error:
            raise MachineError(
                f"{self.folder}: {self.what} can't be written: {error}. Free some space, choose another output folder, "
                f"or {self.advice}."
            ) from error


class _Saved(NamedTuple):
    """Whole blocks of a folder, from its first row on."""

    folder: Path
    items: str = ""  # hash of the items of the set; empty if the folder holds none of this key
    num_rows: int = 0  # in whole blocks
    num_blocks: int = 0
    reason: str = ""  # why there are no more; empty if nothing was ever there


def _read_blocks(folder: Path, key: Key) -> _Saved:
    """Return the whole blocks of a folder: made of the key, and with the bytes that their lines promise.

    Rows behind a damaged block don't count: bits rarely rot, and resuming needs the beginning alone.
    """
    saved = _Saved(folder)
    if not (folder / BLOCKS_FILE).is_file():
        return saved
    try:
        head, *blocks = _read_lines(folder)
        if head["format"] != FORMAT:
            return saved._replace(reason="another version of the file format")
        if changed := changed_parts(head["key"], key):
            return saved._replace(reason=f"changed: {', '.join(changed)}")
        if _hash(np.load(folder / IDS_FILE)) != head["items"]:
            return saved._replace(reason=f"{IDS_FILE} is damaged")
        saved = saved._replace(items=head["items"])
        with (folder / VECTORS_FILE).open("rb") as vectors:
            header = vectors.read(HEADER_BYTES)
            for block in blocks:
                content = vectors.read(block["bytes"])
                is_whole = header == _header(head["rows"], block["bytes"] // (4 * block["rows"]))
                if not is_whole or hashlib.sha256(content).hexdigest() != block["sha256"]:
                    return saved._replace(reason=f"{VECTORS_FILE} is damaged")
                saved = saved._replace(num_rows=saved.num_rows + block["rows"], num_blocks=saved.num_blocks + 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        return saved._replace(reason=f"{folder.name} can't be read: {error}")
    return saved


def _read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the head and the blocks of a set, without a last line that a kill has cut."""
    lines = (folder / BLOCKS_FILE).read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def _find_rows(ids_N: NDArray[np.int64], sources: Sequence[_Saved]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return for each item which source holds its vector, -1 for none, and in which row; (N,) each."""
    source_N, row_N = np.full(len(ids_N), -1, dtype=np.int32), np.zeros(len(ids_N), dtype=np.int64)
    for number, source in enumerate(sources):
        ids_S = np.load(source.folder / IDS_FILE)[: source.num_rows]
        order = np.argsort(ids_S, kind="stable")
        nearest_N = order[np.minimum(np.searchsorted(ids_S, ids_N, sorter=order), len(ids_S) - 1)]
        is_here = (ids_S[nearest_N] == ids_N) & (source_N < 0)
        source_N[is_here], row_N[is_here] = number, nearest_N[is_here]
    return source_N, row_N


def _merge(
    encoded_KE: NDArray[np.float32],
    encoded_K: NDArray[np.int64],
    tables: Sequence[NDArray[np.float32]],
    source_B: NDArray[np.int32],
    row_B: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Return a block of vectors, K of them encoded, the others copied from tables.

    Args:
        encoded_K: Where in the block the encoded ones belong.
        source_B: Table of each vector of the block, -1 if it was encoded.
        row_B: Its row there.
    """
    if len(encoded_KE) == len(source_B):  # nearly always: no copy of the block
        return encoded_KE
    block_BE = np.empty((len(source_B), encoded_KE.shape[1]), dtype=np.float32)
    block_BE[encoded_K] = encoded_KE
    for number, table in enumerate(tables):
        is_there_B = source_B == number
        block_BE[is_there_B] = table[row_B[is_there_B]]
    return block_BE


class _Part:
    """A set that grows in a folder of its own, which this process has locked.

    It continues an unfinished part whose process is gone; the lock of a dead process is free.
    """

    def __init__(self, path: Path, key: Key, ids_N: NDArray[np.int64]) -> None:
        self.num_rows = 0
        self._num_items = len(ids_N)
        self._vectors: BinaryIO
        unfinished = sorted(path.parent.glob(f".{path.name}.*.part"))
        new = (path.with_name(f".{path.name}.{secrets.token_hex(4)}.part") for _ in count())
        for self._folder in chain(unfinished, new):
            if self._folder not in unfinished:
                self._folder.mkdir(parents=True)
            with suppress(FileNotFoundError):  # its process has published it in between
                self._lines = (self._folder / BLOCKS_FILE).open("ab")
                if self._lock():
                    break
                self._lines.close()
        saved = _read_blocks(self._folder, key)
        if saved.num_rows and saved.items == _hash(ids_N):
            # Cut both files behind the last whole block.
            lines = (self._folder / BLOCKS_FILE).read_bytes().split(b"\n")[: saved.num_blocks + 1]
            self._lines.truncate(sum(len(line) + 1 for line in lines))
            end = HEADER_BYTES + sum(json.loads(line)["bytes"] for line in lines[1:])
            self._vectors = (self._folder / VECTORS_FILE).open("r+b")
            self._vectors.truncate(end)
            self._vectors.seek(end)
            self.num_rows = saved.num_rows
        else:
            self._lines.truncate(0)
            np.save(self._folder / IDS_FILE, ids_N)
            fsync_path(self._folder / IDS_FILE)
            self._vectors = (self._folder / VECTORS_FILE).open("wb")
            self._append_line({"format": FORMAT, "rows": len(ids_N), "items": _hash(ids_N), "key": key})

    def _lock(self) -> bool:
        """Lock the part; return False if another process has it, or has had it and it is gone by now."""
        try:
            fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # Two processes may then write one part, and its hashes show it.
            _log.debug("%s lies on a file system without locks: %s", self._folder, error)
        # Between opening and locking the part may have been published: this is then the file of a finished set.
        return os.path.samestat(os.fstat(self._lines.fileno()), (self._folder / BLOCKS_FILE).stat())

    def append(self, vectors_BE: NDArray[np.float32], *, num_truncated: int, seconds: float) -> None:
        """Append a block, then the line that makes it count."""
        rows, dim = vectors_BE.shape
        content = np.ascontiguousarray(vectors_BE, dtype="<f4").data
        if not self.num_rows:
            self._vectors.write(_header(self._num_items, dim))
        self._vectors.write(content)
        self._vectors.flush()
        os.fsync(self._vectors.fileno())
        block = {"rows": rows, "bytes": content.nbytes, "sha256": hashlib.sha256(content).hexdigest()}
        self._append_line({**block, "num_truncated": num_truncated, "seconds": round(seconds, 3)})
        self.num_rows += rows

    def publish(self, path: Path) -> None:
        """Give the finished set its name; what had the name before goes away."""
        assert self.num_rows == self._num_items, "all blocks are there"
        fsync_path(self._folder)
        while True:
            # No system renames a folder over one that holds files. Whoever has mapped the old files keeps them.
            with suppress(FileNotFoundError):
                path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}.old"))
            try:
                self._folder.rename(path)
                break
            except OSError:
                if not path.exists():
                    raise
                # Another process has published the same set in between: it goes the way of the old one.
        fsync_path(path.parent)
        for old in path.parent.glob(f".{path.name}.*.old"):
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Close the files, which frees the lock. A part without a block isn't worth keeping."""
        self._vectors.close()
        if not self.num_rows:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._lines.close()

    def _append_line(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line, sort_keys=True).encode() + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())


def _header(num_rows: int, dim: int) -> bytes:
    """Return what numpy's files begin with: 128 bytes, whatever the numbers."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (num_rows, dim)})
    return header.getvalue()


HEADER_BYTES = len(_header(1, 1))


def _hash(ids_N: NDArray[np.int64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(ids_N, dtype="<i8").data).hexdigest()
