"""What the processes of a run tell each other beside their collectives, through the store where they met."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from vembed.distributed.failures import Beat, Failure
from vembed.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store  # type: ignore[attr-defined]

_CLAIM, _CLAIMS, _HEARD, _LEAVING, _PARTED = "failure", "claims", "heard", "leaving", "parted"


LOOK_SECONDS: Final = 0.1
"""From one look at what others say to the next."""


class StoreLostError(MachineError):
    """The store can't be reached: the launcher that keeps it has ended, or rank 0, or the network between."""


class SharedStore:
    """The store as one process uses it; every method raises `StoreLostError` where it can't be reached.

    Args:
        store: Shared by all processes; used by this object alone.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._lock = threading.Lock()  # a store's client holds one conversation at a time

    @contextmanager
    def _talk(self) -> Iterator[Store]:
        with self._lock:
            try:
                yield self._store
            except RuntimeError as error:  # as torch's DistError is
                raise StoreLostError(f"the processes' store can't be reached: {error}") from error

    def has(self, *keys: str) -> bool:
        """Return whether all keys are set."""
        with self._talk() as store:
            return bool(store.check(list(keys)))

    def set(self, key: str) -> None:
        """Set a key that others wait for."""
        with self._talk() as store:
            store.set(key, "here")

    def claim(self, failure: Failure) -> tuple[Failure, bool]:
        """Say that the run fails; return what failed first, and whether that is what this process said."""
        with self._talk() as store:
            if store.add(_CLAIMS, 1) == 1:
                store.set(_CLAIM, failure.to_json())
                return failure, True
            return Failure.from_json(store.get(_CLAIM).decode()), False

    def first_failure(self) -> Failure | None:
        """Return the failure that some process has claimed, if any."""
        if not self.has(_CLAIM):
            return None
        with self._talk() as store:
            return Failure.from_json(store.get(_CLAIM).decode())

    def hear(self) -> None:
        """Say that this process knows of the failure."""
        self.set(f"{_HEARD}/{self._rank}")

    def all_have_heard(self, *, but: int) -> bool:
        """Return whether every process knows of the failure, except for the rank that may not speak any more."""
        others = [f"{_HEARD}/{rank}" for rank in range(self._world_size) if rank != but]
        return not others or self.has(*others)

    def leave(self) -> None:
        """Say that this process is ready to leave."""
        with self._talk() as store:
            store.add(_LEAVING, 1)

    def all_leave(self) -> bool:
        """Return whether every process is ready to leave."""
        with self._talk() as store:
            return bool(store.add(_LEAVING, 0) >= self._world_size)

    def part(self) -> None:
        """Say that this process asks the store nothing more."""
        with self._talk() as store:
            store.add(_PARTED, 1)

    def others_parted(self) -> bool:
        """Return whether every process but rank 0 has parted."""
        with self._talk() as store:
            return bool(store.add(_PARTED, 0) >= self._world_size - 1)

    def beat(self, beat: Beat) -> None:
        """Tell where this process is."""
        with self._talk() as store:
            store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def beats(self) -> dict[int, Beat]:
        """Return what every process last told; waits for those that have told nothing yet."""
        with self._talk() as store:
            texts = store.multi_get([f"beat/{rank}" for rank in range(self._world_size)])
        return {rank: Beat(**json.loads(text)) for rank, text in enumerate(texts)}

    def all_beat(self) -> bool:
        """Return whether every process has told something."""
        return self.has(*(f"beat/{rank}" for rank in range(self._world_size)))


def wait(is_over: Callable[[], bool], seconds: float | None) -> None:
    """Wait until something is over, or for some seconds."""
    until = None if seconds is None else time.monotonic() + seconds
    while not is_over() and (until is None or time.monotonic() < until):
        time.sleep(LOOK_SECONDS)
