"""InfoNCE in which more than documents compete with a query's positive, in one softmax.

For query i with positives P(i) and negatives N(i), s the logit scale and each line as `loss_directions` asks for it:

    Z_i = sum over j in P(i), N(i) of exp(s <q_i, d_j>)                           query to document, always
        + sum over queries k unlike i of exp(s <q_i, q_k>)                        query to query
        + sum over p in P(i) of sum over queries k of exp(s <q_k, d_p>)           document to query
        + sum over p in P(i) of sum over documents m unlike p of exp(s <d_p, d_m>)        document to document

    L_i = log Z_i - log sum over p in P(i) of exp(s <q_i, d_p>)

Document to query, k is i itself, or a query to which p is a negative. A query doesn't compete with itself, nor do
documents of one query. With `mask_false_negatives` neither do queries that
have one content or share a positive, documents of one content, nor what is masked; without it they do.

1. Sweep the tiles of all three matrices: sums of the rows of queries, and of the columns and rows of documents. Ranks
   merge them, so that every rank knows each Z.
2. Sweep again. With r_i = log w_i - log Z_i, and c_p = log sum over the queries of p of exp(r_i),

    dL/dl_ij = exp(l_ij + r_i) + exp(l_ij + c_j)        dL/dl_ik = exp(l_ik + r_i) + exp(l_ik + r_k) for two queries

   Of two queries each rank has its own as rows, for which both terms are complete; documents are shared out as rows.

Source: Li et al., 2023, "Towards General Text Embeddings with Multi-stage Contrastive Learning" (GTE).
Shape legend: Q queries of all ranks, D documents of all, K prefixes, P pairs of a query and a positive.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from vembed.batch import ranges
from vembed.device import to_device
from vembed.losses.base import BatchStructure, query_shares
from vembed.losses.cells import CellMap, positive_mask
from vembed.losses.infonce import InfoNCE
from vembed.losses.softmax_sweep import SoftmaxSweep, focal_weights, line_gaps, line_shifts
from vembed.losses.streamed import (
    LogSumExp,
    LossGradients,
    Statistics,
    collect_rows,
    differentiate,
    empty_gradients,
)
from vembed.losses.tiles import EmbeddingGradients, SimilarityTiles, weighted_similarities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.losses.keys import Direction
    from vembed.losses.streamed import StreamedBatch

    Pairs = NDArray[np.int64]
    """(left, right), sorted and without repeats, (N, 2)."""


class JointInfoNCE(InfoNCE):
    """InfoNCE with one softmax over several directions.

    Args:
        directions: What competes with a query's positive, beside the documents of the batch.
        options: Those of InfoNCE.
    """

    def __init__(self, *, directions: Sequence[Direction], **options: Any) -> None:
        super().__init__(**options)
        assert not self.bidirectional, "one softmax has all directions"
        assert self.negative_filter is None, "no filter judges two queries"
        self.queries_too = "query_to_query" in directions
        self.columns_too = "document_to_query" in directions
        self.documents_too = "document_to_document" in directions

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss by whole matrices."""
        positive_QD = positive_mask(structure)
        shares_Q, losses = query_shares(structure).to(q_QE.dtype), []
        masked_QD = self.masked(structure, positive_QD, positive_QD)
        alike_QQ, alike_DD = self._alike(structure, positive_QD)
        sides = ((q_QE, d_DE), (q_QE, q_QE), (d_DE, d_DE))
        blocks = zip(*(weighted_similarities(*both, self.prefixes) for both in sides), strict=True)
        for (weight, similarity_QD), (_, of_queries_QQ), (_, of_documents_DD) in blocks:
            scale = self.log_scale.exp()
            logits_QD = (scale * similarity_QD).masked_fill(masked_QD, -math.inf)
            query_logits_QD = logits_QD
            if self.hardness is not None:
                query_logits_QD = logits_QD + self.hardness.added_logits(similarity_QD, positive_QD, structure)
            wanted_Q = logits_QD.masked_fill(~positive_QD, -math.inf).logsumexp(dim=1)
            parts = [query_logits_QD.logsumexp(dim=1)]
            if self.queries_too:
                parts.append((scale * of_queries_QQ).masked_fill(alike_QQ, -math.inf).logsumexp(dim=1))
            if self.columns_too:
                columns_D = logits_QD.masked_fill(positive_QD, -math.inf).logsumexp(dim=0)
                parts += [_of_positives(columns_D, positive_QD), wanted_Q]
            if self.documents_too:
                rows_D = (scale * of_documents_DD).masked_fill(alike_DD, -math.inf).logsumexp(dim=1)
                parts.append(_of_positives(rows_D, positive_QD))
            losses_Q = torch.stack(parts).logsumexp(dim=0) - wanted_Q
            if self.focal_gamma:
                # 1 - exp(-loss) = the negatives' share of the softmax, exact for tiny losses.
                losses_Q = losses_Q * (-torch.expm1(-losses_Q.detach())).pow(self.focal_gamma)
            # A query without positives has an infinite loss, which its weight of 0 would turn into NaN.
            losses.append(weight * torch.where(positive_QD.any(dim=1), losses_Q * shares_Q, 0.0).sum())
        return torch.stack(losses).sum()

    def _alike(self, structure: BatchStructure, positive_QD: Tensor) -> tuple[Tensor, Tensor]:
        """Return which queries (Q, Q) and which documents (D, D) belong together."""
        owned_QD = positive_QD.clone()
        if structure.negatives_P2 is not None:
            owned_QD[structure.negatives_P2.unbind(dim=1)] = True
        # Products of 0 and 1 count common queries; float64 counts exactly, and boolean products don't exist.
        alike_DD = (positive_QD.T.double() @ owned_QD.double()) > 0
        alike_QQ = torch.eye(structure.num_queries, dtype=torch.bool, device=positive_QD.device)
        if self.mask_false_negatives:
            same_QQ = structure.query_groups_Q[:, None] == structure.query_groups_Q
            same_DD = structure.document_groups_D[:, None] == structure.document_groups_D
            by_content_QD = (positive_QD.double() @ same_DD.double()) > 0
            shared_QQ = (by_content_QD.double() @ positive_QD.double().T) > 0
            alike_QQ = same_QQ.double() @ (alike_QQ | shared_QQ).double() @ same_QQ.double() > 0
            alike_DD = same_DD.double() @ alike_DD.double() @ same_DD.double() > 0
            alike_DD |= same_DD
        return alike_QQ, alike_DD

    @property
    def needs_statistics(self) -> bool:
        """A document's columns and rows are swept by several ranks."""
        return True

    @torch.no_grad()
    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Return sums (K, Q + Q + D): over each query's negatives and positives, and over each document's."""
        tiles = self.make_scaled_tiles(batch)
        sweep = SoftmaxSweep(tiles, with_columns=self.columns_too, hardness=self.hardness)
        rows = _swept(sweep)
        if self.queries_too:
            rows = rows.merge(_swept(SoftmaxSweep(self._of_queries(batch, tiles), with_columns=False)))
        cell_map, like, shape = tiles.cell_map, tiles.zeros(), (tiles.num_prefixes,)
        positives = LogSumExp.scattered(sweep.positives_KP, cell_map.pair_rows, cell_map.num_rows)
        # Queries are summed by one rank each: the sums of all others are empty, so that merging them is a gather.
        of_queries = [LogSumExp.empty(*shape, batch.structure.num_queries, like=like, bounded=False) for _ in range(2)]
        for whole, part in zip(of_queries, (rows, positives), strict=True):
            part = part.without_idle_maxima()
            whole.max[:, batch.rows], whole.sum[:, batch.rows] = part.max, part.sum
        documents = LogSumExp.empty(*shape, cell_map.num_columns, like=like, bounded=False)
        if sweep.column_sums is not None:
            documents = sweep.column_sums.without_idle_maxima()
        if (rows_of := self._of_documents(batch, tiles)) is not None:
            # Columns and rows of a document end up in one sum: both have the same shift for its queries.
            wanted_W, block = rows_of
            both = documents[:, wanted_W].merge(_swept(SoftmaxSweep(block, with_columns=False)).without_idle_maxima())
            documents.max[:, wanted_W], documents.sum[:, wanted_W] = both.max, both.sum
        parts = (*of_queries, documents)
        columns = LogSumExp(torch.cat([part.max for part in parts], 1), torch.cat([part.sum for part in parts], 1))
        return Statistics(sweep, columns)

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients from the sums of all ranks."""
        if statistics is None or statistics.columns is None:
            raise ValueError("one softmax over several directions needs the statistics of all ranks first")
        sweep = statistics.sweep
        assert isinstance(sweep, SoftmaxSweep)
        tiles = sweep.tiles
        out = empty_gradients(tiles, batch, into)
        loss, shifts_KQ, shifts_KD, sweep.pair_slopes_KP = self._terms(batch, sweep, statistics.columns)
        row_shifts_KQ = shifts_KQ[:, batch.rows]
        _back(sweep, row_shifts_KQ, shifts_KD if self.columns_too else None, out)
        scale_gradient = tiles.finish(out)
        if self.queries_too:
            block = self._of_queries(batch, tiles)
            into_rows = EmbeddingGradients(out.dq_QE, out.dd_DE[:0], *_moments(block))
            # Rows are this rank's queries, columns those of all ranks. With both shifts the gradient of a row is
            # complete, and each column gets its gradient as a row of some rank.
            _back(SoftmaxSweep(block, with_columns=True), row_shifts_KQ, shifts_KQ, into_rows)
            scale_gradient = scale_gradient + block.finish(into_rows) / 2  # each pair of queries is seen from both
        if (rows_of := self._of_documents(batch, tiles)) is not None:
            wanted_W, block = rows_of
            rows_NE = tiles.zeros(len(wanted_W), batch.d_DE.shape[1])
            into_both = EmbeddingGradients(rows_NE, out.dd_DE, *_moments(block))
            _back(SoftmaxSweep(block, with_columns=False), shifts_KD[:, wanted_W], None, into_both)
            scale_gradient = scale_gradient + block.finish(into_both)
            out.dd_DE.index_add_(0, wanted_W, rows_NE)  # numbers are unique: nothing is added twice, in no order
        if self.prefixes is None:  # each logit is s <a, b>, and both sides have its gradient
            sides = ((batch.q_QE, out.dq_QE), (batch.d_DE, out.dd_DE))
            # Some rows at a time: products of all would be as large as the embeddings.
            blocks = [zip(*(side.split(tiles.tile_size) for side in pair), strict=True) for pair in sides]
            dots = [(z.to(tiles.dtype) * dz).sum() for pairs in blocks for z, dz in pairs]
            scale_gradient = torch.stack([tiles.zeros(), *dots]).sum() / 2
        return LossGradients(loss, out.dq_QE, out.dd_DE, {"log_scale": scale_gradient.to(self.log_scale.dtype)})

    def _terms(
        self, batch: StreamedBatch, sweep: SoftmaxSweep, columns: LogSumExp
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return this rank's loss, the shifts of all queries and documents, and its positive pairs' slopes."""
        tiles, num_queries = sweep.tiles, batch.structure.num_queries
        counts = [num_queries, num_queries, tiles.cell_map.num_columns]
        rows_KQ, p_KQ, documents_KD = columns.value().split(counts, dim=1)
        pairs = np.unique(batch.structure.positives_P2.cpu().numpy(), axis=0).T.copy()
        queries_P, documents_P = (to_device(torch.from_numpy(side), tiles.device) for side in pairs)
        # Sums over documents reach a query by way of its positives; a query with two of them has both sums.
        through_KQ = LogSumExp.scattered(documents_KD[:, documents_P], queries_P, num_queries).value()
        n_KQ = torch.logaddexp(rows_KQ, through_KQ)
        if self.columns_too:
            n_KQ = torch.logaddexp(n_KQ, p_KQ)
        weights_KQ = self.weights_of(query_shares(batch.structure), tiles)
        gap_KQ = line_gaps(n_KQ, p_KQ)
        weights_KQ = focal_weights(weights_KQ, gap_KQ, self.focal_gamma)
        shifts_KQ = line_shifts(n_KQ, p_KQ, weights_KQ)
        loss = (-logsigmoid(-gap_KQ) * weights_KQ)[:, batch.rows].sum()
        shifts_KD = LogSumExp.scattered(shifts_KQ[:, queries_P], documents_P, tiles.cell_map.num_columns).value()
        logits_KP, rows_P = sweep.positives_KP, tiles.cell_map.pair_rows + batch.first_query
        # A positive stands in the sum over all (rises) and in the one that is subtracted (falls); where columns compete
        # it stands in the former twice.
        falls_KP = (logits_KP - p_KQ[:, rows_P]).exp() * gap_KQ[:, rows_P].sigmoid() * weights_KQ[:, rows_P]
        rises_KP = (logits_KP + shifts_KQ[:, rows_P]).exp() if self.columns_too else torch.zeros_like(falls_KP)
        return loss, shifts_KQ, shifts_KD, rises_KP - falls_KP

    def _of_queries(self, batch: StreamedBatch, tiles: SimilarityTiles) -> SimilarityTiles:
        """Return the tiles of this rank's queries and those of all ranks."""
        # A batch whose documents are its queries, and whose positives are the queries that belong together: each with
        # itself, and with masks those that share a positive by content.
        structure = batch.structure
        related_N2 = np.repeat(np.arange(structure.num_queries), 2).reshape(-1, 2)
        if self.mask_false_negatives:
            queries_P, documents_P = _numpy(structure.positives_P2).T
            contents_P = _numpy(structure.document_groups_D)[documents_P]
            shared_N2 = _joined(_pairs(queries_P, contents_P), _pairs(contents_P, queries_P))
            related_N2 = np.unique(np.concatenate([related_N2, shared_N2]), axis=0)
        structure = replace(
            _bare(structure, related_N2),
            document_ids_D=structure.query_ids_Q,
            document_groups_D=structure.query_groups_Q,
        )
        every_QE = batch.q_QE if batch.every_q_QE is None else batch.every_q_QE
        block = self._block(batch.q_QE, every_QE, structure, batch.queries, tiles)
        block.rows_only = True
        return block

    def _of_documents(self, batch: StreamedBatch, tiles: SimilarityTiles) -> tuple[Tensor, SimilarityTiles] | None:
        """Return this rank's share of the documents that are positives, and their tiles with all documents."""
        if not self.documents_too:
            return None
        # A batch whose queries are the documents that are positives; their own positives are the documents that they
        # belong to: the positives and hard negatives of their rows.
        structure = batch.structure
        positives_P2 = _numpy(structure.positives_P2)
        owned_N2 = positives_P2
        if structure.negatives_P2 is not None:
            owned_N2 = np.concatenate([positives_P2, _numpy(structure.negatives_P2)])
        wanted_W, rows_P = np.unique(positives_P2[:, 1], return_inverse=True)
        related_N2 = _joined(_pairs(rows_P, positives_P2[:, 0]), _pairs(owned_N2[:, 0], owned_N2[:, 1]))
        groups_W = np.unique(_numpy(structure.document_groups_D)[wanted_W], return_inverse=True)[1]
        structure = replace(
            _bare(structure, related_N2),
            query_ids_Q=structure.document_ids_D.cpu()[torch.from_numpy(wanted_W)],
            query_groups_Q=torch.from_numpy(groups_W),
        )
        # This rank's share of them: in proportion to its queries.
        ends = (batch.queries.start, batch.queries.stop)
        rows = range(*(len(wanted_W) * end // batch.structure.num_queries for end in ends))
        wanted = to_device(torch.from_numpy(wanted_W[rows.start : rows.stop]), tiles.device)
        return wanted, self._block(batch.d_DE[wanted], batch.d_DE, structure, rows, tiles)

    def _block(
        self, rows_NE: Tensor, columns_ME: Tensor, structure: BatchStructure, rows: range, tiles: SimilarityTiles
    ) -> SimilarityTiles:
        cell_map = CellMap(structure, rows, mask_false_negatives=self.mask_false_negatives, device=tiles.device)
        return SimilarityTiles(
            rows_NE, columns_ME, cell_map, scale=tiles.scale, prefixes=self.prefixes, tile_size=self.tile_size
        )


def _of_positives(values_D: Tensor, positive_QD: Tensor) -> Tensor:
    """Return the log-sum-exp over each query's positives, (Q,)."""
    return values_D.expand_as(positive_QD).masked_fill(~positive_QD, -math.inf).logsumexp(dim=1)


def _swept(sweep: SoftmaxSweep) -> LogSumExp:
    """Collect all tiles and return the sums over the rows of a block, (K, rows)."""
    for rows in sweep.tiles.row_blocks():
        collect_rows(sweep, rows)
    return sweep.row_sums


def _back(sweep: SoftmaxSweep, rows_KQ: Tensor, columns_KD: Tensor | None, out: EmbeddingGradients) -> None:
    """Add the gradients of a block from the shifts of its rows and columns."""
    sweep.row_shifts_KQ, sweep.column_shifts_KD = rows_KQ, columns_KD
    sweep.reach = "batch"  # the shifts are known: nothing is left to collect
    differentiate(sweep, out)


def _moments(tiles: SimilarityTiles) -> tuple[Tensor, Tensor]:
    rows, columns = (tiles.zeros(tiles.num_prefixes, n) for n in (tiles.cell_map.num_rows, tiles.cell_map.num_columns))
    return rows, columns


# Which queries, and which documents, belong together: they don't compete with each other ------------------------------
#
# Queries belong together that have one content or share a positive by content; documents that one query has, as
# positives or hard negatives of its row, and with masks those of equal content. A batch in which one side stands for
# both says so to a `CellMap`: its positives are the pairs that belong together.


def _bare(structure: BatchStructure, positives_P2: Pairs) -> BatchStructure:
    """Return the identities of a batch with other positives and nothing else, on the CPU."""
    return BatchStructure(
        positives_P2=torch.from_numpy(positives_P2),
        query_ids_Q=structure.query_ids_Q.cpu(),
        document_ids_D=structure.document_ids_D.cpu(),
        query_groups_Q=structure.query_groups_Q.cpu(),
        document_groups_D=structure.document_groups_D.cpu(),
    )


def _pairs(left_N: NDArray[np.int64], right_N: NDArray[np.int64]) -> Pairs:
    return np.unique(np.stack([left_N, right_N], axis=1), axis=0)


def _joined(first: Pairs, second: Pairs) -> Pairs:
    """Return (a, c) for which some b has (a, b) and (b, c).

    Rows of one class have the same list of b, which is followed once: a class of n takes n squared steps.
    """
    lefts_A, starts_A, sizes_A = np.unique(first[:, 0], return_index=True, return_counts=True)
    first_with: dict[bytes, int] = {}  # by its list of b, the first a that has it: the model of all that share the list
    lists = (first[start : start + size, 1].tobytes() for start, size in zip(starts_A, sizes_A, strict=True))
    models_A = np.array([first_with.setdefault(bs, a) for a, bs in enumerate(lists)], dtype=np.int64)
    models_M, model_of_A = np.unique(models_A, return_inverse=True)
    steps = ranges(starts_A[models_M], sizes_A[models_M])
    owner = np.repeat(np.arange(len(models_M)), sizes_A[models_M])
    # `second` is sorted by b: what a step leads to is one range of it.
    begins, ends = (np.searchsorted(second[:, 0], first[steps, 1], side) for side in ("left", "right"))
    reached = _pairs(np.repeat(owner, ends - begins), second[ranges(begins, ends - begins), 1])
    numbers_M = np.arange(len(models_M))
    first_of_M, stop_of_M = (np.searchsorted(reached[:, 0], numbers_M, side) for side in ("left", "right"))
    counts_A = (stop_of_M - first_of_M)[model_of_A]
    return np.stack([np.repeat(lefts_A, counts_A), reached[ranges(first_of_M[model_of_A], counts_A), 1]], axis=1)


def _numpy(values: Tensor) -> NDArray[np.int64]:
    array: NDArray[np.int64] = values.cpu().numpy()
    return array
