"""What this machine gives one process: cores and memory, container limits included."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run happens.

    Attributes:
        device: "cpu" or the accelerator's type, e.g. "cuda".
        device_name: For people.
        memory_bytes: Memory that one process may use: of its accelerator, else of the container or the machine.
        num_cores: Cores that this process may use.
        fast_bf16: Whether bfloat16 saves time here.
        num_busy_cores: Cores that training itself keeps busy: on a CPU its threads, else the one that feeds the device.
    """

    device: str
    device_name: str
    memory_bytes: int
    num_cores: int
    fast_bf16: bool
    num_busy_cores: int = 1


def cpu_memory_bytes() -> int:
    """Return the memory that this process may use: the cgroup's limit, or all that the machine has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_limit(Path(path)) for path in _CGROUP_LIMITS]
    return min([total, *(limit for limit in limits if limit is not None)])


def cpu_cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # no container, or another version of cgroups
    return int(text) if text.isdigit() else None
