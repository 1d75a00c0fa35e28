"""`vembed evaluate` as a benchmark: every model on every set, once; a rerun does only what is new."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytrec_eval
import torch

from vembed.entrypoints.evaluate import main
from vembed.models.tables import NgramBag, NgramBagConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS = ("apple", "train", "river", "stone", "window", "garden", "paper", "winter", "music", "bridge")
VARIANTS = ("--dims", "8,16", "--quantize", "int8", "binary", "--index", "HNSW8", "IVF2,Flat:nprobe=2")


def write_set(folder: Path, *, seed: int, documents: int = 60, queries: int = 20) -> Path:
    """Write a BEIR folder of random word lists, each query sharing words with its documents."""
    draw = random.Random(seed)
    texts = {f"d{row}": " ".join(draw.choices(WORDS, k=8)) for row in range(documents)}
    relevant = {f"q{row}": draw.sample(list(texts), 2) for row in range(queries)}
    asked = {name: " ".join(texts[found[0]].split()[:3]) for name, found in relevant.items()}
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", texts), ("queries", asked)):
        lines = (json.dumps({"_id": key, "text": text}) for key, text in rows.items())
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    lines = (f"{query}\t{name}\t{grade}" for query, found in relevant.items() for grade, name in enumerate(found, 1))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
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
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of every encoder call."""
    rows: list[int] = []
    forward = NgramBag.forward

    def counting(self: NgramBag, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        rows.append(len(inputs["offsets"]))
        return forward(self, inputs)

    monkeypatch.setattr(NgramBag, "forward", counting)
    yield rows
    rows.clear()


def evaluate(*words: object) -> int:
    return main([str(word) for word in words], program="vembed evaluate")


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


def test_every_number_on_the_leaderboard_is_that_of_pytrec_eval_on_its_run_file(
    models: list[Path], sets: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert evaluate(*models, "bm25", "--data", *sets, "--output", out, *VARIANTS) == 0
    board = board_of(out)
    qrels = {folder.name: qrels_of(folder) for folder in sets}

    def scored(task: str, folder: str) -> float:
        judged = qrels[task.split("/")[0]]
        found = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10"}).evaluate(run_of(out / folder))
        return sum(found.get(query, {"ndcg_cut_10": 0.0})["ndcg_cut_10"] for query in judged) / len(judged)

    cells = [cell for row in board["systems"] for cell in row["sets"]]
    assert len(cells) == 3 * 2
    assert len(board["variants"]) == 2 * 2 * (1 + 2 + 2 * 3 + 2)
    for cell in cells:
        assert cell["value"] == pytest.approx(scored(cell["task"], cell["folder"]), abs=1e-12)
    for row in board["variants"]:
        assert row["value"] == pytest.approx(scored(row["task"], row["folder"]), abs=1e-12)
    for row in board["systems"]:
        assert row["mean"] == pytest.approx(np.mean([cell["value"] for cell in row["sets"]]))
    assert len({round(cell["value"], 6) for cell in cells}) > 3  # the systems do differ


@pytest.mark.slow
def test_each_side_of_each_set_is_encoded_once_and_a_rerun_encodes_nothing(
    models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*models, "--bm25", "--data", *sets, "--output", tmp_path / "out", *VARIANTS]
    assert evaluate(*words) == 0
    assert sum(encoded) == 2 * 2 * (60 + 20)
    first = board_of(tmp_path / "out")
    encoded.clear()
    capsys.readouterr()
    assert evaluate(*words) == 0
    assert encoded == []
    told = capsys.readouterr().out
    for system, task in itertools.product(("bag", "sack", "BM25"), ("one/test", "two/test")):
        assert f"{system} on {task}: done and unchanged, skipped" in told
    assert board_of(tmp_path / "out") == first  # times too: they are those of the run that measured them


@pytest.mark.slow
def test_a_rerun_with_new_forms_and_a_new_model_encodes_only_the_new_model(
    models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert evaluate(models[0], "--data", sets[0], "--output", out) == 0
    encoded.clear()
    assert evaluate(*models, "--data", sets[0], "--output", out, *VARIANTS) == 0
    assert sum(encoded) == 60 + 20
    told = capsys.readouterr().out
    assert "bag on one/test: vectors of the documents: 60 unchanged, read from" in told
    assert "sack on one/test: vectors of the documents: making 60 of 60: " in told


@pytest.mark.slow
def test_changed_weights_texts_and_judgements_redo_what_hangs_on_them(
    models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "out", [*models, "bm25", "--data", *sets, "--output", tmp_path / "out"]
    assert evaluate(*words) == 0

    def rerun() -> str:
        encoded.clear()
        capsys.readouterr()
        assert evaluate(*words) == 0
        return capsys.readouterr().out

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


@pytest.mark.slow
def test_without_kept_vectors_the_numbers_are_the_same_and_nothing_heavy_is_written(
    models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int]
) -> None:
    words = [models[0], "--data", sets[0], *VARIANTS]
    assert evaluate(*words, "--output", tmp_path / "kept") == 0
    assert evaluate(*words, "--output", tmp_path / "bare", "--no-keep-vectors") == 0
    assert numbers(board_of(tmp_path / "bare")) == numbers(board_of(tmp_path / "kept"))
    assert len(list((tmp_path / "kept").rglob("vectors.npy"))) == 2
    assert list((tmp_path / "bare").rglob("*.npy")) == []
    encoded.clear()
    assert evaluate(*words, "--output", tmp_path / "bare", "--no-keep-vectors") == 0
    assert encoded == []  # finished numbers need no vectors
    assert evaluate(*words, "--dims", "4", "--output", tmp_path / "bare", "--no-keep-vectors") == 0
    assert sum(encoded) == 60 + 20


@pytest.mark.slow
def test_an_interrupted_benchmark_goes_on_where_it_stopped(
    models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*models, "--data", *sets, "--output", tmp_path / "out"]
    counting = NgramBag.forward

    def interrupted(self: NgramBag, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if sum(encoded) >= 60 + 20 + 60:  # the first set is done, and the documents of the second one are
            raise KeyboardInterrupt
        return counting(self, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(NgramBag, "forward", interrupted)
        assert evaluate(*words) == 130
    assert not (tmp_path / "out" / "leaderboard.json").exists()
    encoded.clear()
    assert evaluate(*words) == 0
    assert sum(encoded) == 20 + 2 * (60 + 20)
    found = numbers(board_of(tmp_path / "out"))
    assert evaluate(*words[:-1], tmp_path / "undisturbed") == 0
    assert numbers(board_of(tmp_path / "undisturbed")) == found


@pytest.mark.slow
def test_a_damaged_vector_file_is_told_and_encoded_again(
    models: list[Path], sets: list[Path], tmp_path: Path, encoded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [models[0], "--data", sets[0], "--output", tmp_path / "out"]
    assert evaluate(*words) == 0
    array = tmp_path / "out" / "bag" / "one_test" / "vectors" / "documents" / "vectors.npy"
    array.write_bytes(array.read_bytes()[:-4])
    encoded.clear()
    assert evaluate(*words, "--dims", "8") == 0
    assert sum(encoded) == 60
    assert "making 60 of 60 again (vectors.npy is damaged)" in capsys.readouterr().out
    assert np.load(array).shape == (60, 32)


def test_bm25_is_a_model_by_name_and_alone(sets: list[Path], tmp_path: Path) -> None:
    assert evaluate("bm25", "--data", sets[0], "--output", tmp_path / "named") == 0
    assert evaluate("bm25", "--bm25", "--data", sets[0], "--output", tmp_path / "both") == 0
    assert [row["system"] for row in board_of(tmp_path / "named")["systems"]] == ["BM25"]
    assert numbers(board_of(tmp_path / "both")) == numbers(board_of(tmp_path / "named"))


def test_bm25_of_another_language_is_measured_anew_and_told(
    sets: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bm25", "--data", sets[0], "--output", tmp_path / "out"]
    assert evaluate(*words) == 0
    assert "BM25 reads words as English" in capsys.readouterr().out
    assert evaluate(*words, "--bm25-language", "german") == 0
    assert "BM25 reads words as German" in capsys.readouterr().out
    board = (tmp_path / "out" / "leaderboard.md").read_text()
    assert "BM25 reads words as German" in board
    assert "English" not in board


@pytest.mark.slow
def test_the_metric_decides_the_order_and_a_misspelt_one_is_refused(
    models: list[Path], sets: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*models, "--data", *sets, "--output", tmp_path / "out"]
    assert evaluate(*words, "--metric", "recall@20") == 0
    board = board_of(tmp_path / "out")
    cell = board["systems"][0]["sets"][0]
    assert board["metric"] == "recall@20"
    metrics = json.loads((tmp_path / "out" / cell["folder"] / "metrics.json").read_text())["metrics"]
    assert cell["value"] == metrics["recall@20"]
    assert "recall@20" in capsys.readouterr().out.splitlines()[-5]
    for wrong, told in (("ndgc@10", "did you mean ndcg@10"), ("ndcg", "ndcg@10"), ("mrr@1001", "between 1 and 1000")):
        assert evaluate(*words, "--metric", wrong) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_model_or_a_set_cannot_give_is_refused_before_anything_is_encoded(
    sets: list[Path], tmp_path: Path, encoded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    large, small = write_model(tmp_path / "large", 0, dimension=32), write_model(tmp_path / "small", 1, dimension=16)
    words = [large, small, "--data", *sets, "--output", tmp_path / "out"]
    for options, told in (
        (("--dims", "24"), "small has 16 dimensions; give at most 16"),
        (("--dims", "8,x"), "'x' is no number of dimensions"),
        (("--dims", "8", "x"), "'x' is no number of dimensions"),
        (("--dims", "0"), "at least 1 dimension"),
        (("--index", "IVF256,Flat"), "at least 256 documents, one/test has 60; use IVF1,Flat"),
        (("--index", "HNSW"), ""),
        (("--index", "Flatt"), "can't build the index 'Flatt'"),
    ):
        code = evaluate(*words, *options)
        assert (code, encoded == []) == ((2, True) if told else (0, False)), options
        assert told in capsys.readouterr().err
        encoded.clear()
    assert evaluate(*words, "--dims", "8", "16", "--index", "IVF1,Flat") == 0
    assert {"8 dims", "16 dims"} <= {row["name"] for row in board_of(tmp_path / "out")["variants"]}
    assert evaluate(large, "--data", sets[0], sets[0], "--output", tmp_path / "out") == 2
    assert "is named twice" in capsys.readouterr().err


def test_two_sets_of_one_name_keep_their_results_apart(models: list[Path], tmp_path: Path) -> None:
    sets = [write_set(tmp_path / name / "set", seed=seed) for seed, name in enumerate(("a", "b"))]
    assert evaluate(models[0], "--data", *sets, "--output", tmp_path / "out") == 0
    cells = board_of(tmp_path / "out")["systems"][0]["sets"]
    assert len({cell["folder"] for cell in cells}) == len({cell["task"] for cell in cells}) == 2
    assert cells[0]["value"] != cells[1]["value"]


def test_the_command_is_kept_without_the_secrets_of_an_address(sets: list[Path], tmp_path: Path) -> None:
    out, canary = tmp_path / "out", "canary0123456789"
    assert evaluate("bm25", "--data", sets[0], "--output", out, "--query-prompt", f"https://user:{canary}@host/") == 0
    command = board_of(out)["command"]
    assert command.startswith("vembed evaluate bm25 --data ")
    assert "@host" in command
    assert not [path for path in out.rglob("*") if path.is_file() and canary in path.read_text()]


@pytest.mark.slow
def test_scifact_with_bm25_and_an_ngram_bag(real_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["builtin:ngram-bag", "bm25", "--data", real_data / "scifact", "--output", out]
    options = ["--dims", "64,128", "--quantize", "int8", "binary", "--index", "HNSW32", "IVF64,Flat:nprobe=64"]
    assert evaluate(*words, *options) == 0
    board = board_of(out)
    assert [row["system"] for row in board["systems"]] == ["BM25", "builtin:ngram-bag"]
    assert board["systems"][0]["mean"] == pytest.approx(0.680, abs=0.001)
    assert board["systems"][1]["sets"][0]["p_value"] == 1 / 10_001
    value = {row["name"]: row["value"] for row in board["variants"]}
    size = {row["name"]: row["cost"]["bytes_per_document"] for row in board["variants"]}
    assert value["IVF64,Flat:nprobe=64"] == pytest.approx(value["exact"], abs=1e-3)  # every list is looked at
    assert value["int8"] == pytest.approx(value["exact"], abs=0.01)
    assert value["64 dims"] < value["128 dims"] < value["exact"]
    assert (size["exact"], size["int8"], size["64 dims, binary"]) == (1024, 256, 8)
    assert size["HNSW32"] > size["exact"]
    for name in ("leaderboard.html", "leaderboard.md"):
        assert "scifact/test" in (out / name).read_text()
