"""A streamed loss against its definition in plain autograd, on one rank and on several."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from loss_cases import LossCase
from numpy.typing import NDArray
from torch import Tensor

from vembed.losses.base import MultiVectors
from vembed.losses.streamed import Hardest, LogSumExp, LossGradients, Statistics, StreamedBatch, StreamedLoss

if TYPE_CHECKING:
    from collections.abc import Sequence


Counts = tuple[NDArray[np.int64], NDArray[np.int64]] | None
"""Vectors of each query and document; None: one each."""


def defined(loss: StreamedLoss, case: LossCase, q_QE: Tensor, d_DE: Tensor, counts: Counts = None) -> LossGradients:
    """Return loss and gradients by autograd over the whole matrix."""
    own = dict(loss.named_parameters())
    q, d = q_QE.detach().requires_grad_(), d_DE.detach().requires_grad_()
    sides = (q, d) if counts is None else map(MultiVectors, (q, d), map(torch.from_numpy, counts))
    value = loss(*sides, case.structure)
    dq, dd, *rest = torch.autograd.grad(value, [q, d, *own.values()])
    return LossGradients(value.detach(), dq, dd, dict(zip(own, rest, strict=True)))


def streamed(loss: StreamedLoss, case: LossCase, q_QE: Tensor, d_DE: Tensor, counts: Counts = None) -> LossGradients:
    """Return them tile by tile, as one rank does."""
    batch = StreamedBatch(q_QE.detach(), d_DE.detach(), case.structure, counts=counts)
    return loss.gradients(batch, loss.statistics(batch) if loss.needs_statistics else None)


def over_ranks(
    loss: StreamedLoss, case: LossCase, q_QE: Tensor, d_DE: Tensor, sizes: Sequence[int], counts: Counts = None
) -> LossGradients:
    """Return them as ranks of these sizes do: their own queries, all documents, columns merged, shares added up."""
    assert sum(sizes) == len(case.queries)
    starts = np.cumsum([0, *sizes])
    ends = np.arange(len(case.queries) + 1) if counts is None else np.cumsum([0, *counts[0]])
    batches = [
        StreamedBatch(
            q_QE[ends[first] : ends[stop]].detach(),
            d_DE.detach(),
            case.structure,
            int(first),
            None if counts is None else (counts[0][first:stop], counts[1]),
            q_QE.detach(),
        )
        for first, stop in itertools.pairwise(starts)
    ]
    statistics: list[Statistics | None] = [None] * len(batches)
    if loss.needs_statistics:
        statistics = merged([loss.statistics(batch) for batch in batches])
    shares = [loss.gradients(batch, each) for batch, each in zip(batches, statistics, strict=True)]
    return LossGradients(
        torch.stack([share.loss for share in shares]).sum(),
        torch.cat([share.dq_QE for share in shares]),
        torch.stack([share.dd_DE for share in shares]).sum(0),
        {name: torch.stack([share.parameters[name] for share in shares]).sum(0) for name in shares[0].parameters},
    )


def merged(ranks: Sequence[Statistics]) -> list[Statistics | None]:
    """Return the statistics of each rank as the loss stage gives them back."""
    if ranks[0].parts:
        parts = [
            [None] * len(ranks) if any(each is None for each in part) else merged([each for each in part if each])
            for part in zip(*(rank.parts for rank in ranks), strict=True)
        ]
        return [replace(rank, parts=tuple(each)) for rank, each in zip(ranks, zip(*parts, strict=True), strict=True)]
    sums = [rank.sums for rank in ranks if rank.sums is not None]
    columns, hardest = None, None
    if ranks[0].columns is not None:
        known = [rank.columns for rank in ranks if rank.columns is not None]
        assert len(known) == len(ranks)
        top = torch.stack([each.max for each in known]).amax(0)  # all_reduce(MAX)
        columns = LogSumExp(top, torch.stack([each.rescaled(top) for each in known]).sum(0))  # all_reduce(SUM)
    if ranks[0].column_hardest is not None:
        hardest = Hardest.merged([rank.column_hardest for rank in ranks if rank.column_hardest is not None])
    total = torch.stack(sums).sum(0) if sums else None
    return [replace(rank, columns=columns, column_hardest=hardest, sums=total) for rank in ranks]


def assert_equal(found: LossGradients, expected: LossGradients, tolerance: float = 1e-10) -> None:
    """Compare loss and every gradient, relative to the largest entry of each or absolutely where it is small."""
    pairs = {
        "loss": (found.loss, expected.loss),
        "dq": (found.dq_QE, expected.dq_QE),
        "dd": (found.dd_DE, expected.dd_DE),
        **{name: (found.parameters[name], value) for name, value in expected.parameters.items()},
    }
    for name, (ours, reference) in pairs.items():
        assert ours.shape == reference.shape, name
        error = (ours - reference).abs().max().item()
        assert error <= tolerance * max(1.0, reference.abs().max().item()), (name, error)


def random_case(seed: int, *, num_queries: int = 6, num_documents: int = 11, texts: int = 10) -> LossCase:
    """Draw texts from so few that queries, documents and both repeat each other, with one or two positives each."""
    rng = np.random.default_rng(seed)
    pairs = {(i, int(rng.integers(num_documents))) for i in range(num_queries) for _ in range(1 + i % 2)}
    return LossCase(
        tuple(f"text {rng.integers(texts)}" for _ in range(num_queries)),
        tuple(f"text {rng.integers(texts)}" for _ in range(num_documents)),
        tuple(sorted(pairs)),
    )


def unit_rows(count: int, dim: int, *, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(rows, dim=-1).to(dtype)
