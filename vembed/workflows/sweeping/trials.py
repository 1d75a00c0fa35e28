"""A trial: one training of a sweep, in a folder of its own, and what became of it.

1. A trial whose folder has an `outcome.json` is done: finished, or failed with a reason. It isn't trained again;
   without its folder it is. One that failed for its configuration or the machine leaves none.
2. Any other is trained by a runner, which continues from the run's own checkpoints where there are some.
3. What came of it is read from the run's folder, so that a sweep that was killed between 2 and 3 loses nothing.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vembed.config.names import targets
from vembed.errors import DataError, MachineError, VembedError
from vembed.evaluation.judge import query_values
from vembed.evaluation.results import read_evaluation
from vembed.files import replace_text
from vembed.json_text import fit, read_object
from vembed.redact import redact
from vembed.text import show_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.results import EvaluationResult
    from vembed.workflows.sweeping.space import Choice

OUTCOME_FILE = "outcome.json"
REPORT_FILE = Path("report", "report.json")
NAME_CHARACTERS = 80

_MAKES_ROWS = ("data", "loss", "max_image", "max_invalid", "teacher")
"""Beginnings of keys that decide what a trial's training rows hold."""

_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """One training of a sweep."""

    name: str  # of its folder
    choice: Choice  # the values that it tries, by key
    overrides: Choice = field(default_factory=dict)  # further settings, such as the steps of a shorter training
    steps: int = 0  # optimizer steps, where they are known

    @property
    def shown(self) -> dict[str, str]:
        """The values by key, without secrets."""
        return _shown(self.choice)

    @property
    def values(self) -> str:
        """The values for people: "learning_rate=1e-5 temperature=0.02"."""
        return " ".join(f"{key}={value}" for key, value in self.shown.items())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trial."""

    trial: Trial
    folder: Path
    dev: EvaluationResult | None = None  # of the model that it kept; None where it failed
    kept_step: int = 0
    sentence: str = ""  # the verdict of the run
    on_test: bool = False  # whether that is on another set than the dev set
    caveats: Sequence[str] = ()  # what takes from the verdict's worth
    error: str = ""  # why it failed
    is_done: bool = True  # whether the same command leaves it as it is; else it trains it again
    data: Mapping[str, str] = field(default_factory=dict)  # "training", "dev" or another set -> hash of its content

    @property
    def next_try(self) -> str:
        """How a trial that failed is trained again."""
        return f"delete {self.folder} to try it again" if self.is_done else "the same command tries it again"


class TryAgainError(VembedError):
    """A trial failed for its configuration or the machine: once the cause is gone, another try may finish."""


class Runner(Protocol):
    """Trains a trial into a folder, or continues it there."""

    def __call__(self, trial: Trial, folder: Path) -> str:
        """Return why it failed; nothing where it finished.

        Raises:
            PreemptedError: A signal asked to stop; the same call continues.
            TryAgainError: It failed, and the same call may finish later.
        """


@dataclass(slots=True)
class Trials:
    """Trains the trials of a sweep, each once.

    Args:
        total_steps: Steps of all trials together, for the time that is left; 0 where nobody knows.
    """

    folder: Path
    runner: Runner
    metric: str  # what the run chose its checkpoint by
    count: int  # trials, those of each shorter training counted apart
    total_steps: int = 0
    _done: list[Outcome] = field(default_factory=list)
    _steps_done: int = 0
    _seconds: float = 0.0
    _steps_timed: int = 0

    def train(self, trial: Trial) -> Outcome:
        """Return what becomes of a trial; one that is done already is only read.

        Raises:
            DataError: Its results can't be read any more, or its data are others than those of the trials before.
            MachineError: Its outcome can't be written.
        """
        folder = self.folder / trial.name
        place = f"trial {len(self._done) + 1} of {self.count}: {trial.values or trial.name}"
        before = _read_outcome(folder)
        if before is None:
            _log.info("%s  (%s)", place, folder)
            began = time.monotonic()
            try:
                outcome = self._outcome(trial, folder, self.runner(trial, folder))
            except TryAgainError as error:
                outcome = Outcome(trial, folder, error=str(error), is_done=False)
            self._seconds += time.monotonic() - began
            self._steps_timed += trial.steps
            if outcome.is_done:
                _write_outcome(outcome)
        else:
            outcome = self._outcome(trial, folder, before)
        _refuse_other_data(self._done, outcome)
        self._done.append(outcome)
        self._steps_done += trial.steps
        _log.info("%s", self._line(outcome, place, was_done=before is not None))
        return outcome

    def _outcome(self, trial: Trial, folder: Path, error: str) -> Outcome:
        if error:
            return Outcome(trial, folder, error=error)
        return read_run(trial, folder, self.metric)

    def _line(self, outcome: Outcome, place: str, *, was_done: bool) -> str:
        if outcome.dev is None:
            return f"{place}: failed: {outcome.error}{' (before)' if was_done else ''}"
        line = f"  dev {outcome.dev.deciding(self.metric)} {dev_value(outcome, self.metric):.4f}"
        if was_done:
            return f"{place}: done before,{line[1:]}"
        left = self.total_steps - self._steps_done
        if left > 0 and self._steps_timed:
            line += f"; about {show_duration(self._seconds / self._steps_timed * left)} left"
        return line


def trial_name(number: int, choice: Choice, *, of: int, ending: str = "") -> str:
    """Return the name of a trial's folder: its number and its values, as far as a file system takes them."""
    values = "_".join(f"{key}-{_UNSAFE.sub('.', value)}" for key, value in _shown(choice).items())
    return f"{number:0{max(2, len(str(of)))}}_{values[:NAME_CHARACTERS]}{ending}"


