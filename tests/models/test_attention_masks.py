"""Attention takes no mask that it doesn't need, and nothing waits for the device to find that out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kit.picture_models import write_picture_model
from packing_cases import LENGTHS, OTHER_SHAPES, PAD, SHAPES, Reads, build, encode, rows, with_gradients

if TYPE_CHECKING:
    from pathlib import Path

DECODERS = ("qwen2", "qwen3", "llama", "mistral", "gemma3_text", "gpt2")
BIDIRECTIONAL = {"gemma3_text": {"use_bidirectional_attention": True}, "qwen3": {"is_causal": False}}


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


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("kind", BIDIRECTIONAL)
def test_a_decoder_made_bidirectional_reads_no_number_back_and_masks_its_padding(kind: str, equal: bool) -> None:
    encoder, features = build(kind, **BIDIRECTIONAL[kind]), rows((9, 9) if equal else LENGTHS)
    with Reads() as reads:
        z_RE = encode(encoder, features, packed=False)
    assert reads.count == 0
    alone = [encoder(encoder.collate(features, np.array([row]), 1 * int(features.lengths[row]))) for row in range(2)]
    assert torch.allclose(z_RE[:2], torch.cat(alone), atol=1e-10)
    changed = rows((9, 9) if equal else LENGTHS)
    changed.columns["input_ids"].values[8] = PAD + 1  # the last token of a row that is averaged over all of them
    assert not torch.allclose(encode(encoder, changed, packed=False)[:2], z_RE[:2])


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_texts_of_two_towers_read_no_number_back(kind: str, tmp_path: Path) -> None:
    from kit.text_models import load_any

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
