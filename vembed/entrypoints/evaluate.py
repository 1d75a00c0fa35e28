"""`vembed evaluate MODEL ... --data SET ... --output DIR`: each model on each set, to search or of graded pairs."""

from __future__ import annotations

import difflib
import gc
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

import vembed
from vembed.data.keys import LabelKind
from vembed.distributed.lock import hold_output
from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.entrypoints.options import ModelOptions, check, parse_words
from vembed.errors import ConfigError, ExitCode
from vembed.evaluation.keys import Bm25Language
from vembed.files import home_path, is_folder
from vembed.redact import redact
from vembed.registry import METRICS
from vembed.section import Count, Name, option, word

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from vembed.distributed.runtime import Runtime
    from vembed.evaluation.benchmark.run import Entry
    from vembed.models.keys import ModelKeys

BM25_NAMES = ("bm25", "BM25")
"""Names of BM25 among the models; a folder of that name is given as ./bm25."""

DEFAULT_METRIC = "ndcg@10"
SHOWN_METRICS = ("ndcg@10", "recall@10", "recall@100", "mrr@10", "map@100")


class EvaluateOptions(ModelOptions):
    """Evaluate embedding models on retrieval sets: encode, search exactly with FAISS, score with trec_eval."""

    command = "evaluate"

    models: list[Name] = word("MODEL", "hub id, local folder, output of a run (model/), or bm25")
    data: list[Name] | None = option(
        None,
        "BEIR folder, file of rows, hub id, builtin:SET, or a published set: flickr30k:DIR, sop:DIR, cirr:DIR",
        metavar="SET",
        one_of="sets!",
    )
    output: Annotated[Path, AfterValidator(home_path)] = option(
        ...,
        "folder for leaderboard.html, .md, .json and MODEL/SET/run.trec; for pairs: report.html, .md, .json",
        metavar="DIR",
    )
    metric: str = option(DEFAULT_METRIC, "metric to compare by; default: ndcg@10", metavar="M")
    split: str | None = option(None, "split of the sets; default: their test split", metavar="SPLIT")
    batch_size: Count = option(256, "largest number of items per encoder call", metavar="N")
    bm25: bool = option(False, "evaluate BM25 too")
    bm25_language: Bm25Language | None = option(
        None,
        "evaluate BM25 too, on texts of this language, whose stemmer and stop words it uses; plain: words as they are "
        "written; default of --bm25: english",
        metavar="LANGUAGE",
    )
    dims: list[str] | None = option(
        None, "also search with the first N dimensions alone, e.g. 64 128 or 64,128", metavar="N"
    )
    quantize: list[Literal["int8", "binary"]] = option([], "also search quantized vectors")
    rescore: list[int] = option(
        [],
        "also rescore N candidates per hit of --quantize and --dims with the full vectors, e.g. 4 10",
        metavar="N",
    )
    index: list[str] = option([], "also search FAISS indexes, e.g. HNSW32 IVF64,Flat:nprobe=8", metavar="F")
    no_keep_vectors: bool = option(False, "don't keep vectors on disk for the next run")
    image_root: Path | None = option(None, "folder that picture paths start from; default: the set's", metavar="DIR")
    label_kind: LabelKind = option(
        "auto",
        "what numbers in the column label mean (docs/data.md); grade and pair evaluate the pairs themselves instead of "
        "a search (docs/evaluation.md)",
    )
    both_directions: bool = option(
        False, "also search sets of texts and pictures in reverse (shown as NAME reversed), and report rsum"
    )

    @property
    def language_of_bm25(self) -> Bm25Language | None:
        """Language that BM25 is evaluated in; None: it isn't."""
        wants_bm25 = self.bm25 or any(name in BM25_NAMES for name in self.models)
        return self.bm25_language or ("english" if wants_bm25 else None)

    @property
    def sets(self) -> list[str]:
        """Sets of --data; none where a plugin's option stands in its place, such as --mteb."""
        return self.data or []

    def refuse_word_models(self, reason: str) -> None:
        """Refuse BM25 among the models, where vectors are needed.

        Args:
            reason: The option that needs them, and what it does.

        Raises:
            ConfigError: It is among them.
        """
        if named := [name for name in self.models if name in BM25_NAMES]:
            raise ConfigError(f"{reason}, and {named[0]} is no model of vectors: leave it out")


OPTIONS = EvaluateOptions


def main(arguments: Sequence[str], *, program: str) -> int:
    """Evaluate models on retrieval sets."""
    given = parse_words(EvaluateOptions, arguments, program=program)
    command = command_line(program, arguments)
    return run_command(lambda: _run(check(EvaluateOptions, given), command=command))


