"""The bytes that the loss stage really allocates, against those that the plan counts for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from vembed.batch import ContrastiveBatch
from vembed.config.load import load_config
from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import RowAssignment
from vembed.gradcache.loss_stage import LossStage
from vembed.losses.base import BatchStructure, LossCommon
from vembed.losses.registry import loss_section
from vembed.losses.tiles import DEFAULT_TILE_SIZE
from vembed.models.measure import LiveBytes
from vembed.plan.devices import Devices, Machine
from vembed.plan.memory import ModelSize
from vembed.plan.plan import make_plan
from vembed.plan.problem import DataSize
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from kit.ranks import RankPool

PAIRS, DIMENSION, TILE = 1536, 512, 128
VECTORS = {"late interaction": 4, "late interaction, both directions": 4}  # of each row; 1 for other losses
"""With these the embeddings take ten times what the loss holds of the similarities, and as much as ten steps would."""


def peak_on(rank: int, kind: str, world_size: int, uneven: int, tile: int = TILE) -> int:
    """Return the bytes of a rank's worst moment: its embeddings, and what the stage allocates beside them."""
    rows = np.arange(2 * PAIRS)
    slots = [rows[each::world_size] for each in range(world_size)]
    if uneven:
        slots = [np.sort(np.concatenate([slots[0], slots[1][:uneven]])), slots[1][uneven:]]
    vectors = VECTORS.get(kind, 1)
    counts_N = np.full(2 * PAIRS, vectors) if vectors > 1 else None
    assignment = RowAssignment(tuple(slots))
    assignment = assignment if counts_N is None else assignment.of_vectors(counts_N)
    first = np.arange(PAIRS)
    batch = ContrastiveBatch(
        queries=("",) * PAIRS,
        documents=("",) * PAIRS,
        positives_P2=np.stack([first, first], axis=1),
        query_ids_Q=first,
        document_ids_D=PAIRS + first,
        record_ids=tuple(range(PAIRS)),
    )
    config = load_config(None, overrides(kind, tile)).config
    loss = config.run_loss().build(config, LossCommon(torch.float32, DIMENSION, tile))
    torch.manual_seed(rank)
    z_VE = torch.nn.functional.normalize(torch.randn(vectors * len(slots[rank]), DIMENSION // vectors), dim=-1)
    ranks = Ranks() if world_size == 1 else Ranks.of_this_process()
    live = LiveBytes([z_VE])
    with live:
        LossStage(loss, ranks).run(z_VE, BatchStructure.of(batch), assignment, counts_N=counts_N)
    return z_VE.nbytes + max(accumulate(live.events))


TEACHER = ["false_negative_filter=teacher", "teacher_model_name=t"]
KINDS: dict[str, list[str]] = {
    "one direction": [],
    "both directions": ["loss_bidirectional=true"],
    "prefixes": ["mrl_dims=[512, 64]"],
    "sigmoid": ["loss_type=sigmoid"],
    "spread out": ["added_losses={spread_out: 0.1}"],
    "hardest": ["loss_type=in_batch_hard", "hard_topk=32"],
    "hardest, both directions": ["loss_type=in_batch_hard", "loss_bidirectional=true"],
    "supcon, both directions": ["loss_type=supcon", "loss_bidirectional=true"],
    "harder negatives, both directions": ["hardness_mode=all_negatives", "loss_bidirectional=true"],
    "all directions": ["loss_directions=[query_to_document, query_to_query, document_to_query, document_to_document]"],
    "filtered": ["false_negative_filter=threshold"],
    "filtered by a teacher": TEACHER,
    "triplet": ["loss_type=triplet"],
    "hardest triplet": ["loss_type=triplet", "triplet_negatives=hardest"],
    "cosent": ["loss_type=cosent"],
    "distillation": ["loss_type=distillation", "teacher_model_name=t"],
    "distillation of cosines": ["loss_type=distillation", "distillation_loss_type=mse", "teacher_model_name=t"],
    "hardest, filtered by a teacher": ["loss_type=in_batch_hard", *TEACHER],
    "supcon, filtered by a teacher": ["loss_type=supcon", *TEACHER],
    "sigmoid, filtered by a teacher": ["loss_type=sigmoid", *TEACHER],
    "triplet, filtered by a teacher": ["loss_type=triplet", *TEACHER],
    "cosent, filtered by a teacher": ["loss_type=cosent", *TEACHER],
    "late interaction": ["loss_type=colbert"],
    "late interaction, both directions": ["loss_type=colbert", "loss_bidirectional=true"],
}


FAST = ("one direction", "both directions", "prefixes", "sigmoid")
TAUGHT = tuple(kind for kind, keys in KINDS.items() if "teacher_model_name=t" in keys)
NEAR = (
    "spread out",
    "all directions",
    "triplet",
    "hardest triplet",
)  # of two processes each holds less than the plan counts


def overrides(kind: str, tile: int = TILE) -> list[str]:
    return ["model_name=m", f"global_batch_size={PAIRS}", f"loss_tile_size={tile}", *KINDS[kind]]


def planned(kind: str, world_size: int, tile: int = TILE) -> int:
    """Return what the plan counts for the stage."""
    machine = Machine("cpu", "the CPU", 1 << 36, 1, fast_bf16=False)
    model = ModelSize.by_formula(
        num_parameters=1, num_trainable=1, bytes_per_value=4, dimension=DIMENSION // VECTORS.get(kind, 1), max_length=8,
        activation_bytes_per_token=1,
    )  # fmt: skip
    model = replace(model, vectors=(float(VECTORS.get(kind, 1)), 0.0))
    config = load_config(None, overrides(kind, tile)).config
    plan = make_plan(config, machine, model, DataSize(PAIRS, 1.0), devices=Devices.of(machine, world_size))
    return plan.bytes_per_device.loss + plan.bytes_per_device.embeddings


@pytest.mark.parametrize(
    "kind",
    [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in (*FAST, *TAUGHT, *NEAR))],
)
def test_the_loss_stage_holds_what_the_plan_counts(two_ranks: RankPool, kind: str) -> None:
    alone = peak_on(0, kind, 1, 0)
    assert planned(kind, 1) == pytest.approx(alone, rel=0.05)
    for uneven in (0, 20):
        largest = max(two_ranks.run(peak_on, kind, 2, uneven))
        assert planned(kind, 2) == pytest.approx(largest, rel=0.05)
    table = 2 * PAIRS * DIMENSION * 4
    assert largest < 3.4 * table, "the embeddings of all ranks and their gradients once, and half of both for its own"


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEAR)
def test_one_process_holds_what_the_plan_counts(kind: str) -> None:
    assert planned(kind, 1) == pytest.approx(peak_on(0, kind, 1, 0), rel=0.05)


