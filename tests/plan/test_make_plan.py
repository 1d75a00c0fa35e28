"""The plan as a pure function: numbers in, decisions and their reasons out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from plan_cases import planned

from vembed.config.load import load_config
from vembed.plan.chunks import CPU_CHUNK_BYTES, LEAST_CHUNK_TOKENS, MOST_CHUNK_ROWS
from vembed.plan.devices import GIB, Machine
from vembed.plan.memory import LOSS_STRIP_TILES, BatchRows, LossTiles, ModelSize, loss_bytes
from vembed.plan.plan import Plan, make_plan
from vembed.plan.problem import BLAS_BYTES, CONTEXT_BYTES, DataSize
from vembed.plan.text import explain, explain_fully
from vembed.text import show_bytes, show_count

CPU = Machine("cpu", "the CPU", 16 * GIB, 8, fast_bf16=False)
GPU = Machine("cuda", "NVIDIA H200", 139 * GIB, 16, fast_bf16=True)


def sized(*, max_length: int | None = 256, activation_bytes_per_token: int = 100_000) -> ModelSize:
    return ModelSize.by_formula(
        num_parameters=22_000_000, num_trainable=21_000_000, bytes_per_value=4, dimension=384, max_length=max_length,
        activation_bytes_per_token=activation_bytes_per_token,
    )  # fmt: skip


MINILM = sized()
DATA = DataSize(num_records=1000, documents_per_query=2.5)


def plan(*overrides: str, machine: Machine = CPU, model: ModelSize = MINILM, data: DataSize = DATA) -> Plan:
    batch = [] if any(each.startswith("batch_size=") for each in overrides) else ["batch_size=64"]
    config = load_config(None, ["model_name=m", *batch, *overrides]).config
    return make_plan(config, machine, model, data)


def reason(of: Plan, start: str) -> str:
    (found,) = [each for each in of.reasons if each.startswith(start)]
    return found


def test_the_same_numbers_give_the_same_plan_and_nothing_is_changed() -> None:
    assert plan() == plan()
    assert json.loads(json.dumps(plan().to_json())) == plan().to_json()


def test_pictures_are_never_cut_to_the_length_of_texts() -> None:
    (texts,) = sized(max_length=8192).towers
    pictures = replace(texts, name="vision", items="pictures", cuts=False, max_tokens=5000)
    both = replace(MINILM, towers=(replace(texts, items="texts"), pictures))
    assert [tower.max_tokens for tower in both.limited(100).towers] == [100, 5000]
    made = plan(model=both)
    assert "texts of up to 2048 of the 8192 tokens" in reason(made, "memory is predicted")
    assert plan(model=replace(both, towers=(pictures,))).bytes_per_device.activations >= 5000 * 100_000


def test_one_process_takes_the_whole_batch_and_the_global_batch_wins() -> None:
    alone = plan()
    assert (alone.way.strategy, alone.world_size, alone.batch.per_device, alone.batch.total) == ("single", 1, 64, 64)
    both = plan("global_batch_size=96")
    assert (both.batch.per_device, both.batch.total) == (96, 96)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [([], 16), (["epochs=3"], 48), (["epochs=3", "max_steps=5"], 5), (["max_steps=500"], 500)],
)
def test_steps_are_epochs_unless_max_steps_says_otherwise(overrides: list[str], steps: int) -> None:
    assert plan(*overrides).steps.total == steps


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
    assert plan(*overrides).steps.warmup == warmup


@pytest.mark.parametrize(
    ("overrides", "every"),
    [([], 16), (["eval_strategy=no"], None), (["eval_strategy=steps", "eval_steps=5"], 5), (["max_steps=3"], 16)],
)
def test_evaluations_follow_the_strategy(overrides: list[str], every: int | None) -> None:
    assert plan(*overrides).steps.eval_every == every


def budget(of: Plan) -> tuple[int, int]:
    return of.chunks.rows, of.chunks.tokens


def test_auto_chunks_fill_the_bytes_that_suit_the_device() -> None:
    assert budget(plan()) == (MOST_CHUNK_ROWS, CPU_CHUNK_BYTES // 100_000)
    text = reason(plan(), "gradient_cache_chunk_tokens 1342")
    assert "128.0 MiB of activations at 97.7 KiB a token" in text


def test_a_chunk_holds_at_least_one_row_of_full_length_and_512_tokens() -> None:
    heavy = 10**9
    assert budget(plan(model=sized(activation_bytes_per_token=heavy)))[1] == LEAST_CHUNK_TOKENS
    assert budget(plan(model=sized(activation_bytes_per_token=heavy, max_length=1024)))[1] == 1024
    assert budget(plan(model=sized(activation_bytes_per_token=heavy, max_length=None)))[1] == LEAST_CHUNK_TOKENS


def test_a_number_of_rows_is_not_cut_shorter_by_tokens() -> None:
    assert budget(plan("gradient_cache_chunk_size=40")) == (40, 40 * 256)
    without_limit = plan("gradient_cache_chunk_size=40", model=sized(max_length=None))
    assert budget(without_limit) == (40, CPU_CHUNK_BYTES // 100_000)


def test_given_tokens_stand_and_the_smaller_of_both_budgets_wins_later() -> None:
    assert budget(plan("gradient_cache_chunk_tokens=99")) == (MOST_CHUNK_ROWS, 99)
    assert budget(plan("gradient_cache_chunk_tokens=99", "gradient_cache_chunk_size=3")) == (3, 99)


@pytest.mark.parametrize(
    ("overrides", "machine", "dtype"),
    [
        ([], CPU, "float32"),
        ([], GPU, "bfloat16"),
        (["bf16=false"], GPU, "float32"),
        (["bf16=true"], CPU, "bfloat16"),
        (["fp16=true"], CPU, "float16"),
        (["fp16=true"], GPU, "float16"),
        (["torch_dtype=float64"], GPU, "float64"),
    ],
)
def test_precision_is_the_users_word_or_what_the_device_is_fast_at(
    overrides: list[str], machine: Machine, dtype: str
) -> None:
    made = plan(*overrides, machine=machine)
    assert made.dtype == dtype
    decided = machine is GPU and not overrides
    assert any(each.startswith("bf16: NVIDIA H200 computes faster") for each in made.reasons) == decided
    emulating = plan(*overrides, machine=replace(GPU, device_name="Tesla T4", fast_bf16=False))
    assert any("Tesla T4 only emulates it" in each for each in emulating.reasons) == (not overrides)


def test_the_bytes_of_a_step_are_what_the_parts_add_up_to() -> None:
    sizes = plan("retain=0", "gradient_cache_chunk_tokens=1000", "loss_tile_size=100").bytes_per_device
    assert sizes.parameters == 22_000_000 * 4
    assert sizes.gradients == 21_000_000 * 4
    assert sizes.optimizer == 2 * sizes.gradients
    assert sizes.activations == 1000 * 100_000
    assert sizes.loss == 2 * (64 + 160) * 384 * 4 + 64 * 100 * 4 + 64 * 160 * 4
    assert (sizes.embeddings, sizes.reduction, sizes.sharding) == (0, 0, 0), "one device waits for nobody"
    assert sizes.total == sum((sizes.parameters, sizes.gradients, sizes.optimizer, sizes.activations, sizes.loss))


def test_gradient_caching_needs_the_activations_of_one_chunk_and_plain_training_those_of_the_batch() -> None:
    cached, plain = plan("retain=0"), plan("use_gradient_cache=false")
    assert (cached.chunks.retain, plain.chunks.retain) == (0.0, 1.0)
    assert cached.bytes_per_device.activations == cached.chunks.tokens * 100_000
    assert plain.bytes_per_device.activations == (64 + 160) * 256 * 100_000
    assert reason(cached, "gradient caching: ")
    assert "encoded in one call" in reason(plain, "use_gradient_cache false: ")
    without_limit = plan("use_gradient_cache=false", model=sized(max_length=None))
    assert without_limit.bytes_per_device.activations == cached.bytes_per_device.activations


def test_auto_retention_keeps_what_a_part_of_the_spare_memory_holds_and_says_the_arithmetic() -> None:
    made = plan("batch_size=4096", machine=GPU, data=replace(DATA, num_records=100_000))
    assert made.chunks.retain == 1.0
    assert made.chunks.retain_tokens is not None
    kept_bytes = made.chunks.retain_tokens * 100_000
    room = (0.95 * GPU.memory_bytes - CONTEXT_BYTES - BLAS_BYTES) / 1.1 - (made.bytes_per_device.total - kept_bytes)
    assert kept_bytes == pytest.approx(0.5 * room, abs=100_000)
    assert "to spare holds the activations of" in reason(made, f"retain: at most {made.chunks.retain_tokens} tokens ")
    assert made.fits
    small = plan("batch_size=4")
    assert small.chunks.retain_tokens == (4 + 10) * 256, "no more than a batch has"
    assert "nothing is encoded twice" in reason(small, "retain: ")
    assert plan(model=sized(max_length=None)).chunks.retain_tokens > 0
    assert plan(machine=replace(CPU, memory_bytes=GIB)).chunks.retain_tokens == 0


def test_rows_without_a_limit_are_as_long_as_a_sample_of_the_data_says() -> None:
    endless, sampled = sized(max_length=None), replace(DATA, record_tokens=(200.0, 400.0) * 32)
    made, unknown = plan(model=endless, data=sampled), plan(model=endless)
    tokens = math.ceil(64 * (300 + 4 * 100 / 8))
    assert made.bytes_per_device.activations == tokens * 100_000
    assert plan("retain=1", model=endless, data=sampled).bytes_per_device.activations == tokens * 100_000
    whole = plan("use_gradient_cache=false", model=endless, data=sampled)
    assert whole.bytes_per_device.activations == tokens * 100_000
    assert f"has at most {tokens} by a sample of the data: nothing is encoded twice" in reason(made, "retain: ")
    assert made.chunks.retain_tokens == unknown.chunks.retain_tokens > tokens, "longer rows may come"
    assert unknown.bytes_per_device.activations > made.bytes_per_device.activations
    assert "nothing says how long rows are" in reason(unknown, "retain: ")


def test_a_given_share_of_kept_graphs_stands_and_counts_in_the_prediction() -> None:
    half, none = plan("retain=0.5"), plan("retain=0")
    assert (half.chunks.retain, none.chunks.retain) == (0.5, 0.0)
    assert half.chunks.retain_tokens is None, "the user's share stands whatever the memory"
    kept = half.bytes_per_device.activations - none.bytes_per_device.activations
    assert kept == (64 + 160) * 256 * 100_000 // 2


def test_the_prediction_is_of_the_batch_that_there_is() -> None:
    small = plan("batch_size=4096", data=DataSize(num_records=10, documents_per_query=1.0))
    of_ten = loss_bytes(MINILM, BatchRows.of_one(10, 10), LossTiles(1024, 1))
    assert small.bytes_per_device.loss == of_ten


def test_a_teachers_vectors_of_all_rows_are_counted() -> None:
    plain, taught = (
        plan("batch_size=4096", data=DataSize(num_records=9000, documents_per_query=2.0, teacher_dimension=dimension))
        for dimension in (0, 1024)
    )
    assert taught.bytes_per_device.loss - plain.bytes_per_device.loss == 3 * 4096 * 1024 * 4


def test_the_loss_takes_the_memory_of_tiles_however_large_the_batch() -> None:
    loss = loss_bytes(replace(MINILM, dimension=256), BatchRows.of_one(65_536, 65_536), LossTiles(1024, 2))
    table = 2 * 65_536 * 256 * 4
    assert loss == 2 * table + (2 + LOSS_STRIP_TILES) * 1024**2 * 4
    assert loss - table < 200e6, "beside the embeddings"


@pytest.mark.parametrize(
    ("overrides", "machine", "size"),
    [([], CPU, 1024), ([], GPU, 4096), (["loss_tile_size=77"], CPU, 77), (["loss_tile_size=77"], GPU, 77)],
)
def test_tiles_suit_the_device_unless_their_size_is_given(overrides: list[str], machine: Machine, size: int) -> None:
    assert plan(*overrides, machine=machine).loss_tile_size == size


def test_prefixes_hold_a_tile_each_and_leaving_the_whole_dim_out_is_said() -> None:
    whole, partly = plan("mrl_dims=[384, 64]"), plan("mrl_dims=[64]")
    assert whole.bytes_per_device.loss == plan().bytes_per_device.loss + 2 * 64 * 160 * 4
    assert not any("mrl_dims" in each for each in whole.reasons)
    assert reason(partly, "mrl_dims: ").endswith("only its first 64 are trained")


def test_it_fits_up_to_95_percent_of_the_memory_with_reserve() -> None:
    needed = 1.1 * plan("retain=0").bytes_per_device.total + 1.5 * GIB
    least = math.ceil(needed / 0.95)
    fitting = plan("retain=0", machine=replace(CPU, memory_bytes=least + 1))
    assert fitting.fits
    assert reason(fitting, "memory: ").endswith(": fits")
    tight = plan("retain=0", machine=replace(CPU, memory_bytes=least - 2))
    assert not tight.fits
    assert reason(tight, "memory: ").endswith("may not fit; a smaller batch_size helps")
    assert tight.steps.total == fitting.steps.total, "the plan warns; the user's word stands"


def test_reasons_begin_with_the_strategy_and_hold_the_notes_of_the_data() -> None:
    made = plan(data=replace(DATA, notes=("3 rows skipped.", "The last batch is smaller.")))
    assert made.reasons[0].startswith("single: one process on one device; without caching it would need")
    assert plan("batch_size=2", model=sized(activation_bytes_per_token=1)).why[0] == "single: one process on one device"
    assert made.reasons[1:3] == ("3 rows skipped.", "The last batch is smaller.")
    assert made.reasons[3] == "The last batch of each epoch has 40 records instead of 64."
    assert made.to_json()["reasons"] == list(made.reasons)
    assert not [each for each in plan("batch_sampling=classes").reasons if "last batch" in each]


def test_one_candidate_is_the_plan_itself_and_all_of_them_are_of_one_process() -> None:
    made = plan()
    candidates = made.to_json()["candidates"]
    assert {each["strategy"] for each in candidates} == {"single"}
    (chosen,) = [each for each in candidates if each["recommended"]]
    assert chosen["fits"] is made.fits
    assert chosen["bytes_per_device"]["total"] == made.bytes_per_device.total
    assert chosen["estimated"] is True
    assert set(chosen["bytes_per_device"]) >= {"parameters", "gradients", "optimizer", "activations", "loss", "total"}


def test_the_text_says_what_was_decided_with_its_arithmetic() -> None:
    made = plan("epochs=2", "max_steps=24")
    text = explain_fully(made, facts={"model": "m", "pooling": "mean"})
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "plan"
    assert any(line.startswith("pooling") and line.endswith("mean") for line in lines)
    assert any(line.endswith("64 = 64 x 1 process") for line in lines)
    assert any(line.endswith("24 (1.5 epochs of 16), 3 of warmup") for line in lines)
    assert any(line.endswith("at most 1342 padded tokens, 512 rows") for line in lines)
    assert any(line.startswith("total") and line.endswith(show_bytes(made.bytes_per_device.total)) for line in lines)
    for each in made.reasons:
        assert f"- {each}" in lines
    plain = explain_fully(plan("use_gradient_cache=false"), facts={})
    assert any(line.split() == ["chunk", "the", "whole", "batch"] for line in plain.splitlines())
    assert "never together" not in text + plain


def test_the_short_form_is_one_screen_with_the_way_its_reason_the_memory_and_the_time() -> None:
    made = plan("epochs=2", "max_steps=24").noting(*(f"note {number}: {'word ' * 30}" for number in range(9)))
    text = explain(replace(made, model={"pooling": "mean"}), facts={"model": "m", "pooling": "mean", "data": "64 rows"})
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    labels = [line.split()[0] for line in lines if re.match(r"  \w", line)]
    assert labels == ["model", "data", "way", "why", "memory", "batch", "steps", "time", "note", "more"]
    assert "24 (1.5 epochs of 16), 3 of warmup" in text
    assert re.search(r"memory +\[#*\++\.+\] [\d.]+ of [\d.]+ GiB usable: fits", text)
    assert re.search(r"\d more notes, \d+ reasons and 2 ways compared: see --plan --details", text)
    assert "unknown until a step is measured" in text, "a CPU's figures say nothing of its speed"
    assert "about 1:12 for all steps" in explain(made, facts={}, step_seconds=3.0)
    assert "compared: see --details\n" in explain(made, facts={}, details="--details") + "\n"
    assert "ways to train" not in text


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
