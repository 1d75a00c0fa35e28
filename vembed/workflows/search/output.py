"""The output of a corpus's vectors: the form that it has, and what may stand there already."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from vembed.errors import ConfigError
from vembed.files import home_path, is_file, is_folder
from vembed.registry import import_extra
from vembed.vectors.keys import Format

if TYPE_CHECKING:
    from pathlib import Path


def output_form(output: Path, asked: str | None) -> Format:
    """Return the form that was asked for, or the one that the output's name tells.

    Raises:
        ConfigError: There is no such form, the name doesn't fit it, or LanceDB isn't installed.
    """
    # Parquet is told by its suffix, since a folder of that name would surprise; the other two are folders.
    by_name: Format = "parquet" if output.suffix == ".parquet" else "index"
    form: Format | None = next((each for each in get_args(Format) if each == (asked or by_name)), None)
    if form is None:
        raise ConfigError(f"the format {asked!r} is unknown; choose one of {', '.join(get_args(Format))}")
    if form != "parquet" and by_name == "parquet":
        raise ConfigError(f"--output {output} names a Parquet file; leave --format out, or choose another name")
    if form == "parquet" and by_name != "parquet":
        raise ConfigError(f"--format parquet doesn't fit --output {output}: a Parquet file's name ends in .parquet")
    if form == "lancedb":
        import_extra("lancedb", "lancedb", "--format lancedb")
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
