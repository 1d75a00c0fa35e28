"""A trial: one training in a folder of its own, and its outcome.

1. `Request` keeps in the folder of a sweep what was asked for: the same command continues it, another one is refused.
2. `Trials` trains each trial once. One whose folder has an `outcome.json` is done: finished, or failed with a reason.
   It isn't trained again; without its folder it is. One that failed for its configuration or the machine has no record.
3. A `Runner` trains one trial; that of process.py starts `vembed train`.
4. An outcome is read from the run's folder, so that a sweep that is killed between 3 and the record loses nothing.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from vembed.config.names import targets
from vembed.config.record import plain_values, resume_differences
from vembed.data.keys import DataKeys
from vembed.distributed.lock import LOCK_FILE
from vembed.errors import ConfigError, DataError, MachineError, VembedError
from vembed.evaluation.judge import query_values
from vembed.evaluation.results import read_evaluation
from vembed.files import replace_text
from vembed.json_text import fit, read_object
from vembed.redact import redact
from vembed.text import show_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vembed.config.schema import Config
    from vembed.evaluation.results import EvaluationResult
    from vembed.workflows.sweeping.space import Choice

REQUEST_FILE: Final = "request.json"
OUTCOME_FILE: Final = "outcome.json"
REPORT_FILE: Final = Path("report", "report.json")
NAME_CHARACTERS: Final = 80

_NOBODYS = (LOCK_FILE, "plan.json", "config.yaml")
"""Files that the lock and `--plan` leave in a folder that nothing was trained in."""

LEAVE_ROWS = frozenset(
    {
        "source_batches",
        "source_temperature",
        "image_augmentation",
        "image_flip",
        "retrieval_mode",
        "num_workers",
        "prefetch_factor",
        "drop_last",
    }
)
"""Keys of the section Data that leave the training rows as they are; the others decide what is read or kept."""

ASK_FOR_ROWS = frozenset({"loss_type", "added_losses", "false_negative_filter", "teacher_model_name"})
"""Keys of other sections by which a loss asks for columns (`Config.loss_needs`), and so for other training rows."""

_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """Words and configuration of a sweep or of several seeds, as the folder keeps them."""

    asked: tuple[str, ...]  # the words that decide the trials, each "--try learning_rate=1e-5,2e-5"
    config: dict[str, Any]  # key -> value of the configuration without what is tried
    steps: dict[str, int] = field(default_factory=dict)  # of each trial by name, once they are counted

    @classmethod
    def of(cls, asked: tuple[str, ...], config: Config, tried: set[str]) -> Self:
        """Return the request of a command.

        Args:
            config: Of any trial.
            tried: Keys whose values differ from trial to trial.
        """
        values = {name: value for name, value in plain_values(config).items() if name not in tried}
        return cls(tuple(map(redact, asked)), values)

    def go_on(self, folder: Path, config: Config) -> Request:
        """Return the request that the folder was begun with, checked to be the same; write this one where it is new.

        Raises:
            ConfigError: The folder holds another sweep, or other files.
            MachineError: It can't be written.
        """
        path = folder / REQUEST_FILE
        if not path.exists():
            if folder.exists() and any(entry.name not in _NOBODYS for entry in folder.iterdir()):
                raise ConfigError(f"{folder} holds other files; choose an empty folder, or a new one")
            self.write(folder)
            return self
        try:
            before = fit(Request, read_object(path), where=REQUEST_FILE)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: can't be read: {error}; choose another folder") from error
        # A key that only says how a run goes (how often it logs, where it writes) may change: results stay comparable.
        differences = [
            f"  {difference.key}: {difference.old!r} before, {difference.new!r} now"
            for difference in resume_differences(before.config, config)
            if difference.kind == "refused" and difference.key in self.config
        ]
        if before.asked != self.asked:
            differences.insert(0, f"  {' '.join(before.asked)} before, {' '.join(self.asked)} now")
        if differences:
            listed = "\n".join(differences)
            raise ConfigError(
                f"{folder} was begun with something else:\n{listed}\nSet this back to continue it, choose another "
                f"folder, or delete it to start anew"
            )
        return replace(self, steps=before.steps)

    def write(self, folder: Path) -> None:
        """Write it into the folder.

        Raises:
            MachineError: The folder can't be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / REQUEST_FILE, json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            raise MachineError(f"{folder} can't be written: {error}; choose another folder") from error


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
        return _without_secrets(self.choice)

    @property
    def values(self) -> str:
        """The values for people: "learning_rate=1e-5 temperature=0.02"."""
        return " ".join(f"{key}={value}" for key, value in self.shown.items())


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a trial, or the reason why it failed."""

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
        """Advice on how to train a failed trial again."""
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
        """Return the outcome of a trial; one that is done already is only read.

        Raises:
            DataError: Its results can't be read any more, or its data are others than those of the trials before.
            MachineError: Its outcome can't be written.
        """
        folder = self.folder / trial.name
        label = f"trial {len(self._done) + 1} of {self.count}: {trial.values or trial.name}"
        error = _recorded_error(folder)
        was_done, is_final = error is not None, True
        if error is None:
            _log.info("%s  (%s)", label, folder)
            began = time.monotonic()
            try:
                error = self.runner(trial, folder)
            except TryAgainError as cause:
                error, is_final = str(cause), False
            self._seconds += time.monotonic() - began
            self._steps_timed += trial.steps
        if error:
            outcome = Outcome(trial, folder, error=error, is_done=is_final)
        else:
            outcome = read_run(trial, folder, self.metric)
        if is_final and not was_done:
            # Written after the results were read: a kill in between trains nothing twice, as the run itself is whole.
            try:
                folder.mkdir(parents=True, exist_ok=True)
                replace_text(folder / OUTCOME_FILE, json.dumps({"error": error}) + "\n")
            except OSError as cause:
                raise MachineError(f"{folder}: the outcome can't be written: {cause}; free some space there") from cause
        _refuse_other_data(self._done, outcome)
        self._done.append(outcome)
        self._steps_done += trial.steps
        if outcome.dev is None:
            line = f"{label}: failed: {outcome.error}{' (before)' if was_done else ''}"
        else:
            value = f"dev {outcome.dev.deciding(self.metric)} {dev_value(outcome, self.metric):.4f}"
            line = f"{label}: done before, {value}" if was_done else f"  {value}"
            left = self.total_steps - self._steps_done
            # Only trainings of this start are timed: what an earlier one did may have run on another machine.
            if not was_done and left > 0 and self._steps_timed:
                line += f"; about {show_duration(self._seconds / self._steps_timed * left)} left"
        _log.info("%s", line)
        return outcome


def trial_name(number: int, choice: Choice, *, of: int) -> str:
    """Return the name of a trial's folder: its number and its values, as far as a file system takes them."""
    values = "_".join(f"{key}-{_UNSAFE.sub('.', value)}" for key, value in _without_secrets(choice).items())
    return f"{number:0{max(2, len(str(of)))}}_{values[:NAME_CHARACTERS]}"


