"""Frozen batch normalisation: exact gradients through chunks and ranks, statistics as in the files, or a refusal."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import (
    CPU,
    make_loss,
    partly_trained,
    picture_batch,
    trainable_of,
)
from kit.picture_models import PICTURES, RESNET_CONFIG, opened, pools_of, vectors, write_open_clip
from kit.text_models import load_any
from safetensors.torch import load_file

import vembed
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.gradcache.chunks import ChunkBudget, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine, Pool
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure
from vembed.training.model import refuse_batch_norm

if TYPE_CHECKING:
    from pathlib import Path

    from kit.ranks import RankPool

    from vembed.models.encoder import Encoder

pytestmark = pytest.mark.usefixtures("undrawn")

FROZEN = {"freeze_batch_norm": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_open_clip(tmp_path_factory.mktemp("resnet") / "model", RESNET_CONFIG)


def gradients(encoder: Encoder, loss: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Take the gradients out and clear them."""
    found = {}
    for name, parameter in [*encoder.named_parameters(), *loss.named_parameters()]:
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
        parameter.grad = None
    return found


def by_the_definition(encoder: Encoder) -> tuple[float, dict[str, torch.Tensor]]:
    """Backpropagate the batch in one call of each tower."""
    batch, loss = picture_batch(), make_loss()
    value = reference_step(pools_of(encoder, batch), BatchStructure.of(batch), loss)
    return value.item(), gradients(encoder, loss)


