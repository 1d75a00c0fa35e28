"""Published sets and composed rows through the whole program: evaluate, one step of training, a short run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from preset_cases import CAPTIONS, PHOTOS, PRODUCTS, SETS, WRITERS, draw, write_cirr

from vembed.batch import Composed, Image
from vembed.config.schema import Config
from vembed.data.keys import DataKeys
from vembed.data.picture_survey import ItemCounts, RetrievalMode
from vembed.data.run_data import RunData, load_run_data, record_texts
from vembed.entrypoints.evaluate import main
from vembed.errors import DataError
from vembed.training.run import run_from_config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("undrawn")

COUNTS = {
    "flickr30k": (PHOTOS["test"] * CAPTIONS, PHOTOS["test"]),
    "sop": (sum(PRODUCTS["test"].values()) - 1, sum(PRODUCTS["test"].values())),
    "cirr": (2 * SETS, 6 * SETS),
}
"""Queries that count, and documents."""

MODES = {"flickr30k": "t2i", "sop": "i2i", "cirr": "m2i"}


def evaluate(tmp_path: Path, name: str, *words: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Evaluate an untrained model; return its metrics.json and the ids that each query found, best first."""
    folder = tmp_path / "set"
    if not folder.exists():
        WRITERS[name](folder)
    output = tmp_path / "-".join(("out", *words))
    arguments = ["builtin:tiny-clip", "--data", f"{name}:{folder}", "--output", str(output), *words]
    assert main(arguments, program="vembed evaluate") == 0
    (metrics,) = output.glob("*/*/metrics.json")
    run: dict[str, list[str]] = {}
    for line in (metrics.parent / "run.trec").read_text().splitlines():
        query, _, document, *_ = line.split()
        run.setdefault(query, []).append(document)
    return json.loads(metrics.read_text()), run


