"""A test of this machine: collectives, and the gradients of the engine against plain autograd, on fresh processes.

Theorem: with the loss L over the embeddings z of all rows, dL/dw is the sum over rows of (dz/dw)^T dL/dz. So the
gradients of ranks that each encode some of the rows, in chunks, add up to those of the whole batch at once: nothing is
divided by the number of ranks, and no factor is missing. Here a small encoder is trained by one step in both ways, in
float64, so that what is left between them is rounding. A wrong factor would show as an error of 0.5 or more.

The processes are started here (`run_on_local_ranks`) and not by the launcher of a run: a test must end within seconds
on a machine where they never meet, and say which of them failed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vembed.batch import ContrastiveBatch, Features, Ragged
from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError
from vembed.gradcache.chunks import ChunkBudget, Pool, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure
from vembed.losses.infonce import InfoNCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

Answer = TypeVar("Answer")

Backend: TypeAlias = Literal["gloo", "nccl"]

TIMEOUT_SECONDS = 90
"""Longest wait for all processes together, their start included."""

LEAVE_SECONDS = 2
"""Longest wait for all of them to end by themselves, once they have answered or one of them has failed."""

TOLERANCE = 1e-9
"""Largest relative error of a gradient; rounding alone stays under 1e-12."""

NUM_QUERIES, VOCABULARY, WIDTH = 12, 50, 16


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Errors and time of one training step that was compared with plain autograd."""

    gradient_error: float  # largest difference of a parameter's gradient from plain autograd, relative to its norm
    loss_error: float  # relative
    collective_error: float  # largest difference of what the collectives gave from what they should
    num_chunks: tuple[int, ...]  # encoder calls of each rank
    seconds: float  # of the step with the engine, on the slowest rank

    @property
    def passed(self) -> bool:
        """True where all errors are within rounding."""
        return max(self.gradient_error, self.loss_error, self.collective_error) <= TOLERANCE


class SmallEncoder(nn.Module):
    """One layer of attention with mean pooling: no dropout, so that both ways compute the same function."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Pad rows to a width: ids and padding (R, width)."""
        ids = features.columns["ids"].take(rows)
        is_padding = np.arange(width) >= ids.lengths[:, None]
        return {"ids": torch.from_numpy(ids.padded(width, 0)).long(), "padding": torch.from_numpy(is_padding)}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return unit vectors (R, E)."""
        padding = inputs["padding"]
        hidden = self.layer(self.tokens(inputs["ids"]), src_key_padding_mask=padding)
        pooled = hidden.masked_fill(padding.unsqueeze(-1), 0.0).sum(1)
        return nn.functional.normalize(pooled, dim=-1)


def self_tests(num_gpus: int) -> dict[str, SelfTest | MachineError]:
    """Test two processes on the CPU, and one for each GPU where there are any; an error says why they can't work."""
    wanted: list[tuple[str, int, Backend]] = [("2 processes on the CPU (gloo)", 2, "gloo")]
    if num_gpus:
        devices = "1 process on the GPU" if num_gpus == 1 else f"{num_gpus} processes on {num_gpus} GPUs"
        wanted.append((f"{devices} (nccl)", num_gpus, "nccl"))
    results: dict[str, SelfTest | MachineError] = {}
    for name, world_size, backend in wanted:
        try:
            results[name] = self_test(world_size=world_size, backend=backend)
        except MachineError as error:
            results[name] = error
    return results


def self_test(*, world_size: int, backend: Backend) -> SelfTest:
    """Test several fresh processes of this machine.

    Raises:
        MachineError: The processes can't work together at all.
    """
    ranks = run_on_local_ranks(check_this_rank, world_size=world_size, backend=backend)
    return SelfTest(
        gradient_error=max(rank.gradient_error for rank in ranks),
        loss_error=max(rank.loss_error for rank in ranks),
        collective_error=max(rank.collective_error for rank in ranks),
        num_chunks=tuple(count for rank in ranks for count in rank.num_chunks),
        seconds=max(rank.seconds for rank in ranks),
    )


def check_this_rank(device: torch.device) -> SelfTest:
    """Test this process together with the others of its process group; alone where there is none."""
    ranks = Ranks.of_this_process()
    collective_error = _collective_error(ranks, device)
    batch = _batch()
    num_rows = NUM_QUERIES + len(batch.documents)
    structure = BatchStructure.of(batch)
    # The same weights and rows on every rank, so that no rank needs to send them.
    rng = np.random.default_rng(0)
    ids = Ragged.from_rows([rng.integers(1, VOCABULARY, length) for length in rng.integers(2, 20, num_rows)])
    features = Features({"ids": ids}, ids.lengths)
    torch.manual_seed(0)
    # In float64: rounding is then 1e-15, and a wrong factor can't hide in it.
    encoder = SmallEncoder().double().to(device)
    loss = InfoNCE(temperature=0.1, learn_temperature=True, bidirectional=True, dtype=torch.float64).to(device)

    def on_device(inputs: dict[str, Tensor]) -> Tensor:
        embeddings: Tensor = encoder({name: tensor.to(device) for name, tensor in inputs.items()})
        return embeddings

    whole = Pool(on_device, encoder.collate, features, np.arange(num_rows))
    expected_loss = reference_step([whole], structure, loss).item()
    expected = _gradients(encoder, loss)
    # Uneven, and queries apart from their documents: what a split by halves would hide shows here.
    owner = np.minimum(np.arange(num_rows) % (ranks.world_size + 1), ranks.world_size - 1)
    assignment = RowAssignment(tuple(np.flatnonzero(owner == rank) for rank in range(ranks.world_size)))
    own = assignment.slots[ranks.rank]
    pool = Pool(on_device, encoder.collate, features.take(own), own)
    # Small chunks, and embeddings of some kept: several encoder calls, replayed ones among them.
    options = EngineOptions(budget=ChunkBudget(rows=5, tokens=60), device=device, retain=0.3, ranks=ranks)
    engine = GradCacheEngine(loss, options, list(encoder.parameters()))
    started = time.perf_counter()
    result = engine.step([pool], structure, assignment=assignment)
    seconds = time.perf_counter() - started
    return SelfTest(
        gradient_error=_relative_error(_gradients(encoder, loss), expected),
        loss_error=abs(result.loss - expected_loss) / abs(expected_loss),
        collective_error=collective_error,
        num_chunks=(result.num_chunks,),
        seconds=seconds,
    )


