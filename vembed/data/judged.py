"""Judged sets: queries, documents and relevance judgements, as they are published or made of records.

A set is a BEIR folder (`read_beir`), rows of pairs, whose distinct positives and negatives are the documents
(`task_from_records`), or a built-in or published one that makes a `RetrievalData` itself.

The BEIR layout is corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv. A row of corpus or queries may hold a picture in
`image`, a path; with a text beside it, the item is both in one.

Source: Thakur et al. 2021, "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of Information Retrieval Models".
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from vembed.batch import MODALITY_WORDS, modality_of
from vembed.data.check import Fault, ProblemLog, checked_id, document_item, document_text, encoding_fault, text_fault
from vembed.data.columns import listing
from vembed.data.formats import iter_rows
from vembed.data.images import content_name
from vembed.data.keys import PATH_KEYS, SPLIT_NAMES, Role, missing_split, split_for
from vembed.data.lines import numbered_lines
from vembed.data.raw_rows import Unreadable
from vembed.errors import DataError
from vembed.files import is_file, is_folder
from vembed.text import plural, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from vembed.batch import Item, Modality
    from vembed.data.columns import ExtraColumn
    from vembed.data.images import ImageRoot
    from vembed.data.raw_rows import RawRow
    from vembed.data.table import RecordTable

PairKind: TypeAlias = Literal["grade", "pair"]
"""Meaning of the grades of pairs: how close the two are, or 1 and 0 for whether they belong together."""

REVERSED = "reversed"
"""Last word of the name of a set whose documents ask."""


@dataclass(frozen=True, slots=True)
class RetrievalData:
    """One retrieval task."""

    name: str  # for people, e.g. "scifact/test"
    queries: Mapping[str, Item]  # query id -> text, picture, or both in one
    documents: Mapping[str, Item]  # document id -> text (title, one space, text), picture, or both in one
    qrels: Mapping[str, Mapping[str, int]]  # query id -> document id -> graded relevance (0 is judged and not relevant)
    notes: tuple[str, ...] = ()  # what was left out or is unusual, one plain sentence each
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)  # query id -> never ranked for it
    candidates: Mapping[str, frozenset[str]] = field(default_factory=dict)  # query id -> all that it ranks
    cutoffs: tuple[int, ...] = ()  # cut-offs that the literature reports the set at, beside the usual ones
    # Where the set is of graded pairs: query id -> document id -> grade (1 and 0 of kind "pair"). Nothing is searched
    # then: the order of all pairs by similarity is compared with that by grade.
    grades: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    kind: PairKind = "grade"

    @property
    def crosses_modalities(self) -> bool:
        """True where texts search pictures or pictures search texts, on either side nothing else: both ways are asked.

        A set that ranks a few named candidates for each query has no other way round.
        """
        sides = [_modalities(self.queries.values()), _modalities(self.documents.values())]
        return sorted(sides, key=sorted) == [{"image"}, {"text"}] and not self.candidates and not self.grades

    @property
    def direction(self) -> str:
        """Modalities of both sides in words, e.g. "texts search pictures"."""
        asking, searched = (
            " and ".join(MODALITY_WORDS[modality][1] for modality in sorted(_modalities(side.values()), reverse=True))
            for side in (self.queries, self.documents)
        )
        return f"{asking} search {searched}"

    def reversed(self) -> RetrievalData:
        """Return the task the other way round: documents ask for the queries that they are relevant to.

        Ids are kept and judgements are turned round with their grades. Queries without a relevant document aren't
        searched, as no number of this task is about them (a corpus of captions then holds those of its split alone);
        documents that are relevant to no query don't ask.
        """
        # Queries and documents change places, and everything that names pairs is turned round: judgements, exclusions
        # and candidates. `cutoffs` stay; `grades` have no direction, and such a set is never reversed.
        asked = {query for query, grades in self.qrels.items() if any(grade > 0 for grade in grades.values())}
        documents = {query: item for query, item in self.queries.items() if query in asked}
        qrels: dict[str, dict[str, int]] = {}
        for query in documents:
            for document, grade in self.qrels[query].items():
                qrels.setdefault(document, {})[query] = grade
        asking = {document for document, grades in qrels.items() if any(grade > 0 for grade in grades.values())}
        queries = {document: item for document, item in self.documents.items() if document in asking}
        silent = len(self.documents) - len(queries)
        return RetrievalData(
            name=f"{self.name} {REVERSED}",
            queries=queries,
            documents=documents,
            qrels={document: qrels[document] for document in queries},
            notes=(f"{silent} of {len(self.documents)} documents are relevant to no query: they don't ask.",)
            if silent
            else (),
            excluded={
                document: frozenset(query for query in documents if document in self.excluded.get(query, ()))
                for document in (queries if self.excluded else ())
            },
            candidates={
                document: frozenset(query for query in documents if document in self.candidates.get(query, {document}))
                for document in (queries if self.candidates else ())
            },
            cutoffs=self.cutoffs,
        )


def _modalities(items: Iterable[Item]) -> set[Modality]:
    """Return the kinds of items there are."""
    return {modality_of(item) for item in items}


# --- Of records

MOST_CLASS_JUDGEMENTS = 2_000_000
"""Judgements of a set with classes, each about 200 bytes of an evaluation's memory; beyond, fewer queries search."""


