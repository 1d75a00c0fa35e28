"""What benchmarks share that train with several seeds and compare on the same queries."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vembed.evaluation.results import EvaluationResult


ONLY_TRAINS: dict[str, Any] = {
    "resume": "never",
    "overwrite_output_dir": True,
    "save_strategy": "no",
    "eval_strategy": "no",
    "bm25": False,
    "weight_decay": 0.0,
    "warmup_ratio": 0.1,
}
"""Keys of a run that leaves a model and nothing to continue from."""


def mean_over_seeds(results: Sequence[EvaluationResult], metric: str) -> EvaluationResult:
    """Return one result with each query's mean over the seeds."""
    values = {query: fmean(each.per_query[metric][query] for each in results) for query in results[0].per_query[metric]}
    return replace(results[0], metrics={metric: fmean(values.values())}, per_query={metric: values})


def smaller_set(data: Path, split: str, documents: int, folder: Path) -> Path:
    """Write a set with fewer documents, evenly spaced; all judged ones stay."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data / "queries.jsonl", folder / "queries.jsonl")
    judgements = folder / "qrels" / f"{split}.tsv"
    shutil.copyfile(data / "qrels" / f"{split}.tsv", judgements)
    judged = {line.split("\t")[1] for line in judgements.read_text("utf-8").splitlines()[1:]}
    lines = (data / "corpus.jsonl").read_text("utf-8").splitlines()
    kept = {place for place, line in enumerate(lines) if json.loads(line)["_id"] in judged}
    others = [place for place in range(len(lines)) if place not in kept]
    kept |= set(others[:: max(1, -(-len(others) // (documents - len(kept))))])
    (folder / "corpus.jsonl").write_text("\n".join(lines[place] for place in sorted(kept)) + "\n", "utf-8")
    return folder
