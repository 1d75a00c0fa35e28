"""InfoNCE over each query's hardest negatives.

    L_i = -log( sum over j in P(i) of exp(l_ij)  /  sum over j in P(i) and H(i) of exp(l_ij) )

H(i) are the k negatives of query i with the largest logits, of all documents of the batch that aren't masked; of equal
logits the documents that come first. Document to query is the same over columns: the k hardest queries of a document.
The choice has no gradient.

1. One sweep over the tiles keeps the k largest logits of each row and column, and where they are. Ranks merge those of
   columns. They are all that the softmax sums over.
2. No second sweep: only the chosen cells have a gradient, and single rows are added for those.

Memory: a tile, and k (logit, position) for each query, and for each document where both directions count.
Cost: 1 product of Q x D x E, and k rows of E for each query and document on the way back.
Shape legend: Q queries of this rank, D documents of all, K prefixes, P positive pairs, k hardest negatives.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch

from vembed.losses.infonce import InfoNCE, softmax_options
from vembed.losses.softmax_sweep import InfoNCESweep
from vembed.losses.streamed import Hardest, LogSumExp, LossGradients, Statistics, collect_rows, empty_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vembed.losses.base import LossCommon
    from vembed.losses.keys import InBatchHardKeys
    from vembed.losses.softmax_sweep import SoftmaxSweep
    from vembed.losses.streamed import StreamedBatch, TileLogits
    from vembed.losses.tiles import SimilarityTiles


class InBatchHard(InfoNCE):
    """InfoNCE over the hard_topk negatives that are most similar to the query.

    Args:
        hard_topk: How many of each query; None takes all, which is InfoNCE.
        options: Those of InfoNCE.
    """

    def __init__(self, *, hard_topk: int | None = 8, **options: Any) -> None:
        super().__init__(**options)
        assert hard_topk is None or self.hardness is None, "the lists hold logits without hardness"
        self.hard_topk = hard_topk

    @classmethod
    def from_keys(cls, keys: InBatchHardKeys, common: LossCommon) -> Self:  # type: ignore[override]
        """Make the loss of a run."""
        return cls(**softmax_options(keys, common), hard_topk=None if keys.use_all_negatives else keys.hard_topk)

    def _one_direction(self, logits_RC: Tensor, positive_RC: Tensor, shares_R: Tensor) -> Tensor:
        """Return the sum over rows of share x InfoNCE, over positives and the hardest of the other columns."""
        if self.hard_topk is not None:
            negatives_RC = logits_RC.detach().masked_fill(positive_RC, -math.inf)
            order_RC = negatives_RC.argsort(dim=1, descending=True, stable=True)
            # Stable, as the streamed loss takes the first of equal logits: copies of a text make them frequent.
            counts_RC = positive_RC.scatter(1, order_RC[:, : self.hard_topk], value=True) | positive_RC
            logits_RC = logits_RC.masked_fill(~counts_RC, -math.inf)
        return super()._one_direction(logits_RC, positive_RC, shares_R)

    def sweep(self, batch: StreamedBatch) -> InfoNCESweep:
        """Begin the lists of the largest negatives of rows, and of columns when bidirectional."""
        if self.hard_topk is None:
            return super().sweep(batch)
        return HardestSweep(self, batch, self.make_scaled_tiles(batch), self.hard_topk)

    def statistics_to_merge(self, sweep: SoftmaxSweep) -> Statistics:
        """Return the sums over the positives of each document, and the largest negatives of each."""
        if not isinstance(sweep, HardestSweep):
            return super().statistics_to_merge(sweep)
        cell_map = sweep.tiles.cell_map
        positives = LogSumExp.scattered(sweep.positives_KP, cell_map.pair_columns, cell_map.num_columns)
        return Statistics(sweep, positives, sweep.column_hardest)

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients, from the chosen cells alone: no second sweep."""
        if self.hard_topk is None or (statistics is None and self.needs_statistics):
            return super().gradients(batch, statistics, into)
        sweep = self.sweep(batch) if statistics is None else statistics.sweep
        assert isinstance(sweep, HardestSweep)
        tiles = sweep.tiles
        sweep.loss = tiles.zeros()  # the same statistics may be differentiated again
        for rows in tiles.row_blocks() if statistics is None else ():
            collect_rows(sweep, rows)
        sweep.complete(slice(0, tiles.cell_map.num_rows), statistics)
        # P + k (Q + D) cells have a gradient: a second sweep would multiply all Q x D of them by E, twice.
        out = empty_gradients(tiles, batch, into)
        for prefix in range(tiles.num_prefixes):
            pairs = tiles.cell_map.pair_rows, tiles.cell_map.pair_columns
            tiles.backward_cells(prefix, pairs, sweep.pair_slopes_KP[prefix], out)
            for cells, slopes_N in sweep.hardest_cells(prefix, batch.first_query):
                tiles.backward_cells(prefix, cells, slopes_N, out)
        return LossGradients(sweep.loss, out.dq_QE, out.dd_DE, self.parameter_gradients(sweep, tiles.finish(out)))


