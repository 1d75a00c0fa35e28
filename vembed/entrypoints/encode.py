"""`vembed encode MODEL --data CORPUS --output DIR`: a corpus as vectors and an index."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.entrypoints.model_arguments import add_model_arguments, add_picture_argument, load_options
from vembed.errors import ConfigError, ExitCode
from vembed.files import home_path
from vembed.output_lock import hold_output
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Sequence


DESCRIPTION = "Encode a corpus into a folder that vembed search reads: vectors, ids, and a FAISS index."


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of an encoding."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="hub id, local folder, or the output folder of a run")
    parser.add_argument(
        "--data",
        required=True,
        metavar="CORPUS",
        help="BEIR folder; folder of pictures; JSONL, CSV, TSV or Parquet with ids and texts or pictures; .txt with "
        "one document a line; builtin:SET",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets vectors, ids, FAISS index, thumbnails, meta.json",
    )
    parser.add_argument("--side", choices=("document", "query"), default="document", help="which prompt texts get")
    parser.add_argument(
        "--index", default="Flat", metavar="FACTORY", help="FAISS index: Flat (exact, default), HNSW32, IVF1024,Flat"
    )
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="most items of one encoder call")
    parser.add_argument("--id-column", metavar="NAME", help="default: _id, id, docid or doc_id")
    parser.add_argument("--text-column", metavar="NAME", help="default: text, document, passage, contents or content")
    parser.add_argument("--image-column", metavar="NAME", help="default: image, positive_image or image_path")
    parser.add_argument(
        "--image-root", type=Path, metavar="DIR", help="paths of pictures start here; default: the corpus's folder"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an index that is there")
    add_model_arguments(parser)
    add_picture_argument(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Encode a corpus into an index."""
    parsed = parse_arguments(arguments, program=program)
    return run_command(lambda: _run(parsed))


def _run(parsed: argparse.Namespace) -> int:
    if parsed.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {parsed.batch_size}")
    from vembed.data.corpus import Corpus

    Corpus(parsed.data)  # a path that leads nowhere is told before torch is imported, which takes seconds
    with hold_output(parsed.output, beside=True):
        return _encode(parsed)


def _encode(parsed: argparse.Namespace) -> int:
    from vembed.api.model import load
    from vembed.api.retrieval import build_index
    from vembed.search.build import refuse_taken
    from vembed.training.guards import StopSignal

    refuse_taken(home_path(parsed.output), overwrite=parsed.overwrite)  # before a model is loaded
    quiet_libraries()
    with StopSignal(advice="nothing was written, encode again") as stop:
        model = load(parsed.model, **load_options(parsed))
        meta = build_index(
            model,
            parsed.data,
            parsed.output,
            side=parsed.side,
            index=parsed.index,
            batch_size=parsed.batch_size,
            overwrite=parsed.overwrite,
            id_column=parsed.id_column,
            text_column=parsed.text_column,
            image_column=parsed.image_column,
            image_root=parsed.image_root,
            poll=stop.poll,
        )
    for note in meta.notes:
        print(note)
    if meta.num_truncated:
        longest = model.item_encoder(parsed.batch_size).encoder.longest_text(parsed.side)
        print(f"{meta.num_truncated:,} texts are longer than the {longest} tokens of the model: cut.")
    documents = f"{meta.num_documents:,} documents"
    if meta.num_pictures:
        documents += f" ({meta.num_pictures:,} with a picture)"
    if meta.num_vectors is not None:
        each, size = meta.num_vectors / meta.num_documents, 4 * meta.num_vectors * meta.model.dimension
        documents += f", {meta.num_vectors:,} vectors ({each:.1f} a document, {size / 1e6:,.1f} MB)"
    print(f"{documents}, {meta.model.dimension} dimensions, index {meta.factory}: {redact(str(parsed.output))}")
    return ExitCode.OK