def _collective_error(ranks: Ranks, device: torch.device) -> float:
    """Return how far gathered rows and sums over the ranks are from what they should be."""
    counts = [rank + 1 for rank in range(ranks.world_size)]  # another one on each rank: rows are gathered with padding
    own = torch.full((counts[ranks.rank], 3), float(ranks.rank), dtype=torch.float64, device=device)
    every = torch.cat([torch.full((count, 3), float(rank)) for rank, count in enumerate(counts)]).double()
    gathered = ranks.gather_rows(own, counts).cpu()
    blocks = torch.arange(ranks.world_size, dtype=torch.float64, device=device).repeat_interleave(2)
    summed = ranks.sum_own_block(blocks[:, None].repeat(1, 3)).cpu()
    total = ranks.sum_(torch.tensor([1.0 + ranks.rank], dtype=torch.float64, device=device)).cpu()
    largest = ranks.max_(torch.tensor([1.0 + ranks.rank], dtype=torch.float64, device=device)).cpu()
    # Every rank knows what the others hold, so each result is compared with its closed form.
    errors = (
        (gathered - every).abs().max(),
        (summed - ranks.world_size * float(ranks.rank)).abs().max(),
        (total - sum(counts)).abs().max(),
        (largest - ranks.world_size).abs().max(),
    )
    return max(error.item() for error in errors)


def _batch() -> ContrastiveBatch:
    """Return queries of which every third has a hard negative, and two share a positive's content."""
    positives, num_documents = [], 0
    for query in range(NUM_QUERIES):
        positives.append((query, num_documents))
        num_documents += 2 if query % 3 == 0 else 1
    document_ids = np.arange(100, 100 + num_documents, dtype=np.int64)
    document_ids[positives[1][1]] = document_ids[positives[0][1]]
    return ContrastiveBatch(
        queries=("",) * NUM_QUERIES,
        documents=("",) * num_documents,
        positives_P2=np.array(positives, dtype=np.int64),
        query_ids_Q=np.arange(NUM_QUERIES, dtype=np.int64),
        document_ids_D=document_ids,
        record_ids=tuple(range(NUM_QUERIES)),
    )


def _gradients(*modules: nn.Module) -> dict[str, Tensor]:
    """Take the gradients out of modules and clear them."""
    gradients = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradients[f"{number}.{name}"] = parameter.grad.detach().clone()
            parameter.grad = None
    return gradients


def _relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest error of a parameter; norms under 1e-9 of the largest count as zero."""
    # A parameter whose true gradient is zero (a bias before a softmax) has rounding alone, which is no error of 1.
    floor = 1e-9 * max(gradient.norm().item() for gradient in expected.values())
    if actual.keys() != expected.keys():
        return float("inf")
    errors: list[float] = [
        float((actual[name] - gradient).norm()) / max(float(gradient.norm()), floor)
        for name, gradient in expected.items()
    ]
    return max(errors)


def run_on_local_ranks(
    function: Callable[[torch.device], Answer],
    *,
    world_size: int,
    backend: Backend,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Answer]:
    """Call a function on every rank of a fresh process group, and return what each rank returned, in their order.

    Args:
        function: Of a module, so that a new process can import it; gets the device of its rank.
        backend: "gloo" on the CPU, "nccl" with a GPU for each.

    Raises:
        MachineError: A process failed or said nothing in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, function, rank, world_size, backend, Path(folder) / "store")
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # while it is open here, the end of the process isn't seen as the end of its messages
            ends.append(ours)
            processes.append(process)
        try:
            return _answers(ends, time.monotonic() + timeout_seconds)
        finally:
            until = time.monotonic() + LEAVE_SECONDS
            for process in processes:
                process.join(max(0.0, until - time.monotonic()))
            for process in processes:
                process.kill()  # one that waits in a collective for a rank that failed never ends by itself
                process.join()


def _answers(ends: list[Connection], deadline: float) -> list[Answer]:
    """Wait for all ranks; the first that fails is named, as the others only wait for it."""
    answers: dict[int, Answer] = {}
    waiting = dict(enumerate(ends))
    while waiting:
        ready = multiprocessing.connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = ", ".join(map(str, waiting))
            raise MachineError(f"process {silent} of {len(ends)} said nothing in time")
        for rank, end in list(waiting.items()):
            if end not in ready:
                continue
            del waiting[rank]
            try:
                worked, answer = end.recv()
            except EOFError:
                worked, answer = False, "it ended without a word"
            if not worked:
                raise MachineError(f"process {rank} of {len(ends)} failed: {answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(ends))]


def _serve(
    end: Connection,
    function: Callable[[torch.device], object],
    rank: int,
    world_size: int,
    backend: Backend,
    store: Path,
) -> None:
    torch.set_num_threads(1)
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            from vembed.distributed.runtime import leave_out_broken_links

            torch.cuda.set_device(device)
            leave_out_broken_links()
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",  # no port that another program may have
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        end.send((True, function(device)))
    except Exception:  # noqa: BLE001 - whatever it is, the process that asked must see it
        end.send((False, traceback.format_exc().strip().rpartition("\n")[2]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
