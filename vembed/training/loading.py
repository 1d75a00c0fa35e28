"""The next batches, made ahead by worker processes.

1. Each worker has the whole `BatchSource` and makes the features of every n-th batch. A batch is a function of its
   number, so nothing depends on how many workers there are. torch's DataLoader hands out the numbers, in order.
2. All arrays of a batch come back in one block of shared memory where there is room for it, else through the pipe, like
   the rest. Neither texts nor encoded pictures do: nobody needs them behind this point.
3. This process makes the pools. A worker computes nothing on a device.

Workers are forked, not started anew: records and tokenizers stay shared with this process, nothing has to be pickled
on the way in, a user's script needs no guard around its main part, and a worker is there at once. What a fork doesn't
bring over are threads, so a worker uses none: one thread for torch, for the decoder and for tokenizers. It never calls
the device's driver, and it lets go of the weights that lie in memory, which would otherwise be held a second time from
the first update on. Only Linux forks safely under the libraries that are used here.

Signals are the business of this process: workers ignore SIGINT and SIGTERM, which a terminal or a scheduler sends to
all of them, and end when this process closes them, or at once when it is gone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from multiprocessing.connection import wait
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from vembed.distributed.shards import is_shared
from vembed.errors import MachineError, VembedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess
    from types import TracebackType

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.training.batches import BatchSource, FeaturedBatch

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where torch puts shared tensors; only its free space is looked at

TOKENIZERS_SWITCH = "TOKENIZERS_PARALLELISM"
"""Read by Hugging Face's tokenizers; unset, they warn of a fork."""

ALIGNMENT = 64
"""Arrays begin at multiples of so many bytes in a block: any type of number can be read there."""

CLOSE_SECONDS = 10.0
"""Time that workers have to finish before they are killed: none of their batches is needed any more."""

DYING_SECONDS = 2.0
"""Time after an error in which the death of a worker, its cause, may still show."""

_SIGNS_OF_DEATH = (RuntimeError, OSError, EOFError)
_HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


