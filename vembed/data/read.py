"""Read a path as rows to train on, as a judged set, or document by document: one door for all of them.

`read(path, role, keys)` returns a `DataSource`; nothing is opened before one of its methods is called. A path is a
file, a folder, a glob or a list of row files, a BEIR folder, a hub id, a built-in set or a published one (`kind`).

1. `refuse_missing` opens the files, `peek` checks the first rows: in milliseconds, before torch is imported.
2. `records` reads all rows. A `_SourceChecker` resolves their columns (`columns.py`), checks every value (`check.py`),
   counts the invalid rows, and judges the source as a whole; a `_Loader` adds the valid ones to an Arrow table
   (`table_writer.py`). The whole source is read before anything trains; memory is the table plus a few thousand rows.
3. `judged` reads queries, documents and judgements (`judged.py`), `documents` a corpus (`documents.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vembed import collector_paused
from vembed.batch import Composed, Image, ImageLimits, modality_of, pictures_in
from vembed.data.builtin import load_builtin, load_builtin_retrieval
from vembed.data.check import Fault, ProblemLog, RowChecker, UnclearLabels, block_of_texts
from vembed.data.columns import WEIGHT_COLUMN, ColumnResolver
from vembed.data.documents import Corpus
from vembed.data.formats import JSONL, format_of, iter_rows, table_form
from vembed.data.images import ImageRoot
from vembed.data.judged import is_beir, read_beir, task_from_records
from vembed.data.keys import BUILTIN_PREFIX, PATH_KEYS, SPLIT_KEYS, SPLIT_NAMES, DataKeys
from vembed.data.lines import Unreadable, jsonl_rows, line_blocks, os_errors_named, rows_alike
from vembed.data.presets import preset_path
from vembed.data.row_files import hub_rows, hub_split, row_files
from vembed.data.table import LoadedRecords, Record
from vembed.data.table_cache import kept_or_read
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError
from vembed.files import home_path, is_folder
from vembed.redact import redact
from vembed.registry import DATASETS
from vembed.text import cut, plural, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vembed.batch import Item, Modality
    from vembed.data.check import Fields
    from vembed.data.columns import ColumnsRead, ExtraColumn, LossNeeds
    from vembed.data.judged import RetrievalData
    from vembed.data.keys import Role
    from vembed.data.lines import RawRow
    from vembed.data.presets import PresetPath
    from vembed.data.table import RecordTable

FIRST_ROWS = 100
"""Rows that tell in milliseconds whether the others have the columns that they need."""


def read(
    path: str,
    role: Role,
    keys: DataKeys | None = None,
    *,
    split: str | None = None,
    loss: LossNeeds | None = None,
    user_names: tuple[str, str] | None = None,
) -> DataSource:
    """Return a source of data, which reads when it is asked for rows, a judged set or documents.

    Args:
        path: A .jsonl, .json, .csv, .tsv (each possibly .gz), .parquet or .tar file, or one of a plugin's format; a
            folder, glob or range `{000..127}` of such files, read in order of their names; a BEIR folder;
            `builtin:NAME`; a published set `NAME:FOLDER` of `presets/`; or a hub id `owner/name[:config]`.
        role: What the data are for; chooses the split where there are several.
        keys: Of these, columns, labels, pictures and invalid rows are read; None takes the defaults.
        split: The split to read instead of the role's.
        loss: Needs of the loss that trains on the rows; of other roles' rows, nothing is asked for it.
        user_names: The user's names for path and split, for errors, such as ("--data", "--split"); None takes the keys
            of the role.
    """
    return DataSource(path, role, keys or DataKeys(), split=split, loss=loss, user_names=user_names)


class DataSource:
    """A path with a role, and how it is to be read; `read` makes it.

    Attributes:
        path_key: The user's name for the path, for errors: a config key, an option or an argument.
        split_key: The same of the split.
        loss_needs: Needs of the loss that trains on the rows, whatever the role; see `training_needs`.
        image_limits: Caps on each picture.
    """

    def __init__(
        self,
        path: str,
        role: Role,
        keys: DataKeys,
        *,
        split: str | None = None,
        loss: LossNeeds | None = None,
        user_names: tuple[str, str] | None = None,
    ) -> None:
        self.path, self.role, self.keys, self.split, self.loss_needs = path, role, keys, split, loss
        self.path_key, self.split_key = user_names or (PATH_KEYS[role], SPLIT_KEYS[role])
        self.image_limits = ImageLimits(max_pixels=keys.max_image_pixels)

    @cached_property
    def preset(self) -> PresetPath | None:
        """The published set that the path names."""
        return None if self.path.startswith(BUILTIN_PREFIX) else preset_path(self.path)

    @cached_property
    def kind(self) -> Literal["builtin", "published", "beir", "rows"]:
        """The kind of set; "rows" are local files or a hub set. The first three have judgements or fixed columns."""
        # Names before files: a local file whose name begins like a set is named with its folder, `./builtin:x.jsonl`.
        if self.path.startswith(BUILTIN_PREFIX):
            return "builtin"
        if self.preset is not None:
            return "published"
        return "beir" if is_folder(self._local) and is_beir(self._local) else "rows"

    @cached_property
    def files(self) -> Sequence[Path]:
        """Local files of rows; none where the path names a hub set or a set of another kind.

        Raises:
            DataError: Nothing is there, files of several kinds are, or there is no such split.
        """
        return self._files_and_notes[0]

    @property
    def name(self) -> str:
        """Name for a table of results: "stdlib-code/dev", "dev.jsonl", "owner/name/test"."""
        if self.path.startswith(BUILTIN_PREFIX):
            return f"{self.path.removeprefix(BUILTIN_PREFIX)}/{self._builtin_split}"
        name = Path(self.path).name if os.path.lexists(self._local) else self.path
        return f"{name}/{self.split}" if self.split else name

    @property
    def training_needs(self) -> LossNeeds | None:
        """Needs of the loss on these rows; None where they aren't trained on."""
        return self.loss_needs if self.role == "train" else None

    @property
    def extra_columns(self) -> tuple[ExtraColumn, ...]:
        """Columns of numbers that the loss asks for; none where the rows aren't trained on."""
        return () if self.training_needs is None else tuple(self.training_needs.columns)

    def images(self, folder: Path | None) -> ImageRoot:
        """Return what checks pictures whose paths start from a folder; None where the rows stand in none.

        Raises:
            DataError: `image_root` doesn't exist.
        """
        root = self.keys.image_root
        return ImageRoot(folder if root is None else Path(root), self.image_limits)

    def new_columns(self) -> ColumnResolver:
        """Return what resolves the columns of the rows.

        Raises:
            ConfigError: `column_mapping` names a target that records don't have, or one target twice.
        """
        # One mapping serves all sets: in others than the training set, too, it may name a column that the loss reads.
        extra = () if self.loss_needs is None else tuple(self.loss_needs.columns)
        return ColumnResolver(self.keys.column_mapping, extra)

    def new_log(self) -> ProblemLog:
        """Return a log of invalid rows that follows the policy of the keys."""
        return ProblemLog(self.keys.max_invalid_records if self.keys.skip_invalid_records else None)

    def refuse_missing(self) -> None:
        """Refuse a path where no file is, or one that can't be opened, without reading any.

        Raises:
            DataError: Nothing is there, files of several kinds are, or there is no such split.
            MachineError: The system refuses to open a file.
        """
        for file in self.files:
            with os_errors_named(file):
                file.open("rb").close()

    def peek(self) -> tuple[ColumnsRead, frozenset[Modality]]:
        """Refuse local files of rows where the columns of the first rows show that `records` would.

        Returns:
            How local files of rows are read, empty for a source of another kind; and the modalities of the first items.

        Raises:
            VembedError: As `records`.
        """
        columns = self.new_columns()  # refuses a wrong column_mapping, whatever the kind of set
        if self.files:
            checker = _SourceChecker(self)
            modalities: set[Modality] = set()
            for line, row in islice(checker.open_file(self.files[0]), FIRST_ROWS):
                fields = checker.check_row(line, row)
                if fields is not None:
                    modalities.update(map(modality_of, (fields.query, *fields.positives, *fields.negatives)))
            is_only_file = len(self.files) == 1
            checker.judge_first_rows(self.path if is_only_file else str(self.files[0]), is_only_file=is_only_file)
            return checker.columns.summary(), frozenset(modalities)
        has_pictures = self.kind == "published"
        if self.kind == "builtin":
            # Drawing the rows takes seconds: the set states whether they have pictures.
            name = self.path.removeprefix(BUILTIN_PREFIX)
            has_pictures = name in DATASETS and DATASETS.load(name).holds_pictures
        return columns.summary(), frozenset({"image"} if has_pictures else ())

    def raw_rows(self, count: int) -> list[dict[str, object]]:
        """Return the first rows of local files as they are written, without those that can't be read.

        Raises:
            VembedError: As `records`.
        """
        rows = islice(iter_rows(self.files[0]), count) if self.files else ()
        return [row for _, row in rows if isinstance(row, dict)]

    def records(self) -> LoadedRecords:
        """Read, check and collect the rows; those of large files are taken from the cache, or kept there.

        Returns:
            At least one record, and notes on what was skipped or ignored.

        Raises:
            ConfigError: `column_mapping` names a column that records don't have.
            DataError: The source is missing, broken or inconsistent, or lacks what the loss learns from; the message
                names file:line and column.
            MachineError: The hub can't be reached, or the system refuses to read a file.
        """
        self.new_columns()  # refuses a wrong column_mapping, whatever the kind of set
        if self.files:
            return kept_or_read(self.files, self, self.extra_columns, self._load_files)
        return self._load_set()

    def checked_records(self, problems: ProblemLog, folder: Path) -> LoadedRecords:
        """Read, check and collect the rows as `records` does, for a report on the invalid ones.

        Args:
            problems: Collects the invalid rows, and says how many are too many in place of the keys.
            folder: An empty folder that rows of files are read into.

        Raises:
            VembedError: As `records`.
        """
        self.new_columns()  # as in `records`
        # Not from the cache, which doesn't say which rows were invalid.
        return self._load_files(folder, problems) if self.files else self._load_set(problems)

    def judged(self, *, takes_pairs: bool = False) -> RetrievalData:
        """Read queries, documents and judgements.

        A BEIR folder or a published set is taken as it is, and so is a built-in set with judgements. Of any other
        source the documents are the distinct positives and negatives.

        Args:
            takes_pairs: Whether rows with graded pairs become a task of these, on which nothing is searched.

        Raises:
            ConfigError: As `records`.
            DataError: As `records` and `read_beir`.
            MachineError: As `records`.
        """
        task: RetrievalData | None = None
        kind = ""
        if self.kind == "beir":
            images = self.images(self._local)
            task = read_beir(self._local, self.split, self.role, images, split_key=self.split_key).data
            kind = "a BEIR folder"
        elif self.preset is not None:
            # A set with rows left out would no longer be the set that others report.
            task, kind = self.preset.retrieval(self, ProblemLog()), "a published set"
        elif self.kind == "builtin":
            name = self.path.removeprefix(BUILTIN_PREFIX)
            task, kind = load_builtin_retrieval(name, self._builtin_split), "a built-in set"
        if task is not None:
            return replace(task, notes=(*task.notes, *self._unmapped(kind)))
        loaded = self.records()
        task = task_from_records(loaded.table, self.name, self.keys.label_kind if takes_pairs else "auto")
        return replace(task, notes=(*loaded.notes, *task.notes))

    def documents(
        self, *, id_column: str | None = None, text_column: str | None = None, image_column: str | None = None
    ) -> Corpus:
        """Return the documents of a corpus, which are read as they are iterated.

        Args:
            id_column: Column of the ids; None takes the first of the usual names that a row has.
            text_column: Column of the texts; without `image_column`, it leaves pictures in the rows alone.
            image_column: Column of the pictures.

        Raises:
            DataError: There is no such source.
        """
        # Columns and labels of training rows mean nothing here: of the keys, those of pictures count.
        keys = DataKeys(image_root=self.keys.image_root, max_image_pixels=self.keys.max_image_pixels)
        source = DataSource(self.path, "test", keys)
        return Corpus(source, id_column=id_column, text_column=text_column, image_column=image_column)

    @property
    def _local(self) -> Path:
        return home_path(self.path)

    @property
    def _builtin_split(self) -> str:
        return self.split or SPLIT_NAMES[self.role][0]

    @cached_property
    def _files_and_notes(self) -> tuple[list[Path], tuple[str, ...]]:
        return row_files(self.path, self) if self.kind == "rows" else ([], ())

    def _load_files(self, into: Path | None, problems: ProblemLog | None = None) -> LoadedRecords:
        """Read local files into a folder, or with None into memory."""
        loader = _Loader(self, into, problems)
        for file in self.files:
            loader.add_file(file)
        return loader.finish(self.path, self._files_and_notes[1])

    def _load_set(self, problems: ProblemLog | None = None) -> LoadedRecords:
        """Read a source that isn't local files of rows into memory."""
        if self.preset is not None:
            log = self.new_log() if problems is None else problems
            return self._finish_fixed(self.preset.records(self, log), "a published set")
        if self.kind == "builtin":
            return self._load_builtin(problems)
        if self.kind == "beir":
            return self._load_beir(problems)
        split, dataset = hub_split(self)  # all that is left
        name = f"{self.path}/{split}"
        loader = _Loader(self, problems=problems)
        loader.checker.begin_file(name, self.images(None))
        loader.add_rows(hub_rows(dataset, partial(loader.checker.columns.wanted, where=f"{name}:1")))
        return loader.finish(self.path)

    def _load_builtin(self, problems: ProblemLog | None) -> LoadedRecords:
        """Return the records of a set that code makes; its dictionaries are checked as rows of a file are."""
        name, split = self.path.removeprefix(BUILTIN_PREFIX), self._builtin_split
        made = load_builtin(name, split)
        if isinstance(made, LoadedRecords):
            return self._finish_fixed(made, "a built-in set")
        rows: Iterable[object] = made  # the code may be a plugin's, and yield anything
        loader = _Loader(self, problems=problems)
        loader.checker.begin_file(f"{name}/{split}", self.images(None))
        for number, row in enumerate(rows, start=1):
            if isinstance(row, Record):
                loader.add_record(row)
            elif isinstance(row, Mapping):
                loader.add_row(number, dict(row))
            else:
                loader.add_row(number, Unreadable(f"expected a dictionary or a Record, got {type(row).__name__}"))
        return loader.finish(self.path)

    def _load_beir(self, problems: ProblemLog | None) -> LoadedRecords:
        """Return a record per query of a BEIR split that has a relevant document."""
        folder, images = self._local, self.images(self._local)
        part = read_beir(folder, self.split, self.role, images, self.extra_columns, problems, split_key=self.split_key)
        loader = _Loader(self, problems=problems)
        loader.checker.columns = ColumnResolver({}, self.extra_columns)  # the layout fixes the columns
        loader.checker.begin_file(part.query_file, images)
        loader.add_rows(part.rows())
        notes = [*part.data.notes, *self._unmapped("a BEIR folder")]
        if irrelevant := len(part.data.queries) - loader.checker.num_rows:
            verb = "has no relevant document and is" if irrelevant == 1 else "have no relevant document and are"
            notes.append(f"{plural(irrelevant, 'query', 'queries')} {verb} left out.")
        return loader.finish(f"{folder} ({part.data.name})", notes)

    def _finish_fixed(self, loaded: LoadedRecords, kind: str) -> LoadedRecords:
        """Return the ready table of a set whose columns are fixed, with the defaults of those that the loss asks for.

        Raises:
            DataError: The loss can't do without a column.
        """
        for column in self.extra_columns:
            if column.required and self.training_needs is not None:
                needed = self.training_needs.reason_for(column)
                raise DataError(f"{self.path} is {kind} and has no column {column.name!r}; {needed}")
        table = loaded.table.with_columns(self.extra_columns) if self.extra_columns else loaded.table
        _check_supervision(table, self.training_needs)
        return LoadedRecords(table, (*loaded.notes, *self._unmapped(kind)), loaded.num_invalid)

    def _unmapped(self, kind: str) -> tuple[str, ...]:
        """Return a note that column_mapping has no effect on a set whose columns are fixed."""
        return (f"column_mapping has no effect on {kind}.",) if self.keys.column_mapping else ()


