"""The squared difference of a query's margins to a teacher's.

    L = mean over queries i, listed positives p and other listed documents n of i of
        (margin_mse_scale (S_ip - S_in) - (y_ip - y_in))^2

with y the scores that the data or a teacher give a row's own documents.

Source: Hofstätter et al., 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
Distillation".
Shape legend: A listed pairs of this rank's queries, T margins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from vembed.batch import ranges
from vembed.device import to_device
from vembed.losses.listed import ListedLoss, ListedPairs, scores_of, shares
from vembed.losses.tiles import DEFAULT_TILE_SIZE, Prefixes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import MarginMseKeys


class MarginMseLoss(ListedLoss):
    """The mean squared difference of the margins of listed pairs to those of their scores."""

    def __init__(
        self, *, scale: float = 1.0, prefixes: Prefixes | None = None, tile_size: int = DEFAULT_TILE_SIZE
    ) -> None:
        super().__init__(prefixes=prefixes, tile_size=tile_size)
        self.scale = scale

    @classmethod
    def from_keys(cls, keys: MarginMseKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(scale=keys.margin_mse_scale, prefixes=Prefixes.of_keys(keys), tile_size=common.tile_size)

    def of_similarities(self, similarity_A: Tensor, pairs: ListedPairs, structure: BatchStructure) -> Tensor:
        """Return the weighted sum of these queries' squares."""
        every, (near, far) = ListedPairs.of(structure), _margins(pairs, structure)
        all_T = every.queries_A[_margins(every, structure)[0]]
        shares_T = shares(pairs.queries_A[near], all_T, structure, similarity_A)
        near_T, far_T = (to_device(torch.from_numpy(each), similarity_A.device) for each in (near, far))
        excess_A = self.scale * similarity_A - scores_of(pairs, structure, similarity_A)
        return (shares_T * (excess_A[near_T] - excess_A[far_T]).square()).sum()


def _margins(pairs: ListedPairs, structure: BatchStructure) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places among some pairs of the listed positive and the other listed document of each margin."""
    columns = np.array([structure.num_documents, 1])
    known = structure.positives_P2.cpu().numpy() @ columns
    is_positive_A = np.isin(np.stack([pairs.queries_A, pairs.documents_A], axis=1) @ columns, known)
    near, far = np.flatnonzero(is_positive_A), np.flatnonzero(~is_positive_A)
    far = far[np.argsort(pairs.queries_A[far], kind="stable")]
    starts, stops = (np.searchsorted(pairs.queries_A[far], pairs.queries_A[near], side) for side in ("left", "right"))
    return np.repeat(near, stops - starts), far[ranges(starts, stops - starts)]
