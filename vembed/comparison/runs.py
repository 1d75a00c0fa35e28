"""What a run's output folder says, whatever state the run is in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from vembed.errors import ConfigError, DataError
from vembed.evaluation.report.run_report import SCHEMA_VERSION
from vembed.evaluation.store import METRICS_FILE, read_evaluation
from vembed.files import home_path, is_file, is_folder
from vembed.json_text import fit, read_object
from vembed.models.names import MODEL_FOLDER, is_run, nearest_folder
from vembed.redact import redact
from vembed.training.trackers.jsonl import read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.sets import SetRole

SEEDS_FILE = "seeds.json"
"""Marks a folder that holds a run for each of several seeds."""

DEFAULT_METRIC = "ndcg@10"

_SHAPES: Final[dict[str, Any]] = {
    "steps": int,
    "world_size": int,
    "global_batch_size": int,
    "candidates": list[dict[str, Any]],
    "data_facts": list[list[str]],
    "data_hashes": dict[str, str],
    "environment": dict[str, str],
    "metrics": dict[str, float | dict[str, Any] | None],
}
"""Key of plan.json, report.json or metrics.json -> what it must hold to be read."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """A run on one of its sets."""

    key: str  # "dev" or "test" for the set of the verdict, else a folder below evaluation/, such as "guard-1"
    role: SetRole
    content: str  # hash of the set; empty where the run didn't record it
    final: EvaluationResult  # the chosen model
    untrained: EvaluationResult | None  # the model before training; None where its result is gone

    @property
    def name(self) -> str:
        """What the set is called."""
        return self.final.task


@dataclass(frozen=True, slots=True)
class Run:
    """An output folder, read."""

    name: str  # the end of its path that no other run has
    folder: Path
    config: Mapping[str, Any]  # as given; `auto` stays
    plan: Mapping[str, Any]  # what `auto` became
    report: Mapping[str, Any]  # report.json; empty where there is none
    rows: Sequence[Mapping[str, float]]  # of metrics.jsonl
    evaluations: Sequence[tuple[int, Mapping[str, float]]]  # (step, metrics on the dev set)
    sets: tuple[SetResult, ...]  # that of the verdict first; empty where the run hasn't finished
    notes: tuple[str, ...]  # what is missing or odd, one sentence each

    @property
    def is_finished(self) -> bool:
        """Whether there is a result of the chosen model."""
        return bool(self.sets)

    @property
    def metric(self) -> str:
        """The metric that the run is judged by."""
        return str(self.config.get("metric_for_best_model") or DEFAULT_METRIC)


def read_runs(paths: Sequence[Path | str], first: Path | str | None = None) -> tuple[list[Run], list[str]]:
    """Read each run once; a pattern with `*` stands for the runs that it matches.

    Args:
        first: A run that comes first, wherever it stands among the others.

    Returns:
        The runs in the order in which they were named, and a note for each that was named twice or passed over.

    Raises:
        ConfigError: A path leads to no run.
    """
    begin = [] if first is None else _folders(first)[0][:1]
    folders: dict[Path, Path] = {}
    notes = []
    for path in paths:
        place = home_path(path)
        if is_file(place) and any(is_run(each) for each in place.parent.iterdir() if each.is_dir()):
            notes.append(f"{redact(str(path))} is passed over: it isn't a run.")  # a shell's DIR/* names logs too
            continue
        found, passed_over = _folders(path)
        notes += passed_over
        for folder in found:
            if folder.resolve() in folders:
                notes.append(f"{redact(str(folder))} is named twice and compared once.")
            folders.setdefault(folder.resolve(), folder)
    folders = {**{folder.resolve(): folder for folder in begin}, **folders}
    if not folders:
        raise ConfigError("none of the files named is a run; name output folders of runs")
    names = _names(list(folders))
    return [_read_run(folder, name) for folder, name in zip(folders.values(), names, strict=True)], notes


def _folders(path: Path | str) -> tuple[list[Path], list[str]]:
    """Return the run folders that a path or a pattern names, and notes on what isn't one.

    Raises:
        ConfigError: It names no run.
    """
    place = home_path(path)
    if "*" in str(path) and not place.exists():
        start = Path(place.anchor)
        matches = sorted(start.glob(str(place.relative_to(start))))
        runs = [match for match in matches if is_folder(match) and is_run(match) and not is_file(match / SEEDS_FILE)]
        if not runs:
            raise ConfigError(f"{redact(str(path))} matches no output folder of a run")
        others = [match for match in matches if match not in runs]
        return runs, [f"{redact(str(other))} is passed over: it isn't a run." for other in others]
    if not is_folder(place):
        raise ConfigError(f"there is no folder {redact(str(path))}{nearest_folder(place)}; name a run's output folder")
    for folder in (place, place.parent):
        if is_run(folder) and (folder == place or place.name in ("report", MODEL_FOLDER, "evaluation")):
            if is_file(folder / SEEDS_FILE):
                each = redact(str(folder / "seed-*"))
                raise ConfigError(f"{redact(str(path))} is of several seeds; name their runs: vembed compare {each}")
            return [folder], []
    said = f"{redact(str(path))} isn't the output folder of a run: it has no plan.json and no train.log"
    if any(is_run(child) for child in place.iterdir() if child.is_dir()):
        raise ConfigError(f"{said}. It holds runs; name those: vembed compare {redact(str(path))}/*")
    raise ConfigError(f"{said}. Models without a run are compared by: vembed evaluate MODEL MODEL ... --data SET")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that tells it from the others."""
    names = []
    for folder in folders:
        parts = folder.parts
        count = next(
            (
                count
                for count in range(1, len(parts))
                if sum(other.parts[-count:] == parts[-count:] for other in folders) == 1
            ),
            len(parts),
        )
        names.append(redact("/".join(parts[-count:])))
    return names


