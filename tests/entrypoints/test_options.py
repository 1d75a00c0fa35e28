"""Options that are made from sections: how words become values, and how a wrong one is named."""

from __future__ import annotations

import pytest

from vembed.entrypoints.evaluate import EvaluateOptions
from vembed.entrypoints.mine import MineOptions
from vembed.entrypoints.options import check, parse_words
from vembed.entrypoints.train import TrainOptions
from vembed.errors import ConfigError


def mine(*words: str) -> MineOptions:
    arguments = ["model", "--data", "rows.jsonl", "--output", "out.jsonl", *words]
    return check(MineOptions, parse_words(MineOptions, arguments, program="vembed mine"))


def test_none_turns_a_default_off_and_silence_keeps_it() -> None:
    assert mine().mine_relative_margin == 0.05
    assert mine("--relative-margin", "none").mine_relative_margin is None


def test_only_what_was_given_is_an_option_of_the_model() -> None:
    assert mine().load_options() == {}
    assert mine("--bf16", "--max-seq-length", "64").load_options() == {"bf16": True, "max_seq_length": 64}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "0"], "--batch-size: must be >= 1, got 0"),
        (["--batch-size", "many"], "--batch-size: must be an integer >= 1, got 'many'"),
        (["--relative-margin", "2"], "--relative-margin: must be <= 1, got 2"),
        (["--sampling", "tp"], "--sampling: must be top or random, got 'tp'; did you mean top?"),
    ],
)
def test_a_wrong_value_is_named_by_its_option(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        mine(*words)
    assert str(refused.value) == message


def test_words_become_the_types_of_their_fields() -> None:
    words = [
        "a",
        "b",
        "--data",
        "x",
        "--output",
        "o",
        "--rescore",
        "4",
        "10",
        "--quantize",
        "int8",
        "binary",
        "--no-keep-vectors",
    ]
    options = check(EvaluateOptions, parse_words(EvaluateOptions, words, program="vembed evaluate"))
    assert (options.models, options.rescore, options.quantize) == (["a", "b"], [4, 10], ["int8", "binary"])
    assert options.no_keep_vectors


@pytest.mark.parametrize(("words", "mode"), [([], "train"), (["--validate"], "validate"), (["--dry-run"], "dry-run")])
def test_a_flag_is_a_value_of_the_mode(words: list[str], mode: str) -> None:
    assert check(TrainOptions, parse_words(TrainOptions, ["a.yaml", *words], program="vembed train")).mode == mode


@pytest.mark.parametrize("words", [["--validate", "--plan"], ["--unknown"]])
def test_words_that_do_not_fit_together_end_with_the_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_words(TrainOptions, ["a.yaml", *words], program="vembed train")
    assert left.value.code == 2
