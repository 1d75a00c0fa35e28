"""What a DeepSpeed configuration says, in keys of ours: DeepSpeed itself is not used, its stages are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MARKS: Final = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")

_STAGES: Final = {
    0: "use_fsdp: false",
    1: "use_fsdp: true, fsdp_mode: fast",
    2: "use_fsdp: true, fsdp_mode: lean",
    3: "use_fsdp: true, fsdp_mode: sharded",
}

_EQUAL: Final = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
"""Path in DeepSpeed's file -> key of ours with the same value."""


def is_deepspeed(content: object) -> bool:
    """Return whether the content of a JSON file is a DeepSpeed configuration."""
    return isinstance(content, dict) and any(mark in content for mark in _MARKS)


def deepspeed_refusal(content: Mapping[str, Any], *, where: str) -> str:
    """Return what to tell the user of a DeepSpeed configuration."""
    lines = "".join(f"\n  {line}" for line in _equal_keys(content))
    return (
        f"{where} is a configuration for DeepSpeed, which is not used here: its stages are built in. The same in keys "
        f"of this program, for the YAML file or --config_override:{lines}"
    )


def _equal_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that has an equal, and one that names the others."""
    flat = dict(_flat(content))
    known = set()
    stage = flat.get("zero_optimization.stage")
    if stage in _STAGES:
        known.add("zero_optimization.stage")
        yield f"{_STAGES[stage]}  (zero_optimization.stage {stage})"
    offloads = [path for path, value in flat.items() if ".offload_" in path and path.endswith(".device")]
    if any(flat[path] in ("cpu", "nvme") for path in offloads):
        yield "cpu_offload: true  (offload_optimizer, offload_param)"
    known |= {path for path in flat if ".offload_" in path}
    for path, key in _EQUAL.items():
        value = flat.get(path)
        if value is None:
            continue
        known.add(path)
        if value != "auto":
            yield f"{key}: {str(value).lower() if isinstance(value, bool) else value}  ({path})"
    if isinstance(betas := flat.get("optimizer.params.betas"), list) and len(betas) == 2:
        known.add("optimizer.params.betas")
        yield f"adam_beta1: {betas[0]}, adam_beta2: {betas[1]}  (optimizer.params.betas)"
    if any(path.startswith("activation_checkpointing.") for path in flat):
        known |= {path for path in flat if path.startswith("activation_checkpointing.")}
        yield "gradient_checkpointing: true  (activation_checkpointing)"
    others = sorted(set(flat) - known)
    if others:
        yield f"without an equal, and not needed: {', '.join(others)}"


def _flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its path, `a.b.c`."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
