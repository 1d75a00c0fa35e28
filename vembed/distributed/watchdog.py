"""A thread in each process that notices when another one fails, stops answering or is missing from a collective.

1. Every second it tells the store that all processes share where this process's main thread is.
2. It looks there for a failure that another process has claimed. The main thread may never hear of it (a collective of
   NCCL waits for ever for a process that is gone), so the thread ends this process when the main thread doesn't.
3. When the main thread stands still, it looks whether the other processes of this machine are there: one that was
   killed is named at once, as no launcher can reach those that wait for it inside a collective.
4. When the main thread has stood still for the whole timeout, it compares: a process that no longer tells anything has
   stopped or died; one that is elsewhere while others wait in a collective is missing from it. That one is named.
5. A store that can't be reached is the end of the launcher, or of the process that keeps it. Each process then says so
   by itself, and lingers until the others have found out too: its end isn't the cause of theirs.

The store is torch's own, at the address where the processes met; nothing here costs the main thread anything.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from vembed.distributed.failures import (
    UNEXPECTED_CODE,
    Beat,
    ExitFiles,
    Failure,
    LastWords,
    ended_ranks,
    failed_in_collective,
    host_name,
    late_ranks,
    lateness_of,
    look,
    loss_of_store,
    silence_of,
    silent_ranks,
)
from vembed.distributed.shared_store import SharedStore, StoreLostError, wait
from vembed.errors import ExitCode
from vembed.output_lock import machine_name

if TYPE_CHECKING:
    from collections.abc import Iterator

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

LINGER_SECONDS: Final = 2.0
"""How long a process that has lost the store stays; the others lose it within a beat."""

FAREWELL_SECONDS: Final = 10.0
"""How long a failing process waits for the others to have heard of it; it may be the one that keeps the store."""

STORE_SECONDS: Final = 10.0
"""Longest wait for the store."""


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
        self._store: SharedStore | None = None
        self._rank, self._timeout_seconds = 0, 0.0
        self._num_beats = self._num_meetings = 0
        self._whereabouts = look()
        self._claimed: Failure | None = None
        self._is_reporting = False
        self._suspected: tuple[float, dict[int, Beat]] | None = None  # when the others were looked at, and their beats
        self._known: dict[int, Beat] = {}  # beats of all, as first read
        self._loss: Failure | None = None  # the end of the store, as this process found it
        self._launcher = os.getppid()
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
        self._rank, self._store = rank, SharedStore(store, rank=rank, world_size=world_size)
        self._timeout_seconds = timeout_seconds
        self._pid_namespace = machine_name()
        self._beat(self._store)
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
        if together:
            self._part()

    @property
    def _is_on(self) -> bool:
        return self._store is not None and not self._ended.is_set()

    @property
    def _shared(self) -> SharedStore:
        assert self._store is not None, "it has not been started"
        return self._store

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
            self._shared.set(key)
            return
        pause = POLL_SECONDS
        with self.patience():
            while not self._shared.has(key):
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
            first, is_ours = self._shared.claim(failure)
        self._claimed = first
        self.exit_files.write(first, to_folder=is_ours)
        return first, is_ours

    def first_failure(self) -> Failure | None:
        """Return the failure that some process has claimed, if any."""
        return self._shared.first_failure()

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

    def _cause(self, failure: Failure, error: BaseException) -> Failure:
        """Return what is behind an error that ends this process, once those who may know more had time to tell.

        Raises:
            StoreLostError: Nobody can be asked.
        """
        if failure.code == UNEXPECTED_CODE and failed_in_collective(error):
            return self._witness() or replace(failure, code=int(ExitCode.ENVIRONMENT))
        if failure.is_stop:  # a launcher that sees a process die stops the others
            return self.first_failure() or self._killed_here() or failure
        if self._rank > 0 or isinstance(error, StoreLostError):
            self._await_claim(FIRST_SECONDS)
        return failure

    def _witness(self) -> Failure | None:
        """Return what made a collective fail: a failure that was claimed, or a process that went silent.

        Takes some seconds: whoever failed has to say so, or to be missed.
        """
        before = self._shared.beats()
        found = self._await_claim(FIRST_SECONDS) or self._killed_here() or self._await_claim(SILENT_SECONDS)
        if found is not None:
            return found
        silent = silent_ranks(before, self._shared.beats(), own=self._rank)
        return silence_of(silent, before).with_advice(self.words) if silent else None

    def _await_claim(self, seconds: float) -> Failure | None:
        """Return the failure that another process claims within some seconds, if any."""
        wait(lambda: self.first_failure() is not None, seconds)
        return self.first_failure()

    def _await_all(self, seconds: float | None) -> None:
        """Wait until every process leaves; without a limit of seconds, until one has failed."""
        self._shared.leave()
        with self.patience():
            wait(
                lambda: self._shared.all_leave() or (seconds is None and self.first_failure() is not None),
                seconds,
            )

    def _part(self) -> None:
        """Say that this process needs the store no more; rank 0, which may keep it, stays until the others have."""
        if self._rank > 0:
            with suppress(StoreLostError):  # rank 0 has waited for long enough; nothing is asked of the store any more
                self._shared.part()
        elif self._shared.all_leave():
            wait(self._shared.others_parted, FAREWELL_SECONDS)

    def _part_after(self, first: Failure, *, is_ours: bool) -> None:
        """Stay until the others know why the run ends; the one that told of it may keep the store."""
        with self._without_store_too():
            if first.is_stop:
                self._await_all(FAREWELL_SECONDS)
                return
            self._shared.hear()
            if is_ours:
                wait(lambda: self._shared.all_have_heard(but=first.rank), FAREWELL_SECONDS)
        if self._loss is not None:
            time.sleep(LINGER_SECONDS)

    def _run(self) -> None:
        """Beat until the end; every way out but `stop` ends the process."""
        num_lost = 0
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._beat(self._shared)
                found = self.first_failure()
                missing = None if found is not None else self._ended_here() or self._missing()
                num_lost, self._loss = 0, None
            except StoreLostError:
                num_lost += 1
                loss = self._find_loss()
                if (self._is_orphan or num_lost * BEAT_SECONDS >= LEAVE_SECONDS) and not self._is_reporting:
                    self.exit_files.write(loss, to_folder=True)
                    self._end(loss, str(loss))
                continue
            if missing is not None:
                first, is_ours = self.claim(missing)
                self._part_after(first, is_ours=is_ours)
                self._end(first, str(first))
            if found is not None and not found.is_stop and self._claimed is None:
                self._follow(found)

    def _beat(self, store: SharedStore) -> None:
        """Tell where the main thread is."""
        self._num_beats += 1
        count, is_patient = self.num_collectives, self._is_patient
        here = self._whereabouts = look(self._whereabouts, num_collectives=count)
        waits = here.waits and not is_patient
        store.beat(
            Beat(self._num_beats, host_name(), here.line, waits, is_patient, count, os.getpid(), self._pid_namespace)
        )
        if not self._known and store.all_beat():
            self._known = store.beats()

    def _killed_here(self) -> Failure | None:
        """Return the end of processes of this machine that the system knows no more."""
        ended = ended_ranks(self._known, own=self._rank) if self._known else []
        return silence_of(ended, self._shared.beats()).with_advice(self.words) if ended else None

    def _ended_here(self) -> Failure | None:
        """Return the end of a process of this machine that nobody has told of, once this one may be waiting for it."""
        return None if self._whereabouts.still_seconds < SILENT_SECONDS else self._killed_here()

    def _missing(self) -> Failure | None:
        """Return whom this process has been waiting for during the whole timeout, if that can be said."""
        if self._whereabouts.still_seconds < self._timeout_seconds:
            self._suspected = None
            return None
        if self._suspected is None:
            self._suspected = time.monotonic(), self._shared.beats()
            return None
        began, before = self._suspected
        if time.monotonic() - began < SILENT_SECONDS:
            return None
        self._suspected = None
        after = self._shared.beats()
        silent = silent_ranks(before, after, own=self._rank)
        if silent:
            return silence_of(silent, after).with_advice(self.words)
        late = late_ranks(after)
        if not late or self._rank in late:
            return None
        return lateness_of(late, after, self._timeout_seconds).with_advice(self.words)

    @property
    def _is_orphan(self) -> bool:
        """Whether the process that started this one has ended."""
        return os.getppid() != self._launcher

    def _find_loss(self) -> Failure:
        """Return the failure that the loss of the store is, with the processes that were gone when it was found."""
        if self._loss is None:
            wait(lambda: self._is_orphan, FIRST_SECONDS)  # a process that ends closes its sockets first
            loss = loss_of_store(self._known, own=self._rank, is_orphan=self._is_orphan)
            self._loss = loss.with_advice(self.words)
        return self._loss

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
        time.sleep(0.0 if self._loss is None else LINGER_SECONDS)
        os._exit(failure.code)
