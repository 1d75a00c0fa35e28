"""Documents that are too similar to a query to be its negatives, as the model itself or a teacher finds.

With the similarity s_ij of query and document and the highest one t_i of the query's positives, document j is no
negative of query i where

    s_ij > t_i - margin            or, relative,            s_ij > t_i - margin |t_i|

A similarity within `ROUNDING` of that limit counts as equal to it: the same product rounds otherwise in another tile,
and with a margin of 0 that would decide about copies of the positive, which stay negatives.
Similarities are the model's own, each prefix's by itself, or those of a teacher's vectors. The choice has no gradient.
Positives are never left out. Streamed, a tile's own logits are compared, or one more product gives the teacher's.

Source: Solatorio, 2024, "GISTEmbed: Guided In-sample Selection of Training Negatives" (a teacher); the margin relative
to the positive as in Moreira et al., 2024, "NV-Retriever".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import torch

from vembed.device import to_device
from vembed.losses.tiles import pair_similarity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vembed.losses.base import BatchStructure
    from vembed.losses.cells import Tile
    from vembed.losses.keys import FilterKeys
    from vembed.losses.streamed import StreamedBatch
    from vembed.losses.tiles import SimilarityTiles


ROUNDING = 1e-4
"""Of a similarity, or of 1 where that is larger; products in TF32 of unit vectors differ by less."""


@dataclass(frozen=True, slots=True)
class FalseNegativeFilter:
    """Rule of false negatives: the similarities that it compares, and the distance from the positive's to its limit."""

    by: Literal["threshold", "teacher"]  # the model's own similarities, or a teacher's
    margin: float
    relative: bool  # whether the margin is a share of the positive's similarity

    @classmethod
    def of_keys(cls, keys: FilterKeys) -> Self | None:
        """Return what a loss's keys ask for; None where equal content alone makes false negatives."""
        if keys.false_negative_filter == "identity":
            return None
        relative = keys.false_negative_margin_kind == "relative"
        return cls(keys.false_negative_filter, keys.false_negative_margin, relative)

    def limits(self, best: Tensor) -> Tensor:
        """Return the similarities above which documents are no negatives; a query without positives has no limit.

        Args:
            best: The highest similarity of each query's positives, -inf without any.
        """
        below = best.abs() * self.margin if self.relative else self.margin
        rounding = ROUNDING * best.abs().clamp_min(1.0)
        return torch.where(best == -math.inf, math.inf, best - below + rounding)

    def false_negatives(self, structure: BatchStructure, similarity_QD: Tensor, positive_QD: Tensor) -> Tensor:
        """Return the false negatives of a whole batch, bool (Q, D): the definition."""
        if self.by == "teacher":
            teacher_Q, teacher_D = _teacher(structure)
            similarity_QD = teacher_Q @ teacher_D.T
        similarity_QD = similarity_QD.detach()  # which documents are left out is a choice, without a gradient
        best_Q = similarity_QD.masked_fill(~positive_QD, -math.inf).amax(dim=1)
        return (similarity_QD > self.limits(best_Q)[:, None]) & ~positive_QD


class TileFilter:
    """Finds the false negatives of tiles.

    Args:
        dims: Length of each prefix; None is the embedding as it is.
    """

    def __init__(
        self, rule: FalseNegativeFilter, batch: StreamedBatch, tiles: SimilarityTiles, dims: Sequence[int | None]
    ) -> None:
        self._teacher: tuple[Tensor, Tensor] | None = None
        sides, factor = (batch.q_QE, batch.d_DE), tiles.scale
        if rule.by == "teacher":
            teacher_Q, teacher_D = (to_device(side, tiles.device) for side in _teacher(batch.structure))
            sides = self._teacher = teacher_Q[batch.rows], teacher_D
            # A teacher judges all prefixes alike, by its own vectors and without the scale of the model's logits.
            dims, factor = (None,) * len(dims), 1.0
        self._limits_KQ = torch.stack([factor * rule.limits(_best(tiles, sides, dim)) for dim in dims])

    def leave_out(self, prefix: int, tile: Tile, tiles: SimilarityTiles, logits_RC: Tensor) -> None:
        """Put -inf into the logits of a tile that are false negatives; of a tile the prefixes come in order."""
        similar_RC = tiles.scratch("false negatives", tile.shape, torch.bool)
        limits_R1 = self._limits_KQ[prefix, tile.rows, None]
        if self._teacher is None:
            torch.gt(logits_RC, limits_R1, out=similar_RC)
        elif prefix == 0:
            rows_RT, columns_CT = self._teacher[0][tile.rows], self._teacher[1][tile.columns]
            similarity_RC = tiles.scratch("teacher", tile.shape, rows_RT.dtype)
            torch.gt(torch.mm(rows_RT, columns_CT.T, out=similarity_RC), limits_R1, out=similar_RC)
        # With a teacher the further prefixes of a tile take what the first left here.
        logits_RC.masked_fill_(similar_RC, -math.inf)


def _best(tiles: SimilarityTiles, sides: tuple[Tensor, Tensor], dim: int | None) -> Tensor:
    """Return the highest similarity of each query's positives, (Q,); -inf without any."""
    cell_map = tiles.cell_map
    best_Q = tiles.zeros(cell_map.num_rows).fill_(-math.inf)
    # A block of pairs at a time: rows of all pairs would be a copy of the queries, and one of their documents.
    pairs = (side.split(tiles.tile_size) for side in (cell_map.pair_rows, cell_map.pair_columns))
    for rows, columns in zip(*pairs, strict=True):
        q_PE, d_PE = sides[0][rows].to(tiles.dtype), sides[1][columns].to(tiles.dtype)
        best_Q.scatter_reduce_(0, rows, pair_similarity(q_PE, d_PE, dim), "amax")
    return best_Q


def _teacher(structure: BatchStructure) -> tuple[Tensor, Tensor]:
    """Return the teacher's vectors.

    Raises:
        ValueError: The batch has none.
    """
    if structure.teacher_Q is None or structure.teacher_D is None:
        raise ValueError("false_negative_filter: teacher needs a teacher's vectors, and this batch has none")
    return structure.teacher_Q, structure.teacher_D
