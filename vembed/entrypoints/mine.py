"""`vembed mine MODEL --data PATH --output FILE`: rows with hard negatives that a model finds, and a report."""

from __future__ import annotations

import argparse
import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vembed.config.keys.data import DataKeys
from vembed.config.keys.mining import SOURCES, MiningKeys
from vembed.config.messages import checked_section
from vembed.distributed.watchdog import Watchdog
from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.entrypoints.model_arguments import add_model_arguments, add_picture_argument, load_options
from vembed.entrypoints.row_arguments import add_row_arguments, row_keys
from vembed.errors import ConfigError, ExitCode
from vembed.files import home_path
from vembed.output_lock import hold_output
from vembed.redact import redact
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.data.images import ImageLimits
    from vembed.data.item_table import ItemTable
    from vembed.data.splits import SourceOptions
    from vembed.distributed.runtime import Runtime
    from vembed.mining.mine import Teacher
    from vembed.mining.task import MiningTask
    from vembed.training.guards import StopSignal

DESCRIPTION = (
    "Mine hard negatives: for each row, documents that a model ranks high for its query and that aren't labelled as "
    "relevant."
)


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of a mining."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="hub id, local folder, or the output folder of a run")
    parser.add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help="rows with queries and positives: anything that the key data_path accepts",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="FILE.jsonl or FILE.parquet; a report goes to FILE-report/",
    )
    parser.add_argument(
        "--corpus",
        metavar="CORPUS",
        help="more documents, in the forms of vembed encode --data; default: only those of the rows",
    )
    add_row_arguments(parser)
    parser.add_argument(
        "--skip-invalid",
        type=int,
        nargs="?",
        const=DataKeys.model_fields["max_invalid_records"].default,
        metavar="N",
        help="drop up to N rows that can't be used (default %(const)s) instead of stopping",
    )
    add_mining_arguments(parser)
    parser.add_argument(
        "--teacher",
        metavar="MODEL",
        help="a stronger model whose scores the margins use: encoder or cross-encoder of sentence-transformers",
    )
    parser.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="largest number of items per encoder call"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of --sampling random (default 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it is there")
    add_model_arguments(parser)
    add_picture_argument(parser)
    return parser.parse_args(arguments)


def add_mining_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a word for each key of mining, with the key's own default."""
    for name, info in MiningKeys.model_fields.items():
        if name in SOURCES:
            continue
        word, default, meaning = _word(name), info.get_default(), (info.description or "").replace("%", "%%")
        if default is False:
            parser.add_argument(word, dest=name, action="store_true", help=meaning)
        else:
            read = partial(_value, or_none=type(None) in get_args(info.annotation))
            shown = f"{meaning} Default: {'none' if default is None else default}."
            parser.add_argument(word, dest=name, default=default, type=read, metavar="X", help=shown)


def _word(name: str) -> str:
    """Return the option of a key."""
    return f"--{name.removeprefix('mine_').replace('_', '-')}"


def _value(text: str, *, or_none: bool) -> str | int | float | None:
    """Return what a word says as a configuration would read it; the key checks it."""
    if or_none and text.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def main(arguments: Sequence[str], *, program: str) -> int:
    """Mine hard negatives for training rows."""
    parsed = parse_arguments(arguments, program=program)
    command = command_line(program, arguments)
    watchdog = Watchdog()
    return run_command(partial(_run, parsed, command, watchdog), in_several=True, watchdog=watchdog)


def _run(parsed: argparse.Namespace, command: str, watchdog: Watchdog) -> int:
    if parsed.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {parsed.batch_size}")
    keys = _mining_keys(parsed)
    if parsed.seed is not None and keys.mine_sampling != "random":
        raise ConfigError("--seed has an effect only with --sampling random")
    from vembed.data.sources import refuse_missing
    from vembed.data.splits import SourceOptions
    from vembed.losses.registry import loss_facts
    from vembed.mining.output import refuse_output

    output = home_path(parsed.output)
    refuse_output(output, overwrite=parsed.overwrite)  # before torch is imported, which takes seconds
    # InfoNCE weighs rows; which loss will learn from pairs with scores isn't known here
    named, loss = ("--data", "--split"), replace(loss_facts("infonce"), takes=("positives", "pairs"))
    source = SourceOptions("train", parsed.split, row_keys(parsed), loss, named=named)
    refuse_missing(parsed.data, source)

    from vembed.distributed.runtime import shut_down, start_runtime
    from vembed.training.guards import StopSignal

    quiet_libraries()
    runtime = start_runtime(deterministic=False, watchdog=watchdog)
    ranks = runtime.ranks
    with ExitStack() as stack, StopSignal(advice="what is done is kept, and the same command continues") as stop:
        ranks.from_first(lambda: stack.enter_context(hold_output(output, beside=True)))
        stack.enter_context(stop.asking(ranks.agreement(runtime.device)))
        _mine(parsed, command, (keys, source), output, runtime, stop)
    shut_down(watchdog)
    return ExitCode.OK


def _mining_keys(parsed: argparse.Namespace) -> MiningKeys:
    given = {name: getattr(parsed, name) for name in MiningKeys.model_fields if name not in SOURCES}
    try:
        keys = checked_section(MiningKeys, given)
    except ConfigError as error:
        name, _, reason = str(error).partition(":")
        raise ConfigError(f"{_word(name)}:{reason}") from error
    return keys.model_copy(update={name: value for name, value in given.items() if value is None})


def _mine(
    parsed: argparse.Namespace,
    command: str,
    options: tuple[MiningKeys, SourceOptions],
    output: Path,
    runtime: Runtime,
    stop: StopSignal,
) -> None:
    from vembed.api.model import load
    from vembed.data.sources import load_records
    from vembed.mining.mine import Miner, Seconds
    from vembed.mining.output import rows_without_positives, write_rows
    from vembed.mining.report import MiningReport, write_mining_report
    from vembed.mining.task import MiningTask

    (keys, source), seconds, ranks = options, Seconds(), runtime.ranks
    with seconds.part("read data"):
        loaded = load_records(parsed.data, source)
        alone = len(rows_without_positives(output, loaded.table, lists_grades=parsed.label_kind == "grade"))
        task = MiningTask.of(loaded.table, _corpus(parsed, source.image_limits))
    with seconds.part("load model"):
        model = load(parsed.model, **load_options(parsed))
    encode = model.item_encoder(parsed.batch_size, poll=stop.poll)
    encode.ranks = ranks
    folder = output.with_name(f".{output.name}.mining")
    with seconds.part("teacher"):
        teacher = _teacher(parsed, task, folder, runtime, stop)
    mined = Miner(encode, keys, folder, parsed.seed or 0, teacher, seconds).mine(task)
    if ranks.is_first:
        facts = {"model": redact(model.name), "weights": model.identity.weights_sha256[:16], "settings": _shown(keys)}
        if teacher is not None:
            facts["teacher"] = redact(parsed.teacher)
        with seconds.part("write"):
            write_rows(
                output,
                loaded.table,
                task,
                mined,
                facts,
                replaces=keys.mine_replace,
                lists_grades=parsed.label_kind == "grade",
                poll=stop.poll_alone,
            )
        verbs = "has nothing to mine below and comes" if alone == 1 else "have nothing to mine below and come"
        notes = [*loaded.notes, *[f"{plural(alone, 'row')} without a positive {verbs} out as before."] * (alone > 0)]
        report = MiningReport(task, mined, keys, facts, notes, seconds.parts, command)
        pages = output.with_name(f"{output.stem}-report")
        write_mining_report(pages, report, source.image_limits)
        print(f"{report.headline}\nwritten to {redact(str(output))}; report: {redact(str(pages / 'report.html'))}")
        shutil.rmtree(folder, ignore_errors=True)
    ranks.gather_objects(None)  # all wait: the first one may fail


def _corpus(parsed: argparse.Namespace, limits: ImageLimits) -> ItemTable | None:
    """Read the further documents."""
    if parsed.corpus is None:
        return None
    from vembed.data.corpus import Corpus, CorpusOptions
    from vembed.mining.task import corpus_items

    root = None if parsed.image_root is None else home_path(parsed.image_root)
    corpus = Corpus(parsed.corpus, CorpusOptions(image_root=root, image_limits=limits))
    return corpus_items(document.item for document in corpus)


def _teacher(
    parsed: argparse.Namespace, task: MiningTask, folder: Path, runtime: Runtime, stop: StopSignal
) -> Teacher | None:
    """Load the teacher and have it encode, where there is one."""
    if parsed.teacher is None:
        return None
    from vembed.api.model import load
    from vembed.config.keys.model import ModelKeys
    from vembed.mining.teacher import CrossEncoderTeacher, EncoderTeacher
    from vembed.models.cross_encoder import CrossEncoder

    name, pickled = parsed.teacher, parsed.allow_pickle
    keys = ModelKeys(model_name=name, allow_pickle=pickled)
    if CrossEncoder.is_meant(keys):
        return CrossEncoderTeacher.of(CrossEncoder(keys).to(runtime.device), task, ranks=runtime.ranks, poll=stop.poll)
    encode = load(name, allow_pickle=pickled, bf16=parsed.bf16).item_encoder(parsed.batch_size, poll=stop.poll)
    encode.ranks = runtime.ranks
    return EncoderTeacher.of(encode, task, folder / "teacher")


def _shown(keys: MiningKeys) -> str:
    """Return the settings on one line."""
    return " ".join(
        f"{name.removeprefix('mine_')}={value}" for name, value in keys.mining().items() if value not in (None, False)
    )
