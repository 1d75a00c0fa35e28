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

import itertools
import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from vembed.distributed.beats import (
    Beat,
    ended_ranks,
    late_ranks,
    lateness_of,
    numbering,
    silence_of,
    silent_ranks,
)
from vembed.distributed.failures import EXIT_FILES, UNEXPECTED_CODE, Ending, Failure, host_name, now, report_with
from vembed.distributed.last_words import forget_last_words, keep_last_words
from vembed.distributed.patience import wait_with
from vembed.distributed.whereabouts import PROGRESS, failed_in_collective, look
from vembed.errors import ExitCode

if TYPE_CHECKING:
    from vembed.distributed.ranks import Ranks

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


class Watch:
    """Watches the other processes of a run from a thread.

    Args:
        ranks: This process among them.
        store: Shared by all; used by this object alone.
        timeout_seconds: Longest wait for another process.
    """

    def __init__(self, ranks: Ranks, store: Store, *, timeout_seconds: float) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._store = store
        self._lock = threading.Lock()  # a store's client holds one conversation at a time
        self._timeout_seconds = timeout_seconds
        self._beats = 0
        self._whereabouts = look()
        self._meetings = 0
        self._claimed: Failure | None = None
        self._suspected: tuple[float, dict[int, Beat]] | None = None  # when the others were looked at, and their beats
        self._known: dict[int, Beat] = {}  # beats of all, as first read
        self._numbering = numbering()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vembed-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(2 * STORE_SECONDS)

    def claim(self, failure: Failure) -> tuple[Failure, bool]:
        """Say that the run fails.

        Args:
            failure: Of this process, or of one that can't speak.

        Returns:
            What failed first, and whether that is what this process said.
        """
        first, is_ours = failure, True
        self._claimed = failure
        try:
            with self._lock:
                is_ours = self._store.add(_CLAIMS, 1) == 1
                if is_ours:
                    self._store.set(_CLAIM, failure.to_json())
                else:
                    first = Failure.from_json(self._store.get(_CLAIM).decode())
        except (dist.DistError, RuntimeError) as error:
            _log.info("the processes' store can't be reached: %s", error)
        self._claimed = first
        EXIT_FILES.write(first, to_folder=is_ours)
        return first, is_ours

    def first_failure(self) -> Failure | None:
        """Return the failure that some process has claimed, if any."""
        if not self._has(_CLAIM):
            return None
        with self._lock:
            return Failure.from_json(self._store.get(_CLAIM).decode())

    def witness(self) -> Failure | None:
        """Return what made a collective fail: a failure that was claimed, or a process that went silent.

        Takes some seconds: whoever failed has to say so, or to be missed.
        """
        before = self._read_beats()
        found = self.await_claim(SILENT_SECONDS)
        if found is not None:
            return found
        silent = silent_ranks(before, self._read_beats(), own=self.rank)
        return silence_of(silent, before) if silent else None

    def await_claim(self, seconds: float) -> Failure | None:
        """Return the failure that another process claims within some seconds, if any."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = self.first_failure()
            if found is not None:
                return found
            time.sleep(BEAT_SECONDS / 10)
        return None

    def await_first(self) -> None:
        """Wait until the first rank gets here too, for as long as it lives."""
        self._meetings += 1
        key = f"first/{self._meetings}"
        if self.rank == 0:
            with self._lock:
                self._store.set(key, "here")
            return
        pause = POLL_SECONDS
        with PROGRESS.patience():
            while not self._has(key):
                time.sleep(pause)
                pause = min(2 * pause, BEAT_SECONDS / 10)

    def _has(self, key: str) -> bool:
        with self._lock:
            return bool(self._store.check([key]))

    def await_all(self, seconds: float | None) -> None:
        """Wait until every process leaves, or one has failed.

        Args:
            seconds: Longest wait; None waits for as long as the others answer.
        """
        until = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            self._store.add(_LEAVING, 1)
        with PROGRESS.patience():
            while until is None or time.monotonic() < until:
                with self._lock:
                    everybody = self._store.add(_LEAVING, 0) >= self.world_size
                if everybody or (seconds is None and self.first_failure() is not None):
                    return
                time.sleep(BEAT_SECONDS / 10)

    def part_after(self, first: Failure, *, is_ours: bool) -> None:
        """Stay until the others know why the run ends.

        Args:
            first: Its first failure.
            is_ours: Whether this process told of it: it may be the one that keeps the store.
        """
        try:
            if first.is_stop:
                self.await_all(FAREWELL_SECONDS)
                return
            with self._lock:
                self._store.set(f"{_HEARD}/{self.rank}", "")
            if is_ours:
                others = [f"{_HEARD}/{rank}" for rank in range(self.world_size) if rank != first.rank]
                self._await_keys(others)
        except (dist.DistError, RuntimeError) as error:
            _log.info("the processes' store can't be reached: %s", error)

    def _await_keys(self, keys: list[str]) -> None:
        until = time.monotonic() + FAREWELL_SECONDS
        while keys and time.monotonic() < until:
            with self._lock:
                if self._store.check(keys):
                    return
            time.sleep(BEAT_SECONDS / 10)

    def _run(self) -> None:
        """Beat until the end; every way out but `stop` ends the process."""
        num_lost = 0
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._beat()
                found = self.first_failure()
                missing = None if found is not None else self._ended_here() or self._missing()
                num_lost = 0
            except (dist.DistError, RuntimeError) as error:
                num_lost += 1
                if num_lost * BEAT_SECONDS >= LEAVE_SECONDS:
                    failure = self._storeless(error)
                    EXIT_FILES.write(failure, to_folder=self.rank == 0)
                    self._end(failure, str(failure))
                continue
            if missing is not None:
                first, is_ours = self.claim(missing)
                self.part_after(first, is_ours=is_ours)
                self._end(first, str(first))
            if found is not None and not found.is_stop and self._claimed is None:
                self._follow(found)

    def _beat(self) -> None:
        """Tell where the main thread is."""
        self._beats += 1
        here = self._whereabouts = look(self._whereabouts)
        beat = Beat(
            self._beats,
            host_name(),
            here.place,
            here.waits,
            here.is_patient,
            here.collectives,
            os.getpid(),
            self._numbering,
        )
        with self._lock:
            self._store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def _ended_here(self) -> Failure | None:
        """Return the end of a process of this machine that nobody has told of, once this one may be waiting for it."""
        if self._whereabouts.still_seconds < SILENT_SECONDS:
            return None
        self._known = self._known or self._read_beats()
        ended = ended_ranks(self._known, own=self.rank)
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
        silent = silent_ranks(before, after, own=self.rank)
        if silent:
            return silence_of(silent, after)
        late = late_ranks(after)
        return lateness_of(late, after, self._timeout_seconds) if late and self.rank not in late else None

    def _storeless(self, error: Exception) -> Failure:
        """Return the failure that the loss of the store is."""
        _log.info("the processes' store can't be reached: %s", error)
        keeper = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        message = f"{keeper} is gone, or its machine or network: nothing can be heard of the other processes"
        return Failure(int(ExitCode.ENVIRONMENT), self.rank, host_name(), message, now())

    def _read_beats(self) -> dict[int, Beat]:
        """Return what every process last told."""
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        with self._lock:
            texts = self._store.multi_get(keys)
        return {rank: Beat(**json.loads(text)) for rank, text in enumerate(texts)}

    def _follow(self, failure: Failure) -> None:
        """Leave after another process's failure, if the main thread doesn't."""
        self._claimed = failure
        self.part_after(failure, is_ours=False)
        EXIT_FILES.write(failure, to_folder=False)
        if not self._ended.wait(LEAVE_SECONDS):
            self._end(failure, f"rank {self.rank}: leaves after the failure of rank {failure.rank}")

    def _end(self, failure: Failure, words: str) -> None:
        """End this process from outside its main thread, which may be stuck where no exception reaches it."""
        _log.error("%s", words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.code)


_watches: list[Watch] = []
"""The watch of this process, if it is one of several."""

_numbers = itertools.count()
"""Number of the next watch: what an earlier run of this process left in the store is not its business."""


def start_watch(ranks: Ranks, *, timeout_seconds: float) -> None:
    """Watch the other processes from now on, unless that is done already.

    Args:
        ranks: This process among them.
        timeout_seconds: Longest wait for another process.
    """
    if _watches:
        return
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"vembed/{attempt}/{next(_numbers)}"
    watch = Watch(ranks, PrefixStore(prefix, store), timeout_seconds=timeout_seconds)
    _watches.append(watch)
    watch.start()
    keep_last_words()
    report_with(_report)
    wait_with(watch.await_first)


def stop_watch(*, together: bool = True) -> None:
    """Stop watching; does nothing in a run of one process.

    Args:
        together: Wait until every process is ready to; not after an error, of which the others may not know.
    """
    if not _watches:
        return
    watch = _watches[0]
    if together:
        watch.await_all(None)
    watch.stop()
    forget_last_words()
    _watches.clear()
    report_with(None)
    wait_with(None)


def _report(error: BaseException, *, code: int, message: str) -> Ending:
    """Claim a failure for this process, or find out whose fault it is."""
    watch = _watches[0]
    failure = Failure(code, watch.rank, host_name(), message, now())
    try:
        if code == UNEXPECTED_CODE and failed_in_collective(error):
            failure = watch.witness() or replace(failure, code=int(ExitCode.ENVIRONMENT))
        elif watch.rank > 0:
            watch.await_claim(FIRST_SECONDS)
    except (dist.DistError, RuntimeError) as lost:
        _log.info("the processes' store can't be reached: %s", lost)
    first, is_ours = watch.claim(failure)
    watch.part_after(first, is_ours=is_ours)
    watch.stop()
    # What libraries do at the end of the interpreter may wait for processes that are gone.
    leave = threading.Timer(FAREWELL_SECONDS, os._exit, [first.code])
    leave.daemon = True
    leave.start()
    return Ending(first, is_ours=is_ours)
