"""The masks equal brute force over texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loss_cases import CASES, MASKED, LossCase, masked_cells

from vembed.losses.cells import false_negative_mask, positive_mask


def cells(mask_QD: torch.Tensor) -> set[tuple[int, int]]:
    assert mask_QD.dtype == torch.bool
    return {(int(i), int(j)) for i, j in mask_QD.nonzero()}


def random_case(seed: int) -> LossCase:
    """Draw texts from so few that queries, documents and both repeat each other."""
    rng = np.random.default_rng(seed)
    num_queries, num_documents = 6, 11
    pairs = {(i, int(rng.integers(num_documents))) for i in range(num_queries) for _ in range(1 + i % 2)}
    return LossCase(
        tuple(f"text {rng.integers(8)}" for _ in range(num_queries)),
        tuple(f"text {rng.integers(12)}" for _ in range(num_documents)),
        tuple(sorted(pairs)),
    )


@pytest.mark.parametrize("name", CASES)
def test_masks_equal_brute_force(name: str) -> None:
    case = CASES[name]
    positive_QD = positive_mask(case.structure)
    assert cells(positive_QD) == set(case.positives)
    assert cells(false_negative_mask(case.structure, positive_QD)) == masked_cells(case)


@pytest.mark.parametrize("seed", range(30))
def test_masks_of_random_batches_equal_brute_force(seed: int) -> None:
    case = random_case(seed)
    positive_QD = positive_mask(case.structure)
    masked_QD = false_negative_mask(case.structure, positive_QD)
    assert cells(positive_QD) == set(case.positives)
    assert cells(masked_QD) == masked_cells(case)
    assert not (masked_QD & positive_QD).any()


def test_random_batches_hold_every_kind_of_false_negative() -> None:
    cases = [random_case(seed) for seed in range(30)]
    found = [(case, cell) for case in cases for cell in masked_cells(case)]
    assert any(case.queries[i] == case.documents[j] for case, (i, j) in found)
    assert any((i, b) in case.positives and case.documents[b] == case.documents[j]
               for case, (i, j) in found for b in range(11))  # fmt: skip
    assert any(len(set(case.queries)) < len(case.queries) for case in cases)


EXPECTED = {
    "a positive text that stands twice": {(0, 1), (1, 0)},
    "a query that stands twice": {(0, 1), (1, 0)},
    "a document equal to a query": {(0, 2)},
    "a hard negative that repeats a positive": {(0, 2), (1, 3)},
    "a positive known by way of the other row": {(0, 1), (0, 2), (1, 0), (1, 2)},
}


@pytest.mark.parametrize("name", MASKED)
def test_the_masked_cells_are_those_written_out_by_hand(name: str) -> None:
    case = CASES[name]
    assert cells(false_negative_mask(case.structure, positive_mask(case.structure))) == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in CASES if name not in MASKED])
def test_without_copies_nothing_is_masked(name: str) -> None:
    case = CASES[name]
    assert cells(false_negative_mask(case.structure, positive_mask(case.structure))) == set()
