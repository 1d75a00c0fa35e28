"""The engine over a sharded encoder: the gradients of one shot, whatever is sharded and when."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.ranks import RankPool
from sharded_cases import Sharded, assignment_of, case_of, engine_of, pools_of, step_on, steps_on, whole_gradients
from test_engine import assert_same_gradients, gradients
from test_engine_losses import make

from vembed.gradcache.reference import reference_step

MODES = ["fast", "lean", "sharded"]


def expected_of(setting: Sharded) -> tuple[float, dict[str, torch.Tensor]]:
    case = case_of(replace(setting, dropout=0.0, checkpointing=False))
    loss = make("both directions", 1024)
    value = reference_step(case.pools, case.structure, loss).item()
    return value, gradients(case.encoder, loss)


def assert_equals_one_shot(two_ranks: RankPool, settings: list[Sharded]) -> None:
    answers = two_ranks.run(steps_on, settings)
    for setting, *of_ranks in zip(settings, *answers, strict=True):
        value, expected = expected_of(setting)
        assert "1.log_scale" in expected
        for result, found, _ in of_ranks:
            assert result.loss == pytest.approx(value, rel=1e-11), setting
            assert result.replay_drift == 0, setting
            assert_same_gradients(found, expected, 1e-10)


def test_a_sharded_encoder_has_the_gradients_of_one_shot(two_ranks: RankPool) -> None:
    assert_equals_one_shot(
        two_ranks,
        [
            Sharded("fast", retain=0.5),
            Sharded("lean", encoder="clip", assignment="queries apart"),
            Sharded("sharded", encoder="lora", retain=0.5),
        ],
    )


def accumulated_on(rank: int, settings: list[Sharded]) -> list[dict[str, torch.Tensor]]:
    """Add a third and two thirds of a batch's gradients up."""
    answers = []
    for setting in settings:
        case, loss = case_of(setting), make("both directions", 3)
        engine = engine_of(case, setting, loss)
        assignment = assignment_of(case, setting.assignment)
        pools = pools_of(case, assignment.slots[rank], spare=True)
        for scale in (1 / 3, 2 / 3):
            engine.step(pools, case.structure, assignment=assignment, gradient_scale=scale)
        answers.append(whole_gradients(case.encoder, loss))
    return answers


def idle_on(rank: int, modes: list[Any]) -> list[tuple[list[str], list[str]]]:
    """Do a step with a layer that nothing calls, and with a tower that only rank 0 calls; return what has gradients."""
    answers = []
    for mode in modes:
        setting = Sharded(mode, encoder="clip", assignment="queries apart")
        case, loss = case_of(setting), make("both directions", 3)
        case.encoder.idle = torch.nn.Linear(3, 5).double()
        engine = engine_of(case, setting, loss)
        assignment = assignment_of(case, setting.assignment)
        pools = pools_of(case, assignment.slots[rank], spare=mode in ("lean", "sharded"))
        engine.step(pools, case.structure, assignment=assignment)
        names = [name for name, weight in case.encoder.named_parameters() if weight.requires_grad]
        found = {name.removeprefix("0.") for name in whole_gradients(case.encoder)}
        answers.append(([name for name in names if name not in found], sorted(found)))
    return answers


@pytest.mark.parametrize("modes", [[None, "fast"], pytest.param(["lean", "sharded"], marks=pytest.mark.slow)])
def test_a_weight_that_no_rank_touches_has_no_gradient_as_on_one_device(two_ranks: RankPool, modes: list[Any]) -> None:
    case, loss = case_of(Sharded(encoder="clip")), make("both directions", 1024)
    reference_step(case.pools, case.structure, loss)
    expected = sorted(name.removeprefix("0.") for name in gradients(case.encoder) if name.startswith("0."))
    for of_rank in two_ranks.run(idle_on, modes):
        for without, found in of_rank:
            assert found == expected, "what one rank alone touches has its gradient on all"
            assert {"idle.weight", "idle.bias"} <= set(without), "AdamW would let it decay"


@pytest.mark.slow
def test_gradients_of_several_batches_add_up_in_the_shards(two_ranks: RankPool) -> None:
    settings = [Sharded("fast", retain=0.5), Sharded("sharded")]
    expected = expected_of(settings[0])[1]
    for of_rank in two_ranks.run(accumulated_on, settings):
        for found in of_rank:
            assert_same_gradients(found, expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_neither_retention_nor_grouping_nor_adapters_nor_the_deal_change_a_gradient(
    two_ranks: RankPool, mode: Any
) -> None:
    base = Sharded(mode)
    assert_equals_one_shot(
        two_ranks,
        [
            base,
            replace(base, retain=0.5, steps=2),
            replace(base, retain=1.0, assignment="even"),
            replace(base, factor=1, retain=0.5),
            replace(base, checkpointing=True),
            replace(base, encoder="lora", retain=0.5),
            replace(base, assignment="nothing"),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_towers_may_be_called_unevenly_and_be_frozen(two_ranks: RankPool, mode: Any) -> None:
    base = Sharded(mode, encoder="clip")
    assert_equals_one_shot(
        two_ranks,
        [
            base,
            replace(base, assignment="queries apart"),
            replace(base, retain=0.5),
            replace(base, freeze="text_model"),
            replace(base, freeze="vision", assignment="queries apart"),
            replace(base, encoder="open_clip", retain=0.5),
        ],
    )


def dropout_on(rank: int, settings: list[Sharded]) -> list[Any]:
    """Do each step replicated and sharded, under the same assignment and the same seed."""
    return [(step_on(rank, replace(each, mode=None)), step_on(rank, each)) for each in settings]


@pytest.mark.slow
def test_dropout_draws_the_masks_of_the_same_deal_replicated(two_ranks: RankPool) -> None:
    settings = [
        Sharded("fast", dropout=0.1, retain=0.5),
        Sharded("lean", dropout=0.1),
        Sharded("lean", encoder="lora", dropout=0.1),
        Sharded("sharded", encoder="clip", dropout=0.1),
    ]
    for answer in two_ranks.run(dropout_on, settings):
        for (plain, expected, _), (result, found, _) in answer:
            assert result.loss == pytest.approx(plain.loss, rel=1e-12)
            assert result.replay_drift == plain.replay_drift == 0
            assert_same_gradients(found, expected, 1e-10)


@pytest.mark.slow
def test_mixed_precision_adds_gradients_up_in_float32(two_ranks: RankPool) -> None:
    runs = [("bert", (None, *MODES)), ("open_clip", (None, "fast"))]
    for encoder, modes in runs:
        exact = expected_of(Sharded(encoder=encoder))[1]
        settings = [Sharded(mode, encoder=encoder, mixed=True, retain=0.5, chunk_rows=2) for mode in modes]
        for answer in two_ranks.run(steps_on, settings):
            plain_result, plain, _ = answer[0]
            assert difference(plain, exact) > 1e-5  # it is mixed
            for result, found, _ in answer[1:]:
                assert result.loss == pytest.approx(plain_result.loss, rel=1e-6)
                assert all(each.dtype == torch.float32 for name, each in found.items() if name.startswith("0."))
                assert difference(found, plain) < 1e-6


def difference(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the difference of all gradients of the encoder together, relative to their norm."""
    names = [name for name in other if name.startswith("0.")]
    off = sum((found[name].double() - other[name].double()).square().sum().item() for name in names)
    return float((off / sum(other[name].double().square().sum().item() for name in names)) ** 0.5)
