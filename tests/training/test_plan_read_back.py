"""What a resumed run takes from the plan of its checkpoint, and what it decides anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vembed.checkpoint.tensors import LoadedCheckpoint
from vembed.config.load import load_config
from vembed.config.record import plain_values
from vembed.plan.devices import GIB, Devices, Machine
from vembed.plan.memory import ModelSize
from vembed.plan.plan import Plan, make_plan
from vembed.plan.problem import DataSize
from vembed.training.planning import as_begun, read_back

CPU = Machine("cpu", "the CPU", 16 * GIB, 8, fast_bf16=False)
SIZE = ModelSize.by_formula(
    num_parameters=22_000_000,
    num_trainable=22_000_000,
    bytes_per_value=4,
    dimension=384,
    max_length=128,
    activation_bytes_per_token=100_000,
)


GPU = Machine("cuda", "the GPU", 24 * GIB, 8, fast_bf16=True)
LARGE = ModelSize.by_formula(
    num_parameters=3_000_000_000,
    num_trainable=3_000_000_000,
    bytes_per_value=4,
    dimension=2048,
    max_length=128,
    activation_bytes_per_token=2_000_000,
)
LARGE = replace(LARGE, adapted=replace(LARGE, num_parameters=3_020_000_000, num_trainable=20_000_000))


def plan(world_size: int, *overrides: str, memory: int = 16 * GIB) -> tuple[Plan, Any]:
    config = load_config(None, ["model_name=m", "batch_size=32", *overrides]).config
    machine = replace(CPU, memory_bytes=memory)
    return make_plan(config, machine, SIZE, DataSize(1000, 1.0), devices=Devices.of(machine, world_size)), config


def checkpoint_of(made: Plan, config: Any) -> LoadedCheckpoint:
    checkpoint = object.__new__(LoadedCheckpoint)
    for name, value in {
        "step": 5, "path": Path("step-5"), "stamp": {"plan": made.to_json(), "config": plain_values(config)},
    }.items():  # fmt: skip
        object.__setattr__(checkpoint, name, value)
    return checkpoint


def test_auto_is_resolved_once_and_read_back_on_another_machine() -> None:
    before, config = plan(2)
    saved = checkpoint_of(before, config)
    now, config = plan(2, memory=3 * GIB)
    decided = before.chunks.retain_tokens, before.way.strategy
    assert (now.chunks.retain_tokens, now.way.strategy) != decided, "else this shows nothing"
    resumed = read_back(now, saved, config)
    for name in ("strategy", "retain_tokens", "gradient_cache_chunk_tokens", "global_batch_size", "steps", "dtype"):
        assert resumed.to_json()[name] == before.to_json()[name], name
    assert resumed.memory_bytes == now.memory_bytes
    assert any(each.startswith("resumed from step 5: ") for each in resumed.reasons)


def test_another_number_of_processes_keeps_the_global_batch_and_decides_the_strategy_anew() -> None:
    before, config = plan(1)
    resumed = read_back(plan(4)[0], checkpoint_of(before, config), config)
    assert (before.way.strategy, resumed.way.strategy) == ("single", "ddp")
    assert (resumed.batch.total, resumed.batch.per_device, resumed.world_size) == (32, 8, 4)
    assert (resumed.steps.total, resumed.steps.per_epoch) == (before.steps.total, before.steps.per_epoch)


@pytest.mark.parametrize(("override", "strategy"), [("use_fsdp=true", "fsdp"), ("use_fsdp=auto", "ddp")])
def test_a_key_that_decides_the_strategy_is_heard_when_it_changes(override: str, strategy: str) -> None:
    before, config = plan(2)
    now, changed = plan(2, override)
    assert read_back(now, checkpoint_of(before, config), changed).way.strategy == strategy


def test_what_trains_is_the_checkpoints_and_the_ways_are_weighed_for_it() -> None:
    def large(world_size: int, memory: int, saved: LoadedCheckpoint | None = None) -> tuple[Plan, Any]:
        config = load_config(None, ["model_name=m", "batch_size=32"]).config
        machine = replace(GPU, memory_bytes=memory)
        planned = config if saved is None else as_begun(config, saved)
        made = make_plan(planned, machine, LARGE, DataSize(1000, 1.0), devices=Devices.of(machine, world_size))
        return (made if saved is None else read_back(made, saved, config)), config

    def chosen(made: Plan) -> tuple[bool, bool]:
        """Return whether the plan's own way trains adapters, and whether that fits; both of its candidate."""
        (candidate,) = [each for each in made.candidates if made.recommends(each)]
        assert candidate.fits == made.fits
        return candidate.way.use_lora, candidate.fits

    small, config = large(1, 24 * GIB)
    many, _ = large(8, 80 * GIB)
    assert (chosen(small), chosen(many)) == ((True, True), (False, True)), "else this shows nothing"
    assert chosen(large(8, 80 * GIB, checkpoint_of(small, config))[0]) == (True, True)
    # All weights of 3 billion parameters train in no memory of 24 GiB, and the plan says so.
    assert chosen(large(1, 24 * GIB, checkpoint_of(many, config))[0]) == (False, False)


def test_a_key_that_the_user_set_is_not_replaced_by_the_checkpoints() -> None:
    before, config = plan(1, "use_lora=true")
    saved = checkpoint_of(before, config)
    for word, expected in (("auto", True), ("false", False), ("true", True)):
        asked = load_config(None, ["model_name=m", f"use_lora={word}"]).config
        assert as_begun(asked, saved).use_lora is expected
    del saved.stamp["plan"]["use_lora"]  # type: ignore[union-attr,attr-defined]
    assert as_begun(load_config(None, ["model_name=m"]).config, saved).use_lora == "auto"
