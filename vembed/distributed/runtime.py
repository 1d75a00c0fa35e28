"""What this process is: its device and its place among the others."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from accelerate import PartialState

from vembed.errors import MachineError
from vembed.plan.hardware import Machine, cpu_cores, cpu_memory_bytes


@dataclass(frozen=True, slots=True)
class Runtime:
    """This process.

    Attributes:
        device: Where the encoder runs.
        machine: What that offers.
    """

    device: torch.device
    machine: Machine


def start_runtime(*, deterministic: bool) -> Runtime:
    """Find the device and fix the number formats.

    float32 matrix products run in full float32 unless mixed precision is asked for: TF32 stays off, so that equal
    settings mean equal arithmetic on every machine.

    Args:
        deterministic: Use only kernels whose result doesn't depend on scheduling.

    Raises:
        MachineError: When started as one of several processes, which this version can't train in.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise MachineError(
            f"started as one of {world_size} processes, and this version of vembed trains in one; "
            f"launch with --num_processes 1"
        )
    device = PartialState().device
    torch.set_float32_matmul_precision("highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    return Runtime(device, describe_machine(device))


def describe_machine(device: torch.device) -> Machine:
    """Return what the device of this process offers."""
    if device.type == "cpu":
        cores, threads = cpu_cores(), torch.get_num_threads()
        return Machine("cpu", "the CPU", cpu_memory_bytes(), cores, fast_bf16=False, num_busy_cores=threads)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Machine(
            "cuda", properties.name, properties.total_memory, cpu_cores(), fast_bf16=torch.cuda.is_bf16_supported()
        )
    return Machine(device.type, device.type, cpu_memory_bytes(), cpu_cores(), fast_bf16=False)
