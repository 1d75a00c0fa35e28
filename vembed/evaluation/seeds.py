"""Judge training by several seeds: an interval of the mean difference over other seeds and other queries.

Each seed's run gives a difference (after - before) for each query: a table of S seeds x Q queries. Its mean varies with
the seeds (sigma_s), with the queries (sigma_q) and with both together (sigma_e):

    Var(mean) = sigma_s^2 / S + sigma_q^2 / Q + sigma_e^2 / (S Q)

1. The variance of the S means over queries, divided by S, estimates the first and the last term.
2. The variance of the Q means over seeds, divided by Q, estimates the second and the last term.
3. What neither explains, divided by S Q, estimates the last term, which 1 and 2 have both counted: it goes off once.

A negative share of the seeds counts as none. The interval is Student's t with Satterthwaite's degrees of freedom: where
seeds differ more than queries do, 3 of them leave 2, and the interval is wide. A bootstrap of 3 seeds would be too
narrow by a factor of (S - 1) / S. Over several sets, each counting the same, 2 and 3 are summed over the sets.
Shape legend: S seeds, Q queries of a set.
Source: two-way random effects without replication: Satterthwaite, An Approximate Distribution of Estimates of Variance
Components (Biometrics Bulletin 1946); Brennan, Generalizability Theory (2001), the p x i design.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.significance import CONFIDENCE, FLOAT_NOISE_DECIMALS, Comparison, judged, query_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.significance import Verdict


@dataclass(frozen=True, slots=True)
class SeedsVerdict:
    """What several seeds say together."""

    verdict: Verdict  # of the mean over seeds; its interval is over seeds and queries
    baselines: tuple[float, ...]  # of each seed, before training
    finals: tuple[float, ...]  # of each seed, after it

    @property
    def spread(self) -> float:
        """Standard deviation of the trained models' metric from seed to seed."""
        return stdev(self.finals)


def seeds_verdict(runs: Sequence[Sequence[tuple[EvaluationResult, EvaluationResult]]], metric: str) -> SeedsVerdict:
    """Judge training by several seeds.

    Args:
        runs: Of each seed its results before and after training, on one set or on several.

    Raises:
        ValueError: Seeds were evaluated on different queries, the metric is missing, or there are fewer than 2 seeds.
    """
    if len(runs) < 2:
        raise ValueError("one seed says nothing about others; give at least 2.")
    before = [_table([run[place][0] for run in runs], metric) for place in range(len(runs[0]))]
    after = [_table([run[place][1] for run in runs], metric) for place in range(len(runs[0]))]
    parts = [one - other for one, other in zip(after, before, strict=True)]
    low, high = seeds_interval(parts)
    baselines, finals = (
        tuple(fmean(float(table[seed].mean()) for table in tables) for seed in range(len(runs)))
        for tables in (before, after)
    )
    name = metric if len(parts) == 1 else f"mean {metric} of {len(parts)} sets"
    comparison = Comparison(
        metric=name,
        baseline=fmean(baselines),
        candidate=fmean(finals),
        difference=round(fmean(float(part.mean()) for part in parts), FLOAT_NOISE_DECIMALS),
        low=low,
        high=high,
        num_queries=sum(part.shape[1] for part in parts),
        confidence=CONFIDENCE,
    )
    found = judged(comparison)
    sentence = f"{found.sentence.removesuffix(')')}, {len(runs)} seeds)"
    return SeedsVerdict(replace(found, sentence=sentence), baselines, finals)


def _table(results: Sequence[EvaluationResult], metric: str) -> NDArray[np.float64]:
    """Return a metric by seed and query (S, Q)."""
    ids, _ = query_values(results[0], metric)
    values = []
    for result in results:
        own_ids, own = query_values(result, metric)
        if own_ids != ids:
            raise ValueError(f"{result.task}: the seeds were evaluated on different queries.")
        values.append(own)
    return np.stack(values)


def seeds_interval(parts: Sequence[NDArray[np.float64]], *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of the mean of differences over other seeds and other queries.

    Args:
        parts: Of each set the differences (S, Q), of the same seeds in the same order. Sets count the same.
    """
    from scipy.special import stdtrit  # only at the end of all runs

    num_seeds, num_sets = len(parts[0]), len(parts)
    means_S = np.mean([part.mean(axis=1) for part in parts], axis=0)
    terms = []  # variance and degrees of freedom of each query part; of what is left, negative
    left_over, left_freedom = 0.0, 0.0
    for part in parts:
        count = part.shape[1]
        if count < 2:
            continue
        terms.append((float(part.mean(axis=0).var(ddof=1)) / count / num_sets**2, count - 1.0))
        left = part - part.mean(axis=0) - part.mean(axis=1, keepdims=True) + part.mean()
        freedom = (count - 1) * (num_seeds - 1)
        left_over += float((left**2).sum()) / freedom / (num_seeds * count) / num_sets**2
        left_freedom += freedom
    of_seeds = float(means_S.var(ddof=1)) / num_seeds
    if of_seeds > left_over:
        terms += [(of_seeds, num_seeds - 1.0), (-left_over, left_freedom)]
    middle, total = float(means_S.mean()), sum(variance for variance, _ in terms)
    reach = 0.0
    if total > 0.0:
        freedom = total**2 / sum(variance**2 / free for variance, free in terms if free)
        reach = float(stdtrit(freedom, (1.0 + confidence) / 2.0)) * total**0.5
    return round(middle - reach, FLOAT_NOISE_DECIMALS), round(middle + reach, FLOAT_NOISE_DECIMALS)
