"""The trackers by name: ours and those of plugins go through the same door."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, TypeVar

from vembed.errors import MachineError, VembedError
from vembed.registry import TRACKERS
from vembed.training.trackers.base import GuardedTracker, Tracker, warn_of_failure
from vembed.training.trackers.hosted import missing_text
from vembed.training.trackers.jsonl import JsonlTracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)

TRACKER_FOLDER = "trackers"
"""Holds a folder for each tracker but TensorBoard, so that none takes a name of the run's own files."""

Registered = TypeVar("Registered", bound=type[Tracker])


def register_tracker(tracker: Registered) -> Registered:
    """Add a tracker, a class with a `name` that `report_to` takes; also a decorator.

    Raises:
        ConfigError: The name is taken, or not one that a configuration can use.
    """
    TRACKERS.register(tracker.name, tracker, module=tracker.__module__)
    return tracker


def open_trackers(
    report_to: str | list[str], output: Path, *, resume_step: int, config: Mapping[str, object]
) -> list[Tracker]:
    """Return metrics.jsonl, cut back to a step, and the trackers that the user wants beside it.

    Args:
        report_to: Their names; "none" is none, "all" is each of ours whose package is installed.
        resume_step: Step of the checkpoint that the run continues from; 0 for a run from the start.

    Raises:
        MachineError: The disk refuses metrics.jsonl, or a tracker misses a package.
    """
    jsonl = JsonlTracker(output / "metrics.jsonl")
    jsonl.say_lost(resume_step)
    jsonl.cut_back(resume_step)
    trackers: list[Tracker] = [jsonl]
    takes_model = False
    for name in _names(report_to):
        folder = output / name if name == "tensorboard" else output / TRACKER_FOLDER / name
        try:
            tracker = TRACKERS.load(name)(folder, resume_step=resume_step, config=config)
        except VembedError:
            raise  # before training, with the fix
        except Exception as error:  # noqa: BLE001 - a plugin's code may fail in any way
            warn_of_failure(name, error, Tracker.advice)
        else:
            trackers.append(GuardedTracker(tracker, name=name))
            takes_model = takes_model or type(tracker).log_model is not Tracker.log_model
    if config.get("log_model") and not takes_model:
        _log.warning("log_model: no tracker of report_to takes a model; wandb, mlflow and trackio do")
    return trackers


def refuse_missing_packages(report_to: str | list[str]) -> None:
    """Refuse a tracker whose package isn't installed, without importing any.

    Raises:
        MachineError: It is missing.
    """
    for name in _names(report_to):
        if name not in TRACKERS.plugins() and not _is_installed(name):
            raise MachineError(missing_text(name, f"No module named {name!r}"))


def _names(report_to: str | list[str]) -> list[str]:
    if report_to == "all":
        return [name for name in TRACKERS.names() if name in TRACKERS.plugins() or _is_installed(name)]
    return [] if report_to == "none" else [report_to] if isinstance(report_to, str) else [*dict.fromkeys(report_to)]


def _is_installed(package: str) -> bool:
    """Tell whether there is a package; a folder of that name, which wandb leaves behind, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
