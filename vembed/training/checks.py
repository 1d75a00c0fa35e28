"""What is looked at before the first step: an encoder that would train wrongly, and one step to see that it runs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from vembed.distributed.shards import total_norm
from vembed.errors import ConfigError, NonFiniteError
from vembed.training.memory import peak_memory_bytes

if TYPE_CHECKING:
    from vembed.gradcache.engine import GradCacheEngine
    from vembed.models.encoder import Encoder
    from vembed.training.batches import BatchSource

_log = logging.getLogger(__name__)


def refuse_batch_norm(encoder: Encoder) -> None:
    """Refuse statistics over a chunk, which no replay makes those of the batch.

    Raises:
        ConfigError: The encoder has batch normalisation.
    """
    if not encoder.mixes_rows():
        return
    if encoder.freeze_batch_norm:
        way_in = "it has no statistics of its own that freeze_batch_norm could keep"
    else:
        way_in = "or freeze_batch_norm: true, which keeps the statistics of the model's files"
    raise ConfigError(
        f"{encoder.name} has batch normalisation, whose statistics depend on the chunk: gradient caching can't "
        f"compute its gradients. Set use_gradient_cache: false, {way_in}; or use a model with another normalisation"
    )


def refuse_nonfinite_weights(encoder: Encoder) -> None:
    """Refuse weights that are broken before training.

    Raises:
        NonFiniteError: A weight is NaN or infinite.
    """
    bad = [name for name, parameter in encoder.named_parameters() if not parameter.isfinite().all()]
    if bad:
        raise NonFiniteError(f"{encoder.name}: {len(bad)} weights are NaN or infinite as loaded, the first is {bad[0]}")


def dry_run(source: BatchSource, engine: GradCacheEngine, encoder: Encoder) -> None:
    """Do one step on the first batch and say what it took; no weight changes, nothing is written.

    Args:
        encoder: Gets gradients and loses them with the process.
    """
    started = time.perf_counter()
    encoder.train()
    batch = source.batch(0)
    result = engine.step(batch.pools, batch.structure, assignment=batch.assignment)
    norm = total_norm([p.grad for p in encoder.parameters() if p.grad is not None], engine.options.ranks)
    _log.info(
        "dry run: one step of %d queries in %.2f s, %d chunks, loss %.4f, gradient norm %.3g, peak memory %.2f GiB; "
        "nothing was written",
        batch.structure.num_queries,
        time.perf_counter() - started,
        result.num_chunks,
        result.loss,
        norm.item(),
        peak_memory_bytes(source.device) / (1 << 30),
    )
