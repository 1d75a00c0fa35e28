"""`vembed export RUN_OR_MODEL --output DIR`: a model as its library loads it, with a card, read back to be sure."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from vembed.distributed.signals import StopSignal
from vembed.entrypoints.command import held_output, quiet_libraries, run_command
from vembed.entrypoints.options import WRITING_HEADINGS, TrustOptions, check, parse_words
from vembed.errors import ConfigError, ExitCode
from vembed.evaluation.keys import CardKeys
from vembed.files import clean_beside, home_path
from vembed.models.export_formats import OUR_FORMS
from vembed.redact import redact
from vembed.registry import EXPORTS
from vembed.section import names_of, option, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from vembed.models.export import Exported
    from vembed.models.export_formats import ExportFormat
    from vembed.models.exportable import Form


class ExportOptions(CardKeys, TrustOptions):
    """Write a model into a folder that sentence-transformers, transformers or open_clip loads, with a model card
    (README.md) made from the records of its run. The folder is loaded again and must give the same vectors.
    """  # noqa: D205 - the sentence that --help prints

    command = "export"
    headings = WRITING_HEADINGS

    model: str = word("RUN_OR_MODEL", "output folder of a run, folder of a model, or hub id")
    output: Path = option(..., "folder to write; must be empty", metavar="DIR")
    format: Annotated[str, names_of(EXPORTS, *OUR_FORMS)] = option(
        "auto", "library to write for; default: auto, the model's own"
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = option(
        None, "data type of the stored weights; default: that of the model"
    )
    overwrite: bool = option(False, "replace the model that DIR holds")
    checkpoint: int | None = option(
        None, "export this checkpoint of the run instead of its model; the run may be unfinished", metavar="STEP"
    )


OPTIONS = ExportOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Export a model with its card for another library."""
    given = parse_words(ExportOptions, arguments, program=program)
    return run_command(lambda: _run(given, arguments))


def _run(given: Mapping[str, Any], words: Sequence[str]) -> int:
    options = check(ExportOptions, given)
    if (code := options.run_added()) is not None:
        return code
    output = home_path(options.output).resolve()
    from_checkpoint = output.with_name(f".{output.name}.checkpoint")  # the model of --checkpoint while it is exported
    clean = partial(clean_beside, output)
    with held_output(options.output, words, overwrite=options.overwrite, clean=clean) as is_finished:
        shutil.rmtree(from_checkpoint, ignore_errors=True)  # what a kill left
        if is_finished:
            return ExitCode.OK
        try:
            return _export(options, from_checkpoint)
        finally:
            shutil.rmtree(from_checkpoint, ignore_errors=True)


def _export(options: ExportOptions, from_checkpoint: Path) -> int:
    import torch

    from vembed.models.export import ExportRequest, export_model
    from vembed.models.names import locate_model
    from vembed.workflows.publishing import card_files, spelled

    quiet_libraries()
    # Words on the card are refused before the model is loaded, which takes seconds to minutes.
    owner = spelled(options)
    if options.checkpoint is None:
        model, run = locate_model(options.model)
    else:
        from vembed.training.output import OutputFolder
        from vembed.training.saving import write_saved_model

        folder = Path(options.model).expanduser().resolve()
        if not OutputFolder(folder).checkpoints.is_dir():
            raise ConfigError(f"--checkpoint: {options.model} has no checkpoints; name the output folder of a run")
        step = options.checkpoint
        print(f"the card tells nothing of the run: its report is of its kept model, not of step {step}")
        model, run = str(write_saved_model(folder, step, from_checkpoint)), None
    keys = options.model_keys(model)
    added_format: ExportFormat | None = None if options.format in OUR_FORMS else EXPORTS.load(options.format)
    if added_format is not None:
        added_format.refuse_missing()
    request = ExportRequest(
        keys=keys,
        output=options.output,
        form=cast("Form | Literal['auto']", options.format) if added_format is None else added_format.form,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        overwrite=options.overwrite,
        format=added_format,
        format_options=options.added(options.format),
    )
    title = redact(request.output.expanduser().resolve().name)
    card = card_files(title, title, model, run, owner)
    with StopSignal(advice="nothing was written, export again") as stop:
        exported = export_model(request, card, poll=stop.poll)
    _print(exported, request.output, owner.license)
    return ExitCode.OK


def _print(exported: Exported, output: Path, license_id: str | None) -> None:
    from vembed.evaluation.card import LICENSES, nearest_license

    # The difference is that of reading back alone; rounding is told apart, as it was asked for.
    dtype = str(exported.dtype).removeprefix("torch.")
    print(f"read back by {' and '.join(exported.readers)}: {exported.num_items} sample items, largest difference "
          f"{exported.difference:.2g}")  # fmt: skip
    if exported.rounding:
        print(f"rounding the weights to {dtype} moved vectors by up to {exported.rounding:.2g}")
    for line in exported.added:
        print(line)
    if license_id is None:
        print("the card states no licence; --license ID does")
    elif license_id not in LICENSES:
        nearest = nearest_license(license_id)
        hint = f" (did you mean {nearest}?)" if nearest else ""
        print(f"licence {license_id!r} is none of the hub's ids{hint}: the card gives it as other")
    print(f"{exported.form} folder, {dtype} weights: {redact(str(output))}")
