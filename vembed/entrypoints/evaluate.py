"""`vembed evaluate MODEL ... --data SET ... --output DIR`: each model on each set, to search or of graded pairs."""

from __future__ import annotations

import argparse
import difflib
import gc
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vembed.config.keys.data import LabelKind
from vembed.config.keys.model import ModelKeys
from vembed.config.messages import checked_section
from vembed.entrypoints.command import command_line, quiet_libraries, run_command
from vembed.entrypoints.evaluate_mteb import evaluate_mteb
from vembed.entrypoints.model_arguments import add_model_arguments
from vembed.errors import ConfigError, ExitCode
from vembed.files import home_path, is_folder
from vembed.output_lock import hold_output
from vembed.redact import redact
from vembed.registry import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from vembed.distributed.runtime import Runtime
    from vembed.evaluation.benchmark.run import BenchmarkOptions, Entry
    from vembed.evaluation.benchmark.variants import Variant

DESCRIPTION = "Evaluate embedding models on retrieval sets: encode, search exactly with FAISS, score with trec_eval."
BM25_NAMES = ("bm25", "BM25")
"""What BM25 is called among the models; a folder of that name is given as ./bm25."""

DEFAULT_METRIC = "ndcg@10"
QUANTIZE = ("int8", "binary")
SHOWN_METRICS = ("ndcg@10", "recall@10", "recall@100", "mrr@10", "map@100")


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of an evaluation."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="hub id, local folder, output of a run (model/), or bm25"
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--data",
        nargs="+",
        metavar="SET",
        help="BEIR folder, file of rows, hub id, builtin:SET, or a published set: flickr30k:DIR, sop:DIR, cirr:DIR",
    )
    asked.add_argument(
        "--mteb",
        nargs="+",
        metavar="NAME",
        help="MTEB benchmarks or tasks instead of --data, e.g. NanoBEIR; needs vembed[mteb]",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for leaderboard.html, .md, .json and MODEL/SET/run.trec; for pairs: report.html, .md, .json",
    )
    parser.add_argument("--metric", default=DEFAULT_METRIC, metavar="M", help="metric to compare by; default: ndcg@10")
    parser.add_argument("--split", help="split of the sets; default: their test split")
    parser.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="largest number of items per encoder call"
    )
    parser.add_argument("--bm25", action="store_true", help="evaluate BM25 too")
    parser.add_argument(
        "--dims", nargs="+", metavar="N", help="also search with the first N dimensions alone, e.g. 64 128 or 64,128"
    )
    parser.add_argument("--quantize", nargs="+", default=[], choices=QUANTIZE, help="also search quantized vectors")
    parser.add_argument(
        "--rescore",
        nargs="+",
        default=[],
        type=int,
        metavar="N",
        help="also rescore N candidates per hit of --quantize and --dims with the full vectors, e.g. 4 10",
    )
    parser.add_argument(
        "--index", nargs="+", default=[], metavar="F", help="also search FAISS indexes, e.g. HNSW32 IVF64,Flat:nprobe=8"
    )
    parser.add_argument("--no-keep-vectors", action="store_true", help="don't keep vectors on disk for the next run")
    parser.add_argument(
        "--image-root", type=Path, metavar="DIR", help="folder that picture paths start from; default: the set's"
    )
    parser.add_argument(
        "--label-kind",
        choices=get_args(LabelKind),
        default="auto",
        help="what numbers in the column label mean (docs/data.md); grade and pair evaluate the pairs themselves "
        "instead of a search (docs/benchmark.md)",
    )
    parser.add_argument(
        "--both-directions",
        action="store_true",
        help="also search sets of texts and pictures in reverse (shown as NAME reversed), and report rsum",
    )
    add_model_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Evaluate models on retrieval sets."""
    parsed = parse_arguments(arguments, program=program)
    command = command_line(program, arguments)
    return run_command(lambda: _run(parsed, command=command))


def _run(parsed: argparse.Namespace, *, command: str) -> int:
    if parsed.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {parsed.batch_size}")
    _refuse_output(parsed)
    if parsed.mteb is not None:
        _refuse_without_effect(parsed, "--mteb measures as MTEB does", of_mteb=True)
        _refuse_unread_code(parsed)
        with hold_output(parsed.output):
            return evaluate_mteb(parsed)
    from vembed.data.sources import refuse_missing
    from vembed.data.splits import SourceOptions

    for path in parsed.data:  # told before torch is imported, which takes seconds
        refuse_missing(path, SourceOptions("test", parsed.split, named=("--data", "--split")))
    with hold_output(parsed.output):
        return _evaluate_pairs(parsed, command) if _measures_pairs(parsed) else _evaluate(parsed, command=command)


def _refuse_output(parsed: argparse.Namespace) -> None:
    """Refuse an output folder that a set or a model is read from: results would lie among its files."""
    from vembed.data.presets import preset_path
    from vembed.models.names import MODEL_FOLDER, is_run

    places = [preset.folder if (preset := preset_path(path)) else home_path(path) for path in parsed.data or ()]
    for model in (home_path(name).resolve() for name in parsed.models if name not in BM25_NAMES):
        run = model.parent if model.name == MODEL_FOLDER and is_run(model.parent) else model
        places += [model, run, *([run / MODEL_FOLDER] if is_run(run) else ())]
    output = home_path(parsed.output).resolve()
    if is_folder(output) and output in (place.resolve() for place in places):
        raise ConfigError(
            f"--output {parsed.output} is a folder that a set or a model is read from; choose another one"
        )


def _measures_pairs(parsed: argparse.Namespace) -> bool:
    """Return whether pairs are measured: rows whose label says something of the pair."""
    from vembed.data.sources import is_judged_set

    judged = [path for path in parsed.data if is_judged_set(path)]
    if parsed.label_kind not in {"pair", "grade"} or len(judged) == len(parsed.data):
        return False
    said = f"--label-kind {parsed.label_kind} measures pairs and searches nothing"
    if judged:
        raise ConfigError(f"{said}, but {judged[0]} is a set to search: evaluate it with a command of its own")
    _refuse_without_effect(parsed, said)
    return True


def _refuse_without_effect(parsed: argparse.Namespace, said: str, *, of_mteb: bool = False) -> None:
    """Refuse options that have no effect beside another; `said` says which, and what it does."""
    without_effect = {
        "--metric": parsed.metric != DEFAULT_METRIC,
        "--bm25": parsed.bm25,
        "--dims": parsed.dims is not None,
        "--quantize": parsed.quantize,
        "--rescore": parsed.rescore,
        "--index": parsed.index,
        "--both-directions": parsed.both_directions,
    }
    if of_mteb:
        without_effect |= {
            "--split": parsed.split is not None,
            "--label-kind": parsed.label_kind != "auto",
            "--image-root": parsed.image_root is not None,
            "--no-keep-vectors": parsed.no_keep_vectors,
        }
    if wrong := [option for option, is_given in without_effect.items() if is_given]:
        raise ConfigError(f"{said}: leave out {' and '.join(wrong)}")
    if named := [name for name in parsed.models if name in BM25_NAMES]:
        raise ConfigError(f"{said}, and {named[0]} is no model of vectors: leave it out")


def _evaluate_pairs(parsed: argparse.Namespace, command: str) -> int:
    """Measure how far the models' similarities follow the labels of pairs."""
    _refuse_unread_code(parsed)

    import torch

    from vembed.config.keys.data import DataKeys
    from vembed.data.splits import SourceOptions
    from vembed.distributed.runtime import start_runtime
    from vembed.evaluation.benchmark.names import model_labels, set_labels
    from vembed.evaluation.benchmark.run import load_model
    from vembed.evaluation.encode import ItemEncoder, encoding_budget
    from vembed.evaluation.graded import load_pairs, measure_pairs
    from vembed.evaluation.graded_report import PairsReport, write_pairs_report
    from vembed.training.guards import StopSignal

    quiet_libraries()
    root = None if parsed.image_root is None else str(parsed.image_root)
    keys = DataKeys(image_root=root, label_kind=parsed.label_kind)
    source = SourceOptions("test", parsed.split, keys, named=("--data", "--split"))
    sets = [load_pairs(path, source) for path in parsed.data]
    names = set_labels([each.name for each in sets], parsed.data)
    sets = [replace(each, name=name) for each, name in zip(sets, names, strict=True)]
    runtime = start_runtime(deterministic=False)
    dtype = torch.bfloat16 if parsed.bf16 else None
    similarities: list[dict[str, NDArray[np.float32]]] = [{} for _ in sets]
    with StopSignal(advice="run the same command again") as stop:
        for name, label in zip(parsed.models, model_labels(parsed.models), strict=True):
            encoder = load_model(_model_keys(parsed, name)).to(runtime.device)
            budget = encoding_budget(encoder, runtime.device, parsed.batch_size)
            encode = ItemEncoder(encoder, budget, runtime.device, dtype, poll=stop.poll)
            for pairs, found in zip(sets, similarities, strict=True):
                found[label] = pairs.similarities(encode)
            del encoder, encode  # two large models don't fit at once
            gc.collect()
        outcomes = [measure_pairs(*each, poll=stop.poll) for each in zip(sets, similarities, strict=True)]
    report = PairsReport(outcomes, _facts(runtime, "vembed", "torch"), command)
    write_pairs_report(parsed.output, report)
    lines = "\n".join(report.lines)
    print(f"{lines}\nwritten to {parsed.output / 'report.html'}, .md and .json")
    return ExitCode.OK


