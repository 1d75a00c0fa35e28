"""Estimate how many mined negatives answer their query after all, from scores alone.

1. Scores are made comparable over queries: of each query's the median of its window is taken away.
2. Labelled positives say how high a document that answers its query stands. Of the candidates in the window, N answer
   theirs without a label; they are spread as the labelled ones are (positives are labelled at random, whatever their
   score). Above any height t, candidates then number at least N times the share of positives above t.
3. N is the lowest of these bounds, (candidates above t) / (share of positives above t), each with its own uncertainty
   counted in: near the top, where hardly a true negative comes, the bound is tight.
4. A candidate of a given rank and height answers its query with the probability N * (share of positives there) /
   (candidates there). Rank matters beside height: the best candidate of a query answers it more often than others of
   its height. A positive's rank is counted among the candidates that don't answer: those above it that do, by these
   very probabilities, are left out, in a few rounds. Mean over the mined ones, the probability is the rate.

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
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEAST_POSITIVES = 50
"""Below so many sampled positives in reach nothing is estimated."""

Z = 1.96
"""Half of a 95% interval, in standard errors."""

RANKS = (0, 1, 2, 4, 8, 16)
"""Ranks from each of which to the next one candidates count as alike, where they also stand alike in height."""

BINS, LEAST_IN_BIN = 40, 25
"""Most heights between which candidates of like rank count as alike, and fewest positives in each."""

ROUNDS = 8
"""How often the positives' ranks are corrected; 5 are enough."""


@dataclass(frozen=True, slots=True)
class FalseNegatives:
    """The estimate."""

    rate: float  # share of the mined negatives that answer their query
    low: float  # of 95% intervals for the sampling of queries, by height alone and by rank and height together
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
    inside_P = np.flatnonzero(positive_S >= lowest_S)
    if len(inside_P) < LEAST_POSITIVES:
        return None
    positives_P = (positive_S - median_S1[:, 0])[inside_P]
    ranks_P = (scores_SK[inside_P] > positive_S[inside_P, None]).sum(axis=1)
    count, error = _hidden_answers(positives_P, heights_SK[found_SK])
    answers, everywhere = count / len(inside_P), np.zeros_like(ranks_P)
    chances_SK = _chances(answers, positives_P, everywhere, np.ones(len(inside_P)), heights_SK, (0,))
    rates = [float(chances_SK[chosen_SK].mean())]
    for _ in range(ROUNDS):
        sums = np.pad(np.cumsum(chances_SK, axis=1), ((0, 0), (1, 0)))[inside_P]
        ahead = sums[np.arange(len(inside_P)), ranks_P] / np.maximum(1.0, sums[:, -1])  # 0 to 1
        ranks, weights = np.concatenate([ranks_P, ranks_P - 1]), np.concatenate([1 - ahead, ahead])
        chances_SK = _chances(answers, np.tile(positives_P, 2), ranks, weights, heights_SK, RANKS)
    rates.append(float(chances_SK[chosen_SK].mean()))
    probabilities = np.zeros((len(some), scores_SK.shape[1]))
    probabilities[some] = chances_SK
    bounds = [rate * (1 + sign * Z * error) if rate else 0.0 for rate in rates for sign in (-1, 1)]
    return FalseNegatives(rates[-1], max(0.0, min(bounds)), min(1.0, max(bounds)), probabilities)


def _chances(
    answers: float,
    positives_P: NDArray[np.float64],
    ranks_P: NDArray[np.int64],
    weights_P: NDArray[np.float64],
    heights_SK: NDArray[np.float64],
    edges: Sequence[int],
) -> NDArray[np.float64]:
    """Return the probability that each candidate answers its query, by rank and height.

    Args:
        answers: Hidden answers for each positive.
        weights_P: What each positive counts.
        edges: Ranks from each of which to the next one candidates count as alike.
    """
    chances_SK = np.zeros(heights_SK.shape)
    for first, stop in zip(edges, (*edges[1:], heights_SK.shape[1]), strict=True):
        like = np.flatnonzero((ranks_P >= first) & (ranks_P < stop))
        like = like[np.argsort(positives_P[like])]
        heights, weights, columns = positives_P[like], weights_P[like], heights_SK[:, first:stop]
        bins = int(min(BINS, weights.sum() // LEAST_IN_BIN))
        if not columns.size or not weights.sum():
            continue
        reached = np.cumsum(weights) / weights.sum()
        inner = heights[np.searchsorted(reached, np.arange(1, max(1, bins)) / max(1, bins))]
        cuts = np.unique(np.concatenate([[-np.inf], inner, [np.inf]]))
        share = np.histogram(heights, cuts, weights=weights)[0]
        there = np.histogram(columns[np.isfinite(columns)], cuts)[0]
        places = np.clip(np.searchsorted(cuts, columns, side="right") - 1, 0, len(share) - 1)
        chances_SK[:, first:stop] = np.minimum(1.0, answers * share / np.maximum(1, there))[places]
    return np.where(np.isfinite(heights_SK), chances_SK, 0.0)


def _hidden_answers(positives_P: NDArray[np.float64], candidates_C: NDArray[np.float64]) -> tuple[float, float]:
    """Return how many candidates answer their query, and the relative standard error of that."""
    heights_T = np.quantile(positives_P, np.linspace(0.02, 0.98, 49))
    above_T = len(candidates_C) - np.searchsorted(np.sort(candidates_C), heights_T, side="right")
    share_T = np.maximum((positives_P > heights_T[:, None]).mean(axis=1), 1 / len(positives_P))
    errors_T = np.sqrt(1 / np.maximum(above_T, 1) + (1 - share_T) / (share_T * len(positives_P)))
    bounds_T = above_T / share_T
    best = int(np.argmin((bounds_T + 1) * (1 + Z * errors_T)))
    return float(bounds_T[best]), float(errors_T[best]) if above_T[best] else math.inf
