"""Estimate how many mined negatives answer their query after all, from scores alone.

1. Labelled positives say how a document that answers its query scores. Of the candidates in the window, N answer theirs
   without a label; they score as the labelled ones do (positives are labelled at random, whatever their score). Above
   any score t, candidates then number at least N times the share of positives above t. N is the lowest of these
   bounds, each with its own uncertainty counted in: near the top, where few true negatives come, the bound is tight.
2. Scores of different queries aren't comparable, leads are: how far a document stands above the second best of the
   query's other candidates. Hardly a true negative leads by much, so bounds on leads are the tightest; but several
   answers to one query take the lead from each other. Heights above the median of a query's candidates say less and
   don't mind. Where leads show less than half of what heights show, heights count.
3. A candidate of a given rank and height answers its query with the probability N * (share of positives there) /
   (candidates there). Rank matters beside height: the best candidate of a query answers it more often than others of
   its height. A positive's rank is counted among the candidates that don't answer: those above it that do, by these
   very probabilities, are left out, in a few rounds. Mean over the mined ones, the probability is the rate. Heights
   are those above the query's third candidate; where leads don't count, above the median.

Limits: where true negatives score as high as positives, which is to say where the model (or teacher) can't tell them
apart, the estimate is too high; where unlabelled answers score lower than labelled ones, or one query has several of
them, too low. A better teacher makes the first two smaller.
Source: positive-unlabelled learning, N as in Garg et al., "Mixture Proportion Estimation and PU Learning", 2021.
Shape legend: S sampled queries, K candidates of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEAST_POSITIVES = 50
"""Below so many sampled positives in reach nothing is estimated."""

LEAST_CANDIDATES = 5
"""Queries with fewer candidates tell nothing: there is too little to hold the best ones against."""

Z = 1.96
"""Half of a 95% interval, in standard errors."""

RANKS = (0, 1, 2, 4, 8, 16)
"""Ranks from each of which to the next one candidates count as alike, where they also stand alike in height."""

BINS, LEAST_IN_BIN = 40, 25
"""Most heights between which candidates of like rank count as alike, and fewest positives in each."""

LEAST_BY_LEADS = 0.5
"""If leads show a smaller share of the hidden answers that heights show, queries have several answers each."""

ROUNDS = 8
"""How often the positives' ranks and the share of hidden answers are corrected; 5 are enough."""


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
        scores_SK: Scores of the candidates, in the order in which the model finds them; -inf where there is none.
        chosen_SK: Which of them were mined.
    """
    found_SK: NDArray[np.bool_] = np.isfinite(scores_SK)
    some = found_SK.sum(axis=1) >= LEAST_CANDIDATES
    positive_S, scores_SK, found_SK, chosen_SK = positive_S[some], scores_SK[some], found_SK[some], chosen_SK[some]
    if not chosen_SK.any():
        return None
    # An answer outside of the window is no candidate: only positives that would be in it tell of those inside.
    lowest_S = np.where(found_SK.all(axis=1), scores_SK.min(axis=1), -np.inf)
    inside_P = np.flatnonzero(positive_S >= lowest_S)
    if len(inside_P) < LEAST_POSITIVES:
        return None
    count, error, reference_S = _counted(positive_S, scores_SK, inside_P)
    ranks_P = (scores_SK[inside_P] > positive_S[inside_P, None]).sum(axis=1)
    positives_P, heights_SK = (positive_S - reference_S)[inside_P], scores_SK - reference_S[:, None]
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
    bounds = [rate * (1 + sign * Z * error) for rate in rates for sign in (-1, 1)]
    return FalseNegatives(rates[-1], max(0.0, min(bounds)), min(1.0, max(bounds)), probabilities)


def _counted(
    positive_S: NDArray[np.float32], scores_SK: NDArray[np.float32], inside_P: NDArray[np.int64]
) -> tuple[float, float, NDArray[np.float64]]:
    """Return how many candidates answer their query, the relative standard error, and above what heights are told.

    Args:
        inside_P: Queries whose positive would be in the window.
    """
    nearest_S3 = _nearest(scores_SK)
    with_positive = np.concatenate([scores_SK, positive_S[:, None]], axis=1)
    leads = (_leads(scores_SK, others) for others in (scores_SK, with_positive))
    by_leads, error_by_leads = _hidden_answers((positive_S - nearest_S3[:, 1])[inside_P], *leads)
    is_found_SK = np.isfinite(scores_SK)
    median_S = np.nanmedian(np.where(is_found_SK, scores_SK, np.nan), axis=1).astype(np.float64)
    heights_C = np.sort((scores_SK - median_S[:, None])[is_found_SK])
    by_heights, error_by_heights = _hidden_answers((positive_S - median_S)[inside_P], heights_C, heights_C)
    if by_leads >= LEAST_BY_LEADS * by_heights:
        return by_leads, error_by_leads, nearest_S3[:, 2]
    return by_heights, error_by_heights, median_S


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


def _hidden_answers(
    positives_P: NDArray[np.float64], alone_C: NDArray[np.float64], beside_C: NDArray[np.float64]
) -> tuple[float, float]:
    """Return how many candidates answer their query, and the relative standard error of that.

    Args:
        positives_P: Leads of the positives, or their heights.
        alone_C: Those of the candidates, sorted, with the labelled positive not among the others of its query.
        beside_C: The same with it. A hidden answer has a labelled one beside it, a labelled one has a hidden one in
            some queries only, about N of them: for that share of the candidates these count.
    """
    levels_T = np.quantile(positives_P, np.linspace(0.02, 0.98, 49))
    share_T = np.maximum((positives_P > levels_T[:, None]).mean(axis=1), 1 / len(positives_P))
    alone_T, beside_T = (len(each) - np.searchsorted(each, levels_T, side="right") for each in (alone_C, beside_C))
    count, error = 0.0, 0.0
    for _ in range(ROUNDS):
        beside = min(1.0, count / len(positives_P))
        above_T = np.maximum(1, (1 - beside) * alone_T + beside * beside_T)  # none there doesn't mean none anywhere
        errors_T = np.sqrt(1 / above_T + (1 - share_T) / (share_T * len(positives_P)))
        bounds_T = above_T / share_T
        best = int(np.argmin((bounds_T + 1) * (1 + Z * errors_T)))
        count, error = float(bounds_T[best]), float(errors_T[best])
    return count, error


def _nearest(scores_SJ: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the three best scores of each query, the lowest again where there are fewer."""
    lowest_S1 = np.min(scores_SJ, axis=1, keepdims=True, where=np.isfinite(scores_SJ), initial=np.inf)
    filled = np.concatenate([scores_SJ, np.repeat(lowest_S1, 2, axis=1)], axis=1)
    return -np.sort(-np.maximum(filled, lowest_S1), axis=1)[:, :3].astype(np.float64)


def _leads(scores_SK: NDArray[np.float32], others_SJ: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return how far each candidate stands above the second best of the others, itself left out; sorted, in one row."""
    nearest_S3 = _nearest(others_SJ)
    leads_SK = scores_SK - np.where(scores_SK >= nearest_S3[:, 1:2], nearest_S3[:, 2:], nearest_S3[:, 1:2])
    return np.sort(leads_SK[np.isfinite(scores_SK)])
