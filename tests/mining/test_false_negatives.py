"""The estimate of false negatives: near the planted rate, for any rule of choice; honest where it can't tell."""

from __future__ import annotations

import numpy as np
import pytest

from vembed.mining.false_negatives import estimate

QUERIES, WINDOW = 4000, 60


def planted(share: float, *, per_query: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scores of positives and of the window, and which of these answer: a share of queries have hidden answers.

    True negatives have a long tail that reaches into the positives, and queries differ in how high everything scores.
    """
    draw = np.random.default_rng(seed)
    level = draw.normal(0.2, 0.1, (QUERIES, 1))
    negatives = level + draw.gamma(2.0, 0.05, (QUERIES, WINDOW))
    hidden = level + draw.normal(0.55, 0.15, (QUERIES, per_query))
    hidden[draw.random(QUERIES) >= share] = -np.inf
    scores = np.concatenate([negatives, hidden], axis=1)
    order = np.argsort(-scores, axis=1)[:, :WINDOW]
    positive = (level + draw.normal(0.55, 0.15, (QUERIES, 1)))[:, 0]
    return positive, np.take_along_axis(scores, order, axis=1), order >= WINDOW


@pytest.mark.parametrize(("share", "per_query"), [(0.43, 1), (0.65, 2)])
def test_the_estimate_is_within_a_fifth_of_the_planted_rate(share: float, per_query: int) -> None:
    positive, scores, answers = planted(share, per_query=per_query)
    top = np.zeros(scores.shape, dtype=np.bool_)
    top[:, :4] = True
    found = estimate(positive, scores, top)
    truth = answers[:, :4].mean()
    assert found is not None
    assert truth == pytest.approx(0.1 if per_query == 1 else 0.3, abs=0.02)
    assert found.rate == pytest.approx(truth, rel=0.2)
    assert found.low < truth < found.high
    assert found.probabilities_SK[answers].mean() > 0.6
    assert found.probabilities_SK[~answers].mean() < 0.02


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_neighbours_of_the_answer_are_told_from_answers(seed: int) -> None:
    """A query's topic lifts its dozen nearest documents with its answers, on some queries more than on others."""
    draw = np.random.default_rng(seed)
    topic = draw.gamma(2.0, 0.1, (QUERIES, 1))
    negatives = draw.gamma(2.0, 0.03, (QUERIES, WINDOW))
    negatives[:, :12] += topic
    answers = topic + draw.normal(0.3, 0.15, (QUERIES, 2))
    positive, scores = answers[:, 0], np.concatenate([negatives, answers[:, 1:]], axis=1)
    order = np.argsort(-scores, axis=1)[:, :WINDOW]
    scores, hidden = np.take_along_axis(scores, order, axis=1), order == WINDOW
    top = np.zeros(scores.shape, dtype=np.bool_)
    top[:, :4] = True
    found = estimate(positive, scores, top)
    assert found is not None
    assert found.rate == pytest.approx(hidden[top].mean(), rel=0.2)


def test_a_window_of_five_candidates_is_enough() -> None:
    positive, scores, answers = planted(0.43, per_query=1)
    chosen = np.ones(scores.shape, dtype=np.bool_)
    found = estimate(positive, scores[:, :5], chosen[:, :5])
    assert found is not None
    assert found.rate == pytest.approx(answers[:, :5].mean(), rel=0.2)
    assert estimate(positive, scores[:, :4], chosen[:, :4]) is None, "there is too little to hold the best ones against"


def test_a_margin_leaves_few_and_the_estimate_says_so() -> None:
    positive, scores, answers = planted(0.65, per_query=2)
    allowed = scores <= 0.7 * positive[:, None]
    chosen = allowed & (np.cumsum(allowed, axis=1) <= 4)
    found = estimate(positive, scores, chosen)
    assert found is not None
    assert answers[chosen].mean() < 0.12
    assert found.rate == pytest.approx(answers[chosen].mean(), rel=0.35)


def test_without_any_the_estimate_is_near_nothing() -> None:
    positive, scores, _ = planted(0.0, per_query=1)
    top = np.zeros(scores.shape, dtype=np.bool_)
    top[:, :4] = True
    found = estimate(positive, scores, top)
    assert found is not None
    assert found.low == 0 < found.rate < found.high < 0.01


def test_too_few_positives_give_no_estimate() -> None:
    positive, scores, _ = planted(0.4, per_query=1)
    top = np.ones(scores.shape, dtype=np.bool_)
    assert estimate(positive[:40], scores[:40], top[:40]) is None
    assert estimate(positive - 9, scores, top) is None, "no positive is in reach of the window"
    assert estimate(positive, scores, ~top) is None, "nothing was mined"
    assert estimate(positive, np.full_like(scores, -np.inf), top) is None
