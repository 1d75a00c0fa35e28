"""How all tests of this folder run: how many examples, from which seed, and what one example may take.

`VEMBED_FUZZ_EXAMPLES` is the number of examples of all tests together (300 by default); `VEMBED_FUZZ_SEED` gives other
examples than those that every run of the tests repeats. `make fuzz` sets both.
"""

import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

MOST_CPU_SECONDS = 5.0
MOST_SECONDS = 60.0  # of the clock: what waits for something that never comes
MOST_BYTES = 500 * 10**6

_FULL_SHARES = 15  # what the shares of all tests of this folder add up to, about

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "vembed-hypothesis")  # not in the project


def fuzzed(examples_share: float = 1.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test of `hypothesis.given` on its share of the examples, the same in every run unless a seed is given."""
    examples = int(os.environ.get("VEMBED_FUZZ_EXAMPLES", "300"))
    seed = os.environ.get("VEMBED_FUZZ_SEED")
    applied = hypothesis.settings(
        max_examples=max(1, round(examples * examples_share / _FULL_SHARES)),
        database=None,
        deadline=None,  # `within_limits` counts CPU time; other processes may hold the cores
        derandomize=seed is None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        seeded: Any = applied(test)
        return seeded if seed is None else hypothesis.seed(int(seed))(seeded)

    return decorate


@contextmanager
def within_limits() -> Iterator[None]:
    """Fail when the body takes over 5 s of CPU time, 60 s of the clock, or 500 MB more memory than there was."""
    before = _memory_from_now_on()
    start = time.process_time()
    with _interrupted():
        yield
    seconds, taken = time.process_time() - start, _peak_bytes() - before
    assert seconds <= MOST_CPU_SECONDS, f"took {seconds:.1f} s of CPU time"
    assert taken <= MOST_BYTES, f"took {taken / 10**6:.0f} MB"


@contextmanager
def _interrupted() -> Iterator[None]:
    """End a body that hangs; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def fail(number: int, frame: object) -> None:
        pytest.fail(f"still running after {MOST_CPU_SECONDS:g} s of CPU time or {MOST_SECONDS:g} s of the clock")

    timers = {
        signal.ITIMER_PROF: (signal.SIGPROF, 2 * MOST_CPU_SECONDS),
        signal.ITIMER_REAL: (signal.SIGALRM, MOST_SECONDS),
    }
    handlers = {number: signal.signal(number, fail) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _memory_from_now_on() -> int:
    """Forget the peak of this process where the system can, and return its memory in bytes."""
    with suppress(OSError):  # then the peak stays that of the whole process: only what grows beyond it is seen
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
