"""Whether rows lie end to end: the user's word where the model can, else where a device is fast at it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from plan_cases import DATA, model, planned, reason

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.plan.devices import GIB, Machine
from vembed.plan.plan import make_plan

if TYPE_CHECKING:
    from vembed.plan.plan import Plan

PACKABLE = replace(model(1e8), why_not_packed="")


def on_a_cpu(*overrides: str) -> Plan:
    machine = Machine(device="cpu", device_name="a CPU", memory_bytes=64 * GIB, num_cores=8, fast_bf16=False)
    return make_plan(load_config(None, ["model_name=m", *overrides]).config, machine, PACKABLE, DATA)


def test_auto_lays_rows_end_to_end_on_an_accelerator_and_pads_them_on_a_cpu() -> None:
    plan = planned("1xA100-80GB", PACKABLE)
    assert plan.packing
    assert plan.to_json()["packing"] is True
    assert reason(plan, "packing") == (
        "packing true: the rows of a call lie end to end instead of being padded to the longest"
    )
    assert not on_a_cpu().packing
    assert reason(on_a_cpu(), "packing").startswith("packing false: a CPU has no fast operator")


def test_auto_says_why_a_model_is_padded_and_true_refuses_it() -> None:
    unproven = replace(PACKABLE, why_not_packed="packing isn't tested for mpnet models")
    plan = planned("1xA100-80GB", unproven)
    assert not plan.packing
    assert reason(plan, "packing") == f"packing false: {unproven.why_not_packed}"
    with pytest.raises(ConfigError, match="packing true: packing isn't tested for mpnet") as refused:
        planned("1xA100-80GB", unproven, "packing=true")
    assert str(refused.value).startswith("packing true: ")
    assert str(refused.value).endswith("; set packing: auto")


def test_the_users_word_wins_and_on_a_cpu_it_has_a_price() -> None:
    assert not planned("1xA100-80GB", PACKABLE, "packing=false").packing
    assert reason(planned("1xA100-80GB", PACKABLE, "packing=true"), "packing").endswith("; as set")
    assert on_a_cpu("packing=true").packing
    price = reason(on_a_cpu("packing=true"), "packing")
    assert "a slow reference, which takes more memory than predicted" in price
    assert "predicted" not in reason(planned("1xA100-80GB", PACKABLE, "packing=true"), "packing")
