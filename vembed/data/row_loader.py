"""Load the rows of one source: check each, refuse a source that is bad as a whole, and put the valid rows in a table.

1. A `SourceChecker` resolves the columns of each row (columns.py), checks every value (check.py), counts the invalid
   rows by what is wrong with them, and after the last row refuses the source if too much is wrong.
2. A `RowLoader` gives it the rows, and adds the valid ones to an Arrow table (table_writer.py). Memory is the table
   plus a few thousand rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vembed import collector_paused
from vembed.data.check import Fault, RowChecker, UnclearLabels, block_of_texts
from vembed.data.formats import JSONL, format_of, iter_rows
from vembed.data.json_lines import jsonl_rows, rows_alike
from vembed.data.lines import line_blocks
from vembed.data.raw_rows import Unreadable
from vembed.data.table import LoadedRecords
from vembed.data.table_writer import RecordWriter
from vembed.data.text_tables import table_form, table_rows
from vembed.errors import DataError
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from vembed.data.check import Fields, ProblemLog
    from vembed.data.columns import ColumnResolver, LossNeeds
    from vembed.data.images import ImageRoot
    from vembed.data.raw_rows import RawRow
    from vembed.data.read import DataSource
    from vembed.data.table import Record, RecordTable

FIRST_ROWS = 100
"""Rows that `DataSource.peek` checks: enough to see which columns a source has."""


@dataclass(slots=True)
class _Missing:
    """Rows without a column that every row needs."""

    first: str  # file:line of the first of them
    needed: str  # why the loss needs the column; "" of query and positive, which every loss needs
    count: int = 0


class SourceChecker:
    """Checks one source: each row as it is read, then the source as a whole.

    Call `open_file` or `begin_file` before the rows of each file, `check_row` for each row, `refuse_bad` at the end.

    Args:
        source: Gives the keys, what the loss needs and the names for errors; its rows come from the caller.
        problems: Collects the invalid rows; None follows the policy of the keys.
        resolver: Resolves the columns; None follows `column_mapping`.

    Attributes:
        resolver: What each column of a row is.
        log: The invalid rows.
        file: Name of the file that was begun last.
        num_rows: Rows so far, valid or not.
    """

    def __init__(
        self, source: DataSource, *, problems: ProblemLog | None = None, resolver: ColumnResolver | None = None
    ) -> None:
        self._source = source
        self.resolver = resolver or source.new_resolver()
        self.log = source.new_log() if problems is None else problems
        self.num_rows = 0
        self._missing: dict[str, _Missing] = {}  # by the name of the column
        self._unclear = UnclearLabels()
        # Of the file that was begun last; `begin_file` sets all five.
        self.file = ""
        self._is_table = False  # CSV or TSV
        self._names_columns = False  # a header, or the schema of a columnar file, names every column
        self._schema: Sequence[str] = ()  # all columns of a columnar file: its rows hold only those that are read
        self._row_checker: RowChecker

    def open_file(self, file: Path) -> Iterable[RawRow]:
        """Begin a local file, and return its rows to be checked; columnar files give only the columns that are read.

        Raises:
            DataError: How a table's cells are told apart isn't clear, or `image_root` doesn't exist.
            MachineError: The system refuses to read the file.
        """
        images = self._source.images(file.parent)
        # The form of a table is found once, here, and handed on: finding it may read a table with tabs whole, and
        # `iter_rows` would do it again. What is unusual about it is shown with the columns (`ColumnsRead.text`).
        form = table_form(file) if format_of(file).cells_are_text else None
        if form is not None and (words := form.unusual(file)):
            self.resolver.note_table(words)
        self.begin_file(self._source.file_names[file], images, cells_are_text=form is not None)
        return iter_rows(file, self.wanted) if form is None else table_rows(file, form)

    def begin_file(self, name: str, images: ImageRoot, *, cells_are_text: bool = False) -> None:
        """Begin the rows of a file, or of a set that has no files.

        Args:
            name: Of the file, for the errors of its rows.
            images: Checks the pictures of its rows; their paths start from the folder of the file.
            cells_are_text: The file is CSV or TSV.
        """
        self.file, self._is_table = name, cells_are_text
        self._names_columns, self._schema = cells_are_text, ()  # of a columnar file, `wanted` sets both
        self._row_checker = RowChecker(
            images,
            cells_are_text=cells_are_text,
            label_kind=self._source.keys.label_kind,
            loss=self._source.training_needs,
            unclear=self._unclear,
            note_list=lambda column: self.resolver.note_table(f"JSON lists in {column} read as lists"),
        )

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Return the columns to read among those of a columnar file."""
        self._names_columns, self._schema = True, names
        return self.resolver.wanted(names, where=f"{self.file}:1")

    def count_checked(self, count: int) -> None:
        """Count valid rows that were checked elsewhere."""
        self.num_rows += count

    def check_row(self, line: int, row: dict[str, Any] | Unreadable) -> Fields | None:
        """Return the content of a row, every value checked; None for an invalid row, which goes to the log.

        Raises:
            DataError: Two columns of the row stand for one, or it isn't clear what a picture is for; that refuses the
                source even where invalid rows may be dropped.
        """
        self.num_rows += 1
        where = f"{self.file}:{line}"
        if isinstance(row, Unreadable):
            self.log.add(where, row)
            return None
        shape = self.resolver.shape(tuple(row), where=where)
        try:
            return self._row_checker.check(row, shape, where)
        except Fault as fault:
            self._note_fault(fault, row, where)
            return None

    def _note_fault(self, fault: Fault, row: dict[str, Any], where: str) -> None:
        """Add an invalid row to the log."""
        reason = fault.reason
        if fault.missing:
            needed = fault.reason  # of a missing column it says why the loss needs it
            self._missing.setdefault(fault.column, _Missing(where, needed)).count += 1
            # `resolver.missing` searches for similar names, which is too slow for every row: the log takes the words of
            # the first row without the column, and counts the others. If all rows lack it, `_check_missing` says so.
            reason = ""
            if self.log.lists_missing(fault.column):
                names = self._schema or row
                reason = "; ".join(filter(None, (self.resolver.missing(fault.column, names), needed)))
        self.log.add(where, reason, column=fault.column, may_drop=not fault.escapes)

    def refuse_bad_start(self, name: str, *, is_only_file: bool) -> None:
        """Refuse a source early where its first rows already show that `refuse_bad` will: wrong columns, or no rows.

        Wrong values are left to `refuse_bad`, which lists those of all rows.

        Args:
            name: The file, for the error.
            is_only_file: False where another file may have a column that this one lacks.

        Raises:
            DataError: The only file holds no rows, a mapped column isn't there, or all rows lack a column they need.
        """
        # A header or a schema names all columns. In JSONL a later row may have another one, unless this was all.
        all_columns_seen = self._names_columns or self.num_rows < FIRST_ROWS
        if is_only_file and not self.num_rows:
            raise DataError(f"{name} holds no rows")
        if is_only_file and all_columns_seen:
            self.resolver.check_mapping(name, trains=self._source.role == "train")
        # Where invalid rows may be dropped, later rows of JSONL or another file may still have the column; the later
        # rows of a file that names its columns can't.
        if self.log.refused or (self._names_columns and is_only_file):
            self._check_missing(name if all_columns_seen else f"the first {FIRST_ROWS} rows of {name}")

    def refuse_bad(self, name: str, num_kept: int) -> None:
        """Refuse a source for what is wrong with its rows; to be called after the last row.

        Args:
            name: The source, for the error.
            num_kept: Rows of the table.

        Raises:
            DataError: With the most general cause.
        """
        # The most general cause first: no rows, a misspelt mapping, a column that all rows lack, unclear labels, too
        # many invalid rows, no valid row.
        if not self.num_rows:
            # A BEIR folder logs its broken queries itself and makes no row of them: they may be why there is none.
            raise DataError(": ".join((f"{name} holds no rows", *self.log.notes())))
        # One mapping serves all sets: a set that isn't trained on need not have the columns that training drops.
        self.resolver.check_mapping(name, trains=self._source.role == "train")
        self._check_missing(name)
        self._unclear.refuse_any()
        self.log.refuse_over_budget(name, self.num_rows)
        if not num_kept:
            raise DataError(f"all {plural(self.num_rows, 'row')} of {name} are invalid: {self.log.notes()[0]}")

    def _check_missing(self, name: str) -> None:
        """Refuse rows that all lack a column which every row needs."""
        for column, missing in self._missing.items():
            if missing.count == self.num_rows:
                # `name` may be a folder of several files, as in BEIR, where only queries.jsonl can hold a column of the
                # loss: the first row without it tells which file to fix.
                where = f"{missing.first}: " if missing.needed else ""
                needed = f"; {missing.needed}" if missing.needed else ""
                reason = self.resolver.missing(column, self.resolver.seen)
                header = "; the first line of a CSV or TSV file names its columns" if self._is_table else ""
                raise DataError(f"{where}no row of {name} has a column {column!r}: {reason}{needed}{header}")


