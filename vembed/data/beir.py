"""Read the BEIR layout: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv.

A row of corpus or queries may hold a picture in `image`, a path; with a text beside it, the item is both in one.

Source: Thakur et al. 2021, "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of Information Retrieval Models".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vembed.batch import ImageLimits
from vembed.data.check import ProblemLog, encoding_fault, id_fault, part_fault, text_fault, title_and_text
from vembed.data.columns import listing
from vembed.data.formats import iter_rows
from vembed.data.image_root import ImageRoot, PictureFault
from vembed.data.lines import numbered_lines, reading
from vembed.data.retrieval import RetrievalData
from vembed.data.splits import PATH_KEYS, SPLIT_NAMES, Role, is_for_evaluation, missing_split, split_for
from vembed.errors import DataError
from vembed.files import is_file, is_folder
from vembed.text import plural, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from vembed.batch import Item
    from vembed.data.columns import ExtraColumn

HEADER_CELLS = frozenset({"query-id", "query_id", "qid", "query"})
MAX_ID_LIST = 3
MOST_GRADE = 2**31 - 1
_GRADE = re.compile(r"[+-]?[0-9]{1,64}")


class BeirSplit(NamedTuple):
    """One split of a BEIR folder, with what records of its queries need."""

    data: RetrievalData
    query_lines: dict[str, int]  # query id -> line of queries.jsonl
    query_file: str  # its name
    cells: dict[str, dict[str, Any]]  # query id -> the columns of queries.jsonl that a loss asks for


@dataclass(slots=True)
class _Qrels:
    grades: dict[str, dict[str, int]] = field(default_factory=dict)
    num_repeated: int = 0
    num_negative: int = 0


def is_beir(folder: Path) -> bool:
    """Return whether a folder has the BEIR layout."""
    return is_folder(folder / "qrels") or all(_find(folder, name) for name in ("corpus", "queries"))


def read_beir(
    folder: Path, split: str | None, role: Role, images: ImageRoot | None = None, *, split_key: str | None = None
) -> RetrievalData:
    """Read one split of a BEIR folder as a retrieval task.

    Args:
        folder: Holds corpus.jsonl, queries.jsonl and qrels/, the first two possibly as .gz.
        split: The qrels file, by name without `.tsv`; None chooses by role.
        images: What checks the pictures; None takes their paths from the folder, with the default limits.
        split_key: What the user calls the split; the key of the role where that isn't said.

    Returns:
        All documents, the judged queries, and their judgements. A judged document that the corpus lacks is left out.

    Raises:
        DataError: A file is missing or broken, ids repeat, or nothing that is judged exists.
    """
    return read_beir_split(folder, split, role, images, split_key=split_key).data


def read_beir_split(
    folder: Path,
    split: str | None,
    role: Role,
    images: ImageRoot | None = None,
    extra: Sequence[ExtraColumn] = (),
    problems: ProblemLog | None = None,
    *,
    split_key: str | None = None,
) -> BeirSplit:
    """Read one split as `read_beir` does, and keep where its queries stand and what of them a loss asks for.

    Args:
        problems: Collects the invalid rows; None refuses the folder for any.
    """
    split, notes = find_split(folder, split, role, split_key)
    corpus_file, query_file = _part(folder, "corpus"), _part(folder, "queries")
    log = problems or ProblemLog()
    images = images or ImageRoot(folder, ImageLimits())
    qrels = _read_qrels(folder / "qrels" / f"{split}.tsv", log)
    asked = {name for column in extra for name in (column.name, *column.aliases)}
    queries, query_lines, cells = _read_queries(query_file, set(qrels.grades), images, log, asked)
    documents, num_empty = _read_corpus(corpus_file, images, log)
    if log.refused:
        raise DataError(log.listing(str(folder)))
    grades, missing_notes = _existing(qrels.grades, queries, documents, f"{folder.name}/qrels/{split}.tsv")
    counts = [
        (num_empty, "document has neither a title nor a text", "documents have neither a title nor a text"),
        (qrels.num_repeated, "judgement stands twice in the qrels", "judgements stand twice in the qrels"),
        (qrels.num_negative, "negative grade counts as 0", "negative grades count as 0"),
    ]
    data = RetrievalData(
        name=f"{folder.resolve().name}/{split}",
        queries={name: item for name, item in queries.items() if name in grades},
        documents=documents,
        qrels=grades,
        notes=(*notes, *missing_notes, *(f"{plural(n, one, many)}." for n, one, many in counts if n)),
    )
    return BeirSplit(data, query_lines, query_file.name, cells)


def find_split(
    folder: Path, split: str | None, role: Role, split_key: str | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return which qrels file to read, and what is unusual about the choice.

    A split that the user names must exist. Otherwise the role decides: train; dev, val or validation; test. A folder's
    only qrels file serves any role, except that evaluation judgements are never taken for training unasked.

    Raises:
        DataError: There is no such split; the message lists those that exist.
    """
    available = sorted(path.stem for path in (folder / "qrels").glob("*.tsv"))
    if not available:
        msg = f"{folder} has no judgements: expected qrels/{SPLIT_NAMES[role][0]}.tsv"
        raise DataError(msg)
    chosen = split_for(available, split, role)
    if chosen is not None:
        return chosen, ()
    if split is None and len(available) == 1 and not (role == "train" and is_for_evaluation(available[0])):
        return available[0], (f"{folder.name} has one split only: {available[0]!r} serves as the {role} data.",)
    rows = folder / "train.jsonl"
    hint = f", or train on its rows: {PATH_KEYS[role]}: {rows}" if role == "train" and is_file(rows) else ""
    raise DataError(f"{missing_split(folder, available, split, role, split_key)}{hint}")


