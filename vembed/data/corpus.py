"""Read a corpus, document by document: the other half of a search, without queries or judgements.

A corpus is a BEIR folder's corpus.jsonl; a file of rows with an id and a text (and possibly a title) or a picture; a
text file with one document a line; a folder of pictures; or a built-in or published set. Every row is checked, and of
every picture the header; memory is the ids.

Rows of training data are a corpus of their pictures: where a row has no id, its picture is named by its path, and a
picture that stands in many rows is one document.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.batch import Composed, Image, ImageLimits, pictures_in
from vembed.data.check import ProblemLog, encoding_fault, id_fault, part_fault, title_and_text
from vembed.data.columns import closest, listing
from vembed.data.corpus_files import TEXT_FILES, corpus_source, find_pictures
from vembed.data.formats import iter_rows
from vembed.data.image_root import ImageRoot, PictureFault
from vembed.data.images import content_name
from vembed.data.keys import DataKeys
from vembed.data.lines import RawRow, text_rows
from vembed.data.presets import preset_path
from vembed.data.retrieval_sources import load_retrieval
from vembed.data.sources import BUILTIN_PREFIX
from vembed.data.splits import SourceOptions
from vembed.errors import DataError
from vembed.files import home_path, is_folder
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from vembed.batch import Item
    from vembed.data.retrieval import RetrievalData

ID_COLUMNS = ("_id", "id", "docid", "doc_id")
TEXT_COLUMNS = ("text", "document", "passage", "contents", "content")
IMAGE_COLUMNS = ("image", "positive_image", "image_path")
"""Names that the columns go by, the preferred one first."""

TITLE_COLUMN = "title"
CAPTION_COLUMNS = ("caption", "query", "anchor", "question", "sentence1")
"""What says of a picture what it shows: people see it beside the picture, the model doesn't."""

PATH_SEPARATOR = " + "  # stands between the paths of the pictures of one document


class Document(NamedTuple):
    """One document."""

    id: str  # different from that of any other
    item: Item  # title, one space, text (may be empty); or a picture, alone or with such a text
    path: str = ""  # of each picture, as the corpus names it; "" of a text, and of bytes without a path
    caption: str = ""  # what the corpus says that a picture shows; "" where it says nothing

    @property
    def text(self) -> str:
        """What can be read of it: its text, or the caption of a picture that has none."""
        if isinstance(self.item, str):
            return self.item
        return (self.item.text if isinstance(self.item, Composed) else "") or self.caption


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """How to read a corpus. None takes the first of the usual names that a row has."""

    id: str | None = None
    text: str | None = None  # of the texts; given without `image`, it leaves pictures in the rows alone
    image: str | None = None
    image_root: Path | None = None  # what pictures' paths start from and stay in; None: the corpus file's folder
    image_limits: ImageLimits = field(default_factory=ImageLimits)

    @property
    def image_names(self) -> tuple[str, ...]:
        """What the column of the pictures may be called."""
        if self.image is not None:
            return (self.image,)
        return IMAGE_COLUMNS if self.text is None else ()