def task_from_records(table: RecordTable, name: str, label_kind: str) -> RetrievalData:
    """Make a task of records: of pairs with grades or truths where they have such, else of retrieval.

    Rows that list grades of several documents, as a teacher's, rank documents of a query: they are one of retrieval.

    Raises:
        DataError: No record has a positive.
        ImageError: A picture can't be read any more.
    """
    row_P, grade_P = table.listed
    lists_several = label_kind == "grade" and len(np.unique(row_P)) < len(row_P)
    if label_kind not in ("grade", "pair") or lists_several or len(np.unique(grade_P)) < 2:
        return retrieval_from_records(table, name)
    return _graded_task(table, name, "pair" if label_kind == "pair" else "grade")


def _graded_task(table: RecordTable, name: str, kind: PairKind) -> RetrievalData:
    """Make a task of the pairs of records; of a pair that comes again the mean of its grades counts."""
    # Items are named by their content; the cache hashes a picture once, however many rows hold it.
    digest = cache(content_name)
    queries: dict[str, Item] = {}
    documents: dict[str, Item] = {}
    listed: dict[str, dict[str, list[float]]] = {}  # query id -> document id -> the grades of all its rows
    silent = 0
    for record in table:
        if not record.scores:
            silent += 1
            continue
        query_id = digest(record.query)
        queries.setdefault(query_id, record.query)
        of_query = listed.setdefault(query_id, {})
        for document, grade in zip((*record.positives, *record.negatives), record.scores, strict=True):
            document_id = digest(document)
            documents.setdefault(document_id, document)
            of_query.setdefault(document_id, []).append(grade)
    grades = {query: {one: fmean(values) for one, values in of_query.items()} for query, of_query in listed.items()}
    num_pairs = sum(map(len, grades.values()))
    measure = "Spearman's rank correlation of similarity and grade" if kind == "grade" else "average precision"
    pairs = plural(num_pairs, "graded pair" if kind == "grade" else "judged pair")
    notes = [f"{name} has {pairs}, and nothing is searched: {measure} decides."]
    if silent:
        notes.append(f"{plural(silent, 'row')} without a {'grade' if kind == 'grade' else 'label'} left out.")
    judged = {query: dict.fromkeys(of_query, 1) for query, of_query in grades.items()}
    return RetrievalData(name, queries, documents, judged, tuple(notes), grades=grades, kind=kind)


