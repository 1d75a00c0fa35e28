"""The interval over seeds and queries: its formula, what it does at its ends, and how often it holds the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vembed.evaluation.judge import seeds_interval, seeds_verdict
from vembed.evaluation.results import EvaluationResult

METRIC = "ndcg@10"


def differences(source: np.random.Generator, *, seeds: int, queries: int, of_seeds: float) -> np.ndarray:
    """Draw a table whose mean is 0.02: seeds and queries have effects of their own, and each cell another."""
    effects = of_seeds * source.standard_normal((seeds, 1)) + 0.15 * source.standard_normal((1, queries))
    return 0.02 + effects + 0.08 * source.standard_normal((seeds, queries))


def evaluated(values: np.ndarray, task: str = "set/test") -> EvaluationResult:
    per_query = {f"q{place}": float(value) for place, value in enumerate(values)}
    run = {query: [("d", 1.0)] for query in per_query}
    return EvaluationResult(task, "m", {METRIC: float(values.mean())}, {METRIC: per_query}, run, len(per_query), 1)


def test_it_is_that_of_two_crossed_random_effects() -> None:
    table = differences(np.random.default_rng(0), seeds=4, queries=30, of_seeds=0.1)
    num_seeds, num_queries = table.shape
    of_seeds = num_queries * table.mean(1).var(ddof=1)
    of_queries = num_seeds * table.mean(0).var(ddof=1)
    left = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    of_rest = (left**2).sum() / ((num_seeds - 1) * (num_queries - 1))
    total = of_seeds + of_queries - of_rest
    freedom = total**2 / (
        of_seeds**2 / (num_seeds - 1)
        + of_queries**2 / (num_queries - 1)
        - of_rest**2 / ((num_seeds - 1) * (num_queries - 1))
    )
    reach = stats.t.ppf(0.975, freedom) * (total / table.size) ** 0.5
    low, high = seeds_interval([table])
    assert (high - low) / 2 == pytest.approx(reach, rel=0.02)
    assert (high + low) / 2 == pytest.approx(table.mean())


def test_seeds_that_agree_leave_the_interval_over_queries() -> None:
    one = differences(np.random.default_rng(1), seeds=1, queries=50, of_seeds=0.0)
    low, high = seeds_interval([np.repeat(one, 3, axis=0)])
    reach = stats.t.ppf(0.975, 49) * one.std(ddof=1) / 50**0.5
    assert (high - low) / 2 == pytest.approx(reach, abs=1e-9)


def test_seeds_that_differ_widen_it_far_beyond_the_queries() -> None:
    table = differences(np.random.default_rng(2), seeds=3, queries=500, of_seeds=0.0)
    apart = table + np.array([[-0.05], [0.0], [0.05]])
    narrow, wide = (high - low for low, high in (seeds_interval([table]), seeds_interval([apart])))
    assert wide > 5 * narrow


def test_queries_and_seeds_without_any_difference_make_a_point() -> None:
    assert seeds_interval([np.full((3, 10), 0.25)]) == (0.25, 0.25)


@pytest.mark.parametrize(("seeds", "of_seeds"), [(3, 0.0), (3, 0.01), (3, 0.03), (5, 0.02)])
def test_it_holds_the_truth_about_as_often_as_it_says(seeds: int, of_seeds: float) -> None:
    source = np.random.default_rng(7)
    held = 0
    for _ in range(600):
        low, high = seeds_interval([differences(source, seeds=seeds, queries=100, of_seeds=of_seeds)])
        held += low <= 0.02 <= high
    assert 0.91 <= held / 600 <= 0.985


def test_an_interval_over_queries_alone_would_be_wrong() -> None:
    """The guard of the test above: with seeds that differ, the mean over seeds as one system holds it too rarely."""
    source = np.random.default_rng(7)
    held = 0
    for _ in range(600):
        means = differences(source, seeds=3, queries=400, of_seeds=0.03).mean(axis=0)
        reach = stats.t.ppf(0.975, 399) * means.std(ddof=1) / 400**0.5
        held += abs(means.mean() - 0.02) <= reach
    assert held / 600 < 0.7


def test_a_verdict_tells_seeds_and_queries() -> None:
    source = np.random.default_rng(3)
    before = source.uniform(0.2, 0.4, (3, 60))
    after = before + 0.1 + 0.02 * source.standard_normal((3, 60))
    found = seeds_verdict([[(evaluated(one), evaluated(two))] for one, two in zip(before, after, strict=True)], METRIC)
    assert found.verdict.word == "improved"
    assert found.verdict.sentence.endswith("60 queries, 3 seeds)")
    assert found.finals == pytest.approx(tuple(after.mean(axis=1)))
    assert found.spread == pytest.approx(after.mean(axis=1).std(ddof=1))


def test_several_sets_count_the_same_whatever_their_size() -> None:
    zero, half = np.zeros((3, 10)), np.full((3, 90), 0.5)
    runs = [
        [(evaluated(zero[s]), evaluated(zero[s])), (evaluated(zero[s], "b"), evaluated(half[s][:10], "b"))]
        for s in range(3)
    ]
    found = seeds_verdict(runs, METRIC).verdict.comparison
    assert found.difference == pytest.approx(0.25)
    assert found.metric == "mean ndcg@10 of 2 sets"


def test_other_queries_and_a_single_seed_are_refused() -> None:
    one, two = evaluated(np.zeros(3)), evaluated(np.zeros(4))
    with pytest.raises(ValueError, match="different queries"):
        seeds_verdict([[(one, one)], [(two, two)]], METRIC)
    with pytest.raises(ValueError, match="at least 2"):
        seeds_verdict([[(one, one)]], METRIC)
