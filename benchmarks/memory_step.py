"""One optimizer step of a memory case: engine, shards and AdamW around an encoder. Needs no package but torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vembed.distributed.fsdp import shard_encoder
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.losses.infonce import InfoNCE
from vembed.plan.problem import Way
from vembed.training.optimizer import Optimizer, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memory_cases import Case

    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.engine import Pool
    from vembed.losses.base import BatchLoss, BatchStructure
    from vembed.models.encoder import Encoder

TILE_SIZE = 1024
MOST_ROWS = 1 << 20

ADAMW: Any = SimpleNamespace(weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=1.0)
"""Stands for OptimisationKeys, which need pydantic."""


def prepare_step(
    case: Case,
    encoder: Encoder,
    ranks: Ranks,
    device: torch.device,
    pools: Sequence[Pool],
    structure: BatchStructure,
) -> tuple[Optimizer, Callable[[int], tuple[float, float]]]:
    """Return the optimizer of a case, and its step, which gives loss and gradient norm."""
    compute_dtype = torch.bfloat16 if case.bf16 else None
    sharded = None
    if case.fsdp_mode is not None:
        way = Way("fsdp", mode=case.fsdp_mode, sharding_factor=ranks.world_size, cpu_offload=case.cpu_offload)
        sharded = shard_encoder(encoder, way, ranks, device=device, compute_dtype=compute_dtype)
    loss: BatchLoss = InfoNCE(temperature=0.05, tile_size=TILE_SIZE)
    if case.several:
        from vembed.losses.colbert import ColbertLoss

        loss = ColbertLoss(temperature=0.05, tile_size=TILE_SIZE)
    loss.to(device)
    schedule = Schedule(1e-5, "constant", warmup_steps=0, steps=2)
    optimizer = Optimizer(encoder, loss, ADAMW, schedule, loss_scaling=False, ranks=ranks)
    options = EngineOptions(
        budget=ChunkBudget(MOST_ROWS, case.chunk_tokens, bucketed=device.type != "cpu"),
        device=device,
        retain=1.0 if case.retain is None else case.retain,
        autocast_dtype=compute_dtype,
        ranks=ranks,
    )
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    engine = GradCacheEngine(loss, options, trained, sharded=sharded)

    def step(number: int) -> tuple[float, float]:
        result = engine.step(pools, structure, assignment=None if ranks.is_one else case.assignment)
        norm = optimizer.clip_gradients()
        optimizer.step(optimizer.schedule.learning_rate(number))
        optimizer.zero_grad()
        return result.loss, norm

    return optimizer, step