def retrieval_from_records(table: RecordTable, name: str) -> RetrievalData:
    """Make a retrieval task of records: every query searches the distinct positives and negatives of all of them.

    Queries of equal content are one query with the positives of all its records; hard negatives are documents without
    a judgement. Ids are 16 hexadecimal digits of the content hash, so that they don't depend on the order of the rows.
    All positives of a class are relevant to each of its queries, as in training (`collate`), but for a copy of the
    query itself.

    Raises:
        DataError: No record has a positive.
        ImageError: A picture can't be read any more.
    """
    digest = cache(content_name)
    queries: dict[str, Item] = {}
    documents: dict[str, Item] = {}
    qrels: dict[str, dict[str, int]] = {}
    documents_of: defaultdict[str | int, dict[str, int]] = defaultdict(dict)  # class -> its positives
    classes_of: defaultdict[str, set[str | int]] = defaultdict(set)  # query id -> the classes of its rows
    num_repeated = 0
    for record in table:
        query_id = digest(record.query)
        num_repeated += query_id in queries
        queries.setdefault(query_id, record.query)
        for item in (*record.positives, *record.negatives):
            documents.setdefault(digest(item), item)
        relevant = {digest(item): 1 for item in record.positives}
        qrels.setdefault(query_id, {}).update(relevant)
        if record.label is not None:
            documents_of[record.label].update(relevant)
            classes_of[query_id].add(record.label)
    alone = [query_id for query_id, grades in qrels.items() if not grades]
    if alone and len(alone) == len(queries):
        raise DataError(f"{name}: no query has a document that belongs to it, so there is nothing to find")
    for query_id in alone:
        del queries[query_id], qrels[query_id]
    notes = []
    if num_repeated:
        notes.append(f"{plural(num_repeated, 'row')} merged into an earlier row of the same query.")
    if alone:
        verbs = "has no document that belongs to it and isn't" if len(alone) == 1 else "have none and aren't"
        notes.append(f"{plural(len(alone), 'query', 'queries')} {verbs} searched.")
    if classes_of:
        # A class of n rows makes n squared judgements. Where they would be too many, fewer queries search, drawn by
        # content hash: a sample that neither the rows' order nor the classes decide on.
        counts = {query: max(1, sum(len(documents_of[one]) for one in classes_of.get(query, ()))) for query in qrels}
        drawn = sorted(qrels)
        sums = np.cumsum([counts[query] for query in drawn])
        fitting = int(np.searchsorted(sums, MOST_CLASS_JUDGEMENTS, side="right"))
        kept = set(drawn[: max(1, fitting)])
        judged = {query: dict(grades) for query, grades in qrels.items() if query in kept}
        for query, grades in judged.items():
            for one in classes_of.get(query, ()):
                grades.update((document, 1) for document in documents_of[one] if document != query)
        if any(len(grades) > len(qrels[query]) for query, grades in judged.items()):
            notes.append("All documents of a query's class are relevant to it, but for the query itself.")
        if len(kept) < len(qrels):
            searched = plural(len(qrels), "query", "queries")
            notes.append(
                f"{len(kept):,} of {searched} search, the first by content hash: classes so large would make "
                f"{sum(counts.values()):,} judgements, and {MOST_CLASS_JUDGEMENTS:,} are the most."
            )
        qrels, queries = judged, {query_id: item for query_id, item in queries.items() if query_id in judged}
    return RetrievalData(name, queries, documents, qrels, tuple(notes))


# --- BEIR folders

HEADER_CELLS = frozenset({"query-id", "query_id", "qid", "query"})
MAX_ID_LIST = 3
MOST_GRADE = 1_000_000
"""Largest grade: trec_eval counts the documents of every grade up to a query's largest, 8 MB of counts for a million.
Of 2**31 - 1 it overflows, and every metric is 0."""

_GRADE = re.compile(r"[+-]?[0-9]{1,64}")


class BeirSplit(NamedTuple):
    """One split of a BEIR folder, with what records of its queries need."""

    data: RetrievalData
    query_lines: dict[str, int]  # query id -> line of queries.jsonl
    query_file: str  # its name
    cells: dict[str, dict[str, Any]]  # query id -> the columns of queries.jsonl that a loss asks for

    def positives(self, query_id: str) -> list[Item]:
        """Return the documents that are relevant to a query, without blank ones: nothing is learnt from them."""
        documents = self.data.documents
        return [documents[name] for name, grade in self.data.qrels[query_id].items() if grade > 0 and documents[name]]

    def rows(self) -> Iterator[RawRow]:
        """Yield one row to train on per query with a relevant document, with the query's line.

        All its relevant documents are positives; documents judged not relevant are negatives. Blank ones are neither.
        """
        documents = self.data.documents
        for query_id, grades in self.data.qrels.items():
            positives = self.positives(query_id)
            negatives = [documents[name] for name, grade in grades.items() if grade == 0 and documents[name]]
            if positives and self.data.queries[query_id] != "":  # it was broken, and a check continues without it
                row = {"query": self.data.queries[query_id], "positive": positives, "negatives": negatives}
                yield self.query_lines[query_id], row | self.cells.get(query_id, {})


def is_beir(folder: Path) -> bool:
    """Return whether a folder has the BEIR layout."""
    return is_folder(folder / "qrels") or all(_part(folder, name) for name in ("corpus", "queries"))


