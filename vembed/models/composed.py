"""Encoders of two towers, one for texts and one for pictures, that end in one space.

An item that is a picture and a text goes through both:

1. Features of both parts share a row: the columns of the texts and the arrays of the pictures, side by side.
2. Each tower sees its own part of a chunk and ends in unit length.
3. The embedding is the sum of the two, brought to unit length: the direction halfway between them.

It needs no parameter of its own, so that a model that was never trained on such items takes them too.
Source: the "image + text" baselines of Liu et al., 2021 (CIRR) and Saito et al., 2023 (Pic2Word).

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from vembed.batch import Features, modality_of, parts_of, texts_of
from vembed.models.encoder import Encoder
from vembed.models.pictures import pictures_of, rows_of, without_padding

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Image, Item, Modality, Side


class TwoTowers(Encoder):
    """An encoder of texts, of pictures, and of items that are both."""

    modalities: frozenset[Modality] = frozenset({"text", "image", "image+text"})
    text_inputs: ClassVar[frozenset[str]] = frozenset(
        {"input_ids"}
    )  # what `collate` makes of texts; the rest: pictures
    max_length: int
    picture_tokens: int  # what a picture costs; the most where they differ
    padding_id: int  # fills rows of token ids at the right

    @abstractmethod
    def featurize_texts(self, texts: list[str], side: Side) -> Features:
        """Tokenize texts into ragged columns."""

    @abstractmethod
    def featurize_pictures(self, images: Sequence[Image]) -> Features:
        """Decode pictures into arrays with one entry per picture."""

    @abstractmethod
    def embed_texts(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the embeddings of texts, (R, E), of unit length, at least float32."""

    @abstractmethod
    def embed_pictures(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the embeddings of pictures, (R, E), of unit length, at least float32."""

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Read items by the tower of their modality, or by both."""
        modality = modality_of(items[0])
        if modality == "text":
            return self.featurize_texts(texts_of(items), side)
        if modality == "image":
            return self.featurize_pictures(pictures_of(items))
        images, texts = parts_of(items)
        return join_features(self.featurize_pictures(images), self.featurize_texts(texts, side))

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Take the rows of pictures, or pad those of texts at the right, never past the last position, or both.

        Pictures of unequal numbers of patches are padded to the longest of the chunk.
        """
        inputs = without_padding({name: rows_of(values, rows) for name, values in features.per_row.items()})
        if "input_ids" in features.columns:
            ids = features.columns["input_ids"].take(rows)
            # Beside a picture the width is that of both.
            width = int(ids.lengths.max()) if inputs else min(width, self.max_length)
            inputs["input_ids"] = torch.from_numpy(ids.padded(width, self.padding_id))
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E) of texts, of pictures or of both, of unit length, at least float32."""
        texts, pictures = self.split_inputs(inputs)
        if not texts:
            return self.embed_pictures(pictures)
        text_RE = self.embed_texts(texts)
        return sum_of_units(self.embed_pictures(pictures), text_RE) if pictures else text_RE

    def split_inputs(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the inputs of the text tower and those of the image tower."""
        texts = {name: tensor for name, tensor in inputs.items() if name in self.text_inputs}
        return texts, {name: tensor for name, tensor in inputs.items() if name not in texts}

    @property
    def longest_item(self) -> int:
        """Tokens of the longest text or picture."""
        return max(self.max_length, self.picture_tokens)


def join_features(pictures: Features, texts: Features) -> Features:
    """Return features of n rows that hold a picture and a text each; a row costs the tokens of both.

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
    """Return the direction halfway between two unit vectors, row by row; the zero vector of two opposite ones."""
    return F.normalize(picture_RE + text_RE, dim=-1)
