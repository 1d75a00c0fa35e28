"""Read a path as rows to train on, as a judged set, or document by document: one door for all of them.

`read(path, role, keys)` returns a `DataSource`; nothing is opened before one of its methods is called. A path is a
file, a folder, a glob or a list of row files, a BEIR folder, a hub id, a built-in set or a published one (`kind`).

1. `refuse_missing` opens the files, `peek` checks the first rows: in milliseconds, before torch is imported.
2. `records` reads all rows. Their columns are resolved (`columns.py`), every value is checked (`check.py`), valid rows
   go to an Arrow table (`table_writer.py`), invalid ones are counted. The whole source is read before anything trains;
   memory is the table plus a few thousand rows.
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
from typing import TYPE_CHECKING, Literal

from vembed import collector_paused
from vembed.batch import Composed, Image, ImageLimits, modality_of, pictures_in
from vembed.data.builtin import load_builtin, load_builtin_retrieval
from vembed.data.check import Fault, ProblemLog, RowChecker, UnclearLabels, block_of_texts
from vembed.data.columns import WEIGHT_COLUMN, ColumnResolver
from vembed.data.documents import Corpus
from vembed.data.formats import format_of, iter_rows, suffix_of, table_form
from vembed.data.images import ImageRoot
from vembed.data.judged import is_beir, read_beir, task_from_records
from vembed.data.keys import BUILTIN_PREFIX, PATH_KEYS, SPLIT_KEYS, SPLIT_NAMES, DataKeys
from vembed.data.lines import jsonl_rows, line_blocks, reading, rows_alike
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
    from collections.abc import Iterable, Iterator, Sequence

    from vembed.batch import Item, Modality
    from vembed.data.builtin import Rows
    from vembed.data.columns import ColumnsRead, LossNeeds
    from vembed.data.formats import TableForm
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
    named: tuple[str, str] | None = None,
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
        named: What the user calls path and split, where those aren't the keys of the role.
    """
    return DataSource(path, role, keys or DataKeys(), split=split, loss=loss, named=named)


