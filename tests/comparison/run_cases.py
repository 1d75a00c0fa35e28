"""Output folders of runs, written by hand: what the tests of comparisons read; no tests here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from vembed.evaluation.results import EvaluationResult, write_evaluation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

METRIC = "ndcg@10"
CONTENT = "a" * 64
ENVIRONMENT = {"vembed": "0.1.0", "torch": "2.15.0", "device": "the CPU"}


def values_of(seed: int, *, shift: float = 0.0, count: int = 40) -> list[float]:
    """Return a value for each query, between 0 and 1."""
    drawn = np.random.default_rng(seed).uniform(0.2, 0.7, count)
    return np.clip(drawn + shift, 0, 1).round(3).tolist()


def result(values: Sequence[float], *, task: str = "toy/test", num_documents: int = 50, metric: str = METRIC) -> Any:
    """Return a result whose first document is right where the value is above one half."""
    ids = [f"q{place:03}" for place in range(len(values))]
    return EvaluationResult(
        task=task,
        system="model",
        metrics={metric: float(np.mean(values))},
        per_query={metric: dict(zip(ids, map(float, values), strict=True))},
        run={
            query: (("right" if value > 0.5 else "wrong", 0.9), ("other", 0.1))
            for query, value in zip(ids, values, strict=True)
        },
        num_queries=len(values),
        num_documents=num_documents,
    )


def write_run(
    folder: Path,
    values: Sequence[float] | None,
    *,
    untrained: Sequence[float] | None = None,
    config: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    hashes: Mapping[str, str] | None = None,
    report: Mapping[str, Any] | None = None,
    steps: int = 30,
    task: str = "toy/test",
    num_documents: int = 50,
    metric: str = METRIC,
    further: Mapping[str, Sequence[float]] | None = None,
) -> Path:
    """Write what a run leaves; without values one that hasn't finished, and with an empty report none."""
    folder.mkdir(parents=True)
    settings = {
        "metric_for_best_model": METRIC,
        "test_data_path": "gone.jsonl",
        "learning_rate": 2e-5,
        "batch_size": "auto",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | dict(config or {})), "utf-8")
    candidates = [{"recommended": True, "bytes_per_device": {"total": 4_000_000}}]
    decided = {"strategy": "single", "world_size": 1, "steps": 30, "batch_size": 16, "candidates": candidates}
    (folder / "plan.json").write_text(json.dumps(decided | dict(plan or {})), "utf-8")
    rows = [
        {
            "step": step,
            "loss": 3.0 / step,
            "learning_rate": 1e-5 * step,
            "step_seconds": 0.5,
            "samples_per_second": 32.0,
            "tokens_per_second": 640.0,
            "peak_memory_bytes": 5e6,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    start = result(untrained or values_of(0), task="toy/dev")
    write_evaluation(folder / "evaluation" / "step-0", start)
    write_evaluation(folder / "evaluation" / "step-30", result(values or values_of(1), task="toy/dev"))
    if values is None:
        return folder
    write_evaluation(
        folder / "evaluation" / "final", result(values, task=task, num_documents=num_documents, metric=metric)
    )
    before = result(untrained or values_of(0, count=len(values)), task=task, num_documents=num_documents, metric=metric)
    write_evaluation(folder / "evaluation" / "baseline", before)
    for key, more in (further or {}).items():
        for place in ("baseline", "final"):
            write_evaluation(folder / "evaluation" / key / place, result(more, task=f"toy/{key}"))
    written = {
        "schema_version": 1,
        "data_facts": [["training records", "84"], ["note", "held out"]],
        "data_hashes": {"training": "b" * 64, "test": CONTENT} if hashes is None else hashes,
        "environment": ENVIRONMENT,
    } | dict(report or {})
    if report != {}:
        (folder / "report").mkdir()
        (folder / "report" / "report.json").write_text(json.dumps(written), "utf-8")
        (folder / "report" / "report.html").write_text("<html></html>", "utf-8")
    return folder
