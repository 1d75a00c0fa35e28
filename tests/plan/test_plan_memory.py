"""What a step takes: bytes by part, their worst moment, the reserve, seconds, and bytes over the wires."""

import math
from dataclasses import replace
from typing import TypeAlias

import pytest
from plan_cases import CPU, DATA, MINILM, formula, model, plan_here, planned, reason, tower

from vembed.config.load import load_config
from vembed.plan.chunks import ChunkPlan
from vembed.plan.cost import Candidate
from vembed.plan.devices import GIB, parse_devices
from vembed.plan.memory import (
    LOSS_STRIP_TILES,
    BatchRows,
    BytesPerDevice,
    CallCost,
    LossTiles,
    ModelSize,
    TowerSize,
    loss_bytes,
)
from vembed.plan.peak import Activations, activation_moments, peak_of_step
from vembed.plan.plan import Plan, make_plan
from vembed.plan.problem import BLAS_BYTES, COMMUNICATOR_BYTES, CONTEXT_BYTES, PROCESS_BYTES, DataSize, Way, reserve

# Parts ----------------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_step_are_what_the_parts_add_up_to() -> None:
    sizes = plan_here("retain=0", "gradient_cache_chunk_tokens=1000", "loss_tile_size=100").bytes_per_device
    assert sizes.parameters == 22_000_000 * 4
    assert sizes.gradients == 21_000_000 * 4
    assert sizes.optimizer == 2 * sizes.gradients
    assert sizes.activations == 1000 * 100_000
    assert sizes.loss == 2 * (64 + 160) * 384 * 4 + 64 * 100 * 4 + 64 * 160 * 4
    assert (sizes.embeddings, sizes.reduction, sizes.sharding) == (0, 0, 0), "one device waits for nobody"
    assert sizes.total == sum((sizes.parameters, sizes.gradients, sizes.optimizer, sizes.activations, sizes.loss))


def test_the_prediction_is_of_the_batch_that_there_is() -> None:
    small = plan_here("batch_size=4096", data=DataSize(num_records=10, documents_per_query=1.0))
    of_ten = loss_bytes(MINILM, BatchRows(10, 10, 10, 10), LossTiles(1024, 1))
    assert small.bytes_per_device.loss == of_ten


def test_a_teachers_vectors_of_all_rows_are_counted() -> None:
    plain, taught = (
        plan_here(
            "batch_size=4096", data=DataSize(num_records=9000, documents_per_query=2.0, teacher_dimension=dimension)
        )
        for dimension in (0, 1024)
    )
    assert taught.bytes_per_device.loss - plain.bytes_per_device.loss == 3 * 4096 * 1024 * 4


def test_the_loss_takes_the_memory_of_tiles_however_large_the_batch() -> None:
    loss = loss_bytes(replace(MINILM, dimension=256), BatchRows(65_536, 65_536, 65_536, 65_536), LossTiles(1024, 2))
    table = 2 * 65_536 * 256 * 4
    assert loss == 2 * table + (2 + LOSS_STRIP_TILES) * 1024**2 * 4
    assert loss - table < 200e6, "beside the embeddings"


def test_pictures_are_never_cut_to_the_length_of_texts() -> None:
    (texts,) = formula(max_length=8192).towers
    pictures = replace(texts, name="vision", items="pictures", cuts=False, max_tokens=5000)
    both = replace(MINILM, towers=(replace(texts, items="texts"), pictures))
    assert [tower.max_tokens for tower in both.limited(100).towers] == [100, 5000]
    made = plan_here(model=both)
    assert "texts of up to 2048 of the 8192 tokens" in reason(made, "memory is predicted")
    assert plan_here(model=replace(both, towers=(pictures,))).bytes_per_device.activations >= 5000 * 100_000


# Ways -----------------------------------------------------------------------------------------------------------------


