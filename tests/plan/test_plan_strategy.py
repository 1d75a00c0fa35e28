"""Which way of training is chosen: the decision matrix, what fits, what a key forces."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import DATA, model, planned, reason

from vembed.config.load import load_config
from vembed.errors import ConfigError
from vembed.plan.devices import GIB, parse_devices
from vembed.plan.plan import Plan, make_plan
from vembed.plan.problem import FIT_FACTOR, FIT_SHARE, Way, reserve
from vembed.plan.strategy import prior

CONFIGS = Path(__file__).parents[2] / "configs"
CLIP, QWEN_2B, QWEN_8B = 151_277_313, 2_127_532_032, 8_144_793_840


@pytest.mark.parametrize(
    ("parameters", "devices", "strategy"),
    [
        (22e6, 1, "single"), (250e6, 1, "single"), (60e9, 1, "single"),
        (500e6, 2, "ddp"), (500e6, 4, "ddp"), (1.25e9, 3, "ddp"), (499e6, 4, "ddp"), (1e8, 8, "ddp"),
        (2e9, 4, "ddp_gradcache"), (5e9, 8, "ddp_gradcache"), (1.999e9, 4, "ddp"), (7.99e9, 8, "ddp_gradcache"),
        (8e9, 8, "fsdp_lora"), (29e9, 16, "fsdp_lora"), (50e9, 16, "fsdp_lora"), (90e9, 64, "fsdp_lora"),
        (3e9, 2, "ddp"), (20e9, 4, "ddp_gradcache"), (60e9, 8, "fsdp_lora"), (3e9, 16, "ddp_gradcache"),
    ],
)  # fmt: skip
def test_the_matrix_by_parameters_and_devices_with_lower_bounds_inclusive(
    parameters: float, devices: int, strategy: str
) -> None:
    assert prior(int(parameters), devices).strategy == strategy


@pytest.mark.parametrize(
    ("parameters", "devices", "strategy"),
    [
        *[(22e6, "1xA100-80GB", "single"), (500e6, "2xA100-80GB", "ddp"), (1.25e9, "4xA100-80GB", "ddp")],
        *[(2e9, "4xA100-80GB", "ddp_gradcache"), (3.5e9, "8xA100-80GB", "ddp_gradcache"), (5e9, "8xA100-80GB", "fsdp")],
        *[(8e9, "8xA100-80GB", "fsdp_lora"), (29e9, "16xA100-80GB", "fsdp_lora"), (75e9, "4x8xA100-80GB", "fsdp_lora")],
    ],
)
def test_every_row_of_the_matrix_at_its_lower_bound_and_its_middle(
    parameters: float, devices: str, strategy: str
) -> None:
    made = planned(devices, parameters)
    assert (made.way.strategy, made.fits) == (strategy, True)
    assert made.reasons[0].startswith(strategy)


def test_what_does_not_fit_replicated_takes_the_rows_alternative_and_says_the_arithmetic() -> None:
    made = planned("8xA100-80GB", 5e9)
    assert "the decision matrix says ddp_gradcache, else fsdp when memory is tight" in made.reasons[0]
    assert "GiB predicted, at most" in reason(made, "ddp_gradcache doesn't fit")
    assert planned("8xH200-141GB", 5e9).way.strategy == "ddp_gradcache", "more memory, and the row's own word stands"


@pytest.mark.parametrize("devices", ["4xRTX4090-24GB", "4xA100-40GB", "4xA100-80GB", "4xH200-141GB"])
def test_around_the_border_of_a_devices_memory_the_plan_changes_and_always_fits(devices: str) -> None:
    """States of full fine-tuning take 16 bytes a parameter: just under the border it is replicated, just over not."""
    memory = parse_devices(devices).memory_bytes
    reserved = sum(reserve("cuda", Way("ddp"), 4).values())
    limit = (FIT_SHARE * memory - reserved) / FIT_FACTOR
    under, over = (planned(devices, share * limit / 16, "use_lora=false") for share in (0.85, 1.02))
    assert under.way.mode is None
    assert over.way.strategy == "fsdp"
    assert under.fits
    assert over.fits
    needed = FIT_FACTOR * over.bytes_per_device.total + reserved
    assert needed <= FIT_SHARE * memory


EXAMPLES = [
    ("clip_ddp.yaml", CLIP, "4xA100-40GB", "ddp"),
    ("qwen3_vl_2b_gradcache.yaml", QWEN_2B, "4xA100-80GB", "ddp_gradcache"),
    ("qwen3_vl_8b_fsdp_lora.yaml", QWEN_8B, "8xA100-80GB", "fsdp_lora"),
]


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize(("name", "parameters", "devices", "strategy"), EXAMPLES)
def test_the_examples_come_to_their_strategy_with_and_without_the_use_keys(
    name: str, parameters: int, devices: str, strategy: str, with_keys: bool
) -> None:
    config = load_config(CONFIGS / name).config
    if not with_keys:
        config = config.model_copy(update=dict.fromkeys(("use_gradient_cache", "use_fsdp", "use_lora"), "auto"))
    spread = parse_devices(devices)
    made = make_plan(config, spread.machine(16), model(parameters), DATA, devices=spread)
    assert (made.way.strategy, made.fits) == (strategy, True)
    assert made.way.use_lora == (strategy == "fsdp_lora")
    assert made.way.gradient_checkpointing == (strategy != "ddp")
    assert made.batch.total == config.batch_size * spread.count


def test_the_examples_hold_exactly_the_keys_of_their_document() -> None:
    def keys(name: str) -> dict[str, object]:
        loaded = load_config(CONFIGS / name)
        return {key: getattr(loaded.config, key) for key in loaded.sources} | {"data_path": 0, "output_dir": 0}

    own = {"data_path": 0, "output_dir": 0}
    assert keys("clip_ddp.yaml") == own | {
        "model_name": "openai/clip-vit-base-patch32", "batch_size": 128, "learning_rate": 1e-4, "epochs": 3,
        "loss_type": "infonce",
    }  # fmt: skip
    assert keys("qwen3_vl_2b_gradcache.yaml") == own | {
        "model_name": "Qwen/Qwen3-VL-Embedding-2B", "batch_size": 64, "use_gradient_cache": True,
        "gradient_cache_chunk_size": 8, "gradient_checkpointing": True, "learning_rate": 1e-5,
    }  # fmt: skip
    assert keys("qwen3_vl_8b_fsdp_lora.yaml") == own | {
        "model_name": "Qwen/Qwen3-VL-Embedding-8B", "batch_size": 16, "use_fsdp": True, "use_lora": True, "lora_r": 16,
        "gradient_checkpointing": True, "learning_rate": 2e-5,
    }  # fmt: skip


def test_lora_comes_with_sharding_from_8b_on_and_never_against_the_users_word() -> None:
    large = planned("8xA100-80GB", 8e9)
    assert (large.way.strategy, large.way.use_lora) == ("fsdp_lora", True)
    assert "use_lora false keeps full fine-tuning" in reason(large, "use_lora: ")
    full = planned("8xA100-80GB", 8e9, "use_lora=false")
    assert (full.way.strategy, full.way.use_lora, full.fits) == ("fsdp", False, True)
    part = planned("8xA100-80GB", 8e9, "trainable=last_2_layers")
    assert not part.way.use_lora, "who names the part that trains has decided"
    assert planned("8xA100-80GB", 8e9, adapters=False).way.strategy == "fsdp"
    assert planned("4xA100-80GB", 3e9, "use_fsdp=true").way.strategy == "fsdp", "a smaller model trains in full"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["use_fsdp=true"], ("fsdp", "fast", 4)),
        (["use_fsdp=true", "fsdp_mode=sharded"], ("fsdp", "sharded", 4)),
        (["fsdp_mode=lean"], ("fsdp", "lean", 4)),
        (["sharding_factor=2"], ("fsdp", "fast", 2)),
        (["sharding_factor=1"], ("ddp", None, 1)),
        (["cpu_offload=true"], ("fsdp", "sharded", 4)),
        (["use_gradient_cache=true"], ("ddp_gradcache", None, 1)),
        (["use_fsdp=true", "use_lora=true"], ("fsdp_lora", "fast", 4)),
        (["use_lora=true"], ("ddp", None, 1)),
    ],
)
def test_what_the_user_forces_wins_and_the_numbers_are_heard(
    overrides: list[str], expected: tuple[str, str | None, int]
) -> None:
    made = planned("4xA100-80GB", 600e6, *overrides)
    assert (made.way.strategy, made.way.mode, made.way.sharding_factor) == expected
    warned = any("as set; the numbers alone would give ddp" in each for each in made.reasons)
    assert warned == (expected[0] != "ddp")
    assert made.way.use_lora == ("use_lora=true" in overrides)
    assert made.way.cpu_offload == ("cpu_offload=true" in overrides)


def test_a_forced_way_that_does_not_fit_is_taken_with_a_warning() -> None:
    made = planned("4xRTX4090-24GB", 3e9, "use_fsdp=false", "use_lora=false")
    assert (made.way.strategy, made.fits) == ("ddp_gradcache", False)
    assert reason(made, "by the numbers fsdp ").endswith("the keys that are set rule it out")
    assert any("no way that the keys allow fits" in each for each in made.reasons)


def test_gradient_checkpointing_above_1b_brings_gradient_caching() -> None:
    assert planned("4xA100-80GB", 1.2e9, "gradient_checkpointing=true").way.strategy == "ddp_gradcache"
    assert planned("4xA100-80GB", 0.9e9, "gradient_checkpointing=true").way.strategy == "ddp"
    forced = planned("4xA100-80GB", 1.2e9, "gradient_checkpointing=true", "use_gradient_cache=false")
    assert (forced.way.strategy, forced.chunks.retain) == ("ddp", 1.0)


def test_a_batch_whose_graphs_do_not_fit_is_cached_and_one_that_fits_costs_nothing() -> None:
    assert planned("4xA100-80GB", 600e6, "batch_size=64").way.strategy == "ddp"
    assert planned("4xA100-80GB", 600e6, "batch_size=64", "retain=0.5").way.strategy == "ddp_gradcache"
    large = planned("4xA100-80GB", 600e6, "batch_size=4096")
    assert (large.way.strategy, large.fits) == ("ddp_gradcache", True)
    spare = planned("4xA100-80GB", 2.1e9, "batch_size=8")
    (chosen,) = [each for each in spare.candidates if spare.recommends(each)]
    assert (spare.way.strategy, chosen.chunks.kept_share) == ("ddp_gradcache", 1.0)


def test_checkpointing_comes_before_sharding_and_offload_comes_last() -> None:
    """A long row's graph alone is too large without checkpointing."""
    assert not planned("4xRTX4090-24GB", 1.05e9, tokens=128).way.gradient_checkpointing
    tight = planned("4xRTX4090-24GB", 1.05e9, tokens=2048)
    assert (tight.way.strategy, tight.way.gradient_checkpointing, tight.fits) == ("ddp_gradcache", True, True)
    assert "wouldn't fit without" in reason(tight, "gradient_checkpointing: ")
    never = planned("4xRTX4090-24GB", 1.05e9, "gradient_checkpointing=false", tokens=2048)
    assert (never.way.strategy, never.fits) == ("fsdp", True)
    offloaded = planned("4xRTX4090-24GB", 12e9, "use_lora=false")
    assert (offloaded.way.strategy, offloaded.way.cpu_offload, offloaded.fits) == ("fsdp", True, True)