def _run(options: EvaluateOptions, *, command: str) -> int:
    from vembed.data.presets import preset_path
    from vembed.models.names import MODEL_FOLDER, is_run

    # In a folder that a set or a model is read from, results would lie among its files. The folder of a run holds its
    # model below model/: naming either means both.
    places = [preset.folder if (preset := preset_path(path)) else home_path(path) for path in options.sets]
    for model in (home_path(name).resolve() for name in options.models if name not in BM25_NAMES):
        run = model.parent if model.name == MODEL_FOLDER and is_run(model.parent) else model
        places += [model, run, *([run / MODEL_FOLDER] if is_run(run) else ())]
    output = home_path(options.output).resolve()
    if is_folder(output) and output in (place.resolve() for place in places):
        raise ConfigError(
            f"--output {options.output} is a folder that a set or a model is read from; choose another one"
        )
    if (code := options.run_added()) is not None:
        return code
    from vembed.data.read import DataSource

    sources = [DataSource(path, "test", split=options.split, user_names=("--data", "--split")) for path in options.sets]
    for source in sources:  # told before torch is imported, which takes seconds
        source.refuse_missing()
    with hold_output(options.output):
        judged = [source.path for source in sources if source.kind != "rows"]
        if options.label_kind not in {"pair", "grade"} or len(judged) == len(options.sets):
            return _evaluate(options, command=command)
        # Rows whose label says something of the pair.
        said = f"--label-kind {options.label_kind} measures pairs and searches nothing"
        if judged:
            raise ConfigError(f"{said}, but {judged[0]} is a set to search: evaluate it with a command of its own")
        idle = ("metric", "bm25", "bm25_language", "dims", "quantize", "rescore", "index", "both_directions")
        options.refuse_beside(said, idle)
        options.refuse_word_models(said)
        return _evaluate_pairs(options, command)


def _evaluate_pairs(options: EvaluateOptions, command: str) -> int:
    """Measure how far the models' similarities follow the labels of pairs."""
    options.refuse_unread_code()

    import torch

    from vembed.data.keys import DataKeys
    from vembed.data.read import DataSource
    from vembed.distributed.runtime import start_runtime
    from vembed.distributed.signals import StopSignal
    from vembed.evaluation.benchmark.names import model_labels, set_labels
    from vembed.evaluation.benchmark.run import load_model
    from vembed.evaluation.graded import graded_page, load_pairs, measure_pairs
    from vembed.pages.terminal import render_terminal
    from vembed.pages.write import write_page
    from vembed.vectors.encode import ItemEncoder, encoding_budget

    quiet_libraries()
    root = None if options.image_root is None else str(options.image_root)
    keys = DataKeys(image_root=root, label_kind=options.label_kind)
    named = ("--data", "--split")
    sets = [load_pairs(DataSource(path, "test", keys, split=options.split, user_names=named)) for path in options.sets]
    names = set_labels([each.name for each in sets], options.sets)
    sets = [replace(each, name=name) for each, name in zip(sets, names, strict=True)]
    runtime = start_runtime(deterministic=False)
    dtype = torch.bfloat16 if options.bf16 else None
    # Pairs by model: of each set a dictionary label -> (n,) similarities. Vectors are gone with their model.
    similarities: list[dict[str, NDArray[np.float32]]] = [{} for _ in sets]
    with StopSignal(advice="run the same command again") as stop:
        for name, label in zip(options.models, model_labels(options.models), strict=True):
            encoder = load_model(_model_keys(options, name)).to(runtime.device)
            budget = encoding_budget(encoder, runtime.device, options.batch_size)
            encode = ItemEncoder(encoder, budget, runtime.device, dtype, poll=stop.poll)
            for pairs, found in zip(sets, similarities, strict=True):
                found[label] = pairs.similarities(encode)
            del encoder, encode  # two large models don't fit at once
            gc.collect()
        outcomes = [measure_pairs(*each, poll=stop.poll) for each in zip(sets, similarities, strict=True)]
    page = graded_page(outcomes, _facts(runtime, "torch"), command)
    write_page(options.output, page)
    print(f"{render_terminal(page)}\nwritten to {options.output / 'report.html'}, .md and .json")
    return ExitCode.OK


def _facts(runtime: Runtime, *packages: str) -> list[tuple[str, str]]:
    """Return what a result was made on and with."""
    facts = [
        ("System", f"{platform.system()} {platform.machine()}"),
        ("Device of the encoders", runtime.machine.device_name),
        ("vembed", vembed.__version__),
    ]
    return [*facts, *((name, version(name)) for name in packages)]


