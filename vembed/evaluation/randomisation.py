"""Say how often chance alone would make two systems differ as much as they do: the paired randomisation test.

1. Pair the two systems' values of one metric by query, and take the differences.
2. If the systems were equal, each query's two values could as well be swapped: that flips the sign of its difference.
3. Flip signs at random, many times over; count how often the mean difference is at least as far from 0 as the real one.

With up to 14 queries that differ, all sign flips are enumerated and the p-value is exact; above, it is estimated, and
the real assignment counts as one of the drawn ones, so that it is never 0. A true null is rejected at 5% in 5% of
samples, and in fewer where few queries differ and all by the same, as with recall@1.
Shape legend: Q queries whose values differ, P permutations.
Source: Smucker, Allan & Carterette, A Comparison of Statistical Significance Tests for Information Retrieval Evaluation
(CIKM 2007); the count of the real assignment: Phipson & Smyth (2010).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.significance import query_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.evaluation.result import EvaluationResult

PERMUTATIONS = 10_000

EXACT_QUERIES = 14
"""Most differing queries whose sign flips are all enumerated: 2^14 = 16,384 of them."""

SLICE_DRAWS = 1 << 20
"""Signs held in memory at a time, a byte each, however many permutations."""

FLOAT_NOISE = 1e-12
"""How far below the real difference a permuted one may lie and still count as equal: sums in another order."""


def randomisation_test(
    one: EvaluationResult, other: EvaluationResult, metric: str, *, permutations: int = PERMUTATIONS, seed: int = 0
) -> float:
    """Return the two-sided p-value of the difference between two systems in one metric.

    Args:
        permutations: Sign flips to draw where they are too many to enumerate.

    Returns:
        A share of sign flips above 0 and up to 1; 1 where no query differs.

    Raises:
        ValueError: The query sets differ, the metric is missing, or permutations is below 1.
    """
    ids, one_values = query_values(one, metric)
    other_ids, other_values = query_values(other, metric)
    if ids != other_ids:
        raise ValueError(
            f"{metric} of {one.system} and of {other.system} are over different queries; "
            "evaluate both on the same task."
        )
    return p_value(one_values - other_values, permutations=permutations, seed=seed)


def p_value(differences_Q: NDArray[np.float64], *, permutations: int = PERMUTATIONS, seed: int = 0) -> float:
    """Return the two-sided p-value of the mean of paired differences being 0.

    Raises:
        ValueError: permutations is below 1.
    """
    if permutations < 1:
        raise ValueError(f"permutations is {permutations}; at least 1 is needed, {PERMUTATIONS} is usual.")
    # Flipping the sign of 0 changes nothing: queries that don't differ carry no weight in the test.
    differences_Q = differences_Q[np.abs(differences_Q) > FLOAT_NOISE]
    count = len(differences_Q)
    if not count:
        return 1.0
    threshold = abs(float(differences_Q.sum())) - FLOAT_NOISE * count
    if count <= EXACT_QUERIES:
        flips_PQ = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
        return float(np.mean(np.abs((1 - 2 * flips_PQ) @ differences_Q) >= threshold))
    rng = np.random.default_rng(seed)
    rows = max(1, SLICE_DRAWS // count)
    as_far = 0
    for start in range(0, permutations, rows):
        flips_PQ = rng.integers(0, 2, size=(min(rows, permutations - start), count), dtype=np.int8)
        # sum of signed differences = their sum - 2 * the sum of the flipped ones
        sums_P = differences_Q.sum() - 2.0 * (flips_PQ @ differences_Q)
        as_far += int(np.count_nonzero(np.abs(sums_P) >= threshold))
    return (as_far + 1) / (permutations + 1)
