"""Say whether one system retrieves better than another, or whether the difference is noise.

1. Pair the two systems' values of one metric by query, and take the differences.
2. Draw as many queries as there are, with replacement, many times over; each draw has a mean difference.
3. The interval is what remains of those means after cutting off both tails.
4. Improved when the whole interval lies above zero, worse when it lies below, within noise otherwise.

Pairing matters: queries differ far more in difficulty than systems do in quality, and that part cancels. The interval
speaks of other queries of the same kind; it knows nothing of other training seeds. With few queries (under about 20)
the percentile interval is too narrow.
Shape legend: S resamples, Q queries, C columns of values that are resampled together.
Source: Efron & Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 (percentile interval); Sakai, Evaluating
Evaluation Metrics based on the Bootstrap (SIGIR 2006), for retrieval metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from vembed.evaluation.result import EvaluationResult

SLICE_DRAWS = 1 << 20
"""Query draws held in memory at a time: 8 MB of indices and 8 MB of counts, however many resamples."""

FLOAT_NOISE_DECIMALS = 12
"""Decimals that bounds are rounded to: a sum of differences that cancel leaves 1e-17, which is not an improvement."""

SAMPLES = 10_000
"""Resamples where a caller doesn't say."""

CONFIDENCE = 0.95

VerdictWord: TypeAlias = Literal["improved", "within noise", "worse"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference of two systems in one metric, over the same queries."""

    metric: str  # name of the metric, e.g. "ndcg@10"
    baseline: float  # mean of the baseline
    candidate: float  # mean of the candidate
    difference: float  # mean of candidate minus baseline
    low: float  # lower bound of the interval of the difference
    high: float  # upper bound of the interval of the difference
    num_queries: int  # queries that were paired
    confidence: float  # share of resamples inside the interval, e.g. 0.95


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison put into one word and one sentence."""

    word: VerdictWord  # "improved", "within noise" or "worse"
    comparison: Comparison  # the numbers behind it
    sentence: str  # the line that ends a run


def verdict(
    baseline: EvaluationResult,
    candidate: EvaluationResult,
    metric: str,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Judge whether the candidate is better than the baseline.

    One query is always within noise: its resamples are all alike, so that the interval is a point and says nothing.

    Args:
        candidate: What is there now, evaluated on the same queries.
        confidence: Share of resamples inside the interval, between 0 and 1.

    Returns:
        "improved" when the whole interval is above zero, "worse" when it is below, else "within noise".

    Raises:
        ValueError: The query sets differ, or the metric is missing.
    """
    return _judged(paired_bootstrap(baseline, candidate, metric, samples=samples, seed=seed, confidence=confidence))


def verdicts(
    baseline: EvaluationResult, candidate: EvaluationResult, metrics: Sequence[str], *, seed: int = 0
) -> dict[str, Verdict]:
    """Judge many metrics at once: the draws of queries are made once and serve all of them.

    Returns:
        Metric -> what `verdict` says of it.

    Raises:
        ValueError: The query sets differ, or a metric is missing.
    """
    found = _paired(baseline, candidate, metrics, samples=SAMPLES, seed=seed, confidence=CONFIDENCE)
    return {comparison.metric: _judged(comparison) for comparison in found}


def paired_bootstrap(
    baseline: EvaluationResult,
    candidate: EvaluationResult,
    metric: str,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compare two systems in one metric with a percentile interval of the mean paired difference.

    Raises:
        ValueError: The query sets differ, or the metric is missing.

    Source:
        Sakai (SIGIR 2006), the paired case.
    """
    (comparison,) = _paired(baseline, candidate, [metric], samples=samples, seed=seed, confidence=confidence)
    return comparison


def _paired(
    baseline: EvaluationResult,
    candidate: EvaluationResult,
    metrics: Sequence[str],
    *,
    samples: int,
    seed: int,
    confidence: float,
) -> list[Comparison]:
    """Compare two systems in some metrics, over the same draws of queries."""
    pairs = [_paired_values(baseline, candidate, metric) for metric in metrics]
    bounds = _percentile_intervals([after_Q - before_Q for before_Q, after_Q in pairs], samples, seed, confidence)
    return [
        Comparison(
            metric=metric,
            baseline=fmean(before_Q),
            candidate=fmean(after_Q),
            difference=round(float((after_Q - before_Q).mean()), FLOAT_NOISE_DECIMALS),
            low=low,
            high=high,
            num_queries=len(before_Q),
            confidence=confidence,
        )
        for metric, (before_Q, after_Q), (low, high) in zip(metrics, pairs, bounds, strict=True)
    ]


def _paired_values(
    baseline: EvaluationResult, candidate: EvaluationResult, metric: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values of both systems, query by query.

    Raises:
        ValueError: The query sets differ, or the metric is missing.
    """
    ids, before_Q = query_values(baseline, metric)
    candidate_ids, after_Q = query_values(candidate, metric)
    if ids != candidate_ids:
        raise ValueError(
            f"{metric} of {baseline.system} and of {candidate.system} are over different queries: "
            f"{_some(set(ids) - set(candidate_ids))} only in the first, "
            f"{_some(set(candidate_ids) - set(ids))} only in the second; evaluate both on the same task."
        )
    return before_Q, after_Q


def bootstrap_interval(
    result: EvaluationResult, metric: str, *, samples: int = SAMPLES, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the percentile interval of one system's mean over other queries of the same kind.

    Intervals of two systems may overlap although one is surely better: compare with `paired_bootstrap`.

    Raises:
        ValueError: The metric is missing.
    """
    _, values_Q = query_values(result, metric)
    (bounds,) = _percentile_intervals([values_Q], samples, seed, confidence)
    return bounds


def bootstrap_intervals(
    result: EvaluationResult, metrics: Sequence[str], *, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return `bootstrap_interval` of many metrics, for the draws of one.

    Raises:
        ValueError: A metric is missing.
    """
    values = [query_values(result, metric)[1] for metric in metrics]
    return dict(zip(metrics, _percentile_intervals(values, SAMPLES, seed, CONFIDENCE), strict=True))


def mean_interval(
    results: Sequence[EvaluationResult],
    metric: str,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """Return the percentile interval of one system's mean over sets, each set counting the same.

    Each resample draws the queries of every set anew; the sets stay, so that the interval speaks of other queries of
    these sets, not of other sets.

    Args:
        seed: Seed of the draws of the first set; the next set takes the next one.

    Returns:
        Lower and upper bound; those of `bootstrap_interval` where there is one set.

    Raises:
        ValueError: There is no result, or the metric is missing.
    """
    if not results:
        raise ValueError("there is no result to take the mean of.")
    means_S = np.zeros(samples, dtype=np.float64)
    for offset, result in enumerate(results):
        _, values_Q = query_values(result, metric)
        means_S += _resampled_means(values_Q[:, None], samples=samples, seed=seed + offset)[:, 0]
    return _bounds(means_S / len(results), confidence=confidence)


def sum_interval(
    results: Sequence[EvaluationResult], metrics: Sequence[str], *, samples: int = SAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95% interval of the sum of some metrics' means over some sets, the queries of each drawn anew.

    Raises:
        ValueError: A metric is missing.
    """
    sums_S = np.zeros(samples, dtype=np.float64)
    for offset, result in enumerate(results):
        values_Q = np.sum([query_values(result, metric)[1] for metric in metrics], axis=0)
        sums_S += _resampled_means(values_Q[:, None], samples=samples, seed=seed + offset)[:, 0]
    return _bounds(sums_S, confidence=CONFIDENCE)


def _percentile_intervals(
    columns: Sequence[NDArray[np.float64]], samples: int, seed: int, confidence: float
) -> list[tuple[float, float]]:
    """Return for each column (Q,) the bounds between which `confidence` of its resampled means lie."""
    if samples < 1:
        raise ValueError(f"samples is {samples}; at least 1 resample is needed, 10000 is usual.")
    if not columns:
        return []
    means_SC = _resampled_means(np.stack(columns, axis=1), samples=samples, seed=seed)
    return [_bounds(means_S, confidence=confidence) for means_S in means_SC.T]


def _bounds(means_S: NDArray[np.float64], *, confidence: float) -> tuple[float, float]:
    """Return what remains of resampled means after cutting off both tails."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it is a share between 0 and 1, e.g. 0.95.")
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means_S, (tail, 1.0 - tail))
    return round(float(low), FLOAT_NOISE_DECIMALS), round(float(high), FLOAT_NOISE_DECIMALS)


def _resampled_means(values_QC: NDArray[np.float64], *, samples: int, seed: int) -> NDArray[np.float64]:
    """Return the mean of each column over each of `samples` draws of Q rows with replacement, (S, C).

    A draw is turned into how often it holds each query, so that a matrix product serves all columns.
    """
    rng = np.random.default_rng(seed)
    count = len(values_QC)
    rows = max(1, SLICE_DRAWS // count)
    means_SC = np.empty((samples, values_QC.shape[1]), dtype=np.float64)
    for start in range(0, samples, rows):
        stop = min(start + rows, samples)
        places = rng.integers(0, count, size=(stop - start, count))
        places += count * np.arange(stop - start)[:, None]
        times_SQ = np.bincount(places.ravel(), minlength=(stop - start) * count).reshape(-1, count)
        del places
        means_SC[start:stop] = times_SQ.astype(np.float64) @ values_QC / count
    return means_SC


def query_values(result: EvaluationResult, metric: str) -> tuple[list[str], NDArray[np.float64]]:
    """Return the query ids in sorted order, so that no interval depends on the order of a file, and their values.

    Raises:
        ValueError: The metric is missing, or there is no query.
    """
    if metric not in result.per_query:
        known = ", ".join(sorted(result.per_query)) or "none"
        raise ValueError(f"{result.system} on {result.task} has no metric {metric!r}; it has: {known}.")
    values = result.per_query[metric]
    if not values:
        raise ValueError(f"{result.system} on {result.task} has no query with a relevant document: nothing to compare.")
    ids = sorted(values)
    return ids, np.asarray([values[query_id] for query_id in ids], dtype=np.float64)


def _judged(comparison: Comparison) -> Verdict:
    """Return a comparison with its verdict."""
    word = _word(comparison)
    return Verdict(word, comparison, _sentence(word, comparison))


def _word(comparison: Comparison) -> VerdictWord:
    """Return the verdict that the interval gives."""
    if comparison.num_queries < 2:
        return "within noise"
    if comparison.low > 0.0:
        return "improved"
    if comparison.high < 0.0:
        return "worse"
    return "within noise"


def _sentence(word: VerdictWord, comparison: Comparison) -> str:
    """Return the verdict as a line for people."""
    digits = _digits(word, comparison)
    means = f"{comparison.metric} {comparison.baseline:.{digits}f} -> {comparison.candidate:.{digits}f}"
    difference = _signed(comparison.difference, digits)
    if comparison.num_queries < 2:
        return f"{word}: {means} ({difference}, 1 query: too few for an interval)"
    bounds = f"{_signed(comparison.low, digits)} to {_signed(comparison.high, digits)}"
    share = f"{100 * comparison.confidence:g}%"
    return f"{word}: {means} ({difference}, {share} interval {bounds}, {comparison.num_queries} queries)"


def _digits(word: VerdictWord, comparison: Comparison) -> int:
    """Return 3 decimals, or more where the bound that decided would read as zero."""
    if word == "within noise":
        return 3
    bound = comparison.low if word == "improved" else comparison.high
    return next((digits for digits in range(3, FLOAT_NOISE_DECIMALS) if round(bound, digits)), FLOAT_NOISE_DECIMALS)


def _signed(value: float, digits: int) -> str:
    """Return the value with its sign; adding 0.0 turns the minus zero that rounding leaves into plus zero."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def _some(ids: Collection[str]) -> str:
    """Return how many ids there are, and the first of them."""
    if not ids:
        return "none"
    shown = ", ".join(sorted(ids)[:3])
    return f"{len(ids)} ({shown}{', ...' if len(ids) > 3 else ''})"
