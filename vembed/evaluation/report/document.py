"""report.json: the report of a run for programs.

Numbers are unrounded. The keys that are named here are in every report, null where nothing was measured; tables by
metric, curve or kind of example hold what there is.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.judge import headline
from vembed.evaluation.report.changes import change_counts
from vembed.evaluation.report.comparison import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.evaluation.judge import SetOutcome
    from vembed.evaluation.report.comparison import Comparisons
    from vembed.evaluation.report.curves import Curve
    from vembed.evaluation.report.inputs import Reverse, RunReport
    from vembed.evaluation.report.run_report import ReportNumbers
    from vembed.evaluation.report.speed import TimeSplit
    from vembed.evaluation.results import EvaluationResult

SCHEMA_VERSION = 1
"""Raised when a key changes its meaning or goes away, not when a key is added."""

QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Quantiles of the scores: least, three quartiles, most."""


def run_document(
    report: RunReport, numbers: ReportNumbers, *, num_shown_pictures: int, num_decoded_pictures: int
) -> dict[str, object]:
    """Return the report as JSON data.

    Args:
        num_shown_pictures: Distinct pictures in examples, tables and plugins' sections, but not on the map of vectors.
        num_decoded_pictures: Those of them that could be decoded.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "title": report.title,
        "verdict": asdict(report.final_verdict),
        "headline": headline(report.final_verdict, report.sets),
        "caveats": list(report.caveats),
        "sets": [_set_json(outcome) for outcome in report.sets],
        "task": {**_task_size(report.task.name, report.final), "notes": report.evaluation_notes},
        "metrics": _metrics_json(numbers.forward),
        "reverse": None if report.reverse is None else _reverse_json(report.reverse, numbers),
        "checkpoint": {"kept_step": report.kept_step, "last_step": report.last_step},
        "queries": {
            **change_counts(numbers.gains),
            "examples": {group.kind: [example.query_id for example in group.examples] for group in numbers.groups},
        },
        "recall_at_k": _array_lists(numbers.recalls),
        "scores": [
            {"system": split.label, "relevant": _quartiles(split.relevant), "others": _quartiles(split.others)}
            for split in numbers.splits
        ],
        "pictures": {"shown": num_shown_pictures, "decoded": num_decoded_pictures},
        "dev_task": report.dev_task or report.task.name,
        "curves": {curve.spec.key: _curve_json(curve) for curve in numbers.curves.steps},
        "evaluations": [{"step": step, "metrics": dict(metrics)} for step, metrics in numbers.curves.evaluations],
        "num_step_rows": len(report.steps),
        "performance": report.performance,
        "time_of_a_step": None if numbers.time_split is None else _time_of_a_step(numbers.time_split),
        "findings": None if report.findings is None else [asdict(finding) for finding in report.findings],
        "data_facts": [list(fact) for fact in report.data_facts],
        "data_hashes": report.data_hashes,
        "plan": report.plan,
        "config": report.config,
        "environment": report.environment,
        "command": report.command,
    }


def _set_json(outcome: SetOutcome) -> dict[str, object]:
    """Return the outcome of one test or guard set."""
    # The verdict on the queries that weren't trained on: None where none was trained on, or no other is left.
    unseen = outcome.unseen if outcome.trained | outcome.near else None
    return {
        "task": outcome.final.task,
        "role": outcome.role,
        "num_queries": outcome.final.num_queries,
        "num_documents": outcome.final.num_documents,
        "forgets": outcome.forgets,
        "verdict": asdict(outcome.verdict),
        "trained_queries": len(outcome.trained),
        "near_queries": len(outcome.near),
        "unseen": None if unseen is None else asdict(unseen.verdict),
    }


def _task_size(name: str, result: EvaluationResult) -> dict[str, object]:
    return {"name": name, "num_queries": result.num_queries, "num_documents": result.num_documents}


def _metrics_json(comparisons: Comparisons) -> dict[str, object]:
    """Return the numbers of every system, null where it wasn't measured, and the differences of the two models."""
    systems: dict[str, object] = dict.fromkeys(SYSTEMS)  # a program finds every key in each report
    for key, result in comparisons.results.items():
        systems[key] = {
            "system": result.system,
            "task": result.task,
            "num_queries": result.num_queries,
            "num_documents": result.num_documents,
            "seconds": result.seconds,
            "values": dict(result.metrics),
            "intervals": {row.name: list(row.intervals[key]) for row in comparisons.rows if key in row.intervals},
        }
    return {**systems, "differences": {row.name: asdict(row.verdict) for row in comparisons.rows if row.verdict}}


def _reverse_json(reverse: Reverse, numbers: ReportNumbers) -> dict[str, object]:
    """Return the numbers of the other direction, and the sum of both directions' recalls."""
    assert numbers.reverse is not None  # it is computed of every report that has a reverse
    return {
        "direction": numbers.reverse.direction,
        "task": _task_size(reverse.task.name, reverse.final),
        "verdict": asdict(reverse.verdict),
        "metrics": _metrics_json(numbers.reverse),
        "recall_at_k": _array_lists(numbers.reverse_recalls),
        "rsum": {key: asdict(total) for key, total in numbers.recall_sums.items()} or None,
    }


def _array_lists(arrays: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in arrays.items()}


def _quartiles(scores: np.ndarray) -> dict[str, object]:
    return {"count": len(scores), "quartiles": np.quantile(scores, QUARTILES).tolist() if len(scores) else None}


def _curve_json(curve: Curve) -> dict[str, object]:
    """Return what the words under a curve say; every point is in metrics.jsonl."""
    return {
        "first": float(curve.values_N[0]),
        "last": float(curve.values_N[-1]),
        "lowest": float(curve.values_N.min()),
        "highest": float(curve.values_N.max()),
        "num_points": curve.num_points,
        "num_non_finite": curve.num_non_finite,
    }


def _time_of_a_step(split: TimeSplit) -> dict[str, object]:
    return {
        "num_steps": split.num_steps,
        "step_seconds": split.step_seconds,
        **{part.key or "other_seconds": part.seconds for part in split.parts},
    }
