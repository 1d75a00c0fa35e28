"""What facts and environment variables of a machine mean for a run: pure rules, each with what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.plan.devices import OLDEST_TORCH
from vembed.text import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vembed.workflows.doctor.facts import MachineFacts

Level: TypeAlias = Literal["warning", "problem"]
"""A warning costs speed or may cost the run; with a problem nothing can be trained as it is."""

SMALL_SHARED_MEMORY = 1 << 30
"""Below it data workers and NCCL run out with large pictures or many GPUs; containers have 64 MiB by default."""

SMALL_DISK, NO_DISK = 20 << 30, 1 << 30
"""A checkpoint holds the weights and twice as much of optimizer state."""

BUSY_SHARE = 0.1
"""Memory of a device that is taken before a run, from which another program must be using it."""


SHOWN = re.compile(
    r"^(NCCL_|TORCH_NCCL_|TORCH_|GLOO_|OMP_|MKL_|CUDA_|CUBLAS_|PYTORCH_|ACCELERATE_|FSDP_|SLURM_(?:JOB_ID|PROCID|NTASKS)$"
    r"|MASTER_|WORLD_SIZE$|RANK$|LOCAL_RANK$|LOCAL_WORLD_SIZE$|HF_HUB_OFFLINE$|HF_HOME$)"
)
"""Names that are shown; nothing with a token or a password has such a name."""

MEANINGS = {
    "NCCL_DEBUG": "how much NCCL tells; WARN or INFO when something hangs",
    "NCCL_SOCKET_IFNAME": "network interface between machines",
    "NCCL_P2P_DISABLE": "1: GPUs of one machine don't copy to each other directly",
    "NCCL_SHM_DISABLE": "1: processes of one machine don't use shared memory",
    "NCCL_IB_DISABLE": "1: InfiniBand is not used",
    "GLOO_SOCKET_IFNAME": "network interface of gloo",
    "TORCH_NCCL_BLOCKING_WAIT": "1: the program waits in every collective",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0: a failed collective doesn't end the process",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL checks every collective, at a cost",
    "OMP_NUM_THREADS": "threads of one process on the CPU",
    "CUDA_VISIBLE_DEVICES": "GPUs that this program may see",
    "CUDA_LAUNCH_BLOCKING": "1: the program waits for every kernel",
    "PYTORCH_ALLOC_CONF": "settings of the memory allocator; unset, a run on GPUs takes expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": "settings of the memory allocator, by its older name",
    "WORLD_SIZE": "processes of the run, set by a launcher",
    "RANK": "this process, set by a launcher",
    "LOCAL_RANK": "this process on its machine, set by a launcher",
    "MASTER_ADDR": "where processes meet, set by a launcher",
    "MASTER_PORT": "port where processes meet, set by a launcher",
}
"""What the more common ones do."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that isn't as it should be."""

    level: Level
    about: str  # a word or two
    sentence: str  # what was found and what to do


def check_machine(facts: MachineFacts, variables: Sequence[Check]) -> tuple[Check, ...]:
    """Return what isn't as it should be, problems first: `variables` are those that `odd_variables` found."""
    found = [*_packages(facts), *_devices(facts), *_room(facts), *variables]
    return tuple(sorted(found, key=lambda check: check.level != "problem"))


def _packages(facts: MachineFacts) -> Iterator[Check]:
    missing = [name for name, version in facts.packages.items() if not version]
    if missing:
        yield Check("problem", "packages", f"{', '.join(missing)} missing: pip install {' '.join(missing)}.")
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts.packages.get("torch", ""))[:2])
    if numbers and numbers < OLDEST_TORCH:
        yield Check("problem", "torch", f"{facts.packages['torch']} is too old: 2.11 or newer is needed.")


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


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter here, by name."""
    return {name: environment[name] for name in sorted(environment) if SHOWN.match(name)}


def odd_variables(environment: Mapping[str, str], *, num_cores: int, num_gpus: int) -> tuple[Check, ...]:
    """Return the variables whose values slow a run down, break it, or contradict each other."""
    found = []

    def odd(name: str, sentence: str) -> None:
        found.append(Check("warning", name, sentence))

    for name, why in _SLOW.items():
        if environment.get(name, "0") not in ("0", ""):
            odd(name, why)
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        odd("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0 lets processes hang when another one is gone: unset it.")
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        odd("TORCH_DISTRIBUTED_DEBUG", "DETAIL checks every collective: unset it when the search for a hang is over.")
    if environment.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        odd("NCCL_DEBUG", "It fills the log: WARN is enough when nothing hangs.")
    if environment.get("CUDA_VISIBLE_DEVICES") == "" and num_gpus == 0:
        odd("CUDA_VISIBLE_DEVICES", "It is empty, so that no GPU is seen: unset it to train on GPUs.")
    odd_threads = _odd_threads(environment.get("OMP_NUM_THREADS", ""), num_cores)
    if odd_threads:
        odd("OMP_NUM_THREADS", odd_threads)
    if "PYTORCH_CUDA_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
        odd("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF is its newer name, and both are set: keep one.")
    if "WORLD_SIZE" not in environment and ("RANK" in environment or "LOCAL_RANK" in environment):
        odd("RANK", "It is set without WORLD_SIZE, which no launcher does: unset what an earlier run left behind.")
    if environment.get("WORLD_SIZE", "1") not in ("1", ""):
        odd(
            "WORLD_SIZE",
            f"A run started here takes itself for one of {environment['WORLD_SIZE']} processes and waits for the "
            f"others: unset it, unless a launcher has just set it.",
        )
    return tuple(found)


_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "The program waits for every kernel: for finding a failing one only; unset it.",
    "TORCH_NCCL_BLOCKING_WAIT": "The program waits in every collective: unset it; nccl_timeout ends what hangs.",
    "NCCL_P2P_DISABLE": "GPUs exchange data through the host's memory, far slower: unset it unless they hang without.",
    "NCCL_SHM_DISABLE": "Processes of one machine talk over the network: unset it, and give containers shared memory.",
    "NCCL_IB_DISABLE": "Machines talk over TCP even where there is InfiniBand: unset it where there is.",
}


def _odd_threads(value: str, num_cores: int) -> str:
    """Return what is odd about the number of threads, or nothing."""
    if not value:
        return ""
    if not value.isdigit() or value == "0":
        return f"{value!r} is no number of threads: unset it, or set it to cores divided by processes."
    if int(value) > num_cores:
        return f"{value} threads share {num_cores} cores and slow each other down: at most cores divided by processes."
    return ""
