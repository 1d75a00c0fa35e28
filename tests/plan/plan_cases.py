"""Models by their size, planned for one device, or for devices that nobody here has."""

from dataclasses import replace
from typing import Any

import pytest

from vembed.config.load import load_config
from vembed.plan.devices import GIB, Machine, parse_devices
from vembed.plan.memory import CallCost, ModelSize, TowerSize
from vembed.plan.plan import Plan, make_plan
from vembed.plan.problem import DataSize

CPU = Machine("cpu", "the CPU", 16 * GIB, 8, fast_bf16=False)
GPU = Machine("cuda", "NVIDIA H200", 139 * GIB, 16, fast_bf16=True)

DATA = DataSize(num_records=100_000, documents_per_query=1.0)
"""Pairs."""

RECORDS = DataSize(num_records=1000, documents_per_query=2.5)
"""Few, with hard negatives."""


def formula(*, max_length: int | None = 256, activation_bytes_per_token: int = 100_000) -> ModelSize:
    """A small model of which only one number per token is known, in float32."""
    return ModelSize.by_formula(
        num_parameters=22_000_000, num_trainable=21_000_000, bytes_per_value=4, dimension=384, max_length=max_length,
        activation_bytes_per_token=activation_bytes_per_token,
    )  # fmt: skip


MINILM = formula()


def plan_here(*overrides: str, machine: Machine = CPU, model: ModelSize = MINILM, data: DataSize = RECORDS) -> Plan:
    """Plan for one device of a machine."""
    batch = [] if any(word.startswith("batch_size=") for word in overrides) else ["batch_size=64"]
    config = load_config(None, ["model_name=m", *batch, *overrides]).config
    return make_plan(config, machine, model, data)


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
