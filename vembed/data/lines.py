"""Read a text file in bounded memory: as numbered lines, in blocks of them, or as one text piece by piece.

A file, unpacked where it is gzip, is read in blocks of a few MiB that end where a line ends (`line_blocks`). Three
things that no real data set has are refused with a `DataError`, before they cost hours or gigabytes: a line of over
64 MiB, over a million blank lines in a row, and a gzip file that unpacks to over 200 times its size. JSON is decoded in
json_lines.py.
"""

from __future__ import annotations

import gzip
import io
import zlib
from codecs import getincrementaldecoder
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from vembed.data.raw_rows import Unreadable
from vembed.errors import DataError, MachineError
from vembed.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from vembed.data.raw_rows import RawRow


MAX_LINE_BYTES = 64 * 2**20
"""Longest line, row of CSV, or object of JSON: a binary file without line ends must not be read into memory whole."""

MAX_BLANK_LINES = 1_000_000
"""Most blank lines in a row."""

MAX_GZIP_RATIO, GZIP_FREE_BYTES = 200, 4 * 2**20
"""Most bytes out of a gzip file for each byte in it, beyond the first few: texts reach 3 to 20, gzip itself 1,032."""

PIECE_BYTES, BLOCK_BYTES = 2**20, 4 * 2**20
"""Bytes that are read at a time: of one text, and of lines."""

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_BROKEN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)


# --- Blocks of lines


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

    @property
    def num_ends(self) -> int:
        """Line ends in the block; counted by numpy, as `bytes.count` takes several times as long."""
        return int(np.count_nonzero(np.frombuffer(self.data, np.uint8) == ord("\n")))

    def followed_by(self, data: bytes) -> LineBlock:
        """Return the block of the lines that come next."""
        # Blank lines at the end of this block count towards the limit in the next one. The last 1,000 bytes tell how
        # many there are, unless all of them are white space: only then the whole block is looked at.
        end = self.data if self.data[-1000:].isspace() else self.data[-1000:]
        num_visible = len(end.rstrip())
        num_ends = end.count(b"\n", num_visible)
        # After a visible character the first line end closes its own line; without one, the blank lines go on.
        num_trailing_blank = num_ends - 1 if num_visible else self.num_blank + num_ends
        return LineBlock(self.name, self.first + self.num_ends, num_trailing_blank, data)


