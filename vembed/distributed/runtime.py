"""This process: its device, its rank among the others, the group that joins them, and arithmetic alike everywhere.

Every process of a run executes the whole program; whoever launched it (run.py, accelerate launch, torchrun, srun) says
in the environment which one it is (process_env.py). Nothing here launches anything. accelerate, which takes a second to
import, is imported only where processes are joined.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.torch_version import TorchVersion

from vembed.distributed.process_env import ProcessEnv, process_env, refuse_copies
from vembed.distributed.ranks import Ranks
from vembed.distributed.watchdog import STORE_SECONDS, Watchdog
from vembed.errors import ConfigError, MachineError
from vembed.plan.devices import Machine, cpu_cores, cpu_memory_bytes
from vembed.plan.problem import CONTEXT_BYTES

TIMEOUT_SECONDS: Final = 600
"""Longest wait for another process where the caller doesn't say."""

GRACE_SECONDS: Final = 30
"""A collective itself gives up this much later than the watchdog, which can say who is missing."""

ALLOCATOR_SETTINGS: Final = "expandable_segments:True"
"""Chunks differ in size: blocks that grow leave no holes between them."""

HOST_ALLOCATOR_SETTINGS: Final = "pinned_max_round_threshold_mb:1"
"""Page-locked memory of pixels is of the size that is asked for, not of the next power of two."""

EXACT_SIZES_TORCH: Final = "2.15"
"""The first torch that is known to find memory of such sizes again without handing out too little."""

NARROW_GATHERS_TORCH: Final = "2.15"
"""The first torch tried that gathers each weight of a block in a type of its own; 2.11 has one type for all of them."""

NVML_PACKAGE: Final = "nvidia-ml-py"
"""Package that `torch.cuda.utilization` reads the driver's counters with; without it nothing is measured."""

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Read in this order: the first that is set is the user's word."""

_LINK_VARIABLES: Final = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")

_VIRTUAL_MEMORY_ATTRIBUTE: Final = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of CUDA's driver."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """This process."""

    device: torch.device  # where the encoder runs
    machine: Machine  # what that offers to this process: a CPU's memory is shared by the processes on it
    ranks: Ranks = field(default_factory=Ranks)  # all processes of the run, with their collectives
    local_rank: int = 0  # among the processes of this machine
    local_world_size: int = 1
    watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def world_size(self) -> int:
        """Processes of the run: of the one that is planned, in a process that only plans."""
        return max(self.ranks.world_size, self.local_world_size)


# Joining the others


def start_runtime(
    *,
    deterministic: bool,
    timeout_seconds: int = TIMEOUT_SECONDS,
    num_processes: int | Literal["auto"] = "auto",
    plans_only: bool = False,
    watchdog: Watchdog | None = None,
) -> Runtime:
    """Find the device, join the other processes and fix the arithmetic.

    Args:
        deterministic: Use only kernels whose result doesn't depend on scheduling.
        timeout_seconds: Longest wait for another process.
        num_processes: Processes of this machine that the user asks for.
        plans_only: Whether this process stands for those that a run would start.
        watchdog: Of whoever reports how this process ends; it watches the other processes from now on.

    Raises:
        ConfigError: The launcher's numbers make no sense, there are fewer devices or other processes than asked for, or
            this is one of several copies that mpirun started.
        MachineError: The other processes can't be reached.
    """
    refuse_copies()
    process = process_env()
    if plans_only and not process.is_launched:
        local_world_size = processes_to_start(num_processes)
    else:
        local_world_size = process.local_world_size
        if num_processes not in ("auto", local_world_size):  # only what launches processes can mend that
            if not process.is_launched:
                raise ConfigError(
                    f"num_processes is {num_processes}, and a call from Python trains in its own process; use python "
                    f"run.py or vembed train, or start the script with torchrun --nproc-per-node {num_processes}"
                )
            raise ConfigError(
                f"num_processes is {num_processes}, and {process.launcher} started {local_world_size} on this machine; "
                f"start {num_processes} (--num_processes of accelerate launch, --nproc-per-node of torchrun), or leave "
                f"num_processes out"
            )
    prepare_device()
    device = local_device() if process.world_size == 1 else _join(process, timeout_seconds)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    machine = describe_machine(device, num_processes=local_world_size)
    watchdog = watchdog or Watchdog()
    ranks = replace(Ranks.of_this_process(), watchdog=watchdog)
    if not ranks.is_one:
        # A connection of the watchdog's own: the process group's is busy while a collective waits.
        wait = timedelta(seconds=STORE_SECONDS)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=wait, wait_for_workers=False)
        # A new prefix for each run and each restart of the launcher: an earlier one may have left its words there.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        number = store.add(f"vembed/{attempt}/runs of rank {ranks.rank}", 1)
        shared = PrefixStore(f"vembed/{attempt}/{number}", store)
        watchdog.start(ranks.rank, ranks.world_size, shared, timeout_seconds=timeout_seconds)
    return Runtime(device, machine, ranks, process.local_rank, local_world_size, watchdog)


