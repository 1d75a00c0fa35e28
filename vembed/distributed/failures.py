"""What ended a run of several processes: the first failure, its rank, and the file that tells scripts.

A launcher turns the exit code of every process into 1, and a process that only lost its peers can't say why. So the
first rank that fails claims the failure in the store that all share; the others leave with its code and name it.
`exit.json` in the output folder holds it, and a folder of the launching process, which returns the code.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from vembed.errors import ExitCode
from vembed.files import replace_text

_log = logging.getLogger(__name__)

EXIT_FILE: Final = "exit.json"

LAUNCHER_FOLDER: Final = "VEMBED_EXIT_FOLDER"
"""Variable that names the folder in which the launching process reads of a failure, one file for each rank."""

_OWNED: Final = "output_folder"
"""File there in which rank 0 names the output folder once the run writes to it."""

UNEXPECTED_CODE: Final = 1
"""Exit code of an error that is a bug: Python's own."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a run that did not reach its last step.

    Attributes:
        code: Exit code of the run.
        rank: Process that failed first.
        host: Its machine.
        message: What it said.
        time: When, in UTC.
    """

    code: int
    rank: int
    host: str
    message: str
    time: str = ""

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the contents of exit.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @property
    def is_stop(self) -> bool:
        """Whether a signal asked the run to stop: every process then leaves by itself, with a checkpoint."""
        return self.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"


class Report(Protocol):
    """Tells the other processes that this one fails."""

    def __call__(self, error: BaseException, *, code: int, message: str) -> Ending:
        """Tell the others."""
        ...


_reports: list[Report] = []
"""How this process tells the others; empty in a run of one process."""


def report_with(report: Report | None) -> None:
    """Set how this process tells the others of its failure.

    Args:
        report: Called with the error that ends this process; None when nobody is there to be told.
    """
    _reports[:] = [] if report is None else [report]


def report_failure(error: BaseException, *, code: int, message: str) -> Ending | None:
    """Tell the other processes that this one fails.

    Args:
        error: The exception that ends this process.
        code: Exit code that it stands for.
        message: What it says, without secrets.

    Returns:
        The run's first failure, whose code every process ends with; None in a run of one process.
    """
    return _reports[0](error, code=code, message=message) if _reports else None


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Ending:
    """Why this process ends.

    Attributes:
        first: The run's first failure.
        is_ours: Whether this process was the one to tell of it; it may have told of one that can't speak any more.
    """

    first: Failure
    is_ours: bool


class ExitFiles:
    """Where a failure is written.

    The output folder is the run's only from the moment that it writes there: an error before that belongs to nobody's
    folder, unless the folder is missing or empty.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._is_own = False

    def expect(self, folder: Path) -> None:
        """Say which folder the run will write.

        Args:
            folder: The output folder; it may be another run's.
        """
        self._folder, self._is_own = folder, False

    def own(self, folder: Path, *, is_main: bool) -> None:
        """Say that the run writes a folder now, and delete what an earlier end of it left.

        Args:
            folder: The output folder.
            is_main: Whether this process is the one that writes there.
        """
        self._folder, self._is_own = folder, True
        if not is_main:
            return
        (folder / EXIT_FILE).unlink(missing_ok=True)
        launcher = os.environ.get(LAUNCHER_FOLDER)
        if launcher:
            (Path(launcher) / _OWNED).write_text(str(folder.resolve()), "utf-8")

    def write(self, failure: Failure, *, to_folder: bool) -> None:
        """Write a failure for the launching process and into the output folder.

        Args:
            failure: The first one of the run.
            to_folder: Whether this process writes the folder's file: one does.
        """
        launcher = os.environ.get(LAUNCHER_FOLDER)
        # It may be gone, with its folder.
        paths = [Path(launcher) / f"{os.getpid()}.json"] if launcher and Path(launcher).is_dir() else []
        if to_folder and self._folder is not None and (self._is_own or _is_free(self._folder)):
            paths.append(self._folder / EXIT_FILE)
        for path in paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, failure.to_json())
            except OSError as error:
                _log.warning("%s can't be written: %s", path, error)


EXIT_FILES = ExitFiles()
"""Of this process."""


def write_for_the_dead(failure: Failure, folder: Path) -> None:
    """Write the output folder's exit.json in the launching process, for processes that can't.

    Args:
        failure: What ended them.
        folder: Where they tell the launcher.
    """
    owned = folder / _OWNED
    if owned.is_file():
        files = ExitFiles()
        files.own(Path(owned.read_text("utf-8")), is_main=False)
        files.write(failure, to_folder=True)


def read_failure(folder: Path) -> Failure | None:
    """Return the failure that the processes of a launcher wrote into its folder: they all write of the first one."""
    for path in sorted(folder.glob("*.json")):
        return Failure.from_json(path.read_text("utf-8"))
    return None


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
