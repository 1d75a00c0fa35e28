"""Loading: files, overrides, and every problem at once with its place."""

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


def test_overrides_alone_make_a_config() -> None:
    loaded = load_config(None, ["model_name=m"])
    assert loaded.config.model_name == "m"
    assert loaded.path is None


def test_all_problems_are_told_at_once_in_reading_order(write: Write) -> None:
    path = write(
        "model_name: m\nbatch_size: true\nlearning_rte: 1e-5\nbf16: true\nfp16: true\ntemperature: .nan\n"
        "seed: 1\nseed: 2\n"
    )
    one_precision = "bf16 and fp16 are both true, but a run has one mixed precision; set fp16 to false"
    needs_steps = "eval_strategy steps needs eval_steps; set eval_steps, such as 100, or eval_strategy to epoch"
    assert problems(path, "learning_rate=-1", "foo", "eval_strategy=steps") == [
        "configs/a.yaml:2: batch_size: must be auto or an integer >= 1, got true",
        "configs/a.yaml:3: learning_rte: unknown key; did you mean learning_rate?",
        "configs/a.yaml:5: fp16: " + one_precision + " (bf16 is set at configs/a.yaml:4)",
        "configs/a.yaml:6: temperature: must be a finite number, got nan",
        "configs/a.yaml:8: seed: duplicate key, first set in line 7; keep one",
        "override learning_rate=-1: must be > 0, got -1",
        "override foo: there is no '='; write key=value, such as batch_size=32",
        "override eval_strategy=steps: " + needs_steps,
    ]


def test_a_rule_is_not_judged_by_a_key_that_is_wrong_itself(write: Write) -> None:
    path = write("model_name: m\nwarmup_steps: 10\nmax_steps: -1\n")
    assert problems(path) == ["configs/a.yaml:3: max_steps: must be >= 1, got -1"]
    path = write("model_name: m\neval_strategy: steps\neval_steps: 0\n")
    assert problems(path) == ["configs/a.yaml:3: eval_steps: must be >= 1, got 0"]
    path = write("model_name: m\nwarmup_steps: 10\nmax_steps: 1\n")
    assert len(problems(path)) == 1
    assert "never reach its peak" in problems(path)[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("epochs: '3'", "must be an integer >= 1, got '3'; remove the quotes"),
        ("epochs: 3.0", "must be an integer >= 1, got 3.0; write 3"),
        ("epochs: null", "must be an integer >= 1, got null"),
        ("epochs: 99999999999", "must be <= 2147483647, got 99999999999"),
        ("seed: 4294967296", "must be <= 4294967295, got 4294967296"),
        (f"epochs: {'9' * 5000}", "must be an integer >= 1, got inf"),
        ("learning_rate: 1e999", "must be a finite number, got inf"),
        ("learning_rate: nan", "must be a number > 0, got 'nan'"),
        ("bf16: yes", "must be auto, true or false, got 'yes'; write true"),
        ("gradient_cache_chunk_size: 0", "must be auto or an integer >= 1, got 0"),
        ("scheduler_type: cosin", "must be cosine, linear or constant, got 'cosin'; did you mean cosine?"),
        ("data_path: 2024", "must be a text or null, got 2024; put it in quotes"),
        ('data_path: "a\\0b"', "must not hold a NUL character, got 'a\\x00b'"),
        ('data_path: "\\ud800"', "must be valid Unicode; it holds half of a surrogate pair, got '\\ud800'"),
        ("output_dir: ' '", "must not be blank, got ' '"),
        ("batch_size: [1]", "must be auto or an integer >= 1, got [1]"),
    ],
)
def test_a_wrong_value_is_shown_with_the_fix(write: Write, line: str, expected: str) -> None:
    key = line.partition(":")[0]
    assert problems(write(f"model_name: m\n{line}\n")) == [f"configs/a.yaml:2: {key}: {expected}"]


def test_the_nearest_metric_is_named(write: Write) -> None:
    (line,) = problems(write("model_name: m\nmetric_for_best_model: NDCG@10\n"))
    assert line.endswith("got 'NDCG@10'; did you mean ndcg@10?")


