"""The size of a model that was never built: against the same model on real tensors, and what must hold of any."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.picture_models import PICTURES, vectors, write_picture_model
from kit.text_models import load_any

from vembed.errors import ConfigError
from vembed.models import profile as profiling
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_skeleton
from vembed.models.measure import LiveBytes, ProfileTarget, as_cost, forget_cached
from vembed.models.plannable import ROWS
from vembed.models.profile import profile_model
from vembed.plan.memory import CallCost

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"

CPU = ProfileTarget("cpu")

BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 5000,
    "max_position_embeddings": 32,
}
_STACK = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128, "hidden_size": 64}
CLIP = {
    "model_type": "clip",
    "projection_dim": 32,
    "text_config": {**_STACK, "vocab_size": 5000, "max_position_embeddings": 24, "bos_token_id": 0, "eos_token_id": 2},
    "vision_config": {**_STACK, "image_size": 64, "patch_size": 16},
}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 5000,
    "max_position_embeddings": 64,
    "sliding_window": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where shapes lie. What was measured once in this process isn't measured again."""
    return tmp_path_factory.mktemp("shapes")


def shape(folder: Path, content: dict[str, Any]) -> ModelKeys:
    text = json.dumps(content)
    path = folder / f"{zlib.crc32(text.encode())}.json"
    if not path.exists():
        path.write_text(text, "utf-8")
    return ModelKeys(model_name=str(path))


def really_taken(options: ModelKeys, tower: str, rows: int) -> tuple[int, int]:
    """Bytes that a call of the model with real weights keeps, and its peak, with gradients there before."""
    encoder = load_skeleton(options, device="cpu").train()
    for parameter in encoder.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for module in encoder.modules():  # their gradient is counted by itself
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings >= profiling.TABLE_ROWS:
            module.weight.requires_grad_(False)
    made = next(each for each in encoder.profile_inputs() if each.name == tower).make()
    inputs = {name: torch.ones(rows, *each.shape[1:], dtype=each.dtype) for name, each in made.items()}
    known = [*encoder.parameters(), *encoder.buffers(), *inputs.values()]
    live = LiveBytes([*known, *(each.grad for each in encoder.parameters() if each.grad is not None)])
    with live:
        z = encoder(inputs)
        forward = live.now()
        z.backward(torch.ones_like(z))
    return tuple(sum(size * count for size, count in live.alive_at(at).items()) for at in (forward, live.worst()))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "tower"),
    [(BERT, "text"), (CLIP, "text"), (CLIP, "vision"), pytest.param(GEMMA, "text", marks=pytest.mark.slow)],
)
def test_a_call_takes_what_was_measured_without_the_model(folder: Path, content: dict[str, Any], tower: str) -> None:
    options = shape(folder, content)
    size = next(each for each in profile_model(options, CPU).towers if each.name == tower)
    inputs = next(each for each in load_skeleton(options).profile_inputs() if each.name == tower)
    for rows in (11, 37):
        kept, peak = really_taken(options, tower, rows)
        assert size.saved.of(rows, inputs.width) == pytest.approx(kept, rel=0.02)
        assert size.peak(rows, inputs.width, checkpointed=False) == pytest.approx(peak, rel=0.02)


def test_checkpointing_keeps_little_and_takes_the_rest_of_one_layer_again(folder: Path) -> None:
    size = profile_model(shape(folder, BERT), CPU)
    (tower,) = size.towers
    assert size.checkpointable
    assert tower.saved_checkpointed.of(8, 31) < 0.3 * tower.saved.of(8, 31)
    assert tower.peak(8, 31, checkpointed=True) < tower.peak(8, 31, checkpointed=False)
    assert tower.transient_checkpointed.of(8, 31) > tower.transient.of(8, 31)


def test_the_bag_of_words_has_no_checkpointing() -> None:
    assert not profile_model(ModelKeys(model_name="builtin:ngram-bag"), CPU).checkpointable


@pytest.mark.slow
def test_only_layers_that_train_keep_activations(folder: Path) -> None:
    options = shape(folder, BERT)
    whole, last, two = (
        profile_model(options, CPU, trainable=part).towers[0] for part in ("all", "last_1_layers", "last_2_layers")
    )
    layer = two.saved.per_token - last.saved.per_token
    assert layer > 0
    assert last.saved.per_token < 1.5 * layer
    assert whole.saved.per_token > two.saved.per_token + layer
    assert last.num_trainable < two.num_trainable < whole.num_trainable


