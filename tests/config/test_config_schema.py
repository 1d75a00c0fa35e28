"""The schema: each bound and each rule between keys, with the valid neighbour of every refused value."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from vembed.config.messages import key_schemas
from vembed.config.names import ALIASES
from vembed.config.schema import SECTIONS, Config, config_class, default_of, fields, key_names, rules, section_keys
from vembed.data.keys import Source
from vembed.evaluation.keys import metrics_that_choose


def make(**values: object) -> Config:
    return Config.model_validate({"model_name": "some/model", **values})


def refused(**values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        make(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        *[("batch_size", None, 3), ("max_steps", 0, None), ("seed", 2**32, 2**32 - 1), ("max_seq_length", 3, 4)],
        *[("max_seq_length", "Auto", "auto"), ("learning_rate", 0, 1), ("learning_rate", 10**400, 10)],
        *[("temperature", 0.0, 1e-3), ("adam_beta1", 1.0, 0), ("max_grad_norm", False, None)],
        *[("bf16", 1, True), ("bf16", "yes", False), ("fp16", "auto", False), ("warmup_ratio", 1.01, 1)],
        *[("torch_dtype", "float16", "float64"), ("attn_implementation", "flash", "flash_attention_2")],
        *[("pooling_method", "max", "last_token"), ("eval_strategy", False, "no"), ("save_total_limit", 1, 2)],
        *[("metric_for_best_model", "ndcg@20", "ndcg@100"), ("metric_for_best_model", "ndcg@10\n", "hit@1")],
        *[("report_to", ["tensorboard", "all"], ["tensorboard", "wandb"]), ("report_to", ["none"], [])],
        *[("gradient_cache_chunk_tokens", 1.5, 4096), ("loss_tile_size", 1.5, 1), ("bm25", 0, False)],
        *[("model_name", " ", "x"), ("output_dir", "", "."), ("max_image_pixels", None, 89_478_485)],
        *[("data_path", "a\0b", "a b"), ("data_path", "\ud800", "é"), ("data_path", [], "a")],
        *[("query_prompt", 3, ""), ("pad_token", "", "<pad>"), ("image_root", " ", "pictures")],
        *[("column_mapping", {"a": "querry"}, {"a": "query"}), ("column_mapping", {"a": 3}, {"a": None})],
        *[
            ("column_mapping", {"a": "image"}, {"a": "positive_image"}),
            ("column_mapping", {3: "query"}, {"3": "query"}),
        ],
        *[("column_mapping", {"": "query"}, {".": "query"}), ("column_mapping", ["text"], {})],
        *[("mrl_dims", 64, [64]), ("mrl_dims", [], None), ("mrl_dims", [64, 0], [64, 1])],
    ],
)
def test_a_value_out_of_bounds_or_of_another_type_is_refused(key: str, bad: object, good: object) -> None:
    refused(**{key: bad})
    assert getattr(make(**{key: good}), key) == good


def test_an_integer_becomes_a_float_where_a_float_is_expected() -> None:
    config = make(learning_rate=1, max_grad_norm=2)
    assert isinstance(config.learning_rate, float)
    assert isinstance(config.max_grad_norm, float)


RULE_CASES = """
bf16: true, fp16: true | bf16: auto | set fp16 to false
bf16: true, torch_dtype: float64 | bf16: false | bf16 would undo
fp16: true, torch_dtype: float64 | torch_dtype: float32 | fp16 would undo
bf16: false, torch_dtype: bfloat16 | bf16: true | compute in bfloat16
fp16: true, torch_dtype: bfloat16 | fp16: default | fp16 needs float32 weights
bm25: false, bm25_language: german | bm25: default | bm25_language has no effect
teacher_model_name: t | loss_type: margin_mse | nothing reads the teacher: set false_negative_filter to teacher
false_negative_filter: teacher | teacher_model_name: t | false_negative_filter teacher reads a teacher's vectors, but
teacher_model_name: builtin:ngram-bag, loss_type: kl | teacher_model_name: ./t | has nothing to teach
teacher_model_name: t, loss_type: kl, label_kind: grade | label_kind: default | label_kind grade gives the scores
batch_size: auto, global_batch_size: 8 | global_batch_size: default | global_batch_size already sets it
data: [{path: a}], data_path: b | data_path: default | remove one of them
batch_sampling: classes, batch_size: 10 | batch_size: 8 | doesn't divide batch_size 10 into two or more classes; set
batch_sampling: classes, label_kind: pair, loss_type: cosent | label_kind: class, loss_type: default | label_kind is
sharding_factor: 1, use_fsdp: true | use_fsdp: false | replicates the model
sharding_factor: 2, use_fsdp: false | use_fsdp: true | shards the model while
fsdp_mode: lean, use_fsdp: false | use_fsdp: default | fsdp_mode has no effect with use_fsdp false
fsdp_mode: lean, sharding_factor: 1 | sharding_factor: 2 | set sharding_factor to auto, or 2 or more
cpu_offload: true, use_fsdp: false | use_fsdp: true | cpu_offload has no effect
cpu_offload: true, sharding_factor: 1 | cpu_offload: false | sharding_factor 1
use_lora: false, lora_r: 8 | use_lora: auto | lora_r has no effect
use_lora: false, lora_alpha: 8 | use_lora: true | lora_alpha has no effect
use_lora: false, lora_dropout: 0.1 | use_lora: default | lora_dropout has no effect
use_lora: false, lora_target_modules: [q_proj] | use_lora: true | lora_target_modules has no effect
use_lora: false, lora_towers: text | use_lora: true | set use_lora to true
use_lora: true, trainable: text | use_lora: auto | set lora_towers to text
use_lora: true, trainable: text+projection | lora_towers: text+projection, trainable: default | set lora_towers to
use_lora: true, trainable: last_2_layers | use_lora: default | set trainable to all
load_in_4bit: true | use_lora: true | set use_lora to true
load_in_4bit: true, use_lora: true, torch_dtype: float64 | torch_dtype: bfloat16 | would undo torch_dtype float64
load_in_4bit: true, use_lora: true, use_fsdp: true | load_in_4bit: default | keeps a whole copy of the model on each
eval_strategy: steps | eval_steps: 5 | needs eval_steps
eval_steps: 5 | eval_strategy: epoch, eval_steps: default | eval_steps has no effect with eval_strategy epoch
early_stopping_patience: 2, eval_strategy: "no" | eval_strategy: epoch | has no effect with eval_strategy no
model_name: builtin:ngram-bg | model_name: builtin:ngram-bag | did you mean builtin:ngram-bag?
text_model_name: a, image_model_name: b | model_name: a | is neither the text tower nor the image tower; leave
model_name: b, text_model_name: a, model_revision: main | model_revision: default | model_revision belongs to one model, but
model_name: b, text_model_name: a, encoder_mode: clip | encoder_mode: composed | encoder_mode clip belongs to one model
model_name: builtin:ngram-bg, image_model_name: b | model_name: builtin:ngram-bag | did you mean builtin:ngram-bag?
trust_remote_code: true | model_revision: "0123456789abcdef0123456789abcdef01234567" | pin it to a commit
trust_remote_code: true, model_revision: main | trust_remote_code: false | pin it to a commit
trust_remote_code: true, model_revision: 123456789abcdef0123456789abcdef01234567 | trust_remote_code: default | 40 lower
batch_size: 1 | batch_size: 2 | no in-batch negatives
batch_size: 1, global_batch_size: null | global_batch_size: 8 | set batch_size to 2
global_batch_size: 1 | global_batch_size: 2 | set global_batch_size to 2
use_gradient_cache: false, gradient_cache_chunk_size: 8 | use_gradient_cache: true | gradient_cache_chunk_size has no
use_gradient_cache: false, gradient_cache_chunk_tokens: 8 | gradient_cache_chunk_tokens: auto | gradient_cache_chunk_tok
use_gradient_cache: false, retain: 0.5 | use_gradient_cache: auto | retain has no effect
warmup_steps: 10, max_steps: 10 | warmup_steps: 9 | set warmup_steps to 9 or less
data_split: train | data_path: d | set data_path
val_data_split: dev | val_data_path: d | set val_data_path
val_fraction: 0.1, val_data_path: d | val_data_path: default | set val_data_path to null
test_data_split: test | test_data_path: d | set test_data_path
guard_data_split: test | guard_data: [d] | set guard_data
guard_data: [d, d] | guard_data: [d, e] | guard_data lists d twice; name it once
label_kind: grade | label_kind: class | loss_type infonce doesn't take listed pairs
loss_type: sigmoid, temperature: 0.1 | loss_type: infonce | set init_logit_scale to 2.303
loss_type: sigmoid, learn_temperature: true | loss_type: default | always learns its scale
loss_type: sigmoid, loss_bidirectional: true | loss_type: default | judges each pair once
false_negative_filter: threshold, loss_type: colbert | loss_type: default | false_negative_filter has no effect
false_negative_margin: 0.1, loss_type: colbert | false_negative_filter: threshold, loss_type: default | has no effect
false_negative_margin_kind: absolute, loss_type: colbert | false_negative_filter: threshold, loss_type: default | effect
hardness_mode: all_negatives, loss_type: supcon | hardness_mode: hard_negatives, loss_type: default | hardness_mode has
hardness_strength: 9.0, loss_type: supcon | hardness_mode: hard_negatives, loss_type: default | hardness_strength has
focal_gamma: 0.5, loss_type: supcon | hardness_mode: hard_negatives, loss_type: default | focal_gamma has no effect
loss_directions: [query_to_document, query_to_query], loss_type: supcon | loss_type: default | loss_directions has no
hardness_strength: 9.0 | hardness_mode: all_negatives | hardness_mode none
cosent_scale: 10.0 | loss_type: cosent | set temperature to 0.1
distillation_temperature: 2.0, distillation_loss_type: mse | loss_type: distillation, teacher_model_name: t, distillation_temperature: default | distillation_temperature has no effect with distillation_loss_type mse
loss_type: distillation, teacher_model_name: t, distillation_alpha: 0.0, temperature: 0.1 | distillation_alpha: 0.1 | temperature has no effect with distillation_alpha 0
loss_type: distillation, teacher_model_name: t, distillation_alpha: 0.0, focal_gamma: 0.5, hardness_mode: all_negatives | added_losses: {infonce: 1.0} | hardness_mode and focal_gamma have no effect with distillation_alpha 0
loss_type: distillation, teacher_model_name: t, distillation_alpha: 0.0, false_negative_filter: teacher | false_negative_filter: default | false_negative_filter has no effect
loss_type: distillation, teacher_model_name: t, distillation_alpha: 1.0, false_negative_filter: teacher, distillation_loss_type: mse | distillation_loss_type: default | distillation_loss_type has no effect with distillation_alpha 1
loss_type: distillation, teacher_model_name: t, distillation_alpha: 1.0 | distillation_alpha: 0.9 | teacher_model_name has no effect with distillation_alpha 1
loss_type: distillation, teacher_model_name: t, distillation_alpha: 1.0 | added_losses: {kl: 1.0} | set loss_type to infonce
loss_type: cosent, label_kind: grade, false_negative_filter: threshold | false_negative_filter: default | has no effect
loss_type: cosent, label_kind: pair, false_negative_filter: threshold | added_losses: {infonce: 1.0} | identity
loss_type: cosent, teacher_model_name: t, false_negative_filter: threshold | false_negative_filter: teacher | scores of the teacher
loss_type: cosent, teacher_model_name: t, label_kind: grade, false_negative_filter: teacher | label_kind: default | has no effect
added_losses: {cosentt: 1.0} | added_losses: {cosent: 1.0} | 'cosentt' is no loss
loss_type: spread_out | added_losses: {spread_out: 1.0}, loss_type: default | spread_out alone learns nothing
added_losses: {angle: 1.0} | label_kind: grade | set label_kind
angle_scale: 5.0, loss_type: kl | angle_scale: default | angle_scale has no effect
cosent_scale: 10.0, loss_type: angle | cosent_scale: default | set angle_scale to 10
temperature: 0.1, loss_type: kl | kl_temperature: 0.1, temperature: default | set kl_temperature to 0.1
use_all_negatives: true | loss_type: in_batch_hard | only in_batch_hard leaves negatives out
use_all_negatives: true, loss_type: supcon | loss_type: in_batch_hard | loss_type to in_batch_hard; only in_batch_hard leaves negatives out
hard_topk: 4, loss_type: in_batch_hard, use_all_negatives: true | use_all_negatives: default | hard_topk has no effect
loss_type: colbert, mrl_dims: [8] | loss_type: default | vectors of late interaction are short
loss_type: colbert, mrl_dims: [8], mrl_weights: [1.0] | loss_type: default | mrl_weights has no effect with loss_type
mrl_dims: [8, 8] | mrl_dims: [8, 4] | holds a number twice
mrl_weights: [1.0], mrl_dims: [8, 4] | mrl_weights: default | one weight for each
save_strategy: "no", save_steps: 5 | save_strategy: epoch | set save_strategy to steps
save_strategy: "no", save_minutes: 5.0 | save_minutes: default | set save_strategy to steps or epoch
max_skipped_steps: 5 | nonfinite_policy: skip | set nonfinite_policy to skip
mine: once, label_kind: grade | label_kind: default | mine needs rows with positives
mine: once, mine_teacher: builtin:ngram-bag | mine_teacher: ./t | has nothing to teach
data: [{path: a}, {path: b, loss: cosent}] | source_batches: single | data[1].loss: a mixed batch holds rows of all
data: [{path: a, loss: cosent}], added_losses: {spread_out: 0.1} | data: [{path: a}] | added_losses has no effect:
seeds: [1, 2, 1] | seeds: [1, 2] | seed 1 is listed twice
seeds: [1, 2], test_data_path: t, eval_strategy: "no" | eval_strategy: default | seeds keeps the model that is best on
batch_sampling: classes, batch_size: 4 | batch_size: 8 | set batch_size to 8
batch_sampling: classes, global_batch_size: 30 | global_batch_size: 32 | set global_batch_size to 32
batch_sampling: classes, batch_size: auto, samples_per_class: 3 | samples_per_class: 4 | a power of two
loss_type: sigmoid, batch_size: 1 | batch_size: 2 | sigmoid loss learns nothing
learn_temperature: true, temperature: 0.009 | learn_temperature: false | starts between 0.01 and 1.0
learn_temperature: true, temperature: 1.01 | temperature: 1.0 | starts between 0.01 and 1.0
label_kind: pair | loss_type: cosent | set loss_type to cosent
"""  # noqa: E501
"""What is refused | what mends it | a part of the message."""

IDLE = """
teacher_model_name: t, loss_type: cosine_mse | teacher_revision: x, teacher_cache: x
data: [{path: a}] | source_batches: single, source_temperature: 2.0
batch_sampling: hard | hard_max_similarity: 0.9, hard_refresh: 2
batch_sampling: classes | samples_per_class: 8
lr_scaling: sqrt | lr_reference_batch: 8
skip_invalid_records: true | max_invalid_records: 5
loss_type: sigmoid | init_logit_scale: 3.0, init_logit_bias: 3.0
loss_type: colbert | maxsim_sum: true
loss_type: triplet | triplet_margin: 0.5, triplet_negatives: listed
loss_type: distillation, teacher_model_name: t | distillation_alpha: 0.7, distillation_temperature: 2.0
loss_type: distillation, teacher_model_name: t | distillation_loss_type: mse
added_losses: {spread_out: 1.0} | spread_out_mean: 2.0, spread_out_second_moment: 2.0
loss_type: angle | angle_scale: 5.0
loss_type: margin_mse | margin_mse_scale: 9.0
loss_type: kl | kl_temperature: 0.5, kl_teacher_temperature: 2.0
loss_type: in_batch_hard | hard_topk: 4
mrl_dims: [8] | mrl_weights: [1.0]
mine: once | mine_corpus: corpus.jsonl, mine_teacher: ./t, mine_negatives: 2, mine_range_min: 5, mine_range_max: 50
mine: once | mine_relative_margin: 0.1, mine_absolute_margin: 0.1, mine_min_score: 0.1, mine_max_score: 0.9
mine: once | mine_sampling: random, mine_index: HNSW32, mine_replace: true
"""
"""What makes keys act | keys that each alone are refused, as nothing reads them."""


def parts(row: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return what is refused, what isn't, and a part of the message."""
    bad, changes, sentence = row.split(" | ")
    refused_values, mended = (yaml.safe_load(f"{{{text}}}") for text in (bad, changes))
    mended = {key: value for key, value in {**refused_values, **mended}.items() if value != "default"}
    return refused_values, mended, sentence


