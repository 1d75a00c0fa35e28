"""The environment variables that decide how processes find each other and how fast they compute, and what is odd."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "PYTORCH_ALLOC_CONF": "settings of the memory allocator",
    "PYTORCH_CUDA_ALLOC_CONF": "settings of the memory allocator, by its older name",
    "WORLD_SIZE": "processes of the run, set by a launcher",
    "RANK": "this process, set by a launcher",
    "LOCAL_RANK": "this process on its machine, set by a launcher",
    "MASTER_ADDR": "where processes meet, set by a launcher",
    "MASTER_PORT": "port where processes meet, set by a launcher",
}
"""What the more common ones do."""


@dataclass(frozen=True, slots=True)
class Oddity:
    """A variable that probably isn't meant.

    Attributes:
        name: The variable.
        sentence: What it does here, and what to do.
    """

    name: str
    sentence: str


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter here, by name."""
    return {name: environment[name] for name in sorted(environment) if SHOWN.match(name)}


def odd_variables(environment: Mapping[str, str], *, num_cores: int, num_gpus: int) -> tuple[Oddity, ...]:
    """Return the variables whose values slow a run down, break it, or contradict each other.

    Args:
        environment: Of the process.
        num_cores: Cores that it may use.
        num_gpus: GPUs that it sees.
    """
    found = []

    def odd(name: str, sentence: str) -> None:
        found.append(Oddity(name, sentence))

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