class _FirstLack(NamedTuple):
    """First row without a column that the loss asks for."""

    where: str  # file:line
    reason: str  # of the need


class _SourceChecker:
    """Checker of one source: of each row as it is read, then of the source as a whole.

    Args:
        problems: Collects the invalid rows; None follows the policy of the keys.

    Attributes:
        columns: Resolves the columns of the rows.
        log: The invalid rows.
        file: Name of the file whose rows are checked now, as `begin_file` was told.
        num_rows: Rows so far, valid or not.
    """

    def __init__(self, source: DataSource, problems: ProblemLog | None = None) -> None:
        self._source = source
        self.columns = source.new_columns()
        self.log = source.new_log() if problems is None else problems
        self._unclear = UnclearLabels()
        self.file = ""
        self._row_checker: RowChecker  # of the file that was begun last
        self._last_file_is_table = False  # for the advice that a header names the columns
        self.num_rows = 0
        self._num_missing: Counter[str] = Counter()  # column that every row needs -> rows without it
        self._first_lacks: dict[str, _FirstLack] = {}  # by the column that the loss asks for

    def open_file(self, file: Path) -> Iterable[RawRow]:
        """Begin a local file, and return its rows to be checked; columnar files give only the columns that are read."""
        images = self._source.images(file.parent)
        form = table_form(file) if format_of(file).cells_are_text else None
        if form is not None and (words := form.unusual(file)):
            self.columns.note_table(words)
        self.begin_file(file.name, images, cells_are_text=form is not None)
        return iter_rows(file, partial(self.columns.wanted, where=f"{file.name}:1"), form)

    def begin_file(self, name: str, images: ImageRoot, *, cells_are_text: bool = False) -> None:
        """Take the rows that are checked from now on for those of a file, or of a set that has no files."""
        self.file, self._last_file_is_table = name, cells_are_text
        # A checker for each file: its pictures' paths start from its folder.
        self._row_checker = RowChecker(
            images,
            cells_are_text=cells_are_text,
            label_kind=self._source.keys.label_kind,
            loss=self._source.training_needs,
            unclear=self._unclear,
        )

    def check_row(self, line: int, row: dict[str, Any] | Unreadable) -> Fields | None:
        """Return the content of a row, every value checked; None for an invalid row, which goes to the log."""
        self.num_rows += 1
        where = f"{self.file}:{line}"
        if isinstance(row, Unreadable):
            self.log.add(where, row)
            return None
        shape = self.columns.shape(tuple(row), where=where)
        try:
            return self._row_checker.check(row, shape, where)
        except Fault as fault:
            self._note_fault(fault, row, where)
            return None

    def _note_fault(self, fault: Fault, row: dict[str, Any], where: str) -> None:
        reason = fault.reason
        if fault.missing:
            self._num_missing[fault.column] += 1
            if fault.reason:  # the column is one that the loss asks for
                self._first_lacks.setdefault(fault.column, _FirstLack(where, fault.reason))
            # `columns.missing` searches for similar names: too slow for every row. The first row gets the words; if all
            # rows lack the column, `_check_missing` says so once.
            reason = ""
            if self.log.lists_missing(fault.column):
                reason = "; ".join(filter(None, (self.columns.missing(fault.column, row), fault.reason)))
        self.log.add(where, reason, column=fault.column, may_drop=not fault.escapes)

    def judge_first_rows(self, name: str, *, is_only_file: bool) -> None:
        """Refuse a source whose first rows show that `judge` would.

        Args:
            name: The file, for the error.
            is_only_file: False where another file may have a column that this one lacks.
        """
        # A table states its columns in the header; a JSONL row may add one, unless all rows were read.
        all_columns_seen = self._last_file_is_table or self.num_rows < FIRST_ROWS
        if is_only_file and not self.num_rows:
            raise DataError(f"{name} holds no rows")
        if is_only_file and all_columns_seen:
            self.columns.check_mapping(name, trains=self._source.role == "train")
        if self.log.refused or self._last_file_is_table:
            self._check_missing(name if all_columns_seen else f"the first {FIRST_ROWS} rows of {name}")

    def judge(self, name: str, num_kept: int) -> None:
        """Refuse a source by what was wrong with its rows; to be called after the last one.

        Args:
            name: The source, for the error.
            num_kept: Valid rows, of which the table is made.
        """
        # From the most general cause to the most special: nothing there, a misspelt mapping, a column that all lack,
        # unclear labels, too many bad rows, none left.
        if not self.num_rows:
            raise DataError(f"{name} holds no rows")
        # One mapping serves all sets: a column that training drops need not stand in the others.
        self.columns.check_mapping(name, trains=self._source.role == "train")
        self._check_missing(name)
        self._unclear.refuse_any()
        self.log.refuse_over_budget(name, self.num_rows)
        if not num_kept:
            raise DataError(f"all {plural(self.num_rows, 'row')} of {name} are invalid: {self.log.notes()[0]}")

    def _check_missing(self, name: str) -> None:
        """Refuse rows that all lack a column which every row needs."""
        for column, count in self._num_missing.items():
            if count == self.num_rows:
                first = self._first_lacks.get(column)
                where, needed = ("", "") if first is None else (f"{first.where}: ", f"; {first.reason}")
                reason = self.columns.missing(column, self.columns.seen)
                header = "; the first line of a CSV or TSV file names its columns" if self._last_file_is_table else ""
                raise DataError(f"{where}no row of {name} has a column {column!r}: {reason}{needed}{header}")


