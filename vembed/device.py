"""Copies between the host and a device: of one tensor, and of inputs one encoder call ahead of the one that computes.

A CUDA device copies on a stream of its own, out of page-locked memory: while it computes a call it copies the inputs of
the next one, and this process waits for neither. Other devices get the inputs of a call when it is its turn; a CPU sees
them where they lie.

No memory is written again too early:

1. torch keeps the page-locked memory that is made here until its copy has run. Pixels that a batch brings along in such
   memory live as long as the batch, and a step ends by reading a number that comes after all its copies.
2. The memory of a copy belongs to the stream that copies; `record_stream` keeps it until the computation that reads it
   has run, too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

T = TypeVar("T")

CALLS_AHEAD = 1
"""Calls whose inputs are on their way while another one computes."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device through page-locked memory: a copy from other memory waits for the device's queue."""
    # Page-locking would initialise CUDA where it isn't yet, and an empty tensor has no memory to lock.
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel() and torch.cuda.is_initialized():
        tensor = tensor.pin_memory()  # itself where it is there already
    return tensor.to(device, non_blocking=True)


class Transfer:
    """Copies of inputs to a device, and of results to the host, beside what the device computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Made with their first copies, one for each direction: the allocator keeps freed memory for its stream.
        self._arriving: torch.cuda.Stream | None = None
        self._leaving: torch.cuda.Stream | None = None

    def ahead(
        self, items: Iterable[T], make: Callable[[T], dict[str, Tensor]]
    ) -> Iterator[tuple[T, dict[str, Tensor]]]:
        """Yield each item with its inputs on the device.

        Args:
            make: Returns the inputs of an item, on the CPU.
        """
        if self._device.type != "cuda":
            for item in items:
                yield item, {name: to_device(tensor, self._device) for name, tensor in make(item).items()}
            return
        sent: deque[tuple[T, dict[str, Tensor], torch.cuda.Event]] = deque()
        for item in items:
            inputs = make(item)
            self._arriving = self._arriving or torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._arriving):
                copies = {name: to_device(tensor, self._device) for name, tensor in inputs.items()}
                sent.append((item, copies, self._arriving.record_event()))
            if len(sent) > CALLS_AHEAD:
                yield self._receive(*sent.popleft())
        while sent:
            yield self._receive(*sent.popleft())

    def _receive(self, item: T, copies: dict[str, Tensor], arrival: torch.cuda.Event) -> tuple[T, dict[str, Tensor]]:
        """Let the computation wait for copies, and keep them until it has run."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(arrival)  # the device waits, this process doesn't
        for copy in copies.values():
            # Without it the allocator would hand the memory to the next copy while this call still reads it.
            copy.record_stream(computing)
        return item, copies

    def to_host(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return a tensor in the host's memory, and what tells that it has arrived; None where it is there already.

        A CUDA device copies beside what it computes next.
        """
        if tensor.device.type != "cuda":
            return tensor.cpu(), None
        # Page-locked, as a copy into other memory makes this process wait for the device's queue.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._leaving = self._leaving or torch.cuda.Stream(self._device)
        # The kernels that write the tensor may still be queued: the copy comes after them.
        self._leaving.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._leaving):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._leaving)
        return host, self._leaving.record_event()
