"""An item that is a picture and a text, in models of two towers: the sum of what each tower makes of its part.

1. Features of both parts share a row: the columns of the texts and the arrays of the pictures, side by side.
2. Each tower sees its own part of a chunk and ends in unit length.
3. The embedding is the sum of the two, brought to unit length: the direction halfway between them.

It needs no parameter of its own, so that a model that was never trained on such items takes them too.
Source: the "image + text" baselines of Liu et al., 2021 (CIRR) and Saito et al., 2023 (Pic2Word).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812

from vembed.batch import Features

if TYPE_CHECKING:
    from torch import Tensor


def join_features(pictures: Features, texts: Features) -> Features:
    """Return features whose rows hold a picture and a text each.

    Args:
        pictures: Features of n pictures: arrays with one entry per picture.
        texts: Features of n texts: ragged columns.

    Returns:
        n rows; each costs the tokens of both, and is cut where its text is.

    Raises:
        ValueError: A column or an array would be both.
    """
    shared = (pictures.columns.keys() & texts.columns.keys()) | (pictures.per_row.keys() & texts.per_row.keys())
    if shared or len(pictures) != len(texts):
        raise ValueError(f"{len(pictures)} pictures and {len(texts)} texts share the inputs {sorted(shared)}")
    return Features(
        columns={**pictures.columns, **texts.columns},
        lengths=pictures.lengths + texts.lengths,
        per_row={**pictures.per_row, **texts.per_row},
        num_truncated=pictures.num_truncated + texts.num_truncated,
    )


def sum_of_units(picture_RE: Tensor, text_RE: Tensor) -> Tensor:
    """Return the direction halfway between two unit vectors, row by row.

    Args:
        picture_RE: Embeddings of the pictures, (R, E), of unit length.
        text_RE: Embeddings of the texts, (R, E), of unit length.

    Returns:
        (R, E) of unit length; of two opposite vectors the zero vector.
    """
    return F.normalize(picture_RE + text_RE, dim=-1)
