"""Keys and values of other trainers: the same as ours, a line of the plan, or a refusal that says what to do."""

from pathlib import Path

import pytest

from vembed.config.load import LoadedConfig, load_config, load_values
from vembed.config.names import ALIASES, FOREIGN, OTHER_KEYS, VALUES_ELSEWHERE, is_foreign
from vembed.config.record import dump_config, resume_differences
from vembed.config.schema import Config, fields
from vembed.entrypoints import train
from vembed.errors import ConfigError


def load(**values: object) -> LoadedConfig:
    return load_values({"model_name": "some/model", **values}, {})


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "written", "ours"),
    [
        *[("save_steps", 0, None), ("max_grad_norm", 0, None), ("max_grad_norm", 0.0, None)],
        *[("scheduler_type", "constant_with_warmup", "constant"), ("attn_implementation", None, "auto")],
        ("torch_dtype", None, "float32"),
    ],
)
def test_another_way_to_write_a_value_is_the_same_run(key: str, written: object, ours: object) -> None:
    config = load(**{key: written}).config
    assert config == load(**{key: ours}).config
    assert dump_config(config) == dump_config(load(**{key: ours}).config)
    before = {key: ours}
    assert not [each for each in resume_differences(before, config) if each.key == key]
    assert getattr(Config.model_validate({"model_name": "m", key: written}), key) == ours


@pytest.mark.parametrize("key", ["save_steps", "max_grad_norm"])
def test_false_is_not_zero(key: str) -> None:
    assert f"{key}: must be" in refusal(**{key: False})


ALWAYS_ON = ["enable_gather", "validate_data", "persistent_workers", "enable_image_cache", "debug_gpu_memory"]


@pytest.mark.parametrize("key", ALWAYS_ON)
def test_what_is_always_on_is_accepted_with_one_line(key: str) -> None:
    loaded = load(**{key: True})
    (note,) = loaded.notes
    assert note.startswith(f"{key} true: ")
    assert loaded.config == load().config
    assert key not in loaded.sources
    assert f"{key}: must be true or false, got 3" in refusal(**{key: 3})


def test_the_line_is_printed_by_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model_name: m\ndata_path: builtin:pages\nvalidate_data: true\nsave_steps: 0\n")
    assert train.main([str(path), "--validate"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("valid, 3 keys set, the others have their defaults")
    assert said[1].startswith("validate_data true: all rows are checked")


def test_prefixes_are_said_twice_without_contradiction() -> None:
    assert load(use_mrl=True, mrl_dims=[64, 32]).config.mrl_dims == [64, 32]
    assert load(use_mrl=False).notes == ("use_mrl false: mrl_dims alone turns it on",)
    assert "use_mrl: true contradicts mrl_dims, which alone decides; set mrl_dims" in refusal(use_mrl=True)
    assert "remove mrl_dims" in refusal(use_mrl=False, mrl_dims=[64])


@pytest.mark.parametrize("row", [row for row in FOREIGN if row.verdict == "refused"], ids=lambda row: row.key)
def test_what_nothing_reads_is_refused_with_what_does_it_here(row: object) -> None:
    row = next(each for each in FOREIGN if each == row)
    value = row.value if isinstance(row.value, (str, bool)) else 7
    line = refusal(**{row.key: value})
    assert row.key in line
    assert line.endswith(row.text)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *[("directions", ["query_to_doc"], "loss_directions"), ("distill_model", "ViT-L-14", "teacher_model_name")],
        *[("multi_dataset_batch_sampler", "ROUND_ROBIN", "source_temperature"), ("siglip", True, "sigmoid")],
        *[("same_dataset_within_batch", True, "single"), ("lock_image", True, "text+projection")],
        *[("lock_text", True, "vision+projection"), ("push_to_hub", True, "vembed push")],
        ("greater_is_better", False, "higher is better for every metric"),
    ],
)
def test_a_peers_key_is_answered_with_what_to_set(key: str, value: object, words: str) -> None:
    assert words in refusal(**{key: value})


def test_a_peers_switch_that_is_off_asks_for_nothing() -> None:
    for key in ("siglip", "lock_image", "push_to_hub"):
        assert load(**{key: False}).config == load().config


def test_null_asks_for_nothing() -> None:
    loaded = load(teacher_model_name=None, sync_bn=None)
    assert loaded.notes == ()
    assert loaded.config == load().config


def test_an_override_replaces_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model_name: m\nenable_gather: false\n")
    with pytest.raises(ConfigError, match="enable_gather: false: the documents of all devices"):
        load_config(path)
    assert load_config(path, ["enable_gather=true"]).notes


def test_a_part_of_a_foreign_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="is one value and has no parts"):
        load_config(None, ["model_name=m", "use_mrl.a=true"])


def test_the_table_says_each_thing_once() -> None:
    assert len({(row.key, str(row.value)) for row in FOREIGN}) == len(FOREIGN)
    assert not {row.key for row in FOREIGN} & set(ALIASES)
    for row in FOREIGN:
        assert row.verdict == "same" or row.text, row
        assert (row.verdict == "accepted") <= (row.key not in fields()), f"{row.key} is a key of ours"


def test_a_strategy_of_saving_that_never_saves_has_no_interval() -> None:
    assert load(save_strategy="epoch", save_steps=1000).config.save_strategy == "epoch"
    assert load(save_strategy="no", save_steps=0).config.save_steps is None
    assert "save_steps has no effect with save_strategy no" in refusal(save_strategy="no", save_steps=5)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *[("num_train_epochs", "epochs"), ("base_model", "model_name"), ("train_batch_size", "batch_size")],
        *[("datasets", "data"), ("train_file", "data_path"), ("lora_rank", "lora_r"), ("Matryoshka_Dims", "mrl_dims")],
        *[("--lr-scheduler-type", "scheduler_type"), ("query_instruction_for_retrieval", "query_prompt")],
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours(theirs: str, ours: str) -> None:
    assert refusal(**{theirs: 1}) == f"configuration: {theirs}: unknown key; vembed calls it {ours}"
    with pytest.raises(ConfigError, match=f"unknown key; vembed calls it {ours}$"):
        load_config(None, ["model_name=m", f"{theirs}=1"])


@pytest.mark.parametrize(
    ("key", "theirs", "ours"),
    [
        ("loss_type", "mnrl", "infonce"),
        ("loss_type", "MultipleNegativesRankingLoss", "infonce"),
        ("loss_type", "CosineSimilarityLoss", "cosine_mse"),
        ("loss_type", "GISTEmbedLoss", "infonce with false_negative_filter: teacher"),
        ("pooling_method", "eos", "last_token"),
        ("torch_dtype", "bf16", "bfloat16"),
        ("eval_strategy", "never", "no"),
    ],
)
def test_a_value_of_another_trainer_is_answered_with_ours(key: str, theirs: str, ours: str) -> None:
    assert refusal(**{key: theirs}).endswith(f", got '{theirs}'; vembed calls it {ours}")


def test_no_name_of_another_trainer_is_one_of_ours() -> None:
    assert set(OTHER_KEYS.values()) <= set(fields())
    assert not [name for name in OTHER_KEYS if name in fields() or name in ALIASES or is_foreign(name)]
    for key, values in VALUES_ELSEWHERE.items():
        for ours, names in values.items():
            assert f"{key}: must be" not in refusal(epochs=0, **{key: ours.partition(" ")[0]})
            for name in names.split():
                assert f"{key}: must be" in refusal(**{key: name})
