"""The place of this process in a run, as its launcher wrote it into the environment.

run.py, accelerate launch and torchrun set RANK, WORLD_SIZE and so on; srun sets variables of SLURM. Nothing here
imports torch: commands ask who they are before they do.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

LAUNCHED_BY: Final = "VEMBED_LAUNCHED_BY"
"""Variable in which a command says to the processes that it starts how it was called."""

DEFAULT_PORT: Final = 29500
_SLURM_PORTS: Final = range(20_000, 30_000)
"""The job's number picks one, so that two jobs on a machine don't meet."""

_MPI_PREFIXES: Final = ("OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD")
"""Beginnings of the variables in which mpirun counts processes: of Open MPI, of MPICH and Intel MPI, of MVAPICH2."""


@dataclass(frozen=True, slots=True)
class ProcessEnv:
    """One process among those of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of its machine
    local_world_size: int = 1
    launcher: str = ""  # what started it, for people; empty when nothing did
    main_address: str = "127.0.0.1"  # host of rank 0, where the processes meet
    main_port: int = DEFAULT_PORT
    on_cpu: bool = False  # whether it was told to leave accelerators alone

    @property
    def is_launched(self) -> bool:
        """True when something started this process as one of a run: then nothing more is to be started."""
        return bool(self.launcher)

    def environment(self) -> dict[str, str]:
        """Return the variables by which torch and Accelerate know the process."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.main_address,
            "MASTER_PORT": str(self.main_port),
        }


def process_env(environ: Mapping[str, str] = os.environ) -> ProcessEnv:
    """Return the place of this process in its run.

    Raises:
        ConfigError: The variables contradict each other, or several processes were asked for and one was started.
    """
    on_cpu = environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if "WORLD_SIZE" in environ:
        return _from_torchrun(environ, on_cpu=on_cpu)
    if is_under_accelerate(environ):
        if "MASTER_ADDR" in environ:
            raise ConfigError(
                "accelerate launch was asked for several processes and started one: that is what it does with --cpu "
                "and with distributed_type NO or MULTI_CPU. Let vembed start them (python run.py CONFIG "
                "--config_override num_processes=2), or write distributed_type: MULTI_GPU beside use_cpu: true in the "
                "file of accelerate"
            )
        return ProcessEnv(launcher="accelerate launch", on_cpu=on_cpu)
    # A step of several tasks, one for each device, as `srun` starts it: the batch script itself, and an interactive
    # shell, are steps of one.
    if (num_tasks := _number(environ, "SLURM_STEP_NUM_TASKS", 1)) > 1:
        job, node = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_NODEID", 0)
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
        return ProcessEnv(
            _number(environ, "SLURM_PROCID", 0),
            num_tasks,
            _number(environ, "SLURM_LOCALID", 0),
            _tasks_of_node(tasks, node),
            "srun",
            environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
            _number(environ, "MASTER_PORT", _SLURM_PORTS[job % len(_SLURM_PORTS)]),
            on_cpu,
        )
    return ProcessEnv(on_cpu=on_cpu)


def refuse_copies(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to be one of several copies that mpirun started: each would run alone, and write the same output.

    What sets WORLD_SIZE, as torchrun on each machine does, makes processes that know each other of copies; so does srun
    of its tasks, whichever library of MPI it prepares.

    Raises:
        ConfigError: With the cure.
    """
    if "WORLD_SIZE" in environ:
        return
    for prefix in _MPI_PREFIXES:
        count = _number(environ, f"{prefix}_SIZE", 1)
        # SLURM_NTASKS says nothing: an interactive shell and a batch script have it, and are one process.
        srun = tuple(_number(environ, name, 0) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
        if count > 1 and srun != (count, _number(environ, f"{prefix}_RANK", 0)):
            raise ConfigError(
                f"mpirun started {count} copies of this command ({prefix}_SIZE is set and WORLD_SIZE isn't), and each "
                f"of them would run alone and write the same output. Start it once: vembed train starts a process for "
                f"each device by itself, or start them with accelerate launch or torchrun. Copies that are meant, with "
                f"an output for each, need WORLD_SIZE=1"
            )


def is_under_accelerate(environ: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch` started this process."""
    return "ACCELERATE_MIXED_PRECISION" in environ


def _from_torchrun(environ: Mapping[str, str], *, on_cpu: bool) -> ProcessEnv:
    """Read the variables of torchrun and everything built on it."""
    world_size, rank = _number(environ, "WORLD_SIZE", 1), _number(environ, "RANK", 0)
    local_rank = _number(environ, "LOCAL_RANK", 0)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size if "LOCAL_RANK" in environ else 1)
    if world_size > 1 and "RANK" not in environ:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} and RANK is not set: launch with run.py, accelerate launch or torchrun"
        )
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise ConfigError(
            f"the launcher's numbers contradict each other: RANK {rank}, WORLD_SIZE {world_size}, "
            f"LOCAL_RANK {local_rank}, LOCAL_WORLD_SIZE {local_world_size}"
        )
    address = environ.get("MASTER_ADDR")
    if world_size > 1 and address is None:
        raise ConfigError("WORLD_SIZE is set and MASTER_ADDR is not: it names the host of rank 0")
    launcher = environ.get(LAUNCHED_BY)
    if launcher is None and is_under_accelerate(environ):
        launcher = "accelerate launch"
    elif launcher is None:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
    return ProcessEnv(
        rank,
        world_size,
        local_rank,
        local_world_size,
        launcher,
        address or "127.0.0.1",
        _number(environ, "MASTER_PORT", DEFAULT_PORT),
        on_cpu,
    )


def first_host(listed: str) -> str:
    """Return the first host of a list as SLURM writes it, e.g. `gpu003` of `gpu[003-006,009],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?", listed)
    return listed if match is None else match[1] + (match[2] or "")


def _tasks_of_node(listed: str, node: int) -> int:
    """Return the tasks of a node from a list as SLURM writes it: `8(x2),4` is 8, 8, 4."""
    counts: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(
                f"SLURM says {listed!r} tasks per node, which can't be read; set LOCAL_WORLD_SIZE and RANK"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"the environment variable {name} is {text!r}, and must be a whole number") from error
