"""Turn what `data_path` names into checked records: a file, a folder, a glob, a hub id, a built-in or a published set.

1. Read rows one by one (`files.py`, `beir.py`, `hub.py`, `builtin/`, `presets/`).
2. Resolve each row's columns (`columns.py`) and check every value (`validate.py`).
3. Append what is valid to an Arrow table; count the rest (`problems.py`).

The whole source is read and checked before anything trains. Memory is the table plus a few thousand rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from vembed import collector_paused
from vembed.batch import modality_of
from vembed.data.beir import BeirSplit, beir_rows, is_beir, read_beir_split
from vembed.data.builtin import holds_pictures, load_builtin
from vembed.data.check import Fault, RowChecker, UnclearLabels, block_of_texts
from vembed.data.columns import ColumnResolver
from vembed.data.formats import TableForm, format_of, iter_rows, suffix_of, table_form
from vembed.data.hub import hub_rows, hub_split
from vembed.data.lines import RawRow, jsonl_rows, line_blocks, reading, rows_alike
from vembed.data.presets import preset_path
from vembed.data.row_files import row_files
from vembed.data.splits import SPLIT_NAMES, SourceOptions
from vembed.data.table import LoadedRecords, Record
from vembed.data.table_cache import kept_or_read
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError
from vembed.files import home_path, is_folder
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from vembed.batch import Modality
    from vembed.data.builtin import Rows
    from vembed.data.columns import ColumnsRead, LossNeeds
    from vembed.data.image_root import ImageRoot
    from vembed.data.table import RecordTable

BUILTIN_PREFIX = "builtin:"

FIRST_ROWS = 100
"""Rows that tell in milliseconds whether the others have the columns that they need."""


def load_records(path: str, options: SourceOptions) -> LoadedRecords:
    """Read, check and collect the records of a data source.

    Args:
        path: A .jsonl, .json, .csv, .tsv (each possibly .gz), .parquet or .tar file; a folder, glob or range
            `{000..127}` of such files, read in order of their names; a BEIR folder; `builtin:NAME`; a published set
            `NAME:FOLDER` of `presets/`; or a hub id `owner/name[:config]`.

    Returns:
        At least one record, and notes on what was skipped or ignored.

    Raises:
        ConfigError: `column_mapping` names a column that records don't have.
        DataError: The source is missing, broken or inconsistent, or lacks what the loss learns from; the message names
            file:line and column.
        MachineError: The hub can't be reached, or the system refuses to read a file.
    """
    loader = _Loader(options)
    if path.startswith(BUILTIN_PREFIX):
        split = options.split or SPLIT_NAMES[options.role][0]
        name = path.removeprefix(BUILTIN_PREFIX)
        return loader.read_set(load_builtin(name, split), path, name=f"{name}/{split}")
    if preset := preset_path(path):
        return loader.complete(preset.records(options, options.log()), path, "a published set")
    if folder := beir_folder(path):
        images = options.images(folder)
        part = read_beir_split(
            folder, options.split, options.role, images, loader.extra, options.problems, split_key=options.split_key
        )
        return loader.read_beir(part, folder, images)
    files, notes = row_files(path, options)
    if not files:
        return _load_hub(path, options, loader)
    if options.problems is not None:  # what is kept on disk doesn't say which rows were invalid
        return _read_files(path, files, notes, options, options.scratch)
    return kept_or_read(files, options, loader.extra, partial(_read_files, path, files, notes, options))


def refuse_missing(path: str, options: SourceOptions) -> None:
    """Refuse a path of `load_records` where no file is, or one that can't be opened, without reading any.

    Raises:
        DataError: As `load_records`.
        MachineError: As `load_records`.
    """
    for file in _own_files(path, options):
        with reading(file):
            file.open("rb").close()


class FirstRows(NamedTuple):
    """The first rows of a source, as far as they can be read at once."""

    columns: ColumnsRead  # how local files of rows are read; empty for a source of another kind
    modalities: frozenset[Modality]  # of their items


def refuse_by_first_rows(path: str, options: SourceOptions) -> FirstRows:
    """Refuse local files of rows where the columns of the first rows show that `load_records` would.

    Raises:
        VembedError: As `load_records`.
    """
    loader = _Loader(options, keeps=False)
    if files := _own_files(path, options):
        loader.read_file(files[0], most=FIRST_ROWS)
        loader.check_first(path if len(files) == 1 else str(files[0]), is_alone=len(files) == 1)
    if preset_path(path) is not None or (path.startswith(BUILTIN_PREFIX) and holds_pictures(path)):
        loader.modalities.add("image")  # drawing the rows of a built-in set takes seconds
    return FirstRows(loader.columns.read(), frozenset(loader.modalities))


def first_rows(path: str, options: SourceOptions, most: int) -> list[dict[str, object]]:
    """Return the first rows of local files as they are written, without those that can't be read.

    Raises:
        VembedError: As `load_records`.
    """
    found: list[dict[str, object]] = []
    for file in _own_files(path, options)[:1]:
        form = table_form(file) if format_of(file).cells_are_text else None
        found += [row for _, row in islice(iter_rows(file, list, form), most) if isinstance(row, dict)]
    return found


def _own_files(path: str, options: SourceOptions) -> Sequence[Path]:
    """Return the local files of rows that a path names; none where it names a set of another kind."""
    return () if is_judged_set(path) else row_files(path, options)[0]


def is_judged_set(path: str) -> bool:
    """Return whether a path names a built-in or published set or a BEIR folder, whose labels nobody need explain."""
    return path.startswith(BUILTIN_PREFIX) or preset_path(path) is not None or beir_folder(path) is not None


def _read_files(
    path: str, files: Sequence[Path], notes: tuple[str, ...], options: SourceOptions, folder: Path | None
) -> LoadedRecords:
    """Read local files of rows into a folder, or with None into memory."""
    loader = _Loader(options, folder)
    for file in files:
        loader.read_file(file)
    return loader.finish(path, notes)


def _load_hub(path: str, options: SourceOptions, loader: _Loader) -> LoadedRecords:
    """Read a hub set."""
    split, dataset = hub_split(path, options.split, options.role, split_key=options.split_key)
    name = f"{path}/{split}"
    rows = hub_rows(dataset, partial(loader.columns.wanted, where=f"{name}:1"))
    loader.read(rows, options.images(None), file=name)
    return loader.finish(path, ())


def _check_supervision(table: RecordTable, loss: LossNeeds | None) -> None:
    """Refuse records that hold nothing which a loss learns from: it would average over nothing.

    Raises:
        DataError: With the first such record.
    """
    if loss is None or "positives" in loss.takes:
        return  # every row has a positive, or lists its pairs
    found = {
        "classes": "label_kind: class and a label",
        "pairs": "label_kind: pair or grade, and a label or score",
        "lists": "label_kind: grade, and as label or score a list of numbers, one for each of its documents",
    }
    wanted = " or ".join(found[each] for each in sorted(loss.takes) if each in found)
    for record in table:
        has = {"classes": record.label is not None, "pairs": bool(record.scores), "lists": len(record.scores) > 1}
        if not any(has.get(each) for each in loss.takes):
            raise DataError(f"{record.location}: loss_type {loss.name} learns nothing from this row: it needs {wanted}")


def beir_folder(path: str) -> Path | None:
    """Return the BEIR folder that a path names, or None when it names something else."""
    folder = home_path(path)
    return folder if is_folder(folder) and is_beir(folder) else None


class _Loader:
    """Collect the rows of one source under the options' policy, in memory or on disk in a folder."""

    def __init__(self, options: SourceOptions, folder: Path | None = None, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.loss = options.loss if options.role == "train" else None
        extra = () if options.loss is None else tuple(options.loss.columns)
        self.extra = () if self.loss is None else extra
        self.columns = ColumnResolver(options.keys.column_mapping, extra)
        self._options = options
        self._folder = folder
        self._log = options.log()
        self._unclear = UnclearLabels()
        self._num_rows = 0
        self._has_header = False
        self._num_missing: Counter[str] = Counter()  # rows without a column that every row needs
        self.modalities: set[Modality] = set()  # of the items of rows that are only looked at
        self._needed: dict[str, tuple[str, str]] = {}  # one that the loss asks for -> first row without it, and why

    @cached_property
    def _writer(self) -> RecordWriter:
        """What keeps rows; rows that are only looked at need none."""
        return RecordWriter(self.extra, self._folder)

    def table_form(self, file: Path) -> TableForm:
        """Tell how the cells of a table of text are told apart, and remember it for people."""
        form = table_form(file)
        self.columns.tables.update(dict.fromkeys(filter(None, [form.unusual(file)])))
        return form

    def read_file(self, file: Path, *, most: int | None = None) -> None:
        """Check the rows of a local file, or the first `most` of them, and keep the valid ones."""
        if most is None and (suffix_of(file) or "").startswith(".jsonl"):
            with collector_paused():
                self._read_blocks(file)
            return
        wanted = partial(self.columns.wanted, where=f"{file.name}:1")
        form = self.table_form(file) if format_of(file).cells_are_text else None
        rows, images = islice(iter_rows(file, wanted, form), most), self._options.images(file.parent)
        self.read(rows, images, file=file.name, cells_are_text=form is not None)

    def _read_blocks(self, file: Path) -> None:
        """Check the rows of a file of JSONL: a block of them at once where all are texts and right."""
        images, self._has_header = self._options.images(file.parent), False
        defaults = {each.name: each.typed(each.default) for each in self.extra}
        for block in line_blocks(file):
            rows = rows_alike(block)
            if rows is None:
                self.read(jsonl_rows(block.numbered()), images, file=file.name)
                continue
            shape = self.columns.shape(tuple(rows[0]), where=f"{file.name}:{block.first}")
            texts = block_of_texts(rows, shape)
            if texts is None:
                self.read(enumerate(rows, block.first), images, file=file.name)
                continue
            self._num_rows += len(rows)
            if self._keeps and not self._log.refused:
                self._writer.add_texts(texts, defaults, file=file.name, first=block.first)

    def check_first(self, source: str, *, is_alone: bool) -> None:
        """Refuse a source by what is known of its columns after its first rows.

        Args:
            is_alone: Whether there is no other file, which may have a column that this one lacks.
        """
        is_known = self._has_header or self._num_rows < FIRST_ROWS
        if is_alone and not self._num_rows:
            raise DataError(f"{source} holds no rows")
        if is_alone and is_known:
            self.columns.check_mapping(source, trains=self._options.role == "train")
        if self._log.refused or self._has_header:
            self._check_missing(source if is_known else f"the first {FIRST_ROWS} rows of {source}")

    def read(self, rows: Iterable[RawRow], images: ImageRoot, *, file: str, cells_are_text: bool = False) -> None:
        """Check the rows of one file and keep the valid ones."""
        columns, log = self.columns, self._log
        self._has_header = cells_are_text
        checker = RowChecker(
            images,
            cells_are_text=cells_are_text,
            label_kind=self._options.keys.label_kind,
            loss=self.loss,
            unclear=self._unclear,
        )
        for line, row in rows:
            self._num_rows += 1
            where = f"{file}:{line}"
            if isinstance(row, str):
                log.add(where, row)
                continue
            shape = columns.shape(tuple(row), where=where)
            try:
                fields = checker.check(row, shape, where)
            except Fault as fault:
                self._refuse(fault, row, where)
                continue
            query, positives, negatives, label, scores, numbers = fields
            if not self._keeps:
                self.modalities.update(map(modality_of, (query, *positives, *negatives)))
            elif not log.refused:
                self._writer.add(
                    query,
                    positives=positives,
                    negatives=negatives,
                    label=label,
                    scores=scores,
                    columns=numbers,
                    file=file,
                    line=line,
                )

    def read_beir(self, part: BeirSplit, folder: Path, images: ImageRoot) -> LoadedRecords:
        """Return a record per query of a BEIR split that has a relevant document."""
        self.columns = ColumnResolver({}, self.extra)  # the layout fixes the columns
        self.read(beir_rows(part), images, file=part.query_file)
        irrelevant = len(part.data.queries) - self._num_rows
        notes = [*part.data.notes, *self._unmapped("a BEIR folder")]
        if irrelevant:
            verb = "has no relevant document and is" if irrelevant == 1 else "have no relevant document and are"
            notes.append(f"{plural(irrelevant, 'query', 'queries')} {verb} left out.")
        return self.finish(f"{folder} ({part.data.name})", notes)

    def read_set(self, rows: Rows, path: str, *, name: str) -> LoadedRecords:
        """Return the records of a set that code makes; dictionaries are checked as rows of a file called `name`."""
        if isinstance(rows, LoadedRecords):
            return self.complete(rows, path, "a built-in set")
        self.read(self._rows_of(rows), self._options.images(None), file=name)
        return self.finish(path, ())

    def _rows_of(self, rows: Iterable[object]) -> Iterator[RawRow]:
        """Yield dictionaries with their numbers, and keep records as they are."""
        for number, row in enumerate(rows, start=1):
            if isinstance(row, Record):
                self._keep(row)
            elif isinstance(row, Mapping):
                yield number, dict(row)
            else:
                yield number, f"expected a dictionary or a Record, got {type(row).__name__}"

    def _keep(self, record: Record) -> None:
        for column in self.extra:
            if column.required and column.name not in record.columns and self.loss is not None:
                needed = f"loss_type {self.loss.name} needs it: {column.meaning}"
                raise DataError(f"{record.location}: {column.name}: missing; {needed}")
        file, _, line = record.location.rpartition(":")
        if not line.isascii() or not line.isdigit():
            raise DataError(f"a record says that it stands in {record.location!r}; write its location as file:line")
        self._num_rows += 1
        self._writer.add(
            record.query,
            positives=record.positives,
            negatives=record.negatives,
            label=record.label,
            scores=record.scores,
            columns={each.name: each.typed(record.columns.get(each.name, each.default)) for each in self.extra},
            file=file,
            line=int(line),
        )

    def complete(self, loaded: LoadedRecords, path: str, kind: str) -> LoadedRecords:
        """Return the records of a set whose columns are fixed, with what the loss asks for where that may be left out.

        Raises:
            DataError: The loss can't do without a column.
        """
        for column in self.extra:
            if column.required and self.loss is not None:
                needed = f"loss_type {self.loss.name} needs it: {column.meaning}"
                raise DataError(f"{path} is {kind} and has no column {column.name!r}; {needed}")
        table = loaded.table.with_columns(self.extra) if self.extra else loaded.table
        _check_supervision(table, self.loss)
        return LoadedRecords(table, (*loaded.notes, *self._unmapped(kind)), loaded.num_invalid)

    def _unmapped(self, source: str) -> tuple[str, ...]:
        """Return a sentence that column_mapping has no effect on a source whose columns are fixed."""
        return (f"column_mapping has no effect on {source}.",) if self._options.keys.column_mapping else ()

    def finish(self, source: str, notes: Sequence[str]) -> LoadedRecords:
        """Return what was kept, or refuse the source."""
        if not self._num_rows:
            msg = f"{source} holds no rows"
            raise DataError(msg)
        # One mapping serves all sets: a column that training drops need not stand in the others.
        self.columns.check_mapping(source, trains=self._options.role == "train")
        self._check_missing(source)
        self._unclear.check()
        self._log.check(source, self._num_rows)
        if not len(self._writer):
            msg = f"all {plural(self._num_rows, 'row')} of {source} are invalid: {self._log.notes()[0]}"
            raise DataError(msg)
        columns = self.columns.read()
        kept = (*notes, *self._log.notes(), *columns.notes)
        table = self._writer.finish()
        _check_supervision(table, self.loss)
        return LoadedRecords(table, kept, self._log.count, columns)

    def _check_missing(self, source: str) -> None:
        """Refuse rows that all lack a column which every row needs."""
        for column, count in self._num_missing.items():
            if count == self._num_rows:
                first, needed = self._needed.get(column, ("", ""))
                reason = self.columns.missing(column, self.columns.seen)
                header = "; the first line of a CSV or TSV file names its columns" if self._has_header else ""
                raise DataError(f"{first}no row of {source} has a column {column!r}: {reason}{needed}{header}")

    def _refuse(self, fault: Fault, row: Mapping[str, object], where: str) -> None:
        reason = fault.reason
        if fault.missing:
            self._num_missing[fault.column] += 1
            reason = self.columns.missing(fault.column, row) if self._log.lists_missing(fault.column) else ""
            if fault.reason:
                self._needed.setdefault(fault.column, (f"{where}: ", f"; {fault.reason}"))
                reason = f"{reason}; {fault.reason}" if reason else ""
        self._log.add(where, reason, column=fault.column, may_drop=not fault.escapes)
