"""Devices: what one process may use of this machine, and what a run is spread over.

A `Machine` is one process with its device, here or imagined; `Devices` are all of them: how many, how large, how fast,
how they are joined.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GIB = 1 << 30

OLDEST_TORCH = (2, 11)
"""The lowest torch that vembed runs with (pyproject.toml); pip keeps to it, a container's own torch may not."""

USABLE_SHARE = 0.985
"""Of the memory on a device's label, what its driver leaves: "80GB" shows as 79 GiB, "24GB" as 23.6."""


# This machine ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """A process and its device, as the plan sees them."""

    device: str  # "cpu" or the accelerator's type, e.g. "cuda"
    device_name: str  # for people
    memory_bytes: int  # of one process: its accelerator's, else the container's or the machine's
    num_cores: int  # that this process may use
    fast_bf16: bool  # whether bfloat16 saves time
    taken_bytes: int = 0  # of the accelerator's memory, by other programs: `memory_bytes` leaves it out
    narrow_gathers: bool = True  # whether shards of float32 are gathered in half precision where products take it
    num_busy_cores: int = 1  # by training itself: on a CPU its threads, else the core that feeds the device
    torch_version: str = ""  # e.g. "2.11.0+cu128"; empty where the plan is for another machine

    @property
    def has_old_torch(self) -> bool:
        """True where its torch is older than the oldest that vembed runs with."""
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.torch_version)[:2])
        return bool(numbers) and numbers < OLDEST_TORCH


def cpu_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may use: the least limit of its cgroups, or all that the machine has.

    Args:
        root: Folder that /proc and /sys lie in.
    """
    # In whole 64 MiB: what the kernel keeps for itself differs by some KiB from boot to boot, and the plan must not.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 26 << 26
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
        # "0::/user.slice" is version 2, one tree for all controllers; "5:cpu,cpuacct:/job" is a tree of version 1.
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers:
            top /= controller
        if not controllers or controller in controllers.split(","):
            folder = top / path.lstrip("/")
            # A container sees its own cgroup at the top, under whatever path the host has for it: the folder of that
            # path is missing there, and one above it has the limit.
            yield from (folder, *(above for above in folder.parents if above.is_relative_to(top)))


def _read_numbers(path: Path) -> list[int]:
    """Return the whole numbers of a file; none where it is missing or says that there is no limit ("max", -1)."""
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []


# Devices of a run -----------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """Rough public figures of a device: they order candidates, no result depends on them."""

    label_gib: float  # memory on its label
    tflops: float  # dense bfloat16 (float16 where it has none), in 10^12 operations a second
    link: float  # to a device of the same machine, in 10^9 bytes a second and direction


KNOWN_DEVICES: Mapping[str, Known] = {
    "B200": Known(180, 2250, 900),
    "H200": Known(141, 989, 450),
    "H100": Known(80, 989, 450),
    "A100": Known(80, 312, 300),
    "L40S": Known(48, 362, 25),
    "A6000": Known(48, 155, 25),
    "A40": Known(48, 150, 25),
    "RTX4090": Known(24, 165, 20),
    "RTX3090": Known(24, 71, 20),
    "A10": Known(24, 125, 25),
    "L4": Known(24, 121, 25),
    "V100": Known(32, 125, 150),
    "T4": Known(16, 65, 12),
}
"""The longest name that a device's own name holds, spaces left out, is taken; no digit follows: an A4000 is no A40."""

WITHOUT_BF16 = ("V100", "P100", "T4", "RTX206", "RTX207", "RTX208", "QUADRORTX", "TITAN", "GTX")
"""Parts of the names of devices that only emulate bfloat16."""

UNKNOWN_DEVICE = Known(0, 100, 20)
CPU_TFLOPS_PER_CORE, CPU_LINK = 0.05, 5.0

NETWORK = 25.0
"""To a device of another machine, in 10^9 bytes a second: a 200 Gbit/s adapter for each device."""

HOST_LINK = 20.0
"""From a device to its host's memory, in 10^9 bytes a second."""


