"""How many accelerators this machine has, and how many processes they call for."""

from __future__ import annotations

from typing import Literal

import torch

from vembed.distributed.process_env import process_env
from vembed.errors import ConfigError


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
