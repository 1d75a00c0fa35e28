"""A thread in each process that notices when another one fails, stops answering or is missing from a collective.

1. Every second it tells the store that all processes share where this process's main thread is.
2. It looks there for a failure that another process has claimed. The main thread may never hear of it (a collective of
   NCCL waits for ever for a process that is gone), so the thread ends this process when the main thread doesn't.
3. When the main thread stands still, it looks whether the other processes of this machine are there: one that was
   killed is named at once, as no launcher can reach those that wait for it inside a collective.
4. When the main thread has stood still for the whole timeout, it compares: a process that no longer tells anything has
   stopped or died; one that is elsewhere while others wait in a collective is missing from it. That one is named.
5. A store that can't be reached is the end of the launcher, or of the process that keeps it.

The store is torch's own, at the address where the processes met; nothing here costs the main thread anything.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vembed.distributed.failures import (
    UNEXPECTED_CODE,
    Beat,
    ExitFiles,
    Failure,
    ended_ranks,
    failed_in_collective,
    host_name,
    late_ranks,
    lateness_of,
    look,
    silence_of,
    silent_ranks,
)
from vembed.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch.distributed import Store  # type: ignore[attr-defined]

_log = logging.getLogger(__name__)

BEAT_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.001
"""First pause between two looks at a key that another process sets; later ones are longer."""

SILENT_SECONDS: Final = 5.0
"""A process that says nothing for this long has stopped, died, or its machine is gone."""

FIRST_SECONDS: Final = 0.5
"""Head start of rank 0 in telling of an error that all processes meet at once."""

LEAVE_SECONDS: Final = 5.0
"""How long the main thread may take to notice another process's failure by itself."""

FAREWELL_SECONDS: Final = 10.0
"""How long a failing process waits for the others to have heard of it; it may be the one that keeps the store."""

STORE_SECONDS: Final = 10.0
"""Longest wait for the store."""

_CLAIM, _CLAIMS, _HEARD, _LEAVING = "failure", "claims", "heard", "leaving"


