"""A run that fails on one process ends on all of them, with one cause, one exit code and one exit.json.

A launcher turns the exit code of every process into 1, a process that only lost its peers can't say why, and a
collective of NCCL waits for ever for one that is gone. So each process has a thread beside its main thread:

1. Every second it tells the store that all processes share where this process's main thread is.
2. It looks there for a failure that another process has claimed. The first claim is the run's failure; the others
   leave with its code and name it. The main thread may never hear of it, so the thread ends this process when the main
   thread doesn't.
3. When the main thread stands still, it looks whether the other processes of this machine are there: one that was
   killed is named at once, as no launcher can reach those that wait for it inside a collective.
4. When the main thread has stood still for the whole timeout, it compares: a process that no longer beats has stopped
   or died; one that is elsewhere while others wait in a collective is missing from it. That one is named.
5. A store that can't be reached is the end of the launcher, or of the process that keeps it. Each process then says so
   by itself, and lingers until the others have noticed too: its end isn't the cause of theirs.

Whoever is named "stopped answering, last seen in FILE:LINE": from outside, killed, stopped, hung and slow look alike.
The store is torch's own, at the address where the processes met; nothing here costs the main thread anything. No torch
is imported: commands make a watchdog before they know whether they need it.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vembed.distributed.lock import LOCK_FILE, machine_name
from vembed.errors import ExitCode, MachineError
from vembed.files import replace_text
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch.distributed import Store  # type: ignore[attr-defined]

EXIT_FILE: Final = "exit.json"

LAUNCHER_FOLDER: Final = "VEMBED_EXIT_FOLDER"
"""Variable that names the folder in which the launching process reads of a failure, one file for each rank."""

OWNED_FILE: Final = "output_folder"
"""File there in which rank 0 names the output folder once the run writes to it."""

UNEXPECTED_CODE: Final = 1
"""Exit code of an error that is a bug: Python's own."""

BEAT_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.1
"""Pause between two looks at what the others have told the store."""

POLL_SECONDS: Final = 0.001
"""First pause between two looks for rank 0, whose work alone is mostly short; later ones are longer."""

SILENT_SECONDS: Final = 5.0
"""A process that doesn't beat for this long has stopped, died, or its machine is gone."""

FIRST_SECONDS: Final = 0.5
"""Head start of rank 0 in telling of an error that all processes meet at once."""

LEAVE_SECONDS: Final = 5.0
"""Time that the main thread has to notice another process's failure, and that the store may be away."""

LINGER_SECONDS: Final = 2.0
"""Time that a process which has lost the store stays; the others lose it within a beat."""

FAREWELL_SECONDS: Final = 10.0
"""Longest wait of a failing process for the others to have heard of it; it may be the one that keeps the store."""

STORE_SECONDS: Final = 10.0
"""Longest wait for the store."""

_CLAIM, _CLAIMS, _HEARD, _LEAVING, _PARTED = "failure", "claims", "heard", "leaving", "parted"  # keys of the store

_PACKAGE: Final = Path(__file__).parents[1]
_COLLECTIVES: Final = str(Path(__file__).parent)
_NO_COLLECTIVES: Final = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("watchdog", "signals", "lock"))
_TORCH_COLLECTIVES: Final = str(Path("torch", "distributed"))

_log = logging.getLogger(__name__)


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


