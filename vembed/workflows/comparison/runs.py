"""Output folders of runs, read in whatever state they are: results, differences, time and memory.

A folder may be of a run that goes on, was killed, or was written by another version. What can't be read is left out
with a note that the page shows; nothing is guessed, and a run without a result takes part with its settings and curves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vembed.config.load import file_values
from vembed.data.run_data import further_role
from vembed.errors import ConfigError, DataError
from vembed.evaluation.report.document import SCHEMA_VERSION
from vembed.evaluation.report.speed import rate, settled_rows
from vembed.evaluation.results import METRICS_FILE, read_evaluation
from vembed.files import home_path, is_file, is_folder
from vembed.json_text import fit, read_object
from vembed.models.names import MODEL_FOLDER, is_run, nearest_folder
from vembed.pages.text import finite, value_text
from vembed.redact import redact
from vembed.training.progress import evaluation_seconds
from vembed.training.trackers import read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.judge import SetRole
    from vembed.evaluation.results import EvaluationResult

SEEDS_FILE = "seeds.json"
"""Marks a folder that holds a run for each of several seeds."""

DEFAULT_METRIC = "ndcg@10"

NOT_KNOWN = "not recorded"

OWN_KEYS = ("output_dir", "overwrite_output_dir", "resume")
"""Keys that say where a run lies and how it was started."""

DECIDED = ("strategy", "mode", "world_size", "dtype", "steps", "gradient_cache")
"""Settings that only the plan knows."""

HASH_CHARACTERS = 12

PEAK_KEYS = ("peak_memory_bytes", "largest_rank_memory_bytes")

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
"""Key of plan.json, report.json or metrics.json -> type that it must have to be read."""


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
        """Return the name of the set."""
        return self.final.task


@dataclass(frozen=True, slots=True)
class Run:
    """An output folder, read."""

    name: str  # the end of its path that no other run has
    folder: Path
    config: Mapping[str, Any]  # as written; `auto` stays
    plan: Mapping[str, Any]  # has the values that `auto` became
    report: Mapping[str, Any]  # report.json; empty where there is none
    rows: Sequence[Mapping[str, float]]  # of metrics.jsonl
    evaluations: Sequence[tuple[int, Mapping[str, float]]]  # (step, metrics on the dev set)
    sets: tuple[SetResult, ...]  # that of the verdict first; empty where the run hasn't finished
    notes: tuple[str, ...]  # what is missing or odd, one sentence each

    @property
    def is_finished(self) -> bool:
        """Return True where there is a result of the chosen model."""
        return bool(self.sets)

    @property
    def metric(self) -> str:
        """Return the metric that the run is judged by."""
        return str(self.config.get("metric_for_best_model") or DEFAULT_METRIC)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings with what `auto` became."""
        decided = {key: self.plan[key] for key in self.plan if key in self.config or key in DECIDED}
        return {**self.config, **{key: value for key, value in decided.items() if value is not None}}

    def texts(self, key: str) -> dict[str, str]:
        """Return names and texts that the report holds under a key; none where it doesn't have them."""
        return self.report.get(key) or {}


def read_runs(paths: Sequence[Path | str], first: Path | str | None = None) -> tuple[list[Run], list[str]]:
    """Read each run once; a pattern with `*` stands for the runs that it matches.

    Args:
        first: A run that comes first, wherever it stands among the others.

    Returns:
        The runs in the order in which they were named, and a note for each that was named twice or passed over.

    Raises:
        ConfigError: A path leads to no run.
    """
    # By the folder itself, wherever links and relative paths come from: a run is read and compared once.
    begin = [] if first is None else _folders(first)[0][:1]
    folders: dict[Path, Path] = {}
    notes = []
    for named in paths:
        path = home_path(named)
        if is_file(path) and any(is_run(folder) for folder in path.parent.iterdir() if folder.is_dir()):
            continue  # a shell's DIR/* names logs too
        matches, passed_over = _folders(named)
        notes += passed_over
        for folder in matches:
            if folder.resolve() in folders:
                notes.append(f"{redact(str(folder))} is named twice and compared once.")
            folders.setdefault(folder.resolve(), folder)
    folders = {**{folder.resolve(): folder for folder in begin}, **folders}
    if not folders:
        raise ConfigError("none of the files named is a run; name output folders of runs")
    names = _names(list(folders))
    return [_read_run(folder, name) for folder, name in zip(folders.values(), names, strict=True)], notes


