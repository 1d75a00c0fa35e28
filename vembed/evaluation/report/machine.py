"""The report for programs: every number as it was given, and nothing that JSON can't hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from vembed.evaluation.report.content import notes
from vembed.evaluation.report.text import plain
from vembed.evaluation.significance import bootstrap_interval

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.evaluation.report.content import Content
    from vembed.evaluation.result import EvaluationResult

SCHEMA_VERSION = 1
"""Raised when a key changes its meaning or goes away; a new key doesn't raise it."""


def render_json(content: Content) -> str:
    """Return report.json: numbers unrounded, NaN and infinity as null, keys in a fixed order."""
    report = content.report
    document: Mapping[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "title": report.title,
        "verdict": asdict(report.verdict),
        "task": {
            "name": report.task.name,
            "num_queries": report.final.num_queries,
            "num_documents": report.final.num_documents,
            "notes": list(notes(report)),
        },
        "metrics": {
            "baseline": _system(content, report.baseline),
            "final": _system(content, report.final),
            "bm25": _system(content, report.bm25) if report.bm25 else None,
            "differences": {row.name: asdict(row.verdict) for row in content.metrics if row.verdict},
        },
        "queries": {
            "improved": content.changes.num_improved,
            "unchanged": content.changes.num_unchanged,
            "worse": content.changes.num_worse,
            "examples": {group.kind: [example.query_id for example in group.examples] for group in content.groups},
        },
        "recall_at_k": {curve.label: curve.recall_K.tolist() for curve in content.ranks.curves},
        "pictures": {"shown": content.thumbnails.num_pictures, "decoded": len(content.thumbnails.by_picture)},
        "dev_task": report.dev_task or report.task.name,
        "evaluations": [{"step": step, "metrics": dict(metrics)} for step, metrics in content.evaluations],
        "num_step_rows": len(report.steps),
        "data_facts": [list(fact) for fact in report.data_facts],
        "plan": report.plan,
        "config": report.config,
        "environment": report.environment,
        "command": report.command,
    }
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def _system(content: Content, result: EvaluationResult) -> Mapping[str, object]:
    """Return the means of one system, with an interval for each metric of the headline that it has by query."""
    names = [row.name for row in content.metrics if row.is_headline and result.per_query.get(row.name)]
    return {
        "system": result.system,
        "task": result.task,
        "num_queries": result.num_queries,
        "num_documents": result.num_documents,
        "seconds": result.seconds,
        "values": dict(result.metrics),
        "intervals": {name: list(bootstrap_interval(result, name)) for name in names},
    }
