"""The optimizer and what belongs to it: schedule, decay, clipping, loss scaling, resuming from a checkpoint."""

from __future__ import annotations

import json
import math
import weakref
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from vembed.losses.infonce import InfoNCE
from vembed.plan.keys import OptimisationKeys
from vembed.training.optimizer import GROWTH_STEPS, LEAST_SCALE, LossScale, Optimizer, Schedule

KEYS = OptimisationKeys(weight_decay=0.1, adam_beta2=0.99, max_grad_norm=None)
CONSTANT = Schedule(0.01, "constant", 0, 100)


class Network(nn.Module):
    """A matrix, two vectors, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def make(
    schedule: Schedule = CONSTANT, *, learn_temperature: bool = True, loss_scaling: bool = False, **keys: Any
) -> tuple[Any, InfoNCE, Optimizer]:
    network: Any = Network()
    loss = InfoNCE(temperature=0.1, learn_temperature=learn_temperature)
    return network, loss, Optimizer(network, loss, KEYS.model_copy(update=keys), schedule, loss_scaling=loss_scaling)


def give_gradients(optimizer: Optimizer, value: float) -> None:
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, value)


def end_step(optimizer: Optimizer, step: int, *, overflowed: bool = False) -> None:
    """End a step as the loop does, once its gradients are accepted or have overflowed."""
    if not overflowed:
        optimizer.step(optimizer.schedule.learning_rate(step))
    optimizer.zero_grad()
    optimizer.scale.update(overflowed=overflowed)


@pytest.mark.parametrize(("kind", "theirs"), [("cosine", "cosine"), ("linear", "linear"),
                                             ("constant", "constant_with_warmup")])  # fmt: skip
@pytest.mark.parametrize(("warmup", "steps"), [(3, 20), (0, 7), (10, 10), (1, 1)])
def test_the_schedule_is_that_of_transformers_and_sets_the_rate_of_every_group(
    kind: Literal["cosine", "linear", "constant"], theirs: str, warmup: int, steps: int
) -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(theirs, sgd, num_warmup_steps=warmup, num_training_steps=steps)
    _, _, optimizer = make(Schedule(0.3, kind, warmup, steps))
    for step in range(steps):
        give_gradients(optimizer, 1.0)
        end_step(optimizer, step)
        expected = pytest.approx(scheduler.get_last_lr()[0], abs=1e-15)
        assert [group["lr"] for group in optimizer.adamw.param_groups] == [expected] * 3, step
        sgd.step()
        scheduler.step()


def test_weight_decay_acts_on_matrices_alone() -> None:
    network, loss, optimizer = make(Schedule(0.5, "constant", 0, 10))
    before = {name: value.clone() for name, value in [*network.named_parameters(), *loss.named_parameters()]}
    give_gradients(optimizer, 0.0)
    end_step(optimizer, 0)
    torch.testing.assert_close(network.layer.weight, before.pop("layer.weight") * (1 - 0.5 * 0.1))
    after = dict([*network.named_parameters(), *loss.named_parameters()])
    assert before.keys() == {"layer.bias", "norm.weight", "norm.bias", "frozen", "log_scale"}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_temperature_is_trained_when_it_is_learned_and_kept_within_bounds() -> None:
    for learned, expected in ((True, 0.01), (False, 0.1)):
        _, loss, optimizer = make(Schedule(100.0, "constant", 0, 10), learn_temperature=learned)
        assert len(optimizer.parameters) == 4 + learned
        give_gradients(optimizer, -1.0)
        end_step(optimizer, 0)
        assert loss.temperature == pytest.approx(expected)


@pytest.mark.parametrize("limit", [0.7, 1e6, None])
def test_clipping_is_that_of_torch_bit_for_bit_and_returns_the_norm_before(limit: float | None) -> None:
    network, loss, optimizer = make(max_grad_norm=limit)
    twin, other_loss, _ = make()
    torch.manual_seed(3)
    twins = [*twin.parameters(), *other_loss.parameters()]
    for parameter, other in zip([*network.parameters(), *loss.parameters()], twins, strict=True):
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
    norm = optimizer.clip_gradients()
    assert norm == nn.utils.clip_grad_norm_(twins, limit or math.inf).item() > 0.7
    assert torch.equal(network.layer.weight.grad, twin.layer.weight.grad)


def test_module_norms_are_of_each_module_and_of_the_loss() -> None:
    network, _, optimizer = make()
    assert optimizer.module_norms() == {}
    give_gradients(optimizer, 1.0)
    network.norm.bias.grad = None
    expected = {"encoder.layer": math.sqrt(15), "encoder.norm": math.sqrt(3), "loss": 1.0}
    assert optimizer.module_norms() == pytest.approx(expected)


def test_module_norms_hold_the_gradients_of_one_module_at_a_time_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float64 copy of all gradients would take twice the memory of the model, on a device that is full."""
    network, _, optimizer = make()
    give_gradients(optimizer, 1.0)
    double, most = torch.Tensor.double, 0
    copies: list[weakref.ref[torch.Tensor]] = []

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        copy = double(tensor)
        copies.append(weakref.ref(copy))
        most = max(most, sum(alive.numel() for reference in copies if (alive := reference()) is not None))
        return copy

    monkeypatch.setattr(torch.Tensor, "double", watched)
    optimizer.module_norms()
    largest = sum(parameter.numel() for parameter in network.layer.parameters())
    assert sum(parameter.numel() for parameter in optimizer.parameters) > largest
    assert 0 < most <= largest


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_gradient_is_still_seen_in_its_own_module_after_the_norm_was_taken(bad: float) -> None:
    network, _, optimizer = make(max_grad_norm=1.0)
    give_gradients(optimizer, 1.0)
    network.norm.weight.grad[1] = bad
    assert not math.isfinite(optimizer.clip_gradients())
    expected = {"encoder.layer": math.sqrt(15), "encoder.norm": bad, "loss": 1.0}
    assert optimizer.module_norms() == pytest.approx(expected, nan_ok=True)