def _read_run(folder: Path, name: str) -> Run:
    notes: list[str] = []
    config, plan = _read_config(folder / "config.yaml", notes), _read_json(folder / "plan.json", notes)
    has_report = is_file(folder / "report" / "report.json")
    report = _read_json(folder / "report" / "report.json", notes) if has_report else {}
    version = report.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        notes.append(f"its report.json has schema_version {version}, which this version of vembed doesn't know.")
        report = {}
    run = Run(name, folder, config, plan, report, (), (), (), ())
    try:
        rows = read_rows(folder / "metrics.jsonl")
    except OSError as error:
        rows = []
        notes.append(f"its metrics.jsonl can't be read: {error}.")
    sets = _read_sets(folder, config, report, notes)
    if not sets:
        done, total = int(rows[-1]["step"]) if rows else 0, plan.get("steps")
        of = f" of {total}" if total else ""
        notes.append(f"it hasn't finished: {done}{of} steps, and no result of a chosen model in evaluation/final.")
    elif not has_report:
        notes.append("it has no report: versions, hardware and hashes of its data aren't known.")
    elif report and not report.get("data_hashes"):
        notes.append("an older version of vembed wrote it, which recorded no hashes of the data.")
    evaluations = _evaluations(folder, notes)
    return replace(run, rows=rows, evaluations=evaluations, sets=sets, notes=tuple(notes))


def _read_sets(
    folder: Path, config: Mapping[str, Any], report: Mapping[str, Any], notes: list[str]
) -> tuple[SetResult, ...]:
    """Return the results of the chosen model, that of the verdict first."""
    hashes = report.get("data_hashes") or {}
    first = "test" if config.get("test_data_path") else "dev"
    below = folder / "evaluation"
    further = sorted(path.name for kind in ("test", "guard") for path in below.glob(f"{kind}-*") if is_folder(path))
    further.sort(key=lambda name: (int(end) if (end := name.rpartition("-")[2]).isdigit() else 0, name))
    found = []
    for key, place in ((first, below), *((name, below / name) for name in further)):
        if not is_file(place / "final" / METRICS_FILE):
            if key == first:
                return ()
            continue
        try:
            final = read_evaluation(place / "final")
            has_start = is_file(place / "baseline" / METRICS_FILE)
            untrained = read_evaluation(place / "baseline") if has_start else None
        except DataError as error:
            notes.append(f"a result can't be read: {redact(str(error))}")
            continue
        role: SetRole = "guard" if key.startswith("guard") else "test" if key.startswith("test") else "dev"
        found.append(SetResult(key, role, str(hashes.get(key, "")), final, untrained))
    return tuple(found)


def _evaluations(folder: Path, notes: list[str]) -> list[tuple[int, Mapping[str, float]]]:
    """Return the metrics on the dev set by step."""
    found = []
    for path in (folder / "evaluation").glob(f"step-*/{METRICS_FILE}"):
        step = path.parent.name.removeprefix("step-")
        metrics = _read_json(path, notes).get("metrics")
        if step.isdigit() and metrics is not None:
            found.append((int(step), metrics))
    return sorted(found, key=lambda row: row[0])


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; of one that is gone or broken nothing, and a note."""
    try:
        found = read_object(path)
        for key, kind in _SHAPES.items():
            if found.get(key) is not None:
                fit(kind, found[key], where=key)
    except (OSError, ValueError) as error:
        notes.append(f"its {path.name} can't be read: {redact(str(error))}.")
        return {}
    return found


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the settings in config.yaml; of a file that is gone or broken none, and a note."""
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no keys")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"its {path.name} can't be read: {redact(str(error))}.")
        return {}
    return {str(key): value for key, value in found.items()}
