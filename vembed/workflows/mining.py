"""Write mined rows as JSONL or Parquet that training reads: the rows as they were, with negatives and where from.

The column `mined` holds the provenance; training passes over it (`data/columns.py`).
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Composed, pictures_in
from vembed.data.columns import PROVENANCE, WEIGHT_COLUMN
from vembed.errors import ConfigError, DataError, MachineError
from vembed.files import disk_error, is_folder, new_file
from vembed.pages.write import refuse_foreign_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.table import Record, RecordTable
    from vembed.vectors.mining import Mined, MiningTask

    Blocks = Callable[[], Iterator[list[dict[str, Any]]]]

SUFFIXES = (".jsonl", ".parquet")
BLOCK_ROWS = 8192
"""Rows that are written at a time."""

REPORT_KEYS = ("near_positives", "queries_with_fewer")
"""Keys of report.json that tell the report of a mining from others."""

DECIMALS = 6
"""Of a score in the file."""


def refuse_output(path: Path, *, overwrite: bool) -> None:
    """Refuse a file of another kind, or one that is there, or something else than a report at the report's name.

    Raises:
        ConfigError: With the fix.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--output {path}: name a file that ends in {' or '.join(SUFFIXES)}")
    if is_folder(path):
        raise ConfigError(f"--output {path} is a folder; name a file that ends in {' or '.join(SUFFIXES)}")
    if not overwrite and path.exists():
        raise ConfigError(f"{path} is there; replace it with --overwrite, or choose another file")
    refuse_foreign_report(report_folder(path), REPORT_KEYS)


def report_folder(output: Path) -> Path:
    """Return the folder of the report of a mining: rows-report/ beside rows.jsonl."""
    return output.with_name(f"{output.stem}-report")


def rows_without_positives(path: Path, records: RecordTable, *, lists_grades: bool) -> NDArray[np.int64]:
    """Return the rows that have nothing to mine below, and so come out as they went in.

    Raises:
        ConfigError: Parquet can't hold them, as their label is a number beside the lists of other rows.
    """
    rows = np.setdiff1d(np.arange(len(records)), records.numbers("positives")[0])
    if lists_grades and len(rows) and path.suffix == ".parquet":
        raise ConfigError(
            f"--output {path}: {records[int(rows[0])].location} has a grade of 0 or less and keeps that number as its "
            "label, other rows get a list of grades, and a column of Parquet can't hold both; name a file that ends in "
            ".jsonl"
        )
    return rows


def refuse_unwritable(task: MiningTask) -> None:
    """Refuse queries and documents that no row of the output can hold, before anything is encoded for them.

    Raises:
        DataError: A picture can't stand in such a file.
    """
    for items in (task.queries, task.documents):
        rows = items.pictured
        for start in range(0, len(rows), BLOCK_ROWS):
            for item in items.take(rows[start : start + BLOCK_ROWS]):
                if items is task.queries:
                    _pictures(item)
                else:
                    _side([item], "negatives", "negative_images")