def beir_rows(part: BeirSplit) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield one row per query with a relevant document, with the query's line.

    All its relevant documents are positives; documents judged not relevant are negatives.
    """
    documents = part.data.documents
    for query_id, grades in part.data.qrels.items():
        positives = [documents[name] for name, grade in grades.items() if grade > 0]
        negatives = [documents[name] for name, grade in grades.items() if grade == 0]
        if positives and part.data.queries[query_id] != "":  # it was broken, and a check continues without it
            row = {"query": part.data.queries[query_id], "positive": positives, "negatives": negatives}
            yield part.query_lines[query_id], row | part.cells.get(query_id, {})


def _read_corpus(path: Path, images: ImageRoot, log: ProblemLog) -> tuple[dict[str, Item], int]:
    """Return document id -> item, and how many are empty."""
    documents: dict[str, Item] = {}
    num_empty = 0
    for where, name, row in _identified(path, log, known=documents):
        title, text = row.get("title"), row.get("text")
        has_picture = bool(row.get("image"))
        faults = {"title": part_fault(title, needed=False), "text": part_fault(text, needed=not has_picture)}
        column, fault = next(((column, fault) for column, fault in faults.items() if fault), ("", None))
        if fault:
            log.add(where, fault, column=column)
            continue
        joined = title_and_text(title, text)
        document = _with_picture(row, joined, images, where, log) if has_picture else joined
        if document is not None:
            documents[name] = document
            num_empty += not document
    if not documents and not log.count:
        msg = f"{path} holds no documents"
        raise DataError(msg)
    return documents, num_empty


def _read_queries(
    path: Path, judged: set[str], images: ImageRoot, log: ProblemLog, asked: set[str]
) -> tuple[dict[str, Item], dict[str, int], dict[str, dict[str, Any]]]:
    """Return query id -> item, line and asked columns of all queries; only judged ones must be usable."""
    queries: dict[str, Item] = {}
    lines: dict[str, int] = {}
    cells: dict[str, dict[str, Any]] = {}
    for where, name, row in _identified(path, log, known=queries):
        lines[name] = int(where.rpartition(":")[2])
        if asked:
            cells[name] = {column: cell for column, cell in row.items() if column in asked}
        text = row.get("text")
        has_picture = name in judged and bool(row.get("image"))
        needed = name in judged and not (has_picture and (text is None or text == ""))
        reason = text_fault(text) if needed else None
        if reason:
            log.add(where, reason if "text" in row else "missing", column="text")
        queries[name] = text if isinstance(text, str) else ""
        if has_picture and not reason:
            queries[name] = _with_picture(row, text or "", images, where, log) or ""
    return queries, lines, cells


def _with_picture(row: dict[str, Any], text: str, images: ImageRoot, where: str, log: ProblemLog) -> Item | None:
    """Return the pictures of a row, with the row's text where it has one, or note why there are none."""
    try:
        return images.item(row["image"], name=where, text=text)
    except PictureFault as fault:
        log.add(where, fault.reason, column="image")
        return None


