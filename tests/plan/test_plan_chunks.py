"""Encoder calls: their rows and tokens in training and evaluation, and the graphs that are kept."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import CPU, DATA, GPU, MINILM, RECORDS, formula, model, plan_here, planned, reason

from vembed.plan.chunks import (
    ACCELERATOR_CHUNK_ROWS,
    CPU_CHUNK_BYTES,
    EVALUATION_SECONDS,
    EVALUATION_SHARE,
    LEAST_CHUNK_TOKENS,
    MOST_CHUNK_ROWS,
    call_tokens,
)
from vembed.plan.cost import Candidate
from vembed.plan.devices import GIB
from vembed.plan.memory import CallCost, ModelSize, TowerSize
from vembed.plan.plan import Plan
from vembed.plan.problem import BLAS_BYTES, CONTEXT_BYTES, reserve

# A call of training ---------------------------------------------------------------------------------------------------


def budget(of: Plan) -> tuple[int, int]:
    return of.chunks.rows, of.chunks.tokens


def test_auto_chunks_fill_the_bytes_that_suit_the_device() -> None:
    assert budget(plan_here()) == (MOST_CHUNK_ROWS, CPU_CHUNK_BYTES // 100_000)
    text = reason(plan_here(), "gradient_cache_chunk_tokens 1342")
    assert "128.0 MiB of activations at 97.7 KiB a token" in text


HEAVY = 10**9


@pytest.mark.parametrize(
    ("overrides", "model", "expected"),
    [
        ("", formula(activation_bytes_per_token=HEAVY), (MOST_CHUNK_ROWS, LEAST_CHUNK_TOKENS)),
        ("", formula(activation_bytes_per_token=HEAVY, max_length=1024), (MOST_CHUNK_ROWS, 1024)),
        ("", formula(activation_bytes_per_token=HEAVY, max_length=None), (MOST_CHUNK_ROWS, LEAST_CHUNK_TOKENS)),
        ("gradient_cache_chunk_size=40", MINILM, (40, 40 * 256)),
        ("gradient_cache_chunk_size=40", formula(max_length=None), (40, CPU_CHUNK_BYTES // 100_000)),
        ("gradient_cache_chunk_tokens=99", MINILM, (MOST_CHUNK_ROWS, 99)),
        ("gradient_cache_chunk_tokens=99 gradient_cache_chunk_size=3", MINILM, (3, 99)),
    ],
)
def test_a_chunk_holds_a_whole_row_and_what_the_user_gives(
    overrides: str, model: ModelSize, expected: tuple[int, int]
) -> None:
    assert budget(plan_here(*overrides.split(), model=model)) == expected


# Kept graphs ----------------------------------------------------------------------------------------------------------


def test_gradient_caching_needs_the_activations_of_one_chunk_and_plain_training_those_of_the_batch() -> None:
    cached, plain = plan_here("retain=0"), plan_here("use_gradient_cache=false")
    assert (cached.chunks.retain, plain.chunks.retain) == (0.0, 1.0)
    assert cached.bytes_per_device.activations == cached.chunks.tokens * 100_000
    assert plain.bytes_per_device.activations == (64 + 160) * 256 * 100_000
    assert reason(cached, "gradient caching: ")
    assert "encoded in one call" in reason(plain, "use_gradient_cache false: ")
    without_limit = plan_here("use_gradient_cache=false", model=formula(max_length=None))
    assert without_limit.bytes_per_device.activations == cached.bytes_per_device.activations


def test_auto_retention_keeps_what_a_part_of_the_spare_memory_holds_and_says_the_arithmetic() -> None:
    made = plan_here("batch_size=4096", machine=GPU, data=replace(RECORDS, num_records=100_000))
    assert made.chunks.retain == 1.0
    assert made.chunks.retain_tokens is not None
    kept_bytes = made.chunks.retain_tokens * 100_000
    room = (0.95 * GPU.memory_bytes - CONTEXT_BYTES - BLAS_BYTES) / 1.1 - (made.bytes_per_device.total - kept_bytes)
    assert kept_bytes == pytest.approx(0.5 * room, abs=100_000)
    assert "to spare holds the activations of" in reason(made, f"retain: at most {made.chunks.retain_tokens} tokens ")
    assert made.fits
    small = plan_here("batch_size=4")
    assert small.chunks.retain_tokens == (4 + 10) * 256, "no more than a batch has"
    assert "nothing is encoded twice" in reason(small, "retain: ")
    assert plan_here(model=formula(max_length=None)).chunks.retain_tokens > 0
    assert plan_here(machine=replace(CPU, memory_bytes=GIB)).chunks.retain_tokens == 0


def test_rows_without_a_limit_are_as_long_as_a_sample_of_the_data_says() -> None:
    endless, sampled = formula(max_length=None), replace(RECORDS, record_tokens=(200.0, 400.0) * 32)
    made, unknown = plan_here(model=endless, data=sampled), plan_here(model=endless)
    tokens = math.ceil(64 * (300 + 4 * 100 / 8))
    assert made.bytes_per_device.activations == tokens * 100_000
    small = plan_here(model=endless, data=replace(sampled, record_tokens=(200.0, 400.0) * 8))
    assert small.bytes_per_device.activations == math.ceil(64 * (300 + 4 * 100 / 4)) * 100_000, "16 rows say less"
    assert plan_here("retain=1", model=endless, data=sampled).bytes_per_device.activations == tokens * 100_000
    whole = plan_here("use_gradient_cache=false", model=endless, data=sampled)
    assert whole.bytes_per_device.activations == tokens * 100_000
    assert f"has at most {tokens} by a sample of the data: nothing is encoded twice" in reason(made, "retain: ")
    assert made.chunks.retain_tokens == unknown.chunks.retain_tokens > tokens, "longer rows may come"
    assert unknown.bytes_per_device.activations > made.bytes_per_device.activations
    assert "nothing says how long rows are" in reason(unknown, "retain: ")


def test_a_given_share_of_kept_graphs_stands_and_counts_in_the_prediction() -> None:
    half, none = plan_here("retain=0.5"), plan_here("retain=0")
    assert (half.chunks.retain, none.chunks.retain) == (0.5, 0.0)
    assert half.chunks.retain_tokens is None, "the user's share stands whatever the memory"
    kept = half.bytes_per_device.activations - none.bytes_per_device.activations
    assert kept == (64 + 160) * 256 * 100_000 // 2


# A call of an evaluation ----------------------------------------------------------------------------------------------


def test_a_call_is_as_large_as_work_and_memory_ask_for() -> None:
    by_work = EVALUATION_SECONDS * 989e12 / 44e6
    assert call_tokens(1e15, 10_000, 44e6, 989) == int(by_work)
    assert call_tokens(40e9, 10_000, 44e6, 989) == int(EVALUATION_SHARE * 40e9 / 10_000) < by_work
    assert call_tokens(-1.0, 10_000, 44e6, 989) == 1


def test_on_an_accelerator_calls_are_larger_than_those_of_training_and_the_plan_says_so() -> None:
    made = plan_here(machine=GPU)
    assert made.eval_tokens is not None
    assert made.eval_tokens > made.chunks.tokens
    assert made.eval_rows == made.eval_tokens, "short texts aren't cut by a number of rows"
    assert f"takes at most {made.eval_tokens} tokens" in reason(made, "evaluation: ")
    small = plan_here(machine=replace(GPU, memory_bytes=8 * GIB))
    assert small.eval_tokens is not None
    assert small.chunks.tokens <= small.eval_tokens < made.eval_tokens


def test_calls_leave_room_for_weights_and_optimizer() -> None:
    large = replace(MINILM, num_parameters=6 * 10**9, num_trainable=6 * 10**9)
    made, full = plan_here(machine=GPU), plan_here("use_lora=false", machine=GPU, model=large)
    assert made.eval_tokens is not None
    assert full.eval_tokens is not None
    assert full.eval_tokens < made.eval_tokens


@pytest.mark.parametrize("overrides", [[], ["use_gradient_cache=false"], ["gradient_cache_chunk_tokens=99"]])
def test_on_a_cpu_calls_have_the_tokens_of_training(overrides: list[str]) -> None:
    made = plan_here(*overrides)
    assert (made.eval_rows, made.eval_tokens) == (256, None)
    assert not any(each.startswith("evaluation: ") for each in made.reasons)


def test_one_call_of_a_whole_batch_is_none_of_an_evaluation() -> None:
    whole, cached = plan_here("use_gradient_cache=false", machine=GPU), plan_here(machine=GPU)
    assert whole.eval_tokens == cached.eval_tokens


@pytest.mark.parametrize("machine", [GPU, replace(GPU, device="cpu")])
def test_the_rows_that_the_user_asks_for_stand(machine: object) -> None:
    assert plan_here("eval_batch_size=7", machine=machine).eval_rows == 7  # type: ignore[arg-type]


# Three usual models on three cards that nobody here has ---------------------------------------------------------------


SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


def measured_tower(
    name: str, tokens: int, parameters: int, table: int, copies: int, saved: float, again: float, flops: float
) -> TowerSize:
    return TowerSize(
        name=name,
        items={"text": "texts", "vision": "pictures"}.get(name, "all"),  # type: ignore[arg-type]
        max_tokens=tokens,
        num_parameters=parameters,
        num_trainable=parameters,
        largest_block=parameters // 30,
        saved=CallCost(saved),
        transient=CallCost(saved / 50),
        saved_checkpointed=CallCost(again),
        transient_checkpointed=CallCost(again),
        forward_flops=CallCost(flops),
        largest_tensor=table,
        outside_blocks=table,
        cast_bytes=copies,
    )


def measured_model(*towers: TowerSize, dimension: int) -> ModelSize:
    total = sum(each.num_parameters for each in towers)
    return ModelSize(total, total, 4, dimension, towers, estimated=False)


# By profile_model of configs/shapes on cuda in bfloat16; activations in bytes for each token of the longest item.
QWEN = measured_model(
    measured_tower("all", 512, 596_049_920, 155_582_464, 880_934_336, 2_446_015, 123_477, 9.397e8), dimension=1024
)


BERT = measured_model(
    measured_tower("all", 512, 109_482_240, 23_440_896, 169_870_520, 404_049, 44_364, 1.910e8), dimension=768
)


CLIP = measured_model(
    measured_tower("text", 77, 63_428_096, 25_296_896, 76_022_048, 297_622, 35_567, 7.815e7),
    measured_tower("vision", 50, 87_849_216, 2_359_296, 175_374_624, 458_433, 162_261, 1.775e8),
    dimension=512,
)


MODELS = {"Qwen3-0.6B": QWEN, "BERT-base": BERT, "CLIP B/32": CLIP}


PAIRS = {"CLIP B/32": replace(DATA, num_records=10**6, pictures_per_record=1.0)}


def plan_of(name: str, card: str, *overrides: str, pairs: int = 8192) -> Plan:
    longest = MODELS[name].max_length
    data = PAIRS.get(name, replace(DATA, num_records=10**6))
    batch = (f"global_batch_size={pairs}", f"max_seq_length={longest}")
    return planned(f"1x{card}", MODELS[name], *batch, *overrides, data=data)


@pytest.mark.parametrize(
    ("name", "card", "rows", "milliseconds"),
    [
        *[("Qwen3-0.6B", "H200", 23, 11), ("Qwen3-0.6B", "H100-80GB", 13, 6), ("Qwen3-0.6B", "RTX4090-24GB", 2, 7)],
        *[("BERT-base", "H200", 152, 15), ("BERT-base", "H100-80GB", 84, 8), ("BERT-base", "RTX4090-24GB", 23, 14)],
        *[("CLIP B/32", "H200", 860, 12), ("CLIP B/32", "H100-80GB", 478, 7)],
        ("CLIP B/32", "RTX4090-24GB", 126, 10),
    ],
)
def test_a_call_keeps_the_card_busy_in_a_quarter_of_what_is_free_and_graphs_are_kept_without_checkpointing(
    name: str, card: str, rows: int, milliseconds: int
) -> None:
    made = plan_of(name, card)
    longest = MODELS[name].max_length
    assert longest is not None
    assert made.chunks.rows == ACCELERATOR_CHUNK_ROWS
    assert made.chunks.tokens // longest == pytest.approx(rows, rel=0.05, abs=1)
    said = re.search(r"; ([0-9.]+) ms of the device at its peak", reason(made, "gradient_cache_chunk_tokens"))
    assert said is not None
    assert float(said[1]) == pytest.approx(milliseconds, abs=0.7)
    call = MODELS[name].call_bytes(made.chunks.tokens, checkpointed=False) - MODELS[name].cast_bytes
    assert call <= 0.26 * made.memory_bytes
    assert made.fits
    assert not made.way.gradient_checkpointing
    assert made.chunks.retain_tokens is not None
    assert made.chunks.retain_tokens > 2 * made.chunks.tokens
    assert made.bytes_per_device.total < 0.9 * made.memory_bytes


@pytest.mark.parametrize(("bf16", "peak"), [("auto", 989e12), ("false", 989e12 / 8)])
def test_a_call_takes_no_more_than_twenty_milliseconds_at_the_peak(bf16: str, peak: float) -> None:
    deep = replace(BERT, towers=(replace(BERT.towers[0], forward_flops=CallCost(4e9)),))
    rows = replace(DATA, num_records=10**6)
    made = planned("1xH200", deep, "global_batch_size=8192", "max_seq_length=512", f"bf16={bf16}", data=rows)
    assert made.chunks.tokens == int(0.02 * peak / 4e9)
    assert "; 20.0 ms of the device at its peak" in reason(made, "gradient_cache_chunk_tokens")


def room_of(made: Plan, candidate: Candidate) -> int:
    """The bytes that a way leaves to activations."""
    sizes = candidate.bytes_per_device
    free = (0.95 * made.memory_bytes - sum(reserve("cuda", candidate.way, made.world_size).values())) / 1.1
    return int(free) - (sizes.total + sizes.apart - sizes.activations)


def test_kept_graphs_take_nine_tenths_of_what_is_free_and_the_place_of_the_first_call() -> None:
    made = plan_of("BERT-base", "H200")
    (cached,) = [each for each in made.candidates if each.way.gradient_cache and not each.way.gradient_checkpointing]
    tokens = cached.chunks.tokens
    room = room_of(made, cached) - BERT.call_bytes(tokens, checkpointed=False)
    token_bytes = BERT.kept_bytes_per_token(checkpointed=False, call_tokens=tokens)
    assert cached.chunks.retain_tokens == int(0.9 * (room + token_bytes * tokens)) // token_bytes


def test_a_call_that_gathers_the_weights_anew_takes_half_of_what_is_free() -> None:
    made = planned("4xRTX4090-24GB", 2.5e9, "batch_size=4096")
    plain = [each for each in made.candidates if not (each.way.use_lora or each.way.cpu_offload)]
    (way,) = [
        each
        for each in plain
        if each.way.mode == "sharded" and each.way.sharding_factor == 4 and not each.way.gradient_checkpointing
    ]
    token_bytes = model(2.5e9).call_bytes_per_token(checkpointed=False)
    assert way.chunks.tokens == int(0.5 * (room_of(made, way) // token_bytes)) < made.memory_bytes // 4 // token_bytes


def test_no_call_is_planned_larger_than_the_batch() -> None:
    made = planned("1xH200", BERT, "global_batch_size=16", "max_seq_length=512")
    assert made.chunks.tokens == 2 * 16 * 512


def test_retained_calls_share_the_copy_of_the_weights() -> None:
    """With a copy for each retained call, 8,192 pairs were said to take 169 GiB, and layers were recomputed."""
    made = plan_of("Qwen3-0.6B", "H200", "retain=1", pairs=32)
    assert made.fits
    assert not made.way.gradient_checkpointing
    tokens = 2 * 32 * 512
    kept = tokens * 2_446_015 + 880_934_336
    assert made.bytes_per_device.activations == pytest.approx(kept, rel=0.03)
    each_its_own = tokens // made.chunks.tokens * 880_934_336
    assert each_its_own > 1 * GIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [("Qwen3-0.6B", "qwen3_0_6b"), ("BERT-base", "bert_base"), ("CLIP B/32", "clip_vit_base_patch32")],
)
def test_the_models_are_those_of_the_shapes(name: str, shape: str) -> None:
    import torch

    from vembed.models.keys import ModelKeys
    from vembed.models.measure import ProfileTarget
    from vembed.models.profile import profile_model

    longest = {} if name == "CLIP B/32" else {"max_seq_length": 512}
    keys = ModelKeys(model_name=str(SHAPES / f"{shape}.json"), **longest)
    found = profile_model(keys, ProfileTarget("cuda", torch.bfloat16))
    assert found.num_parameters == pytest.approx(MODELS[name].num_parameters, rel=1e-6)
    for expected, tower in zip(MODELS[name].towers, found.towers, strict=True):
        width = expected.max_tokens or 1
        assert (tower.max_tokens, tower.largest_tensor) == (width, expected.largest_tensor)
        assert tower.cast_bytes == pytest.approx(expected.cast_bytes, rel=0.01)
        assert tower.saved.of(1, width) / width == pytest.approx(expected.saved.per_token, rel=0.1)
        assert tower.forward_flops.of(1, width) / width == pytest.approx(expected.forward_flops.per_token, rel=0.01)


@pytest.mark.parametrize("longest", [512, None])
@pytest.mark.parametrize("devices", ["1xRTX4090-24GB", "1xH200", "2x8xA100"])
def test_what_retain_auto_keeps_always_fits(devices: str, longest: int | None) -> None:
    size = replace(BERT, towers=tuple(replace(each, max_tokens=longest) for each in BERT.towers))
    plan = planned(devices, size, "global_batch_size=8192", data=replace(DATA, num_records=10**6))
    cached = [candidate for candidate in plan.candidates if candidate.way.gradient_cache]
    assert cached, "else this shows nothing"
    for candidate in cached:
        assert candidate.fits, candidate.way
        assert candidate.chunks.retain_tokens
