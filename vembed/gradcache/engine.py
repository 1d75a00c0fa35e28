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

A step that runs out of memory is done again from its beginning, first without kept graphs, then in chunks of half the
size: nothing of the first attempt is left, and what is computed stays the same. The next step begins as planned; memory
that runs out there as well leaves the run with what helped.

Source: Gao et al., 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError, VembedError
from vembed.gradcache.calls import Passes, Pool, Retention, equal_calls, fit_one_chunk, plan_calls
from vembed.gradcache.gradients import ReplicatedGradients, ShardedGradients
from vembed.gradcache.loss_stage import LossStage
from vembed.gradcache.memory import RepairNeeded, StepLimits, free_cache, is_out_of_memory
from vembed.gradcache.replay import RngState
from vembed.gradcache.row_assignment import RowAssignment
from vembed.gradcache.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.gradcache.calls import Call
    from vembed.gradcache.chunking import ChunkBudget
    from vembed.gradcache.gradients import Gradients
    from vembed.gradcache.loss_stage import LossResult
    from vembed.gradcache.stopwatch import Part
    from vembed.losses.base import BatchLoss, BatchStructure

__all__ = ["EngineOptions", "GradCacheEngine", "Pool", "ReplayDriftError", "StepResult"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

DRIFT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference between the passes that rounding explains, by the type that the encoder computes in."""


class ReplayDriftError(VembedError):
    """The second pass computed other embeddings than the first: the gradients of this step would be wrong."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the step is computed; none of it changes what is computed."""

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
    """What a step measured. Gradients are in `.grad` of the parameters."""

    loss: float  # mean over the batch of all ranks
    num_chunks: int  # encoder calls of pass 1 on this rank
    tokens: int  # encoded on this rank, without padding
    padded_tokens: int
    replay_drift: float  # largest |z' - z| / max |z| over the replayed chunks of all ranks; 0.0 without any
    rank_loss: (
        float  # of the queries of this rank, with `loss` as mean over ranks; `loss` itself where it isn't streamed
    )
    num_repairs: int = 0  # how often the step ran out of memory and was done again


class GradCacheEngine:
    """Computes loss and gradients of batches.

    Args:
        parameters: The encoder's trainable parameters, in the same order on every rank: what is reduced over ranks and,
            after running out of memory, taken back. Needed for both.
        sharded: The handle of an encoder that is sharded over the ranks; its parameters are those, then.

    Attributes:
        limits: What the next step begins with; less than the options after memory ran out twice.
        stopwatch: Counts what each part of the steps takes; whoever logs reads it.
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
        self.limits = StepLimits(options.budget.rows, options.budget.tokens, options.retain)
        self._present = self.limits  # those of the attempt that is running
        self._ran_out = False  # in this optimizer step
        self._may_repair = options.oom_retry and len(parameters) > 0
        self._gradients: Gradients = (
            ReplicatedGradients(parameters, options.ranks) if sharded is None else ShardedGradients(sharded)
        )
        self.passes = Passes(options.device, options.autocast_dtype, replay_rng=options.replay_rng, sharded=sharded)
        self._loss_stage = LossStage(loss, options.ranks, tf32=options.loss_tf32)
        self.stopwatch = Stopwatch(options.device)

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
        self._present, num_repairs = self.limits, 0
        self._ran_out = continues and self._ran_out
        while True:
            self._gradients.begin()
            try:
                with self.passes.shared_casts():
                    result = self._attempt(pools, structure, assignment, gradient_scale)
                break
            except RepairNeeded as repair:
                self._lower_limits(repair)
            # Behind the handler, as the tensors of the attempt live as long as the traceback.
            self._gradients.abandon()
            free_cache(self.options.device)
            start.restore()
            num_repairs += 1
        if num_repairs and not self._ran_out:
            self._ran_out = True
            self._remember_repair()
        return replace(result, num_repairs=num_repairs)

    def _attempt(
        self, pools: Sequence[Pool], structure: BatchStructure, assignment: RowAssignment, gradient_scale: float
    ) -> StepResult:
        """Do the step once, in the five parts that the top of the file names.

        Raises:
            RepairNeeded: Some rank ran out of memory; raised on all of them.
        """
        # 1. Cut this rank's rows into encoder calls.
        counts_N = self._vector_counts(pools, assignment)
        calls = self._plan_calls(pools, assignment, counts_N)
        # 2. Encode them.
        vectors = assignment if counts_N is None else assignment.of_vectors(counts_N)
        num_vectors = vectors.counts[self.options.ranks.rank]
        z_VE = self._together("encode", lambda: self.passes.first(calls, num_vectors=num_vectors), calls)

        # 3. Compute the loss and its gradient with respect to each embedding.
        def run_loss() -> LossResult:
            return self._loss_stage.run(z_VE, structure, vectors, counts_N=counts_N, gradient_scale=gradient_scale)

        if self.options.ranks.is_one and any(call.graph is not None for call in calls):  # room that a repair can make
            found = self._together("loss", run_loss, calls)
        else:
            found = self._loss_as_it_is(run_loss, vectors.num_rows)
        # 4. Backward the retained calls, and encode the others again.
        drift = self._together("encode", lambda: self.passes.second(calls, z_VE, found.u_VE), calls)
        # 5. Add the gradients of all ranks up.
        with self.stopwatch.part("reduce"):
            self._gradients.finish()
        self._add_own_gradients(found, gradient_scale)
        return self._result(calls, pools, found, drift)

    def _plan_calls(self, pools: Sequence[Pool], assignment: RowAssignment, counts_N: np.ndarray | None) -> list[Call]:
        ranks, device = self.options.ranks, self.options.device
        places_N = (
            assignment.places(ranks.rank) if counts_N is None else _first_places(assignment.slots[ranks.rank], counts_N)
        )
        keep = Retention(self._present.retain, self.options.retain_tokens)
        calls = plan_calls(pools, places_N, self._budget, keep, device)
        return equal_calls(calls, pools, ranks, device) if self._gradients.needs_equal_calls else calls

    @property
    def _budget(self) -> ChunkBudget:
        return replace(self.options.budget, rows=self._present.rows, tokens=self._present.tokens)

    def _together(self, part: Part, action: Callable[[], T], calls: Sequence[Call]) -> T:
        """Run an action, then ask all ranks whether memory ran out; the first to arrive waits for the slowest.

        Args:
            action: Part of the step; on several ranks it must reach no collective.

        Raises:
            RepairNeeded: Memory ran out on some rank.
            MachineError: It did, and the step can't be done again.
        """
        failed = False
        try:
            with self.stopwatch.part(part):
                result = action()
        except (RuntimeError, MemoryError) as error:
            self._require_repairable(error, calls)
            failed = True
        with self.stopwatch.part("wait"):
            failed = self.options.ranks.any(failed, self.options.device)
        if failed:
            raise self._repair(calls)
        return result

    def _loss_as_it_is(self, run_loss: Callable[[], LossResult], num_vectors: int) -> LossResult:
        """Compute the loss where no repair can help: no graph to drop, or other ranks in its collectives.

        Raises:
            MachineError: It doesn't fit.
        """
        try:
            with self.stopwatch.part("loss"):
                return run_loss()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            rank = "" if self.options.ranks.is_one else f" on rank {self.options.ranks.rank}"
            keys = ["set retain: 0"] if self._present.retain > 0 else []
            keys += ["set loss_tile_size to a smaller number", "lower batch_size"]
            raise MachineError(
                f"out of memory{rank} in the loss over {num_vectors} embeddings, which smaller chunks can't cure: "
                f"{', or '.join(keys)}"
            ) from error

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

    def _result(self, calls: Sequence[Call], pools: Sequence[Pool], found: LossResult, drift: Tensor) -> StepResult:
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
        )

    def _add_own_gradients(self, found: LossResult, gradient_scale: float) -> None:
        """Add the gradients of the loss's own parameters, once; frozen ones get none."""
        for name, parameter in self.loss.named_parameters():
            if parameter.requires_grad:
                scaled = found.own[name] * gradient_scale
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled

    def _require_repairable(self, error: BaseException, calls: Sequence[Call]) -> None:
        """Raise an error that no repair can cure.

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
        rows, tokens = _largest(calls)
        lower = self._present.lowered(RepairNeeded(rows=rows, tokens=tokens, kept_graphs=False))
        cure = "shorten the rows (max_seq_length, or smaller pictures) or set cpu_offload: true"
        if lower is not None:
            cure = f"set gradient_cache_chunk_size: {lower.rows} and gradient_cache_chunk_tokens: {lower.tokens}"
            cure += " and retain: 0" if self._present.retain > 0 else ""
        return MachineError(
            f"out of memory in chunks of {rows} rows and {tokens} tokens. With this fsdp_mode the step can't be done "
            f"again by itself, as the other processes wait in encoder calls of this one: {cure}"
        )

    def _repair(self, calls: Sequence[Call]) -> RepairNeeded:
        """Return what all ranks must know to lower their limits alike, and let go of the graphs."""
        kept_graphs = self._present.retain > 0 and any(call.retained for call in calls)
        kept_graphs = kept_graphs and not fit_one_chunk(calls, self._budget)  # a single chunk keeps its graph anyway
        for call in calls:
            call.graph = None
        own = torch.tensor([*_largest(calls), kept_graphs], device=self.options.device)
        rows, tokens, any_kept = self.options.ranks.max_(own).tolist()
        return RepairNeeded(rows=rows, tokens=tokens, kept_graphs=any_kept > 0)

    def _lower_limits(self, repair: RepairNeeded) -> None:
        """Choose what the step is tried with next.

        Raises:
            MachineError: When a chunk is a single row already.
        """
        lower = self._present.lowered(repair)
        if lower is None:
            raise MachineError(
                f"out of memory with a single row of {repair.tokens} tokens in a chunk: shorten the rows "
                f"(max_seq_length, or smaller pictures), set gradient_checkpointing: true, or take a smaller model"
            ) from None
        smaller = "" if repair.kept_graphs else f"{lower.rows} rows and {lower.tokens} tokens, "
        _log.warning(
            "out of memory in chunks of %d rows and %d tokens: the same step again with %sno graph kept",
            repair.rows,
            repair.tokens,
            smaller,
        )
        self._present = lower

    def _remember_repair(self) -> None:
        """Begin the next step as this one, or with what helped where memory ran out twice."""
        if self.limits.ran_out:
            _log.warning(
                "out of memory in a second step: from now on chunks of at most %d rows and %d tokens, no graph kept",
                self._present.rows,
                self._present.tokens,
            )
        self.limits = self.limits.after_repair(self._present)

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


def _largest(calls: Sequence[Call]) -> tuple[int, int]:
    """Return the most rows and the most padded tokens of any call."""
    return max(len(call.chunk.rows) for call in calls), max(call.chunk.padded_tokens for call in calls)


def _first_places(own: np.ndarray, counts_N: np.ndarray) -> np.ndarray:
    """Return where the vectors of each of a rank's rows begin among its own, (N,); -1 for the rows of others."""
    places_N = np.full(len(counts_N), -1, dtype=np.int64)
    places_N[own] = np.cumsum(counts_N[own]) - counts_N[own]
    return places_N
