"""Recall at every cut-off and the scores by judgement: trec_eval's numbers, and honest about what is missing."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from test_report_samples import METRIC, page, result, sample

from vembed.data.judged import RetrievalData
from vembed.evaluation.metrics import score_run
from vembed.evaluation.report.ranks import build_ranks
from vembed.evaluation.report.run_report import build_page
from vembed.pages.markdown import render_markdown
from vembed.pages.write import render_json


def random_case(depth: int = 100) -> tuple[RetrievalData, dict[str, list[tuple[str, float]]]]:
    rng = random.Random(0)
    documents = [f"d{number}" for number in range(150)]
    run, qrels = {}, {}
    for number in range(30):
        found = rng.sample(documents, depth)
        run[f"q{number}"] = [(name, 1.0 - place / 200) for place, name in enumerate(found)]
        qrels[f"q{number}"] = {name: rng.choice([0, 1, 2]) for name in rng.sample(documents, 12)} | {"lost": 1}
    run["q0"] = []
    task = RetrievalData("random", dict.fromkeys(run, "x"), dict.fromkeys(documents, "y"), qrels)
    return task, run


def test_recall_at_every_cut_equals_trec_evals() -> None:
    task, run = random_case()
    final = result("final", dict.fromkeys(run, 0.5), run=run)
    recall_K = build_ranks(task, final, final, None).recalls_K["final"]
    cuts = [1, 2, 3, 7, 10, 50, 99, 100]
    expected = {name: np.mean(list(values.values())) for name, values in score_run(run, task.qrels, cuts).items()}
    assert 0 < recall_K[9] < recall_K[99] < 1
    for cut in cuts:
        assert recall_K[cut - 1] == pytest.approx(expected[f"recall@{cut}"], abs=1e-12)


def test_scores_are_split_by_judgement_and_those_that_are_not_finite_are_counted() -> None:
    run = {"q1": [("d1", 0.9), ("d2", 0.5)], "q4": [("d1", 0.4), ("d4", math.nan), ("d3", math.inf)]}
    final = result("final", {"q1": 1.0, "q4": 0.0}, run=run)
    split = build_ranks(sample().task, final, final, None).splits[1]
    assert split.relevant.tolist() == [0.9]
    assert split.others.tolist() == [0.5, 0.4], "d1 is judged for q4, with grade 0"
    assert split.num_non_finite == 2
    assert split.summary == (
        "Retrieved: 1 relevant document with median 0.900 and 2 others with median 0.450. "
        "2 scores NaN or infinite, left out."
    )


def test_all_three_forms_show_recall_and_scores() -> None:
    content = build_page(sample())
    shown, markdown, data = page(sample()), render_markdown(content), json.loads(render_json(content))
    assert "Recall at k = 1 to 3" in shown.text
    assert "Scores before training" in shown.text
    assert "Scores after training" in shown.text
    assert [attributes["href"] for attributes in shown.named("a")].count("#ranks") == 1
    assert "| System | recall@1 | recall@3 |" in markdown
    assert "- Scores after training: Retrieved: 3 relevant documents" in markdown
    assert list(data["recall_at_k"]) == ["baseline", "final", "BM25"]
    assert data["recall_at_k"]["final"] == pytest.approx([0.25, 0.5, 0.625])


@pytest.mark.parametrize("run", [{}, {"q1": []}])
def test_a_run_that_found_nothing_has_no_such_section(run: dict) -> None:
    base, final = (replace(each, run=run) for each in (sample().baseline, sample().final))
    report = sample(baseline=base, final=final, bm25=None)
    shown = page(report)
    assert "Ranks and scores" not in shown.text
    assert "## Ranks and scores" not in render_markdown(build_page(report))
    assert "Nothing was retrieved." in shown.text
    assert "Ranks and scores" in page(sample()).text


@pytest.mark.parametrize("score", [0.5, math.nan])
def test_one_document_with_one_score_is_drawn(score: float) -> None:
    run = {"q1": [("d1", score)]}
    base, final = (result(name, {"q1": 1.0}, run=run) for name in ("a", "b"))
    verdict = replace(sample().verdict, comparison=replace(sample().verdict.comparison, metric=METRIC))
    text = page(sample(baseline=base, final=final, bm25=None, verdict=verdict)).text
    assert "Recall at k = 1 to 1" in text
    assert ("Scores after training" in text) == math.isfinite(score)


def test_queries_without_a_judgement_dont_count() -> None:
    task, run = random_case()
    more = {**run, "unjudged": run["q1"]}
    results = [result("x", dict.fromkeys(each, 0.5), run=each) for each in (run, more)]
    first, second = (build_ranks(task, each, each, None).recalls_K["baseline"].tolist() for each in results)
    assert first == second
