"""Score runs with trec_eval, so that every number can be compared with BEIR's, MTEB's and a paper's; and graded pairs.

| name        | trec_eval        | meaning                                                                             |
|-------------|------------------|-------------------------------------------------------------------------------------|
| ndcg@k      | ndcg_cut         | graded; the gain is the grade itself, the discount log2(rank + 1)                   |
| recall@k    | recall           | share of the relevant documents among the first k                                   |
| precision@k | P                | share of the first k that is relevant; divides by k even where fewer were found     |
| mrr@k       | recip_rank       | 1 / rank of the first relevant document, 0 where it is not among the first k        |
| map@k       | map_cut          | average precision of the first k, divided by the number of all relevant documents   |
| hit@k       | success          | 1 where a relevant document is among the first k                                    |

Relevant means grade 1 or more. A relevant document that was not found counts as missed, in the corpus or not.

Pairs that people graded have no run. Their similarities are measured by Spearman's rank correlation with the grades, or
by average precision and ROC AUC where a pair either belongs together or doesn't. The value takes a weight for each
pair, so that a bootstrap draw needs no new sort. The influence is the slope of the value in a pair's weight, by which
such a set is judged query by query as any other is: a rank correlation is no mean over queries, but to first order it
is the mean of v_q = value + Q / P * (sum of the influences of the query's pairs).
Shape legend: P pairs, Q queries, V distinct values.
Source: Efron & Tibshirani, An Introduction to the Bootstrap (1993), chapter 21 (influence, the delta method).
"""

from __future__ import annotations

import math
import traceback
from numbers import Real
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytrec_eval

from vembed.errors import ConfigError
from vembed.registry import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.data.judged import PairKind

    Metric: TypeAlias = Callable[[Sequence[int], Sequence[int], int], float]
    PairValue: TypeAlias = Callable[["RankedValues", "RankedValues", NDArray[np.float64]], float]
    PairInfluence: TypeAlias = Callable[["RankedValues", "RankedValues"], NDArray[np.float64]]

HEADLINE = ("ndcg@10", "recall@1", "mrr@10", "map@100")
"""The metrics that a report leads with."""

DEFAULT_KS = (1, 3, 5, 10, 100)
"""Cut-offs that metrics are computed at."""

DEFAULT_DEPTH = 100
"""Documents kept per query."""

MAX_DEPTH = 1000
"""Documents kept per query where a cut-off asks for more than the usual: each takes some 100 bytes of memory."""


# Metrics that trec_eval computes, by its own names. All of them take a cut-off but the reciprocal rank.
NDCG = "ndcg_cut"
RECALL = "recall"
PRECISION = "P"
MRR = "recip_rank"
MAP = "map_cut"
HIT = "success"


def register_metric(function: Metric) -> Metric:
    """Add a metric under the name of its function; also a decorator.

    It is computed for each query as `function(ranked, judged, k)` and stands in every result as `NAME@k`; larger is
    better.

    Args:
        function: Takes the grades of the documents in the order found (0 where nobody judged), the grades of all judged
            documents, and the cut-off; returns a finite number.

    Raises:
        ConfigError: The name is taken.
    """
    METRICS.register(function.__name__, function, module=function.__module__)
    return function