def test_a_missing_model_name_says_what_to_set(write: Write) -> None:
    (line,) = problems(write("epochs: 1\n"))
    assert line.startswith("configs/a.yaml: model_name: a required key is missing; set it, such as model_name: NAME")
    (line,) = problems(None)
    assert line.startswith("configuration: model_name: a required key is missing")


@pytest.mark.parametrize(
    ("word", "value"),
    [("1e-5", 1e-5), ("1E5", 1e5), ("1.5e+3", 1500.0), (".5", 0.5), ("2.", 2.0), ("3", 3.0), ("+1", 1.0)],
)
def test_numbers_are_read_as_people_write_them(write: Write, word: str, value: float) -> None:
    assert load_config(write(f"model_name: m\nlearning_rate: {word}\n")).config.learning_rate == value
    assert load_config(None, ["model_name=m", f"learning_rate={word}"]).config.learning_rate == value


def test_plain_words_are_texts_unless_yaml_1_2_says_otherwise(write: Write) -> None:
    config = load_config(write("model_name: 2024-01-01\neval_strategy: no\noutput_dir: on\ndata_path: 1:30\n")).config
    assert (config.model_name, config.eval_strategy, config.output_dir, config.data_path) == (
        "2024-01-01",
        "no",
        "on",
        "1:30",
    )
    assert load_config(write("model_name: m\nmax_steps: 100_000\n")).config.max_steps == 100_000
    assert "got '0100'" in problems(write("model_name: m\nmax_steps: 0100\n"))[0]  # octal to some readers


def test_bom_crlf_comments_and_document_marks_are_accepted(write: Write) -> None:
    path = write(b"\xef\xbb\xbf---\r\nmodel_name: m # why\r\n\r\nepochs: 2\r\n...\r\n")
    loaded = load_config(path)
    assert loaded.config.epochs == 2
    assert loaded.sources["epochs"] == "configs/a.yaml:4"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("model_name: m\nmodel_name: n\n", 2, "model_name: duplicate key, first set in line 1"),
        ("model_name: m\ncolumn_mapping:\n  a: query\n  a: label\n", 4, "a: duplicate key, first set in line 3"),
        ("model_name: m\ndata_path: &x a\n", 2, "anchors"),
        ("model_name: &x m\ndata_path: *x\n", 1, "anchors"),
        ("model_name: m\ndata_path: *x\n", 2, "anchors"),
        ("model_name: !!python/object/apply:os.system ['true']\n", 1, "tags"),
        ("model_name: !!str m\n", 1, "tags"),
        ("model_name: ! m\n", 1, "tags"),
        ("!!map {model_name: m}\n", 1, "tags"),
        ("model_name: m\n---\nmodel_name: n\n", 2, "second YAML document"),
        ("- model_name\n", 1, "a configuration is a mapping"),
        ("model_name\n", 1, "a configuration is a mapping"),
        ("model_name: m\nepochs: a: b\n", 2, "put a text that holds ': ' in quotes"),
        ("model_name: m\n\tepochs: 1\n", 2, "indent with spaces, not tabs"),
        ("model_name: m\nquery_prompt: 'abc\n", 2, "not valid YAML: the quote that opens in this line is never closed"),
        ("model_name: m\nepochs: 1\nseed: 1\ndata_path d\n", 4, "not valid YAML: there is no ': ' in this line"),
        ("model_name: m\ndata_path:d\nepochs: 1\n", 2, "not valid YAML: there is no ': ' in this line"),
        ("model_name: m\nmrl_dims: [64, 128\nepochs: 1\n", 2, "the bracket that opens in this line is not closed"),
        ("model_name: m\nmrl_dims: {a: b: c}\n", 2, "not valid YAML: while parsing a flow mapping"),
        ("model_name: m\nquery_prompt: @x\n", 2, "put the value in quotes"),
        ("model_name: m\nepochs: \x7f\n", 2, "U+007F is not allowed"),
        ("model_name: m\n? [a]\n: 1\n", 2, "a key must be a text"),
        ("model_name: m\n3: 1\n", 2, "a key must be a text"),
        ("model_name: m\ncolumn_mapping: {3: query}\n", 2, "a key must be a text"),
        ("model_name: m\n<<: {epochs: 2}\n", 2, "<<: unknown key"),
        ("model_name: m\ndata_path: [[[[[[[[1]]]]]]]]\n", 2, "nested more than 8 deep"),
        ("model_name: m\nepochs: 1\0\n", 2, "NUL"),
        (b"model_name: m\nepochs: \xff\n", 2, "not valid UTF-8"),
    ],
)
def test_a_hostile_or_broken_file_is_refused_at_its_line(
    write: Write, text: str | bytes, line: int, reason: str
) -> None:
    found = problems(write(text))
    assert found[0].startswith(f"configs/a.yaml:{line}: ")
    assert reason in found[0]


