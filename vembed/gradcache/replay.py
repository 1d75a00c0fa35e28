"""Replay randomness: the second pass of a chunk must draw the dropout masks of the first."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """State of the generators that an encoder on `device` draws from."""

    cpu: Tensor  # state of the CPU generator
    accelerator: Tensor | None  # state of the device's own generator; None on the CPU
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        """Remember the present state. Costs a copy of 5 kB on the CPU and 16 bytes on a GPU, no synchronisation."""
        accelerator = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(torch.get_rng_state(), accelerator, device)

    def restore(self) -> None:
        """Make this the present state."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    def equals(self, other: RngState) -> bool:
        """Return whether no random number lies between two states of one device."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        if self.accelerator is None or other.accelerator is None:
            return self.accelerator is other.accelerator
        return torch.equal(self.accelerator, other.accelerator)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run the block from this state; afterwards the generators stand where they stood before."""
        present = RngState.capture(self.device)
        self.restore()
        try:
            yield
        finally:
            present.restore()