def trec_order(scored: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Return one query's documents in the order that trec_eval ranks them, whatever order a file has.

    Scores are compared as float32, largest first; equal scores by document id, last one first. Python compares ids by
    code point and trec_eval by UTF-8 byte, which is the same order.

    Returns:
        The same pairs, best first.

    Source:
        trec_eval 9, form_res_rels.c, comp_sim_docno.
    """
    pairs = tuple(scored)
    # trec_eval keeps scores as C floats: two float64 scores that round to the same float32 are a tie there.
    single = np.asarray([score for _, score in pairs], dtype=np.float32).tolist()
    keyed = sorted(
        ((score, document_id, pair) for score, (document_id, _), pair in zip(single, pairs, pairs, strict=True)),
        key=itemgetter(0, 1),
        reverse=True,
    )
    return tuple(pair for _, _, pair in keyed)


def tie_ranks(document_ids: Sequence[str]) -> NDArray[np.int64]:
    """Return each document's place among equal scores (D,), 0 for the first, as `trec_order` has it."""
    ranks_D = np.empty(len(document_ids), dtype=np.int64)
    ranks_D[sorted(range(len(document_ids)), key=document_ids.__getitem__, reverse=True)] = np.arange(len(document_ids))
    return ranks_D


def with_relevant(qrels: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Return the queries that have a relevant document: the ones that a mean can be over."""
    return {query_id: grades for query_id, grades in qrels.items() if any(grade > 0 for grade in grades.values())}


def score_run(
    run: Mapping[str, Sequence[tuple[str, float]]],
    qrels: Mapping[str, Mapping[str, int]],
    ks: Sequence[int] = DEFAULT_KS,
) -> dict[str, dict[str, float]]:
    """Score each query that has a relevant document.

    Args:
        run: Query id -> (document id, score) in any order. A query that is missing here found nothing and scores 0.

    Returns:
        Metric name ("ndcg@10") -> query id -> value between 0 and 1; the same queries for every metric.

    Raises:
        ValueError: A cut-off is below 1, or there is none.
        ConfigError: A metric that is a function failed, or returned no finite number.
    """
    cuts = sorted(set(ks))
    if not cuts or cuts[0] < 1:
        raise ValueError(f"ks is {tuple(ks)}; give at least one cut-off, each 1 or more, e.g. {DEFAULT_KS}.")
    judged = with_relevant(qrels)
    joined = ",".join(str(cut) for cut in cuts)
    entries = {name: METRICS.load(name) for name in METRICS.names()}
    ours = {name: entry for name, entry in entries.items() if isinstance(entry, str)}
    measures = {measure if measure == MRR else f"{measure}.{joined}" for measure in ours.values()}
    evaluator = pytrec_eval.RelevanceEvaluator(judged, measures)
    scored = evaluator.evaluate({query_id: dict(run.get(query_id, ())) for query_id in judged})
    per_query: dict[str, dict[str, float]] = {}
    for name, measure in sorted(ours.items(), key=lambda entry: entry[1] == MRR):  # the order of metrics.json
        for cut in cuts:
            if measure == MRR:
                # Of the first relevant document: a cut at k leaves the reciprocal rank as it is or makes it 0.
                ranks = {query_id: float(scored[query_id][measure]) for query_id in judged}
                values = {query_id: rank if rank >= 1.0 / cut else 0.0 for query_id, rank in ranks.items()}
            else:
                values = {query_id: float(scored[query_id][f"{measure}_{cut}"]) for query_id in judged}
            per_query[f"{name}@{cut}"] = values
    for name in entries:
        if name not in ours:
            per_query |= _by_function(name, run, judged, cuts)
    return per_query


def _by_function(
    name: str,
    run: Mapping[str, Sequence[tuple[str, float]]],
    judged: Mapping[str, Mapping[str, int]],
    cuts: Sequence[int],
) -> dict[str, dict[str, float]]:
    """Score each query by a metric that is a function, such as a plugin's.

    Raises:
        ConfigError: It failed, or returned no finite number.
    """
    function, owner = METRICS.load(name), METRICS.plugins().get(name, "vembed")
    scored: dict[str, dict[str, float]] = {f"{name}@{cut}": {} for cut in cuts}
    for query_id, grades in judged.items():
        ranked = [grades.get(document, 0) for document, _ in trec_order(run.get(query_id, ()))]
        for cut in cuts:
            try:
                value = function(ranked, list(grades.values()), cut)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                raise ConfigError(
                    f"the metric {name} of {owner} failed for query {query_id!r} at k = {cut}: "
                    f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}"
                ) from error
            if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
                raise ConfigError(
                    f"the metric {name} of {owner} returned {value!r} for query {query_id!r} at k = {cut}; it must "
                    "return a finite number"
                )
            scored[f"{name}@{cut}"][query_id] = float(value)
    return scored


class RankedValues:
    """Values sorted once, to be ranked under many weights; equal ones share the mean of their ranks."""

    def __init__(self, values_P: NDArray[np.floating]) -> None:
        self.values_P: NDArray[np.float64] = values_P.astype(np.float64)
        values_V, self._group_P = np.unique(values_P, return_inverse=True)
        self._num_groups = len(values_V)

    def sums(self, weight_P: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weight of each distinct value (V,), the smallest value first."""
        return np.bincount(self._group_P, weight_P, minlength=self._num_groups).astype(np.float64)

    def spread(self, numbers_V: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the number of each pair's value (P,)."""
        return numbers_V[self._group_P]

    def below(self, weight_P: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weight of all smaller values and half that of the equal ones (P,): the rank less 1/2.

        Exact for weights that are whole numbers: the sums are then whole or half numbers, in any order.
        """
        weight_V = self.sums(weight_P)
        return self.spread(np.cumsum(weight_V) - weight_V / 2.0)

    def above(self, weight_P: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weight of all larger values and half that of the equal ones (P,)."""
        return -self.below(weight_P) + float(weight_P.sum())


def spearman(similarities: RankedValues, grades: RankedValues, weight_P: NDArray[np.float64]) -> float:
    """Return the correlation of the ranks; 0 where all similarities are equal, NaN where all grades are."""
    # Less half of all the weight, `below` is the rank's distance from the mean rank.
    half = weight_P.sum() / 2.0
    x_P, y_P = similarities.below(weight_P) - half, grades.below(weight_P) - half
    weighted_P = weight_P * x_P
    xx, yy, xy = float(weighted_P @ x_P), float((weight_P * y_P) @ y_P), float(weighted_P @ y_P)
    if yy == 0.0:
        return float("nan")
    return xy / (xx * yy) ** 0.5 if xx > 0.0 else 0.0


def _spearman_influence(similarities: RankedValues, grades: RankedValues) -> NDArray[np.float64]:
    count = len(grades.values_P)
    once_P = np.ones(count)
    value = spearman(similarities, grades, once_P)
    # f and g are the shares of pairs below, 1/2 in the mean: the correlation is cov(f, g) / sqrt(var(f) var(g)).
    f_P, g_P = similarities.below(once_P) / count, grades.below(once_P) / count
    f_variance, g_variance = float((f_P * f_P).mean()) - 0.25, float((g_P * g_P).mean()) - 0.25
    if f_variance <= 0.0:
        return np.zeros(count)
    # More weight on a pair acts twice: its own product counts more, and the ranks of all pairs above it rise. Of a
    # product of shares such as f g, the second part is the mean of g over the pairs above in f, and the reverse.
    covariance_P = f_P * g_P + similarities.above(g_P) / count + grades.above(f_P) / count - 3 * (f_P * g_P).mean()
    f_variance_P = f_P**2 + 2 * similarities.above(f_P) / count - 3 * (f_P**2).mean()
    g_variance_P = g_P**2 + 2 * grades.above(g_P) / count - 3 * (g_P**2).mean()
    variances_P = f_variance_P / f_variance + g_variance_P / g_variance
    influence_P: NDArray[np.float64] = covariance_P / np.sqrt(f_variance * g_variance) - value / 2 * variances_P
    return influence_P


def average_precision(similarities: RankedValues, truths: RankedValues, weight_P: NDArray[np.float64]) -> float:
    """Return the mean precision at each true pair, pairs of equal similarity taken together; NaN without a true one."""
    true_V, all_V = (similarities.sums(weights)[::-1] for weights in (weight_P * truths.values_P, weight_P))
    true_so_far_V, all_so_far_V = np.cumsum(true_V), np.cumsum(all_V)  # at least as similar
    if true_so_far_V[-1] == 0.0:
        return float("nan")
    # A draw may leave out the most similar values, where nothing has been seen yet: 0 / 1 there instead of 0 / 0.
    return float(np.sum(true_V * true_so_far_V / np.maximum(all_so_far_V, 1.0)) / true_so_far_V[-1])


def _average_precision_influence(similarities: RankedValues, truths: RankedValues) -> NDArray[np.float64]:
    truth_P = truths.values_P
    once_P = np.ones(len(truth_P))
    value = average_precision(similarities, truths, once_P)
    true_V = similarities.sums(truth_P)
    seen_V = np.cumsum(similarities.sums(once_P)[::-1])[::-1]  # at least as similar
    precision_V = np.cumsum(true_V[::-1])[::-1] / seen_V
    # A further pair is seen at every true pair that is no more similar, and counts as a find there where it is true.
    share_V = true_V / true_V.sum() / seen_V * len(truth_P)
    found_P = truth_P * similarities.spread(np.cumsum(share_V))
    seen_P = similarities.spread(np.cumsum(share_V * precision_V))
    # A true one adds its own precision to the mean besides.
    own_P = truth_P * (similarities.spread(precision_V) - value) / truth_P.mean()
    influence_P: NDArray[np.float64] = own_P + found_P - seen_P
    return influence_P


def roc_auc(similarities: RankedValues, truths: RankedValues, weight_P: NDArray[np.float64]) -> float:
    """Return how often a true pair is more similar than one that isn't, equal ones half; NaN without one of each."""
    true_P = weight_P * truths.values_P
    num_true = float(true_P.sum())
    num_false = float(weight_P.sum()) - num_true
    if num_true == 0.0 or num_false == 0.0:
        return float("nan")
    # Mann and Whitney's U: the true pairs' ranks, less those that they would have among themselves.
    wins = float(np.sum(true_P * similarities.below(weight_P))) - num_true * num_true / 2.0
    return wins / (num_true * num_false)


def _roc_auc_influence(similarities: RankedValues, truths: RankedValues) -> NDArray[np.float64]:
    truth_P, count = truths.values_P, len(truths.values_P)
    value, share = roc_auc(similarities, truths, np.ones(count)), float(truth_P.mean())
    false_below_P = similarities.below(1 - truth_P) / count / (1 - share)
    true_above_P = similarities.above(truth_P) / count / share
    influence_P: NDArray[np.float64] = truth_P * (false_below_P - value) / share
    return influence_P + (1 - truth_P) * (true_above_P - value) / (1 - share)


PAIR_MEASURES: dict[PairKind, dict[str, tuple[PairValue, PairInfluence]]] = {
    "grade": {"spearman": (spearman, _spearman_influence)},
    "pair": {
        "average precision": (average_precision, _average_precision_influence),
        "ROC AUC": (roc_auc, _roc_auc_influence),
    },
}
"""Kind of the labels -> name of a measure -> its value and its influence; the first measure decides.

Both take the pairs' similarities and their grades (1 and 0 of pairs that belong together). The value is a function of
the pairs' weights, NaN where these leave nothing to measure. The influence is the slope of that value in each pair's
weight, all others being 1, times P; its mean is 0.
"""


def pair_values_by_query(
    value: float, influence_P: NDArray[np.float64], query_P: NDArray[np.int64], num_queries: int
) -> NDArray[np.float64]:
    """Return the part of each query in a measure over pairs (Q,): their mean is the value."""
    sums_Q = np.bincount(query_P, influence_P, minlength=num_queries)
    values_Q: NDArray[np.float64] = value + sums_Q * num_queries / len(query_P)
    return values_Q