@pytest.mark.slow
def test_adapters_train_few_parameters_and_are_counted(folder: Path) -> None:
    options = shape(folder, BERT)
    adapted = profile_model(options, CPU, lora=AdapterKeys(lora_r=4)).adapted
    plain = profile_model(options, CPU)
    assert plain.adapted is None
    assert adapted is not None
    assert 0 < adapted.num_trainable < 0.1 * plain.num_trainable
    assert adapted.num_parameters == plain.num_parameters + adapted.num_trainable
    assert adapted.towers[0].saved.per_token > 0


def test_what_cannot_have_adapters_has_no_adapted_size() -> None:
    assert profile_model(ModelKeys(model_name="builtin:ngram-bag"), CPU, lora=AdapterKeys()).adapted is None


@pytest.mark.slow
def test_autocast_makes_a_copy_of_the_weights_that_no_call_keeps_for_itself(folder: Path) -> None:
    options = shape(folder, {**BERT, "vocab_size": 100})
    full, half = (
        profile_model(options, replace(CPU, autocast_dtype=dtype)).towers[0] for dtype in (None, torch.bfloat16)
    )
    matrices = 4 * (4 * 64 * 64 + 2 * 64 * 128)
    assert full.saved.per_call < 4096
    assert full.cast_bytes == 0
    assert half.cast_bytes == pytest.approx(2 * matrices, rel=0.1)
    assert half.saved.per_call < 1
    assert half.saved.per_token < full.saved.per_token


@pytest.mark.slow
def test_a_tower_whose_calls_pass_through_another_counts_the_copies_of_its_own_weights_alone() -> None:
    half = ProfileTarget("cpu", torch.bfloat16)
    text, vision = profile_model(ModelKeys(model_name="builtin:tiny-qwen3-vl"), half).towers
    assert vision.through == (text.name,)
    # Nearly all of its weights are matrices, and a copy takes two bytes a weight.
    assert 1.9 * vision.num_parameters < vision.cast_bytes <= 2 * vision.num_parameters


@pytest.mark.slow
def test_an_accelerator_is_measured_on_a_machine_that_has_none(folder: Path) -> None:
    options = shape(folder, BERT)
    before = torch.is_autocast_enabled("cuda"), torch.nn.functional.scaled_dot_product_attention
    here = profile_model(options, CPU)
    there = profile_model(options, ProfileTarget("cuda", torch.bfloat16))
    assert not there.estimated
    assert there.num_parameters == here.num_parameters
    # Its attention doesn't store the weights that a CPU stores under dropout.
    assert here.towers[0].saved.per_pair >= 4 * 4 * 4
    assert there.towers[0].saved.per_pair < 4 * 4
    assert 0 < there.towers[0].saved.per_token < here.towers[0].saved.per_token
    assert before == (torch.is_autocast_enabled("cuda"), torch.nn.functional.scaled_dot_product_attention)


def test_what_cannot_be_run_is_estimated_marked_and_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = shape(folder, {**BERT, "num_hidden_layers": 5})

    def refuse(*_: object) -> None:
        raise RuntimeError("data-dependent")

    with monkeypatch.context() as patched:
        patched.setattr(profiling, "measure_call", refuse)
        estimated = profile_model(options, CPU)
    assert estimated.estimated
    assert estimated.kept_bytes_per_token(checkpointed=False) > 0
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "RuntimeError: data-dependent" in warning.getMessage()
    caplog.clear()
    assert not profile_model(shape(folder, BERT), CPU).estimated
    assert not caplog.records


def test_a_second_call_measures_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = shape(folder, BERT)
    first = profile_model(options, CPU)
    monkeypatch.setattr(profiling, "_profile", None)
    assert profile_model(options, CPU) is first


def test_a_shape_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither model_type .* nor vision_cfg"):
        profile_model(shape(folder, {"hidden_size": 3}), CPU)


def test_layers_of_several_kinds_are_taken_by_their_period(folder: Path) -> None:
    encoder = load_skeleton(shape(folder, GEMMA))
    [tower] = encoder.towers()
    assert tower.layers is not None
    assert (tower.period, len(encoder.get_submodule(tower.layers))) == (6, 12)  # type: ignore[arg-type]
    assert len(encoder.skeleton({"text": 6}).get_submodule(tower.layers)) == 6  # type: ignore[arg-type]