def _folders(named: Path | str) -> tuple[list[Path], list[str]]:
    """Return the run folders that a path or a pattern names, and notes on what isn't one.

    Raises:
        ConfigError: It names no run.
    """
    path, shown = home_path(named), redact(str(named))
    # The program matches patterns itself: Windows' shell leaves them, and so do quotes.
    if "*" in str(named) and not path.exists():
        start = Path(path.anchor)
        matches = sorted(start.glob(str(path.relative_to(start))))
        runs = [match for match in matches if is_folder(match) and is_run(match) and not is_file(match / SEEDS_FILE)]
        if not runs:
            raise ConfigError(f"{shown} matches no output folder of a run")
        others = [match for match in matches if match not in runs and is_folder(match)]  # logs lie beside runs
        return runs, [f"{redact(str(other))} is passed over: it isn't a run." for other in others]
    if not is_folder(path):
        raise ConfigError(f"there is no folder {shown}{nearest_folder(path)}; name a run's output folder")
    # A report, a model or the evaluations of a run name it as well: tab completion often ends there.
    for folder in (path, path.parent):
        if is_run(folder) and (folder == path or path.name in ("report", MODEL_FOLDER, "evaluation")):
            if is_file(folder / SEEDS_FILE):
                seeds = redact(str(folder / "seed-*"))
                raise ConfigError(f"{shown} is of several seeds; name their runs: vembed compare {seeds}")
            return [folder], []
    reason = f"{shown} isn't the output folder of a run: it has no plan.json and no train.log"
    if any(is_run(child) for child in path.iterdir() if child.is_dir()):
        raise ConfigError(f"{reason}. It holds runs; name those: vembed compare {shown}/*")
    raise ConfigError(f"{reason}. Models without a run are compared by: vembed evaluate MODEL MODEL ... --data SET")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that tells it from the others."""
    names = []
    for folder in folders:
        parts = folder.parts
        count = next(
            (  # quadratic in the runs, of which there are tens
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
    try:
        config = file_values(folder / "config.yaml")  # by our own rules of YAML, in which `eval_strategy: no` is a text
    except ConfigError as error:
        config = {}
        notes.append(f"its config.yaml can't be read: {redact(str(error))}.")
    plan = _read_json(folder / "plan.json", notes)
    has_report = is_file(folder / "report" / "report.json")
    report = _read_json(folder / "report" / "report.json", notes) if has_report else {}
    # A newer version may have changed the meaning of a key: its report isn't read, its metrics files are.
    version = report.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        notes.append(f"its report.json has schema_version {version}, which this version of vembed doesn't know.")
        report = {}
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

    evaluations = []
    for path in (folder / "evaluation").glob(f"step-*/{METRICS_FILE}"):
        step = path.parent.name.removeprefix("step-")
        metrics = _read_json(path, notes).get("metrics")
        if step.isdigit() and metrics is not None:
            evaluations.append((int(step), metrics))
    evaluations.sort(key=lambda row: row[0])
    return Run(name, folder, config, plan, report, rows, evaluations, sets, tuple(notes))


def _read_sets(
    folder: Path, config: Mapping[str, Any], report: Mapping[str, Any], notes: list[str]
) -> tuple[SetResult, ...]:
    """Return the results of the chosen model, that of the verdict first."""
    # A run without test data has its verdict on the dev set; `evaluation/` itself holds the set of the verdict.
    hashes = report.get("data_hashes") or {}
    first = "test" if config.get("test_data_path") or "test" in hashes else "dev"
    below = folder / "evaluation"
    further = sorted(path.name for kind in ("test", "guard") for path in below.glob(f"{kind}-*") if is_folder(path))
    further.sort(key=lambda name: (int(end) if (end := name.rpartition("-")[2]).isdigit() else 0, name))
    sets = []
    for key, path in ((first, below), *((name, below / name) for name in further)):
        if not is_file(path / "final" / METRICS_FILE):
            if key == first:  # written before the others, when training has ended
                return ()
            continue
        try:
            final = read_evaluation(path / "final")
            has_start = is_file(path / "baseline" / METRICS_FILE)
            untrained = read_evaluation(path / "baseline") if has_start else None
        except DataError as error:
            notes.append(f"a result can't be read: {redact(str(error))}")
            continue
        role: SetRole = "dev" if key == "dev" else further_role(key)
        sets.append(SetResult(key, role, str(hashes.get(key, "")), final, untrained))
    return tuple(sets)


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; of one that is gone or broken nothing, and a note."""
    try:
        document = read_object(path)
        for key, kind in _SHAPES.items():
            if document.get(key) is not None:
                fit(kind, document[key], where=key)
    except (OSError, ValueError) as error:
        notes.append(f"its {path.name} can't be read: {redact(str(error))}.")
        return {}
    return document


