"""A loss for each source: each batch has the loss of its own, on any ranks, and the plan counts the largest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loss_cases import graded, plain
from streamed_cases import unit_rows

from vembed.config.load import load_config, load_values
from vembed.data.keys import loss_names
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.evaluation.card_facts import losses_of_run
from vembed.gradcache.chunks import RowAssignment
from vembed.gradcache.loss_stage import LossStage
from vembed.losses.base import LossCommon
from vembed.plan.memory import BatchRows, LossTiles, ModelSize, similarity_values

if TYPE_CHECKING:
    from kit.ranks import RankPool

DATA: list[dict[str, Any]] = [
    {"path": "a"}, {"path": "b", "loss": "cosent"}, {"path": "c", "loss": "sigmoid"}, {"path": "d", "loss": "cosent"}
]  # fmt: skip
KEYS: dict[str, Any] = {
    "model_name": "m", "data": DATA, "source_batches": "single", "learn_temperature": True, "cosent_scale": 5,
    "init_logit_bias": -3.0, "label_kind": "grade",
}  # fmt: skip


def built(**changes: Any) -> Any:
    config = load_values(KEYS | changes, {}).config
    return config.run_loss().build(config, LossCommon(torch.float64, 5, 3))


def batch(source: int) -> Any:
    return replace((graded(13, 29, grades=4) if source in (1, 3) else plain(13, 29)).structure, source=source)


def embeddings() -> torch.Tensor:
    return torch.cat([unit_rows(13, 5, seed=1), unit_rows(29, 5, seed=2)])


SLOTS = tuple(np.sort(part) for part in np.split(np.random.default_rng(0).permutation(42), [15]))


def share_on(rank: int, source: int) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    stage = LossStage(built(), Ranks.of_this_process())
    found = stage.run(embeddings()[SLOTS[rank]], batch(source), RowAssignment(SLOTS))
    return found.loss.item(), found.u_VE, found.parameters


def expected(source: int) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the source's own loss, whole, by autograd."""
    loss, z_NE, structure = built(), embeddings().requires_grad_(), batch(source)
    part = loss.parts[(0, 1, 2, 1)[source]]
    own = {name: each for name, each in loss.named_parameters() if any(each is other for other in part.parameters())}
    value = part(z_NE[:13], z_NE[13:], structure)
    u_NE, *rest = torch.autograd.grad(value, [z_NE, *own.values()])
    zeros = {name: torch.zeros_like(each) for name, each in loss.named_parameters()}
    return value.item(), u_NE, zeros | dict(zip(own, rest, strict=True))


def assert_same(found: tuple[float, torch.Tensor, Any], wanted: tuple[float, torch.Tensor, Any], rows: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-11)
    assert torch.allclose(found[1], wanted[1][rows], rtol=0, atol=1e-10)
    assert found[2].keys() == wanted[2].keys()
    for name, gradient in wanted[2].items():
        assert torch.allclose(found[2][name], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("source", range(4))
def test_a_batch_has_the_loss_of_its_source(source: int) -> None:
    found = LossStage(built(), Ranks()).run(embeddings(), batch(source), RowAssignment.alone(42))
    wanted = expected(source)
    assert wanted[0] > 0.01
    assert any(gradient.abs().max() > 0 for gradient in wanted[2].values()) == (source in (0, 2))
    assert_same((found.loss.item(), found.u_VE, found.parameters), wanted, slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("source", range(3))
def test_two_processes_compute_what_one_does(two_ranks: RankPool, source: int) -> None:
    for found, rows in zip(two_ranks.run(share_on, source), SLOTS, strict=True):
        assert_same(found, expected(source), rows)


def test_sources_of_one_loss_share_it_with_its_parameters_and_bounds() -> None:
    loss = built()
    assert [type(part).__name__ for part in loss.parts] == ["InfoNCE", "CosentLoss", "SigmoidLoss"]
    assert loss.of_source == (0, 1, 2, 1)
    assert (loss.parts[1].scale, loss.temperature) == (5.0, pytest.approx(0.05))
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.fill_(1e6)
    loss.constrain()
    assert loss.temperature == pytest.approx(0.01)
    alone = built(data=[{"path": "b", "loss": "cosent"}], learn_temperature=False, init_logit_bias=-10.0)
    assert type(alone).__name__ == "CosentLoss"


def test_the_plan_counts_the_largest_of_the_losses() -> None:
    size = ModelSize.__new__(ModelSize)
    parts = (LossTiles(4, 2, "matrix"), LossTiles(4, 0, "pairs"))
    rows = BatchRows(50, 70, 50, 70)
    largest, smaller = (similarity_values(size, rows, part) for part in parts)
    assert largest > smaller
    assert similarity_values(size, rows, LossTiles(4, 0, parts=parts, at_once=False)) == largest


def test_rows_of_a_source_are_read_for_its_own_loss() -> None:
    loss = load_values(KEYS, {}).config.run_loss()
    needs = loss.needs()
    assert needs.takes == ("positives", "pairs")
    assert [needs.for_source(number).name for number in range(4)] == ["infonce", "cosent", "sigmoid", "cosent"]
    assert [loss.for_source(number).name for number in range(4)] == ["infonce", "cosent", "sigmoid", "cosent"]
    assert [section.name for section in loss.sections] == ["infonce", "cosent", "sigmoid"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_batches": "mixed"}, "data[1].loss: a mixed batch holds rows of all sources and has one loss; set"),
        ({"data": [{"path": "a", "loss": "infonse"}]}, "data[0].loss: 'infonse' is no loss; name one of"),
        ({"data": [{"path": "a", "loss": "spread_out"}]}, "'spread_out' learns nothing from the rows alone"),
        (
            {"data": [{"path": "a"}, {"path": "b", "loss": "colbert"}]},
            "colbert and infonce differ: one takes several vectors a row",
        ),
        ({"data": DATA[:2]}, "init_logit_bias has no effect with loss_type infonce"),
        ({"data": [{"path": "a", "loss": "angle"}], "label_kind": "auto"}, ""),
    ],
)
def test_what_can_not_be_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    if not words:
        changes |= {"cosent_scale": 20, "learn_temperature": False, "init_logit_bias": -10.0}
        assert load_values(KEYS | changes, {}).config.run_loss().name == "angle"
        return
    with pytest.raises(ConfigError) as refused:
        load_values(KEYS | changes, {})
    assert words in str(refused.value)


def test_the_settings_of_a_run_name_all_losses() -> None:
    config = load_config(None, ["model_name=m", "source_batches=single", "data=[{path: a}, {path: b, loss: cosent}]"])
    assert losses_of_run(config.config.model_dump()) == loss_names(config.config) == ("infonce", "cosent")