def test_storages_are_told_apart_by_what_they_grow_with() -> None:
    width = 31
    sizes = Counter({ROWS * width * width * 4: 2, ROWS * width * 64: 1, ROWS * 12: 1, 1000: 3})
    assert as_cost(sizes, rows=ROWS, width=width) == CallCost(64 + 12 / width, 8.0, 3000.0)
    fixed = as_cost(Counter({ROWS * width * 64: 1, ROWS * 31: -1}), rows=ROWS, width=width, fixed=True)
    assert fixed == CallCost(63.0, 0.0, 0.0)


def test_live_bytes_follow_real_tensors() -> None:
    before = torch.zeros(1000)
    live = LiveBytes([before])
    with live:
        a = before + 1
        peak_at = live.now()
        b = a * 2
        del a
        view = b[:10]
        before.mul_(2)
        end = live.now()
    assert live.alive_at(peak_at) == Counter({4000: 1})
    assert live.alive_at(live.worst()) == Counter({4000: 2})
    assert live.alive_at(end) == Counter({4000: 1})
    assert len(view) == 10


@pytest.mark.slow
def test_eight_billion_parameters_take_seconds_and_no_memory(folder: Path) -> None:
    script = textwrap.dedent(
        """
        import json, sys, time
        import torch
        from vembed.models.keys import AdapterKeys
        from vembed.models.keys import ModelKeys
        from vembed.models.measure import ProfileTarget, forget_cached
        from vembed.models.profile import profile_model
        started = time.process_time()
        options = ModelKeys(model_name=sys.argv[1])
        size = profile_model(options, ProfileTarget("cuda", torch.bfloat16), lora=AdapterKeys())
        taken = time.process_time() - started
        assert not size.estimated and size.adapted is not None
        # Not ru_maxrss: a process that was started by vfork counts what its parent held.
        [peak] = [1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")]
        print(json.dumps([size.num_parameters, taken, peak]))
        """
    )
    qwen = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 2048,
    }
    name = shape(folder, qwen).model_name
    ran = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=True)
    parameters, seconds, peak = json.loads(ran.stdout.strip().splitlines()[-1])
    assert parameters > 7.5e9
    assert seconds < 20
    assert peak < 2 << 30


@pytest.mark.slow
def test_adapters_of_a_language_model_with_pictures_are_measured_in_its_language_layers(tmp_path: Path) -> None:
    content = json.loads((SHAPES / "qwen3_vl_2b.json").read_text("utf-8"))
    content["text_config"] |= {"num_hidden_layers": 4}
    content["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [1]}
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(content), "utf-8")
    size = profile_model(ModelKeys(model_name=str(shape)), ProfileTarget("cuda", torch.bfloat16), lora=AdapterKeys())
    assert size.adapted is not None
    plain, adapted = size.towers[0].saved, size.adapted.towers[0].saved
    assert 0.5 * plain.per_token < adapted.per_token < 1.5 * plain.per_token


def test_nothing_fake_is_left_in_the_caches_of_a_network(tmp_path: Path) -> None:
    """DINOv3 keeps the places of its patches in a cache of the module, which the real model reads too."""
    folder = write_picture_model(tmp_path, "dinov3")
    encoder = load_any(folder).eval()
    expected = vectors(encoder, PICTURES)
    forget_cached(encoder)
    profiling._known.clear()
    profile_model(ModelKeys(model_name=str(folder)), ProfileTarget())
    assert torch.equal(torch.as_tensor(vectors(encoder, PICTURES)), torch.as_tensor(expected))


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["text", pytest.param("image", marks=pytest.mark.slow)])
def test_a_changed_tower_of_a_pair_is_measured_again(tmp_path: Path, changed: str) -> None:
    vit = {"model_type": "vit", **_STACK, "image_size": 32, "patch_size": 16}
    contents, paths = {"text": BERT, "image": vit}, {name: tmp_path / f"{name}.json" for name in ("text", "image")}
    sizes = []
    for layers in (2, 3):
        content = contents | {changed: {**contents[changed], "num_hidden_layers": layers}}
        for name, path in paths.items():
            path.write_text(json.dumps(content[name]), "utf-8")
        keys = ModelKeys.model_validate({f"{name}_model_name": str(path) for name, path in paths.items()})
        sizes.append(profile_model(keys, CPU).num_parameters)
    assert sizes[0] < sizes[1]
