"""Losses over the listed pairs of a batch: a query, a document, and a score y that the data or a teacher gives the two.

Three formulas over the similarities S of these pairs:

    cosine_mse   L = mean over listed pairs a of (S_a - y_a)^2

    margin_mse   L = mean over queries i, listed positives p and other listed documents n of i of
                     (margin_mse_scale (S_ip - S_in) - (y_ip - y_in))^2

    kl           L = max(1, t)^2 mean over queries i with two listed documents or more of
                     sum over listed documents a of i of p_a (log p_a - log softmax(S_i / t)_a)

with p = softmax(y_i / u), t = kl_temperature and u = kl_teacher_temperature. The factor keeps gradients of temperatures
over 1 as large as those of 1.

A rank has the pairs of its own queries. Their similarities are made block by block, the formula over these few numbers
is differentiated by autograd, and its slopes go back to the embeddings block by block: no copy of more rows than a
block's ever exists.

Sources: Reimers & Gurevych, 2019, "Sentence-BERT: Sentence Embeddings using Siamese BERT-Networks" (cosine_mse);
Hofstätter et al., 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation"
(margin_mse); Lin et al., 2020, "Distilling Dense Representations for Ranking using Tightly-Coupled Teachers" (kl).
Shape legend: A listed pairs of this rank's queries, N pairs of a block, T margins, L lists, K prefixes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch

from vembed.batch import ranges
from vembed.device import to_device
from vembed.losses.streamed import LogSumExp, LossGradients, StreamedLoss, zero_gradients
from vembed.losses.tiles import DEFAULT_TILE_SIZE, Prefixes, pair_similarity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import CosineMseKeys, KlKeys, MarginMseKeys
    from vembed.losses.streamed import Statistics, StreamedBatch

    Similarity = Callable[[Tensor, Tensor, int | None], Tensor]
    """From the queries (N, E) and documents (N, E) of pairs, and the length of a prefix, to (N,)."""


class ListedPairs(NamedTuple):
    """The listed pairs of some queries."""

    numbers_A: NDArray[np.int64]  # of them among the batch's listed pairs
    queries_A: NDArray[np.int64]  # rows of the batch
    documents_A: NDArray[np.int64]

    @classmethod
    def of(cls, structure: BatchStructure, queries: range | None = None) -> ListedPairs:
        """Return those of some queries of the batch; None takes all."""
        queries = range(structure.num_queries) if queries is None else queries
        pairs_P2 = np.zeros((0, 2), dtype=np.int64)
        if structure.listed_P2 is not None:
            pairs_P2 = structure.listed_P2.cpu().numpy()
        numbers_A = np.flatnonzero((pairs_P2[:, 0] >= queries.start) & (pairs_P2[:, 0] < queries.stop))
        return cls(numbers_A, *pairs_P2[numbers_A].T)


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
        shape = len(self._dims), len(self.pairs.numbers_A)
        similarity_KA = torch.empty(shape, dtype=self._dtype, device=self._q.device)
        for block, queries_N, documents_N in self._blocks():
            q_NE, d_NE = self._of(queries_N, documents_N)
            for prefix, dim in enumerate(self._dims):
                similarity_KA[prefix, block] = self._similarity(q_NE, d_NE, dim)
        return similarity_KA

    def backward(self, slopes_KA: Tensor, dq_QE: Tensor, dd_DE: Tensor) -> None:
        """Add dL/dsimilarity of the pairs to the gradients of the embeddings, in a fixed order."""
        for block, queries_N, documents_N in self._blocks():
            with torch.enable_grad():
                q_NE, d_NE = (side.requires_grad_() for side in self._of(queries_N, documents_N))
                # The similarities are made again: their graphs over all pairs would hold a copy of each pair's rows.
                similarity_KN = torch.stack([self._similarity(q_NE, d_NE, dim) for dim in self._dims])
                dq_NE, dd_NE = torch.autograd.grad(similarity_KN, [q_NE, d_NE], slopes_KA[:, block])
            dq_QE.index_put_((queries_N,), dq_NE, accumulate=True)
            dd_DE.index_put_((documents_N,), dd_NE, accumulate=True)

    def _blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the slice of each block among the pairs, and its rows of both sides."""
        for start in range(0, len(self.pairs.numbers_A), self._rows):
            block = slice(start, start + self._rows)
            rows = (self.pairs.queries_A[block] - self._first, self.pairs.documents_A[block])
            queries_N, documents_N = (to_device(torch.from_numpy(side), self._q.device) for side in rows)
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
        # The leaf is one number for each pair: autograd has the formula alone, the sweep takes its slopes further.
        with torch.enable_grad():
            similarity_KA = sweep.similarities().requires_grad_()
            parts = zip(self.prefix_weights, similarity_KA, strict=True)
            losses = [w * self.of_similarities(similarity_A, sweep.pairs, batch.structure) for w, similarity_A in parts]
            loss = torch.stack(losses).sum()
            (slopes_KA,) = torch.autograd.grad(loss, [similarity_KA])
        sweep.backward(slopes_KA, dq_QE, dd_DE)
        return LossGradients(loss.detach(), dq_QE, dd_DE, {})