def idle_rows() -> list[str]:
    pairs = (line.split(" | ") for line in IDLE.strip().splitlines())
    return [
        f"{json.dumps({key: value})[1:-1]} | {acting} | {key} has no effect"
        for acting, keys in pairs
        for key, value in yaml.safe_load(f"{{{keys}}}").items()
    ]


ROWS = [*RULE_CASES.strip().splitlines(), *idle_rows()]


@pytest.mark.parametrize("row", ROWS)
def test_an_impossible_combination_is_refused_with_its_fix(row: str) -> None:
    bad, mended, sentence = parts(row)
    assert sentence in refused(**bad)
    make(**mended)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"text_model_name": "a", "image_model_name": "b"}, "a + b"),
        ({"model_name": "a", "image_model_name": "b"}, "a + b"),
        ({"model_name": "b", "text_model_name": "a"}, "a + b"),
        ({"model_name": "a + b", "text_model_name": "c", "image_model_name": "b"}, "c + b"),
    ],
)
def test_two_models_are_one_of_both_names_whichever_model_name_stands_for(given: dict[str, str], name: str) -> None:
    config = Config.model_validate(given)
    assert config.model_name == name
    text, _, image = name.partition(" + ")
    assert (config.text_model_name, config.image_model_name) == (text, image)
    assert Config.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("given", ["text_model_name", "image_model_name"])
