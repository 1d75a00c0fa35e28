"""The failure that ends a run of several processes, whom their beats accuse of it, and the file that tells scripts.

A launcher turns the exit code of every process into 1, and a process that only lost its peers can't say why. So the
first rank that fails claims the failure in the store that all share (watchdog.py); the others leave with its code and
name it. `exit.json` in the output folder holds it, and a folder of the launching process, which returns the code.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vembed.errors import ExitCode
from vembed.files import replace_text
from vembed.output_lock import LOCK_FILE
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

_log = logging.getLogger(__name__)

EXIT_FILE: Final = "exit.json"

LAUNCHER_FOLDER: Final = "VEMBED_EXIT_FOLDER"
"""Variable that names the folder in which the launching process reads of a failure, one file for each rank."""

_OWNED: Final = "output_folder"
"""File there in which rank 0 names the output folder once the run writes to it."""

_PACKAGE: Final = Path(__file__).parents[1]
_WATCHING: Final = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("failures", "watchdog", "signals"))
_COLLECTIVES: Final = str(Path(__file__).parent)
_TORCH_COLLECTIVES: Final = str(Path("torch", "distributed"))

UNEXPECTED_CODE: Final = 1
"""Exit code of an error that is a bug: Python's own."""


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a run that did not reach its last step: what the process that failed first said."""

    code: int  # exit code of the run
    rank: int
    host: str
    message: str
    time: str = field(default_factory=_now)  # UTC

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", redact(self.message))  # a path of the run's may hold a secret

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the contents of exit.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def with_advice(self, words: LastWords) -> Failure:
        """Return it with what was saved, where the run has begun."""
        return replace(self, message=f"{self.message}; {words.advice}") if words.doing else self

    @property
    def is_stop(self) -> bool:
        """Whether a signal asked the run to stop: every process then leaves by itself, with a checkpoint."""
        return self.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"


class LastWords:
    """Where a run stands, for whoever has to say why it ends.

    Attributes:
        doing: What it does now, behind "while"; empty before it begins.
        checkpoint: The newest one that is whole, or that it continues from.
    """

    def __init__(self) -> None:
        self.doing = ""
        self.checkpoint: Path | None = None

    @property
    def advice(self) -> str:
        """What was saved, and how to continue."""
        if self.checkpoint is None:
            return "nothing was saved, and the same command starts again"
        return f"resume continues from {self.checkpoint}"

    def __str__(self) -> str:
        return f" while {self.doing}; {self.advice}" if self.doing else ""


class ExitFiles:
    """Where a failure is written.

    The output folder is the run's only from the moment that it writes there: an error before that belongs to nobody's
    folder, unless the folder is missing or empty.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._is_own = False

    def expect(self, folder: Path) -> None:
        """Say which output folder the run will write; it may be another run's now."""
        self._folder, self._is_own = folder, False

    def own(self, folder: Path, *, is_main: bool) -> None:
        """Say that the run writes its output folder now; the main process deletes what an earlier end of it left."""
        self._folder, self._is_own = folder, True
        if not is_main:
            return
        (folder / EXIT_FILE).unlink(missing_ok=True)
        launcher = os.environ.get(LAUNCHER_FOLDER)
        if launcher:
            (Path(launcher) / _OWNED).write_text(str(folder.resolve()), "utf-8")

    def write_own(self, failure: Failure) -> None:
        """Write the failure of a run of one process, where its output folder is there."""
        if self._is_own and self._folder is not None and self._folder.is_dir():
            self.write(failure, to_folder=True)

    def write(self, failure: Failure, *, to_folder: bool) -> None:
        """Write the run's first failure for the launching process and, in one process, into the output folder."""
        launcher = os.environ.get(LAUNCHER_FOLDER)
        # It may be gone, with its folder.
        paths = [Path(launcher) / f"{os.getpid()}.json"] if launcher and Path(launcher).is_dir() else []
        if to_folder and self._folder is not None and (self._is_own or _is_free(self._folder)):
            paths.append(self._folder / EXIT_FILE)
            if self._is_own and not self._folder.is_dir():
                _log.warning("%s is not written: the folder was moved or deleted", paths.pop())
        for path in paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, failure.to_json(), shared=True)  # without a store, every process writes it
            except OSError as error:
                _log.warning("%s can't be written: %s", path, error)


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and all(path.name == LOCK_FILE for path in folder.iterdir()))


def write_for_the_dead(failure: Failure, folder: Path) -> None:
    """Write the output folder's exit.json for processes that can't: they wrote to the launching one's `folder`."""
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


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process tells of itself every second."""

    number: int  # counts the beats
    host: str
    line: str  # where its main thread is: file, line and function
    waits: bool  # whether that is in a collective
    is_patient: bool  # whether the first rank works alone just now, and this is it or one that waits for it
    num_collectives: int  # that it has entered
    pid: int
    pid_namespace: str  # two processes with the same one see each other's pids; empty where the system doesn't say


def ended_ranks(beats: Mapping[int, Beat], *, own: int) -> list[int]:
    """Return the ranks whose processes the system of this one (rank `own`) knows no more; of other systems, none."""
    here = beats[own].pid_namespace
    return [rank for rank, beat in beats.items() if here and beat.pid_namespace == here and not _is_known(beat.pid)]


def _is_known(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's now
    return True


def silent_ranks(before: Mapping[int, Beat], after: Mapping[int, Beat], *, own: int) -> list[int]:
    """Return the ranks that have told nothing between two looks; this one (`own`) can't be silent."""
    return [rank for rank in before if rank != own and before[rank].number == after[rank].number]