def _shown(choice: Choice) -> dict[str, str]:
    return {key: redact(f"{key}={value}").partition("=")[2] for key, value in choice.items()}


def read_run(trial: Trial, folder: Path, metric: str) -> Outcome:
    """Read what a finished run says of itself: the dev result of the model that it kept, and its verdict.

    Raises:
        DataError: A file is missing or broken.
    """
    report = run_report(folder)
    kept, has_test = report["checkpoint"]["kept_step"], report["dev_task"] != ""
    dev = read_evaluation(folder / "evaluation" / (f"step-{kept}" if has_test else "final"))
    try:
        query_values(dev, dev.deciding(metric))
    except ValueError as error:
        raise DataError(f"{folder}: {error} Trials can't be compared by it") from error
    data = report.get("data_hashes") or {}  # older versions recorded none
    return Outcome(
        trial,
        folder,
        dev,
        kept,
        report["verdict"]["sentence"],
        on_test=any(row.get("role") == "test" for row in report.get("sets", ())),
        caveats=report.get("caveats", ()),
        data=data,
    )


def run_report(folder: Path) -> dict[str, Any]:
    """Return report.json of a finished run.

    Raises:
        DataError: It is missing or broken.
    """
    path = folder / REPORT_FILE
    try:
        report = read_object(path)
        fit(int, report["checkpoint"]["kept_step"], where="kept_step")
        fit(str, report["verdict"]["sentence"], where="sentence")
        fit(str, report["dev_task"], where="dev_task")
        fit(dict[str, str], report.get("data_hashes") or {}, where="data_hashes")
        fit(list[dict[str, Any]], report.get("sets") or [], where="sets")
        fit(list[str], report.get("caveats") or [], where="caveats")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the report of a finished run: {error}; delete {folder} to train again") from error
    return report


def _refuse_other_data(before: Sequence[Outcome], outcome: Outcome) -> None:
    """Refuse a trial whose data have changed since an earlier one: their results can't be compared.

    Raises:
        DataError: The data differ.
    """
    other = next((each for each in before if each.data), None)
    if other is None:
        return
    makes_rows = any(key.startswith(_MAKES_ROWS) for each in outcome.trial.choice for key in targets(each))
    changed = [
        name
        for name, content in outcome.data.items()
        if other.data.get(name, content) != content and not (name == "training" and makes_rows)
    ]
    if changed:
        raise DataError(
            f"{outcome.folder} and {other.folder} can't be compared: their data differ ({', '.join(changed)}), so "
            f"files have changed in between; delete the folders of the trials on the data that you don't want, and the "
            f"same command trains them again"
        )


def _read_outcome(folder: Path) -> str | None:
    """Return why a trial failed, nothing where it finished, None where it isn't done."""
    path = folder / OUTCOME_FILE
    try:
        error: str = fit(str, read_object(path)["error"], where="error")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: can't be read: {error}; delete it to train the trial again") from error
    return error


def _write_outcome(outcome: Outcome) -> None:
    try:
        outcome.folder.mkdir(parents=True, exist_ok=True)
        replace_text(outcome.folder / OUTCOME_FILE, json.dumps({"error": outcome.error}) + "\n")
    except OSError as error:
        raise MachineError(f"{outcome.folder}: the outcome can't be written: {error}; free some space there") from error


def best_of(outcomes: Sequence[Outcome], metric: str) -> Outcome | None:
    """Return the finished trial that is best on the dev set, the first of equals; None where none finished."""
    finished = [each for each in outcomes if each.dev is not None]
    return max(finished, key=lambda each: dev_value(each, metric), default=None)


def dev_value(outcome: Outcome, metric: str) -> float:
    """Return the dev metric of a finished trial, or what decides on its dev set instead."""
    assert outcome.dev is not None
    value: float = outcome.dev.metrics[outcome.dev.deciding(metric)]
    return value


def dev_metric(outcomes: Sequence[Outcome], metric: str) -> str:
    """Return what decides on the dev set: the metric, or the first one of a set that is measured otherwise."""
    return next((each.dev.deciding(metric) for each in outcomes if each.dev is not None), metric)
