"""What the facts of a machine mean for a run: pure rules, each with its threshold and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.plan.memory import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vembed.distributed.machine_facts import MachineFacts
    from vembed.distributed.variables import Oddity

Level: TypeAlias = Literal["warning", "problem"]
"""A warning costs speed or may cost the run; with a problem nothing can be trained as it is."""

OLDEST_TORCH, SHARDING_TORCH = (2, 11), (2, 15)

SMALL_SHARED_MEMORY = 1 << 30
"""Below it data workers and NCCL run out with large pictures or many GPUs; containers have 64 MiB by default."""

SMALL_DISK, NO_DISK = 20 << 30, 1 << 30
"""A checkpoint holds the weights and twice as much of optimizer state."""

BUSY_SHARE = 0.1
"""Memory of a device that is taken before a run, from which another program must be using it."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that isn't as it should be.

    Attributes:
        level: How bad.
        about: What it is about, in a word or two.
        sentence: What was found and what to do.
    """

    level: Level
    about: str
    sentence: str


def check_machine(facts: MachineFacts, oddities: Sequence[Oddity]) -> tuple[Check, ...]:
    """Return what isn't as it should be, problems first.

    Args:
        facts: Of the machine.
        oddities: Of its environment variables.
    """
    found = [*_packages(facts), *_devices(facts), *_room(facts)]
    found += [Check("warning", oddity.name, oddity.sentence) for oddity in oddities]
    return tuple(sorted(found, key=lambda check: check.level != "problem"))


def _packages(facts: MachineFacts) -> Iterator[Check]:
    missing = [name for name, version in facts.packages.items() if not version]
    if missing:
        yield Check("problem", "packages", f"{', '.join(missing)} missing: pip install {' '.join(missing)}.")
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts.packages.get("torch", ""))[:2])
    if numbers and numbers < OLDEST_TORCH:
        yield Check("problem", "torch", f"{facts.packages['torch']} is too old: 2.11 or newer is needed.")
    elif numbers and numbers < SHARDING_TORCH:
        yield Check("warning", "torch", f"{facts.packages['torch']} can't shard models (use_fsdp): 2.15 or newer can.")


def _devices(facts: MachineFacts) -> Iterator[Check]:
    if not facts.devices and facts.driver:
        why = "torch is built without CUDA" if not facts.cuda else "torch can't use them"
        yield Check(
            "problem", "devices", f"The driver shows GPUs and {why}: install a CUDA build of torch that fits it."
        )
    kinds = {(device.name, device.memory_bytes >> 30) for device in facts.devices}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{name} ({gib} GiB)" for name, gib in kinds))
        yield Check("warning", "devices", f"They differ ({listed}): the slowest and the smallest set the pace of all.")
    for number, device in enumerate(facts.devices):
        taken = device.memory_bytes - device.free_bytes
        if taken > BUSY_SHARE * device.memory_bytes:
            yield Check(
                "warning",
                f"device {number}",
                f"{show_bytes(taken)} of {show_bytes(device.memory_bytes)} are taken by another program: end it, or "
                f"leave the device out with CUDA_VISIBLE_DEVICES.",
            )


def _room(facts: MachineFacts) -> Iterator[Check]:
    shared, disk = facts.shared_memory, facts.disk
    if shared is not None and shared.total_bytes < SMALL_SHARED_MEMORY:
        yield Check(
            "warning",
            "shared memory",
            f"{shared.path} has {show_bytes(shared.total_bytes)}: data workers and NCCL may run out; start the "
            f"container with --shm-size=8g, or set num_workers: 0.",
        )
    if disk is not None and disk.free_bytes < SMALL_DISK:
        level: Level = "problem" if disk.free_bytes < NO_DISK else "warning"
        yield Check(
            level,
            "disk",
            f"{show_bytes(disk.free_bytes)} free for {disk.path}: checkpoints take three times the weights each; free "
            f"some, or set output_dir to another disk.",
        )
