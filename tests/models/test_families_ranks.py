"""Two ranks have the gradients of one process where items are pictures of uneven sizes, with one vector and several."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import loss_of, partly_trained, step_of_a_rank, wake
from late_cases import batch_of as cases_batch
from model_cases import load_any
from picture_cases import PICTURES, pools_of, write_picture_model
from test_adapters_engine import take
from test_vision_language import mixed_batch
from test_vision_late import PICTURES as PAGES
from test_vision_late import TEXTS
from vision_language_cases import FAMILY_BUILDERS, RETRIEVAL_BUILDERS, write_vision_language

from vembed.batch import ContrastiveBatch
from vembed.gradcache.reference import reference_step
from vembed.gradcache.row_assignment import RowAssignment
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from pathlib import Path

    from rank_pool import RankPool

pytestmark = pytest.mark.slow

LATE = {"late qwen3_vl": "qwen3_vl", "late dinov2": "dinov2"}
"""Models that give several vectors once they got a head -> what they are made from."""

KINDS = (*FAMILY_BUILDERS, *RETRIEVAL_BUILDERS, *LATE)
HOW: tuple[tuple[str, str, str | None], ...] = (
    *((kind, "all", None) for kind in KINDS),
    *((kind, what, None) for kind in ("idefics3", "colqwen2", "late dinov2") for what in ("lora", "checkpointed")),
    *((kind, "all", mode) for kind in ("gemma3", "colqwen2") for mode in ("fast", "sharded")),
)
"""A model, what of it trains, and how its weights are shared."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    found = {kind: write_vision_language(root / kind, kind) for kind in (*FAMILY_BUILDERS, *RETRIEVAL_BUILDERS)}
    for kind, bare in LATE.items():
        write = write_picture_model if bare == "dinov2" else write_vision_language
        torch.manual_seed(1)
        found[kind] = root / kind
        load_any(without_dropout(write(root / bare, bare)), pooling_method="none", projection_dim=12).save(found[kind])
    return found


def without_dropout(folder: Path) -> Path:
    """Let a model of pictures drop nothing: each rank draws masks of its own."""
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    dropped = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    config |= {name: 0.0 for name in dropped if name in config}
    file.write_text(json.dumps(config), "utf-8")
    return folder


def batch_of(kind: str) -> ContrastiveBatch:
    """Return what a model takes: all kinds of items, texts that search pages, or pictures alone."""
    if kind in FAMILY_BUILDERS:
        return mixed_batch()
    if kind != "late dinov2":
        return cases_batch(TEXTS, PAGES)
    numbers = np.arange(3)
    pairs, of_documents = np.stack([numbers, numbers], axis=1), numbers + 100
    return ContrastiveBatch(PICTURES[:3], PICTURES[2:], pairs, numbers, of_documents, record_ids=(0, 1, 2))


def step(rank: int, *arguments: Any) -> Any:
    """Do the step with what this file's imports set up."""
    return step_of_a_rank(rank, *arguments)


@pytest.mark.parametrize(("kind", "what", "mode"), HOW)
def test_two_ranks_have_the_gradients_of_one(
    two_ranks: RankPool, folders: dict[str, Path], kind: str, what: str, mode: Any
) -> None:
    """Norms of language models compute in float32: calls of other rows round otherwise."""
    encoder, batch = partly_trained(folders[kind], what), batch_of(kind)
    loss = loss_of(encoder)
    wake(encoder)
    value = reference_step(pools_of(encoder, batch), BatchStructure.of(batch), loss)
    expected = take(encoder, loss)
    few = [0, 1, 5] if len(batch.queries) > 3 else [0, 3]  # one item of each kind
    others = np.setdiff1d(np.arange(len(batch.queries) + len(batch.documents)), few)
    near = 1e-10 if kind == "late dinov2" else 1e-5
    for found_value, found, _ in two_ranks.run(
        step, folders[kind], what, RowAssignment((np.array(few), others)), batch, mode
    ):
        assert found_value == pytest.approx(value.item(), rel=near)
        assert found.keys() == expected.keys() - {"log_scale"}
        largest = max(gradient.norm() for gradient in expected.values())
        errors = {name: float((gradient - expected[name]).norm() / largest) for name, gradient in found.items()}
        assert max(errors.values()) < near, errors
