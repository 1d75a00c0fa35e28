"""The plan in words: on one screen, in full, as a table, and its advice."""

import re
from dataclasses import asdict, replace

import pytest
from plan_cases import DATA, model, plan_here, planned, tower

from vembed.plan.devices import GIB
from vembed.plan.memory import ModelSize
from vembed.plan.problem import Way
from vembed.plan.text import comparison, explain, explain_fully
from vembed.text import show_bytes, show_count

# One screen, and in full ----------------------------------------------------------------------------------------------


def test_the_full_text_holds_every_fact_and_reason() -> None:
    made = plan_here("epochs=2", "max_steps=24")
    lines = [line.strip() for line in explain_fully(made, facts={"pooling": "mean"}).splitlines()]
    for start, end in (
        ("pooling", "mean"),
        ("", "24 (1.5 epochs of 16), 3 of warmup"),
        ("", "at most 1342 padded tokens, 512 rows"),
        ("total", show_bytes(made.bytes_per_device.total)),
        *((f"- {each}", each) for each in made.reasons),
    ):
        assert any(line.startswith(start) and line.endswith(end) for line in lines), end
    plain = explain_fully(plan_here("use_gradient_cache=false"), facts={})
    assert any(line.split() == ["chunk", "the", "whole", "batch"] for line in plain.splitlines())


@pytest.mark.parametrize("devices", ["1xA100-80GB", "4xA100-80GB"])
def test_gradients_of_earlier_batches_are_among_the_parts(devices: str) -> None:
    """The worst moment then holds more than each part at its own worst; no size is negative."""
    made = planned(devices, 6e8, "batch_size=2", "gradient_accumulation_steps=8")
    assert made.bytes_per_device.gradients > 6e8 * 4
    for candidate in made.candidates:
        sizes = asdict(candidate.bytes_per_device)
        assert sum(sizes.values()) - 2 * sizes["apart"] == candidate.bytes_per_device.total
        assert min(sizes.values()) >= 0, candidate.way


def test_the_short_form_is_one_screen_with_the_way_its_reason_the_memory_and_the_time() -> None:
    made = plan_here("epochs=2", "max_steps=24").noting(*(f"note {number}: {'word ' * 30}" for number in range(9)))
    text = explain(replace(made, model={"pooling": "mean"}), facts={"model": "m", "pooling": "mean", "data": "64 rows"})
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    labels = [line.split()[0] for line in lines if re.match(r"  \w", line)]
    assert labels == ["model", "data", "strategy", "why", "memory", "batch", "steps", "time", "note", "more"]
    assert "24 (1.5 epochs of 16), 3 of warmup" in text
    assert re.search(r"memory +\[#*\++\.+\] [\d.]+ of [\d.]+ GiB usable: fits", text)
    assert re.search(r"\d more notes, \d+ reasons and 2 strategies compared: see --plan --details", text)
    assert "unknown until a step is measured" in text, "a CPU's figures say nothing of its speed"
    assert "about 1:12 for all steps" in explain(made, facts={}, step_seconds=3.0)
    assert "compared: see --details\n" in explain(made, facts={}, details="--details") + "\n"
    assert "strategies\n" not in text


def test_keys_without_effect_stand_before_other_notes() -> None:
    text = explain(plan_here().noting("3 rows are skipped", "fsdp_mode lean has no effect"), facts={})
    assert text.index("fsdp_mode lean has no effect") < text.index("3 rows are skipped")


def test_time_on_a_known_device_is_called_rough_and_on_an_unknown_one_is_not_guessed() -> None:
    known, blind = planned("8xA100-80GB", 5e8), planned("8x80GB", 5e8)
    assert "by the device's rough figures; no step was measured" in explain(known, facts={})
    assert "unknown until a step is measured" in explain(blind, facts={})
    assert known.to_json()["rough_step_seconds"] == known.rough_step_seconds > 0
    assert "rough_step_seconds" not in blind.to_json()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"), (3 << 30, "3.0 GiB"),
     (5000 << 30, "5000.0 GiB")],
)  # fmt: skip
def test_bytes_are_shown_in_the_unit_that_suits(count: int, text: str) -> None:
    assert show_bytes(count) == text


