"""Encoders of which a part trains, batches for them, and one step of the engine beside the plain one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.picture_models import PICTURES, pools_of
from kit.text_models import load_any

from vembed.batch import ContrastiveBatch, content_id
from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure
from vembed.losses.colbert import ColbertLoss
from vembed.losses.infonce import InfoNCE
from vembed.models.adapters import add_adapters, freeze
from vembed.models.keys import AdapterKeys

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.distributed.fsdp import ShardingMode
    from vembed.gradcache.chunks import RowAssignment
    from vembed.losses.base import BatchLoss
    from vembed.models.encoder import Encoder

CPU = torch.device("cpu")
BUDGET = ChunkBudget(rows=2, tokens=10**6)
NO_GRADIENT_IN_TRUTH = ("k_proj.bias", "key.bias")
"""Attention doesn't change when the same vector is added to all keys."""
TEXTS = ("sea", "a b", "how do I sort a list in place?", "The river runs to the sea.", "Sea, again")


def picture_batch() -> ContrastiveBatch:
    """Five texts that search five pictures, the first of which is the positive of nothing else."""
    return ContrastiveBatch(
        queries=TEXTS,
        documents=PICTURES,
        positives_P2=np.array([(number, number) for number in range(len(TEXTS))], dtype=np.int64),
        query_ids_Q=np.array([content_id(text) for text in TEXTS]),
        document_ids_D=np.arange(len(PICTURES), dtype=np.int64) + 100,
        record_ids=tuple(range(len(TEXTS))),
    )


def text_batch() -> ContrastiveBatch:
    """Five texts that search five others."""
    documents = tuple(f"{text}, and more of it {number}" for number, text in enumerate(TEXTS))
    return ContrastiveBatch(
        queries=TEXTS,
        documents=documents,
        positives_P2=np.array([(number, number) for number in range(len(TEXTS))], dtype=np.int64),
        query_ids_Q=np.arange(len(TEXTS), dtype=np.int64),
        document_ids_D=np.arange(len(TEXTS), dtype=np.int64) + 100,
        record_ids=tuple(range(len(TEXTS))),
    )


def partly_trained(folder: Path, what: str, **options: Any) -> Encoder:
    """Load in float64 and freeze: a value of `trainable`, or "lora", "lora dropout", "lora TOWERS"; "eval": as it is.

    "checkpointed": all of it, its layers recomputed.
    """
    encoder = load_any(folder, **{"dtype": torch.float64, **options}).train()
    torch.manual_seed(7)
    if what == "eval":
        return encoder.eval()
    if what == "checkpointed":
        encoder.enable_gradient_checkpointing()
        return encoder
    if not what.startswith("lora"):
        freeze(encoder, what)
        return encoder
    dropout = 0.1 if "dropout" in what else 0.0
    towers = what.removeprefix("lora").replace("dropout", "").strip() or "all"
    add_adapters(encoder, AdapterKeys(lora_r=2, lora_dropout=dropout, lora_towers=towers))
    return encoder


def wake(encoder: Encoder) -> None:
    """Give the second factor of each adapter, which starts at zero, random values."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1)


def make_loss() -> InfoNCE:
    return InfoNCE(temperature=0.1, learn_temperature=True, bidirectional=True, dtype=torch.float64)


def loss_of(encoder: Encoder) -> BatchLoss:
    """Return a loss that takes what an encoder gives."""
    return ColbertLoss(temperature=0.3, dtype=torch.float64, tile_size=24) if encoder.multi_vector else make_loss()


def trainable_of(encoder: Encoder) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad}


def step_of_a_rank(
    rank: int,
    folder: Path,
    what: str,
    assignment: RowAssignment,
    batch: ContrastiveBatch | None = None,
    mode: ShardingMode | None = None,
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Do one step on this rank's rows; return the loss, all gradients, and the gradients' reductions."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    from vembed.distributed.fsdp import shard_encoder
    from vembed.gradcache.chunks import Pool
    from vembed.plan.problem import Way

    encoder, batch = partly_trained(folder, what), batch or picture_batch()
    loss = loss_of(encoder)
    wake(encoder)
    pools = []
    for pool in pools_of(encoder, batch):
        mine = np.flatnonzero(np.isin(pool.slots, assignment.slots[rank]))
        if len(mine):
            features = pool.features.take(mine)
            pools.append(Pool(pool.encode, pool.collate, features, pool.slots[mine], encoder.num_vectors(features)))
    ranks, sharded = Ranks.of_this_process(), None
    if mode is not None:
        sharded = shard_encoder(encoder, Way("fsdp", mode=mode, sharding_factor=2), ranks, device=CPU)
    trainable = list(trainable_of(encoder).values())
    engine = GradCacheEngine(loss, EngineOptions(BUDGET, CPU, ranks=ranks), trainable, sharded=sharded)
    for module in encoder.modules():  # each rank draws masks of its own
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    with CommDebugMode() as counted:
        result = engine.step(pools, BatchStructure.of(batch), assignment=assignment)
    gradients = {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}
    found = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in gradients.items()}
    return result.loss, found, sum(n for name, n in counted.get_comm_counts().items() if "reduce" in str(name))


def take(encoder: Encoder, loss: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Take the gradients out and clear them."""
    found = {}
    for name, parameter in [*encoder.named_parameters(), *loss.named_parameters()]:
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
        parameter.grad = None
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(gradient.norm().item() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-10 * gradient.norm() + 1e-13 * largest, name


def assert_exact(encoder: Encoder, batch: ContrastiveBatch) -> None:
    """Compare the engine at three retentions with one graph over the same chunks; all that trains has a gradient."""
    pools, structure, loss = pools_of(encoder, batch), BatchStructure.of(batch), make_loss()
    torch.manual_seed(5)
    value = reference_step(pools, structure, loss, budget=BUDGET)
    expected = take(encoder, loss)
    trainable = trainable_of(encoder)
    assert expected.keys() - {"log_scale"} == trainable.keys()
    largest = max(gradient.norm().item() for gradient in expected.values())
    still = {name for name, gradient in expected.items() if gradient.norm() <= 1e-12 * largest}
    assert all(name.endswith(NO_GRADIENT_IN_TRUTH) for name in still), still
    assert len(still) < len(trainable) / 2
    for retain in (0.0, 0.5, 1.0):
        torch.manual_seed(5)
        engine = GradCacheEngine(loss, EngineOptions(BUDGET, CPU, retain=retain), list(trainable.values()))
        result = engine.step(pools, structure)
        assert result.loss == pytest.approx(value.item(), rel=1e-12)
        assert result.replay_drift == 0
        assert_same(take(encoder, loss), expected)