def read_beir(
    folder: Path,
    split: str | None,
    role: Role,
    images: ImageRoot,
    extra: Sequence[ExtraColumn] = (),
    problems: ProblemLog | None = None,
    *,
    split_key: str,
) -> BeirSplit:
    """Read one split of a BEIR folder.

    Args:
        folder: Holds corpus.jsonl, queries.jsonl and qrels/, the first two possibly as .gz.
        split: The qrels file, by name without `.tsv`; None chooses by role.
        images: What checks the pictures.
        extra: Columns of queries.jsonl that a loss asks for.
        problems: Collects the invalid rows; None refuses the folder for any.
        split_key: What the user calls the split.

    Returns:
        All documents, the judged queries, and their judgements. A judged document that the corpus lacks is left out.

    Raises:
        DataError: A file is missing or broken, ids repeat, or nothing that is judged exists.
    """
    split, notes = find_split(folder, split, role, split_key)
    files = {part: _part(folder, part) for part in ("corpus", "queries")}
    for part, file in files.items():
        if file is None:
            raise DataError(f"{folder} has no {part}.jsonl: a BEIR folder holds corpus.jsonl, queries.jsonl and qrels/")
    corpus_file, query_file = (file for file in files.values() if file is not None)
    log = problems or ProblemLog()
    # Judgements first: only judged queries must be usable, as published files have broken ones among the others.
    qrels, num_repeated, num_negative = _read_qrels(folder / "qrels" / f"{split}.tsv", log)
    asked = {name for column in extra for name in (column.name, *column.aliases)}
    queries, query_lines, cells = _read_queries(query_file, set(qrels), images, log, asked)

    documents: dict[str, Item] = {}
    num_empty = 0
    for where, name, row in _identified(corpus_file, log, known=documents):
        try:
            has_picture = bool(row.get("image"))
            text = document_text(row, "text", needed=not has_picture)
            documents[name] = document_item(images, row, "image", where, text) if has_picture else text
            num_empty += not (text or has_picture)
        except Fault as fault:
            log.add(where, fault.reason, column=fault.column, may_drop=not fault.escapes)
    if not documents and not log.count:
        raise DataError(f"{corpus_file} holds no documents")
    if log.refused:
        raise DataError(log.listing(str(folder)))

    # Judgements whose query or document doesn't exist are left out, and told.
    lost_queries = [name for name in qrels if name not in queries]
    lost_documents = list(dict.fromkeys(name for per in qrels.values() for name in per if name not in documents))
    grades = {
        query_id: {name: grade for name, grade in qrels[query_id].items() if name in documents}
        for query_id in queries
        if query_id in qrels
    }
    grades = {query_id: per for query_id, per in grades.items() if per}
    lost_notes = tuple(
        f"{plural(len(ids), f'judged {noun}', f'judged {many}')} missing from {file}: {listing(ids, MAX_ID_LIST)}."
        for ids, noun, many, file in (
            (lost_queries, "query is", "queries are", "the queries"),
            (lost_documents, "document is", "documents are", "the corpus"),
        )
        if ids
    )
    if not grades:
        raise DataError(
            f"no judgement of {folder.name}/qrels/{split}.tsv has both its query and its document: "
            f"{' '.join(lost_notes)} Are the ids the same?"
        )
    counts = [
        (
            sum(name in queries for name in qrels) - len(grades),
            "query is left without a judged document and isn't searched",
            "queries are left without a judged document and aren't searched",
        ),
        (num_empty, "document has neither a title nor a text", "documents have neither a title nor a text"),
        (num_repeated, "judgement is given twice in the qrels", "judgements are given twice in the qrels"),
        (num_negative, "negative grade counts as 0", "negative grades count as 0"),
    ]
    data = RetrievalData(
        name=f"{folder.resolve().name}/{split}",
        queries={name: item for name, item in queries.items() if name in grades},
        documents=documents,
        qrels=grades,
        notes=(*notes, *lost_notes, *(f"{plural(n, one, many)}." for n, one, many in counts if n)),
    )
    return BeirSplit(data, query_lines, query_file.name, cells)


