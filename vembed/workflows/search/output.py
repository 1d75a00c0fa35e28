"""The output of a corpus's vectors: the forms that it may have, and what may stand there already.

The form "index" is a folder of our own (format.py). All others are tables with a row for each document (tables.py),
which an `IndexFormat` writes and reads: Parquet here, others by plugins. Nothing here imports torch, as the command
tells a wrong output before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from vembed.errors import ConfigError
from vembed.files import home_path, is_file, is_folder
from vembed.registry import INDEX_FORMATS, import_extra

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 8192
"""Rows of a batch: 12 MiB of vectors at 384 dimensions."""

WriteTable: TypeAlias = Callable[[Path, "pa.Schema", "Iterator[pa.RecordBatch]"], None]
"""Path, schema whose metadata must be kept too, rows in batches of `BATCH_ROWS`; writes the table."""

ReadTable: TypeAlias = Callable[[Path], "tuple[pa.Schema, Iterable[pa.RecordBatch]]"]
"""Path -> schema with its metadata, and the rows in the order in which they were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFormat:
    """Table of an index's documents and vectors, as another library reads it: `vembed encode --format NAME`."""

    title: str  # the name for people, "Parquet"
    write: WriteTable  # to a path that takes the output's name once the table is whole
    read: ReadTable  # a ConfigError where it is none, or broken
    owns: Callable[[Path], bool]  # whether a path looks like such a table
    suffix: str = ""  # of the output, a file: ".parquet"; without one the output is a folder
    entries: tuple[str, ...] = ()  # names in that folder that the format writes, and that the next start replaces
    packages: tuple[str, ...] = ()  # modules to be found before a model is loaded
    extra: str = ""  # extra of vembed that brings them


def register_index_format(
    name: str,
    *,
    write: WriteTable,
    read: ReadTable,
    owns: Callable[[Path], bool],
    title: str = "",
    suffix: str = "",
    entries: Iterable[str] = (),
    packages: Iterable[str] = (),
) -> None:
    """Add a form of an index that `vembed encode --format` and `build_index(format=...)` write.

    `vembed search` and `open_index` read it again: into the folder of an index in the temporary folder, after checking
    hashes of all that they read. Names of columns and what the metadata hold are told in workflows/search/tables.py.

    Args:
        write: Gets a path, a schema and the rows as Arrow batches. The metadata of the schema must be kept.
        read: Gets the path; returns the schema with its metadata and the batches, in the order of writing. It raises
            `ConfigError` where the path is no such table.
        owns: Returns whether a path looks like such a table: by its suffix, or by what lies in a folder.
        title: Name for people; the name itself by default.
        suffix: Suffix of the output where it is a file, which then chooses the format; "" for a folder.
        entries: Of a folder, the names that the format writes into it.
        packages: Modules that the format needs; where one is missing, the command is refused before a model is loaded.

    Raises:
        ConfigError: The name is taken, or the suffix has no dot.
    """
    module = write.__module__
    if suffix and not suffix.startswith("."):
        raise ConfigError(f"index format {name!r} of {module}: a suffix begins with a dot, as '.parquet' does")
    if name == "index":
        raise ConfigError(f"index format {name!r} of {module} is already that of vembed; choose another name")
    entry = IndexFormat(
        title=title or name,
        write=write,
        read=read,
        owns=owns,
        suffix=suffix,
        entries=tuple(entries),
        packages=tuple(packages),
    )
    INDEX_FORMATS.register(name, entry, module=module)


def table_format(path: Path) -> IndexFormat | None:
    """Return the format that a path is a table of, by its looks; None for the folder of an index and anything else."""
    formats: Iterator[IndexFormat] = map(INDEX_FORMATS.load, INDEX_FORMATS.names())
    return next((form for form in formats if form.owns(path)), None)


def output_form(output: Path, asked: str | None) -> str:
    """Return the form that was asked for, or the one that the output's name tells.

    Raises:
        ConfigError: There is no such form, the name doesn't fit it, or a package isn't installed.
    """
    names = ("index", *INDEX_FORMATS.names())
    if asked is not None and asked not in names and asked not in INDEX_FORMATS:
        raise ConfigError(f"the format {asked!r} is unknown; choose one of {', '.join(names)}")
    # A file is told by its suffix, since a folder of that name would surprise; without one the output is a folder.
    formats: dict[str, IndexFormat] = {name: INDEX_FORMATS.load(name) for name in INDEX_FORMATS.names()}
    by_name = next((name for name, form in formats.items() if form.suffix and form.suffix == output.suffix), None)
    form = asked or by_name or "index"
    named = formats.get(by_name or form)
    file = "" if named is None else f"{'an' if named.title[0] in 'AEIOU' else 'a'} {named.title} file"
    if by_name not in (None, form):
        raise ConfigError(f"--output {output} names {file}; leave --format out, or choose another name")
    if form == "index":
        return form
    if formats[form].suffix and by_name is None:
        suffix = formats[form].suffix
        raise ConfigError(f"--format {form} doesn't fit --output {output}: {file}'s name ends in {suffix}")
    for package in formats[form].packages:
        import_extra(package, formats[form].extra, f"--format {form}")
    return form


def refuse_taken(output: Path, data: str, *, overwrite: bool) -> None:
    """Refuse an output that holds something, unless it is an index or a table of ours that may be replaced.

    Raises:
        ConfigError: It holds vectors and `overwrite` is false, or the corpus, or anything else.
    """
    from vembed.workflows.search.format import is_index  # imports torch, which takes seconds
    from vembed.workflows.search.tables import is_own_table

    if not output.exists():
        return
    corpus = home_path(data)
    if (is_file(corpus) or is_folder(corpus)) and output.resolve() in (corpus.resolve(), *corpus.resolve().parents):
        raise ConfigError(f"{output} holds the corpus itself, which --output would replace; choose another name")
    if is_index(output):
        if not overwrite:
            raise ConfigError(f"{output} holds an index; replace it with --overwrite, or choose another folder")
    elif is_own_table(output):
        if not overwrite:
            raise ConfigError(f"{output} holds vectors; replace them with --overwrite, or choose another name")
    elif not output.is_dir():
        raise ConfigError(f"{output} is a file that vembed encode didn't write; choose another name")
    elif any(output.iterdir()):
        raise ConfigError(f"{output} holds other files than an index; choose a folder of its own")


# Parquet --------------------------------------------------------------------------------------------------------------


def _write_parquet(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _read_parquet(path: Path) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} can't be read as Parquet: {error}; encode the corpus again") from error
    # Batches, not whole row groups: those of another writer may hold the whole corpus.
    return file.schema_arrow, file.iter_batches(BATCH_ROWS)


PARQUET = IndexFormat(
    title="Parquet",
    write=_write_parquet,
    read=_read_parquet,
    owns=lambda path: is_file(path) and path.suffix == ".parquet",
    suffix=".parquet",
)
