"""Run one call of an encoder, forward and backward, on fake tensors, and count what it keeps and what it takes.

Fake tensors have shapes, types and a device but no memory, and the operations are those of the device: the attention
that it chooses, the casts of mixed precision, the random masks of dropout. The gradients of all parameters are there
before the run, as they are from the second call of a step on.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vembed.models.plannable import ROWS
from vembed.models.profile.live import LiveBytes, as_cost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from vembed.models.encoder import Encoder
    from vembed.models.plannable import TowerInputs
    from vembed.plan.memory import CallCost


HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """Where and how the encoder will run."""

    device: str = "cpu"  # or an accelerator's type
    autocast_dtype: torch.dtype | None = None  # of mixed precision: bfloat16 or float16


@dataclass(frozen=True, slots=True)
class CallCosts:
    """What a call keeps for its backward pass, and what it takes beyond that at the worst moment."""

    saved: CallCost
    transient: CallCost


def measure_call(build: Callable[[], Encoder], inputs: TowerInputs, target: ProfileTarget) -> CallCosts:
    """Return what a call keeps and takes."""

    def cost(sizes: Counter[int]) -> CallCost:
        return as_cost(sizes, rows=ROWS, width=inputs.width, fixed=inputs.fixed)

    if target.device == "cpu":
        saved, transient = _run(build(), inputs.make(), target)
        return CallCosts(cost(saved), cost(transient))
    with accelerator_attention():
        saved, _ = _run(build(), inputs.make(), target, backward=False)
        # A backward pass on a device that this machine lacks can't even be faked; it is run as a CPU would.
        _, transient = _run(build(), inputs.make(), replace(target, device="cpu"))
        return CallCosts(cost(saved), cost(transient))


def _run(
    encoder: Encoder, inputs: Mapping[str, Tensor], target: ProfileTarget, *, backward: bool = True
) -> tuple[Counter[int], Counter[int]]:
    """Return the sizes of the storages that a call keeps, and of those beyond them at the worst moment.

    What is kept includes the embeddings. What is gone by the worst moment has a negative count there.
    """
    on_cpu = target.device == "cpu"
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        become_fake(encoder, target.device)
        for parameter in encoder.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        gradients = [each.grad for each in encoder.parameters() if each.grad is not None]
        live = LiveBytes([*encoder.parameters(), *encoder.buffers(), *gradients])
        if not on_cpu:  # inputs are copied there; a CPU sees them where the batch lies
            stack.enter_context(live)
        made = {name: _fake(each, target.device) if each.is_meta else each for name, each in inputs.items()}
        if on_cpu:
            live.ignore(made.values())
            stack.enter_context(live)
        with _autocast(target):
            z = encoder(made)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        forward = live.now()
        if backward and z.requires_grad:
            torch.autograd.backward(z, torch.empty_like(z))
        saved, peak = live.alive_at(forward), live.alive_at(live.worst())
    forget_cached(encoder)
    transient = Counter(peak)
    transient.subtract(saved)
    return saved, transient


def forget_cached(encoder: nn.Module) -> None:
    """Empty the caches of functions beside the networks, as of DINOv3's positions: they hold fake tensors now."""
    for home in {sys.modules[type(each).__module__] for each in encoder.modules()}:
        for function in vars(home).values():
            cells = getattr(function, "__closure__", None) or ()
            for held in (function, *(cell.cell_contents for cell in cells)):
                if isinstance(held, functools._lru_cache_wrapper):
                    held.cache_clear()


def become_fake(module: nn.Module, device: str) -> None:
    """Turn parameters and buffers on the meta device into fake ones of a device, inside of a FakeTensorMode."""
    made: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays one
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                fake = made.get(id(parameter))
                if fake is None:
                    fake = nn.Parameter(_fake(parameter, device), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = fake
                each._parameters[name] = fake
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = _fake(buffer, device)


def _fake(tensor: Tensor, device: str) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@contextmanager
def _autocast(target: ProfileTarget) -> Iterator[None]:
    """Switch mixed precision on, also for a device that this machine lacks, where torch.autocast would refuse."""
    device, dtype = target.device, target.autocast_dtype
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


@contextmanager
def accelerator_attention() -> Iterator[None]:
    """Replace torch's attention by an accelerator's operators, none of which stores its weights.

    Without the device, torch would choose another one.
    """
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the flash operator where it can be, else the memory-efficient one."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (each.to(dtype) for each in (query, key, value))
    result: Tensor
    if attn_mask is None and query.dtype in HALF:
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    result = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return result