def test_one_device_takes_adapters_only_where_nothing_else_fits() -> None:
    made = planned("1xA100-80GB", 7e9)
    assert (made.way.strategy, made.way.use_lora, made.fits) == ("single", True, True)
    assert not planned("1xA100-80GB", 3e9).way.use_lora
    assert planned("1xA100-80GB", 7e9, "use_lora=false").fits is False


def test_one_device_has_nothing_to_shard_over_and_says_so() -> None:
    made = planned("1xA100-80GB", 250e6, "use_fsdp=true", "sharding_factor=4")
    assert (made.way.strategy, made.way.sharding_factor) == ("single", 1)
    assert "nothing to shard over" in reason(made, "use_fsdp true")
    assert "nothing to shard over" in reason(made, "sharding_factor 4")


def test_a_sharding_factor_that_does_not_divide_the_devices_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"sharding_factor 3 doesn't divide 8 devices; set it to 2, or to auto"):
        planned("8xA100-80GB", 1e9, "sharding_factor=3")
    assert planned("8xA100-80GB", 1e9, "sharding_factor=4").way.sharding_factor == 4


def test_gradients_in_half_precision_are_never_added_up_in_shards() -> None:
    halved = replace(model(20e9), bytes_per_value=2)
    made = planned("4xA100-80GB", halved, "torch_dtype=bfloat16", "use_lora=false")
    assert {each.way.mode for each in made.candidates if not each.way.use_lora} == {None, "fast", "lean"}
    with pytest.raises(ConfigError, match="no way to train has all of use_fsdp true, fsdp_mode sharded"):
        planned("4xA100-80GB", halved, "torch_dtype=bfloat16", "use_lora=false", "use_fsdp=true", "fsdp_mode=sharded")
    assert planned("4xA100-80GB", 20e9, "use_lora=false", "use_fsdp=true", "fsdp_mode=sharded").way.mode == "sharded"


