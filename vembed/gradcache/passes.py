"""The two passes over the encoder calls of a step, and the random state that makes the second repeat the first.

Pass 1 encodes every chunk once; pass 2 brings the gradient of each embedding back through its chunk. Retained calls
keep their graphs in between, the others are encoded again under the random state of their first time: they draw the
same dropout masks. An encoder whose output needs no gradient is frozen: it is encoded once and never again.

Shape legend: V embedding vectors of this rank (one for each row, or several with token-level encoders), E dim.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vembed.device import Transfer
from vembed.gradcache.chunks import Call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from vembed.distributed.fsdp import ShardedEncoder


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


class CallProgress(NamedTuple):
    """Which encoder call of a step is running."""

    doing: str
    number: int  # of the call in its pass, from 1
    total: int
    share: float  # of the work of both passes that is done


class Passes:
    """Runs the calls of a step.

    Args:
        replay_rng: Whether pass 2 replays the random state; False only serves to show that the drift monitor works.
        sharded: The handle of a sharded encoder, whose units reduce gradients before a shared copy would have its own.

    Attributes:
        running: The call that is running, for a thread that looks on; None between the passes.
    """

    def __init__(
        self,
        device: torch.device,
        autocast_dtype: torch.dtype | None = None,
        *,
        replay_rng: bool = True,
        sharded: ShardedEncoder | None = None,
    ) -> None:
        self.device = device
        self.autocast_dtype = autocast_dtype
        self.replay_rng = replay_rng
        self.is_sharded = sharded is not None
        self._backward = torch.autograd.backward if sharded is None else sharded.backward
        self.running: CallProgress | None = None
        self._transfer = Transfer(device)

    def shared_casts(self) -> AbstractContextManager[None]:
        """Return a context for both passes in which mixed precision casts a weight once, and not in each call.

        Autocast forgets its copies of weights at the end of the outermost context. This one switches it off, so that
        what is between the passes doesn't see it. A copy that a call without a graph makes has one itself.

        On CUDA gradient checkpointing computes again in autograd's own thread, where autocast is outermost: weights are
        then cast again in each backward pass. Compiled layers cast in their graphs, in each call.
        """
        if self.autocast_dtype is None or self.is_sharded:
            return nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def first(self, calls: Sequence[Call], *, num_vectors: int) -> Tensor:
        """Encode everything once and return this rank's embeddings (V, E), at least float32.

        Args:
            calls: At least one.
        """
        table_VE: Tensor | None = None
        # Pools whose first output has been looked at: it alone tells if any weight in the encoder is trained.
        probed: set[int] = set()
        work = _work(calls)
        for index, (call, inputs) in enumerate(self._transfer.ahead(calls, Call.inputs)):
            self.running = CallProgress("encoding", index + 1, len(calls), index / work)
            call.rng = RngState.capture(self.device)
            # A spare call draws no random numbers from those of the rank's own rows.
            drawing = call.rng.replayed() if call.is_spare else nullcontext()
            # The first call of a pool runs with a graph whatever it is, as only its output tells if there is one.
            probes = id(call.pool) not in probed
            with torch.set_grad_enabled(probes or (call.retained and not call.frozen)), drawing:
                z = self._encode(call, inputs)
            if probes:
                probed.add(id(call.pool))
                if not z.requires_grad:
                    for other in calls:
                        other.frozen = other.frozen or other.pool is call.pool
                    work = _work(calls)  # a frozen pool has no second pass
            if call.retained and not call.frozen:
                call.graph = z
            if table_VE is None:  # E and the type are known with the first embeddings
                table_VE = z.new_empty(num_vectors, z.shape[1])
            table_VE[call.positions] = call.kept(z.detach())
            del z, inputs  # the next call must not run beside them
        self.running = None
        if table_VE is None:
            raise ValueError("a step needs at least one row on every rank, if only a spare one")
        return table_VE.detach()

    def second(self, calls: Sequence[Call], z_VE: Tensor, u_VE: Tensor) -> Tensor:
        """Backward every call, the retained ones first: that frees their memory.

        Args:
            u_VE: Gradient of the loss with respect to it.

        Returns:
            The largest |z' - z| of the replayed calls, a scalar on the device.
        """
        drift = z_VE.new_zeros(())  # stays on the device: reading it here would wait for every call
        retained = [call for call in reversed(calls) if call.graph is not None]
        replayed = [call for call in calls if not (call.retained or call.frozen)]
        progress = _second_pass([*retained, *replayed], calls)
        for call in retained:
            self.running = next(progress)
            graph, call.graph = call.graph, None  # freed with its backward pass, and not with the step
            assert graph is not None
            self._backward(graph, call.gradient(u_VE, graph))
            del graph
        for call, inputs in self._transfer.ahead(replayed, Call.inputs):
            assert call.rng is not None
            self.running = next(progress)
            with call.rng.replayed() if self.replay_rng else nullcontext():
                z = self._encode(call, inputs)
            if not call.is_spare:
                drift = torch.maximum(drift, (call.kept(z.detach()) - z_VE[call.positions]).abs().max())
            self._backward(z, call.gradient(u_VE, z))
            del z, inputs
        self.running = None
        return drift  # of retained calls there is none: their embeddings are those that the loss saw

    def _encode(self, call: Call, inputs: dict[str, Tensor]) -> Tensor:
        """Encode a chunk; the embeddings come out in at least float32."""
        mixed = self.autocast_dtype is not None
        with torch.autocast(self.device.type, self.autocast_dtype) if mixed else nullcontext():
            z = call.pool.encode(inputs)
        return z.to(torch.promote_types(z.dtype, torch.float32))


def _work(calls: Sequence[Call]) -> int:
    """Return the cost of both passes in forward passes of a call; a backward pass is worth two."""
    return len(calls) + sum(2 if call.retained else 3 for call in calls if not call.frozen)


def _second_pass(order: Sequence[Call], calls: Sequence[Call]) -> Iterator[CallProgress]:
    """Yield the progress at the beginning of each call of the second pass."""
    done, work = len(calls), _work(calls)
    for number, call in enumerate(order, 1):
        yield CallProgress("second pass over", number, len(order), done / work)
        done += 2 if call.retained else 3