def test_one_tower_is_no_model(given: str) -> None:
    other = {"text_model_name": "image_model_name", "image_model_name": "text_model_name"}[given]
    with pytest.raises(ValidationError, match=f"needs both names; set {other}"):
        Config.model_validate({given: "a"})


def constructed(values: Mapping[str, Any]) -> Config:
    """Return a configuration whose rules nobody has checked."""
    sources = {"data": [Source(**each) for each in values["data"]]} if values.get("data") else {}
    return config_class().model_construct(**{"model_name": "m", **values, **sources})


def test_every_rule_has_a_case_above_and_one_sentence_for_the_reference() -> None:
    broken = set()
    for row in ROWS:
        candidate = constructed(parts(row)[0])
        broken |= {rule.sentence for rule in rules() if rule.violation(candidate) is not None}
    assert broken == {rule.sentence for rule in rules()}
    assert all(rule.sentence.endswith(".") and "\n" not in rule.sentence for rule in rules())


def test_a_rule_reads_no_key_that_it_does_not_name() -> None:
    class Watched:
        def __init__(self, config: Config) -> None:
            self.config = config
            self.read: set[str] = set()

        def __getattr__(self, name: str) -> object:
            self.read.add(name)
            return getattr(self.config, name)

    configs = [constructed(values) for values in [{}, *(parts(row)[0] for row in ROWS)]]
    watched_something = False
    for rule in rules():
        for config in configs:
            watched = Watched(config)
            rule.violation(watched)
            assert watched.read <= set(rule.keys), rule.sentence
            watched_something |= bool(watched.read)
    assert watched_something


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_an_alias_sets_its_keys_and_is_refused_beside_one(alias: str) -> None:
    values = {"lr": 1e-3, "per_device_train_batch_size": 8, "dataloader_num_workers": 2, "num_gpus": 2}
    value = (values | {"use_torch_compile": False, "pin_memory": False}).get(alias, "text")
    config = Config.model_validate({**({} if alias == "model_name_or_path" else {"model_name": "m"}), alias: value})
    for target in ALIASES[alias]:
        assert getattr(config, target) == value
        with pytest.raises(ValidationError, match=f"{alias} sets {target}, which is also set"):
            Config.model_validate({"model_name": "m", target: value, alias: value})


