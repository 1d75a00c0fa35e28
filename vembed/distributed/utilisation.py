"""How busy an accelerator is, as its driver counts it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

PACKAGE = "nvidia-ml-py"
"""What `torch.cuda.utilization` reads the driver's counters with; without it nothing is measured."""


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
