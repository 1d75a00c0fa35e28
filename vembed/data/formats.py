"""Read the rows of a file by its suffix: JSONL, JSON lists, CSV, TSV, Parquet, Arrow, tar shards, formats of plugins.

A format is a `RowFormat` in the table `FORMATS` (vembed/registry.py), where a plugin adds its own by `register_format`.
Rows are (line, columns) pairs, read a few at a time, so that memory doesn't grow with the file. A row that can't be
read is an `Unreadable`, a plain sentence, in place of a dictionary: the caller's policy decides. What makes the rest of
the file unreadable is a `DataError` with file:line.

Tables of text: the delimiter is the suffix's where it splits the first lines evenly, each into as many cells, and more
than one; where it doesn't and one other does, that one is taken, and the plan says so. Cells may stand in quotes, as
RFC 4180 has it. TSV as such has no quotes: where each line has as many cells as the header, and quotes would break rows
or join several into one, they are characters like others.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vembed.data import lines  # for `lines.MAX_LINE_BYTES`: tests set it lower, which an imported name would not see
from vembed.data.lines import (
    MAX_COLUMNS,
    RawRow,
    Unreadable,
    first_visible_byte,
    jsonl_rows,
    numbered_lines,
    os_errors_named,
    pieces,
    repeated,
    row_of,
    too_long,
    unique_keys,
)
from vembed.data.tar_shards import shard_rows
from vembed.errors import ConfigError, DataError
from vembed.files import open_regular
from vembed.registry import FORMATS
from vembed.text import plural, quoted, show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Wanted: TypeAlias = Callable[[Sequence[str]], Sequence[str]]
    """Given the columns of a columnar file, returns those to read; the default `list` wants all columns."""

    PluginRows: TypeAlias = Callable[[Path], Iterable[tuple[int, dict[str, Any] | str]]]

SHARD_SUFFIX = ".tar"
NAMED_SUFFIXES = (".txt", ".txt.gz")
"""Of tables that are read where their file is named; one in a folder may be anything."""


class RowFormat(NamedTuple):
    """Reader of one kind of file."""

    rows: Callable[[Path, Wanted], Iterator[RawRow]]
    cells_are_text: bool = False  # cells are texts without a type, as in CSV


def register_format(suffix: str) -> Callable[[PluginRows], PluginRows]:
    """Read files whose names end with a suffix, as rows; a decorator of the function that reads one file.

    The function takes the file's path and yields (line counted from 1, row) in order. A row is a dictionary with the
    columns of docs/data.md, or a text that says why it can't be read; columns, values and invalid rows are treated as
    those of JSONL. It raises `DataError` with file:line where it can't read on; a `ValueError` or `EOFError` of a
    decoder, or an `OSError` of the system, is told with the file's name. Such files work wherever rows are read: as
    training data, judged sets and corpora. `vembed.testing.formats.FormatContract` has the tests of a format.

    Args:
        suffix: In lower case, with its dot: ".xml".

    Raises:
        ConfigError: The suffix is taken, or is none.
    """
    if not suffix.startswith("."):
        raise ConfigError(f"data format {suffix!r}: a suffix begins with a dot, as '.xml' does")

    def register(function: PluginRows) -> PluginRows:
        def rows(path: Path, _: Wanted) -> Iterator[RawRow]:
            line = 0
            try:
                for line, row in function(path):
                    yield line, Unreadable(row) if isinstance(row, str) else row_of(row)
            except (ValueError, EOFError) as error:  # of Python's decoders; any other error is a fault of the code
                reason = str(error) or type(error).__name__
                raise DataError(f"{path.name}:{line}: can't be read on as {suffix}: {reason}") from error

        FORMATS.register(suffix[1:], RowFormat(rows), module=function.__module__)
        return function

    return register


def row_suffixes() -> tuple[str, ...]:
    """Return the suffixes of all files of rows but of those that must be named, our own first."""
    return tuple(f".{name}" for name in FORMATS.names() if f".{name}" not in NAMED_SUFFIXES)


def suffix_of(path: Path) -> str | None:
    """Return the suffix that a file name ends with, of `row_suffixes` or of a text that may be a table; or None."""
    name = path.name.lower()
    return max((f".{suffix}" for suffix in FORMATS.names() if name.endswith(f".{suffix}")), key=len, default=None)


def format_of(path: Path) -> RowFormat:
    """Return the format of a file of rows; a file of any other suffix is a table of text."""
    loaded: RowFormat = FORMATS.load((suffix_of(path) or NAMED_SUFFIXES[0])[1:])
    return loaded


def plugin_code(path: Path) -> str:
    """Return a hash of the module that reads a file, where a plugin does; rows that are kept on disk follow from it."""
    module = FORMATS.plugins().get((suffix_of(path) or ".")[1:])
    if module is None:
        return ""
    file = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else module


def iter_rows(path: Path, wanted: Wanted = list, form: TableForm | None = None) -> Iterator[RawRow]:
    """Yield the rows of one file, in order.

    Args:
        wanted: Given the columns of a columnar file, says which to read.
        form: Of a table of text; None finds it in the file.

    Raises:
        DataError: The file is empty, or can't be read on.
        MachineError: The operating system refuses to read it.
    """
    with os_errors_named(path):
        yield from format_of(path).rows(path, wanted) if form is None else table_rows(path, form)


# --- JSON


def json_rows(path: Path) -> Iterator[RawRow]:
    """Yield the objects of a JSON list, each with the line that it begins on; read a file that is no list as JSONL.

    One object and one piece of the file are in memory at a time, so that a list may be longer than memory.
    """
    if first_visible_byte(path) != b"[":
        yield from jsonl_rows(numbered_lines(path))
        return
    text = _JsonText(path)
    text.skip(1)
    while text.peek() != "]":
        line = text.line
        yield line, row_of(text.value())
        following = text.peek()
        if following == ",":
            text.skip(1)
            if text.peek() == "]":
                raise text.broken("a comma before the end of the list")
        elif following != "]":
            raise text.broken("expected ',' or ']' after an object")
    text.skip(1)
    if text.peek():
        raise text.broken("text after the end of the list")


class _JsonText:
    """The text of a JSON file from one position on, of which as many pieces are held as the next value needs."""

    NEAR_END = 12
    """Characters before the end in which a token may have been cut: `-Infinity`, an escape of a surrogate pair."""

    _SPACE = re.compile(r"\s*")

    def __init__(self, path: Path) -> None:
        self._name, self._pieces = path.name, pieces(path)
        self._decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
        self._text, self._at = "", 0
        self._line, self._counted = 1, 0  # the line of the character at `_counted`, which only moves on
        self.peek()

    @property
    def line(self) -> int:
        """Line of the position, counted from 1."""
        return self._line_at(self._at)

    def peek(self) -> str:
        """Skip white space, and return the character behind it without going on; "" at the end."""
        while True:
            match = self._SPACE.match(self._text, self._at)
            self._at = self._at if match is None else match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def skip(self, count: int) -> None:
        """Go on by some characters of those that are held."""
        self._at += count

    def value(self) -> Any:
        """Read one value, and go behind it.

        Raises:
            DataError: There is none, or it is too long.
        """
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # An error near the end of what is held may only say that the value goes on in the next piece.
                was_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - self.NEAR_END
                if was_cut and self._read_more():
                    continue
                raise self.broken(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self.broken(str(error)) from error
            if end == len(self._text) and isinstance(value, (int, float)) and self._read_more():
                continue  # a number may go on as well
            self._at = end
            return value

    def broken(self, reason: str, position: int | None = None) -> DataError:
        """Return the error for what stands at a position."""
        line = self._line_at(self._at if position is None else position)
        return DataError(f"{self._name}:{line}: bad JSON: {reason}")

    def _read_more(self) -> bool:
        """Let go of what was read and add as much text as is left, at least one piece; return whether there was any."""
        rest = self._text[self._at :]
        if len(rest) > lines.MAX_LINE_BYTES:
            raise too_long(f"{self._name}:{self.line}", "JSON object")
        added: list[str] = []
        num_wanted = max(1, len(rest))  # doubles: a long object is not decoded anew for every piece
        while num_wanted > 0 and (piece := next(self._pieces, "")):
            added.append(piece)
            num_wanted -= len(piece)
        if added:
            self._line_at(self._at)  # counts the lines of the text that is let go
            self._text, self._at, self._counted = "".join((rest, *added)), 0, 0
        return bool(added)

    def _line_at(self, position: int) -> int:
        """Return the line of a position that is not before the last one asked for."""
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line


# --- Tables of text

DELIMITERS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "pipes"}
"""Characters that may stand between cells, and their names in messages."""

SUFFIX_DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Suffix -> the delimiter that it stands for; .txt stands for none."""

