"""A run trained on graded pairs: its verdict, its best checkpoint and its report are of their order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kit.runs import Outcome, Site, assert_same_run, run_here, run_keys, run_killed, write_config, write_rows
from kit.several_ranks import exact, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def graded(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run on pairs: a row's own answer has grade 1, one of another row 0 or 0.5."""
    rows = [json.loads(line) for line in site.train.read_text("utf-8").splitlines()]
    pairs = []
    for place, row in enumerate(rows):
        for step, grade in ((0, 1.0), (1, 0.5), (2, 0.0)):  # of three rows that share their answers
            other = rows[place - place % 3 + (place + step) % 3]["positive"]
            pairs.append({"query": row["query"], "positive": other, "score": grade})
    folder = tmp_path_factory.mktemp("graded")
    sets = {name: write_rows(folder / f"{name}.jsonl", part) for name, part in
            (("train", pairs[:126]), ("dev", pairs[126:180]), ("test", pairs[180:]))}  # fmt: skip
    return {
        "data_path": str(sets["train"]), "val_data_path": str(sets["dev"]), "test_data_path": str(sets["test"]),
        "loss_type": "cosent", "label_kind": "grade", "temperature": None, "learning_rate": 1e-2,
        "save_steps": 3, "bm25": True,
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(graded: dict[str, Any], site: Site, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that nothing stopped."""
    outcome = run_keys(tmp_path_factory.mktemp("whole"), site.keys(**graded))
    assert outcome.code == 0, outcome.err
    return outcome


def test_the_verdict_is_a_rank_correlation_with_an_interval_and_chooses_the_checkpoint(whole: Outcome) -> None:
    assert "spearman 0." in whole.last_line or "spearman -0." in whole.last_line
    assert "95% interval" in whole.last_line
    found = [json.loads((whole.folder / f"evaluation/step-{step}/metrics.json").read_text()) for step in (4, 8)]
    assert [list(each["metrics"]) for each in found] == [["spearman"]] * 2
    first, second = (each["metrics"]["spearman"] for each in found)
    best = (whole.folder / "checkpoints" / "BEST").read_text().strip()
    assert int(best.partition("-")[2]) == (8 if second > first else 4)
    plan = json.loads((whole.folder / "plan.json").read_text())["reasons"]
    assert any("test.jsonl has 72 graded pairs, and nothing is searched: Spearman's rank" in each for each in plan)
    assert "BM25 is left out" in whole.out + whole.err


def test_the_report_and_the_card_speak_of_pairs(whole: Outcome) -> None:
    report = (whole.folder / "report" / "report.md").read_text("utf-8")
    assert "spearman" in report
    assert "Ranks and scores" not in report
    assert "72 pairs with a grade" in report
    card = (whole.folder / "model" / "README.md").read_text("utf-8")
    assert "spearman" in card
    page = (whole.folder / "report" / "report.html").read_text("utf-8")
    assert "rank correlation of similarity and grade decides" in page
    assert 'id="queries"' not in page


@pytest.mark.slow
def test_sets_of_different_kinds_stand_beside_each_other(graded: dict[str, Any], site: Site, tmp_path: Path) -> None:
    sets = {"test_data_path": [graded["test_data_path"], str(site.test)], "guard_data": str(site.dev)}
    outcome = run_keys(
        tmp_path, site.keys(**graded | sets | {"val_data_path": None, "eval_strategy": "epoch", "eval_steps": None})
    )
    assert outcome.code == 0, outcome.err
    assert "spearman" in outcome.last_line
    report = (outcome.folder / "report" / "report.md").read_text("utf-8")
    assert "(ndcg@10)" in report
    assert "(spearman)" in report
    assert "mean of" not in report, "nothing is averaged over different measures"
    assert json.loads((outcome.folder / "evaluation/step-0/metrics.json").read_text())["task"] == "held out"
    held_out = json.loads((outcome.folder / "evaluation/step-0/metrics.json").read_text())["metrics"]
    assert list(held_out) == ["spearman"]


@pytest.mark.slow
def test_a_dev_set_of_another_kind_than_the_test_set_chooses_by_its_own_metric(
    graded: dict[str, Any], site: Site, tmp_path: Path
) -> None:
    outcome = run_keys(tmp_path, site.keys(**graded | {"test_data_path": str(site.test), "max_steps": 4}))
    assert outcome.code == 0, outcome.err
    assert "ndcg@10" in outcome.last_line
    report = (outcome.folder / "report" / "report.md").read_text("utf-8")
    assert "Final is the model of step 4, the last and also the best" in report
    assert "Dev spearman" in report


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(
    graded: dict[str, Any], whole: Outcome, site: Site, tmp_path: Path
) -> None:
    config = write_config(tmp_path, site.keys(**graded))
    run_killed(config, before=5)
    outcome = run_here(config)
    assert outcome.code == 0, outcome.err
    assert outcome.last_line == whole.last_line
    assert_same_run(outcome.folder, whole.folder)


@pytest.mark.slow
def test_two_processes_judge_as_one_does(graded: dict[str, Any], site: Site, tmp_path: Path) -> None:
    keys = graded | {"bm25": False}
    alone, shared = (
        {key: value for key, value in exact(site, **keys | more).items() if value is not None}
        for more in ({}, {"batch_size": 8, "num_processes": 2})
    )
    one, two = run_keys(tmp_path / "1", alone), run_ranks(write_config(tmp_path / "2", shared))
    assert (one.code, two.code) == (0, 0), two.err
    assert two.losses == pytest.approx(one.losses, abs=1e-9)
    found = [
        json.loads((each.folder / "evaluation/final/per_query.json").read_text())["spearman"] for each in (one, two)
    ]
    assert list(found[0]) == list(found[1])
    assert np.allclose(list(found[0].values()), list(found[1].values()), atol=1e-6)