def test_the_valid_neighbours_of_those_files_load(write: Write) -> None:
    loaded = load_config(write("model_name: 'm*&!'\ndata_path: '*x'\ncolumn_mapping:\n  '3': query\n  a: null\n"))
    assert loaded.config.model_name == "m*&!"
    assert loaded.config.column_mapping == {"3": "query", "a": None}
    assert load_config(write("{model_name: m, column_mapping: {a: label}}")).config.column_mapping == {"a": "label"}


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null"])
def test_an_empty_file_is_refused(write: Write, text: str) -> None:
    (line,) = problems(write(text))
    assert line == "configs/a.yaml: the file is empty; write at least model_name: NAME" or "mapping" in line
    assert text == "null" or "empty" in line


def test_a_file_over_256_kibibytes_is_refused_and_one_of_just_that_size_loads(write: Write) -> None:
    start = "model_name: m\n"
    exact = start + "#" * (2**18 - len(start) - 1) + "\n"
    assert len(exact) == 2**18
    assert load_config(write(exact)).config.model_name == "m"
    assert problems(write(exact + "\n")) == [
        "configs/a.yaml: 262,145 bytes; a configuration has at most 262,144 (256 KiB)"
    ]


def test_a_file_that_is_not_there_is_named_with_the_nearest_one(write: Write) -> None:
    write("model_name: m\n", "quickstart.yaml")
    assert problems(Path("configs/quikstart.yaml")) == [
        "configs/quikstart.yaml: no such file; did you mean configs/quickstart.yaml?"
    ]
    assert problems(Path("nowhere/a.yaml")) == ["nowhere/a.yaml: no such file; its folder does not exist either"]


def test_a_folder_a_pipe_and_another_suffix_are_refused(write: Write) -> None:
    Path("configs/folder.yaml").mkdir()
    os.mkfifo("configs/pipe.yaml")
    assert "a folder; name a configuration, a file that ends in .yaml" in problems(Path("configs/folder.yaml"))[0]
    assert "not a regular file" in problems(Path("configs/pipe.yaml"))[0]
    assert "a configuration ends in .yaml, .yml, .json" in problems(write("model_name: m\n", "a.toml"))[0]
    assert load_config(write("model_name: m\n", "a.YML")).config.model_name == "m"


def test_overrides_are_judged_even_when_the_file_is_not_readable() -> None:
    found = problems(Path("missing.yaml"), "learning_rate=-1", "epoch=2")
    assert found[0].startswith("missing.yaml: no such file")
    assert found[1:] == [
        "override learning_rate=-1: must be > 0, got -1",
        "override epoch=2: unknown key; did you mean epochs?",
    ]


def test_a_long_path_is_told_in_full(write: Write) -> None:
    folder = Path("configs", *["a_folder_with_a_long_name"] * 6)
    folder.mkdir(parents=True)
    path = folder / "a.yaml"
    path.write_text("model_name: m\nepochs: 0\n")
    assert problems(path) == [f"{path}:2: epochs: must be >= 1, got 0"]


# JSON