def test_shards_that_the_hosts_memory_cannot_hold_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """8B in float32: 4 devices with 29.8 GiB each."""
    monkeypatch.setattr("vembed.plan.plan.cpu_memory_bytes", lambda: 128 * GIB)
    config = load_config(None, ["model_name=m", "use_lora=false", "cpu_offload=true"]).config
    devices = parse_devices("4x24GB")
    here = replace(devices.machine(16), torch_version="2.15.0")
    made = make_plan(config, here, model(8e9), DATA, devices=devices)
    assert "take 119.2 GiB of the host's memory" not in " ".join(made.notes), "they fit"
    monkeypatch.setattr("vembed.plan.plan.cpu_memory_bytes", lambda: 64 * GIB)
    made = make_plan(config, here, model(8e9), DATA, devices=devices)
    assert "4 devices take 119.2 GiB of the host's memory, which is 64.0 GiB" in reason(made, "cpu_offload")
    assert not any("cpu_offload" in note for note in planned("4x24GB", 8e9, "cpu_offload=true").notes), "of other hosts"


def test_weights_in_four_bits_are_never_sharded() -> None:
    made = planned("4xA100-80GB", 20e9, "use_lora=true", "load_in_4bit=true")
    assert (made.way.mode, made.way.use_lora, made.fits) == (None, True, True)
    assert made.bytes_per_device.parameters < 0.6 * 20e9 + 1e9
    assert {each.way.mode for each in made.candidates} == {None}


