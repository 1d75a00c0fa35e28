"""`vembed init`, `explain`, `help` and `--version`: how a new user finds the way, without anything heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import vembed
from vembed import __main__ as program
from vembed.config.load import load_config, load_values
from vembed.config.messages import key_schemas
from vembed.config.reference import example
from vembed.entrypoints import explain, init
from vembed.entrypoints.command import run_command
from vembed.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.config.schema import Config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(folder: Path, name: str, text: str) -> Config:
    """Write data, and return the configuration that is made for them."""
    (folder / name).write_text(text)
    assert init.main([name, "--overwrite"], program="vembed init") == 0
    return load_config(folder / "config.yaml").config


def test_a_configuration_is_written_with_a_comment_for_each_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(40)]
    config = made(folder, "faq.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert (config.data_path, config.output_dir, config.batch_size) == ("faq.jsonl", "runs/faq", 8)
    assert config.model_name == init.TEXT_MODEL
    lines = (folder / "config.yaml").read_text().splitlines()
    assert lines[0] == "# Train with: vembed train config.yaml"
    assert "data_path: faq.jsonl  # columns question as query, answer as positive" in lines
    assert all("  # " in line for line in lines if ": " in line and not line.startswith("#"))
    assert "config.yaml is written and valid. Train with: vembed train config.yaml" in capsys.readouterr().out


def test_a_model_and_test_sets_may_be_named_and_what_is_not_there_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("faq.jsonl", "a.jsonl", "b.jsonl"):
        (folder / name).write_text('{"question": "q", "answer": "a"}\n' * 4)

    def asked(*words: str) -> int:
        return init.main(["faq.jsonl", "--overwrite", *words], program="vembed init")

    assert asked("--model", "builtin:ngram-bag", "--test", "a.jsonl") == 0
    config = load_config(folder / "config.yaml").config
    assert (config.model_name, config.test_data_path) == ("builtin:ngram-bag", "a.jsonl")
    assert asked("--test", "a.jsonl", "b.jsonl") == 0
    before = (folder / "config.yaml").read_bytes()
    assert load_config(folder / "config.yaml").config.test_data_path == ["a.jsonl", "b.jsonl"]
    capsys.readouterr()
    assert asked("--model", "./nowhere", "--test", "c.jsonl", "a.jsonl") != 0
    said = capsys.readouterr().err
    assert "model_name: there is no folder ./nowhere" in said
    assert "c.jsonl" in said
    assert asked("--model", "all-MiniLM-L6-v2") != 0
    assert "did you mean sentence-transformers/all-MiniLM-L6-v2" in capsys.readouterr().err
    assert (folder / "config.yaml").read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"faq.jsonl", "a.jsonl", "b.jsonl", "config.yaml"}


@pytest.mark.parametrize(
    ("model", "epochs", "learning_rate"),
    [
        ("builtin:ngram-bag", 10, 2e-3),
        ("builtin:static", 10, 5e-2),
        ("open_clip:ViT-B-32", 10, 5e-4),
        ("open_clip:ViT-B-32:laion2b_s34b_b79k", 1, 2e-5),
        ("sentence-transformers/all-MiniLM-L6-v2", 1, 2e-5),
    ],
)
def test_a_model_from_random_weights_gets_a_learning_rate_and_epochs_that_it_learns_with(
    folder: Path, model: str, epochs: int, learning_rate: float
) -> None:
    (folder / "faq.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 4)
    assert init.main(["faq.jsonl", "--model", model], program="vembed init") == 0
    config = load_config(folder / "config.yaml").config
    assert (config.epochs, config.learning_rate) == (epochs, learning_rate)
    assert ("random weights" in (folder / "config.yaml").read_text()) == (epochs == 10)


def test_columns_that_nobody_knows_are_mapped_in_their_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = made(folder, "a.csv", "frage,antwort\n" + "wer,ich\n" * 5)
    assert config.column_mapping == {"frage": "query", "antwort": "positive"}
    assert config.batch_size == 2
    said = capsys.readouterr().out
    assert "query from frage, positive from antwort: change column_mapping if that's wrong" in said


def test_a_name_of_a_column_that_breaks_a_line_stays_in_its_comment(folder: Path) -> None:
    config = made(folder, "faq.csv", '"the\nquestion",the answer\nWhat is it?,It is this.\n')
    assert config.column_mapping == {"the\nquestion": "query", "the answer": "positive"}
    assert r"  # columns the\nquestion as query, the answer as positive" in (folder / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *[("", "a.csv holds no rows"), ("query,positive\n", "a.csv holds no rows")],
        ("user_id,message\n7,hello\n8,bye\n", "column 'user_id' holds only numbers"),
    ],
)
def test_data_that_hold_no_texts_are_refused(
    folder: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.csv").write_text(text)
    assert init.main(["a.csv"], program="vembed init") == 3
    assert said in capsys.readouterr().err
    assert not (folder / "config.yaml").exists()


@pytest.mark.parametrize(
    ("labels", "kind", "loss"),
    [((0, 1, 1), "pair", "cosent"), ((0.25, 0.5, 1), "grade", "cosent"), ((3, 4, 5), "grade", "cosent")],
)
def test_numbers_beside_two_texts_get_the_keys_that_they_need(
    folder: Path, labels: tuple[float, ...], kind: str, loss: str
) -> None:
    rows = "".join(f"q{n},p{n},{label}\n" for n, label in enumerate(labels))
    config = made(folder, "a.csv", f"query,positive,label\n{rows}")
    assert (config.label_kind, config.loss_type) == (kind, loss)


def test_a_built_in_set_stands_in_for_data(folder: Path) -> None:
    assert init.main(["-o", "first.yaml"], program="vembed init") == 0
    assert load_config(folder / "first.yaml").config.data_path == "builtin:stdlib-code"


def test_a_file_is_replaced_only_on_demand_and_nothing_wrong_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.yaml").write_text("mine")
    assert init.main([], program="vembed init") == 2
    assert "config.yaml is there already; name another file with -o, or add --overwrite" in capsys.readouterr().err
    assert (folder / "config.yaml").read_text() == "mine"
    (folder / "a.csv").write_text("a,b,c\n1,2,3\n")
    assert init.main(["a.csv", "-o", "other.yaml"], program="vembed init") == 3
    assert init.main(["nowhere.csv", "-o", "other.yaml"], program="vembed init") == 3
    assert not (folder / "other.yaml").exists()
    for words in (["a.csv", "--overwrite"], ["nowhere.csv", "--overwrite"]):
        assert init.main(words, program="vembed init") == 3
        assert (folder / "config.yaml").read_text() == "mine", "a configuration that fails replaces nothing"
    assert {each.name for each in folder.iterdir()} == {"config.yaml", "a.csv"}


def test_a_key_is_explained_as_the_reference_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["triplet_negatives"], program="vembed explain") == 0
    said = capsys.readouterr().out
    for text in (
        "all, hardest or listed",
        key_schemas()["triplet_negatives"]["description"],
        "triplet_negatives=hardest",
    ):
        assert text in said
    assert "has an effect only with loss_type: triplet" in said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("lr", "lr is another name of learning_rate"),
        ("--num-train-epochs", "num_train_epochs is what other trainers call epochs"),
        ("deepspeed", "refused: vembed has no DeepSpeed"),
        ("mining", "mine_negatives "),
        ("MultipleNegativesRankingLoss", "MultipleNegativesRankingLoss is what other trainers call loss_type: infonce"),
        ("none", "none is what other trainers call eval_strategy: no and save_strategy: no"),
    ],
)
def test_other_names_lead_to_a_key(asked: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    explain.main(["--", asked], program="vembed explain")
    assert said in capsys.readouterr().out


def test_a_key_that_is_none_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["learning_rte"], program="vembed explain") == 2
    assert "there is no key learning_rte; did you mean learning_rate?" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(key_schemas()))
def test_the_example_of_a_key_is_a_value_that_it_takes(name: str) -> None:
    said = ""
    try:
        load_values({"model_name": "m"}, {name: example(name)})
    except ConfigError as error:  # of a rule: another key is needed beside it
        said = str(error)
    assert ": must be" not in said


def test_help_version_and_the_like_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    words = [["--version"], ["help"], ["help", "train"], ["init", "a.jsonl"], ["explain"], ["explain", "epochs"]]
    code = (
        "import json, sys\nfrom vembed import __main__ as program\n"
        "for words in json.loads(sys.argv[1]):\n    try:\n        assert program._run(words) == 0, words\n"
        "    except SystemExit as left:\n        assert left.code == 0\n"
        "print([name for name in ('torch', 'transformers', 'faiss', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(words)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"vembed {vembed.__version__}"
    assert "--config_override" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_of_no_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert program._run(["help", "trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [1, 5000])  # within the buffer, and beyond it
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: int
) -> None:
    def command() -> int:
        for number in range(lines):
            print(f"line {number}")
        return 0

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert run_command(command) == 0
        monkeypatch.undo()
    assert not capsys.readouterr().err


def test_another_pipe_that_breaks_is_no_quiet_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> int:
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which the command sets
    with pytest.raises(BrokenPipeError, match="a worker is gone"):
        run_command(command)
