"""Start one process for each device of this machine with torch's elastic launcher, and say what became of the run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from vembed.distributed.process_env import LAUNCHED_BY
from vembed.distributed.watchdog import LAUNCHER_FOLDER, OWNED_FILE, ExitFiles, Failure, host_name
from vembed.errors import ExitCode
from vembed.plan.devices import cpu_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_ELASTIC: Final = "torch.distributed.elastic"
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def launch(script: Path, words: Sequence[str], *, num_processes: int, called: str, stop_seconds: int) -> int:
    """Start processes, wait for them, and return the exit code of the run with what failed first.

    A signal to this process reaches all of them.

    Args:
        script: Python file that every process runs.
        words: Its arguments.
        num_processes: How many to start.
        called: How the user called the command, for the report and for messages.
        stop_seconds: How long the processes may take to save and leave after a signal; then they are killed.
    """
    options: dict[str, Any] = {}
    known = {option.name for option in fields(LaunchConfig)}
    if "shutdown_timeout" in known:  # older versions of torch kill after 30 s
        options["shutdown_timeout"] = stop_seconds
    if "signals_to_handle" in known:  # and leave out SIGUSR1
        handled = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup wants it
        options["signals_to_handle"] = ",".join(number.name for number in handled)
    elastic = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        **options,
    )
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_cores() // num_processes)))  # which share the cores
    with tempfile.TemporaryDirectory(prefix="vembed-") as folder, ExitStack() as stack:
        added = {LAUNCHED_BY: called, LAUNCHER_FOLDER: folder, "OMP_NUM_THREADS": threads}
        for context in (_environment(added), _quiet_elastic(), _own_signals()):
            stack.enter_context(context)
        try:
            elastic_launch(elastic, sys.executable)(str(script), *words)
        except ChildFailedError as error:
            rank, process = error.get_first_failure()
            code, message = process.exitcode, f"ended with exit code {process.exitcode}"
            if code < 0:
                code = int(ExitCode.ENVIRONMENT)
                message = (
                    f"was ended by {process.signal_name()}; did the machine run out of memory? The same command "
                    f"continues from the last checkpoint"
                )
            return conclude(Path(folder), Failure(code, rank, host_name(), message))
        except SignalException as stopped:  # processes that had nothing to save yet
            code = ExitCode.INTERRUPTED if stopped.sigval == signal.SIGINT else ExitCode.PREEMPTED
            message = f"stopped by {stopped.sigval.name} before training began; the same command starts again"
            return conclude(Path(folder), Failure(int(code), 0, host_name(), message))
    return ExitCode.OK


def conclude(folder: Path, unsaid: Failure) -> int:
    """Return the exit code of a run that failed, and say why where its processes could not.

    Args:
        folder: Where each process writes the first failure, and rank 0 which output folder is the run's.
        unsaid: The failure as seen from here, for processes that were killed before they could write.
    """
    for path in folder.glob("*.json"):
        return Failure.from_json(path.read_text("utf-8")).code  # they all write of the first one
    if (owned := folder / OWNED_FILE).is_file():
        files = ExitFiles()
        files.own(Path(owned.read_text("utf-8")), is_main=False)
        files.write(unsaid, to_folder=True)
    print(f"error: {unsaid}", file=sys.stderr)  # noqa: T201 - nobody else is left to say it
    return unsaid.code


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put the handlers of signals back that torch's launcher replaces for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was installed by C code, which Python can't put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Add variables for the processes that are started in the block."""
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep torch's own words about failures off the terminal: the processes say which failed first, and why."""
    loggers = [logging.getLogger(name) for name in [*logging.root.manager.loggerDict] if name.startswith(_ELASTIC)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
