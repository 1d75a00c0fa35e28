"""The step: loss and gradients of a whole batch, one chunk of activations at a time.

1. Cut every pool of rows into chunks (chunking.py).
2. Pass 1: encode the chunks, remembering the state of the random generators; only retained chunks keep their graphs.
3. Compute the loss over all embeddings at once and cache its gradient with respect to each embedding, u = dL/dz.
4. Pass 2: backward the retained chunks from u; encode the others again under their remembered random state and
   backward them. Their embeddings are compared with those of pass 1: the replay drift.

By the chain rule dL/dw = sum over rows of (dz/dw)^T u, so the accumulated gradient is that of the batch at once,
whatever the chunks. The condition is that pass 2 computes the function of pass 1: same masks, same mode, same shapes.
The drift measures that condition in every step and a violation raises.

Source: Gao et al., 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vembed.errors import VembedError
from vembed.gradcache.chunking import Chunk, ChunkBudget, plan_chunks
from vembed.gradcache.replay import RngState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Features
    from vembed.losses.base import BatchStructure, ContrastiveLoss

DRIFT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference between the passes that rounding explains, by the type that the encoder computes in."""


class ReplayDriftError(VembedError):
    """The second pass computed other embeddings than the first: the gradients of this step would be wrong."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of a batch that go through one encoder.

    Attributes:
        encode: Turns the inputs of one chunk into embeddings (rows, E).
        collate: Makes those inputs from features, row numbers and a width.
        features: The rows, ragged, on the CPU.
        slots: Where each row's embedding belongs in [queries; documents], int64.
    """

    encode: Callable[[dict[str, Tensor]], Tensor]
    collate: Callable[[Features, NDArray[np.int64], int], dict[str, Tensor]]
    features: Features
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the step is computed; none of it changes what is computed.

    Attributes:
        budget: Limits of one chunk.
        device: Where the encoders run.
        retain: Share of the chunks whose graphs are kept from pass 1, 0 to 1; 1 is plain training.
        autocast_dtype: Type of mixed precision (bfloat16, float16), or None.
        replay_rng: Whether pass 2 replays the random state; False only serves to show that the drift monitor works.
    """

    budget: ChunkBudget
    device: torch.device
    retain: float = 0.0
    autocast_dtype: torch.dtype | None = None
    replay_rng: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured. Gradients are in `.grad` of the parameters.

    Attributes:
        loss: Mean loss of the batch.
        num_chunks: Encoder calls of pass 1.
        tokens: Tokens encoded, without padding.
        padded_tokens: The same with padding.
        replay_drift: Largest |z' - z| / max |z| over the replayed chunks; 0.0 where nothing was replayed.
    """

    loss: float
    num_chunks: int
    tokens: int
    padded_tokens: int
    replay_drift: float

    @property
    def padding_ratio(self) -> float:
        """Padded tokens over real ones, at least 1."""
        return self.padded_tokens / max(1, self.tokens)


@dataclass(slots=True)
class _Call:
    """One chunk on its way through the step."""

    pool: Pool
    chunk: Chunk
    slots: Tensor
    retained: bool
    rng: RngState | None = None
    graph: Tensor | None = None