SAMPLE_LINES, SAMPLE_BYTES = 1000, 2**20
"""Most lines, and most bytes of them, in which the delimiter is sought."""


class TableForm(NamedTuple):
    """Delimiter of a table, and whether its cells may stand in quotes."""

    delimiter: str
    has_quotes: bool = True

    def reader(self, texts: Iterator[str]) -> Any:
        """Return a csv reader, which refuses a quote that is never closed instead of reading on to the end."""
        if self.has_quotes:
            return csv.reader(texts, delimiter=self.delimiter, strict=True)
        return csv.reader(texts, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)

    def unusual(self, path: Path) -> str:
        """Return in words what the file's suffix doesn't say, or nothing."""
        is_expected = self.delimiter == _suffix_delimiter(path)
        delimiter = "" if is_expected else f"cells split at {DELIMITERS[self.delimiter]}"
        return ", ".join(filter(None, (delimiter, "" if self.has_quotes else "quotes read as characters")))


def table_form(path: Path) -> TableForm:
    """Find the delimiter in the first 1,000 lines, and for tabs whether quotes are characters.

    The latter reads the whole file once, or twice where a cell begins with a quote.

    Raises:
        DataError: Several delimiters split the lines evenly, or a .txt file has none that does.
        MachineError: The system refuses to read it, or it is no regular file.
    """
    sample: list[str] = []
    num_bytes, is_whole = 0, True
    for _, line in numbered_lines(path):
        num_bytes += len(line)
        if len(sample) == SAMPLE_LINES or num_bytes > SAMPLE_BYTES:
            is_whole = False
            break
        sample.append(line.decode(errors="surrogateescape"))
    expected = _suffix_delimiter(path)
    fitting = [candidate for candidate in DELIMITERS if _splits_evenly(sample, candidate, is_whole=is_whole)]
    if expected is not None and not fitting and any('"' in line for line in sample):
        # One bad quote breaks the cells of all that follows. Then a delimiter counts that is as often in most lines as
        # in the header, whatever the quotes.
        filled = [line for line in sample if line.strip("\r\n")]
        for delimiter in DELIMITERS:
            per_line = [line.count(delimiter) for line in filled]
            if per_line[0] > 0 and per_line.count(per_line[0]) > len(per_line) / 2:
                fitting.append(delimiter)
    # Where none fits, that of the suffix: each row will say how many cells it lacks.
    if expected in fitting or (expected is not None and not fitting):
        delimiter = expected
    elif len(fitting) > 1:
        names = " and ".join(DELIMITERS[candidate] for candidate in fitting)
        raise DataError(
            f"{path.name}: {names} both split its lines evenly: save it as .csv with commas or .tsv with tabs"
        )
    elif fitting:
        delimiter = fitting[0]
    else:
        raise DataError(
            f"{path}: unknown kind of file: a .txt file holds rows where tabs, semicolons, commas or pipes split every "
            "line into as many cells as the header; save other data as .jsonl, .csv or .parquet"
        )
    return TableForm(delimiter, not (delimiter == "\t" and _quotes_are_characters(path)))


