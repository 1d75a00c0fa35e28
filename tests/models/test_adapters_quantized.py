"""Adapters beside weights of 4 bits, where bitsandbytes is installed: it computes on the CPU too, only slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.text_models import embed, load, wordpiece_tokenizer
from transformers import BertConfig, BertModel

from vembed.models.adapters import add_adapters, base_fingerprint, changing_names, save_trained
from vembed.models.hub import four_bit_config
from vembed.models.keys import AdapterKeys

if TYPE_CHECKING:
    from pathlib import Path

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install -e .[qlora]")


def test_adapters_train_beside_four_bits_and_leave_an_ordinary_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
