"""The Kullback-Leibler divergence of a query's listed documents from what a teacher makes of them.

    L = max(1, t)^2 mean over queries i with two listed documents or more of
        sum over listed documents a of i of p_a (log p_a - log softmax(S_i / t)_a)        p = softmax(y_i / u)

with y the scores that the data or a teacher give a row's own documents, t = kl_temperature and u =
kl_teacher_temperature. The factor keeps gradients of temperatures over 1 as large as those of 1.

Source: Lin et al., 2020, "Distilling Dense Representations for Ranking using Tightly-Coupled Teachers".
Shape legend: A listed pairs of this rank's queries, Q all queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from vembed.device import to_device
from vembed.losses.listed import ListedLoss, ListedPairs, scores_of, shares
from vembed.losses.streamed import LogSumExp
from vembed.losses.tiles import DEFAULT_TILE_SIZE, Prefixes

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import KlKeys


class KlLoss(ListedLoss):
    """The mean divergence of the listed documents of a query."""

    def __init__(
        self,
        *,
        temperature: float,
        teacher_temperature: float,
        prefixes: Prefixes | None = None,
        tile_size: int = DEFAULT_TILE_SIZE,
    ) -> None:
        super().__init__(prefixes=prefixes, tile_size=tile_size)
        self.student_temperature = temperature
        self.teacher_temperature = teacher_temperature

    @classmethod
    def from_keys(cls, keys: KlKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        default = keys.kl_temperature if common.scores_are_cosines else 1.0
        return cls(
            temperature=keys.kl_temperature,
            teacher_temperature=keys.kl_teacher_temperature or default,
            prefixes=Prefixes.of_keys(keys),
            tile_size=common.tile_size,
        )

    def of_similarities(self, similarity_A: Tensor, pairs: ListedPairs, structure: BatchStructure) -> Tensor:
        """Return the weighted sum of these queries' divergences."""
        all_queries, sizes = np.unique(ListedPairs.of(structure).queries_A, return_counts=True)
        present, lists = np.unique(pairs.queries_A, return_inverse=True)
        shares_L = shares(present, all_queries[sizes > 1], structure, similarity_A)  # a list of one has no divergence
        lists_A = to_device(torch.from_numpy(lists), similarity_A.device)
        student_A = _log_shares(similarity_A / self.student_temperature, lists_A, len(present))
        teacher_A = scores_of(pairs, structure, similarity_A) / self.teacher_temperature
        teacher_A = _log_shares(teacher_A, lists_A, len(present))
        terms_A = shares_L[lists_A] * teacher_A.exp() * (teacher_A - student_A)
        return terms_A.sum() * max(1.0, self.student_temperature) ** 2


def _log_shares(logits_A: Tensor, lists_A: Tensor, count: int) -> Tensor:
    """Return the log of each logit's share of its list, (A,)."""
    return logits_A - LogSumExp.of_groups(logits_A[None], lists_A, count).value()[0, lists_A]