class Watchdog:
    """Watches the other processes of a run for this one, and tells them when this one fails.

    Whoever handles the end of the process makes it; `start_runtime` starts it where there are several processes. Before
    that, and in a run of one process, its methods do nothing.

    Attributes:
        exit_files: Where the run's first failure is written.
        num_collectives: Collectives that this process has entered: two processes at one line may be a step apart.
    """

    def __init__(self) -> None:
        self.exit_files = ExitFiles()
        self.num_collectives = 0
        self._is_patient = False
        self._store: Store | None = None
        self._lock = threading.Lock()  # a store's client holds one conversation at a time
        self._rank, self._world_size, self._timeout_seconds = 0, 1, 0.0
        self._num_beats = self._num_meetings = 0
        self._whereabouts = look()
        self._claimed: Failure | None = None
        self._suspected: tuple[float, dict[int, Beat]] | None = None  # when the others were looked at, and their beats
        self._known: dict[int, Beat] = {}  # beats of all, as first read
        self._pid_namespace = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vembed-watchdog", daemon=True)

    def start(self, rank: int, world_size: int, store: Store, *, timeout_seconds: float) -> None:
        """Watch the other processes from now on.

        Args:
            rank: This process.
            world_size: How many there are.
            store: Shared by all of them; used by this object alone.
            timeout_seconds: Longest wait for another process.
        """
        self._rank, self._world_size, self._store = rank, world_size, store
        self._timeout_seconds = timeout_seconds
        self._pid_namespace = _pid_namespace()
        self._beat()
        self._thread.start()
        _keep_last_words()

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
        _forget_last_words()

    @property
    def _is_on(self) -> bool:
        return self._store is not None and not self._ended.is_set()

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
        """
        if not self._is_on:
            return
        self._num_meetings += 1
        key = f"first/{self._num_meetings}"
        if self._rank == 0:
            with self._talk() as store:
                store.set(key, "here")
            return
        pause = POLL_SECONDS
        with self.patience():
            while not self._has(key):
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
            it: it may have told of one that can't speak any more. None in a run of one process.
        """
        if not self._is_on:
            return None
        failure = Failure(code, self._rank, host_name(), message)
        with _unreachable_is_logged():
            if code == UNEXPECTED_CODE and failed_in_collective(error):
                failure = self._witness() or replace(failure, code=int(ExitCode.ENVIRONMENT))
            elif self._rank > 0:
                self._await_claim(FIRST_SECONDS)
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
        with _unreachable_is_logged(), self._talk() as store:
            is_ours = store.add(_CLAIMS, 1) == 1
            if is_ours:
                store.set(_CLAIM, failure.to_json())
            else:
                first = Failure.from_json(store.get(_CLAIM).decode())
        self._claimed = first
        self.exit_files.write(first, to_folder=is_ours)
        return first, is_ours

    def first_failure(self) -> Failure | None:
        """Return the failure that some process has claimed, if any."""
        if not self._has(_CLAIM):
            return None
        with self._talk() as store:
            return Failure.from_json(store.get(_CLAIM).decode())

    @contextmanager
    def _talk(self) -> Iterator[Store]:
        assert self._store is not None, "it has not been started"
        with self._lock:
            yield self._store

    def _has(self, *keys: str) -> bool:
        with self._talk() as store:
            return bool(store.check(list(keys)))

    def _halt(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(2 * STORE_SECONDS)

    def _witness(self) -> Failure | None:
        """Return what made a collective fail: a failure that was claimed, or a process that went silent.

        Takes some seconds: whoever failed has to say so, or to be missed.
        """
        before = self._read_beats()
        found = self._await_claim(SILENT_SECONDS)
        if found is not None:
            return found
        silent = silent_ranks(before, self._read_beats(), own=self._rank)
        return silence_of(silent, before) if silent else None

    def _await_claim(self, seconds: float) -> Failure | None:
        """Return the failure that another process claims within some seconds, if any."""
        _wait(lambda: self._has(_CLAIM), seconds)
        return self.first_failure()

    def _await_all(self, seconds: float | None) -> None:
        """Wait until every process leaves; without a limit of seconds, until one has failed."""
        with self._talk() as store:
            store.add(_LEAVING, 1)

        def is_over() -> bool:
            with self._talk() as store:
                everybody = bool(store.add(_LEAVING, 0) >= self._world_size)
            return everybody or (seconds is None and self.first_failure() is not None)

        with self.patience():
            _wait(is_over, seconds)

    def _part_after(self, first: Failure, *, is_ours: bool) -> None:
        """Stay until the others know why the run ends; the one that told of it may keep the store."""
        with _unreachable_is_logged():
            if first.is_stop:
                self._await_all(FAREWELL_SECONDS)
                return
            with self._talk() as store:
                store.set(f"{_HEARD}/{self._rank}", "")
            others = [f"{_HEARD}/{rank}" for rank in range(self._world_size) if rank != first.rank]
            if is_ours and others:
                _wait(lambda: self._has(*others), FAREWELL_SECONDS)

    def _run(self) -> None:
        """Beat until the end; every way out but `stop` ends the process."""
        num_lost = 0
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._beat()
                found = self.first_failure()
                missing = None if found is not None else self._ended_here() or self._missing()
                num_lost = 0
            except RuntimeError as error:
                num_lost += 1
                if num_lost * BEAT_SECONDS >= LEAVE_SECONDS:
                    failure = self._storeless(error)
                    self.exit_files.write(failure, to_folder=self._rank == 0)
                    self._end(failure, str(failure))
                continue
            if missing is not None:
                first, is_ours = self.claim(missing)
                self._part_after(first, is_ours=is_ours)
                self._end(first, str(first))
            if found is not None and not found.is_stop and self._claimed is None:
                self._follow(found)

    def _beat(self) -> None:
        """Tell where the main thread is."""
        self._num_beats += 1
        count, is_patient = self.num_collectives, self._is_patient
        here = self._whereabouts = look(self._whereabouts, num_collectives=count)
        waits = here.waits and not is_patient
        beat = Beat(self._num_beats, host_name(), here.line, waits, is_patient, count, os.getpid(), self._pid_namespace)
        with self._talk() as store:
            store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def _read_beats(self) -> dict[int, Beat]:
        """Return what every process last told."""
        with self._talk() as store:
            texts = store.multi_get([f"beat/{rank}" for rank in range(self._world_size)])
        return {rank: Beat(**json.loads(text)) for rank, text in enumerate(texts)}

    def _ended_here(self) -> Failure | None:
        """Return the end of a process of this machine that nobody has told of, once this one may be waiting for it."""
        if self._whereabouts.still_seconds < SILENT_SECONDS:
            return None
        self._known = self._known or self._read_beats()
        ended = ended_ranks(self._known, own=self._rank)
        return silence_of(ended, self._read_beats()) if ended else None

    def _missing(self) -> Failure | None:
        """Return whom this process has been waiting for during the whole timeout, if that can be said."""
        if self._whereabouts.still_seconds < self._timeout_seconds:
            self._suspected = None
            return None
        if self._suspected is None:
            self._suspected = time.monotonic(), self._read_beats()
            return None
        began, before = self._suspected
        if time.monotonic() - began < SILENT_SECONDS:
            return None
        self._suspected = None
        after = self._read_beats()
        silent = silent_ranks(before, after, own=self._rank)
        if silent:
            return silence_of(silent, after)
        late = late_ranks(after)
        return lateness_of(late, after, self._timeout_seconds) if late and self._rank not in late else None

    def _storeless(self, error: Exception) -> Failure:
        """Return the failure that the loss of the store is."""
        _log.info("the processes' store can't be reached: %s", error)
        keeper = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        message = f"{keeper} is gone, or its machine or network: nothing can be heard of the other processes"
        return Failure(int(ExitCode.ENVIRONMENT), self._rank, host_name(), message)

    def _follow(self, failure: Failure) -> None:
        """Leave after another process's failure, if the main thread doesn't."""
        self._claimed = failure
        self._part_after(failure, is_ours=False)
        self.exit_files.write(failure, to_folder=False)
        if not self._ended.wait(LEAVE_SECONDS):
            self._end(failure, f"rank {self._rank}: leaves after the failure of rank {failure.rank}")

    def _end(self, failure: Failure, words: str) -> None:
        """End this process from outside its main thread, which may be stuck where no exception reaches it."""
        _log.error("%s", words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.code)


def _wait(is_over: Callable[[], bool], seconds: float | None) -> None:
    """Wait until something is over, or for some seconds."""
    until = None if seconds is None else time.monotonic() + seconds
    while not is_over() and (until is None or time.monotonic() < until):
        time.sleep(BEAT_SECONDS / 10)


@contextmanager
def _unreachable_is_logged() -> Iterator[None]:
    """Go on behind the block where the store can't be reached: its keeper may have been the first to end."""
    try:
        yield
    except RuntimeError as error:  # as torch's DistError is
        _log.info("the processes' store can't be reached: %s", error)


def _pid_namespace() -> str:
    """Return a machine since its start, without its containers; empty where the system doesn't say.

    Host names don't tell: two containers may have the same one.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _keep_last_words() -> None:
    """Let SIGTERM end this process as usual, but not while it handles an error: then it is about to end by itself.

    A launcher that sees one process die sends SIGTERM to the others at once. Those have just lost a collective and are
    finding out whom they lost: killed there, they would leave no exit.json. Does nothing outside the main thread, and
    where a program has its own way with SIGTERM.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_unless_failing)


def _forget_last_words() -> None:
    """Undo `_keep_last_words`."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _end_unless_failing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_unless_failing(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature that signal calls
    if sys.exc_info()[0] is not None:  # of the interrupted code, clean-up on the way out included
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
