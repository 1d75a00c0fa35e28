"""`vembed merge MODEL MODEL ... --output DIR`: one model of several, its weights given or chosen on sets."""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.distributed.lock import hold_for_command
from vembed.entrypoints.command import command_line, quiet_libraries, run_command, say_whole
from vembed.entrypoints.model_arguments import add_model_arguments
from vembed.errors import ConfigError, ExitCode
from vembed.evaluation.keys import metrics_that_choose
from vembed.files import clean_beside, home_path
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from vembed.data.retrieval import RetrievalData
    from vembed.merging.choose import Choice
    from vembed.merging.weights import Mixture
    from vembed.models.encoder import Encoder
    from vembed.models.exportable import Form
    from vembed.models.keys import ModelKeys

DESCRIPTION = (
    "Merge models that were trained from the same base: mixing some of the old weights back in helps a tuned model to "
    "keep its earlier abilities. Give the weights, or sets to choose them on."
)
METHODS = ("linear", "slerp")
WEIGHT_NOISE = 1e-6


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of a merge."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="hub id, local folder, or output of a run; put the one to preserve first",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must be empty")
    parser.add_argument("--method", choices=METHODS, default="linear", help="how weights are mixed; default: linear")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--weights", nargs="+", type=float, metavar="W", help="weight of each model; their sum is 1")
    how.add_argument("--data", nargs="+", metavar="SET", help="dev sets to choose the weights on")
    choosing = parser.add_argument_group("when weights are chosen")
    choosing.add_argument(
        "--guard",
        nargs="+",
        default=[],
        metavar="SET",
        help="sets on which the merged model must stay as good as the first",
    )
    choosing.add_argument("--split", help="split of the sets of --data; default: their validation split")
    choosing.add_argument(
        "--guard-split", metavar="SPLIT", help="split of the sets of --guard; default: that of --split"
    )
    choosing.add_argument("--metric", default="ndcg@10", metavar="M", help="metric to choose by; default: ndcg@10")
    choosing.add_argument("--steps", type=int, default=10, metavar="N", help="try weights in steps of 1/N; default: 10")
    choosing.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="largest number of items per encoder call"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the model that DIR holds")
    add_model_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Merge models into one."""
    parsed = parse_arguments(arguments, program=program)
    command = command_line(program, arguments)
    return run_command(lambda: _run(parsed, arguments, command))


def _run(parsed: argparse.Namespace, words: Sequence[str], command: str) -> int:
    _check(parsed)
    output = home_path(parsed.output)
    with hold_for_command(output, words) as is_whole:
        if is_whole and not parsed.overwrite:
            clean_beside(output.resolve())
            shutil.rmtree(_work_folder(output), ignore_errors=True)
            return say_whole(output)
        return _merge(parsed, output, command)


def _check(parsed: argparse.Namespace) -> None:
    """Refuse what can't be done, before torch is imported, which takes seconds."""
    if len(parsed.models) < 2:
        raise ConfigError("vembed merge takes at least two models; put the one to preserve first")
    if parsed.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {parsed.steps}")
    if parsed.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {parsed.batch_size}")
    if parsed.weights is not None:
        if parsed.guard:
            raise ConfigError("--guard chooses weights, and --weights gives them: leave one out")
        if len(parsed.weights) != len(parsed.models):
            raise ConfigError(f"--weights names {len(parsed.weights)} weights for {len(parsed.models)} models")
        if min(parsed.weights) < 0 or not abs(sum(parsed.weights) - 1) <= WEIGHT_NOISE:
            raise ConfigError("--weights must be at least 0 and add up to 1, such as 0.4 0.6")
    from vembed.data.sources import refuse_missing
    from vembed.data.splits import SourceOptions

    known = metrics_that_choose()
    if parsed.metric not in known:
        close = difflib.get_close_matches(parsed.metric, known, n=1, cutoff=0.0)
        raise ConfigError(f"--metric: there is no {parsed.metric!r}; did you mean {close[0]}?")
    for path, split in _named_sets(parsed):
        refuse_missing(path, SourceOptions("validation", split, named=("--data or --guard", "--split")))
    for path in parsed.data or () if parsed.split is None else ():
        _refuse_other_split(path)


def _refuse_other_split(path: str) -> None:
    """Refuse a BEIR folder whose only split isn't for validation: it would serve without a word."""
    from vembed.data.beir import find_split
    from vembed.data.sources import beir_folder
    from vembed.data.splits import SPLIT_NAMES

    if (folder := beir_folder(path)) is None:
        return
    split, _ = find_split(folder, None, "validation", "--split")
    if split not in SPLIT_NAMES["validation"]:
        raise ConfigError(
            f"{path} has no validation split; it has: {split}. Choosing the weights on it would flatter them; to do so "
            f"all the same: --split {split}"
        )


