"""A training of a sweep as a process of its own: `vembed train` with the settings of a trial.

It continues from the run's own checkpoints where there are some. The process gets a SIGTERM when this one ends, however
it does, so that it saves a checkpoint and leaves.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vembed.config.load import read_overrides
from vembed.config.names import targets
from vembed.distributed.lock import FolderInUseError, hold_output
from vembed.errors import ExitCode, PreemptedError, VembedError
from vembed.json_text import fit, read_object
from vembed.redact import redact
from vembed.text import cut
from vembed.training.trackers import read_rows
from vembed.workflows.sweeping.trials import TryAgainError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vembed.workflows.sweeping.trials import Trial

GO_ON: Final = "what is done is kept, and the same command continues"

POLL_SECONDS: Final = 0.2
WAIT_SECONDS: Final = 600.0
"""Longest wait for the process of a sweep that was killed: it saves a checkpoint before it leaves its folder."""

PROBE_STEPS: Final = 3
"""Steps of the short run that a time is estimated from."""

_PR_SET_PDEATHSIG: Final = 1  # of linux/prctl.h
_LOG_LINES: Final = 50
_STOPPED: Final = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
_OUTSIDE: Final = (ExitCode.CONFIG, ExitCode.ENVIRONMENT)
"""Exit codes of causes that may be gone at the next try: a file, a package, memory, a full disk."""

_log = logging.getLogger(__name__)


class PlanFailedError(VembedError):
    """A training can't be planned or tried; the message is the last line that it printed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code) if code in {*ExitCode} else ExitCode.ENVIRONMENT