def config_differences(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Return the settings that differ between runs which know them: name -> value in each run."""
    settings = [run.settings for run in runs]
    differences = {}
    # A run that doesn't know a key, being older, doesn't differ in it; `unknown_keys` says that it is missing.
    for name in dict.fromkeys(name for values in settings for name in values if name not in OWN_KEYS):
        known = [values[name] for values in settings if name in values]
        # True equals 1 in Python, and isn't the same setting.
        if any(value != known[0] or isinstance(value, bool) != isinstance(known[0], bool) for value in known[1:]):
            texts = (value_text(name, values[name]) if name in values else NOT_KNOWN for values in settings)
            differences[name] = tuple(texts)
    return differences


def unknown_keys(runs: Sequence[Run]) -> list[str]:
    """Return a note for each run whose version lacks settings that another one has."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    missing = {run.name: [name for name in names if name not in run.config] for run in runs if run.config}
    return [
        f"{name} is of a version of vembed without {', '.join(lacking)}."
        for name, lacking in missing.items()
        if lacking
    ]


def data_differences(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Return how the runs' data differ (counts, sources, and content by its hash): name -> value in each run."""
    facts = []
    for run in runs:
        rows = [row for row in run.report.get("data_facts") or [] if len(row) == 2 and row[0] != "note"]
        hashes = {
            f"content of {'the training rows' if key == 'training' else f'the set {key}'}": value[:HASH_CHARACTERS]
            for key, value in run.texts("data_hashes").items()
        }
        facts.append({row[0]: row[1] for row in rows} | hashes)
    return _differences(facts)


def data_sentence(runs: Sequence[Run]) -> str:
    """Return a sentence on whether all runs trained on the same rows, as far as that is known."""
    hashes = [run.texts("data_hashes").get("training", "") for run in runs]
    if len({value for value in hashes if value}) > 1:
        return "The runs didn't train on the same rows."
    if not all(hashes):
        return "Not every run recorded the content of its training rows."
    return f"All runs trained on the same rows (hash {hashes[0][:HASH_CHARACTERS]})."


def environment_differences(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Return the versions and the hardware that differ between finished runs: name -> value in each run."""
    return _differences([run.texts("environment") for run in runs])


def _differences(facts: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for known in facts for name in known)
    return {
        name: tuple(known.get(name, NOT_KNOWN if not known else "none") for known in facts)
        for name in names
        if len({known.get(name) for known in facts if known}) > 1
    }


@dataclass(frozen=True, slots=True)
class RunCost:
    """Time and memory of a run; a number that isn't known is None."""

    device: str
    strategy: str
    processes: int | None
    global_batch_size: int | None
    steps_done: int
    steps_planned: int | None
    step_seconds: float | None  # of all steps
    evaluation_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    peak_bytes: float | None  # measured, of the process that used most
    planned_bytes: float | None  # of one device
    planned_step_seconds: float | None  # of as many steps, on a device whose speed the plan knows


def cost_of(run: Run) -> RunCost:
    """Return what a run took, from its rows; what only a report knows is empty without one."""
    settled = settled_rows(run.rows)  # without the first step, which compiles and fills caches
    seconds = [value for row in run.rows if math.isfinite(value := finite(row.get("step_seconds")))]
    peaks = [value for row in run.rows for key in PEAK_KEYS if math.isfinite(value := finite(row.get(key)))]
    # The plan weighed several strategies; what it predicts for this run is that of the one it recommended.
    candidates = [candidate for candidate in run.plan.get("candidates") or [] if candidate.get("recommended")]
    parts = [
        candidate["bytes_per_device"] for candidate in candidates if isinstance(candidate.get("bytes_per_device"), dict)
    ]
    planned = [finite(bytes_by_part.get("total")) for bytes_by_part in parts]
    # Of as many steps as were done, so that it can stand beside the time that they took.
    planned_seconds = finite(run.plan.get("rough_step_seconds")) * len(seconds)
    try:
        evaluating = evaluation_seconds(run.folder / "evaluation") or None
    except (OSError, ValueError, TypeError, KeyError):
        evaluating = None  # of a broken file, which a note of the run tells of
    return RunCost(
        device=run.texts("environment").get("device", NOT_KNOWN),
        strategy=" ".join(filter(None, (str(run.plan.get("strategy") or ""), str(run.plan.get("mode") or "")))),
        processes=run.plan.get("world_size"),
        global_batch_size=run.plan.get("global_batch_size"),
        steps_done=int(run.rows[-1]["step"]) if run.rows else 0,
        steps_planned=run.plan.get("steps"),
        step_seconds=sum(seconds) if seconds else None,
        evaluation_seconds=evaluating,
        samples_per_second=rate(settled, "samples_per_second"),
        tokens_per_second=rate(settled, "tokens_per_second"),
        peak_bytes=max(peaks, default=None),
        planned_bytes=planned[0] if planned else None,
        planned_step_seconds=planned_seconds if math.isfinite(planned_seconds) else None,
    )