def _identified(path: Path, log: ProblemLog, *, known: Mapping[str, Item]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (file:line, id, row) of each row with a usable new id."""
    for line, row in iter_rows(path):
        where = f"{path.name}:{line}"
        if isinstance(row, str):
            log.add(where, row)
            continue
        name = row.get("_id", row.get("id"))
        if fault := id_fault(name, known):
            log.add(where, fault, column="_id")
        else:
            yield where, str(name), row


def _read_qrels(path: Path, log: ProblemLog) -> _Qrels:
    """Read `query-id, corpus-id, score` with or without a header, or TREC's four columns."""
    qrels = _Qrels()
    with reading(path):
        first = True
        for number, line in _qrels_lines(path):
            if not line.strip():
                continue
            cells = [cell.strip() for cell in (line.split("\t") if "\t" in line else line.split())]
            if first and cells[0].lower() in HEADER_CELLS:
                first = False
                continue
            first = False
            where = f"{path.name}:{number}"
            reason = _add_judgement(qrels, cells)
            if reason:
                log.add(where, reason)
    if not qrels.grades and not log.count:
        msg = f"{path} holds no judgements"
        raise DataError(msg)
    return qrels


def _qrels_lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in numbered_lines(path):
        for part in line.decode(errors="surrogateescape").split("\r"):  # some files have no other line ends
            yield number, part


def _add_judgement(qrels: _Qrels, cells: list[str]) -> str | None:
    """Add one line's judgement; return why it can't be, or None."""
    if len(cells) not in {3, 4}:
        return f"{len(cells)} columns; expected query-id, corpus-id, score (or TREC's query-id, 0, corpus-id, score)"
    query_id, document_id, score = cells[0], cells[-2], cells[-1]
    if not query_id or not document_id:
        return "an empty id"
    fault = encoding_fault(query_id + document_id)
    if fault:
        return fault
    grade = int(score) if _GRADE.fullmatch(score) else None
    if grade is None:
        return f"score {quoted(score)} is not a whole number"
    if grade > MOST_GRADE:
        return f"score {quoted(score)} is over {MOST_GRADE:,}"
    qrels.num_negative += grade < 0
    grade = max(grade, 0)
    grades = qrels.grades.setdefault(query_id, {})
    before = grades.get(document_id)
    if before not in {None, grade}:
        return f"query {quoted(query_id)} judges document {quoted(document_id)} twice, with grades {before} and {grade}"
    qrels.num_repeated += before is not None
    grades[document_id] = grade
    return None


def _existing(
    grades: dict[str, dict[str, int]], queries: Mapping[str, Item], documents: Mapping[str, Item], source: str
) -> tuple[dict[str, dict[str, int]], tuple[str, ...]]:
    """Return the judgements whose query and document exist, and sentences about the others."""
    lost_queries = [name for name in grades if name not in queries]
    lost_documents = list(dict.fromkeys(name for per in grades.values() for name in per if name not in documents))
    kept = {
        query_id: {name: grade for name, grade in grades[query_id].items() if name in documents}
        for query_id in queries
        if query_id in grades
    }
    kept = {query_id: per for query_id, per in kept.items() if per}
    notes = tuple(
        f"{plural(len(ids), f'judged {noun}', f'judged {many}')} missing from {file}: {listing(ids, MAX_ID_LIST)}."
        for ids, noun, many, file in (
            (lost_queries, "query is", "queries are", "the queries"),
            (lost_documents, "document is", "documents are", "the corpus"),
        )
        if ids
    )
    if not kept:
        msg = f"no judgement of {source} has both its query and its document: {' '.join(notes)} Are the ids the same?"
        raise DataError(msg)
    return kept, notes


def _find(folder: Path, part: str) -> Path | None:
    return next((path for end in (".jsonl", ".jsonl.gz") if is_file(path := folder / f"{part}{end}")), None)


def _part(folder: Path, part: str) -> Path:
    path = _find(folder, part)
    if path is None:
        msg = f"{folder} has no {part}.jsonl: a BEIR folder holds corpus.jsonl, queries.jsonl and qrels/"
        raise DataError(msg)
    return path
