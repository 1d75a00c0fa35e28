"""What a run is spread over: how many devices, how large, how fast, how they are joined."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vembed.errors import ConfigError
from vembed.plan.hardware import GIB, Machine

if TYPE_CHECKING:
    from collections.abc import Mapping

USABLE_SHARE = 0.985
"""Of the memory on a device's label, what its driver leaves: "80GB" shows as 79 GiB, "24GB" as 23.6."""


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
"""The longest name that a device's own name holds, spaces left out, is taken."""

WITHOUT_BF16 = ("V100", "P100", "T4", "RTX20", "QUADRORTX", "TITAN", "GTX")
"""Parts of the names of devices that only emulate bfloat16."""

UNKNOWN_DEVICE = Known(0, 100, 20)
CPU_TFLOPS_PER_CORE, CPU_LINK = 0.05, 5.0

NETWORK = 25.0
"""To a device of another machine, in 10^9 bytes a second: a 200 Gbit/s adapter for each device."""

HOST_LINK = 20.0
"""From a device to its host's memory, in 10^9 bytes a second."""

_FORM = re.compile(r"(?:(\d+)x)?(\d+)x(?:([A-Za-z][\w ]*?)(?:-|$))?(?:(\d+(?:\.\d+)?)\s*Gi?B)?", re.IGNORECASE)
_EXAMPLES = "such as 8xH100-80GB, 4x24GB, or 2x8xA100-40GB for two machines of eight"


@dataclass(frozen=True, slots=True)
class Devices:
    """What a run is spread over, one process on each."""

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
            speed = CPU_TFLOPS_PER_CORE * max(1, machine.num_cores // max(1, count // nodes))
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
        has_bf16 = not any(each in _plain(self.name) for each in WITHOUT_BF16)
        return Machine("cuda", self.name, self.memory_bytes, num_cores, fast_bf16=has_bf16)

    def __str__(self) -> str:
        where = f" on {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.count} x {self.name}, {self.memory_bytes / GIB:.1f} GiB each{where}"


def find_known(name: str) -> Known | None:
    """Return the figures of a device by its name, e.g. "NVIDIA H100 80GB HBM3"; None when it isn't in the table."""
    names = [each for each in KNOWN_DEVICES if each in _plain(name)]
    return KNOWN_DEVICES[max(names, key=len)] if names else None


def _plain(name: str) -> str:
    return name.upper().replace(" ", "").replace("-", "").replace("_", "")


def parse_devices(text: str) -> Devices:
    """Read what a run is spread over.

    Args:
        text: `8xH100-80GB`, `4x24GB`, `8xH100`, or `2x8xA100-40GB` for two machines of eight.

    Raises:
        ConfigError: It can't be read, or names a device without its memory that isn't in the table.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--devices {text!r} can't be read; write NUMBERxNAME-MEMORY, {_EXAMPLES}")
    nodes, count = int(match[1] or 1), int(match[2])
    if nodes < 1 or count < 1:
        raise ConfigError(f"--devices {text!r} has no devices; write 1 or more, {_EXAMPLES}")
    figures = None if match[3] is None else find_known(match[3])
    if match[4] is None and figures is None:
        listed = ", ".join(KNOWN_DEVICES)
        raise ConfigError(f"--devices {text!r} doesn't say the memory, and its name is none of {listed}; {_EXAMPLES}")
    known = figures or UNKNOWN_DEVICE
    label = known.label_gib if match[4] is None else float(match[4])
    if label <= 0:
        raise ConfigError(f"--devices {text!r} has no memory; {_EXAMPLES}")
    name = match[3] or f"device of {label:g} GB"
    memory = int(label * USABLE_SHARE * GIB)
    return Devices(name, nodes * count, memory, known.tflops, known.link, nodes, known=figures is not None)