def write_rows(
    path: Path,
    records: RecordTable,
    task: MiningTask,
    mined: Mined,
    source: dict[str, str],
    *,
    replaces: bool,
    lists_grades: bool = False,
    poll: Callable[[], None],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Write every record with its negatives; the file appears whole or not at all.

    Args:
        before: Called when all is written, before the file takes its name.
        source: What all rows were mined with: model, settings and so on.
        replaces: Whether the negatives that the records have are dropped.
        lists_grades: Whether scores are grades: the label then lists one for each document; else it is 1 or 0.

    Raises:
        DataError: See `refuse_unwritable`.
        MachineError: The file can't be written.
    """
    blocks = partial(_blocks, records, task, mined, source, replaces=replaces, lists_grades=lists_grades)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as temporary:
            if path.suffix == ".parquet":
                _write_parquet(temporary, blocks, poll, lists_grades=lists_grades)
            else:
                with temporary.open("w", encoding="utf-8", newline="\n") as file:
                    for rows in blocks():
                        poll()
                        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
            before()
    except Exception as error:
        refused = error if isinstance(error, OSError) else disk_error(error)
        if refused is None:
            raise
        raise MachineError(f"{path} can't be written: {refused}; free some space there") from error


def _write_parquet(path: Path, blocks: Blocks, poll: Callable[[], None], *, lists_grades: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, texts, numbers = pa.string(), pa.list_(pa.string()), pa.list_(pa.float64())
    mined = {"model": text, "weights": text, "settings": text, "teacher": text}
    mined |= {"scores": numbers, "ranks": pa.list_(pa.int64()), "positive_score": pa.float64()}
    columns = {"query": text, "query_image": texts, "positive": texts, "positive_image": texts, "negatives": texts}
    columns |= {"negative_images": texts, WEIGHT_COLUMN.name: pa.float64()}
    columns["label"] = numbers if lists_grades else pa.int64()
    # Parquet's schema comes before the first row, so the rows are made twice: once for the columns that they fill.
    filled = set[str]()  # a column that no row fills would be read as one that is there
    for rows in blocks():
        poll()
        filled.update(name for row in rows for name in row)
    details = pa.struct([*mined.items(), ("teacher_scores", numbers)])
    used = [(name, kind) for name, kind in columns.items() if name in filled]
    schema = pa.schema([*used, (PROVENANCE, details)])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in blocks():
            poll()
            # A column holds lists where any row has several; a single text becomes a list of one.
            lists = [
                {name: [cell] if name in columns and columns[name] == texts and isinstance(cell, str) else cell
                 for name, cell in row.items()}
                for row in rows
            ]  # fmt: skip
            writer.write_table(pa.Table.from_pylist(lists, schema))


def _blocks(
    records: RecordTable,
    task: MiningTask,
    mined: Mined,
    source: dict[str, str],
    *,
    replaces: bool,
    lists_grades: bool,
) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(records), BLOCK_ROWS):
        own = np.arange(start, min(start + BLOCK_ROWS, len(records)))
        queries = task.query_of_record_N[own]
        rows_Bn = mined.rows_Un[queries]
        counts = (rows_Bn >= 0).sum(axis=1)
        # All negatives of the block are read in one go: one by one would seek in the mapped table for each.
        items = iter(task.documents.take(rows_Bn[rows_Bn >= 0]))
        block = []
        for record, query, count in zip(records.take(own), queries.tolist(), counts.tolist(), strict=True):
            negatives = [next(items) for _ in range(count)]
            if not record.positives:  # nothing is mined below it, though it may be for another row of its query
                count, negatives = 0, []
            details: dict[str, Any] = {**source}
            # Rounded: the digits behind differ from machine to machine.
            details["scores"] = _rounded(mined.scores_Un[query, :count])
            details["ranks"] = mined.ranks_Un[query, :count].tolist()
            if np.isfinite(mined.positive_U[query]):
                details["positive_score"] = _rounded(mined.positive_U[query : query + 1])[0]
            if count and np.isfinite(mined.teacher_Un[query, 0]):
                details["teacher_scores"] = _rounded(mined.teacher_Un[query, :count])
            row = _row(record, negatives, replaces=replaces, lists_grades=lists_grades)
            block.append({**row, PROVENANCE: details})
        yield block


def _rounded(values: Any) -> list[float]:
    return [round(float(value), DECIMALS) for value in values]


def _row(record: Record, mined: list[Item], *, replaces: bool, lists_grades: bool) -> dict[str, Any]:
    """Return a record in the columns of the reader."""
    row: dict[str, Any] = {}
    query = record.query
    if isinstance(query, str):
        row["query"] = query
    else:
        if isinstance(query, Composed) and query.text:
            row["query"] = query.text
        row["query_image"] = _pictures(query)
    positives, kept = record.positives, () if replaces else record.negatives
    if not positives:  # a pair that doesn't belong together: its label says so again
        count = len(record.negatives) if lists_grades else 1
        positives, kept = record.negatives[:count], record.negatives[count:]
    row |= _side(positives, "positive", "positive_image")
    row |= _side([*kept, *mined], "negatives", "negative_images")
    if record.scores and lists_grades and record.positives:
        # The label lists grades in the order in which the reader will find the documents: what was mined has grade 0.
        grades = record.scores[len(positives) : len(positives) + len(kept)]
        below = [*zip(kept, grades, strict=True), *((item, 0.0) for item in mined)]
        below.sort(key=lambda pair: not isinstance(pair[0], str))  # texts are read before pictures
        row["label"] = [*record.scores[: len(positives)], *(grade for _, grade in below)]
    elif record.scores:  # of one truth or grade
        row["label"] = record.scores[0] if lists_grades else int(record.scores[0])
    weight = record.columns.get(WEIGHT_COLUMN.name, WEIGHT_COLUMN.default)
    if weight != WEIGHT_COLUMN.default:
        row[WEIGHT_COLUMN.name] = weight
    return row


def _side(items: Any, texts_column: str, pictures_column: str) -> dict[str, Any]:
    """Return documents as texts and as pictures."""
    texts = [item for item in items if isinstance(item, str)]
    pictures = []
    for item in items:
        if isinstance(item, Composed) and (item.text or len(item.images) > 1):
            raise DataError("a mined row can't hold a document of a picture with a text, or of several pictures")
        pictures += _pictures(item)
    cells: dict[str, Any] = {}
    if texts:
        cells[texts_column] = texts[0] if texts_column == "positive" and len(texts) == 1 else texts
    if pictures:
        cells[pictures_column] = pictures
    return cells


def _pictures(item: Item) -> list[str]:
    """Return the paths of an item's pictures."""
    images = list(pictures_in([item]))
    for image in images:
        if image.data is not None:
            raise DataError(
                f"{image.path} holds a picture's bytes: mined rows name pictures by path; store them as files"
            )
    return [image.path for image in images]
