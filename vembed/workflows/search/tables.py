"""An index as a table that other libraries read: a row for each document, and what else it holds in the metadata.

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
from vembed.files import file_sha256, is_folder, new_file, new_folder
from vembed.registry import INDEX_FORMATS
from vembed.text import first_line
from vembed.vectors.index import build_any_index, write_faiss
from vembed.vectors.store import VECTORS
from vembed.workflows.search.format import (
    DOCUMENTS_FILE,
    INDEX_FILE,
    META_FILE,
    OFFSETS_FILE,
    PROBE_FILE,
    THUMBNAILS_FILE,
    VECTORS_FILE,
    IndexMeta,
    is_others,
    parse_meta,
)
from vembed.workflows.search.output import BATCH_ROWS, table_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from vembed.workflows.search.output import IndexFormat

_FACTS = (b"vembed", b"normalised", b"probe", b"sha256")


def write_table(folder: Path, output: Path, meta: IndexMeta, form: str) -> None:
    """Write the vectors and rows of a folder as a table; the output appears complete or not at all.

    Args:
        form: A name of `INDEX_FORMATS`.

    Raises:
        ConfigError: A package of the format isn't installed.
        MachineError: The disk refuses.
    """
    import pyarrow as pa

    table: IndexFormat = INDEX_FORMATS.load(form)
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
        with new_file(output) if table.suffix else new_folder(output, keeps=is_others) as temporary:
            table.write(temporary, schema, _batches(folder, schema))
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


def is_own_table(path: Path) -> bool:
    """Return whether a path is a table that vembed wrote, with nothing else beside it in its folder."""
    form = table_format(path)
    if form is None or (is_folder(path) and len(list(path.iterdir())) > 1):
        return False
    try:
        return "vembed" in _opened(path, form)[0]
    except ConfigError:
        return False


def unpacked(path: Path, form: IndexFormat) -> Path:
    """Return the folder of the index that a table was written from, made again in the temporary folder.

    It is deleted when the program ends.

    Raises:
        ConfigError: A package of the format isn't installed, or it is no table of ours, or broken.
        MachineError: The disk refuses.
    """
    import pyarrow as pa

    facts, batches = _opened(path, form)
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


def _opened(path: Path, form: IndexFormat) -> tuple[dict[str, str], Iterable[Any]]:
    """Return what the metadata of a table holds, and its rows."""
    schema, batches = form.read(path)
    metadata = schema.metadata or {}
    return {key.decode(): value.decode() for key, value in metadata.items() if key in _FACTS}, batches


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