def test_a_faster_way_that_fits_is_named_and_not_taken() -> None:
    made = planned("4xA100-80GB", 3.5e9, "batch_size=128")
    assert made.way.strategy == "ddp_gradcache"
    others = [each for each in made.candidates if each.fits and not each.way.use_lora]
    faster = max(others, key=lambda each: each.relative_speed)
    (chosen,) = [each for each in made.candidates if made.recommends(each)]
    assert faster.relative_speed > 1.05 * chosen.relative_speed, "else this shows nothing"
    assert any(each.startswith(f"{faster.way} fits as well") for each in made.reasons)


def test_the_plan_is_a_pure_function_and_its_json_names_one_choice() -> None:
    one, other = planned("8xA100-80GB", 8e9), planned("8xA100-80GB", 8e9)
    assert one == other
    content = one.to_json()
    assert json.loads(json.dumps(content)) == content
    chosen = [each for each in content["candidates"] if each["recommended"]]
    assert len(chosen) == 1
    assert (chosen[0]["strategy"], chosen[0]["mode"], chosen[0]["zero_stage"]) == ("fsdp_lora", "fast", 1)
    for each in content["candidates"]:
        parts = dict(each["bytes_per_device"])
        assert parts.pop("total") == sum(parts.values()) > 0
    for devices in ("1xA100-80GB", "4xA100-80GB"):
        made = planned(devices, 6e8)
        (chosen,) = [each for each in made.to_json()["candidates"] if each["recommended"]]
        assert (chosen["fits"], chosen["bytes_per_device"]["total"]) == (made.fits, made.bytes_per_device.total)


def fits_somewhere(plan: Plan) -> bool:
    return any(each.fits for each in plan.candidates)


def test_sharding_reaches_models_that_no_replica_holds() -> None:
    """The sizes at which replication stops: 2.28B on 40 GB and 11B on 80 GB."""
    for devices, parameters in (("4xA100-40GB", 2.4e9), ("8xA100-80GB", 11e9)):
        made = planned(devices, parameters, "use_lora=false")
        assert (made.way.strategy, made.fits) == ("fsdp", True)
        assert not any(each.fits for each in made.candidates if each.way.mode is None and not each.way.use_lora)
    assert not fits_somewhere(planned("1xT4-16GB", replace(model(30e9), adapted=None)))


def test_a_faster_way_that_keys_rule_out_is_named_with_them() -> None:
    made = planned("8xA100-80GB", 5e8, "gradient_checkpointing=true")
    (said,) = [each for each in made.reasons if "ruled out by" in each]
    assert said.endswith("by rough figures; ruled out by gradient_checkpointing true")
    assert not any("ruled out by" in each for each in planned("8xA100-80GB", 5e8).reasons)
