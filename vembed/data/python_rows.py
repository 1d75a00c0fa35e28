"""Rows of a Python caller become a file beside the run, so that all that follows reads, checks and resumes as ever.

The file is JSON lines, row n on line n, and is named after its content: the same rows give the same path, other rows
another one. Pictures stand in it as base64.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import PIL.Image

from vembed.batch import Image
from vembed.data.python_inputs import as_png
from vembed.errors import DataError, MachineError
from vembed.files import fsync_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.batch import ImageLimits

RowsInput: TypeAlias = "Iterable[Mapping[str, Any]] | Any"
"""Dictionaries in any iterable, or a table: `datasets.Dataset`, `pandas.DataFrame`, `pyarrow.Table` and the like."""

ROWS_FOLDER = "rows"
_TABLE_ROWS = 1_000
"""Rows of a table that are Python objects at once."""

_WRITTEN_AS_TEXT = (date, time, timedelta, UUID)


def write_rows(rows: RowsInput, folder: Path, name: str, limits: ImageLimits) -> Path:
    """Write rows into a file of a folder, one at a time, and return its path.

    Args:
        name: What the caller calls them: messages say `NAME-....jsonl:3` of the third row.

    Raises:
        DataError: There are no rows, or one holds what rows can't.
        MachineError: The folder can't be written.
        TypeError: They are no rows at all.
    """
    found = _rows_of(rows, name)
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    digest, number = hashlib.sha256(), 0
    with _disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = temporary.open("wb")
    try:
        with file:
            for number, row in enumerate(found, start=1):
                line = json.dumps(_Plain(f"{name}: row {number}", limits).value(row), ensure_ascii=False) + "\n"
                data = line.encode(errors="surrogatepass")  # half of a pair is refused where the row is checked
                digest.update(data)
                with _disk(folder):
                    file.write(data)
        if not number:
            raise DataError(f"{name} holds no rows")
        path = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        with _disk(folder):
            if not path.exists():
                fsync_path(temporary)
                temporary.replace(path)
                fsync_path(folder)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Say which folder a disk refuses; what the rows themselves raise is the caller's own."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{folder} can't be written: {error}") from error


def _rows_of(rows: RowsInput, name: str) -> Iterable[Any]:
    """Return the rows of whatever holds them."""
    library = type(rows).__module__.partition(".")[0]
    if library == "pandas" and hasattr(rows, "to_dict"):
        return _frame_rows(rows)
    if library == "datasets" and hasattr(rows, "with_format"):
        tables = rows.with_format("arrow").iter(batch_size=_TABLE_ROWS)  # pictures stay the bytes that they are
        return (row for table in tables for row in table.to_pylist())
    if hasattr(rows, "__arrow_c_stream__"):
        return _arrow_rows(rows)
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable) or isinstance(rows, (str, bytes)):
        several = isinstance(rows, Mapping) and bool(rows) and hasattr(next(iter(rows.values())), "with_format")
        hint = (
            f"give one split, as in {name}={name}[{next(iter(rows))!r}]" if several else "give a list of dictionaries"
        )
        raise TypeError(f"{name} is of type {type(rows).__name__}, which is not rows; {hint}")
    return rows


def _frame_rows(frame: Any) -> Iterator[Any]:
    """Yield the rows of a pandas table; a missing value is null."""
    for start in range(0, len(frame), _TABLE_ROWS):
        part = frame.iloc[start : start + _TABLE_ROWS].astype(object)
        yield from part.where(part.notna(), None).to_dict("records")


def _arrow_rows(table: Any) -> Iterator[Any]:
    import pyarrow as pa

    for batch in pa.RecordBatchReader.from_stream(table):
        for start in range(0, batch.num_rows, _TABLE_ROWS):
            yield from batch.slice(start, _TABLE_ROWS).to_pylist()


class _Plain:
    """Turn a row into what JSON holds."""

    def __init__(self, where: str, limits: ImageLimits) -> None:
        self._where = where
        self._limits = limits

    def value(self, value: Any) -> Any:
        """Return a value as JSON holds it.

        Raises:
            DataError: It is none that a row can hold.
        """
        if value is None or isinstance(value, (str, int, float)):
            return value
        if isinstance(value, Mapping):
            if isinstance(value.get("bytes"), (bytes, memoryview)):  # a picture as data sets hold it
                return self.value(value["bytes"])
            return {str(key): self.value(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(part) for part in value]
        if isinstance(value, (bytes, bytearray, memoryview)):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, PIL.Image.Image):
            return self.value(as_png(value, self._where, self._limits))
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, Image):
            return {"path": value.path} if value.data is None else self.value(value.data)
        if hasattr(value, "tolist"):  # an array, a tensor or a number of one
            return self.value(value.tolist())
        if isinstance(value, Decimal):
            fits = value.is_finite() and abs(value) < 2**63
            return int(value) if fits and value == int(value) else float(value)
        if isinstance(value, _WRITTEN_AS_TEXT):
            return str(value)
        raise DataError(
            f"{self._where} holds a {type(value).__name__}; a value is a text, a number, a picture, or a list of those"
        )
