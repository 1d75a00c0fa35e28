"""Hard batches: rows that lie close together share a batch, those that are too close don't."""

from __future__ import annotations

import numpy as np
import pytest

from vembed.data.arrangements import VECTOR_LENGTH, HardBatches, whole_numbers
from vembed.data.sampler import GlobalSampler


def clustered(num_rows: int, num_clusters: int, dimension: int, *, noise: float = 0.6) -> np.ndarray:
    generator = np.random.default_rng(num_rows)
    centres = generator.normal(size=(num_clusters, dimension)) / dimension**0.5
    own = generator.integers(num_clusters, size=num_rows)
    return (centres[own] + noise * generator.normal(size=(num_rows, dimension)) / dimension**0.5).astype(np.float32)


def sampler_of(vectors: np.ndarray, batch_size: int, *, cap: float = 0.99) -> GlobalSampler:
    arrangement = HardBatches(whole_numbers(vectors), cap)
    return GlobalSampler(len(vectors), batch_size=batch_size, seed=3, arrangement=arrangement)


def epoch_batches(sampler: GlobalSampler, epoch: int) -> list[np.ndarray]:
    first = epoch * sampler.batches_per_epoch
    return [sampler.rows(step) for step in range(first, first + sampler.batches_per_epoch)]


def nearest(vectors: np.ndarray, batches: list[np.ndarray]) -> float:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return float(np.mean([(unit[rows] @ unit[rows].T - 2 * np.eye(len(rows))).max(axis=1).mean() for rows in batches]))


def test_rows_of_a_batch_lie_closer_than_at_random_and_every_row_comes_once() -> None:
    vectors = clustered(1010, 50, 32)
    sampler = sampler_of(vectors, 32)
    at_random = GlobalSampler(len(vectors), batch_size=32, seed=3)
    for epoch in range(2):
        batches = epoch_batches(sampler, epoch)
        assert sorted(map(len, batches)) == sorted(map(len, epoch_batches(at_random, epoch)))
        assert np.sort(np.concatenate(batches)).tolist() == list(range(len(vectors)))
        assert nearest(vectors, batches) > nearest(vectors, epoch_batches(at_random, epoch)) + 0.15
    first, second = ({frozenset(rows.tolist()) for rows in epoch_batches(sampler, epoch)} for epoch in range(2))
    assert not first & second


def test_rows_that_are_too_near_share_no_batch() -> None:
    vectors = np.repeat(clustered(200, 20, 16), 3, axis=0)  # each row and two copies of it
    copies = np.arange(600) // 3
    plain, capped = (epoch_batches(sampler_of(vectors, 20, cap=cap), 0) for cap in (1.0, 0.98))
    assert sum(len(rows) - len(set(copies[rows])) for rows in plain) > 100
    assert all(len(rows) == len(set(copies[rows])) for rows in capped)
    kept = sum(map(len, capped))
    assert kept > 560
    [note] = sampler_of(vectors, 20, cap=0.98).arrangement_notes()
    assert f"{600 - kept} row" in note or kept == 600


def test_rows_that_are_all_alike_still_make_batches_of_two() -> None:
    batches = epoch_batches(sampler_of(np.ones((20, 4), dtype=np.float32), 5, cap=0.9), 0)
    assert [len(rows) for rows in batches] == [2] * 4


def test_batches_are_a_function_of_seed_and_step_alone() -> None:
    vectors = clustered(300, 20, 16)
    one, other = sampler_of(vectors, 16), sampler_of(vectors, 16)
    forward = [one.rows(step).tolist() for step in range(40)]
    assert [other.rows(step).tolist() for step in reversed(range(40))] == forward[::-1]


@pytest.mark.parametrize("dimension", [8, 384, 4096])
def test_products_of_two_vectors_and_of_a_direction_are_exact_in_any_order(dimension: int) -> None:
    """In float32 each sum of whole numbers below 2^24 is exact."""
    whole = whole_numbers(np.random.default_rng(0).normal(size=(64, dimension)).astype(np.float32))
    longest = np.sqrt((whole.astype(np.int64) ** 2).sum(axis=1)).max()
    assert 0.9 * VECTOR_LENGTH < longest < 1.1 * VECTOR_LENGTH
    assert 2 * longest * longest < 2**24
    directions = (whole[1:] - whole[:-1]).astype(np.float32)
    exact = whole.astype(np.int64) @ (whole[1:] - whole[:-1]).astype(np.int64).T
    assert np.array_equal(whole.astype(np.float32) @ directions.T, exact)
