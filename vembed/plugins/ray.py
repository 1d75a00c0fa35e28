"""`vembed encode --ray`: encode the texts of an index as a Ray Data job, on workers that may be on several machines.

1. The rows of the job are where each block begins and ends in ids.jsonl.
2. Each worker is an actor that holds the model. It reads a block from that file, encodes it sorted by length, and sends
   the vectors back.
3. The vectors arrive here in the order of the blocks, and are stored as those of one process are.

A block is what a process without Ray encodes at a time, so that the vectors are the same.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import warnings
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Ragged
from vembed.errors import ConfigError, DataError, MachineError, VembedError
from vembed.registry import import_extra
from vembed.text import first_line
from vembed.vectors.encode import Encoded, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from vembed.batch import Side
    from vembed.vectors.encode import ItemEncoder
    from vembed.workflows.search.build import EncodeTexts

_log = logging.getLogger(__name__)

RETRIES = 3
"""Times that a worker that died is started again, and that a block is encoded anew."""

WORKER_CPUS = 4
"""CPUs of a worker where there is no GPU and nobody says how many workers there are."""

POLL_SECONDS = 0.5


def encode_with_ray(address: str = "", num_workers: int | None = None) -> EncodeTexts:
    """Return what `build_index(encode=...)` takes to encode on the workers of a Ray cluster.

    Args:
        address: HOST:PORT; "" is $RAY_ADDRESS, a cluster of this machine, or a new one here.
        num_workers: One for each GPU by default, or for each `WORKER_CPUS` CPUs.
    """
    # A generator function: Ray is imported and reached when the first vectors are asked for, not before.
    return partial(_stream, address, num_workers)


def _stream(
    address: str,
    asked_workers: int | None,
    make: Callable[[], ItemEncoder],
    documents: Path,
    spans: list[tuple[int, int]],
    side: Side,
    poll: Callable[[], None],
) -> Generator[Encoded]:
    """Yield the vectors of one block after the other, as `EncodeTexts` says.

    Raises:
        MachineError: Ray can't be reached, or a worker died too often.
        VembedError: What a worker raised.
    """
    if not spans:
        return
    with _cluster(address) as ray:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        num_workers, resources = _share(ray.cluster_resources(), asked_workers)
        _log.info("Ray: %d workers, each with %s", num_workers, resources)
        # One block for each row, so that Ray hands out blocks one by one and returns them in order.
        rows = [{"start": start, "stop": stop} for start, stop in spans]
        with warnings.catch_warnings():
            # Ray 2.64 drops the keywords of starting again; the extra ends before it.
            warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
            results = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                _Worker,
                fn_constructor_args=(make, str(documents), side),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=num_workers),
                max_restarts=RETRIES,
                max_task_retries=RETRIES,
                **resources,
            )
        for row in _arriving(results.iter_rows, poll):
            num_truncated, offsets, vectors_VE = int(row["num_truncated"]), row["offsets"], row["vectors"]
            yield Encoded(Ragged(vectors_VE, offsets) if len(offsets) else vectors_VE, num_truncated)


class _Worker:
    """An actor that holds the model."""

    def __init__(self, make: Callable[[], ItemEncoder], documents: str, side: Side) -> None:
        self._make, self._documents, self._side = make, documents, side

    @cached_property
    def _encode(self) -> ItemEncoder:
        return self._make()

    def __call__(self, batch: dict[str, NDArray[np.int64]]) -> dict[str, Any]:
        """Encode a block; an error of ours is returned, since Ray would keep its traceback alone."""
        try:
            return self._encoded(int(batch["start"][0]), int(batch["stop"][0]))
        except VembedError as error:
            return {"error": np.array([error], dtype=object)}

    def _encoded(self, start: int, stop: int) -> dict[str, Any]:
        try:
            with Path(self._documents).open("rb") as file:
                file.seek(start)
                lines = file.read(stop - start).splitlines()
        except OSError as error:
            raise DataError(
                f"a Ray worker on {socket.gethostname()} can't read {self._documents}: {error.strerror}; choose an "
                "--output in a folder that all machines of the cluster see"
            ) from error
        before = self._encode.num_truncated[self._side]
        vectors = self._encode([json.loads(line)["text"] for line in lines], self._side)
        return {
            "vectors": values_of(vectors)[None],
            "offsets": (vectors.offsets if isinstance(vectors, Ragged) else np.zeros(0, np.int64))[None],
            "num_truncated": np.array([self._encode.num_truncated[self._side] - before]),
        }


@contextmanager
def _cluster(address: str) -> Generator[Any]:
    """Connect to a cluster, and leave it at the end; one that the caller is connected to stays so."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray's own process logs to our terminal
    # After a stop the thread that waits for rows would have Ray start another cluster.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    ray = import_extra("ray", "ray", "--ray")
    import_extra("ray.data", "ray", "--ray")
    logging.getLogger("ray.data").setLevel(
        logging.CRITICAL
    )  # errors are told by us, and its plan of one step by nobody
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        raise MachineError(
            f"no Ray cluster at {address or 'this machine'}: {first_line(error)}. Start one with "
            "`ray start --head`, or give --ray no address"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _share(cluster: dict[str, float], asked: int | None) -> tuple[int, dict[str, float]]:
    """Return how many workers there are, and what each gets of the cluster."""
    name, has, usual = "CPU", int(cluster.get("CPU", 0)), WORKER_CPUS
    if cluster.get("GPU", 0) >= 1:
        name, has, usual = "GPU", int(cluster["GPU"]), 1
    num_workers = max(1, has // usual) if asked is None else asked
    if not 1 <= num_workers <= has:
        raise ConfigError(f"--ray-workers must be 1 to {has}, a {name} of the cluster for each, got {num_workers}")
    return num_workers, {f"num_{name.lower()}s": 1 if name == "GPU" else has // num_workers}


def _arriving(rows: Callable[[], Iterator[dict[str, Any]]], poll: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield what a job returns, and poll while it is awaited."""
    # Ray's iterator blocks without a timeout: a thread waits for it, so that this one can poll and be stopped. It is a
    # daemon, since nothing can wake it once the job is abandoned.
    arrived: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue(maxsize=1)

    def read() -> None:
        try:
            for row in rows():
                arrived.put(row)
            arrived.put(None)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            arrived.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        poll()
        try:
            row = arrived.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
        if isinstance(row, Exception):
            # Of a worker's error Ray tells the traceback, which ends in the error.
            lines = str(row).strip().splitlines() or [type(row).__name__]
            reason = lines[-1 if "ray::" in lines[0] else 0]
            raise MachineError(f"the Ray job failed: {reason}. A worker that dies is started again {RETRIES} times")
        if row is None:
            return
        if "error" in row:
            raise row["error"]
        yield row