class _Loader:
    """Builder of the table of one source, from its valid rows.

    Args:
        folder: An empty folder for the table's files; None keeps them in memory.
        problems: Collects the invalid rows; None follows the policy of the keys.

    Attributes:
        checker: Checks the rows. `add_row` and `add_rows` take those of the file that it began.
    """

    def __init__(self, source: DataSource, folder: Path | None = None, problems: ProblemLog | None = None) -> None:
        self._source = source
        self.checker = _SourceChecker(source, problems)
        self._writer = RecordWriter(source.extra_columns, folder)

    def add_file(self, file: Path) -> None:
        """Add the valid rows of a local file."""
        # The fast path of our own JSONL; a look at the first rows needs no speed.
        if format_of(file) is JSONL:
            # The collector would visit every row that is a Python object, again and again.
            with collector_paused():
                self._add_jsonl_blocks(file)
        else:
            self.add_rows(self.checker.open_file(file))

    def _add_jsonl_blocks(self, file: Path) -> None:
        """Add the valid rows of a file of JSONL: a block of them at once where all are texts and right."""
        checker = self.checker
        checker.begin_file(file.name, self._source.images(file.parent))
        defaults = {column.name: column.typed(column.default) for column in self._source.extra_columns}
        for block in line_blocks(file):
            # Three paths, each slower and more careful than the one before: a block of texts at once (no Python per
            # row), a block of rows that are alike (parsed at once, checked one by one), and line by line.
            rows = rows_alike(block)
            if rows is None:
                self.add_rows(jsonl_rows(block.numbered()))
                continue
            shape = checker.columns.shape(tuple(rows[0]), where=f"{file.name}:{block.first}")
            texts = block_of_texts(rows, shape)
            if texts is None:
                self.add_rows(enumerate(rows, block.first))
                continue
            checker.num_rows += len(rows)  # which `block_of_texts` has checked
            if not checker.log.refused:
                self._writer.add_texts(texts, defaults, file=file.name, first=block.first)

    def add_rows(self, rows: Iterable[RawRow]) -> None:
        """Add the valid ones among some rows."""
        for line, row in rows:
            self.add_row(line, row)

    def add_row(self, line: int, row: dict[str, Any] | Unreadable) -> None:
        """Add a row, if it is valid."""
        fields = self.checker.check_row(line, row)
        # A source that is refused is read on for its problems alone.
        if fields is not None and not self.checker.log.refused:
            query, positives, negatives, label, scores, numbers = fields
            self._writer.add(
                query,
                positives=positives,
                negatives=negatives,
                label=label,
                scores=scores,
                columns=numbers,
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
        if not line.isascii() or not line.isdigit():
            raise DataError(f"a record has the location {record.location!r}; write it as file:line")
        self.checker.num_rows += 1
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
        """
        checker = self.checker
        checker.judge(source_name, len(self._writer))
        columns = checker.columns.summary()
        table = self._writer.finish()
        _check_supervision(table, self._source.training_needs)
        return LoadedRecords(table, (*notes, *checker.log.notes(), *columns.notes), checker.log.count, columns)


def _check_supervision(table: RecordTable, needs: LossNeeds | None) -> None:
    """Refuse records that hold nothing which the loss learns from: it would average over nothing.

    Raises:
        DataError: With the first such record.
    """
    if needs is None or "positives" in needs.takes:
        return  # every row has a positive, or lists its pairs
    sources = {
        "classes": "label_kind: class and a label",
        "pairs": "label_kind: pair or grade, and a label or score",
        "lists": "label_kind: grade, and as label or score a list of numbers, one for each of its documents",
    }
    wanted = " or ".join(sources[kind] for kind in sorted(needs.takes) if kind in sources)
    # One walk over all records, for losses of pairs and classes only.
    for record in table:
        has = {"classes": record.label is not None, "pairs": bool(record.scores), "lists": len(record.scores) > 1}
        if not any(has.get(kind) for kind in needs.takes):
            raise DataError(
                f"{record.location}: loss_type {needs.name} learns nothing from this row: it needs {wanted}"
            )


def describe(path: str, loaded: LoadedRecords, *, parts: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return what was read of a source of records by label: "data", "columns" (where the source has any), "example".

    Args:
        parts: How many of the loaded rows aren't trained on, by what they are for; None says nothing of it.
    """
    table = loaded.table
    facts = [f"{plural(len(table), 'row')} of {cut(path, 200)}"]
    if parts:
        uses = {"train": len(table) - sum(parts.values()), **parts}
        facts[0] += f": {', '.join(f'{count:,} {use}' for use, count in uses.items())}"
    if loaded.num_invalid:
        facts.append(f"{plural(loaded.num_invalid, 'invalid row')} dropped")
    facts.append(plural(len(table.numbers("negatives")[1]), "hard negative"))
    columns = loaded.columns.text
    lines = {"data": "; ".join(facts), **({"columns": columns} if columns else {}), "example": example(table[0])}
    return {name: redact(text) for name, text in lines.items()}


def example(record: Record) -> str:
    """Return one record in a line, every text shortened."""

    def shown(item: Item) -> str:
        if isinstance(item, str):
            return quoted(" ".join(item[:200].split()))
        pictures = list(pictures_in([item]))
        words = f"picture {quoted(pictures[0].path)}" if isinstance(item, Image) or len(pictures) == 1 else "pictures"
        return f"{words} with {quoted(item.text)}" if isinstance(item, Composed) and item.text else words

    parts = [f"query {shown(record.query)}"]
    for name, items in (("positive", record.positives), ("negative", record.negatives)):
        if items:
            more = f" and {len(items) - 1:,} more" if len(items) > 1 else ""
            parts.append(f"{name} {shown(items[0])}{more}")
    if record.label is not None:
        parts.append(f"label {cut(str(record.label), 40)}")
    parts += ["scores " + ", ".join(f"{score:g}" for score in record.scores[:5])] if record.scores else []
    usual = {WEIGHT_COLUMN.name: WEIGHT_COLUMN.default}
    parts += [f"{cut(name, 40)} {number:g}" for name, number in record.columns.items() if usual.get(name) != number]
    return ", ".join(parts)