class Corpus:
    """The documents of one source, in order; may be iterated again, which checks again.

    Args:
        path: A folder with a corpus.jsonl, or one with pictures in it; a .jsonl, .json, .csv, .tsv, .txt (each possibly
            .gz) or .parquet file; `builtin:SET`; or a published set `NAME:FOLDER`. Of sets it is the test split.
        options: Which columns of a row are what, and where its pictures are.

    Attributes:
        limits: Caps on each picture.

    Raises:
        DataError: There is no such source.
    """

    def __init__(self, path: str, options: CorpusOptions | None = None) -> None:
        self._path = path
        self._options = options or CorpusOptions()
        self.limits = self._options.image_limits
        self._preset = preset_path(path)
        is_set = path.startswith(BUILTIN_PREFIX) or self._preset is not None
        self._source = None if is_set else corpus_source(path)
        self._start()

    def _start(self) -> None:
        self._log = ProblemLog()
        self._num_blank = 0
        self._num_empty = 0
        self._num_repeated = 0
        self._num_others = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what was skipped or is unusual; complete after the last document."""
        counts = [
            (self._num_blank, "blank line is no document", "blank lines are no documents"),
            (self._num_empty, "document has neither a title nor a text", "documents have neither a title nor a text"),
            (self._num_repeated, "row repeats an earlier picture", "rows repeat an earlier picture"),
            (self._num_others, "file isn't a picture by its name", "files aren't pictures by their names"),
        ]
        return tuple(f"{plural(count, one, many)}." for count, one, many in counts if count)

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents.

        Raises:
            DataError: There is none, or a row is invalid; raised after the last row, with the first problems of all.
            MachineError: The operating system refuses to read a file.
        """
        self._start()
        if self._source is None:
            yield from self._of_task()
            return
        known: set[str] = set()
        documents = self._files(self._source) if is_folder(self._source) else self._of_rows(self._source, known)
        for document in documents:
            if not self._log.count:
                known.add(document.id)
                self._num_empty += document.item == ""
                yield document
        if self._log.count:
            raise DataError(self._log.listing(self._path))
        if not known:
            raise DataError(f"{self._path} holds no documents")

    def _of_task(self) -> Iterator[Document]:
        """Yield the documents of a set; what is asked about a picture is its caption."""
        captions: dict[str, str] = {}
        for query, grades in self._task.qrels.items():
            asked = self._task.queries[query]
            if isinstance(asked, str):
                for name, grade in grades.items():
                    if grade > 0:
                        captions.setdefault(name, asked)
        for name, item in self._task.documents.items():
            path = PATH_SEPARATOR.join(map(self._path_in_set, pictures_in([item])))
            yield Document(name, item, path, "" if isinstance(item, str) else captions.get(name, ""))

    def _path_in_set(self, picture: Image) -> str:
        """Return what a set calls a picture; no folder of this machine is kept."""
        if self._preset is None or picture.data is not None:
            return picture.path
        root = self._options.image_root or self._preset.folder
        return os.path.relpath(picture.path, os.path.realpath(home_path(root)))

    @cached_property
    def _task(self) -> RetrievalData:
        root = self._options.image_root
        keys = DataKeys(image_root=None if root is None else str(root), max_image_pixels=self.limits.max_pixels)
        return load_retrieval(self._path, SourceOptions(role="test", keys=keys))

    def _files(self, folder: Path) -> Iterator[Document]:
        """Yield each picture below a folder."""
        if self._options.image_root is not None:
            raise DataError(f"{self._path} is a folder of pictures: it is its own image_root; leave that out")
        images = ImageRoot(folder, self.limits)
        paths, self._num_others = find_pictures(folder)
        for path in paths:
            try:
                yield Document(path, images.image(f"./{path}", name=path), path)  # ./: a colon in a name is no scheme
            except PictureFault as fault:
                self._log.add(path.encode(errors="backslashreplace").decode(), fault.reason)

    def _of_rows(self, file: Path, known: set[str]) -> Iterator[Document]:
        root = file.parent if self._options.image_root is None else self._options.image_root
        images = ImageRoot(root, self.limits)
        for line, row in self._rows(file):
            where = f"{file.name}:{line}"
            if isinstance(row, str):
                self._log.add(where, row)
                continue
            try:
                yield from self._checked(row, where, known, images)
            except _RowFault as fault:
                self._log.add(where, fault.reason, column=fault.column)

    def _rows(self, file: Path) -> Iterator[RawRow]:
        if file.name.lower().endswith(TEXT_FILES):
            for line, row in text_rows(file):
                if isinstance(row, dict) and not row["text"]:
                    self._num_blank += 1
                else:
                    yield line, row if isinstance(row, str) else {"id": line, **row}
        else:
            yield from iter_rows(file, partial(_wanted, options=self._options, where=file.name))

    def _checked(self, row: dict[str, Any], where: str, known: set[str], images: ImageRoot) -> Iterator[Document]:
        """Yield the documents of a row: one, or each picture of a row without an id."""
        if self._options.image is not None and self._options.image not in row:
            raise _RowFault(None, _missing_column("image_column", (self._options.image,), row))
        image_column = next((name for name in self._options.image_names if row.get(name)), None)
        if image_column is not None:
            yield from self._pictures(row, image_column, where, known, images)
            return
        columns = _text_columns(row, self._options)
        name = _checked_id(row[columns.id], columns.id, known)
        yield Document(name, _document_text(row, columns.text, needed=True))

    def _pictures(
        self, row: dict[str, Any], column: str, where: str, known: set[str], images: ImageRoot
    ) -> Iterator[Document]:
        cells = row[column] if isinstance(row[column], list) else [row[column]]
        id_column = _found(row, self._options.id, ID_COLUMNS)
        if id_column is not None:
            cells = [cells]  # one document
        if self._options.id is not None and id_column is None:
            raise _RowFault(None, _missing_column("id_column", (self._options.id,), row))
        text_column = _found(row, self._options.text, TEXT_COLUMNS[:1])
        # Beside a picture without an id `text` is its caption, as in training data.
        text = "" if id_column is None else _document_text(row, text_column, needed=False)
        captions = CAPTION_COLUMNS if id_column is not None else (*CAPTION_COLUMNS, *TEXT_COLUMNS[:1])
        caption = _caption(row, captions)
        for cell in cells:
            try:
                item = images.item(cell, name=where, text=text)
            except PictureFault as fault:
                raise _RowFault(column, fault.reason) from fault
            path = _paths_of(cell if isinstance(cell, list) else [cell], column)
            if id_column is None:
                # Bytes: a path there need not be unique.
                name = path if isinstance(item, Image) and item.data is None else content_name(item)
                if name in known:
                    self._num_repeated += 1
                    continue
            else:
                name = _checked_id(row[id_column], id_column, known)
            yield Document(name, item, path, caption)


