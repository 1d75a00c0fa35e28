"""A few texts and pictures that a written model must give the same vectors for as the one that it was written from.

Shape legend: n sample items, E embedding dim.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
import torch

from vembed.batch import Image

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.models.encoder import Encoder

    Vectors: TypeAlias = Mapping[str, NDArray[np.float64]]

TEXTS = (
    "sea",
    "How do I sort a list in place? Use list.sort(), which returns None.",
    "Übergrößen: naïve café, 東京の天気, 3.14 €",
    "a red fox " * 120,
)
"""A word, a sentence, other scripts, and a text that most models cut."""

PICTURE_SIZES = ((96, 64), (64, 96), (33, 47))


def sample_vectors(encoder: Encoder) -> dict[str, NDArray[np.float64]]:
    """Encode the samples that an encoder takes, each kind in one call.

    Returns:
        What was encoded -> (n, E): texts as queries and as documents, and pictures.
    """
    return {name: _encode(encoder, items, side) for name, items, side in sample_kinds(encoder)}


def sample_kinds(encoder: Encoder) -> Iterator[tuple[str, Sequence[Item], Side]]:
    """Yield the samples that an encoder takes: what they are called, items of one kind, their side."""
    if "text" in encoder.modalities:
        yield "query texts", TEXTS, "query"
        yield "document texts", TEXTS, "document"
    if "image" in encoder.modalities:
        yield "pictures", [Image(f"sample-{number}.png", data) for number, data in enumerate(picture_bytes())], "query"


@torch.no_grad()
def _encode(encoder: Encoder, items: Sequence[Item], side: Side) -> NDArray[np.float64]:
    features = encoder.featurize(items, side)
    inputs = encoder.collate(features, np.arange(len(items)), int(features.lengths.max()))
    vectors: NDArray[np.float64] = encoder(inputs).double().numpy()
    return vectors


def picture_bytes() -> list[bytes]:
    """Return coloured squares of different shapes, as PNG."""
    written = []
    for seed, size in enumerate(PICTURE_SIZES):
        colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        PIL.Image.fromarray(colours).resize(size, PIL.Image.Resampling.BICUBIC).save(buffer, "PNG")
        written.append(buffer.getvalue())
    return written


def largest_difference(one: Vectors, other: Vectors) -> float:
    """Return the largest difference of two sets of vectors, infinite where a number isn't finite.

    Vectors that aren't of unit length are measured in units of their largest component, where that is above 1.
    """
    assert one.keys() == other.keys()
    worst = 0.0
    for name, vectors_NE in one.items():
        if vectors_NE.shape != other[name].shape:
            return math.inf
        difference = float(np.abs(vectors_NE - other[name]).max())
        if not math.isfinite(difference):
            return math.inf
        worst = max(worst, difference / max(1.0, float(np.abs(vectors_NE).max())))
    return worst


def num_items(vectors: Vectors) -> int:
    """Return how many items were encoded."""
    return sum(len(rows) for rows in vectors.values())
