"""The encoder calls of a step, and the two passes over them.

Pass 1 encodes every chunk once; pass 2 brings the gradient of each embedding back through its chunk. Retained calls
keep their graphs in between, the others are encoded again under the random state of their first time. An encoder whose
output needs no gradient is frozen: it is encoded once and never again.

Shape legend: V embedding vectors of this rank (one for each row, or several with token-level encoders), E dim.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vembed.batch import ranges
from vembed.gradcache.chunking import Chunk, ChunkBudget, plan_chunks
from vembed.gradcache.replay import RngState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Features


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of a batch that go through one encoder.

    Attributes:
        encode: Turns the inputs of one chunk into embeddings (rows, E), or (vectors, E) with `num_vectors`.
        collate: Makes those inputs from features, row numbers and a width.
        features: The rows, ragged, on the CPU.
        slots: Where each row's embedding belongs in [queries; documents], int64.
        num_vectors: Embedding vectors of each row, int64, for encoders that give several (one for each token, say);
            they come out row after row. None is one each.
    """

    encode: Callable[[dict[str, Tensor]], Tensor]
    collate: Callable[[Features, NDArray[np.int64], int], dict[str, Tensor]]
    features: Features
    slots: NDArray[np.int64]
    num_vectors: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How chunks are encoded.

    Attributes:
        device: Where the encoders run.
        autocast_dtype: Type of mixed precision (bfloat16, float16), or None.
        replay_rng: Whether pass 2 replays the random state; False only serves to show that the drift monitor works.
    """

    device: torch.device
    autocast_dtype: torch.dtype | None = None
    replay_rng: bool = True


@dataclass(slots=True)
class Call:
    """One chunk on its way through the step.

    Attributes:
        pool: Where its rows are from.
        chunk: Its rows.
        places: Where its vectors belong among this rank's, int64, on the device.
        retained: Whether its graph is kept from pass 1.
        frozen: Whether its encoder needs no gradient; known after pass 1.
        rng: Random state at its first time.
        graph: Its embeddings with their graph, while it is retained.
    """

    pool: Pool
    chunk: Chunk
    places: Tensor
    retained: bool = False
    frozen: bool = False
    rng: RngState | None = None
    graph: Tensor | None = None


def plan_calls(
    pools: Sequence[Pool], places_N: NDArray[np.int64], budget: ChunkBudget, retain: float, device: torch.device
) -> list[Call]:
    """Cut pools into calls and say which are retained.

    The last ones are: fewer no-grad chunks then coexist with their graphs. What fits one chunk as a whole needs no
    replay, though two towers see it in two calls.

    Args:
        pools: The rows of this rank.
        places_N: First vector of each row of the batch among this rank's.
        budget: Limits of one chunk.
        retain: Share of the padded tokens whose graphs are kept.
        device: Where the encoders run.
    """
    calls = []
    for pool in pools:
        for chunk in plan_chunks(pool.features.lengths, budget):
            places = places_N[pool.slots[chunk.rows]]
            if pool.num_vectors is not None:
                places = ranges(places, pool.num_vectors[chunk.rows])
            calls.append(Call(pool, chunk, torch.from_numpy(places).to(device, non_blocking=True)))
    num_rows = sum(len(call.chunk.rows) for call in calls)
    num_tokens = sum(call.chunk.padded_tokens for call in calls)
    if num_rows <= budget.rows and num_tokens <= budget.tokens:
        retain = 1.0
    kept = 0
    for call in reversed(calls):
        # A call is kept when that brings the kept share nearer to what was asked for.
        call.retained = kept + call.chunk.padded_tokens / 2 <= retain * num_tokens
        if not call.retained:
            break
        kept += call.chunk.padded_tokens
    return calls


class Passes:
    """Runs the calls of a step.

    Args:
        options: Device and precision.
    """

    def __init__(self, options: CallOptions) -> None:
        self.options = options

    def first(self, calls: Sequence[Call], *, num_vectors: int) -> Tensor:
        """Encode everything once and return this rank's embeddings (V, E), at least float32.

        Args:
            calls: At least one.
            num_vectors: V.
        """
        table: Tensor | None = None
        frozen: dict[int, bool] = {}
        for call in calls:
            call.rng = RngState.capture(self.options.device)
            # The first call of a pool runs with a graph whatever it is, as only its output tells if there is one.
            probes = id(call.pool) not in frozen
            call.frozen = frozen.get(id(call.pool), False)
            with torch.set_grad_enabled(probes or (call.retained and not call.frozen)):
                z = self._encode(call)
            if probes:
                call.frozen = frozen[id(call.pool)] = not z.requires_grad
            if call.retained and not call.frozen:
                call.graph = z
            if table is None:
                table = z.new_empty(num_vectors, z.shape[1])
            table[call.places] = z.detach()
            del z
        if table is None:
            raise ValueError("a step needs at least one row on every rank")
        return table.detach()

    def second(self, calls: Sequence[Call], z_VE: Tensor, u_VE: Tensor) -> Tensor:
        """Backward every call, the retained ones first: that frees their memory.

        Args:
            calls: Those of the first pass.
            z_VE: What it returned.
            u_VE: Gradient of the loss with respect to it.

        Returns:
            The largest |z' - z| of the replayed calls, a scalar on the device.
        """
        worst = z_VE.new_zeros(())
        for call in reversed(calls):
            if call.graph is not None:
                graph, call.graph = call.graph, None
                torch.autograd.backward(graph, u_VE[call.places])
                del graph
        for call in calls:
            if call.retained or call.frozen:
                continue
            assert call.rng is not None
            with call.rng.replayed() if self.options.replay_rng else nullcontext():
                z = self._encode(call)
            worst = torch.maximum(worst, (z.detach() - z_VE[call.places]).abs().max())
            torch.autograd.backward(z, u_VE[call.places])
            del z
        return worst

    def _encode(self, call: Call) -> Tensor:
        """Encode a chunk; the embeddings come out in at least float32."""
        inputs = call.pool.collate(call.pool.features, call.chunk.rows, call.chunk.width)
        inputs = {name: tensor.to(self.options.device, non_blocking=True) for name, tensor in inputs.items()}
        with self._autocast():
            z = call.pool.encode(inputs)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    def _autocast(self) -> AbstractContextManager[None]:
        if self.options.autocast_dtype is None:
            return nullcontext()
        # One context per chunk: its cache of cast weights must not outlive a no_grad call, or pass 2 has no graph.
        return torch.autocast(self.options.device.type, self.options.autocast_dtype)
