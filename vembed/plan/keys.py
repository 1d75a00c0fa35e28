"""Keys that the plan decides from: the batch and its chunks, the devices, the optimizer and its precision."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from vembed.registry import LOSSES
from vembed.section import LARGEST_COUNT, Auto, Count, Decay, NonNegative, Positive, Rule, Section, Share, key

if TYPE_CHECKING:
    from vembed.config.schema import Config

IN_CHUNKS = {"use_gradient_cache": ("auto", True)}
WITH_SHARDING = {"use_fsdp": (True, "auto"), "sharding_factor": ("auto", {"minimum": 2})}

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


class BatchKeys(Section):
    """Batch of a step, and the chunks in which it is encoded."""

    batch_size: Auto | Count = key(
        64,
        "Batch size per device. auto: the largest power of two that memory, the loss and the number of steps allow.",
        unit="queries",
    )
    global_batch_size: Count | None = key(
        None, "Batch size of all devices together, divided over them; overrides batch_size.", unit="queries"
    )
    gradient_accumulation_steps: Auto | Count = key(
        "auto",
        "Batches per optimizer step, each with its own negatives; the gradient is the mean over all their rows. The "
        "last step of an epoch uses the batches that are left. auto: 1, because gradient caching takes the whole "
        "batch at once, with all its negatives, in the same memory.",
        unit="batches",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = key(
        "none",
        "Multiply learning_rate by batch / lr_reference_batch (linear) or its square root (sqrt). none: keep it.",
    )
    lr_reference_batch: Count = key(
        256,
        "Effective batch size that learning_rate is meant for; lr_scaling uses it.",
        unit="queries",
        acts_with={"lr_scaling": ("linear", "sqrt")},
    )
    use_gradient_cache: Auto | bool = key(
        "auto", "Encode the batch in chunks; gradients stay exact. false: encode it in one call."
    )
    gradient_cache_chunk_size: Auto | Count = key(
        "auto", "Largest number of texts or pictures per encoder call.", unit="items", acts_with=IN_CHUNKS
    )
    gradient_cache_chunk_tokens: Auto | Count = key(
        "auto",
        "Largest number of padded tokens (items x width) per encoder call; the smaller chunk wins.",
        unit="tokens",
        acts_with=IN_CHUNKS,
    )
    retain: Auto | Share = key(
        "auto",
        "Share of the batch that keeps its graphs from the first pass, which saves encoding it again: memory for "
        "speed, the same gradients. auto: use part of the spare memory.",
        acts_with=IN_CHUNKS,
    )
    packing: Auto | bool = key(
        "auto",
        "Lay the rows of an encoder call end to end instead of padding them; attention stays in each row. auto: on if "
        "the device has a fast operator for it and the model's type is proven to compute the same. true on a CPU: a "
        "slow reference. Attention weighs all pairs of a call's tokens and needs more memory than the plan predicts.",
    )
    oom_retry: bool = key(
        True,
        "Repeat a step that runs out of memory instead of ending the run: first without kept graphs, then in chunks "
        "of half the size.",
        affects="run",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "The global batch (`global_batch_size`, else `batch_size`) must be 2 or more.",
            ("global_batch_size", "batch_size", "loss_type"),
            lambda config: _batch_without_negatives(config),
        ),
        Rule(
            "`batch_size: auto` can't be combined with `global_batch_size`.",
            ("batch_size", "global_batch_size"),
            lambda config: config.batch_size == "auto" and config.global_batch_size is not None,
            "batch_size auto lets the plan choose the batch, but global_batch_size already sets it; remove one of them",
        ),
    )


class DistributedKeys(Section):
    """Several devices: their number, sharding and communication."""

    # The strategy, its mode and the number of processes stand in every checkpoint's stamp and are judged there.
    num_processes: Auto | Count = key(
        "auto",
        "Training processes on this machine. auto: one per accelerator, or one if there is none.",
        unit="processes",
        affects="run",
    )
    use_fsdp: Auto | bool = key(
        "auto",
        "Shard the weights, gradients and optimizer state over the devices. auto: on if a whole copy doesn't fit.",
        affects="run",
    )
    sharding_factor: Auto | Count = key(
        "auto",
        "Devices that share one copy of the model. 1: replicate it. The number of all devices: shard it fully. A "
        "divisor between: shard it in groups that replicate each other.",
        unit="devices",
        affects="run",
    )
    fsdp_mode: Auto | Literal["fast", "lean", "sharded"] = key(
        "auto",
        "Parts kept whole on each device during a step. fast: weights and gradients; only the optimizer is sharded. "
        "lean: gradients. sharded: none.",
        affects="run",
        acts_with=WITH_SHARDING,
    )
    cpu_offload: Auto | bool = key(
        "auto",
        "Keep the shards of weights and optimizer state in host memory and update them there; needs sharding. auto: "
        "on if nothing else fits.",
        affects="run",
        acts_with=WITH_SHARDING,
    )
    nccl_timeout: Count = key(
        600,
        "Longest wait in a collective, with any backend. After it the run ends and names the missing processes.",
        unit="seconds",
        affects="run",
    )
    ddp_bucket_cap_mb: Count = key(
        128, "Size of the gradients that one collective of a replicated run sums.", unit="MiB"
    )
    ddp_broadcast_buffers: bool = key(
        True, "Start all processes of a replicated run with the first one's buffers, as with its weights."
    )
    ddp_find_unused_parameters: bool = key(
        False,
        "Known from other trainers and never needed: a parameter that no process used stays as it is. true adds a line "
        "to the plan.",
        affects="run",
    )
    dataloader_pin_memory: bool = key(
        True,
        "Hold the data workers' batches in page-locked memory, which an accelerator copies faster. No effect on a CPU.",
        affects="run",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`sharding_factor` over 1 is refused with `use_fsdp: false`, and 1 with `use_fsdp: true`.",
            ("sharding_factor", "use_fsdp"),
            lambda config: _contradicting_sharding(config.sharding_factor, config.use_fsdp),
        ),
    )


class OptimisationKeys(Section):
    """AdamW, its schedule, precision, randomness and compilation."""

    epochs: Count = key(1, "Passes over the training data.", unit="epochs")
    max_steps: Count | None = key(None, "Optimizer steps of the whole run; overrides epochs.", unit="steps")
    learning_rate: Positive = key(2e-5, "Peak learning rate, after the warmup.")
    weight_decay: NonNegative = key(0.01, "Decoupled weight decay of AdamW.")
    adam_beta1: Decay = key(0.9, "Decay of AdamW's first moment.")
    adam_beta2: Decay = key(0.999, "Decay of AdamW's second moment.")
    adam_epsilon: Positive = key(1e-8, "Term added to AdamW's denominator.")
    max_grad_norm: Positive | None = key(1.0, "Clip gradients to this global norm. null and 0: no clipping.")
    scheduler_type: Literal["cosine", "linear", "constant"] = key(
        "cosine", "Shape of the learning rate after the warmup."
    )
    warmup_ratio: Share = key(0.1, "Share of all steps in which the learning rate rises to its peak.")
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = key(
        None, "Warmup in steps; overrides warmup_ratio.", unit="steps"
    )
    bf16: Auto | bool = key("auto", "Mixed precision in bfloat16. auto: on if the device is fast at it.")
    fp16: bool = key(False, "Mixed precision in float16 with loss scaling.")
    compile: Auto | bool = key(
        "auto",
        "Compile the repeated layers with TorchInductor, each kind of layer once for all layers and call sizes: less "
        "time, the same function up to rounding. auto: on for CUDA devices that it's proven on (none so far), if the "
        "run is long enough to pay it back; a layer that can't be compiled runs as before. true: such a layer ends "
        "the run.",
    )
    seed: Seed = key(42, "Seed of the weights, dropout and sample order.")
    seeds: Annotated[list[Seed], Field(min_length=2)] | None = key(
        None,
        "Seeds to train with, once each in output_dir/seed-N, in place of seed. The verdict gets an interval over "
        "seeds and queries.",
    )
    deterministic: bool = key(False, "Use only deterministic kernels: bit-equal runs on a GPU, but slower.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`seeds` must name each seed once.",
            ("seeds",),
            lambda config: next(
                (
                    f"seed {seed} is listed twice, and would train the same model; list it once"
                    for seed in config.seeds or []
                    if config.seeds.count(seed) > 1
                ),
                None,
            ),
        ),
        Rule(
            "`warmup_steps` must be smaller than `max_steps`.",
            ("warmup_steps", "max_steps"),
            lambda config: (
                config.warmup_steps is not None
                and config.max_steps is not None
                and config.warmup_steps >= config.max_steps
                and f"warmup_steps {config.warmup_steps} is not smaller than max_steps {config.max_steps}, so the "
                f"learning rate would never reach its peak; set warmup_steps to {config.max_steps - 1} or less"
            ),
        ),
        Rule(
            "`bf16` and `fp16` must not both be true.",
            ("fp16", "bf16"),
            lambda config: config.fp16 and config.bf16 is True,
            "bf16 and fp16 are both true, but a run has one mixed precision; set fp16 to false",
        ),
        Rule(
            "`bf16: true` needs `torch_dtype: float32`.",
            ("bf16", "torch_dtype"),
            lambda config: config.bf16 is True and config.torch_dtype == "float64",
            "bf16 would undo torch_dtype float64; set bf16 to false or torch_dtype to float32",
        ),
        Rule(
            "`fp16: true` needs `torch_dtype: float32`.",
            ("fp16", "torch_dtype"),
            lambda config: config.fp16 and config.torch_dtype == "float64",
            "fp16 would undo torch_dtype float64; set fp16 to false or torch_dtype to float32",
        ),
        Rule(
            "`bf16: false` can't be combined with `torch_dtype: bfloat16`.",
            ("bf16", "torch_dtype"),
            lambda config: config.bf16 is False and config.torch_dtype == "bfloat16",
            "weights of torch_dtype bfloat16 compute in bfloat16; set bf16 to auto or torch_dtype to float32",
        ),
        Rule(
            "`fp16: true` can't be combined with `torch_dtype: bfloat16`.",
            ("fp16", "torch_dtype"),
            lambda config: config.fp16 and config.torch_dtype == "bfloat16",
            "fp16 needs float32 weights, and torch_dtype is bfloat16; set fp16 to false or torch_dtype to float32",
        ),
    )


def _batch_without_negatives(config: "Config") -> str:
    name = "batch_size" if config.global_batch_size is None else "global_batch_size"
    if getattr(config, name) != 1 or "positives" not in LOSSES.load(config.loss_type).takes:
        return ""
    return (
        f"{name} 1 leaves no in-batch negatives, so the {config.loss_type} loss learns nothing; set {name} to 2 or more"
    )


def _contradicting_sharding(factor: int | str, sharded: bool | str) -> str:
    if isinstance(factor, str) or isinstance(sharded, str) or (factor > 1) == sharded:
        return ""
    if sharded:
        return "sharding_factor 1 replicates the model while use_fsdp is true; set sharding_factor to auto or 2 or more"
    return f"sharding_factor {factor} shards the model while use_fsdp is false; set use_fsdp to auto or true"