class RowLoader:
    """Builds the table of one source from its valid rows.

    `add_file` takes a local file. Other rows come by `add_rows`, `add_row` and `add_record`, after
    `checker.begin_file`. `finish` refuses a bad source, or returns the table.

    Args:
        source: Gives the keys, what the loss needs and the names for errors; its rows come from the caller.
        folder: An empty folder for the table's files; None keeps them in memory.
        problems: Collects the invalid rows; None follows the policy of the keys.
        resolver: Resolves the columns; None follows `column_mapping`.
    """

    def __init__(
        self,
        source: DataSource,
        folder: Path | None = None,
        *,
        problems: ProblemLog | None = None,
        resolver: ColumnResolver | None = None,
    ) -> None:
        self._source = source
        self.checker = SourceChecker(source, problems=problems, resolver=resolver)
        self._writer = RecordWriter(source.extra_columns, folder)

    def add_file(self, file: Path) -> None:
        """Add the valid rows of a local file."""
        with self._source.errors_named(file):
            if format_of(file) is JSONL:  # the common format has a fast path
                with collector_paused():  # it would visit all rows that are Python objects, again and again
                    self._add_jsonl_blocks(file)
            else:
                self.add_rows(self.checker.open_file(file))

    def _add_jsonl_blocks(self, file: Path) -> None:
        """Add the valid rows of a file of JSONL, a block of them at once where all are texts and none is invalid."""
        checker = self.checker
        checker.begin_file(self._source.file_names[file], self._source.images(file.parent))
        # The fast path takes no block with a column that the loss asks for: all of its rows have the defaults.
        defaults = {column.name: column.typed(column.default) for column in self._source.extra_columns}
        for block in line_blocks(file):
            # Three paths, from the slowest to the fastest.
            rows = rows_alike(block)
            if rows is None:
                self.add_rows(jsonl_rows(block.numbered()))  # line by line: words every error
                continue
            shape = checker.resolver.shape(tuple(rows[0]), where=f"{checker.file}:{block.first}")
            texts = block_of_texts(rows, shape)
            if texts is None:
                self.add_rows(enumerate(rows, block.first))  # parsed at once, checked one by one
                continue
            # Checked at once, without Python for each row.
            checker.count_checked(len(rows))  # `block_of_texts` found no fault in any
            if not checker.log.refused:
                self._writer.add_texts(texts, defaults, file=checker.file, first=block.first)

    def add_rows(self, rows: Iterable[RawRow]) -> None:
        """Add the valid ones among some rows."""
        for line, row in rows:
            self.add_row(line, row)

    def add_row(self, line: int, row: dict[str, Any] | Unreadable) -> None:
        """Add a row, if it is valid."""
        fields = self.checker.check_row(line, row)
        # Once the source is refused, the other rows are read for their problems only.
        if fields is not None and not self.checker.log.refused:
            self._writer.add(
                fields.query,
                positives=fields.positives,
                negatives=fields.negatives,
                label=fields.label,
                scores=fields.scores,
                columns=fields.columns,
                file=self.checker.file,
                line=line,
            )

    def add_record(self, record: Record) -> None:
        """Add a record that a plugin made and checked.

        Raises:
            DataError: The loss can't do without a column that it lacks, or its location has no line.
        """
        extra, needs = self._source.extra_columns, self._source.training_needs
        for column in extra:
            if column.required and column.name not in record.columns and needs is not None:
                raise DataError(f"{record.location}: {column.name}: missing; {needs.reason_for(column)}")
        file, _, line = record.location.rpartition(":")
        if not file or not line.isascii() or not line.isdigit():
            raise DataError(f"a record has the location {record.location!r}; write it as file:line")
        self.checker.count_checked(1)
        self._writer.add(
            record.query,
            positives=record.positives,
            negatives=record.negatives,
            label=record.label,
            scores=record.scores,
            columns={column.name: column.typed(record.columns.get(column.name, column.default)) for column in extra},
            file=file,
            line=int(line),
        )

    def finish(self, source_name: str, notes: Sequence[str] = ()) -> LoadedRecords:
        """Return the table and notes on it, or refuse the source.

        Args:
            source_name: For errors.
            notes: Sentences that come before those on invalid rows and ignored columns.

        Raises:
            DataError: As `SourceChecker.refuse_bad` and `refuse_unlearnable`.
        """
        checker = self.checker
        checker.refuse_bad(source_name, len(self._writer))
        columns = checker.resolver.summary()
        table = self._writer.finish()
        refuse_unlearnable(table, self._source.training_needs)
        return LoadedRecords(table, (*notes, *checker.log.notes(), *columns.notes), checker.log.count, columns)


def refuse_unlearnable(table: RecordTable, needs: LossNeeds | None) -> None:
    """Refuse a table with a record that the loss learns nothing from.

    Raises:
        DataError: With the first such record.
    """
    if needs is None or "positives" in needs.takes:
        return  # every row has a positive, or lists its pairs
    cures = {
        "classes": "label_kind: class and a label",
        "pairs": "label_kind: pair or grade, and a label or score",
        "lists": "label_kind: grade, and as label or score a list of numbers, one for each of its documents",
    }
    wanted = " or ".join(cures[kind] for kind in sorted(needs.takes) if kind in cures)
    # This walks over all records; losses of positives, the usual ones, have returned above.
    for record in table:
        has = {"classes": record.label is not None, "pairs": bool(record.scores), "lists": len(record.scores) > 1}
        if not any(has.get(kind) for kind in needs.takes):
            raise DataError(
                f"{record.location}: loss_type {needs.name} learns nothing from this row: it needs {wanted}"
            )
