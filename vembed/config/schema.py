"""Every key of the configuration: type, default, unit, bounds, meaning, alias, and the rules between keys.

The sections below group the keys; the file that a user writes is flat. A fact about a key stands here and nowhere else:
the reference, the JSON schema and the error messages are made from it. Values are strict: `True` is no integer and "3"
is no number; an integer is fine where a float is expected.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vembed.config.fields import (
    LARGEST_COUNT,
    RULES,
    Auto,
    BrokenRules,
    Count,
    Decay,
    Name,
    NonNegative,
    Positive,
    Share,
    Text,
    key,
    rule,
)
from vembed.config.redact import redact_value

ColumnName = Literal["query", "positive", "negatives", "query_image", "positive_image", "negative_images", "label"]
"""The columns that a row may have under our names."""

_METRIC_NAMES = ("ndcg", "recall", "precision", "mrr", "map", "hit")
_METRIC_DEPTHS = (1, 3, 5, 10, 100)

METRICS = tuple(f"{name}@{depth}" for name in _METRIC_NAMES for depth in _METRIC_DEPTHS)
"""The metrics that can choose a checkpoint."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "model_name_or_path": ("model_name",),
    "prompt": ("query_prompt", "document_prompt"),
    "per_device_train_batch_size": ("batch_size",),
    "lr": ("learning_rate",),
    "resume_from_checkpoint": ("resume",),
}
"""Other names of a key, or of several that one value sets. An alias beside its key is an error."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a path may hold a password
        protected_namespaces=(),  # model_name is ours
    )


class ModelKeys(_Section):
    """The model and how a text or a picture becomes a vector."""

    model_name: Name = key(
        ..., "Hub id or local folder of the model, or `builtin:NAME` to train a tiny one from scratch."
    )
    model_revision: Name | None = key(None, "Branch, tag or commit of a hub model; null is the hub's default branch.")
    trust_remote_code: bool = key(False, "Run Python code that the model's repository holds; needs a pinned commit.")
    allow_pickle: bool = key(
        False, "Read pickled weights (with `weights_only`) when the model has no safetensors file."
    )
    torch_dtype: Literal["float32", "float64"] = key("float32", "Dtype of the weights and of the optimizer state.")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key("auto", "Attention kernel.")
    pooling_method: Literal["auto", "mean", "cls", "last_token"] = key(
        "auto", "How token vectors become one vector; auto is what the model's own files say."
    )
    max_seq_length: Auto | Annotated[int, Field(ge=4, le=LARGEST_COUNT)] = key(
        "auto", "Longer texts are truncated and counted; auto is the model's own limit.", unit="tokens"
    )
    query_prompt: Text | None = key(None, "Text put before each query; null is the model's own, '' is none.")
    document_prompt: Text | None = key(None, "Text put before each document; null is the model's own, '' is none.")
    pad_token: Name | None = key(None, "Padding token; null is the tokenizer's own.")
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass: less memory, more time.")


@rule("trust_remote_code", "model_revision")
def _remote_code_is_pinned(config: "Config") -> str | None:
    """`trust_remote_code: true` needs `model_revision` to be a commit of 40 hex digits."""
    if not config.trust_remote_code or re.fullmatch(r"[0-9a-f]{40}", config.model_revision or ""):
        return None
    return (
        "trust_remote_code runs the repository's code, so model_revision must pin it to a commit of 40 lower-case hex "
        "digits; copy the commit that you have read from the model's page, or set trust_remote_code to false"
    )


class DataKeys(_Section):
    """Where the rows come from and what happens to broken ones."""

    data_path: Name | None = key(None, "Training data: file, folder, hub id or `builtin:SET`.")
    val_data_path: Name | None = key(
        None, "Data that chooses the best checkpoint; null holds out a part of the training data."
    )
    test_data_path: Name | None = key(None, "Data of the verdict, never used to choose anything.")
    data_split: Name | None = key(None, "Split of data_path; null is its training split.")
    val_data_split: Name | None = key(None, "Split of val_data_path; null is its validation split.")
    test_data_split: Name | None = key(None, "Split of test_data_path; null is its test split.")
    column_mapping: Mapping[Name, ColumnName | None] = key(
        {},
        "Column of the data -> our column (query, positive, negatives, query_image, positive_image, negative_images, "
        "label), or null to ignore it.",
    )
    image_root: Name | None = key(
        None, "Folder that paths of pictures in the data start from and stay in; null is the data file's own folder."
    )
    max_image_pixels: Count = key(
        89_478_485, "A picture whose header says more is refused before it is decoded.", unit="pixels"
    )
    retrieval_mode: Literal["auto", "t2t", "t2i", "i2t", "i2i"] = key(
        "auto",
        "What searches what, t for texts and i for pictures (t2i: texts search pictures); data of another kind are "
        "refused; auto takes what the data hold.",
    )
    skip_invalid_records: bool = key(False, "Drop and count rows that can't be used, instead of stopping.")
    max_invalid_records: Count = key(
        100, "With skip_invalid_records: more broken rows than this stop the run.", unit="rows"
    )
    drop_last: bool = key(False, "Drop the last, smaller batch of each epoch.")


@rule("data_split", "data_path")
def _split_has_data(config: "Config") -> str | None:
    """`data_split` needs `data_path`."""
    return _idle_split(config, "data")


@rule("val_data_split", "val_data_path")
def _val_split_has_data(config: "Config") -> str | None:
    """`val_data_split` needs `val_data_path`."""
    return _idle_split(config, "val_data")


@rule("test_data_split", "test_data_path")
def _test_split_has_data(config: "Config") -> str | None:
    """`test_data_split` needs `test_data_path`."""
    return _idle_split(config, "test_data")


def _idle_split(config: "Config", data: str) -> str | None:
    if getattr(config, f"{data}_split") is None or getattr(config, f"{data}_path") is not None:
        return None
    return f"{data}_split chooses a split of {data}_path, which is not set; set {data}_path or remove {data}_split"


@rule("max_invalid_records", "skip_invalid_records")
def _invalid_budget_acts(config: "Config") -> str | None:
    """`max_invalid_records` other than its default needs `skip_invalid_records: true`."""
    if config.skip_invalid_records or config.max_invalid_records == default_of("max_invalid_records"):
        return None
    return (
        "max_invalid_records has no effect while skip_invalid_records is false, as any broken row stops the run; "
        "set skip_invalid_records to true or remove max_invalid_records"
    )


class LossKeys(_Section):
    """What is minimised."""

    loss_type: Literal["infonce"] = key("infonce", "The loss.")
    temperature: Positive = key(0.05, "Similarities are divided by it; its start value with learn_temperature.")
    learn_temperature: bool = key(False, "Train the temperature as well.")
    loss_bidirectional: bool = key(False, "Average the losses of query -> document and document -> query.")
    mask_false_negatives: bool = key(
        True, "A copy of a query's positive in the batch is no negative (by id and content)."
    )


class BatchKeys(_Section):
    """How many rows one step sees, and how many of them at a time."""

    batch_size: Count = key(64, "Batch of one device.", unit="queries")
    global_batch_size: Count | None = key(
        None, "Batch of all devices together; wins over batch_size and is divided over the devices.", unit="queries"
    )
    use_gradient_cache: Auto | bool = key(
        "auto", "Encode the batch in chunks with its own gradients; false: in one call."
    )
    gradient_cache_chunk_size: Auto | Count = key("auto", "Most texts or pictures of one encoder call.", unit="items")
    gradient_cache_chunk_tokens: Auto | Count = key(
        "auto", "Most padded tokens (items x width) of one encoder call; the smaller chunk wins.", unit="tokens"
    )


@rule("global_batch_size", "batch_size", "loss_type")
def _batch_has_negatives(config: "Config") -> str | None:
    """The global batch (`global_batch_size`, else `batch_size`) must be 2 or more with `loss_type: infonce`."""
    name = "batch_size" if config.global_batch_size is None else "global_batch_size"
    if getattr(config, name) > 1:
        return None
    return f"{name} 1 leaves no in-batch negatives, so the infonce loss learns nothing; set {name} to 2 or more"


@rule("gradient_cache_chunk_size", "use_gradient_cache")
def _chunk_size_acts(config: "Config") -> str | None:
    """`gradient_cache_chunk_size` must be auto with `use_gradient_cache: false`."""
    return _idle_chunk(config, "gradient_cache_chunk_size")


@rule("gradient_cache_chunk_tokens", "use_gradient_cache")
def _chunk_tokens_act(config: "Config") -> str | None:
    """`gradient_cache_chunk_tokens` must be auto with `use_gradient_cache: false`."""
    return _idle_chunk(config, "gradient_cache_chunk_tokens")


def _idle_chunk(config: "Config", name: str) -> str | None:
    if config.use_gradient_cache is not False or getattr(config, name) == "auto":
        return None
    return (
        f"{name} has no effect while use_gradient_cache is false, as the batch is encoded in one call; "
        f"set use_gradient_cache to auto or {name} to auto"
    )


class OptimisationKeys(_Section):
    """AdamW, its schedule, precision and randomness."""

    epochs: Count = key(1, "Passes over the training data.", unit="epochs")
    max_steps: Count | None = key(None, "Optimizer steps of the whole run; wins over epochs.", unit="steps")
    learning_rate: Positive = key(2e-5, "Peak, after the warmup.")
    weight_decay: NonNegative = key(0.01, "Decoupled weight decay of AdamW.")
    adam_beta1: Decay = key(0.9, "Decay of AdamW's first moment.")
    adam_beta2: Decay = key(0.999, "Decay of AdamW's second moment.")
    adam_epsilon: Positive = key(1e-8, "Added to AdamW's denominator.")
    max_grad_norm: Positive | None = key(1.0, "Gradients are clipped to this global norm; null clips nothing.")
    scheduler_type: Literal["cosine", "linear", "constant"] = key(
        "cosine", "Course of the learning rate after the warmup."
    )
    warmup_ratio: Share = key(0.1, "Part of all steps in which the learning rate rises to its peak.")
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = key(
        None, "The same in steps; wins over warmup_ratio.", unit="steps"
    )
    bf16: Auto | bool = key("auto", "Mixed precision in bfloat16; auto is on where the device is fast at it.")
    fp16: bool = key(False, "Mixed precision in float16 with loss scaling.")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = key(
        42, "Seed of the weights, of dropout and of the sample order."
    )
    deterministic: bool = key(False, "Use deterministic kernels only: bit-equal runs on a GPU, slower.")


@rule("warmup_steps", "max_steps")
def _warmup_ends(config: "Config") -> str | None:
    """`warmup_steps` must be smaller than `max_steps`."""
    if config.warmup_steps is None or config.max_steps is None or config.warmup_steps < config.max_steps:
        return None
    return (
        f"warmup_steps {config.warmup_steps} is not smaller than max_steps {config.max_steps}, so the learning rate "
        f"would never reach its peak; set warmup_steps to {config.max_steps - 1} or less"
    )


@rule("fp16", "bf16")
def _one_half_precision(config: "Config") -> str | None:
    """`bf16` and `fp16` must not both be true."""
    if not (config.fp16 and config.bf16 is True):
        return None
    return "bf16 and fp16 are both true, but a run has one mixed precision; set fp16 to false"


@rule("bf16", "torch_dtype")
def _bfloat16_on_float32(config: "Config") -> str | None:
    """`bf16: true` needs `torch_dtype: float32`."""
    return _half_of_double(config, "bf16")


@rule("fp16", "torch_dtype")
def _float16_on_float32(config: "Config") -> str | None:
    """`fp16: true` needs `torch_dtype: float32`."""
    return _half_of_double(config, "fp16")


def _half_of_double(config: "Config", name: str) -> str | None:
    if config.torch_dtype != "float64" or getattr(config, name) is not True:
        return None
    return f"{name} would undo torch_dtype float64; set {name} to false or torch_dtype to float32"


class EvaluationKeys(_Section):
    """When retrieval is measured, and what chooses the best checkpoint."""

    eval_strategy: Literal["epoch", "steps", "no"] = key(
        "epoch", "When the validation data are evaluated during training."
    )
    eval_steps: Count | None = key(
        None, "Steps from one evaluation to the next, with eval_strategy steps.", unit="steps"
    )
    eval_batch_size: Count = key(
        256, "Most texts or pictures of one encoder call in evaluation.", unit="items", on_resume="harmless"
    )
    metric_for_best_model: str = key(
        "ndcg@10",
        "Metric that chooses the best checkpoint; higher is better.",
        choices=METRICS,
        form=f"NAME@K (NAME: {', '.join(_METRIC_NAMES)}; K: {', '.join(map(str, _METRIC_DEPTHS))})",
    )
    early_stopping_patience: Count | None = key(
        None, "Stop after so many evaluations in a row without a better metric; null never does.", unit="evaluations"
    )
    bm25: bool = key(True, "Evaluate BM25 beside the model where the set is all texts.", on_resume="harmless")


@rule("eval_strategy", "eval_steps")
def _steps_strategy_has_steps(config: "Config") -> str | None:
    """`eval_strategy: steps` needs `eval_steps`."""
    if config.eval_strategy != "steps" or config.eval_steps is not None:
        return None
    return "eval_strategy steps needs eval_steps; set eval_steps, such as 100, or eval_strategy to epoch"


@rule("eval_steps", "eval_strategy")
def _eval_steps_act(config: "Config") -> str | None:
    """`eval_steps` needs `eval_strategy: steps`."""
    if config.eval_steps is None or config.eval_strategy == "steps":
        return None
    return (
        f"eval_steps has no effect with eval_strategy {config.eval_strategy}; "
        "set eval_strategy to steps or remove eval_steps"
    )


@rule("early_stopping_patience", "eval_strategy")
def _early_stopping_is_fed(config: "Config") -> str | None:
    """`early_stopping_patience` needs an `eval_strategy` other than no."""
    if config.early_stopping_patience is None or config.eval_strategy != "no":
        return None
    return (
        "early_stopping_patience counts evaluations, and eval_strategy no makes none during training; "
        "set eval_strategy to epoch or remove early_stopping_patience"
    )


class OutputKeys(_Section):
    """What is written, how often, and what a run does when something is there or goes wrong."""

    output_dir: Name = key("outputs", "Folder of everything that the run writes.", on_resume="harmless")
    overwrite_output_dir: bool = key(False, "With resume never: delete the run in output_dir.", on_resume="harmless")
    save_steps: Count | None = key(None, "Steps from one checkpoint to the next.", unit="steps", on_resume="harmless")
    save_minutes: Positive | None = key(
        None, "Minutes from one checkpoint to the next.", unit="minutes", on_resume="harmless"
    )
    save_total_limit: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = key(
        2, "Newest checkpoints kept, beside the best one.", unit="checkpoints", on_resume="harmless"
    )
    resume: Name = key(
        "auto",
        "auto goes on from the newest valid checkpoint, never starts anew, a path names one.",
        on_resume="harmless",
    )
    logging_steps: Count = key(10, "Steps from one log line to the next.", unit="steps", on_resume="harmless")
    report_to: Literal["tensorboard", "none"] = key(
        "tensorboard", "Tracker beside metrics.jsonl, which is always written.", on_resume="harmless"
    )
    nonfinite_policy: Literal["stop", "skip"] = key(
        "stop", "At a loss or gradient that is NaN or infinite: stop the run, or skip the step and count it."
    )
    max_skipped_steps: Count = key(
        10, "With nonfinite_policy skip: more skipped steps than this stop the run.", unit="steps"
    )


@rule("max_skipped_steps", "nonfinite_policy")
def _skip_budget_acts(config: "Config") -> str | None:
    """`max_skipped_steps` other than its default needs `nonfinite_policy: skip`."""
    if config.nonfinite_policy == "skip" or config.max_skipped_steps == default_of("max_skipped_steps"):
        return None
    return (
        "max_skipped_steps has no effect with nonfinite_policy stop; "
        "set nonfinite_policy to skip or remove max_skipped_steps"
    )


SECTIONS: Mapping[str, type[BaseModel]] = {
    "Model": ModelKeys,
    "Data": DataKeys,
    "Loss": LossKeys,
    "Batch": BatchKeys,
    "Optimisation": OptimisationKeys,
    "Evaluation": EvaluationKeys,
    "Output": OutputKeys,
}
"""The sections in the order of every listing."""


# Last section first: pydantic collects fields from the last base to the first.
class Config(OutputKeys, EvaluationKeys, OptimisationKeys, BatchKeys, LossKeys, DataKeys, ModelKeys):
    """A complete, checked configuration; it can't be changed."""

    NOT_HASHED: ClassVar[frozenset[str]] = frozenset(
        {
            "output_dir",
            "overwrite_output_dir",
            "resume",
            "logging_steps",
            "report_to",
            "save_steps",
            "save_minutes",
            "save_total_limit",
        }
    )
    """Keys that decide nothing about the result."""

    @model_validator(mode="before")
    @classmethod
    def _expand_aliases(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        expanded: dict[Any, Any] = {name: value for name, value in values.items() if name not in ALIASES}
        for alias in (name for name in values if name in ALIASES):
            for target in ALIASES[alias]:
                if target in expanded:
                    msg = f"{alias} sets {target}, which is also set; keep one of them"
                    raise ValueError(msg)
                expanded[target] = values[alias]
        return expanded

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        broken = [(each.keys, sentence) for each in RULES if (sentence := each.check(self)) is not None]
        if broken:
            raise BrokenRules(broken)
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact_value(value)


def default_of(name: str) -> Any:
    """Return the default of a key.

    Args:
        name: A key that isn't required.

    Returns:
        The value that stands in the schema.
    """
    return Config.model_fields[name].get_default()
