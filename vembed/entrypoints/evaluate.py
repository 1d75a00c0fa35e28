"""`vembed evaluate MODEL --data SET --output DIR`: retrieval quality of models on sets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.entrypoints.command import quiet_libraries, run_command
from vembed.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.batch import Side
    from vembed.evaluation.result import EvaluationResult
    from vembed.models.huggingface import ModelOptions

DESCRIPTION = "Evaluate embedding models on retrieval sets: encode, search exactly with FAISS, score with trec_eval."
SHOWN_METRICS = ("ndcg@10", "recall@10", "recall@100", "mrr@10", "map@100")


def parse_arguments(arguments: Sequence[str], *, program: str) -> argparse.Namespace:
    """Parse the command line of an evaluation.

    Args:
        arguments: Words behind the program's name.
        program: How the program was called, for its help.
    """
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="hub id, local folder or output of a run (model/)")
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="SET", help="BEIR folder, file of rows, hub id or builtin:SET"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="gets MODEL/SET/metrics.json, run.trec"
    )
    parser.add_argument("--split", help="split of the sets; default: their test split")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="most texts of one encoder call")
    parser.add_argument("--bf16", action="store_true", help="encode in bfloat16")
    parser.add_argument("--bm25", action="store_true", help="evaluate BM25 too")
    parser.add_argument("--query-prompt", help="text before each query; default: the model's own")
    parser.add_argument("--document-prompt", help="text before each document; default: the model's own")
    parser.add_argument("--max-seq-length", type=int, metavar="N", help="longest input in tokens; default: the model's")
    parser.add_argument("--model-revision", metavar="COMMIT", help="branch, tag or commit of hub models")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a model brings; needs a commit")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled weights, with weights_only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: Words behind the program's name.
        program: How the program was called, for its help.
    """
    parsed = parse_arguments(arguments, program=program)
    return run_command(lambda: _run(parsed))


def _run(parsed: argparse.Namespace) -> int:
    if parsed.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {parsed.batch_size}")
    if parsed.trust_remote_code and parsed.model_revision is None:
        raise ConfigError("--trust-remote-code needs --model-revision: the commit whose code you read")
    import torch

    from vembed.distributed.runtime import start_runtime
    from vembed.evaluation.benchmark import BenchmarkOptions, run_benchmark
    from vembed.training.guards import StopSignal

    quiet_libraries()
    runtime = start_runtime(deterministic=False)
    with StopSignal() as stop:
        options = BenchmarkOptions(
            device=runtime.device,
            batch_rows=parsed.batch_size,
            split=parsed.split,
            autocast_dtype=torch.bfloat16 if parsed.bf16 else None,
            with_bm25=parsed.bm25,
            poll=stop.poll,
        )
        models = [_model_options(parsed, name) for name in parsed.models]
        for result in run_benchmark(models, parsed.data, parsed.output, options):
            _print_result(result)
    print(f"written to {parsed.output}")
    return ExitCode.OK


def _model_options(parsed: argparse.Namespace, name: str) -> ModelOptions:
    from vembed.models.huggingface import ModelOptions

    prompts: dict[Side, str] = {}
    if parsed.query_prompt is not None:
        prompts["query"] = parsed.query_prompt
    if parsed.document_prompt is not None:
        prompts["document"] = parsed.document_prompt
    return ModelOptions(
        name=name,
        revision=parsed.model_revision,
        trust_remote_code=parsed.trust_remote_code,
        allow_pickle=parsed.allow_pickle,
        max_length=parsed.max_seq_length,
        prompts=prompts,
    )


def _print_result(result: EvaluationResult) -> None:
    """Print a result on two lines and its notes."""
    from vembed.evaluation.significance import bootstrap_interval

    low, high = bootstrap_interval(result, "ndcg@10")
    print(f"{result.system} on {result.task}: {result.num_queries} queries, {result.num_documents} documents")
    numbers = "  ".join(f"{metric} {result.metrics[metric]:.4f}" for metric in SHOWN_METRICS)
    print(f"  {numbers}  (95% interval of ndcg@10: {low:.4f} to {high:.4f})")
    for note in result.notes:
        print(f"  {note}")