@dataclass(frozen=True, slots=True)
class Devices:
    """All devices of a run, equal to each other, with one process on each."""

    name: str  # of one device, for people
    count: int  # over all machines
    memory_bytes: int  # of one device
    tflops: float  # 10^12 operations a second in half precision
    link: float  # 10^9 bytes a second to a device of the same machine
    nodes: int = 1  # machines
    known: bool = False  # whether the speed figures are of this kind of device and not a general guess

    @classmethod
    def of(cls, machine: Machine, count: int = 1, nodes: int = 1) -> Devices:
        """Return so many devices like the machine's."""
        if machine.device == "cpu":
            speed = CPU_TFLOPS_PER_CORE * machine.num_cores
            return cls(machine.device_name, count, machine.memory_bytes, speed, CPU_LINK, nodes)
        figures = find_known(machine.device_name)
        known = figures or UNKNOWN_DEVICE
        name, memory = machine.device_name, machine.memory_bytes
        return cls(name, count, memory, known.tflops, known.link, nodes, known=figures is not None)

    @property
    def per_node(self) -> int:
        """Devices of one machine."""
        return self.count // self.nodes

    def bandwidth(self, group: int) -> float:
        """Return 10^9 bytes a second between the devices of a group of neighbours."""
        return self.link if group <= self.per_node else min(self.link, NETWORK)

    def machine(self, num_cores: int) -> Machine:
        """Return one of the machines, for a plan that is made elsewhere."""
        has_bf16 = not any(name in _plain(self.name) for name in WITHOUT_BF16)
        return Machine("cuda", self.name, self.memory_bytes, num_cores, fast_bf16=has_bf16)

    def __str__(self) -> str:
        where = f" on {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.count} x {self.name}, {self.memory_bytes / GIB:.1f} GiB each{where}"


def find_known(name: str) -> Known | None:
    """Return the figures of a device by its name, e.g. "NVIDIA H100 80GB HBM3"; None when it isn't in the table."""
    names = [known for known in KNOWN_DEVICES if re.search(rf"{known}(?!\d)", _plain(name))]
    return KNOWN_DEVICES[max(names, key=len)] if names else None


def _plain(name: str) -> str:
    # What stands between two numbers stays: "H100 80GB" is no H10080.
    return re.sub(r"(?<!\d)[ _-]+|[ _-]+(?!\d)", "", name.upper())


_FORM = re.compile(r"(?:(\d+)x)?(\d+)x(?:([A-Za-z][\w -]*?)(?:[ _-]|$))?(?:(\d+(?:\.\d+)?)\s*Gi?B)?", re.IGNORECASE)
_MEMORY = re.compile(r"\d\s*Gi?B", re.IGNORECASE)
_EXAMPLES = "such as 8xH100-80GB, 4x24GB, or 2x8xA100-40GB for two machines of eight"


def parse_devices(text: str) -> Devices:
    """Read what a run is spread over.

    Args:
        text: `8xH100-80GB`, `4x24GB`, `8xH100`, or `2x8xA100-40GB` for two machines of eight.

    Raises:
        ConfigError: It can't be read, or names a device without its memory that isn't in the table.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or (match[4] is None and _MEMORY.search(text)):  # a memory that would be taken for a name
        raise ConfigError(f"--devices {text!r} can't be read; write NUMBERxNAME-MEMORY, {_EXAMPLES}")
    nodes, count = int(match[1] or 1), int(match[2])
    if nodes < 1 or count < 1:
        raise ConfigError(f"--devices {text!r} has no devices; write 1 or more, {_EXAMPLES}")
    figures = None if match[3] is None else find_known(match[3])
    if match[4] is None and figures is None:
        listed = ", ".join(KNOWN_DEVICES)
        message = f"--devices {text!r} gives no memory size and no known device ({listed}); add the memory, {_EXAMPLES}"
        raise ConfigError(message)
    known = figures or UNKNOWN_DEVICE
    label = known.label_gib if match[4] is None else float(match[4])
    if label <= 0:
        raise ConfigError(f"--devices {text!r} has no memory; {_EXAMPLES}")
    name = match[3] or f"device of {label:g} GB"
    memory = int(label * USABLE_SHARE * GIB)
    return Devices(name, nodes * count, memory, known.tflops, known.link, nodes, known=figures is not None)