class HardestSweep(InfoNCESweep):
    """The k largest negatives of each row, and column, and their softmax terms."""

    def __init__(self, loss: InBatchHard, batch: StreamedBatch, tiles: SimilarityTiles, hard_topk: int) -> None:
        super().__init__(loss, batch, tiles)
        self.first_query = batch.first_query
        like, num_prefixes = tiles.zeros(), tiles.num_prefixes
        self.row_hardest = Hardest.empty(num_prefixes, tiles.cell_map.num_rows, hard_topk, like=like)
        self.column_hardest: Hardest | None = None
        if loss.bidirectional:
            self.column_hardest = Hardest.empty(num_prefixes, tiles.cell_map.num_columns, hard_topk, like=like)

    def collect(self, part: TileLogits) -> None:
        """Add a tile to the lists."""
        prefix, tile, logits_RC = part.prefix, part.tile, part.logits_RC
        self.positives_KP[prefix, tile.pairs] = part.positives_P
        self.row_hardest.add_logits((prefix, tile.rows), logits_RC, tile.columns.start)
        if self.column_hardest is not None:
            self.column_hardest.add_logits((prefix, tile.columns), logits_RC.T, self.first_query + tile.rows.start)

    def complete(self, rows: slice, merged: Statistics | None = None) -> None:
        """Take the sums over the lists, those of columns over all ranks'."""
        self.row_sums = _sums(self.row_hardest)
        if merged is not None and merged.columns is not None and merged.column_hardest is not None:
            self.column_hardest = merged.column_hardest
            sums = LogSumExp.stack([_sums(merged.column_hardest), merged.columns])
            merged = replace(merged, columns=sums)
        super().complete(rows, merged)

    def hardest_cells(self, prefix: int, first_query: int) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        """Yield row and column of the listed cells of both directions, and their slopes."""
        slopes_Qk = (self.row_hardest.logits[prefix] + self.row_shifts_KQ[prefix, :, None]).exp_()
        yield (_lines(slopes_Qk), self.row_hardest.positions[prefix].view(-1)), slopes_Qk.view(-1)
        if self.column_hardest is None or self.column_shifts_KD is None or not self.tiles.cell_map.num_rows:
            return
        positions_Dk = self.column_hardest.positions[prefix]
        slopes_Dk = (self.column_hardest.logits[prefix] + self.column_shifts_KD[prefix, :, None]).exp_().view(-1)
        # Of all ranks' queries, this one's have a gradient here. Selecting them would wait for the device.
        rows = positions_Dk.view(-1) - first_query
        slopes_Dk.masked_fill_((rows < 0) | (rows >= self.tiles.cell_map.num_rows), 0.0)
        yield (rows.clamp_(0, self.tiles.cell_map.num_rows - 1), _lines(positions_Dk)), slopes_Dk


def _sums(hardest: Hardest) -> LogSumExp:
    """Return the finished sums over each list."""
    value = hardest.logits.logsumexp(-1)
    return LogSumExp(value, torch.ones_like(value))


def _lines(lists_Lk: Tensor) -> Tensor:
    """Return the line of each entry of lists, (L * k,)."""
    lines_L = torch.arange(len(lists_Lk), device=lists_Lk.device)
    return lines_L.repeat_interleave(lists_Lk.shape[1])
