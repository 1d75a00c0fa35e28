"""Count the bytes that one call of an encoder keeps and takes, forward and backward, without memory or a device.

1. Fake tensors have shapes, types and a device but no memory, and the operations are those of the device: the attention
   that it chooses, the casts of mixed precision, the random masks of dropout. The gradients of all parameters are there
   before the run, as they are from the second call of a step on.
2. `LiveBytes` takes every allocation and every release as an event. Afterwards the events say which storages were alive
   at any moment, and how large each was. It counts real tensors as well.
3. `as_cost` tells how the storages grow: the numbers of rows and tokens divide nothing else, so that division alone
   tells what grows with both, with the rows, with pairs of tokens, or not at all. One run so stands for all sizes.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vembed.models.plannable import ROWS
from vembed.plan.memory import CallCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from vembed.models.encoder import Encoder
    from vembed.models.plannable import TowerInputs

HALF = (torch.float16, torch.bfloat16)


# --- Live bytes -------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """A record of the allocations and releases of all operations while it is entered.

    Args:
        known: Tensors that were there before, such as parameters; they count for nothing.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[int] = []  # bytes, negative where a storage is released
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ignored: dict[int, torch.UntypedStorage] = {}
        self.ignore(known)

    def ignore(self, known: Iterable[Tensor]) -> None:
        """Let tensors count for nothing."""
        # The storages are held, not only their addresses: a later one at the same address would be ignored too.
        storages = [tensor.untyped_storage() for tensor in known]
        self._ignored |= {storage._cdata: storage for storage in storages}

    def __torch_dispatch__(  # type: ignore[no-untyped-def]  # the signature is torch's
        self, func, types, args=(), kwargs=None
    ) -> Any:
        """Run an operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, torch.Tensor):
                self._count(output.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        # By the address of the storage: views, and what is computed in place, share that of their input and allocate
        # nothing.
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._ignored or not size:
            return
        self.events.append(size)

        def released(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[key]
            self.events.append(-size)

        self._alive[key] = weakref.ref(storage, released)  # the last tensor on it is gone when this fires

    def now(self) -> int:
        """Return the present moment: the number of events so far."""
        return len(self.events)

    def worst(self, first: int = 0) -> int:
        """Return the moment, not before `first`, at which most bytes are alive."""
        totals = list(accumulate(self.events, initial=0))
        return max(range(first, len(totals)), key=totals.__getitem__)

    def alive_at(self, moment: int) -> Counter[int]:
        """Return the sizes of the storages that are alive at a moment, with how many there are of each."""
        sizes: Counter[int] = Counter()
        for event in self.events[:moment]:
            sizes[abs(event)] += 1 if event > 0 else -1
        return +sizes


def as_cost(sizes: Counter[int], *, rows: int, width: int, fixed: bool = False) -> CallCost:
    """Return how the storages of a run grow with rows and tokens.

    Args:
        sizes: Bytes of each storage, with how many there are; negative counts are taken away.
        width: Tokens of a row; what grows with the rows alone is shared out over them.
        fixed: Whether all rows are of that width, as pictures are.
    """
    # The largest product that divides a size is what it grows with: what grows with pairs of tokens is divided by rows
    # and by rows * width too. ROWS and the widths are primes that divide no usual layer width.
    per_call = per_row = per_token = per_pair = 0.0
    for size, count in sizes.items():
        if size % rows:
            per_call += count * size
        elif not fixed and size % (rows * width * width) == 0:
            per_pair += count * size / (rows * width * width)
        elif not fixed and size % (rows * width) == 0:
            per_token += count * size / (rows * width)
        else:
            per_row += count * size / rows
    return CallCost(per_token + per_row / width, per_pair, per_call)


# --- One call on fake tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """The device and the precision that an encoder will run in."""

    device: str = "cpu"  # or an accelerator's type
    autocast_dtype: torch.dtype | None = None  # of mixed precision: bfloat16 or float16


@dataclass(frozen=True, slots=True)
class CallCosts:
    """The memory of one call."""

    saved: CallCost  # kept for its backward pass
    transient: CallCost  # taken beyond that at the worst moment


def measure_call(build: Callable[[], Encoder], inputs: TowerInputs, target: ProfileTarget) -> CallCosts:
    """Return what a call keeps and takes.

    Args:
        build: Makes the encoder on the meta device; a run uses it up.
    """
    if target.device == "cpu":
        saved, transient = _run(build(), inputs.make(), target)
        return CallCosts(_as_cost(saved, inputs), _as_cost(transient, inputs))
    saved_cost = measure_saved(build, inputs, target)
    with accelerator_attention():
        # A backward pass on a device that this machine lacks can't even be faked; it is run as a CPU would.
        _, transient = _run(build(), inputs.make(), replace(target, device="cpu"))
    return CallCosts(saved_cost, _as_cost(transient, inputs))


def measure_saved(build: Callable[[], Encoder], inputs: TowerInputs, target: ProfileTarget) -> CallCost:
    """Return what a call keeps for its backward pass: the forward pass tells, in less than half of the time of both."""
    with nullcontext() if target.device == "cpu" else accelerator_attention():
        saved, _ = _run(build(), inputs.make(), target, backward=False)
    return _as_cost(saved, inputs)


def _as_cost(sizes: Counter[int], inputs: TowerInputs) -> CallCost:
    return as_cost(sizes, rows=ROWS, width=inputs.width, fixed=inputs.fixed)


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
        gradients = [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]
        live = LiveBytes([*encoder.parameters(), *encoder.buffers(), *gradients])
        if not on_cpu:  # inputs are copied there; a CPU sees them where the batch lies
            stack.enter_context(live)
        made = {name: _fake(tensor, target.device) if tensor.is_meta else tensor for name, tensor in inputs.items()}
        if on_cpu:
            live.ignore(made.values())
            stack.enter_context(live)
        with _autocast(target):
            z = encoder(made)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        # What is alive now is what autograd holds for backward: all that the forward pass dropped was released already.
        forward = live.now()
        if backward and z.requires_grad:
            torch.autograd.backward(z, torch.empty_like(z))
        saved, peak = live.alive_at(forward), live.alive_at(live.worst())
    forget_cached(encoder)
    # The worst moment may be one of the forward pass, or one of backward, when part of what was kept is gone again.
    transient = Counter(peak)
    transient.subtract(saved)
    return saved, transient


def forget_cached(encoder: nn.Module) -> None:
    """Empty the caches of functions beside the networks, as of DINOv3's positions: they hold fake tensors now."""
    for home in {sys.modules[type(module).__module__] for module in encoder.modules()}:
        for function in vars(home).values():
            # A decorator may have wrapped the cached function: then it is a cell of the wrapper's closure.
            cells = getattr(function, "__closure__", None) or ()
            for candidate in (function, *(cell.cell_contents for cell in cells)):
                if isinstance(candidate, functools._lru_cache_wrapper):
                    candidate.cache_clear()


def become_fake(module: nn.Module, device: str) -> None:
    """Turn parameters and buffers on the meta device into fake ones of a device, inside of a FakeTensorMode."""
    made: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays one
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                fake = made.get(id(parameter))
                if fake is None:
                    fake = nn.Parameter(_fake(parameter, device), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = fake
                child._parameters[name] = fake
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = _fake(buffer, device)


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
    F.scaled_dot_product_attention = _fused_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _fused_attention(
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
    # Both operators are called past the dispatcher's choice, so that autocast must be followed by hand.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (states.to(dtype) for states in (query, key, value))
    result: Tensor
    if attn_mask is None and query.dtype in HALF:
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    if enable_gqa:  # the memory-efficient operator wants as many heads of keys as of queries
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # the operator adds numbers; torch makes them of a mask, and so they count
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    result = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return result
