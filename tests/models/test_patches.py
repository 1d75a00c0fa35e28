"""Late interaction on pictures: a vector for each patch, as many as the keys say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.late_models import rows_of
from kit.picture_models import PATCH, PICTURES, SIDE, write_picture_model
from kit.text_models import load_any

from vembed.errors import ConfigError
from vembed.models.keys import ModelKeys
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model

if TYPE_CHECKING:
    from pathlib import Path

DIMENSION = 8
PATCHES = (SIDE // PATCH) ** 2
TOKENS = {
    **dict.fromkeys(("vit", "mae", "dinov2", "clip vision"), 1 + PATCHES),
    "dinov3": 3 + PATCHES,
    "siglip vision": PATCHES,
}
"""Family -> the tokens of a picture: the first one, where it has one, registers and patches."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("patches")
    return {kind: write_picture_model(root / kind, kind) for kind in TOKENS}


def late(folder: Path, **keys: Any) -> Any:
    torch.manual_seed(1)
    return load_any(folder, pooling_method="none", projection_dim=DIMENSION, **keys).eval()


@pytest.mark.parametrize("kind", TOKENS)
def test_each_token_of_a_picture_becomes_a_vector(folders: dict[str, Path], kind: str) -> None:
    encoder = late(folders[kind])
    features = encoder.featurize(PICTURES, "document")
    inputs = encoder.collate(features, np.arange(len(PICTURES)), 0)
    with torch.no_grad():
        hidden = encoder.outputs(inputs).last_hidden_state
        wanted = torch.nn.functional.normalize(hidden @ encoder.head.layers[0].linear.weight.T, dim=-1)
    assert wanted.shape == (len(PICTURES), TOKENS[kind], DIMENSION)
    found = rows_of(encoder, PICTURES, "document")
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", TOKENS)
def test_all_that_trains_reaches_a_vector(folders: dict[str, Path], kind: str) -> None:
    encoder = late(folders[kind])
    features = encoder.featurize(PICTURES, "document")
    z_VE = encoder(encoder.collate(features, np.arange(len(PICTURES)), 0))
    (z_VE * torch.randn_like(z_VE)).sum().backward()
    trained = {name: weight.grad for name, weight in encoder.named_parameters() if weight.requires_grad}
    assert [name for name, gradient in trained.items() if gradient is None] == []


@pytest.mark.parametrize(
    ("keys", "count"),
    [({}, 1 + PATCHES), ({"topk_tokens": 5}, 5), ({"pool_factor": 3.0}, 1 + PATCHES // 3)],
    ids=["all", "topk", "pooled"],
)
def test_a_saved_model_gives_as_many_vectors_and_pools_them_no_further(
    folders: dict[str, Path], tmp_path: Path, keys: dict[str, Any], count: int
) -> None:
    late(folders["dinov2"], **keys).save(tmp_path)
    assert {len(vectors) for vectors in rows_of(load_any(tmp_path).eval(), PICTURES, "document")} == {count}
    with pytest.raises(ConfigError, match="would pool them"):
        load_any(tmp_path, pooling_method="cls")


def test_the_plan_counts_the_vectors_of_a_picture(folders: dict[str, Path]) -> None:
    keys = ModelKeys(model_name=str(folders["dinov2"]), pooling_method="none", topk_tokens=5)
    size = profile_model(keys, ProfileTarget("cpu"))
    assert (size.estimated, size.vectors, size.dimension) == (False, (5.0, 0.0), 128)