# The failure of a run, and the file that tells scripts


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a run that did not reach its last step, as the process that failed first tells it."""

    code: int  # exit code of the run
    rank: int
    host: str
    message: str
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

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
        """True when a signal asked the run to stop: every process then leaves by itself, with a checkpoint."""
        return self.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"


class LastWords:
    """Progress of a run, for the message of the error that ends it.

    Attributes:
        doing: Its present work, in words that follow "while"; empty before it begins.
        checkpoint: The newest one that is whole, or that it continues from.
    """

    def __init__(self) -> None:
        self.doing = ""
        self.checkpoint: Path | None = None

    @property
    def advice(self) -> str:
        """Name of the checkpoint that was saved, and the way to continue."""
        if self.checkpoint is None:
            return "nothing was saved, and the same command starts again"
        return f"resume continues from {self.checkpoint}"

    def __str__(self) -> str:
        return f" while {self.doing}; {self.advice}" if self.doing else ""


class ExitFiles:
    """Files that a failure is written to.

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
        if launcher := os.environ.get(LAUNCHER_FOLDER):
            (Path(launcher) / OWNED_FILE).write_text(str(folder.resolve()), "utf-8")

    def write_own(self, failure: Failure) -> None:
        """Write the failure of a run of one process, where its output folder is there."""
        if self._is_own and self._folder is not None and self._folder.is_dir():
            self.write(failure, to_folder=True)

    def write(self, failure: Failure, *, to_folder: bool) -> None:
        """Write the run's first failure for the launching process and, in one process, into the output folder."""
        launcher, folder = os.environ.get(LAUNCHER_FOLDER), self._folder
        # It may be gone, with its folder.
        paths = [Path(launcher) / f"{os.getpid()}.json"] if launcher and Path(launcher).is_dir() else []
        if to_folder and folder is not None:
            is_folder = folder.is_dir()
            is_empty = is_folder and all(path.name == LOCK_FILE for path in folder.iterdir())
            if self._is_own and not is_folder:
                _log.warning("%s is not written: the folder was moved or deleted", folder / EXIT_FILE)
            elif self._is_own or is_empty or not folder.exists():
                paths.append(folder / EXIT_FILE)
        for path in paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, failure.to_json(), shared=True)  # without a store, every process writes it
            except OSError as error:
                _log.warning("%s can't be written: %s", path, error)


# Where the main thread is


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Position of the main thread at the time of a look."""

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
    frames: list[FrameType] = []  # innermost first
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    ours = [frame for frame in frames if _is_ours(frame)]
    line = "no Python code"
    if frames:
        shown = (ours or frames)[0]
        path = Path(shown.f_code.co_filename)
        path = path.relative_to(_PACKAGE.parent) if path.is_relative_to(_PACKAGE) else path
        line = f"{path}:{shown.f_lineno} ({shown.f_code.co_name})"
    # f_lasti, not the line: a loop over steps comes back to the same line, but has entered more collectives by then.
    spot = (num_collectives, *((frame.f_code.co_qualname, frame.f_lasti) for frame in ours))
    since = before.since if before is not None and before.spot == spot else time.monotonic()
    return Whereabouts(line, _waits(frames, ours), spot, since)


def failed_in_collective(error: BaseException) -> bool:
    """Return whether an exception was raised inside a collective: then the cause may be in another process."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    return _waits(frames, [frame for frame in frames if _is_ours(frame)])


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(_PACKAGE)) and frame.f_code.co_filename not in _NO_COLLECTIVES


def _waits(frames: list[FrameType], ours: list[FrameType]) -> bool:
    """Return whether the innermost function of ours is a collective, or has called one of torch's."""
    if not ours:
        return False
    if ours[0].f_code.co_filename.startswith(_COLLECTIVES):
        return True
    deeper = frames[: frames.index(ours[0])]
    return any(_TORCH_COLLECTIVES in frame.f_code.co_filename for frame in deeper)


# Whom the beats accuse


@dataclass(frozen=True, slots=True)
class Beat:
    """State of a process, which it tells the store every second."""

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
    ended = []
    for rank, beat in beats.items():
        if here and beat.pid_namespace == here:
            try:
                os.kill(beat.pid, 0)  # sends nothing
            except ProcessLookupError:
                ended.append(rank)
            except PermissionError:
                continue  # somebody else's now, so this can't tell
    return ended


def silent_ranks(before: Mapping[int, Beat], after: Mapping[int, Beat], *, own: int) -> list[int]:
    """Return the ranks that didn't beat between two looks; this one (`own`) can't be silent."""
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
    """Return the failure that ranks which stopped answering are: of the first, with the others named."""
    first = beats[ranks[0]]
    others = f" (the same holds for rank {', '.join(map(str, ranks[1:]))})" if ranks[1:] else ""
    message = (
        f"stopped answering, last seen in {first.line}: killed from outside, out of memory, stuck, or slower than "
        f"nccl_timeout allows{others}"
    )
    return Failure(int(ExitCode.ENVIRONMENT), ranks[0], first.host, message)


# The store


class StoreLostError(MachineError):
    """The store can't be reached: the launcher that keeps it has ended, or rank 0, or the network between."""


