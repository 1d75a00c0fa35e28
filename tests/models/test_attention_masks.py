"""Attention takes no mask that it needs not, reads no number back to find out, and sees both sides where asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kit.picture_models import write_picture_model
from kit.text_models import TEXTS, embed, load, load_any, write_model
from packing_cases import (
    LENGTHS,
    OTHER_SHAPES,
    PAD,
    SHAPES,
    Reads,
    build,
    encode,
    largest_difference,
    rows,
    with_gradients,
)
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from vembed.errors import ConfigError
from vembed.models.attention import PACKED_TYPES
from vembed.models.text_spec import BIDIRECTIONAL_TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.text import TextEncoder


DECODERS = ("qwen2", "qwen3", "llama", "mistral", "gemma3_text", "gpt2")


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the masks that torch's attention is given."""
    found: list[Any] = []
    attend = F.scaled_dot_product_attention

    def record(*args: Any, **kwargs: Any) -> Any:
        found.append(kwargs["attn_mask"])
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return found


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    ("kind", "packed"), [(kind, False) for kind in (*SHAPES, *OTHER_SHAPES)] + [(kind, True) for kind in SHAPES]
)
def test_no_call_reads_a_number_back(kind: str, packed: bool, equal: bool) -> None:
    encoder = build(kind)
    features = rows((9, 9)) if equal else rows(prompts=(0, 2, 0, 1, 0, 3))
    with Reads() as reads:
        with_gradients(encode(encoder, features, packed=packed), encoder)
    assert reads.count == 0


@pytest.mark.parametrize("kind", ["bert", "qwen3", "mpnet", "gemma2"])
def test_a_graph_attends_as_the_encoder_does(kind: str) -> None:
    """MPNet adds the mask to its scores, Gemma 2 caps them: neither runs on torch's attention."""
    encoder, features = build(kind), rows()
    wanted = encode(encoder, features, packed=False)
    ids, width = features.columns["input_ids"], int(features.lengths.max())
    mask = torch.from_numpy((np.arange(width) < features.lengths[:, None]).astype(np.int64))
    _, found = encoder.graph()(torch.from_numpy(ids.padded(width, PAD)).long(), mask)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_texts_of_two_towers_read_no_number_back(kind: str, tmp_path: Path) -> None:
    encoder = load_any(write_picture_model(tmp_path, kind))
    features = encoder.featurize(["sea", "a b", "sun and rain"], "query")
    inputs = encoder.collate(features, np.arange(3), int(features.lengths.max()))
    with Reads() as reads:
        encoder(inputs).sum().backward()
    assert reads.count == 0


@pytest.mark.parametrize("kind", DECODERS)
def test_causal_attention_without_windows_takes_no_mask_for_padding(kind: str, masks: list[Any]) -> None:
    whole = {"sliding_window": None, "layer_types": None, "use_sliding_window": False} if kind != "gpt2" else {}
    if kind == "gemma3_text":
        whole = {"layer_types": ["full_attention"] * 2}
    encode(build(kind, **whole), rows(), packed=False)
    assert masks == [None, None]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "mistral"])
def test_a_window_that_holds_all_rows_takes_no_mask_and_a_narrower_one_does(kind: str, masks: list[Any]) -> None:
    encode(build(kind, sliding_window=64), rows(), packed=False)
    assert masks == [None, None]
    masks.clear()
    encode(build(kind), rows(), packed=False)
    assert any(mask is not None for mask in masks)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "modernbert", "eurobert"])
def test_bidirectional_attention_takes_one_number_for_each_token(kind: str, masks: list[Any]) -> None:
    encoder = build(kind, **({"local_attention": 128} if kind == "modernbert" else {}))
    encode(encoder, rows(), packed=False)
    assert [tuple(mask.shape) for mask in masks] == [(len(LENGTHS), 1, 1, max(LENGTHS))] * 2
    assert {mask.dtype for mask in masks} == {torch.float64}
    assert torch.equal(masks[0][0, 0, 0] == 0, torch.arange(max(LENGTHS)) < LENGTHS[0])
    masks.clear()
    encode(encoder, rows((9, 9)), packed=False)
    assert masks == [None, None]


