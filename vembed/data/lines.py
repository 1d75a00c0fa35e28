"""Read a user's file as lines, or as one text piece by piece, in bounded memory: the door of every row file.

What no honest set does ends the reading with a `DataError`, in place of hours or gigabytes: a line of over 64 MiB, a
million blank lines in a row, a gzip file that unpacks to 200 times its size.
"""

from __future__ import annotations

import gzip
import io
import zlib
from codecs import getincrementaldecoder
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from vembed.data.columns import closest
from vembed.errors import DataError, MachineError
from vembed.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_LINE_BYTES = 64 * 2**20
"""Longest line, row of CSV, or object of JSON: a binary file without line ends must not be read into memory whole."""

MAX_BLANK_LINES = 1_000_000
"""Most blank lines in a row."""

MAX_GZIP_RATIO, GZIP_FREE_BYTES = 200, 4 * 2**20
"""Most bytes out of a gzip file for each byte in it, beyond the first few: texts reach 3 to 20, gzip itself 1,032."""

PIECE_BYTES, BLOCK_BYTES = 2**20, 4 * 2**20

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_BROKEN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)


class LineBlock(NamedTuple):
    """Whole lines of a file, next to each other."""

    name: str  # of the file
    first: int  # number of the first line, counted from 1
    num_blank: int  # blank lines right before it
    data: bytes

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line number, line with its end).

        Raises:
            DataError: A line is too long, or too many are blank.
        """
        num_blank = self.num_blank
        for number, line in enumerate(io.BytesIO(self.data), start=self.first):
            if len(line) > MAX_LINE_BYTES:
                raise too_long(f"{self.name}:{number}", "line")
            num_blank = num_blank + 1 if line.isspace() else 0
            if num_blank > MAX_BLANK_LINES:
                msg = f"{self.name}:{number}: over {MAX_BLANK_LINES:,} blank lines in a row; is this a text file?"
                raise DataError(msg)
            yield number, line

    def followed_by(self, data: bytes) -> LineBlock:
        """Return the block of the lines that come next."""
        end = self.data if self.data[-1000:].isspace() else self.data[-1000:]
        filled = len(end.rstrip())
        num_blank = end.count(b"\n", filled) + (-1 if filled else self.num_blank)
        return LineBlock(self.name, self.first + num_ends(self.data), num_blank, data)


def num_ends(data: bytes) -> int:
    """Return how many lines end in some bytes; `bytes.count` takes several times as long."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))


def line_blocks(path: Path) -> Iterator[LineBlock]:
    """Yield all lines of a file, without a byte order mark, in blocks of a few MiB, or of one long line.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    block, rest = LineBlock(path.name, 1, 0, b""), b""
    try:
        with _opened(path) as handle:
            while True:
                piece = handle.read1(BLOCK_BYTES)
                end = piece.rfind(b"\n") + 1
                if not end and piece and len(rest) + len(piece) <= MAX_LINE_BYTES:
                    rest += piece
                    continue
                end = end or len(piece)
                data, rest = b"".join((rest, memoryview(piece)[:end])), piece[end:]
                if data:
                    block = block.followed_by(data if block.data else _without_bom(data, path))
                    yield block
                if not piece:
                    break
    except _BROKEN_GZIP as error:
        raise _broken_gzip(f"{path.name}:{block.followed_by(b'').first}", error) from error


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line with its end), without a byte order mark.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    for block in line_blocks(path):
        yield from block.numbered()


def pieces(path: Path) -> Iterator[str]:
    """Yield a file's text in pieces of about 1 MiB, without a byte order mark.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    decoder = getincrementaldecoder("utf-8")()
    line = 1
    try:
        with _opened(path) as handle:
            piece = _without_bom(handle.read(PIECE_BYTES), path)
            while piece:
                text = decoder.decode(piece)
                line += text.count("\n")
                if text:
                    yield text
                piece = handle.read(PIECE_BYTES)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise DataError(f"{path.name}:{line}: invalid UTF-8") from error
    except _BROKEN_GZIP as error:
        raise _broken_gzip(f"{path.name}:{line}", error) from error


def first_character(path: Path) -> bytes:
    """Return the first byte of a file that is no white space; none where there is none.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    try:
        with _opened(path) as handle:
            piece = _without_bom(handle.read(PIECE_BYTES), path)
            while piece.isspace():
                piece = handle.read(PIECE_BYTES)
            return piece.lstrip()[:1]
    except _BROKEN_GZIP as error:
        raise _broken_gzip(f"{path.name}:1", error) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say of what the system refuses which file or folder it is.

    Raises:
        MachineError: It refused.
    """
    try:
        yield
    except OSError as error:
        raise MachineError(f"can't read {path}: {error.strerror or error}") from error


def nearest_entry(path: Path) -> str:
    """Return ` (did you mean 'x'?)` for the nearest name in the folder of a missing file, or an empty string."""
    with suppress(OSError, ValueError):
        return closest(path.name, (entry.name for entry in path.parent.iterdir()))
    return ""


def too_long(where: str, what: str) -> DataError:
    """Return the error for a line, row or object over the limit."""
    return DataError(f"{where}: a {what} of over {MAX_LINE_BYTES // 2**20} MiB; is this a text file?")


class _Unpacked(io.RawIOBase):
    """The bytes inside a gzip file, refused where they are too many for the file's own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._packed = open_regular(path)
        self._inside = gzip.GzipFile(fileobj=self._packed, mode="rb")
        self._count = 0
        self._broken: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what BufferedReader gives
        filled, data = 0, b"?"
        while data and filled < len(buffer) and not self._broken:
            try:
                data = self._inside.read1(len(buffer) - filled)
            except _BROKEN_GZIP as error:  # what was unpacked before is read first
                self._broken = error
                break
            buffer[filled : filled + len(data)] = data
            filled += len(data)
            self._count += len(data)
            if self._count > max(GZIP_FREE_BYTES, MAX_GZIP_RATIO * self._packed.tell()):
                raise DataError(
                    f"{self._path}: it unpacks to over {MAX_GZIP_RATIO} times its size, as no set of texts does; if "
                    "that is meant, unpack it with gunzip and name the file that comes out"
                )
        if self._broken and not filled:
            raise self._broken
        return filled

    def close(self) -> None:
        if not self.closed:
            self._inside.close()
            self._packed.close()
        super().close()


def _opened(path: Path) -> io.BufferedReader:
    if not path.name.lower().endswith(".gz"):
        return cast("io.BufferedReader", open_regular(path))
    return io.BufferedReader(_Unpacked(path), PIECE_BYTES)


def _without_bom(start: bytes, path: Path) -> bytes:
    if start.startswith(UTF16_BOMS):
        raise DataError(f"{path.name}:1: the file is UTF-16; save it as UTF-8")
    return start.removeprefix(UTF8_BOM)


def _broken_gzip(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: the gzip data is truncated or broken: {error}")
