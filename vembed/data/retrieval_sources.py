"""Turn what `val_data_path` or `test_data_path` names into a retrieval task."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.batch import content_id
from vembed.data.beir import read_beir
from vembed.data.problems import plural
from vembed.data.retrieval import RetrievalData
from vembed.data.sources import BUILTIN_PREFIX, SourceOptions, beir_folder, load_records
from vembed.data.splits import SPLIT_NAMES

if TYPE_CHECKING:
    from vembed.data.records import RecordTable


def load_retrieval(path: str, options: SourceOptions) -> RetrievalData:
    """Read a data source as a retrieval task.

    A BEIR folder is taken as it is. Of any other source the documents are the distinct positives and negatives.

    Args:
        path: Any form that `load_records` takes.
        options: Role, split, columns and what to do with invalid rows.

    Raises:
        ConfigError: As `load_records`.
        DataError: As `load_records` and `read_beir`.
        MachineError: As `load_records`.
    """
    if folder := beir_folder(path):
        task = read_beir(folder, options.split, options.role)
        notes = ("column_mapping has no effect on a BEIR folder.",) if options.column_mapping else ()
        return RetrievalData(task.name, task.queries, task.documents, task.qrels, (*task.notes, *notes))
    loaded = load_records(path, options)
    task = retrieval_from_records(loaded.table, _task_name(path, options))
    return RetrievalData(task.name, task.queries, task.documents, task.qrels, (*loaded.notes, *task.notes))


def retrieval_from_records(table: RecordTable, name: str) -> RetrievalData:
    """Make a retrieval task of records: every query searches the distinct positives and negatives of all of them.

    Queries of equal content are one query with the positives of all its records; hard negatives are documents without
    a judgement. Ids are 16 hexadecimal digits of the content hash, so that they don't depend on the order of the rows.
    Labels are not used: rows of one class keep their own positives.

    Args:
        table: The records.
        name: Name of the task, for people.
    """
    digest = cache(_text_id)
    queries: dict[str, str] = {}
    documents: dict[str, str] = {}
    qrels: dict[str, dict[str, int]] = {}
    num_repeated = 0
    for record in table:
        query_id = digest(record.query)
        num_repeated += query_id in queries
        queries.setdefault(query_id, record.query)
        for text in (*record.positives, *record.negatives):
            documents.setdefault(digest(text), text)
        qrels.setdefault(query_id, {}).update((digest(text), 1) for text in record.positives)
    notes = (f"{plural(num_repeated, 'row')} merged into an earlier row of the same query.",) if num_repeated else ()
    return RetrievalData(name, queries, documents, qrels, notes)


def _text_id(text: str) -> str:
    return f"{content_id(text) & (2**64 - 1):016x}"


def _task_name(path: str, options: SourceOptions) -> str:
    """Return "stdlib-code/dev", "dev.jsonl", "owner/name/test": what a table of results should say."""
    if path.startswith(BUILTIN_PREFIX):
        return f"{path.removeprefix(BUILTIN_PREFIX)}/{options.split or SPLIT_NAMES[options.role][0]}"
    name = Path(path).name if Path(path).expanduser().exists() else path
    return f"{name}/{options.split}" if options.split else name
