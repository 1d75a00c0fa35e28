"""Two processes compute the losses of one: graded pairs, weights of rows, filters and all directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from vembed.batch import ContrastiveBatch
from vembed.config.load import load_config
from vembed.distributed.ranks import Ranks
from vembed.gradcache.loss_stage import LossStage
from vembed.gradcache.row_assignment import RowAssignment
from vembed.losses.base import BatchLoss, BatchStructure, LossCommon
from vembed.losses.registry import loss_facts

if TYPE_CHECKING:
    from rank_pool import RankPool

QUERIES, DOCUMENTS, NUMBERS = 13, 29, 8
KINDS = {
    "graded pairs": ["loss_type=cosent"],
    "both directions": ["loss_bidirectional=true", "hardness_mode=all_negatives", "focal_gamma=0.5"],
    "all directions": [
        "loss_directions=[query_to_document, query_to_query, document_to_query, document_to_document]",
        "mrl_dims=[8, 4]",
    ],
    "supcon": ["loss_type=supcon", "loss_bidirectional=true"],
    "hardest": ["loss_type=in_batch_hard", "loss_bidirectional=true", "hard_topk=2"],
    "threshold": ["loss_type=triplet", "false_negative_filter=threshold"],
    "teacher": ["loss_type=sigmoid", "false_negative_filter=teacher", "teacher_model_name=t"],
}


def setting(kind: str) -> tuple[BatchLoss, BatchStructure, torch.Tensor, tuple[np.ndarray, np.ndarray]]:
    """Return a loss, a batch whose rows count differently, its embeddings, and the rows of two ranks."""
    rng, graded = np.random.default_rng(3), kind == "graded pairs"
    documents = np.arange(DOCUMENTS)
    pairs_P2 = np.stack([np.sort(rng.integers(QUERIES, size=DOCUMENTS)), documents], axis=1)
    pairs_P2[:QUERIES, 0] = np.arange(QUERIES)
    pairs_P2 = pairs_P2[np.lexsort(pairs_P2.T[::-1])]
    teacher_N = rng.normal(size=(QUERIES + DOCUMENTS, 3)).astype(np.float32)
    teacher_N /= np.linalg.norm(teacher_N, axis=1, keepdims=True)
    batch = ContrastiveBatch(
        queries=("",) * QUERIES,
        documents=("",) * DOCUMENTS,
        positives_P2=pairs_P2[pairs_P2[:, 1] < 18],
        query_ids_Q=np.arange(QUERIES),
        document_ids_D=QUERIES + documents % 26,  # three documents stand twice
        record_ids=tuple(range(QUERIES)),
        listed_P2=pairs_P2 if graded else None,
        listed_scores_P=rng.integers(4, size=DOCUMENTS) / 3 if graded else None,
        negatives_P2=pairs_P2[pairs_P2[:, 1] >= 18],
        columns={"weight": rng.uniform(0, 3, size=QUERIES)},
        teacher_Q=teacher_N[:QUERIES],
        teacher_D=teacher_N[QUERIES:],
    )
    config = load_config(None, ["model_name=m", *KINDS[kind]]).config
    loss = loss_facts(config.loss_type).build(config.loss_keys(), LossCommon(torch.float64, NUMBERS, 4))
    z_NE = torch.from_numpy(rng.normal(size=(QUERIES + DOCUMENTS, NUMBERS)))
    rows = rng.permutation(QUERIES + DOCUMENTS)
    return (
        loss,
        BatchStructure.of(batch),
        torch.nn.functional.normalize(z_NE, dim=-1),
        (
            np.sort(rows[:15]),
            np.sort(rows[15:]),
        ),
    )


def share_on(rank: int, kind: str) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    loss, structure, z_NE, slots = setting(kind)
    found = LossStage(loss, Ranks.of_this_process()).run(z_NE[slots[rank]], structure, RowAssignment(slots))
    return found.loss.item(), found.u_VE, found.own


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_compute_what_one_does(two_ranks: RankPool, kind: str) -> None:
    loss, structure, z_NE, slots = setting(kind)
    z_NE.requires_grad_()
    own: dict[str, Any] = dict(loss.named_parameters())
    value = loss(z_NE[:QUERIES], z_NE[QUERIES:], structure)
    assert value > 0.01
    u_NE, *rest = torch.autograd.grad(value, [z_NE, *own.values()])
    for (found, u_VE, gradients), rows in zip(two_ranks.run(share_on, kind), slots, strict=True):
        assert found == pytest.approx(value.item(), rel=1e-11)
        assert torch.allclose(u_VE, u_NE[rows], rtol=0, atol=1e-10 * max(1.0, u_NE.abs().max().item()))
        for name, expected in zip(own, rest, strict=True):
            assert torch.allclose(gradients[name], expected, rtol=1e-10, atol=1e-10)
