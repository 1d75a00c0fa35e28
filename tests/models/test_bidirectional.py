"""A decoder made bidirectional sees both sides, whatever its padding, its neighbours and the library that loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.text_models import TEXTS, embed, load, write_model
from packing_cases import LENGTHS, build, encode, largest_difference, rows, with_gradients
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from vembed.errors import ConfigError
from vembed.models.attention import PACKED_TYPES
from vembed.models.text_spec import BIDIRECTIONAL_TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.text import TextEncoder

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
    together = encode(encoder, features, packed=False)
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
