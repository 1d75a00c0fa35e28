"""What is kept of an encoder of which a part trains: adapters, checkpoints, frozen weights of 16 and of 4 bits.

Frozen matrices in bfloat16 under mixed precision give the same numbers from half the bytes, and none of it is in a
file. bitsandbytes computes on the CPU too, only slowly.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_cases import partly_trained, trainable_of, wake
from kit.picture_models import PICTURES, vectors, write_open_clip, write_picture_model
from kit.text_models import TEXTS, embed, load, wordpiece_tokenizer, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel

from vembed.config.load import load_config
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.models.adapters import (
    add_adapters,
    base_fingerprint,
    changing_names,
    merge_adapters,
    narrow_frozen,
    save_trained,
)
from vembed.models.hub import four_bit_config
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model
from vembed.plan.devices import parse_devices
from vembed.plan.plan import make_plan
from vembed.plan.problem import DataSize
from vembed.training.saving import gather_encoder, load_module, model_bytes, module_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.encoder import Encoder


TEXT_KINDS = ("bert", "modernbert", "qwen3", "gpt2", "t5", "bidirectional gemma3")
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saving")
    made = {kind: write_model(root / kind, kind) for kind in TEXT_KINDS}
    made |= {kind: write_picture_model(root / kind, kind) for kind in ("clip", "siglip", "vit")}
    return made | {"open_clip": write_open_clip(root / "open_clip")}


def adapted(folder: Path, dtype: torch.dtype = torch.float32, what: str = "lora") -> Encoder:
    encoder = partly_trained(folder, what, dtype=dtype).eval()
    wake(encoder)
    return encoder


def encode(encoder: Encoder) -> Any:
    items = (*(TEXTS if "text" in encoder.modalities else ()), *(PICTURES if "image" in encoder.modalities else ()))
    return vectors(encoder.eval(), items)


@pytest.mark.parametrize("kind", ["bert", "gpt2", pytest.param("clip", marks=pytest.mark.slow), "open_clip"])
def test_peft_loads_the_adapters_onto_the_base(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    encoder = adapted(folders[kind])
    expected = encode(encoder)
    save_trained(encoder, tmp_path / "model", tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folders[kind]
    )
    other = load_encoder(ModelKeys(model_name=str(folders[kind]))).eval()
    host = other.adapter_host()
    base = host if kind == "open_clip" else AutoModel.from_pretrained(folders[kind])
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert with_adapter.peft_config["default"].inference_mode
    for name in ("backbone", "model"):
        if getattr(other, name, None) is host:
            setattr(other, name, with_adapter.base_model.model)
    assert (encode(other) - expected).abs().max() < 1e-6


def test_merging_into_bfloat16_rounds_once(folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = adapted(folders["bert"], torch.bfloat16)
    layer = encoder.get_submodule("backbone.encoder.layer.0.attention.self.query")
    exact = layer.base_layer.weight.double() + layer.get_delta_weight("default").double()  # type: ignore[operator, union-attr]
    save_trained(encoder, tmp_path / "model", tmp_path / "adapter")
    weight = encoder.get_parameter("backbone.encoder.layer.0.attention.self.query.weight")
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, exact.to(torch.bfloat16))
    assert {each.dtype for each in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.parametrize("what", ["lora", "last_1_layers", "projection"])
def test_a_checkpoint_holds_what_trains_and_goes_onto_the_same_base(folders: dict[str, Path], what: str) -> None:
    encoder, other = (partly_trained(folders["clip"], what).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in trainable_of(encoder).values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    tensors = module_tensors(encoder)
    assert tensors.keys() == trainable_of(encoder).keys() == changing_names(encoder)
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert held < 0.4 * sum(parameter.nbytes for parameter in encoder.parameters())
    before = encode(other)
    load_module(other, {name: tensor.clone() for name, tensor in tensors.items()})
    assert torch.equal(encode(other), encode(encoder))
    assert not torch.equal(encode(other), before)
    with pytest.raises(ConfigError, match="holds another model"):
        load_module(partly_trained(folders["clip"], "vision"), tensors)


def test_a_checkpoint_of_a_whole_model_holds_all_of_it(folders: dict[str, Path]) -> None:
    encoder = partly_trained(folders["clip"], "all")
    assert changing_names(encoder) is None
    assert base_fingerprint(encoder) is None
    assert module_tensors(encoder).keys() >= {name for name, _ in encoder.named_parameters()}


def test_the_fingerprint_tells_another_base_and_not_another_training(folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = partly_trained(folders["bert"], "lora")
    first = base_fingerprint(encoder)
    wake(encoder)
    assert base_fingerprint(encoder) == first is not None
    assert base_fingerprint(partly_trained(folders["bert"], "last_1_layers")) != first
    for path in folders["bert"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert base_fingerprint(partly_trained(tmp_path, "lora")) == first
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("layer.1.output.dense.weight"))
    weights[name] *= 1.001
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert base_fingerprint(partly_trained(tmp_path, "lora")) != first


def test_options_reach_the_adapters_as_they_were_given(folders: dict[str, Path]) -> None:
    encoder = load_encoder(ModelKeys(model_name=str(folders["bert"])))
    add_adapters(encoder, AdapterKeys(lora_r=4, lora_alpha=6.0, lora_dropout=0.25, lora_target_modules=["value"]))
    layer: Any = encoder.get_submodule("backbone.encoder.layer.1.attention.self.value")
    assert layer.scaling["default"] == 1.5
    assert layer.lora_dropout["default"].p == 0.25
    assert layer.lora_A["default"].weight.shape == (4, 32)
    assert layer.lora_B["default"].weight.abs().max() == 0


def computed(encoder: Encoder) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return embeddings and gradients in mixed precision."""
    items = (*(TEXTS if "text" in encoder.modalities else ()), *(PICTURES if "image" in encoder.modalities else ()))
    with torch.autocast("cpu", HALF):
        z = vectors.__wrapped__(encoder, items)  # type: ignore[attr-defined]  # it switches gradients off
    z.float().square().cumsum(0).sum().backward()
    return z.detach(), {name: each.grad for name, each in encoder.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("what", ["lora", pytest.param("last_1_layers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*TEXT_KINDS, "clip", "siglip", "vit", "open_clip"])
def test_no_embedding_and_no_gradient_differs_by_a_bit(folders: dict[str, Path], kind: str, what: str) -> None:
    plain, narrow = adapted(folders[kind], what=what), adapted(folders[kind], what=what)
    count = narrow_frozen(narrow, HALF)
    assert count > 0
    held = {parameter.dtype for parameter in narrow.parameters() if not parameter.requires_grad}
    assert held == {HALF, torch.float32}
    assert all(parameter.dtype == torch.float32 for parameter in narrow.parameters() if parameter.requires_grad)
    names = {name for name, parameter in narrow.named_parameters() if parameter.dtype == HALF}
    assert not [name for name in names if "norm" in name.lower() or "embed" in name or name.endswith("bias")]
    (z, gradients), (narrow_z, narrow_gradients) = computed(plain), computed(narrow)
    assert torch.equal(z, narrow_z)
    assert gradients.keys() == narrow_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient is None) == (narrow_gradients[name] is None)
        assert gradient is None or torch.equal(gradient, narrow_gradients[name]), name
    assert model_bytes(narrow) == model_bytes(plain), "what is written is not narrowed"


def test_nothing_is_narrowed_without_mixed_precision_or_where_all_trains(folders: dict[str, Path]) -> None:
    for dtype in (None, torch.float16):
        assert narrow_frozen(adapted(folders["bert"]), dtype) == 0
    assert narrow_frozen(load_encoder(ModelKeys(model_name=str(folders["bert"]))), HALF) == 0


def test_what_is_written_has_the_weights_of_the_files_and_float32_sums(folders: dict[str, Path]) -> None:
    plain, narrow = adapted(folders["bert"]), adapted(folders["bert"])
    narrow_frozen(narrow, HALF)
    fresh = partly_trained(folders["bert"], "lora", dtype=torch.float32).eval()
    whole = gather_encoder(narrow, Ranks(), lambda: fresh)
    assert whole is fresh
    for encoder in (plain, whole):
        merge_adapters(encoder)
    expected = plain.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.state_dict().items())
    assert {tensor.dtype for tensor in whole.state_dict().values()} == {torch.float32}


def test_weights_that_were_changed_behind_a_run_are_not_merged_with_its_adapters(folders: dict[str, Path]) -> None:
    narrow, fresh = (partly_trained(folders["bert"], "lora", dtype=torch.float32) for _ in range(2))
    narrow_frozen(narrow, HALF)
    narrow.trained = replace(narrow.trained, base="of the start")
    fresh.trained = replace(fresh.trained, base="of today")
    with pytest.raises(ConfigError, match="is no longer the model that training began with"):
        gather_encoder(narrow, Ranks(), lambda: fresh)


@pytest.mark.slow
def test_the_plan_counts_two_bytes_for_each_and_says_so(folders: dict[str, Path]) -> None:
    keys = ModelKeys(model_name=str(folders["qwen3"]))
    sizes = [profile_model(keys, ProfileTarget("cuda", dtype), lora=AdapterKeys()) for dtype in (HALF, None)]
    half, full = (size.adapted for size in sizes)
    assert half is not None
    assert full is not None
    encoder = adapted(folders["qwen3"])
    assert half.narrowed == narrow_frozen(encoder, HALF) > 0
    assert full.narrowed == sizes[0].narrowed == 0
    without = replace(sizes[0], adapted=replace(half, narrowed=0))
    config = load_config(None, ["model_name=m", "use_lora=true", "bf16=true"]).config
    spread = parse_devices("1xA100-40GB")
    machine, data = spread.machine(8), DataSize(100, 1.0)
    plans = [make_plan(config, machine, size, data, devices=spread) for size in (sizes[0], without)]
    weights, before = (plan.bytes_per_device.parameters for plan in plans)
    assert before - weights == 2 * half.narrowed
    assert [sum(reason.startswith("frozen weights: ") for reason in plan.reasons) for plan in plans] == [1, 0]


def test_adapters_train_beside_four_bits_and_leave_an_ordinary_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install -e .[qlora]")
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=192,
        max_position_embeddings=64, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "base")
    wordpiece_tokenizer().save_pretrained(tmp_path / "base")
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        settings = four_bit_config()
    monkeypatch.setattr("vembed.models.hub.four_bit_config", lambda: settings)
    encoder: Any = load(tmp_path / "base", load_in_4bit=True).train()
    weight = encoder.backbone.encoder.layer[0].attention.self.query.weight
    assert weight.dtype == torch.uint8
    assert weight.numel() == 128 * 128 / 2
    difference = (embed(encoder) - embed(load(tmp_path / "base"))).abs().max()
    assert 1e-5 < difference < 0.05, "4 bits round, and not beyond recognition"

    add_adapters(encoder, AdapterKeys(lora_r=4))
    assert len(changing_names(encoder) or ()) == 2 * 2 * 6
    assert base_fingerprint(encoder)
    total = sum(parameter.numel() for parameter in load(tmp_path / "base").parameters()) + 14_336
    assert f"14,336 of {total:,} parameters" in encoder.trained.words
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    features = encoder.featurize(("a b", "sea"), "query")
    encoder(encoder.collate(features, torch.arange(2).numpy(), int(features.lengths.max()))).sum().backward()
    assert {name for name, parameter in encoder.named_parameters() if parameter.grad is not None} == {
        name for name, parameter in encoder.named_parameters() if parameter.requires_grad
    }
    adapted = embed(encoder)
    save_trained(encoder, tmp_path / "model", tmp_path / "adapter")
    other = load(tmp_path / "model")
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    assert not hasattr(other.backbone.config, "quantization_config")
    assert (embed(other) - embed(encoder)).abs().max() < 1e-6
    assert (embed(other) - adapted).abs().max() < 1e-3, "products in bfloat16 against those in float32"
