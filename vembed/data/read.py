"""A source of data: a path, read as rows to train on, as a judged set, or document by document.

`DataSource(path, role, keys)` opens nothing. Its methods read:

- `refuse_missing` opens the files, and `peek` checks the first rows of the first one, both before torch is imported.
  They take milliseconds, except that `peek` reads a tab-separated table whole, to learn whether its quotes are
  characters (text_tables.py).
- `documents` reads a corpus document by document (documents.py).
- `judged` reads queries, documents and judgements (judged.py).
- `records` reads all rows, checks every value and collects the valid rows in an Arrow table (row_loader.py).

The readers get the source itself. They ask it for the columns that the loss needs, the check of pictures, what resolves
columns, the log of invalid rows, and its names for errors.

The `kind` of a source follows from its path. `column_mapping` applies to rows of files and of the hub, and to
dictionaries that a built-in set yields; the columns of all other sets are fixed (`FIXED_KINDS`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vembed.batch import ImageLimits, modality_of
from vembed.data.builtin import find_builtin, load_builtin, load_builtin_retrieval
from vembed.data.check import ProblemLog
from vembed.data.columns import ColumnResolver
from vembed.data.documents import Corpus
from vembed.data.formats import iter_rows
from vembed.data.images import ImageRoot
from vembed.data.judged import find_split, is_beir, read_beir, task_from_records
from vembed.data.keys import BUILTIN_PREFIX, PATH_KEYS, SPLIT_KEYS, SPLIT_NAMES, DataKeys
from vembed.data.lines import os_errors_named
from vembed.data.presets import preset_path
from vembed.data.raw_rows import Unreadable, row_of
from vembed.data.row_files import hub_rows, hub_split, row_files
from vembed.data.row_loader import FIRST_ROWS, RowLoader, SourceChecker, refuse_unlearnable
from vembed.data.table import LoadedRecords, Record
from vembed.data.table_cache import kept_or_read
from vembed.errors import DataError
from vembed.files import home_path, is_folder
from vembed.registry import DATASETS
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vembed.batch import Modality
    from vembed.data.columns import ColumnsRead, ExtraColumn, LossNeeds
    from vembed.data.judged import BeirSplit, RetrievalData
    from vembed.data.keys import Role
    from vembed.data.presets import PresetPath

FIXED_KINDS = {"builtin": "a built-in set", "published": "a published set", "beir": "a BEIR folder"}
"""Kind of set whose columns are fixed -> its name in messages.

