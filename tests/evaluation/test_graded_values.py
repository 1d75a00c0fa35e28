"""What queries add to a measure over graded pairs: its mean is the measure, its spread that of other queries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from test_graded_pairs import pairs_of

from vembed.batch import Ragged
from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.evaluation.evaluate import EvaluationOptions, evaluate, pair_similarities
from vembed.evaluation.graded import DRAWS, measure_pairs
from vembed.evaluation.judge import CONFIDENCE, verdict
from vembed.evaluation.metrics import PAIR_MEASURES, RankedValues, pair_values_by_query

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.data.judged import PairKind


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
    for measure in PAIR_MEASURES[kind].values():
        value, influence_P = measure.value(similarities, grades, once_P), measure.influence(similarities, grades)
        assert influence_P.mean() == pytest.approx(0, abs=1e-12)
        assert pair_values_by_query(value, influence_P, query_P, 150).mean() == pytest.approx(value, abs=1e-12)
        assert influence_P.std() > 0.1
        for place in (0, 7, 300):
            # Weights, not copies: ranks of many copies of all pairs, of which one has some more.
            weight_P = np.full(len(grade_P), 1e6)
            before = measure.value(similarities, grades, weight_P)
            weight_P[place] += 100.0
            slope = (measure.value(similarities, grades, weight_P) - before) * 1e4 * len(grade_P)
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
    from vembed.data.judged import RetrievalData

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


def test_rows_of_several_vectors_are_compared_by_their_best_matches() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(count, 3)).astype(np.float32) for count in (2, 3, 1, 4)]
    ragged = [Ragged.from_rows(each, np.float32) for each in (rows[:2], rows[2:])]
    found = pair_similarities(*ragged, np.array([0, 1, 1]), np.array([1, 0, 1]))
    expected = [(rows[one] @ rows[2 + other].T).max(axis=1).sum() for one, other in ((0, 1), (1, 0), (1, 1))]
    assert found == pytest.approx(expected)


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
    task = read(str(tmp_path / "rows.jsonl"), **options).judged(takes_pairs=True)
    assert [grade for own in task.grades.values() for grade in own.values()] == (grades or [])
    assert not read(str(tmp_path / "rows.jsonl"), **options).judged().grades
    assert not task.crosses_modalities
