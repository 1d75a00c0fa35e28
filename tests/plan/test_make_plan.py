"""The plan as a pure function: numbers in, decisions and their reasons out."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import CPU, DATA, GPU, RECORDS, formula, model, plan_here, planned, reason

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.plan.devices import GIB, OLDEST_TORCH, Machine
from vembed.plan.memory import ModelSize
from vembed.plan.plan import Plan, make_plan
from vembed.plan.text import explain


@pytest.mark.parametrize(
    ("overrides", "machine", "dtype"),
    [
        *[([], CPU, "float32"), ([], GPU, "bfloat16"), (["bf16=false"], GPU, "float32")],
        *[(["bf16=true"], CPU, "bfloat16"), (["fp16=true"], CPU, "float16"), (["fp16=true"], GPU, "float16")],
        (["torch_dtype=float64"], GPU, "float64"),
    ],
)
def test_precision_is_the_users_word_or_what_the_device_is_fast_at(
    overrides: list[str], machine: Machine, dtype: str
) -> None:
    made = plan_here(*overrides, machine=machine)
    assert made.dtype == dtype
    decided = machine is GPU and not overrides
    assert any(each.startswith("bf16: NVIDIA H200 computes faster") for each in made.reasons) == decided
    emulating = plan_here(*overrides, machine=replace(GPU, device_name="Tesla T4", fast_bf16=False))
    assert any("Tesla T4 only emulates it" in each for each in emulating.reasons) == (not overrides)


@pytest.mark.parametrize(
    ("overrides", "machine", "size"),
    [([], CPU, 1024), ([], GPU, 4096), (["loss_tile_size=77"], CPU, 77), (["loss_tile_size=77"], GPU, 77)],
)
def test_tiles_suit_the_device_unless_their_size_is_given(overrides: list[str], machine: Machine, size: int) -> None:
    assert plan_here(*overrides, machine=machine).loss_tile_size == size


def test_prefixes_hold_a_tile_each_and_leaving_the_whole_dim_out_is_said() -> None:
    whole, partly = plan_here("mrl_dims=[384, 64]"), plan_here("mrl_dims=[64]")
    assert whole.bytes_per_device.loss == plan_here().bytes_per_device.loss + 2 * 64 * 160 * 4
    assert not any("mrl_dims" in each for each in whole.reasons)
    assert reason(partly, "mrl_dims: ").endswith("only its first 64 are trained")


def test_reasons_begin_with_the_strategy_and_hold_the_notes_of_the_data() -> None:
    made = plan_here(data=replace(RECORDS, notes=("3 rows skipped.", "The last batch is smaller.")))
    assert made.reasons[0].startswith("single: one process on one device; without caching it would need")
    assert (
        plan_here("batch_size=2", model=formula(activation_bytes_per_token=1)).why[0]
        == "single: one process on one device"
    )
    assert made.reasons[1:3] == ("3 rows skipped.", "The last batch is smaller.")
    assert made.reasons[3] == "The last batch of each epoch has 40 records instead of 64."
    assert made.to_json()["reasons"] == list(made.reasons)
    assert not [each for each in plan_here("batch_sampling=classes").reasons if "last batch" in each]


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("2.10.1+cu128", True), ("1.13.0", True), ("2.11.0", False), ("2.15.0+cu130", False), ("3.0", False), ("", False)],
)
def test_a_torch_older_than_the_oldest_is_noted_before_all_else(version: str, is_old: bool) -> None:
    made = plan_here(machine=replace(CPU, torch_version=version), data=replace(RECORDS, notes=("3 rows skipped.",)))
    assert made.notes[0].startswith(f"torch {version} is older than 2.11" if is_old else "3 rows skipped.")
    assert ("is older than" in explain(made, facts={})) == is_old
    assert any("is older than" in sentence for sentence in made.to_json()["reasons"]) == is_old


def test_the_oldest_torch_is_the_one_that_pip_keeps_to() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}" in project["dependencies"]


# Packing --------------------------------------------------------------------------------------------------------------


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


# Compiling ------------------------------------------------------------------------------------------------------------


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
        assert f"(15% of {plan.steps.total:,} batches of about " in said


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
