"""AnglE: CoSENT over the angles of pairs in the complex plane, which don't flatten where a cosine is near 1 or -1.

Numbers k and k + E/2 of an embedding are the real and the imaginary part of a complex number. With x of the query and y
of the document, both of unit length,

    S = |sum over k of Re(x_k conj(y_k)) + Im(x_k conj(y_k))|

and the loss is that of CoSENT over listed pairs and their grades.

Source: Li & Li, 2024, "AoE: Angle-optimized Embeddings for Semantic Textual Similarity".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch.nn.functional import normalize

from vembed.errors import ConfigError
from vembed.losses.cosent import CosentLoss
from vembed.losses.tiles import NORM_EPSILON, Prefixes

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import AngleKeys


class AngleLoss(CosentLoss):
    """CoSENT over the angles of the listed pairs of a batch."""

    @staticmethod
    def similarity(q_NE: Tensor, d_NE: Tensor, dim: int | None) -> Tensor:
        """Return how small the angle of each pair is (N,), 0 to the square root of 2; None takes rows as they are."""
        if dim is not None:
            q_NE, d_NE = (normalize(each[:, :dim], dim=-1, eps=NORM_EPSILON) for each in (q_NE, d_NE))
        real, imaginary = d_NE.chunk(2, dim=1)
        turned_NE = torch.cat(
            [real - imaginary, real + imaginary], dim=1
        )  # both parts of a product are one dot product
        return (q_NE * turned_NE).sum(dim=1).abs()

    @classmethod
    def from_keys(cls, keys: AngleKeys, common: LossCommon) -> Self:  # type: ignore[override]
        """Make the loss of a run.

        Raises:
            ConfigError: A length is odd: its numbers can't be taken two by two.
        """
        odd = [dim for dim in keys.mrl_dims or [common.dimension] if dim % 2]
        if odd:
            raise ConfigError(f"loss_type angle takes the numbers of an embedding two by two, and {odd[0]} is odd")
        return cls(scale=keys.angle_scale, prefixes=Prefixes.of_keys(keys), tile_size=common.tile_size)

    def listed(self, structure: BatchStructure) -> tuple[Tensor, Tensor]:
        """Return the listed pairs and their grades; a batch without any has no loss."""
        return super().listed(structure) or (structure.positives_P2[:0], structure.positives_P2.new_zeros(0))
