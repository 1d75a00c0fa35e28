"""What an encoder is measured with before there are data: sample texts, a blank picture, and inputs without values."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.batch import Image
from vembed.data.images import ImageLimits
from vembed.models.pictures import blank_picture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from vembed.batch import Features
    from vembed.models.encoder import Encoder
    from vembed.models.towers import TowerName

ROWS = 23
"""Rows of a run: a prime that divides no usual width of a layer."""

WIDTHS = (127, 113, 101, 89, 73, 61, 47, 31, 19, 11, 7, 5, 3, 2)
"""Tokens of a row in a run: the first that the encoder takes; primes, none of them the number of rows."""

WORDS = (*ascii_lowercase, *map("".join, itertools.product(ascii_lowercase, repeat=2)))[: WIDTHS[0]]
"""Of sample texts: short and all different."""


@dataclass(frozen=True, slots=True)
class TowerInputs:
    """What one tower is measured with."""

    name: TowerName
    max_tokens: int | None  # of the longest item; None where there is no limit
    width: int  # tokens of each row of the run
    fixed: bool  # whether every item is of that width
    make: Callable[[], dict[str, Tensor]]  # inputs of ROWS rows on the meta device
    through: tuple[TowerName, ...] = ()  # other towers that the same call passes through
    patches: int = 1  # of the tower for each token


def text_inputs(encoder: Encoder) -> TowerInputs:
    """Return what a text tower is measured with, by what `featurize` and `collate` make of texts of 1, 2, ... words."""
    features = encoder.featurize([" ".join(WORDS[:count]) for count in range(1, len(WORDS) + 1)], "document")
    width = next((width for width in WIDTHS if width in features.lengths), int(features.lengths.max()))
    rows = np.full(ROWS, np.flatnonzero(features.lengths == width)[0])
    fixed = bool((features.lengths == width).all())

    def make() -> dict[str, Tensor]:
        return {name: each.to("meta") for name, each in encoder.collate(features, rows, width).items()}

    return TowerInputs("text", encoder.max_length, width, fixed, make)


def token_inputs(longest: int, *, padded: bool = False, masked: bool = False) -> TowerInputs:
    """Return rows of token ids, as most text towers take them.

    Args:
        padded: Whether every text is padded to that length.
        masked: Whether their lengths go with them: rows of a chunk are seldom all of one.
    """
    width = longest if padded else next((width for width in WIDTHS if width <= longest), 1)

    def make() -> dict[str, Tensor]:
        ids = torch.empty(ROWS, width, dtype=torch.long, device="meta")
        return {"input_ids": ids, "lengths": ids[:, 0].int()} if masked else {"input_ids": ids}

    return TowerInputs("text", longest, width, padded, make)


def picture_inputs(encoder: Encoder) -> TowerInputs:
    """Return what a picture tower is measured with, by what `featurize` and `collate` make of a blank picture."""
    features = one_picture(encoder)
    tokens = int(features.lengths[0])

    def make() -> dict[str, Tensor]:
        made = encoder.collate(features, np.zeros(ROWS, dtype=np.int64), tokens)
        # What isn't pixels says how they lie, and is read by value.
        return {
            name: each.to("meta") if each.is_floating_point() or each.dtype == torch.uint8 else each
            for name, each in made.items()
        }

    return TowerInputs("vision", tokens, tokens, True, make)


def one_picture(encoder: Encoder) -> Features:
    """Return the features of a blank picture."""
    encoded = BytesIO()
    blank_picture().save(encoded, "PNG")
    with any_picture(encoder):
        return encoder.featurize([Image("blank", encoded.getvalue())], "document")


@contextmanager
def any_picture(encoder: Encoder) -> Iterator[None]:
    """Lift an encoder's limits on pictures within the block: those in it are ours, not the user's."""
    allowed, encoder.image_limits = encoder.image_limits, ImageLimits()
    try:
        yield
    finally:
        encoder.image_limits = allowed


def picture_bytes(encoder: Encoder) -> int:
    """Return the memory that the features of one picture take; 0 for an encoder of texts."""
    if "image" not in encoder.modalities:
        return 0
    features = one_picture(encoder)
    arrays = [*features.per_row.values(), *(column.values for column in features.columns.values())]
    return sum(values.nbytes for values in arrays)
