"""The pairwise sigmoid loss of SigLIP, with a learned logit scale and bias.

Each cell of the matrix is a question of its own, is this document a positive of this query:

    L = 1/Q sum over i, j of softplus(-y_ij (s S_ij + b)),   y_ij = 1 for positives, -1 for negatives

without the masked cells. There is nothing to normalise, so that one sweep over the tiles gives loss and gradients,
3 products of Q x D x E:

    dL/d(s S_ij) = (sigmoid(s S_ij + b) - [y_ij = 1]) / Q

Source: Zhai et al., 2023, "Sigmoid Loss for Language Image Pre-Training".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from vembed.config.keys.loss import MAX_LOGIT_SCALE, MIN_LOGIT_SCALE
from vembed.losses.masks import positive_mask
from vembed.losses.prefixes import weighted_similarities
from vembed.losses.streamed import LossGradients, StreamedLoss, empty_gradients, streamed_options
from vembed.losses.tiles import read_numbers
from vembed.losses.weights import query_shares

if TYPE_CHECKING:
    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.cells import Tile
    from vembed.losses.facts.sigmoid import SigmoidKeys
    from vembed.losses.statistics import Statistics
    from vembed.losses.streamed import StreamedBatch, StreamedOptions

EXACT_THRESHOLD = 40.0
"""Above this, log(1 + e^x) is x in every type; torch's own threshold of 20 would cost digits in float64."""


class SigmoidLoss(StreamedLoss):
    """The sigmoid loss over all pairs of a batch.

    Args:
        init_logit_scale: Starting log of the logit scale; the scale is kept within [1, 100].
        init_logit_bias: Starting bias. Far below 0, as nearly all pairs are negatives.
    """

    def __init__(
        self,
        *,
        init_logit_scale: float,
        init_logit_bias: float,
        dtype: torch.dtype = torch.float32,
        **options: Unpack[StreamedOptions],
    ) -> None:
        super().__init__(**options)
        own = torch.promote_types(dtype, torch.float32)
        self.log_scale = nn.Parameter(torch.tensor(init_logit_scale, dtype=own))
        self.bias = nn.Parameter(torch.tensor(init_logit_bias, dtype=own))

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

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients in one sweep; statistics have no part in it."""
        assert statistics is None
        scale, bias = read_numbers(self.log_scale.exp(), self.bias)
        tiles = self.tiles(batch, scale=scale)
        out = empty_gradients(tiles, batch, into)
        weights_KQ = self.query_weights(batch, tiles)
        loss, bias_gradient = tiles.zeros(), tiles.zeros()
        for strip in tiles.strips():
            for tile in strip:

                def differentiate(prefix: int, logits_RC: Tensor, tile: Tile = tile) -> None:
                    weights_R, cells = weights_KQ[prefix, tile.rows], logits_RC.view(-1)
                    positives_P, rows_P = cells[tile.pair_cells] + bias, tiles.cells.pair_rows[tile.pairs]
                    weights_P = weights_KQ[prefix, rows_P]
                    tiles.exclude(prefix, tile, logits_RC)
                    logits_RC.add_(bias)
                    loss.add_(softplus(logits_RC, threshold=EXACT_THRESHOLD).sum(dim=1) @ weights_R)
                    loss.add_(softplus(-positives_P, threshold=EXACT_THRESHOLD) @ weights_P)
                    logits_RC.sigmoid_().mul_(weights_R[:, None])
                    cells[tile.pair_cells] = -weights_P * (-positives_P).sigmoid()
                    bias_gradient.add_(logits_RC.sum())

                tiles.backward(tile, differentiate, out)
        own = {"log_scale": tiles.finish(out), "bias": bias_gradient}
        return LossGradients(
            loss, out.dq_QE, out.dd_DE, {name: value.to(self.bias.dtype) for name, value in own.items()}
        )

    @torch.no_grad()
    def constrain(self) -> None:
        """Clamp the logit scale to [1, 100]."""
        self.log_scale.clamp_(math.log(MIN_LOGIT_SCALE), math.log(MAX_LOGIT_SCALE))

    @property
    def temperature(self) -> float:
        """1 / logit scale."""
        return math.exp(-self.log_scale.item())
