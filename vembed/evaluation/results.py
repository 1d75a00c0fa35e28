"""The result of an evaluation: the one type between metrics, verdict and report, and its three files on disk.

    metrics.json     task, system, metrics, counts, notes, seconds
    per_query.json   metric -> query id -> value
    run.trec         TREC format, a line for each hit: query id, Q0, document id, rank, score, system

Given run.trec and the judgements, trec_eval finds the numbers of metrics.json: scores have as many digits as they need
to be read back exactly, and lines stand in trec_eval's own order.
A TREC file separates its columns by white space. Where an id or the system's name holds white space, a control
character, or a "%" that two hexadecimal digits follow, that character is percent-encoded as in a URL ("doc 7" becomes
"doc%207"); all other ids stand as they are. The JSON files hold every id as it is. Judgements for trec_eval then need
the same encoding, under which exact ties may fall in another order; `read_evaluation` decodes and keeps the order.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from vembed.errors import DataError, MachineError
from vembed.files import clean_beside, new_folder
from vembed.json_text import fit, parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

METRICS_FILE = "metrics.json"
PER_QUERY_FILE = "per_query.json"
RUN_FILE = "run.trec"
RECORD_FILE = "benchmark.json"
"""File of `vembed evaluate` beside the three: what the evaluation was made of."""

_OWN_FILES = frozenset((METRICS_FILE, PER_QUERY_FILE, RUN_FILE, RECORD_FILE))

# White space and control characters would end a column; a "%" that looks like an escape would be decoded as one.
_UNSAFE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]|%(?=[0-9A-Fa-f]{2})")

_SHAPES: Final[dict[str, Any]] = {
    "num_hits": int,
    "queries_without_hits": list[str],
    "task": str,
    "system": str,
    "metrics": dict[str, float],
    "num_queries": int,
    "num_documents": int,
    "notes": list[str],
    "seconds": float,
}
"""Key of metrics.json -> type of its value."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The retrieval quality of one model (or BM25) on one task."""

    task: str  # name of the task, for people
    system: str  # a model's name, or "BM25"
    metrics: Mapping[str, float]  # mean over the judged queries, e.g. {"ndcg@10": 0.645, "recall@10": 0.783}
    per_query: Mapping[str, Mapping[str, float]] = field(repr=False)  # metric -> query id -> value, the same queries
    # query id -> (document id, score), best first; ties in the order that trec_eval gives them
    run: Mapping[str, Sequence[tuple[str, float]]] = field(repr=False)
    num_queries: int  # judged queries that the means are over
    num_documents: int  # documents searched
    notes: Sequence[str] = ()  # left out or clipped, one sentence each ("3 queries have no relevant document ...")
    seconds: float = 0.0  # wall time of encoding and searching

    def without(self, queries: Collection[str]) -> EvaluationResult:
        """Return the result on the other queries; the means of graded pairs are then true to first order."""
        per_query = {
            metric: {query: value for query, value in values.items() if query not in queries}
            for metric, values in self.per_query.items()
        }
        left = next(iter(per_query.values()), {})
        return replace(
            self,
            metrics={metric: fmean(values.values()) for metric, values in per_query.items() if values},
            per_query=per_query,
            run={query: hits for query, hits in self.run.items() if query in left},
            num_queries=len(left),
        )

    def deciding(self, metric: str) -> str:
        """Return the metric that decides here: the given one, or the first of a set that is measured otherwise."""
        return deciding_metric(self.metrics, metric)


def deciding_metric(metrics: Mapping[str, float], wanted: str) -> str:
    """Return the metric that decides among those of a set: the wanted one, or the first of a set without it."""
    return wanted if wanted in metrics else next(iter(metrics))


def approximate_note(factory: str) -> str:
    """Return the note of a search that may miss documents."""
    return f'Searched with the FAISS index "{factory}", which may miss documents.'


def refuse_other_files(folder: Path, *, kept: Collection[str] = ()) -> None:
    """Refuse a folder that an evaluation would replace and that is none: a slip must not cost a user's files.

    Args:
        kept: Entries that may stand in the folder before there is an evaluation.

    Raises:
        MachineError: The folder holds other files, or can't be read.
    """
    try:
        holds_others = folder.exists() and any(path.name not in kept for path in folder.iterdir())
        reason = f"it holds other files and no {METRICS_FILE}"
    except OSError as error:
        holds_others, reason = True, str(error)
    if holds_others and not (folder / METRICS_FILE).is_file():
        raise MachineError(f"{folder}: the evaluation can't be written: {reason}. Choose another output folder.")