class GradCacheEngine:
    """Computes loss and gradients of batches.

    Args:
        loss: Loss over the embeddings of the batch.
        options: Chunk budget, retention, device and precision.
    """

    def __init__(self, loss: ContrastiveLoss, options: EngineOptions) -> None:
        self.loss = loss
        self.options = options

    def step(self, pools: Sequence[Pool], structure: BatchStructure, *, gradient_scale: float = 1.0) -> StepResult:
        """Add the gradients of one batch to `.grad` of every parameter that takes part.

        Args:
            pools: The rows of the batch; their slots cover [queries; documents] exactly once.
            structure: Positives and identities, on the engine's device.
            gradient_scale: Factor on all gradients (the loss scale of float16 training); the loss stays unscaled.

        Returns:
            The loss and the counters of the step.

        Raises:
            ReplayDriftError: When pass 2 didn't compute what pass 1 did.
        """
        calls = self._plan(pools)
        z_NE = self._first_pass(calls, num_rows=structure.num_queries + structure.num_documents)
        loss, u_NE = self._loss_stage(z_NE, structure, gradient_scale)
        drift = self._second_pass(calls, z_NE, u_NE)
        result = StepResult(
            loss=loss.item(),  # the step's one wait for the device, beside the drift's
            num_chunks=len(calls),
            tokens=sum(int(pool.features.lengths.sum()) for pool in pools),
            padded_tokens=sum(call.chunk.padded_tokens for call in calls),
            replay_drift=drift,
        )
        self._check_drift(drift, z_NE)
        return result

    def _plan(self, pools: Sequence[Pool]) -> list[_Call]:
        """Cut the pools into calls. The last are retained: fewer no-grad chunks then coexist with their graphs."""
        calls = [
            _Call(pool, chunk, torch.from_numpy(pool.slots[chunk.rows]).to(self.options.device), retained=False)
            for pool in pools
            for chunk in plan_chunks(pool.features.lengths, self.options.budget)
        ]
        # What fits one chunk as a whole needs no replay, though two towers see it in two calls.
        num_retained = len(calls) if self._fits_one_chunk(calls) else round(self.options.retain * len(calls))
        for call in calls[len(calls) - num_retained :]:
            call.retained = True
        return calls

    def _fits_one_chunk(self, calls: list[_Call]) -> bool:
        """Return whether all graphs together take no more than the budget lets one chunk take."""
        num_rows = sum(len(call.chunk.rows) for call in calls)
        num_tokens = sum(call.chunk.padded_tokens for call in calls)
        return len(calls) == 1 or (num_rows <= self.options.budget.rows and num_tokens <= self.options.budget.tokens)

    def _encode(self, call: _Call) -> Tensor:
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

    def _first_pass(self, calls: list[_Call], *, num_rows: int) -> Tensor:
        """Encode everything once and return the embedding table (N, E)."""
        table: Tensor | None = None
        for call in calls:
            call.rng = RngState.capture(self.options.device)
            with torch.set_grad_enabled(call.retained):
                z = self._encode(call)
            if call.retained:
                call.graph = z
            if table is None:
                table = z.new_empty(num_rows, z.shape[1])
            table[call.slots] = z.detach()
        if table is None:
            raise ValueError("a step needs at least one row")
        return table

    def _loss_stage(self, z_NE: Tensor, structure: BatchStructure, gradient_scale: float) -> tuple[Tensor, Tensor]:
        """Return the loss and u = dL/dz (N, E) scaled; add the gradients of the loss's own parameters once."""
        embeddings = z_NE.detach().requires_grad_()
        own = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]
        loss = self.loss(embeddings[: structure.num_queries], embeddings[structure.num_queries :], structure)
        u_NE, *own_gradients = torch.autograd.grad(loss, [embeddings, *own])
        for parameter, gradient in zip(own, own_gradients, strict=True):
            scaled = gradient * gradient_scale
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return loss.detach(), u_NE * gradient_scale

    def _second_pass(self, calls: list[_Call], z_NE: Tensor, u_NE: Tensor) -> float:
        """Backward every chunk, the retained ones first: that frees their memory. Return the replay drift."""
        worst = z_NE.new_zeros(())
        for call in reversed([call for call in calls if call.retained]):
            assert call.graph is not None
            torch.autograd.backward(call.graph, u_NE[call.slots])
            call.graph = None
        for call in calls:
            if call.retained:
                continue
            assert call.rng is not None
            with call.rng.replayed() if self.options.replay_rng else nullcontext():
                z = self._encode(call)
            worst = torch.maximum(worst, (z.detach() - z_NE[call.slots]).abs().max())
            torch.autograd.backward(z, u_NE[call.slots])
        return (worst / z_NE.abs().max().clamp_min(torch.finfo(z_NE.dtype).tiny)).item()

    def _check_drift(self, drift: float, z_NE: Tensor) -> None:
        """Raise when the two passes differ by more than rounding. NaN passes: that is the guards' business."""
        dtype = self.options.autocast_dtype or z_NE.dtype
        if drift > DRIFT_TOLERANCE[dtype]:
            raise ReplayDriftError(
                f"the second pass of gradient caching computed other embeddings than the first (relative difference "
                f"{drift:.2g}, rounding explains {DRIFT_TOLERANCE[dtype]:.0e}): the gradients would be wrong. "
                f"The encoder draws random numbers from a generator of its own, or changes its buffers in forward. "
                f"use_gradient_cache: false trains it without a second pass."
            )
