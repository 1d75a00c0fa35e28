"""Read tables of text: CSV, TSV and their like, whose first row names the columns.

1. The delimiter is the suffix's own where it splits the first lines evenly: each into as many cells, and more than one.
   Where it doesn't and one other does, that one is taken, and the plan says so.
2. Cells may stand in quotes, as RFC 4180 has it. TSV as such has no quotes: where each line has as many cells as the
   header, and quotes would break rows or join several into one, they are characters like others.
"""

from __future__ import annotations

import csv
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.data import lines as limits
from vembed.data.lines import lines, too_long
from vembed.data.parquet import MAX_COLUMNS, repeated
from vembed.errors import DataError
from vembed.text import plural, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

DELIMITERS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "pipes"}
"""What cells may be told apart by, in words."""

OWN_DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Suffix -> the delimiter that it stands for; .txt stands for none."""

SAMPLE_LINES, SAMPLE_BYTES = 1000, 2**20
"""Most lines, and most bytes of them, that the delimiter is told from."""


class TableForm(NamedTuple):
    """How the cells of a table are told apart."""

    delimiter: str
    has_quotes: bool = True  # whether cells may stand in quotes

    def reader(self, texts: Iterator[str]) -> Any:
        """Return a csv reader, which refuses a quote that is never closed instead of reading on to the end."""
        if self.has_quotes:
            return csv.reader(texts, delimiter=self.delimiter, strict=True)
        return csv.reader(texts, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)

    def unusual(self, path: Path) -> str:
        """Return in words what the file's suffix doesn't say, or nothing."""
        own = self.delimiter == OWN_DELIMITERS.get(_suffix(path))
        delimiter = "" if own else f"cells split at {DELIMITERS[self.delimiter]}"
        return ", ".join(filter(None, (delimiter, "" if self.has_quotes else "quotes read as characters")))


def table_form(path: Path) -> TableForm:
    """Tell how a file's cells are told apart.

    Raises:
        DataError: Several delimiters split the lines evenly, or a .txt file has none that does.
        OSError: The system refuses to read it, or it is no regular file.
    """
    sample, is_whole = _sample(path)
    own = OWN_DELIMITERS.get(_suffix(path))
    even = [each for each in DELIMITERS if _splits_evenly(sample, each, is_whole=is_whole)]
    if own is not None and not even and any('"' in line for line in sample):
        # One bad quote breaks the cells of all that follows: the lines by themselves still tell the delimiter.
        even = [each for each in DELIMITERS if _splits_most_lines(sample, each)]
    if own not in even and len(even) > 1:
        names = " and ".join(DELIMITERS[each] for each in even)
        raise DataError(
            f"{path.name}: {names} both split its lines evenly: save it as .csv with commas or .tsv with tabs"
        )
    if own is None and not even:
        raise DataError(
            f"{path}: unknown kind of file: a .txt file holds rows where tabs, semicolons, commas or pipes split every "
            "line into as many cells as the header; save other data as .jsonl, .csv or .parquet"
        )
    delimiter = own if own in even or not even else even[0]
    assert delimiter is not None
    return TableForm(delimiter, not (delimiter == "\t" and _quotes_are_characters(path)))


def table_rows(path: Path, form: TableForm) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (the line that a row begins on, its columns or why it can't be read).

    Raises:
        DataError: The header is broken, a row is too long, or a quote is never closed.
        OSError: The system refuses to read it, or it is no regular file.
    """
    with _cell_limit(limits.MAX_LINE_BYTES):
        source = _Lines(path, form.delimiter)
        reader = form.reader(source)
        header: list[str] | None = None
        while True:
            begin = source.begin_row()
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                if source.ended:
                    raise DataError(
                        f"{path.name}:{begin}: bad quoting: the quote that opens here is never closed"
                    ) from error
                reason = f"{error} (a quote inside a quoted cell is written twice)"
                if "new-line character" in str(error):
                    reason = "a line ends with \\r alone; save the file so that lines end with \\n"
                if header is None:
                    raise DataError(f"{path.name}:{begin}: bad header: {reason}") from error
                yield begin, f"bad quoting or cells: {reason}"
                continue
            if not cells or cells == [""]:
                continue
            if header is None:
                header = _header(cells, f"{path.name}:{begin}")
            elif source.holds_rows(len(header)):
                below = plural(source.height - 1, "line")
                yield begin, f"bad quoting: a quote opens here and closes {below} below; each line is a row by itself"
            elif len(cells) != len(header):
                yield begin, f"{len(cells)} cells for {len(header)} columns"
            else:
                yield begin, dict(zip(header, cells, strict=True))