def _join(process: ProcessEnv, timeout_seconds: int) -> torch.device:
    """Initialise the process group and return the device of this process."""
    devices = num_devices()
    if devices:
        # srun may show each process its own device alone.
        if process.local_world_size > devices and not (devices == 1 and process.launcher == "srun"):
            raise ConfigError(
                f"{process.launcher} started {process.local_world_size} processes on a machine with {devices} devices, "
                f"and each needs its own; start {devices}"
            )
        leave_out_broken_links()
    os.environ.update(process.environment())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The launcher keeps the store and was there before its processes: if it is gone, joining would wait for ever.
        try:
            socket.create_connection((process.main_address, process.main_port), timeout=STORE_SECONDS).close()
        except OSError as error:
            raise MachineError(
                f"rank {process.rank} of {process.world_size}: the launcher at {process.main_address} is gone (killed "
                f"from outside?), or can't be reached: {error.strerror or error}; start the run again"
            ) from error
    from accelerate import PartialState

    try:
        state = PartialState(cpu=devices == 0, timeout=timedelta(seconds=timeout_seconds + GRACE_SECONDS))
    except dist.DistError as error:
        raise MachineError(
            f"rank {process.rank} of {process.world_size} can't join the others at {process.main_address}: {error}"
        ) from error
    if state.num_processes != process.world_size:
        raise MachineError(
            f"{process.launcher} started {process.world_size} processes, but only {state.num_processes} trains: "
            f"accelerate found no backend that joins them on {state.device}"
        )
    device: torch.device = state.device
    return device


def leave_out_broken_links() -> None:
    """Keep NCCL off ways between cards that their driver offers and they don't have, as accelerate's launcher does."""
    from accelerate.utils import check_cuda_p2p_ib_support

    missing = [name for name in _LINK_VARIABLES if name not in os.environ]
    if missing and not check_cuda_p2p_ib_support():
        os.environ.update(dict.fromkeys(missing, "1"))
        _log.warning(
            "this driver lets RTX 40 cards copy to each other, which they can't: %s set to 1, and data goes through "
            "the host's memory. Install driver 550.40.07 or newer, which doesn't need it",
            " and ".join(missing),
        )


def shut_down(watchdog: Watchdog) -> None:
    """Leave the process group, once every process is ready to; does nothing in a run of one process.

    Processes that end one after the other look like failures to those that are still at work.
    """
    watchdog.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


# The device


def num_devices() -> int:
    """Return the accelerators of this machine that this process may use."""
    if process_env().on_cpu or not torch.accelerator.is_available():
        return 0
    return torch.accelerator.device_count()


