"""The paired randomisation test: equal to counting by hand, exact where it can be, the same at every call."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from vembed.evaluation.randomisation import p_value, randomisation_test
from vembed.evaluation.result import EvaluationResult

METRIC = "ndcg@10"


def result(values: dict[str, float], system: str = "a") -> EvaluationResult:
    mean = sum(values.values()) / len(values)
    return EvaluationResult("task", system, {METRIC: mean}, {METRIC: values}, {}, len(values), 10)


def enumerated(differences: list[float]) -> float:
    """The definition: every assignment of signs, one after the other."""
    real = abs(sum(differences))
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    as_far = sum(abs(sum(s * d for s, d in zip(row, differences, strict=True))) >= real - 1e-12 for row in signs)
    return as_far / len(signs)


def test_hand_cases() -> None:
    assert p_value(np.array([0.3])) == 1.0  # one query: either sign is as far
    assert p_value(np.array([0.3, 0.2, 0.5])) == 2 / 8  # only all plus and all minus
    assert p_value(np.array([0.5, 0.5, 0.5, -0.5])) == 10 / 16  # |sum| is 1: all but the 6 that cancel
    assert p_value(np.array([0.5, -0.25])) == 1.0
    assert p_value(np.zeros(5)) == 1.0


@pytest.mark.parametrize("count", [2, 5, 9, 13])
def test_up_to_fourteen_queries_it_equals_the_enumeration(count: int) -> None:
    differences = np.random.default_rng(count).normal(0.3, 1.0, size=count).round(2)
    assert p_value(differences) == pytest.approx(enumerated(differences.tolist()), abs=1e-12)
    assert p_value(differences, seed=1) == p_value(differences, seed=2)  # nothing is drawn


def test_above_it_is_drawn_near_an_independent_simulation_and_depends_on_the_seed_alone() -> None:
    differences = np.random.default_rng(3).normal(0.25, 1.0, size=40)
    draw = random.Random(11)
    real, values = abs(differences.sum()), differences.tolist()
    as_far = sum(abs(sum(d if draw.random() < 0.5 else -d for d in values)) >= real for _ in range(20_000))
    found = p_value(differences)
    assert 0.01 < found < 0.9
    assert found == pytest.approx(as_far / 20_000, abs=0.015)
    assert found == p_value(differences)
    assert found != p_value(differences, seed=1)


def test_queries_that_do_not_differ_change_nothing() -> None:
    differences = np.random.default_rng(4).normal(0.3, 1.0, size=12)
    assert p_value(np.concatenate([differences, np.zeros(500)])) == p_value(differences)


def test_a_drawn_p_value_is_never_zero_and_both_directions_are_alike() -> None:
    differences = np.full(200, 0.1)
    assert p_value(differences) == 1 / 10_001
    assert p_value(-differences) == p_value(differences)
    with pytest.raises(ValueError, match="permutations is 0"):
        p_value(differences, permutations=0)


def test_systems_are_paired_by_query_id_whatever_the_order() -> None:
    values = {f"q{row}": row / 20 for row in range(20)}
    better = {name: value + 0.05 for name, value in reversed(values.items())}
    assert randomisation_test(result(values), result(better, "b"), METRIC) < 0.001
    assert randomisation_test(result(values), result(dict(reversed(values.items())), "b"), METRIC) == 1.0
    with pytest.raises(ValueError, match="different queries"):
        randomisation_test(result(values), result({"other": 1.0}, "b"), METRIC)
