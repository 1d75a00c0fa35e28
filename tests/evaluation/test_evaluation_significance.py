"""The interval: known cases, coverage, and the three verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy import stats

from vembed.evaluation.judge import compare, holm, mean_interval, paired_p_value, sum_interval, verdict
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


def test_a_constant_difference_has_an_interval_of_zero_width() -> None:
    before = np.arange(50) / 128  # sums of eighths of a power of two are exact
    comparison = compare(result(before), result(before + 0.125), METRIC)
    assert comparison.low == comparison.high == comparison.difference == 0.125
    assert comparison.candidate - comparison.baseline == 0.125


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


def test_bounds_stay_where_a_mean_of_such_a_metric_can_be() -> None:
    low, high = mean_interval([result([1.0] * 19 + [0.5])], METRIC)
    assert 0.9 < low < 0.975 < high == 1.0
    assert mean_interval([result([0.0] * 19 + [0.5])], METRIC)[0] == 0.0
    low, high = mean_interval([result([100.0] * 19 + [50.0])], METRIC)  # a metric of another range
    assert low < 97.5 < 100 < high


def test_the_interval_agrees_with_the_normal_one_for_many_queries() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.uniform(size=400), rng.uniform(size=400)
    comparison = compare(result(before), result(after), METRIC)
    error = float(np.std(after - before)) / 20
    assert comparison.low == pytest.approx(comparison.difference - 1.96 * error, abs=0.06 * error)
    assert comparison.high == pytest.approx(comparison.difference + 1.96 * error, abs=0.06 * error)


def test_symmetric_noise_is_within_noise() -> None:
    before = np.full(100, 0.5)
    after = before + np.where(np.arange(100) % 2, 0.1, -0.1)
    judged = verdict(result(before), result(after), METRIC)
    assert judged.comparison.low < 0 < judged.comparison.high
    assert judged.word == "within noise"


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


def test_pairing_takes_the_difficulty_of_the_queries_out() -> None:
    before = np.linspace(0, 0.9, 100)
    after = before + np.random.default_rng(0).normal(0.03, 0.02, size=100)
    comparison = compare(result(before), result(after), METRIC)
    low, high = mean_interval([result(after)], METRIC)
    assert comparison.high - comparison.low < 0.2 * (high - low)
    assert verdict(result(before), result(after), METRIC).word == "improved"


def test_the_interval_of_a_mean_holds_it_and_narrows_with_more_queries() -> None:
    values = np.random.default_rng(0).uniform(size=1600)
    widths = []
    for count in (100, 1600):
        low, high = mean_interval([result(values[:count])], METRIC)
        assert low < values[:count].mean() < high
        widths.append(high - low)
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.15)


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


def test_the_sentence_gives_means_difference_interval_and_queries() -> None:
    judged = verdict(result([0.25] * 64), result([0.5] * 64), METRIC)
    assert judged.sentence == ("improved: ndcg@10 0.250 -> 0.500 (+0.250, 95% interval +0.250 to +0.250, 64 queries)")
    down = verdict(result([0.5] * 64), result([0.25] * 64), METRIC, confidence=0.995)
    assert down.sentence == "worse: ndcg@10 0.500 -> 0.250 (-0.250, 99.5% interval -0.250 to -0.250, 64 queries)"
    same = verdict(result([0.5] * 64), result([0.5] * 64), METRIC)
    assert same.sentence == "within noise: ndcg@10 0.500 -> 0.500 (+0.000, 95% interval +0.000 to +0.000, 64 queries)"


def test_a_difference_that_rounds_to_zero_has_no_minus_sign() -> None:
    judged = verdict(result([0.5] * 4), result([0.5, 0.5, 0.5, 0.5 - 2**-14]), METRIC)
    assert judged.comparison.low < judged.comparison.difference < 0 < judged.comparison.high
    assert judged.sentence == "within noise: ndcg@10 0.500 -> 0.500 (+0.000, 95% interval +0.000 to +0.000, 4 queries)"


def test_a_small_sure_improvement_is_not_shown_as_zero() -> None:
    judged = verdict(result([0.5] * 8), result([0.5 + 2**-13] * 8), METRIC)
    assert judged.sentence == (
        "improved: ndcg@10 0.5000 -> 0.5001 (+0.0001, 95% interval +0.0001 to +0.0001, 8 queries)"
    )


def test_one_query_is_within_noise_and_says_why() -> None:
    judged = verdict(result([0.25]), result([0.75]), METRIC)
    assert judged.word == "within noise"
    assert judged.sentence == ("within noise: ndcg@10 0.250 -> 0.750 (+0.500, 1 query: too few for an interval)")
    assert verdict(result([0.25] * 2), result([0.75] * 2), METRIC).word == "improved"


def test_different_queries_are_refused_and_named() -> None:
    with pytest.raises(ValueError, match=r"1 \(q0000\) only in the first, 1 \(q0005\) only in the second"):
        compare(result([0.5] * 5), result([0.5] * 5, first_id=1), METRIC)
    with pytest.raises(
        ValueError, match=r"none only in the first, 5 \(q0005, q0006, q0007, \.\.\.\) only in the second"
    ):
        verdict(result([0.5] * 5), result([0.5] * 10), METRIC)
    compare(result([0.5] * 5), result([0.5] * 5), METRIC)


def test_a_missing_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"BM25 on task has no metric 'ndcg@7'; it has: ndcg@10\."):
        compare(result([0.5], system="BM25"), result([0.5]), "ndcg@7")


def test_no_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        mean_interval([result([])], METRIC)


@pytest.mark.parametrize("wrong", [0.0, 1.0, 95.0])
def test_an_impossible_confidence_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="a share between 0 and 1"):
        compare(result([0.5, 0.6]), result([0.5, 0.6]), METRIC, confidence=wrong)


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
