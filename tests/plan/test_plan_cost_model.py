"""What each way costs: bytes by part, seconds, bytes over the wires; and the texts made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from plan_cases import DATA, model, planned, reason, tower

from vembed.config.load import load_config
from vembed.plan.devices import GIB, parse_devices
from vembed.plan.memory import ModelSize
from vembed.plan.plan import make_plan
from vembed.plan.problem import DataSize
from vembed.plan.text import comparison

if TYPE_CHECKING:
    from vembed.plan.cost import Candidate
    from vembed.plan.plan import Plan


def of(plan: Plan, **wanted: object) -> Candidate:
    """The first candidate whose way is so, full fine-tuning without checkpointing unless said otherwise."""
    wanted = {"use_lora": False, "gradient_checkpointing": False, "cpu_offload": False, **wanted}
    return next(
        each for each in plan.candidates if all(getattr(each.way, key) == value for key, value in wanted.items())
    )


def states(candidate: Candidate) -> float:
    sizes = candidate.bytes_per_device
    return (sizes.parameters + sizes.gradients + sizes.optimizer) / 1e9


def test_7b_in_float32_with_adam_on_two_devices_takes_112_84_70_and_56_gb_before_activations() -> None:
    made = planned("2xA100-80GB", 7e9, "bf16=false")
    ways = [of(made, strategy="ddp"), *(of(made, strategy="fsdp", mode=mode) for mode in ("fast", "lean", "sharded"))]
    assert [states(each) for each in ways] == pytest.approx([112, 84, 70, 56])
    assert [each.way.zero_stage for each in ways] == [0, 1, 2, 3]
    text = comparison(made)
    for line in (
        "DP M(1+1+k) = 104.3 GiB",
        "fast = 78.2 GiB",
        "lean = 65.2 GiB",
        "sharded = 52.2 GiB",
        "= 26.1 GiB, k = 2",
    ):
        assert line in text, line


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_zero_stages_follow_their_formulas_on_any_number_of_devices(devices: int) -> None:
    made = planned(f"{devices}xA100-80GB", 1e9, "bf16=false")
    full, factor = 4.0, 1 / devices
    formulas = {"fast": 2 + 2 * factor, "lean": 1 + 3 * factor, "sharded": 4 * factor}
    for mode, formula in formulas.items():
        assert states(of(made, strategy="fsdp", mode=mode, sharding_factor=devices)) == pytest.approx(full * formula)


def test_a_frozen_part_costs_neither_gradient_nor_optimizer_memory() -> None:
    whole = model(1e9)
    half = replace(whole, num_trainable=whole.num_trainable // 2)
    one, other = (of(planned("2xA100-80GB", each), strategy="ddp").bytes_per_device for each in (whole, half))
    assert other.parameters == one.parameters
    assert (other.gradients, other.optimizer) == (one.gradients // 2, one.optimizer // 2)
    adapted = of(planned("2xA100-80GB", whole), strategy="ddp", use_lora=True).bytes_per_device
    assert adapted.gradients == whole.adapted.num_trainable * 4  # type: ignore[union-attr]
    assert adapted.gradients + adapted.optimizer < 0.1 * one.gradients


def test_adapters_are_float32_beside_a_base_in_half_precision() -> None:
    size = model(1e9)
    assert size.adapted is not None
    halved = replace(size, bytes_per_value=2, adapted=replace(size.adapted, bytes_per_value=2))
    made = planned("2xA100-80GB", halved, "torch_dtype=bfloat16")
    adapted = of(made, strategy="ddp", use_lora=True).bytes_per_device
    assert adapted.parameters == 2 * 10**9 + 4 * size.adapted.num_trainable
    assert adapted.gradients == 4 * size.adapted.num_trainable
    assert of(made, strategy="ddp").bytes_per_device.parameters == 2 * 10**9


def test_sharding_gathers_blocks_in_half_precision_and_the_rest_in_its_own() -> None:
    whole = model(1e9)
    (stack,) = whole.towers
    split = replace(whole, towers=(replace(stack, outside_blocks=2 * 10**8),))
    plain, mixed = (of(planned("4xA100-80GB", each), strategy="fsdp", mode="fast") for each in (whole, split))
    assert plain.bytes_per_device.parameters == 2 * 10**9
    assert mixed.bytes_per_device.parameters == 2 * 8 * 10**8 + 4 * 2 * 10**8
    lean = [of(planned("4xA100-80GB", each), strategy="fsdp", mode="lean").bytes_per_device for each in (whole, split)]
    assert lean[1].sharding - lean[0].sharding == 4 * 2 * 10**8


def test_every_way_that_the_devices_allow_is_weighed() -> None:
    made = planned("8xA100-80GB", 1e9)
    seen = {(each.way.strategy, each.way.mode, each.way.sharding_factor) for each in made.candidates}
    shards = {(name, mode, factor) for name in ("fsdp", "fsdp_lora") for mode in ("fast", "lean", "sharded")
              for factor in (2, 4, 8)}  # fmt: skip
    assert seen == shards | {("ddp", None, 1), ("ddp_gradcache", None, 1)}
    assert {each.way.gradient_checkpointing for each in made.candidates} == {True, False}
    assert any(each.way.cpu_offload for each in made.candidates)
    alone = planned("1xA100-80GB", 1e9)
    assert {each.way.strategy for each in alone.candidates} == {"single"}


def test_sharding_in_groups_lies_between_replicas_and_full_shards() -> None:
    made = planned("8xA100-80GB", 1e9)
    totals = [states(of(made, strategy="fsdp", mode="sharded", sharding_factor=factor)) for factor in (2, 4, 8)]
    assert states(of(made, strategy="ddp")) > totals[0] > totals[1] > totals[2]


def test_offloaded_shards_lie_in_the_hosts_memory() -> None:
    made = planned("4xA100-80GB", 1e9)
    offloaded = of(made, strategy="fsdp", cpu_offload=True, sharding_factor=4)
    assert states(offloaded) == 0
    assert offloaded.host_bytes == 16 * 10**9 // 4
    assert of(made, strategy="fsdp", mode="sharded").host_bytes == 0


def test_the_settings_of_replicated_gradients_are_in_the_plan() -> None:
    made = planned("2xA100-80GB", 1e9, "ddp_bucket_cap_mb=5", "ddp_find_unused_parameters=true")
    assert made.bucket_bytes == 5 << 20
    assert of(made, strategy="ddp").bytes_per_device.reduction == 2 * 5 << 20
    assert "buckets of 5 MiB" in reason(made, "gradients are added up once a step")
    assert "never needed" in reason(made, "ddp_find_unused_parameters true")
    assert of(planned("1xA100-80GB", 1e9), strategy="single").bytes_per_device.reduction == 0


def test_what_is_sent_in_a_step_follows_the_collectives() -> None:
    made = planned("4xA100-80GB", 1e9, "batch_size=8", "bf16=false")
    rows = 4 * 8 * 2
    embeddings = 2 * rows * 2048 * 4 * 3 / 4
    weights = 4e9
    assert of(made, strategy="ddp").communication_bytes == pytest.approx(2 * weights * 3 / 4 + embeddings, rel=1e-6)
    fast = of(made, strategy="fsdp", mode="fast", sharding_factor=4)
    assert fast.communication_bytes == pytest.approx(2 * weights * 3 / 4 + embeddings, rel=1e-6)
    sharded = of(made, strategy="fsdp", mode="sharded", sharding_factor=4)
    assert sharded.communication_bytes > fast.communication_bytes
    assert of(made, strategy="ddp", use_lora=True).communication_bytes < 0.1 * fast.communication_bytes


def test_encoding_twice_costs_a_third_more_in_full_and_half_more_with_adapters() -> None:
    made = planned("2xA100-80GB", 1e9, "retain=0", "gradient_checkpointing=false")
    for use_lora, factor in ((False, 4 / 3), (True, 3 / 2)):
        plain = of(made, strategy="ddp", use_lora=use_lora)
        cached = of(made, strategy="ddp_gradcache", use_lora=use_lora)
        compute = [each.relative_speed / each.scaling_efficiency for each in (plain, cached)]
        assert compute[0] / compute[1] == pytest.approx(factor, rel=0.03)
    assert of(made, strategy="ddp").relative_speed < 1 < of(made, strategy="ddp", use_lora=True).relative_speed


def test_communication_takes_more_of_a_step_the_slower_the_links_and_the_more_devices() -> None:
    fast = [of(planned(f"{n}xH100-80GB", 6e8), strategy="ddp").scaling_efficiency for n in (2, 4, 8)]
    slow = [of(planned(f"{n}xRTX4090-24GB", 6e8), strategy="ddp").scaling_efficiency for n in (2, 4, 8)]
    assert fast == sorted(fast, reverse=True)
    assert slow == sorted(slow, reverse=True)
    assert all(quick > sluggish for quick, sluggish in zip(fast, slow, strict=True))
    wide = of(planned("4x8xH100-80GB", 6e8), strategy="ddp").scaling_efficiency
    assert wide < fast[-1], "between machines the network is slower"


def test_two_towers_count_each_item_where_it_passes() -> None:
    text = tower(6e7, 6e7, layers=12, hidden=512, tokens=77)
    vision = tower(9e7, 9e7, layers=12, hidden=768, tokens=50)
    towers = (replace(text, items="texts"), replace(vision, items="pictures"))
    size = ModelSize(150_000_000, 150_000_000, 4, 512, towers, estimated=False)
    pairs = DataSize(100_000, 1.0, pictures_per_record=1.0)
    activations = of(planned("1xA100-80GB", size, data=pairs), strategy="single").bytes_per_device.activations
    kept = 64 * 77 * text.saved.per_token + 64 * 50 * vision.saved.per_token
    assert kept < activations < 1.05 * kept


def test_the_table_marks_the_choice_and_the_text_answers_the_three_questions() -> None:
    made = planned("4xA100-80GB", 5e9)
    text = comparison(made)
    (chosen,) = [line for line in text.splitlines() if line.startswith("  *")]
    assert chosen.split()[1:3] == ["fsdp", "fast,"]
    total = f"{made.bytes_per_device.total / GIB:.2f}"
    assert total in chosen.split()
    for question in (
        "Does it fit on one device? No",
        "Must it be faster? 4 devices",
        "How much memory is missing? None",
    ):
        assert question in text
    assert "Does it fit on one device? Yes: single" in comparison(planned("4xA100-80GB", 5e8))


def test_the_ladder_goes_from_checkpointing_to_more_devices_with_numbers() -> None:
    ladder = planned("4xA100-80GB", 2.1e9).advice.oom_ladder
    order = ["nothing to do", "gradient_checkpointing: true", "use_fsdp: true", "half the batch", "twice the devices"]
    assert [line.partition(" ")[2].startswith(start) for line, start in zip(ladder, order, strict=True)] == [True] * 5
    assert all("GiB" in line for line in ladder)
    assert "GiB less" in ladder[2], "sharding 2.1B saves the most"


def test_more_devices_are_weighed_from_one_on() -> None:
    lines = planned("4xA100-80GB", 6e8, scaled=True).advice.scaling
    assert [line.split(":")[0] for line in lines] == ["1", "2", "4", "8 on 2 machines"]
    assert lines[0].startswith("1: single")
    assert lines[2].startswith("4: ddp")
    assert [line.split(":")[0] for line in planned("2x8xA100-80GB", 6e8, scaled=True).advice.scaling][
        -1
    ] == "32 on 4 machines"


def test_copies_of_weights_in_half_precision_are_counted_where_autocast_makes_them() -> None:
    plain = model(1e9, adapters=False)
    (stack,) = plain.towers
    copies = 2_000_000_000
    cast = replace(stack, cast_bytes=copies)
    made = planned("4xA100-80GB", replace(plain, towers=(cast,)), "bf16=true", "batch_size=8", "retain=0")
    bare = planned("4xA100-80GB", plain, "bf16=true", "batch_size=8", "retain=0")
    for mode, added in ((None, copies), ("fast", 0), ("lean", 0), ("sharded", 0)):
        way = {"mode": mode, "gradient_cache": True}
        more = of(made, **way).bytes_per_device.activations - of(bare, **way).bytes_per_device.activations
        assert more == pytest.approx(added), mode


@pytest.mark.parametrize("narrowed", [0, 7_000_000_000])
def test_a_torch_that_gathers_weights_as_they_are_takes_twice_the_room_unless_they_are_narrow(narrowed: int) -> None:
    """Under mixed precision in bfloat16; frozen weights below adapters are held in it."""
    config = load_config(None, ["model_name=m"]).config
    devices, size = parse_devices("8xA100-80GB"), replace(model(7e9), narrowed=narrowed)
    bytes_of = []
    for narrow_gathers in (True, False):
        machine = replace(devices.machine(16), narrow_gathers=narrow_gathers)
        made = of(make_plan(config, machine, size, DATA, devices=devices), strategy="fsdp", mode="fast")
        bytes_of.append(made.bytes_per_device.parameters)
    assert bytes_of[1] == (bytes_of[0] if narrowed else pytest.approx(2 * bytes_of[0], rel=0.05))
