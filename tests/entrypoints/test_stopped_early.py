"""Signals before and after the loop: one last word that says what was done and how to continue, and the code for it."""

from __future__ import annotations

import json
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import Site, run_here, run_keys, steps_saved, write_config

import vembed.entrypoints.train as command
import vembed.training.run as assembly
from vembed.entrypoints.command import run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType


def signal_before(monkeypatch: pytest.MonkeyPatch, room: ModuleType, name: str, number: signal.Signals) -> None:
    """Send a signal to this process when a function is called."""
    function: Callable[..., Any] = getattr(room, name)

    def signalled(*words: Any, **options: Any) -> Any:
        os.kill(os.getpid(), number)
        return function(*words, **options)

    monkeypatch.setattr(room, name, signalled)


PHASES = [
    (command, "load_config", "starting", False),
    (assembly, "load_data", "reading the data", False),
    (assembly, "build_plan", "making the plan", True),
    (assembly, "build_encoder", "loading the model", True),
    (assembly, "explain", "beginning", True),
]


@pytest.mark.parametrize(("room", "name", "doing", "owns"), PHASES)
def test_a_signal_before_the_first_step_leaves_at_once_with_one_line(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: ModuleType, name: str, doing: str, owns: bool
) -> None:
    number = signal.SIGUSR1 if name == "explain" else signal.SIGTERM
    signal_before(monkeypatch, room, name, number)
    stopped = run_keys(tmp_path, site.keys(max_steps=2))
    words = f"stopped by {number.name} while {doing}; nothing was saved, and the same command starts again"
    assert (stopped.code, stopped.err.splitlines()) == (75, [f"error: {words}"])
    assert (stopped.folder / "exit.json").exists() == owns, "a folder that isn't the run's yet is left alone"
    if owns:
        left = json.loads((stopped.folder / "exit.json").read_text("utf-8"))
        assert (left["code"], left["message"]) == (75, words)


def test_a_signal_inside_an_import_is_told_as_a_signal(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 turns whatever a class's `__set_name__` raises, a stop too, into a RuntimeError."""
    (tmp_path / "slow_plugin.py").write_text(
        "import os, signal\n"
        "class Field:\n"
        "    def __set_name__(self, owner, name):\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "class Model:\n"
        "    size = Field()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    stopped = run_keys(tmp_path, site.keys(max_steps=2, plugins=["slow_plugin"]))
    words = "stopped by SIGUSR1 while starting; nothing was saved, and the same command starts again"
    assert (stopped.code, stopped.err.splitlines()) == (75, [f"error: {words}"])


def test_a_signal_at_the_end_says_what_was_saved_and_the_same_command_ends_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, site.keys(max_steps=2, eval_steps=2))
    with monkeypatch.context() as patch:
        signal_before(patch, assembly, "finish_run", signal.SIGHUP)
        stopped = run_here(config)
    checkpoint = stopped.folder / "checkpoints/step-00000002"
    words = f"stopped by SIGHUP while finishing; resume continues from {checkpoint}"
    assert (stopped.code, stopped.err.splitlines()) == (75, [f"error: {words}"])
    assert json.loads((stopped.folder / "exit.json").read_text("utf-8"))["message"] == words
    ended = run_here(config)
    assert ended.code == 0, ended.err
    assert steps_saved(ended.folder) == [2]
    assert not (ended.folder / "exit.json").exists()


def test_a_terminal_that_is_closed_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with SIGHUP when a connection breaks: what is printed then goes nowhere, what is saved is saved."""
    ours, theirs = os.openpty()
    terminal = os.fdopen(theirs, "w", buffering=1)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    done = tmp_path / "done"

    def command() -> int:
        logging.getLogger("vembed").info("read")
        os.close(ours)
        for line in ("lost", "lost too"):
            logging.getLogger("vembed").info(line)
        os.kill(os.getpid(), signal.SIGHUP)
        done.touch()
        return 0

    assert run_command(command) == 75
    assert not done.exists()
    terminal.close()
