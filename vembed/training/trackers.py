"""Trackers: where the numbers of a run go while it trains, and what they get beside those numbers.

1. `open_trackers` opens metrics.jsonl, always, and the trackers that `report_to` names.
2. `track_start` sends the plan; the loop sends the numbers of steps and evaluations by `tell`.
3. `track_end` sends results, examples, files and the model; `closing` ends the trackers, whatever ended the run.

A tracker that fails is dropped with one warning, and training goes on. metrics.jsonl is the exception: it is the run's
own record, so when the disk refuses a row the run stops, and the last checkpoint is as good as it was.

`vembed train --validate` imports this file to look for missing packages. That must not take the second that the modules
of evaluation and pages take, so the functions that need those import them.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeGuard, TypeVar

from vembed.errors import MachineError, VembedError
from vembed.files import replace_text
from vembed.redact import redact
from vembed.registry import TRACKERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image as Bitmap

    from vembed.batch import ImageLimits, Item
    from vembed.evaluation.report.examples import Group
    from vembed.training.finish import RunResult
    from vembed.training.run import Run

    Cell: TypeAlias = str | float | Bitmap | None  # of a table: a text, a number, a small picture, or nothing

_log = logging.getLogger(__name__)

TRACKER_FOLDER = "trackers"
"""Holds a folder for each tracker but TensorBoard, so that none takes a name of the run's own files."""

FILES = ("report/report.html", "report/report.json", "config.yaml", "plan.json", "metrics.jsonl", "train.log")
"""Files of the output folder that trackers get a copy of, as far as they exist."""

CELL_CHARACTERS = 1_000
"""Most characters of a text in a table."""

Call: TypeAlias = Literal[
    "log", "log_ranks", "log_evaluation", "log_result", "log_text", "log_table", "log_file", "log_model",
    "log_stop", "close",
]  # fmt: skip
"""Methods of a tracker that `tell` calls."""


