"""Verdicts: intervals and p-values of known cases, how often they hold the truth, and the same over several seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy import stats

from vembed.evaluation.judge import (
    compare,
    holm,
    mean_interval,
    mean_verdict,
    paired_p_value,
    seeds_interval,
    seeds_verdict,
    sum_interval,
    verdict,
)
from vembed.evaluation.results import EvaluationResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


METRIC = "ndcg@10"


def result(
    values: Sequence[float] | NDArray[np.float64], *, system: str = "model", first_id: int = 0
) -> EvaluationResult:
    per_query = {f"q{number:04}": float(value) for number, value in enumerate(values, start=first_id)}
    return EvaluationResult(
        task="task",
        system=system,
        metrics={METRIC: float(np.mean(values))} if len(values) else {},
        per_query={METRIC: per_query},
        run={},
        num_queries=len(per_query),
        num_documents=1,
    )


def test_the_interval_of_two_queries_is_the_one_worked_out_by_hand() -> None:
    # Differences 0 and 1: mean 1/2, standard error 1/2. With one degree of freedom, t is tan(pi * confidence / 2).
    before, after = result([0, 0]), result([0, 1])
    wide = compare(before, after, METRIC, confidence=0.95)
    narrow = compare(before, after, METRIC, confidence=0.5)
    assert (wide.low, wide.high) == pytest.approx((0.5 - 6.353102, 0.5 + 6.353102), abs=1e-6)
    assert (narrow.low, narrow.high) == pytest.approx((0.0, 1.0), abs=1e-12)  # tan(pi / 4) is 1


def test_the_interval_of_a_mean_is_that_of_a_table() -> None:
    # 0, 2, .., 20 hundredths: mean 0.1, variance 0.0044, 10 degrees of freedom, t of tables 2.228139.
    low, high = mean_interval([result(np.arange(11) / 50)], METRIC)
    reach = 2.228139 * (0.0044 / 11) ** 0.5
    assert (low, high) == pytest.approx((0.1 - reach, 0.1 + reach), abs=1e-7)


def test_a_sum_over_sets_has_the_degrees_of_freedom_of_welch() -> None:
    # Both sets: variance of the mean 1/6 / 4 = 1/24; together 1/12, and 2 * 3 = 6 degrees: t of tables 2.446912.
    sets = [result([0.5, 0.5, 0.0, 1.0]), result([0.0, 0.5, 1.0, 0.5])]
    assert sum_interval(sets, [METRIC]) == pytest.approx((1 - 2.446912 / 12**0.5, 1 + 2.446912 / 12**0.5), abs=1e-6)
    total = sum_interval(sets, [METRIC])
    assert mean_interval(sets, METRIC) == pytest.approx([bound / 2 for bound in total])


def test_bounds_stay_where_a_mean_of_such_a_metric_can_be() -> None:
    low, high = mean_interval([result([1.0] * 19 + [0.5])], METRIC)
    assert 0.9 < low < 0.975 < high == 1.0
    assert mean_interval([result([0.0] * 19 + [0.5])], METRIC)[0] == 0.0
    low, high = mean_interval([result([100.0] * 19 + [50.0])], METRIC)  # a metric of another range
    assert low < 97.5 < 100 < high


SIMULATIONS = 1000


def simulated(
    kind: str, count: int, *, simulations: int = SIMULATIONS, is_null: bool = False
) -> tuple[NDArray[np.float64], float]:
    """Draw two systems' values by query many times, as retrieval has them; return their differences (S, Q).

    The true mean difference, returned too, follows from the probabilities. With `is_null` the two systems are alike.
    """
    rng = np.random.default_rng([count, *kind.encode()])
    shape = (simulations, count)
    if kind == "hits":  # recall@1: a tenth of the queries change, of those that a hit may be lost and a miss mended
        gain, loss = (0.06, 0.06) if is_null else (0.08, 0.04)
        drawn = rng.random(shape)
        return (drawn < gain).astype(float) - (drawn > 1 - loss), gain - loss
    if kind == "ranks":  # reciprocal ranks: 60% of the queries are tied
        values = np.array([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 10, 0])
        before = np.array([0.30, 0.15, 0.10, 0.05, 0.05, 0.05, 0.30])
        after = before if is_null else np.array([0.36, 0.16, 0.10, 0.05, 0.05, 0.05, 0.23])
        drawn = [rng.choice(values, p=p, size=shape) for p in (before, after)]
        return np.where(rng.random(shape) < 0.6, 0.0, drawn[1] - drawn[0]), 0.4 * float((after - before) @ values)
    # ndcg: skewed values in 0..1, a quarter zeros, half of the queries tied
    one, other = (rng.beta(0.6, b, size=shape) * (rng.random(shape) > 0.25) for b in (0.8, 0.8 if is_null else 0.7))
    true = 0.0 if is_null else 0.5 * 0.75 * (0.6 / 1.3 - 0.6 / 1.4)
    return np.where(rng.random(shape) < 0.5, 0.0, other - one), true


KINDS = ("ndcg", "ranks", "hits")


@pytest.mark.parametrize("count", [50, 200, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interval_of_95_percent_holds_the_truth_in_93_to_97_percent(kind: str, count: int) -> None:
    differences_SQ, true = simulated(kind, count)
    assert differences_SQ.mean() == pytest.approx(true, abs=5e-3)
    before = result(np.zeros(count))
    found = [compare(before, result(differences_Q), METRIC) for differences_Q in differences_SQ]
    held = sum(each.low <= true <= each.high for each in found)
    assert 0.93 * SIMULATIONS <= held <= 0.97 * SIMULATIONS


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_paired_test_rejects_a_true_null_in_3_to_6_percent(kind: str, count: int) -> None:
    """Fewer where values are 0 and 1 alone, and few queries change."""
    differences_SQ, _ = simulated(kind, count, simulations=3 * SIMULATIONS, is_null=True)
    before = result(np.zeros(count))
    p_values = [paired_p_value([(before, result(differences_Q))], METRIC) for differences_Q in differences_SQ]
    assert 0.03 <= np.mean(np.array(p_values) < 0.05) <= 0.06


def test_the_order_of_the_queries_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    before, after = result(rng.uniform(size=30)), result(rng.uniform(size=30))
    shuffled = dict(reversed(list(after.per_query[METRIC].items())))
    other = EvaluationResult("task", "model", after.metrics, {METRIC: shuffled}, {}, 30, 1)
    assert compare(before, other, METRIC) == compare(before, after, METRIC)


def test_rounding_errors_are_not_an_improvement() -> None:
    before, after = [0.3] * 50, [0.1 + 0.2] * 50
    assert after[0] - before[0] > 0
    comparison = compare(result(before), result(after), METRIC)
    assert comparison.low == comparison.difference == comparison.high == 0


@pytest.mark.parametrize(("shift", "word"), [(0.05, "improved"), (-0.05, "worse"), (0.0, "within noise")])
def test_the_verdict_follows_the_interval(shift: float, word: str) -> None:
    before = np.linspace(0.1, 0.9, 200)
    after = before + np.random.default_rng(0).permutation(np.linspace(-0.1, 0.1, 200)) + shift
    judged = verdict(result(before), result(after), METRIC)
    assert judged.word == word
    assert judged.sentence.startswith(f"{word}: {METRIC} 0.500 -> ")


@pytest.mark.parametrize(
    ("before", "after", "confidence", "sentence"),
    [
        ([0.25] * 64, [0.5] * 64, 0.95, "improved: 0.250 -> 0.500 (+0.250, 95% interval +0.250 to +0.250, 64 queries)"),
        ([0.5] * 64, [0.25] * 64, 0.995, "worse: 0.500 -> 0.250 (-0.250, 99.5% interval -0.250 to -0.250, 64 queries)"),
        ([0.5] * 4, [0.5] * 3 + [0.5 - 2**-14], 0.95,
         "within noise: 0.500 -> 0.500 (+0.000, 95% interval +0.000 to +0.000, 4 queries)"),
        ([0.5] * 8, [0.5 + 2**-13] * 8, 0.95,
         "improved: 0.5000 -> 0.5001 (+0.0001, 95% interval +0.0001 to +0.0001, 8 queries)"),
        ([0.25], [0.75], 0.95, "within noise: 0.250 -> 0.750 (+0.500, 1 query: too few for an interval)"),
    ],
    ids=["better", "another confidence", "no minus zero", "small and sure", "one query"],
)  # fmt: skip
def test_the_sentence_gives_means_difference_interval_and_queries(
    before: list[float], after: list[float], confidence: float, sentence: str
) -> None:
    judged = verdict(result(before), result(after), METRIC, confidence=confidence)
    assert judged.sentence == sentence.replace(": 0", f": {METRIC} 0", 1)


def test_what_cannot_be_compared_is_refused_and_named() -> None:
    five, ten = result([0.5] * 5), result([0.5] * 10)
    compare(five, five, METRIC)
    for call, named in (
        (lambda: compare(five, result([0.5] * 5, first_id=1), METRIC), r"1 \(q0000\).*1 \(q0005\)"),
        (lambda: verdict(five, ten, METRIC), r"5 \(q0005, q0006, q0007, \.\.\.\)"),
        (lambda: compare(five, five, "ndcg@7"), "'ndcg@7'.* ndcg@10"),
        (lambda: mean_interval([result([])], METRIC), "nothing to compare"),
        (lambda: mean_interval([], METRIC), "no result"),
        *((lambda wrong=wrong: compare(five, five, METRIC, confidence=wrong), "share") for wrong in (0.0, 1.0, 95.0)),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_holm_gives_the_numbers_of_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_the_paired_p_value_is_scipys_and_agrees_with_the_interval() -> None:
    rng = np.random.default_rng(0)
    words = set()
    for _ in range(60):
        before = rng.uniform(0, 1, 12)
        after = before + rng.normal(0.12, 0.2, 12)
        p_value_here = paired_p_value([(result(before), result(after))], METRIC)
        assert p_value_here == pytest.approx(stats.ttest_rel(after, before).pvalue)
        found = verdict(result(before), result(after), METRIC)
        assert (p_value_here < 0.05) == (found.word != "within noise")
        words.add(found.word)
    assert words >= {"improved", "within noise"}


def test_queries_that_dont_vary_have_a_p_value_of_0_or_1() -> None:
    before = np.arange(8) / 16
    assert paired_p_value([(result(before), result(before))], METRIC) == 1.0
    assert paired_p_value([(result(before), result(before + 0.125))], METRIC) == 0.0
    assert paired_p_value([(result([0.1]), result([0.9]))], METRIC) == 1.0


# --- several seeds


def differences(source: np.random.Generator, *, seeds: int, queries: int, of_seeds: float) -> np.ndarray:
    """Draw a table whose mean is 0.02: seeds and queries have effects of their own, and each cell another."""
    effects = of_seeds * source.standard_normal((seeds, 1)) + 0.15 * source.standard_normal((1, queries))
    return 0.02 + effects + 0.08 * source.standard_normal((seeds, queries))


def evaluated(values: np.ndarray, task: str = "set/test") -> EvaluationResult:
    per_query = {f"q{place}": float(value) for place, value in enumerate(values)}
    run = {query: [("d", 1.0)] for query in per_query}
    return EvaluationResult(task, "m", {METRIC: float(values.mean())}, {METRIC: per_query}, run, len(per_query), 1)


def test_the_interval_over_seeds_is_that_of_two_crossed_random_effects() -> None:
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
    assert seeds_interval([np.full((3, 10), 0.25)]) == (0.25, 0.25), "nothing varies: a point"


@pytest.mark.parametrize(("seeds", "of_seeds"), [(3, 0.0), (3, 0.01), (3, 0.03), (5, 0.02)])
def test_the_interval_over_seeds_holds_the_truth_about_as_often_as_it_says(seeds: int, of_seeds: float) -> None:
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


@pytest.mark.parametrize("others", [1, 30])
def test_a_set_of_one_query_leaves_several_seeds_within_noise_as_it_does_one(others: int) -> None:
    run = [
        (evaluated(np.zeros(count)), evaluated(np.linspace(0.09, 0.11, count + 2)[1:-1], "b")) for count in (1, others)
    ]
    assert mean_verdict(run, METRIC).word == "within noise"
    assert seeds_verdict([run] * 3, METRIC).verdict.word == "within noise"
    assert seeds_verdict([run[1:]] * 3, METRIC).verdict.word == ("improved" if others > 1 else "within noise")


def test_other_queries_and_a_single_seed_are_refused() -> None:
    one, two = evaluated(np.zeros(3)), evaluated(np.zeros(4))
    with pytest.raises(ValueError, match="different queries"):
        seeds_verdict([[(one, one)], [(two, two)]], METRIC)
    with pytest.raises(ValueError, match="at least 2"):
        seeds_verdict([[(one, one)]], METRIC)
