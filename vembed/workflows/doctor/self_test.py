"""Whether this machine computes what it should: collectives, and the gradients of the engine against plain autograd.

Theorem: with the loss L over the embeddings z of all rows, dL/dw is the sum over rows of (dz/dw)^T dL/dz. So the
gradients of ranks that each encode some of the rows, in chunks, add up to those of the whole batch at once: nothing is
divided by the number of ranks, and no factor is missing. Here a small encoder is trained by one step in both ways, in
float64, so that what is left between them is rounding. A wrong factor would show as an error of 0.5 or more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vembed.batch import ContrastiveBatch, Features, Ragged
from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError
from vembed.gradcache.chunks import ChunkBudget, Pool, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure
from vembed.losses.infonce import InfoNCE
from vembed.workflows.doctor.local_ranks import Backend, run_on_local_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

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
        """Whether all errors are within rounding."""
        return max(self.gradient_error, self.loss_error, self.collective_error) <= TOLERANCE


class SmallEncoder(nn.Module):
    """One layer of attention with mean pooling: no dropout, so that both ways compute the same function."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Pad rows to a width."""
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
        each = "1 process on the GPU" if num_gpus == 1 else f"{num_gpus} processes on {num_gpus} GPUs"
        wanted.append((f"{each} (nccl)", num_gpus, "nccl"))
    found: dict[str, SelfTest | MachineError] = {}
    for name, world_size, backend in wanted:
        try:
            found[name] = self_test(world_size=world_size, backend=backend)
        except MachineError as error:
            found[name] = error
    return found


def self_test(*, world_size: int, backend: Backend) -> SelfTest:
    """Test several fresh processes of this machine.

    Raises:
        MachineError: The processes can't work together at all.
    """
    found = run_on_local_ranks(check_this_rank, world_size=world_size, backend=backend)
    return SelfTest(
        gradient_error=max(each.gradient_error for each in found),
        loss_error=max(each.loss_error for each in found),
        collective_error=max(each.collective_error for each in found),
        num_chunks=tuple(count for each in found for count in each.num_chunks),
        seconds=max(each.seconds for each in found),
    )


def check_this_rank(device: torch.device) -> SelfTest:
    """Test this process together with the others of its process group; alone where there is none."""
    ranks = Ranks.of_this_process()
    collective_error = _collective_error(ranks, device)
    batch = _batch()
    num_rows = NUM_QUERIES + len(batch.documents)
    structure = BatchStructure.of(batch)
    torch.manual_seed(0)
    encoder = SmallEncoder().double().to(device)
    loss = InfoNCE(temperature=0.1, learn_temperature=True, bidirectional=True, dtype=torch.float64).to(device)
    features = _features(num_rows)

    def on_device(inputs: dict[str, Tensor]) -> Tensor:
        embeddings: Tensor = encoder({name: tensor.to(device) for name, tensor in inputs.items()})
        return embeddings

    whole = Pool(on_device, encoder.collate, features, np.arange(num_rows))
    expected_loss = reference_step([whole], structure, loss).item()
    expected = _gradients(encoder, loss)
    assignment = _uneven_assignment(num_rows, ranks.world_size)
    own = assignment.slots[ranks.rank]
    pool = Pool(on_device, encoder.collate, features.take(own), own)
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
    counts = [rank + 1 for rank in range(ranks.world_size)]
    own = torch.full((counts[ranks.rank], 3), float(ranks.rank), dtype=torch.float64, device=device)
    every = torch.cat([torch.full((count, 3), float(rank)) for rank, count in enumerate(counts)]).double()
    gathered = ranks.gather_rows(own, counts).cpu()
    blocks = torch.arange(ranks.world_size, dtype=torch.float64, device=device).repeat_interleave(2)
    summed = ranks.sum_own_block(blocks[:, None].repeat(1, 3)).cpu()
    total = ranks.sum_(torch.tensor([1.0 + ranks.rank], dtype=torch.float64, device=device)).cpu()
    largest = ranks.max_(torch.tensor([1.0 + ranks.rank], dtype=torch.float64, device=device)).cpu()
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


def _features(num_rows: int) -> Features:
    """Return rows of uneven lengths."""
    rng = np.random.default_rng(0)
    ids = Ragged.from_rows([rng.integers(1, VOCABULARY, length) for length in rng.integers(2, 20, num_rows)])
    return Features({"ids": ids}, ids.lengths)


def _uneven_assignment(num_rows: int, world_size: int) -> RowAssignment:
    """Assign rows to ranks unevenly, so that queries and their documents don't stay together."""
    owner = np.minimum(np.arange(num_rows) % (world_size + 1), world_size - 1)
    return RowAssignment(tuple(np.flatnonzero(owner == rank) for rank in range(world_size)))


def _gradients(*modules: nn.Module) -> dict[str, Tensor]:
    """Take the gradients out of modules and clear them."""
    found = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"{number}.{name}"] = parameter.grad.detach().clone()
            parameter.grad = None
    return found


def _relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest error of a parameter; norms under 1e-9 of the largest count as zero."""
    floor = 1e-9 * max(gradient.norm().item() for gradient in expected.values())
    if found.keys() != expected.keys():
        return float("inf")
    errors: list[float] = [
        float((found[name] - gradient).norm()) / max(float(gradient.norm()), floor)
        for name, gradient in expected.items()
    ]
    return max(errors)
