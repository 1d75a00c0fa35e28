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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.batch import Composed, Image, pictures_in
from vembed.data.check import Fault, ProblemLog, checked_id, document_item, document_text, encoding_fault
from vembed.data.columns import closest, listing
from vembed.data.formats import SHARD_SUFFIX, iter_rows, row_suffixes
from vembed.data.images import PictureFault, content_name
from vembed.data.lines import text_rows
from vembed.data.raw_rows import Unreadable
from vembed.data.row_files import nearest_entry
from vembed.errors import DataError, MachineError
from vembed.files import home_path, is_file, is_folder
from vembed.text import cut, one_of, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vembed.batch import Item
    from vembed.data.images import ImageRoot
    from vembed.data.judged import RetrievalData
    from vembed.data.read import DataSource

ID_COLUMNS = ("_id", "id", "docid", "doc_id")
TEXT_COLUMNS = ("text", "document", "passage", "contents", "content")
IMAGE_COLUMNS = ("image", "positive_image", "image_path")
"""Names that the columns go by, the preferred one first."""

CAPTION_COLUMNS = ("caption", "query", "anchor", "question", "sentence1")
"""Columns that say what a picture shows: people see it beside the picture, the model doesn't."""

PATH_SEPARATOR = " + "  # stands between the paths of the pictures of one document

