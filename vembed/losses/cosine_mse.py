"""The squared difference of a pair's similarity to its grade.

    L = mean over listed pairs a of (S_a - y_a)^2

Source: Reimers & Gurevych, 2019, "Sentence-BERT: Sentence Embeddings using Siamese BERT-Networks".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from vembed.losses.listed import ListedLoss, ListedPairs, scores_of, shares
from vembed.losses.tiles import Prefixes

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import CosineMseKeys


class CosineMseLoss(ListedLoss):
    """The mean squared difference of similarities to grades."""

    @classmethod
    def from_keys(cls, keys: CosineMseKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(prefixes=Prefixes.of_keys(keys), tile_size=common.tile_size)

    def of_similarities(self, similarity_A: Tensor, pairs: ListedPairs, structure: BatchStructure) -> Tensor:
        """Return the weighted sum of these pairs' squares."""
        shares_A = shares(pairs.queries_A, ListedPairs.of(structure).queries_A, structure, similarity_A)
        return (shares_A * (similarity_A - scores_of(pairs, structure, similarity_A)).square()).sum()
