"""`vembed mine MODEL --data PATH --output FILE`: rows with hard negatives that a model finds, and a report."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.data.keys import DataKeys
from vembed.distributed.watchdog import Watchdog
from vembed.entrypoints.command import command_line, held_output, run_command, run_with_output
from vembed.entrypoints.options import ModelOptions, PictureOptions, RowOptions, check, parse_words
from vembed.errors import ConfigError
from vembed.files import home_path
from vembed.plan.keys import Seed
from vembed.redact import redact
from vembed.section import Count, Name, option, word
from vembed.text import plural
from vembed.vectors.keys import SOURCES, MiningKeys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vembed.data.read import DataSource
    from vembed.distributed.runtime import Runtime
    from vembed.distributed.signals import StopSignal
    from vembed.vectors.mining import MiningTask, Teacher


class MineOptions(RowOptions, MiningKeys, ModelOptions, PictureOptions):
    """Mine hard negatives: for each row, documents that a model ranks high for its query and that aren't labelled as
    relevant.
    """  # noqa: D205 - the sentence that --help prints

    command = "mine"
    hidden = SOURCES
    prefix = "mine_"

    model: Name = word("MODEL", "hub id, local folder, or the output folder of a run")
    data: Name = option(..., "rows with queries and positives: anything that the key data_path accepts", metavar="PATH")
    output: Path = option(..., "FILE.jsonl or FILE.parquet; a report goes to FILE-report/", metavar="FILE")
    corpus: str | None = option(
        None, "more documents, in the forms of vembed encode --data; default: only those of the rows", metavar="CORPUS"
    )
    skip_invalid: int | None = option(
        None,
        "drop up to N rows that can't be used (default 100) instead of stopping",
        metavar="N",
        bare=DataKeys.model_fields["max_invalid_records"].default,
    )
    teacher: str | None = option(
        None,
        "a stronger model whose scores the margins use: encoder or cross-encoder of sentence-transformers",
        metavar="MODEL",
    )
    batch_size: Count = option(256, "largest number of items per encoder call", metavar="N")
    seed: Seed | None = option(None, "seed of --sampling random (default 0)", metavar="N")
    overwrite: bool = option(False, "replace the output if it is there")


OPTIONS = MineOptions

_OPTIONS = {
    **{key: MineOptions.name_of(key) for key in MiningKeys.model_fields if key not in SOURCES},
    "skip_invalid_records: true, max_invalid_records:": "--skip-invalid",
    "skip_invalid_records": "--skip-invalid",
    "max_invalid_records:": "--skip-invalid",
}
"""Keys in messages of reading and mining -> options of this command."""


def main(arguments: Sequence[str], *, program: str) -> int:
    """Mine hard negatives for training rows."""
    given = parse_words(MineOptions, arguments, program=program)
    command = command_line(program, arguments)
    watchdog = Watchdog()
    body = partial(_run, given, arguments, command, watchdog)
    return run_command(body, in_several=True, watchdog=watchdog)


def _run(given: Mapping[str, Any], words: Sequence[str], command: str, watchdog: Watchdog) -> int:
    options = check(MineOptions, given)
    if (code := options.run_added()) is not None:
        return code
    if options.seed is not None and options.mine_sampling != "random":
        raise ConfigError("--seed has an effect only with --sampling random")
    from vembed.data.read import DataSource
    from vembed.losses.registry import RunLoss
    from vembed.workflows.mining import refuse_output

    output = home_path(options.output)
    refuse_output(output, overwrite=True)
    # InfoNCE weighs rows; which loss will learn from pairs with scores isn't known here
    named, loss = ("--data", "--split"), RunLoss.chosen("infonce", {}).needs().taking("pairs")
    skipped = options.skip_invalid
    keys = options.row_keys(
        max_image_pixels=options.max_image_pixels,
        skip_invalid_records=None if skipped is None else True,
        max_invalid_records=skipped,
    )
    source = DataSource(options.data, "train", keys, split=options.split, loss=loss, user_names=named)
    source.refuse_missing()

    @contextmanager
    def held() -> Iterator[bool]:
        clean = partial(shutil.rmtree, _work_folder(output), ignore_errors=True)
        with held_output(output, words, overwrite=options.overwrite, clean=clean) as is_finished:
            if not is_finished:
                refuse_output(output, overwrite=options.overwrite)
            yield is_finished

    def body(runtime: Runtime, stop: StopSignal) -> None:
        from vembed.api.arguments import errors_name_arguments  # with torch

        with errors_name_arguments(_OPTIONS):
            _mine(options, command, source, output, runtime, stop)

    advice = "what is done is kept, and the same command continues"
    return run_with_output(body, held, watchdog=watchdog, advice=advice)


def _mine(
    options: MineOptions,
    command: str,
    source: DataSource,
    output: Path,
    runtime: Runtime,
    stop: StopSignal,
) -> None:
    from vembed.api.model import load
    from vembed.data.read import DataSource
    from vembed.evaluation.mining_report import MiningReport, mining_page
    from vembed.pages.write import write_page
    from vembed.vectors.items import corpus_items
    from vembed.vectors.mining import Miner, MiningTask, timed
    from vembed.workflows.mining import refuse_unwritable, report_folder, rows_without_positives, write_rows

    # Every rank encodes its share and reads the shares of the others; the first one alone writes and prints.
    seconds, ranks = dict[str, float](), runtime.ranks
    with timed(seconds, "read data"):
        loaded = source.records()
        alone = len(rows_without_positives(output, loaded.table, lists_grades=options.label_kind == "grade"))
        corpus = None
        if options.corpus is not None:
            documents = DataSource(options.corpus, "train", source.keys, user_names=("--corpus", "--split")).documents()
            corpus = corpus_items(document.item for document in documents)
        task = MiningTask.of(loaded.table, corpus)
        refuse_unwritable(task)
    with timed(seconds, "load model"):
        model = load(options.model, **options.load_options())
    encode = model.item_encoder(options.batch_size, poll=stop.poll)
    encode.ranks = ranks
    folder = _work_folder(output)
    with timed(seconds, "teacher"):
        teacher = _teacher(options, task, folder, runtime, stop)
    mined = Miner(encode, options, folder, options.seed or 0, teacher, seconds).mine(task)
    if ranks.is_first:
        weights = model.identity.weights_sha256[:16]
        # A limit of 0 is one; `0 in (None, False)` is true.
        chosen = {name: value for name, value in options.mining().items() if value is not None and value is not False}
        settings = [f"{name.removeprefix('mine_')}={value}" for name, value in chosen.items()]
        facts = {"model": redact(model.name), "weights": weights, "settings": " ".join(settings)}
        if teacher is not None and options.teacher is not None:
            facts["teacher"] = redact(options.teacher)
        verbs = "has nothing to mine below and comes" if alone == 1 else "have nothing to mine below and come"
        notes = [*loaded.notes, *[f"{plural(alone, 'row')} without a positive {verbs} out as before."] * (alone > 0)]
        report = MiningReport(task, mined, options, facts, notes, seconds, command)
        pages, started = report_folder(output), time.perf_counter()

        def write_report() -> None:
            seconds["write"] = time.perf_counter() - started
            write_page(pages, mining_page(report, source.image_limits))

        write_rows(
            output,
            loaded.table,
            task,
            mined,
            facts,
            replaces=options.mine_replace,
            lists_grades=options.label_kind == "grade",
            poll=stop.poll_alone,
            before=write_report,  # so that no kill leaves rows without a report
        )
        print(f"{report.headline}\nwritten to {redact(str(output))}; report: {redact(str(pages / 'report.html'))}")
        shutil.rmtree(folder, ignore_errors=True)
    ranks.gather_objects(None)  # all wait: the first one may fail


def _work_folder(output: Path) -> Path:
    """Return the folder that keeps vectors and candidates until the rows are written."""
    return output.with_name(f".{output.name}.mining")


def _teacher(
    options: MineOptions, task: MiningTask, folder: Path, runtime: Runtime, stop: StopSignal
) -> Teacher | None:
    """Load the teacher and have it encode, where there is one."""
    if options.teacher is None:
        return None
    from vembed.api.model import load
    from vembed.models.keys import ModelKeys
    from vembed.models.st_library import CrossEncoder
    from vembed.vectors.mining import cross_encoder_teacher, encoder_teacher

    name, pickled = options.teacher, options.allow_pickle
    keys = ModelKeys(model_name=name, allow_pickle=pickled)
    if CrossEncoder.is_meant(keys):
        return cross_encoder_teacher(CrossEncoder(keys).to(runtime.device), task, ranks=runtime.ranks, poll=stop.poll)
    model = load(name, allow_pickle=pickled, bf16=options.bf16, max_image_pixels=options.max_image_pixels)
    encode = model.item_encoder(options.batch_size, poll=stop.poll)
    encode.ranks = runtime.ranks
    return encoder_teacher(encode, task, folder / "teacher")
