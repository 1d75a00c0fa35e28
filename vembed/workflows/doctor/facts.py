"""What this machine offers: devices, memory, versions, and how its devices are connected."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from vembed.plan.devices import cpu_cores, cpu_memory_bytes

REQUIRED_PACKAGES = (
    "vembed", "torch", "transformers", "accelerate", "peft", "open_clip_torch", "datasets", "safetensors", "faiss-cpu",
    "pytrec-eval-terrier", "tensorboard", "numpy",
)  # fmt: skip
EXTRA_PACKAGES = {
    "sentence-transformers": "loads exported models elsewhere",
    "nvidia-ml-py": "measures how busy a GPU is",
    "bitsandbytes": "4-bit weights",
}
"""What isn't needed, and what it is for."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where processes of one machine exchange data; only its size is read

COMMAND_SECONDS = 20
"""Longest wait for a command of the driver."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator."""

    name: str
    memory_bytes: int
    free_bytes: int  # what no program uses now
    fast_bf16: bool  # whether it computes in bfloat16
    capability: str  # of its architecture, e.g. "9.0"


@dataclass(frozen=True, slots=True)
class Space:
    """Room on a disk."""

    path: str
    total_bytes: int
    free_bytes: int

    @classmethod
    def at(cls, path: Path) -> Space | None:
        """Return the room at a path, or at the nearest folder above it that exists; None where there is nothing."""
        for folder in (path, *path.parents):
            if folder.exists():
                usage = shutil.disk_usage(folder)
                return cls(str(path), usage.total, usage.free)
        return None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What there is."""

    system: str  # operating system and processor
    python: str
    num_cores: int  # that this process may use
    all_cores: int
    memory_bytes: int  # that this process may use: a container limits it
    all_memory_bytes: int
    devices: tuple[Device, ...]
    driver: str  # version of the GPUs' driver; empty where there is none
    cuda: str  # version that torch was built with; empty for a build without
    nccl: str  # likewise
    topology: str  # how the devices are connected, as the driver draws it
    packages: dict[str, str]  # name -> version, empty where it is missing
    extras: dict[str, str]  # the same of what isn't needed
    shared_memory: Space | None  # where processes of one machine exchange data
    disk: Space | None  # for the output


def machine_facts(output: Path) -> MachineFacts:
    """Look at the machine; `output` is where a run would write."""
    devices = tuple(_device(index) for index in range(torch.cuda.device_count()))
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        num_cores=cpu_cores(),
        all_cores=os.cpu_count() or 1,
        memory_bytes=cpu_memory_bytes(),
        all_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        devices=devices,
        driver=_driver("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        topology=_driver("topo", "-m") if len(devices) > 1 else "",
        packages={name: installed_version(name) for name in REQUIRED_PACKAGES},
        extras={name: installed_version(name) for name in EXTRA_PACKAGES},
        shared_memory=Space.at(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        disk=Space.at(output.resolve()),
    )


def installed_version(package: str) -> str:
    """Return the version of a package, empty where it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = f"{properties.major}.{properties.minor}"
    return Device(properties.name, total, free, properties.major >= 8, capability)


def _driver(*words: str) -> str:
    """Return what the driver's own command says, empty where it isn't there or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run([command, *words], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
