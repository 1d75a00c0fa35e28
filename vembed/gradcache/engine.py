"""The step: loss and gradients of a whole batch, one chunk of activations at a time.

1. Cut every pool of rows into chunks (chunks.py).
2. Pass 1: encode the chunks, remembering the state of the random generators; only retained chunks keep their graphs
   (passes.py).
3. Compute the loss over the embeddings of all ranks at once and cache its gradient with respect to each embedding,
   u = dL/dz. Losses that stream do so in the memory of a tile of the similarity matrix (loss_stage.py).
4. Pass 2: backward the retained chunks from u; encode the others again under their remembered random state and
   backward them. Their embeddings are compared with those of pass 1: the replay drift.
5. Add the gradients of all ranks up, once (gradients.py: how depends on who holds the weights).

By the chain rule dL/dw = sum over rows of (dz/dw)^T u, so the accumulated gradient is that of the batch at once,
whatever the chunks and whoever encoded them. The condition is that pass 2 computes the function of pass 1: same masks,
same mode, same shapes. The drift measures that condition in every step and a violation raises.

A step that runs out of memory is done again from its beginning with less (memory.py): nothing of the first attempt is
left, and what is computed stays the same.

Source: Gao et al., 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from vembed.distributed.ranks import Ranks
from vembed.errors import VembedError
from vembed.gradcache.chunks import Pool, RowAssignment, equal_calls, plan_calls, vector_counts
from vembed.gradcache.gradients import ReplicatedGradients, ShardedGradients
from vembed.gradcache.loss_stage import LossStage
from vembed.gradcache.memory import MemoryGuard, RepairNeeded, free_cache
from vembed.gradcache.passes import Passes, RngState
from vembed.gradcache.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.gradcache.chunks import ChunkBudget
    from vembed.gradcache.gradients import Gradients
    from vembed.gradcache.memory import StepLimits
    from vembed.losses.base import BatchLoss, BatchStructure

__all__ = ["EngineOptions", "GradCacheEngine", "Pool", "ReplayDriftError", "StepResult"]

DRIFT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference between the passes that rounding explains, by the type that the encoder computes in."""


