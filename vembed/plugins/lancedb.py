"""`vembed encode --format lancedb`: an index as a LanceDB table, `documents.lance` in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vembed.errors import ConfigError
from vembed.files import is_folder
from vembed.registry import import_extra
from vembed.text import first_line
from vembed.workflows.search.output import BATCH_ROWS, IndexFormat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

TABLE = "documents"
"""LanceDB keeps a folder of tables; the rows of an index are one of them."""


def _write(folder: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    import pyarrow as pa

    lancedb = import_extra("lancedb", "lancedb", "--format lancedb")
    # A reader, not a table of Arrow: batches are written as they come, so that one of them stands in memory.
    lancedb.connect(str(folder)).create_table(TABLE, pa.RecordBatchReader.from_batches(schema, batches))


def _read(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    lancedb = import_extra("lancedb", "lancedb", f"{path}, a LanceDB table,")
    try:
        table = lancedb.connect(str(path)).open_table(TABLE)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path} can't be read as LanceDB: {first_line(error)}; encode the corpus again") from error
    return table.schema, _rows(table)  # the metadata of the schema is as it was written


def _rows(table: Any) -> Iterator[pa.RecordBatch]:
    # A scan of LanceDB may yield fragments in any order; offsets are those of writing.
    num_rows = table.count_rows()
    for start in range(0, num_rows, BATCH_ROWS):
        offsets = list(range(start, min(start + BATCH_ROWS, num_rows)))
        yield from table.take_offsets(offsets).to_arrow().to_batches()


LANCEDB = IndexFormat(
    title="LanceDB",
    write=_write,
    read=_read,
    owns=lambda path: is_folder(path / f"{TABLE}.lance"),
    entries=(f"{TABLE}.lance",),
    packages=("lancedb",),
    extra="lancedb",
)