def test_json_loads_like_yaml(write: Write) -> None:
    path = write(
        '{\n  "model_name": "m",\n  "learning_rate": 1E-5,\n  "column_mapping": {"a": "query", "b": null}\n}', "a.json"
    )
    loaded = load_config(path)
    assert loaded.config.learning_rate == 1e-5
    assert loaded.config.column_mapping == {"a": "query", "b": None}
    assert loaded.sources == {
        "model_name": "configs/a.json:2",
        "learning_rate": "configs/a.json:3",
        "column_mapping": "configs/a.json:4",
    }


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ('{"model_name": "m",\n "model_name": "n"}', ":2", "duplicate key, first set in line 1"),
        ('{"model_name": "m", "column_mapping": {\n"a": null,\n"a": null}}', ":3", "a: duplicate key"),
        ('{"model_name": "m",\n"learning_rate": NaN}', ":2", "learning_rate: must be a finite number, got nan"),
        ('{"model_name": "m",\n"learning_rate": -Infinity}', ":2", "learning_rate: must be a finite number"),
        ('{"model_name": "m",\n"learning_rate": 1e999}', ":2", "learning_rate: must be a finite number"),
        ('{"model_name": "m",\n"epochs": NaN}', ":2", "epochs: must be an integer"),
        ('{"model_name": "m",\n"data_path": "\\u0000"}', ":2", "NUL"),
        ('{"model_name": "m",\n"epochs": ' + "9" * 5000 + "}", ":2", "epochs: must be an integer"),
        ('{"model_name": "m",\n}', ":2", "not valid JSON"),
        ('{"model_name": "m"} {}', ":1", "not valid JSON"),
        ('["model_name"]', ":1", "a configuration is an object"),
        ("", "", "the file is empty"),
        ("[" * 200_000, "", "nested more than 8 deep"),
        ('{"model_name": "m", "column_mapping": ' + '{"a":' * 8 + "1" + "}" * 9, "", "nested more than 8 deep"),
        ('{"model_name": "m", "column_mapping": ' + '{"a":' * 7 + "1" + "}" * 8, ":1", "column_mapping.a"),
        ('{"model_nam\\ne": "m"}', ":1", "model_nam\\ne: unknown key; did you mean model_name?"),
        ('{"model_name": "m", "column_mapping": {\n"a": "x"}}', ":2", "column_mapping.a: must be query"),
    ],
)
def test_broken_json_is_refused_at_its_line(write: Write, text: str, where: str, reason: str) -> None:
    found = [line for line in problems(write(text, "a.json")) if reason in line]
    assert len(found) == 1
    assert found[0].startswith(f"configs/a.json{where}: ")


def test_json_escapes_and_spaces_are_read(write: Write) -> None:
    text = json.dumps({"model_name": 'a"}{,:\\é😀', "column_mapping": {}, "epochs": 2}, indent="\t")
    assert "\\ud83d" in text
    loaded = load_config(write(f" \r\n{text} ", "a.json"))
    assert loaded.config.model_name == 'a"}{,:\\é😀'
    assert loaded.sources["epochs"] == "configs/a.json:5"


# overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("output_dir=a=b", "output_dir", "a=b"),
        ("output_dir= a b", "output_dir", " a b"),
        ("query_prompt=query: ", "query_prompt", "query: "),
        ("query_prompt=''", "query_prompt", ""),
        ('query_prompt="a\\nb"', "query_prompt", "a\nb"),
        ("query_prompt='null'", "query_prompt", "null"),
        ("query_prompt=null", "query_prompt", None),
        ("query_prompt=~", "query_prompt", None),
        ("data_path='*.parquet'", "data_path", "*.parquet"),
        ("data_path=data/*.parquet", "data_path", "data/*.parquet"),
        ("eval_strategy=no", "eval_strategy", "no"),
        ("fp16=true", "fp16", True),
        ("batch_size= 32 ", "batch_size", 32),
        ("max_grad_norm=1e-1", "max_grad_norm", 0.1),
        ("column_mapping={a: query, 'b c': null}", "column_mapping", {"a": "query", "b c": None}),
        ("column_mapping.text=query", "column_mapping", {"text": "query"}),
        ("column_mapping.meta.text=null", "column_mapping", {"meta.text": None}),
        ("per_device_train_batch_size=8", "batch_size", 8),
    ],
)
def test_an_override_is_read_by_the_rules_of_the_file(override: str, key: str, value: object) -> None:
    assert getattr(load_config(None, ["model_name=m", override]).config, key) == value


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("foo", "there is no '='"),
        ("=1", "there is no key before '='"),
        ("epochs=", "there is no value after '='; write epochs='' for an empty text or epochs=null for none"),
        ("epochs= ", "there is no value after '='"),
        ("epoch=1", "unknown key; did you mean epochs?"),
        ("l-r=1", "unknown key; did you mean lr?"),
        ("zzzzzz=1", "unknown key; docs/configuration.md lists every key"),
        ("epochs=NaN", "must be an integer >= 1, got 'NaN'"),
        ("learning_rate=.nan", "must be a finite number, got nan"),
        ("epochs=true", "must be an integer >= 1, got true"),
        ("epochs=[1]", "must be an integer >= 1, got [1]"),
        ("epochs='1'", "must be an integer >= 1, got '1'; remove the quotes"),
        (
            "model_revision=!!python/object:x",
            "a value that starts with ! means something else in YAML; put it in quotes",
        ),
        ("model_revision=&a b", "a value that starts with &"),
        ("model_revision=*a", "a value that starts with *"),
        ("column_mapping={a: *x}", "anchors (&) and aliases (*) are refused"),
        ("column_mapping={a: query, a: label}", "duplicate key"),
        ("column_mapping={a: query", "the value is not valid YAML"),
        ("query_prompt='a' b", "the value is not valid YAML"),
        ("query_prompt='a': b", "something follows the closing quote or bracket"),
        ("column_mapping=[a]", "must be a mapping of column names"),
        ("column_mapping.a=querry", "did you mean query?"),
        ("column_mapping.=query", "write mapping_key.part=value"),
        ("epochs.x=1", "epochs is one value and has no parts; write epochs=VALUE"),
    ],
)
def test_a_wrong_override_is_refused_by_its_name(override: str, reason: str) -> None:
    found = problems(None, "model_name=m", override)
    assert len(found) == 1
    assert found[0].startswith(f"override {override}: ")
    assert reason in found[0]


def test_the_same_key_twice_is_refused() -> None:
    assert problems(None, "model_name=m", "epochs=1", "epochs=2") == [
        "override epochs=2: epochs is already set (see override epochs=1); keep one of them"
    ]
    assert problems(None, "model_name=m", "lr=1", "learning_rate=1") == [
        "override learning_rate=1: learning_rate and lr both set learning_rate (see override lr=1); keep one of them"
    ]
    assert len(problems(None, "model_name=m", "epochs=1", "epochs=1")) == 1
    assert len(problems(None, "model_name=m", "column_mapping={a: query}", "column_mapping.b=label")) == 1
    assert len(problems(None, "model_name=m", "column_mapping.b=label", "column_mapping={a: query}")) == 1
    assert len(problems(None, "model_name=m", "column_mapping.b=label", "column_mapping.b=query")) == 1
    both = load_config(None, ["model_name=m", "column_mapping.a=label", "column_mapping.b=query"]).config
    assert both.column_mapping == {"a": "label", "b": "query"}


def test_a_nested_override_merges_into_the_mapping_of_the_file(write: Write) -> None:
    path = write("model_name: m\ncolumn_mapping:\n  a: query\n  b: label\n")
    loaded = load_config(path, ["column_mapping.b=null", "column_mapping.c=positive"])
    assert loaded.config.column_mapping == {"a": "query", "b": None, "c": "positive"}
    assert loaded.sources["column_mapping"] == "override"
    assert load_config(path, ["column_mapping={c: positive}"]).config.column_mapping == {"c": "positive"}


def test_a_problem_of_a_mapping_is_told_at_the_line_of_its_entry(write: Write) -> None:
    path = write("model_name: m\ncolumn_mapping:\n  a: query\n  b: lable\n")
    names = "query, positive, negatives, query_image, positive_image, negative_images, label, title, weight"
    expected = f"must be {names} or null"
    assert problems(path, "column_mapping.c=quer") == [
        f"configs/a.yaml:4: column_mapping.b: {expected}, got 'lable'; did you mean label?",
        f"override column_mapping.c=quer: {expected}, got 'quer'; did you mean query?",
    ]
    path = write("model_name: m\ncolumn_mapping: text\n")
    assert "column_mapping: must be a mapping" in problems(path, "column_mapping.c=query")[0]


