"""The report for programs: every number as it was given, and nothing that JSON can't hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.text import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.evaluation.report.comparison import Comparisons, SystemKey
    from vembed.evaluation.report.content import Content
    from vembed.evaluation.report.curves import Curve
    from vembed.evaluation.report.ranks import Ranks, ScoreSplit
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.sets import SetOutcome

SCHEMA_VERSION = 1
"""Raised when a key changes its meaning or goes away; a new key doesn't raise it."""

QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def render_json(content: Content) -> str:
    """Return report.json: numbers unrounded, NaN and infinity as null, keys in a fixed order."""
    report = content.report
    document: Mapping[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "title": report.title,
        "verdict": asdict(content.verdict),
        "sets": [_set(each) for each in report.sets],
        "task": {
            "name": report.task.name,
            "num_queries": report.final.num_queries,
            "num_documents": report.final.num_documents,
            "notes": list(content.notes),
        },
        "metrics": {
            **_systems(content.metrics),
            "differences": _differences(content.metrics),
        },
        "reverse": _reverse(content),
        "checkpoint": {"kept_step": report.kept_step, "last_step": report.last_step},
        "queries": {
            **content.change_counts,
            "examples": {group.kind: [example.query_id for example in group.examples] for group in content.groups},
        },
        "recall_at_k": _recalls(content.ranks),
        "scores": [_scores(split) for split in content.ranks.splits],
        "pictures": {"shown": content.thumbnails.num_pictures, "decoded": len(content.thumbnails.by_picture)},
        "dev_task": report.dev_task or report.task.name,
        "curves": {curve.spec.key: _curve(curve) for curve in content.curves},
        "evaluations": [{"step": step, "metrics": dict(metrics)} for step, metrics in content.evaluations],
        "num_step_rows": len(report.steps),
        "performance": report.performance,
        "time_of_a_step": _time(content),
        "findings": None if report.findings is None else [asdict(finding) for finding in report.findings],
        "data_facts": [list(fact) for fact in report.data_facts],
        "data_hashes": report.data_hashes,
        "plan": report.plan,
        "config": report.config,
        "environment": report.environment,
        "command": report.command,
    }
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def _set(outcome: SetOutcome) -> Mapping[str, object]:
    """Return what training did on one set."""
    return {
        "task": outcome.final.task,
        "role": outcome.role,
        "num_queries": outcome.final.num_queries,
        "num_documents": outcome.final.num_documents,
        "forgets": outcome.forgets,
        "verdict": asdict(outcome.verdict),
    }


def _systems(comparisons: Comparisons) -> dict[str, object]:
    """Return every system of one direction; one that wasn't measured is null."""
    found = comparisons.results
    keys: tuple[SystemKey, ...] = ("baseline", "last", "final", "bm25")
    return {key: _system(comparisons, key, found[key]) if key in found else None for key in keys}


def _system(comparisons: Comparisons, key: SystemKey, result: EvaluationResult) -> Mapping[str, object]:
    """Return the means of one system, with an interval for each that it has by query."""
    return {
        "system": result.system,
        "task": result.task,
        "num_queries": result.num_queries,
        "num_documents": result.num_documents,
        "seconds": result.seconds,
        "values": dict(result.metrics),
        "intervals": {row.name: list(row.intervals[key]) for row in comparisons.rows if key in row.intervals},
    }


def _differences(comparisons: Comparisons) -> Mapping[str, object]:
    """Return each metric's comparison of baseline and final."""
    return {row.name: asdict(row.verdict) for row in comparisons.rows if row.verdict}


def _reverse(content: Content) -> Mapping[str, object] | None:
    """Return the other direction, or null where it isn't measured."""
    reverse, comparisons = content.report.reverse, content.reverse
    if reverse is None or comparisons is None:
        return None
    return {
        "direction": comparisons.direction,
        "task": {
            "name": reverse.task.name,
            "num_queries": reverse.final.num_queries,
            "num_documents": reverse.final.num_documents,
        },
        "verdict": asdict(reverse.verdict),
        "metrics": {**_systems(comparisons), "differences": _differences(comparisons)},
        "recall_at_k": _recalls(content.reverse_ranks) if content.reverse_ranks else {},
        "rsum": {key: asdict(value) for key, value in content.sums.items()} or None,
    }


def _recalls(ranks: Ranks) -> Mapping[str, object]:
    """Return the recall of each system at k = 1 to K."""
    return {label: recall_K.tolist() for label, recall_K in ranks.recalls_K.items()}


def _scores(split: ScoreSplit) -> Mapping[str, object]:
    """Return how the scores of one system lie: counts and quartiles of each group."""
    groups = {"relevant": split.relevant, "others": split.others}
    return {
        "system": split.label,
        **{
            name: {"count": len(scores), "quartiles": np.quantile(scores, QUARTILES).tolist() if len(scores) else None}
            for name, scores in groups.items()
        },
    }


def _time(content: Content) -> Mapping[str, object] | None:
    """Return the mean seconds of each part of a step, or null where they weren't logged."""
    split = content.time
    if split is None:
        return None
    parts = {part.key or "other_seconds": part.seconds for part in split.parts}
    return {"num_steps": split.num_steps, "step_seconds": split.step_seconds, **parts}


def _curve(curve: Curve) -> Mapping[str, object]:
    """Return what the words under a curve say; metrics.jsonl has every point."""
    return {
        "first": float(curve.values_N[0]),
        "last": float(curve.values_N[-1]),
        "lowest": float(curve.values_N.min()),
        "highest": float(curve.values_N.max()),
        "num_points": curve.num_points,
        "num_non_finite": curve.num_non_finite,
    }
