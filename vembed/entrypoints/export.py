"""`vembed export RUN_OR_MODEL --output DIR`: a model as its library loads it, with a card, read back to be sure."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vembed.config.keys.model import ModelKeys
from vembed.config.load import file_values
from vembed.config.messages import checked_section
from vembed.config.plugins import import_plugins
from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.errors import ConfigError, ExitCode
from vembed.files import is_folder
from vembed.output_lock import hold_output
from vembed.redact import redact, redact_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.card.facts import RunFacts
    from vembed.models.encoder import Encoder, Form
    from vembed.models.export.write import Exported, ExportRequest

DESCRIPTION = (
    "Write a model into a folder that sentence-transformers, transformers or open_clip loads, with a model card "
    "(README.md) of what its run left. What was written is read back and must give the same vectors."
)
FORMATS = ("auto", "sentence-transformers", "transformers", "open_clip")
DTYPES = ("float32", "float16", "bfloat16")


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of an export."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="output folder of a run, folder of a model, or hub id")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must be empty")
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="library to write for; default: auto, the model's own"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the stored weights; default: that of the model")
    parser.add_argument("--overwrite", action="store_true", help="replace the model that DIR holds")
    parser.add_argument(
        "--checkpoint", type=int, metavar="STEP", help="a checkpoint of the run, finished or not, in place of its model"
    )
    card = parser.add_argument_group("for the model card; what isn't given reads 'not stated'")
    card.add_argument("--license", metavar="ID", help="licence of the model, e.g. apache-2.0")
    card.add_argument("--base-model-license", metavar="ID", help="licence of the model that training started from")
    card.add_argument("--language", nargs="+", default=[], metavar="CODE", help="languages of the model, e.g. en de")
    source = parser.add_argument_group("for models that need it")
    source.add_argument("--model-revision", metavar="COMMIT", help="branch, tag or commit of a hub model")
    source.add_argument("--trust-remote-code", action="store_true", help="run code that a model brings; needs a commit")
    source.add_argument("--allow-pickle", action="store_true", help="read pickled weights, with weights_only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Write a model with its card, for the library that loads it."""
    parsed = parse_arguments(arguments, program=program)
    return run_command(lambda: _run(parsed))


def _run(parsed: argparse.Namespace) -> int:
    with ExitStack() as stack:
        stack.enter_context(hold_output(parsed.output, beside=True))
        return _export(parsed, stack)


def _export(parsed: argparse.Namespace, stack: ExitStack) -> int:
    from vembed.api.model import locate_model
    from vembed.evaluation.card.facts import CardFacts, model_facts, written_with
    from vembed.evaluation.card.front_matter import check_languages, check_license
    from vembed.evaluation.card.names import public_name
    from vembed.evaluation.card.render import CARD_FILE, render_card
    from vembed.models.export.write import export_model
    from vembed.training.guards import StopSignal

    quiet_libraries()
    licenses = [
        None if given is None else check_license(redact(given)) for given in (parsed.license, parsed.base_model_license)
    ]
    languages = check_languages(parsed.language)
    model, folder = locate_model(parsed.model) if parsed.checkpoint is None else (_saved_model(parsed, stack), None)
    request = _request(parsed, model)
    run = None if folder is None else _run_facts(folder)
    is_hub = run is None and not is_folder(model)
    if parsed.base_model_license is not None and run is not None and run.base.kind == "built-in":
        raise ConfigError("--base-model-license: the run trained from scratch; leave it out")
    title = redact(request.output.expanduser().resolve().name)

    def card(encoder: Encoder, form: Form) -> Mapping[str, str]:
        facts = CardFacts(
            title=title,
            folder=title,
            model=model_facts(encoder, form),
            run=run,
            base=public_name(model) if is_hub else None,
            license_id=licenses[0],
            base_license=licenses[1],
            languages=languages,
            versions=written_with(),
        )
        return {CARD_FILE: render_card(facts)}

    with StopSignal(advice="nothing was written, export again") as stop:
        exported = export_model(request, card, poll=stop.poll)
    _print(exported, request.output, licenses[0])
    return ExitCode.OK


def _request(parsed: argparse.Namespace, model: str) -> ExportRequest:
    import torch

    from vembed.api.model import COMMIT
    from vembed.models.export.write import ExportRequest

    if parsed.trust_remote_code and not COMMIT.fullmatch(parsed.model_revision or ""):
        raise ConfigError("--trust-remote-code needs --model-revision: the commit (40 hex digits) whose code you read")
    names = ("model_revision", "trust_remote_code", "allow_pickle")
    keys = checked_section(ModelKeys, {"model_name": model, **{key: getattr(parsed, key) for key in names}})
    dtype = None if parsed.dtype is None else getattr(torch, parsed.dtype)
    return ExportRequest(keys=keys, output=parsed.output, form=parsed.format, dtype=dtype, overwrite=parsed.overwrite)


def _saved_model(parsed: argparse.Namespace, stack: ExitStack) -> str:
    """Return the model of a checkpoint, written beside the output for as long as the command runs."""
    from vembed.training.output import OutputFolder
    from vembed.training.wiring.saved_model import write_saved_model

    run = Path(parsed.model).expanduser().resolve()
    if not OutputFolder(run).checkpoints.is_dir():
        raise ConfigError(f"--checkpoint: {parsed.model} has no checkpoints; name the output folder of a run")
    near = parsed.output.expanduser().resolve().parent
    near.mkdir(parents=True, exist_ok=True)
    folder = Path(stack.enter_context(TemporaryDirectory(dir=near, prefix=".checkpoint-")))
    print(f"the card tells nothing of the run: its report is of its kept model, not of step {parsed.checkpoint}")
    return str(write_saved_model(run, parsed.checkpoint, folder))


def _run_facts(run: Path) -> RunFacts | None:
    """Return what the card tells of a run; None, said on the terminal, where its files can't be read."""
    from vembed.errors import DataError
    from vembed.evaluation.card.gather import gather_run, read_report

    path = run / "config.yaml"
    try:
        config = {name: redact_value(value) for name, value in file_values(path).items()}
        import_plugins(config.get("plugins"))  # the card tells the facts of the loss
        data_facts, environment = read_report(run)
        pairs = [(redact(label), redact(value)) for label, value in data_facts]
        return gather_run(run, config=config, data_facts=pairs, environment=environment)
    except (OSError, ConfigError, DataError) as error:
        print(f"warning: the card tells nothing of the run: {redact(str(error))} ({path})")
        return None


def _print(exported: Exported, output: Path, license_id: str | None) -> None:
    from vembed.evaluation.card.front_matter import LICENSES, nearest_license

    dtype = str(exported.dtype).removeprefix("torch.")
    print(f"read back by {' and '.join(exported.readers)}: {exported.num_items} sample items, largest difference "
          f"{exported.difference:.2g}")  # fmt: skip
    if exported.rounding:
        print(f"rounding the weights to {dtype} moved vectors by up to {exported.rounding:.2g}")
    if license_id is None:
        print("the card states no licence; --license ID does")
    elif license_id not in LICENSES:
        nearest = nearest_license(license_id)
        hint = f" (did you mean {nearest}?)" if nearest else ""
        print(f"licence {license_id!r} is none of the hub's ids{hint}: the card gives it as other")
    print(f"{exported.form} folder, {dtype} weights: {redact(str(output))}")
