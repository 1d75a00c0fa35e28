"""BM25 is for texts: a task with one picture is told apart, and never half scored."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import PIL.Image
import pytest
import torch

from vembed.batch import Image
from vembed.data.judged import RetrievalData
from vembed.evaluation.benchmark.run import BenchmarkOptions, run_benchmark
from vembed.evaluation.bm25 import evaluate_bm25, why_no_bm25

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = RetrievalData("animals", {"q1": "a cat", "q2": "a dog"}, {"d1": "the cat", "d2": "a dog"}, {"q1": {"d1": 1}})
PICTURE = Image("cat.png", b"bytes")


def test_a_task_of_texts_has_nothing_against_bm25() -> None:
    assert why_no_bm25(TEXTS) is None
    assert evaluate_bm25(TEXTS, (1,)).metrics["hit@1"] == 1.0


@pytest.mark.parametrize(
    ("task", "count"),
    [
        (replace(TEXTS, documents={**TEXTS.documents, "d1": PICTURE}), "1 item is a picture"),
        (replace(TEXTS, queries={**TEXTS.queries, "q2": PICTURE}), "1 item is a picture"),
        (replace(TEXTS, documents=dict.fromkeys(TEXTS.documents, PICTURE)), "2 items are pictures"),
    ],
)
def test_a_task_with_a_picture_on_either_side_says_why_in_one_line(task: RetrievalData, count: str) -> None:
    reason = why_no_bm25(task)
    assert reason is not None
    assert f"{count} among the 4 queries and documents of animals" in reason
    assert "\n" not in reason


def test_calling_it_all_the_same_is_refused_and_scores_nothing() -> None:
    with pytest.raises(TypeError, match="pictures where texts are expected"):
        evaluate_bm25(replace(TEXTS, documents=dict.fromkeys(TEXTS.documents, PICTURE)), (1,))


def test_a_benchmark_leaves_the_set_with_pictures_out_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PIL.Image.new("RGB", (4, 4)).save(tmp_path / "cat.png")
    rows = {"pictures": {"query": "a cat", "positive_image": "cat.png"}, "words": {"query": "a cat", "positive": "cat"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    options = BenchmarkOptions(torch.device("cpu"), 8, None, None, bm25_language="english", poll=lambda: None)
    paths = [str(tmp_path / f"{name}.jsonl") for name in rows]
    with caplog.at_level(logging.INFO, logger="vembed"):
        results = list(run_benchmark([], paths, tmp_path / "out", options))
    assert [result.task for result in results] == ["words.jsonl"]
    assert [record.getMessage().count("BM25 is left out") for record in caplog.records] == [1]
