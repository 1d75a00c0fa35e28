"""`import vembed`: train, load, evaluate, and what they refuse."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vembed
from vembed.entrypoints import evaluate as evaluate_command
from vembed.entrypoints import train as train_command
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["apple pie", "a train at noon", "", "sort the list, please, and then sort it once more", "x"]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    words = ("red", "blue", "green", "white", "black", "fox", "tree", "car", "lamp", "river")
    rows = [{"query": f"a {one} {two}", "positive": f"{one[::-1]} {two[::-1]}"} for one in words for two in words]
    for name, part in (("train", rows[:70]), ("test", rows[70:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return {
        "model_name": "builtin:ngram-bag", "data_path": str(tmp_path / "train.jsonl"),
        "val_data_path": str(tmp_path / "test.jsonl"), "output_dir": str(tmp_path / "out"), "batch_size": 16,
        "max_steps": 4, "learning_rate": 1e-2, "eval_strategy": "no", "bm25": False, "report_to": "none",
    }  # fmt: skip


# --- import


@pytest.mark.slow
def test_importing_the_package_imports_nothing_heavy_and_its_names_still_work() -> None:
    program = (
        "import gc, sys, vembed\n"
        "assert dir(vembed) == sorted(vembed.__all__)\n"
        "vembed.Config, vembed.DataError\n"
        "assert not {'torch', 'numpy', 'transformers', 'faiss'} & set(sys.modules), 'heavy'\n"
        "assert callable(vembed.load)\n"
        "assert 'torch' in sys.modules\n"
        "assert callable(vembed.train)\n"
        "late = {'matplotlib', 'scipy', 'transformers', 'torchvision', 'torch._dynamo', 'pandas', 'bm25s'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
        "assert gc.isenabled()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_and_others_are_not() -> None:
    for name in vembed.__all__:
        assert getattr(vembed, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        vembed.trian  # type: ignore[attr-defined] # noqa: B018


# --- train


@pytest.mark.slow
def test_a_path_a_mapping_a_config_and_the_command_line_are_the_same_run(keys: dict[str, Any], tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(keys))
    weights = []
    forms: list[Any] = [str(path), keys, vembed.Config(**keys)]
    for number, form in enumerate(forms):
        result = vembed.train(form, output_dir=tmp_path / f"run{number}", seed=3)
        assert result.output == tmp_path / f"run{number}"
        assert result.verdict.sentence
        weights.append((result.output / "model/model.safetensors").read_bytes())
    words = [f"{key}={value}" for key, value in (keys | {"output_dir": str(tmp_path / "command"), "seed": 3}).items()]
    assert train_command.main(["--config_override", *words]) == 0
    weights.append((tmp_path / "command/model/model.safetensors").read_bytes())
    assert len(set(weights)) == 1
    vembed.train(path, output_dir=str(tmp_path / "other"), seed=4)
    assert (tmp_path / "other/model/model.safetensors").read_bytes() != weights[0], "overrides count"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_sise": 8}, ["batch_sise=8"]),
        ({"batch_size": 1}, ["batch_size=1"]),
        ({"learning_rate": -1, "epochs": "x"}, ["learning_rate=-1", "epochs=x"]),
        ({"lr": 0.1, "learning_rate": 0.2}, ["lr=0.1", "learning_rate=0.2"]),
    ],
)
def test_errors_are_those_of_the_command_line(
    changes: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(vembed.ConfigError) as caught:
        vembed.train({"model_name": "builtin:ngram-bag"}, **changes)
    code = train_command.main(["--config_override", "model_name=builtin:ngram-bag", *words, "--validate"])
    assert code == caught.value.exit_code == 2
    told = capsys.readouterr().err.removeprefix("error: ").rstrip("\n")
    assert str(caught.value) == told.replace("override ", "argument ")


def test_values_that_no_file_could_hold_are_refused_by_name() -> None:
    with pytest.raises(vembed.ConfigError, match=r"argument seed=.*a Tensor is no setting"):
        vembed.train({"model_name": "m"}, seed=torch.tensor(1))
    with pytest.raises(vembed.ConfigError, match=r"configuration: column_mapping: .*no setting"):
        vembed.train({"model_name": "m", "column_mapping": {"a": {1, 2}}})
    with pytest.raises(vembed.ConfigError, match="no such file"):
        vembed.train("nowhere.yaml")


def test_a_secret_in_an_override_is_not_shown() -> None:
    with pytest.raises(vembed.ConfigError) as caught:
        vembed.train({"model_name": "m"}, hub_token="hf_canary")
    assert "hub_token" in str(caught.value)
    assert "canary" not in str(caught.value)


# --- load and encode


def test_vectors_are_those_of_the_encoder_in_the_order_of_the_rows(bag: Path) -> None:
    model = vembed.load(bag)
    vectors = model.encode(TEXTS, "document", batch_size=2)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), model.dimension) == (5, 64)
    assert model.similarity == "cosine"
    encoder = load_encoder(ModelKeys(model_name=str(bag))).eval()
    for text, vector in zip(TEXTS, vectors, strict=True):
        features = encoder.featurize([text], "document")
        with torch.no_grad():
            expected = encoder(encoder.collate(features, np.arange(1), int(features.lengths.max())))
        np.testing.assert_allclose(vector, expected.numpy()[0], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    assert model.encode([], "query").shape == (0, 64)
    assert model.encode((text for text in TEXTS), "document").shape == (5, 64)


def test_each_side_has_its_prompt_and_an_option_wins(transformer: Path) -> None:
    model = vembed.load(str(transformer))
    assert model.prompts == {"query": "ask: ", "document": "doc: "}
    query, document = (model.encode(["apple pie"], side) for side in ("query", "document"))
    assert np.abs(query - document).max() > 1e-3
    bare = vembed.load(transformer, query_prompt="", document_prompt="ask: ")
    np.testing.assert_allclose(bare.encode(["apple pie"], side="document"), query, atol=1e-6)
    np.testing.assert_allclose(bare.encode(["ask: apple pie"], side="query"), query, atol=1e-6)
    assert vembed.load(transformer, max_seq_length=16).max_length == 16


def test_the_output_folder_of_a_run_stands_for_its_model(bag: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    with pytest.raises(vembed.ConfigError, match="is a run that has not finished: it has no model/ yet"):
        vembed.load(run)
    (run / "model").symlink_to(bag)
    np.testing.assert_array_equal(vembed.load(run).encode(TEXTS, "query"), vembed.load(bag).encode(TEXTS, "query"))


def test_what_is_no_model_is_refused(tmp_path: Path, bag: Path) -> None:
    with pytest.raises(vembed.ConfigError, match="trained from scratch"):
        vembed.load("builtin:ngram-bag")
    with pytest.raises(vembed.ConfigError, match="there is no folder"):
        vembed.load(tmp_path / "nothing")
    with pytest.raises(vembed.ConfigError, match="model_revision to the commit"):
        vembed.load(bag, trust_remote_code=True, model_revision="main")
    with pytest.raises(vembed.ConfigError, match="query_prompt or document_prompt has no effect with "):
        vembed.load(bag, query_prompt="ask: ")
    with pytest.raises(vembed.MachineError, match="device 'nonsense'"):
        vembed.load(bag, device="nonsense")
    assert vembed.load(bag, device="cpu").dimension == 64


def test_a_wrong_call_says_what_was_meant(bag: Path) -> None:
    model = vembed.load(bag)
    with pytest.raises(TypeError, match="did you mean 'max_seq_length'"):
        vembed.load(bag, max_seq_len=8)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match='say which side the rows are: "query" or "document"'):
        model.encode(["a text"])  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="did you mean 'query'"):
        model.encode(TEXTS, "querry")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rows is one text"):
        model.encode("apple", "query")
    with pytest.raises(TypeError, match="row 1 is a int"):
        model.encode(["a", 1], "query")  # type: ignore[list-item]
    with pytest.raises(vembed.DataError, match=r"row 1 is not valid UTF-8 text \(character 6\)"):
        model.encode(["größe", "half \ud800"], "query")
    with pytest.raises(ValueError, match="at least 1"):
        model.encode(TEXTS, "query", batch_size=0)


def test_texts_that_are_cut_are_said_once(bag: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = vembed.load(bag)
    model.encode(["short"], "query")
    assert not caplog.messages
    model.encode(["word " * 17, "short"], "query")
    model.encode(["word " * 17], "query")
    assert len([message for message in caplog.messages if message.startswith("1 of 2 texts are longer")]) == 1


def test_vectors_that_are_not_finite_are_refused(bag: Path) -> None:
    model = vembed.load(bag)
    with torch.no_grad():
        model._encoder.table.weight.fill_(float("nan"))
    with pytest.raises(vembed.NonFiniteError, match="row 0"):
        model.encode(["apple"], "query")


# --- evaluate


def test_evaluating_gives_the_numbers_of_the_command(
    bag: Path, beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # --output=~/theirs: no shell expands that
    monkeypatch.chdir(tmp_path)
    result = vembed.evaluate(bag, beir, output="~/ours")
    assert evaluate_command.main(
        [str(bag), "--data", str(beir), "--output=~/theirs"], program="vembed evaluate"
    ) == 0  # fmt: skip
    assert not (tmp_path / "~").exists()
    (theirs,) = (tmp_path / "theirs" / "bag").glob("*/metrics.json")
    assert dict(result.metrics) == json.loads(theirs.read_text())["metrics"]
    assert dict(result.metrics) == json.loads((tmp_path / "ours/metrics.json").read_text())["metrics"]
    assert result.num_queries == 2
    assert vembed.evaluate(vembed.load(bag), str(beir)).metrics == result.metrics


def test_what_evaluating_refuses_is_refused_before_a_model_is_loaded(beir: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(vembed.ConfigError, match="label_kind: must be auto, class, pair or grade, got 'grades'"):
        vembed.evaluate("./no-such-model", beir, label_kind="grades")  # type: ignore[arg-type]
    with pytest.raises(vembed.MachineError, match="holds other files"):
        vembed.evaluate("./no-such-model", beir, output=tmp_path)
    with pytest.raises(vembed.ConfigError, match="no-such-model"):
        vembed.evaluate("./no-such-model", beir, output=tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_evaluating_says_what_was_cut_and_what_is_missing(bag: Path, beir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    (folder / "qrels").mkdir(parents=True)
    for name in ("queries.jsonl", "qrels/test.tsv"):
        (folder / name).write_bytes((beir / name).read_bytes())
    row = json.dumps({"_id": "d5", "text": "word " * 17})
    (folder / "corpus.jsonl").write_text((beir / "corpus.jsonl").read_text() + "\n" + row)
    assert any("1 texts on the document side are longer" in note for note in vembed.evaluate(bag, folder).notes)
    assert not any("longer" in note for note in vembed.evaluate(bag, beir).notes)
    with pytest.raises(vembed.DataError, match="doesn't exist"):
        vembed.evaluate(bag, tmp_path / "nothing")
    with pytest.raises(vembed.DataError, match="no split 'dev'"):
        vembed.evaluate(bag, beir, split="dev")


# --- one in place of a list


def test_one_word_stands_for_a_list_of_one(bag: Path, tmp_path: Path) -> None:
    with pytest.raises(vembed.ConfigError, match=r"there is no folder .*missing"):
        vembed.compare(str(tmp_path / "missing"))
    with pytest.raises(vembed.ConfigError, match="--language 'no code'"):
        vembed.load(bag).push_to_hub("team/name", dry_run=True, language="no code")