def write_evaluation(
    folder: Path, result: EvaluationResult, *, extra: Mapping[str, str] | None = None, kept: Collection[str] = ()
) -> None:
    """Write the result into a folder that appears complete or not at all.

    An earlier evaluation there is replaced; other files beside it stay.

    Args:
        extra: Further files by name, written with the others.
        kept: Entries that may stand in the folder before there is an evaluation.

    Raises:
        MachineError: The folder holds something that isn't an evaluation, or can't be written.
        ValueError: An id is empty, or a metric is NaN or infinite.
    """
    # The last two keys let a reader notice a run.trec that is cut short, and know the queries that it can't name.
    summary = {
        "task": result.task,
        "system": result.system,
        "metrics": dict(result.metrics),
        "num_queries": result.num_queries,
        "num_documents": result.num_documents,
        "notes": list(result.notes),
        "seconds": result.seconds,
        "num_hits": sum(len(hits) for hits in result.run.values()),
        "queries_without_hits": [query_id for query_id, hits in result.run.items() if not hits],
    }
    # repr has as many digits as float() needs to give the same bits back; ranks count from 1.
    system = _encode_id(result.system)
    run_lines = (
        f"{_encode_id(query_id)} Q0 {_encode_id(document_id)} {rank} {float(score)!r} {system}\n"
        for query_id, hits in result.run.items()
        for rank, (document_id, score) in enumerate(hits, start=1)
    )
    files = {
        METRICS_FILE: _json_text(summary),
        PER_QUERY_FILE: _json_text(result.per_query),
        RUN_FILE: "".join(run_lines),
        **(extra or {}),
    }
    refuse_other_files(folder, kept=kept)
    try:
        with new_folder(folder, keeps=lambda name: name not in {*_OWN_FILES, *files}) as temporary:
            for name, text in files.items():
                (temporary / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"{folder}: the evaluation can't be written: {error}. Free some space, or choose another output folder."
        ) from error


def finish_evaluation(folder: Path) -> None:
    """Do what `write_evaluation` had left to do when it was killed: its result, and what stays beside it, are whole.

    Raises:
        OSError: The disk refused.
    """
    clean_beside(folder, keeps=lambda name: name not in _OWN_FILES)


def read_evaluation(folder: Path) -> EvaluationResult:
    """Read what `write_evaluation` wrote.

    Raises:
        DataError: A file is missing or broken.
    """
    summary = _read_json(folder / METRICS_FILE)
    per_query = _read_json(folder / PER_QUERY_FILE)
    try:
        for name, kind in _SHAPES.items():
            fit(kind, summary[name], where=name)
        fit(dict[str, dict[str, float]], per_query, where=PER_QUERY_FILE)
        # The order of queries is that of run.trec; those without a hit have no line there and follow.
        run = _read_run(folder / RUN_FILE, num_hits=summary["num_hits"])
        run |= dict.fromkeys(summary["queries_without_hits"], ())
        return EvaluationResult(
            task=summary["task"],
            system=summary["system"],
            metrics=summary["metrics"],
            per_query=per_query,
            run=run,
            num_queries=summary["num_queries"],
            num_documents=summary["num_documents"],
            notes=tuple(summary["notes"]),
            seconds=summary["seconds"],
        )
    except KeyError as error:
        raise DataError(f"{folder / METRICS_FILE}: the key {error} is missing; evaluate again to write it.") from error
    except ValueError as error:
        raise DataError(f"{folder / METRICS_FILE}: {error}; evaluate again to write it.") from error


def _json_text(value: object) -> str:
    """Return JSON that any reader takes: no NaN, real characters, one key on a line."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _encode_id(name: str) -> str:
    """Return the name as one column of a TREC file."""
    if not name:
        raise ValueError("an empty id or system name can't be written to a TREC file; give it a name.")
    return _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match.group().encode()), name)


def _read_text(path: Path) -> str:
    """Return the text of one of the three files."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: can't be read: {error}. A folder with an evaluation holds "
            f"{METRICS_FILE}, {PER_QUERY_FILE} and {RUN_FILE}."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        value = parse_json(_read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}; evaluate again to write it.") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}; evaluate again to write it.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__} instead of an object; evaluate again to write it.")
    return value


def _read_run(path: Path, *, num_hits: int) -> dict[str, tuple[tuple[str, float], ...]]:
    """Return the hits of each query in the order of the file, which must have all its lines, the last one whole."""
    run: dict[str, list[tuple[str, float]]] = {}
    *lines, rest = _read_text(path).split("\n")
    if rest or len(lines) != num_hits:
        raise DataError(
            f"{path}:{len(lines) + 1}: the file ends here, but {METRICS_FILE} counts {num_hits} lines; "
            "evaluate again to write it."
        )
    for number, line in enumerate(lines, start=1):
        try:
            query_id, _, document_id, _, score, _ = line.split()
            run.setdefault(unquote(query_id), []).append((unquote(document_id), float(score)))
        except ValueError as error:
            raise DataError(
                f"{path}:{number}: expected 6 columns (query Q0 document rank score system), found {line[:80]!r}."
            ) from error
    return {query_id: tuple(hits) for query_id, hits in run.items()}