def late_ranks(beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks that others wait for: they are in no collective, or have entered fewer."""
    waiting = [rank for rank, beat in beats.items() if beat.waits]
    absent = [rank for rank, beat in beats.items() if not beat.waits and not beat.is_patient]
    if waiting and absent:
        return absent
    fewest = min(beat.num_collectives for beat in beats.values())
    behind = [rank for rank, beat in beats.items() if beat.num_collectives == fewest]
    return behind if len(behind) < len(beats) else []


def silence_of(ranks: Sequence[int], beats: Mapping[int, Beat]) -> Failure:
    """Return the failure that the silence of some ranks is."""
    return _accuse(
        ranks,
        beats,
        f"ended or stopped without a word, last seen in {beats[ranks[0]].line}. Killed from outside (did the machine "
        f"run out of memory?), stopped, crashed in a library, or its machine or network is gone",
    )


def lateness_of(ranks: Sequence[int], beats: Mapping[int, Beat], seconds: float) -> Failure:
    """Return the failure that some ranks are missing from a collective in which the others have waited so long."""
    return _accuse(
        ranks,
        beats,
        f"the other processes have waited {seconds:g} s for it in a collective (nccl_timeout), and it is still in "
        f"{beats[ranks[0]].line}. If that is slow but right, raise nccl_timeout",
    )


def loss_of_store(beats: Mapping[int, Beat], *, own: int, is_orphan: bool) -> Failure:
    """Return the failure that the loss of the processes' store is.

    Args:
        beats: Of all processes, as once read; may be empty.
        own: Rank of this one.
        is_orphan: Whether the process that started this one has ended.
    """
    ended = ended_ranks(beats, own=own) if beats else []
    gone = [f"rank {rank} on {beats[rank].host}" for rank in ended]
    if is_orphan:
        gone.insert(0, f"the launcher on {host_name()}")
    elif not gone:
        at = os.environ.get("MASTER_ADDR", "")
        keeper = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        gone = [f"{keeper} at {beats[0].host if beats and keeper == 'rank 0' else at}, or its machine or network,"]
    are = "is" if len(gone) == 1 else "are"
    return Failure(
        int(ExitCode.ENVIRONMENT), own, host_name(), f"{' and '.join(gone)} {are} gone (killed from outside?)"
    )


def _accuse(ranks: Sequence[int], beats: Mapping[int, Beat], message: str) -> Failure:
    others = f" (the same holds for rank {', '.join(map(str, ranks[1:]))})" if ranks[1:] else ""
    return Failure(int(ExitCode.ENVIRONMENT), ranks[0], beats[ranks[0]].host, message + others)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the main thread was when it was looked at."""

    line: str  # file, line and function, for people
    waits: bool  # whether it was in a collective
    spot: tuple[object, ...]  # the instruction of every function of ours that it was in, and the collectives entered
    since: float  # time at which it came there, by the monotonic clock

    @property
    def still_seconds(self) -> float:
        """For how long it has not moved."""
        return time.monotonic() - self.since


def look(before: Whereabouts | None = None, *, num_collectives: int = 0) -> Whereabouts:
    """Return where the main thread is now; `before` is where it was when it was last looked at."""
    frames = _frames(sys._current_frames().get(threading.main_thread().ident or 0))
    ours = [frame for frame in frames if _is_ours(frame)]
    spot = (num_collectives, *((frame.f_code.co_qualname, frame.f_lasti) for frame in ours))
    since = before.since if before is not None and before.spot == spot else time.monotonic()
    return Whereabouts(_show(ours or frames), _waits(frames, ours), spot, since)


def failed_in_collective(error: BaseException) -> bool:
    """Return whether an exception was raised inside a collective: then the cause may be in another process."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    return _waits(frames, [frame for frame in frames if _is_ours(frame)])


def _frames(innermost: FrameType | None) -> list[FrameType]:
    """Return a stack, innermost first."""
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(_PACKAGE)) and frame.f_code.co_filename not in _WATCHING


def _waits(frames: list[FrameType], ours: list[FrameType]) -> bool:
    """Return whether the innermost function of ours is a collective, or has called one of torch's."""
    if not ours:
        return False
    if ours[0].f_code.co_filename.startswith(_COLLECTIVES):
        return True
    deeper = frames[: frames.index(ours[0])]
    return any(_TORCH_COLLECTIVES in frame.f_code.co_filename for frame in deeper)


def _show(frames: list[FrameType]) -> str:
    if not frames:
        return "no Python code"
    frame = frames[0]
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(_PACKAGE.parent) if path.is_relative_to(_PACKAGE) else path
    return f"{shown}:{frame.f_lineno} ({frame.f_code.co_name})"
