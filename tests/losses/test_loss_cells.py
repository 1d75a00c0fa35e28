"""The cells listed tile by tile are those of the masks, each once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loss_cases import CASES, LossCase, masked_cells, plain
from streamed_cases import random_case

from vembed.losses import cells as cells_module
from vembed.losses.cells import CellMap, false_negative_mask, positive_mask


def listed(case: LossCase, rows: range, *, height: int, width: int, mask: bool) -> tuple[list, list, CellMap]:
    """Return positives and other excluded cells as (query, document), by way of the tiles."""
    cells = CellMap(case.structure, rows, mask_false_negatives=mask)
    positives, excluded, seen = [], [], np.zeros((len(rows), len(case.documents)), dtype=int)
    for start in range(0, len(rows), height):
        for tile in cells.strip(start, min(start + height, len(rows)), width):
            seen[tile.rows, tile.columns] += 1
            across = tile.shape[1]

            def place(cell: int, tile: cells_module.Tile = tile, across: int = across) -> tuple[int, int]:
                return rows.start + tile.rows.start + cell // across, tile.columns.start + cell % across

            for pair, cell in zip(tile.pairs.tolist(), tile.pair_cells.tolist(), strict=True):
                assert place(cell) == (rows.start + int(cells.pair_rows[pair]), int(cells.pair_columns[pair]))
                positives.append(place(cell))
            excluded += [place(cell) for cell in tile.excluded.tolist()]
    assert (seen == 1).all(), "the tiles cover the matrix once"
    return positives, excluded, cells


@pytest.mark.parametrize("at_once", [0, cells_module.MOST_CELLS_AT_ONCE])
@pytest.mark.parametrize("mask", [True, False])
def test_the_cells_of_all_tiles_equal_brute_force(mask: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "MOST_CELLS_AT_ONCE", at_once)
    cases = [*CASES.values(), *(random_case(seed, num_queries=7, num_documents=12) for seed in range(10))]
    for case in cases:
        wanted = set(case.positives) | (masked_cells(case) if mask else set())
        for height, width in ((1, 1), (2, 5), (100, 3), (100, 100)):
            rows = range(len(case.queries))
            positives, excluded, _ = listed(case, rows, height=height, width=width, mask=mask)
            assert sorted(positives) == sorted(set(case.positives))
            assert len(excluded) == len(set(excluded))
            assert set(excluded) == wanted


def test_a_rank_sees_its_own_rows_with_what_all_ranks_know() -> None:
    case = LossCase(("same", "q", "same"), ("a", "b", "c"), ((0, 0), (1, 1), (2, 2)))
    positives, excluded, cells = listed(case, range(2, 3), height=4, width=2, mask=True)
    assert positives == [(2, 2)]
    assert set(excluded) == {(2, 2), (2, 0)}, "the positive of the same query on another rank is no negative"
    assert (cells.num_rows, cells.num_columns) == (1, 3)


def test_a_pair_that_is_named_twice_counts_once() -> None:
    case = LossCase(("q0", "q1"), ("a", "b"), ((1, 1), (0, 0), (1, 1)))
    positives, _, _ = listed(case, range(2), height=2, width=2, mask=True)
    assert positives == [(0, 0), (1, 1)]


def test_one_text_everywhere_masks_everything_in_the_memory_of_a_tile() -> None:
    size = 3000  # 9 million cells: 72 MB as indices
    case = LossCase(("q",) * size, ("a",) * size, tuple((i, i) for i in range(size)))
    cells = CellMap(case.structure, range(size), mask_false_negatives=True)
    assert 500 * size > cells_module.MOST_CELLS_AT_ONCE
    for tile in cells.strip(0, 500, 400):
        assert sorted(tile.excluded.tolist()) == list(range(tile.shape[0] * tile.shape[1]))


def test_a_batch_without_repeats_lists_one_cell_for_each_pair() -> None:
    case = plain(200, 300)
    cells = CellMap(case.structure, range(200), mask_false_negatives=True)
    tiles = [tile for start in range(0, 200, 64) for tile in cells.strip(start, min(start + 64, 200), 64)]
    assert sum(len(tile.excluded) for tile in tiles) == sum(len(tile.pairs) for tile in tiles) == 200
    assert all(tile.excluded.dtype == torch.int64 for tile in tiles)


def cells_of(mask_QD: torch.Tensor) -> set[tuple[int, int]]:
    assert mask_QD.dtype == torch.bool
    return {(int(i), int(j)) for i, j in mask_QD.nonzero()}


def test_masks_equal_brute_force_which_knows_every_kind_of_false_negative() -> None:
    cases = [*CASES.values(), *(random_case(seed) for seed in range(30))]
    for case in cases:
        positive_QD = positive_mask(case.structure)
        assert cells_of(positive_QD) == set(case.positives)
        assert cells_of(false_negative_mask(case.structure, positive_QD)) == masked_cells(case)
    found = [(case, i, j) for case in cases for i, j in masked_cells(case)]
    assert any(case.queries[i] == case.documents[j] for case, i, j in found)
    assert any((i, b) in case.positives and case.documents[b] == case.documents[j]
               for case, i, j in found for b in range(len(case.documents)))  # fmt: skip


EXPECTED = {
    "a positive text that stands twice": {(0, 1), (1, 0)},
    "a query that stands twice": {(0, 1), (1, 0)},
    "a document equal to a query": {(0, 2)},
    "a hard negative that repeats a positive": {(0, 2), (1, 3)},
    "a positive known by way of the other row": {(0, 1), (0, 2), (1, 0), (1, 2)},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_masked_cells_are_those_written_out_by_hand(name: str) -> None:
    assert masked_cells(CASES[name]) == EXPECTED[name]
