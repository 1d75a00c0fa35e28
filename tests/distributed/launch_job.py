"""A run of several processes without a model: it adds numbers up, and one process fails in the way that is asked for.

Arguments: what happens, the output folder, the timeout in seconds.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch

from vembed.distributed.runtime import shut_down, start_runtime
from vembed.distributed.watchdog import Watchdog
from vembed.entrypoints.command import run_command
from vembed.errors import DataError, PreemptedError


def main(what: str, folder: Path, timeout_seconds: int, watchdog: Watchdog) -> int:
    watchdog.exit_files.expect(folder)
    runtime = start_runtime(deterministic=False, timeout_seconds=timeout_seconds, watchdog=watchdog)
    ranks = runtime.ranks
    folder.mkdir(exist_ok=True)
    watchdog.exit_files.own(folder, is_main=ranks.is_first)
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"rank {ranks.rank} of {ranks.world_size}, {runtime.local_rank} here, {threads} threads", flush=True)
    ranks.require_equal({"batch_size": "8" if what != "differ" or ranks.rank == 0 else "16"})
    if what == "work alone":
        ranks.from_first(lambda: time.sleep(2 * timeout_seconds))
    if what == "kill alone":
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # as in training, where it only asks
        ranks.from_first(lambda: os.kill(os.getpid(), signal.SIGKILL))
    for step in range(5 if what in ("nothing", "work alone") else 10_000):
        total = ranks.sum_(torch.ones(1))
        assert total.item() == ranks.world_size
        if step == 3 and ranks.rank == 1:
            happen(what)
        time.sleep(0.02)
    if what == "nothing" and ranks.rank == 0:
        time.sleep(1)  # the others wait for it
        (folder / "done").touch()
    shut_down(watchdog)
    return 0


def happen(what: str) -> None:
    if what == "error":
        raise DataError("rows.jsonl:3: the text is empty")
    if what == "bug":
        raise ZeroDivisionError("a bug")
    if what == "preempted":
        raise PreemptedError("stopped by SIGTERM")
    if what == "hang":
        time.sleep(10_000)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    what, folder, seconds = sys.argv[1:]
    dog = Watchdog()
    body = functools.partial(main, what, Path(folder), int(seconds), dog)
    sys.exit(run_command(body, in_several=True, watchdog=dog))
