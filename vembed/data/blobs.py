"""The bytes of pictures that a data set brings along: a few in memory, many in an unnamed file that the system maps."""

from __future__ import annotations

import mmap
import tempfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from vembed.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOB_BYTES = 16 * 2**20
"""Bytes of pictures that are Python objects at any one time."""

MAX_HELD_BYTES = 256 * 2**20
"""Bytes of pictures of one source that stay in memory; those of a larger source go to a file, all of them."""


class BlobWriter:
    """Collect bytes as an Arrow array; the file has no name, so that nothing of it outlives the process."""

    def __init__(self) -> None:
        self._blobs: list[bytes] = []
        self._num_bytes = 0  # of `_blobs`
        self._chunks: list[Any] = []
        self._num_held = 0  # bytes of `_chunks`
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    def add(self, blob: bytes) -> None:
        """Append one.

        Raises:
            MachineError: The disk of the file is full.
        """
        self._blobs.append(blob)
        self._num_bytes += len(blob)
        if self._num_bytes >= BLOB_BYTES:
            self._flush()

    def finish(self) -> Any:
        """Return all of them, in order, as a chunked Arrow array.

        Raises:
            MachineError: The disk of the file is full.
        """
        import pyarrow as pa

        self._flush()
        if self._file is None:
            return pa.chunked_array(self._chunks, type=pa.large_binary())
        with _writing():
            self._writer.close()
            self._file.flush()
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file.close()
        return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()["bytes"]

    def _flush(self) -> None:
        import pyarrow as pa

        self._chunks.append(pa.array(self._blobs, type=pa.large_binary()))
        self._num_held += self._num_bytes
        self._blobs, self._num_bytes = [], 0
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
