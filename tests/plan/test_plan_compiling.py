"""Whether layers are compiled: where it pays back, and where it can."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import DATA, model, planned, reason

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.plan.devices import GIB, Machine
from vembed.plan.memory import ModelSize
from vembed.plan.plan import make_plan


@pytest.fixture
def proven_on_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let auto compile on one class of devices, as it will where the rows of a proof held."""
    monkeypatch.setattr("vembed.plan.plan.PROVEN_ON", frozenset({"A100"}))


@pytest.mark.usefixtures("proven_on_a100")
@pytest.mark.parametrize(("devices", "compiles"), [("1xA100-80GB", True), ("1xH100-80GB", False)])
def test_auto_compiles_on_a_class_of_devices_that_it_is_proven_on(devices: str, compiles: bool) -> None:
    plan = planned(devices, 1.1e8, "batch_size=4096", "max_steps=200000")
    assert plan.compiles == compiles
    assert reason(plan, "compile: ").startswith(
        "compile: on: " if compiles else "compile: off, as compiled layers aren't "
    )


def test_no_device_is_proven_yet_so_auto_compiles_nowhere() -> None:
    plan = planned("1xA100-80GB", 1.1e8, "batch_size=4096", "max_steps=200000")
    assert not plan.compiles
    assert "compile: true takes about 180 s and may save about " in reason(plan, "compile: ")


@pytest.mark.usefixtures("proven_on_a100")
def test_auto_compiles_where_a_run_is_long_enough_to_pay_it_back() -> None:
    long = planned("1xA100-80GB", 1.1e8, "batch_size=4096", "max_steps=20000")
    short = planned("1xA100-80GB", 1.1e8, "batch_size=4096", "max_steps=100")
    assert long.compiles
    assert not short.compiles
    assert long.to_json()["compile"] is True
    for plan, word in ((long, "on"), (short, "off")):
        (said,) = [each for each in plan.reasons if each.startswith("compile: ")]
        assert said.startswith(f"compile: {word}: 3 kinds of graphs take about 180 s to compile and save about ")
        assert f"(15% of {plan.steps.total:,} steps of about " in said


def test_the_users_word_wins() -> None:
    assert planned("1xA100-80GB", 1.1e8, "max_steps=1", "compile=true").compiles
    off = planned("1xA100-80GB", 1.1e8, "batch_size=4096", "max_steps=20000", "compile=false")
    assert not off.compiles
    assert not any(each.startswith("compile: ") for each in off.reasons)


FLAT = ModelSize.by_formula(
    num_parameters=10**9, num_trainable=10**9, bytes_per_value=4, dimension=64, max_length=64,
    activation_bytes_per_token=1000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "size", "overrides", "why"),
    [
        ("1xA100-80GB", FLAT, (), "the model has no list of equal layers"),
        ("1xA100-80GB", model(1e9), ("load_in_4bit=true", "use_lora=true"), "weights of 4 bits have "),
        ("4xA100-80GB", model(1e9), ("use_fsdp=true",), "sharded layers hold weights in bfloat16 beside gradients in "),
        ("1xA100-80GB", replace(model(1e9), bytes_per_value=2), ("torch_dtype=bfloat16",), "weights in bfloat16 have "),
    ],
    ids=["no layers", "4 bits", "sharded", "bfloat16 weights"],
)  # fmt: skip
def test_what_cant_be_compiled_is_left_by_auto_and_refused_when_asked_for(
    devices: str, size: ModelSize, overrides: tuple[str, ...], why: str
) -> None:
    plan = planned(devices, size, "max_steps=1000000", *overrides, data=DATA)
    assert not plan.compiles
    assert reason(plan, "compile: ").startswith(f"compile: off, as {why}")
    with pytest.raises(ConfigError, match=f"^compile: {why}.*; set compile to auto or false"):
        planned(devices, size, "compile=true", *overrides)


def test_tf32_says_where_it_has_no_effect() -> None:
    assert not any("loss_precision" in each for each in planned("1xA100-80GB", 1.1e8, "loss_precision=tf32").reasons)
    config = load_config(None, ["model_name=m", "loss_precision=tf32"]).config
    machine = Machine("cpu", "the CPU", 16 * GIB, 8, fast_bf16=False)
    expected = "loss_precision tf32 has no effect on the CPU: only CUDA devices have TF32"
    assert reason(make_plan(config, machine, model(1e8), DATA), "loss_precision") == expected


@pytest.mark.usefixtures("proven_on_a100")
def test_layers_whose_own_copies_find_no_room_are_not_compiled() -> None:
    """Mixed precision casts once a step; a compiled layer keeps a copy with each kept call."""
    size = model(1.1e8)
    (stack,) = size.towers
    heavy = replace(size, towers=(replace(stack, cast_bytes=8 * GIB),), adapted=None)
    long = ("batch_size=4096", "max_steps=20000")
    plan = planned("1xA100-80GB", heavy, *long)
    assert plan.chunks.kept_share > 0
    assert not plan.compiles
    assert reason(plan, "compile").startswith("compile: off, as kept calls of compiled layers hold ")
    assert planned("1xA100-80GB", heavy, *long, "retain=0").compiles
    asked = planned("1xA100-80GB", heavy, *long, "compile=true")
    assert asked.compiles
    assert reason(asked, "compile").endswith("are to spare: set retain: 0")
