"""Turn what `val_data_path` or `test_data_path` names into a retrieval task."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from vembed.data.beir import read_beir
from vembed.data.builtin import load_builtin_retrieval
from vembed.data.check import ProblemLog
from vembed.data.images import content_name
from vembed.data.presets import preset_path
from vembed.data.retrieval import RetrievalData
from vembed.data.sources import BUILTIN_PREFIX, beir_folder, load_records
from vembed.data.splits import SPLIT_NAMES, SourceOptions
from vembed.errors import DataError
from vembed.files import home_path
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.batch import Item
    from vembed.data.retrieval import PairKind
    from vembed.data.table import RecordTable

MOST_CLASS_JUDGEMENTS = 2_000_000
"""Judgements of a set with classes, each about 200 bytes of an evaluation's memory; beyond, fewer queries search."""


def load_retrieval(path: str, options: SourceOptions, *, takes_pairs: bool = False) -> RetrievalData:
    """Read a data source as a retrieval task.

    A BEIR folder or a published set is taken as it is, and so is a built-in set with judgements of its own. Of any
    other source the documents are the distinct positives and negatives.

    Args:
        path: Any form that `load_records` takes.
        takes_pairs: Whether rows with graded pairs become a task of these, on which nothing is searched.

    Raises:
        ConfigError: As `load_records`.
        DataError: As `load_records` and `read_beir`.
        MachineError: As `load_records`.
    """
    judged: RetrievalData | None = None
    kind = ""
    if folder := beir_folder(path):
        images = options.images(folder)
        judged = read_beir(folder, options.split, options.role, images, split_key=options.split_key)
        kind = "a BEIR folder"
    elif preset := preset_path(path):
        # A set with rows left out would no longer be the set that others report.
        judged, kind = preset.retrieval(options, ProblemLog()), "a published set"
    elif path.startswith(BUILTIN_PREFIX):
        name, split = path.removeprefix(BUILTIN_PREFIX), options.split or SPLIT_NAMES[options.role][0]
        judged, kind = load_builtin_retrieval(name, split), "a built-in set"
    if judged is None:
        loaded = load_records(path, options)
        name, label_kind = source_name(path, options), options.keys.label_kind if takes_pairs else "auto"
        task = task_from_records(loaded.table, name, label_kind)
        return replace(task, notes=(*loaded.notes, *task.notes))
    notes = (f"column_mapping has no effect on {kind}.",) if options.keys.column_mapping else ()
    return replace(judged, notes=(*judged.notes, *notes))


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
    digest = cache(content_name)
    queries: dict[str, Item] = {}
    documents: dict[str, Item] = {}
    said: dict[str, dict[str, list[float]]] = {}
    silent = 0
    for record in table:
        if not record.scores:
            silent += 1
            continue
        query_id = digest(record.query)
        queries.setdefault(query_id, record.query)
        own = said.setdefault(query_id, {})
        for document, grade in zip((*record.positives, *record.negatives), record.scores, strict=True):
            document_id = digest(document)
            documents.setdefault(document_id, document)
            own.setdefault(document_id, []).append(grade)
    grades = {query: {one: fmean(found) for one, found in own.items()} for query, own in said.items()}
    num_pairs = sum(map(len, grades.values()))
    measure = "Spearman's rank correlation of similarity and grade" if kind == "grade" else "average precision"
    pairs = plural(num_pairs, "graded pair" if kind == "grade" else "judged pair")
    notes = [f"{name} has {pairs}, and nothing is searched: {measure} decides."]
    if silent:
        notes.append(f"{plural(silent, 'row')} without a {'grade' if kind == 'grade' else 'label'} left out.")
    judged = {query: dict.fromkeys(own, 1) for query, own in grades.items()}
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
        own = {digest(item): 1 for item in record.positives}
        qrels.setdefault(query_id, {}).update(own)
        if record.label is not None:
            documents_of[record.label].update(own)
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
        qrels, said = _with_classes(qrels, documents_of, classes_of)
        queries = {query_id: item for query_id, item in queries.items() if query_id in qrels}
        notes += said
    return RetrievalData(name, queries, documents, qrels, tuple(notes))


def _with_classes(
    qrels: Mapping[str, Mapping[str, int]],
    documents_of: Mapping[str | int, Mapping[str, int]],
    classes_of: Mapping[str, set[str | int]],
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return judgements in which all of a query's class is relevant, of as many queries as fit, and notes on both."""
    counts = {query: max(1, sum(len(documents_of[one]) for one in classes_of.get(query, ()))) for query in qrels}
    drawn = sorted(qrels)  # by content hash: a sample that neither rows' order nor classes decide on
    fitting = int(np.searchsorted(np.cumsum([counts[query] for query in drawn]), MOST_CLASS_JUDGEMENTS, side="right"))
    kept = set(drawn[: max(1, fitting)])
    judged = {query: dict(own) for query, own in qrels.items() if query in kept}
    for query, own in judged.items():
        for one in classes_of.get(query, ()):
            own.update((document, 1) for document in documents_of[one] if document != query)
    notes = []
    if any(len(own) > len(qrels[query]) for query, own in judged.items()):
        notes.append("All documents of a query's class are relevant to it, but for the query itself.")
    if len(kept) < len(qrels):
        searched = plural(len(qrels), "query", "queries")
        notes.append(
            f"{len(kept):,} of {searched} search, the first by content hash: classes so large would make "
            f"{sum(counts.values()):,} judgements, and {MOST_CLASS_JUDGEMENTS:,} are the most."
        )
    return judged, notes


def source_name(path: str, options: SourceOptions) -> str:
    """Return "stdlib-code/dev", "dev.jsonl", "owner/name/test": what a table of results should say."""
    if path.startswith(BUILTIN_PREFIX):
        return f"{path.removeprefix(BUILTIN_PREFIX)}/{options.split or SPLIT_NAMES[options.role][0]}"
    name = Path(path).name if os.path.lexists(home_path(path)) else path
    return f"{name}/{options.split}" if options.split else name
