"""Out of memory: its errors, the limits of a step, and a guard by which all ranks do a step again with less.

A step that runs out of memory is done again from its beginning, first without kept graphs, then in chunks of half the
size. The next step begins as planned; memory that runs out there as well leaves the run with what helped.

`MemoryGuard.guard` swallows the error of a part of the step and `MemoryGuard.agree`, behind it, raises `RepairNeeded`
on every rank. They are two calls because an error holds the frames that failed, and these hold their tensors: by the
time the ranks talk to each other, and the more so when the step begins again, that memory must be free.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from vembed.errors import MachineError
from vembed.gradcache.chunks import fit_one_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.chunks import Call, ChunkBudget
    from vembed.gradcache.stopwatch import Part, Stopwatch

_log = logging.getLogger(__name__)

_ALLOCATORS: Final = (
    "out of memory",  # CUDA and its driver, HIP, XPU, MPS, Triton
    "ALLOC_FAILED",  # cuBLAS, hipBLAS, cuDNN before version 9
    "ALLOCATION_FAILED",  # cuDNN
    "Invalid buffer size",  # MPS, of a tensor larger than any may be
    "can't allocate memory",  # torch on the CPU, on Linux and on Windows
    "not enough memory",
    "bad_alloc",  # C++
)
"""Words of torch and the libraries under it, in plain RuntimeErrors, where they find no memory for a call."""

_COLLECTIVES: Final = ("Failed to CUDA", "out of memory")
"""Words of NCCL where it finds no memory for its buffers."""


def _is_of_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "nccl" in str(error).lower()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, of the device or the host, ran out in a call that can be repeated."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Libraries under torch raise plain RuntimeErrors, and NCCL words that look alike but end the communicator.
    if not isinstance(error, RuntimeError) or _is_of_collective(error):
        return False
    return any(words in str(error) for words in _ALLOCATORS)


def out_of_memory_advice(error: BaseException) -> str | None:
    """Return advice where memory ran out and no step can be done again; None after any other error.

    A collective that finds none is broken for good.
    """
    if not _is_of_collective(error):
        if not is_out_of_memory(error):
            return None
        first_line = str(error).partition("\n")[0] or type(error).__name__
        return (
            f"memory ran out outside of the encoder calls of a step, which alone can be done again ({first_line}): set "
            f"eval_batch_size or batch_size to a smaller number, or use_fsdp: true, or end other programs on the device"
        )
    if "shared memory segment" in str(error):
        return (
            "NCCL found no room for its buffers in the machine's shared memory: start the container with "
            "--shm-size=8g, or set NCCL_SHM_DISABLE=1, which is slower"
        )
    if any(words in str(error) for words in _COLLECTIVES):
        return (
            "NCCL found no memory for its buffers, and no process can continue: torch held the rest of the device. Set "
            "gradient_cache_chunk_tokens or batch_size to a smaller number, retain: 0, or end other programs on it"
        )
    return None


class RepairNeeded(Exception):  # noqa: N818 - no error: the step is done again
    """Memory ran out on some rank, and every rank must do the step again with less.

    Args:
        rows: Rows of the largest encoder call of any rank.
        tokens: Padded tokens of the largest one.
        kept_graphs: Whether some rank kept graphs that it can do without.
    """

    def __init__(self, *, rows: int, tokens: int, kept_graphs: bool) -> None:
        super().__init__()
        self.rows = rows
        self.tokens = tokens
        self.kept_graphs = kept_graphs


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of the memory of a step, the same on every rank."""

    rows: int  # most rows of one encoder call
    tokens: int  # most padded tokens of one encoder call
    retain: float  # share of the padded tokens whose graphs are kept
    ran_out: bool = False  # memory ran out once in a step that began with these limits

    def lowered(self, repair: RepairNeeded) -> StepLimits | None:
        """Return the limits of the next attempt: no graphs, then half the largest chunk; None after a single row."""
        if repair.kept_graphs:
            return replace(self, retain=0.0)
        if repair.rows == 1:
            return None
        # Half of the largest call that was made: of a limit far above the batch it would take many attempts.
        rows, tokens = min(self.rows, repair.rows) // 2, min(self.tokens, repair.tokens) // 2
        return replace(self, rows=max(1, rows), tokens=max(1, tokens), retain=0.0)

    def after_repair(self, helped: StepLimits) -> StepLimits:
        """Return the limits of the next step: the same ones once more, then those that helped.

        Args:
            helped: The limits under which the step came through.
        """
        # A batch of unusual lengths is rare: one failure must not slow down the rest of a run.
        return replace(helped, ran_out=False) if self.ran_out else replace(self, ran_out=True)