def of(plan: Plan, **wanted: object) -> Candidate:
    """The first candidate whose way is so, full fine-tuning without checkpointing unless said otherwise."""
    wanted = {"use_lora": False, "gradient_checkpointing": False, "cpu_offload": False, **wanted}
    return next(
        each for each in plan.candidates if all(getattr(each.way, key) == value for key, value in wanted.items())
    )


def states(candidate: Candidate) -> float:
    sizes = candidate.bytes_per_device
    return (sizes.parameters + sizes.gradients + sizes.optimizer) / 1e9


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_zero_stages_follow_their_formulas_on_any_number_of_devices_and_in_groups(devices: int) -> None:
    """In float32 with Adam a parameter takes 4 bytes, and as many for its gradient and for each of two moments."""
    made = planned(f"{devices}xA100-80GB", 1e9, "bf16=false")
    replicated = of(made, strategy="ddp")
    assert (states(replicated), replicated.way.zero_stage) == (pytest.approx(4.0 * 4), 0)
    for factor in (each for each in (2, 4, 8) if each <= devices):
        for stage, mode, held in ((1, "fast", 2 + 2 / factor), (2, "lean", 1 + 3 / factor), (3, "sharded", 4 / factor)):
            way = of(made, strategy="fsdp", mode=mode, sharding_factor=factor)
            assert (states(way), way.way.zero_stage) == (pytest.approx(4.0 * held), stage)


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


def test_sharded_blocks_are_gathered_in_the_type_that_they_compute_in_so_that_calls_keep_no_copies() -> None:
    stack = replace(tower(500, 500, layers=1, hidden=1, tokens=1), cast_bytes=900, saved=CallCost(1.0, per_call=200.0))
    assert stack.sharded(2).saved == CallCost(1.0, per_call=100.0), "200 + 900 less 500 values of 2 bytes"
    assert replace(stack, cast_bytes=100).sharded(2).saved.per_call == 0
    assert stack.sharded(2).cast_bytes == 0


def test_gradients_that_blocks_leave_over_are_not_there_beside_the_graphs() -> None:
    (stack,) = model(1e9).towers
    split = replace(model(1e9), towers=(replace(stack, outside_blocks=2 * 10**8),))
    sizes = of(planned("4xA100-80GB", split), strategy="fsdp", mode="sharded", sharding_factor=4).bytes_per_device
    assert sizes.apart >= sizes.gradients + 4 * 2 * 10**8


def test_gradients_of_accumulated_batches_are_there_beside_the_graphs() -> None:
    one, two = (planned("1xA100-80GB", 6e8, f"gradient_accumulation_steps={steps}", "retain=0") for steps in (1, 2))
    assert two.bytes_per_device.total == one.bytes_per_device.total + one.bytes_per_device.gradients


def test_sharding_gathers_blocks_in_half_precision_and_the_rest_in_its_own() -> None:
    whole = model(1e9)
    (stack,) = whole.towers
    split = replace(whole, towers=(replace(stack, outside_blocks=2 * 10**8),))
    plain, mixed = (of(planned("4xA100-80GB", each), strategy="fsdp", mode="fast") for each in (whole, split))
    assert plain.bytes_per_device.parameters == 2 * 10**9
    assert mixed.bytes_per_device.parameters == 2 * 8 * 10**8 + 4 * 2 * 10**8
    lean = [of(planned("4xA100-80GB", each), strategy="fsdp", mode="lean").bytes_per_device for each in (whole, split)]
    assert lean[1].sharding - lean[0].sharding == 4 * 2 * 10**8


def test_two_blocks_are_whole_at_once_beside_shards_of_gradients_or_the_gradients_of_one_block() -> None:
    made = planned("4xA100-80GB", 1e9)
    block, gradients = 10**9 // 28, 4 * 10**9
    lean, sharded = (of(made, strategy="fsdp", mode=mode, sharding_factor=4) for mode in ("lean", "sharded"))
    assert lean.bytes_per_device.sharding == 2 * block * 2 + gradients // 4
    assert sharded.bytes_per_device.sharding == 2 * block * 2 + block * 4
    assert of(made, strategy="fsdp", cpu_offload=True, sharding_factor=4).bytes_per_device.sharding == (
        sharded.bytes_per_device.sharding
    )


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


