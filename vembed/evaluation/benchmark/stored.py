"""Results on disk with what they were made of: read back while that is still true."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vembed.errors import DataError, MachineError
from vembed.evaluation.results import RECORD_FILE, finish_evaluation, read_evaluation, write_evaluation
from vembed.registry import METRICS, module_code
from vembed.vectors.provenance import changed_parts, digest, items_digest

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.data.judged import RetrievalData
    from vembed.evaluation.results import EvaluationResult
    from vembed.vectors.provenance import Key

VECTORS_FOLDER = "vectors"
VARIANTS_FOLDER = "variants"

RANKING_RULES = 2
"""Counts the changes of evaluation/run.py that rank other documents; results of older rules are done again."""

FORMAT = 2
"""Raised when the record or the way of scoring changes its meaning; other formats are done again."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Memory and time of a search."""

    dimension: int  # numbers of each vector
    bytes_per_document: float  # memory of the index for each document
    milliseconds_per_query: float  # median wall time of the search of one query, on one thread; encoding is not in it
    milliseconds_p95: float  # 95 of 100 queries took no longer
    milliseconds_p99: float
    num_timed: int  # queries that these are of
    rescoring_bytes: float = 0.0  # of each document that rescoring reads, which may lie on disk


def task_key(task: RetrievalData, *, with_texts: bool) -> Key:
    """Return what a task is beside its texts: ids, judgements, notes.

    Args:
        with_texts: Whether its texts count too; not where vectors stand for them.
    """
    # Judgements are a set: the order of lines in a file changes no metric, and no key.
    qrels = {query: dict(sorted(grades.items())) for query, grades in task.qrels.items()}
    key: Key = {
        "ids": items_digest([*task.queries, "", *task.documents]),
        "judgements": digest(qrels),
        "task": digest([task.name, list(task.notes)]),
        "rules": RANKING_RULES,
    }
    # Left out where a task has none, so that results of before these limits were known stay true.
    if task.excluded or task.candidates or task.cutoffs:
        limits = [{query: sorted(ids) for query, ids in part.items()} for part in (task.excluded, task.candidates)]
        key["ranking"] = digest([*limits, list(task.cutoffs)])
    if with_texts:
        key["texts"] = items_digest([*task.queries.values(), *task.documents.values()])
    return key


def plugin_metrics_key() -> Key:
    """Return what the metrics of plugins are: each name with its module's code; empty where there is none."""
    plugins = METRICS.plugins()
    return {"metrics": digest({name: module_code(plugins[name]) for name in plugins})} if plugins else {}


def write_stored(folder: Path, result: EvaluationResult, cost: Cost | None, key: Key) -> None:
    """Write a result, its cost and what it was made of; vectors and variants in the folder stay.

    Args:
        cost: None of word matching, which has none.

    Raises:
        MachineError: When the folder can't be written.
    """
    # The record goes into the folder with the result, in one rename: neither is ever there without the other.
    record = {"format": FORMAT, "key": key, "cost": asdict(cost) if cost else None}
    write_evaluation(
        folder,
        result,
        extra={RECORD_FILE: json.dumps(record, indent=1) + "\n"},
        kept=(VECTORS_FOLDER, VARIANTS_FOLDER),
    )


def read_stored(folder: Path, key: Key, *, system: str) -> tuple[tuple[EvaluationResult, Cost | None] | None, str]:
    """Read a result if it is whole and made of what the key says; finish the writing of it that a kill interrupted.

    Returns:
        The result and its cost, or None; and why not, empty where there never was one.

    Raises:
        MachineError: The disk refused to finish the writing.
    """
    # A kill between two renames leaves the result beside its place; from here on it is where it belongs.
    try:
        finish_evaluation(folder)
    except OSError as error:
        raise MachineError(f"{folder} can't be written: {error}; choose another output folder") from error
    path = folder / RECORD_FILE
    if not path.is_file():
        return None, ""
    try:
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if record["format"] != FORMAT:
            return None, "another version of the file format"
        changed = changed_parts(record["key"], key)
        if changed:
            return None, f"changed: {', '.join(changed)}"
        cost = Cost(**record["cost"]) if record["cost"] else None
        return (replace(read_evaluation(folder), system=system), cost), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError) as error:
        return None, f"it can't be read: {error}"
