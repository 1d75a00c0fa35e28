"""The map of a report and its near-duplicates: what the vectors say, on a page that stays small."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
import pytest
from test_report_samples import page, sample

from vembed.batch import Image
from vembed.data.judged import RetrievalData
from vembed.evaluation.evaluate import EncodedTask, RunBuilder
from vembed.evaluation.report.vectors import (
    MAP_DOCUMENTS,
    MAP_QUERIES,
    NEAR_COSINE,
    Geometry,
    build_geometry,
    near_pairs,
    project,
)

if TYPE_CHECKING:
    from pathlib import Path


def encoded(task: RetrievalData, documents: np.ndarray, queries: np.ndarray) -> EncodedTask:
    builder = RunBuilder(task, ks=(1, 10), depth=10)
    return EncodedTask(task, builder, documents.astype(np.float32), queries.astype(np.float32), 0.0)


def task_of(num_queries: int, num_documents: int) -> RetrievalData:
    return RetrievalData(
        name="toy",
        queries={f"q{number}": f"query {number}" for number in range(num_queries)},
        documents={f"d{number}": f"text {number}" for number in range(num_documents)},
        qrels={f"q{number}": {f"d{num_documents - 1 - number}": 1} for number in range(num_queries)},
    )


def test_the_map_shows_the_two_directions_of_largest_variance() -> None:
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(50, 2)) * [5.0, 1.0]
    turn, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    rows = np.concatenate([flat, 0.001 * rng.normal(size=(50, 6))], axis=1) @ turn
    places, share = project(rows)
    assert share > 0.999
    assert (places.min(axis=0), places.max(axis=0)) == (pytest.approx([0, 0]), pytest.approx([1, 1]))
    for axis in (0, 1):
        assert abs(np.corrcoef(places[:, axis], flat[:, axis])[0, 1]) > 0.97
    assert project(np.ones((4, 3)))[1] == 0.0, "equal rows have no direction"


def test_pairs_over_the_threshold_are_counted_and_the_closest_are_named() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(1200, 32))
    rows[1100], rows[700] = rows[3], rows[600] + 0.01 * rng.normal(size=32)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    expected = np.argwhere(np.triu(unit @ unit.T > NEAR_COSINE, k=1))
    pairs, count = near_pairs(unit, [f"d{number}" for number in range(1200)])
    assert count == len(expected) == 2
    assert [pair[:2] for pair in pairs] == [("d3", "d1100"), ("d600", "d700")]
    assert pairs[0][2] == pytest.approx(1.0)


def test_a_large_set_is_sampled_with_what_is_relevant_to_its_queries() -> None:
    rng = np.random.default_rng(2)
    task = task_of(300, 900)
    made = build_geometry(encoded(task, rng.normal(size=(900, 16)), rng.normal(size=(300, 16))))
    assert made is not None
    documents = {point.identifier for point in made.points if point.side == "document"}
    queries = {point.identifier for point in made.points if point.side == "query"}
    assert (len(documents), len(queries)) == (MAP_DOCUMENTS, MAP_QUERIES)
    assert all(name in documents for query in queries for name in task.qrels[query])
    assert build_geometry(encoded(task_of(1, 1), np.ones((1, 4)), np.ones((1, 4)))) is None


@pytest.mark.slow
def test_the_page_names_each_point_on_hover_and_shows_both_texts_of_a_pair() -> None:
    report = sample()
    ids, queries = list(report.task.documents), list(report.task.queries)
    rows = np.eye(len(ids), 8)
    rows[1] = rows[0]
    made = build_geometry(encoded(report.task, rows, np.eye(len(report.final.per_query["ndcg@10"]), 8)))
    assert made is not None
    shown = page(replace(report, geometry=made))
    titles = [text for text, path in shown.texts if path[-1:] == ("title",) and "svg" in path]
    assert len(titles) == len(made.points)
    assert any(title.startswith("query: ") for title in titles)
    assert "1 pair of documents is nearly the same to the trained model" in shown.text
    assert "Embedding map" not in page(report).text
    assert queries


@pytest.mark.slow
def test_the_page_stays_under_two_megabytes_with_a_map_of_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    pictures = {}
    for number in range(260):
        path = tmp_path / f"{number}.png"
        PIL.Image.fromarray(rng.integers(0, 255, (200, 200, 3), dtype=np.uint8)).save(path)
        pictures[f"d{number}"] = Image(str(path))
    report = sample()
    task = replace(report.task, documents={**report.task.documents, **pictures})
    asked = len(report.final.per_query["ndcg@10"])
    made = build_geometry(encoded(task, rng.normal(size=(len(task.documents), 16)), rng.normal(size=(asked, 16))))
    assert isinstance(made, Geometry)
    source = page(replace(report, task=task, geometry=made)).source
    assert source.count("<image ") > 50
    assert len(source.encode()) < 2_000_000
