"""Vectors of items on disk: encoded once, checked by content, continued after the last whole block when killed.

    NAME/vectors.npy   (N, E) float32, row i is item i
    NAME/ids.npy       (N,) int64, the content of each item
    NAME/blocks.jsonl  the key (what the vectors are made of), then one line per block: its rows, bytes and SHA-256
    .NAME.*.part/      the same files while they grow

and where each item has several vectors:

    NAME/vectors.npy   (V, E) float32, all vectors of item 0, then those of item 1, ...
    NAME/offsets.npy   (N + 1,) int64, where the vectors of item i start; a block's line has their lengths

1. If key, items and hashes are the wanted ones, the file is mapped into memory as it is.
2. Otherwise it is made block by block. Rows that a folder of the same key holds are copied: those of a smaller set, of
   other items under the same name, or of this set up to a damaged block. All ranks together encode the rest.
3. The first rank appends a block, forces it to disk, and only then appends its line. A kill therefore leaves whole
   blocks and at most the beginning of one more, which the next start cuts off.
4. With the last block in place the part is renamed to NAME. NAME never changes again, only another folder can take its
   name, so a process that has mapped it keeps what it mapped.

A block is encoded by itself, so a resumed file has the bytes of one that was never interrupted.

Cost: every start reads the vectors once to hash them. Memory: two blocks on the first rank, 12 bytes per item on all
(20 where each has several vectors).
Shape legend: N items, V vectors of all of them, E numbers per vector, B items per block.
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
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeAlias

import numpy as np

from vembed.batch import Ragged
from vembed.errors import MachineError
from vembed.files import BROKEN_ARRAY, fsync_path
from vembed.vectors.encode import rows_of, values_of
from vembed.vectors.index import check_finite
from vembed.vectors.provenance import changed_parts, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.distributed.ranks import Ranks
    from vembed.vectors.encode import Encoded, Vectors
    from vembed.vectors.provenance import Key

VECTORS_FILE, OFFSETS_FILE, IDS_FILE, BLOCKS_FILE = "vectors.npy", "offsets.npy", "ids.npy", "blocks.jsonl"

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


class Progress(NamedTuple):
    """State of a set that is being made."""

    num_rows: int  # on disk
    num_truncated: int = 0  # of the items that this call encoded
    rate: float = 0.0  # of this call, items a second


class RowFile(NamedTuple):
    """The file of all rows of a set: vectors, or any bytes."""

    name: str
    dtype: str

    def header(self, num_rows: int, dim: int) -> bytes:
        """Return what numpy's files begin with: 128 bytes, whatever the numbers. Nothing stands before bytes."""
        if self.dtype != VECTORS.dtype:
            return b""
        header = BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": self.dtype, "fortran_order": False, "shape": (num_rows, dim)}
        )
        return header.getvalue()


VECTORS = RowFile(VECTORS_FILE, "<f4")
BYTES = RowFile("rows.bin", "|u1")
"""Rows of bytes, which an `Encode` yields as ragged (V, 1); small copies of pictures are such a set."""

HEADER_BYTES = len(VECTORS.header(1, 1))


