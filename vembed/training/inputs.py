"""The data of a run: what it trains on, what chooses the best checkpoint, and what the verdict is on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.batch import content_id
from vembed.data.hold_out import hold_out
from vembed.data.retrieval_sources import load_retrieval, retrieval_from_records
from vembed.data.sources import load_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vembed.data.records import RecordTable
    from vembed.data.retrieval import RetrievalData
    from vembed.data.sources import SourceOptions


@dataclass(frozen=True, slots=True)
class DataPaths:
    """Where the data is.

    Attributes:
        train: Training data and how to read it.
        dev: Set that chooses the best checkpoint, or None.
        test: Set of the verdict, or None.
        needs_dev: Whether a dev set is held out where none is given.
    """

    train: tuple[str, SourceOptions]
    dev: tuple[str, SourceOptions] | None
    test: tuple[str, SourceOptions] | None
    needs_dev: bool


@dataclass(frozen=True, slots=True)
class RunData:
    """The data, checked.

    Attributes:
        records: Training records.
        dev: Dev set, or None.
        test: Test set, or None.
        notes: What was held out, skipped or ignored, one plain sentence each.
        counts: What the training records hold.
        fingerprint: Hash of the training records and of the dev and test sets.
    """

    records: RecordTable
    dev: RetrievalData | None
    test: RetrievalData | None
    notes: tuple[str, ...]
    counts: RecordCounts
    fingerprint: str

    def facts(self) -> list[tuple[str, str]]:
        """Return (label, value) for the report."""
        counts = self.counts
        facts = [
            ("training records", str(counts.num_records)),
            ("documents in them", str(counts.num_documents)),
            ("hard negatives among those", str(counts.num_negatives)),
            ("records whose query another record before has", str(counts.repeated_queries)),
            ("positives that another record before has", str(counts.repeated_positives)),
        ]
        for label, task in (("dev set", self.dev), ("test set", self.test)):
            if task is not None:
                facts.append((label, f"{task.name}: {len(task.queries)} queries, {len(task.documents)} documents"))
        return [*facts, *(("note", note) for note in self.notes)]


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """What records hold.

    Attributes:
        num_records: Records.
        num_documents: Positives and negatives, repeated ones counted again.
        num_negatives: Hard negatives among them.
        repeated_queries: Records whose query another record before had.
        repeated_positives: Positives that another record before had.
    """

    num_records: int
    num_documents: int
    num_negatives: int
    repeated_queries: int
    repeated_positives: int

    @classmethod
    def of(cls, records: RecordTable) -> RecordCounts:
        """Count in one pass."""
        queries: set[int] = set()
        positives: set[int] = set()
        num_positives = num_negatives = 0
        for record in records:
            queries.add(content_id(record.query))
            positives.update(map(content_id, record.positives))
            num_positives += len(record.positives)
            num_negatives += len(record.negatives)
        return cls(
            num_records=len(records),
            num_documents=num_positives + num_negatives,
            num_negatives=num_negatives,
            repeated_queries=len(records) - len(queries),
            repeated_positives=num_positives - len(positives),
        )


def load_run_data(paths: DataPaths) -> RunData:
    """Read and check all data of a run; hold a dev set out where none is given and one is needed.

    Raises:
        DataError: When any of it is missing or broken.
    """
    loaded = load_records(*paths.train)
    records, notes = loaded.table, list(loaded.notes)
    dev = None if paths.dev is None else load_retrieval(*paths.dev)
    if dev is None and paths.needs_dev:
        split = hold_out(records)
        dev = retrieval_from_records(records.subset(split.held_out_rows), name="held out")
        records = records.subset(split.train_rows)
        notes += split.notes
    test = None if paths.test is None else load_retrieval(*paths.test)
    for task in (dev, test):
        if task is not None:
            notes += task.notes
    fingerprint = _fingerprint(records, [task for task in (dev, test) if task is not None])
    return RunData(records, dev, test, tuple(notes), RecordCounts.of(records), fingerprint)


def _fingerprint(records: RecordTable, tasks: Sequence[RetrievalData]) -> str:
    """Return one hash (hex) of all that a run reads: the verdict compares a baseline with a final of the same set."""
    digest = hashlib.sha256(records.fingerprint.encode())
    for task in tasks:
        for part in (task.queries, task.documents, task.qrels):
            for item in part.items():
                digest.update(json.dumps(item).encode())
            digest.update(b"\n")
    return digest.hexdigest()


def record_texts(records: RecordTable) -> Iterator[str]:
    """Yield every text of the records, for tokenizers that are trained on them."""
    for record in records:
        yield record.query
        yield from record.positives
        yield from record.negatives
