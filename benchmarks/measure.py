"""Measure one call: CPU time, wall time and the memory that it adds.

On a CPU each call runs in a forked child: every measurement starts from the same heap, so that the peak of one variant
says nothing about the variants before it. A child's peak resident size starts at its present one; the difference is
what the call added. Its first run gets every page from the system, which no step of a training run but the first does:
a warm-up leaves that out of the time. On a GPU calls run in this process, and the caching allocator's own peak counts.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one call cost.

    Attributes:
        cpu_seconds: Time of all threads of the process; on a GPU the same as `wall_seconds`.
        wall_seconds: Time by the clock; on a GPU until the device is done.
        peak_bytes: Most memory above what was in use when the call began.
        value: What the call returned.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    value: Any


def measure(call: Callable[[], Any], device: torch.device, *, warm_up: bool = False) -> Measurement:
    """Run a call and return what it cost.

    Args:
        call: What to measure; on a CPU its return value must be picklable.
        device: Where its work runs.
        warm_up: Whether it runs once before its time is taken; memory is that of both runs. On a GPU nothing changes.

    Raises:
        RuntimeError: When the call failed; its traceback is in the message.
    """
    return _on_gpu(call, device) if device.type == "cuda" else _in_a_child(call, warm_up=warm_up)


def _on_gpu(call: Callable[[], Any], device: torch.device) -> Measurement:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    value = call()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    return Measurement(seconds, seconds, torch.cuda.max_memory_allocated(device) - before, value)


def _in_a_child(call: Callable[[], Any], *, warm_up: bool) -> Measurement:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 0
        with os.fdopen(writer, "wb") as pipe:
            try:
                pickle.dump(_measured(call, warm_up=warm_up), pipe)
            except BaseException:  # noqa: BLE001  whatever it was, the parent has to hear of it
                pickle.dump(traceback.format_exc(), pipe)
                status = 1
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    result = pickle.loads(content) if content else "the child was killed, most likely for its memory"
    if not isinstance(result, Measurement):
        raise RuntimeError(f"a measured call failed:\n{result}")
    return result


def _measured(call: Callable[[], Any], *, warm_up: bool) -> Measurement:
    before_bytes = _status_bytes("VmRSS")
    if warm_up:
        call()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    value = call()
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measurement(cpu, wall, _status_bytes("VmHWM") - before_bytes, value)


def _status_bytes(field: str) -> int:
    """Return a size from the kernel's account of this process (VmRSS: now, VmHWM: at its peak)."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel states no {field}")