def _evaluate(options: EvaluateOptions, *, command: str) -> int:
    from vembed.evaluation.benchmark.variants import plan_variants

    # All that words alone can get wrong is told before torch is imported and before a set is read.
    k = _cut_off(options.metric)
    words = [word.strip() for word in ",".join(options.dims).split(",")] if options.dims is not None else []
    for dim in words:
        if not dim.isascii() or not dim.isdigit():
            raise ConfigError(f"--dims: {dim!r} is no number of dimensions; write them like 64,128,256")
    dims = [int(dim) for dim in words]
    variants = plan_variants(dims=dims, precisions=options.quantize, indexes=options.index, rescored=options.rescore)
    options.refuse_unread_code()

    import torch

    from vembed.distributed.runtime import start_runtime
    from vembed.distributed.signals import StopSignal
    from vembed.evaluation.benchmark.run import BenchmarkOptions, run_benchmark
    from vembed.evaluation.leaderboard import build_board
    from vembed.evaluation.leaderboard_page import board_page
    from vembed.evaluation.metrics import DEFAULT_KS
    from vembed.pages.terminal import render_terminal
    from vembed.pages.write import write_page

    quiet_libraries()
    runtime = start_runtime(deterministic=False)
    with StopSignal(advice="what is done is kept, and the same command continues") as stop:
        settings = BenchmarkOptions(
            device=runtime.device,
            batch_rows=options.batch_size,
            split=options.split,
            autocast_dtype=torch.bfloat16 if options.bf16 else None,
            bm25_language=options.language_of_bm25,
            poll=stop.poll,
            ks=tuple(sorted({*DEFAULT_KS, k})),
            variants=variants,
            keep_vectors=not options.no_keep_vectors,
            image_root=options.image_root,
            label_kind=options.label_kind,
            both_directions=options.both_directions,
        )
        # Word matching has no weights: run_benchmark evaluates it by its language.
        models = [_model_keys(options, name) for name in options.models if name not in BM25_NAMES]
        entries = []
        for entry in run_benchmark(models, options.sets, options.output, settings):
            _print_result(entry, options.metric)
            entries.append(entry)
    facts = _facts(runtime, "faiss-cpu", "torch")
    page = board_page(build_board(entries, options.metric, facts=facts, command=command))
    write_page(options.output, page, name="leaderboard")
    # The ranking holds the values of all sets with their marks; a table for each set would push it off the screen.
    brief = replace(page, sections=[section for section in page.sections if section.name != "sets"])
    print(f"\n{render_terminal(brief)}\nwritten to {options.output / 'leaderboard.html'}, .md and .json")
    return ExitCode.OK


def _cut_off(metric: str) -> int:
    """Return the k of a metric's name."""
    from vembed.evaluation.metrics import MAX_DEPTH

    name, _, digits = metric.partition("@")
    if name not in METRICS:
        close = difflib.get_close_matches(name, METRICS.names(), n=1, cutoff=0.0)
        raise ConfigError(f"--metric: there is no {metric!r}; did you mean {close[0]}@{digits or 10}?")
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) <= MAX_DEPTH:
        raise ConfigError(f"--metric {metric!r}: write {name}@k with k between 1 and {MAX_DEPTH}, e.g. {name}@10")
    return int(digits)


def _model_keys(options: EvaluateOptions, name: str) -> ModelKeys:
    from vembed.models.names import locate

    if (note := locate(name).note) is not None:
        print(redact(note))
    return options.model_keys(name)


def _print_result(entry: Entry, metric: str) -> None:
    """Print a result on three lines and its notes."""
    from vembed.evaluation.judge import mean_interval

    result = entry.result
    low, high = mean_interval([result], metric)
    print(f"{entry.system} on {entry.task}: {result.num_queries} queries, {result.num_documents} documents")
    numbers = "  ".join(f"{name} {result.metrics[name]:.4f}" for name in dict.fromkeys((metric, *SHOWN_METRICS)))
    print(f"  {numbers}  (95% interval of {metric}: {low:.4f} to {high:.4f})")
    cut_offs = sorted(int(name.removeprefix("hit@")) for name in result.metrics if name.startswith("hit@"))
    print("  " + "  ".join(f"hit@{k} {result.metrics[f'hit@{k}']:.4f}" for k in cut_offs))
    for note in result.notes:
        print(f"  {note}")
