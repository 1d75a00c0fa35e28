"""Keys of the batch and its chunks."""

from typing import TYPE_CHECKING, Literal

from vembed.config.fields import Auto, Count, Section, Share, key, rule
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from vembed.config.schema import Config


IN_CHUNKS = {"use_gradient_cache": ("auto", True)}


class BatchKeys(Section):
    """How many rows one step sees, and how many of them at a time."""

    batch_size: Auto | Count = key(
        64,
        "Batch of one device; auto is the largest power of two that memory, the loss and the number of steps allow.",
        unit="queries",
    )
    global_batch_size: Count | None = key(
        None, "Batch of all devices together; wins over batch_size and is divided over the devices.", unit="queries"
    )
    gradient_accumulation_steps: Auto | Count = key(
        "auto",
        "Batches whose gradients are added up before an optimizer step, each with its own negatives; auto is 1, as "
        "gradient caching takes the whole batch at once, with all its negatives, in the same memory.",
        unit="batches",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = key(
        "none", "Multiply learning_rate by batch / lr_reference_batch, or by the root of that; none takes it as it is."
    )
    lr_reference_batch: Count = key(
        256,
        "With lr_scaling: the effective batch that learning_rate is meant for.",
        unit="queries",
        acts_with={"lr_scaling": ("linear", "sqrt")},
    )
    use_gradient_cache: Auto | bool = key(
        "auto", "Encode the batch in chunks with its own gradients; false: in one call."
    )
    gradient_cache_chunk_size: Auto | Count = key(
        "auto", "Most texts or pictures of one encoder call.", unit="items", acts_with=IN_CHUNKS
    )
    gradient_cache_chunk_tokens: Auto | Count = key(
        "auto",
        "Most padded tokens (items x width) of one encoder call; the smaller chunk wins.",
        unit="tokens",
        acts_with=IN_CHUNKS,
    )
    retain: Auto | Share = key(
        "auto",
        "Share of the batch that keeps its graphs from the first pass and isn't encoded again: memory for speed, the "
        "same gradients; auto takes a part of the memory to spare.",
        acts_with=IN_CHUNKS,
    )
    packing: Auto | bool = key(
        "auto",
        "Lay the rows of an encoder call end to end instead of padding them; attention stays in each row. auto does "
        "where the device has a fast operator for it and the model's type is proven to compute the same. On a CPU true "
        "is a slow reference: attention weighs all pairs of a call's tokens.",
    )
    oom_retry: bool = key(
        True,
        "Do a step that runs out of memory again without kept graphs, then in chunks of half the size, instead of "
        "ending the run.",
        on_resume="harmless",
    )


@rule("global_batch_size", "batch_size", "loss_type")
def _batch_has_negatives(config: "Config") -> str | None:
    """The global batch (`global_batch_size`, else `batch_size`) must be 2 or more."""
    name = "batch_size" if config.global_batch_size is None else "global_batch_size"
    loss = config.loss_type
    if getattr(config, name) != 1 or "positives" not in LOSSES.load(loss).takes:
        return None
    return f"{name} 1 leaves no in-batch negatives, so the {loss} loss learns nothing; set {name} to 2 or more"


@rule("batch_size", "global_batch_size")
def _batch_is_said_once(config: "Config") -> str | None:
    """`batch_size: auto` must not stand beside a `global_batch_size`."""
    if config.batch_size != "auto" or config.global_batch_size is None:
        return None
    return "batch_size auto asks the plan for a batch that global_batch_size already gives; remove one of them"
