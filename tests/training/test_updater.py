"""The optimizer and what belongs to it: schedule, decay, clipping, loss scaling, resuming from a checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from vembed.losses.infonce import InfoNCE
from vembed.plan.keys import OptimisationKeys
from vembed.training.optimizer import Optimizer, Schedule

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
) -> tuple[Network, InfoNCE, Optimizer]:
    network, loss = Network(), InfoNCE(temperature=0.1, learn_temperature=learn_temperature)
    encoder: Any = network
    return network, loss, Optimizer(encoder, loss, KEYS.model_copy(update=keys), schedule, loss_scaling=loss_scaling)


def give_gradients(optimizer: Optimizer, value: float = 1.0) -> None:
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, value)


def update(optimizer: Optimizer, step: int) -> None:
    """End a step as the loop does, once its gradients are accepted."""
    optimizer.step(optimizer.learning_rate(step))
    optimizer.zero_grad()
    optimizer.scale.update(overflowed=False)


def discard(optimizer: Optimizer) -> None:
    """End a step as the loop does, once its gradients have overflowed."""
    optimizer.zero_grad()
    optimizer.scale.update(overflowed=True)


@pytest.mark.parametrize(("kind", "theirs"), [("cosine", "cosine"), ("linear", "linear"),
                                             ("constant", "constant_with_warmup")])  # fmt: skip
@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 20), (10, 10), (1, 1)])
def test_the_schedule_is_that_of_transformers(
    kind: Literal["cosine", "linear", "constant"], theirs: str, warmup: int, steps: int
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(theirs, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    schedule = Schedule(0.3, kind, warmup, steps)
    for step in range(steps):
        assert schedule.learning_rate(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-15), step
        optimizer.step()
        scheduler.step()


def test_the_schedule_rises_to_its_peak_and_falls_to_nothing() -> None:
    rates = [Schedule(1.0, "cosine", 4, 100).learning_rate(step) for step in range(100)]
    assert rates[:5] == [0, 0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.001


def test_update_sets_the_rate_of_the_step() -> None:
    _, _, optimizer = make(schedule=Schedule(1.0, "linear", 2, 6))
    for step, expected in enumerate([0, 0.5, 1.0, 0.75, 0.5, 0.25]):
        give_gradients(optimizer)
        update(optimizer, step)
        assert [group["lr"] for group in optimizer.adamw.param_groups] == [expected] * 3


def test_weight_decay_acts_on_matrices_alone() -> None:
    network, loss, optimizer = make(schedule=Schedule(0.5, "constant", 0, 10))
    before = {name: value.clone() for name, value in network.named_parameters()}
    scale = loss.log_scale.clone()
    give_gradients(optimizer, 0.0)
    update(optimizer, 0)
    torch.testing.assert_close(network.layer.weight, before["layer.weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(network.layer.bias, before["layer.bias"])
    assert torch.equal(network.norm.weight, before["norm.weight"])
    assert torch.equal(network.frozen, before["frozen"])
    assert torch.equal(loss.log_scale, scale)


def test_the_temperature_is_trained_when_it_is_learned_and_kept_within_bounds() -> None:
    _, loss, optimizer = make(schedule=Schedule(100.0, "constant", 0, 10))
    give_gradients(optimizer, -1.0)
    update(optimizer, 0)
    assert loss.temperature == pytest.approx(0.01)
    _, fixed, optimizer = make(learn_temperature=False)
    assert len(optimizer.parameters) == 4
    give_gradients(optimizer, -1.0)
    update(optimizer, 0)
    assert fixed.temperature == pytest.approx(0.1)


@pytest.mark.parametrize("limit", [0.5, 1e6, None])
def test_clipping_brings_the_global_norm_down_and_returns_that_before(limit: float | None) -> None:
    _, _, optimizer = make(max_grad_norm=limit)
    give_gradients(optimizer, 2.0)
    count = sum(parameter.numel() for parameter in optimizer.parameters)
    norm = optimizer.clip_gradients()
    assert norm == pytest.approx(2.0 * math.sqrt(count))
    after = math.sqrt(sum(p.grad.pow(2).sum().item() for p in optimizer.parameters if p.grad is not None))
    assert after == pytest.approx(min(norm, limit or math.inf), rel=1e-5)


def test_clipping_is_that_of_torch_bit_for_bit() -> None:
    network, loss, optimizer = make(max_grad_norm=0.7)
    twin, other_loss, _ = make()
    torch.manual_seed(3)
    for parameter, other in zip(
        [*network.parameters(), *loss.parameters()], [*twin.parameters(), *other_loss.parameters()], strict=True
    ):
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
    expected = nn.utils.clip_grad_norm_([*twin.parameters(), *other_loss.parameters()], 0.7)
    assert optimizer.clip_gradients() == expected.item()
    assert network.layer.weight.grad is not None
    assert twin.layer.weight.grad is not None
    assert torch.equal(network.layer.weight.grad, twin.layer.weight.grad)


def test_module_norms_are_of_each_module_and_of_the_loss() -> None:
    network, _, optimizer = make()
    assert optimizer.module_norms() == {}
    give_gradients(optimizer, 1.0)
    network.norm.bias.grad = None
    assert optimizer.module_norms() == pytest.approx(
        {"encoder.layer": math.sqrt(15), "encoder.norm": math.sqrt(3), "loss": 1.0}
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_gradient_is_still_seen_in_its_own_module_after_the_norm_was_taken(bad: float) -> None:
    network, _, optimizer = make(max_grad_norm=1.0)
    give_gradients(optimizer, 1.0)
    assert network.norm.weight.grad is not None
    network.norm.weight.grad[1] = bad
    assert not math.isfinite(optimizer.clip_gradients())
    norms = optimizer.module_norms()
    assert norms.pop("encoder.norm") == pytest.approx(bad, nan_ok=True)
    assert norms == pytest.approx({"encoder.layer": math.sqrt(15), "loss": 1.0})


def test_without_loss_scaling_there_is_no_scale_and_no_overflow() -> None:
    _, _, optimizer = make()
    assert optimizer.scale.value == 1.0
    assert not optimizer.scale.overflowed(math.inf)


def test_with_loss_scaling_the_step_is_that_of_unscaled_gradients() -> None:
    plain, _, optimizer = make(max_grad_norm=0.3)
    scaled, _, scaling = make(max_grad_norm=0.3, loss_scaling=True)
    assert scaling.scale.value == 2.0**16
    give_gradients(optimizer, 0.25)
    give_gradients(scaling, 0.25 * scaling.scale.value)
    assert scaling.clip_gradients() == optimizer.clip_gradients()
    update(optimizer, 0)
    update(scaling, 0)
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
        discard(optimizer)
        assert network.layer.weight.grad is None
    assert scales == [2.0**power for power in range(16, 0, -1)]
    assert optimizer.scale.value == 1.0
    assert torch.equal(network.layer.weight, before)
    assert not optimizer.scale.overflowed(1.0)


@pytest.mark.parametrize("loss_scaling", [False, True])
def test_restored_state_goes_on_bit_for_bit(loss_scaling: bool) -> None:
    options: dict[str, Any] = {"loss_scaling": loss_scaling, "max_grad_norm": 0.5}
    schedule = Schedule(0.05, "cosine", 2, 12)

    def train(network: Network, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            for parameter in optimizer.parameters:
                parameter.grad = torch.randn_like(parameter) * (math.inf if step == 2 and loss_scaling else 1.0)
            norm = optimizer.clip_gradients()
            if optimizer.scale.overflowed(norm):
                discard(optimizer)
            else:
                update(optimizer, step)

    whole, whole_loss, optimizer = make(schedule, **options)
    train(whole, optimizer, range(12))

    first, first_loss, optimizer = make(schedule, **options)
    train(first, optimizer, range(6))
    tensors, packed = optimizer.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    packed = json.loads(json.dumps(packed))

    second, second_loss, resumed = make(schedule, **options)
    second.load_state_dict(first.state_dict())
    second_loss.load_state_dict(first_loss.state_dict())
    resumed.restore(tensors, packed)
    train(second, resumed, range(6, 12))
    assert resumed.scale.value == (2.0**15 if loss_scaling else 1.0)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert torch.equal(whole_loss.log_scale, second_loss.log_scale)
    for name, tensor in optimizer.state()[0].items():
        assert resumed.state()[0][name].shape == tensor.shape

    forgotten, forgotten_loss, fresh = make(schedule, **options)
    forgotten.load_state_dict(first.state_dict())
    forgotten_loss.load_state_dict(first_loss.state_dict())
    train(forgotten, fresh, range(6, 12))
    assert not torch.equal(whole.layer.weight, forgotten.layer.weight), "without its state the optimizer goes elsewhere"