def test_with_loss_scaling_the_step_is_that_of_unscaled_gradients() -> None:
    plain, _, optimizer = make(max_grad_norm=0.3)
    scaled, _, scaling = make(max_grad_norm=0.3, loss_scaling=True)
    assert scaling.scale.value == 2.0**16
    give_gradients(optimizer, 0.25)
    give_gradients(scaling, 0.25 * scaling.scale.value)
    assert scaling.clip_gradients() == optimizer.clip_gradients()
    end_step(optimizer, 0)
    end_step(scaling, 0)
    assert torch.equal(plain.layer.weight, scaled.layer.weight)


def test_an_overflow_halves_the_scale_until_it_is_no_longer_the_scales_fault() -> None:
    network, _, optimizer = make(loss_scaling=True)
    before = network.layer.weight.clone()
    scales = []
    for _ in range(40):
        give_gradients(optimizer, math.inf)
        norm = optimizer.clip_gradients()
        assert not math.isfinite(norm)
        if not optimizer.scale.overflowed(norm):
            break
        scales.append(optimizer.scale.value)
        end_step(optimizer, 0, overflowed=True)
        assert network.layer.weight.grad is None
    assert scales == [2.0**power for power in range(16, 0, -1)]
    assert torch.equal(network.layer.weight, before)
    assert not optimizer.scale.overflowed(1.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_scale_never_falls_below_one_and_stays_one_where_nothing_is_scaled(enabled: bool) -> None:
    scale = LossScale(enabled=enabled)
    assert scale.overflowed(math.inf) == enabled
    for _ in range(40):
        scale.update(overflowed=True)
    assert scale.value == LEAST_SCALE == 1.0
    assert bool(scale.state()) == enabled


def test_the_scale_goes_the_way_of_torchs_scaler_and_a_resumed_one_goes_on_as_it_would_have_gone() -> None:
    theirs = torch.amp.GradScaler("cpu", growth_interval=GROWTH_STEPS)
    ours = LossScale(enabled=True)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs.scale(torch.ones(()))
    scales = set()
    for step in range(3 * GROWTH_STEPS):
        overflowed = step in (0, 1, 7, GROWTH_STEPS + 3)
        parameter.grad = torch.tensor([torch.inf if overflowed else 1.0])
        theirs.unscale_(optimizer)
        theirs.update()
        ours.update(overflowed=overflowed)
        scales.add(ours.value)
        assert ours.value == theirs.get_scale(), step
        if step in (1, GROWTH_STEPS + 7):  # few and many good steps after an overflow
            state = json.loads(json.dumps(ours.state()))
            ours = LossScale(enabled=True)
            ours.restore(state)
    assert len(scales) > 3


@pytest.mark.parametrize("loss_scaling", [False, True])
def test_restored_state_goes_on_bit_for_bit(loss_scaling: bool) -> None:
    Made = tuple[Any, InfoNCE, Optimizer]

    def begin(other: Made | None = None) -> Made:
        """Make a network, a loss and an optimizer, with the weights of others."""
        made = make(Schedule(0.05, "cosine", 2, 12), loss_scaling=loss_scaling, max_grad_norm=0.5)
        for mine, theirs in zip(made[:2], (other or made)[:2], strict=True):
            mine.load_state_dict(theirs.state_dict())
        return made

    def train(optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            for parameter in optimizer.parameters:
                parameter.grad = torch.randn_like(parameter) * (math.inf if step == 2 and loss_scaling else 1.0)
            norm = optimizer.clip_gradients()
            end_step(optimizer, step, overflowed=optimizer.scale.overflowed(norm))

    whole, first = begin(), begin()
    train(whole[2], range(12))
    train(first[2], range(6))
    tensors, packed = first[2].state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    second, forgotten = begin(first), begin(first)
    second[2].restore(tensors, json.loads(json.dumps(packed)))
    for made in (second, forgotten):
        train(made[2], range(6, 12))
    assert second[2].scale.value == (2.0**15 if loss_scaling else 1.0)
    for mine, theirs in zip(second[:2], whole[:2], strict=True):
        expected = theirs.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in mine.state_dict().items())
    for name, tensor in whole[2].state()[0].items():
        assert torch.equal(second[2].state()[0][name], tensor), name
    assert not torch.equal(whole[0].layer.weight, forgotten[0].layer.weight), "without its state it goes elsewhere"