def test_parameters_are_shown_in_the_unit_that_suits() -> None:
    assert [show_count(count) for count in (5_289_984, 999e6, 8_144_793_840)] == ["5.29M", "999M", "8.14B"]
    assert [show_count(count) for count in (20_900, 999_999, 640)] == ["20.9k", "1M", "640"]


# Table and advice -----------------------------------------------------------------------------------------------------


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
    ladder = planned("4xA100-80GB", 2.1e9).oom_ladder
    order = ["nothing to do", "gradient_checkpointing: true", "use_fsdp: true", "half the batch", "twice the devices"]
    assert [line.partition(" ")[2].startswith(start) for line, start in zip(ladder, order, strict=True)] == [True] * 5
    assert all("GiB" in line for line in ladder)
    assert "GiB less" in ladder[2], "sharding 2.1B saves the most"


@pytest.mark.parametrize(
    ("keys", "more", "change"),
    [
        ("batch_size=8192", "batch_size=4096", "twice the devices, the same batch over all"),
        ("use_fsdp=true batch_size=4096", "use_fsdp=true batch_size=4096", "twice the devices"),
    ],
)
def test_twice_the_devices_take_what_a_plan_for_so_many_says(keys: str, more: str, change: str) -> None:
    wide = replace(model(6e8), dimension=8192)  # embeddings of all devices count beside activations
    here, there = planned("2x4xA100-80GB", wide, *keys.split()), planned("4x4xA100-80GB", wide, *more.split())
    wider = replace(here.way, sharding_factor=2 * here.way.sharding_factor if here.way.mode else 1)
    (needed,) = [candidate.least_bytes for candidate in there.candidates if candidate.way == wider]
    (line,) = [line for line in here.oom_ladder if f" {change}: " in line]
    assert f"{change}: {show_bytes(needed)} a device" in line


def test_half_the_batch_is_half_of_its_pictures_too() -> None:
    towers = [tower(8e7, 8e7, layers=12, hidden=512, tokens=64) for _ in range(2)]
    both = (replace(towers[0], items="texts"), replace(towers[1], name="vision", items="pictures"))
    size = ModelSize(160_000_000, 160_000_000, 4, 512, both, estimated=False, checkpointable=False)
    pairs = replace(DATA, pictures_per_record=1.0)
    whole, half = (planned("1xA100-80GB", size, f"batch_size={rows}", data=pairs) for rows in (64, 32))
    assert whole.way == half.way == Way("single")
    (line,) = [line for line in whole.oom_ladder if "half the batch" in line]
    assert f"half the batch: {show_bytes(half.bytes_per_device.total)} a device" in line


def test_partly_sharded_ways_that_nobody_asked_for_are_shown_once() -> None:
    made = planned("8xA100-80GB", 1e9)
    lines = comparison(made).splitlines()
    shown = [line.strip() for line in lines if "1/2 (ZeRO" in line or "1/4 (ZeRO" in line]
    assert {line.partition(" (")[0] for line in shown} == {
        f"{name} sharded, 1/{factor}" for name in ("fsdp", "fsdp_lora") for factor in (2, 4)
    }
    assert any("1/8 (ZeRO-2)" in line for line in lines)


def test_more_devices_are_weighed_from_one_on() -> None:
    lines = planned("4xA100-80GB", 6e8, scaled=True).scaling
    assert [line.split(":")[0] for line in lines] == ["1", "2", "4", "8 on 2 machines"]
    assert lines[0].startswith("1: single")
    assert lines[2].startswith("4: ddp")
    assert [line.split(":")[0] for line in planned("2x8xA100-80GB", 6e8, scaled=True).scaling][-1] == "32 on 4 machines"
    six = [line.split(":")[0] for line in planned("1x6xA100-80GB", 6e8, scaled=True).scaling]
    assert six == ["1", "2", "4", "8 on 2 machines"], "no machine of six has eight"