def find_split(folder: Path, split: str | None, role: Role, split_key: str) -> tuple[str, tuple[str, ...]]:
    """Return which qrels file to read, and what is unusual about the choice.

    A split that the user names must exist. Otherwise the role decides: train; dev, val or validation; test. A folder's
    only qrels file serves any role, except that evaluation judgements are never taken for training unasked.

    Raises:
        DataError: There is no such split; the message lists those that exist.
    """
    available = sorted(path.stem for path in (folder / "qrels").glob("*.tsv"))
    if not available:
        raise DataError(f"{folder} has no judgements: expected qrels/{SPLIT_NAMES[role][0]}.tsv")
    chosen = split_for(available, split, role)
    if chosen is not None:
        return chosen, ()
    # dev, validation, test, test_unseen
    for_evaluation = available[0].startswith((*SPLIT_NAMES["validation"], *SPLIT_NAMES["test"]))
    if split is None and len(available) == 1 and not (role == "train" and for_evaluation):
        return available[0], (f"{folder.name} has one split only: {available[0]!r} serves as the {role} data.",)
    rows = folder / "train.jsonl"
    hint = f", or train on its rows: {PATH_KEYS[role]}: {rows}" if role == "train" and is_file(rows) else ""
    raise DataError(f"{missing_split(folder, available, split, role, split_key)}{hint}")


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
        queries[name] = text if isinstance(text, str) else ""
        if name not in judged:
            continue
        try:
            has_picture = bool(row.get("image"))
            if not (has_picture and (text is None or text == "")) and (reason := text_fault(text)):
                raise Fault("text", reason if "text" in row else "missing")
            if has_picture:
                queries[name] = ""  # until its picture is known to be right
                queries[name] = document_item(images, row, "image", where, text or "")
        except Fault as fault:
            queries[name] = ""  # `BeirSplit.rows` leaves it out, or it would be logged twice
            log.add(where, fault.reason, column=fault.column, may_drop=not fault.escapes)
    return queries, lines, cells


def _identified(path: Path, log: ProblemLog, *, known: Mapping[str, Item]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (file:line, id, row) of each row with a usable new id."""
    for line, row in iter_rows(path):
        where = f"{path.name}:{line}"
        if isinstance(row, Unreadable):
            log.add(where, row)
            continue
        try:
            name = checked_id(row.get("_id", row.get("id")), "_id", known)
        except Fault as fault:
            log.add(where, fault.reason, column=fault.column)
        else:
            yield where, name, row


def _read_qrels(path: Path, log: ProblemLog) -> tuple[dict[str, dict[str, int]], int, int]:
    """Read `query-id, corpus-id, score` with or without a header, or TREC's four columns.

    Returns:
        Query id -> document id -> grade, at least 0; the number of judgements that repeat another, and of those with a
        negative grade, which count as 0.
    """
    qrels: dict[str, dict[str, int]] = {}
    num_repeated = num_negative = 0
    may_be_header = True
    for number, data in numbered_lines(path):
        for line in data.decode(errors="surrogateescape").split("\r"):  # some files have no other line ends
            if not line.strip():
                continue
            cells = [cell.strip() for cell in (line.split("\t") if "\t" in line else line.split())]
            is_header, may_be_header = may_be_header and cells[0].lower() in HEADER_CELLS, False
            if is_header:
                continue
            judgement = _judgement(cells)
            if isinstance(judgement, str):
                log.add(f"{path.name}:{number}", judgement)
                continue
            query_id, document_id, grade = judgement
            num_negative += grade < 0
            grade = max(grade, 0)
            grades = qrels.setdefault(query_id, {})
            before = grades.get(document_id)
            if before not in {None, grade}:
                pair = f"query {quoted(query_id)} judges document {quoted(document_id)}"
                log.add(f"{path.name}:{number}", f"{pair} twice, with grades {before} and {grade}")
                continue
            num_repeated += before is not None
            grades[document_id] = grade
    if not qrels and not log.count:
        raise DataError(f"{path} holds no judgements")
    return qrels, num_repeated, num_negative


def _judgement(cells: Sequence[str]) -> tuple[str, str, int] | str:
    """Return the query, the document and the grade of a line, or the reason why it is no judgement."""
    if len(cells) not in {3, 4}:
        columns = "query-id, corpus-id, score (or TREC's query-id, 0, corpus-id, score)"
        return f"{len(cells)} columns; expected {columns}"
    query_id, document_id, score = cells[0], cells[-2], cells[-1]
    if not query_id or not document_id:
        return "an empty id"
    if fault := encoding_fault(query_id + document_id):
        return fault
    if not _GRADE.fullmatch(score):
        return f"score {quoted(score)} is not a whole number"
    if int(score) > MOST_GRADE:
        return f"score {quoted(score)} is over {MOST_GRADE:,}"
    return query_id, document_id, int(score)


def _part(folder: Path, part: str) -> Path | None:
    """Return the file of the corpus or the queries, possibly packed."""
    return next((path for end in (".jsonl", ".jsonl.gz") if is_file(path := folder / f"{part}{end}")), None)