def processes_to_start(asked: int | Literal["auto"]) -> int:
    """Return how many processes a run on this machine has.

    Args:
        asked: The user's word; "auto" is one for each accelerator, and one on a machine without.

    Raises:
        ConfigError: There are fewer accelerators than processes.
    """
    devices = num_devices()
    if asked == "auto":
        return max(1, devices)
    if devices and asked > devices:
        raise ConfigError(
            f"num_processes is {asked}, and this machine has {devices} device{'s' * (devices > 1)}; each process needs "
            f"its own: set num_processes to {devices}, or to auto"
        )
    return asked


def local_device() -> torch.device:
    """Return the device of this process, without joining any others."""
    prepare_device()
    if num_devices() == 0:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, process_env().local_rank % num_devices())


def prepare_device() -> None:
    """Set the allocators and the arithmetic of accelerators, before anything uses one.

    The allocators' settings leave alone what the user set. Equal settings then mean equal arithmetic on every machine,
    and in both passes over a chunk.
    """
    # CUDA reads the variable when it starts.
    is_supported = num_devices() > 0 and torch.version.cuda is not None and sys.platform == "linux"
    if is_supported and not any(name in os.environ for name in _ALLOCATOR_VARIABLES) and has_virtual_memory():
        is_exact = TorchVersion(torch.__version__) >= EXACT_SIZES_TORCH
        settings = [ALLOCATOR_SETTINGS, *([HOST_ALLOCATOR_SETTINGS] if is_exact else [])]
        os.environ[_ALLOCATOR_VARIABLES[-1]] = ",".join(settings)
    # Full float32 unless mixed precision is asked for; convolutions have a switch of their own, and it is on.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # cuDNN's attention makes a plan for each new shape (20 to 900 ms), and promises no equal dropout masks in two
    # passes.
    torch.backends.cuda.enable_cudnn_sdp(False)


def has_virtual_memory() -> bool:
    """Return whether blocks of the first GPU's memory can grow: not on every card that is shared out (vGPU)."""
    driver, device, supported = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(supported), _VIRTUAL_MEMORY_ATTRIBUTE, device)
    )
    return not failed and supported.value == 1


def gathers_narrow() -> bool:
    """Return whether shards can be gathered in half precision but for norms and biases, as mixed precision computes."""
    return TorchVersion(torch.__version__) >= NARROW_GATHERS_TORCH


def describe_machine(device: torch.device, *, num_processes: int = 1) -> Machine:
    """Return what a device offers to one of several training processes, which share cores and a CPU's memory."""
    # srun binds each task to cores of its own.
    cores = cpu_cores() if process_env().launcher == "srun" else max(1, cpu_cores() // num_processes)
    if device.type == "cpu":
        return Machine(
            "cpu",
            "the CPU",
            cpu_memory_bytes() // num_processes,
            cores,
            fast_bf16=False,
            num_busy_cores=min(torch.get_num_threads(), cores),
            narrow_gathers=gathers_narrow(),
            torch_version=str(torch.__version__),
        )
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free_bytes, all_bytes = torch.cuda.mem_get_info(device)
        own_bytes = torch.cuda.memory_reserved(device) + CONTEXT_BYTES  # which the plan's reserve counts
        taken = max(0, all_bytes - free_bytes - own_bytes)  # by the display, say
        return Machine(
            "cuda",
            properties.name,
            all_bytes - taken,
            cores,
            fast_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            taken_bytes=taken,
            narrow_gathers=gathers_narrow(),
            torch_version=str(torch.__version__),
        )
    return Machine(device.type, device.type, cpu_memory_bytes() // num_processes, cores, fast_bf16=False)


def can_measure_utilisation() -> bool:
    """Return whether the package that reads the driver's counters is installed."""
    return find_spec("pynvml") is not None


def utilisation(device: torch.device) -> float | None:
    """Return the share of the last second in which the device ran a kernel, 0 to 1; None where nobody can tell."""
    if device.type != "cuda" or not can_measure_utilisation():
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # noqa: BLE001 - whatever the driver refuses with, training doesn't depend on this number
        return None
