"""Keys of the optimizer, its schedule, precision, randomness and compilation."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vembed.config.fields import (
    LARGEST_COUNT,
    Auto,
    Count,
    Decay,
    NonNegative,
    Positive,
    Section,
    Share,
    key,
    rule,
)

if TYPE_CHECKING:
    from vembed.config.schema import Config


Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


class OptimisationKeys(Section):
    """AdamW, its schedule, precision, randomness and compilation."""

    epochs: Count = key(1, "Passes over the training data.", unit="epochs")
    max_steps: Count | None = key(None, "Optimizer steps of the whole run; wins over epochs.", unit="steps")
    learning_rate: Positive = key(2e-5, "Peak, after the warmup.")
    weight_decay: NonNegative = key(0.01, "Decoupled weight decay of AdamW.")
    adam_beta1: Decay = key(0.9, "Decay of AdamW's first moment.")
    adam_beta2: Decay = key(0.999, "Decay of AdamW's second moment.")
    adam_epsilon: Positive = key(1e-8, "Added to AdamW's denominator.")
    max_grad_norm: Positive | None = key(1.0, "Gradients are clipped to this global norm; null and 0 clip nothing.")
    scheduler_type: Literal["cosine", "linear", "constant"] = key(
        "cosine", "Course of the learning rate after the warmup."
    )
    warmup_ratio: Share = key(0.1, "Part of all steps in which the learning rate rises to its peak.")
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = key(
        None, "The same in steps; wins over warmup_ratio.", unit="steps"
    )
    bf16: Auto | bool = key("auto", "Mixed precision in bfloat16; auto is on where the device is fast at it.")
    fp16: bool = key(False, "Mixed precision in float16 with loss scaling.")
    compile: Auto | bool = key(
        "auto",
        "Compile the repeated layers by TorchInductor, each kind of layer once for all layers and sizes of calls: less "
        "time, the same function up to rounding. auto does on CUDA where the run is long enough to pay that back, and "
        "computes as without where a layer can't be compiled; true ends the run there.",
    )
    seed: Seed = key(42, "Seed of the weights, of dropout and of the sample order.")
    seeds: Annotated[list[Seed], Field(min_length=2)] | None = key(
        None,
        "Train once with each of these in place of seed, in output_dir/seed-N, and judge with an interval over seeds "
        "and queries.",
    )
    deterministic: bool = key(False, "Use deterministic kernels only: bit-equal runs on a GPU, slower.")


@rule("seeds")
def _each_seed_once(config: "Config") -> str | None:
    """`seeds` must name each seed once."""
    twice = next((seed for seed in config.seeds or () if (config.seeds or []).count(seed) > 1), None)
    return None if twice is None else f"seed {twice} is listed twice, and would train the same model; list it once"


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


@rule("bf16", "torch_dtype")
def _bfloat16_weights_compute_so(config: "Config") -> str | None:
    """`bf16: false` must not stand with `torch_dtype: bfloat16`."""
    if config.torch_dtype != "bfloat16" or config.bf16 is not False:
        return None
    return "weights of torch_dtype bfloat16 compute in bfloat16; set bf16 to auto or torch_dtype to float32"


@rule("fp16", "torch_dtype")
def _float16_on_bfloat16(config: "Config") -> str | None:
    """`fp16: true` must not stand with `torch_dtype: bfloat16`."""
    if config.torch_dtype != "bfloat16" or not config.fp16:
        return None
    return "fp16 has no use for weights of torch_dtype bfloat16; set fp16 to false or torch_dtype to float32"


def _half_of_double(config: "Config", name: str) -> str | None:
    if config.torch_dtype != "float64" or getattr(config, name) is not True:
        return None
    return f"{name} would undo torch_dtype float64; set {name} to false or torch_dtype to float32"
