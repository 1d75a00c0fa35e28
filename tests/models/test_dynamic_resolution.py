"""Pictures that keep their shape have as many patches as they need: each costs its own, and padding changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from kit.picture_models import picture, write_picture_model
from kit.text_models import load_any

from vembed.batch import Composed
from vembed.gradcache.chunks import ChunkBudget, plan_chunks

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.encoder import Encoder

SHAPES = ((64, 64), (96, 64), (100, 30), (40, 100), (64, 50))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder: Path = write_picture_model(tmp_path_factory.mktemp("naflex"), "siglip2")
    return load_any(folder, dtype=torch.float64).eval()


@torch.no_grad()
def test_each_picture_costs_its_own_patches_and_is_embedded_as_if_it_were_alone(encoder: Encoder) -> None:
    items = [picture(seed, shape) for seed, shape in enumerate(SHAPES)]
    features = encoder.featurize(items, "document")
    own = features.per_row["spatial_shapes"].prod(axis=1)
    assert list(features.lengths) == list(own + 1)
    assert len(set(features.lengths)) > 1, "the shapes do need different numbers of patches"
    together = encoder(encoder.collate(features, np.arange(len(items)), int(features.lengths.max())))
    padded = encoder({name: torch.from_numpy(values) for name, values in features.per_row.items()})
    assert torch.allclose(together, padded, atol=1e-12)
    for row, length in enumerate(features.lengths):
        inputs = encoder.collate(features, np.array([row]), int(length))
        assert inputs["pixel_values"].shape[1] == length - 1
        assert torch.allclose(encoder(inputs)[0], together[row], atol=1e-12)


def test_a_chunk_is_as_wide_as_its_longest_picture(encoder: Encoder) -> None:
    features = encoder.featurize([picture(seed, shape) for seed, shape in enumerate(SHAPES)], "document")
    chunks = plan_chunks(features.lengths, ChunkBudget(2, 10**6))
    widths = [encoder.collate(features, chunk.rows, chunk.width)["pixel_values"].shape[1] + 1 for chunk in chunks]
    assert widths == [chunk.width for chunk in chunks] == sorted(widths, reverse=True)


def test_a_picture_with_a_text_costs_the_tokens_of_both(encoder: Encoder) -> None:
    composed = encoder.featurize([Composed((picture(1, SHAPES[1]),), "in red")], "query")
    alone = encoder.featurize([picture(1, SHAPES[1])], "query")
    text = encoder.featurize(["in red"], "query")
    assert composed.lengths[0] == alone.lengths[0] + text.lengths[0]
