"""The batch, accumulation, the learning rate, steps and data workers, each with its arithmetic."""

import math
from dataclasses import replace

import pytest
from plan_cases import DATA, formula, model, plan_here, planned, reason, tower

from vembed.config.load import load_config
from vembed.config.schema import Config
from vembed.plan.batch import LEAST_STEPS, MOST_QUERIES, ROW_BYTES, plan_batch, plan_loading, step_batches
from vembed.plan.devices import Machine, parse_devices
from vembed.plan.memory import ModelSize
from vembed.plan.plan import Plan
from vembed.plan.problem import DataSize

# Queries --------------------------------------------------------------------------------------------------------------


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


def test_auto_is_bounded_by_the_host_memory_of_all_machines_together() -> None:
    config = load_config(None, ["model_name=m", "batch_size=auto", "max_steps=10"]).config
    pictures = DataSize(10**6, 1.0, pictures_per_record=1.0, picture_bytes=10**6)
    totals = [
        plan_batch(config, parse_devices(devices), model(1e8), pictures, host_bytes=8 * 10**9).total
        for devices in ("1x8xA100-80GB", "2x8xA100-80GB", "4x8xA100-80GB")
    ]
    assert totals == [512, 1024, 2048], "under 991 rows of 1 MB and two texts in each machine"


def test_auto_without_gradient_caching_is_bounded_by_activations() -> None:
    plain = planned(
        "1xA100-80GB", 6e8, "batch_size=auto", "use_gradient_cache=false", data=replace(DATA, num_records=10**6)
    )
    assert plain.fits
    assert 32 <= plain.batch.per_device < 4096


@pytest.mark.parametrize("order", [1, -1])
def test_auto_without_gradient_caching_counts_the_activations_of_every_tower(order: int) -> None:
    texts = replace(tower(3e7, 3e7, layers=4, hidden=256, tokens=32), items="texts")
    pictures = replace(tower(3e8, 3e8, layers=24, hidden=1024, tokens=257), name="vision", items="pictures")
    size = ModelSize(33 * 10**7, 33 * 10**7, 4, 512, (texts, pictures)[::order], estimated=False, checkpointable=False)
    pairs = DataSize(10**6, 1.0, pictures_per_record=1.0, picture_bytes=600_000)
    made = planned("1x24GB", size, "batch_size=auto", "use_gradient_cache=false", data=pairs)
    assert (made.batch.per_device, made.fits) == (32, True)
    assert "Activations grow with the batch" in reason(made, "batch_size auto")


def test_auto_without_gradient_caching_counts_sampled_tokens_where_nothing_limits_them() -> None:
    long = DataSize(10**6, 1.0, record_tokens=(300.0,) * 10)
    made = planned("1x24GB", formula(max_length=None), "batch_size=auto", "use_gradient_cache=false", data=long)
    assert (made.batch.per_device, made.fits) == (256, True)


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


def test_the_learning_rate_follows_the_records_where_they_are_fewer_than_a_batch() -> None:
    keys = ("batch_size=64", "learning_rate=1e-5", "lr_scaling=linear", "lr_reference_batch=100")
    made = planned("8xA100-80GB", 6e8, *keys, data=replace(DATA, num_records=100))
    assert made.batch.learning_rate == pytest.approx(1e-5), "a step sees 100 rows, not 512"
    assert "= 512, of which an epoch has 100;" in reason(made, "effective batch")


def test_one_process_takes_the_whole_batch_and_the_global_batch_wins() -> None:
    alone = plan_here()
    assert (alone.way.strategy, alone.world_size, alone.batch.per_device, alone.batch.total) == ("single", 1, 64, 64)
    both = plan_here("global_batch_size=96")
    assert (both.batch.per_device, both.batch.total) == (96, 96)


# Steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "steps"), [([], 16), (["epochs=3"], 48), (["epochs=3", "max_steps=5"], 5), (["max_steps=500"], 500)]
)
def test_steps_are_epochs_unless_max_steps_says_otherwise(overrides: list[str], steps: int) -> None:
    assert plan_here(*overrides).steps.total == steps


@pytest.mark.parametrize(
    ("overrides", "warmup"),
    [
        (["max_steps=100"], 10),
        (["max_steps=101"], 11),
        (["max_steps=100", "warmup_ratio=0"], 0),
        (["max_steps=100", "warmup_ratio=1"], 100),
        (["max_steps=100", "warmup_ratio=0.5", "warmup_steps=7"], 7),
        (["max_steps=100", "warmup_steps=0"], 0),
    ],
)
def test_warmup_is_a_rounded_up_share_or_the_number_given(overrides: list[str], warmup: int) -> None:
    assert plan_here(*overrides).steps.warmup == warmup


