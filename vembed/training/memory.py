"""Memory in use, as metrics and reports give it."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that was in use so far: allocated on an accelerator, resident on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.is_file():
        # Not getrusage: on Linux its maximum also counts the process that started this one.
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