class DataSource:
    """A path with a role, and how it is to be read; `read` makes it.

    Attributes:
        path_key: What the user calls the path, for errors: a config key, an option or an argument.
        split_key: The same of the split.
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
        named: tuple[str, str] | None = None,
    ) -> None:
        self.path, self.role, self.keys, self.split, self.loss = path, role, keys, split, loss
        self.path_key, self.split_key = named or (PATH_KEYS[role], SPLIT_KEYS[role])
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

    def images(self, folder: Path | None) -> ImageRoot:
        """Return what checks the pictures of a source in a folder, None when it has none.

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
        return ColumnResolver(self.keys.column_mapping, () if self.loss is None else tuple(self.loss.columns))

    def refuse_missing(self) -> None:
        """Refuse a path where no file is, or one that can't be opened, without reading any.

        Raises:
            DataError: Nothing is there, files of several kinds are, or there is no such split.
            MachineError: The system refuses to open a file.
        """
        for file in self.files:
            with reading(file):
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
            loader = _Loader(self, keeps=False)
            loader.read_file(self.files[0], most=FIRST_ROWS)
            is_alone = len(self.files) == 1
            loader.check_first(self.path if is_alone else str(self.files[0]), is_alone=is_alone)
            return loader.columns.read(), frozenset(loader.modalities)
        # Drawing the rows of a built-in set takes seconds: it states whether they have pictures.
        builtin = self.path.removeprefix(BUILTIN_PREFIX) if self.kind == "builtin" else ""
        has_pictures = self.kind == "published" or (builtin in DATASETS and DATASETS.load(builtin).holds_pictures)
        return columns.read(), frozenset({"image"} if has_pictures else ())

    def raw_rows(self, count: int) -> list[dict[str, object]]:
        """Return the first rows of local files as they are written, without those that can't be read.

        Raises:
            VembedError: As `records`.
        """
        rows = islice(iter_rows(self.files[0]), count) if self.files else ()
        return [row for _, row in rows if isinstance(row, dict)]

    def records(self, problems: ProblemLog | None = None, folder: Path | None = None) -> LoadedRecords:
        """Read, check and collect the rows.

        Args:
            problems: Collects the invalid rows in place of the keys' policy; nothing is kept for later starts then.
            folder: With `problems`: an empty folder that rows of files are read into; None: memory.

        Returns:
            At least one record, and notes on what was skipped or ignored.

        Raises:
            ConfigError: `column_mapping` names a column that records don't have.
            DataError: The source is missing, broken or inconsistent, or lacks what the loss learns from; the message
                names file:line and column.
            MachineError: The hub can't be reached, or the system refuses to read a file.
        """
        loader = _Loader(self, problems=problems)
        if self.kind == "builtin":
            name, split = self.path.removeprefix(BUILTIN_PREFIX), self._builtin_split
            return loader.read_set(load_builtin(name, split), name=f"{name}/{split}")
        if self.preset is not None:
            return loader.complete(self.preset.records(self, loader.log), "a published set")
        if self.kind == "beir":
            return loader.read_beir(self._local)
        if not self.files:
            split, dataset = hub_split(self)
            name = f"{self.path}/{split}"
            rows = hub_rows(dataset, partial(loader.columns.wanted, where=f"{name}:1"))
            loader.read(rows, self.images(None), file=name)
            return loader.finish(self.path)

        def read_files(folder: Path | None) -> LoadedRecords:
            """Read the files into a folder, or with None into memory."""
            loader = _Loader(self, folder, problems=problems)
            for file in self.files:
                loader.read_file(file)
            return loader.finish(self.path, self._files_and_notes[1])

        if problems is not None:  # what is kept on disk doesn't say which rows were invalid
            return read_files(folder)
        return kept_or_read(self.files, self, loader.extra, read_files)

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
        judged: RetrievalData | None = None
        kind = ""
        if self.kind == "beir":
            images = self.images(self._local)
            judged = read_beir(self._local, self.split, self.role, images, split_key=self.split_key).data
            kind = "a BEIR folder"
        elif self.preset is not None:
            # A set with rows left out would no longer be the set that others report.
            judged, kind = self.preset.retrieval(self, ProblemLog()), "a published set"
        elif self.kind == "builtin":
            name = self.path.removeprefix(BUILTIN_PREFIX)
            judged, kind = load_builtin_retrieval(name, self._builtin_split), "a built-in set"
        if judged is not None:
            notes = (f"column_mapping has no effect on {kind}.",) if self.keys.column_mapping else ()
            return replace(judged, notes=(*judged.notes, *notes))
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


