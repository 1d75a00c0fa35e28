"""The step: loss and gradients of a whole batch, one chunk of activations at a time.

1. Cut every pool of rows into chunks (chunking.py).
2. Pass 1: encode the chunks, remembering the state of the random generators; only retained chunks keep their graphs.
3. Compute the loss over the embeddings of all ranks at once and cache its gradient with respect to each embedding,
   u = dL/dz. Losses that stream do so in the memory of a tile of the similarity matrix (loss_stage.py).
4. Pass 2: backward the retained chunks from u; encode the others again under their remembered random state and
   backward them. Their embeddings are compared with those of pass 1: the replay drift.
5. Add the gradients of all ranks up, once (gradients.py: how depends on who holds the weights).

By the chain rule dL/dw = sum over rows of (dz/dw)^T u, so the accumulated gradient is that of the batch at once,
whatever the chunks and whoever encoded them. The condition is that pass 2 computes the function of pass 1: same masks,
same mode, same shapes. The drift measures that condition in every step and a violation raises.

A step that runs out of memory is done again from its beginning in smaller chunks: nothing of the first attempt is left,
and what is computed stays the same.

Source: Gao et al., 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError, VembedError
from vembed.gradcache.calls import CallOptions, Passes, Pool, Retention, equal_calls, plan_calls
from vembed.gradcache.gradients import ReplicatedGradients, ShardedGradients
from vembed.gradcache.loss_stage import LossStage
from vembed.gradcache.memory import is_out_of_memory, smaller
from vembed.gradcache.replay import RngState
from vembed.gradcache.row_assignment import RowAssignment
from vembed.gradcache.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.gradcache.calls import Call
    from vembed.gradcache.chunking import ChunkBudget
    from vembed.gradcache.gradients import Gradients
    from vembed.gradcache.loss_stage import LossResult
    from vembed.losses.base import BatchStructure, ContrastiveLoss, MultiVectorLoss

__all__ = ["EngineOptions", "GradCacheEngine", "Pool", "ReplayDriftError", "StepResult"]

_log = logging.getLogger(__name__)

DRIFT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference between the passes that rounding explains, by the type that the encoder computes in."""