@dataclass(frozen=True, slots=True)
class TrainProcess:
    """Trains a trial with `vembed train`, in a process of its own whose output goes into a log beside its folder."""

    config: Path | None  # the file that the user named
    overrides: Sequence[str]  # those that the user wrote
    poll: Callable[[], None]  # raises where a signal asked to stop

    def __call__(self, trial: Trial, folder: Path) -> str:
        """Train, and return why it failed; nothing where it finished.

        A process that the system killed, most often for memory, gets a second try from its last checkpoint.

        Raises:
            PreemptedError: A signal asked it to stop.
            TryAgainError: The configuration or the machine is why it failed.
            FolderInUseError: Another process keeps writing in the folder.
        """
        self._wait_for(folder)
        log = folder.with_name(f"{folder.name}.log")
        words = self.words({**trial.choice, **trial.overrides, **_run_settings(folder)})
        begin = _size(log)  # an earlier try wrote into the same log; its last words aren't the reason of this failure
        code = self._run(words, log)
        if code == -signal.SIGKILL:
            _log.warning("%s was killed, perhaps for lack of memory; one more try from its last checkpoint", folder)
            begin = _size(log)
            code = self._run(words, log)
        if code in _STOPPED:
            raise PreemptedError(f"{folder.name} was stopped by a signal; {GO_ON}")
        if code in _OUTSIDE:
            raise TryAgainError(_reason(code, log, begin))
        return "" if code == ExitCode.OK else _reason(code, log, begin)

    def words(self, settings: Mapping[str, str], *options: str) -> list[str]:
        """Return the command of a training with some settings in place of the user's own."""
        overrides = [f"{key}={value}" for key, value in settings.items()]
        replaced = _keys(overrides)
        # The loader refuses a key that is set twice, so what the trial sets goes out of the user's words.
        kept = [override for override in self.overrides if not _keys([override]) & replaced]
        file = [] if self.config is None else [str(self.config)]
        command = [sys.executable, "-m", "vembed", "train", *file, *options]
        return [*command, "--config_override", *kept, *overrides]

    def steps(self, trial: Trial) -> int:
        """Return the optimizer steps of a trial, as its plan has them.

        Raises:
            PreemptedError: A signal asked to stop.
            PlanFailedError: It can't be planned.
        """
        with tempfile.TemporaryDirectory(prefix="vembed-sweep-") as work:
            folder = Path(work, "plan")
            self._run_or_raise(self.words({**trial.choice, **_run_settings(folder)}, "--plan"), Path(work, "log"))
            steps: int = fit(int, read_object(folder / "plan.json")["steps"], where="steps")
            return steps

    def seconds(self, trial: Trial) -> float:
        """Return about how long a trial takes: a short run of it, and its further steps at the same speed.

        Raises:
            PreemptedError: A signal asked to stop.
            PlanFailedError: It can't be run.
        """
        steps = min(PROBE_STEPS, trial.steps)
        short = {"max_steps": str(steps), "warmup_steps": "null", "bm25": "false", "report_to": "none"}
        with tempfile.TemporaryDirectory(prefix="vembed-sweep-") as work:
            folder, began = Path(work, "run"), time.monotonic()
            self._run_or_raise(self.words({**trial.choice, **short, **_run_settings(folder)}), Path(work, "log"))
            whole = time.monotonic() - began
            # The fastest step: the first one also compiles kernels and fills caches.
            step_seconds = min(float(row["step_seconds"]) for row in read_rows(folder / "metrics.jsonl"))
        return whole + step_seconds * (trial.steps - steps)

    def _run_or_raise(self, words: Sequence[str], log: Path) -> None:
        code = self._run(words, log)
        if code in _STOPPED:
            raise PreemptedError(f"stopped by a signal; {GO_ON}")
        if code != ExitCode.OK:
            raise PlanFailedError(_reason(code, log), code)

    def _run(self, words: Sequence[str], log: Path) -> int:
        """Run a command until it ends; a signal to this process stops it too."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's signals come through this process, once
                preexec_fn=_end_with_parent(),
            )
            try:
                while child.poll() is None:
                    self.poll()
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(POLL_SECONDS)
            except BaseException:
                child.send_signal(signal.SIGTERM)
                child.wait()  # until it has saved its checkpoint: the same command continues from there
                raise
        return child.returncode

    def _wait_for(self, folder: Path) -> None:
        """Wait until the process of a sweep that was killed has left the folder.

        Raises:
            FolderInUseError: It doesn't.
        """
        until, is_logged = time.monotonic() + WAIT_SECONDS, False
        while folder.exists():
            try:
                with hold_output(folder):
                    return
            except FolderInUseError:
                if time.monotonic() > until:
                    raise
            if not is_logged:
                _log.info("waiting for the process that still writes in %s", folder)
                is_logged = True
            self.poll()
            time.sleep(POLL_SECONDS)


def _run_settings(folder: Path) -> dict[str, str]:
    """Return the settings that make a run one of a sweep: in a folder of its own, and continued where it stopped."""
    quoted = "'" + str(folder).replace("'", "''") + "'"  # a path may look like a number, or open a list
    return {"output_dir": quoted, "resume": "auto", "overwrite_output_dir": "false", "seeds": "null"}


def _keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys that overrides set, a part of a mapping as `key.part`."""
    entries = read_overrides(overrides).settings
    names = [(name, entry.part) for entry in entries for name in targets(entry.name)]
    return {name if part is None else f"{name}.{part}" for name, part in names}


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _reason(code: int, log: Path, begin: int = 0) -> str:
    """Return why a process failed: its last line that begins with "error: ", else its last line.

    Args:
        begin: Size in bytes that the log had before the process.
    """
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(begin)
        lines = [line.rstrip() for line in deque(file, maxlen=_LOG_LINES) if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "no word")
    how = f"killed by {signal.Signals(-code).name}: " if code < 0 else ""
    return redact(cut(how + re.sub(r"^error: ", "", last), 500))


def _end_with_parent() -> Callable[[], None] | None:
    """Return what makes a child get a SIGTERM when its parent ends; None where the system can't."""
    if not sys.platform.startswith("linux"):
        return None
    # Everything is looked up before the fork: an import in the child may wait for a lock that no thread there holds.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended in between
            os.kill(os.getpid(), signal.SIGTERM)

    return ask