def test_the_mask_has_the_type_of_mixed_precision(masks: list[Any]) -> None:
    encoder = build("bert", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        encode(encoder, rows(), packed=False)
    assert {mask.dtype for mask in masks} == {torch.bfloat16}


def test_a_decoder_makes_the_same_vectors_as_with_its_own_masks() -> None:
    for kind in (*DECODERS, "bert", "modernbert"):
        encoder, features = build(kind), rows()
        found = encode(encoder, features, packed=False)
        encoder.backbone.config._attn_implementation = "sdpa"
        assert torch.allclose(encode(encoder, features, packed=False), found, rtol=0, atol=1e-12), kind


def test_the_files_of_a_model_name_no_attention_of_ours(tmp_path: Path) -> None:
    encoder = build("bert")
    encoder.backbone.save_pretrained(tmp_path)
    assert "vembed" not in (tmp_path / "config.json").read_text()
    assert encoder.describe()["attention"] == "sdpa"
    assert build("mpnet").describe()["attention"] == "eager"


KINDS = sorted(BIDIRECTIONAL_TYPES)


def first_tokens(encoder: TextEncoder, last_token: int, *, padded: bool, packed: bool = False) -> torch.Tensor:
    """Return the first token of a row of eight that ends with `last_token`, alone or before a shorter row."""
    encoder.spec = type(encoder.spec)(("cls",), 64, normalize=False)
    features = rows((8, 5))
    features.columns["input_ids"].values[7] = last_token
    if not padded:
        features = features.take(np.array([0]))
    return encode(encoder, features, packed=packed)[0].detach()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_sees_the_last_one(kind: str, padded: bool) -> None:
    causal = build(kind)
    assert torch.equal(first_tokens(causal, 5, padded=padded), first_tokens(causal, 6, padded=padded))
    both = build(kind, bidirectional=True)
    five, six = (first_tokens(both, token, padded=padded) for token in (5, 6))
    assert (five - six).abs().max() > 1e-5
    assert torch.allclose(first_tokens(both, 5, padded=not padded), five, atol=1e-10)
    if kind in PACKED_TYPES:
        assert torch.allclose(first_tokens(both, 5, padded=padded, packed=True), five, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_nothing_and_windows_are_kept(kind: str) -> None:
    encoder, features = build(kind, bidirectional=True), rows()
    with Reads() as reads:
        together = encode(encoder, features, packed=False)
        encode(encoder, rows((9, 9)), packed=False)
    assert reads.count == 0
    for row, length in enumerate(LENGTHS):
        alone = encoder(encoder.collate(features, np.array([row]), length))
        assert torch.allclose(alone[0], together[row], atol=1e-10)
    if kind in PACKED_TYPES:
        assert encoder.why_not_packed("cpu", torch.float64) == ""
        padded = with_gradients(encode(encoder, features, packed=False), encoder)
        packed = with_gradients(encode(encoder, features, packed=True, width=96), encoder)
        assert largest_difference(padded, packed) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma3"])
def test_a_folder_keeps_it_for_every_library_that_loads_it(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path / "causal", kind)
    causal, both = load(folder), load(folder, bidirectional=True)
    assert (causal.spec.pooling, both.spec.pooling) == (("lasttoken",), ("mean",))
    assert load(folder, bidirectional=True, pooling_method="last_token").spec.pooling == ("lasttoken",)
    assert (causal.describe()["attention"], both.describe()["attention"]) == ("sdpa", "sdpa, bidirectional")
    expected = embed(both)
    assert (expected - embed(load(folder, pooling_method="mean"))).abs().max() > 1e-2
    both.save(tmp_path / "saved")
    assert torch.equal(embed(load(tmp_path / "saved")), expected)
    assert torch.equal(embed(load(tmp_path / "saved", bidirectional=True)), expected)
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert (theirs.encode(list(TEXTS), convert_to_tensor=True) - expected).abs().max() <= 1e-5
    backbone = AutoModel.from_pretrained(tmp_path / "saved").eval()
    for text, vector in zip(TEXTS, expected, strict=True):  # without padding, and so without a mask
        with torch.no_grad():
            hidden_1TH = backbone(**both.tokenizer(text, return_tensors="pt")).last_hidden_state
        assert (torch.nn.functional.normalize(hidden_1TH[0].mean(0), dim=0) - vector).abs().max() <= 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_recomputed_layers_see_both_sides_too(packed: bool) -> None:
    encoder, features = build("qwen3", bidirectional=True).train(), rows()
    plain = with_gradients(encode(encoder, features, packed=packed), encoder)
    encoder.enable_gradient_checkpointing()
    again = with_gradients(encode(encoder, features, packed=packed), encoder)
    assert largest_difference(plain, again) == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [("bert", "bidirectional is for decoders, and bert models are none"), ("gpt2", "isn't tested for gpt2 models")],
)
def test_what_cannot_be_made_bidirectional_is_refused(tmp_path: Path, kind: str, message: Any) -> None:
    folder = write_model(tmp_path, kind)
    load(folder)
    with pytest.raises(ConfigError, match=message):
        load(folder, bidirectional=True)
