"""What a person reads of a run holds none of its secrets: every text key bears one, every file and line is searched."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kit.text_models import write_model

import vembed
from vembed.distributed.watchdog import Failure
from vembed.entrypoints.command import run_command
from vembed.entrypoints.export import main as export_main
from vembed.entrypoints.train import main

CANARY = "c4n4ryc4n4ry"
QUERY_PROMPT = (
    f"see https://user:{CANARY}@host/ jdbc:db;password={CANARY};x Authorization: Bearer {CANARY} hf_{CANARY}0123 "
    f"sk-{CANARY}0123456789 AKIA{CANARY.upper()}0123: "
)

FUNCTIONAL = {
    "model/config_sentence_transformers.json": "the model puts the prompts before texts wherever it is loaded"
}
"""Files that hold a secret of the user's, and what for."""


def settings(folder: Path) -> dict[str, object]:
    """Return a run with a secret in every key that takes a text of the user's own."""
    data = folder / f"secret={CANARY}"
    data.mkdir()
    rows = [{f"password={CANARY}": f"question {n}", "positive": f"answer {n}"} for n in range(24)]
    for name in ("train", "val", "test"):
        (data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model_name": str(write_model(folder / f"api_key={CANARY}", "bert")),
        "query_prompt": QUERY_PROMPT,
        "document_prompt": f"https://h/?api_key={CANARY} ",
        **{f"{name}_path": str(data / f"{file}.jsonl") for name, file in
           (("data", "train"), ("val_data", "val"), ("test_data", "test"))},
        "column_mapping": {f"password={CANARY}": "query"},
        "image_root": str(data),
        "embedding_cache": str(folder / f"cache_secret={CANARY}"),
        "output_dir": str(folder / f"run-secret={CANARY}"),
        "batch_size": 8,
        "max_steps": 2,
        "logging_steps": 1,
        "save_steps": 1,
    }  # fmt: skip


def files_with_canary(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)) for path in files if CANARY.encode() in path.read_bytes().lower()}


@pytest.fixture
def hook() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


def test_nothing_that_a_run_prints_or_writes_holds_a_secret(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(config, width=10_000))
    output = Path(str(config["output_dir"]))

    def said(*words: str, code: int = 0) -> str:
        assert main([str(path), *words]) == code
        printed = "".join(capfd.readouterr())
        assert CANARY not in printed.lower()
        return printed

    said("--validate")
    said("--plan")
    assert "https://***@host" in said("--plan", "--details")
    assert files_with_canary(output) == set()
    assert "https://***@host" in (output / "plan.json").read_text()
    said("--config_override", f"document_prompt=?token={CANARY} ")
    assert files_with_canary(output) == set(FUNCTIONAL)
    assert {"report/report.html", "report/report.json", "report/report.md", "model/README.md", "train.log"} <= {
        str(each.relative_to(output)) for each in output.rglob("*")
    }
    prompts = json.loads((output / "model/config_sentence_transformers.json").read_text())["prompts"]
    assert prompts["query"] == QUERY_PROMPT  # the model is as the user asked

    said("--config_override", f"document_prompt=?token={CANARY} ", "max_steps=3", code=2)  # the difference is shown
    said("--config_override", f"document_prompt=?token={CANARY}2 ")  # a new token is the same run
    path.write_bytes((output / "config.yaml").read_bytes())
    assert "query_prompt: *** replaces a secret" in said(code=2)  # nothing continues with the mask
    words = [str(output), "--checkpoint", "2", "--output", str(tmp_path / "exported")]
    assert export_main(words, program="vembed export") == 2
    assert "keeps no secrets, and model_name, query_prompt, document_prompt had one" in capfd.readouterr().err


def test_no_error_holds_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str], hook: None) -> None:
    place = tmp_path / f"password={CANARY}"
    keys = {"model_name": "builtin:ngram-bag", "output_dir": str(tmp_path / "run")}
    with pytest.raises(vembed.VembedError, match=r"password=\*\*\*") as refused:
        vembed.train(keys, data_path=str(place))
    assert CANARY not in str(refused.value)
    assert main(["--config_override", *(f"{name}={value}" for name, value in keys.items()), f"data_path={place}"]) == 3
    assert CANARY not in "".join(capsys.readouterr())
    assert CANARY not in "".join(each.read_text() for each in (tmp_path / "run").rglob("*") if each.is_file())

    failure = Failure(75, 0, "host", f"resume continues from {place}/run/checkpoints/step-00000003")
    assert "continues from /" in f"{failure} {failure.to_json()}"
    assert CANARY not in f"{failure} {failure.to_json()}"

    def fail() -> int:
        raise ZeroDivisionError(f"https://u:{CANARY}@h")

    with pytest.raises(ZeroDivisionError) as bug:
        run_command(fail)
    sys.excepthook(bug.type, bug.value, bug.tb)
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "ZeroDivisionError: https://***@h" in printed
    assert CANARY not in printed
