"""What other trainers' keys and values come to here: another name, one line of the plan, or a refusal with the fix.

One table. The loader, the messages and the reference are made from it.
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


_WORKERS = "data workers live as long as the run"
_CHECKED = "all rows are checked before training; skip_invalid_records decides about broken ones"
_PICTURES = "data workers decode pictures ahead of the step, and embedding_cache keeps the vectors of a frozen tower"
_MEMORY = "metrics.jsonl has the peak memory of every step, and the plan predicts it"
_SHARED = "the documents of all devices are negatives of every query, whatever the strategy; remove it"
_HARD = (
    "infonce learns from all negatives of the batch, the hardest most: the lower the temperature, the more so; "
    "loss_type in_batch_hard from the hard_topk hardest; rows bring hard ones of their own in the column negatives"
)
_BANK = (
    "there is no memory bank: with use_gradient_cache a batch_size as large as the bank takes the memory of a chunk, "
    "and its negatives are never out of date"
)


def _either(key: str, text: str, goes_with: str | None = None) -> tuple[Foreign, ...]:
    return tuple(Foreign(key, value, "accepted", text, goes_with=goes_with) for value in (True, False))


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
    Foreign("enable_gather", True, "accepted", "the documents of all devices are always negatives of every query"),
    Foreign("enable_gather", False, "refused", _SHARED),
    *_either("validate_data", _CHECKED),
    *_either("use_mrl", "mrl_dims says it by itself", goes_with="mrl_dims"),
    *_either("persistent_workers", _WORKERS),
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
