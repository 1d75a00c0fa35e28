"""The encoder calls of a step, and the two passes over them.

Pass 1 encodes every chunk once; pass 2 brings the gradient of each embedding back through its chunk. Retained calls
keep their graphs in between, the others are encoded again under the random state of their first time. An encoder whose
output needs no gradient is frozen: it is encoded once and never again.

A spare row is one that no loss sees: its embedding is thrown away and its gradient is zero. It is there where a rank
must call an encoder that it has no rows for, or as often as the others do.

Shape legend: V embedding vectors of this rank (one for each row, or several with token-level encoders), E dim.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vembed.batch import ranges
from vembed.gradcache.chunking import Chunk, ChunkBudget, plan_chunks
from vembed.gradcache.replay import RngState
from vembed.gradcache.transfer import Transfer
from vembed.losses.base import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Features
    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of a batch that go through one encoder."""

    encode: Callable[[dict[str, Tensor]], Tensor]  # inputs of a chunk -> (rows, E), or (vectors, E) with num_vectors
    collate: Callable[[Features, NDArray[np.int64], int], dict[str, Tensor]]  # features, row numbers, width -> inputs
    features: Features  # ragged, on the CPU
    slots: NDArray[np.int64]  # place of each row's embedding in [queries; documents]; -1 for a spare row
    num_vectors: NDArray[np.int64] | None = None  # vectors of each row, which come out row after row; None: one each
    packs: bool = False  # whether `collate` lays the rows of a chunk end to end


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of a batch keeps its graphs; the smaller of the two limits wins.

    A tower that turns out to be frozen has no graphs to keep, but its calls count: less memory is taken than was meant.
    """

    share: float  # of the padded tokens, 0 to 1
    tokens: int | None = None  # most padded tokens, whatever the batch; None for no such limit

    def keeps(self, own: int, *, kept: int, total: int) -> bool:
        """Return whether a call keeps its graph: that brings the share nearer to what was asked for, and fits.

        Args:
            own: Padded tokens of the call.
            kept: Those that keep their graphs already.
            total: Those of all calls.
        """
        return kept + own / 2 <= self.share * total and (self.tokens is None or kept + own <= self.tokens)


@dataclass(slots=True)
class Call:
    """One chunk on its way through the step."""

    pool: Pool
    chunk: Chunk
    places: Tensor  # of its vectors among this rank's, int64, on the device; spare rows are left out
    own: Tensor | None = None  # which of its vectors these are, int64, on the device; None: all of them
    retained: bool = False  # whether its graph is kept from pass 1
    frozen: bool = False  # whether its encoder needs no gradient; known after pass 1
    rng: RngState | None = None  # random state at its first time
    graph: Tensor | None = None  # its embeddings with their graph, while it is retained

    @property
    def is_spare(self) -> bool:
        """Whether none of its rows has a place."""
        return len(self.places) == 0

    def kept(self, z: Tensor) -> Tensor:
        """Return the embeddings that have a place."""
        return z if self.own is None else z[self.own]

    def gradient(self, u_VE: Tensor, z: Tensor) -> Tensor:
        """Return the gradient of each embedding: zero for spare rows."""
        if self.own is None:
            return u_VE[self.places]
        return torch.zeros_like(z).index_copy_(0, self.own, u_VE[self.places])


def plan_calls(
    pools: Sequence[Pool], places_N: NDArray[np.int64], budget: ChunkBudget, keep: Retention, device: torch.device
) -> list[Call]:
    """Cut pools into calls and say which are retained.

    The last ones are: fewer no-grad chunks then coexist with their graphs. What fits one chunk as a whole needs no
    replay, though two towers see it in two calls.

    Args:
        places_N: First vector of each row of the batch among this rank's.
    """
    calls = []
    for pool in pools:
        chunks = plan_chunks(pool.features.lengths, budget, packed=pool.packs)
        calls += [_call(pool, chunk, places_N, device) for chunk in chunks]
    if fit_one_chunk(calls, budget):
        keep = Retention(1.0)
    kept, num_tokens = 0, sum(call.chunk.padded_tokens for call in calls)
    for call in reversed(calls):
        call.retained = keep.keeps(call.chunk.padded_tokens, kept=kept, total=num_tokens)
        if not call.retained:
            break
        kept += call.chunk.padded_tokens
    return calls


def fit_one_chunk(calls: Sequence[Call], budget: ChunkBudget) -> bool:
    """Return whether all rows of a rank together fit the limits of one chunk."""
    num_rows = sum(len(call.chunk.rows) for call in calls)
    num_tokens = sum(call.chunk.padded_tokens for call in calls)
    return num_rows <= budget.rows and num_tokens <= budget.tokens


def _call(pool: Pool, chunk: Chunk, places_N: NDArray[np.int64], device: torch.device) -> Call:
    """Say where the vectors of a chunk belong."""
    slots = pool.slots[chunk.rows]
    slots[len(slots) - chunk.num_spare :] = -1
    is_own = slots >= 0
    places = places_N[slots[is_own]]
    if pool.num_vectors is not None:
        counts = pool.num_vectors[chunk.rows]
        places = ranges(places, counts[is_own])
        is_own = np.repeat(is_own, counts)
    own = None if is_own.all() else to_device(torch.from_numpy(np.flatnonzero(is_own)), device)
    return Call(pool, chunk, to_device(torch.from_numpy(places), device), own)


def equal_calls(calls: Sequence[Call], pools: Sequence[Pool], ranks: Ranks, device: torch.device) -> list[Call]:
    """Return as many calls of each pool as the rank that makes the most, of which the fewest of any are retained.

    Each missing one is a spare call of one row, the shortest. They come first, so that what is retained last is the
    rank's own. One collective, whatever the number of pools.

    Args:
        calls: Those of this rank, pool by pool, at least one of each.
        pools: The pools, in the same order on every rank.
    """
    own = [[call for call in calls if call.pool is pool] for pool in pools]
    numbers = [[len(of_pool), -sum(call.retained for call in of_pool)] for of_pool in own]
    agreed = ranks.max_(torch.tensor(numbers, device=device)).tolist()
    together: list[Call] = []
    for pool, of_pool, (number, minus_retained) in zip(pools, own, agreed, strict=True):
        nowhere = torch.empty(0, dtype=torch.int64, device=device)
        spare_chunk = _shortest(pool, of_pool)
        spare = [Call(pool, spare_chunk, nowhere, nowhere) for _ in range(number - len(of_pool))]
        together += [*spare, *of_pool]
        for place, call in enumerate(reversed([*spare, *of_pool])):
            call.retained = place < -minus_retained
    return together


def _shortest(pool: Pool, calls: Sequence[Call]) -> Chunk:
    """Return a chunk of the shortest row alone, in the width that it has among its like."""
    shortest = int(pool.features.lengths.argmin())
    width = int(pool.features.lengths[shortest]) if pool.packs else min(call.chunk.width for call in calls)
    return Chunk(rows=np.array([shortest]), width=width, packed=pool.packs)


class CallProgress(NamedTuple):
    """Which encoder call of a step is running."""

    doing: str
    number: int  # of the call in its pass, from 1
    total: int
    share: float  # of the work of both passes that is done


def _work(calls: Sequence[Call]) -> int:
    """Return what both passes cost, in forward passes of a call; a backward pass is worth two."""
    return len(calls) + sum(2 if call.retained else 3 for call in calls if not call.frozen)


def _second_pass(order: Sequence[Call], calls: Sequence[Call]) -> Iterator[CallProgress]:
    """Yield what is running, call by call of the second pass."""
    done, work = len(calls), _work(calls)
    for number, call in enumerate(order, 1):
        yield CallProgress("second pass over", number, len(order), done / work)
        done += 2 if call.retained else 3


def _inputs(call: Call) -> dict[str, Tensor]:
    """Return the inputs of a call, on the CPU."""
    return call.pool.collate(call.pool.features, call.chunk.rows, call.chunk.width)


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
        table: Tensor | None = None
        probed: set[int] = set()
        work = _work(calls)
        for place, (call, inputs) in enumerate(self._transfer.ahead(calls, _inputs)):
            self.running = CallProgress("encoding", place + 1, len(calls), place / work)
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
                    for each in calls:
                        each.frozen = each.frozen or each.pool is call.pool
                    work = _work(calls)
            if call.retained and not call.frozen:
                call.graph = z
            if table is None:
                table = z.new_empty(num_vectors, z.shape[1])
            table[call.places] = call.kept(z.detach())
            del z, inputs
        self.running = None
        if table is None:
            raise ValueError("a step needs at least one row on every rank, if only a spare one")
        return table.detach()

    def second(self, calls: Sequence[Call], z_VE: Tensor, u_VE: Tensor) -> Tensor:
        """Backward every call, the retained ones first: that frees their memory.

        Args:
            u_VE: Gradient of the loss with respect to it.

        Returns:
            The largest |z' - z| of the replayed calls, a scalar on the device.
        """
        worst = z_VE.new_zeros(())
        retained = [call for call in reversed(calls) if call.graph is not None]
        replayed = [call for call in calls if not (call.retained or call.frozen)]
        announced = _second_pass([*retained, *replayed], calls)
        for call in retained:
            self.running = next(announced)
            graph, call.graph = call.graph, None
            assert graph is not None
            self._backward(graph, call.gradient(u_VE, graph))
            del graph
        for call, inputs in self._transfer.ahead(replayed, _inputs):
            assert call.rng is not None
            self.running = next(announced)
            with call.rng.replayed() if self.replay_rng else nullcontext():
                z = self._encode(call, inputs)
            if not call.is_spare:
                worst = torch.maximum(worst, (call.kept(z.detach()) - z_VE[call.places]).abs().max())
            self._backward(z, call.gradient(u_VE, z))
            del z, inputs
        self.running = None
        return worst

    def _encode(self, call: Call, inputs: dict[str, Tensor]) -> Tensor:
        """Encode a chunk; the embeddings come out in at least float32."""
        with self._autocast():
            z = call.pool.encode(inputs)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    def _autocast(self) -> AbstractContextManager[None]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)
