"""The loss stage gives every loss and gradient of its definition over the whole matrix, on one process and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_kinds import KINDS, build, structure_for

from vembed.batch import ContrastiveBatch
from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import RowAssignment
from vembed.gradcache.loss_stage import LossStage
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from rank_pool import RankPool

QUERIES, DOCUMENTS, NUMBERS = 13, 29, 16


def setting(kind: str) -> tuple[Any, BatchStructure, torch.Tensor, tuple[np.ndarray, np.ndarray]]:
    """Return a loss, a batch whose rows count differently, its embeddings, and the rows of two ranks."""
    rng, documents = np.random.default_rng(3), np.arange(DOCUMENTS)
    pairs_P2 = np.stack([np.sort(rng.integers(QUERIES, size=DOCUMENTS)), documents], axis=1)
    pairs_P2[:QUERIES, 0] = np.arange(QUERIES)
    pairs_P2 = pairs_P2[np.lexsort(pairs_P2.T[::-1])]
    batch = ContrastiveBatch(
        queries=("",) * QUERIES,
        documents=("",) * DOCUMENTS,
        positives_P2=pairs_P2[pairs_P2[:, 1] < 18],
        query_ids_Q=np.arange(QUERIES),
        document_ids_D=QUERIES + documents % 26,  # three documents stand twice
        record_ids=tuple(range(QUERIES)),
        negatives_P2=pairs_P2[pairs_P2[:, 1] >= 18],
    )
    z_NE = torch.from_numpy(rng.normal(size=(QUERIES + DOCUMENTS, NUMBERS)))
    z_NE = torch.nn.functional.normalize(z_NE + z_NE[:1], dim=-1)  # so near that they can be spread out
    rows = rng.permutation(QUERIES + DOCUMENTS)
    slots = np.sort(rows[:15]), np.sort(rows[15:])
    return build(kind, 4), structure_for(kind, BatchStructure.of(batch)), z_NE, slots


Found = tuple[float, torch.Tensor, dict[str, torch.Tensor]]


def share_on(rank: int, kind: str) -> Found:
    loss, structure, z_NE, slots = setting(kind)
    found = LossStage(loss, Ranks.of_this_process()).run(z_NE[slots[rank]], structure, RowAssignment(slots))
    return found.loss.item(), found.u_VE, found.parameters


def alone(kind: str) -> Found:
    loss, structure, z_NE, _ = setting(kind)
    found = LossStage(loss, Ranks()).run(z_NE, structure, RowAssignment.alone(len(z_NE)))
    return found.loss.item(), found.u_VE, found.parameters


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_and_two_compute_the_definition(two_ranks: RankPool, kind: str) -> None:
    loss, structure, z_NE, slots = setting(kind)
    z_NE.requires_grad_()
    own: dict[str, Any] = dict(loss.named_parameters())
    value = loss(z_NE[:QUERIES], z_NE[QUERIES:], structure)
    assert value > 0.01
    u_NE, *rest = torch.autograd.grad(value, [z_NE, *own.values()])
    shares = zip([alone(kind), *two_ranks.run(share_on, kind)], [slice(None), *slots], strict=True)
    for (found, u_VE, gradients), rows in shares:
        assert found == pytest.approx(value.item(), rel=1e-11)
        assert torch.allclose(u_VE, u_NE[rows], rtol=0, atol=1e-10 * max(1.0, u_NE.abs().max().item()))
        for name, expected in zip(own, rest, strict=True):
            assert torch.allclose(gradients[name], expected, rtol=1e-10, atol=1e-10)
