"""Parts of the proof that need torch alone: what the machine is, and whether its attention kernels can be replayed."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proof_rows import Finding, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

PRODUCTS = 10


def versions(setting: Setting) -> Iterator[Finding]:
    """State versions, machine and variables, and time one matrix product: the ceiling of all that follows."""
    import torch

    from vembed.workflows.doctor.machine import machine_facts, shown_variables

    facts = machine_facts(Path.cwd())
    packages = {name: found or "missing" for name, found in (facts.packages | facts.extras).items()}
    yield Finding("packages", {"python": facts.python, **packages})
    figures: dict[str, Any] = {"system": facts.system, "cores": facts.num_cores, "memory_bytes": facts.memory_bytes}
    for device in facts.devices:
        figures |= {"device": device.name, "device_memory_bytes": device.memory_bytes, "free_bytes": device.free_bytes}
        figures |= {"capability": device.capability, "bf16": device.fast_bf16}
    figures |= {"driver": facts.driver or "none", "CUDA": facts.cuda or "none", "NCCL": facts.nccl or "none"}
    figures["cuDNN"] = torch.backends.cudnn.version() or "none"
    yield Finding("machine", figures)
    yield Finding("variables", shown_variables(os.environ))
    size = 256 if setting.is_small else 8192
    a, b = (torch.randn(size, size, device=setting.device).bfloat16() for _ in range(2))
    _seconds(lambda: a @ b, setting.device)
    seconds = min(_seconds(lambda: a @ b, setting.device) for _ in range(PRODUCTS))
    yield Finding(f"bfloat16 product of {size}", {"TFLOPs": 2 * size**3 / seconds / 1e12})


def _seconds(call: Any, device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def attention(setting: Setting) -> Iterator[Finding]:
    """Try every backend with every mask and dropout: does it run, and does its replay equal its first pass bit for bit?

    Pass 1 of a cached step runs without a graph and pass 2 with one, from the same random state; a kernel that draws
    other dropout masks in the two would give wrong gradients. cuDNN's is only measured: vembed leaves it out.
    """
    from torch.nn.attention import SDPBackend

    backends = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": getattr(SDPBackend, "CUDNN_ATTENTION", None),
    }
    for name, backend in backends.items():
        for mask in ("none", "bool", "additive"):
            for dropout in (0.0, 0.1):
                case = f"{name}, mask {mask}, dropout {dropout:g}"
                if backend is None:
                    yield Finding(case, {}, why_not="this torch has no such backend")
                    continue
                figures = _replayed(backend, mask, dropout, setting)
                if isinstance(figures, str):
                    yield Finding(case, {}, why_not=figures)
                else:
                    yield Finding(case, figures, held=None if name == "cudnn" else figures["equal"])


def _replayed(backend: Any, mask: str, dropout: float, setting: Setting) -> dict[str, Any] | str:
    """Run one attention without and with a graph from one random state, in a shape that is new to the backend.

    Returns:
        What it found, or why the backend can't do this.
    """
    import torch
    from torch.nn.attention import sdpa_kernel

    from vembed.gradcache.passes import RngState

    device = torch.device(setting.device)
    rows, heads, dim, dtype = (2, 2, 16, torch.float32) if setting.is_small else (64, 12, 64, torch.bfloat16)

    def run(width: int, *, graph: bool) -> tuple[Tensor, float]:
        q, k, v = (
            torch.randn(rows, heads, width, dim, device=device).to(dtype).requires_grad_(graph) for _ in range(3)
        )
        given = _mask(mask, rows, width, device, dtype)
        found: list[Tensor] = []
        start.restore()
        seconds = _seconds(lambda: found.append(attend(q, k, v, attn_mask=given, dropout_p=dropout)), setting.device)
        if graph:
            found[0].sum().backward()
        return found[0].detach(), seconds

    attend = torch.nn.functional.scaled_dot_product_attention
    start = RngState.capture(device)
    with warnings.catch_warnings(record=True) as said, sdpa_kernel([backend]):
        warnings.simplefilter("always")
        try:
            run(64, graph=False)  # loads the library
            inputs = RngState.capture(device)
            first, first_seconds = run(128, graph=False)
            inputs.restore()
            again, again_seconds = run(128, graph=True)
        except RuntimeError as error:
            reasons = [str(each.message).partition(" (Triggered")[0] for each in said]
            return " ".join(reasons[:2]) or str(error).partition("\n")[0]
    equal = bool(torch.equal(first, again))
    milliseconds = {"first_ms": 1000 * first_seconds, "second_ms": 1000 * again_seconds}
    return {"equal": equal, "largest": float((first - again).abs().max()), **milliseconds}


def _mask(kind: str, rows: int, width: int, device: Any, dtype: Any) -> Any:
    """Return no mask, or one that hides the last quarter of every other row."""
    import torch

    if kind == "none":
        return None
    shown = torch.ones(rows, 1, width, width, dtype=torch.bool, device=device)
    shown[::2, :, :, 3 * width // 4 :] = False
    if kind == "bool":
        return shown
    return torch.zeros(shown.shape, dtype=dtype, device=device).masked_fill(~shown, float("-inf"))