TEXT_FILES = (".txt", ".txt.gz")
CORPUS_FILES = ("corpus.jsonl", "corpus.jsonl.gz")
"""Names of a folder's corpus, as in BEIR."""

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Ends of the names of files that are taken for pictures, in any case; the first bytes tell what a file holds."""


class Document(NamedTuple):
    """One document."""

    id: str  # different from that of any other
    item: Item  # title, one space, text (may be empty); or a picture, alone or with such a text
    path: str = ""  # of each picture, as the corpus names it; "" of a text, and of bytes without a path
    caption: str = ""  # what the corpus says that a picture shows; "" where it says nothing

    @property
    def text(self) -> str:
        """The text of the document, or the caption of a picture that has none."""
        if isinstance(self.item, str):
            return self.item
        return (self.item.text if isinstance(self.item, Composed) else "") or self.caption


class Corpus:
    """The documents of one source, in order; may be iterated again, which checks again.

    Args:
        source: A folder with a corpus.jsonl, or one with pictures in it; a .jsonl, .json, .csv, .tsv, .txt (each
            possibly .gz), .parquet or .arrow file, or one of a plugin's format; `builtin:SET`; or a published set
            `NAME:FOLDER`.
        id_column: Column of the ids; None takes the first of the usual names that a row has.
        text_column: Column of the texts; without `image_column`, it leaves pictures in the rows alone.
        image_column: Column of the pictures.

    Raises:
        DataError: There is no such source.
    """

    def __init__(
        self,
        source: DataSource,
        *,
        id_column: str | None = None,
        text_column: str | None = None,
        image_column: str | None = None,
    ) -> None:
        self._source, self._path, self.limits = source, source.path, source.image_limits
        self._id, self._text, self._image = id_column, text_column, image_column
        if image_column is not None:
            self._image_columns: tuple[str, ...] = (image_column,)
        else:
            self._image_columns = IMAGE_COLUMNS if text_column is None else ()
        self._file = None if source.kind in ("builtin", "published") else corpus_file(source.path)
        self._start()

    def _start(self) -> None:
        self._log = ProblemLog()
        self._num_blank = self._num_empty = self._num_repeated = self._num_others = 0

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
        if self._file is None:
            yield from self._of_task()
            return
        known: set[str] = set()  # all that grows with the corpus: about 100 bytes for each id
        # After the first problem nothing more is yielded: the rest is read for its problems only.
        for document in self._of_pictures(self._file) if is_folder(self._file) else self._of_rows(self._file, known):
            if not self._log.count:
                known.add(document.id)
                self._num_empty += document.item == ""
                yield document
        if self._log.count:
            raise DataError(self._log.listing(self._path))
        if not known:
            raise DataError(f"{self._path} holds no documents")

    @cached_property
    def _task(self) -> RetrievalData:
        return self._source.judged()

    def _of_task(self) -> Iterator[Document]:
        """Yield the documents of a set; the text that searches for a picture is its caption."""
        task = self._task
        captions: dict[str, str] = {}
        for query, grades in task.qrels.items():
            asked = task.queries[query]
            if isinstance(asked, str):
                for name, grade in grades.items():
                    if grade > 0:
                        captions.setdefault(name, asked)
        # Paths are kept relative to a published set: an index that is built of it names no folder of this machine.
        root = None
        if (preset := self._source.preset) is not None:
            root = os.path.realpath(home_path(self._source.keys.image_root or preset.folder))
        for name, item in task.documents.items():
            paths = [
                image.path if root is None or image.data is not None else os.path.relpath(image.path, root)
                for image in pictures_in([item])
            ]
            caption = "" if isinstance(item, str) else captions.get(name, "")
            yield Document(name, item, PATH_SEPARATOR.join(paths), caption)

    def _of_pictures(self, folder: Path) -> Iterator[Document]:
        """Yield each picture in a folder and below it, in the order of their paths."""
        if self._source.keys.image_root is not None:
            raise DataError(f"{self._path} is a folder of pictures: it is its own image_root; leave that out")
        images = self._source.images(folder)
        paths = []
        for path, is_picture in _files_below(folder):
            if is_picture:
                paths.append(path.relative_to(folder).as_posix())
            else:
                self._num_others += 1
        for name in sorted(paths):
            try:
                yield Document(name, images.image(f"./{name}", name=name), name)  # ./: a colon in a name is no scheme
            except PictureFault as fault:
                self._log.add(name.encode(errors="backslashreplace").decode(), fault.reason)

    def _of_rows(self, file: Path, known: set[str]) -> Iterator[Document]:
        """Yield the documents of the rows of a file: of each row one, or each picture of a row without an id."""
        images = self._source.images(file.parent)
        # A .txt file is a table where rows are trained on, and one document a line here; the line's number is its id.
        is_text = file.name.lower().endswith(TEXT_FILES)
        for line, row in text_rows(file) if is_text else iter_rows(file, self._wanted(file.name)):
            where = f"{file.name}:{line}"
            if isinstance(row, Unreadable):
                self._log.add(where, row)
                continue
            if is_text and not row["text"]:
                self._num_blank += 1
                continue
            if is_text:
                row = {"id": line, **row}
            try:
                if self._image is not None and self._image not in row:
                    raise Fault("", _no_column("image_column", (self._image,), row))
                image_column = next((name for name in self._image_columns if row.get(name)), None)
                if image_column is not None:
                    yield from self._with_pictures(row, image_column, where, known, images)
                else:
                    id_column, text_column = self._text_columns(row)
                    name = checked_id(row[id_column], id_column, known)
                    yield Document(name, document_text(row, text_column, needed=True))
            except Fault as fault:
                self._log.add(where, fault.reason, column=fault.column)

    def _wanted(self, where: str) -> Callable[[Sequence[str]], list[str]]:
        """Return what picks the columns to read of a columnar file."""

        def wanted(names: Sequence[str]) -> list[str]:
            pictures = [name for name in self._image_columns if name in names]
            if self._image is not None and not pictures:
                raise DataError(f"{where}: {_no_column('image_column', (self._image,), names)}")
            if not pictures:
                try:
                    self._text_columns(names)
                except Fault as fault:
                    raise DataError(f"{where}: {fault.reason}") from fault
            texts = (_first_of(names, self._id, ID_COLUMNS), _first_of(names, self._text, TEXT_COLUMNS))
            return [name for name in names if name in {*texts, *pictures, "title", *CAPTION_COLUMNS * bool(pictures)}]

        return wanted

    def _text_columns(self, names: Iterable[str]) -> tuple[str, str]:
        """Return the id's and the text's column of a row without a picture."""
        columns = []
        for option, asked, usual in (("id_column", self._id, ID_COLUMNS), ("text_column", self._text, TEXT_COLUMNS)):
            name = _first_of(names, asked, usual)
            if name is None:
                raise Fault("", _no_column(option, usual if asked is None else (asked,), names))
            columns.append(name)
        return columns[0], columns[1]

    def _with_pictures(
        self, row: dict[str, Any], column: str, where: str, known: set[str], images: ImageRoot
    ) -> Iterator[Document]:
        """Yield the one document of a row with an id, or a document for each picture of a row without."""
        id_column = _first_of(row, self._id, ID_COLUMNS)
        if self._id is not None and id_column is None:
            raise Fault("", _no_column("id_column", (self._id,), row))
        # With an id the pictures of a row are one document, without each of them is one.
        cells = [row[column]] if id_column is not None or not isinstance(row[column], list) else row[column]
        # Beside a picture without an id `text` is its caption, as in training data.
        text_column = _first_of(row, self._text, TEXT_COLUMNS[:1])
        text = "" if id_column is None else document_text(row, text_column, needed=False)
        captions = CAPTION_COLUMNS if id_column is not None else (*CAPTION_COLUMNS, *TEXT_COLUMNS[:1])
        caption_column = next((name for name in captions if isinstance(row.get(name), str) and row[name]), "")
        caption = row[caption_column] if caption_column else ""
        if reason := encoding_fault(caption):
            raise Fault(caption_column, reason)
        for cell in cells:
            item = document_item(images, {column: cell}, column, where, text)
            parts = cell if isinstance(cell, list) else [cell]
            named = (part.get("path") if isinstance(part, Mapping) else part for part in parts)
            paths = [path for path in named if isinstance(path, str) and path]
            if reason := encoding_fault("".join(paths)):
                raise Fault(column, reason)
            path = PATH_SEPARATOR.join(map(os.path.normpath, paths))
            if id_column is not None:
                name = checked_id(row[id_column], id_column, known)
            else:
                # Bytes go by their content: a path beside them need not be unique.
                name = path if isinstance(item, Image) and item.data is None else content_name(item)
                if name in known:
                    self._num_repeated += 1
                    continue
            yield Document(name, item, path, caption)


def corpus_file(path: str) -> Path:
    """Return the file that holds a corpus, or a folder of pictures.

    Raises:
        DataError: There is none.
        MachineError: A folder can't be listed.
    """
    local = home_path(path)
    if is_folder(local):
        named = next((local / name for name in CORPUS_FILES if is_file(local / name)), None)
        if named is not None:
            return named
        if any(is_picture for _, is_picture in _files_below(local)):
            return local
        raise DataError(
            f"{path} has no {CORPUS_FILES[0]} and no pictures; name a BEIR folder, a folder of pictures, or the file "
            f"that holds the corpus"
        )
    if not is_file(local):
        if "://" in path:  # not echoed: an address may hold a password
            raise DataError("the corpus is an address; download it and name the local file")
        if os.path.lexists(local):
            raise DataError(f"{path} is no regular file but a pipe, socket, device, or a link that leads nowhere")
        raise DataError(
            f"{cut(path, 1000)} doesn't exist{nearest_entry(local)}; a corpus is a BEIR folder, a file, or builtin:SET"
        )
    kinds = (*(suffix for suffix in row_suffixes() if suffix != SHARD_SUFFIX), *TEXT_FILES)
    if not local.name.lower().endswith(kinds):
        raise DataError(f"{path}: unknown kind of file; expected {', '.join(kinds)}")
    return local


def _files_below(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each file in a folder and below it, and whether it is a picture by its name.

    Links to folders and hidden folders aren't entered.

    Raises:
        MachineError: A folder can't be listed.
    """

    def refuse(error: OSError) -> None:
        raise MachineError(f"{error.filename}: the folder can't be listed: {error.strerror}") from error

    # Sorted by the caller: `os.walk` gives the order of the file system, which differs between machines.
    for inner, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            yield Path(inner) / name, name.lower().endswith(PICTURE_SUFFIXES) and not name.startswith(".")


def _first_of(names: Iterable[str], asked: str | None, usual: tuple[str, ...]) -> str | None:
    return next((name for name in (usual if asked is None else (asked,)) if name in names), None)


def _no_column(option: str, wanted: tuple[str, ...], names: Iterable[str]) -> str:
    near = closest(wanted[0], names) if len(wanted) == 1 else ""
    return (
        f"no column {one_of(map(repr, wanted))}{near}; the row has {listing(names)}. Name it with "
        f"{option} (--{option.replace('_', '-')})"
    )
