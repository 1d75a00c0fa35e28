"""Read tables of text: CSV, TSV, and others whose delimiter is found in the file.

The delimiter is the suffix's where it splits the first lines evenly, each into as many cells, and more than one; where
it doesn't and one other does, that one is taken, and the plan says so. Cells may stand in quotes, as RFC 4180 has it.
TSV as such has no quotes: where each line has as many cells as the header, and quotes would break rows or join several
into one, they are characters like others.
"""

from __future__ import annotations

import csv
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.data import lines  # the module, not its limit: tests lower `lines.MAX_LINE_BYTES`
from vembed.data.lines import numbered_lines, too_long
from vembed.data.raw_rows import MAX_COLUMNS, Unreadable, repeated
from vembed.errors import DataError
from vembed.text import plural, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vembed.data.raw_rows import RawRow

DELIMITERS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "pipes"}
"""Characters that may stand between cells, and their names in messages."""

SUFFIX_DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Suffix -> the delimiter that it stands for; .txt stands for none."""

SAMPLE_LINES, SAMPLE_BYTES = 1000, 2**20
"""Most lines, and most bytes of them, in which the delimiter is sought."""


# --- Which delimiter, and whether quotes are characters


class TableForm(NamedTuple):
    """Delimiter of a table, and whether its cells may stand in quotes."""

    delimiter: str
    has_quotes: bool = True

    def reader(self, texts: Iterator[str]) -> Any:
        """Return a csv reader, which refuses a quote that is never closed instead of reading on to the end."""
        # The csv module's own limit, 128 KiB a cell, is one for the whole process. It is raised and never put back, as
        # another table may be open. `_TableLines` refuses a row that is too long.
        csv.field_size_limit(max(csv.field_size_limit(), lines.MAX_LINE_BYTES))
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
        DataError: Several delimiters split the lines evenly but the suffix's doesn't, or a .txt file has none.
        MachineError: The system refuses to read it, or it is no regular file.
    """
    sample, is_whole = _first_lines(path)
    expected = _suffix_delimiter(path)
    fitting = [candidate for candidate in DELIMITERS if _splits_evenly(sample, candidate, is_whole=is_whole)]
    if expected is not None and not fitting and any('"' in line for line in sample):
        # One bad quote breaks the cells of all that follows: count the delimiters, whatever the quotes.
        fitting = [candidate for candidate in DELIMITERS if _splits_most_lines(sample, candidate)]
    if expected is not None and (expected in fitting or not fitting):
        delimiter = expected  # where none fits, too: each row will say how many cells it lacks
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
    quotes_are_characters = delimiter == "\t" and _quotes_are_characters(path)
    return TableForm(delimiter, has_quotes=not quotes_are_characters)


def _first_lines(path: Path) -> tuple[list[str], bool]:
    """Return the lines in which the delimiter is sought, and whether they are the whole file."""
    sample: list[str] = []
    num_bytes = 0
    for _, line in numbered_lines(path):
        num_bytes += len(line)
        if len(sample) == SAMPLE_LINES or num_bytes > SAMPLE_BYTES:
            return sample, False
        sample.append(line.decode(errors="surrogateescape"))
    return sample, True


def _suffix_delimiter(path: Path) -> str | None:
    """Return the delimiter that a file's suffix, without .gz, stands for."""
    return SUFFIX_DELIMITERS.get(PurePath(path.name.lower().removesuffix(".gz")).suffix)


def _splits_evenly(sample: Sequence[str], delimiter: str, *, is_whole: bool) -> bool:
    """Return whether a delimiter splits every line into as many cells, and more than one; tabs also without quotes."""
    if delimiter not in (sample[0] if sample else ""):
        return False
    if delimiter == "\t" and len({line.count(delimiter) for line in sample if line.strip("\r\n")}) == 1:
        return True
    widths: set[int] = set()
    reader = TableForm(delimiter).reader(iter(sample))
    try:
        for cells in reader:
            if not _is_blank(cells):
                widths.add(len(cells))
    except csv.Error:
        if is_whole or reader.line_num < len(sample):  # else a row that continues after the sample
            return False
    return len(widths) == 1 and widths != {1}


def _splits_most_lines(sample: Sequence[str], delimiter: str) -> bool:
    """Return whether a delimiter is in the header, and as often in more than half of the lines; quotes don't count."""
    counts = [line.count(delimiter) for line in sample if line.strip("\r\n")]
    return counts[0] > 0 and counts.count(counts[0]) > len(counts) / 2


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


# --- Rows


def table_rows(path: Path, form: TableForm | None = None) -> Iterator[RawRow]:
    """Yield (the line that a row begins on, its columns or why it can't be read).

    Args:
        form: None finds it in the file.

    Raises:
        DataError: The header is broken, a row is too long, or a quote is never closed.
        MachineError: The system refuses to read it, or it is no regular file.
    """
    form = form or table_form(path)
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
            where = f"{path.name}:{begin}"
            if source.ended:  # inside quotes
                raise DataError(f"{where}: bad quoting: the quote that opens here is never closed") from error
            if header is None:
                raise DataError(f"{where}: bad header: {_cells_fault(error)}") from error
            yield begin, Unreadable(f"bad quoting or cells: {_cells_fault(error)}")
            continue
        if _is_blank(cells):
            continue
        if header is None:
            header = _header(cells, where=f"{path.name}:{begin}")
        elif source.looks_like_joined_rows(len(header)):
            below = plural(source.num_lines - 1, "line")
            reason = f"bad quoting: a quote opens here and closes {below} below; each line is a row by itself"
            yield begin, Unreadable(reason)
        elif len(cells) != len(header):
            yield begin, Unreadable(f"{len(cells)} cells for {len(header)} columns")
        else:
            yield begin, dict(zip(header, cells, strict=True))


def _cells_fault(error: csv.Error) -> str:
    """Return what is wrong with a row, and how to write it."""
    if "new-line character" in str(error):
        return "a line ends with \\r alone; save the file so that lines end with \\n"
    return f"{error} (a quote inside a quoted cell is written twice)"


def _header(cells: list[str], *, where: str) -> list[str]:
    """Return the names of the columns, or refuse the table."""
    names = [cell.strip() for cell in cells]
    if len(names) > MAX_COLUMNS:
        raise DataError(f"{where}: {len(names):,} columns, and a row has at most {MAX_COLUMNS:,}")
    if len(set(names)) != len(names):
        twice = quoted(repeated(names)) if repeated(names) else "a column without a name"
        raise DataError(f"{where}: the header names {twice} twice")
    return names


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


def _is_blank(cells: list[str]) -> bool:
    """Return whether a csv reader got the cells from a blank line."""
    return not cells or cells == [""]
