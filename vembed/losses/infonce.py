"""InfoNCE over in-batch negatives and hard negatives, with one or several positives per query.

Query to document, for each query i with positives P(i) and the documents N(i) that are neither positive nor masked:

    L_i = -log( sum over j in P(i) of exp(s S_ij)  /  sum over j in P(i) and N(i) of exp(s S_ij) )

S is the matrix of similarities, s the logit scale (1 / temperature). Hard negatives are documents like any other: they
are added to the in-batch negatives of every query. Document to query is the same over the columns of those documents
that are some query's positive; bidirectional training averages both.

Streamed over tiles: with the log-sum-exps p_i over positives and n_i over negatives, L_i = softplus(n_i - p_i) and

    dL_i/d(s S_ij) = exp(s S_ij - log(e^p_i + e^n_i))                    for a negative,
                   = -exp(s S_ij - p_i) sigmoid(n_i - p_i)               for a positive,

which keeps its digits where p_i is far above n_i. Both directions come from the same tiles, 4 products of Q x D x E.
One direction alone keeps the tiles of a strip of rows, whose sums are complete, and saves the fourth product.

Source: van den Oord et al., 2018, "Representation Learning with Contrastive Predictive Coding"; the two directions as
in Radford et al., 2021 (CLIP); a sum over positives inside the logarithm as in Miech et al., 2020 (MIL-NCE); sums
merged online as in Milakov & Gimelshein, 2018, "Online normalizer calculation for softmax".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, cast

import torch
from torch import Tensor, nn

from vembed.config.keys.loss import MAX_LOGIT_SCALE, MIN_LOGIT_SCALE
from vembed.losses.base import to_device
from vembed.losses.cells import CellMap
from vembed.losses.masks import positive_mask
from vembed.losses.prefixes import weighted_similarities
from vembed.losses.softmax import Hardness, Slopes, Sums, terms
from vembed.losses.statistics import LogSumExp
from vembed.losses.streamed import LossGradients, StreamedLoss, empty_gradients, streamed_options
from vembed.losses.tiles import BOUNDED_LOGIT, longest_row, read_numbers
from vembed.losses.weights import document_shares, positive_counts, query_shares, share_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.cells import Tile
    from vembed.losses.facts.infonce import InfoNCEKeys, SoftmaxKeys
    from vembed.losses.softmax import Terms
    from vembed.losses.statistics import Statistics
    from vembed.losses.streamed import StreamedBatch, StreamedOptions
    from vembed.losses.tiles import EmbeddingGradients, SimilarityTiles

STRIP_TILES = 10
"""Most logits of a strip of rows that are kept to save a product, in whole tiles: 40 MiB for tiles of 4."""

LEAST_STRIP_ROWS = 32
"""Under this, products with so few rows cost more than the one that is saved."""


class SoftmaxLoss(StreamedLoss):
    """InfoNCE over similarities of any kind, with a fixed or learned temperature.

    Args:
        learn_temperature: Whether the logit scale is a parameter; it is then kept within [1, 100].
        dtype: Type of the learned logit scale.
        hardness: Which negatives count more for a query, and how much.
        focal_gamma: Power of what a query doesn't give its positives that weighs its loss, without a gradient.
    """

    positives_apart: ClassVar[bool] = False
    """Whether each positive has a loss of its own, whose mean counts, or all together one."""

    def __init__(
        self,
        *,
        temperature: float,
        learn_temperature: bool = False,
        bidirectional: bool = False,
        dtype: torch.dtype = torch.float32,
        hardness: Hardness | None = None,
        focal_gamma: float = 0.0,
        **options: Unpack[StreamedOptions],
    ) -> None:
        super().__init__(**options)
        log_scale = torch.tensor(math.log(1.0 / temperature), dtype=torch.promote_types(dtype, torch.float32))
        self.log_scale: Tensor
        self._fixed = None if learn_temperature else temperature
        if learn_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale, persistent=False)
        self.bidirectional, self.hardness, self.focal_gamma = bidirectional, hardness, focal_gamma

    def of_similarities(self, weighted: Iterable[tuple[float, Tensor]], structure: BatchStructure) -> Tensor:
        """Return the mean loss over queries (averaged with that over positive documents when bidirectional).

        Args:
            weighted: Whole matrices of similarities (Q, D), each with its weight.
        """
        positive_QD = positive_mask(structure)
        shares_Q, shares_D = query_shares(structure), document_shares(structure)
        losses = []
        for weight, similarity_QD in weighted:
            masked_QD = self.masked(structure, similarity_QD, positive_QD)
            logits_QD = (similarity_QD * self.log_scale.exp()).masked_fill(masked_QD, -math.inf)
            raised_QD = logits_QD
            if self.hardness is not None:
                penalties_QD = self.hardness.penalties(similarity_QD, structure)
                raised_QD = logits_QD + penalties_QD.masked_fill(positive_QD, 0.0)
            loss = self._direction(raised_QD, positive_QD, shares_Q)
            if self.bidirectional:
                loss = (loss + self._direction(logits_QD.T, positive_QD.T, shares_D)) / 2
            losses.append(weight * loss)
        return torch.stack(losses).sum()

    def _direction(self, logits_RC: Tensor, positive_RC: Tensor, shares_R: Tensor) -> Tensor:
        """Return the mean over rows R of log-sum-exp over all columns C minus that over the positive ones.

        A row without positives counts 0.
        """
        counted_R = positive_RC.any(dim=1)
        logits, positive = logits_RC[counted_R], positive_RC[counted_R]
        wanted = logits.masked_fill(~positive, -math.inf).logsumexp(dim=1)
        if self.positives_apart:
            wanted = logits.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1)
        losses = logits.logsumexp(dim=1) - wanted
        if self.focal_gamma:
            losses = losses * (-torch.expm1(-losses.detach())).pow(self.focal_gamma)
        return (losses * shares_R[counted_R].to(losses.dtype)).sum()

    @property
    def needs_statistics(self) -> bool:
        """Columns need the sums of all queries, rows only those of their own strip."""
        return self.bidirectional

    @torch.no_grad()
    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Sweep the tiles once for the log-sum-exps of rows, and of columns when bidirectional."""
        return self._swept(self._tiles(batch))

    def _swept(self, tiles: SimilarityTiles) -> Statistics:
        sums = Sums(tiles, columns=self.bidirectional, hardness=self.hardness)
        for strip in tiles.strips():
            for tile in strip:
                for prefix, logits_RC in enumerate(tiles.logits(tile)):
                    sums.add(prefix, tile, logits_RC)
        return sums.finished()

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients from statistics, or in one sweep where the rows alone decide."""
        if statistics is None and self.needs_statistics:
            raise ValueError("two directions need the statistics of all ranks first")
        tiles = self._tiles(batch) if statistics is None else statistics.tiles
        cells = tiles.cells
        out = empty_gradients(tiles, batch, into)
        height = min(tiles.tile_size, STRIP_TILES * tiles.tile_size**2 // cells.num_columns)  # in vectors
        enough = min(LEAST_STRIP_ROWS, tiles.tile_size, cells.num_rows)
        if statistics is None and self.prefixes is None and height >= enough:
            loss = self._one_sweep(tiles, batch, out, max(1, height // tiles.row_vectors))
        else:
            known = self._swept(tiles) if statistics is None else statistics
            loss = self._second_sweep(tiles, batch, known, out)
        return LossGradients(loss, out.dq_QE, out.dd_DE, {"log_scale": tiles.finish(out).to(self.log_scale.dtype)})

    def _one_sweep(self, tiles: SimilarityTiles, batch: StreamedBatch, out: EmbeddingGradients, height: int) -> Tensor:
        """Keep the logits of a strip until its rows are complete; return the loss."""
        cells, sums, loss = tiles.cells, Sums(tiles, columns=False, hardness=self.hardness), tiles.zeros()
        weights_KQ, (counts_Q, _) = self.query_weights(batch, tiles), self._counts(batch, tiles)
        for strip in tiles.strips(height):
            kept: list[tuple[Tile, Tensor]] = []
            for tile in strip:
                logits_RC = tiles.plain_logits(tile, f"kept {len(kept)}")
                sums.add(0, tile, logits_RC)
                kept.append((tile, logits_RC))
            rows = kept[0][0].rows
            pairs = cells.pairs_of(rows)
            logits_KP, groups_P = sums.positive_logits_KP[:, pairs], cells.pair_rows[pairs] - rows.start
            positives = LogSumExp.of_groups(logits_KP, groups_P, rows.stop - rows.start)
            of_rows = terms(
                sums.rows[:, rows],
                positives,
                (logits_KP, groups_P),
                weights_KQ[:, rows],
                focal_gamma=self.focal_gamma,
                counts_G=None if counts_Q is None else counts_Q[rows],
            )
            loss += of_rows.loss + of_rows.own_loss
            for place, (tile, matrix_RC) in enumerate(kept):
                slopes = Slopes(of_rows.shifts_KG[0], None, of_rows.pair_gradients_KP[0, tile.pairs - pairs.start])
                slopes.apply(tiles, tile, matrix_RC, exponentials=sums.bounded)
                tiles.backward_plain(tile, matrix_RC, out, f"kept {place}")
        return loss

    def _second_sweep(
        self, tiles: SimilarityTiles, batch: StreamedBatch, known: Statistics, out: EmbeddingGradients
    ) -> Tensor:
        """Compute every tile again, now that its rows and columns are complete; return the loss."""
        loss, rows, columns, pair_gradients_KP = self._both_terms(tiles, batch, known)
        exponentials = tiles.largest_logit <= BOUNDED_LOGIT and self.hardness is None
        for strip in tiles.strips():
            for tile in strip:

                def differentiate(prefix: int, matrix_RC: Tensor, tile: Tile = tile) -> None:
                    tiles.exclude(prefix, tile, matrix_RC)
                    slopes = Slopes(
                        rows.shifts_KG[prefix, tile.rows],
                        None if columns is None else columns.shifts_KG[prefix, tile.columns],
                        pair_gradients_KP[prefix, tile.pairs],
                        self.hardness,
                    )
                    if exponentials:
                        matrix_RC.exp_()
                    slopes.apply(tiles, tile, matrix_RC, exponentials=exponentials)

                tiles.backward(tile, differentiate, out)
        return loss

    def _both_terms(
        self, tiles: SimilarityTiles, batch: StreamedBatch, known: Statistics
    ) -> tuple[Tensor, Terms, Terms | None, Tensor]:
        """Return the loss, the terms of rows and columns, and the gradients of the positive pairs' logits."""
        cells, logits_KP = tiles.cells, known.positive_logits_KP
        share = 1.0 if known.columns is None else 0.5
        positives = LogSumExp.of_groups(logits_KP, cells.pair_rows, cells.num_rows)
        counts_Q, counts_D = self._counts(batch, tiles)
        rows = terms(
            known.rows,
            positives,
            (logits_KP, cells.pair_rows),
            self.query_weights(batch, tiles, share),
            focal_gamma=self.focal_gamma,
            counts_G=counts_Q,
        )
        loss, pair_gradients_KP, columns = rows.loss + rows.own_loss, rows.pair_gradients_KP, None
        if known.columns is not None:
            columns = terms(
                known.columns[0],
                known.columns[1],
                (logits_KP, cells.pair_columns),
                self.weights_of(share * document_shares(batch.structure), tiles),
                focal_gamma=self.focal_gamma,
                counts_G=counts_D,
            )
            of_rank = share_of(batch.structure, batch.queries)  # every rank has all of the columns' loss
            loss = loss + columns.loss * of_rank + columns.own_loss
            pair_gradients_KP = pair_gradients_KP + columns.pair_gradients_KP
        return loss, rows, columns, pair_gradients_KP

    def _counts(self, batch: StreamedBatch, tiles: SimilarityTiles) -> tuple[Tensor | None, Tensor | None]:
        """Return the positives of this rank's queries (Q,) and of all documents (D,), where each has a loss."""
        if not self.positives_apart:
            return None, None
        counts_Q, counts_D = positive_counts(batch.structure)
        own = slice(batch.queries.start, batch.queries.stop)
        of_queries, of_documents = (to_device(each.to(tiles.dtype), tiles.device) for each in (counts_Q[own], counts_D))
        return of_queries, of_documents

    def cells(self, batch: StreamedBatch) -> CellMap:
        """Return which cells of this rank's queries are positives, no negatives, and negatives of their own row."""
        if self.hardness is None:
            return super().cells(batch)
        masks, device = self.mask_false_negatives, batch.q_QE.device
        return CellMap(batch.structure, batch.queries, mask_false_negatives=masks, device=device, with_named=True)

    def _tiles(self, batch: StreamedBatch) -> SimilarityTiles:
        """Return the tiles of a batch; the scale and how large a logit can be are read together."""
        rows = () if self.prefixes is not None else (longest_row(batch.q_QE), longest_row(batch.d_DE))
        scale, *norms = read_numbers(self.log_scale.exp(), *rows)
        return self.tiles(batch, scale=scale, longest=math.prod(norms))

    @torch.no_grad()
    def constrain(self) -> None:
        """Clamp a learned logit scale to [1, 100]."""
        if isinstance(self.log_scale, nn.Parameter):
            self.log_scale.clamp_(math.log(MIN_LOGIT_SCALE), math.log(MAX_LOGIT_SCALE))

    @property
    def temperature(self) -> float:
        """1 / logit scale; a learned one is read from its device."""
        return math.exp(-self.log_scale.item()) if self._fixed is None else self._fixed


