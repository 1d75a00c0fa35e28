"""Run one call of an encoder, forward and backward, on fake tensors, and count what it keeps and what it takes.

Fake tensors have shapes, types and a device but no memory, and the operations are those of the device: the attention
that it chooses, the casts of mixed precision, the random masks of dropout. The gradients of all parameters are there
before the run, as they are from the second call of a step on.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vembed.models.profile.attention import accelerator_attention
from vembed.models.profile.live import LiveBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from vembed.models.encoder import Encoder


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """Where and how the encoder will run.

    Attributes:
        device: "cpu" or an accelerator's type.
        autocast_dtype: Type of mixed precision (bfloat16, float16), or None.
    """

    device: str = "cpu"
    autocast_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Storages of a call, each size in bytes with how many there are.

    Attributes:
        saved: Kept from the forward pass for the backward pass, the embeddings included.
        transient: What is alive beyond that at the worst moment, less what is gone by then (negative counts).
    """

    saved: Counter[int]
    transient: Counter[int]


def measure_call(
    encoder: Callable[[], Encoder], make: Callable[[], dict[str, Tensor]], target: ProfileTarget
) -> CallBytes:
    """Return what a call keeps and takes.

    Args:
        encoder: Returns it in training mode, on the meta device.
        make: Returns what `forward` takes, on the meta device but for small tensors whose values count.
        target: Device and precision.
    """
    if target.device == "cpu":
        return _run(encoder(), make(), target)
    with accelerator_attention():
        saved = _run(encoder(), make(), target, backward=False).saved
        # A backward pass on a device that this machine lacks can't even be faked; it is run as a CPU would.
        return CallBytes(saved, _run(encoder(), make(), replace(target, device="cpu")).transient)


def _run(encoder: Encoder, inputs: Mapping[str, Tensor], target: ProfileTarget, *, backward: bool = True) -> CallBytes:
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
    transient = Counter(peak)
    transient.subtract(saved)
    return CallBytes(saved, transient)


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