def scores_of(pairs: ListedPairs, structure: BatchStructure, like: Tensor) -> Tensor:
    """Return the scores of some pairs, in the type and on the device of a tensor."""
    if structure.listed_scores_P is None:
        return like.new_zeros(0)
    scores_P = structure.listed_scores_P
    scores_A = scores_P[torch.from_numpy(pairs.numbers_A).to(scores_P.device)].to(like.dtype)
    return to_device(scores_A, like.device)


def shares(queries_N: NDArray[np.int64], all_N: NDArray[np.int64], structure: BatchStructure, like: Tensor) -> Tensor:
    """Return the share of each of this rank's terms in the mean over all ranks' (N,), by the weights of rows.

    Args:
        queries_N: Query of each of this rank's terms.
        all_N: Query of each term of the whole batch.
        like: Gives type and device.
    """
    weights_Q = np.ones(structure.num_queries)
    if structure.weights_Q is not None:
        weights_Q = structure.weights_Q.cpu().numpy()
    shares_N = torch.from_numpy(weights_Q[queries_N] / (weights_Q[all_N].sum() or 1.0)).to(like.dtype)
    return to_device(shares_N, like.device)


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
        near_T, far_T = (to_device(torch.from_numpy(pairs_T), similarity_A.device) for pairs_T in (near, far))
        excess_A = self.scale * similarity_A - scores_of(pairs, structure, similarity_A)
        return (shares_T * (excess_A[near_T] - excess_A[far_T]).square()).sum()


def _margins(pairs: ListedPairs, structure: BatchStructure) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each margin, the indices among some pairs of the listed positive and of the other document."""
    columns = np.array([structure.num_documents, 1])  # one number for each pair, by which pairs are compared
    known = structure.positives_P2.cpu().numpy() @ columns
    is_positive_A = np.isin(np.stack([pairs.queries_A, pairs.documents_A], axis=1) @ columns, known)
    near, far = np.flatnonzero(is_positive_A), np.flatnonzero(~is_positive_A)
    # Sorted by query, the other documents of a positive's query are one range of `far`.
    far = far[np.argsort(pairs.queries_A[far], kind="stable")]
    starts, stops = (np.searchsorted(pairs.queries_A[far], pairs.queries_A[near], side) for side in ("left", "right"))
    return np.repeat(near, stops - starts), far[ranges(starts, stops - starts)]


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
        # Terms of a list are weighed by its query; lists are counted over all ranks, where each rank has some of them.
        shares_L = shares(present, all_queries[sizes > 1], structure, similarity_A)  # a list of one has no divergence
        lists_A = to_device(torch.from_numpy(lists), similarity_A.device)
        student_A = _log_shares(similarity_A / self.student_temperature, lists_A, len(present))
        teacher_A = scores_of(pairs, structure, similarity_A) / self.teacher_temperature
        teacher_A = _log_shares(teacher_A, lists_A, len(present))
        terms_A = shares_L[lists_A] * teacher_A.exp() * (teacher_A - student_A)
        return terms_A.sum() * max(1.0, self.student_temperature) ** 2


def _log_shares(logits_A: Tensor, lists_A: Tensor, count: int) -> Tensor:
    """Return the log of each logit's share of its list, (A,)."""
    # The log-sum-exp of each list without a loop over lists, which have different lengths.
    return logits_A - LogSumExp.scattered(logits_A[None], lists_A, count).value()[0, lists_A]