@pytest.mark.parametrize("tile", [TILE // 2, 4 * TILE])
@pytest.mark.parametrize("kind", ["triplet", "hardest triplet"])
def test_triplets_hold_the_rows_of_a_block_of_cells_whatever_their_number(kind: str, tile: int) -> None:
    """A block of cells has as many numbers as a tile: the queries fill 192 of them, or 3."""
    assert planned(kind, 1, tile) == pytest.approx(peak_on(0, kind, 1, 0, tile), rel=0.05)


def test_every_loss_over_the_matrix_has_a_kind() -> None:
    known = {load_config(None, overrides(kind)).config.loss_type for kind in KINDS}
    own = [facts for facts in map(loss_section, LOSSES.names()) if isinstance(facts.loss, str)]
    assert len(own) > 10
    assert {facts.name for facts in own if facts.memory in ("matrix", "tiles")} <= known


BATCH, NUMBERS = 16_384, 256


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in VECTORS])
def test_sixteen_thousand_pairs_add_under_200_mb(kind: str) -> None:
    first = np.arange(BATCH)
    teacher = np.full((BATCH, 64), 0.125, dtype=np.float32)
    batch = ContrastiveBatch(
        queries=("",) * BATCH,
        documents=("",) * BATCH,
        positives_P2=np.stack([first, first], axis=1),
        query_ids_Q=first,
        document_ids_D=BATCH + first,
        record_ids=(),
        teacher_Q=teacher,
        teacher_D=teacher,
    )
    config = load_config(None, overrides(kind)).config
    loss = config.run_loss().build(config, LossCommon(torch.float32, NUMBERS, DEFAULT_TILE_SIZE))
    z_VE = torch.nn.functional.normalize(torch.randn(2 * BATCH, NUMBERS), dim=-1)
    live = LiveBytes([z_VE])
    with live:
        LossStage(loss, Ranks()).run(z_VE, BatchStructure.of(batch), RowAssignment((np.arange(2 * BATCH),)))
    added = max(accumulate(live.events))
    assert z_VE.nbytes < added < 200_000_000, "the gradients, and what the loss holds of 1.07 GB of similarities"
