"""Rows are dealt alike on every rank: each once, counts within one, costs balanced, every modality apart."""

import numpy as np
import pytest

from vembed.batch import Composed, Image
from vembed.training.batches import assign_rows, estimated_costs


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [(40,), (7, 5), (1, 1), (3, 0, 64)])
def test_every_row_is_dealt_once_and_counts_differ_by_one_at_most(sizes: tuple[int, ...], world_size: int) -> None:
    rows = np.random.default_rng(0).permutation(sum(sizes))
    groups = [np.sort(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]
    assignment = assign_rows(groups, np.random.default_rng(1).integers(1, 100, len(rows)), world_size)
    assert sorted(assignment.rank_order.tolist()) == list(range(len(rows)))
    assert all((np.diff(own) > 0).all() for own in assignment.slots)
    assert max(assignment.counts) - min(assignment.counts) <= 1
    for group in groups:
        counts = [np.isin(own, group).sum() for own in assignment.slots]
        assert max(counts) - min(counts) <= 1


def test_long_rows_are_spread_so_that_no_rank_waits_for_another() -> None:
    costs = np.minimum(np.random.default_rng(0).lognormal(5, 1.0, 512), 1024).astype(np.int64)
    assignment = assign_rows([np.arange(512)], costs, 8)
    shares = np.array([costs[own].sum() for own in assignment.slots])
    in_order = np.array([part.sum() for part in np.split(costs, 8)])
    assert shares.max() / shares.mean() < 1.03
    assert in_order.max() / in_order.mean() > 1.15, "dealt in the order of the data they would not be"


def test_a_text_costs_as_far_as_it_is_read_and_pictures_cost_alike() -> None:
    assert estimated_costs(["ab", "x" * 1000], max_length=8).tolist() == [2, 32]
    assert estimated_costs(["ab", "x" * 1000], max_length=None).tolist() == [2, 1000]
    pictures = [Image("a.png"), Image("b.png")]
    assert len(set(estimated_costs(pictures, max_length=8).tolist())) == 1
    assert estimated_costs([Composed((pictures[0],), "red")], max_length=8).tolist() == [3]
