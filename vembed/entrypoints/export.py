"""`vembed export RUN_OR_MODEL --output DIR`: a model as its library loads it, with a card, read back to be sure."""

from __future__ import annotations

import argparse
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.distributed.lock import hold_for_command
from vembed.entrypoints.command import quiet_libraries, run_command, say_whole
from vembed.entrypoints.model_arguments import add_card_arguments, add_source_arguments, source_keys
from vembed.errors import ConfigError, ExitCode
from vembed.extras import import_extra
from vembed.files import clean_beside, home_path
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.models.export.write import Exported, ExportRequest

DESCRIPTION = (
    "Write a model into a folder that sentence-transformers, transformers or open_clip loads, with a model card "
    "(README.md) made from the records of its run. The folder is loaded again and must give the same vectors."
)
FORMATS = ("auto", "sentence-transformers", "transformers", "open_clip", "pylate", "onnx")
DTYPES = ("float32", "float16", "bfloat16")


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of an export."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="output folder of a run, folder of a model, or hub id")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must be empty")
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="library to write for; default: auto, the model's own"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="data type of the stored weights; default: that of the model")
    parser.add_argument("--overwrite", action="store_true", help="replace the model that DIR holds")
    parser.add_argument(
        "--checkpoint",
        type=int,
        metavar="STEP",
        help="export this checkpoint of the run instead of its model; the run may be unfinished",
    )
    graphs = parser.add_argument_group("for --format onnx: a sentence-transformers folder with ONNX graphs in onnx/")
    graphs.add_argument("--int8", action="store_true", help="also write a graph with 8-bit weights")
    graphs.add_argument("--opset", type=int, metavar="N", help="ONNX operator set version; default: that of torch")
    graphs.add_argument(
        "--allow-lower",
        action="store_true",
        help="accept a graph whose vectors have a cosine below 0.999 to the model's",
    )
    add_card_arguments(parser)
    add_source_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Export a model with its card for another library."""
    parsed = parse_arguments(arguments, program=program)
    return run_command(lambda: _run(parsed, arguments))


def _run(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    output = home_path(parsed.output).resolve()
    with ExitStack() as stack:
        is_whole = stack.enter_context(hold_for_command(output, words))
        shutil.rmtree(_checkpoint_folder(output), ignore_errors=True)  # what a kill left
        if is_whole and not parsed.overwrite:
            clean_beside(output)
            return say_whole(parsed.output)
        return _export(parsed, stack)


def _export(parsed: argparse.Namespace, stack: ExitStack) -> int:
    from vembed.api.card import OwnersWords, card_files
    from vembed.api.loading import locate_model
    from vembed.distributed.signals import StopSignal
    from vembed.models.export.write import export_model

    quiet_libraries()
    words = OwnersWords.checked(parsed.license, parsed.base_model_license, parsed.language)
    model, run = locate_model(parsed.model) if parsed.checkpoint is None else (_saved_model(parsed, stack), None)
    request = _request(parsed, model)
    title = redact(request.output.expanduser().resolve().name)
    card = card_files(title, title, model, run, words)
    with StopSignal(advice="nothing was written, export again") as stop:
        exported = export_model(request, card, poll=stop.poll)
    _print(exported, request.output, words.license)
    return ExitCode.OK


def _request(parsed: argparse.Namespace, model: str) -> ExportRequest:
    import torch

    from vembed.models.export.graph import GraphRequest
    from vembed.models.export.write import ExportRequest

    keys = source_keys(parsed, model)
    dtype = None if parsed.dtype is None else getattr(torch, parsed.dtype)
    form, graphs = parsed.format, None
    if form == "onnx":
        for name in ("onnx", "onnxruntime", "onnxscript"):
            import_extra(name, "onnx", "--format onnx")
        form, graphs = (
            "sentence-transformers",
            GraphRequest(int8=parsed.int8, opset=parsed.opset, allow_lower=parsed.allow_lower),
        )
    elif parsed.int8 or parsed.opset is not None or parsed.allow_lower:
        raise ConfigError("--int8, --opset and --allow-lower are for graphs; add --format onnx")
    return ExportRequest(
        keys=keys, output=parsed.output, form=form, dtype=dtype, overwrite=parsed.overwrite, graphs=graphs
    )


def _saved_model(parsed: argparse.Namespace, stack: ExitStack) -> str:
    """Return the model of a checkpoint, written beside the output for as long as the command runs."""
    from vembed.training.output import OutputFolder
    from vembed.training.saving import write_saved_model

    run = Path(parsed.model).expanduser().resolve()
    if not OutputFolder(run).checkpoints.is_dir():
        raise ConfigError(f"--checkpoint: {parsed.model} has no checkpoints; name the output folder of a run")
    folder = _checkpoint_folder(home_path(parsed.output).resolve())
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"the card tells nothing of the run: its report is of its kept model, not of step {parsed.checkpoint}")
    return str(write_saved_model(run, parsed.checkpoint, folder))


def _checkpoint_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.checkpoint")


def _print(exported: Exported, output: Path, license_id: str | None) -> None:
    from vembed.evaluation.card.front_matter import LICENSES, nearest_license
    from vembed.models.export.graph import LEAST
    from vembed.pages.text import bytes_text

    dtype = str(exported.dtype).removeprefix("torch.")
    print(f"read back by {' and '.join(exported.readers)}: {exported.num_items} sample items, largest difference "
          f"{exported.difference:.2g}")  # fmt: skip
    if exported.rounding:
        print(f"rounding the weights to {dtype} moved vectors by up to {exported.rounding:.2g}")
    for graph in exported.graphs:
        print(f"{graph.name}, {bytes_text(graph.num_bytes)}: its vectors have a cosine of at least {graph.cosine:.7f} "
              f"to the model's ({graph.num_texts} texts, each alone and all at once)")  # fmt: skip
        if graph.length < LEAST:
            print(f"{graph.name}: lengths of vectors differ from the model's by up to {1 - graph.length:.2%}")
    if license_id is None:
        print("the card states no licence; --license ID does")
    elif license_id not in LICENSES:
        nearest = nearest_license(license_id)
        hint = f" (did you mean {nearest}?)" if nearest else ""
        print(f"licence {license_id!r} is none of the hub's ids{hint}: the card gives it as other")
    print(f"{exported.form} folder, {dtype} weights: {redact(str(output))}")
