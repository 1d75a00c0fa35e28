"""Late interaction on pages: the vectors of transformers' ColPali and ColQwen2, folders, and exact gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import partly_trained, wake
from late_cases import assert_engine_is_exact, batch_of
from model_cases import load_any
from picture_cases import opened, picture
from transformers import AutoModel, AutoModelForPreTraining, AutoProcessor
from vision_language_cases import RETRIEVAL_BUILDERS, write_vision_language

from vembed.batch import Composed, Features, Image
from vembed.errors import ConfigError, DataError
from vembed.gradcache.calls import Pool
from vembed.models.adapters.lora import add_adapters
from vembed.models.adapters.trained import changing_names, save_trained
from vembed.models.exportable import writable_forms
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.profile.measure import ProfileTarget
from vembed.models.profile.profile import profile_model
from vembed.models.vision_late import VisionLateEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Item, Side

KINDS = (*RETRIEVAL_BUILDERS, "qwen3_vl")
SMALL, LARGE, FLAT = picture(0), picture(1, (90, 60)), picture(2, (30, 100))
TEXTS = ("sea", "which page has the inn brave otter", "a longer text, by far")
PICTURES = (LARGE, SMALL, FLAT)
NEAR = 1e-6
"""Norms and rotations compute in float32, whatever the type of the weights."""

FEWER: tuple[dict[str, Any], ...] = ({"topk_tokens": 6}, {"pool_factor": 2.0})
NEW: dict[str, Any] = {"pooling_method": "none", "projection_dim": 12}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision-late")
    return {kind: write_vision_language(root / kind, kind) for kind in KINDS}


def keys_of(kind: str) -> dict[str, Any]:
    return {} if kind in RETRIEVAL_BUILDERS else NEW


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


@pytest.mark.parametrize("kind", KINDS)
def test_neither_neighbours_nor_their_order_nor_padding_change_a_vector(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind], **keys_of(kind))
    for items in (TEXTS, PICTURES):
        together = rows_of(encoder, items)
        for one, other in zip(together, rows_of(encoder, items[::-1], more=3)[::-1], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=NEAR)
        for item, vectors in zip(items, together, strict=True):
            torch.testing.assert_close(rows_of(encoder, (item,))[0], vectors, rtol=0, atol=NEAR)


@pytest.mark.parametrize("choice", [{}, *(pytest.param(each, marks=pytest.mark.slow) for each in FEWER)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_was_written_gives_the_same_vectors(
    folders: dict[str, Path], tmp_path: Path, kind: str, choice: dict[str, Any]
) -> None:
    encoder = load(folders[kind], query_prompt="Find", **keys_of(kind), **choice)
    encoder.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.describe() | {"model": ""} == encoder.describe() | {"model": ""}
    for items in (TEXTS, PICTURES):
        for side in ("query", "document"):
            for one, other in zip(rows_of(encoder, items, side=side), rows_of(again, items, side=side), strict=True):  # type: ignore[arg-type]
                assert torch.equal(one, other)
    with pytest.raises(ConfigError, match="pooling_method mean would pool them"):
        load(tmp_path / "model", pooling_method="mean")


@pytest.mark.parametrize("kind", [*RETRIEVAL_BUILDERS, pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_adapters_are_merged_into_the_folder(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    encoder: Any = partly_trained(folders[kind], "lora", **keys_of(kind)).eval()
    wake(encoder)
    expected = rows_of(encoder, PICTURES)
    save_trained(encoder, tmp_path / "merged", tmp_path / "adapter")
    for one, other in zip(rows_of(load(tmp_path / "merged"), PICTURES), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=NEAR)


@pytest.mark.parametrize("what", ["lora", "lora text", "vision", "text", "last_1_layers"])
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


def test_a_new_head_trains_beside_adapters_of_the_tower_for_pictures(folders: dict[str, Path]) -> None:
    encoder = load(folders["qwen3_vl"], **NEW)
    add_adapters(encoder, AdapterKeys(lora_r=2, lora_towers="vision"))
    assert encoder.get_parameter("head.layers.0.linear.weight").requires_grad
    assert "and head:" in encoder.trained.words


def pools_of(encoder: VisionLateEncoder) -> list[Pool]:
    texts, pictures = encoder.featurize(TEXTS, "query"), encoder.featurize(PICTURES, "document")
    numbers = np.arange(len(TEXTS))
    parts: list[tuple[Features, Any]] = [(texts, numbers), (pictures, numbers + len(TEXTS))]
    return [Pool(encoder, encoder.collate, each, slots, encoder.num_vectors(each)) for each, slots in parts]


@pytest.mark.parametrize("choice", [{}, {"topk_tokens": 6}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_gives_the_gradients_of_the_plain_step(
    folders: dict[str, Path], kind: str, choice: dict[str, Any]
) -> None:
    gradients, num_chunks = assert_engine_is_exact(
        lambda: load(folders[kind], **keys_of(kind), **choice),
        pools_of,
        batch_of(TEXTS, PICTURES),
        rows=2,
        of_largest=1e-10,
    )
    assert num_chunks > 2
    assert gradients["head.layers.0.linear.weight"].abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["colpali", pytest.param("colqwen2", marks=pytest.mark.slow)])
def test_the_plan_runs_them_on_no_data(folders: dict[str, Path], kind: str) -> None:
    size = profile_model(ModelKeys(model_name=str(folders[kind])), ProfileTarget("cpu"))
    assert not size.estimated
    assert size.dimension == 12
