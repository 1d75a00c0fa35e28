"""Keyword arguments of `vembed.train`, `vembed.load` and `vembed.build_index`, made from the sections.

Written by `python -m vembed.config.reference keys`; change the sections, not this file. docs/configuration.md says what
the keys mean.
"""
# fmt: off
# ruff: noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class TrainKeys(TypedDict, total=False):
    """Keys of the configuration, and other names of the same; those of your own losses are taken too."""

    model_name: str | Path
    text_model_name: str | Path | None
    image_model_name: str | Path | None
    projection_layers: int
    encoder_mode: Literal["auto", "clip", "siglip", "vit", "dino", "dinov2", "dinov3", "mae", "bert", "bge", "e5", "qwen", "qwen-vl", "llava", "composed"]
    model_revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    torch_dtype: Literal["float32", "float64", "bfloat16"]
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"]
    pooling_method: Literal["auto", "mean", "cls", "last_token", "head", "none"]
    projection_dim: Literal["auto"] | int
    topk_tokens: Literal["auto"] | int
    pool_factor: Literal["auto"] | float
    query_length: Literal["auto"] | int
    query_expansion: Literal["auto"] | bool
    bidirectional: bool
    max_seq_length: Literal["auto"] | int
    query_prompt: str | None
    document_prompt: str | None
    pad_token: str | None
    image_background: Literal["auto", "white", "black", "none"]
    image_tokens: Literal["auto"] | int
    max_image_size: int | None
    freeze_batch_norm: bool
    gradient_checkpointing: Literal["auto"] | bool
    trainable: str
    use_lora: Literal["auto"] | bool
    lora_r: int
    lora_alpha: float | None
    lora_dropout: float
    lora_target_modules: Literal["auto"] | Sequence[str]
    lora_towers: str
    load_in_4bit: bool
    source_batches: Literal["mixed", "single"]
    source_temperature: float
    data_path: str | Path | None
    val_data_path: str | Path | None
    val_fraction: Literal["auto"] | float
    test_data_path: str | Path | Sequence[str] | None
    guard_data: str | Sequence[str] | None
    leak: Literal["warn", "drop", "refuse"]
    data_split: str | None
    val_data_split: str | None
    test_data_split: str | None
    guard_data_split: str | None
    column_mapping: Mapping[str, Literal["query", "positive", "negatives", "query_image", "positive_image", "negative_images", "label", "title", "weight"] | None]
    label_kind: Literal["auto", "class", "pair", "grade"]
    image_root: str | Path | None
    max_image_pixels: int
    image_augmentation: Literal["none", "light", "strong"]
    image_flip: bool
    retrieval_mode: Literal["auto", "t2t", "t2i", "i2t", "i2i", "m2i", "m2t"]
    num_workers: Literal["auto"] | int
    prefetch_factor: Literal["auto"] | int
    skip_invalid_records: bool
    max_invalid_records: int
    drop_last: bool
    loss_type: Literal["infonce", "sigmoid", "colbert", "triplet", "cosent", "in_batch_hard", "supcon", "angle", "cosine_mse", "margin_mse", "kl", "spread_out", "distillation"] | str
    loss_bidirectional: bool
    temperature: float
    learn_temperature: bool
    false_negative_filter: Literal["identity", "threshold", "teacher"]
    false_negative_margin: float
    false_negative_margin_kind: Literal["relative", "absolute"]
    loss_directions: Sequence[Literal["query_to_document", "document_to_query", "query_to_query", "document_to_document"]] | None
    hardness_mode: Literal["none", "in_batch_negatives", "hard_negatives", "all_negatives"]
    hardness_strength: float
    focal_gamma: float
    init_logit_scale: float
    init_logit_bias: float
    maxsim_sum: bool
    triplet_margin: float
    triplet_negatives: Literal["all", "hardest", "listed"]
    cosent_scale: float
    hard_topk: int
    use_all_negatives: bool
    angle_scale: float
    margin_mse_scale: float
    kl_temperature: float
    kl_teacher_temperature: float | None
    spread_out_mean: float
    spread_out_second_moment: float
    distillation_alpha: float
    distillation_temperature: float
    distillation_loss_type: Literal["kl", "mse"]
    added_losses: Mapping[str, float]
    loss_precision: Literal["highest", "tf32"]
    mask_false_negatives: bool
    mrl_dims: Sequence[int] | None
    mrl_weights: Sequence[float] | None
    loss_tile_size: Literal["auto"] | int
    batch_sampling: Literal["random", "no_duplicates", "classes", "hard"]
    samples_per_class: int
    hard_max_similarity: float
    hard_refresh: Literal["once"] | int
    teacher_model_name: str | Path | None
    teacher_revision: str | None
    teacher_cache: str | Path
    mine: Literal["never", "once"] | int
    mine_corpus: str | None
    mine_teacher: str | None
    mine_negatives: int
    mine_range_min: int
    mine_range_max: int
    mine_relative_margin: float | None
    mine_absolute_margin: float | None
    mine_min_score: float | None
    mine_max_score: float | None
    mine_sampling: Literal["top", "random"]
    mine_index: str
    mine_replace: bool
    batch_size: Literal["auto"] | int
    global_batch_size: int | None
    gradient_accumulation_steps: Literal["auto"] | int
    lr_scaling: Literal["none", "linear", "sqrt"]
    lr_reference_batch: int
    use_gradient_cache: Literal["auto"] | bool
    gradient_cache_chunk_size: Literal["auto"] | int
    gradient_cache_chunk_tokens: Literal["auto"] | int
    retain: Literal["auto"] | float
    packing: Literal["auto"] | bool
    oom_retry: bool
    num_processes: Literal["auto"] | int
    use_fsdp: Literal["auto"] | bool
    sharding_factor: Literal["auto"] | int
    fsdp_mode: Literal["auto"] | Literal["fast", "lean", "sharded"]
    cpu_offload: Literal["auto"] | bool
    nccl_timeout: int
    ddp_bucket_cap_mb: int
    ddp_broadcast_buffers: bool
    ddp_find_unused_parameters: bool
    dataloader_pin_memory: bool
    epochs: int
    max_steps: int | None
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float | None
    scheduler_type: Literal["cosine", "linear", "constant"]
    warmup_ratio: float
    warmup_steps: int | None
    bf16: Literal["auto"] | bool
    fp16: bool
    compile: Literal["auto"] | bool
    seed: int
    seeds: Sequence[int] | None
    deterministic: bool
    eval_strategy: Literal["epoch", "steps", "no"]
    eval_steps: int | None
    eval_batch_size: Literal["auto"] | int
    metric_for_best_model: str
    early_stopping_patience: int | None
    eval_both_directions: Literal["auto"] | bool
    bm25: bool
    bm25_language: Literal["english", "dutch", "french", "german", "italian", "norwegian", "portuguese", "russian", "spanish", "swedish", "plain"]
    output_dir: str | Path
    overwrite_output_dir: bool
    save_strategy: Literal["steps", "epoch", "no"]
    save_steps: int | None
    save_minutes: float | None
    save_total_limit: int
    resume: str | Path
    resume_elastic: bool
    embedding_cache: str | Path
    logging_steps: int
    report_to: str | Sequence[str]
    log_model: bool
    nonfinite_policy: Literal["stop", "skip"]
    max_skipped_steps: int
    plugins: Sequence[str]
    model_name_or_path: str | Path
    prompt: str | None
    per_device_train_batch_size: Literal["auto"] | int
    lr: float
    resume_from_checkpoint: str | Path
    dataloader_num_workers: Literal["auto"] | int
    num_gpus: Literal["auto"] | int
    use_torch_compile: Literal["auto"] | bool
    pin_memory: bool


class LoadKeys(TypedDict, total=False):
    """Options of a model that is loaded; None leaves it to the model's files."""

    model_revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] | None
    pooling_method: Literal["auto", "mean", "cls", "last_token", "head", "none"] | None
    projection_dim: Literal["auto"] | int | None
    topk_tokens: Literal["auto"] | int | None
    pool_factor: Literal["auto"] | float | None
    query_length: Literal["auto"] | int | None
    query_expansion: Literal["auto"] | bool | None
    bidirectional: bool
    max_seq_length: Literal["auto"] | int | None
    query_prompt: str | None
    document_prompt: str | None
    pad_token: str | None
    image_background: Literal["auto", "white", "black", "none"] | None
    image_tokens: Literal["auto"] | int | None
    max_image_size: int | None
    max_image_pixels: int | None
    device: str | None
    bf16: bool


class BuildIndexKeys(TypedDict, total=False):
    """Options of `vembed encode`, whose help says what they mean."""

    format: str | None
    side: Literal["document", "query"]
    index: str
    batch_size: int
    ray: str | None
    ray_workers: int | None
    id_column: str | None
    text_column: str | None
    image_column: str | None
    image_root: str | Path | None
    overwrite: bool