class _Lines:
    """The lines of a file as texts, with what is known of those of the row that is being read."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self._name = path.name
        self._lines = lines(path)
        self._delimiter = delimiter.encode()
        self._number = 0
        self.ended = False
        self.begin_row()

    def begin_row(self) -> int:
        """Forget the lines of the last row, and return the number of the next line."""
        self._num_bytes = self.height = 0
        self._widths: set[int] = set()
        return self._number + 1

    def holds_rows(self, width: int) -> bool:
        """Return whether the row spans lines each of which splits at tabs into as many cells as a row has."""
        return self._delimiter == b"\t" and self.height > 1 and self._widths == {width}

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        try:
            self._number, line = next(self._lines)
        except StopIteration:
            self.ended = True
            raise
        self.height += 1
        self._num_bytes += len(line)
        self._widths.add(line.count(self._delimiter) + 1)
        if self._num_bytes > limits.MAX_LINE_BYTES:
            raise too_long(f"{self._name}:{self._number}", "row")
        # Bytes that are not UTF-8 become lone surrogates, which the row check refuses in the columns that matter.
        return line.decode(errors="surrogateescape")


def _sample(path: Path) -> tuple[list[str], bool]:
    """Return the first lines, and whether they are all."""
    found: list[str] = []
    num_bytes = 0
    for _, line in lines(path):
        num_bytes += len(line)
        if len(found) == SAMPLE_LINES or num_bytes > SAMPLE_BYTES:
            return found, False
        found.append(line.decode(errors="surrogateescape"))
    return found, True


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
                widths |= {len(cells)} if cells and cells != [""] else set()
        except csv.Error:
            if is_whole or reader.line_num < len(sample):  # else a row that continues after the sample
                return False
    return len(widths) == 1 and widths != {1}


def _splits_most_lines(sample: Sequence[str], delimiter: str) -> bool:
    """Return whether a delimiter is as often in most lines as in the header, whatever the quotes."""
    counts = [line.count(delimiter) for line in sample if line.strip("\r\n")]
    return counts[0] > 0 and counts.count(counts[0]) > len(counts) / 2


def _quotes_are_characters(path: Path) -> bool:
    """Return whether quotes of a table with tabs are characters: read as quotes, they would break rows or join them."""
    width, opens = 0, False
    for _, line in lines(path):
        if line.strip(b"\r\n"):
            cells = line.count(b"\t") + 1
            width = width or cells
            opens = opens or line.startswith(b'"') or b'\t"' in line
            if cells != width:
                return False
    source = _Lines(path, "\t")
    reader = TableForm("\t").reader(source)
    with _cell_limit(limits.MAX_LINE_BYTES):
        try:
            while opens:
                source.begin_row()
                row = next(reader)
                if row and row != [""] and (len(row) != width or source.holds_rows(width)):
                    return True
        except StopIteration:
            return False
        except (csv.Error, DataError):  # a row of all lines up to the next quote, which is too far
            return True
    return False


def _header(cells: Sequence[str], where: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    if len(header) > MAX_COLUMNS:
        raise DataError(f"{where}: {len(header):,} columns, and a row has at most {MAX_COLUMNS:,}")
    if len(set(header)) != len(header):
        twice = repeated(header)
        raise DataError(f"{where}: the header names {quoted(twice) if twice else 'a column without a name'} twice")
    return header


def _suffix(path: Path) -> str:
    """Return how a file's name ends, without .gz."""
    return PurePath(path.name.lower().removesuffix(".gz")).suffix


@contextmanager
def _cell_limit(limit: int) -> Iterator[None]:
    """Raise the csv module's process-wide limit of 128 KiB a cell, and put it back."""
    before = csv.field_size_limit(limit)
    try:
        yield
    finally:
        csv.field_size_limit(before)
