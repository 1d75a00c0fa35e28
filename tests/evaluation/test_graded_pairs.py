"""Measures of graded pairs against scipy and scikit-learn, their intervals, and the differences of models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.errors import DataError
from vembed.evaluation.graded import GradedPairs, graded_page, load_pairs, measure_pairs
from vembed.pages.page import Table
from vembed.pages.terminal import render_terminal

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.data.judged import PairKind
    from vembed.evaluation.graded import PairsOutcome


def pairs_of(grade_P: Any, *, kind: PairKind = "grade", per_query: int = 1) -> GradedPairs:
    grades = np.asarray(grade_P, dtype=np.float64)
    query_P = np.arange(len(grades)) // per_query
    items = [f"text {place}" for place in range(len(grades))]
    return GradedPairs("set", kind, items[: query_P[-1] + 1], items, query_P, np.arange(len(grades)), grades)


def tied(seed: int, count: int = 300) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return grades and similarities that follow them, both with many equal values."""
    rng = np.random.default_rng(seed)
    grade_P = rng.integers(4, size=count).astype(np.float64)
    return grade_P, np.round(grade_P + rng.normal(size=count) * 2).astype(np.float32)


def value(outcome: PairsOutcome, name: str, model: str = "model") -> float:
    return outcome.estimates[model][name].value


def test_the_correlation_and_every_draw_of_it_are_those_of_scipy_among_ties() -> None:
    grade_P, similarity_P = tied(0)
    pairs = pairs_of(grade_P, per_query=3)
    outcome = measure_pairs(pairs, {"model": similarity_P}, draws=50)
    assert value(outcome, "spearman") == pytest.approx(spearmanr(similarity_P, grade_P).statistic, abs=1e-12)
    draw, drawn = np.random.default_rng(0), []
    for _ in range(50):  # with each pair written out as often as its query was drawn
        queries = draw.integers(100, size=100)
        rows = np.concatenate([np.flatnonzero(pairs.query_P == query) for query in queries])
        drawn.append(spearmanr(similarity_P[rows], grade_P[rows]).statistic)
    found = outcome.estimates["model"]["spearman"]
    assert (found.low, found.high) == pytest.approx(np.quantile(drawn, (0.025, 0.975)), abs=1e-9)


def test_truths_are_measured_as_scikit_learn_does_among_ties() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    grade_P, similarity_P = tied(1)
    truth_P = (grade_P > 1).astype(np.float64)
    outcome = measure_pairs(pairs_of(truth_P, kind="pair"), {"model": similarity_P}, draws=5)
    expected = {
        "average precision": metrics.average_precision_score(truth_P, similarity_P),
        "ROC AUC": metrics.roc_auc_score(truth_P, similarity_P),
    }
    assert {name: value(outcome, name) for name in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("kind", "chance"), [("grade", 0.0), ("pair", 0.5)])
def test_a_perfect_model_reaches_one_and_a_random_one_chance(kind: PairKind, chance: float) -> None:
    rng = np.random.default_rng(2)
    grade_P = rng.permutation(np.repeat([0.0, 1.0], 500)) if kind == "pair" else rng.permutation(1000).astype(float)
    models = {
        "random": rng.normal(size=1000).astype(np.float32),
        "perfect": grade_P.astype(np.float32),
        "reversed": -grade_P.astype(np.float32),
        "constant": np.ones(1000, dtype=np.float32),
    }
    outcome = measure_pairs(pairs_of(grade_P, kind=kind), models, draws=300)
    last = "spearman" if kind == "grade" else "ROC AUC"
    assert value(outcome, last, "perfect") == pytest.approx(1.0)
    assert value(outcome, last, "reversed") == pytest.approx(-1.0 if kind == "grade" else 0.0)
    assert value(outcome, last, "constant") == pytest.approx(chance)
    found = outcome.estimates["random"][last]
    assert found.low <= chance <= found.high
    assert outcome.verdicts["perfect"].word == "improved"
    assert outcome.verdicts["perfect"].sentence.startswith("improved: ")
    assert "random" not in outcome.verdicts


def test_a_model_differs_from_itself_by_nothing_and_the_same_pairs_give_the_same_interval() -> None:
    grade_P, similarity_P = tied(3)
    pairs = pairs_of(grade_P)
    models = {"model": similarity_P, "again": similarity_P.copy()}
    both = [measure_pairs(pairs, models, draws=100) for _ in range(2)]
    assert both[0].estimates == both[1].estimates
    found = both[0].verdicts["again"].comparison
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)
    assert both[0].verdicts["again"].word == "within noise"


def test_intervals_hold_the_truth_and_know_that_pairs_of_one_query_resemble_each_other() -> None:
    def sample(rng: np.random.Generator, queries: int) -> tuple[GradedPairs, dict[str, Any]]:
        shared, own = (rng.normal(size=(2, queries, 1)), rng.normal(size=(2, queries, 4)))
        topic, noise = (0.8 * shared + 0.6 * own).reshape(2, -1)
        return pairs_of(np.round(topic), per_query=4), {"model": 0.5 * topic + noise}

    rng = np.random.default_rng(4)
    truth = value(measure_pairs(*sample(rng, 20_000), draws=2), "spearman")
    held, too_narrow = 0, 0
    for _ in range(60):
        pairs, similarities = sample(rng, 60)
        found = measure_pairs(pairs, similarities, draws=100).estimates["model"]["spearman"]
        held += found.low <= truth <= found.high
        alone = pairs_of(pairs.grade_P)  # as if each pair had a query of its own
        narrow = measure_pairs(alone, similarities, draws=100).estimates["model"]["spearman"]
        too_narrow += narrow.low <= truth <= narrow.high
    assert held >= 51  # 57 are expected, fewer than 51 come once in 300
    assert too_narrow < held


