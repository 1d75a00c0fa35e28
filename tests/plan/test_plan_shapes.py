"""Three usual models on three cards that nobody here has: calls that keep the card busy, and graphs that fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plan_cases import DATA, planned, reason

from vembed.plan.chunks import ACCELERATOR_CHUNK_ROWS
from vembed.plan.devices import GIB
from vembed.plan.memory import CallCost, ModelSize, TowerSize

if TYPE_CHECKING:
    from vembed.plan.plan import Plan

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


def tower(
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


def model(*towers: TowerSize, dimension: int) -> ModelSize:
    total = sum(each.num_parameters for each in towers)
    return ModelSize(total, total, 4, dimension, towers, estimated=False)


# By profile_model of configs/shapes on cuda in bfloat16; activations in bytes for each token of the longest item.
QWEN = model(tower("all", 512, 596_049_920, 155_582_464, 880_934_336, 2_446_015, 123_477, 9.397e8), dimension=1024)
BERT = model(tower("all", 512, 109_482_240, 23_440_896, 169_870_520, 404_049, 44_364, 1.910e8), dimension=768)
CLIP = model(
    tower("text", 77, 63_428_096, 25_296_896, 76_022_048, 297_622, 35_567, 7.815e7),
    tower("vision", 50, 87_849_216, 2_359_296, 175_374_624, 458_433, 162_261, 1.775e8),
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
        ("Qwen3-0.6B", "H200", 23, 11),
        ("Qwen3-0.6B", "H100-80GB", 13, 6),
        ("Qwen3-0.6B", "RTX4090-24GB", 2, 7),
        ("BERT-base", "H200", 152, 15),
        ("BERT-base", "H100-80GB", 84, 8),
        ("BERT-base", "RTX4090-24GB", 23, 14),
        ("CLIP B/32", "H200", 860, 12),
        ("CLIP B/32", "H100-80GB", 478, 7),
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
    from vembed.models.profile.measure import ProfileTarget
    from vembed.models.profile.profile import profile_model

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
    for candidate in plan.candidates:
        if candidate.way.gradient_cache:
            assert candidate.fits, candidate.way
            assert candidate.chunks.retain_tokens