A built-in set is one only where its code makes records; dictionaries that it yields follow `column_mapping`.
"""


class DataSource:
    """A path with a role, and how it is read.

    Args:
        path: One of:

            - a .jsonl, .json, .csv or .tsv file (each possibly .gz), .parquet, .arrow or .tar, or of a plugin's format
            - a folder, glob or range `{000..127}` of such files, read in order of their names
            - a BEIR folder
            - `builtin:NAME`, a set that code makes (builtin/)
            - `NAME:FOLDER`, a published set as it is published (presets.py)
            - a hub id `owner/name[:config]`
        role: What the data are for; chooses the split where there are several.
        keys: The data keys, of which those on columns, labels, pictures and invalid rows matter here; None takes the
            defaults.
        split: The split to read instead of the role's.
        loss: What the training loss needs. Rows of other roles may lack it.
        user_names: What the user calls path and split, for errors, such as ("--data", "--split"); None takes the
            configuration keys of the role.
    """

    def __init__(
        self,
        path: str,
        role: Role,
        keys: DataKeys | None = None,
        *,
        split: str | None = None,
        loss: LossNeeds | None = None,
        user_names: tuple[str, str] | None = None,
    ) -> None:
        self.path = path
        self.role = role
        self.keys = keys or DataKeys()
        self.split = split
        self.loss_needs = loss  # whatever the role: see `training_needs`
        self.path_key, self.split_key = user_names or (PATH_KEYS[role], SPLIT_KEYS[role])
        self.image_limits = ImageLimits(max_pixels=self.keys.max_image_pixels)

    # --- What the path names

    @cached_property
    def kind(self) -> Literal["builtin", "published", "beir", "rows"]:
        """The kind of set; "rows" are local files, or a set of the hub."""
        # Set names win over file names: to read a local file called `builtin:x.jsonl`, write `./builtin:x.jsonl`.
        if self.path.startswith(BUILTIN_PREFIX):
            return "builtin"
        if self.preset is not None:
            return "published"
        return "beir" if is_folder(self._local) and is_beir(self._local) else "rows"

    @cached_property
    def preset(self) -> PresetPath | None:
        """The published set that the path names; None where it names something else."""
        return None if self.path.startswith(BUILTIN_PREFIX) else preset_path(self.path)

    @property
    def files(self) -> Sequence[Path]:
        """Local files of rows; none where the path names a set of the hub or of another kind.

        Raises:
            DataError: The path leads to nothing, it mixes files of several kinds, or there is no such split.
        """
        files, _ = self._files_and_notes
        return files

    @cached_property
    def file_names(self) -> dict[Path, str]:
        """Local file -> its name in `file:line`: the last part of its path, or the whole path where two share that."""
        counts = Counter(file.name for file in self.files)
        return {file: file.name if counts[file.name] == 1 else str(file) for file in self.files}

    @contextmanager
    def errors_named(self, file: Path) -> Iterator[None]:
        """Let errors that begin with the last part of a file's path begin with its name in `file_names` instead.

        The reader of a format knows the path alone, not that another file of the source ends in the same name.
        """
        try:
            yield
        except DataError as error:
            text, name = str(error), self.file_names[file]
            if name == file.name or not text.startswith(f"{file.name}:"):
                raise
            raise DataError(f"{name}{text.removeprefix(file.name)}") from error

    @cached_property
    def _files_and_notes(self) -> tuple[list[Path], tuple[str, ...]]:
        """Local files of rows, and sentences on which split was chosen; folders are listed once for each source."""
        return row_files(self.path, self) if self.kind == "rows" else ([], ())

    @property
    def name(self) -> str:
        """Name for a table of results: "stdlib-code/dev", "dev.jsonl", "owner/name", with a `split` "owner/name/x"."""
        if self.kind == "builtin":
            return f"{self._builtin_name}/{self._builtin_split}"
        name = self._local.absolute().name if os.path.lexists(self._local) else self.path  # "." has no name itself
        return f"{name}/{self.split}" if self.split else name

    @property
    def _local(self) -> Path:
        return home_path(self.path)

    @property
    def _builtin_name(self) -> str:
        return self.path.removeprefix(BUILTIN_PREFIX)

    @property
    def _builtin_split(self) -> str:
        return self.split or SPLIT_NAMES[self.role][0]

    # --- What is asked of its rows

    @property
    def training_needs(self) -> LossNeeds | None:
        """The columns that the loss needs of these rows; None where they aren't trained on."""
        return self.loss_needs if self.role == "train" else None

    @property
    def extra_columns(self) -> tuple[ExtraColumn, ...]:
        """Columns of numbers that the loss asks for; none where the rows aren't trained on."""
        return () if self.training_needs is None else tuple(self.training_needs.columns)

    def images(self, folder: Path | None) -> ImageRoot:
        """Return the check of pictures: their paths start from `image_root`, or else from the folder of their rows.

        Args:
            folder: None where the rows lie in no folder.

        Raises:
            DataError: `image_root` doesn't exist.
        """
        root = self.keys.image_root
        return ImageRoot(folder if root is None else Path(root), self.image_limits)

    def new_resolver(self) -> ColumnResolver:
        """Return what resolves the columns of the rows.

        Raises:
            ConfigError: `column_mapping` names a target that records don't have, or one target twice.
        """
        # One `column_mapping` serves all sets: a dev or test set must accept a target that only the loss reads.
        extra = () if self.loss_needs is None else tuple(self.loss_needs.columns)
        return ColumnResolver(self.keys.column_mapping, extra)

    def new_log(self) -> ProblemLog:
        """Return a log of invalid rows that follows the policy of the keys."""
        return ProblemLog(self.keys.max_invalid_records if self.keys.skip_invalid_records else None)

    # --- A first look

    def refuse_missing(self) -> None:
        """Refuse a path where nothing is, or a file that can't be opened, without reading any; the hub isn't asked.

        Raises:
            DataError: The path leads to nothing, it mixes files of several kinds, or there is no such set or split; the
                split of a published set is looked for when it is read.
            MachineError: The system refuses to open a file.
        """
        if self.kind == "builtin":
            find_builtin(self._builtin_name, self._builtin_split)
        if self.preset is not None:
            self.preset.refuse_missing(self)
        if self.kind == "beir":
            find_split(self._local, self.split, self.role, self.split_key)
        for file in self.files:
            with os_errors_named(file):
                file.open("rb").close()

    def peek(self) -> tuple[ColumnsRead, frozenset[Modality]]:
        """Refuse local files whose first rows show that `records` would refuse the source for its columns.

        Wrong values and unclear labels are left to `records`, which lists those of all rows. Only the first file is
        looked at.

        Returns:
            How the columns are read, and the modalities of the items in the first rows. Without local files no row is
            read: the columns are empty, and the modalities are {"image"} if the set is known to hold pictures, else
            empty.

        Raises:
            VembedError: As `records`.
        """
        self._refuse_wrong_mapping()
        if not self.files:
            has_pictures = self.kind == "published"  # every preset has them; one of texts alone would need a flag
            if self.kind == "builtin" and self._builtin_name in DATASETS:  # it isn't made, which takes seconds
                has_pictures = DATASETS.load(self._builtin_name).holds_pictures
            return self.new_resolver().summary(), frozenset({"image"} if has_pictures else ())
        first = self.files[0]
        is_only_file = len(self.files) == 1
        checker = SourceChecker(self)
        modalities: set[Modality] = set()
        with self.errors_named(first):
            for line, row in islice(checker.open_file(first), FIRST_ROWS):
                fields = checker.check_row(line, row)
                if fields is not None:
                    modalities.update(map(modality_of, (fields.query, *fields.positives, *fields.negatives)))
        checker.refuse_bad_start(self.path if is_only_file else str(first), is_only_file=is_only_file)
        return checker.resolver.summary(), frozenset(modalities)

    def raw_rows(self, count: int) -> list[dict[str, object]]:
        """Return the first rows of the first local file as they are written, column name -> value.

        Of the first `count` rows those that can't be read are left out; a source without local files has none.

        Raises:
            VembedError: As `records`.
        """
        if not self.files:
            return []
        first = self.files[0]
        with self.errors_named(first):
            return [row for _, row in islice(iter_rows(first), count) if isinstance(row, dict)]

    def _refuse_wrong_mapping(self) -> None:
        """Refuse a `column_mapping` that no rows can follow, whatever the kind of set."""
        self.new_resolver()

    # --- Judged sets and corpora

    def judged(self, *, takes_pairs: bool = False) -> RetrievalData:
        """Read queries, documents and judgements.

        A BEIR folder or a published set is taken as it is, and so is a built-in set with judgements. Of any other
        source the documents are the distinct positives and negatives.

        Args:
            takes_pairs: Whether rows with graded pairs become a task of these, on which nothing is searched.

        Raises:
            ConfigError: As `records`; never of a set with judgements of its own, which only notes that
                `column_mapping` has no effect.
            DataError: As `records` and `read_beir`.
            MachineError: As `records`.
        """
        task = self._own_task()
        if task is not None:
            return replace(task, notes=(*task.notes, *self._mapping_note()))
        loaded = self.records()
        task = task_from_records(loaded.table, self.name, self.keys.label_kind if takes_pairs else "auto")
        return replace(task, notes=(*loaded.notes, *task.notes))

    def _own_task(self) -> RetrievalData | None:
        """Return the task of a set that states its judgements; None where they follow from its rows."""
        if self.preset is not None:
            # No row is skipped: with rows left out it would no longer be the set that others report.
            return self.preset.retrieval(self, ProblemLog())
        if self.kind == "builtin":
            return load_builtin_retrieval(self._builtin_name, self._builtin_split)
        if self.kind == "beir":
            return self._read_beir(self.images(self._local)).data
        return None

    def documents(
        self, *, id_column: str | None = None, text_column: str | None = None, image_column: str | None = None
    ) -> Corpus:
        """Return the documents of a corpus, read as they are iterated; of several splits "test", whatever `split` says.

        Args:
            id_column: Column of the ids; None takes the first of the usual names that a row has.
            text_column: Column of the texts; without `image_column`, it leaves pictures in the rows alone.
            image_column: Column of the pictures.

        Raises:
            DataError: There is no such source.
        """
        # A corpus has no columns or labels of training rows, and its split is that of "test", whatever this source's
        # role and split are: of the keys, only those of pictures count.
        keys = DataKeys(image_root=self.keys.image_root, max_image_pixels=self.keys.max_image_pixels)
        source = DataSource(self.path, "test", keys, user_names=(self.path_key, self.split_key))
        return Corpus(source, id_column=id_column, text_column=text_column, image_column=image_column)

    # --- Rows to train on

    def records(self) -> LoadedRecords:
        """Read, check and collect the rows; those of large files are taken from the cache, or kept there.

        Returns:
            At least one record, and notes on what was skipped or ignored.

        Raises:
            ConfigError: `column_mapping` names a target that records don't have, or one target twice.
            DataError: The source is missing, broken or inconsistent, or lacks what the loss learns from; the message
                names file:line and column.
            MachineError: The hub can't be reached, or the system refuses to read a file.
        """
        self._refuse_wrong_mapping()
        if self.files:
            return kept_or_read(self.files, self, self.extra_columns, self._load_files)
        return self._load_set()

    def records_with_problems(self, problems: ProblemLog, folder: Path) -> LoadedRecords:
        """Read, check and collect the rows as `records` does, for a report on the invalid ones.

        Args:
            problems: Collects the invalid rows, and says how many are too many in place of the keys.
            folder: An empty folder that rows of files are read into.

        Raises:
            VembedError: As `records`.
        """
        self._refuse_wrong_mapping()
        # Not from the cache, which doesn't say which rows were invalid.
        return self._load_files(folder, problems) if self.files else self._load_set(problems)

    def _load_files(self, folder: Path | None, problems: ProblemLog | None = None) -> LoadedRecords:
        """Read local files into an empty folder; None keeps the table in memory."""
        files, notes = self._files_and_notes
        loader = RowLoader(self, folder, problems=problems)
        for file in files:
            loader.add_file(file)
        return loader.finish(self.path, notes)

    def _load_set(self, problems: ProblemLog | None = None) -> LoadedRecords:
        """Read a source that isn't local files into memory."""
        match self.kind:
            case "published":
                assert self.preset is not None  # that is what makes the kind "published"
                return self._finish_fixed(self.preset.records(self, self.new_log() if problems is None else problems))
            case "builtin":
                return self._load_builtin(problems)
            case "beir":
                return self._load_beir(problems)
            case _:  # "rows" without local files
                return self._load_hub(problems)

    def _load_builtin(self, problems: ProblemLog | None) -> LoadedRecords:
        """Return the records of a set that code makes; its dictionaries are checked as rows of a file are."""
        made = load_builtin(self._builtin_name, self._builtin_split)
        if isinstance(made, LoadedRecords):
            return self._finish_fixed(made)
        rows: Iterable[object] = made  # the code may be a plugin's, and yield anything
        loader = RowLoader(self, problems=problems)
        loader.checker.begin_file(f"{self._builtin_name}/{self._builtin_split}", self.images(None))
        for number, row in enumerate(rows, start=1):
            if isinstance(row, Record):
                loader.add_record(row)
            elif isinstance(row, Mapping):
                loader.add_row(number, row_of(row))
            else:
                loader.add_row(number, Unreadable(f"expected a dictionary or a Record, got {type(row).__name__}"))
        # Records alone have no columns to map: `check_mapping` passes, and a key without effect must be told.
        return loader.finish(self.path, () if loader.checker.resolver.seen else self._mapping_note())

    def _load_beir(self, problems: ProblemLog | None) -> LoadedRecords:
        """Return a record per query of a BEIR split that has a relevant document."""
        images = self.images(self._local)
        # One log, and so one budget of invalid rows, for the folder's files and the records made of them.
        problems = self.new_log() if problems is None else problems
        part = self._read_beir(images, self.extra_columns, problems)
        resolver = ColumnResolver({}, self.extra_columns)  # without column_mapping: the layout fixes the columns
        loader = RowLoader(self, problems=problems, resolver=resolver)
        loader.checker.begin_file(part.query_file, images)
        loader.add_rows(part.rows())
        notes = [*part.data.notes, *self._mapping_note()]
        judged = {name for grades in part.data.qrels.values() for name in grades}
        if num_blank := sum(not part.data.documents[name] for name in judged):
            many = "judged documents are blank: no row has them"
            notes.append(f"{plural(num_blank, 'judged document is blank: no row has it', many)}.")
        # Not the number of rows: a data check also leaves out broken queries, which may have a relevant document.
        num_unanswered = sum(not part.positives(query_id) for query_id in part.data.qrels)
        if num_unanswered == len(part.data.qrels):
            raise DataError(f"{self._local} ({part.data.name}): no judged query has a relevant document to learn from")
        if num_unanswered:
            verb = "has no relevant document and is" if num_unanswered == 1 else "have no relevant document and are"
            notes.append(f"{plural(num_unanswered, 'query', 'queries')} {verb} left out.")
        return loader.finish(f"{self._local} ({part.data.name})", notes)

    def _read_beir(
        self, images: ImageRoot, extra: Sequence[ExtraColumn] = (), problems: ProblemLog | None = None
    ) -> BeirSplit:
        return read_beir(self._local, self.split, self.role, images, extra, problems, split_key=self.split_key)

    def _load_hub(self, problems: ProblemLog | None) -> LoadedRecords:
        split, dataset = hub_split(self)
        name = f"{self.path}/{split}"
        loader = RowLoader(self, problems=problems)
        loader.checker.begin_file(name, self.images(None))
        loader.add_rows(hub_rows(dataset, loader.checker.wanted))
        return loader.finish(self.path, (f"Read split {split!r} of {self.path}.",))

    def _finish_fixed(self, loaded: LoadedRecords) -> LoadedRecords:
        """Return the ready table of a set whose columns are fixed, with the defaults of those that the loss asks for.

        Raises:
            DataError: The loss can't do without a column.
        """
        for column in self.extra_columns:
            if column.required and self.training_needs is not None:
                needed = self.training_needs.reason_for(column)
                raise DataError(f"{self.path} is {FIXED_KINDS[self.kind]} and has no column {column.name!r}; {needed}")
        table = loaded.table.with_columns(self.extra_columns) if self.extra_columns else loaded.table
        refuse_unlearnable(table, self.training_needs)
        return LoadedRecords(table, (*loaded.notes, *self._mapping_note()), loaded.num_invalid)

    def _mapping_note(self) -> tuple[str, ...]:
        """Return a note that `column_mapping` has no effect on this kind of set."""
        return (f"column_mapping has no effect on {FIXED_KINDS[self.kind]}.",) if self.keys.column_mapping else ()