# aliases


def test_an_alias_beside_its_key_names_both_places(write: Write) -> None:
    path = write("model_name: m\nlearning_rate: 1e-5\nlr: 1e-4\n")
    assert problems(path) == [
        "configs/a.yaml:3: lr: lr and learning_rate both set learning_rate (see configs/a.yaml:2); keep one of them"
    ]
    assert load_config(write("model_name: m\nlr: 1e-4\n")).config.learning_rate == 1e-4


def test_prompt_sets_both_sides_and_conflicts_with_either(write: Write) -> None:
    config = load_config(write("model_name: m\nprompt: 'x '\n")).config
    assert (config.query_prompt, config.document_prompt) == ("x ", "x ")
    for side in ("query_prompt", "document_prompt"):
        (line,) = problems(write(f"model_name: m\n{side}: y\nprompt: x\n"))
        assert line.startswith(f"configs/a.yaml:3: prompt: prompt and {side} both set {side}")
    assert len(problems(write("model_name: m\nprompt: 3\n"))) == 1


def test_an_override_by_another_name_still_wins_over_the_file(write: Write) -> None:
    path = write("model_name: m\nlearning_rate: 1e-5\nprompt: x\n")
    config = load_config(path, ["lr=1e-4", "query_prompt=y"]).config
    assert (config.learning_rate, config.query_prompt, config.document_prompt) == (1e-4, "y", "x")
    path = write("model_name: m\nlr: 1e-5\n")
    assert load_config(path, ["learning_rate=1e-4"]).config.learning_rate == 1e-4


def test_an_override_mends_a_wrong_value_of_the_file(write: Write) -> None:
    path = write("model_name: m\nbatch_size: 0\n")
    assert load_config(path, ["batch_size=8"]).config.batch_size == 8
    assert len(problems(path)) == 1


def test_many_problems_are_listed_up_to_a_hundred_and_the_others_counted(write: Write) -> None:
    found = problems(write("model_name: m\n" + "".join(f"unknown_{i}: 1\n" for i in range(250))))
    assert len(found) == 101
    assert found[0].startswith("configs/a.yaml:2: unknown_0: unknown key")
    assert found[-1] == "... and 150 more problems"


def test_the_nearest_key_is_looked_for_behind_a_few_unknown_ones_only(write: Write) -> None:
    found = problems(write("model_name: m\n" + "".join(f"learning_ratio{i}: 1\n" for i in range(50))))
    assert len(found) == 50
    assert [line.endswith("; did you mean learning_rate?") for line in found] == [True] * 20 + [False] * 30
    assert found[20] == "configs/a.yaml:22: learning_ratio20: unknown key"


# secrets


def test_no_secret_is_in_a_message(write: Write) -> None:
    url = "https://user:canary@host/x?access_token=canary&page=1"
    path = write(f"model_name: m\nhub_token: canary\nreport_to: {url}\nbad key\n")
    assert "canary" not in "".join(problems(path))
    path = write(
        f"model_name: m\nhub_token: canary\nreport_to: {url}\n'{url}': 1\ncolumn_mapping: {{'{url}': '{url}'}}\n"
    )
    found = problems(
        path,
        f"report_to={url}",
        "hub_token=canary",
        f"column_mapping.https://u:canary@h={url}",
        url,
        f"data_path={url}",
    )
    assert "canary" not in "".join(found)
    assert "override hub_token=***: unknown key" in "\n".join(found)
    assert "https://***@host/x?access_token=***" in "\n".join(found)
    assert "override pad_token=3:" in problems(None, "model_name=m", "pad_token=3")[0]


def test_a_value_can_not_forge_a_line_of_the_message(write: Write) -> None:
    found = problems(None, "model_name=m", "epochs=1\nconfigs/a.yaml:1: fine", f"fp16={'x' * 1000}")
    assert len(found) == 2
    assert all(len(line) < 300 for line in found)