class SharedStore:
    """The store where the processes met, for both threads of one; each method raises `StoreLostError` without it.

    Args:
        store: Shared by all processes; used by this object alone.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()  # a store's client holds one conversation at a time

    @contextmanager
    def _connected(self) -> Iterator[Store]:
        with self._lock:
            try:
                yield self._store
            except RuntimeError as error:  # as torch's DistError is
                raise StoreLostError(f"the processes' store can't be reached: {error}") from error

    def has(self, *keys: str) -> bool:
        """Return whether all keys are set."""
        with self._connected() as store:
            return bool(store.check(list(keys)))

    def set(self, key: str, text: str = "here") -> None:
        """Set a key that others look at."""
        with self._connected() as store:
            store.set(key, text)

    def count(self, key: str, more: int = 1) -> int:
        """Add to a number that all processes share, and return it."""
        with self._connected() as store:
            return int(store.add(key, more))

    def texts(self, *keys: str) -> list[str]:
        """Return the texts of keys; waits for those that aren't set yet."""
        with self._connected() as store:
            return [text.decode() for text in store.multi_get(list(keys))]


def _wait(is_over: Callable[[], bool], seconds: float | None) -> None:
    """Wait until something is over, or for some seconds."""
    until = None if seconds is None else time.monotonic() + seconds
    while not is_over() and (until is None or time.monotonic() < until):
        time.sleep(LOOK_SECONDS)


# The watchdog


