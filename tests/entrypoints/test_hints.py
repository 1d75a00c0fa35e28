"""Hints of messages: the nearest name only where one is near, and plain words for what other trainers call it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from vembed.entrypoints import train

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (("frage", "antwort"), "say which is query and which positive: column_mapping: {frage: ____, antwort: ____}"),
        (("query", "antwort"), "say which is positive: column_mapping: {antwort: ____}"),
        (
            ("querry", "positve"),
            "if 'querry' and 'positve' are meant: column_mapping: {querry: query, positve: positive}",
        ),
        (
            ("querry", "antwort"),
            "say which is positive: column_mapping: {querry: query, antwort: ____}",
        ),
    ],
)
def test_all_missing_columns_stand_in_one_message(
    tmp_path: Path, columns: tuple[str, str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(dict.fromkeys(columns, "text")) + "\n")
    words = ["model_name=builtin:ngram-bag", f"data_path={data}", f"output_dir={tmp_path / 'run'}"]
    assert train.main(["--validate", "--config_override", *words]) == 3
    message = capsys.readouterr().err.strip()
    assert message.endswith(f"the row has {', '.join(columns)}; {hint}")
    assert ("and so is 'positive'" in message) == (columns[0] != "query")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        (
            "device=cuda",
            "remove it: a run uses every visible accelerator; CUDA_VISIBLE_DEVICES=0 vembed train ... chooses them",
        ),
        ("gpu=1", "a run uses every visible accelerator"),
        ("cuda=true", "a run uses every visible accelerator"),
        ("val_data_path=none", "To train without a dev set, set eval_strategy to no and name a test_data_path"),
        ("n_dims_per_step=3", "unknown key; docs/configuration.md lists every key"),
        ("lerning_rate=1", "unknown key; did you mean learning_rate?"),
        ("num_epoch=1", "unknown key; did you mean epochs?"),
    ],
)
def test_a_key_that_there_is_not_gets_a_hint_only_where_one_is_near(
    override: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--validate", "--config_override", "model_name=builtin:ngram-bag", override]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["--learning-rate", "1e-3"],
            "--learning-rate is a key of the configuration: write --config_override learning",
        ),
        (["--lr=1e-3"], "--lr is a key of the configuration: write --config_override lr=VALUE"),
        (["--device", "cuda"], "--device: remove it: a run uses every visible accelerator"),
        (["--no_cuda"], "--no_cuda: hide the GPUs: CUDA_VISIBLE_DEVICES= vembed train"),
        (["--zzz"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_override(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.main(["a.yaml", *words])
    assert hint in capsys.readouterr().err
