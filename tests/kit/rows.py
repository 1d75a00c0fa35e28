"""Files of rows and of pictures, and what reading them comes to."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol

import PIL.Image
import pytest

from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vembed.data.keys import Role
    from vembed.data.sampler import GlobalSampler
    from vembed.data.table import LoadedRecords, Record, RecordTable


class Jsonl(Protocol):
    """Writes rows (objects, or text as it is) one a line, and returns the file."""

    def __call__(self, rows: list[Any], name: str = "train.jsonl") -> Path: ...


class Paint(Protocol):
    """Writes a picture of one colour under the test's folder, and returns the file."""

    def __call__(self, name: str, colour: str = "red") -> Path: ...


def png(colour: str = "red", size: tuple[int, int] = (6, 4)) -> bytes:
    """Return the bytes of a picture of one colour."""
    buffer = BytesIO()
    PIL.Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def load(path: Path | str, role: Role = "train", split: str | None = None, **keys: Any) -> LoadedRecords:
    """Read rows to train on, or for another role."""
    return DataSource(str(path), role, DataKeys(**keys), split=split).records()


def only(path: Path | str, **keys: Any) -> Record:
    """Read the one row of a file."""
    (record,) = load(path, **keys).table
    return record


def queries(path: Path | str, **keys: Any) -> list[Any]:
    """Read the queries of rows."""
    return [record.query for record in load(path, **keys).table]


def refusal(path: Path | str, role: Role = "train", split: str | None = None, **keys: Any) -> str:
    """Return the message with which rows are refused."""
    with pytest.raises(DataError) as caught:
        load(path, role, split, **keys)
    return str(caught.value)


def table_of(rows: Iterable[tuple[Any, ...]], file: str = "rows.jsonl", **more: Any) -> RecordTable:
    """Return a table of (query, positives, negatives, label); what is left out is empty."""
    writer = RecordWriter()
    for line, (query, positives, *rest) in enumerate(rows, start=1):
        negatives, label = (*rest, *((), None)[len(rest) :])
        writer.add(query, positives=positives, negatives=negatives, label=label, file=file, line=line, **more)
    return writer.finish()


def epoch_batches(sampler: GlobalSampler, epoch: int = 0) -> list[Any]:
    """Return the rows of each batch of an epoch."""
    first = epoch * sampler.batches_per_epoch
    return [sampler.rows(step) for step in range(first, first + sampler.batches_per_epoch)]
