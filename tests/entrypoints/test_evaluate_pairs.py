"""`vembed evaluate --label-kind grade` and `pair`: pairs are measured instead of a search."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from scipy.stats import spearmanr
from test_benchmark_command import evaluate, write_set

import vembed
from vembed.models.tables import NgramBag, NgramBagConfig

if TYPE_CHECKING:
    from pathlib import Path

ROWS: list[dict[str, Any]] = [
    {"sentence1": "a red fox", "sentence2": "a red fox runs", "score": 4.5},
    {"sentence1": "a red fox", "sentence2": "a red car", "score": 2},
    {"sentence1": "a red fox", "sentence2": "two boats", "score": 0},
    {"sentence1": "the <b>old</b> door", "sentence2": "an old door", "score": 4},
    {"sentence1": "the <b>old</b> door", "sentence2": "a green hat", "score": 0.5},
    {"sentence1": "a quick bird", "sentence2": "a bird is quick", "score": 5},
    {"sentence1": "a quick bird", "sentence2": "an old door", "score": 0},
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    return path


@pytest.mark.slow
def test_models_are_measured_on_graded_pairs_and_compared(
    bag: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    other, out = tmp_path / "other", tmp_path / "out"
    NgramBag(NgramBagConfig(dimension=8, buckets=64)).save(other)
    assert evaluate(bag, other, "--data", pairs, "--output", out, "--label-kind", "grade") == 0

    model, grades = vembed.load(bag), [row["score"] for row in ROWS]
    queries, documents = (
        model.encode([row[column] for row in ROWS], side)
        for column, side in (("sentence1", "query"), ("sentence2", "document"))
    )
    expected = spearmanr((queries * documents).sum(axis=1), grades).statistic
    report = json.loads((out / "report.json").read_text())
    (measured,) = report["sets"]
    assert (measured["pairs"], measured["queries"], measured["label_kind"]) == (7, 3, "grade")
    first, second = measured["models"]
    found = first["measures"]["spearman"]
    assert found["value"] == pytest.approx(expected, abs=1e-6)
    assert found["low"] <= found["value"] <= found["high"]
    assert first["difference_to_first"] is None
    gap = second["measures"]["spearman"]["value"] - found["value"]
    assert second["difference_to_first"]["value"] == pytest.approx(gap)

    told = capsys.readouterr().out
    assert "pairs.jsonl: 7 pairs of 3 queries\n- other against bag: " in told
    low, high = (f"{found[bound]:.3f}".replace("-", "\N{MINUS SIGN}") for bound in ("low", "high"))
    assert re.search(rf"^  bag  +{expected:.3f} \({low} to {high}\)$", told, re.MULTILINE)
    assert f"written to {out / 'report.html'}" in told
    for name in ("report.html", "report.md"):
        text = (out / name).read_text()
        assert f"{expected:.3f}" in text
        assert "Similarity of the pairs of each grade" in text


def test_truths_of_pairs_are_measured_by_average_precision(bag: Path, tmp_path: Path) -> None:
    rows = [{**row, "score": int(row["score"] > 1)} for row in ROWS]
    path = tmp_path / "truths.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert evaluate(bag, "--data", path, "--output", tmp_path / "out", "--label-kind", "pair") == 0
    (measured,) = json.loads((tmp_path / "out" / "report.json").read_text())["sets"]
    measures = measured["models"][0]["measures"]
    assert list(measures) == ["average precision", "ROC AUC"]
    assert all(0.0 <= found["low"] <= found["high"] <= 1.0 for found in measures.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--dims", "8", "--bm25"],
            "--label-kind grade measures pairs and searches nothing: leave out --bm25 and --dims",
        ),
        (["--metric", "recall@5"], "leave out --metric"),
        (["bm25"], "bm25 is no model of vectors: leave it out"),
    ],
)
def test_words_of_a_search_are_refused(
    bag: Path, pairs: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(bag, *words, "--data", pairs, "--output", tmp_path / "out", "--label-kind", "grade") == 2
    assert message in capsys.readouterr().err


def test_a_set_with_judgements_is_searched_as_before_but_not_beside_pairs(
    bag: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir = write_set(tmp_path / "beir", seed=0)
    assert evaluate(bag, "--data", beir, "--output", tmp_path / "board", "--label-kind", "grade") == 0
    assert (tmp_path / "board" / "leaderboard.json").is_file()
    assert evaluate(bag, "--data", pairs, beir, "--output", tmp_path / "out", "--label-kind", "grade") == 2
    assert "beir is a set to search: evaluate it with a command of its own" in capsys.readouterr().err


def test_a_picture_for_a_model_of_texts_is_refused(
    bag: Path, tmp_path: Path, balls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = sorted(balls.glob("*.png"))[0]
    rows = [{"query": "red", "positive_image": str(picture), "label": grade} for grade in (1.0, 2.0)]
    path = tmp_path / "pictures.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    words = ("--output", tmp_path / "out", "--label-kind", "grade", "--image-root", balls)
    code = evaluate(bag, "--data", path, *words)
    told = capsys.readouterr().err
    assert (code, "picture" in told) == (3, True), told
