"""The engine equals the plain step where only a part of an encoder trains, and every part of it really does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import (
    BUDGET,
    CPU,
    make_loss,
    partly_trained,
    picture_batch,
    step_of_a_rank,
    text_batch,
    trainable_of,
    wake,
)
from kit.picture_models import pools_of, write_open_clip, write_picture_model
from kit.text_models import write_model

from vembed.gradcache.chunks import RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure

if TYPE_CHECKING:
    from pathlib import Path

    from kit.ranks import RankPool

    from vembed.batch import ContrastiveBatch
    from vembed.models.encoder import Encoder

NO_GRADIENT_IN_TRUTH = ("k_proj.bias", "key.bias")
"""Attention doesn't change when the same vector is added to all keys."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "clip": write_picture_model(root / "clip", "clip"),
        "open_clip": write_open_clip(root / "open_clip"),
        "bert": write_model(root / "bert", "bert"),
    }


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


@pytest.mark.parametrize("what", ["lora text", "vision", "text", "projection", "last_1_layers"])
def test_the_engine_has_the_gradients_of_the_plain_step_in_two_towers(folders: dict[str, Path], what: str) -> None:
    encoder = partly_trained(folders["clip"], what)
    wake(encoder)
    assert_exact(encoder, picture_batch())


@pytest.mark.parametrize("kind", ["bert", "open_clip"])
def test_the_last_layer_is_exact_in_other_families_too(folders: dict[str, Path], kind: str) -> None:
    encoder = partly_trained(folders[kind], "last_1_layers")
    assert_exact(encoder, picture_batch() if kind == "open_clip" else text_batch())


@pytest.mark.parametrize("what", ["lora dropout", pytest.param("last_1_layers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["bert", "clip", pytest.param("open_clip", marks=pytest.mark.slow)])
def test_gradient_checkpointing_trains_what_trains_without_it(folders: dict[str, Path], kind: str, what: str) -> None:
    batch = text_batch() if kind == "bert" else picture_batch()
    gradients = []
    for checkpointed in (False, True):
        encoder, loss = partly_trained(folders[kind], what, gradient_checkpointing=checkpointed), make_loss()
        wake(encoder)
        torch.manual_seed(5)
        reference_step(pools_of(encoder, batch), BatchStructure.of(batch), loss, budget=BUDGET)
        gradients.append(take(encoder, loss))
    assert_same(gradients[1], gradients[0])
    assert max(gradient.norm() for name, gradient in gradients[1].items() if name != "log_scale") > 0


def test_a_new_adapter_leaves_the_vectors_and_its_first_step_moves_its_second_factor_alone(
    folders: dict[str, Path],
) -> None:
    batch, loss = text_batch(), make_loss()
    structure = BatchStructure.of(batch)
    plain, encoder = partly_trained(folders["bert"], "all").eval(), partly_trained(folders["bert"], "lora").eval()
    pools = [pools_of(each, batch)[0] for each in (plain, encoder)]
    inputs = pools[0].collate(pools[0].features, np.arange(10), int(pools[0].features.lengths.max()))
    with torch.no_grad():
        assert torch.equal(plain(inputs), encoder(inputs))
    optimizer = torch.optim.AdamW(trainable_of(encoder).values(), lr=1e-2)
    engine = GradCacheEngine(loss, EngineOptions(BUDGET, CPU), list(trainable_of(encoder).values()))
    moving = []
    for _ in range(2):
        engine.step(pools[1:], structure)
        moving.append({name for name, parameter in trainable_of(encoder).items() if parameter.grad.norm() > 0})  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert moving[0] == {name for name in trainable_of(encoder) if ".lora_B." in name}
    assert moving[1] == trainable_of(encoder).keys()


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one_where_a_tower_is_frozen(
    two_ranks: RankPool, folders: dict[str, Path]
) -> None:
    """Rank 0 has pictures alone, of whose tower nothing trains: no rank waits for its gradients."""
    batch = picture_batch()
    assignment = RowAssignment((np.array([5, 7, 9]), np.array([0, 1, 2, 3, 4, 6, 8])))
    reductions = {}
    for what in ("lora text", "vision"):
        encoder, loss = partly_trained(folders["clip"], what).eval(), make_loss()
        wake(encoder)
        value = reference_step(pools_of(encoder, batch), BatchStructure.of(batch), loss)
        expected = take(encoder, loss)
        answers: list[Any] = two_ranks.run(step_of_a_rank, folders["clip"], what, assignment)
        for found_value, found, _ in answers:
            assert found_value == pytest.approx(value.item(), rel=1e-11)
            own = {name: gradient for name, gradient in expected.items() if name in found}
            assert own.keys() == expected.keys() - {"log_scale"}
            assert_same(found, own)
        reductions[what] = {count for _, _, count in answers}
    assert reductions["lora text"] == reductions["vision"], "reductions depend on what trains"
    assert len(reductions["vision"]) == 1