class ReplayDriftError(VembedError):
    """The second pass computed other embeddings than the first: the gradients of this step would be wrong."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the step is computed; none of it changes what is computed.

    Attributes:
        budget: Limits of one chunk.
        device: Where the encoders run.
        retain: Share of the padded tokens whose graphs are kept from pass 1, 0 to 1; 1 is plain training.
        retain_tokens: Most padded tokens of this rank whose graphs are kept, whatever the share; None for no limit.
        autocast_dtype: Type of mixed precision (bfloat16, float16), or None.
        replay_rng: Whether pass 2 replays the random state; False only serves to show that the drift monitor works.
        oom_retry: Whether a step that runs out of memory is done again in smaller chunks.
        ranks: Who shares the batch.
    """

    budget: ChunkBudget
    device: torch.device
    retain: float = 0.0
    retain_tokens: int | None = None
    autocast_dtype: torch.dtype | None = None
    replay_rng: bool = True
    oom_retry: bool = True
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured. Gradients are in `.grad` of the parameters.

    Attributes:
        loss: Mean loss of the batch of all ranks.
        num_chunks: Encoder calls of pass 1 on this rank.
        tokens: Tokens encoded on this rank, without padding.
        padded_tokens: The same with padding.
        replay_drift: Largest |z' - z| / max |z| over the replayed chunks of all ranks; 0.0 where nothing was replayed.
        rank_loss: Loss of the queries that this rank computed; its mean over the ranks is `loss`. Losses that don't
            stream are computed whole by every rank.
        num_repairs: How often the step ran out of memory and was done again.
    """

    loss: float
    num_chunks: int
    tokens: int
    padded_tokens: int
    replay_drift: float
    rank_loss: float
    num_repairs: int = 0

    @property
    def padding_ratio(self) -> float:
        """Padded tokens over real ones, at least 1."""
        return self.padded_tokens / max(1, self.tokens)


class GradCacheEngine:
    """Computes loss and gradients of batches.

    Args:
        loss: Loss over the embeddings of the batch.
        options: Chunk budget, retention, device, precision and ranks.
        parameters: The encoder's trainable parameters, in the same order on every rank: what is reduced over ranks and,
            after running out of memory, taken back. Needed for both.
        sharded: The handle of an encoder that is sharded over the ranks; its parameters are those, then.

    Attributes:
        budget: Present limits of one chunk; smaller than those of the options after a repair.
        retain: Present share of kept graphs; 0 after a repair.
        stopwatch: Counts what each part of the steps takes; whoever logs reads it.
    """

    def __init__(
        self,
        loss: ContrastiveLoss | MultiVectorLoss,
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
        self.budget = options.budget
        self.retain = options.retain
        self._may_repair = options.oom_retry and len(parameters) > 0
        self._gradients: Gradients = (
            ReplicatedGradients(parameters, options.ranks) if sharded is None else ShardedGradients(sharded)
        )
        self._passes = Passes(CallOptions(options.device, options.autocast_dtype, options.replay_rng))
        self._loss_stage = LossStage(loss, options.ranks)
        self.stopwatch = Stopwatch(options.device)

    def step(
        self,
        pools: Sequence[Pool],
        structure: BatchStructure,
        *,
        assignment: RowAssignment | None = None,
        gradient_scale: float = 1.0,
    ) -> StepResult:
        """Add the gradients of one batch to `.grad` of every parameter that takes part.

        Args:
            pools: This rank's rows of the batch; on one rank their slots cover [queries; documents] exactly once. A
                sharded encoder takes the same pools in the same order on every rank, if only with a spare row.
            structure: Positives and identities of the whole batch.
            assignment: Which rows are on which rank; None where there is one rank.
            gradient_scale: Factor on all gradients (the loss scale of float16 training); the loss stays unscaled.

        Returns:
            The loss and the counters of the step.

        Raises:
            ReplayDriftError: When pass 2 didn't compute what pass 1 did.
            MachineError: Out of memory, and no smaller chunk is left to try.
        """
        assignment = assignment or RowAssignment.alone(structure.num_queries + structure.num_documents)
        num_repairs = 0
        start = RngState.capture(self.options.device)
        while True:
            self._gradients.begin()
            result = self._attempt(pools, structure, assignment, gradient_scale, num_repairs)
            if result is not None:
                return result
            self._gradients.abandon()
            if self.options.device.type == "cuda":
                torch.cuda.empty_cache()  # what is cached is cut for the larger chunks
            start.restore()
            num_repairs += 1

    def _attempt(
        self,
        pools: Sequence[Pool],
        structure: BatchStructure,
        assignment: RowAssignment,
        gradient_scale: float,
        num_repairs: int,
    ) -> StepResult | None:
        """Do the step once; None when some rank ran out of memory, and the budget is smaller now."""
        ranks = self.options.ranks
        counts_N = self._vector_counts(pools, assignment)
        vectors = assignment if counts_N is None else assignment.of_vectors(counts_N)
        calls = self._plan_calls(pools, assignment, counts_N)
        num_vectors = vectors.counts[ranks.rank]
        found: tuple[Tensor, LossResult] | None = None
        drift: Tensor | None = None
        failed = False
        try:
            with self.stopwatch.part("encode"):
                z_VE = self._passes.first(calls, num_vectors=num_vectors)
            if ranks.is_one and any(call.graph is not None for call in calls):  # which a second attempt doesn't keep
                found = z_VE, self._run_loss(z_VE, structure, vectors, counts_N, gradient_scale)
        except (RuntimeError, MemoryError) as error:
            self._require_repairable(error, calls)
            failed = True
        if self._any(failed):
            self._shrink(calls)
            return None
        if found is None:
            try:
                found = z_VE, self._run_loss(z_VE, structure, vectors, counts_N, gradient_scale)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise self._unrepairable_loss(vectors) from error
        try:
            with self.stopwatch.part("encode"):
                drift = self._passes.second(calls, found[0], found[1].u_VE)
        except (RuntimeError, MemoryError) as error:
            self._require_repairable(error, calls)
            failed = True
        if self._any(failed):
            self._shrink(calls)
            return None
        assert drift is not None
        with self.stopwatch.part("reduce"):
            self._gradients.finish()
        self._add_own_gradients(found[1], gradient_scale)
        return self._result(calls, pools, found[1], drift, num_repairs)

    def _plan_calls(self, pools: Sequence[Pool], assignment: RowAssignment, counts_N: np.ndarray | None) -> list[Call]:
        """Cut this rank's rows into encoder calls."""
        ranks, device = self.options.ranks, self.options.device
        places_N = (
            assignment.places(ranks.rank) if counts_N is None else _first_places(assignment.slots[ranks.rank], counts_N)
        )
        keep = Retention(self.retain, self.options.retain_tokens)
        calls = plan_calls(pools, places_N, self.budget, keep, device)
        return equal_calls(calls, pools, ranks, device) if self._gradients.needs_equal_calls else calls

    def _run_loss(
        self,
        z_VE: Tensor,
        structure: BatchStructure,
        vectors: RowAssignment,
        counts_N: np.ndarray | None,
        gradient_scale: float,
    ) -> LossResult:
        with self.stopwatch.part("loss"):
            return self._loss_stage.run(z_VE, structure, vectors, counts_N=counts_N, gradient_scale=gradient_scale)

    def _any(self, failed: bool) -> bool:
        """Return whether a rank ran out of memory. The first to arrive waits here for the slowest."""
        with self.stopwatch.part("wait"):
            return self.options.ranks.any(failed, self.options.device)

    def _vector_counts(self, pools: Sequence[Pool], assignment: RowAssignment) -> np.ndarray | None:
        """Return the vectors of each row of the batch; None where every row has one."""
        if all(pool.num_vectors is None for pool in pools):
            return None
        ranks, own = self.options.ranks, assignment.slots[self.options.ranks.rank]
        counts_N = np.ones(assignment.num_rows, dtype=np.int64)
        for pool in pools:
            if pool.num_vectors is not None:
                has_place = pool.slots >= 0
                counts_N[pool.slots[has_place]] = pool.num_vectors[has_place]
        if not ranks.is_one:
            local = torch.from_numpy(counts_N[own]).to(self.options.device)
            counts_N[assignment.rank_order] = ranks.gather_rows(local, assignment.counts).cpu().numpy()
        return counts_N

    def _result(
        self, calls: Sequence[Call], pools: Sequence[Pool], found: LossResult, drift: Tensor, num_repairs: int
    ) -> StepResult:
        """Read the numbers of the step from the device, all at once, and check the drift."""
        drift = self.options.ranks.max_(drift / found.largest.clamp_min(torch.finfo(drift.dtype).tiny))
        numbers = torch.stack([found.loss.to(drift.dtype), found.rank_loss.to(drift.dtype), drift])
        loss, rank_loss, relative = numbers.tolist()  # waits for the device
        self._check_drift(relative, found.u_VE.dtype)
        return StepResult(
            loss=loss,
            num_chunks=len(calls),
            tokens=sum(int(pool.features.lengths[pool.slots >= 0].sum()) for pool in pools),
            padded_tokens=sum(call.chunk.padded_tokens for call in calls),
            replay_drift=relative,
            rank_loss=rank_loss,
            num_repairs=num_repairs,
        )

    def _add_own_gradients(self, found: LossResult, gradient_scale: float) -> None:
        """Add the gradients of the loss's own parameters, once; frozen ones get none."""
        for name, parameter in self.loss.named_parameters():
            if parameter.requires_grad:
                scaled = found.own[name] * gradient_scale
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled

    def _require_repairable(self, error: BaseException, calls: Sequence[Call]) -> None:
        """Raise an error that smaller chunks can't cure.

        Raises:
            MachineError: Out of memory, and nothing may be done about it.
        """
        if not is_out_of_memory(error):
            raise error
        if self._gradients.needs_equal_calls:
            raise self._unrepairable(calls) from error
        if not self._may_repair:
            raise MachineError(
                "out of memory, and the step may not be done again in smaller chunks: set oom_retry and "
                "use_gradient_cache to what they are by default, or lower batch_size"
            ) from error

    def _unrepairable(self, calls: Sequence[Call]) -> MachineError:
        """Return the advice for a rank that can't leave the others alone in a collective."""
        rows, tokens = max(len(call.chunk.rows) for call in calls), max(call.chunk.padded_tokens for call in calls)
        shrunk = smaller(self.budget, rows=rows, tokens=tokens)
        cure = "shorten the rows (max_seq_length, or smaller pictures) or set cpu_offload: true"
        if shrunk is not None:
            cure = f"set gradient_cache_chunk_size: {shrunk.rows} and gradient_cache_chunk_tokens: {shrunk.tokens}"
            cure += " and retain: 0" if self.retain > 0 else ""
        return MachineError(
            f"out of memory in chunks of {rows} rows and {tokens} tokens. With this fsdp_mode the step can't be done "
            f"again by itself, as the other processes wait in encoder calls of this one: {cure}"
        )

    def _unrepairable_loss(self, vectors: RowAssignment) -> MachineError:
        """Return the advice for a loss stage that ran out of memory: no graph to drop, or others in its collectives."""
        rank = "" if self.options.ranks.is_one else f" on rank {self.options.ranks.rank}"
        keys = ["set retain: 0"] if self.retain > 0 else []
        keys += ["set loss_tile_size to a smaller number", "lower batch_size"]
        return MachineError(
            f"out of memory{rank} in the loss over {vectors.num_rows} embeddings, which smaller chunks can't cure: "
            f"{', or '.join(keys)}"
        )

    def _shrink(self, calls: Sequence[Call]) -> None:
        """Halve the budget, alike on every rank, and let go of what the attempt held.

        Raises:
            MachineError: When a chunk is a single row already.
        """
        for call in calls:
            call.graph = None
        largest = [max(len(call.chunk.rows) for call in calls), max(call.chunk.padded_tokens for call in calls)]
        rows, tokens = self.options.ranks.max_(torch.tensor(largest, device=self.options.device)).tolist()
        shrunk = smaller(self.budget, rows=rows, tokens=tokens)
        if shrunk is None:
            raise MachineError(
                f"out of memory with a single row of {tokens} tokens in a chunk: shorten the rows (max_seq_length, or "
                f"smaller pictures), set gradient_checkpointing: true, or take a smaller model"
            )
        _log.warning(
            "out of memory in chunks of %d rows and %d tokens: the same step again with %d rows and %d tokens, "
            "no graph kept",
            rows,
            tokens,
            shrunk.rows,
            shrunk.tokens,
        )
        self.budget, self.retain = shrunk, 0.0

    def _check_drift(self, drift: float, dtype: torch.dtype) -> None:
        """Raise when the two passes differ by more than rounding. NaN passes: that is the guards' business."""
        tolerance = DRIFT_TOLERANCE[self.options.autocast_dtype or dtype]
        if drift > tolerance:
            raise ReplayDriftError(
                f"the second pass of gradient caching computed other embeddings than the first (relative difference "
                f"{drift:.2g}, rounding explains {tolerance:.0e}): the gradients would be wrong. "
                f"The encoder draws random numbers from a generator of its own, or changes its buffers in forward. "
                f"use_gradient_cache: false trains it without a second pass."
            )


def _first_places(own: np.ndarray, counts_N: np.ndarray) -> np.ndarray:
    """Return where the vectors of each of a rank's rows begin among its own, (N,); -1 for the rows of others."""
    places_N = np.full(len(counts_N), -1, dtype=np.int64)
    places_N[own] = np.cumsum(counts_N[own]) - counts_N[own]
    return places_N
