"""InfoNCE over MaxSim: wide strips, equal products, memory."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_cases import LossCase, plain
from streamed_cases import assert_equal, defined, streamed
from torch.nn.functional import normalize

from vembed.losses import streamed as streaming
from vembed.losses.base import BatchStructure
from vembed.losses.colbert import ColbertLoss
from vembed.losses.streamed import StreamedBatch
from vembed.models.measure import LiveBytes

if TYPE_CHECKING:
    from numpy.typing import NDArray


def make(**options: Any) -> ColbertLoss:
    return ColbertLoss(**{"temperature": 0.2, "learn_temperature": True, "dtype": torch.float64, **options})


def vectors_of(
    case: LossCase, seed: int = 0, dim: int = 5
) -> tuple[torch.Tensor, torch.Tensor, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return unit vectors of queries and documents, from one to nine for each row, and their numbers."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 6, len(case.queries)), rng.integers(1, 10, len(case.documents))
    q, d = (normalize(torch.from_numpy(rng.standard_normal((each.sum(), dim))), dim=-1) for each in counts)
    return q, d, counts


def test_strips_that_are_too_wide_are_swept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    case, loss = plain(50, 70), make(tile_size=16)
    q, d, counts = vectors_of(case)
    kept = streamed(loss, case, q, d, counts)
    monkeypatch.setattr(streaming, "STRIP_TILES", 2)
    again = streamed(loss, case, q, d, counts)
    assert_equal(again, defined(loss, case, q, d, counts))
    assert_equal(again, kept, 1e-14)


def test_of_equal_products_the_first_vector_gets_the_gradient() -> None:
    """Small integers multiply exactly, so that products that are equal on paper are equal."""
    case, loss = plain(2, 3), make(mean=False, temperature=1.0, tile_size=4)
    q = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    d = torch.tensor([[1, 0], [1, 3], [1, 0], [2, 1], [1, 2], [0, 1], [0, 1], [0, 1]], dtype=torch.float64)
    counts = np.array([1, 2]), np.array([3, 2, 3])
    found = streamed(loss, case, q, d, counts)
    assert_equal(found, defined(loss, case, q, d, counts))
    assert (found.dd_DE[2] == 0).all()  # repeats the first vector of its document
    assert (found.dd_DE[5] != 0).any()
    assert (found.dd_DE[6:] == 0).all()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_batch_of_128_takes_under_100_mb(bidirectional: bool) -> None:
    rows, q_count, d_count, dim = 128, 32, 180, 128
    case = plain(rows, rows)
    counts = np.full(rows, q_count), np.full(rows, d_count)
    torch.manual_seed(0)
    q, d = (normalize(torch.randn(rows * count, dim), dim=-1) for count in (q_count, d_count))
    batch = StreamedBatch(q, d, BatchStructure.of(case.batch), counts=counts)
    loss, live = ColbertLoss(temperature=0.05, bidirectional=bidirectional), LiveBytes([q, d])
    with live:
        loss.gradients(batch, loss.statistics(batch) if bidirectional else None)
    table = (len(q) + len(d)) * dim * 4
    assert table < max(accumulate(live.events)) < 30e6 < rows * rows * q_count * d_count * 4