class BatchLoader:
    """The batches of a `BatchSource`, made ahead in the order of their numbers.

    Use as a context manager around all that may wait for a batch: leaving it ends the workers, and an error that a dead
    worker caused leaves it as a `MachineError`. Workers start with the first batch.

    Args:
        num_workers: At least 1.
        batches_ahead: Most batches that wait or are being made.
        num_batches: Of the whole run: nothing is made beyond.

    Raises:
        MachineError: This system can't fork safely.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        num_workers: int,
        batches_ahead: int,
        num_batches: int,
        pin_memory: bool = True,
    ) -> None:
        if sys.platform != "linux":
            raise MachineError(f"num_workers {num_workers}: data workers need Linux; set num_workers to 0")
        self._source = source
        self._num_workers = num_workers
        self._batches_ahead = batches_ahead
        self._num_batches = num_batches
        self._pin_memory = pin_memory
        self._next_number = -1
        self._iterator: Any = None

    def batch(self, number: int) -> FeaturedBatch:
        """Return a batch by its number, counted from 0; after the first call, only the one after the last.

        Raises:
            DataError: A picture can't be read any more.
            ValueError: The number is out of order.
        """
        if self._iterator is None:
            self._start(number)
        # DataLoader gives batches in the order of its sampler alone. A caller that skips one would train on another.
        if number != self._next_number:
            raise ValueError(f"batch {number} is asked for, and batch {self._next_number} comes next")
        parcel: _Parcel | VembedError = next(self._iterator)
        if isinstance(parcel, VembedError):
            raise parcel
        self._next_number += 1
        return parcel.unpacked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A worker's death shows as whatever this process was at: a torn pipe, a lost file, torch's own RuntimeError. An
        # error of any other kind has its cause here.
        with _children_may_die():
            dead = None
            if isinstance(error, _SIGNS_OF_DEATH) and (workers := self._workers):
                # Some seconds of patience: a worker's pipe may break before the system says that it is dead.
                ended = wait([worker.sentinel for worker in workers], timeout=DYING_SECONDS)
                dead = next((worker for worker in workers if worker.sentinel in ended), None)
            self._close()
        if dead is not None:
            raise MachineError(_obituary(dead, self._num_workers)) from error

    @property
    def _workers(self) -> list[BaseProcess]:
        """The processes: DataLoader has no public name for them."""
        return [] if self._iterator is None else list(self._iterator._workers)

    def _start(self, number: int) -> None:
        """Fork the workers, for all batches from one on."""
        # Once for all. DataLoader sets torch's handler at its first start, which would be inside the block below: that
        # puts the handler from before it back, and a worker's death would go unnoticed.
        signal_handling._set_SIGCHLD_handler()
        with _ready_to_fork(), _children_may_die(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # the plan says it
            loader: DataLoader[_Parcel | VembedError] = DataLoader(
                _FeaturedBatches(self._source, self._num_workers, os.getpid()),
                batch_size=None,
                sampler=range(number, self._num_batches),
                num_workers=self._num_workers,
                prefetch_factor=self._batches_ahead // self._num_workers,
                collate_fn=lambda made: made,  # DataLoader's own would make tensors of it
                worker_init_fn=_become_worker,
                multiprocessing_context="fork",
                pin_memory=self._pin_memory and self._source.device.type == "cuda",
                generator=torch.Generator(),  # else the workers' seeds would be drawn from the run's own generator
            )
            self._iterator = iter(loader)
        self._next_number = number

    def _close(self) -> None:
        """End the workers, politely for some seconds."""
        if self._iterator is None:
            return
        workers, iterator, self._iterator = self._workers, self._iterator, None
        # In a thread: where a worker was killed while it held a lock, this would wait for ever.
        polite = threading.Thread(target=iterator._shutdown_workers, name="close data workers", daemon=True)
        polite.start()
        polite.join(CLOSE_SECONDS)
        for worker in workers:
            worker.kill()
        polite.join(CLOSE_SECONDS)  # two threads that wait for one process can both miss its end
        for worker in workers:
            worker.join()


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A batch on its way from a worker: its arrays in one block of memory, and the rest pickled."""

    rest: bytes
    places: tuple[tuple[int, int], ...]  # first and last byte of each array in the block
    block: NDArray[np.uint8] | Tensor  # a shared tensor where the memory for that has room for every worker's
    is_read_by_device: bool  # whether arrays go to an accelerator as they are: pixels, but not ragged token ids

    @classmethod
    def of(cls, featured: FeaturedBatch, num_workers: int) -> _Parcel:
        """Pack a batch."""
        # Protocol 5 keeps the bytes of arrays out of the pickle, so that they are copied once, into the block. There is
        # one, as torch opens a file for each shared tensor.
        rest, buffers = BytesIO(), list[PickleBuffer]()
        _Pickler(rest, protocol=5, buffer_callback=buffers.append).dump(featured)
        arrays = [buffer.raw() for buffer in buffers]
        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        num_bytes = block_bytes(starts[-1])
        # All workers may write a block at once, and writing beyond the free space kills (SIGBUS) instead of raising.
        # In a container /dev/shm often has 64 MiB; the pipe is slower and always there.
        shared = None
        if num_workers * num_bytes < _free_shared_memory():
            shared = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(num_bytes))
        block = np.empty(num_bytes, dtype=np.uint8) if shared is None else shared.numpy()
        places = tuple((start, start + array.nbytes) for start, array in zip(starts, arrays, strict=False))
        for (start, stop), array in zip(places, arrays, strict=True):
            block[start:stop] = array
        is_read_by_device = any(features.per_row for features, _ in featured.parts)
        return cls(rest.getvalue(), places, block if shared is None else shared, is_read_by_device)

    def pin_memory(self) -> _Parcel:
        """Return the parcel where an accelerator reads its pixels without this process; DataLoader asks."""
        return replace(self, block=torch.as_tensor(self.block).pin_memory()) if self.is_read_by_device else self

    def unpacked(self) -> FeaturedBatch:
        """Return what was packed; the block is seen, not copied."""
        block = np.asarray(self.block).data
        # It was pickled by this program, in a process of its own.
        featured: FeaturedBatch = pickle.loads(  # noqa: S301
            self.rest, buffers=[block[start:stop] for start, stop in self.places]
        )
        return featured


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, whose memory stays apart."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, torch.Tensor) else NotImplemented


