"""The schema: each bound and each rule between keys, with the valid neighbour of every refused value."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from vembed.config.messages import key_schemas
from vembed.config.names import ALIASES
from vembed.config.schema import (
    SECTIONS,
    Config,
    config_class,
    default_of,
    fields,
    key_names,
    rules,
    section_keys,
)
from vembed.data.keys import Source
from vembed.evaluation.keys import metrics_that_choose

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make(**values: object) -> Config:
    return Config.model_validate({"model_name": "some/model", **values})


def refused(**values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        make(**values)
    return str(caught.value)


def test_the_defaults_alone_are_valid() -> None:
    config = make()
    assert config.batch_size == 64
    assert config.learning_rate == 2e-5
    assert config.eval_strategy == "epoch"
    assert config.bf16 == "auto"


def test_the_model_name_is_required() -> None:
    with pytest.raises(ValidationError, match="model_name"):
        Config.model_validate({})


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("batch_size", True, 2),
        ("batch_size", "3", 3),
        ("batch_size", 3.0, 3),
        ("batch_size", None, 3),
        ("epochs", 0, 1),
        ("epochs", 2**31, 2**31 - 1),
        ("global_batch_size", 0, 2),
        ("max_steps", 0, None),
        ("seed", -1, 0),
        ("seed", 2**32, 2**32 - 1),
        ("max_seq_length", 3, 4),
        ("max_seq_length", "Auto", "auto"),
        ("max_seq_length", True, 512),
        ("learning_rate", 0, 1),
        ("learning_rate", True, 1.0),
        ("learning_rate", "1e-5", 1e-5),
        ("learning_rate", 10**400, 10),
        ("temperature", 0.0, 1e-3),
        ("weight_decay", -0.1, 0),
        ("adam_beta1", 1.0, 0),
        ("adam_beta2", -0.1, 0.999),
        ("adam_epsilon", 0, 1e-12),
        ("max_grad_norm", False, None),
        ("max_grad_norm", -1, 0.5),
        ("warmup_ratio", 1.01, 1),
        ("warmup_ratio", -0.01, 0),
        ("warmup_steps", -1, 0),
        ("bf16", 1, True),
        ("bf16", "yes", False),
        ("fp16", "auto", False),
        ("bm25", 0, False),
        ("torch_dtype", "float16", "float64"),
        ("attn_implementation", "flash", "flash_attention_2"),
        ("pooling_method", "max", "last_token"),
        ("loss_type", "triplett", "triplet"),
        ("scheduler_type", "step", "constant"),
        ("eval_strategy", False, "no"),
        ("metric_for_best_model", "ndcg@20", "ndcg@100"),
        ("metric_for_best_model", "ndcg@10\n", "hit@1"),
        ("report_to", "comet", "all"),
        ("report_to", ["tensorboard", "all"], ["tensorboard", "wandb"]),
        ("report_to", ["none"], []),
        ("nonfinite_policy", "ignore", "skip"),
        ("save_total_limit", 1, 2),
        ("save_minutes", 0, 0.5),
        ("save_steps", -1, None),
        ("use_gradient_cache", "true", True),
        ("gradient_cache_chunk_size", 0, 1),
        ("gradient_cache_chunk_tokens", 1.5, 4096),
        ("model_name", " ", "x"),
        ("output_dir", "", "."),
        ("data_path", "a\0b", "a b"),
        ("data_path", "\ud800", "é"),
        ("data_path", [], "a"),
        ("query_prompt", 3, ""),
        ("pad_token", "", "<pad>"),
        ("column_mapping", ["text"], {}),
        ("column_mapping", {"text": "querry"}, {"text": "query"}),
        ("column_mapping", {"text": 3}, {"text": None}),
        ("column_mapping", {"photo": "image"}, {"photo": "positive_image"}),
        ("image_root", " ", "pictures"),
        ("image_root", "a\0b", None),
        ("max_image_pixels", 0, 1),
        ("max_image_pixels", None, 89_478_485),
        ("retrieval_mode", "text2image", "t2i"),
        ("retrieval_mode", None, "auto"),
        ("column_mapping", {3: "query"}, {"3": "query"}),
        ("column_mapping", {"": "query"}, {".": "query"}),
    ],
)
def test_a_value_out_of_bounds_or_of_another_type_is_refused(key: str, bad: object, good: object) -> None:
    refused(**{key: bad})
    assert getattr(make(**{key: good}), key) == good


BESIDE = {
    "init_logit_scale": {"loss_type": "sigmoid"},
    "init_logit_bias": {"loss_type": "sigmoid"},
    "triplet_margin": {"loss_type": "triplet"},
    "cosent_scale": {"loss_type": "cosent"},
    "angle_scale": {"loss_type": "angle"},
    "margin_mse_scale": {"loss_type": "margin_mse"},
    "kl_temperature": {"loss_type": "kl"},
    "kl_teacher_temperature": {"loss_type": "kl"},
    "false_negative_margin": {"false_negative_filter": "threshold"},
    "source_temperature": {"data": [{"path": "a"}]},
    "hardness_strength": {"hardness_mode": "all_negatives"},
    "hard_max_similarity": {"batch_sampling": "hard"},
    "distillation_alpha": {"loss_type": "distillation", "teacher_model_name": "t"},
    "distillation_temperature": {"loss_type": "distillation", "teacher_model_name": "t"},
    "spread_out_mean": {"added_losses": {"spread_out": 1.0}},
    "spread_out_second_moment": {"added_losses": {"spread_out": 1.0}},
    "mine_relative_margin": {"mine": "once"},
    "mine_absolute_margin": {"mine": "once"},
    "mine_min_score": {"mine": "once"},
    "mine_max_score": {"mine": "once"},
}
"""What a key needs beside it to have an effect."""


@pytest.mark.parametrize(
    "key",
    [
        name
        for name, schema in key_schemas().items()
        if '"number"' in str(schema).replace("'", '"') and not {"array", "object"} & set(str(schema).split("'"))
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_float_key_takes_nan_or_infinity(key: str, value: float) -> None:
    beside, good = BESIDE.get(key, {}), 1.0 if key == "pool_factor" else 0.5
    refused(**beside, **{key: value})
    assert getattr(make(**beside, **{key: good}), key) == good
    refused(mrl_dims=[4, 2], mrl_weights=[1.0, value])
    assert make(mrl_dims=[4, 2], mrl_weights=[1.0, 0.5]).mrl_weights == [1.0, 0.5]


def test_the_float_keys_of_the_test_above_are_found() -> None:
    floats = [name for name, schema in key_schemas().items() if "number" in str(schema)]
    assert {"learning_rate", "temperature", "max_grad_norm", "save_minutes"} <= set(floats)


def test_an_integer_becomes_a_float_where_a_float_is_expected() -> None:
    config = make(learning_rate=1, max_grad_norm=2)
    assert isinstance(config.learning_rate, float)
    assert isinstance(config.max_grad_norm, float)


RULE_CASES: list[tuple[Mapping[str, Any], Mapping[str, Any], str]] = [
    ({"bf16": True, "fp16": True}, {"bf16": "auto", "fp16": True}, "set fp16 to false"),
    ({"bf16": True, "torch_dtype": "float64"}, {"bf16": False, "torch_dtype": "float64"}, "bf16 would undo"),
    ({"fp16": True, "torch_dtype": "float64"}, {"fp16": True, "torch_dtype": "float32"}, "fp16 would undo"),
    ({"bf16": False, "torch_dtype": "bfloat16"}, {"bf16": True, "torch_dtype": "bfloat16"}, "compute in bfloat16"),
    ({"fp16": True, "torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, "fp16 needs float32 weights"),
    ({"bm25": False, "bm25_language": "german"}, {"bm25_language": "german"}, "bm25_language has no effect"),
    (
        {"teacher_model_name": "t"},
        {"teacher_model_name": "t", "loss_type": "margin_mse"},
        "nothing reads the teacher: set false_negative_filter to teacher",
    ),
    (
        {"false_negative_filter": "teacher"},
        {"false_negative_filter": "teacher", "teacher_model_name": "t"},
        "false_negative_filter teacher reads a teacher's vectors, but there is none",
    ),
    (
        {"teacher_model_name": "builtin:ngram-bag", "loss_type": "kl"},
        {"teacher_model_name": "./t", "loss_type": "kl"},
        "has nothing to teach",
    ),
    (
        {"teacher_model_name": "t", "loss_type": "kl", "label_kind": "grade"},
        {"teacher_model_name": "t", "loss_type": "kl"},
        "label_kind grade gives the scores already",
    ),
    *(
        (
            {name: "x"},
            {name: "x", "teacher_model_name": "t", "loss_type": "cosine_mse"},
            f"{name} has no effect without teacher_model_name",
        )
        for name in ("teacher_revision", "teacher_cache")
    ),
    ({"batch_size": "auto", "global_batch_size": 8}, {"batch_size": "auto"}, "global_batch_size already sets it"),
    ({"data": [{"path": "a"}], "data_path": "b"}, {"data": [{"path": "a"}]}, "remove one of them"),
    (
        {"source_batches": "single"},
        {"source_batches": "single", "data": [{"path": "a"}]},
        "source_batches has no effect",
    ),
    (
        {"source_temperature": 2.0},
        {"source_temperature": 2.0, "data": [{"path": "a"}]},
        "source_temperature has no effect",
    ),
    (
        {"hard_max_similarity": 0.9},
        {"hard_max_similarity": 0.9, "batch_sampling": "hard"},
        "hard_max_similarity has no effect",
    ),
    (
        {"samples_per_class": 8},
        {"samples_per_class": 8, "batch_sampling": "classes"},
        "samples_per_class has no effect",
    ),
    (
        {"batch_sampling": "classes", "batch_size": 10},
        {"batch_sampling": "classes", "batch_size": 8},
        "doesn't divide batch_size 10 into two or more classes; set batch_size to 8",
    ),
    (
        {"batch_sampling": "classes", "label_kind": "pair", "loss_type": "cosent"},
        {"batch_sampling": "classes", "label_kind": "class"},
        "label_kind is pair: set it to class",
    ),
    ({"lr_reference_batch": 8}, {"lr_scaling": "sqrt", "lr_reference_batch": 8}, "lr_reference_batch has no effect"),
    ({"sharding_factor": 1, "use_fsdp": True}, {"sharding_factor": 1, "use_fsdp": False}, "replicates the model"),
    ({"sharding_factor": 2, "use_fsdp": False}, {"sharding_factor": 2, "use_fsdp": True}, "shards the model while"),
    ({"fsdp_mode": "lean", "use_fsdp": False}, {"fsdp_mode": "lean"}, "fsdp_mode has no effect with use_fsdp false"),
    (
        {"fsdp_mode": "lean", "sharding_factor": 1},
        {"fsdp_mode": "lean", "sharding_factor": 2},
        "set sharding_factor to auto or 2 or more",
    ),
    ({"cpu_offload": True, "use_fsdp": False}, {"cpu_offload": True, "use_fsdp": True}, "cpu_offload has no effect"),
    ({"cpu_offload": True, "sharding_factor": 1}, {"cpu_offload": False, "sharding_factor": 1}, "sharding_factor 1"),
    ({"use_lora": False, "lora_r": 8}, {"use_lora": "auto", "lora_r": 8}, "lora_r has no effect"),
    ({"use_lora": False, "lora_alpha": 8}, {"use_lora": True, "lora_alpha": 8}, "lora_alpha has no effect"),
    ({"use_lora": False, "lora_dropout": 0.1}, {"lora_dropout": 0.1}, "lora_dropout has no effect"),
    (
        {"use_lora": False, "lora_target_modules": ["q_proj"]},
        {"use_lora": True, "lora_target_modules": ["q_proj"]},
        "lora_target_modules has no effect",
    ),
    ({"use_lora": False, "lora_towers": "text"}, {"use_lora": True, "lora_towers": "text"}, "set use_lora to true"),
    ({"use_lora": True, "trainable": "text"}, {"use_lora": "auto", "trainable": "text"}, "set lora_towers to text"),
    (
        {"use_lora": True, "trainable": "text+projection"},
        {"use_lora": True, "lora_towers": "text+projection"},
        "set lora_towers to text+projection",
    ),
    ({"use_lora": True, "trainable": "last_2_layers"}, {"trainable": "last_2_layers"}, "set trainable to all"),
    ({"load_in_4bit": True}, {"load_in_4bit": True, "use_lora": True}, "set use_lora to true"),
    (
        {"load_in_4bit": True, "use_lora": True, "torch_dtype": "float64"},
        {"load_in_4bit": True, "use_lora": True, "torch_dtype": "bfloat16"},
        "would undo torch_dtype float64",
    ),
    (
        {"load_in_4bit": True, "use_lora": True, "use_fsdp": True},
        {"use_lora": True, "use_fsdp": True},
        "keeps a whole copy of the model on each device",
    ),
    ({"eval_strategy": "steps"}, {"eval_strategy": "steps", "eval_steps": 5}, "needs eval_steps"),
    ({"eval_steps": 5}, {"eval_strategy": "epoch"}, "eval_steps has no effect with eval_strategy epoch"),
    (
        {"early_stopping_patience": 2, "eval_strategy": "no"},
        {"early_stopping_patience": 2, "eval_strategy": "epoch"},
        "has no effect with eval_strategy no",
    ),
    ({"model_name": "builtin:ngram-bg"}, {"model_name": "builtin:ngram-bag"}, "did you mean builtin:ngram-bag?"),
    (
        {"text_model_name": "a", "image_model_name": "b"},
        {"model_name": "a", "text_model_name": "a", "image_model_name": "b"},
        "is neither the text tower nor the image tower; leave model_name out",
    ),
    (
        {"model_name": "b", "text_model_name": "a", "model_revision": "main"},
        {"model_name": "b", "text_model_name": "a"},
        "model_revision belongs to one model, but two are named",
    ),
    (
        {"model_name": "b", "text_model_name": "a", "encoder_mode": "clip"},
        {"model_name": "b", "text_model_name": "a", "encoder_mode": "composed"},
        "encoder_mode clip belongs to one model",
    ),
    (
        {"model_name": "builtin:ngram-bg", "image_model_name": "b"},
        {"model_name": "builtin:ngram-bag", "image_model_name": "b"},
        "did you mean builtin:ngram-bag?",
    ),
    ({"trust_remote_code": True}, {"trust_remote_code": True, "model_revision": COMMIT}, "pin it to a commit"),
    (
        {"trust_remote_code": True, "model_revision": "main"},
        {"trust_remote_code": False, "model_revision": "main"},
        "pin it to a commit",
    ),
    ({"trust_remote_code": True, "model_revision": COMMIT[1:]}, {"model_revision": COMMIT[1:]}, "40 lower-case hex"),
    ({"batch_size": 1}, {"batch_size": 2}, "no in-batch negatives"),
    ({"batch_size": 1, "global_batch_size": None}, {"batch_size": 1, "global_batch_size": 8}, "set batch_size to 2"),
    ({"global_batch_size": 1}, {"global_batch_size": 2}, "set global_batch_size to 2"),
    (
        {"use_gradient_cache": False, "gradient_cache_chunk_size": 8},
        {"use_gradient_cache": True, "gradient_cache_chunk_size": 8},
        "gradient_cache_chunk_size has no effect",
    ),
    (
        {"use_gradient_cache": False, "gradient_cache_chunk_tokens": 8},
        {"use_gradient_cache": False, "gradient_cache_chunk_tokens": "auto"},
        "gradient_cache_chunk_tokens has no effect",
    ),
    (
        {"use_gradient_cache": False, "retain": 0.5},
        {"use_gradient_cache": "auto", "retain": 0.5},
        "retain has no effect",
    ),
    ({"warmup_steps": 10, "max_steps": 10}, {"warmup_steps": 9, "max_steps": 10}, "set warmup_steps to 9 or less"),
    ({"data_split": "train"}, {"data_split": "train", "data_path": "d"}, "set data_path"),
    ({"val_data_split": "dev"}, {"val_data_split": "dev", "val_data_path": "d"}, "set val_data_path"),
    ({"val_fraction": 0.1, "val_data_path": "d"}, {"val_fraction": 0.1}, "set val_data_path to null"),
    ({"test_data_split": "test"}, {"test_data_split": "test", "test_data_path": "d"}, "set test_data_path"),
    ({"guard_data_split": "test"}, {"guard_data_split": "test", "guard_data": ["d"]}, "set guard_data"),
    ({"guard_data": ["d", "d"]}, {"guard_data": ["d", "e"]}, "guard_data lists d twice; name it once"),
    (
        {"max_invalid_records": 5},
        {"max_invalid_records": 5, "skip_invalid_records": True},
        "has no effect with skip_invalid_records false; remove it or set skip_invalid_records to true",
    ),
    ({"label_kind": "grade"}, {"label_kind": "class"}, "loss_type infonce doesn't take listed pairs"),
    (
        {"loss_type": "sigmoid", "temperature": 0.1},
        {"loss_type": "infonce", "temperature": 0.1},
        "set init_logit_scale to 2.303",
    ),
    ({"loss_type": "sigmoid", "learn_temperature": True}, {"learn_temperature": True}, "always learns its scale"),
    ({"loss_type": "sigmoid", "loss_bidirectional": True}, {"loss_bidirectional": True}, "judges each pair once"),
    (
        {"init_logit_scale": 3.0},
        {"init_logit_scale": 3.0, "loss_type": "sigmoid"},
        "init_logit_scale has no effect with loss_type infonce",
    ),
    (
        {"init_logit_bias": 3.0},
        {"init_logit_bias": 3.0, "loss_type": "sigmoid"},
        "init_logit_bias has no effect with loss_type infonce",
    ),
    (
        {"maxsim_sum": True},
        {"maxsim_sum": True, "loss_type": "colbert"},
        "maxsim_sum has no effect with loss_type infonce",
    ),
    ({"triplet_margin": 0.5}, {"triplet_margin": 0.5, "loss_type": "triplet"}, "triplet_margin has no effect"),
    *(
        (
            {**given, "loss_type": "colbert"},
            {**given, "false_negative_filter": "teacher", "teacher_model_name": "t"},
            f"{next(iter(given))} has no effect with loss_type colbert",
        )
        for given in (
            {"false_negative_filter": "threshold"},
            {"false_negative_margin": 0.1},
            {"false_negative_margin_kind": "absolute"},
        )
    ),
    *(
        (
            {**given, "loss_type": "supcon"},
            {**given, "hardness_mode": "hard_negatives"},
            f"{next(iter(given))} has no effect with loss_type supcon",
        )
        for given in (
            {"hardness_mode": "all_negatives"},
            {"hardness_strength": 9.0},
            {"focal_gamma": 0.5},
            {"loss_directions": ["query_to_document", "query_to_query"]},
        )
    ),
    ({"hardness_strength": 9.0}, {"hardness_strength": 9.0, "hardness_mode": "all_negatives"}, "hardness_mode none"),
    ({"cosent_scale": 10.0}, {"cosent_scale": 10.0, "loss_type": "cosent"}, "set temperature to 0.1"),
    *(
        (given, {**given, "loss_type": "distillation", "teacher_model_name": "t"}, f"{next(iter(given))} has no effect")
        for given in (
            {"distillation_alpha": 0.7},
            {"distillation_temperature": 2.0},
            {"distillation_loss_type": "mse"},
        )
    ),
    (
        {"distillation_temperature": 2.0, "distillation_loss_type": "mse"},
        {"distillation_loss_type": "mse", "loss_type": "distillation", "teacher_model_name": "t"},
        "distillation_temperature has no effect with distillation_loss_type mse",
    ),
    ({"added_losses": {"cosentt": 1.0}}, {"added_losses": {"cosent": 1.0}}, "'cosentt' is no loss"),
    ({"loss_type": "spread_out"}, {"added_losses": {"spread_out": 1.0}}, "spread_out alone learns nothing"),
    ({"added_losses": {"angle": 1.0}}, {"added_losses": {"angle": 1.0}, "label_kind": "grade"}, "set label_kind"),
    ({"spread_out_mean": 2.0}, {"spread_out_mean": 2.0, "added_losses": {"spread_out": 1.0}}, "has no effect"),
    (
        {"spread_out_second_moment": 2.0},
        {"spread_out_second_moment": 2.0, "added_losses": {"spread_out": 1.0}},
        "spread_out_second_moment has no effect",
    ),
    ({"angle_scale": 5.0}, {"angle_scale": 5.0, "loss_type": "angle"}, "angle_scale has no effect"),
    ({"angle_scale": 5.0, "loss_type": "kl"}, {"loss_type": "kl"}, "angle_scale has no effect"),
    ({"cosent_scale": 10.0, "loss_type": "angle"}, {"loss_type": "angle"}, "set angle_scale to 10"),
    ({"temperature": 0.1, "loss_type": "kl"}, {"kl_temperature": 0.1, "loss_type": "kl"}, "set kl_temperature to 0.1"),
    ({"margin_mse_scale": 9.0}, {"margin_mse_scale": 9.0, "loss_type": "margin_mse"}, "has no effect"),
    ({"kl_temperature": 0.5}, {"kl_temperature": 0.5, "loss_type": "kl"}, "kl_temperature has no effect"),
    ({"kl_teacher_temperature": 2.0}, {"kl_teacher_temperature": 2.0, "loss_type": "kl"}, "has no effect"),
    ({"triplet_negatives": "listed"}, {"triplet_negatives": "listed", "loss_type": "triplet"}, "has no effect"),
    (
        {"hard_topk": 4},
        {"hard_topk": 4, "loss_type": "in_batch_hard"},
        "hard_topk has no effect with loss_type infonce",
    ),
    (
        {"use_all_negatives": True},
        {"use_all_negatives": True, "loss_type": "in_batch_hard"},
        "infonce always learns from all of them",
    ),
    (
        {"hard_topk": 4, "loss_type": "in_batch_hard", "use_all_negatives": True},
        {"hard_topk": 4, "loss_type": "in_batch_hard"},
        "hard_topk has no effect with use_all_negatives true",
    ),
    ({"loss_type": "colbert", "mrl_dims": [8]}, {"mrl_dims": [8]}, "vectors of late interaction are short"),
    (
        {"loss_type": "colbert", "mrl_dims": [8], "mrl_weights": [1.0]},
        {"mrl_dims": [8], "mrl_weights": [1.0]},
        "mrl_weights has no effect with loss_type colbert",
    ),
    ({"mrl_dims": [8, 8]}, {"mrl_dims": [8, 4]}, "holds a number twice"),
    ({"mrl_weights": [1.0]}, {"mrl_weights": [1.0], "mrl_dims": [8]}, "mrl_weights has no effect without mrl_dims"),
    ({"mrl_weights": [1.0], "mrl_dims": [8, 4]}, {"mrl_dims": [8, 4]}, "one weight for each"),
    (
        {"save_strategy": "no", "save_steps": 5},
        {"save_strategy": "epoch", "save_steps": 5},
        "set save_strategy to steps",
    ),
    ({"save_strategy": "no", "save_minutes": 5.0}, {"save_strategy": "no"}, "set save_strategy to steps or epoch"),
    ({"max_skipped_steps": 5}, {"max_skipped_steps": 5, "nonfinite_policy": "skip"}, "set nonfinite_policy to skip"),
    ({"mine": "once", "label_kind": "grade"}, {"mine": "once"}, "mine needs rows with positives"),
    (
        {"mine": "once", "mine_teacher": "builtin:ngram-bag"},
        {"mine": "once", "mine_teacher": "./t"},
        "has nothing to teach",
    ),
    (
        {"data": [{"path": "a"}, {"path": "b", "loss": "cosent"}]},
        {"data": [{"path": "a"}, {"path": "b", "loss": "cosent"}], "source_batches": "single"},
        "data[1].loss: a mixed batch holds rows of all sources and has one loss",
    ),
    (
        {"data": [{"path": "a", "loss": "cosent"}], "added_losses": {"spread_out": 0.1}},
        {"data": [{"path": "a"}], "added_losses": {"spread_out": 0.1}},
        "added_losses has no effect: every source of data has a loss of its own",
    ),
    ({"hard_refresh": 2}, {"hard_refresh": 2, "batch_sampling": "hard"}, "hard_refresh has no effect with"),
    ({"seeds": [1, 2, 1]}, {"seeds": [1, 2]}, "seed 1 is listed twice"),
    (
        {"seeds": [1, 2], "test_data_path": "t", "eval_strategy": "no"},
        {"seeds": [1, 2], "test_data_path": "t"},
        "seeds keeps the model that is best on the dev set",
    ),
    *(
        ({name: value}, {name: value, "mine": "once"}, f"{name} has no effect with mine never")
        for name, value in {
            "mine_corpus": "corpus.jsonl",
            "mine_teacher": "./t",
            "mine_negatives": 2,
            "mine_range_min": 5,
            "mine_range_max": 50,
            "mine_relative_margin": 0.1,
            "mine_absolute_margin": 0.1,
            "mine_min_score": 0.1,
            "mine_max_score": 0.9,
            "mine_sampling": "random",
            "mine_index": "HNSW32",
            "mine_replace": True,
        }.items()
    ),
]


@pytest.mark.parametrize(("bad", "good", "sentence"), RULE_CASES)
def test_an_impossible_combination_is_refused_with_its_fix(
    bad: Mapping[str, Any], good: Mapping[str, Any], sentence: str
) -> None:
    assert sentence in refused(**bad)
    make(**good)


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
    for bad, _, _ in RULE_CASES:
        candidate = constructed(bad)
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

    watched_something = False
    for rule in rules():
        for values in [{}, *(bad for bad, _, _ in RULE_CASES)]:
            watched = Watched(constructed(values))
            rule.violation(watched)
            assert watched.read <= set(rule.keys), rule.sentence
            watched_something |= bool(watched.read)
    assert watched_something


def test_all_broken_rules_are_told_at_once() -> None:
    message = refused(batch_size=1, bf16=True, fp16=True)
    assert "in-batch negatives" in message
    assert "set fp16 to false" in message


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


def test_an_unknown_key_is_refused() -> None:
    assert "learning_rte" in refused(learning_rte=1)
    refused(lora_rank=1)


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
