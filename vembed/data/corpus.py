"""Read a corpus, document by document: the other half of a search, without queries or judgements.

A corpus is a BEIR folder's corpus.jsonl, a file of rows with an id and a text (and possibly a title), a text file with
one document a line, or a built-in set. Every row is checked; memory is the ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.data.columns import closest, listing
from vembed.data.files import ROW_SUFFIXES, RawRow, iter_rows, suffix_of, text_rows
from vembed.data.problems import InvalidPolicy, ProblemLog, plural
from vembed.data.retrieval_sources import load_retrieval
from vembed.data.sources import BUILTIN_PREFIX, SourceOptions
from vembed.data.validate import encoding_fault
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ID_COLUMNS = ("_id", "id", "docid", "doc_id")
TEXT_COLUMNS = ("text", "document", "passage", "contents", "content")
"""Names that the columns go by, the preferred one first."""

TITLE_COLUMN = "title"
TEXT_FILES = (".txt", ".txt.gz")
CORPUS_FILES = ("corpus.jsonl", "corpus.jsonl.gz")
"""What a folder's corpus is called, as in BEIR."""


class Document(NamedTuple):
    """One document.

    Attributes:
        id: Different from that of any other.
        text: Title, one space, text; may be empty.
    """

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class CorpusColumns:
    """Which columns of a row are what; None takes the first of the usual names that the row has.

    Attributes:
        id: Column of the ids.
        text: Column of the texts.
    """

    id: str | None = None
    text: str | None = None


class Corpus:
    """The documents of one source, in order; to be iterated once.

    Args:
        path: A folder with a corpus.jsonl; a .jsonl, .json, .csv, .tsv, .txt (each possibly .gz) or .parquet file; or
            `builtin:SET`.
        columns: Which columns of a row are what.

    Raises:
        DataError: There is no such source.
    """

    def __init__(self, path: str, columns: CorpusColumns | None = None) -> None:
        self._path = path
        self._columns = columns or CorpusColumns()
        self._file = None if path.startswith(BUILTIN_PREFIX) else _corpus_file(path)
        self._log = ProblemLog(InvalidPolicy())
        self._num_blank = 0
        self._num_empty = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what was skipped or is unusual; complete after the last document."""
        counts = [
            (self._num_blank, "blank line is no document", "blank lines are no documents"),
            (self._num_empty, "document has neither a title nor a text", "documents have neither a title nor a text"),
        ]
        return tuple(f"{plural(count, one, many)}." for count, one, many in counts if count)

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents.

        Raises:
            DataError: There is none, or a row is invalid; raised after the last row, with the first problems of all.
            MachineError: The operating system refuses to read a file.
        """
        if self._file is None:
            task = load_retrieval(self._path, SourceOptions(role="test"))
            pictures = sum(not isinstance(item, str) for item in task.documents.values())
            if pictures:
                raise DataError(f"{self._path} holds {pictures} pictures; an index is made of texts in this version")
            yield from (Document(name, text) for name, text in task.documents.items() if isinstance(text, str))
            return
        known: set[str] = set()
        for line, row in self._rows(self._file):
            document = self._checked(row, f"{self._file.name}:{line}", known)
            if document is not None and not self._log.count:
                known.add(document.id)
                self._num_empty += not document.text
                yield document
        if self._log.count:
            raise DataError(self._log.listing(self._path))
        if not known:
            raise DataError(f"{self._path} holds no documents")

    def _rows(self, file: Path) -> Iterator[RawRow]:
        if file.name.lower().endswith(TEXT_FILES):
            for line, row in text_rows(file):
                if isinstance(row, dict) and not row["text"]:
                    self._num_blank += 1
                else:
                    yield line, row if isinstance(row, str) else {"id": line, **row}
        else:
            yield from iter_rows(file, partial(_wanted, columns=self._columns, where=file.name))

    def _checked(self, row: dict[str, Any] | str, where: str, known: set[str]) -> Document | None:
        """Return the document of a row; None, and a problem in the log, when it is invalid."""
        if isinstance(row, str):
            self._log.add(where, row)
            return None
        if row.get("image"):
            raise DataError(f"{where}: column 'image' holds a picture, and this version's corpora are text only")
        columns = _columns_of(row, self._columns)
        if isinstance(columns, str):
            self._log.add(where, columns)
            return None
        id_column, text_column = columns
        name, title, text = row[id_column], row.get(TITLE_COLUMN), row[text_column]
        reason = _id_fault(name)
        if reason is None and str(name) in known:
            reason = f"{str(name)!r} stands twice"
        if reason is not None:
            self._log.add(where, reason, column=id_column)
            return None
        for column, value, needed in ((TITLE_COLUMN, title, False), (text_column, text, True)):
            reason = _text_fault(value, needed=needed)
            if reason is not None:
                self._log.add(where, reason, column=column)
                return None
        return Document(str(name), f"{title or ''} {text}".strip())


def _corpus_file(path: str) -> Path:
    """Return the file that holds the corpus."""
    local = Path(path).expanduser()
    if local.is_dir():
        found = next((local / name for name in CORPUS_FILES if (local / name).is_file()), None)
        if found is None:
            raise DataError(f"{path} has no {CORPUS_FILES[0]}; name a BEIR folder, or the file that holds the corpus")
        return found
    if not local.is_file():
        if "://" in path:  # not echoed: an address may hold a password
            raise DataError("the corpus is an address; download it and name the local file")
        near = closest(local.name, (entry.name for entry in local.parent.iterdir())) if local.parent.is_dir() else ""
        raise DataError(f"{path} doesn't exist{near}; a corpus is a BEIR folder, a file, or builtin:SET")
    if suffix_of(local) is None and not local.name.lower().endswith(TEXT_FILES):
        raise DataError(f"{path}: unknown kind of file; expected {', '.join((*ROW_SUFFIXES, *TEXT_FILES))}")
    return local


def _wanted(names: Sequence[str], *, columns: CorpusColumns, where: str) -> list[str]:
    """Return the columns to read of a columnar file."""
    found = _columns_of(names, columns)
    if isinstance(found, str):
        raise DataError(f"{where}: {found}")
    return [name for name in names if name in {*found, TITLE_COLUMN, "image"}]


def _columns_of(names: Iterable[str], columns: CorpusColumns) -> tuple[str, str] | str:
    """Return the id's and the text's column of a row, or why there is none."""
    found = []
    for option, asked, usual in (("id_column", columns.id, ID_COLUMNS), ("text_column", columns.text, TEXT_COLUMNS)):
        wanted = usual if asked is None else (asked,)
        name = next((name for name in wanted if name in names), None)
        if name is None:
            near = "" if asked is None else closest(asked, names)
            flag = option.replace("_", "-")
            return (
                f"no column {' or '.join(repr(each) for each in wanted)}{near}; the row has {listing(names)}. Name it "
                f"with {option} (--{flag})"
            )
        found.append(name)
    return found[0], found[1]


def _id_fault(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        return "missing, or neither a text nor a whole number"
    return encoding_fault(str(value))


def _text_fault(value: object, *, needed: bool) -> str | None:
    if value is None:
        return "missing" if needed else None
    if not isinstance(value, str):
        return f"expected text, got {type(value).__name__}"
    return encoding_fault(value)