def table_rows(path: Path, form: TableForm | None = None) -> Iterator[RawRow]:
    """Yield (the line that a row begins on, its columns or why it can't be read).

    Args:
        form: None finds it in the file.

    Raises:
        DataError: The header is broken, a row is too long, or a quote is never closed.
        MachineError: The system refuses to read it, or it is no regular file.
    """
    form = form or table_form(path)
    with _cell_limit(lines.MAX_LINE_BYTES):
        source = _TableLines(path, form.delimiter)
        reader = form.reader(source)
        header: list[str] | None = None
        while True:
            begin = source.begin_row()
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                if source.ended:  # inside quotes
                    raise DataError(
                        f"{path.name}:{begin}: bad quoting: the quote that opens here is never closed"
                    ) from error
                reason = f"{error} (a quote inside a quoted cell is written twice)"
                if "new-line character" in str(error):
                    reason = "a line ends with \\r alone; save the file so that lines end with \\n"
                if header is None:
                    raise DataError(f"{path.name}:{begin}: bad header: {reason}") from error
                yield begin, Unreadable(f"bad quoting or cells: {reason}")
                continue
            if _is_blank(cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                if len(header) > MAX_COLUMNS:
                    raise DataError(
                        f"{path.name}:{begin}: {len(header):,} columns, and a row has at most {MAX_COLUMNS:,}"
                    )
                if len(set(header)) != len(header):
                    twice = quoted(repeated(header)) if repeated(header) else "a column without a name"
                    raise DataError(f"{path.name}:{begin}: the header names {twice} twice")
            elif source.looks_like_joined_rows(len(header)):
                below = plural(source.num_lines - 1, "line")
                reason = f"bad quoting: a quote opens here and closes {below} below; each line is a row by itself"
                yield begin, Unreadable(reason)
            elif len(cells) != len(header):
                yield begin, Unreadable(f"{len(cells)} cells for {len(header)} columns")
            else:
                yield begin, dict(zip(header, cells, strict=True))


class _TableLines:
    """The lines of a table as texts, for a csv reader, with what is known of the lines of the row that it reads."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self._name = path.name
        self._lines = numbered_lines(path)
        self._delimiter = delimiter.encode()
        self._number = 0
        self.ended = False
        self.begin_row()

    def begin_row(self) -> int:
        """Forget the lines of the last row, and return the number of the next line."""
        self._num_bytes = self.num_lines = 0
        self._widths: set[int] = set()
        return self._number + 1

    def looks_like_joined_rows(self, width: int) -> bool:
        """Return whether the row spans lines each of which splits at tabs into as many cells as a row has."""
        return self._delimiter == b"\t" and self.num_lines > 1 and self._widths == {width}

    def __iter__(self) -> _TableLines:
        return self

    def __next__(self) -> str:
        try:
            self._number, line = next(self._lines)
        except StopIteration:
            self.ended = True
            raise
        self.num_lines += 1
        self._num_bytes += len(line)
        self._widths.add(line.count(self._delimiter) + 1)
        if self._num_bytes > lines.MAX_LINE_BYTES:
            raise too_long(f"{self._name}:{self._number}", "row")
        # Bytes that are not UTF-8 become lone surrogates, which the row check refuses in the columns that matter.
        return line.decode(errors="surrogateescape")


def _splits_evenly(sample: Sequence[str], delimiter: str, *, is_whole: bool) -> bool:
    """Return whether a delimiter splits every line into as many cells, and more than one; tabs also without quotes."""
    if delimiter not in (sample[0] if sample else ""):
        return False
    if delimiter == "\t" and len({line.count(delimiter) for line in sample if line.strip("\r\n")}) == 1:
        return True
    widths: set[int] = set()
    with _cell_limit(SAMPLE_BYTES):
        reader = TableForm(delimiter).reader(iter(sample))
        try:
            for cells in reader:
                if not _is_blank(cells):
                    widths.add(len(cells))
        except csv.Error:
            if is_whole or reader.line_num < len(sample):  # else a row that continues after the sample
                return False
    return len(widths) == 1 and widths != {1}


def _quotes_are_characters(path: Path) -> bool:
    """Return whether quotes of a table with tabs are characters: read as quotes, they would break rows or join them."""
    # Two passes over the whole file, the second only where a cell begins with a quote: a quote in row 900,000 decides
    # as well, and a wrong guess would join the rows up to the next quote without a word.
    width, has_quoted_cell = 0, False
    for _, line in numbered_lines(path):
        if line.strip(b"\r\n"):
            num_cells = line.count(b"\t") + 1
            width = width or num_cells
            has_quoted_cell = has_quoted_cell or line.startswith(b'"') or b'\t"' in line
            if num_cells != width:
                return False  # only quotes explain why lines differ
    if not has_quoted_cell:
        return False
    source = _TableLines(path, "\t")
    reader = TableForm("\t").reader(source)
    with _cell_limit(lines.MAX_LINE_BYTES):
        try:
            while True:
                source.begin_row()
                cells = next(reader)
                if not _is_blank(cells) and (len(cells) != width or source.looks_like_joined_rows(width)):
                    return True
        except StopIteration:
            return False
        except (csv.Error, DataError):  # a row of all lines up to the next quote, which is too far
            return True


def _is_blank(cells: list[str]) -> bool:
    """Return whether a csv reader got the cells from a blank line."""
    return not cells or cells == [""]


def _suffix_delimiter(path: Path) -> str | None:
    """Return the delimiter that a file's suffix, without .gz, stands for."""
    return SUFFIX_DELIMITERS.get(PurePath(path.name.lower().removesuffix(".gz")).suffix)


@contextmanager
def _cell_limit(limit: int) -> Iterator[None]:
    """Raise the csv module's process-wide limit of 128 KiB a cell, and put it back."""
    before = csv.field_size_limit(limit)
    try:
        yield
    finally:
        csv.field_size_limit(before)


# --- Parquet and Arrow
#
# A small file may stand for much: a text that is stored once and repeated in every row, a billion nulls, pages that
# unpack to a thousand times their size. Such a file is refused by its own figures, or by what its rows came to.

BATCH_ROWS = 64
"""Rows that are Python objects at a time: each may hold pictures, or a text that is stored once."""

MAX_ROW_BYTES = 256 * 2**20
"""Most bytes of the columns that are read of a row: four pictures of the largest size that is read."""

MAX_PAGE_RATIO, PAGE_FREE_BYTES = 200, 64 * 2**20
"""Most bytes out of the compressed pages of a row group for each byte of the file, beyond the first few."""

MAX_ROW_RATIO, ROW_FREE_BYTES = 1000, 2**29
"""Most bytes of all rows for each byte of the file, beyond the first few: a repeated text is stored once."""

MAX_ROWS_PER_BYTE, FREE_ROWS = 100, 1_000_000
"""Most rows for each byte of the file, beyond the first few: rows of nothing take no room."""

# What Arrow's values raise where Python has no such value: a date after the year 9999, bytes that are not UTF-8.
_NO_PYTHON_VALUE = (ArithmeticError, LookupError, TypeError, ValueError, NotImplementedError)


def parquet_rows(path: Path, wanted: Wanted) -> Iterator[RawRow]:
    """Yield (row counted from 1, its columns or why it can't be read); columns that nobody wants are not read.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    import pyarrow.parquet as pq

    def parts() -> Iterator[Iterable[dict[str, Any] | Unreadable]]:
        # By default Arrow holds whole row groups, gigabytes where they have pictures: read columns a little ahead only.
        with open_regular(path) as handle, pq.ParquetFile(handle, buffer_size=2**20, pre_buffer=False) as file:
            names = _wanted_columns(file.schema_arrow.names, wanted, path.name)
            metadata, size = file.metadata, os.fstat(handle.fileno()).st_size
            if metadata.num_rows > max(FREE_ROWS, MAX_ROWS_PER_BYTE * size):
                raise DataError(
                    f"{path}: {metadata.num_rows:,} rows in {size:,} bytes are too many for texts or pictures"
                )
            for group in range(metadata.num_row_groups):
                # Of the group as a whole: what Arrow says of single columns ends the process where the file is broken.
                unpacked = metadata.row_group(group).total_byte_size
                if unpacked > max(PAGE_FREE_BYTES, MAX_PAGE_RATIO * size):
                    raise DataError(
                        f"{path}: its rows unpack to {show_bytes(unpacked)}, over {MAX_PAGE_RATIO} times the file's "
                        "size; if that is meant, save them as JSONL"
                    )
            num_rows = num_bytes = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
                num_bytes += batch.nbytes
                if num_bytes > max(ROW_FREE_BYTES, MAX_ROW_RATIO * size):
                    raise DataError(
                        f"{path.name}:{num_rows + 1}: the rows so far hold {show_bytes(num_bytes)}, over "
                        f"{MAX_ROW_RATIO:,} times the file's size; if that is meant, save them as JSONL"
                    )
                num_rows += batch.num_rows
                yield _batch_rows(batch)

    return _counted_rows(parts(), path, "Parquet")


def arrow_rows(path: Path, wanted: Wanted) -> Iterator[RawRow]:
    """Yield rows as `parquet_rows` does, of a file in Arrow's stream or file form; the system maps it.

    Raises:
        DataError: The file can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    import pyarrow as pa

    def parts() -> Iterator[Iterable[dict[str, Any] | Unreadable]]:
        with open_regular(path) as handle:
            size, is_file_form = os.fstat(handle.fileno()).st_size, handle.read(6) == b"ARROW1"
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source) if is_file_form else pa.ipc.open_stream(source)
            names = _wanted_columns(reader.schema.names, wanted, path.name)
            num_rows = num_bytes = 0
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file_form else reader:
                # Arrow trusts the offsets of a mapped file: broken ones lead outside of it and end the process. The
                # check reads every offset and text once, which the rows need anyway.
                batch.validate(full=True)
                num_bytes += batch.nbytes
                if num_bytes > max(ROW_FREE_BYTES, MAX_ROW_RATIO * size) or batch.num_rows > max(FREE_ROWS, size):
                    raise DataError(
                        f"{path.name}:{num_rows + 1}: the rows so far hold over {MAX_ROW_RATIO:,} times the file"
                    )
                num_rows += batch.num_rows
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    part = batch.slice(start, BATCH_ROWS)
                    # A batch without columns has no rows either.
                    yield _batch_rows(part.select(names)) if names else [{}] * part.num_rows

    return _counted_rows(parts(), path, "Arrow")


