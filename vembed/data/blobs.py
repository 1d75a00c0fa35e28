"""The bytes of pictures that a data set brings along: a few in memory, many in an unnamed file that the system maps."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
from array import array
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from vembed.data.column_files import mapped_columns, new_columns
from vembed.errors import MachineError
from vembed.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

BLOB_BYTES = 16 * 2**20
"""Bytes of pictures that are Python objects at any one time."""

MAX_HELD_BYTES = 256 * 2**20
"""Bytes of pictures of one source that stay in memory; those of a larger source go to a file, all of them."""


class Blobs:
    """Bytes by number, each a view of the memory or file that holds them all: who keeps many keeps no copies."""

    files: Sequence[MappedFile] = ()  # of users that they lie in: none

    def __init__(self, chunks: Sequence[Any]) -> None:
        filled = [chunk for chunk in chunks if len(chunk)]
        self._starts = np.cumsum([0, *map(len, filled)])
        self._offsets = [np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset :] for chunk in filled]
        self._data = [memoryview(chunk.buffers()[2] or b"").cast("B").toreadonly() for chunk in filled]

    def __len__(self) -> int:
        """Return how many there are."""
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> memoryview:
        """Return the bytes of a number, counted from 0."""
        chunk = int(np.searchsorted(self._starts, number, side="right")) - 1
        place = number - int(self._starts[chunk])
        begin, end = self._offsets[chunk][place : place + 2].tolist()
        return self._data[chunk][begin:end]


@cache
def _most_open_files() -> int:
    """Raise the limit of open files as far as the process may: by default a thousand are too few for many shards."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


class MappedFile(mmap.mmap):
    """A file that is mapped to read.

    Attributes:
        path: Where it lies.
    """

    path: str

    @classmethod
    def of(cls, path: Path | str) -> MappedFile:
        """Map a file that holds something; it stays open for as long as one of its views is used.

        Raises:
            MachineError: Too many files are open.
            OSError: It is no regular file, or the system refuses.
            ValueError: It is empty.
        """
        most = _most_open_files()
        try:
            with open_regular(path) as file:
                mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise MachineError(
                f"{path}: this process may open {most:,} files and has no more left; raise the limit with "
                f"'ulimit -Hn', or pack the data into fewer and larger files"
            ) from error
        mapped.path = os.path.realpath(path)
        return mapped

    def place(self, view: memoryview) -> int:
        """Return where in the file a view of it begins."""
        start, first = (np.frombuffer(each, np.uint8).ctypes.data for each in (view, self))
        return int(start - first)


class Spans:
    """Bytes by number that lie in users' files as they are; nothing is copied.

    Args:
        files: The files, mapped.
        places_N3: Number of the file, first byte and end of each.
    """

    def __init__(self, files: Sequence[MappedFile], places_N3: NDArray[np.int64]) -> None:
        self.files = files
        self.places_N3 = places_N3

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.places_N3)

    def __getitem__(self, number: int) -> memoryview:
        """Return the bytes of a number, counted from 0."""
        file, begin, end = self.places_N3[number].tolist()
        return memoryview(self.files[file])[begin:end]


class JoinedBlobs:
    """Bytes by number of several sets of them, one after the other, where they lie."""

    def __init__(self, parts: Sequence[Blobs | Spans | JoinedBlobs]) -> None:
        self.files: Sequence[MappedFile] = [file for part in parts for file in part.files]
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        """Return how many there are."""
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> memoryview:
        """Return the bytes of a number, counted from 0."""
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._parts[part][number - int(self._starts[part])]


def mapped_blobs(folder: Path, count: int, files: Sequence[str]) -> Blobs | Spans:
    """Return what a `BlobWriter` wrote into a folder.

    Args:
        files: Of `Spans`.

    Raises:
        OSError: A file is missing.
        ValueError: A file is too long or too short.
    """
    import pyarrow as pa

    if not files:
        return Blobs([mapped_columns({"blob": pa.large_binary()}, folder, count)["blob"]])
    spans = mapped_columns({"span": pa.int64()}, folder, 3 * count)["span"].to_numpy()
    return Spans([MappedFile.of(file) for file in files], spans.reshape(-1, 3))


class BlobWriter:
    """Collect bytes; of those that are a view of a `MappedFile`, where they lie.

    Args:
        folder: Where they go; None keeps few in memory and many in a file without a name, so that nothing of it
            outlives the process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        import pyarrow as pa

        self._folder = folder
        self._column = None if folder is None else new_columns({"blob": pa.large_binary()}, folder)["blob"]
        self._blobs: list[bytes | memoryview] = []
        self._num_bytes = 0  # of `_blobs`
        self._chunks: list[Any] = []
        self._num_held = 0  # bytes of `_chunks`
        self._file: IO[bytes] | None = None
        self._writer: Any = None
        self._files: dict[str, tuple[int, MappedFile]] = {}
        self._spans = array("q")

    def add(self, blob: bytes | memoryview) -> None:
        """Append one.

        Raises:
            MachineError: The disk of the file is full.
        """
        if isinstance(blob, memoryview) and isinstance(blob.obj, MappedFile):
            file = blob.obj
            number, _ = self._files.setdefault(file.path, (len(self._files), file))
            begin = file.place(blob)
            self._spans.extend((number, begin, begin + len(blob)))
            return
        self._blobs.append(blob)
        self._num_bytes += len(blob)
        if self._num_bytes >= BLOB_BYTES:
            self._flush()

    def finish(self) -> Blobs | Spans:
        """Return all of them, in order.

        Raises:
            MachineError: The disk of the file is full.
        """
        import pyarrow as pa

        if self._files:
            assert not self._blobs, "a source holds its pictures in one way"
            spans, files = np.array(self._spans, dtype=np.int64), [file for _, file in self._files.values()]
            if self._folder is not None:
                column = new_columns({"span": pa.int64()}, self._folder)["span"]
                column.append(pa.array(spans))
                spans = column.finish().to_numpy()
            return Spans(files, spans.reshape(-1, 3))
        self._flush()
        if self._column is not None:
            return Blobs([self._column.finish()])
        if self._file is None:
            return Blobs(self._chunks)
        with _writing():
            self._writer.close()
            self._file.flush()
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file.close()
        return Blobs(pa.ipc.open_file(pa.py_buffer(mapped)).read_all()["bytes"].chunks)

    def _flush(self) -> None:
        import pyarrow as pa

        chunk = pa.array(self._blobs, type=pa.large_binary())
        self._blobs, num_bytes, self._num_bytes = [], self._num_bytes, 0
        if self._column is not None:
            self._column.append(chunk)
            return
        self._chunks.append(chunk)
        self._num_held += num_bytes
        if self._num_held <= MAX_HELD_BYTES and self._file is None:
            return
        schema = pa.schema([("bytes", pa.large_binary())])
        with _writing():
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `finish`
                self._writer = pa.ipc.new_file(self._file, schema)
            for chunk in self._chunks:
                self._writer.write_batch(pa.record_batch([chunk], schema=schema))
        self._chunks = []


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"the pictures in the data can't be kept in {tempfile.gettempdir()}: {error.strerror or error}; name a "
            "folder with room for them in the environment variable TMPDIR"
        ) from error
