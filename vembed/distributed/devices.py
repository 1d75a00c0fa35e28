"""How many accelerators this machine has, how many processes they call for, and how busy they are."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import Final, Literal

import torch
from torch.torch_version import TorchVersion

from vembed.distributed.process_env import process_env
from vembed.errors import ConfigError

PACKAGE: Final = "nvidia-ml-py"
"""What `torch.cuda.utilization` reads the driver's counters with; without it nothing is measured."""

NARROW_GATHERS_TORCH: Final = "2.15"
"""The first torch tried that gathers each weight of a block in a type of its own; 2.11 has one type for all of them."""

VIRTUAL_MEMORY_ATTRIBUTE: Final = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of CUDA's driver."""


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


def gathers_narrow() -> bool:
    """Return whether shards can be gathered in half precision but for norms and biases, as mixed precision computes."""
    return TorchVersion(torch.__version__) >= NARROW_GATHERS_TORCH


def has_virtual_memory() -> bool:
    """Return whether blocks of the first GPU's memory can grow: not on every card that is shared out (vGPU)."""
    driver, device, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(found), VIRTUAL_MEMORY_ATTRIBUTE, device)
    )
    return not failed and found.value == 1


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
