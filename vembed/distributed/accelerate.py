"""Settings of `accelerate launch` and of DeepSpeed's files, in keys of our configuration.

The launcher hands its settings to the processes that it starts as environment variables; the file itself is only looked
at to tell what it says from what it leaves open, and to name it. A setting here is weaker than the user's configuration
and stronger than `auto`. DeepSpeed itself is not used, its stages are: its file is refused with the equal keys.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from vembed.distributed.process_env import is_under_accelerate
from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vembed.distributed.process_env import ProcessEnv

_PRECISIONS: Final[dict[str, dict[str, bool]]] = {
    "no": {"bf16": False},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "bf16": False},
}

_STRATEGIES: Final = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}
"""Older files number them."""

_DEEPSPEED_MARKS: Final = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")

_DEEPSPEED_STAGES: Final = {
    0: "use_fsdp: false",
    1: "use_fsdp: true, fsdp_mode: fast",
    2: "use_fsdp: true, fsdp_mode: lean",
    3: "use_fsdp: true, fsdp_mode: sharded",
}

_DEEPSPEED_KEYS: Final = {
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


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that accelerate asks for."""

    keys: Mapping[str, object]  # key of ours -> value
    words: str  # how accelerate says it
    remark: str = ""  # what becomes of it here, where that isn't plain


