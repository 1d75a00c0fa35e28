"""An index as one Parquet file or as a LanceDB table: a row for each document, and what else it holds in the metadata.

    id         string
    text       string
    image      string, only where there are pictures: the path; null of a text
    thumbnail  binary, only where there are pictures: a small WebP copy; no bytes for a text
    vector     fixed_size_list<float>[E]

The schema's metadata holds `vembed`, the index's meta.json (model, weights, dimensions, similarity, prompts, counts),
`normalised` ("true" where vectors have unit length), `probe`, the vectors that tell the model by pictures, and
`sha256`, the hashes of meta.json and of the files that a table is unpacked into.

To be searched, a table is unpacked into the folder of an index, whose FAISS index is built each time. "Flat", int8 and
binary give the answers of an index; an HNSW index differs a little from build to build, and so may its answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import tempfile
import weakref
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.errors import ConfigError, MachineError
from vembed.files import file_sha256, is_file, is_folder, new_file, new_folder
from vembed.registry import import_extra
from vembed.text import first_line
from vembed.vectors.index import build_any_index, write_faiss
from vembed.vectors.store import VECTORS
from vembed.workflows.search.format import (
    DOCUMENTS_FILE,
    INDEX_FILE,
    META_FILE,
    OFFSETS_FILE,
    PROBE_FILE,
    TABLE,
    THUMBNAILS_FILE,
    VECTORS_FILE,
    IndexMeta,
    is_others,
    parse_meta,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from vembed.vectors.keys import Format

_FACTS = (b"vembed", b"normalised", b"probe", b"sha256")
BATCH_ROWS = 8192
"""Rows of a row group: 12 MiB of vectors at 384 dimensions."""


def write_table(folder: Path, output: Path, meta: IndexMeta, form: Format) -> None:
    """Write the vectors and rows of a folder as a table; the output appears complete or not at all.

    Raises:
        ConfigError: LanceDB isn't installed.
        MachineError: The disk refuses.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures = bool(meta.num_pictures)
    fields = [("id", pa.string()), ("text", pa.string())]
    fields += [("image", pa.string()), ("thumbnail", pa.binary())] if pictures else []
    fields += [("vector", pa.list_(pa.float32(), meta.model.dimension))]
    facts = {"vembed": meta.to_json(), "normalised": str(meta.model.similarity == "cosine").lower()}
    if pictures:
        facts["probe"] = base64.b64encode((folder / PROBE_FILE).read_bytes()).decode()
    names = [name for name in (*meta.files, META_FILE) if name != INDEX_FILE]
    facts["sha256"] = json.dumps({name: file_sha256(folder / name) for name in names})
    schema = pa.schema(fields, metadata=facts)
    try:
        if form == "parquet":
            with new_file(output) as temporary, pq.ParquetWriter(temporary, schema) as writer:
                for batch in _batches(folder, schema):
                    writer.write_batch(batch)
        else:
            lancedb = import_extra("lancedb", "lancedb", "--format lancedb")
            with new_folder(output, keeps=is_others) as temporary:
                reader = pa.RecordBatchReader.from_batches(schema, _batches(folder, schema))
                lancedb.connect(str(temporary)).create_table(TABLE, reader)
    except OSError as error:
        raise MachineError(f"{output}: the vectors can't be written: {error}. Free some space") from error


def _batches(folder: Path, schema: Any) -> Iterator[Any]:
    """Yield the documents of an index, many in each batch."""
    import pyarrow as pa

    vectors_NE: NDArray[np.float32] = np.load(folder / VECTORS_FILE, mmap_mode="r")
    offsets = np.load(folder / OFFSETS_FILE) if "thumbnail" in schema.names else None
    with (folder / DOCUMENTS_FILE).open(encoding="utf-8", newline="\n") as lines:
        for start in range(0, len(vectors_NE), BATCH_ROWS):
            part_NE = vectors_NE[start : start + BATCH_ROWS]
            rows = [json.loads(next(lines)) for _ in range(len(part_NE))]
            columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in ("id", "text", "image")}
            if offsets is not None:
                with (folder / THUMBNAILS_FILE).open("rb") as copies:
                    copies.seek(int(offsets[start]))
                    lengths = np.diff(offsets[start : start + len(part_NE) + 1]).tolist()
                    columns["thumbnail"] = [copies.read(length) for length in lengths]
            # From a flat array without a copy of each row: lists of Python numbers would take many times the memory.
            flat = pa.array(np.ascontiguousarray(part_NE).reshape(-1), pa.float32())
            columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, part_NE.shape[1])
            arrays = [pa.array(columns[field.name], field.type) for field in schema]
            yield pa.record_batch(arrays, schema=schema)


def is_table(path: Path) -> bool:
    """Return whether a path is a Parquet file or a LanceDB folder, by its name and what lies in it."""
    return (is_file(path) and path.suffix == ".parquet") or is_folder(path / f"{TABLE}.lance")