class MemoryGuard:
    """Limits of a step, lowered on all ranks alike where memory runs out on one.

    Args:
        budget: Of an encoder call, as planned.
        retain: Share of the padded tokens whose graphs are kept, as planned.
        may_repair: Whether a step may be done again.
        needs_equal_calls: Whether ranks wait for each other inside encoder calls: a rank can't leave one alone, then.

    Attributes:
        limits: Those that the next step begins with; less than planned after memory ran out twice.
        present: Those of the attempt that is running.
    """

    def __init__(
        self,
        budget: ChunkBudget,
        retain: float,
        *,
        ranks: Ranks,
        device: torch.device,
        stopwatch: Stopwatch,
        may_repair: bool,
        needs_equal_calls: bool,
    ) -> None:
        self.limits = self.present = StepLimits(budget.rows, budget.tokens, retain)
        self._planned = budget
        self._ranks = ranks
        self._device = device
        self._stopwatch = stopwatch
        self._may_repair = may_repair
        self._needs_equal_calls = needs_equal_calls
        self._failed = False  # on this rank, in the part that ended last
        self._ran_out = False  # in this optimizer step

    @property
    def budget(self) -> ChunkBudget:
        """Budget of an encoder call in the attempt that is running."""
        return replace(self._planned, rows=self.present.rows, tokens=self.present.tokens)

    def begin(self, *, continues: bool) -> None:
        """Begin a step.

        Args:
            continues: Whether batches before this one belong to the same optimizer step.
        """
        self.present, self._failed = self.limits, False
        self._ran_out = continues and self._ran_out

    @contextmanager
    def guard(self, part: Part, calls: Sequence[Call]) -> Iterator[None]:
        """Swallow an out-of-memory error of a part of the step that can be done again; `agree` must follow.

        Args:
            calls: The encoder calls of the attempt.

        Raises:
            MachineError: Memory ran out, and the step can't be done again.
        """
        try:
            with self._stopwatch.part(part):
                yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._needs_equal_calls:
                # A repair would leave the other ranks alone in a collective: only advice is left.
                rows, tokens = _largest(calls)
                lower = self.present.lowered(RepairNeeded(rows=rows, tokens=tokens, kept_graphs=False))
                cure = "shorten the rows (max_seq_length, or smaller pictures) or set cpu_offload: true"
                if lower is not None:
                    cure = (
                        f"set gradient_cache_chunk_size: {lower.rows} and gradient_cache_chunk_tokens: {lower.tokens}"
                    )
                    cure += " and retain: 0" if self.present.retain > 0 else ""
                raise MachineError(
                    f"out of memory in chunks of {rows} rows and {tokens} tokens. With this fsdp_mode the step can't "
                    f"be repeated, because the other processes wait in encoder calls of this one: {cure}"
                ) from error
            if not self._may_repair:
                raise MachineError(
                    "out of memory, and oom_retry or use_gradient_cache forbids smaller chunks: leave both at their "
                    "defaults, or lower batch_size"
                ) from error
            # Nothing is raised or asked here: the error still holds the tensors of the frames that failed.
            self._failed = True

    @contextmanager
    def guard_loss(self, calls: Sequence[Call], num_vectors: int) -> Iterator[None]:
        """Guard the loss: only where graphs can be dropped, and no other rank waits in its collectives, does one help.

        Raises:
            MachineError: The loss doesn't fit, and no repair can help.
        """
        if self._ranks.is_one and any(call.graph is not None for call in calls):
            with self.guard("loss", calls):
                yield
            return
        try:
            with self._stopwatch.part("loss"):
                yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            rank = "" if self._ranks.is_one else f" on rank {self._ranks.rank}"
            keys = ["set retain: 0"] if self.present.retain > 0 else []
            keys += ["set loss_tile_size to a smaller number", "lower batch_size"]
            raise MachineError(
                f"out of memory{rank} in the loss over {num_vectors} embeddings, which smaller chunks can't cure: "
                f"{', or '.join(keys)}"
            ) from error

    def agree(self, calls: Sequence[Call]) -> None:
        """Ask all ranks whether memory ran out behind a guard; the first to arrive waits for the slowest.

        Raises:
            RepairNeeded: It did on some rank; raised on all of them, with what they must know to lower limits alike.
        """
        with self._stopwatch.part("wait"):
            failed, self._failed = self._ranks.any(self._failed, self._device), False
        if not failed:
            return
        # Kept graphs go first, on all ranks: without them the chunks may stay as large as planned. They die with the
        # frames of this attempt, once the step has left the handler of what is raised here.
        kept_graphs = self.present.retain > 0 and any(call.retained for call in calls)
        kept_graphs = kept_graphs and not fit_one_chunk(calls, self.budget)  # a single chunk keeps its graph anyway
        numbers = torch.tensor([*_largest(calls), kept_graphs], device=self._device)
        rows, tokens, any_kept = self._ranks.max_(numbers).tolist()
        raise RepairNeeded(rows=rows, tokens=tokens, kept_graphs=any_kept > 0)

    def lower(self, repair: RepairNeeded) -> None:
        """Choose the limits of the next attempt.

        Raises:
            MachineError: When a chunk is a single row already.
        """
        lower = self.present.lowered(repair)
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
        self.present = lower

    def remember(self) -> None:
        """Choose the limits of the next step after one that was repaired; batches of one optimizer step count once."""
        if self._ran_out:
            return
        self._ran_out = True
        if self.limits.ran_out:
            _log.warning(
                "out of memory in a second step: from now on chunks of at most %d rows and %d tokens, no graph kept",
                self.present.rows,
                self.present.tokens,
            )
        self.limits = self.limits.after_repair(self.present)


def _largest(calls: Sequence[Call]) -> tuple[int, int]:
    """Return the most rows and the most padded tokens of any call."""
    return max(len(call.chunk.rows) for call in calls), max(call.chunk.padded_tokens for call in calls)


def free_cache(device: torch.device) -> None:
    """Give back what a device's allocator keeps, which is cut for larger chunks.

    Raises:
        RuntimeError: The device is broken for good, which no repair cures.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()  # waits for the failed attempt, and says here if the device is broken
        module.empty_cache()