def _counted_rows(parts: Iterator[Iterable[dict[str, Any] | Unreadable]], path: Path, kind: str) -> Iterator[RawRow]:
    """Yield rows with their numbers, and turn Arrow's errors into one that names the row."""
    import pyarrow as pa

    number = 0
    try:
        for part in parts:
            for row in part:
                number += 1
                yield number, row
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the operating system's error; Arrow's own, for a broken file, has no number
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path.name}:{number + 1}: can't be read as {kind}: {reason}") from error


def _wanted_columns(names: list[str], wanted: Wanted, name: str) -> list[str]:
    if len(names) > MAX_COLUMNS:
        raise DataError(f"{name}: {len(names):,} columns, and a row has at most {MAX_COLUMNS:,}")
    if len(set(names)) != len(names):
        raise DataError(f"{name}: the file names the column {quoted(repeated(names))} twice")
    return list(wanted(names))


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | Unreadable]:
    """Yield the rows of a record batch; one with a value that has no Python form is unreadable."""
    if batch.nbytes > MAX_ROW_BYTES and batch.num_rows > 1:
        for number in range(batch.num_rows):  # one row at a time, which may be small
            yield from _batch_rows(batch.slice(number, 1))
        return
    if batch.nbytes > MAX_ROW_BYTES:
        yield Unreadable(f"a row of over {MAX_ROW_BYTES // 2**20} MiB")
        return
    names = batch.schema.names
    columns: list[list[Any]] = []
    has_unreadable = False
    for column in batch.columns:
        try:
            columns.append(column.to_pylist())
        except _NO_PYTHON_VALUE:
            has_unreadable = True
            columns.append([])
            for value in column:  # cell by cell, so that one bad cell costs its row only
                try:
                    columns[-1].append(value.as_py())
                except _NO_PYTHON_VALUE as error:
                    reason = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else f"can't be read: {error}"
                    columns[-1].append(Unreadable(f"a value of type {column.type} {reason}"))
    for cells in zip(*columns, strict=True) if columns else [()] * batch.num_rows:
        row = dict(zip(names, cells, strict=True))
        faults = (f"{name}: {cell}" for name, cell in row.items() if isinstance(cell, Unreadable))
        fault = next(faults, None) if has_unreadable else None
        yield row if fault is None else Unreadable(fault)


# --- The formats of FORMATS

JSONL = RowFormat(lambda path, _: jsonl_rows(numbered_lines(path)))
JSON = RowFormat(lambda path, _: json_rows(path))
TABLE = RowFormat(lambda path, _: table_rows(path), cells_are_text=True)
PARQUET = RowFormat(parquet_rows)
ARROW = RowFormat(arrow_rows)
TAR = RowFormat(lambda path, _: shard_rows(path))
