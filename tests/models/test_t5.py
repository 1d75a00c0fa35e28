"""T5's encoder: distances between tokens are all that it knows of places, whatever stands beside them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kit.text_models import embed, load, write_model

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.text import TextEncoder

LENGTH = 300  # beyond the 128 tokens at which distances stop to differ
TEXTS = ("sea", "a b c", "the river runs to the sea " * 12)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    folder: Path = write_model(tmp_path_factory.mktemp("t5"), "t5")
    return load(folder, dtype=torch.float64, max_seq_length=LENGTH)


def bucket(distance: int) -> int:
    """Return the row of the table of biases: 16 to 31 for tokens behind, of which 8 are for near distances."""
    behind, distance = 16 * (distance > 0), abs(distance)
    if distance < 8:
        return behind + distance
    return behind + min(8 + int(math.log(distance / 8) / math.log(128 / 8) * 8), 15)


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
    return x_TH * (x_TH.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight_H


def by_hand(encoder: TextEncoder, text: str) -> torch.Tensor:
    """Compute the vector of one text by the formulas of Raffel et al., 2020, in float64."""
    w = {name.removeprefix("backbone."): each.double() for name, each in encoder.named_parameters()}
    ids = encoder.tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"]
    places = range(len(ids))
    table = w["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    rows = torch.tensor([[bucket(key - query) for key in places] for query in places])
    bias_NTT = table[rows].permute(2, 0, 1)
    x_TH = w["shared.weight"][torch.tensor(ids)]
    for number in range(2):
        attention, feed = f"encoder.block.{number}.layer.0", f"encoder.block.{number}.layer.1"
        h_TH = rms_norm(x_TH, w[f"{attention}.layer_norm.weight"])
        q, k, v = ((h_TH @ w[f"{attention}.SelfAttention.{each}.weight"].T).unflatten(1, (2, 16)) for each in "qkv")
        weights_NTT = (torch.einsum("qnd,knd->nqk", q, k) + bias_NTT).softmax(-1)
        mixed_TD = torch.einsum("nqk,knd->qnd", weights_NTT, v).flatten(1)
        x_TH = x_TH + mixed_TD @ w[f"{attention}.SelfAttention.o.weight"].T
        h_TH = rms_norm(x_TH, w[f"{feed}.layer_norm.weight"])
        x_TH = x_TH + (h_TH @ w[f"{feed}.DenseReluDense.wi.weight"].T).relu() @ w[f"{feed}.DenseReluDense.wo.weight"].T
    return F.normalize(rms_norm(x_TH, w["encoder.final_layer_norm.weight"]).mean(0), dim=0)


@torch.no_grad()
def test_vectors_are_those_of_the_formulas_beside_texts_of_any_length(encoder: TextEncoder) -> None:
    found = embed(encoder, TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        assert (by_hand(encoder, text) - vector).abs().max() <= 1e-6  # its norms compute in float32
        assert (embed(encoder, [text])[0] - vector).abs().max() <= 1e-12


def test_rows_are_padded_as_no_operator_for_packed_rows_takes_the_biases(encoder: TextEncoder) -> None:
    assert "t5 models add a bias for each distance" in encoder.why_not_packed("cuda", torch.bfloat16)
    inputs = encoder.collate(encoder.featurize(TEXTS, "query"), np.arange(3), LENGTH)
    assert inputs["input_ids"].shape == (3, LENGTH)
