"""What each query adds to a measure over graded pairs, so that such a set is judged as any other is.

A rank correlation is no mean over queries. To first order it is: v_q is the measure plus Q / P times the sum, over the
query's pairs, of how much more weight on the pair would raise the measure (its influence, 0 in the mean). The mean of v
is the measure itself, and drawing queries with their v tells how it varies from query to query, ranks included.

Shape legend: P pairs, Q queries, V distinct values.
Source: Efron & Tibshirani, An Introduction to the Bootstrap (1993), chapter 21 (influence, the delta method).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import Ragged
from vembed.vectors.encode import values_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.data.retrieval import PairKind
    from vembed.vectors.encode import Vectors

PAIRS_AT_ONCE = 8192
"""Pairs whose vectors are copied side by side."""

Values = dict[str, tuple[float, "NDArray[np.float64]"]]
"""Measure -> its value, and the influence of each pair (P,)."""


def measured(kind: PairKind, grade_P: NDArray[np.float64], similarity_P: NDArray[np.floating]) -> Values:
    """Measure similarities of pairs by what was said of them; the first measure decides."""
    x_P: NDArray[np.float64] = similarity_P.astype(np.float64)
    if kind == "grade":
        return {"spearman": _spearman(x_P, grade_P)}
    return {"average precision": _average_precision(x_P, grade_P), "ROC AUC": _roc_auc(x_P, grade_P)}


def pair_similarities(
    queries: Vectors, documents: Vectors, query_P: NDArray[np.int64], document_P: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the similarity of each pair by the rows of both (P,): inner product or MaxSim."""
    if isinstance(queries, Ragged) and isinstance(documents, Ragged):
        (q, d) = (np.split(each.values, each.offsets[1:-1]) for each in (queries, documents))
        places = zip(query_P.tolist(), document_P.tolist(), strict=True)
        return np.array([(q[one] @ d[other].T).max(axis=1).sum() for one, other in places], dtype=np.float32)
    q_QE, d_DE = values_of(queries), values_of(documents)
    found_P = np.empty(len(query_P), dtype=np.float32)
    for start in range(0, len(found_P), PAIRS_AT_ONCE):
        own = slice(start, start + PAIRS_AT_ONCE)
        np.einsum("pe,pe->p", q_QE[query_P[own]], d_DE[document_P[own]], out=found_P[own])
    return found_P


def query_values(
    value: float, influence_P: NDArray[np.float64], query_P: NDArray[np.int64], num_queries: int
) -> NDArray[np.float64]:
    """Return what each query adds (Q,): their mean is the value."""
    own_Q = np.bincount(query_P, influence_P, minlength=num_queries)
    found: NDArray[np.float64] = value + own_Q * num_queries / len(query_P)
    return found


class _Order:
    """Values in order, equal ones together."""

    def __init__(self, values_P: NDArray[np.float64]) -> None:
        values_V, self.place_P = np.unique(values_P, return_inverse=True)
        self.count = len(values_P)
        self.size = len(values_V)
        self.mid_P = self.before(np.ones(self.count))  # share of smaller values, half of the equal ones included

    def before(self, weight_P: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean over all pairs of the weight of smaller values, half of the equal ones' included, (P,)."""
        sums_V = np.bincount(self.place_P, weight_P, minlength=self.size) / self.count
        found: NDArray[np.float64] = (np.cumsum(sums_V) - sums_V / 2)[self.place_P]
        return found

    def after(self, weight_P: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the same of larger values."""
        found: NDArray[np.float64] = weight_P.mean() - self.before(weight_P)
        return found


def _spearman(similarity_P: NDArray[np.float64], grade_P: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    x, y = _Order(similarity_P), _Order(grade_P)
    f_P, g_P = x.mid_P, y.mid_P
    covariance, f_variance, g_variance = (
        float((one * other).mean()) - 0.25 for one, other in ((f_P, g_P), (f_P, f_P), (g_P, g_P))
    )
    if f_variance <= 0.0:
        return 0.0, np.zeros(len(f_P))
    size = float(np.sqrt(f_variance * g_variance))
    value = covariance / size
    of_covariance = f_P * g_P + x.after(g_P) + y.after(f_P) - 3 * (f_P * g_P).mean()
    of_f, of_g = (each.mid_P**2 + 2 * each.after(each.mid_P) - 3 * (each.mid_P**2).mean() for each in (x, y))
    return value, of_covariance / size - value / 2 * (of_f / f_variance + of_g / g_variance)


def _average_precision(
    similarity_P: NDArray[np.float64], truth_P: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    order = _Order(similarity_P)
    true_V = np.bincount(order.place_P, truth_P, minlength=order.size)
    all_V = np.bincount(order.place_P, minlength=order.size)
    found_V, seen_V = np.cumsum(true_V[::-1])[::-1], np.cumsum(all_V[::-1])[::-1]  # at least as similar
    precision_V = found_V / seen_V
    value = float((true_V * precision_V).sum() / true_V.sum())
    # A further pair is seen at every true pair that is no more similar, and found there where it is true.
    share_V = true_V / true_V.sum() / seen_V * order.count
    seen_P, lost_P = np.cumsum(share_V)[order.place_P], np.cumsum(share_V * precision_V)[order.place_P]
    own_P = truth_P * (precision_V[order.place_P] - value) / truth_P.mean()
    return value, own_P + truth_P * seen_P - lost_P


def _roc_auc(similarity_P: NDArray[np.float64], truth_P: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    order, share = _Order(similarity_P), float(truth_P.mean())
    below_P, above_P = order.before(1 - truth_P) / (1 - share), order.after(truth_P) / share
    value = float((truth_P * below_P).mean() / share)
    return value, truth_P * (below_P - value) / share + (1 - truth_P) * (above_P - value) / (1 - share)