@dataclass(frozen=True, slots=True)
class VectorStore:
    """Vectors of one kind in a folder, which several runs may share."""

    folder: Path  # made with the first block
    name: str  # of the set
    key: Key  # what the vectors are made of, beside the items
    what: str  # for messages: "the teacher's vectors"
    advice: str  # for messages: what to do if the disk is full, beside freeing space
    shared: bool = False  # whether sets of other keys and items stay: their hashes become part of the name
    file: RowFile = VECTORS

    def get(self, items: Items, encode: Encode, ranks: Ranks) -> NDArray[np.float32]:
        """Return the vectors of one item or more, one for each, (N, E), mapped from disk; encode what isn't there.

        All ranks call it, with the same items.

        Raises:
            MachineError: The disk is full or refuses, or a process doesn't see the folder.
            NonFiniteError: A vector holds NaN or infinity. Its block isn't kept.
        """
        progress = Progress(0)
        with closing(self.make(items, encode, ranks)) as blocks:
            next(blocks)
            for progress in blocks:
                if ranks.is_first:
                    of = len(items.ids)
                    _log.info("%s: %d of %d, %.0f a second", self.what, progress.num_rows, of, progress.rate)
        if progress.num_truncated:
            _log.info("%s: %d were longer than the model takes and were cut", self.what, progress.num_truncated)
        vectors_NE: NDArray[np.float32] = np.load(self.path(items) / self.file.name, mmap_mode="r")
        assert not (self.path(items) / OFFSETS_FILE).exists(), "an encoder with one vector for each item"
        return vectors_NE

    def make(
        self, items: Items, encode: Encode, ranks: Ranks, ends: Sequence[int] | None = None
    ) -> Generator[Progress]:
        """Make what isn't there of a set, so that its files lie in `path(items)`; yield at the start and after a block.

        All ranks call it as they do `get`, and close it where they don't read it to its end.

        Args:
            ends: The rows behind the last one of each block; by default a block has `BLOCK_ROWS`.

        Raises:
            MachineError: The disk is full or refuses, or a process doesn't see the folder.
            NonFiniteError: A vector holds NaN or infinity. Its block isn't kept.
        """
        path, num_items = self.path(items), len(items.ids)
        part: _Part | None = None  # only on the first rank, and only if something is missing

        def survey() -> list[_Saved] | None:
            """Open a part, and return the folders to copy rows from; None if all vectors are there."""
            nonlocal part
            saved, wanted = _read_blocks(path, self.key, self.file), _hash(items.ids)
            if saved.items == wanted and saved.num_rows == num_items:
                if saved.is_closed:
                    _log.info("%s: %d unchanged, read from %s", self.what, saved.num_rows, path)
                    return None
                saved = saved._replace(reason=f"{OFFSETS_FILE} is damaged")
            # In a shared folder other sets of the same key hold rows that are wanted here, as of smaller data.
            siblings = set(self.folder.glob(f"{self._stem}-*")) - {path} if self.shared else set()
            with self._writing():
                part = _Part(path, self.key, self.file, items.ids)
            reason = saved.reason or ("changed: items" if saved.items not in ("", wanted) or part.stale else "")
            again = f" again ({reason})" if reason else ""
            _log.info("%s: making %d of %d%s: %s", self.what, num_items - part.num_rows, num_items, again, path)
            others = (_read_blocks(sibling, self.key, self.file) for sibling in sorted(siblings))
            return [source for source in (saved, *part.stale, *others) if source.num_rows]

        # The first rank alone looks at the disk: others could see another state of it, and would encode other blocks.
        sources = ranks.from_first(survey)
        try:
            if sources is None:
                yield Progress(num_items)
            else:
                bounds = [*range(BLOCK_ROWS, num_items, BLOCK_ROWS), num_items] if ends is None else ends
                yield from self._fill(part, items, encode, ranks, sources, bounds)
                with self._writing():
                    ranks.from_first(lambda: part.publish(path) if part else None)
        finally:
            if part is not None:
                part.close()
        # Without this, a folder on a disk of one machine would be reported by numpy, on another machine.
        sees = ranks.gather_objects((path / self.file.name).is_file())
        if not all(sees):
            raise MachineError(
                f"{path}: process 0 sees this folder and process {sees.index(False)} doesn't; it must be on a file "
                f"system that all machines share, or {self.advice}"
            )

    def path(self, items: Items) -> Path:
        """Return the folder of a set."""
        return self.folder / (f"{self._stem}-{_hash(items.ids)[:16]}" if self.shared else self.name)

    def totals(self, items: Items) -> tuple[int, float]:
        """Return how many items of a set were cut, and the seconds of encoding it, in all runs together."""
        blocks = [json.loads(line) for line in _read_lines(self.path(items))[1:]]
        return sum(block["num_truncated"] for block in blocks), sum(block["seconds"] for block in blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of vectors of this key on disk, of unfinished sets too."""
        return sum(path.stat().st_size for path in self.folder.glob(f"*{self._stem}*/{self.file.name}"))

    @property
    def _stem(self) -> str:
        return f"{self.name}-{digest(self.key)[:16]}" if self.shared else self.name

    def _fill(
        self,
        part: _Part | None,
        items: Items,
        encode: Encode,
        ranks: Ranks,
        sources: Sequence[_Saved],
        ends: Sequence[int],
    ) -> Generator[Progress]:
        """Append the missing blocks. All ranks encode; the first one has the part and writes."""
        num_items = len(items.ids)
        num_done = ranks.from_first(lambda: part.num_rows if part else 0)
        yield Progress(num_done)
        # All ranks map the sources and come to the same list of what is to be encoded.
        source_N, row_N = _find_rows(items.ids, sources)
        tables = [source.read() for source in sources]
        blocks = [slice(*bounds) for bounds in pairwise([num_done, *(end for end in ends if end > num_done)])]
        to_encode = [block.start + np.flatnonzero(source_N[block] < 0) for block in blocks]
        num_encoded = num_cut = 0
        began = last = time.perf_counter()
        # One stream over all blocks, so the encoder works on the next one while this one is hashed and written.
        with closing(encode(items.take(rows) for rows in to_encode if len(rows))) as stream:
            for block, rows in zip(blocks, to_encode, strict=True):
                encoded = next(stream) if len(rows) else None
                # Each rank counts its share of a block; the number belongs to the block, whoever encoded it.
                num_truncated = sum(ranks.gather_objects(encoded.num_truncated if encoded else 0))
                num_encoded, num_cut = num_encoded + len(rows), num_cut + num_truncated
                now = time.perf_counter()
                if part is not None:
                    encoded_K = rows - block.start
                    vectors = _merge(encoded and encoded.vectors, encoded_K, tables, source_N[block], row_N[block])
                    values_VE = values_of(vectors)
                    check_finite(values_VE, self.name)
                    if block.start == num_done:  # the size of a row is known from here on
                        num_bytes = (num_items - num_done) * values_VE.nbytes // (block.stop - num_done)
                        free, wanted = shutil.disk_usage(self.folder).free, FREE_SHARE * num_bytes
                        if free < wanted:
                            raise MachineError(
                                f"{self.folder}: {wanted / 1e9:.1f} GB are needed to keep {self.what}, "
                                f"{free / 1e9:.1f} GB are free. Free some space, or {self.advice}."
                            )
                    # A block that is a copy keeps its numbers; of mixed blocks only what was encoded now is known.
                    copied = _copied_block(sources, source_N[block], row_N[block]) or {"num_truncated": 0, "seconds": 0}
                    with self._writing():
                        part.append(
                            vectors,
                            num_truncated=num_truncated + copied["num_truncated"],
                            seconds=now - last + copied["seconds"],
                        )
                last = now
                yield Progress(block.stop, num_cut, num_encoded / (now - began))

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
    file: RowFile
    items: str = ""  # hash of the items of the set; empty if the folder holds none of this key
    dim: int = 0  # numbers per vector
    blocks: tuple[dict[str, Any], ...] = ()  # the lines of the whole ones
    reason: str = ""  # why there are no more; empty if nothing was ever there

    @property
    def num_rows(self) -> int:
        """Items in whole blocks."""
        return sum(block["rows"] for block in self.blocks)

    @property
    def is_closed(self) -> bool:
        """True unless a finished set of several vectors per item lacks the header or offsets that its lines promise."""
        lengths = _lengths(self.blocks)
        if lengths is None:
            return True
        header = self.file.header(int(lengths.sum()), self.dim)
        try:
            with (self.folder / self.file.name).open("rb") as rows:
                return rows.read(len(header)) == header and (self.folder / OFFSETS_FILE).read_bytes() == _npy(lengths)
        except OSError:
            return False

    def read(self) -> Vectors:
        """Return the vectors of the whole blocks, mapped: the file behind them may be damaged, or not yet written."""
        lengths = _lengths(self.blocks)
        shape = (self.num_rows if lengths is None else int(lengths.sum()), self.dim)
        path, start = self.folder / self.file.name, len(self.file.header(1, 1))
        values: NDArray[Any] = np.empty(shape, self.file.dtype)
        if shape[0]:  # no empty file can be mapped
            values = np.memmap(path, self.file.dtype, "r", start, shape)
        return values if lengths is None else Ragged(values, _offsets(lengths))


def _read_blocks(folder: Path, key: Key, file: RowFile) -> _Saved:
    """Return the whole blocks of a folder: made of the key, and with the bytes that their lines promise.

    Rows behind a damaged block don't count: bits rarely rot, and resuming needs the beginning alone.
    """
    saved = _Saved(folder, file)
    if not (folder / BLOCKS_FILE).is_file():
        return saved
    blocks: list[dict[str, Any]] = []
    reason = ""
    try:
        first, *lines = _read_lines(folder)
        head = json.loads(first)
        if head["format"] != FORMAT:
            return saved._replace(reason="another version of the file format")
        if changed := changed_parts(head["key"], key):
            return saved._replace(reason=f"changed: {', '.join(changed)}")
        if _hash(np.load(folder / IDS_FILE, mmap_mode="r")) != head["items"]:
            return saved._replace(reason=f"{IDS_FILE} is damaged")
        saved = saved._replace(items=head["items"])
        num_bytes = (folder / file.name).stat().st_size
        with (folder / file.name).open("rb") as rows:
            header = rows.read(len(file.header(1, 1)))
            header_rows, dim = 0, 1
            if header:
                numpy_file = BytesIO(header)
                np.lib.format.read_magic(numpy_file)
                (header_rows, dim), _, _ = np.lib.format.read_array_header_1_0(numpy_file)
            saved = saved._replace(dim=dim)
            for line in lines:
                block = json.loads(line)
                if not 0 <= block["bytes"] <= num_bytes:  # nothing is allocated for what a damaged line says
                    reason = f"{BLOCKS_FILE} is damaged"
                    break
                content, lengths = rows.read(block["bytes"]), block.get("lengths")
                # The number of vectors is known at the end alone: an unfinished file says the number of items.
                num_vectors, total = (block["rows"], head["rows"]) if lengths is None else (sum(lengths), header_rows)
                is_whole = header == file.header(total, dim)
                is_whole = is_whole and len(content) == num_vectors * dim * np.dtype(file.dtype).itemsize
                if not is_whole or _sha256(content, lengths) != block["sha256"]:
                    reason = f"{file.name} is damaged"
                    break
                blocks.append(block)
    except (*BROKEN_ARRAY, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{folder.name} can't be read: {error}"
    return saved._replace(blocks=tuple(blocks), reason=reason)


def _read_lines(folder: Path) -> list[bytes]:
    """Return the lines of the head and of the blocks of a set, without a last one that a kill has cut."""
    return (folder / BLOCKS_FILE).read_bytes().split(b"\n")[:-1]


def _lengths(blocks: Sequence[dict[str, Any]]) -> NDArray[np.int64] | None:
    """Return how many vectors each item of some blocks has; None if each has one."""
    if not blocks or "lengths" not in blocks[0]:
        return None
    return np.concatenate([np.array(block["lengths"], dtype=np.int64) for block in blocks])


def _offsets(lengths_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths_N)])


def _npy(lengths_N: NDArray[np.int64]) -> bytes:
    """Return the bytes of offsets.npy."""
    content = BytesIO()
    np.save(content, _offsets(lengths_N).astype("<i8", copy=False))
    return content.getvalue()


def _sha256(content: bytes | memoryview, lengths: Sequence[int] | None) -> str:
    """Return the hash of a block, the lengths of its items among it where they have several vectors."""
    total = hashlib.sha256(content)
    if lengths is not None:
        total.update(np.array(lengths, dtype="<i8").data)
    return total.hexdigest()


def _find_rows(ids_N: NDArray[np.int64], sources: Sequence[_Saved]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return for each item which source holds its vector, -1 for none, and in which row; (N,) each."""
    source_N, row_N = np.full(len(ids_N), -1, dtype=np.int32), np.zeros(len(ids_N), dtype=np.int64)
    for number, source in enumerate(sources):
        ids_S = np.load(source.folder / IDS_FILE)[: source.num_rows]
        # By sorted search: 12 bytes an item, where a dict of a hundred million ids would take ten times that.
        order = np.argsort(ids_S, kind="stable")
        nearest_N = order[np.minimum(np.searchsorted(ids_S, ids_N, sorter=order), len(ids_S) - 1)]
        is_here = (ids_S[nearest_N] == ids_N) & (source_N < 0)
        source_N[is_here], row_N[is_here] = number, nearest_N[is_here]
    return source_N, row_N


def _copied_block(
    sources: Sequence[_Saved], source_B: NDArray[np.int32], row_B: NDArray[np.int64]
) -> dict[str, Any] | None:
    """Return the line of a source's block of which these rows are a copy; None if they are not of one."""
    # All rows from one source, in order and without a gap, and that source has a block that begins and ends with them.
    number, first = int(source_B[0]), int(row_B[0])
    if number < 0 or (source_B != number).any() or (row_B != first + np.arange(len(row_B))).any():
        return None
    start = 0
    for block in sources[number].blocks:
        if start == first:
            return block if block["rows"] == len(row_B) else None
        start += block["rows"]
    return None


def _merge(
    encoded: Vectors | None,
    encoded_K: NDArray[np.int64],
    tables: Sequence[Vectors],
    source_B: NDArray[np.int32],
    row_B: NDArray[np.int64],
) -> Vectors:
    """Return a block of vectors, K of them encoded, the others copied from tables.

    Args:
        encoded_K: Where in the block the encoded ones belong.
        source_B: Table of each vector of the block, -1 if it was encoded.
        row_B: Its row there.
    """
    if encoded is not None and len(encoded_K) == len(source_B):  # nearly always: no copy of the block
        return encoded
    pieces, positions = ([], []) if encoded is None else ([encoded], [encoded_K])
    for number in np.unique(source_B[source_B >= 0]).tolist():
        positions.append(np.flatnonzero(source_B == number))
        pieces.append(rows_of(tables[number], row_B[positions[-1]]))
    order_B = np.argsort(np.concatenate(positions))
    ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
    if ragged:
        return Ragged.concat(ragged).take(order_B)
    return np.concatenate([values_of(piece) for piece in pieces])[order_B]


class _Part:
    """A set that grows in a folder of its own, which this process has locked.

    It continues an unfinished part whose process is gone; the lock of a dead process is free. Those of other items are
    `stale`: their rows are copied, and they go away when this one is finished.
    """

    def __init__(self, path: Path, key: Key, file: RowFile, ids_N: NDArray[np.int64]) -> None:
        self._num_items, self._file = len(ids_N), file
        self._locked: list[BinaryIO] = []
        self.stale: list[_Saved] = []
        saved, wanted = None, _hash(ids_N)
        # Several runs may fill one name at a time, each its part under its lock. Whoever comes later takes up the
        # longest part that nobody holds; the locks of the others are kept too, until this one is closed.
        for folder in sorted(path.parent.glob(f".{path.name}.*.part")):
            lines = self._lock(folder)
            if lines is None:
                continue
            unfinished = _read_blocks(folder, key, file)
            if unfinished.num_rows and unfinished.items != wanted:
                self.stale.append(unfinished)
            elif saved is None or unfinished.num_rows > saved.num_rows:
                saved, self._lines = unfinished, lines
        # Between making and locking a folder another process may have taken it up: then another is made.
        while saved is None:
            folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
            folder.mkdir(parents=True)
            if (lines := self._lock(folder)) is not None:
                saved, self._lines = _Saved(folder, file), lines
        self._folder, self._blocks, self._dim = saved.folder, [*saved.blocks], saved.dim
        if self._blocks:
            # Cut both files behind the last whole block.
            self._lines.truncate(sum(len(line) + 1 for line in _read_lines(self._folder)[: len(self._blocks) + 1]))
            end = len(file.header(1, 1)) + sum(block["bytes"] for block in self._blocks)
            self._rows: BinaryIO = (self._folder / file.name).open("r+b")
            self._rows.truncate(end)
            self._rows.seek(end)
        else:
            self._lines.truncate(0)
            np.save(self._folder / IDS_FILE, ids_N)
            fsync_path(self._folder / IDS_FILE)
            self._rows = (self._folder / file.name).open("wb")
            self._append_line({"format": FORMAT, "rows": len(ids_N), "items": wanted, "key": key})

    @property
    def num_rows(self) -> int:
        """Items in whole blocks."""
        return sum(block["rows"] for block in self._blocks)

    def _lock(self, folder: Path) -> BinaryIO | None:
        """Lock a part; return None if another process has it, or has had it and it is gone by now."""
        try:
            lines = (folder / BLOCKS_FILE).open("ab")
        except FileNotFoundError:  # its process has published it in between
            return None
        self._locked.append(lines)
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:  # Two processes may then write one part, and its hashes show it.
            _log.debug("%s lies on a file system without locks: %s", folder, error)
        # Between opening and locking the part may have been published: this is then the file of a finished set.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lines.fileno()), (folder / BLOCKS_FILE).stat()):
                return lines
        return None

    def append(self, vectors: Vectors, *, num_truncated: int, seconds: float) -> None:
        """Append a block, then the line that makes it count."""
        values_VE = np.ascontiguousarray(values_of(vectors), dtype=self._file.dtype)
        lengths = vectors.lengths.tolist() if isinstance(vectors, Ragged) else None
        if not self._blocks:
            self._dim = values_VE.shape[1]
            self._rows.write(self._file.header(self._num_items, self._dim))
        # The bytes are on disk before the line that promises them: a crash of the machine leaves no line without them.
        self._rows.write(values_VE.data)
        self._rows.flush()
        os.fsync(self._rows.fileno())
        block = {
            "rows": len(values_VE) if lengths is None else len(lengths),
            "bytes": values_VE.nbytes,
            "sha256": _sha256(values_VE.data, lengths),
            "num_truncated": num_truncated,
            "seconds": round(seconds, 3),
            **({} if lengths is None else {"lengths": lengths}),
        }
        self._append_line(block)
        self._blocks.append(block)

    def publish(self, path: Path) -> None:
        """Give the finished set its name; what had the name before goes away."""
        assert self.num_rows == self._num_items, "all blocks are there"
        if (lengths := _lengths(self._blocks)) is not None:
            # Of several vectors the header said the number of items so far; its length is the same for any number.
            self._rows.seek(0)
            self._rows.write(self._file.header(int(lengths.sum()), self._dim))
            self._rows.flush()
            os.fsync(self._rows.fileno())
            (self._folder / OFFSETS_FILE).write_bytes(_npy(lengths))
            fsync_path(self._folder / OFFSETS_FILE)
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
        for old in (*path.parent.glob(f".{path.name}.*.old"), *(stale.folder for stale in self.stale)):
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Close the files, which frees the lock. A part without a block isn't worth keeping."""
        self._rows.close()
        if not self._blocks:
            shutil.rmtree(self._folder, ignore_errors=True)
        for lines in self._locked:
            lines.close()

    def _append_line(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line, sort_keys=True).encode() + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())


def _hash(ids_N: NDArray[np.int64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(ids_N, dtype="<i8").data).hexdigest()