class _RowFault(Exception):  # noqa: N818 - a verdict on one row that never leaves this file
    def __init__(self, column: str | None, reason: str) -> None:
        super().__init__(reason)
        self.column = column
        self.reason = reason


class _TextColumns(NamedTuple):
    id: str
    text: str


def _wanted(names: Sequence[str], *, options: CorpusOptions, where: str) -> list[str]:
    """Return the columns to read of a columnar file."""
    pictures = [name for name in options.image_names if name in names]
    if options.image is not None and not pictures:
        raise DataError(f"{where}: {_missing_column('image_column', (options.image,), names)}")
    if not pictures:
        try:
            _text_columns(names, options)
        except _RowFault as fault:
            raise DataError(f"{where}: {fault.reason}") from fault
    texts = (_found(names, options.id, ID_COLUMNS), _found(names, options.text, TEXT_COLUMNS))
    return [name for name in names if name in {*texts, *pictures, TITLE_COLUMN, *CAPTION_COLUMNS * bool(pictures)}]


def _text_columns(names: Iterable[str], options: CorpusOptions) -> _TextColumns:
    """Return the id's and the text's column of a row without a picture."""
    found = []
    for option, asked, usual in (("id_column", options.id, ID_COLUMNS), ("text_column", options.text, TEXT_COLUMNS)):
        name = _found(names, asked, usual)
        if name is None:
            raise _RowFault(None, _missing_column(option, usual if asked is None else (asked,), names))
        found.append(name)
    return _TextColumns(*found)


def _found(names: Iterable[str], asked: str | None, usual: tuple[str, ...]) -> str | None:
    return next((name for name in (usual if asked is None else (asked,)) if name in names), None)


def _missing_column(option: str, wanted: tuple[str, ...], names: Iterable[str]) -> str:
    near = closest(wanted[0], names) if len(wanted) == 1 else ""
    return (
        f"no column {' or '.join(repr(each) for each in wanted)}{near}; the row has {listing(names)}. Name it with "
        f"{option} (--{option.replace('_', '-')})"
    )


def _checked_id(value: object, column: str, known: set[str]) -> str:
    if fault := id_fault(value, known):
        raise _RowFault(column, fault)
    return str(value)


def _document_text(row: Mapping[str, Any], column: str | None, *, needed: bool) -> str:
    title, text = row.get(TITLE_COLUMN), row[column] if column else None
    for name, fault in ((TITLE_COLUMN, part_fault(title, needed=False)), (column, part_fault(text, needed=needed))):
        if fault is not None:
            raise _RowFault(name, fault)
    return title_and_text(title, text)


def _caption(row: Mapping[str, Any], columns: tuple[str, ...]) -> str:
    """Return the first column that says something."""
    for name in columns:
        value = row.get(name)
        if isinstance(value, str) and value:
            if fault := encoding_fault(value):
                raise _RowFault(name, fault)
            return value
    return ""


def _paths_of(cells: Sequence[object], column: str) -> str:
    """Return what cells call the pictures of a document; "" for bytes alone."""
    named = (cell.get("path") if isinstance(cell, Mapping) else cell for cell in cells)
    paths = [path for path in named if isinstance(path, str) and path]
    if fault := encoding_fault("".join(paths)):
        raise _RowFault(column, fault)
    return PATH_SEPARATOR.join(map(os.path.normpath, paths))