class ReplayDriftError(VembedError):
    """The second pass computed other embeddings than the first: the gradients of this step would be wrong."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of how the step is computed; none of them changes what is computed."""

    budget: ChunkBudget
    device: torch.device
    retain: float = 0.0  # share of the padded tokens whose graphs are kept from pass 1; 1 is plain training
    retain_tokens: int | None = None  # most padded tokens of this rank whose graphs are kept, whatever the share
    autocast_dtype: torch.dtype | None = None  # of mixed precision: bfloat16, float16
    replay_rng: bool = True  # False only serves to show that the drift monitor works
    loss_tf32: bool = False  # whether the loss may multiply float32 matrices in TF32
    oom_retry: bool = True  # whether a step that runs out of memory is done again with less
    compiled: bool = False  # whether the encoder's layers are: the first to suspect where the passes differ
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Measurements of a step. Gradients are in `.grad` of the parameters."""

    loss: float  # mean over the batch of all ranks
    num_chunks: int  # encoder calls of pass 1 on this rank
    tokens: int  # encoded on this rank, without padding
    padded_tokens: int
    replay_drift: float  # largest |z' - z| / max |z| over the replayed chunks of all ranks; 0.0 without any
    # of the queries of this rank, with `loss` as mean over ranks; `loss` itself where it isn't streamed
    rank_loss: float
    num_repairs: int = 0  # how often the step ran out of memory and was done again


class GradCacheEngine:
    """Loss and gradients of batches, as one graph over everything would give them.

    Args:
        parameters: The encoder's trainable parameters, in the same order on every rank: what is reduced over ranks and,
            after running out of memory, taken back. Needed for both.
        sharded: The handle of an encoder that is sharded over the ranks; its parameters are those, then.

    Attributes:
        memory: Guards the parts of a step that may run out of memory.
        stopwatch: Counts the seconds of the parts of the steps; whoever logs reads it.
        passes: Runs the encoder calls, and says which one is running.
    """

    def __init__(
        self,
        loss: BatchLoss,
        options: EngineOptions,
        parameters: Sequence[Tensor] = (),
        *,
        sharded: ShardedEncoder | None = None,
    ) -> None:
        parameters = list(parameters if sharded is None else sharded.parameters)
        if not options.ranks.is_one and not parameters:
            raise ValueError("several ranks reduce the gradients of the encoder's parameters: pass them")
        self.loss = loss
        self.options = options
        self.stopwatch = Stopwatch(options.device)
        self.passes = Passes(options.device, options.autocast_dtype, replay_rng=options.replay_rng, sharded=sharded)
        self._loss_stage = LossStage(loss, options.ranks, tf32=options.loss_tf32)
        self._gradients: Gradients = (
            ReplicatedGradients(parameters, options.ranks) if sharded is None else ShardedGradients(sharded)
        )
        self.memory = MemoryGuard(
            options.budget,
            options.retain,
            ranks=options.ranks,
            device=options.device,
            stopwatch=self.stopwatch,
            may_repair=options.oom_retry and len(parameters) > 0,
            needs_equal_calls=self._gradients.needs_equal_calls,
        )

    @property
    def limits(self) -> StepLimits:
        """Limits of memory that the next step begins with; a run that continues sets those of its checkpoint."""
        return self.memory.limits

    @limits.setter
    def limits(self, limits: StepLimits) -> None:
        self.memory.limits = limits

    def step(
        self,
        pools: Sequence[Pool],
        structure: BatchStructure,
        *,
        assignment: RowAssignment | None = None,
        gradient_scale: float = 1.0,
        continues: bool = False,
    ) -> StepResult:
        """Add the gradients of one batch to `.grad` of every parameter that takes part.

        Args:
            pools: This rank's rows of the batch; on one rank their slots cover [queries; documents] exactly once. A
                sharded encoder takes the same pools in the same order on every rank, if only with a spare row.
            structure: Positives and identities of the whole batch.
            assignment: Which rows are on which rank; None where there is one rank.
            gradient_scale: Factor on all gradients (the loss scale of float16 training); the loss stays unscaled.
            continues: Whether batches before this one belong to the same optimizer step: memory runs out in it once.

        Raises:
            ReplayDriftError: When pass 2 didn't compute what pass 1 did.
            MachineError: Out of memory, and there is nothing left to try.
        """
        assignment = assignment or RowAssignment.alone(structure.num_queries + structure.num_documents)
        start = RngState.capture(self.options.device)
        self.memory.begin(continues=continues)
        num_repairs = 0
        while True:
            self._gradients.begin()
            try:
                with self.passes.shared_casts():
                    result = self._attempt(pools, structure, assignment, gradient_scale)
                break
            except RepairNeeded as repair:
                self.memory.lower(repair)
            # Behind the handler, as the tensors of the attempt live as long as the traceback.
            self._gradients.abandon()
            free_cache(self.options.device)
            start.restore()
            num_repairs += 1
        if num_repairs:
            self.memory.remember()
        return replace(result, num_repairs=num_repairs)

    def _attempt(
        self, pools: Sequence[Pool], structure: BatchStructure, assignment: RowAssignment, gradient_scale: float
    ) -> StepResult:
        """Do the step once, in the five parts that the top of the file names.

        Raises:
            RepairNeeded: Some rank ran out of memory; raised on all of them.
        """
        ranks, device = self.options.ranks, self.options.device
        # 1. Cut this rank's rows into encoder calls.
        counts_N = vector_counts(pools, assignment, ranks, device)
        calls = plan_calls(
            pools,
            assignment.positions(ranks.rank, counts_N),
            self.memory.budget,
            device,
            retain=self.memory.present.retain,
            retain_tokens=self.options.retain_tokens,
        )
        if self._gradients.needs_equal_calls:
            calls = equal_calls(calls, pools, ranks, device)
        # 2. Encode them. No collective may lie inside this guard: a rank that fails leaves it alone.
        vectors = assignment if counts_N is None else assignment.of_vectors(counts_N)
        with self.memory.guard("encode", calls):
            z_VE = self.passes.first(calls, num_vectors=vectors.counts[ranks.rank])
        self.memory.agree(calls)
        # 3. Compute the loss and its gradient with respect to each embedding.
        with self.memory.guard_loss(calls, vectors.num_rows):
            loss_result = self._loss_stage.run(
                z_VE, structure, vectors, counts_N=counts_N, gradient_scale=gradient_scale
            )
        if ranks.is_one:  # several have met in the collectives of the loss, where a failure ends the run
            self.memory.agree(calls)
        # 4. Backward the retained calls, and encode the others again.
        with self.memory.guard("encode", calls):
            drift = self.passes.second(calls, z_VE, loss_result.u_VE)
        self.memory.agree(calls)
        # 5. Add the gradients of all ranks up, and those of the loss's parameters once; frozen ones get none.
        with self.stopwatch.part("reduce"):
            self._gradients.finish()
        for name, parameter in self.loss.named_parameters():
            if parameter.requires_grad:
                scaled = loss_result.parameters[name] * gradient_scale
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        # Read the numbers of the step from the device all at once, as each reading waits for it.
        drift = ranks.max_(drift / loss_result.largest.clamp_min(torch.finfo(drift.dtype).tiny))
        numbers = [loss_result.loss.to(drift.dtype), loss_result.rank_loss.to(drift.dtype), drift]
        loss, rank_loss, relative_drift = torch.stack(numbers).tolist()
        self._check_drift(relative_drift, loss_result.u_VE.dtype)
        return StepResult(
            loss=loss,
            num_chunks=len(calls),
            tokens=sum(int(pool.features.lengths[pool.slots >= 0].sum()) for pool in pools),
            padded_tokens=sum(call.chunk.padded_tokens for call in calls),
            replay_drift=relative_drift,
            rank_loss=rank_loss,
        )

    def _check_drift(self, drift: float, dtype: torch.dtype) -> None:
        """Raise when the two passes differ by more than rounding. NaN passes: that is the guards' business."""
        tolerance = DRIFT_TOLERANCE[self.options.autocast_dtype or dtype]
        if drift > tolerance:
            cause = "The encoder draws random numbers from a generator of its own, or changes its buffers in forward"
            if self.options.compiled:
                cause = "Compiled layers compute another function without gradients than with them: set compile: false"
            raise ReplayDriftError(
                f"the second pass of gradient caching computed other embeddings than the first (relative difference "
                f"{drift:.2g}, rounding explains {tolerance:.0e}): the gradients would be wrong. {cause}. "
                f"use_gradient_cache: false trains it without a second pass."
            )