class _Loader:
    """Rows of one source on their way into a table, in memory or on disk in a folder.

    Args:
        keeps: False only looks at rows: nothing is kept but the modalities of their items.
    """

    def __init__(
        self,
        source: DataSource,
        folder: Path | None = None,
        *,
        problems: ProblemLog | None = None,
        keeps: bool = True,
    ) -> None:
        keys = source.keys
        self._source, self._keeps, self._folder = source, keeps, folder
        self.loss = source.loss if source.role == "train" else None
        self.extra = () if self.loss is None else tuple(self.loss.columns)
        self.columns = source.new_columns()
        self._problems = problems
        self.log = problems or ProblemLog(keys.max_invalid_records if keys.skip_invalid_records else None)
        self._unclear = UnclearLabels()
        self._num_rows = 0
        self._has_header = False
        self._num_missing: Counter[str] = Counter()  # rows without a column that every row needs
        self._needed: dict[str, tuple[str, str]] = {}  # one that the loss asks for -> first row without it, and why
        self.modalities: set[Modality] = set()  # of the items of rows that are only looked at

    @cached_property
    def _writer(self) -> RecordWriter:
        return RecordWriter(self.extra, self._folder)

    def read_file(self, file: Path, *, most: int | None = None) -> None:
        """Check the rows of a local file, or the first `most` of them, and keep the valid ones."""
        images = self._source.images(file.parent)
        if most is None and (suffix_of(file) or "").startswith(".jsonl"):
            # The collector would visit every row that is a Python object, again and again.
            with collector_paused():
                self._read_blocks(file, images)
            return
        form: TableForm | None = None
        if format_of(file).cells_are_text:
            form = table_form(file)
            self.columns.tables.update(dict.fromkeys(filter(None, [form.unusual(file)])))
        rows = iter_rows(file, partial(self.columns.wanted, where=f"{file.name}:1"), form)
        self.read(islice(rows, most), images, file=file.name, cells_are_text=form is not None)

    def _read_blocks(self, file: Path, images: ImageRoot) -> None:
        """Check the rows of a file of JSONL: a block of them at once where all are texts and right."""
        self._has_header = False
        defaults = {column.name: column.typed(column.default) for column in self.extra}
        for block in line_blocks(file):
            # Three paths, each slower and more careful than the one before: a block of texts at once (no Python per
            # row), a block of rows that are alike (parsed at once, checked one by one), and line by line.
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
            if self._keeps and not self.log.refused:
                self._writer.add_texts(texts, defaults, file=file.name, first=block.first)

    def read(self, rows: Iterable[RawRow], images: ImageRoot, *, file: str, cells_are_text: bool = False) -> None:
        """Check the rows of one file and keep the valid ones."""
        columns, log = self.columns, self.log
        self._has_header = cells_are_text
        # A checker for each file: its pictures' paths start from its folder.
        checker = RowChecker(
            images,
            cells_are_text=cells_are_text,
            label_kind=self._source.keys.label_kind,
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
                reason = fault.reason
                if fault.missing:
                    # A column that all rows lack is told once for the source (`_check_missing`); finding words for each
                    # row, with the nearest names, would cost more than reading it.
                    self._num_missing[fault.column] += 1
                    reason = columns.missing(fault.column, row) if log.lists_missing(fault.column) else ""
                    if fault.reason:
                        self._needed.setdefault(fault.column, (f"{where}: ", f"; {fault.reason}"))
                        reason = f"{reason}; {fault.reason}" if reason else ""
                log.add(where, reason, column=fault.column, may_drop=not fault.escapes)
                continue
            query, positives, negatives, label, scores, numbers = fields
            if not self._keeps:
                self.modalities.update(map(modality_of, (query, *positives, *negatives)))
            elif not log.refused:  # else the rest is read for its problems alone
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

    def read_beir(self, folder: Path) -> LoadedRecords:
        """Return a record per query of a BEIR split that has a relevant document."""
        source, images = self._source, self._source.images(folder)
        part = read_beir(
            folder, source.split, source.role, images, self.extra, self._problems, split_key=source.split_key
        )
        self.columns = ColumnResolver({}, self.extra)  # the layout fixes the columns
        self.read(part.rows(), images, file=part.query_file)
        irrelevant = len(part.data.queries) - self._num_rows
        notes = [*part.data.notes, *self._unmapped("a BEIR folder")]
        if irrelevant:
            verb = "has no relevant document and is" if irrelevant == 1 else "have no relevant document and are"
            notes.append(f"{plural(irrelevant, 'query', 'queries')} {verb} left out.")
        return self.finish(f"{folder} ({part.data.name})", notes)

    def read_set(self, rows: Rows, *, name: str) -> LoadedRecords:
        """Return the records of a set that code makes; dictionaries are checked as rows of a file called `name`."""
        if isinstance(rows, LoadedRecords):
            return self.complete(rows, "a built-in set")

        def raw(rows: Iterable[object]) -> Iterator[RawRow]:
            """Yield dictionaries with their numbers, and keep records as they are."""
            for number, row in enumerate(rows, start=1):
                if isinstance(row, Record):
                    self._keep(row)
                elif isinstance(row, Mapping):
                    yield number, dict(row)
                else:
                    yield number, f"expected a dictionary or a Record, got {type(row).__name__}"

        self.read(raw(rows), self._source.images(None), file=name)
        return self.finish(self._source.path)

    def _keep(self, record: Record) -> None:
        # A plugin's record was checked by its maker; what the loss asks for is all that can be missing.
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
            columns={extra.name: extra.typed(record.columns.get(extra.name, extra.default)) for extra in self.extra},
            file=file,
            line=int(line),
        )

    def complete(self, loaded: LoadedRecords, kind: str) -> LoadedRecords:
        """Return the records of a set whose columns are fixed, with what the loss asks for where that may be left out.

        Raises:
            DataError: The loss can't do without a column.
        """
        for column in self.extra:
            if column.required and self.loss is not None:
                needed = f"loss_type {self.loss.name} needs it: {column.meaning}"
                raise DataError(f"{self._source.path} is {kind} and has no column {column.name!r}; {needed}")
        table = loaded.table.with_columns(self.extra) if self.extra else loaded.table
        self._check_supervision(table)
        return LoadedRecords(table, (*loaded.notes, *self._unmapped(kind)), loaded.num_invalid)

    def _unmapped(self, kind: str) -> tuple[str, ...]:
        """Return a sentence that column_mapping has no effect on a source whose columns are fixed."""
        return (f"column_mapping has no effect on {kind}.",) if self._source.keys.column_mapping else ()

    def check_first(self, shown: str, *, is_alone: bool) -> None:
        """Refuse a source by what is known of its columns after its first rows.

        Args:
            shown: The file, for the error.
            is_alone: Whether there is no other file, which may have a column that this one lacks.
        """
        is_known = self._has_header or self._num_rows < FIRST_ROWS
        if is_alone and not self._num_rows:
            raise DataError(f"{shown} holds no rows")
        if is_alone and is_known:
            self.columns.check_mapping(shown, trains=self._source.role == "train")
        if self.log.refused or self._has_header:
            self._check_missing(shown if is_known else f"the first {FIRST_ROWS} rows of {shown}")

    def finish(self, shown: str, notes: Sequence[str] = ()) -> LoadedRecords:
        """Return what was kept, or refuse the source.

        Args:
            shown: The source, for errors.
        """
        if not self._num_rows:
            raise DataError(f"{shown} holds no rows")
        # One mapping serves all sets: a column that training drops need not stand in the others.
        self.columns.check_mapping(shown, trains=self._source.role == "train")
        self._check_missing(shown)
        self._unclear.check()
        self.log.check(shown, self._num_rows)
        if not len(self._writer):
            raise DataError(f"all {plural(self._num_rows, 'row')} of {shown} are invalid: {self.log.notes()[0]}")
        columns = self.columns.read()
        table = self._writer.finish()
        self._check_supervision(table)
        return LoadedRecords(table, (*notes, *self.log.notes(), *columns.notes), self.log.count, columns)

    def _check_missing(self, shown: str) -> None:
        """Refuse rows that all lack a column which every row needs."""
        for column, count in self._num_missing.items():
            if count == self._num_rows:
                first, needed = self._needed.get(column, ("", ""))
                reason = self.columns.missing(column, self.columns.seen)
                header = "; the first line of a CSV or TSV file names its columns" if self._has_header else ""
                raise DataError(f"{first}no row of {shown} has a column {column!r}: {reason}{needed}{header}")

    def _check_supervision(self, table: RecordTable) -> None:
        """Refuse records that hold nothing which the loss learns from: it would average over nothing.

        Raises:
            DataError: With the first such record.
        """
        loss = self.loss
        if loss is None or "positives" in loss.takes:
            return  # every row has a positive, or lists its pairs
        needs = {
            "classes": "label_kind: class and a label",
            "pairs": "label_kind: pair or grade, and a label or score",
            "lists": "label_kind: grade, and as label or score a list of numbers, one for each of its documents",
        }
        wanted = " or ".join(needs[kind] for kind in sorted(loss.takes) if kind in needs)
        # One walk over all records, for losses of pairs and classes only.
        for record in table:
            has = {"classes": record.label is not None, "pairs": bool(record.scores), "lists": len(record.scores) > 1}
            if not any(has.get(kind) for kind in loss.takes):
                raise DataError(
                    f"{record.location}: loss_type {loss.name} learns nothing from this row: it needs {wanted}"
                )


def describe(path: str, loaded: LoadedRecords, *, parts: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return what was read of a source of records by label: "data", "columns" (where the source has any), "example".

    Args:
        parts: How many of the loaded rows aren't trained on, by what they are for; None says nothing of it.
    """
    table = loaded.table
    counts = plural(len(table), "row")
    facts = [f"{counts} of {cut(path, 200)}"]
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
