"""Estimate how many mined negatives answer their query after all, from scores alone.

1. Scores are made comparable over queries: of each query's the median of its window is taken away.
2. Labelled positives say how high a document that answers its query stands. Of the candidates in the window, N answer
   theirs without a label; they are spread as the labelled ones are (positives are labelled at random, whatever their
   score). Above any height t, candidates then number at least N times the share of positives above t.
3. N is the lowest of these bounds, (candidates above t) / (share of positives above t), each with its own uncertainty
   counted in: near the top, where hardly a true negative comes, the bound is tight.
4. A candidate of a given height answers its query with the probability N * (positives there) / (candidates there). Mean
   over the mined ones, it is the rate.

Limits: where true negatives score as high as positives, which is to say where the model (or teacher) can't tell them
apart, the estimate is too high; where unlabelled answers score lower than labelled ones, too low. A better teacher
makes both smaller.
Source: positive-unlabelled learning, N as in Garg et al., "Mixture Proportion Estimation and PU Learning", 2021.
Shape legend: S sampled queries, K candidates of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_POSITIVES = 50
"""Below so many sampled positives in reach nothing is estimated."""

Z = 1.96
"""Half of a 95% interval, in standard errors."""

BINS = 40
"""Heights between which candidates count as alike: each holds as many positives."""


@dataclass(frozen=True, slots=True)
class FalseNegatives:
    """The estimate."""

    rate: float  # share of the mined negatives that answer their query
    low: float  # of a 95% interval, for the sampling of queries alone
    high: float
    probabilities_SK: NDArray[np.float64]  # that a candidate answers its query


def estimate(
    positive_S: NDArray[np.float32], scores_SK: NDArray[np.float32], chosen_SK: NDArray[np.bool_]
) -> FalseNegatives | None:
    """Estimate the rate; None where there is too little to go by.

    Args:
        positive_S: Score of a labelled positive of each query.
        scores_SK: Scores of the candidates, best first; -inf where there is none.
        chosen_SK: Which of them were mined.
    """
    found_SK: NDArray[np.bool_] = np.isfinite(scores_SK)
    some: NDArray[np.bool_] = np.asarray(found_SK.any(axis=1))
    positive_S, scores_SK, found_SK, chosen_SK = positive_S[some], scores_SK[some], found_SK[some], chosen_SK[some]
    if not chosen_SK.any():
        return None
    median_S1 = np.nanmedian(np.where(found_SK, scores_SK, np.nan), axis=1, keepdims=True).astype(np.float64)
    heights_SK = np.where(found_SK, scores_SK - median_S1, -np.inf)
    # An answer outside of the window is no candidate: only positives that would be in it tell of those inside.
    lowest_S = np.where(found_SK.all(axis=1), scores_SK.min(axis=1), -np.inf)
    positives_P = (positive_S - median_S1[:, 0])[positive_S >= lowest_S]
    if len(positives_P) < LEAST_POSITIVES:
        return None
    candidates_C = heights_SK[found_SK]
    count, error = _hidden_answers(positives_P, candidates_C)
    edges = np.unique(np.quantile(positives_P, np.linspace(0, 1, BINS + 1)))
    edges[0], edges[-1] = -np.inf, np.inf
    share = np.histogram(positives_P, edges)[0] / len(positives_P)
    per_bin = np.histogram(candidates_C, edges)[0]
    probability = np.minimum(1.0, count * share / np.maximum(1, per_bin))
    places_SK = np.clip(np.searchsorted(edges, heights_SK, side="right") - 1, 0, len(share) - 1)
    probabilities = np.zeros((len(some), scores_SK.shape[1]))
    probabilities[some] = np.where(found_SK, probability[places_SK], 0.0)
    rate = float(probabilities[some][chosen_SK].mean())
    spread = Z * rate * error if rate else 0.0
    return FalseNegatives(rate, max(0.0, rate - spread), min(1.0, rate + spread), probabilities)


def _hidden_answers(positives_P: NDArray[np.float64], candidates_C: NDArray[np.float64]) -> tuple[float, float]:
    """Return how many candidates answer their query, and the relative standard error of that."""
    heights_T = np.quantile(positives_P, np.linspace(0.02, 0.98, 49))
    above_T = len(candidates_C) - np.searchsorted(np.sort(candidates_C), heights_T, side="right")
    share_T = np.maximum((positives_P > heights_T[:, None]).mean(axis=1), 1 / len(positives_P))
    errors_T = np.sqrt(1 / np.maximum(above_T, 1) + (1 - share_T) / (share_T * len(positives_P)))
    bounds_T = above_T / share_T
    best = int(np.argmin((bounds_T + 1) * (1 + Z * errors_T)))
    return float(bounds_T[best]), float(errors_T[best]) if above_T[best] else math.inf
