"""What is kept of an encoder of which a part trains: the merged model, the adapters, and what a checkpoint holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_cases import partly_trained, trainable_of, wake
from kit.picture_models import PICTURES, vectors, write_open_clip, write_picture_model
from kit.text_models import TEXTS, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from vembed.errors import ConfigError
from vembed.models.adapters import add_adapters, base_fingerprint, changing_names, has_adapters, save_trained
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder
from vembed.training.saving import load_module, module_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.encoder import Encoder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saving")
    texts = {kind: write_model(root / kind, kind) for kind in ("bert", "gpt2")}
    return {
        **texts,
        "clip": write_picture_model(root / "clip", "clip"),
        "open_clip": write_open_clip(root / "open_clip"),
    }


def adapted(folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    encoder = partly_trained(folder, "lora", dtype=dtype).eval()
    wake(encoder)
    return encoder


def encode(encoder: Encoder) -> Any:
    items = (*(TEXTS if "text" in encoder.modalities else ()), *(PICTURES if "image" in encoder.modalities else ()))
    return vectors(encoder.eval(), items)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


@pytest.mark.parametrize("kind", ["bert", "open_clip"])
def test_the_merged_model_is_one_as_any_other_and_has_the_vectors_of_the_adapted_one(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    encoder = adapted(folders[kind])
    expected = encode(encoder)
    assert (encode(load_encoder(ModelKeys(model_name=str(folders[kind])))) - expected).abs().max() > 1e-3, (
        "nothing was adapted"
    )
    save_trained(encoder, tmp_path / "model", tmp_path / "adapter")
    assert not has_adapters(encoder)
    assert (encode(encoder) - expected).abs().max() < 1e-5, "what is evaluated afterwards"
    assert (encode(load_encoder(ModelKeys(model_name=str(tmp_path / "model")))) - expected).abs().max() < 1e-5
    base, merged = weights_of(folders[kind]), weights_of(tmp_path / "model")
    assert {name: (each.shape, each.dtype) for name, each in merged.items()} == {
        name: (each.shape, each.dtype) for name, each in base.items() if not name.startswith("pooler") or name in merged
    }
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert 0 < len(changed) < len(merged)
    assert all(merged[name].ndim == 2 for name in changed)


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