@pytest.mark.parametrize("name", WRITERS)
def test_a_published_set_is_evaluated_by_its_name(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, run = evaluate(tmp_path, name)
    assert (found["num_queries"], found["num_documents"]) == COUNTS[name]
    assert len(run) == COUNTS[name][0]
    out = capsys.readouterr().out
    assert "hit@1 " in out
    if name == "sop":
        assert not any(query in documents for query, documents in run.items()), "no picture finds itself"
        assert {len(documents) for documents in run.values()} == {COUNTS[name][1] - 1}
    if name == "flickr30k":
        assert {len(documents) for documents in run.values()} == {PHOTOS["test"]}
    if name == "cirr":
        assert found["metrics"]["recall@50"] == 1.0
        assert not any(f"val-{int(query) // 10}-0" in documents for query, documents in run.items())
        assert {len(documents) for documents in run.values()} == {6 * SETS - 1}


@pytest.mark.slow
def test_the_subset_of_cirr_is_the_whole_ranking_restricted(tmp_path: Path) -> None:
    whole, ranked = evaluate(tmp_path, "cirr")
    subset, found = evaluate(tmp_path, "cirr", "--split", "val-subset")
    for query, documents in found.items():
        group = int(query) // 10
        assert documents == [name for name in ranked[query] if name.startswith(f"val-{group}-")]
        assert len(documents) == 5
    targets = {query: f"val-{int(query) // 10}-{int(query) % 10 + 1}" for query in found}
    for k in (1, 2, 3):
        share = np.mean([targets[query] in documents[:k] for query, documents in found.items()])
        assert subset["metrics"][f"recall@{k}"] == pytest.approx(share)
    assert "recall@2" not in whole["metrics"]


@pytest.mark.slow
def test_a_cut_off_of_a_thousand_may_be_asked_for(tmp_path: Path) -> None:
    found, _ = evaluate(tmp_path, "sop", "--metric", "hit@1000")
    assert found["metrics"]["hit@1000"] == 1.0


def dry_run(tmp_path: Path, data: str, **keys: Any) -> None:
    values = {
        "model_name": "builtin:tiny-clip",
        "data_path": data,
        "test_data_path": data,
        "eval_strategy": "no",
        "batch_size": 4,
        "report_to": "none",
        "bm25": False,
        "output_dir": str(tmp_path / "run"),
    }
    run_from_config(Config.model_validate(values | keys), mode="dry-run")


@pytest.mark.parametrize(
    "name", ["flickr30k", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sop", "cirr"))]
)
def test_a_published_set_trains_a_step_in_its_own_mode_alone(tmp_path: Path, name: str) -> None:
    folder = WRITERS[name](tmp_path / "set")
    dry_run(tmp_path, f"{name}:{folder}", retrieval_mode=MODES[name])
    with pytest.raises(DataError, match=f"set retrieval_mode to {MODES[name]}"):
        dry_run(tmp_path, f"{name}:{folder}", retrieval_mode="t2t")
    with pytest.raises(DataError, match="builtin:ngram-bag reads texts, and"):
        dry_run(tmp_path, f"{name}:{folder}", model_name="builtin:ngram-bag")


@pytest.mark.slow
def test_a_short_run_on_composed_queries_ends_with_a_report_that_shows_both_parts(tmp_path: Path) -> None:
    folder = write_cirr(tmp_path / "set")
    keys = {
        "model_name": "builtin:tiny-clip",
        "data_path": f"cirr:{folder}",
        "val_data_path": f"cirr:{folder}",
        "val_data_split": "val-subset",
        "test_data_path": f"cirr:{folder}",
        "batch_size": 4,
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "report_to": "none",
        "output_dir": str(tmp_path / "run"),
    }
    result = run_from_config(Config.model_validate(keys))
    assert result is not None
    report = (tmp_path / "run/report/report.html").read_text("utf-8")
    assert "show 1 more of group 0" in report
    assert "data:image/" in report
    assert "pictures with a text search pictures" in report
    final = json.loads((tmp_path / "run/evaluation/final/metrics.json").read_text())
    assert "recall@50" in final["metrics"]


# Rows of one's own


def write_rows(folder: Path, *, query_text: str = "but {} red", positive: str = "{}-b.png") -> Path:
    """Write 4 rows whose queries are a picture and a text."""
    rows = []
    for number in range(4):
        for side in "ab":
            draw(folder / f"{number}-{side}.png", 10 * number + ord(side))
        text = query_text.format(number)
        target = positive.format(number)
        column = "positive_image" if target.endswith(".png") else "positive"
        rows.append({"query": text, "query_image": f"{number}-a.png", column: target})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(path: Path, mode: RetrievalMode = "auto") -> RunData:
    keys = DataKeys(data_path=str(path), test_data_path=str(path), retrieval_mode=mode)
    return load_run_data(keys, needs_dev=False)


def test_composed_rows_are_of_mode_m(tmp_path: Path) -> None:
    pictures, texts = write_rows(tmp_path / "i"), write_rows(tmp_path / "t", positive="answer {}")
    facts = dict(loaded(pictures, "m2i").facts())
    assert facts["training direction"] == "pictures with a text search pictures"
    assert facts["distinct pictures in them"].startswith("8, all 24 x 20")
    assert loaded(texts, "m2t").counts.items.direction == "pictures with a text search texts"
    with pytest.raises(
        DataError, match="holds 4 query pictures with a text, 4 document texts; set retrieval_mode to m2t"
    ):
        loaded(texts, "m2i")
    with pytest.raises(DataError, match="set retrieval_mode to m2i"):
        loaded(pictures, "i2i")
    assert sorted(record_texts(loaded(pictures).records)) == [f"but {number} red" for number in range(4)]


def test_documents_of_both_kinds_have_no_mode_but_auto() -> None:
    counts = ItemCounts()
    counts.add("query", ["a"])
    counts.add("document", [Composed((Image("c.png"),), "t")])
    counts.require("auto", "set")
    with pytest.raises(DataError, match="1 document pictures with a text; set retrieval_mode to auto"):
        counts.require("t2i", "set")


def test_the_fingerprint_of_a_run_is_of_both_parts(tmp_path: Path) -> None:
    before = loaded(write_rows(tmp_path / "a")).fingerprint
    assert loaded(write_rows(tmp_path / "b")).fingerprint == before, "wherever the pictures lie"
    assert loaded(write_rows(tmp_path / "c", query_text="but {} blue")).fingerprint != before
    other = write_rows(tmp_path / "d")
    draw(tmp_path / "d/2-a.png", 999)
    assert loaded(other).fingerprint != before


def test_composed_rows_train_a_step_and_need_a_model_of_two_towers(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    dry_run(tmp_path, str(path), retrieval_mode="m2i", image_augmentation="light")
    with pytest.raises(DataError, match="reads texts, and"):
        dry_run(tmp_path, str(path), model_name="builtin:ngram-bag")