def _refuse_unread_code(parsed: argparse.Namespace) -> None:
    from vembed.api.loading import COMMIT

    if parsed.trust_remote_code and not COMMIT.fullmatch(parsed.model_revision or ""):
        raise ConfigError("--trust-remote-code needs --model-revision: the commit (40 hex digits) whose code you read")


def _facts(runtime: Runtime, *packages: str) -> list[tuple[str, str]]:
    """Return what a result was made on and with."""
    facts = [
        ("System", f"{platform.system()} {platform.machine()}"),
        ("Device of the encoders", runtime.machine.device_name),
    ]
    return [*facts, *((name, version(name)) for name in packages)]


def _evaluate(parsed: argparse.Namespace, *, command: str) -> int:
    k = _cut_off(parsed.metric)
    variants = _variants(parsed)
    _refuse_unread_code(parsed)

    from vembed.distributed.runtime import start_runtime
    from vembed.evaluation.benchmark.run import run_benchmark
    from vembed.evaluation.leaderboard.content import build_board
    from vembed.evaluation.leaderboard.terminal import render_terminal
    from vembed.evaluation.leaderboard.write import write_leaderboard
    from vembed.training.guards import StopSignal

    quiet_libraries()
    runtime = start_runtime(deterministic=False)
    with StopSignal(advice="what is done is kept, and the same command continues") as stop:
        options = _benchmark_options(parsed, device=runtime.device, variants=variants, k=k, poll=stop.poll)
        models = [_model_keys(parsed, name) for name in parsed.models if name not in BM25_NAMES]
        entries = []
        for entry in run_benchmark(models, parsed.data, parsed.output, options):
            _print_result(entry, parsed.metric)
            entries.append(entry)
    facts = _facts(runtime, "vembed", "faiss-cpu", "torch")
    board = build_board(entries, parsed.metric, facts=facts, command=command)
    write_leaderboard(parsed.output, board)
    print(f"\n{render_terminal(board)}\nwritten to {parsed.output / 'leaderboard.html'}, .md and .json")
    return ExitCode.OK


