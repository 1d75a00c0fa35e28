"""Items that are a picture and a text: one vector made of both, exact gradients, refused by models of one tower."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kit.picture_models import DUAL_BUILDERS, PICTURES, TINY, vectors, write_open_clip
from kit.picture_models import write_picture_model as write
from kit.text_models import TEXTS, load_any, write_model

from vembed.batch import Composed, Features, Image, content_id
from vembed.errors import DataError
from vembed.models.composed import join_features
from vembed.models.from_scratch import TinyClip
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Item

KINDS = (*DUAL_BUILDERS, "tiny-clip", "open_clip", "two models")
SHIRTS = tuple(Composed((image,), text) for image, text in zip(PICTURES, TEXTS, strict=False))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("composed")
    torch.manual_seed(0)
    TinyClip(TINY).save(root / "tiny-clip")
    written = {kind: write(root / kind, kind) for kind in (*DUAL_BUILDERS, "vit")}
    towers = {"text_model_name": str(write_model(root / "bert", "bert")), "image_model_name": str(written["vit"])}
    load_encoder(ModelKeys.model_validate({**towers, "projection_dim": 16})).save(root / "two")
    written |= {"two models": root / "two", "tiny-clip": root / "tiny-clip"}
    return {**written, "open_clip": write_open_clip(root / "open_clip")}


def load(folder: Path, **options: Any) -> Any:
    return load_any(folder, **options).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_vector_is_the_normalised_sum_of_the_units_of_both_parts(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind], dtype=torch.float64)
    images = vectors(encoder, [item.images[0] for item in SHIRTS])
    texts = vectors(encoder, [item.text for item in SHIRTS])
    found = vectors(encoder, SHIRTS)
    assert torch.allclose(found, F.normalize(images + texts, dim=-1), atol=1e-9)
    assert (found - images).norm(dim=-1).min() > 1e-3
    assert (found - texts).norm(dim=-1).min() > 1e-3


@pytest.mark.parametrize("kind", ["vit", "text"])
def test_a_model_of_one_tower_refuses_them(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    encoder = load(write_model(tmp_path / "text", "bert") if kind == "text" else folders[kind])
    own: list[Item] = list(TEXTS if kind == "text" else PICTURES)
    assert len(encoder.by_modality(own)) == 1
    with pytest.raises(DataError, match="2 items of the data are pictures with a text: choose a model for both"):
        encoder.by_modality([*own, *SHIRTS[:2]])


@pytest.mark.parametrize("kind", ["vit", "clip"])
def test_a_model_of_one_picture_refuses_an_item_of_several_and_takes_one_without_a_text(
    folders: dict[str, Path], kind: str
) -> None:
    encoder = load(folders[kind])
    assert torch.equal(vectors(encoder, [Composed(PICTURES[:1], "")]), vectors(encoder, PICTURES[:1]))
    with pytest.raises(DataError, match=r"takes one picture in an item, and 1 items .* have several \(the first one 2"):
        encoder.by_modality([*PICTURES, Composed(PICTURES[:2], "")])


def test_both_parts_count_for_the_budget_of_a_chunk_and_cut_texts_are_counted(folders: dict[str, Path]) -> None:
    encoder = load(folders["clip"])
    long = Composed((PICTURES[0],), "red " * 500)
    features = encoder.featurize([*SHIRTS, long], "query")
    alone = encoder.featurize([*(item.text for item in SHIRTS), long.text], "query")
    assert (features.lengths == encoder.picture_tokens + alone.lengths).all()
    assert features.num_truncated == alone.num_truncated == 1
    rows = np.array([0, 1])
    inputs = encoder.collate(features, rows, int(features.lengths[rows].max()))
    assert inputs["input_ids"].shape[1] == alone.lengths[rows].max(), "a text isn't padded to the picture's tokens"


def test_parts_that_would_share_an_input_are_refused() -> None:
    part = Features({}, np.ones(1, dtype=np.int64), {"x": np.zeros(1)})
    assert join_features(part, replace(part, per_row={"y": np.zeros(1)})).per_row.keys() == {"x", "y"}
    with pytest.raises(ValueError, match="share the inputs"):
        join_features(part, part)


def test_identity_is_of_both_parts_and_of_nothing_else(tmp_path: Path) -> None:
    image = PICTURES[0]
    copy = tmp_path / "copy.png"
    copy.write_bytes(image.read())
    item = Composed((image,), "in red")
    assert content_id(item) == content_id(Composed((Image(str(copy)),), " in red "))
    others: list[Item] = [image, "in red", Composed((PICTURES[1],), "in red"), Composed((image,), "in blue")]
    others += [Composed((image, PICTURES[1]), ""), Composed((PICTURES[1], image), ""), Composed((image,) * 2, "")]
    others += [Composed((image, PICTURES[1]), "in red")]
    assert len({content_id(each) for each in [item, *others]}) == 9
    assert content_id(Composed((image,), "")) == content_id(image), "it is the picture alone"