def block_bytes(num_bytes: int) -> int:
    """Return the size of the block for so many bytes: one of eight between powers of two, so that sizes come again.

    Page-locked memory is kept for the next block of the size; without that it would grow with every larger batch.
    """
    step = 1 << max(12, num_bytes.bit_length() - 4)
    return max(1, -(-num_bytes // step)) * step


class _FeaturedBatches(Dataset["_Parcel | VembedError"]):
    """The batches as DataLoader sees them: item i is batch i, or the error that the user has to fix."""

    def __init__(self, source: BatchSource, num_workers: int, parent: int) -> None:
        self.source = source
        self.parent = parent
        self._num_workers = num_workers

    def __getitem__(self, number: int) -> _Parcel | VembedError:
        try:
            return _Parcel.of(self.source.batch(number), self._num_workers)
        except VembedError as error:
            # Raised here, it would come back from DataLoader with the worker's traceback as its message.
            return error


@contextmanager
def _children_may_die() -> Iterator[None]:
    """Keep torch's handler of SIGCHLD still: it raises wherever this thread stands.

    Where workers start, nobody could say yet which of them died, and DataLoader finds out when a batch doesn't come;
    where they are closed, it would stop that half-way.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    while signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
        with suppress(RuntimeError):  # of a death just before
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


@contextmanager
def _ready_to_fork() -> Iterator[None]:
    """Let what is forked inside have tokenizers without threads, and signals that wait until it ignores them."""
    # A signal that comes between the fork and the worker's SIG_IGN would end the worker: it waits until then.
    before = os.environ.get(TOKENIZERS_SWITCH)
    os.environ[TOKENIZERS_SWITCH] = "false"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if before is None:
            del os.environ[TOKENIZERS_SWITCH]
        else:
            os.environ[TOKENIZERS_SWITCH] = before


def _become_worker(number: int) -> None:  # noqa: ARG001 - the signature that DataLoader calls
    """Leave signals to the parent, end with it, use one thread, and let go of the weights (shards are small)."""
    for held in _HELD_SIGNALS:
        signal.signal(held, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_SIGNALS)
    info = get_worker_info()
    assert info is not None
    batches = info.dataset
    assert isinstance(batches, _FeaturedBatches)
    # The kernel ends this process with the thread that forked it, so that no worker outlives a killed run.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != batches.parent:  # it died before the line above
        os._exit(1)
    # Pages of the weights are shared until the parent's first update writes to them; then each worker would hold the
    # old ones, a whole model per worker. Making features needs no weights.
    encoder = batches.source.encoder
    for tensor in (*encoder.parameters(), *encoder.buffers()):
        if tensor.device.type == "cpu" and not is_shared(tensor):
            tensor.data = tensor.new_empty(0)


def _free_shared_memory() -> int:
    """Return the bytes that shared tensors may still take; writing beyond would kill the worker."""
    try:
        space = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize


def _obituary(worker: BaseProcess, num_workers: int) -> str:
    """Say how a worker died, and what helps."""
    code = worker.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    why = {
        -signal.SIGKILL: "by hand, or by the system because memory ran out: then lower num_workers or batch_size",
        -signal.SIGBUS: f"shared memory ran out: enlarge {SHARED_MEMORY}, or lower num_workers or batch_size",
        -signal.SIGSEGV: "a library crashed: num_workers=0 decodes in the training process and may show where",
    }.get(code, "num_workers=0 decodes in the training process and may show why")
    return (
        f"a data worker (process {worker.pid}, one of num_workers: {num_workers}) {how}; {why}. The last "
        f"checkpoint is whole, and the same command continues from it"
    )