def tried_keys(names: Iterable[str]) -> set[str]:
    """Return the keys that names set: those behind an alias, and a mapping for a part of it (`column_mapping.text`)."""
    return {target for name in names for target in targets(name.partition(".")[0])}


def _without_secrets(choice: Choice) -> dict[str, str]:
    return {key: redact(f"{key}={value}").partition("=")[2] for key, value in choice.items()}


def _recorded_error(folder: Path) -> str | None:
    """Return why a trial failed, nothing where it finished, None where it isn't done."""
    path = folder / OUTCOME_FILE
    try:
        error: str = fit(str, read_object(path)["error"], where="error")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: can't be read: {error}; delete it to train the trial again") from error
    return error


def read_run(trial: Trial, folder: Path, metric: str) -> Outcome:
    """Read the outcome of a finished run: the dev result of the model that it kept, and its verdict.

    Raises:
        DataError: A file is missing or broken.
    """
    report = run_report(folder)
    kept, has_test = report["checkpoint"]["kept_step"], report["dev_task"] != ""
    # Without a test set `final` is the dev set; with one the dev result stands beside the checkpoint that was kept.
    dev = read_evaluation(folder / "evaluation" / (f"step-{kept}" if has_test else "final"))
    try:
        query_values(dev, dev.deciding(metric))
    except ValueError as error:
        raise DataError(f"{folder}: {error} Trials can't be compared by it") from error
    return Outcome(
        trial,
        folder,
        dev,
        kept,
        report["verdict"]["sentence"],
        on_test=any(row.get("role") == "test" for row in report.get("sets", ())),
        caveats=report.get("caveats", ()),
        data=report.get("data_hashes") or {},  # older versions recorded none
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
    other = next((earlier for earlier in before if earlier.data), None)
    if other is None:
        return
    # Where the training rows themselves are tried they differ on purpose; the sets of the evaluation never do.
    makes_rows = bool(tried_keys(outcome.trial.choice) & (DataKeys.model_fields.keys() - LEAVE_ROWS | ASK_FOR_ROWS))
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


def best_of(outcomes: Sequence[Outcome], metric: str) -> Outcome | None:
    """Return the finished trial that is best on the dev set, the first of equals; None where none finished."""
    finished = [outcome for outcome in outcomes if outcome.dev is not None]
    return max(finished, key=lambda outcome: dev_value(outcome, metric), default=None)


def dev_value(outcome: Outcome, metric: str) -> float:
    """Return the dev metric of a finished trial, or what decides on its dev set instead."""
    assert outcome.dev is not None
    value: float = outcome.dev.metrics[outcome.dev.deciding(metric)]
    return value


def dev_metric(outcomes: Sequence[Outcome], metric: str) -> str:
    """Return what decides on the dev set: the metric, or the first one of a set that is measured otherwise."""
    return next((outcome.dev.deciding(metric) for outcome in outcomes if outcome.dev is not None), metric)