def is_own_table(path: Path) -> bool:
    """Return whether a path is a table that vembed wrote, with nothing else beside it in its folder."""
    if not is_table(path) or (is_folder(path) and len(list(path.iterdir())) > 1):
        return False
    try:
        return "vembed" in _opened(path)[0]
    except ConfigError:
        return False


def unpacked(path: Path) -> Path:
    """Return the folder of the index that a table was written from, made again in the temporary folder.

    It is deleted when the program ends.

    Raises:
        ConfigError: LanceDB isn't installed, or it is no table of ours, or broken.
        MachineError: The disk refuses.
    """
    import pyarrow as pa

    facts, batches = _opened(path)
    if "vembed" not in facts:
        raise ConfigError(f"{path} holds no vectors of vembed encode: its metadata has no `vembed`")
    folder = Path(tempfile.mkdtemp(prefix="vembed-"))
    weakref.finalize(unpacked, shutil.rmtree, folder, ignore_errors=True)
    try:
        _unpack(batches, facts, parse_meta(json.loads(facts["vembed"]), path), folder)
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        if not isinstance(error, OSError) or error.errno is None:  # Arrow's own, of pages that can't be unpacked
            raise ConfigError(f"{path} is broken: {first_line(error)}; encode the corpus again") from error
        raise MachineError(
            f"{path}: it is unpacked into {folder.parent}, which refuses: {error}. Free some space there, or set TMPDIR"
        ) from error
    return folder


def _opened(path: Path) -> tuple[dict[str, str], Iterable[Any]]:
    """Return what the metadata of a table holds, and its rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if is_file(path):
        try:
            file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{path} can't be read as Parquet: {error}; encode the corpus again") from error
        # Batches, not whole row groups: those of another writer may hold the whole corpus.
        schema, batches = file.schema_arrow, file.iter_batches(BATCH_ROWS)
    else:
        lancedb = import_extra("lancedb", "lancedb", f"{path}, a LanceDB table,")
        try:
            table = lancedb.connect(str(path)).open_table(TABLE)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{path} can't be read as LanceDB: {first_line(error)}; encode the corpus again"
            ) from error
        schema, batches = table.schema, _of_lance(table)
    metadata = schema.metadata or {}
    return {key.decode(): value.decode() for key, value in metadata.items() if key in _FACTS}, batches


def _of_lance(table: Any) -> Iterator[Any]:
    """Yield the rows of a table in the order in which they were written."""
    # A scan of LanceDB may yield fragments in any order; offsets are those of writing.
    num_rows = table.count_rows()
    for start in range(0, num_rows, BATCH_ROWS):
        places = list(range(start, min(start + BATCH_ROWS, num_rows)))
        yield from table.take_offsets(places).to_arrow().to_batches()


def _unpack(batches: Iterable[Any], facts: dict[str, str], meta: IndexMeta, folder: Path) -> None:
    lengths = [0]
    with (
        (folder / VECTORS_FILE).open("wb") as vectors,
        (folder / DOCUMENTS_FILE).open("w", encoding="utf-8", newline="\n") as documents,
        (folder / THUMBNAILS_FILE).open("wb") as copies,
    ):
        vectors.write(VECTORS.header(meta.num_documents, meta.model.dimension))
        for batch in batches:
            vectors.write(batch.column("vector").flatten().to_numpy(zero_copy_only=False).astype("<f4").tobytes())
            named = [name for name in ("id", "text", "image") if name in batch.schema.names]
            for row in batch.select(named).to_pylist():
                kept = {name: value for name, value in row.items() if value is not None}
                documents.write(json.dumps(kept, ensure_ascii=False) + "\n")
            for copy in batch.column("thumbnail").to_pylist() if "thumbnail" in batch.schema.names else ():
                copies.write(copy)
                lengths.append(len(copy))
    if "probe" in facts:
        np.save(folder / OFFSETS_FILE, np.cumsum(lengths, dtype="<i8"))
        np.save(folder / PROBE_FILE, np.load(BytesIO(base64.b64decode(facts["probe"])), allow_pickle=False))
    else:
        (folder / THUMBNAILS_FILE).unlink()
    # Sizes first: they tell a cut table apart from a changed one, for tables of older versions too.
    for name in meta.files:
        if name != INDEX_FILE and (folder / name).stat().st_size != meta.file_bytes[name]:
            raise ValueError(f"the table is cut or was changed: it gives another {name} than was written")
    if "sha256" in facts:  # tables of older versions have none
        hashes = {META_FILE: hashlib.sha256(facts["vembed"].encode()).hexdigest()}
        hashes |= {name: file_sha256(folder / name) for name in meta.files if name != INDEX_FILE}
        changed = [name for name, written in json.loads(facts["sha256"]).items() if hashes.get(name) != written]
        if changed:
            raise ValueError(f"its bytes have changed: it gives another {changed[0]} than was written")
    write_faiss(build_any_index(np.load(folder / VECTORS_FILE, mmap_mode="r"), meta.factory), folder / INDEX_FILE)
    meta = replace(meta, file_bytes={name: (folder / name).stat().st_size for name in meta.files})
    (folder / META_FILE).write_text(meta.to_json(), encoding="utf-8")
