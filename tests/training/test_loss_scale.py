"""The loss scale of float16 training goes the way of torch's GradScaler, without a device."""

from __future__ import annotations

import json

import pytest
import torch

from vembed.training.optimizer import GROWTH_STEPS, LEAST_SCALE, LossScale


def test_it_goes_the_way_of_torchs_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", growth_interval=GROWTH_STEPS)
    ours = LossScale(enabled=True)
    parameter = torch.nn.Parameter(torch.zeros(1))
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
    assert len(scales) > 3


def test_a_resumed_scale_grows_at_the_step_at_which_it_would_have_grown() -> None:
    scale = LossScale(enabled=True)
    for _ in range(GROWTH_STEPS - 1):
        scale.update(overflowed=False)
    resumed = LossScale(enabled=True)
    resumed.restore(json.loads(json.dumps(scale.state())))
    assert resumed.value == scale.value == 2.0**16
    resumed.update(overflowed=False)
    assert resumed.value == 2.0**17


@pytest.mark.parametrize("enabled", [False, True])
def test_it_never_falls_below_one_and_stays_one_where_nothing_is_scaled(enabled: bool) -> None:
    scale = LossScale(enabled=enabled)
    for _ in range(40):
        scale.update(overflowed=True)
    assert scale.value == LEAST_SCALE == 1.0
    assert bool(scale.state()) == enabled
