"""The batch, accumulation and the learning rate, each with its arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from plan_cases import DATA, model, planned, reason

from vembed.plan.batch import LEAST_STEPS, MOST_QUERIES, step_batches
from vembed.plan.problem import DataSize

if TYPE_CHECKING:
    from vembed.plan.plan import Plan


def test_a_batch_is_of_each_device_and_a_global_one_is_divided_over_them() -> None:
    each = planned("4xA100-80GB", 6e8, "batch_size=64")
    assert (each.batch.per_device, each.batch.total, each.world_size) == (64, 256, 4)
    assert "64 x 4 devices x 1 accumulated = 256" in reason(each, "effective batch")
    together = planned("3xA100-80GB", 6e8, "global_batch_size=100")
    assert (together.batch.per_device, together.batch.total) == (34, 100), "uneven: 34, 33, 33"
    assert "100 over 3 devices" in reason(together, "effective batch")


def test_one_global_batch_makes_as_many_steps_on_any_number_of_devices() -> None:
    made = [planned(f"{count}xA100-80GB", 6e8, "global_batch_size=512", "epochs=2") for count in (1, 2, 8)]
    assert {each.steps.total for each in made} == {2 * math.ceil(100_000 / 512)}
    assert {each.batch.total for each in made} == {512}


def auto(records: int, *overrides: str, devices: str = "4xA100-80GB") -> tuple[int, int, str]:
    made = planned(devices, 6e8, "batch_size=auto", *overrides, data=replace(DATA, num_records=records))
    return made.batch.per_device, made.batch.total, reason(made, "batch_size auto")


def test_auto_is_a_power_of_two_bounded_by_the_steps_that_the_data_allow() -> None:
    own, together, text = auto(1_000_000)
    assert (own, together) == (1024, 4096)
    assert together <= 1_000_000 // LEAST_STEPS < 2 * together, "the next power would leave too few steps"
    assert "largest power of two under 1250 = 5000" in text
    assert f"{LEAST_STEPS} steps of the 1000000 records" in text
    assert auto(1_000_000, "epochs=4")[1] == 4 * 4096
    assert auto(1_000_000, devices="1xA100-80GB")[:2] == (4096, 4096)


def test_auto_never_exceeds_the_records_and_keeps_some_negatives_of_few() -> None:
    assert auto(2000)[1] == 64
    assert auto(50)[1] == 32
    assert auto(10**9)[1] == MOST_QUERIES


def test_auto_is_bounded_by_embeddings_and_host_memory() -> None:
    wide = replace(model(6e8), dimension=10**6)
    made = planned("4xA100-80GB", wide, "batch_size=auto", data=replace(DATA, num_records=10**8))
    bytes_each = 2 * 2 * 10**6 * 4
    assert made.batch.total <= 79 * 2**30 / 20 / bytes_each < 2 * made.batch.total
    heavy = DataSize(10**8, 1.0, pictures_per_record=1.0, picture_bytes=10**10)
    assert planned("4xA100-80GB", 6e8, "batch_size=auto", data=heavy).batch.total <= 64


def test_auto_without_gradient_caching_is_bounded_by_activations() -> None:
    plain = planned(
        "1xA100-80GB", 6e8, "batch_size=auto", "use_gradient_cache=false", data=replace(DATA, num_records=10**6)
    )
    assert plain.fits
    assert 32 <= plain.batch.per_device < 4096


def test_nothing_is_accumulated_unless_a_number_is_set_and_steps_count_the_optimizers() -> None:
    none = planned("2xA100-80GB", 6e8, "batch_size=50")
    assert none.batch.accumulated == 1
    assert "with all its negatives" in reason(none, "effective batch")
    four = planned("2xA100-80GB", 6e8, "batch_size=50", "gradient_accumulation_steps=4", "epochs=3")
    assert (four.batch.accumulated, four.steps.per_epoch, four.steps.total) == (4, 250, 750)
    assert "50 x 2 devices x 4 accumulated = 400" in reason(four, "effective batch")
    assert none.steps.total == 1000


def test_an_epoch_ends_where_its_rows_end_however_many_batches_a_step_takes() -> None:
    def steps_of(accumulated: int, *overrides: str) -> Plan:
        words = ("batch_size=10", f"gradient_accumulation_steps={accumulated}", *overrides)
        return planned("1xA100-80GB", 6e8, *words, data=replace(DATA, num_records=1010))

    hundred = steps_of(100)
    assert (hundred.steps.per_epoch, hundred.steps.total) == (2, 2)
    batches = [step_batches(step, batches_per_epoch=101, accumulated=100) for step in range(4)]
    assert batches == [range(100), range(100, 101), range(101, 201), range(201, 202)]
    assert "the last step of an epoch takes the 1 batch left" in reason(hundred, "effective batch")
    assert steps_of(100, "epochs=3").steps.total == 6
    assert steps_of(100, "max_steps=5").steps.total == 5
    whole = steps_of(500, "learning_rate=1e-5", "lr_scaling=linear", "lr_reference_batch=1010")
    assert (whole.batch.accumulated, whole.steps.per_epoch) == (101, 1)
    assert "gradient_accumulation_steps is 500" in reason(whole, "effective batch")
    assert whole.batch.learning_rate == pytest.approx(1e-5), "by the rows that a step sees"
    dropped = steps_of(2, "drop_last=true", "epochs=1")
    assert dropped.steps.total == 51


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        (["learning_rate=1e-5"], 1e-5),
        (["learning_rate=1e-5", "lr_scaling=linear"], 4e-5),
        (["learning_rate=1e-5", "lr_scaling=sqrt"], 2e-5),
        (["learning_rate=1e-5", "lr_scaling=linear", "lr_reference_batch=512"], 2e-5),
        (["learning_rate=1e-5", "lr_scaling=linear", "gradient_accumulation_steps=2"], 8e-5),
    ],
)
def test_the_learning_rate_follows_the_effective_batch_as_asked(overrides: list[str], rate: float) -> None:
    made = planned("4xA100-80GB", 6e8, "batch_size=256", *overrides)
    assert made.batch.learning_rate == pytest.approx(rate)
    assert any(each.startswith("learning_rate ") for each in made.reasons) == (len(overrides) > 1)