@pytest.mark.parametrize(("batch_size", "length"), [(2, 2048), (4, 128), (64, 8)])
def test_a_way_never_needs_more_in_small_calls_than_as_planned(batch_size: int, length: int) -> None:
    for size in (model(6e8, tokens=length), formula(max_length=length)):
        for candidate in planned("2xA100-80GB", size, f"batch_size={batch_size}").candidates:
            assert candidate.least_bytes <= candidate.bytes_per_device.total, candidate.way


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
    made = planned("4xA100-80GB", 1e9, "batch_size=8", "bf16=false", "gradient_cache_chunk_tokens=1024")
    rows = 4 * 8 * 2
    embeddings = 2 * rows * 2048 * 4 * 3 / 4
    weights = 4e9
    assert of(made, strategy="ddp").communication_bytes == pytest.approx(2 * weights * 3 / 4 + embeddings, rel=1e-6)
    fast = of(made, strategy="fsdp", mode="fast", sharding_factor=4)
    # Weights are gathered in each pass of each call; whole gradients wait for the last call, shards of them can't.
    assert fast.communication_bytes == pytest.approx(2 * weights * 3 / 4 + embeddings, rel=1e-6)
    gradients = weights
    for mode in ("lean", "sharded"):
        way = of(made, strategy="fsdp", mode=mode, sharding_factor=4)
        calls = math.ceil(2 * 8 / (way.chunks.tokens // 128))
        gathered = calls * (3 - way.chunks.kept_share) * weights
        reduced = gradients * (calls if mode == "sharded" else 1)
        assert way.communication_bytes == pytest.approx((gathered + reduced) * 3 / 4 + embeddings, rel=1e-6)
    assert calls > 1, "else this shows nothing"
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


# The worst moment of a step, by hand for small numbers of calls -------------------------------------------------------


def small_tower(name: str = "text", *, saved: float = 10.0, extra: float = 1.0, trainable: int = 100) -> TowerSize:
    return TowerSize(
        name=name,
        max_tokens=10,
        num_parameters=100,
        num_trainable=trainable,
        largest_block=10,
        saved=CallCost(saved),
        transient=CallCost(extra),
        saved_checkpointed=CallCost(saved / 10),
        transient_checkpointed=CallCost(extra),
        forward_flops=CallCost(1.0),
        largest_tensor=50,
    )


PARTS = BytesPerDevice(parameters=1000, gradients=400, optimizer=800, activations=0, loss=60)
Load: TypeAlias = tuple[TowerSize, float, int]
"""A tower, its rows, and the tokens of a row."""


def cut(rows: int, tokens: int, retain: float = 0.0, retain_tokens: int | None = None) -> ChunkPlan:
    return ChunkPlan(rows, tokens, retain, retain_tokens, kept_share=0.0, activation_bytes=0, reasons=())


def moments_of(loads: list[Load], chunks: ChunkPlan) -> Activations:
    return activation_moments(loads, chunks, checkpointed=False)


def worst(loads: list[Load], chunks: ChunkPlan, **options: int) -> BytesPerDevice:
    return peak_of_step(PARTS, moments_of(loads, chunks), **{"tables": 20, "fresh": 200, **options})


@pytest.mark.parametrize(
    ("stack", "rows", "chunks", "fresh", "gradients", "activations"),
    [
        # 3 calls of 4 rows x 10 tokens: 400 bytes kept, 40 beyond, beside all gradients.
        pytest.param({}, 12, cut(4, 1000), 200, 400, 440, id="a replay holds one call"),
        # 4 rows, then 1: the large one runs before there are gradients, 440; the small one beside them, 400 + 110.
        pytest.param({}, 5, cut(4, 1000), 200, 400, 200, id="the last call ends with a fresh gradient"),
        pytest.param({}, 5, cut(4, 1000), 0, 400, 110, id="the last call is as small as it is"),
        pytest.param({"saved": 100.0}, 12, cut(100, 1000), 200, 0, 12_120, id="plain training has no gradients yet"),
        pytest.param({"saved": 100.0, "extra": 2.0}, 12, cut(4, 1000, 1.0), 200, 0, 12_080, id="retained calls"),
        pytest.param({"saved": 2.0}, 12, cut(4, 1000, 1.0), 0, 400, 2 * 80 + 40, id="the first retained one goes"),
    ],
)
def test_the_worst_moment_by_hand(
    stack: dict[str, float], rows: int, chunks: ChunkPlan, fresh: int, gradients: int, activations: int
) -> None:
    peak = worst([(small_tower(**stack), rows, 10)], chunks, fresh=fresh)  # type: ignore[arg-type]
    assert (peak.gradients, peak.activations, peak.loss) == (gradients, activations, 20)


def test_what_a_call_keeps_whatever_its_rows_counts_for_each_call() -> None:
    stack = replace(small_tower(extra=2.0), saved=CallCost(100.0, per_call=7.0))
    three = worst([(stack, 12, 10)], cut(rows=4, tokens=1000, retain=1.0))
    one = worst([(stack, 12, 10)], cut(rows=100, tokens=1000))
    assert three.activations == 12_080 + 3 * 7
    assert one.activations == 12_240 + 7


def test_all_calls_share_one_copy_of_the_weights_that_is_there_to_the_end() -> None:
    stack = replace(small_tower(extra=2.0), saved=CallCost(100.0), cast_bytes=70)
    for retain in (0.0, 1.0):
        load, chunks = [(stack, 12, 10)], cut(4, 1000, retain)
        plain = worst([(replace(stack, cast_bytes=0), 12, 10)], chunks)
        assert worst(load, chunks).activations == plain.activations + 70
    assert worst([(stack, 4, 10), (replace(stack, name="b"), 4, 10)], cut(4, 40)).activations == 4080 + 2 * 70


def test_gradients_of_copies_wait_for_the_end_of_a_backward() -> None:
    stack = replace(small_tower(saved=1.0), cast_bytes=900)
    # 40 bytes kept and 40 beyond. At the end of the second call: 900 waiting, the table's fresh 200, all gradients.
    peak = worst([(stack, 12, 10)], cut(rows=4, tokens=1000))
    assert (peak.gradients, peak.activations) == (400, 900 + 900 + 200)
    # A single call goes back before there are gradients.
    peak = worst([(stack, 4, 10)], cut(rows=4, tokens=1000))
    assert (peak.gradients, peak.activations) == (0, 900 + 900)


def test_a_tower_that_comes_later_has_no_gradients_yet() -> None:
    loads = [(small_tower("vision", trainable=75), 4, 10), (small_tower("text", trainable=25), 4, 10)]
    moments = moments_of(loads, cut(rows=4, tokens=40)).moments
    assert [moment.gradients for moment in moments] == [0.0, 0.0, 0.75, 0.75], "a call and its end, tower after tower"


def test_texts_are_retained_before_pictures() -> None:
    loads = [(small_tower("vision", saved=3.0), 8, 10), (small_tower("text"), 8, 10)]
    assert moments_of(loads, cut(rows=4, tokens=40, retain=0.5)).kept == 8 * 10 * 10.0
    assert moments_of(loads, cut(rows=4, tokens=40, retain=0.75)).kept == 8 * 10 * 10.0 + 4 * 10 * 3.0
    assert moments_of(loads, cut(rows=4, tokens=40, retain=1.0, retain_tokens=79)).kept == 4 * 10 * 10.0


def test_what_does_not_train_keeps_no_gradients() -> None:
    loads = [(small_tower("vision", saved=0.0, extra=0.0, trainable=0), 8, 10), (small_tower("text"), 8, 10)]
    moments = moments_of(loads, cut(rows=4, tokens=40)).moments
    assert {moment.gradients for moment in moments} == {0.0, 1.0}


def test_gradients_of_earlier_batches_stay() -> None:
    load, chunks = [(small_tower(), 12, 10)], cut(rows=4, tokens=1000)
    held = peak_of_step(PARTS, moments_of(load, chunks), tables=20, fresh=200, held=True)
    assert held.gradients == 800
    assert worst(load, chunks).gradients == 400


@pytest.mark.parametrize("retain", [0.0, 0.3, 0.5, 1.0])
def test_keeping_more_never_takes_less_in_the_loss(retain: float) -> None:
    load = [(small_tower(), 37, 10)]
    less, more = (moments_of(load, cut(4, 40, share)).kept for share in (retain, min(1.0, retain + 0.2)))
    assert less <= more
    assert moments_of(load, cut(4, 40, 1.0)).kept == 3700.0


def test_reduction_needs_room_for_the_largest_tensor() -> None:
    none = peak_of_step(PARTS, moments_of([(small_tower(), 1, 1)], cut(4, 40)), tables=0, fresh=0)
    parts = replace(PARTS, reduction=100)
    small = peak_of_step(parts, moments_of([(small_tower(), 1, 1)], cut(4, 40)), tables=0, fresh=90)
    large = peak_of_step(parts, moments_of([(small_tower(), 1, 1)], cut(4, 40)), tables=0, fresh=300)
    assert (none.reduction, small.reduction, large.reduction) == (0, 100, 300)


# The reserve ----------------------------------------------------------------------------------------------------------


HYBRID = Way("fsdp", mode="fast", sharding_factor=2)


@pytest.mark.parametrize(
    ("way", "num_devices", "num_groups"),
    [
        (Way("single"), 1, 0),
        (Way("ddp"), 8, 1),
        (Way("fsdp", mode="lean", sharding_factor=8), 8, 1),  # shards are spread over the group of all
        (HYBRID, 8, 3),
    ],
)
def test_an_accelerator_keeps_room_for_context_libraries_and_each_group(
    way: Way, num_devices: int, num_groups: int
) -> None:
    total = sum(reserve("cuda", way, num_devices).values())
    assert total == CONTEXT_BYTES + BLAS_BYTES + num_groups * COMMUNICATOR_BYTES
    assert sum(reserve("cpu", way, num_devices).values()) == PROCESS_BYTES


def test_the_plan_lists_the_reserve_and_counts_it() -> None:
    made = planned("8xA100-40GB", 1.5e9, "use_fsdp=true", "sharding_factor=2")
    assert "3 communicators of NCCL" in reason(made, "reserve: ")
    assert "1 communicator of NCCL" in reason(planned("8xA100-40GB", 1.5e9), "reserve: ")
    assert "+ 2.7 GiB =" in reason(made, "memory: ")
    assert "NCCL" not in reason(planned("1xA100-40GB", 1e8), "reserve: ")


def test_it_fits_up_to_95_percent_of_the_memory_with_reserve() -> None:
    needed = 1.1 * plan_here("retain=0").bytes_per_device.total + 1.5 * GIB
    least = math.ceil(needed / 0.95)
    fitting = plan_here("retain=0", machine=replace(CPU, memory_bytes=least + 1))
    assert fitting.fits
    assert reason(fitting, "memory: ").endswith(": fits")
    tight = plan_here("retain=0", machine=replace(CPU, memory_bytes=least - 2))
    assert not tight.fits
    assert reason(tight, "memory: ").endswith("may not fit; a smaller batch_size helps")
    assert tight.steps.total == fitting.steps.total, "the plan warns; the user's word stands"
