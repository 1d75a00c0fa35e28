"""Keys of the batch and its chunks."""

from typing import TYPE_CHECKING

from vembed.config.fields import Auto, Count, Share, key, rule
from vembed.config.keys.section import Section

if TYPE_CHECKING:
    from vembed.config.schema import Config


class BatchKeys(Section):
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
    retain: Auto | Share = key(
        "auto",
        "Share of the batch that keeps its graphs from the first pass and isn't encoded again: memory for speed, the "
        "same gradients; auto takes a part of the memory to spare.",
    )
    oom_retry: bool = key(
        True,
        "Do a step that runs out of memory again in chunks of half the size, instead of ending the run.",
        on_resume="harmless",
    )


@rule("global_batch_size", "batch_size", "loss_type")
def _batch_has_negatives(config: "Config") -> str | None:
    """The global batch (`global_batch_size`, else `batch_size`) must be 2 or more."""
    name = "batch_size" if config.global_batch_size is None else "global_batch_size"
    if getattr(config, name) > 1:
        return None
    loss = config.loss_type
    return f"{name} 1 leaves no in-batch negatives, so the {loss} loss learns nothing; set {name} to 2 or more"


@rule("gradient_cache_chunk_size", "use_gradient_cache")
def _chunk_size_acts(config: "Config") -> str | None:
    """`gradient_cache_chunk_size` must be auto with `use_gradient_cache: false`."""
    return _idle_chunk(config, "gradient_cache_chunk_size")


@rule("gradient_cache_chunk_tokens", "use_gradient_cache")
def _chunk_tokens_act(config: "Config") -> str | None:
    """`gradient_cache_chunk_tokens` must be auto with `use_gradient_cache: false`."""
    return _idle_chunk(config, "gradient_cache_chunk_tokens")


@rule("retain", "use_gradient_cache")
def _retention_acts(config: "Config") -> str | None:
    """`retain` must be auto with `use_gradient_cache: false`."""
    return _idle_chunk(config, "retain")


def _idle_chunk(config: "Config", name: str) -> str | None:
    if config.use_gradient_cache is not False or getattr(config, name) == "auto":
        return None
    return (
        f"{name} has no effect while use_gradient_cache is false, as the batch is encoded in one call; "
        f"set use_gradient_cache to auto or {name} to auto"
    )
