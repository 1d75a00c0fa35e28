"""Measures of graded pairs: those of scipy and scikit-learn, their intervals, and what each query adds to them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from vembed.data.judged import RetrievalData
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.errors import DataError
from vembed.evaluation.evaluate import EvaluationOptions, evaluate
from vembed.evaluation.graded import DRAWS, GradedPairs, graded_page, load_pairs, measure_pairs
from vembed.evaluation.judge import CONFIDENCE, verdict
from vembed.evaluation.metrics import PAIR_MEASURES, RankedValues, pair_values_by_query
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
    def drawn_pairs(rng: np.random.Generator, queries: int) -> tuple[GradedPairs, dict[str, Any]]:
        shared, own = (rng.normal(size=(2, queries, 1)), rng.normal(size=(2, queries, 4)))
        topic, noise = (0.8 * shared + 0.6 * own).reshape(2, -1)
        return pairs_of(np.round(topic), per_query=4), {"model": 0.5 * topic + noise}

    rng = np.random.default_rng(4)
    truth = value(measure_pairs(*drawn_pairs(rng, 20_000), draws=2), "spearman")
    held, too_narrow = 0, 0
    for _ in range(60):
        pairs, similarities = drawn_pairs(rng, 60)
        found = measure_pairs(pairs, similarities, draws=100).estimates["model"]["spearman"]
        held += found.low <= truth <= found.high
        alone = pairs_of(pairs.grade_P)  # as if each pair had a query of its own
        narrow = measure_pairs(alone, similarities, draws=100).estimates["model"]["spearman"]
        too_narrow += narrow.low <= truth <= narrow.high
    assert held >= 51  # 57 are expected, fewer than 51 come once in 300
    assert too_narrow < held


@pytest.mark.slow
def test_the_interval_of_average_precision_holds_the_truth_for_50_pairs() -> None:
    def drawn_pairs(rng: np.random.Generator, count: int) -> tuple[GradedPairs, dict[str, Any]]:
        truth_P = (rng.random(count) < 0.5).astype(np.float64)
        return pairs_of(truth_P, kind="pair"), {"model": truth_P + rng.normal(size=count)}

    rng = np.random.default_rng(7)
    truth, held = value(measure_pairs(*drawn_pairs(rng, 200_000), draws=1), "average precision"), 0
    for _ in range(300):
        found = measure_pairs(*drawn_pairs(rng, 50), draws=100).estimates["model"]["average precision"]
        held += found.low <= truth <= found.high
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert held >= 280, "285 are expected; of percentiles 266 do"


def test_pairs_of_one_query_have_no_interval_and_one_model_no_differences() -> None:
    pairs = pairs_of([1.0, 0.0, 1.0], kind="pair", per_query=3)
    models = {"a": np.array([3, 2, 1], dtype=np.float32), "b": np.array([3, 1, 2], dtype=np.float32)}
    lines = render_terminal(graded_page([measure_pairs(pairs, models, draws=5)], [], ""), columns=120).splitlines()
    assert [line.split() for line in lines if re.match("  [ab] ", line)][:2] == [
        ["a", "0.833", "0.500"],
        ["b", "1.000", "1.000", "+0.167", "≈", "within", "noise"],
    ]
    table = graded_page([measure_pairs(pairs, {"a": models["a"]}, draws=5)], [], "").sections[0].blocks[0]
    assert isinstance(table, Table)
    assert table.heads == ["Model", "average precision", "ROC AUC"]


def read_pairs(folder: Path, rows: list[dict[str, Any]], kind: PairKind) -> GradedPairs:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return load_pairs(DataSource(str(path), "test", DataKeys(label_kind=kind)))


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
    ("kind", "labels"),
    [("grade", [2, 2]), ("pair", [1, 1]), ("grade", [None, None]), ("pair", [1, 3])],
    ids=["one grade", "one truth", "no grade", "no truth"],
)
def test_pairs_without_an_order_are_refused(tmp_path: Path, kind: PairKind, labels: list[Any]) -> None:
    rows = [{"query": f"q{place}", "positive": "x", "label": label} for place, label in enumerate(labels)]
    with pytest.raises(DataError, match=r"pairs\.jsonl"):
        read_pairs(tmp_path, rows, kind)


def sample(kind: PairKind, *, num_queries: int = 150, per_query: int = 4, seed: int = 0, ties: int = 40) -> Any:
    rng = np.random.default_rng(seed)
    query_P = np.repeat(np.arange(num_queries), per_query)
    latent = rng.normal(size=len(query_P)) + rng.normal(size=num_queries)[query_P]
    grade_P = np.clip(np.round(latent + 1), 0, 4) if kind == "grade" else (latent > 0.5).astype(np.float64)
    similarity = latent + rng.normal(size=len(query_P))
    return grade_P, np.round(similarity * ties / 4).astype(np.float32), query_P


@pytest.mark.parametrize("kind", ["grade", "pair"])
@pytest.mark.parametrize("ties", [8, 40_000])
def test_the_value_is_the_measure_and_influences_are_its_slopes(kind: PairKind, ties: int) -> None:
    grade_P, similarity_P, query_P = sample(kind, ties=ties)
    similarities, grades, once_P = RankedValues(similarity_P), RankedValues(grade_P), np.ones(len(grade_P))
    for measure, influence in PAIR_MEASURES[kind].values():
        value, influence_P = measure(similarities, grades, once_P), influence(similarities, grades)
        assert influence_P.mean() == pytest.approx(0, abs=1e-12)
        assert pair_values_by_query(value, influence_P, query_P, 150).mean() == pytest.approx(value, abs=1e-12)
        assert influence_P.std() > 0.1
        for place in (0, 7, 300):
            # Weights, not copies: ranks of many copies of all pairs, of which one has some more.
            weight_P = np.full(len(grade_P), 1e6)
            before = measure(similarities, grades, weight_P)
            weight_P[place] += 100.0
            slope = (measure(similarities, grades, weight_P) - before) * 1e4 * len(grade_P)
            assert influence_P[place] == pytest.approx(slope, abs=2e-3 * max(1.0, abs(slope)))


@pytest.mark.parametrize("kind", ["grade", "pair"])
def test_intervals_are_those_of_drawing_queries_again(kind: PairKind) -> None:
    grade_P, similarity_P, query_P = sample(kind)
    noise_P = np.random.default_rng(9).normal(size=len(grade_P)).astype(np.float32)
    pairs = pairs_of(grade_P, kind=kind, per_query=4)
    assert np.array_equal(pairs.query_P, query_P)
    drawn = measure_pairs(pairs, {"before": similarity_P + 8 * noise_P, "after": similarity_P}, draws=DRAWS)
    comparison = drawn.verdicts["after"].comparison
    results = [result_of(kind, grade_P, each, query_P) for each in (similarity_P + 8 * noise_P, similarity_P)]
    found = verdict(results[0], results[1], comparison.metric).comparison
    assert found.confidence == CONFIDENCE
    assert (found.baseline, found.candidate) == pytest.approx((comparison.baseline, comparison.candidate), abs=1e-9)
    assert found.high - found.low == pytest.approx(comparison.high - comparison.low, rel=0.12)
    assert found.low == pytest.approx(comparison.low, abs=0.1 * (comparison.high - comparison.low))


def result_of(kind: PairKind, grade_P: Any, similarity_P: Any, query_P: Any) -> Any:
    """Evaluate made-up vectors whose inner products are the similarities."""
    grades: dict[str, dict[str, float]] = {}
    for place, (query, grade) in enumerate(zip(query_P.tolist(), grade_P.tolist(), strict=True)):
        grades.setdefault(f"q{query}", {})[f"d{place}"] = grade
    documents = {f"d{place}": f"d{place}" for place in range(len(grade_P))}
    judged = {query: dict.fromkeys(own, 1) for query, own in grades.items()}
    task = RetrievalData("made", {query: query for query in grades}, documents, judged, grades=grades, kind=kind)

    def encode(items: Any, side: str) -> Any:
        if side == "query":
            return np.ones((len(items), 1), dtype=np.float32)
        return similarity_P[[int(item[1:]) for item in items]][:, None]

    return evaluate(encode, task, EvaluationOptions(system="made"))


def test_a_result_has_the_queries_own_documents_alone_and_reads_back() -> None:
    grade_P, similarity_P, query_P = sample("grade", num_queries=20)
    found = result_of("grade", grade_P, similarity_P, query_P)
    assert list(found.metrics) == list(found.per_query) == ["spearman"]
    assert found.deciding("ndcg@10") == "spearman"
    assert [len(hits) for hits in found.run.values()] == [4] * 20
    assert all(hits[0][1] >= hits[-1][1] for hits in found.run.values())
    constant = result_of("grade", grade_P, np.ones_like(similarity_P), query_P)
    assert constant.metrics["spearman"] == 0


@pytest.mark.parametrize(
    ("rows", "kind", "grades"),
    [
        ([{"label": 1}, {"label": 0}, {"label": 1, "negatives": ["x"]}], "pair", [1, 0, 1, 0]),
        ([{"score": 0.5}, {"score": 0.25}, {}], "grade", [0.5, 0.25]),
        ([{"score": [0.5, 0.1], "negatives": ["x"]}, {"score": 0.25}], "grade", None),
        ([{"score": 0.5}, {"score": 0.5}], "grade", None),
        ([{}, {}], "grade", None),
    ],
)
def test_rows_make_a_task_of_pairs_where_they_say_how_close_pairs_are(
    rows: list[dict[str, Any]], kind: PairKind, grades: list[float] | None, tmp_path: Path
) -> None:
    given = [{"query": f"q {place}", "positive": f"d {place}", **row} for place, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    options = {"role": "test", "keys": DataKeys(label_kind=kind)}
    task = DataSource(str(tmp_path / "rows.jsonl"), **options).judged(takes_pairs=True)
    assert [grade for own in task.grades.values() for grade in own.values()] == (grades or [])
    assert not DataSource(str(tmp_path / "rows.jsonl"), **options).judged().grades
    assert not task.crosses_modalities