def test_the_interval_of_average_precision_holds_the_truth_for_50_pairs() -> None:
    def sample(rng: np.random.Generator, count: int) -> tuple[GradedPairs, dict[str, Any]]:
        truth_P = (rng.random(count) < 0.5).astype(np.float64)
        return pairs_of(truth_P, kind="pair"), {"model": truth_P + rng.normal(size=count)}

    rng = np.random.default_rng(7)
    truth, held = value(measure_pairs(*sample(rng, 200_000), draws=1), "average precision"), 0
    for _ in range(300):
        found = measure_pairs(*sample(rng, 50), draws=100).estimates["model"]["average precision"]
        held += found.low <= truth <= found.high
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert held >= 280, "285 are expected; of percentiles 266 do"


def test_pairs_of_one_query_have_no_interval() -> None:
    pairs = pairs_of([1.0, 0.0, 1.0], kind="pair", per_query=3)
    models = {"a": np.array([3, 2, 1], dtype=np.float32), "b": np.array([3, 1, 2], dtype=np.float32)}
    page = graded_page([measure_pairs(pairs, models, draws=5)], [], "")
    lines = render_terminal(page, columns=120).splitlines()
    assert lines[:8] == [
        "Graded pairs: set",
        "set: 3 pairs of 1 query",
        "- b against a: within noise: average precision 0.833 -> 1.000 (+0.167, 1 query: too few for an interval)",
        "",
        "set",
        "Models on set",
        "Each model with its 95% interval, and its difference to a on the same queries.",
        "  Model  average precision  ROC AUC  Difference in average precision  Verdict",
    ]
    assert [line.split() for line in lines[8:10]] == [
        ["a", "0.833", "0.500"],
        ["b", "1.000", "1.000", "+0.167", "≈", "within", "noise"],
    ]


def test_one_model_has_no_columns_of_differences() -> None:
    grade_P, similarity_P = tied(0)
    page = graded_page([measure_pairs(pairs_of(grade_P), {"model": similarity_P}, draws=5)], [], "")
    table = page.sections[0].blocks[0]
    assert isinstance(table, Table)
    assert (table.heads, table.caption) == (["Model", "spearman"], "Each model with its 95% interval.")


def read_pairs(folder: Path, rows: list[dict[str, Any]], kind: PairKind) -> GradedPairs:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return load_pairs(read(str(path), "test", DataKeys(label_kind=kind)))


def told(pairs: GradedPairs) -> list[tuple[object, object, float]]:
    places = zip(pairs.query_P, pairs.document_P, pairs.grade_P, strict=True)
    return [(pairs.queries[query], pairs.documents[document], grade) for query, document, grade in places]


def test_rows_become_pairs_with_their_grades_and_those_without_are_counted(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "positive": "x", "score": 4.5},
        {"query": "b", "positive": "x", "score": None},
        {"query": "a", "positive": "y", "score": 0},
        {"query": "c", "positive": ["x", "z"], "negatives": ["y"], "score": [3, 2, -1]},
    ]
    pairs = read_pairs(tmp_path, rows, "grade")
    assert sorted(told(pairs)) == [
        ("a", "x", 4.5), ("a", "y", 0.0), ("c", "x", 3.0), ("c", "y", -1.0), ("c", "z", 2.0),
    ]  # fmt: skip
    assert (sorted(pairs.queries), sorted(pairs.documents)) == (["a", "c"], ["x", "y", "z"])
    assert pairs.notes == ("1 row without a grade left out.",)


def test_truths_list_the_negatives_of_their_row_as_false(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "positive": "x", "negatives": ["y"], "label": 1},
        {"query": "b", "positive": "y", "label": 0},
    ]
    assert sorted(told(read_pairs(tmp_path, rows, "pair"))) == [("a", "x", 1.0), ("a", "y", 0.0), ("b", "y", 0.0)]


@pytest.mark.parametrize(
    ("kind", "labels", "words"),
    [
        ("grade", [2, 2], "pairs.jsonl: measuring pairs needs grades that differ in the column label or score; all 2 "),
        ("pair", [1, 1], "needs labels of 1 and of 0 in the column label or score; all 2 pairs have 1"),
        ("grade", [None, None], "no row has one"),
        ("pair", [1, 3], "with label_kind: pair it is 1 (the two belong together) or 0, not the number 3"),
    ],
)
def test_pairs_without_an_order_are_refused(tmp_path: Path, kind: PairKind, labels: list[Any], words: str) -> None:
    rows = [{"query": f"q{place}", "positive": "x", "label": label} for place, label in enumerate(labels)]
    with pytest.raises(DataError) as caught:
        read_pairs(tmp_path, rows, kind)
    assert words in str(caught.value)
