"""`vembed merge`: a model that loads, the choice of its weights on sets, a report, refusals in words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.runs import word_pairs, write_rows

import vembed
from vembed.api.model import load
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.plugins.merge import choose as choose_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and one whose weights went elsewhere."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = NgramBag(NgramBagConfig(dimension=16, buckets=256, max_words=8))
    model.save(folder / "first")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
    model.save(folder / "second")
    return folder / "first", folder / "second"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Pairs that share words, so that even random vectors find some, and pairs in two languages."""
    folder = tmp_path_factory.mktemp("sets")
    near = [{"query": row["query"], "positive": f"{row['query']} by night"} for row in word_pairs()[:40]]
    return write_rows(folder / "near.jsonl", near), write_rows(folder / "far.jsonl", word_pairs()[40:80])


def test_given_weights_make_a_model_whose_weights_are_their_mean(
    call: Any, models: tuple[Path, Path], tmp_path: Path
) -> None:
    done = call("merge", *models, "--output", tmp_path / "merged", "--weights", "0.25", "0.75")
    assert done.code == 0, done.err
    assert "read back by vembed" in done.out
    one, other, merged = (load(path)._encoder.state_dict() for path in (*models, tmp_path / "merged"))
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, 0.25 * one[name] + 0.75 * other[name])
    record = json.loads((tmp_path / "merged" / "merge.json").read_text("utf-8"))
    assert record == {"models": [str(path) for path in models], "weights": [0.25, 0.75], "method": "linear"}
    assert (tmp_path / "merged" / "README.md").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_weights_are_chosen_on_the_sets_and_the_report_shows_every_mixture(
    call: Any, models: tuple[Path, Path], sets: tuple[Path, Path], tmp_path: Path
) -> None:
    words = ("--output", tmp_path / "merged", "--data", sets[1], "--guard", sets[0], "--steps", "4")
    done = call("merge", *models, *words)
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "merged-report" / "report.json").read_text("utf-8"))
    assert [point["weights"] for point in report["points"]] == [[1 - k / 4, k / 4] for k in range(5)]
    keeps = [point for point in report["points"] if point["guards"][0]["high"] >= 0]
    assert [point["loses"] for point in report["points"]] == [
        point["guards"][0]["high"] < 0 for point in report["points"]
    ]
    best = max(keeps, key=lambda point: point["targets"][0]["value"])
    assert (
        report["chosen"] == best["weights"] == json.loads((tmp_path / "merged" / "merge.json").read_text())["weights"]
    )
    final = vembed.evaluate(tmp_path / "merged", sets[1])
    assert final.metrics["ndcg@10"] == pytest.approx(best["targets"][0]["value"], abs=1e-9)
    page = (tmp_path / "merged-report" / "report.html").read_text("utf-8")
    assert page.count("<svg") == 1
    assert "far" in (tmp_path / "merged-report" / "report.md").read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "merged-report"]


def test_a_merge_that_was_stopped_evaluates_only_what_is_missing(
    call: Any, models: tuple[Path, Path], sets: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    evaluate = choose_module.evaluate

    def counted(encode: Any, task: Any, options: Any) -> Any:
        asked.append(task.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return evaluate(encode, task, options)

    monkeypatch.setattr(choose_module, "evaluate", counted)
    words = ("merge", *models, "--output", tmp_path / "merged", "--data", *sets, "--steps", "2")
    assert call(*words).code != 0
    assert not (tmp_path / "merged").exists()
    assert call(*words).code == 0
    assert len(asked) == 3 + 6 - 2, "two of six were there"


def test_files_at_the_name_of_the_report_that_arent_one_of_merging_stay(
    call: Any, models: tuple[Path, Path], sets: tuple[Path, Path], tmp_path: Path
) -> None:
    page = tmp_path / "merged-report" / "report.html"
    page.parent.mkdir()
    page.write_text("mine")
    words = ("merge", *models, "--output", tmp_path / "merged")
    done = call(*words, "--data", *sets, "--steps", "1", "--overwrite")
    assert done.code == 2
    assert f"the report goes to {page.parent}, " in done.err
    assert call(*words, "--weights", "0.5", "0.5").code == 0, "given weights make no report"
    assert page.read_text() == "mine"
    page.unlink()
    for _ in range(2):  # beside nothing, and over the report of the first
        assert call(*words, "--data", *sets, "--steps", "1", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--weights", "1"), "names 1 weights for 2 models"),
        (("--weights", "0.5", "0.6"), "add up to 1"),
        (("--weights", "nan", "0.6"), "--weights: must be a list [a number, ...]"),
        (("--weights", "0.5", "0.5", "--guard", "near"), "leave one out"),
        (("--data", "there-is-none.jsonl"), "there-is-none.jsonl"),
        (("--data", "near", "--steps", "0"), "--steps: must be >= 1, got 0"),
        (("--data", "near", "--metric", "ndgc@10"), "ndcg@10"),
    ],
)
def test_what_cant_be_done_is_refused_in_words(
    words: tuple[str, ...], message: str, call: Any, models: tuple[Path, Path], sets: tuple[Path, Path], tmp_path: Path
) -> None:
    given = [str(sets[0]) if word == "near" else word for word in words]
    done = call("merge", *models, "--output", tmp_path / "merged", *given)
    assert done.code == (3 if "there-is-none.jsonl" in words else 2)
    assert message in done.err
    assert not any(tmp_path.iterdir())


def test_weights_are_chosen_on_a_test_split_only_where_it_is_named(
    call: Any, models: tuple[Path, Path], tmp_path: Path
) -> None:
    beir = tmp_path / "beir"
    for name in ("corpus", "queries"):
        write_rows(beir / f"{name}.jsonl", [{"_id": f"{row}", "text": f"a fox {row}"} for row in range(4)])
    (beir / "qrels").mkdir()
    (beir / "qrels" / "test.tsv").write_text("".join(f"{row}\t{row}\t1\n" for row in range(4)))
    words = ("merge", *models, "--output", tmp_path / "merged", "--steps", "1", "--data", beir)
    done = call(*words)
    assert done.code == 2
    assert f"{beir} has no validation split; it has: test. Choosing the weights on it would flatter them" in done.err
    assert done.err.endswith("to do so all the same: --split test\n")
    assert call(*words, "--split", "test").code == 0
    (beir / "qrels" / "dev.tsv").write_text("0\t0\t1\n")
    assert call(*words, "--overwrite").code == 0, "the validation split serves unasked"


def test_models_that_dont_belong_together_are_refused(
    call: Any, models: tuple[Path, Path], bag: Path, tmp_path: Path
) -> None:
    done = call("merge", models[0], bag, "--output", tmp_path / "merged", "--weights", "0.5", "0.5")
    assert done.code == 2
    assert "can't be merged" in done.err
    assert not any(tmp_path.iterdir())


def test_the_first_model_alone_is_written_to_the_bit(call: Any, models: tuple[Path, Path], tmp_path: Path) -> None:
    done = call("merge", *models, "--output", tmp_path / "merged", "--weights", "1", "0", "--method", "slerp")
    assert done.code == 0, done.err
    texts = ["a red fox", "un oriv"]
    assert np.array_equal(*(load(path).encode(texts, side="query") for path in (models[0], tmp_path / "merged")))
