"""What this machine gives one process: cores and memory, container limits included."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run happens."""

    device: str  # "cpu" or the accelerator's type, e.g. "cuda"
    device_name: str  # for people
    memory_bytes: int  # of one process: its accelerator's, else the container's or the machine's
    num_cores: int  # that this process may use
    fast_bf16: bool  # whether bfloat16 saves time
    taken_bytes: int = 0  # of the accelerator's memory, by other programs: `memory_bytes` leaves it out
    num_busy_cores: int = 1  # by training itself: on a CPU its threads, else the core that feeds the device


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
