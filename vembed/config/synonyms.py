"""What other trainers' keys and values come to here: another name, one line of the plan, or a refusal with the fix.

The loader, the messages and the reference are made from these tables.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

ALIASES: Mapping[str, tuple[str, ...]] = {
    "model_name_or_path": ("model_name",),
    "prompt": ("query_prompt", "document_prompt"),
    "per_device_train_batch_size": ("batch_size",),
    "lr": ("learning_rate",),
    "resume_from_checkpoint": ("resume",),
    "dataloader_num_workers": ("num_workers",),
    "num_gpus": ("num_processes",),
    "use_torch_compile": ("compile",),
    "pin_memory": ("dataloader_pin_memory",),
}
"""Other names of a key, or of several that one value sets. An alias beside its key is an error."""


def targets(name: str) -> tuple[str, ...]:
    """Return the keys that a name sets: those of an alias, or the name itself."""
    return ALIASES.get(name, (name,))


EVERY: object = object()
"""In the table: any value that no earlier row has. null asks for nothing, and is never refused."""


class Foreign(NamedTuple):
    """A value of a key, as other trainers have it."""

    key: str
    value: object
    verdict: Literal["same", "accepted", "refused"]
    text: str = ""  # accepted: the line of the plan; refused: why, and what does it here
    ours: object = None  # same: the value that the key gets
    goes_with: str | None = None  # accepted: only where this key is set, or for false only where it isn't


_BEST = "model/ holds the checkpoint that is best on the dev set, unless eval_strategy is no"
_WORKERS = "data workers live as long as the run"
_CHECKED = "all rows are checked before training; skip_invalid_records decides about broken ones"
_PICTURES = "data workers decode pictures ahead of the step, and embedding_cache keeps the vectors of a frozen tower"
_MEMORY = "metrics.jsonl has the peak memory of every step, and the plan predicts it"
_SHARED = "the documents of all devices are negatives of every query, whatever the strategy; remove it"
_GATHERED = "the documents of all devices are always negatives of every query"
_HARD = (
    "infonce learns from all negatives of the batch, the hardest most: the lower the temperature, the more so; "
    "loss_type in_batch_hard from the hard_topk hardest; rows bring hard ones of their own in the column negatives"
)
_BANK = (
    "there is no memory bank: with use_gradient_cache a batch_size as large as the bank takes the memory of a chunk, "
    "and its negatives are never out of date"
)

_DATA_SETS = (
    "source_batches decides it: single fills each batch from one source of data, mixed from all; sources come by their "
    "size, and a high source_temperature lets all come equally often; remove it"
)
_PUSH = "vembed push RUN OWNER/NAME uploads a model once its verdict is known; remove it"
_LINES = "a run prints a line every logging_steps, and of its first and last step"
_LOCKED = "set trainable to {0}+projection, which freezes the other tower, or to {0}, which freezes projections too"

_GROUP = (
    "a row brings all of its negatives (the column negatives); mine: once finds more, mine_negatives of them for a "
    "query; remove it"
)


def _either(key: str, text: str, goes_with: str | None = None) -> tuple[Foreign, ...]:
    return tuple(Foreign(key, value, "accepted", text, goes_with=goes_with) for value in (True, False))


def _flag(key: str, ours: str) -> tuple[Foreign, ...]:
    """Return a switch that is off by itself, and the way to turn it on."""
    off = Foreign(key, False, "accepted", "off unless asked for")
    return (off, Foreign(key, True, "refused", f"{ours}; remove it"))


def _refused(text: str, *names: str) -> tuple[Foreign, ...]:
    return tuple(Foreign(name, EVERY, "refused", text) for name in names)


FOREIGN: tuple[Foreign, ...] = (
    Foreign("save_steps", 0, "same"),
    Foreign("max_grad_norm", 0, "same"),
    Foreign("scheduler_type", "constant_with_warmup", "same", ours="constant"),
    Foreign("torch_dtype", None, "same", ours="float32"),
    Foreign("attn_implementation", None, "same", ours="auto"),
    Foreign("pooling_method", None, "same", ours="auto"),
    Foreign("lora_target_modules", None, "same", ours="auto"),
    Foreign("projection_dim", None, "same", ours="auto"),
    Foreign("topk_tokens", 0, "same", ours="auto"),
    Foreign("enable_gather", True, "accepted", _GATHERED),
    Foreign("enable_gather", False, "refused", _SHARED),
    Foreign("negatives_cross_device", True, "accepted", _GATHERED),
    Foreign("negatives_cross_device", False, "refused", _SHARED),
    *_either("local_loss", _GATHERED),
    *_either("gather_with_grad", _GATHERED),
    Foreign("load_best_model_at_end", True, "accepted", _BEST),
    Foreign("load_best_model_at_end", False, "refused", f"{_BEST}, which keeps the last; remove it"),
    *_either("validate_data", _CHECKED),
    *_either("use_mrl", "mrl_dims says it by itself", goes_with="mrl_dims"),
    *_either("persistent_workers", _WORKERS),
    *_either("dataloader_persistent_workers", _WORKERS),
    *_either("enable_image_cache", _PICTURES),
    *_either("debug_gpu_memory", _MEMORY),
    Foreign("dry_run", False, "accepted", "--dry-run is an option of the command"),
    Foreign("dry_run", True, "refused", "it is an option of the command, not a key: add --dry-run, and remove it"),
    Foreign("sync_bn", False, "accepted", "each device normalises by its own part of the batch"),
    Foreign(
        "sync_bn",
        True,
        "refused",
        "devices don't share the mean and variance of their batches; set freeze_batch_norm to true, which keeps those "
        "of the model's files, and remove it",
    ),
    *_refused("AdamW is the optimizer of every run; remove it", "optim", "optimizer", "opt"),
    *_either("remove_unused_columns", "columns that no key names are left out"),
    *_either("disable_tqdm", _LINES),
    *_either("logging_first_step", _LINES),
    *_either("eval_on_start", "the untrained model is always evaluated before step 1"),
    *_either("group_by_length", "the rows of a batch are sorted by length before they are encoded"),
    *_either("auto_find_batch_size", "oom_retry makes the encoder calls smaller and leaves the batch as it is"),
    Foreign("greater_is_better", True, "accepted", "every metric is better the higher it is"),
    Foreign("greater_is_better", False, "refused", "every metric is better the higher it is; remove it"),
    *_flag("push_to_hub", "vembed push RUN OWNER/NAME uploads a model once its verdict is known"),
    *_refused(_PUSH, "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push"),
    *_refused("set WANDB_NAME or MLFLOW_RUN_NAME, else trackers take the name of output_dir; remove it", "run_name"),
    *_refused("set WANDB_PROJECT in the environment; remove it", "wandb_project", "wandb_project_name"),
    *_refused(_DATA_SETS, "multi_dataset_batch_sampler", "same_dataset_within_batch"),
    *_flag("lock_image", _LOCKED.format("text")),
    *_flag("lock_text", _LOCKED.format("vision")),
    *_flag("siglip", "set loss_type to sigmoid"),
    *_flag("skip_scheduler", "set scheduler_type to constant"),
    *_flag("use_cpu", "hide the GPUs: CUDA_VISIBLE_DEVICES= vembed train ..."),
    *_flag("no_cuda", "hide the GPUs: CUDA_VISIBLE_DEVICES= vembed train ..."),
    *_flag("tf32", "set loss_precision to tf32 for the loss, and bf16 for the model"),
    *_flag("use_bn_sync", "set freeze_batch_norm to true: devices don't share the mean and variance of their batches"),
    *_refused("one learning_rate is for all; trainable chooses what learns; remove it", "learning_rate_mapping"),
    *_refused("gradient_checkpointing needs no options; remove it", "gradient_checkpointing_kwargs"),
    *_refused("an epoch is all rows of the data; max_steps ends a run before; remove it", "train_num_samples"),
    *_refused("the data tell it by themselves; remove it", "dataset_type", "csv_separator"),
    *_refused("there is no DeepSpeed here; use_fsdp shards what it would, remove it", "deepspeed", "deepspeed_config"),
    *_refused(_GROUP, "train_group_size", "train_n_passages"),
    *_refused("similarities are divided by a temperature: set temperature to 1 / scale, and remove it", "scale"),
    *_refused(_HARD, "mining_mode", "enable_hard_mining", "hard_mining_mode"),
    *_refused(_HARD, "hard_mining_topk", "hard_mining_lambda", "hard_mining_temperature"),
    *_refused(_BANK, "hard_mining_bank_size", "hard_mining_bank_momentum"),
    *_refused(_BANK, "bank_size", "bank_dim", "bank_momentum", "lambda_bank"),
    Foreign("loss_type", "hard_negative", "same", ours="in_batch_hard"),
    Foreign("loss_type", "contrastive_with_bank", "refused", _BANK),
    Foreign("loss_type", "mrl", "refused", "the prefixes are a key of infonce and sigmoid: set mrl_dims, and infonce"),
    Foreign(
        "torch_dtype",
        "float16",
        "refused",
        "updates of float16 weights round to nothing; set fp16 to true: float32 weights, computed in float16, and "
        "frozen ones are held in it",
    ),
)


def foreign(key: str, value: object) -> Foreign | None:
    """Return the row of a value that other trainers have, if there is one."""
    return next((row for row in FOREIGN if row.key == key and _is(row.value, value)), None)


def is_foreign(key: str) -> bool:
    """Tell whether the table has a key."""
    return any(row.key == key for row in FOREIGN)


def _is(known: object, value: object) -> bool:
    """Compare values, keeping True apart from 1."""
    return known is EVERY or (known == value and isinstance(known, bool) == isinstance(value, bool))


_NAMES_ELSEWHERE: Mapping[str, str] = {
    "model_name": (
        "model base_model pretrained pretrained_model pretrained_model_name_or_path checkpoint backbone encoder"
    ),
    "teacher_model_name": "teacher teacher_model teacher_model_name_or_path guide guide_model distill_model",
    "query_prompt": "query_instruction query_instruction_for_retrieval query_prefix query_instruct prompts instruction",
    "document_prompt": (
        "passage_prompt corpus_prompt passage_instruction passage_instruction_for_retrieval passage_prefix "
        "document_prefix doc_prefix"
    ),
    "max_seq_length": (
        "max_length max_len max_seq_len model_max_length query_max_len passage_max_len query_max_length "
        "passage_max_length max_query_length max_doc_length doc_max_len"
    ),
    "pooling_method": "pooling pooling_mode sentence_pooling_method",
    "torch_dtype": "dtype model_dtype",
    "attn_implementation": "use_flash_attention flash_attention use_flash_attention_2 attention_implementation attn",
    "projection_dim": "embedding_dim embed_dim out_dim",
    "use_lora": "lora peft use_peft",
    "lora_r": "lora_rank rank peft_r",
    "lora_target_modules": "target_modules lora_modules lora_targets",
    "load_in_4bit": "use_4bit qlora use_qlora",
    "data": "datasets train_datasets sources",
    "data_path": (
        "dataset dataset_name dataset_path train_data train_file train_files train_path train_data_path "
        "train_dataset training_data train_dir train_data_dir data_dir data_files"
    ),
    "val_data_path": (
        "eval_data eval_dataset eval_file validation_file validation_data val_data dev_data dev_file valid_file "
        "eval_data_path dev_path dev_data_path val_path val_file"
    ),
    "test_data_path": "test_data test_file test_dataset test_path",
    "data_split": "dataset_split train_split",
    "column_mapping": "columns column_names csv_img_key csv_caption_key",
    "image_root": "image_folder image_dir img_dir",
    "num_workers": "workers dataloader_workers preprocessing_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "drop_last": "dataloader_drop_last",
    "loss_type": "loss loss_fn loss_function loss_name criterion",
    "temperature": "temp tau softmax_temperature",
    "loss_directions": "directions",
    "learn_temperature": "learnable_temperature trainable_temperature learn_temp",
    "mrl_dims": "matryoshka_dims nested_dims",
    "mrl_weights": "matryoshka_weights",
    "triplet_margin": "margin",
    "distillation_alpha": "kd_alpha distill_alpha",
    "distillation_temperature": "distill_temperature distil_temperature kd_temperature",
    "batch_sampling": "batch_sampler sampler",
    "mine": "mine_hard_negatives hard_negative_mining use_hard_negatives hard_negatives",
    "mine_negatives": "num_hard_negatives num_negatives negatives_per_query n_negatives",
    "batch_size": "train_batch_size per_device_batch_size micro_batch_size local_batch_size bs",
    "global_batch_size": "total_batch_size effective_batch_size total_train_batch_size",
    "gradient_accumulation_steps": (
        "accum_freq accumulation_steps grad_accum grad_accumulation_steps accumulate_grad_batches"
    ),
    "use_gradient_cache": "grad_cache gradcache gradient_cache use_gradcache",
    "gradient_cache_chunk_size": (
        "mini_batch_size gc_q_chunk_size gc_p_chunk_size sub_batch_size chunk_size chunk_sizes"
    ),
    "gradient_checkpointing": "grad_checkpointing activation_checkpointing",
    "num_processes": "nproc_per_node num_devices n_gpu n_gpus gpus world_size",
    "use_fsdp": "fsdp",
    "nccl_timeout": "ddp_timeout",
    "epochs": "num_train_epochs num_epochs max_epochs n_epochs train_epochs",
    "max_steps": "max_train_steps num_training_steps num_steps total_steps num_train_steps",
    "learning_rate": "peak_lr base_lr max_lr",
    "weight_decay": "wd",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps adam_eps optimizer_eps",
    "max_grad_norm": "grad_clip_norm gradient_clip_val grad_clip clip_grad_norm gradient_clipping max_norm",
    "scheduler_type": "lr_scheduler_type lr_scheduler scheduler",
    "warmup_steps": "warmup num_warmup_steps",
    "warmup_ratio": "warmup_proportion warmup_fraction warmup_percent",
    "bf16": "precision mixed_precision amp use_amp",
    "compile": "torch_compile torchcompile",
    "seed": "random_seed data_seed random_state",
    "deterministic": "full_determinism",
    "eval_strategy": "evaluation_strategy",
    "eval_steps": "evaluation_steps eval_every eval_freq val_frequency",
    "eval_batch_size": "per_device_eval_batch_size test_batch_size",
    "metric_for_best_model": "best_metric eval_metric",
    "early_stopping_patience": "patience early_stopping",
    "output_dir": "output_path output save_dir save_path",
    "overwrite_output_dir": "overwrite",
    "save_strategy": "save_frequency",
    "save_steps": "checkpoint_save_steps save_every",
    "save_total_limit": "checkpoint_save_total_limit",
    "logging_steps": "log_every log_steps log_every_n_steps log_interval",
    "report_to": "logger loggers tracker trackers use_wandb",
}
"""Key -> what other trainers (transformers, sentence-transformers, FlagEmbedding, Tevatron, open_clip) call it."""

VALUES_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "loss_type": {
        "infonce": (
            "mnrl mnr MultipleNegativesRankingLoss CachedMultipleNegativesRankingLoss InfoNCELoss info_nce nt_xent "
            "ntxent contrastive in_batch_negatives m3_kd_loss cross_entropy softmax SimCSE npair"
        ),
        "infonce with loss_bidirectional: true": (
            "clip ClipLoss symmetric MultipleNegativesSymmetricRankingLoss CachedMultipleNegativesSymmetricRankingLoss"
        ),
        "infonce with false_negative_filter: teacher": "GISTEmbedLoss CachedGISTEmbedLoss gist",
        "infonce with mrl_dims": "MatryoshkaLoss Matryoshka2dLoss matryoshka",
        "sigmoid": "SiglipLoss sigmoid_loss",
        "supcon": "SupConLoss supervised_contrastive supervised_contrastive_loss",
        "colbert": "MultiVectorLoss late_interaction maxsim ColbertLoss",
        "triplet": "TripletLoss triplet_loss triplet_margin",
        "triplet with triplet_negatives: hardest": "BatchHardTripletLoss BatchSemiHardTripletLoss",
        "triplet with triplet_negatives: all": "BatchAllTripletLoss",
        "cosent": "CoSENTLoss",
        "angle": "AnglELoss AngleLoss",
        "cosine_mse": "CosineSimilarityLoss cosine cosine_similarity mse_cosine",
        "margin_mse": "MarginMSELoss marginmse",
        "kl": "DistillKLDivLoss kl_div kldiv kl_divergence",
        "distillation": "distill distil",
        "spread_out": "GlobalOrthogonalRegularizationLoss orthogonal",
    },
    "pooling_method": {
        "last_token": "last lasttoken eos eos_token last_token_pooling",
        "cls": "cls_token first first_token",
        "mean": "avg average mean_pooling meanpooling",
    },
    "torch_dtype": {
        "float32": "fp32 float",
        "bfloat16": "bf16",
    },
    "attn_implementation": {
        "flash_attention_2": "flash fa2 flash_attn",
    },
    "scheduler_type": {
        "linear": "warmuplinear linear_with_warmup",
        "constant": "const warmupconstant",
        "cosine": "warmupcosine cosine_with_warmup cosine_annealing",
    },
    "eval_strategy": {
        "no": "none never",
        "epoch": "epochs",
    },
    "save_strategy": {
        "no": "none never",
        "epoch": "epochs",
    },
    "report_to": {
        "tensorboard": "tb",
        "wandb": "weights_and_biases",
    },
    "batch_sampling": {
        "classes": "group_by_label",
        "no_duplicates": "noduplicates",
    },
}
"""Key -> our value -> what other trainers write."""


def _by_other_name(table: Mapping[str, str]) -> dict[str, str]:
    return {plain_name(name): ours for ours, names in table.items() for name in names.split()}


def plain_name(name: str) -> str:
    """Return a name as it is compared: `--Loss-Type` and `loss_type` are one."""
    return name.lower().replace("-", "_").strip("_ ")


OTHER_KEYS: Mapping[str, str] = _by_other_name(_NAMES_ELSEWHERE)
"""What other trainers call a key -> the key."""


def our_value(key: str, value: str) -> str | None:
    """Return what vembed calls a value that other trainers have."""
    return _by_other_name(VALUES_ELSEWHERE.get(key, {})).get(plain_name(value))
