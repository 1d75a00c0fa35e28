"""Late interaction on pages: the vectors of transformers' ColPali and ColQwen2, folders, and exact gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import partly_trained
from kit.picture_models import opened, picture
from kit.text_models import load_any
from transformers import AutoModel, AutoModelForPreTraining, AutoProcessor
from vision_language_cases import RETRIEVAL_BUILDERS, write_vision_language

from vembed.batch import Composed, Image
from vembed.errors import ConfigError, DataError
from vembed.models.adapters import changing_names
from vembed.models.exportable import writable_forms
from vembed.models.vision_late import VisionLateEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Item, Side

KINDS = (*RETRIEVAL_BUILDERS, "qwen3_vl")
SMALL, LARGE, FLAT = picture(0), picture(1, (90, 60)), picture(2, (30, 100))
TEXTS = ("sea", "which page has the inn brave otter", "a longer text, by far")
PICTURES = (LARGE, SMALL, FLAT)
NEW: dict[str, Any] = {"pooling_method": "none", "projection_dim": 12}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision-late")
    return {kind: write_vision_language(root / kind, kind) for kind in KINDS}


def load(folder: Path, **keys: Any) -> VisionLateEncoder:
    torch.manual_seed(1)
    encoder = load_any(folder, dtype=torch.float64, **keys).eval()
    assert isinstance(encoder, VisionLateEncoder)
    return encoder


@torch.no_grad()
def rows_of(encoder: VisionLateEncoder, items: tuple[Item, ...], *, more: int = 0, side: Side = "query") -> list[Any]:
    """Encode items of one modality in one call, and return the vectors of each."""
    features = encoder.featurize(items, side)
    inputs = encoder.collate(features, np.arange(len(items)), int(features.lengths.max()) + more)
    return list(encoder(inputs).split(encoder.num_vectors(features).tolist()))


@pytest.mark.parametrize("kind", RETRIEVAL_BUILDERS)
def test_vectors_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    model = AutoModelForPreTraining.from_pretrained(folders[kind], dtype=torch.float64).eval()
    processor = AutoProcessor.from_pretrained(folders[kind])
    calls = [*(processor(text=[text]) for text in TEXTS), *(processor(images=opened([each])) for each in PICTURES)]
    found = [*rows_of(encoder, TEXTS), *rows_of(encoder, PICTURES, side="document")]
    for call, vectors in zip(calls, found, strict=True):
        call.pop("labels", None)
        with torch.no_grad():
            expected = model(**{name: each.double() if name == "pixel_values" else each for name, each in call.items()})
        torch.testing.assert_close(vectors, expected.embeddings[0], rtol=0, atol=1e-5)
    firsts = torch.stack([each[len(each) // 2] for each in found])
    assert torch.pdist(firsts).min() > 1e-2, "different items have different vectors"
    with pytest.raises(DataError, match="are pictures with a text"):
        encoder.by_modality([Composed((SMALL,), "text")])
    assert tuple(writable_forms(encoder)) == ("transformers",)


@pytest.mark.parametrize("kind", RETRIEVAL_BUILDERS)
def test_queries_end_in_the_padding_token_that_they_were_trained_with(folders: dict[str, Path], kind: str) -> None:
    tokenizer = AutoProcessor.from_pretrained(folders[kind]).tokenizer
    own, other = str(tokenizer.pad_token), str(tokenizer.convert_ids_to_tokens(5))
    ids = load(folders[kind], pad_token=own).featurize(TEXTS, "query").columns["input_ids"].values
    assert (ids == tokenizer.pad_token_id).sum() == 10 * len(TEXTS)
    with pytest.raises(ConfigError, match=r"pad_token .* leave pad_token out"):
        load(folders[kind], pad_token=other)
    load(folders["qwen3_vl"], **NEW, pad_token=other)  # where padding is masked, any token will do


@torch.no_grad()
def test_a_vision_language_model_gives_a_vector_for_each_token_of_its_conversation(folders: dict[str, Path]) -> None:
    encoder = load(folders["qwen3_vl"], query_prompt="Find it.", **NEW)
    model = AutoModel.from_pretrained(folders["qwen3_vl"], dtype=torch.float64).eval()
    processor = AutoProcessor.from_pretrained(folders["qwen3_vl"])
    size = {"shortest_edge": 256, "longest_edge": 1800 * 64}
    items: tuple[Item, ...] = (LARGE, Composed((SMALL, FLAT), "two"), "text")
    for item in items:
        text = item if isinstance(item, str) else item.text if isinstance(item, Composed) else ""
        images = item.images if isinstance(item, Composed) else [item] if isinstance(item, Image) else []
        seen = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        said = f"<|im_start|>system\nFind it.<|im_end|>\n<|im_start|>user\n{seen}{text}<|im_end|>\n"
        inputs = processor(
            text=[f"{said}<|im_start|>assistant\n"], images=opened(images) or None, return_tensors="pt", size=size
        )
        call = {name: each.double() if name == "pixel_values" else each for name, each in inputs.items()}
        hidden = model(**call).last_hidden_state[0]
        weight = encoder.head.layers[0].linear.weight  # type: ignore[union-attr]
        expected = torch.nn.functional.normalize(hidden @ weight.T, dim=-1)
        torch.testing.assert_close(rows_of(encoder, (item,))[0], expected, rtol=0, atol=1e-5)


def test_a_pooling_of_the_vectors_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="pooling_method mean would pool them"):
        load(folders["colpali"], pooling_method="mean")


@pytest.mark.parametrize("what", ["lora", "lora text", "lora vision", "vision", "text", "last_1_layers"])
def test_a_new_head_trains_whatever_else_does(folders: dict[str, Path], tmp_path: Path, what: str) -> None:
    name = "head.layers.0.linear.weight"
    encoder = partly_trained(folders["qwen3_vl"], what, **NEW)
    head = encoder.get_parameter(name)
    assert head.requires_grad
    assert name in (changing_names(encoder) or ())
    assert "and head:" in encoder.trained.words
    torch.manual_seed(2)
    assert torch.equal(head, load_any(folders["qwen3_vl"], dtype=torch.float64, **NEW).get_parameter(name))
    encoder.save(tmp_path)
    if what == "vision":  # a model that has its head keeps it as it is
        assert not partly_trained(tmp_path, what).get_parameter(name).requires_grad
