"""The inputs of a call of many rows, without any data: shapes and types are the encoder's own."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.batch import Image
from vembed.data.images import ImageLimits
from vembed.models.dual import DualEncoder
from vembed.models.ngram_bag import NgramBag
from vembed.models.open_clip_encoder import OpenClipEncoder
from vembed.models.pictures import blank_picture
from vembed.models.profile.live import ROWS, WIDTHS
from vembed.models.text import TextEncoder
from vembed.models.tiny_clip import GRAMS_PER_TOKEN, TinyClip

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from vembed.batch import Features
    from vembed.models.encoder import Encoder
    from vembed.models.towers import TowerName


@dataclass(frozen=True, slots=True)
class TowerInputs:
    """What one tower is measured with.

    Attributes:
        name: The tower.
        max_tokens: Tokens of the longest item, None where there is no limit.
        width: Tokens of each row of the run.
        fixed: Whether every item is of that width.
        make: Returns the inputs of ROWS rows on the meta device.
    """

    name: TowerName
    max_tokens: int | None
    width: int
    fixed: bool
    make: Callable[[], dict[str, Tensor]]


def tower_inputs(encoder: Encoder) -> list[TowerInputs]:
    """Return what each tower of an encoder is measured with."""
    found = []
    if "text" in encoder.modalities:
        found.append(_texts(encoder))
    if "image" in encoder.modalities:
        found.append(_pictures(encoder))
    return found


def _texts(encoder: Encoder) -> TowerInputs:
    if isinstance(encoder, NgramBag | TinyClip):
        bag = isinstance(encoder, NgramBag)
        limit, width = None if bag else encoder.max_length, WIDTHS[-4]
        return TowerInputs("text", limit, width, False, lambda: _grams(width if bag else width * GRAMS_PER_TOKEN))
    longest = encoder.max_length
    assert longest is not None
    padded = isinstance(encoder, DualEncoder) and encoder.family.pads_texts
    padded = padded or (isinstance(encoder, OpenClipEncoder) and encoder.causal_texts is None)
    width = longest if padded else next((width for width in WIDTHS if width <= longest), 1)

    def make() -> dict[str, Tensor]:
        ids = torch.empty(ROWS, width, dtype=torch.long, device="meta")
        # Rows of a chunk are seldom all of one length.
        return {"input_ids": ids, "attention_mask": ids} if isinstance(encoder, TextEncoder) else {"input_ids": ids}

    return TowerInputs("text", longest, width, padded, make)


def _grams(count: int) -> dict[str, Tensor]:
    grams = torch.empty(ROWS * count, dtype=torch.long, device="meta")
    return {"grams": grams, "offsets": torch.empty(ROWS, dtype=torch.long, device="meta"), "rows": grams}


def one_picture(encoder: Encoder) -> Features:
    """Return the features of a blank picture."""
    encoded = BytesIO()
    blank_picture().save(encoded, "PNG")
    allowed, encoder.image_limits = encoder.image_limits, ImageLimits()  # this picture is ours, not the user's
    try:
        return encoder.featurize([Image("blank", encoded.getvalue())], "document")
    finally:
        encoder.image_limits = allowed


def _pictures(encoder: Encoder) -> TowerInputs:
    features = one_picture(encoder)
    tokens = int(features.lengths[0])
    one = encoder.collate(features, np.zeros(1, dtype=np.int64), tokens)

    def make() -> dict[str, Tensor]:
        # What isn't pixels says how they lie, and is read by value.
        return {
            name: torch.empty(ROWS, *each.shape[1:], dtype=each.dtype, device="meta")
            if each.is_floating_point() or each.dtype == torch.uint8
            else each.expand(ROWS, *each.shape[1:]).contiguous()
            for name, each in one.items()
        }

    return TowerInputs("vision", tokens, tokens, True, make)
