"""InfoNCE over in-batch negatives and hard negatives, with one or several positives per query.

Query to document, for each query i with positives P(i) and the documents N(i) that are neither positive nor masked:

    L_i = -log( sum over j in P(i) of exp(s S_ij)  /  sum over j in P(i) and N(i) of exp(s S_ij) )

S is the matrix of similarities, s the logit scale (1 / temperature). Hard negatives are documents like any other: they
are added to the in-batch negatives of every query. Document to query is the same over the columns of those documents
that are some query's positive; bidirectional training averages both.

Source: van den Oord et al., 2018, "Representation Learning with Contrastive Predictive Coding"; the two directions as
in Radford et al., 2021 (CLIP); a sum over positives inside the logarithm as in Miech et al., 2020 (MIL-NCE).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vembed.losses.base import ContrastiveLoss
from vembed.losses.masks import false_negative_mask, positive_mask

if TYPE_CHECKING:
    from vembed.losses.base import BatchStructure

MAX_LOGIT_SCALE = 100.0
"""Upper bound of a learned logit scale, as in CLIP: below a temperature of 0.01 training diverges."""

MIN_LOGIT_SCALE = 1.0
"""Lower bound of a learned logit scale: a temperature over 1 flattens cosine similarities to nothing."""


class InfoNCE(ContrastiveLoss):
    """InfoNCE with a fixed or learned temperature.

    Args:
        temperature: Starting (or fixed) temperature.
        learn_temperature: Whether the logit scale is a parameter; it is then kept within [1, 100].
        bidirectional: Whether the document-to-query direction is averaged in.
        mask_false_negatives: Whether copies of positives are left out of the negatives.
        dtype: Type of the learned logit scale.
    """

    def __init__(
        self,
        *,
        temperature: float,
        learn_temperature: bool = False,
        bidirectional: bool = False,
        mask_false_negatives: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if learn_temperature and not MIN_LOGIT_SCALE <= 1 / temperature <= MAX_LOGIT_SCALE:
            raise ValueError(
                f"a learned temperature starts between {1 / MAX_LOGIT_SCALE} and {1 / MIN_LOGIT_SCALE}, "
                f"got {temperature}"
            )
        log_scale = torch.tensor(math.log(1.0 / temperature), dtype=torch.promote_types(dtype, torch.float32))
        self.log_scale: Tensor
        if learn_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale, persistent=False)
        self.bidirectional = bidirectional
        self.mask_false_negatives = mask_false_negatives

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the mean loss over queries (averaged with that over positive documents when bidirectional)."""
        logits_QD = (q_QE @ d_DE.T) * self.log_scale.exp()
        positive_QD = positive_mask(structure)
        if self.mask_false_negatives:
            logits_QD = logits_QD.masked_fill(false_negative_mask(structure, positive_QD), -math.inf)
        loss = _direction(logits_QD, positive_QD)
        if not self.bidirectional:
            return loss
        wanted_D = positive_QD.any(dim=0)
        return (loss + _direction(logits_QD.T[wanted_D], positive_QD.T[wanted_D])) / 2

    @torch.no_grad()
    def constrain(self) -> None:
        """Clamp a learned logit scale to [1, 100]."""
        if isinstance(self.log_scale, nn.Parameter):
            self.log_scale.clamp_(math.log(MIN_LOGIT_SCALE), math.log(MAX_LOGIT_SCALE))

    @property
    def temperature(self) -> float:
        """1 / logit scale."""
        return math.exp(-self.log_scale.item())


def _direction(logits_RC: Tensor, positive_RC: Tensor) -> Tensor:
    """Return the mean over rows R of log-sum-exp over all columns C minus that over the positive ones."""
    positives_R = logits_RC.masked_fill(~positive_RC, -math.inf).logsumexp(dim=1)
    return (logits_RC.logsumexp(dim=1) - positives_R).mean()