def accelerate_settings(
    process: ProcessEnv, environ: Mapping[str, str] = os.environ
) -> tuple[str, Sequence[Setting]] | None:
    """Return accelerate's file or command line, in words, and the settings; None where it did not start this process.

    Raises:
        ConfigError: It asks for what this program has not.
    """
    if not is_under_accelerate(environ):
        return None
    words = _parent_command()
    path = _file_of(words)
    content: object = {}
    if path is not None:
        # accelerate has read it; a relative path of another folder is only not looked into.
        with suppress(OSError, yaml.YAMLError):
            content = yaml.safe_load(path.read_text("utf-8"))  # JSON is YAML too
    origin = "accelerate launch" if path is None else f"accelerate launch with {path}"
    if _is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        raise ConfigError(deepspeed_refusal(_deepspeed_of(environ), where=origin))
    if _is_true(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError(f"{origin} asks for Megatron-LM, which is not used here; set distributed_type: FSDP instead")
    for name in ("TP", "CP", "SP"):
        size = environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")
        if size not in ("1", ""):
            raise ConfigError(
                f"{origin} asks for parallelism_config_{name.lower()}_size {size}; models are sharded or replicated "
                f"here (use_fsdp, sharding_factor): set it to 1"
            )

    settings = []
    precision = environ["ACCELERATE_MIXED_PRECISION"]
    if precision not in _PRECISIONS:
        raise ConfigError(f"{origin} asks for mixed_precision {precision}; choose no, bf16 or fp16")
    # "no" is also what accelerate sets where nobody said anything.
    is_in_file = isinstance(content, dict) and "mixed_precision" in content
    options = {word.partition("=")[0].replace("-", "_") for word in words}  # it takes both - and _
    if precision != "no" or is_in_file or "__mixed_precision" in options:
        settings.append(Setting(_PRECISIONS[precision], f"mixed_precision: {precision}"))
    if _is_true(environ, "ACCELERATE_USE_FSDP"):
        settings += _fsdp(environ, process)
    if (size := environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")) not in ("1", ""):
        settings.append(Setting({"sharding_factor": int(size)}, f"parallelism_config_dp_shard_size: {size}"))
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        dynamo = f"dynamo_backend: {environ['ACCELERATE_DYNAMO_BACKEND']}"
        settings.append(Setting({}, dynamo, "no effect; the key compile does that"))
    return origin, settings


def _parent_command() -> list[str]:
    """Return the words of the command that started this process, none where the system doesn't tell."""
    try:
        content = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []  # not Linux: the file then stays unnamed
    words = content.decode("utf-8", "replace").split("\0")
    return words if any("accelerate" in word for word in words) else []


def _file_of(words: Sequence[str]) -> Path | None:
    """Return the file that `accelerate launch` has read, if any."""
    from accelerate.commands.config.config_args import default_config_file

    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("--config_file", "--config-file"):
            return Path(value or words[index + 1])
    default = Path(default_config_file)
    return default if words and default.is_file() else None


def _fsdp(environ: Mapping[str, str], process: ProcessEnv) -> list[Setting]:
    """Return the settings of FSDP: version 1's strategies by name, version 2's by whether weights are resharded."""
    is_whole = False
    if environ.get("FSDP_VERSION", "1") == "1":
        strategy = environ.get("FSDP_SHARDING_STRATEGY", "").upper()
        strategy = _STRATEGIES.get(strategy, strategy or "FULL_SHARD")
        is_hybrid = strategy.startswith("HYBRID_SHARD")  # a copy on each machine, which one process has whole
        is_whole = strategy == "NO_SHARD" or (is_hybrid and process.local_world_size == 1)
        keys: dict[str, object] = {"use_fsdp": not is_whole}
        if is_hybrid and not is_whole:
            keys["sharding_factor"] = process.local_world_size
        if not is_whole and strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
            keys["fsdp_mode"] = "lean"
        remark = (
            "carried out with FSDP 2, which wraps each transformer block, prefetches by itself, keeps the original "
            "parameters and saves sharded checkpoints"
        )
        settings = [Setting(keys, f"distributed_type: FSDP, fsdp_sharding_strategy: {strategy}", remark)]
    else:
        settings = [Setting({"use_fsdp": True}, "distributed_type: FSDP, fsdp_version: 2")]
        if environ.get("FSDP_RESHARD_AFTER_FORWARD", "true") == "false":
            settings.append(Setting({"fsdp_mode": "lean"}, "fsdp_reshard_after_forward: false"))
    if _is_true(environ, "FSDP_OFFLOAD_PARAMS"):
        offload = {} if is_whole else {"cpu_offload": True}
        settings.append(
            Setting(offload, "fsdp_offload_params: true", "no effect: nothing is sharded" if is_whole else "")
        )
    if _is_true(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
        settings.append(Setting({"gradient_checkpointing": True}, "fsdp_activation_checkpointing: true"))
    return settings


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("1", "true", "yes")


# DeepSpeed


def _deepspeed_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the DeepSpeed configuration that accelerate would use, as far as it can be read."""
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if path not in ("", "none"):
        try:
            content = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"DeepSpeed's file {path} can't be read ({error}), and DeepSpeed is not used here"
            ) from error
        return content if isinstance(content, dict) else {}
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
    zero: dict[str, Any] = {"stage": int(stage)} if stage.isdigit() else {}
    for part in ("OPTIMIZER", "PARAM"):
        device = environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none")
        zero |= {f"offload_{part.lower()}": {"device": device}}
    clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "none")
    return {"zero_optimization": zero} | ({} if clipping == "none" else {"gradient_clipping": clipping})


def is_deepspeed(content: object) -> bool:
    """Return whether the content of a JSON file is a DeepSpeed configuration."""
    return isinstance(content, dict) and any(mark in content for mark in _DEEPSPEED_MARKS)


def deepspeed_refusal(content: Mapping[str, Any], *, where: str) -> str:
    """Return what to tell the user of a DeepSpeed configuration: the equal of each setting that has one.

    Args:
        content: Of the file, as JSON has it.
        where: The file, for people.
    """
    flat = dict(_flat(content))
    lines = []
    equal = set()  # paths that a line speaks of
    stage = flat.get("zero_optimization.stage")
    if stage in _DEEPSPEED_STAGES:
        equal.add("zero_optimization.stage")
        lines.append(f"{_DEEPSPEED_STAGES[stage]}  (zero_optimization.stage {stage})")
    offload = {path: value for path, value in flat.items() if ".offload_" in path}
    equal |= offload.keys()
    if any(value in ("cpu", "nvme") for path, value in offload.items() if path.endswith(".device")):
        lines.append("cpu_offload: true  (offload_optimizer, offload_param)")
    for path, key in _DEEPSPEED_KEYS.items():
        value = flat.get(path)
        if value is None:
            continue
        equal.add(path)
        if value != "auto":
            lines.append(f"{key}: {str(value).lower() if isinstance(value, bool) else value}  ({path})")
    if isinstance(betas := flat.get("optimizer.params.betas"), list) and len(betas) == 2:
        equal.add("optimizer.params.betas")
        lines.append(f"adam_beta1: {betas[0]}, adam_beta2: {betas[1]}  (optimizer.params.betas)")
    if checkpointing := {path for path in flat if path.startswith("activation_checkpointing.")}:
        equal |= checkpointing
        lines.append("gradient_checkpointing: true  (activation_checkpointing)")
    if others := sorted(set(flat) - equal):
        lines.append(f"without an equal, and not needed: {', '.join(others)}")
    shown = "".join(f"\n  {line}" for line in lines)
    return (
        f"{where} is a DeepSpeed configuration. vembed has those stages built in and doesn't use DeepSpeed. The same "
        f"settings as keys of vembed, for the YAML file or --config_override:{shown}"
    )


def _flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its path, `a.b.c`."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
