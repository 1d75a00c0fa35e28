"""The pairwise sigmoid loss of SigLIP, with a learned logit scale and bias.

Each cell of the matrix is a question of its own: is this document a positive of this query?

    L = 1/Q sum over i, j of softplus(-y_ij (s S_ij + b)),   y_ij = 1 for positives, -1 for negatives

without the masked cells. There is nothing to normalise, so that one sweep over the tiles gives loss and gradients,
3 products of Q x D x E:

    dL/d(s S_ij) = (sigmoid(s S_ij + b) - [y_ij = 1]) / Q

Source: Zhai et al., 2023, "Sigmoid Loss for Language Image Pre-Training".
Shape legend: Q queries of this rank, D documents of all ranks, K prefixes, R x C cells of a tile, P positive pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from vembed.losses import MAX_LOGIT_SCALE, MIN_LOGIT_SCALE
from vembed.losses.base import query_shares
from vembed.losses.cells import positive_mask
from vembed.losses.streamed import CellLoss, Sweep, streamed_options
from vembed.losses.tiles import read_numbers, weighted_similarities

if TYPE_CHECKING:
    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import SigmoidKeys
    from vembed.losses.streamed import StreamedBatch, StreamedOptions, TileLogits
    from vembed.losses.tiles import SimilarityTiles

EXACT_THRESHOLD = 40.0
"""Above this, log(1 + e^x) is x in every type; torch's own threshold of 20 would cost digits in float64."""


class SigmoidSweep(Sweep):
    """Sigmoid terms of one batch: every cell by itself."""

    reach = "cell"

    def __init__(self, tiles: SimilarityTiles, weights_KQ: Tensor, bias: float) -> None:
        super().__init__(tiles)
        self.weights_KQ, self.bias = weights_KQ, bias
        self.bias_gradient = tiles.zeros()

    def slopes(self, part: TileLogits) -> Tensor:
        """Add the terms of a tile, and turn it into sigmoid(logit + bias) times the weight of the query."""
        # Masked cells hold -inf, of which softplus and sigmoid make 0. The filter has compared logits without the bias.
        logits_RC, positives_P = part.logits_RC.add_(self.bias), part.positives_P + self.bias
        weights_Q = self.weights_KQ[part.prefix]
        weights_R, weights_P = weights_Q[part.tile.rows], weights_Q[self.tiles.cell_map.pair_rows[part.tile.pairs]]
        self.loss += softplus(logits_RC, threshold=EXACT_THRESHOLD).sum(dim=1) @ weights_R
        self.loss += softplus(-positives_P, threshold=EXACT_THRESHOLD) @ weights_P
        logits_RC.sigmoid_().mul_(weights_R[:, None])
        slopes_P = -weights_P * (-positives_P).sigmoid()
        self.bias_gradient += logits_RC.sum() + slopes_P.sum()
        return slopes_P


class SigmoidLoss(CellLoss):
    """Sigmoid loss over the documents of the batch, of rows with one vector each."""

    def __init__(
        self,
        *,
        init_logit_scale: float,
        init_logit_bias: float,
        dtype: torch.dtype = torch.float32,
        **options: Unpack[StreamedOptions],
    ) -> None:
        super().__init__(**options)
        at_least_float32 = torch.promote_types(dtype, torch.float32)
        self.log_scale = nn.Parameter(torch.tensor(init_logit_scale, dtype=at_least_float32))
        self.bias = nn.Parameter(torch.tensor(init_logit_bias, dtype=at_least_float32))

    @classmethod
    def from_keys(cls, keys: SigmoidKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(
            init_logit_scale=keys.init_logit_scale,
            init_logit_bias=keys.init_logit_bias,
            dtype=common.dtype,
            **streamed_options(keys, common),
        )

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the mean over queries of the sum over their pairs."""
        shares_Q1 = query_shares(structure).to(q_QE.dtype)[:, None]
        positive_QD = positive_mask(structure)
        signs_QD = torch.where(positive_QD, -1.0, 1.0).to(q_QE.dtype)
        losses = []
        for weight, similarity_QD in weighted_similarities(q_QE, d_DE, self.prefixes):
            logits_QD = similarity_QD * self.log_scale.exp() + self.bias
            masked_QD = self.masked(structure, similarity_QD, positive_QD)
            pairs_QD = softplus(signs_QD * logits_QD, threshold=EXACT_THRESHOLD).masked_fill(masked_QD, 0.0)
            losses.append(weight * (pairs_QD * shares_Q1).sum())
        return torch.stack(losses).sum()

    def sweep(self, batch: StreamedBatch) -> SigmoidSweep:
        """Begin the sums of a batch."""
        scale, bias = read_numbers(self.log_scale.exp(), self.bias)
        tiles = self.make_tiles(batch, scale=scale)
        return SigmoidSweep(tiles, self.query_weights(batch, tiles), bias)

    def parameter_gradients(self, sweep: SigmoidSweep, scale_gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of log scale and bias."""
        return {"log_scale": scale_gradient.to(self.bias.dtype), "bias": sweep.bias_gradient.to(self.bias.dtype)}

    @torch.no_grad()
    def constrain(self) -> None:
        """Clamp the logit scale to [1, 100]."""
        self.log_scale.clamp_(math.log(MIN_LOGIT_SCALE), math.log(MAX_LOGIT_SCALE))

    @property
    def temperature(self) -> float:
        """1 / logit scale."""
        return math.exp(-self.log_scale.item())
