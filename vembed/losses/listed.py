"""Losses over the listed pairs of a batch: a query, a document, and a score that the data or a teacher gives the two.

A rank has the pairs of its own queries. Their similarities are made block by block, what the loss makes of these few
numbers is differentiated by autograd, and its slopes go back to the embeddings block by block: no copy of more rows
than a block's ever exists.

Shape legend: A listed pairs of this rank's queries, N pairs of a block, K prefixes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vembed.device import to_device
from vembed.losses.streamed import LossGradients, StreamedLoss, zero_gradients
from vembed.losses.tiles import DEFAULT_TILE_SIZE, pair_similarity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.losses.base import BatchStructure
    from vembed.losses.streamed import Statistics, StreamedBatch
    from vembed.losses.tiles import Prefixes

    Similarity = Callable[[Tensor, Tensor, int | None], Tensor]
    """From the queries (N, E) and documents (N, E) of pairs, and the length of a prefix, to (N,)."""


class ListedPairs(NamedTuple):
    """The listed pairs of some queries."""

    own_A: NDArray[np.int64]  # which of the batch's listed pairs they are
    queries_A: NDArray[np.int64]  # rows of the batch
    documents_A: NDArray[np.int64]

    @classmethod
    def of(cls, structure: BatchStructure, queries: range | None = None) -> ListedPairs:
        """Return those of some queries of the batch; None takes all."""
        queries = range(structure.num_queries) if queries is None else queries
        pairs_P2 = np.zeros((0, 2), dtype=np.int64)
        if structure.listed_P2 is not None:
            pairs_P2 = structure.listed_P2.cpu().numpy()
        own_A = np.flatnonzero((pairs_P2[:, 0] >= queries.start) & (pairs_P2[:, 0] < queries.stop))
        return cls(own_A, *pairs_P2[own_A].T)


class PairSweep:
    """The similarities of a rank's listed pairs, and the way back from their slopes to the embeddings.

    Args:
        dims: Length of each prefix; None is the embedding as it is.
        tile_size: A block of pairs has an eighth of the numbers of a tile of this size.
    """

    def __init__(
        self,
        batch: StreamedBatch,
        similarity: Similarity,
        *,
        dims: Sequence[int | None],
        tile_size: int,
    ) -> None:
        self.pairs = ListedPairs.of(batch.structure, batch.queries)
        self._q, self._d, self._similarity, self._dims = batch.q_QE, batch.d_DE, similarity, dims
        self._dtype = torch.promote_types(batch.q_QE.dtype, torch.float32)
        self._first, self._rows = batch.first_query, max(1, tile_size**2 // (8 * batch.q_QE.shape[1]))

    @torch.no_grad()
    def similarities(self) -> Tensor:
        """Return those of all pairs (K, A)."""
        found_KA = torch.empty(len(self._dims), len(self.pairs.own_A), dtype=self._dtype, device=self._q.device)
        for block, queries_N, documents_N in self._blocks():
            q_NE, d_NE = self._of(queries_N, documents_N)
            for prefix, dim in enumerate(self._dims):
                found_KA[prefix, block] = self._similarity(q_NE, d_NE, dim)
        return found_KA

    def backward(self, slopes_KA: Tensor, dq_QE: Tensor, dd_DE: Tensor) -> None:
        """Add what dL/dsimilarity of the pairs gives the embeddings, in a fixed order."""
        for block, queries_N, documents_N in self._blocks():
            with torch.enable_grad():
                q_NE, d_NE = (each.requires_grad_() for each in self._of(queries_N, documents_N))
                each_K = torch.stack([self._similarity(q_NE, d_NE, dim) for dim in self._dims])
                dq_NE, dd_NE = torch.autograd.grad(each_K, [q_NE, d_NE], slopes_KA[:, block])
            dq_QE.index_put_((queries_N,), dq_NE, accumulate=True)
            dd_DE.index_put_((documents_N,), dd_NE, accumulate=True)

    def _blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Return where each block lies among the pairs, and its rows of both sides."""
        for start in range(0, len(self.pairs.own_A), self._rows):
            block = slice(start, start + self._rows)
            rows = (self.pairs.queries_A[block] - self._first, self.pairs.documents_A[block])
            queries_N, documents_N = (to_device(torch.from_numpy(each), self._q.device) for each in rows)
            yield block, queries_N, documents_N

    def _of(self, queries_N: Tensor, documents_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the embeddings of a block's pairs, in the type of the gradients."""
        return self._q[queries_N].to(self._dtype), self._d[documents_N].to(self._dtype)


class ListedLoss(StreamedLoss):
    """A loss over listed pairs, a mean of which each rank has the terms of its own queries."""

    def __init__(self, *, prefixes: Prefixes | None = None, tile_size: int = DEFAULT_TILE_SIZE) -> None:
        super().__init__(mask_false_negatives=False, prefixes=prefixes, tile_size=tile_size)

    @abstractmethod
    def of_similarities(self, similarity_A: Tensor, pairs: ListedPairs, structure: BatchStructure) -> Tensor:
        """Return the sum of these pairs' terms, each times its share in the mean over the whole batch.

        Args:
            similarity_A: Similarity of each of the pairs.
            pairs: The pairs of this rank's queries.
            structure: Of the whole batch.
        """

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss over all listed pairs."""
        pairs = ListedPairs.of(structure)
        sides = ((q_QE, pairs.queries_A), (d_DE, pairs.documents_A))
        q_AE, d_AE = (side[torch.from_numpy(rows).to(side.device)] for side, rows in sides)
        parts = zip(self.prefix_weights, self.prefix_dims, strict=True)
        losses = [w * self.of_similarities(pair_similarity(q_AE, d_AE, dim), pairs, structure) for w, dim in parts]
        return torch.stack(losses).sum()

    def gradients(
        self,
        batch: StreamedBatch,
        statistics: Statistics | None = None,  # noqa: ARG002
        into: tuple[Tensor, Tensor] | None = None,
    ) -> LossGradients:
        """Return loss and gradients of this rank's pairs."""
        sweep = PairSweep(batch, pair_similarity, dims=self.prefix_dims, tile_size=self.tile_size)
        dq_QE, dd_DE = zero_gradients(batch, into)
        with torch.enable_grad():
            similarity_KA = sweep.similarities().requires_grad_()
            parts = zip(self.prefix_weights, similarity_KA, strict=True)
            losses = [w * self.of_similarities(each_A, sweep.pairs, batch.structure) for w, each_A in parts]
            loss = torch.stack(losses).sum()
            (slopes_KA,) = torch.autograd.grad(loss, [similarity_KA])
        sweep.backward(slopes_KA, dq_QE, dd_DE)
        return LossGradients(loss.detach(), dq_QE, dd_DE, {})


def scores_of(pairs: ListedPairs, structure: BatchStructure, like: Tensor) -> Tensor:
    """Return the scores of some pairs, in the type and on the device of a tensor."""
    if structure.listed_scores_P is None:
        return like.new_zeros(0)
    scores_P = structure.listed_scores_P
    scores_A = scores_P[torch.from_numpy(pairs.own_A).to(scores_P.device)].to(like.dtype)
    return to_device(scores_A, like.device)


def shares(own_N: NDArray[np.int64], all_N: NDArray[np.int64], structure: BatchStructure, like: Tensor) -> Tensor:
    """Return how much each of this rank's terms counts in the mean over all ranks' (N,), by the weights of rows.

    Args:
        own_N: Query of each of this rank's terms.
        all_N: Query of each term of the whole batch.
        like: Gives type and device.
    """
    weights_Q = np.ones(structure.num_queries)
    if structure.weights_Q is not None:
        weights_Q = structure.weights_Q.cpu().numpy()
    shares_N = torch.from_numpy(weights_Q[own_N] / (weights_Q[all_N].sum() or 1.0)).to(like.dtype)
    return to_device(shares_N, like.device)
