"""The bootstrap: known cases, coverage, and the three verdicts."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vembed.evaluation import significance
from vembed.evaluation.result import EvaluationResult
from vembed.evaluation.significance import bootstrap_interval, paired_bootstrap, verdict

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
    comparison = paired_bootstrap(result(before), result(before + 0.125), METRIC)
    assert comparison.low == comparison.high == comparison.difference == 0.125
    assert comparison.candidate - comparison.baseline == 0.125


def test_the_interval_of_two_queries_is_the_one_worked_out_by_hand() -> None:
    # Differences 0 and 1: a resample has mean 0, 1/2 or 1 with probability 1/4, 1/2 and 1/4.
    before, after = result([0, 0]), result([0, 1])
    wide = paired_bootstrap(before, after, METRIC, confidence=0.95)
    narrow = paired_bootstrap(before, after, METRIC, confidence=0.4)
    assert (wide.low, wide.high) == (0.0, 1.0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_the_interval_agrees_with_the_normal_one_for_many_queries() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.uniform(size=400), rng.uniform(size=400)
    comparison = paired_bootstrap(result(before), result(after), METRIC)
    error = float(np.std(after - before)) / 20
    assert comparison.low == pytest.approx(comparison.difference - 1.96 * error, abs=0.06 * error)
    assert comparison.high == pytest.approx(comparison.difference + 1.96 * error, abs=0.06 * error)


def test_symmetric_noise_is_within_noise() -> None:
    before = np.full(100, 0.5)
    after = before + np.where(np.arange(100) % 2, 0.1, -0.1)
    judged = verdict(result(before), result(after), METRIC)
    assert judged.comparison.low < 0 < judged.comparison.high
    assert judged.word == "within noise"


def test_an_interval_of_95_percent_holds_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    true_difference = 0.1
    held = 0
    for trial in range(300):
        before = rng.uniform(size=60)
        after = before + rng.normal(true_difference, 0.3, size=60)
        comparison = paired_bootstrap(result(before), result(after), METRIC, samples=500, seed=trial)
        held += comparison.low <= true_difference <= comparison.high
    assert 0.90 < held / 300 < 0.98


def test_pairing_takes_the_difficulty_of_the_queries_out() -> None:
    before = np.linspace(0, 0.9, 100)
    after = before + np.random.default_rng(0).normal(0.03, 0.02, size=100)
    comparison = paired_bootstrap(result(before), result(after), METRIC)
    low, high = bootstrap_interval(result(after), METRIC)
    assert comparison.high - comparison.low < 0.2 * (high - low)
    assert verdict(result(before), result(after), METRIC).word == "improved"


def test_the_interval_of_a_mean_holds_it_and_narrows_with_more_queries() -> None:
    values = np.random.default_rng(0).uniform(size=1600)
    widths = []
    for count in (100, 1600):
        low, high = bootstrap_interval(result(values[:count]), METRIC)
        assert low < values[:count].mean() < high
        widths.append(high - low)
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.15)


def test_the_same_seed_gives_the_same_interval_whatever_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).uniform(size=37)
    whole = bootstrap_interval(result(values), METRIC, samples=1000)
    monkeypatch.setattr(significance, "SLICE_DRAWS", 100)  # two resamples at a time
    assert bootstrap_interval(result(values), METRIC, samples=1000) == whole
    assert bootstrap_interval(result(values), METRIC, samples=1000, seed=1) != whole


def test_slices_bound_the_memory() -> None:
    """All draws at once would take 2000 * 4000 * 16 bytes = 128 MB."""
    model = result(np.zeros(2000))
    tracemalloc.start()
    try:
        bootstrap_interval(model, METRIC, samples=4000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1e7 < peak_bytes < 3e7  # above zero: NumPy's arrays are seen


def test_the_order_of_the_queries_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    before, after = result(rng.uniform(size=30)), result(rng.uniform(size=30))
    shuffled = dict(reversed(list(after.per_query[METRIC].items())))
    other = EvaluationResult("task", "model", after.metrics, {METRIC: shuffled}, {}, 30, 1)
    assert paired_bootstrap(before, other, METRIC) == paired_bootstrap(before, after, METRIC)


def test_rounding_errors_are_not_an_improvement() -> None:
    before, after = [0.4, 0.4] * 50, [0.5, 0.3] * 50
    assert (0.5 - 0.4) + (0.3 - 0.4) != 0
    comparison = paired_bootstrap(result(before), result(after), METRIC, confidence=0.001)
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
    assert judged.comparison.low < judged.comparison.difference < 0 == judged.comparison.high
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
        paired_bootstrap(result([0.5] * 5), result([0.5] * 5, first_id=1), METRIC)
    with pytest.raises(
        ValueError, match=r"none only in the first, 5 \(q0005, q0006, q0007, \.\.\.\) only in the second"
    ):
        verdict(result([0.5] * 5), result([0.5] * 10), METRIC)
    paired_bootstrap(result([0.5] * 5), result([0.5] * 5), METRIC)


def test_a_missing_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"BM25 on task has no metric 'ndcg@7'; it has: ndcg@10\."):
        paired_bootstrap(result([0.5], system="BM25"), result([0.5]), "ndcg@7")


def test_no_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        bootstrap_interval(result([]), METRIC)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"confidence": 1.0}, {"confidence": 95.0}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        bootstrap_interval(result([0.5, 0.6]), METRIC, **wrong)  # type: ignore[arg-type]
    bootstrap_interval(result([0.5, 0.6]), METRIC, samples=1, confidence=0.99)
