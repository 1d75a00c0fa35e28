"""`vembed encode MODEL --data CORPUS --output DIR`: a corpus as vectors and an index."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vembed.distributed.lock import hold_for_command
from vembed.distributed.process_env import process_env
from vembed.distributed.watchdog import Watchdog
from vembed.entrypoints.command import quiet_libraries, run_command, say_whole
from vembed.entrypoints.model_arguments import add_model_arguments, add_picture_argument, load_options
from vembed.errors import ConfigError, ExitCode
from vembed.extras import import_extra
from vembed.files import home_path
from vembed.redact import redact
from vembed.search.output import Format, output_form, refuse_taken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vembed.distributed.ranks import Ranks

DESCRIPTION = "Encode a corpus for vembed search, into a folder with vectors, ids and a FAISS index, or into a table."


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of an encoding."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="hub id, local folder, or the output folder of a run")
    parser.add_argument(
        "--data",
        required=True,
        metavar="CORPUS",
        help="BEIR folder; folder of pictures; JSONL, CSV, TSV or Parquet with ids and texts or pictures; .txt with "
        "one document per line; builtin:SET",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for vectors, ids, FAISS index, thumbnails and meta.json; FILE.parquet writes a Parquet file",
    )
    parser.add_argument(
        "--format",
        choices=get_args(Format),
        help="index (a folder, default), parquet (one file), lancedb (a table in a folder; needs vembed[lancedb])",
    )
    parser.add_argument(
        "--side",
        choices=("document", "query"),
        default="document",
        help="add the prompt of this side to the texts; default: document",
    )
    parser.add_argument(
        "--index",
        default="Flat",
        metavar="FACTORY",
        help="FAISS index: Flat (exact, default), HNSW32, IVF1024,Flat; int8 or binary: small, then rescored",
    )
    parser.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="largest number of items per encoder call"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="encode texts as a Ray Data job, on the cluster at HOST:PORT or the one that Ray finds or starts on this "
        "machine (needs vembed[ray])",
    )
    parser.add_argument(
        "--ray-workers", type=int, metavar="N", help="workers of --ray; default: one for each GPU, or for each 4 CPUs"
    )
    parser.add_argument("--id-column", metavar="NAME", help="default: _id, id, docid or doc_id")
    parser.add_argument("--text-column", metavar="NAME", help="default: text, document, passage, contents or content")
    parser.add_argument("--image-column", metavar="NAME", help="default: image, positive_image or image_path")
    parser.add_argument(
        "--image-root",
        type=Path,
        metavar="DIR",
        help="folder that picture paths start from; default: the corpus's folder",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an index that is there")
    add_model_arguments(parser)
    add_picture_argument(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Encode a corpus into an index."""
    parsed, watchdog = parse_arguments(arguments, program=program), Watchdog()
    return run_command(partial(_run, parsed, arguments, watchdog), in_several=True, watchdog=watchdog)


def _run(parsed: argparse.Namespace, words: Sequence[str], watchdog: Watchdog) -> int:
    if parsed.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {parsed.batch_size}")
    _check_ray(parsed)
    output = home_path(parsed.output)
    form = output_form(output, parsed.format)
    from vembed.data.corpus import Corpus

    Corpus(parsed.data)  # a path that leads nowhere is told before torch is imported, which takes seconds
    with ExitStack() as stack:

        def is_finished() -> bool:
            """Hold the output; return whether a start that was killed at its end has written it, and clean up then."""
            is_whole = stack.enter_context(hold_for_command(output, words)) and not parsed.overwrite
            if is_whole:
                from vembed.search.build import clean_killed

                clean_killed(output.resolve())
            return is_whole

        if not process_env().is_launched and is_finished():  # here a folder that can't be written is told as well
            return say_whole(output)
        from vembed.distributed.runtime import shut_down, start_runtime
        from vembed.distributed.signals import StopSignal

        quiet_libraries()
        runtime = start_runtime(deterministic=False, watchdog=watchdog)
        stop = stack.enter_context(StopSignal(advice="what is encoded is kept, and the same command continues"))
        if process_env().is_launched and runtime.ranks.from_first(is_finished):
            shut_down(watchdog)
            return say_whole(output)
        refuse_taken(output, parsed.data, overwrite=parsed.overwrite)  # before a model is loaded
        stack.enter_context(stop.asking(runtime.ranks.agreement(runtime.device)))
        _encode(parsed, form, runtime.ranks, stop.poll)
    shut_down(watchdog)
    return ExitCode.OK


def _check_ray(parsed: argparse.Namespace) -> None:
    if parsed.ray is None:
        if parsed.ray_workers is not None:
            raise ConfigError("--ray-workers is for --ray; add it, or start several processes with torchrun")
        return
    if parsed.ray_workers is not None and parsed.ray_workers < 1:
        raise ConfigError(f"--ray-workers must be at least 1, got {parsed.ray_workers}")
    if find_spec("ray") is None:  # importing it here takes a second, and comes before its settings
        import_extra("ray", "ray", "--ray")


def _encode(parsed: argparse.Namespace, form: Format, ranks: Ranks, poll: Callable[[], None]) -> None:
    from vembed.api.model import load
    from vembed.api.retrieval import index_corpus
    from vembed.pages.text import bytes_text

    options = load_options(parsed)
    if parsed.ray is not None:
        options["device"] = "cpu"  # the workers encode, and may need the whole GPU
    model = load(parsed.model, **options)
    meta = index_corpus(
        model,
        parsed.data,
        parsed.output,
        side=parsed.side,
        index=parsed.index,
        format=form,
        batch_size=parsed.batch_size,
        overwrite=parsed.overwrite,
        id_column=parsed.id_column,
        text_column=parsed.text_column,
        image_column=parsed.image_column,
        image_root=parsed.image_root,
        ranks=ranks,
        poll=poll,
        ray=parsed.ray,
        ray_workers=parsed.ray_workers,
    )
    if not ranks.is_first:
        return
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
        documents += f", {meta.num_vectors:,} vectors ({each:.1f} a document, {bytes_text(size)})"
    kind = f"index {meta.factory}" if form == "index" else {"parquet": "Parquet", "lancedb": "LanceDB"}[form]
    print(f"{documents}, {meta.model.dimension} dimensions, {kind}: {redact(str(parsed.output))}")
