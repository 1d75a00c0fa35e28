"""Optimizer state by name: bit for bit, in any order of parameters, refused for any other model."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import STAMP
from torch import Tensor, nn
from torch.optim import Optimizer

from vembed.checkpoint.format import InvalidCheckpointError
from vembed.checkpoint.manager import CheckpointManager
from vembed.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from vembed.errors import ConfigError


def tiny_model(*, width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2, bias=False)).to(dtype)


def names_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def adamw(model: nn.Module) -> Optimizer:
    """AdamW with two groups, as training has: no decay for norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, plain = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 4, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


Saved = tuple[dict[str, Tensor], dict[str, Any]]


def trained(make: Callable[[nn.Module], Optimizer] = adamw, *, steps: int = 1) -> tuple[Any, Optimizer, Saved]:
    """Return a model, its optimizer, and what is saved of that."""
    model = tiny_model()
    optimizer = make(model)
    train(model, optimizer, range(steps))
    return model, optimizer, pack_optimizer(optimizer, names_of(model))


def unpack(model: nn.Module, optimizer: Optimizer, saved: Saved) -> None:
    unpack_optimizer(optimizer, names_of(model), tensors=saved[0], packed=saved[1])


def assert_same_state(left: Optimizer, right: Optimizer, names: dict[Tensor, str], other: dict[Tensor, str]) -> None:
    left_tensors, left_packed = pack_optimizer(left, names)
    right_tensors, right_packed = pack_optimizer(right, other)
    assert json.loads(json.dumps(left_packed)) == json.loads(json.dumps(right_packed))
    assert left_tensors.keys() == right_tensors.keys()
    for key, tensor in left_tensors.items():
        assert tensor.dtype == right_tensors[key].dtype
        assert torch.equal(tensor, right_tensors[key])


MAKERS: list[Callable[[nn.Module], Optimizer]] = [
    adamw,
    lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=True),
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    lambda model: torch.optim.Adafactor(model.parameters()),
    lambda model: torch.optim.RMSprop(model.parameters()),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_resumed_optimizer_takes_the_same_steps_as_one_that_never_stopped(
    tmp_path: Path, make: Callable[[nn.Module], Optimizer]
) -> None:
    straight, straight_optimizer, (tensors, packed) = trained(make, steps=3)
    manager = CheckpointManager(tmp_path)
    parts = {"model": straight.state_dict(), "optimizer": tensors}
    manager.save(3, tensors=parts, state={"optimizer": packed}, stamp=STAMP, best=False)

    resumed = tiny_model()
    resumed_optimizer = make(resumed)
    train(resumed, resumed_optimizer, range(7, 9))
    loaded = manager.load("auto")
    assert loaded is not None
    resumed.load_state_dict(dict(loaded.tensors["model"]))
    saved: Any = loaded.state["optimizer"]
    unpack(resumed, resumed_optimizer, (dict(loaded.tensors["optimizer"]), saved))
    assert_same_state(straight_optimizer, resumed_optimizer, names_of(straight), names_of(resumed))

    before = copy.deepcopy(straight.state_dict())
    train(straight, straight_optimizer, range(3, 6))
    train(resumed, resumed_optimizer, range(3, 6))
    assert_same_state(straight_optimizer, resumed_optimizer, names_of(straight), names_of(resumed))
    for name, tensor in straight.state_dict().items():
        assert not torch.equal(tensor, before[name])
        assert torch.equal(tensor, resumed.state_dict()[name])


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_that_is_transposed_in_memory_takes_the_same_steps_after_a_resume(tmp_path: Path, fused: bool) -> None:
    def begin() -> tuple[nn.Sequential, Optimizer]:
        model = tiny_model()
        for layer in (model[0], model[2]):
            layer.weight.data = layer.weight.data.t().contiguous().t()
        assert not model[0].weight.is_contiguous()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)

    straight, straight_optimizer = begin()
    train(straight, straight_optimizer, range(2))
    tensors, packed = pack_optimizer(straight_optimizer, names_of(straight))
    parts = {"model": straight.state_dict(), "optimizer": tensors}
    CheckpointManager(tmp_path).save(2, tensors=parts, state={"optimizer": packed}, stamp=STAMP, best=False)
    loaded: Any = CheckpointManager(tmp_path).load("auto")
    resumed, resumed_optimizer = begin()
    resumed.load_state_dict(loaded.tensors["model"])
    unpack(resumed, resumed_optimizer, (loaded.tensors["optimizer"], loaded.state["optimizer"]))
    for model, optimizer in ((straight, straight_optimizer), (resumed, resumed_optimizer)):
        train(model, optimizer, range(2, 4))
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_state_in_another_dtype_than_the_parameters_comes_back_in_its_own() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    fresh_model = tiny_model(dtype=torch.bfloat16)
    fresh = adamw(fresh_model)
    unpack(fresh_model, fresh, pack_optimizer(optimizer, names_of(model)))
    state = fresh.state[next(fresh_model.parameters())]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.bfloat16)
    assert_same_state(optimizer, fresh, names_of(model), names_of(fresh_model))