def line_blocks(path: Path) -> Iterator[LineBlock]:
    """Yield all lines of a file, without a byte order mark, in blocks of a few MiB, or of one long line.

    Raises:
        DataError: The file can't be read on.
        MachineError: The system refuses to read it, or it is no regular file.
    """
    block, rest = LineBlock(path.name, 1, 0, b""), b""
    try:
        with os_errors_named(path), _opened(path) as handle:
            while True:
                piece = handle.read1(BLOCK_BYTES)
                num_whole = piece.rfind(b"\n") + 1  # bytes up to the last line end
                is_inside_line = bool(piece) and not num_whole
                if is_inside_line and len(rest) + len(piece) <= MAX_LINE_BYTES:
                    rest += piece
                    continue
                # What has no line end becomes a block too: the end of the file, and a line over the limit, which
                # `numbered` refuses.
                num_whole = num_whole or len(piece)
                data, rest = b"".join((rest, memoryview(piece)[:num_whole])), piece[num_whole:]
                if data:
                    is_first = not block.data  # only the start of a file may have a byte order mark
                    block = block.followed_by(_without_bom(data, path) if is_first else data)
                    yield block
                if not piece:
                    break
    except _BROKEN_GZIP as error:
        raise _broken_gzip(f"{path.name}:{block.followed_by(b'').first}", error) from error


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line with its end), without a byte order mark.

    Raises:
        DataError: The file can't be read on.
        MachineError: The system refuses to read it, or it is no regular file.
    """
    for block in line_blocks(path):
        yield from block.numbered()


def text_rows(path: Path) -> Iterator[RawRow]:
    """Yield the lines of a text file (possibly .gz) as rows of one column `text`, without white space at their ends.

    A blank line is a row with the text "", so that the caller can count it.

    Raises:
        DataError: The file can't be read on.
        MachineError: The operating system refuses to read it.
    """
    for number, line in numbered_lines(path):
        try:
            yield number, {"text": line.decode().strip()}
        except UnicodeDecodeError as error:
            yield number, Unreadable(f"invalid UTF-8 at byte {error.start + 1} of the line")


# --- One text


def pieces(path: Path) -> Iterator[str]:
    """Yield a file's text in pieces of about 1 MiB, without a byte order mark.

    Raises:
        DataError: The file can't be read on.
        MachineError: The system refuses to read it, or it is no regular file.
    """
    decoder = getincrementaldecoder("utf-8")()
    line = 1
    try:
        with os_errors_named(path), _opened(path) as handle:
            # read1, as in `line_blocks`: read would lose what was unpacked before a broken byte.
            piece = _without_bom(handle.read1(PIECE_BYTES), path)
            while piece:
                text = decoder.decode(piece)  # keeps back a character that the piece cuts in two
                line += text.count("\n")
                if text:
                    yield text
                piece = handle.read1(PIECE_BYTES)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise DataError(f"{path.name}:{line}: invalid UTF-8") from error
    except _BROKEN_GZIP as error:
        raise _broken_gzip(f"{path.name}:{line}", error) from error


def first_visible_byte(path: Path) -> bytes:
    """Return the first byte that is no white space; b"" in a blank file.

    Raises:
        DataError: The file can't be read on.
        MachineError: The system refuses to read it, or it is no regular file.
    """
    try:
        with os_errors_named(path), _opened(path) as handle:
            piece = _without_bom(handle.read1(PIECE_BYTES), path)
            while piece.isspace():
                piece = handle.read1(PIECE_BYTES)
            return piece.lstrip()[:1]
    except _BROKEN_GZIP as error:
        raise _broken_gzip(f"{path.name}:1", error) from error


# --- Errors, and how a file is opened


@contextmanager
def os_errors_named(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into an error that names the file or folder.

    Raises:
        MachineError: It refused.
    """
    try:
        yield
    except gzip.BadGzipFile:
        raise  # an OSError by class, but a fault of the data
    except OSError as error:
        raise MachineError(f"can't read {path}: {error.strerror or error}") from error


def too_long(where: str, what: str) -> DataError:
    """Return the error for a line, row or object over the limit."""
    return DataError(f"{where}: a {what} of over {MAX_LINE_BYTES // 2**20} MiB; is this a text file?")


class _Unpacked(io.RawIOBase):
    """The bytes inside a gzip file, refused where they are too many for the file's own."""

    def __init__(self, path: Path, packed: IO[bytes]) -> None:
        super().__init__()
        self._path = path
        self._packed = packed
        self._inside = gzip.GzipFile(fileobj=self._packed, mode="rb")
        self._count = 0
        self._broken: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what BufferedReader gives
        filled, data = 0, b"?"  # any bytes but none: `data` is empty at the end of the file
        while data and filled < len(buffer) and not self._broken:
            try:
                # Not `readinto`, which loses what it unpacked before the broken byte: those lines are read first, so
                # that the error names the line up to which the file is whole.
                data = self._inside.read1(len(buffer) - filled)
            except _BROKEN_GZIP as error:
                self._broken = error
                break
            buffer[filled : filled + len(data)] = data
            filled += len(data)
            self._count += len(data)
            # Against the packed bytes read so far, not the size of the file: a bomb behind gigabytes of honest text
            # is refused as soon.
            if self._count > max(GZIP_FREE_BYTES, MAX_GZIP_RATIO * self._packed.tell()):
                raise DataError(
                    f"{self._path}: it unpacks to over {MAX_GZIP_RATIO} times its size, more than texts do; if "
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
    # Opened here: if `_Unpacked` opened it and failed, its finalizer would close a half-made object and complain.
    return io.BufferedReader(_Unpacked(path, open_regular(path)), PIECE_BYTES)


def _without_bom(start: bytes, path: Path) -> bytes:
    if start.startswith(UTF16_BOMS):
        raise DataError(f"{path.name}:1: the file is UTF-16; save it as UTF-8")
    return start.removeprefix(UTF8_BOM)


def _broken_gzip(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: the gzip data is truncated or broken: {error}")
