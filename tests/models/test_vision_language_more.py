"""Families that transformers runs by its own forward: Idefics3, SmolVLM, LLaVA-OneVision, Gemma3 and PaliGemma."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_cases import trainable_of
from kit.picture_models import opened, vectors
from test_vision_language import FLAT, ITEMS, LARGE, SMALL, load
from transformers import AutoModel, AutoProcessor
from transformers.models.smolvlm import processing_smolvlm
from vision_language_cases import FAMILY_BUILDERS, write_vision_language

from vembed.batch import Composed, Image
from vembed.errors import ConfigError, MachineError
from vembed.models.adapters import freeze
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.pictures import DECODED_AT_ONCE

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Item

KINDS = tuple(FAMILY_BUILDERS)
SOME = [pytest.param(kind, marks=() if kind in ("idefics3", "paligemma") else pytest.mark.slow) for kind in KINDS]
INSTRUCTION = "Find it."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {kind: write_vision_language(root / kind, kind) for kind in KINDS}


def call_of(kind: str, processor: Any, item: Item) -> dict[str, Any]:
    """Return what transformers' processor makes of an item, worded by hand."""
    text = item if isinstance(item, str) else item.text if isinstance(item, Composed) else ""
    images = item.images if isinstance(item, Composed) else [item] if isinstance(item, Image) else []
    text = text or ("" if images else "NULL")
    if kind == "paligemma":
        said = f"{INSTRUCTION} {text}".strip()
        if images:  # the processor puts pictures and start before the words
            return dict(processor(text=[said], images=[opened(images)], return_tensors="pt"))
        call = processor.tokenizer(f"{processor.tokenizer.bos_token}{said}\n", return_tensors="pt")
        return {**call, "token_type_ids": torch.zeros_like(call["input_ids"])}
    placeholder = "<start_of_image>" if kind == "gemma3" else "<image>"
    said = f"<system>{INSTRUCTION}<end><user>{placeholder * len(images)}{text}<end><assistant>"
    return dict(processor(text=[said], images=[opened(images)] if images else None, return_tensors="pt"))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind], query_prompt=INSTRUCTION)
    model = AutoModel.from_pretrained(folders[kind], dtype=torch.float64, attn_implementation="eager").eval()
    processor = AutoProcessor.from_pretrained(folders[kind])
    expected = []
    for item in ITEMS:
        call = call_of(kind, processor, item)
        call.pop("num_crops", None)
        with torch.no_grad():
            made = {name: each.double() if name == "pixel_values" else each for name, each in call.items()}
            hidden = model(**made).last_hidden_state
        expected.append(torch.nn.functional.normalize(hidden[0, -1], dim=0))
    found = vectors(encoder, ITEMS)
    assert torch.allclose(found, torch.stack(expected), rtol=0, atol=1e-5)
    assert torch.pdist(found[[0, 1, 2, 3, 4, 6, 7]]).min() > 1e-2, "different items have different vectors"


@pytest.mark.parametrize("kind", SOME)
def test_each_part_trains_alone(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    family, every = encoder.family, {name for name, _ in encoder.named_parameters()}
    begins = {"text": (family.language,), "vision": (family.vision, *family.merger), "projection": family.merger}
    for what, parts in begins.items():
        encoder.requires_grad_(requires_grad=True)
        freeze(encoder, what)
        beginnings = tuple(f"backbone.{part}" for part in parts)
        assert trainable_of(encoder).keys() == {name for name in every if name.startswith(beginnings)}


def test_pictures_are_cut_into_as_many_squares_as_the_budget_allows(folders: dict[str, Path]) -> None:
    rows = {}
    for keys in ({}, {"image_tokens": 40}, {"max_image_size": 32}, {"image_tokens": 7}):
        encoder = load(folders["idefics3"], **keys)
        features = encoder.featurize([LARGE, SMALL, FLAT], "query")
        rows[str(keys)] = [int(each) for each in features.columns["rows"].values]
        tokens = (features.columns["input_ids"].values == encoder.tokenizer.convert_tokens_to_ids("<image>")).sum()
        assert tokens == 4 * len(features.columns["pixel_values"].values)
        assert features.lengths.max() <= encoder.spec.image_tokens + len("<user><end><assistant>")
    assert rows == {"{}": [2, 3, 3], "{'image_tokens': 40}": [2, 2, 2], "{'max_image_size': 32}": [2, 2, 2],
                    "{'image_tokens': 7}": [0, 0, 0]}  # fmt: skip
    with pytest.raises(ConfigError, match="a picture takes at least 7 tokens"):
        load(folders["idefics3"], image_tokens=6)
    for kind in ("gemma3", "llava_onevision"):
        with pytest.raises(ConfigError, match="leave image_tokens and max_image_size out"):
            load(folders[kind], image_tokens=3)


def test_none_of_many_pictures_is_read_as_a_single_one(folders: dict[str, Path]) -> None:
    """A block of pictures that are decoded at once has room for all but the last: alone it would be cut up."""
    encoder = load(folders["llava_onevision"])
    features = encoder.featurize([Composed((LARGE,) * (DECODED_AT_ONCE + 1), "many")], "query")
    assert features.columns["image_sizes"].lengths.tolist() == [DECODED_AT_ONCE + 1]
    assert len(features.columns["pixel_values"].values) == DECODED_AT_ONCE + 1, "one square each"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_names_a_placeholder_is_a_text(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    for each in encoder._placeholders:
        assert vectors(encoder, (Composed((SMALL,), f"what is {each}?"), each)).isfinite().all()


@pytest.mark.parametrize("kind", ["llava", "llava_next"])
@pytest.mark.parametrize("mode", ["auto", "llava"])
def test_a_type_that_does_not_train_is_refused_by_name(tmp_path: Path, kind: str, mode: Any) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(ConfigError, match=f"type {kind} don't train here; take one of .*LLaVA-OneVision"):
        load_encoder(ModelKeys(model_name=str(tmp_path), encoder_mode=mode))


def test_a_package_that_a_processor_lacks_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    with pytest.raises(MachineError, match="num2words"):
        load_encoder(ModelKeys(model_name=str(folders["smolvlm"])))