class Watchdog:
    """Watches the other processes of a run for this one, and tells them when this one fails.

    Whoever handles the end of the process makes it; `start_runtime` starts it where there are several processes. Before
    that, and in a run of one process, it watches nobody.

    Attributes:
        exit_files: Where the run's first failure is written.
        words: Where the run stands, for those who say why it ends.
        num_collectives: Collectives that this process has entered: two processes at one line may be a step apart.
    """

    def __init__(self) -> None:
        self.exit_files = ExitFiles()
        self.words = LastWords()
        self.num_collectives = 0
        self._is_patient = False
        self._shared: SharedStore | None = None  # until it is started
        self._rank, self._world_size, self._timeout_seconds = 0, 1, 0.0
        self._num_beats = self._num_meetings = 0
        self._whereabouts = look()
        self._claimed: Failure | None = None  # the failure that this process leaves with
        self._is_reporting = False  # the main thread is about to leave by itself
        self._suspected: tuple[float, dict[int, Beat]] | None = None  # when the others were looked at, and their beats
        self._known: dict[int, Beat] = {}  # beats of all, as first read
        self._loss: Failure | None = None  # the end of the store, as this process saw it
        self._pid_namespace = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vembed-watchdog", daemon=True)

    # Called by the main thread

    def start(self, rank: int, world_size: int, store: Store, *, timeout_seconds: float) -> None:
        """Watch the other processes from now on.

        Args:
            rank: This process.
            world_size: How many there are.
            store: Shared by all of them; used by this object alone.
            timeout_seconds: Longest wait for another process.
        """
        self._rank, self._world_size, self._shared = rank, world_size, SharedStore(store)
        self._timeout_seconds = timeout_seconds
        self._pid_namespace = machine_name()
        self._beat()
        self._thread.start()

    def stop(self, *, together: bool = True) -> None:
        """Stop watching.

        Args:
            together: Wait until every process is ready to; not after an error, of which the others may not know.
        """
        if not self._is_on:
            return
        if together:
            self._await_all(None)
        self._halt()
        if not together:
            return
        # Rank 0, which may keep the store, stays until the others need it no more.
        if self._rank > 0:
            with suppress(StoreLostError):  # rank 0 has waited for long enough; nothing is asked of the store any more
                self._store.count(_PARTED)
        elif self._all_leave():
            _wait(lambda: self._store.count(_PARTED, 0) >= self._world_size - 1, FAREWELL_SECONDS)

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Let the first rank work alone, or wait for it, without a timeout."""
        self._is_patient = True
        try:
            yield
        finally:
            self._is_patient = False

    def await_first(self) -> None:
        """Wait until the first rank gets here too, for as long as it lives; all ranks call it at the same points.

        A collective can't tell work from a hang, so it has a timeout. Where the first rank is known to search, write or
        report alone, the others ask the store instead, and meet it in a collective only when it is done.

        Raises:
            StoreLostError: The store can't be reached.
        """
        if not self._is_on:
            return
        self._num_meetings += 1
        key = f"first/{self._num_meetings}"
        if self._rank == 0:
            self._store.set(key)
            return
        pause = POLL_SECONDS
        with self.patience():
            while not self._store.has(key):
                time.sleep(pause)
                pause = min(2 * pause, BEAT_SECONDS / 10)

    def report(self, error: BaseException, *, code: int, message: str) -> tuple[Failure, bool] | None:
        """Tell the other processes that this one fails, or find out whose fault it is.

        Args:
            error: The exception that ends this process.
            code: Exit code that it stands for.
            message: What it says, without secrets.

        Returns:
            The run's first failure, with whose code every process ends, and whether this process was the one to tell of
            it: it may have told of one that can't speak any more. None in a run of one process, whose exit.json tells
            of a stop alone.
        """
        failure = Failure(code, self._rank, host_name(), message)
        if not self._is_on:
            if failure.is_stop:
                self.exit_files.write_own(failure)
            return None
        self._is_reporting = True
        try:
            failure = self._cause(failure, error)
        except StoreLostError:
            if isinstance(error, StoreLostError) or failed_in_collective(error):
                failure = self._find_loss()
        first, is_ours = self.claim(failure)
        self._part_after(first, is_ours=is_ours)
        self._halt()
        # What libraries do at the end of the interpreter may wait for processes that are gone.
        leave = threading.Timer(FAREWELL_SECONDS, os._exit, [first.code])
        leave.daemon = True
        leave.start()
        return first, is_ours

    def claim(self, failure: Failure) -> tuple[Failure, bool]:
        """Say that the run fails.

        Args:
            failure: Of this process, or of one that can't speak.

        Returns:
            What failed first, and whether that is what this process said.
        """
        first, is_ours = failure, True
        self._claimed = failure
        with self._without_store_too():
            # The first to count has the word; the others wait for its text, which follows at once.
            is_ours = self._store.count(_CLAIMS) == 1
            if is_ours:
                self._store.set(_CLAIM, failure.to_json())
            else:
                first = Failure.from_json(self._store.texts(_CLAIM)[0])
        self._claimed = first
        self.exit_files.write(first, to_folder=is_ours)
        return first, is_ours

    def first_failure(self) -> Failure | None:
        """Return the failure that some process has claimed, if any."""
        return Failure.from_json(self._store.texts(_CLAIM)[0]) if self._store.has(_CLAIM) else None

    # Finding out whose fault it is

    def _cause(self, failure: Failure, error: BaseException) -> Failure:
        """Return what is behind an error that ends this process, once those who may know more had time to tell."""
        if failure.code == UNEXPECTED_CODE and failed_in_collective(error):
            # Another process failed and has to say so, or died and has to be missed: some seconds.
            before = self._beats()
            cause = self._await_claim(FIRST_SECONDS) or self._killed_here() or self._await_claim(SILENT_SECONDS)
            if cause is None and (silent := silent_ranks(before, self._beats(), own=self._rank)):
                cause = silence_of(silent, before).with_advice(self.words)
            return cause or replace(failure, code=int(ExitCode.ENVIRONMENT))
        if failure.is_stop:  # a launcher that sees a process die stops the others
            return self.first_failure() or self._killed_here() or failure
        if self._rank > 0 or isinstance(error, StoreLostError):
            self._await_claim(FIRST_SECONDS)  # which `claim` then returns
        return failure

    def _await_claim(self, seconds: float) -> Failure | None:
        """Return the failure that another process claims within some seconds, if any."""
        _wait(lambda: self.first_failure() is not None, seconds)
        return self.first_failure()

    def _ended_here(self) -> list[int]:
        """Return the ranks of this machine whose processes the system knows no more."""
        return ended_ranks(self._known, own=self._rank) if self._known else []

    def _killed_here(self) -> Failure | None:
        ended = self._ended_here()
        return silence_of(ended, self._beats()).with_advice(self.words) if ended else None

    def _missing(self) -> Failure | None:
        """Return whom this process has been waiting for, if that can be said."""
        still_seconds = self._whereabouts.still_seconds
        if still_seconds >= SILENT_SECONDS and (killed := self._killed_here()) is not None:
            return killed
        if still_seconds < self._timeout_seconds:
            self._suspected = None
            return None
        # Two looks, some seconds apart, show who beats no more.
        if self._suspected is None:
            self._suspected = time.monotonic(), self._beats()
            return None
        began, before = self._suspected
        if time.monotonic() - began < SILENT_SECONDS:
            return None
        self._suspected = None
        after = self._beats()
        accused = silent_ranks(before, after, own=self._rank) or late_ranks(after)
        # Where this process is the late one itself, the others say so.
        return None if not accused or self._rank in accused else silence_of(accused, after).with_advice(self.words)

    def _find_loss(self) -> Failure:
        """Return the failure that the loss of the store is: that of its keeper, or of who was gone by then."""
        if self._loss is not None:
            return self._loss
        _wait(lambda: bool(self._ended_here()), FIRST_SECONDS)  # a process that ends closes its sockets first
        is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if accused := self._ended_here() or ([0] if self._known and self._rank > 0 and not is_launchers else []):
            loss = silence_of(accused, self._known)
        else:
            keeper = f"{'the launcher' if is_launchers else 'rank 0'} at {os.environ.get('MASTER_ADDR', '')}"
            message = f"{keeper} stopped answering: killed from outside, or its machine or network is gone"
            loss = Failure(int(ExitCode.ENVIRONMENT), self._rank, host_name(), message)
        self._loss = loss.with_advice(self.words)
        return self._loss

    # Leaving together

    def _await_all(self, seconds: float | None) -> None:
        """Wait until every process leaves; without a limit of seconds, until one has failed."""
        self._store.count(_LEAVING)
        with self.patience():
            _wait(lambda: self._all_leave() or (seconds is None and self.first_failure() is not None), seconds)

    def _all_leave(self) -> bool:
        return self._store.count(_LEAVING, 0) >= self._world_size

    def _part_after(self, first: Failure, *, is_ours: bool) -> None:
        """Stay until the others know why the run ends; the one that told of it may keep the store."""
        with self._without_store_too():
            if first.is_stop:
                self._await_all(FAREWELL_SECONDS)
                return
            self._store.set(f"{_HEARD}/{self._rank}")
            others = [f"{_HEARD}/{rank}" for rank in range(self._world_size) if rank != first.rank]
            if is_ours and others:  # the failing rank may not speak any more
                _wait(lambda: self._store.has(*others), FAREWELL_SECONDS)
        if self._loss is not None:
            time.sleep(LINGER_SECONDS)

    @contextmanager
    def _without_store_too(self) -> Iterator[None]:
        """Go on behind the block where the store can't be reached: its keeper may have been the first to end."""
        try:
            yield
        except StoreLostError as error:
            self._find_loss()
            _log.debug("%s", error)

    def _halt(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(2 * STORE_SECONDS)

    # The thread

    def _run(self) -> None:
        """Beat until the end; every way out but `stop` ends the process."""
        num_lost = 0
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._beat()
                failure = self.first_failure()
                missing = None if failure is not None else self._missing()
                num_lost, self._loss = 0, None
            except StoreLostError:
                num_lost += 1
                loss = self._find_loss()
                if num_lost * BEAT_SECONDS >= LEAVE_SECONDS and not self._is_reporting:
                    self.exit_files.write(loss, to_folder=True)
                    self._end(loss, str(loss))
                continue
            if missing is not None:
                first, is_ours = self.claim(missing)
                self._part_after(first, is_ours=is_ours)
                self._end(first, str(first))
            if failure is not None and not failure.is_stop and self._claimed is None:
                # The main thread may notice by itself, and say more than this one can.
                self._claimed = failure
                self._part_after(failure, is_ours=False)
                self.exit_files.write(failure, to_folder=False)
                if not self._ended.wait(LEAVE_SECONDS):
                    self._end(failure, f"rank {self._rank}: leaves after the failure of rank {failure.rank}")

    def _beat(self) -> None:
        """Tell where the main thread is."""
        self._num_beats += 1
        count, is_patient = self.num_collectives, self._is_patient
        here = self._whereabouts = look(self._whereabouts, num_collectives=count)
        waits = here.waits and not is_patient
        beat = Beat(self._num_beats, host_name(), here.line, waits, is_patient, count, os.getpid(), self._pid_namespace)
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))
        if not self._known and self._store.has(*(f"beat/{rank}" for rank in range(self._world_size))):
            self._known = self._beats()

    def _beats(self) -> dict[int, Beat]:
        """Return what every process last told; waits for those that have told nothing yet."""
        texts = self._store.texts(*(f"beat/{rank}" for rank in range(self._world_size)))
        return {rank: Beat(**json.loads(text)) for rank, text in enumerate(texts)}

    @property
    def _is_on(self) -> bool:
        return self._shared is not None and not self._ended.is_set()

    @property
    def _store(self) -> SharedStore:
        assert self._shared is not None, "it has not been started"
        return self._shared

    def _end(self, failure: Failure, words: str) -> None:
        """End this process from outside its main thread, which may be stuck where no exception reaches it."""
        _log.error("%s", words)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.0 if self._loss is None else LINGER_SECONDS)
        os._exit(failure.code)
