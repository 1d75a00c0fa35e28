"""What this machine gives one process: cores and memory, within the limits of its container or its batch job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    narrow_gathers: bool = True  # whether shards of float32 are gathered in half precision where products take it
    num_busy_cores: int = 1  # by training itself: on a CPU its threads, else the core that feeds the device


def cpu_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may use: the least limit of its cgroups, or all that the machine has.

    Args:
        root: Folder that /proc and /sys lie in.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("memory.max", "memory.limit_in_bytes")  # of version 2 and 1
    limits = [_read_numbers(folder / name) for folder in _cgroups("memory", root) for name in names]
    return min([total, *(limit[0] for limit in limits if limit)])


def cpu_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may run on: those it is bound to, and no more than its cgroups' share of time.

    Args:
        root: Folder that /proc and /sys lie in.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu", root):
        # Microseconds of computing in each period, over all cores: "150000 100000" are one and a half.
        share = _read_numbers(folder / "cpu.max")
        share = share or [*_read_numbers(folder / "cpu.cfs_quota_us"), *_read_numbers(folder / "cpu.cfs_period_us")]
        if len(share) == 2:
            cores = min(cores, share[0] // share[1])
    return max(1, cores)


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders that may limit this process: that of its cgroup and all above, of versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers:
            top /= controller
        if not controllers or controller in controllers.split(","):
            folder = top / path.lstrip("/")
            # A container sees its own cgroup at the top, under whatever path the host has for it.
            yield from (folder, *(above for above in folder.parents if above.is_relative_to(top)))


def _read_numbers(path: Path) -> list[int]:
    """Return the whole numbers of a file; none where it is missing or says that there is no limit ("max", -1)."""
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []
