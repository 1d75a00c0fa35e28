"""Loading: files and overrides, read by one set of rules; what is said of wrong ones stands in the golden messages."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vembed.config.load import load_config
from vembed.errors import ConfigError, ExitCode

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file of a configs/ folder and return the path as a user would type it."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()

    def write_file(text: str | bytes, name: str = "a.yaml") -> Path:
        path = Path("configs") / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def problems(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value).splitlines()


def test_values_come_with_their_source(write: Write) -> None:
    path = write("# why\nmodel_name: some/model\n\nlearning_rate: 1e-5\nepochs: 2\n")
    loaded = load_config(path, ["epochs=3", "lr=1E-4"])
    assert (loaded.config.model_name, loaded.config.epochs, loaded.config.learning_rate) == ("some/model", 3, 1e-4)
    assert loaded.sources == {"model_name": "configs/a.yaml:2", "epochs": "override", "learning_rate": "override"}
    assert loaded.path == path
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.path = None  # type: ignore[misc]


def test_all_problems_are_told_at_once_in_reading_order(write: Write) -> None:
    path = write(
        "model_name: m\nbatch_size: true\nlearning_rte: 1e-5\nbf16: true\nfp16: true\ntemperature: .nan\n"
        "sync_bn: true\nseed: 1\nseed: 2\n"
    )
    words = ["learning_rate=-1", "foo", "eval_strategy=steps"]
    places = [f"configs/a.yaml:{line}" for line in (2, 3, 5, 6, 7, 9)] + [f"override {word}" for word in words]
    assert [line.split(": ")[0] for line in problems(path, *words)] == places
    found = problems(Path("missing.yaml"), *words)
    assert [line.split(": ")[0] for line in found[:3]] == ["missing.yaml", *places[6:8]], (
        "overrides are judged alone too"
    )


def test_a_rule_is_not_judged_by_a_key_that_is_wrong_itself(write: Write) -> None:
    (line,) = problems(write("model_name: m\neval_strategy: steps\neval_steps: 0\n"))
    assert line.startswith("configs/a.yaml:3: eval_steps: ")
    assert len(problems(write("model_name: m\nwarmup_steps: 10\nmax_steps: 1\n"))) == 1


@pytest.mark.parametrize(
    ("word", "value"),
    [("1e-5", 1e-5), ("1E5", 1e5), ("1.5e+3", 1500.0), (".5", 0.5), ("2.", 2.0), ("3", 3.0), ("+1", 1.0)],
)
def test_numbers_are_read_as_people_write_them(write: Write, word: str, value: float) -> None:
    assert load_config(write(f"model_name: m\nlearning_rate: {word}\n")).config.learning_rate == value
    assert load_config(None, ["model_name=m", f"learning_rate={word}"]).config.learning_rate == value


def test_plain_words_are_texts_unless_yaml_1_2_says_otherwise(write: Write) -> None:
    config = load_config(write("model_name: 2024-01-01\neval_strategy: no\noutput_dir: on\ndata_path: 1:30\n")).config
    values = (config.model_name, config.eval_strategy, config.output_dir, config.data_path)
    assert values == ("2024-01-01", "no", "on", "1:30")
    assert load_config(write("model_name: m\nmax_steps: 100_000\n")).config.max_steps == 100_000
    assert "got '0100'" in problems(write("model_name: m\nmax_steps: 0100\n"))[0]  # octal to some readers


def test_bom_crlf_comments_and_document_marks_are_accepted(write: Write) -> None:
    loaded = load_config(write(b"\xef\xbb\xbf---\r\nmodel_name: m # why\r\n\r\nepochs: 2\r\n...\r\n"))
    assert (loaded.config.epochs, loaded.sources["epochs"]) == (2, "configs/a.yaml:4")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("model_name: &x m\ndata_path: *x\n", 1, "anchors"),
        ("model_name: ! m\n", 1, "tags"),
        ("model_name: m\nepochs: 1\nseed: 1\ndata_path d\n", 4, "there is no ': ' in this line"),
        ("model_name: m\ndata_path:d\nepochs: 1\n", 2, "there is no ': ' in this line"),
        ("model_name: m\nmrl_dims: [64, 128\nepochs: 1\n", 2, "the bracket that opens in this line is not closed"),
        ("model_name: m\nmrl_dims: {a: b: c}\n", 2, "not valid YAML"),
        ("model_name: m\nquery_prompt: @x\n", 2, "quotes"),
        ('{"model_name": "m",\n"learning_rate": -Infinity}', 2, "learning_rate: must be a finite number"),
        ('{"model_name": "m",\n"data_path": "\\u0000"}', 2, "NUL"),
        ('{"model_name": "m",\n"epochs": ' + "9" * 5000 + "}", 2, "epochs: must be an integer"),
        ('{"model_name": "m", "column_mapping": ' + '{"a":' * 7 + "1" + "}" * 8, 1, "column_mapping.a"),
        ("model_name: m\nepochs: 08\n", 2, "got '08'; write it without zeros in front"),
        ("model_name: m\nepochs: '8'\n", 2, "got '8'; remove the quotes"),
        ('{"model_nam\\ne": "m"}', 1, "model_nam\\ne: unknown key; did you mean model_name?"),
    ],
)
def test_a_hostile_or_broken_file_is_refused_at_its_line(write: Write, text: str, line: int, reason: str) -> None:
    found = [each for each in problems(write(text, "a.json" if text[0] == "{" else "a.yaml")) if reason in each]
    assert len(found) == 1
    assert found[0].split(": ")[0].endswith(f":{line}")


def test_a_file_of_another_encoding_is_refused_by_its_name(write: Write) -> None:
    (told,) = problems(write("model_name: m\n".encode("utf-16")))  # as PowerShell's > writes
    assert told.endswith("a.yaml:1: the file is UTF-16; save it as UTF-8")


def test_the_valid_neighbours_of_those_files_load(write: Write) -> None:
    loaded = load_config(write("model_name: 'm*&!'\ndata_path: '*x'\ncolumn_mapping:\n  '3': query\n  a: null\n"))
    assert loaded.config.model_name == "m*&!"
    assert loaded.config.column_mapping == {"3": "query", "a": None}
    assert load_config(write("{model_name: m, column_mapping: {a: label}}")).config.column_mapping == {"a": "label"}


def test_a_file_over_256_kibibytes_is_refused_and_one_of_just_that_size_loads(write: Write) -> None:
    start = "model_name: m\n"
    exact = start + "#" * (2**18 - len(start) - 1) + "\n"
    assert load_config(write(exact)).config.model_name == "m"
    assert "262,145 bytes" in problems(write(exact + "\n"))[0]


def test_a_pipe_is_refused_and_a_suffix_may_be_in_capitals(write: Write) -> None:
    path = write("model_name: m\n", "a.YML")
    os.mkfifo(path.with_name("pipe.yaml"))
    assert "not a regular file" in problems(path.with_name("pipe.yaml"))[0]
    assert load_config(path).config.model_name == "m"


def test_a_long_path_is_told_in_full(write: Write) -> None:
    folder = write("", "x").parent.joinpath(*["a_folder_with_a_long_name"] * 6)
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text("model_name: m\nepochs: 0\n")
    assert problems(folder / "a.yaml")[0].startswith(f"{folder}/a.yaml:2: epochs: ")


def test_json_loads_like_yaml(write: Write) -> None:
    text = '{\n  "model_name": "m",\n  "learning_rate": 1E-5,\n  "column_mapping": {"a": "query", "b": null}\n}'
    loaded = load_config(write(text, "a.json"))
    assert (loaded.config.learning_rate, loaded.config.column_mapping) == (1e-5, {"a": "query", "b": None})
    lines = {"model_name": 2, "learning_rate": 3, "column_mapping": 4}
    assert loaded.sources == {key: f"configs/a.json:{line}" for key, line in lines.items()}


def test_json_escapes_and_spaces_are_read(write: Write) -> None:
    text = json.dumps({"model_name": 'a"}{,:\\é😀', "column_mapping": {}, "epochs": 2}, indent="\t")
    assert "\\ud83d" in text
    loaded = load_config(write(f" \r\n{text} ", "a.json"))
    assert loaded.config.model_name == 'a"}{,:\\é😀'
    assert loaded.sources["epochs"] == "configs/a.json:5"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        *[("output_dir=a=b", "output_dir", "a=b"), ("output_dir= a b", "output_dir", " a b")],
        *[("query_prompt=query: ", "query_prompt", "query: "), ("query_prompt=''", "query_prompt", "")],
        *[('query_prompt="a\\nb"', "query_prompt", "a\nb"), ("query_prompt='null'", "query_prompt", "null")],
        *[("query_prompt=null", "query_prompt", None), ("query_prompt=~", "query_prompt", None)],
        ("data_path='*.parquet'", "data_path", "*.parquet"),
        ("data_path=data/*.parquet", "data_path", "data/*.parquet"),
        *[("eval_strategy=no", "eval_strategy", "no"), ("fp16=true", "fp16", True)],
        *[("batch_size= 32 ", "batch_size", 32), ("max_grad_norm=1e-1", "max_grad_norm", 0.1)],
        ("column_mapping={a: query, 'b c': null}", "column_mapping", {"a": "query", "b c": None}),
        ("column_mapping.text=query", "column_mapping", {"text": "query"}),
        ("column_mapping.meta.text=null", "column_mapping", {"meta.text": None}),
        ("per_device_train_batch_size=8", "batch_size", 8),
    ],
)
def test_an_override_is_read_by_the_rules_of_the_file(override: str, key: str, value: object) -> None:
    assert getattr(load_config(None, ["model_name=m", override]).config, key) == value


def test_the_same_key_twice_is_refused() -> None:
    whole, part = "column_mapping={a: query}", "column_mapping.b=label"
    for words in ([whole, part], [part, whole], [part, "column_mapping.b=query"], ["lr=1", "learning_rate=1"]):
        (line,) = problems(None, "model_name=m", *words)
        assert line.startswith(f"override {words[1]}: ")
        assert f"(see override {words[0]})" in line
    both = load_config(None, ["model_name=m", "column_mapping.a=label", "column_mapping.b=query"]).config
    assert both.column_mapping == {"a": "label", "b": "query"}


def test_a_nested_override_merges_into_the_mapping_of_the_file(write: Write) -> None:
    path = write("model_name: m\ncolumn_mapping:\n  a: query\n  b: label\n")
    loaded = load_config(path, ["column_mapping.b=null", "column_mapping.c=positive"])
    assert loaded.config.column_mapping == {"a": "query", "b": None, "c": "positive"}
    assert loaded.sources["column_mapping"] == "override"
    assert load_config(path, ["column_mapping={c: positive}"]).config.column_mapping == {"c": "positive"}


def test_a_problem_of_a_mapping_is_told_at_the_line_of_its_entry(write: Write) -> None:
    found = problems(write("model_name: m\ncolumn_mapping:\n  a: query\n  b: lable\n"), "column_mapping.c=quer")
    assert found[0].startswith("configs/a.yaml:4: column_mapping.b: ")
    assert found[1].startswith("override column_mapping.c=quer: ")
    path = write("model_name: m\ncolumn_mapping: text\n")
    assert "column_mapping: must be a mapping" in problems(path, "column_mapping.c=query")[0]


def test_prompt_sets_both_sides_and_an_override_by_another_name_still_wins_over_the_file(write: Write) -> None:
    path = write("model_name: m\nlearning_rate: 1e-5\nprompt: x\n")
    config = load_config(path).config
    assert (config.query_prompt, config.document_prompt) == ("x", "x")
    config = load_config(path, ["lr=1e-4", "query_prompt=y"]).config
    assert (config.learning_rate, config.query_prompt, config.document_prompt) == (1e-4, "y", "x")
    assert load_config(write("model_name: m\nlr: 1e-5\n"), ["learning_rate=1e-4"]).config.learning_rate == 1e-4
    for side in ("query_prompt", "document_prompt"):
        (line,) = problems(write(f"model_name: m\n{side}: y\nprompt: x\n"))
        assert line.startswith(f"configs/a.yaml:3: prompt: prompt and {side} both set {side}")


def test_the_nearest_key_is_looked_for_behind_a_few_unknown_ones_only(write: Write) -> None:
    found = problems(write("model_name: m\n" + "".join(f"learning_ratio{i}: 1\n" for i in range(50))))
    assert [line.endswith("; did you mean learning_rate?") for line in found] == [True] * 20 + [False] * 30


def test_no_secret_is_in_a_message(write: Write) -> None:
    url = "https://user:canary@host/x?access_token=canary&page=1"
    path = write(f"model_name: m\nhub_token: canary\nreport_to: {url}\nbad key\n")
    assert "canary" not in "".join(problems(path))
    path = write(
        f"model_name: m\nhub_token: canary\nreport_to: {url}\n'{url}': 1\ncolumn_mapping: {{'{url}': '{url}'}}\n"
    )
    them = [f"report_to={url}", "hub_token=canary", f"column_mapping.https://u:canary@h={url}", url, f"data_path={url}"]
    found = "\n".join(problems(path, *them))
    assert "canary" not in found
    assert "override hub_token=***: unknown key" in found
    assert "https://***@host/x?access_token=***" in found
    assert "override pad_token=3:" in problems(None, "model_name=m", "pad_token=3")[0]