def test_hyper_parameters_come_back_and_those_of_a_scheduler_too() -> None:
    model = tiny_model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    train(model, optimizer, range(1))
    scheduler.step()
    tensors, packed = pack_optimizer(optimizer, names_of(model))
    fresh_model = tiny_model()
    fresh = torch.optim.AdamW(
        [{"params": [p for p in fresh_model.parameters() if p.dim() > 1]},
         {"params": [p for p in fresh_model.parameters() if p.dim() == 1]}],
        lr=9.0,
    )  # fmt: skip
    unpack_optimizer(fresh, names_of(fresh_model), tensors=tensors, packed=json.loads(json.dumps(packed)))
    for group, expected in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        assert settings == {key: value for key, value in expected.items() if key != "params"}
        assert isinstance(group["betas"], tuple)
        assert group["lr"] == 1.5e-3
        assert group["initial_lr"] == 3e-3


def test_state_follows_names_when_the_order_of_parameters_changes() -> None:
    _, _, saved = trained(steps=2)
    turned = tiny_model()
    groups = [[p for p in [*turned.parameters()][::-1] if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    unpack(turned, optimizer, saved)
    for parameter, name in names_of(turned).items():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], saved[0][f"exp_avg/{name}"])


def test_what_never_had_a_gradient_has_no_state_before_or_after() -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].weight.requires_grad_(False)
    train(model, optimizer, range(1))
    saved = pack_optimizer(optimizer, names_of(model))
    assert "exp_avg/0.weight" not in saved[0]
    assert "exp_avg/0.bias" in saved[0]
    fresh_model, fresh, _ = trained(lambda model: torch.optim.AdamW(model.parameters()))
    unpack(fresh_model, fresh, saved)
    assert fresh_model[0].weight not in fresh.state
    assert fresh_model[0].bias in fresh.state

    untouched, never, nothing = trained(steps=0)
    assert nothing[0] == {}
    unpack(untouched, never, nothing)
    assert len(never.state) == 0


def test_training_on_changes_nothing_in_what_was_unpacked() -> None:
    _, _, (tensors, packed) = trained()
    stored = {key: tensor.clone() for key, tensor in tensors.items()}
    model = tiny_model()
    resumed = adamw(model)
    unpack(model, resumed, (stored, packed))
    train(model, resumed, range(1, 3))
    assert all(torch.equal(stored[key], tensors[key]) for key in tensors)


def half_frozen(model: nn.Sequential) -> nn.Sequential:
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "optimizer_of", "message"),
    [
        (lambda: tiny_model(width=6), adamw, r"Other shape: 0.weight, 2.weight"),
        (tiny_model, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), r"holds AdamW, this run uses SGD"),
        (tiny_model, lambda model: torch.optim.AdamW(model.parameters()), r"holds 2 parameter groups, this run has 1"),
        (lambda: half_frozen(tiny_model()), adamw, r"Only in the checkpoint: 2.weight"),
        (lambda: nn.Sequential(*tiny_model(), nn.Linear(2, 2)), adamw, r"Only in this run: 3.weight"),
    ],
)
def test_state_of_another_optimizer_is_refused_and_nothing_changes(
    make: Callable[[], nn.Module], optimizer_of: Callable[[nn.Module], Optimizer], message: str
) -> None:
    _, _, saved = trained()
    model = make()
    other = optimizer_of(model)
    train(model, other, range(1))
    before = copy.deepcopy(pack_optimizer(other, names_of(model))[0])
    with pytest.raises(ConfigError, match=message):
        unpack(model, other, saved)
    after = pack_optimizer(other, names_of(model))[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_missing_and_unexpected_tensors_are_refused() -> None:
    model, _, (tensors, packed) = trained()
    fewer = {key: tensor for key, tensor in tensors.items() if key != "exp_avg/0.weight"}
    more = tensors | {"exp_avg/9.weight": torch.ones(1)}
    for wrong, message in ((fewer, "Missing: exp_avg/0.weight"), (more, "Not expected: exp_avg/9.weight")):
        with pytest.raises(InvalidCheckpointError, match=message):
            unpack(model, adamw(model), (wrong, packed))
    unpack(model, adamw(model), (tensors, packed))


def test_a_parameter_without_a_name_and_a_value_without_json_are_refused() -> None:
    model, optimizer, _ = trained()
    names = {parameter: name for parameter, name in names_of(model).items() if name != "0.weight"}
    with pytest.raises(ValueError, match=r"shape \(8, 4\) has no name"):
        pack_optimizer(optimizer, names)
    tensor_lr = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="lr is a Tensor"):
        pack_optimizer(tensor_lr, names_of(model))
