"""Models by their number of parameters, planned for devices that nobody here has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vembed.config.load import load_config
from vembed.plan.devices import parse_devices
from vembed.plan.memory import CallCost, ModelSize, TowerSize
from vembed.plan.plan import Plan, make_plan
from vembed.plan.problem import DataSize

DATA = DataSize(num_records=100_000, documents_per_query=1.0)
"""Pairs."""


def tower(parameters: float, trainable: float, *, layers: int, hidden: int, tokens: int) -> TowerSize:
    """A transformer in half precision with attention that stores no weights: 17 values of 2 bytes a layer and token."""
    layer = 17 * hidden * 2.0
    return TowerSize(
        name="text",
        max_tokens=tokens,
        num_parameters=int(parameters),
        num_trainable=int(trainable),
        largest_block=int(parameters / layers),
        saved=CallCost(layers * layer),
        transient=CallCost(layer),
        saved_checkpointed=CallCost(layers * hidden * 2.0),
        transient_checkpointed=CallCost(2 * layer),
        forward_flops=CallCost(2.0 * parameters, 4.0 * hidden * layers),
    )


def model(parameters: float, *, tokens: int = 128, adapters: bool = True) -> ModelSize:
    """A text encoder of that many parameters, with LoRA of rank 16 on every linear layer if wanted."""
    layers, hidden = (12, 768) if parameters < 5e8 else (28, 2048) if parameters < 4e9 else (36, 4096)
    added = 16 * 2 * 7 * hidden * layers

    def sized(total: float, trainable: float) -> ModelSize:
        stack = tower(total, trainable, layers=layers, hidden=hidden, tokens=tokens)
        return ModelSize(int(total), int(trainable), 4, hidden, (stack,), estimated=False)

    plain = sized(parameters, parameters)
    return replace(plain, adapted=sized(parameters + added, added)) if adapters else plain


def planned(
    devices: str, size: ModelSize | float, *overrides: str, data: DataSize = DATA, scaled: bool = False, **options: Any
) -> Plan:
    """Plan for devices such as 4xA100-80GB; unless `scaled`, without the plans for more and fewer of them."""
    config = load_config(None, ["model_name=m", *overrides]).config
    sized = model(size, **options) if isinstance(size, (int, float)) else size
    spread = parse_devices(devices)
    with pytest.MonkeyPatch.context() as patch:
        if not scaled:  # they are most of the work
            patch.setattr("vembed.plan.text.scaling_lines", lambda problem: ())
        return make_plan(config, spread.machine(16), sized, data, devices=spread)


def reason(plan: Plan, start: str) -> str:
    """The one reason that begins so."""
    (found,) = [each for each in plan.reasons if each.startswith(start)]
    return found