def softmax_options(keys: SoftmaxKeys, common: LossCommon) -> dict[str, Any]:
    """Return what the keys say of InfoNCE over any negatives."""
    return {
        "temperature": keys.temperature,
        "learn_temperature": keys.learn_temperature,
        "bidirectional": keys.loss_bidirectional,
        "dtype": common.dtype,
        **streamed_options(keys, common),
    }


class InfoNCE(SoftmaxLoss):
    """InfoNCE over inner products of rows with one vector each."""

    @classmethod
    def from_keys(cls, keys: InfoNCEKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        hardness = None
        if keys.hardness_mode != "none":
            hardness = Hardness(keys.hardness_mode, keys.hardness_strength)
        options = {**softmax_options(keys, common), "hardness": hardness, "focal_gamma": keys.focal_gamma}
        if keys.loss_directions is None:
            return cls(**options)
        from vembed.losses.joint import JointInfoNCE  # derived from this class

        return cast("Self", JointInfoNCE(directions=keys.loss_directions, **options))

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss over the whole matrix."""
        return self.of_similarities(weighted_similarities(q_QE, d_DE, self.prefixes), structure)


class SupCon(InfoNCE):
    """InfoNCE in which each positive of a query has a loss of its own, and their mean counts."""

    positives_apart = True

    @classmethod
    def from_keys(cls, keys: SoftmaxKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(**softmax_options(keys, common))