def by_the_engine(
    encoder: Encoder, retain: float, *, ranks: Ranks | None = None, assignment: RowAssignment | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Do the same in chunks of at most three pictures; several ranks each with their rows."""
    batch, loss, ranks = picture_batch(), make_loss(), ranks or Ranks()
    pools = pools_of(encoder, batch)
    if assignment is not None:
        mine = [np.flatnonzero(np.isin(pool.slots, assignment.slots[ranks.rank])) for pool in pools]
        pools = [
            Pool(pool.encode, pool.collate, pool.features.take(rows), pool.slots[rows])
            for pool, rows in zip(pools, mine, strict=True)
        ]
    options = EngineOptions(ChunkBudget(rows=3, tokens=10**6), CPU, retain=retain, ranks=ranks)
    engine = GradCacheEngine(loss, options, list(trainable_of(encoder).values()))
    result = engine.step(pools, BatchStructure.of(batch), assignment=assignment)
    assert result.num_chunks > 1
    return result.loss, gradients(encoder, loss)


def of_a_rank(rank: int, folder: Path, assignment: RowAssignment) -> tuple[float, dict[str, torch.Tensor]]:
    encoder = partly_trained(folder, "all", **FROZEN)
    return by_the_engine(encoder, 0.5, ranks=Ranks.of_this_process(), assignment=assignment)


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a gradient, relative to the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(gradient.norm().item() for gradient in expected.values())
    return max(float((found[name] - expected[name]).norm()) for name in expected) / largest


def statistics(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in encoder.named_buffers() if "running_" in name}


@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
def test_frozen_statistics_have_the_gradients_of_one_call_over_the_batch(folder: Path, retain: float) -> None:
    encoder = partly_trained(folder, "all", **FROZEN)
    refuse_batch_norm(encoder)
    before = statistics(encoder)
    value, expected = by_the_definition(encoder)
    found_value, found = by_the_engine(encoder, retain)
    assert found_value == pytest.approx(value, rel=1e-12)
    assert largest_difference(found, expected) < 1e-12
    after = statistics(encoder)
    assert len(after) == 2 * 19
    assert all(torch.equal(after[name], before[name]) for name in before)
    for norm in encoder.batch_norms():  # scale and shift train
        norm.weight = norm.bias = None
    norms = expected.keys() - dict(encoder.named_parameters()).keys() - {"log_scale"}
    assert len(norms) == 2 * 19
    assert all(expected[name].norm() > 0 for name in norms)


def test_frozen_statistics_are_those_of_the_files(folder: Path) -> None:
    """In training as in evaluation: an embedding is that of open_clip's own model in evaluation mode."""
    import open_clip

    encoder = load_any(folder, **FROZEN)
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    pixels = torch.stack([preprocess(picture) for picture in opened(PICTURES)])
    with torch.no_grad():
        expected = model.eval().encode_image(pixels, normalize=True)
    assert torch.allclose(vectors(encoder.train(), PICTURES), expected, atol=1e-6)
    assert not torch.allclose(vectors(load_any(folder).train(), PICTURES), expected, atol=1e-3)


def test_statistics_of_the_batch_are_refused_with_both_ways_in_and_would_be_wrong(folder: Path) -> None:
    encoder = partly_trained(folder, "all")
    with pytest.raises(ConfigError, match=r"use_gradient_cache: false, or freeze_batch_norm: true, which keeps"):
        refuse_batch_norm(encoder)
    _, expected = by_the_definition(encoder)
    _, found = by_the_engine(encoder, 0.0)
    assert largest_difference(found, expected) > 1e-2


def test_statistics_that_no_file_holds_cannot_be_frozen(folder: Path) -> None:
    encoder = partly_trained(folder, "all", **FROZEN)
    norm = encoder.batch_norms()[0]
    norm.running_mean = norm.running_var = None
    with pytest.raises(ConfigError, match="no statistics of its own that freeze_batch_norm could keep"):
        refuse_batch_norm(encoder)


def test_a_frozen_tower_keeps_its_statistics_without_the_key(folder: Path) -> None:
    refuse_batch_norm(partly_trained(folder, "text"))


def test_a_model_without_batch_normalisation_has_no_use_for_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no batch normalisation for freeze_batch_norm; leave it out"):
        load_any(write_open_clip(tmp_path / "vit"), **FROZEN)


def test_two_ranks_have_the_gradients_of_one(two_ranks: RankPool, folder: Path) -> None:
    value, expected = by_the_definition(partly_trained(folder, "all", **FROZEN))
    assignment = RowAssignment((np.array([5, 7, 9, 0]), np.array([1, 2, 3, 4, 6, 8])))
    for found_value, found in two_ranks.run(of_a_rank, folder, assignment):
        assert found_value == pytest.approx(value, rel=1e-11)
        assert found.keys() >= expected.keys() - {"log_scale"}
        assert largest_difference(found, {name: expected[name] for name in found}) < 1e-12


@pytest.mark.slow
def test_a_run_resumes_and_its_model_is_open_clips(folder: Path, tmp_path: Path) -> None:
    import open_clip

    rows = []
    for number, picture in enumerate(PICTURES * 2):
        (tmp_path / f"{number}.png").write_bytes(picture.read())
        rows.append({"query": f"picture {number}", "positive_image": f"{number}.png"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: dict[str, Any] = {
        "model_name": str(folder), "data_path": str(tmp_path / "rows.jsonl"), "max_steps": 4, "batch_size": 4,
        "val_data_path": str(tmp_path / "rows.jsonl"), "use_gradient_cache": True, "gradient_cache_chunk_size": 2,
        "learning_rate": 1e-3, "save_steps": 2, "eval_strategy": "no", "num_processes": 1,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="freeze_batch_norm: true"):
        vembed.train(keys, output_dir=str(tmp_path / "refused"))
    out = tmp_path / "out"
    vembed.train(keys, freeze_batch_norm=True, output_dir=str(out))
    trained, given = (load_file(path / "open_clip_model.safetensors") for path in (out / "model", folder))
    changed = {name for name in given if not torch.equal(given[name], trained[name])}
    assert not any("running_" in name for name in changed)
    assert "visual.bn1.weight" in changed
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{out / 'model'}")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    first, last = sorted((out / "checkpoints").glob("step-*"))
    assert (first.name[-1], last.name[-1]) == ("2", "4")
    shutil.rmtree(last)
    shutil.rmtree(out / "model")
    vembed.train(keys, freeze_batch_norm=True, output_dir=str(out))
    resumed = load_file(out / "model" / "open_clip_model.safetensors")
    assert all(torch.equal(resumed[name], trained[name]) for name in trained)
