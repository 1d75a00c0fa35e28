"""`vembed encode MODEL --data CORPUS --output DIR`: a corpus as vectors and an index."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.distributed.watchdog import Watchdog
from vembed.entrypoints.command import held_output, run_command, run_with_output
from vembed.entrypoints.options import ModelOptions, PictureOptions, check, parse_words
from vembed.errors import ConfigError
from vembed.files import home_path
from vembed.redact import redact
from vembed.registry import INDEX_FORMATS, import_extra
from vembed.section import Name, option, word
from vembed.vectors.keys import IndexKeys
from vembed.workflows.search.output import output_form, refuse_taken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from vembed.distributed.runtime import Runtime
    from vembed.distributed.signals import StopSignal


class EncodeOptions(IndexKeys, ModelOptions, PictureOptions):
    """Encode a corpus for vembed search, into a folder with vectors, ids and a FAISS index, or into a table."""

    command = "encode"

    model: Name = word("MODEL", "hub id, local folder, or the output folder of a run")
    data: str = option(
        ...,
        "BEIR folder; folder of pictures; JSONL, CSV, TSV or Parquet with ids and texts or pictures; .txt with one "
        "document per line; builtin:SET",
        metavar="CORPUS",
    )
    output: Path = option(
        ...,
        "folder for vectors, ids, FAISS index, thumbnails and meta.json; FILE.parquet writes a Parquet file",
        metavar="DIR",
    )


OPTIONS = EncodeOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Encode a corpus into an index."""
    given, watchdog = parse_words(EncodeOptions, arguments, program=program), Watchdog()
    return run_command(partial(_run, given, arguments, watchdog), in_several=True, watchdog=watchdog)


def _run(given: Mapping[str, Any], words: Sequence[str], watchdog: Watchdog) -> int:
    options = check(EncodeOptions, given)
    if (code := options.run_added()) is not None:
        return code
    if options.ray is None and options.ray_workers is not None:
        raise ConfigError("--ray-workers is for --ray; add it, or start several processes with torchrun")
    # Its import takes a second, and must come before its settings: only where it is missing is it tried here.
    if options.ray is not None and find_spec("ray") is None:
        import_extra("ray", "ray", "--ray")
    output = home_path(options.output)
    # The name of the output decides the form, so a contradiction is told before anything is read.
    form = output_form(output, options.format)
    from vembed.data.read import DataSource

    # A path that leads nowhere is told before torch is imported, which takes seconds.
    DataSource(options.data, "test", user_names=("--data", "--split")).documents()

    def clean() -> None:
        from vembed.workflows.search.build import clean_killed

        clean_killed(output.resolve())

    def encode(runtime: Runtime, stop: StopSignal) -> None:
        from vembed.api.model import load
        from vembed.api.retrieval import index_corpus
        from vembed.pages.text import bytes_text

        refuse_taken(output, options.data, overwrite=options.overwrite)  # before a model is loaded
        model_options = options.load_options()
        if options.ray is not None:
            model_options["device"] = "cpu"  # the workers encode, and may need the whole GPU
        # On several processes each one loads the model; only the first one writes.
        model = load(options.model, **model_options)
        meta = index_corpus(model, options.data, options.output, options, ranks=runtime.ranks, poll=stop.poll)
        if runtime.ranks.is_first:
            longest = model.item_encoder(options.batch_size).encoder.longest_text(options.side)
            lines = [*meta.notes]
            if meta.num_truncated:
                lines.append(f"{meta.num_truncated:,} texts are longer than the {longest} tokens of the model: cut.")
            documents = f"{meta.num_documents:,} documents"
            if meta.num_pictures:
                documents += f" ({meta.num_pictures:,} with a picture)"
            if meta.num_vectors is not None:
                mean = meta.num_vectors / meta.num_documents
                size = bytes_text(4 * meta.num_vectors * meta.model.dimension)  # float32
                documents += f", {meta.num_vectors:,} vectors ({mean:.1f} a document, {size})"
            kind = f"index {meta.factory}" if form == "index" else INDEX_FORMATS.load(form).title
            shown = redact(str(options.output))
            print(*lines, f"{documents}, {meta.model.dimension} dimensions, {kind}: {shown}", sep="\n")

    held = partial(held_output, output, words, overwrite=options.overwrite, clean=clean)
    advice = "what is encoded is kept, and the same command continues"
    return run_with_output(encode, held, watchdog=watchdog, advice=advice)