def _cut_off(metric: str) -> int:
    """Return the k of a metric's name."""
    from vembed.evaluation.run import MAX_DEPTH

    name, _, digits = metric.partition("@")
    if name not in METRICS:
        close = difflib.get_close_matches(name, METRICS.names(), n=1, cutoff=0.0)
        raise ConfigError(f"--metric: there is no {metric!r}; did you mean {close[0]}@{digits or 10}?")
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) <= MAX_DEPTH:
        raise ConfigError(f"--metric {metric!r}: write {name}@k with k between 1 and {MAX_DEPTH}, e.g. {name}@10")
    return int(digits)


def _variants(parsed: argparse.Namespace) -> tuple[Variant, ...]:
    from vembed.evaluation.benchmark.variants import plan_variants

    words = [word.strip() for word in ",".join(parsed.dims).split(",")] if parsed.dims is not None else []
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise ConfigError(f"--dims: {word!r} is no number of dimensions; write them like 64,128,256")
    return plan_variants(
        dims=[int(word) for word in words], precisions=parsed.quantize, indexes=parsed.index, rescored=parsed.rescore
    )


def _benchmark_options(
    parsed: argparse.Namespace,
    *,
    device: torch.device,
    variants: tuple[Variant, ...],
    k: int,
    poll: Callable[[], None],
) -> BenchmarkOptions:
    import torch

    from vembed.evaluation.benchmark.run import BenchmarkOptions
    from vembed.evaluation.metrics import DEFAULT_KS

    return BenchmarkOptions(
        device=device,
        batch_rows=parsed.batch_size,
        split=parsed.split,
        autocast_dtype=torch.bfloat16 if parsed.bf16 else None,
        with_bm25=parsed.bm25 or any(name in BM25_NAMES for name in parsed.models),
        poll=poll,
        ks=tuple(sorted({*DEFAULT_KS, k})),
        variants=variants,
        keep_vectors=not parsed.no_keep_vectors,
        image_root=parsed.image_root,
        label_kind=parsed.label_kind,
        both_directions=parsed.both_directions,
    )


def _model_keys(parsed: argparse.Namespace, name: str) -> ModelKeys:
    from vembed.models.names import locate

    if (note := locate(name).note) is not None:
        print(redact(note))
    names = ["model_revision", "trust_remote_code", "allow_pickle", "max_seq_length", "query_prompt", "document_prompt"]
    return checked_section(ModelKeys, {"model_name": name, **{key: getattr(parsed, key) for key in names}})


def _print_result(entry: Entry, metric: str) -> None:
    """Print a result on three lines and its notes."""
    from vembed.evaluation.significance import mean_interval

    result = entry.result
    low, high = mean_interval([result], metric)
    print(f"{entry.system} on {entry.task}: {result.num_queries} queries, {result.num_documents} documents")
    numbers = "  ".join(f"{name} {result.metrics[name]:.4f}" for name in dict.fromkeys((metric, *SHOWN_METRICS)))
    print(f"  {numbers}  (95% interval of {metric}: {low:.4f} to {high:.4f})")
    cut_offs = sorted(int(name.removeprefix("hit@")) for name in result.metrics if name.startswith("hit@"))
    print("  " + "  ".join(f"hit@{k} {result.metrics[f'hit@{k}']:.4f}" for k in cut_offs))
    for note in result.notes:
        print(f"  {note}")