def test_a_warmup_as_long_as_the_run_is_told() -> None:
    long, short = plan_here("epochs=2", "warmup_steps=32"), plan_here("epochs=2", "warmup_steps=31")
    assert long.steps.total == 32
    assert "warmup_steps 32 is not smaller than the 32 steps of the run" in reason(long, "warmup_steps")
    assert not any(each.startswith("warmup_steps") for each in short.reasons)


@pytest.mark.parametrize(
    ("overrides", "every"),
    [([], 16), (["eval_strategy=no"], None), (["eval_strategy=steps", "eval_steps=5"], 5), (["max_steps=3"], 16)],
)
def test_evaluations_follow_the_strategy(overrides: list[str], every: int | None) -> None:
    assert plan_here(*overrides).steps.eval_every == every


# Data workers ---------------------------------------------------------------------------------------------------------


SIX_BUSY = Machine("cpu", "the SIX_BUSY", 16 << 30, 8, fast_bf16=False, num_busy_cores=6)


PICTURES = DataSize(1000, 1.0, pictures_per_record=1.0, picture_bytes=12_288)


def loading_of(
    machine: Machine, data: DataSize, num_workers: int | str = "auto", *, host_bytes: int = 16 << 30
) -> tuple[int, int, str]:
    config = Config.model_validate({"model_name": "builtin:tiny-clip", "num_workers": num_workers})
    return plan_loading(config, machine, data, num_queries=100, host_bytes=host_bytes)


def test_auto_takes_the_cores_that_training_leaves_where_there_are_pictures() -> None:
    assert loading_of(SIX_BUSY, PICTURES)[:2] == (2, 4)
    assert "8 cores less 6 that training keeps busy leave 2" in loading_of(SIX_BUSY, PICTURES)[2]
    assert loading_of(replace(SIX_BUSY, num_busy_cores=8), PICTURES)[:2] == (0, 0)
    assert loading_of(replace(SIX_BUSY, num_cores=64, num_busy_cores=1), PICTURES)[0] == 8
    texts = replace(PICTURES, pictures_per_record=0.0)
    assert loading_of(SIX_BUSY, texts) == (0, 0, "num_workers 0: no pictures to decode")
    assert loading_of(SIX_BUSY, texts, 3)[:2] == (3, 6)
    assert loading_of(SIX_BUSY, PICTURES, 0)[0] == 0


def test_who_sets_the_batches_of_a_worker_gets_them() -> None:
    keys = Config.model_validate({"model_name": "builtin:tiny-clip", "num_workers": 3, "prefetch_factor": 5})
    _, batches_ahead, reason = plan_loading(keys, SIX_BUSY, PICTURES, num_queries=100, host_bytes=16 << 30)
    assert batches_ahead == 15
    assert "up to 15 batches ahead" in reason


def test_texts_are_tokenized_by_workers_where_an_accelerator_computes() -> None:
    machine = replace(SIX_BUSY, device="cuda", num_busy_cores=1)
    texts = replace(PICTURES, pictures_per_record=0.0, picture_bytes=0)
    assert loading_of(machine, texts)[:2] == (7, 14)
    assert (
        "8 cores less 1 that training keeps busy leave 7, of which at most 8 tokenize" in loading_of(machine, texts)[2]
    )
    assert "up to 14 batches ahead, 10.9 MiB of tokens" in loading_of(machine, texts)[2]
    assert loading_of(replace(machine, num_cores=1), texts)[:2] == (0, 0)
    three_batches = 8 * 3 * 200 * ROW_BYTES
    assert loading_of(machine, texts, host_bytes=three_batches)[:2] == (3, 3)


def test_batches_ahead_stay_within_a_share_of_memory() -> None:
    machine, one_batch = replace(SIX_BUSY, num_busy_cores=0), 8 * 100 * 1000  # of 100 pictures of 1000 bytes

    def of(picture_bytes: int, num_workers: int | str = "auto") -> tuple[int, int]:
        return loading_of(machine, replace(PICTURES, picture_bytes=picture_bytes), num_workers, host_bytes=one_batch)[
            :2
        ]

    assert of(1000 // 16) == (8, 16)
    assert of(1000 // 10) == (8, 8)
    assert of(1000 // 2) == (2, 2)
    assert of(1001) == (0, 0)
    assert of(1001, 3) == (3, 3), "who sets a number gets it"
    config = Config.model_validate({"model_name": "builtin:tiny-clip"})
    small = replace(PICTURES, picture_bytes=1000 // 16)
    shared = plan_loading(config, machine, small, num_queries=100, host_bytes=one_batch, num_processes=4)
    assert shared[:2] == (4, 4), "four processes of a machine share its memory"


def test_auto_is_none_where_workers_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert loading_of(SIX_BUSY, PICTURES) == (0, 0, "num_workers 0: data workers need Linux")