def _named_sets(parsed: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Return the path and the split of each set: those to win on, then those to keep."""
    guard_split = parsed.split if parsed.guard_split is None else parsed.guard_split
    return [*((path, parsed.split) for path in parsed.data or ()), *((path, guard_split) for path in parsed.guard)]


def _merge(parsed: argparse.Namespace, output: Path, command: str) -> int:
    from vembed.distributed.runtime import start_runtime
    from vembed.distributed.signals import StopSignal
    from vembed.merging.report import merge_headline, merge_page
    from vembed.merging.weights import Mixture
    from vembed.models.export.write import refuse_taken
    from vembed.models.load import load_encoder
    from vembed.pages.write import write_page

    quiet_libraries()
    refuse_taken(output, overwrite=parsed.overwrite, source=None)
    keys = [_model_keys(parsed, name) for name in parsed.models]
    runtime = start_runtime(deterministic=False)
    names, pages = [redact(each.model_name) for each in keys], output.with_name(f"{output.name}-report")
    sets = _load_sets(parsed)
    computing = [each.model_copy(update={"torch_dtype": "float32"}) for each in keys]
    facts = {"method": parsed.method, "vembed": version("vembed"), "torch": version("torch")}
    with StopSignal(advice="evaluations that are done are kept, and the same command continues") as stop:
        encoders = [load_encoder(each).eval() for each in computing]
        work, weights = _work_folder(output), parsed.weights
        identities = _identities(encoders) if weights is None else ()
        mixture = Mixture(encoders, names)
        del encoders
        if weights is None:
            choice = _choose(parsed, mixture, identities, sets, work, runtime.device, stop.poll)
            weights = choice.chosen.weights
            write_page(pages, merge_page(choice, names, facts, command))  # before the model: a kill leaves both or none
            print(merge_headline(choice))
        mixture.take(weights, parsed.method)
        record = {"models": names, "weights": list(weights), "method": parsed.method}
        _write(parsed, keys[0], mixture.encoder.to("cpu"), output, record, stop.poll)
    if parsed.weights is None:
        shutil.rmtree(work, ignore_errors=True)
        print(f"report: {redact(str(pages / 'report.html'))}")
    return ExitCode.OK


def _work_folder(output: Path) -> Path:
    """Return the folder that keeps the evaluations of the choice until the model is written."""
    return output.with_name(f".{output.name}.merging")


def _identities(encoders: Sequence[Encoder]) -> tuple[str, ...]:
    from vembed.evaluation.provenance import digest, model_key

    return tuple(digest(model_key(encoder)) for encoder in encoders)


def _load_sets(parsed: argparse.Namespace) -> list[RetrievalData]:
    from vembed.data.keys import DataKeys
    from vembed.data.retrieval_sources import load_retrieval
    from vembed.data.splits import SourceOptions

    named = ("--data or --guard", "--split or --guard-split")
    return [
        load_retrieval(path, SourceOptions("validation", split, DataKeys(), named=named))
        for path, split in _named_sets(parsed)
    ]


def _choose(
    parsed: argparse.Namespace,
    mixture: Mixture,
    identities: tuple[str, ...],
    sets: Sequence[RetrievalData],
    work: Path,
    device: torch.device,
    poll: Callable[[], None],
) -> Choice:
    """Evaluate the grid; what an earlier try has done is read."""
    import torch

    from vembed.evaluation.encode import ItemEncoder, encoding_budget
    from vembed.merging.choose import Trial, grid

    weights = grid(len(parsed.models), parsed.steps)
    encoder = mixture.encoder.to(device)
    autocast = torch.bfloat16 if parsed.bf16 else None
    encode = ItemEncoder(encoder, encoding_budget(encoder, device, parsed.batch_size), device, autocast, poll=poll)
    trial = Trial(mixture, parsed.method, encode, identities, work, parsed.metric, poll)
    return trial.choose(weights, sets[: len(parsed.data)], sets[len(parsed.data) :])


def _write(
    parsed: argparse.Namespace,
    keys: ModelKeys,
    encoder: Encoder,
    output: Path,
    record: Mapping[str, object],
    poll: Callable[[], None],
) -> None:
    """Write the merged model with a card and what it was made of, and read it back."""
    from vembed.evaluation.card.facts import CardFacts, model_facts, written_with
    from vembed.evaluation.card.render import CARD_FILE, render_card
    from vembed.models.export.write import ExportRequest, stored_dtype, write_encoder

    title = redact(output.name)

    def files(encoder: Encoder, form: Form) -> Mapping[str, str]:
        facts = CardFacts(
            title=title,
            folder=title,
            model=model_facts(encoder, form),
            run=None,
            base=None,
            license_id=None,
            base_license=None,
            languages=(),
            versions=written_with(),
        )
        return {CARD_FILE: render_card(facts), "merge.json": json.dumps(record, indent=2) + "\n"}

    request = ExportRequest(keys=keys, output=output, overwrite=parsed.overwrite)
    exported = write_encoder(encoder, request, stored_dtype(keys), files, poll=poll)
    print(
        f"read back by {' and '.join(exported.readers)}: {exported.num_items} sample items, largest difference "
        f"{exported.difference:.2g}\n{exported.form} folder: {redact(str(output))}"
    )


def _model_keys(parsed: argparse.Namespace, name: str) -> ModelKeys:
    from vembed.api.loading import COMMIT, locate_model
    from vembed.config.messages import checked_section
    from vembed.models.keys import ModelKeys

    if parsed.trust_remote_code and not COMMIT.fullmatch(parsed.model_revision or ""):
        raise ConfigError("--trust-remote-code needs --model-revision: the commit (40 hex digits) whose code you read")
    located, _ = locate_model(name)
    given = ("query_prompt", "document_prompt", "max_seq_length", "model_revision", "trust_remote_code", "allow_pickle")
    return checked_section(
        ModelKeys,
        {"model_name": located, **{key: getattr(parsed, key) for key in given if getattr(parsed, key) is not None}},
    )
