"""`vembed plan` for devices that nobody here has, without data and without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vembed.config.load import load_config
from vembed.entrypoints import plan

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run whose data don't exist."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model_name: builtin:tiny-transformer\ndata_path: {tmp_path}/none.jsonl\noutput_dir: {tmp_path}/out\n"
    )
    return path


def run(*words: str) -> int:
    return plan.main(list(words), program="vembed plan")


def test_a_plan_for_other_devices_reads_no_data_and_writes_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            str(config),
            "--devices",
            "4xA100-40GB",
            "--records",
            "1000",
            "--config_override",
            "batch_size=100",
            "enable_gather=true",
            "--details",
        )
        == 0
    )
    out = capsys.readouterr().out
    screen, _, details = out.partition("\nplan\n")
    assert len(screen.splitlines()) <= 24
    assert "strategies\n" not in screen
    facts = dict(line.split(maxsplit=1) for line in details.splitlines()[:5])
    assert (facts["strategy"], facts["batch"]) == ("ddp", "400 = 100 x 4 processes")
    assert "no data were read: 1,000 records" in out
    assert "enable_gather true: the documents of all devices" in out
    for title in (
        "strategies",
        "ZeRO stages",
        "decision tree",
        "if a step still runs out of memory",
        "as devices are added",
    ):
        assert f"\n{title}" in out
    assert not (tmp_path / "out").exists()


def test_the_same_as_json_for_a_shape_in_the_models_place(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = str(CONFIGS / "shapes/bert_base.json")
    words = ("--model-config", shape, "--devices", "2x8xA100-40GB", "--json", "--config_override", "max_seq_length=64")
    assert run(str(config), *words) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert (content["world_size"], content["strategy"]) == (16, "ddp")
    (chosen,) = [each for each in content["candidates"] if each["recommended"]]
    assert chosen["bytes_per_device"]["parameters"] == 4 * 109_482_240


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "many"), "8xH100-80GB"),
        (("--records", "10"), "beside --devices or --model-config"),
        (("--devices", "4x24GB", "--records", "1"), "at least 2 records"),
        (("--devices", "4x24GB", "--model-config", "none.json"), "no such file"),
        (("--devices", "4x24GB", "--config_override", "sharding_factor=3"), "sharding_factor 3 doesn't divide 4"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    config: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(config), *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "shape", "devices"),
    [
        ("2x_rtx4090_24gb", "qwen3_0_6b", "2xRTX4090-24GB"),
        ("2x_a100_h100_80gb", "qwen3_4b", "2xA100-80GB"),
        ("2x_a100_h100_80gb", "qwen3_4b", "2xH100-80GB"),
        ("4x_h200_141gb", "qwen3_8b", "4xH200-141GB"),
    ],
)
def test_a_hardware_preset_fits_its_devices(
    preset: str, shape: str, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CONFIGS / f"hardware/{preset}.yaml"
    assert load_config(path).config.num_processes == int(devices[0])
    assert run(str(path), "--devices", devices, "--model-config", str(CONFIGS / f"shapes/{shape}.json"), "--json") == 0
    content = json.loads(capsys.readouterr().out)
    (chosen,) = [each for each in content["candidates"] if each["recommended"]]
    assert chosen["fits"]
    assert not chosen["estimated"], "activations come from the model's own operations"
    assert content["batch_size"] >= 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_name", "shape", "devices", "strategy"),
    [
        ("clip_ddp", "clip_vit_base_patch32", "4xA100-40GB", "ddp"),
        ("qwen3_vl_2b_gradcache", "qwen3_vl_2b", "4xA100-80GB", "ddp_gradcache"),
        ("qwen3_vl_8b_fsdp_lora", "qwen3_vl_8b", "8xA100-80GB", "fsdp_lora"),
    ],
)
def test_an_example_comes_to_its_strategy_from_the_shape_of_its_model(
    config_name: str, shape: str, devices: str, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(CONFIGS / f"{config_name}.yaml"), "--model-config", str(CONFIGS / f"shapes/{shape}.json"), "--json")
    keys = (
        [] if strategy == "ddp" else ["--config_override", "use_gradient_cache=auto", "use_fsdp=auto", "use_lora=auto"]
    )
    for overrides in ([], keys):
        assert run(*words, "--devices", devices, *overrides) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["strategy"] == strategy
        assert content["fits"]


def test_texts_without_a_limit_are_planned_by_a_sample_of_the_data(
    config: Path, bag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"query": f"apple {number}", "positive": f"a red apple {number}"} for number in range(400)]
    (tmp_path / "none.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--json", "--config_override", f"model_name={bag}", "batch_size=8", "eval_strategy=no")
    assert run(str(config), *words) == 0, capsys.readouterr().err
    content = json.loads(capsys.readouterr().out)
    assert any("by a sample of the data: nothing is encoded twice" in reason for reason in content["reasons"])
    (chosen,) = [each for each in content["candidates"] if each["recommended"]]
    assert chosen["retain"] == 1
    assert chosen["bytes_per_device"]["total"] < 64 << 20