class Tracker:
    """A destination of the numbers, texts and files of a run; a method that isn't overridden does nothing.

    Args:
        folder: Its own, for what it writes; the first to write makes it.
        resume_step: Step of the checkpoint that the run continues from: later ones come again; 0 from the start.
        config: Key -> value of the run, without secrets.
    """

    name: ClassVar[str]
    """Name in `report_to`."""

    package: ClassVar[str] = ""
    """Python package that it imports, for a message before training where it is missing; empty needs none."""

    advice: ClassVar[str] = "leave it out of report_to to run without it"
    """The user's remedy when it fails."""

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        self.resume_step = resume_step
        self.config = config or {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a training step.

        Args:
            step: Optimizer steps done, 1 after the first.
            values: Name -> number, e.g. `{"loss": 0.7, "learning_rate": 2e-5}`; NaN and infinity are allowed.
        """

    def log_ranks(self, step: int, by_rank: Mapping[str, Sequence[float]]) -> None:
        """Record what each process measured since the last call.

        Args:
            by_rank: Name -> the number of each process, in their order; NaN is allowed.
        """

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation.

        Args:
            step: Optimizer steps done, 0 for the baseline.
            metrics: Name -> number, e.g. `{"ndcg@10": 0.645}`.
        """

    def log_result(self, step: int, values: Mapping[str, float]) -> None:
        """Record the main metrics before and after training.

        Args:
            step: The last one.
            values: Name -> number, e.g. `{"baseline/ndcg@10": 0.61, "final/ndcg@10": 0.645}`.
        """

    def log_text(self, step: int, name: str, text: str) -> None:
        """Record a text: the plan, the verdict."""

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table, e.g. the example queries with the documents ranked first."""

    def log_file(self, path: Path) -> None:
        """Keep a copy of a file: the report, the configuration, the log."""

    def log_model(self, folder: Path) -> None:
        """Keep a copy of the trained model."""

    def log_stop(self, error: BaseException) -> None:
        """Record that the run ends early, before `close`."""

    def close(self) -> None:
        """Write what is still held back; nothing is logged afterwards."""


def flatten_ranks(by_rank: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return `NAME/RANK` -> number; a process that measured nothing (NaN) has none."""
    return {
        f"{name}/{rank}": value
        for name, numbers in by_rank.items()
        for rank, value in enumerate(numbers)
        if not math.isnan(value)
    }


def is_picture(cell: Cell) -> TypeGuard[Bitmap]:
    """Tell whether a cell of a table is a picture."""
    return not isinstance(cell, str | float | int | None)


class JsonlTracker(Tracker):
    """metrics.jsonl: one JSON object per step, in order, each step once, whatever was killed and resumed.

    Every row reaches the operating system before `log` returns, so a killed process loses none. At a resume the file is
    cut back to the checkpoint's step, because the steps after it are done again. An evaluation writes a folder of its
    own, and adds no row.

    NaN and infinity are written as null: JSON has neither, and a file that only Python can read is no record. The exact
    number stands in nonfinite-step-N.json.

    Args:
        path: The file; made at the first row.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self._path = path
        self._file: io.FileIO | None = None  # unbuffered: a write is a system call
        self._last_step = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the row of a step.

        Args:
            step: Optimizer steps done; greater than that of the row before.
            values: Name -> number. NaN and infinity become null.

        Raises:
            ValueError: The step was logged before, or a value is called "step".
            MachineError: The disk refused.
        """
        if "step" in values:
            raise ValueError("a row has its step already; call the value something else")
        if self._file is not None and step <= self._last_step:
            raise ValueError(
                f"step {step} comes after step {self._last_step} in {self._path.name}; each step is logged once"
            )
        row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            if self._file is None:
                # Cut away whatever the file holds of this step or later: no order of calls makes a step appear twice.
                self.cut_back(step - 1)
                self._file = io.FileIO(self._path, "a")
            while line:  # a nearly full disk takes a part of a line, and refuses the rest at the next write
                line = line[self._file.write(line) :]
        except OSError as error:
            self.close()
            raise self._refusal(error) from error
        self._last_step = step

    def cut_back(self, step: int) -> int:
        """Drop the rows after a step, and a last line that a crash cut off; atomic, and nothing when there are none.

        Args:
            step: Of the checkpoint that the run continues from; 0 drops everything.

        Returns:
            Lines dropped.

        Raises:
            MachineError: The disk refused; the file is as it was.
        """
        self.close()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                return 0
            text = _read_text(self._path)
            kept = [line for line, row in _whole_rows(text) if row["step"] <= step]
            shorter = "".join(f"{line}\n" for line in kept)
            # Written only where it changes: a resume at the last step leaves the file as it is.
            if shorter != text:
                replace_text(self._path, shorter)
        except OSError as error:
            raise self._refusal(error) from error
        dropped = sum(1 for line in text.split("\n") if line) - len(kept)
        if dropped:
            _log.info("%s: %d lines after step %d dropped, those steps are done again", self._path, dropped, step)
        return dropped

    def say_lost(self, step: int) -> None:
        """Warn where rows up to the checkpoint's step are missing, and keep a copy of the damaged file.

        Raises:
            MachineError: The disk refused.
        """
        kept_as = ""
        try:
            # lexists: a link whose target is gone is refused here, not taken for a run that wrote nothing yet.
            text = _read_text(self._path) if os.path.lexists(self._path) else ""
            present = {row["step"] for _, row in _whole_rows(text)} & {*range(1, step + 1)}
            if len(present) == step:
                return
            if text:
                copies = (self._path.with_name(f"{self._path.name}.broken-{number}") for number in itertools.count(1))
                copy = next(path for path in copies if not path.exists())
                shutil.copyfile(self._path, copy)
                kept_as = f"; what it holds is kept as {copy.name}"
        except OSError as error:
            raise self._refusal(error) from error
        _log.warning(
            "%s: %d of the %d steps up to the checkpoint are missing, and their numbers are lost; weights and later "
            "steps are as they would have been%s",
            self._path, step - len(present), step, kept_as,
        )  # fmt: skip

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _refusal(self, error: OSError) -> MachineError:
        return MachineError(
            f"{self._path}: can't be written ({error}). Without it the run has no record: "
            "free some space or fix the permissions, then resume from the last checkpoint."
        )


def read_rows(path: Path, *, keeps_nan: bool = False) -> list[dict[str, float]]:
    """Return the whole rows of metrics.jsonl, each step once.

    Args:
        path: The file; no rows where there is none.
        keeps_nan: Whether a number that wasn't finite is NaN in its row; else it is left out.
    """
    text = _read_text(path) if path.is_file() else ""
    rows = [row for _, row in _whole_rows(text)]
    if keeps_nan:
        return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_text(encoding="utf-8", errors="replace")


def _whole_rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines that are whole rows of a step later than the one before, each with its numbers."""
    last = 0
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # torn by a crash, or damaged: 100,000 brackets are deeper than the stack
            continue
        if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] <= last:
            continue
        if all(value is None or type(value) in (int, float) for value in row.values()):  # `true` is an int for Python
            last = row["step"]
            yield line, row


Registered = TypeVar("Registered", bound=type[Tracker])


def register_tracker(tracker: Registered) -> Registered:
    """Add a tracker, a class with a `name` that `report_to` takes; also a decorator.

    Raises:
        ConfigError: The name is taken, or not one that a configuration can use.
    """
    TRACKERS.register(tracker.name, tracker, module=tracker.__module__)
    return tracker


def refuse_missing_packages(report_to: str | list[str]) -> None:
    """Refuse a tracker whose package isn't installed, without importing any.

    Raises:
        MachineError: It is missing.
    """
    for name in _names(report_to):
        if (package := _package_of(name)) and not _is_installed(package):
            raise MachineError(missing_text(name, f"No module named {package!r}"))


def missing_text(name: str, why: str) -> str:
    """Return the message for a user whose machine lacks the package of a tracker."""
    # TensorBoard is a dependency of vembed itself; the package of each other one of ours is an extra of its name.
    is_extra = name != "tensorboard" and name not in TRACKERS.plugins()
    wanted = f'"vembed[{name}]"' if is_extra else _package_of(name)
    return (
        f"the tracker {name} needs a package that is missing ({why}): pip install {wanted}, or leave it out of "
        f"report_to"
    )


def open_trackers(
    report_to: str | list[str], output: Path, *, resume_step: int, config: Mapping[str, object]
) -> list[Tracker]:
    """Return metrics.jsonl, cut back to a step, and the trackers that the user wants beside it.

    Args:
        report_to: Their names; "none" is none, "all" is each whose package is installed.
        resume_step: Step of the checkpoint that the run continues from; 0 for a run from the start.

    Raises:
        MachineError: The disk refuses metrics.jsonl, or a tracker misses a package.
    """
    # First the record: a disk that refuses it ends the run before any service hears of it.
    jsonl = JsonlTracker(output / "metrics.jsonl")
    jsonl.say_lost(resume_step)
    jsonl.cut_back(resume_step)
    trackers: list[Tracker] = [jsonl]
    # TensorBoard's files stand where its users look for them, the others' beside each other.
    for name in _names(report_to):
        folder = output / name if name == "tensorboard" else output / TRACKER_FOLDER / name
        try:
            trackers.append(TRACKERS.load(name)(folder, resume_step=resume_step, config=config))
        except VembedError:
            raise  # before training, with the fix
        except Exception as error:  # noqa: BLE001 - a plugin's code may fail in any way
            _warn_of_failure(name, error, Tracker.advice)
    takes_model = any(type(tracker).log_model is not Tracker.log_model for tracker in trackers)
    if config.get("log_model") and not takes_model:
        _log.warning("log_model: no tracker of report_to takes a model; wandb, mlflow and trackio do")
    return trackers


def _names(report_to: str | list[str]) -> list[str]:
    if report_to == "all":
        packages = {name: _package_of(name) for name in TRACKERS.names()}
        return [name for name, package in packages.items() if not package or _is_installed(package)]
    return [] if report_to == "none" else [report_to] if isinstance(report_to, str) else [*dict.fromkeys(report_to)]


def _package_of(name: str) -> str:
    """Return the Python package of a tracker; ours have its name, so that none of their modules is imported for it."""
    is_ours = name in TRACKERS.names() and name not in TRACKERS.plugins()
    package: str = name if is_ours else TRACKERS.load(name).package
    return package


def _is_installed(package: str) -> bool:
    """Tell whether there is a package; a folder of that name, which wandb leaves behind, is none."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of google.cloud.storage, google is imported
        return False
    return spec is not None and spec.origin is not None


def tell(trackers: list[Tracker], call: Call, *arguments: object) -> None:
    """Call a method of every tracker, and take one that fails out of the list, with a warning.

    Raises:
        MachineError: The disk refuses metrics.jsonl, which no run goes on without.
    """
    for tracker in [*trackers]:  # a copy, because the list loses those that fail
        try:
            getattr(tracker, call)(*arguments)
        except Exception as error:
            if isinstance(tracker, JsonlTracker):
                raise
            trackers.remove(tracker)
            _warn_of_failure(tracker.name, error, tracker.advice)


def _warn_of_failure(name: str, error: Exception, advice: str) -> None:
    _log.warning(
        "Tracker %s failed and is switched off; training continues and metrics.jsonl has everything (%s): %s: %s",
        name, advice, type(error).__name__, error,
    )  # fmt: skip


@contextmanager
def closing(trackers: list[Tracker]) -> Iterator[None]:
    """Close trackers at the end of the block, and tell them where an error ends it."""
    try:
        yield
    except BaseException as error:
        tell(trackers, "log_stop", error)
        raise
    finally:
        tell(trackers, "close")


def track_start(trackers: list[Tracker], step: int, *, plan: str) -> None:
    """Tell the trackers the plan, so that a run shows up before its first step."""
    tell(trackers, "log_text", step, "plan", redact(plan))


def track_end(run: Run, result: RunResult) -> None:
    """Tell the trackers the results of the run, and give them its files, and the model where the user wants that."""
    from vembed.evaluation.judge import headline
    from vembed.evaluation.metrics import HEADLINE
    from vembed.evaluation.report.examples import choose_examples
    from vembed.training.data import image_limits

    if not run.trackers:
        return
    # Small things first: uploads of files and of the model take long, and Ctrl-C then loses only those.
    task, step, trackers = run.evaluations.verdict_task, run.state.step, run.trackers
    tell(trackers, "log_text", step, "verdict", redact(headline(result.verdict, result.sets)))
    main: dict[str, float] = {}
    table: list[list[Cell]] = []  # a row for each metric of each set
    for number, outcome in enumerate(result.sets):
        # The verdict's set comes first, under the names of a run with one set: values of several runs share a column.
        prefix = f"{outcome.role}-{number}/" if number else ""
        names = {*HEADLINE, outcome.verdict.comparison.metric}
        before, after = outcome.baseline.metrics, outcome.final.metrics
        for when, metrics in (("baseline", before), ("final", after)):
            main |= {f"{prefix}{when}/{name}": value for name, value in metrics.items() if name in names}
        table += [
            [redact(outcome.final.task), outcome.role, name, before[name], after[name], after[name] - before[name]]
            for name in after
            if name in before
        ]
    tell(trackers, "log_result", step, main)
    tell(trackers, "log_table", step, "results", ("set", "role", "metric", "before", "after", "difference"), table)
    groups = () if task.grades else choose_examples(task, result.baseline, result.final, result.metric)
    columns, rows = _examples_table(groups, result.metric, image_limits(run.config))
    if rows:
        tell(trackers, "log_table", step, "examples", columns, rows)
    for path in (run.output.path / name for name in FILES):
        if path.is_file():
            tell(trackers, "log_file", path)
    if run.config.log_model:
        tell(trackers, "log_model", run.output.model)


def _examples_table(
    groups: Sequence[Group], metric: str, limits: ImageLimits
) -> tuple[Sequence[str], list[list[Cell]]]:
    """Return columns and rows: a row for each example query; a column that no row fills is left out."""
    rows: list[dict[str, Cell]] = []
    for title, example in ((group.title, example) for group in groups for example in group.examples):
        first = example.hits[0] if example.hits else None
        # A relevant document below the cutoff has no hit; `missed` has its ranks.
        relevant = next((hit for hit in (*example.hits, *example.missed) if hit.is_relevant), None)
        rows.append(
            {
                "kind": title,
                "query id": redact(example.query_id),
                **_item_cells("query", example.item, limits),
                f"{metric} before": example.baseline,
                f"{metric} after": example.final,
                **_item_cells("relevant", relevant.item if relevant else None, limits),
                "rank before": _rank_text(relevant.baseline_rank if relevant else None),
                "rank after": _rank_text(relevant.rank if relevant else None),
                **_item_cells("found first", first.item if first else None, limits),
                "found first is": "" if first is None else "relevant" if first.is_relevant else "not relevant",
            }
        )
    # Columns in the order of the dict above: sets of pictures have no texts, and sets of texts no pictures.
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row[name] is not None for row in rows)]
    return columns, [[row[name] for name in columns] for row in rows]


def _item_cells(name: str, item: Item | None, limits: ImageLimits) -> dict[str, Cell]:
    """Return the text and the first picture of an item, as two columns."""
    from vembed.evaluation.report.examples import pictures_of, text_of
    from vembed.pages.pictures import small_copy

    text, pictures = text_of(item), pictures_of(item)
    cut = None if text is None else redact(text)[:CELL_CHARACTERS]
    return {name: cut, f"{name} picture": small_copy(pictures[0], limits) if pictures else None}


def _rank_text(rank: int | None) -> str:
    return "not found" if rank is None else str(rank)