def test_aliases_are_no_keys_and_their_targets_are() -> None:
    assert not set(ALIASES) & set(fields())
    assert {target for targets in ALIASES.values() for target in targets} <= set(fields())


def test_a_config_can_not_be_changed() -> None:
    config = make()
    with pytest.raises(ValidationError, match="frozen"):
        config.batch_size = 3  # type: ignore[misc]
    assert config.batch_size == 64


def test_two_configs_share_no_mapping() -> None:
    one, two = make(), make()
    one.column_mapping["text"] = "query"  # type: ignore[index]
    assert two.column_mapping == {}
    assert default_of("column_mapping") == {}


def test_every_key_is_in_one_section_and_says_how_far_it_reaches() -> None:
    names = [name for title in SECTIONS for name in section_keys(title)]
    assert names == list(key_names())
    assert set(names) == set(fields())
    assert len(names) == len(set(names))
    for name, schema in key_schemas().items():
        assert schema["affects"] in ("result", "run", "process"), name


def test_the_metrics_are_the_ones_that_evaluation_computes() -> None:
    assert len(metrics_that_choose()) == 30
    for metric in metrics_that_choose():
        assert make(metric_for_best_model=metric).metric_for_best_model == metric


def test_a_password_is_in_no_message_and_no_repr() -> None:
    config = make(data_path="https://user:canary@host/data")
    assert config.data_path == "https://user:canary@host/data"
    assert "canary" not in repr(config)
    assert "canary" not in str(config)
    assert "canary" not in refused(report_to="https://user:canary@host/data")
    assert "canary" not in refused(data_path="https://user:canary@host/data", batch_size=1)
