"""InfoNCE over each query's hardest negatives.

    L_i = -log( sum over j in P(i) of exp(l_ij)  /  sum over j in P(i) and H(i) of exp(l_ij) )

H(i) are the k negatives of query i with the largest logits, of all documents of the batch that aren't masked; of equal
logits the documents that come first. Document to query is the same over columns: the k hardest queries of a document.
The choice has no gradient.

1. One sweep over the tiles keeps the k largest logits of each row and column, and where they are. Ranks merge those of
   columns. They are all that the softmax sums over.
2. No second sweep: only the chosen cells have a gradient, and single rows are added for those.

Memory: a tile, and k (logit, place) for each query, and for each document where both directions count. Cost: 1 product
of Q x D x E, and k rows of E for each query and document on the way back.
Shape legend: Q queries of this rank, D documents of all, K prefixes, P positive pairs, k hardest negatives.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch

from vembed.losses.infonce import InfoNCE, softmax_options
from vembed.losses.statistics import Hardest, LogSumExp, Statistics
from vembed.losses.streamed import LossGradients, empty_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.base import LossCommon
    from vembed.losses.facts.in_batch_hard import InBatchHardKeys
    from vembed.losses.streamed import StreamedBatch


class InBatchHard(InfoNCE):
    """InfoNCE over the hardest negatives.

    Args:
        hard_topk: How many of each query; None takes all, which is InfoNCE.
        options: Those of InfoNCE.
    """

    def __init__(self, *, hard_topk: int | None = 8, **options: Any) -> None:
        super().__init__(**options)
        self.hard_topk = hard_topk

    @classmethod
    def from_keys(cls, keys: InBatchHardKeys, common: LossCommon) -> Self:  # type: ignore[override]
        """Make the loss of a run."""
        return cls(**softmax_options(keys, common), hard_topk=None if keys.use_all_negatives else keys.hard_topk)

    def _direction(self, logits_RC: Tensor, positive_RC: Tensor, shares_R: Tensor) -> Tensor:
        """Return the mean over rows of their InfoNCE, over positives and the hardest of the other columns."""
        if self.hard_topk is not None:
            negatives_RC = logits_RC.detach().masked_fill(positive_RC, -math.inf)
            order_RC = negatives_RC.argsort(dim=1, descending=True, stable=True)
            counts_RC = positive_RC.scatter(1, order_RC[:, : self.hard_topk], value=True) | positive_RC
            logits_RC = logits_RC.masked_fill(~counts_RC, -math.inf)
        return super()._direction(logits_RC, positive_RC, shares_R)

    @torch.no_grad()
    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Sweep the tiles once for the largest negatives of rows, and of columns when bidirectional."""
        if self.hard_topk is None:
            return super().statistics(batch)
        tiles = self._tiles(batch)
        cells, documents = tiles.cells, tiles.cells.num_columns if self.bidirectional else 0
        rows, columns = (
            Hardest.empty(tiles.num_prefixes, count, self.hard_topk, like=tiles.zeros())
            for count in (cells.num_rows, documents)
        )
        positives_KP = tiles.zeros(tiles.num_prefixes, len(cells.pair_rows))
        for strip in tiles.strips():
            for tile in strip:
                for prefix, logits_RC in enumerate(tiles.logits(tile)):
                    positives_KP[prefix, tile.pairs] = logits_RC.view(-1)[tile.pair_cells]
                    tiles.exclude(prefix, tile, logits_RC)
                    rows.add_logits((prefix, tile.rows), logits_RC, tile.columns.start)
                    if self.bidirectional:
                        first = batch.first_query + tile.rows.start
                        columns.add_logits((prefix, tile.columns), logits_RC.T, first)
        if not self.bidirectional:
            return Statistics(_sums(rows), None, positives_KP, tiles, rows)
        wanted = LogSumExp.of_groups(positives_KP, cells.pair_columns, cells.num_columns)
        return Statistics(_sums(rows), LogSumExp.stack([_sums(columns), wanted]), positives_KP, tiles, rows, columns)

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients, from the chosen cells alone."""
        if self.hard_topk is None or (statistics is None and self.needs_statistics):
            return super().gradients(batch, statistics, into)
        known = self.statistics(batch) if statistics is None else statistics
        tiles, hardest, by_column = known.tiles, known.row_hardest, known.column_hardest
        assert hardest is not None, "these are statistics of another loss"
        if by_column is not None and known.columns is not None:  # of all ranks' sums, those of the largest remain
            known = replace(known, columns=LogSumExp.stack([_sums(by_column), known.columns[1]]))
        out = empty_gradients(tiles, batch, into)
        loss, rows, columns, pair_gradients_KP = self._both_terms(tiles, batch, known)
        for prefix in range(tiles.num_prefixes):
            tiles.backward_cells(
                prefix, (tiles.cells.pair_rows, tiles.cells.pair_columns), pair_gradients_KP[prefix], out
            )
            slopes_Qk = (hardest.logits[prefix] + rows.shifts_KG[prefix, :, None]).exp_()
            tiles.backward_cells(prefix, (_groups(slopes_Qk), hardest.places[prefix].view(-1)), slopes_Qk.view(-1), out)
            if columns is not None and by_column is not None:
                slopes_Dk = (by_column.logits[prefix] + columns.shifts_KG[prefix, :, None]).exp_().view(-1)
                # Of all ranks' queries, this one's have a gradient here. Selecting them would wait for the device.
                places = by_column.places[prefix].view(-1) - batch.first_query
                slopes_Dk.masked_fill_((places < 0) | (places >= tiles.cells.num_rows), 0.0)
                if tiles.cells.num_rows:
                    inside = places.clamp_(0, tiles.cells.num_rows - 1)
                    tiles.backward_cells(prefix, (inside, _groups(by_column.places[prefix])), slopes_Dk, out)
        return LossGradients(loss, out.dq_QE, out.dd_DE, {"log_scale": tiles.finish(out).to(self.log_scale.dtype)})


def _sums(hardest: Hardest) -> LogSumExp:
    """Return the finished sums over each list."""
    value = hardest.logits.logsumexp(-1)
    return LogSumExp(value, torch.ones_like(value))


def _groups(lists_Gk: Tensor) -> Tensor:
    """Return the group of each entry of lists, (G * k,)."""
    groups_G = torch.arange(len(lists_Gk), device=lists_Gk.device)
    return groups_G.repeat_interleave(lists_Gk.shape[1])
