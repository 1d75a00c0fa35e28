"""Losses that stream: gradients of all embeddings in the memory of a few tiles, without autograd.

`forward` of a loss is its definition over the whole matrix, in plain autograd; tests hold the rest to it. A loss over
the cells of the matrix (`CellLoss`) streams by a `Sweep`, which adds up tiles and then turns them into slopes. Slope:
dL/dlogit of one cell.
The loops over tiles are here, once:

    reach "cell"     for each tile: slopes                                               1 product forth, 2 back
    reach "row"      for each row block: collect its tiles, complete, slopes             the logits are kept: 1 and 2
    reach "batch"    collect all tiles | ranks merge | complete, slopes of all tiles     2 products forth, 2 back

No loss knows of ranks: a rank passes its queries and the documents of all ranks, the loss stage merges `Statistics`
between the sweeps and adds up losses and document gradients after them (gradcache/loss_stage.py). Numbers are read
from the device once, whatever the tiles.

Shape legend: Q queries of this rank, D documents of all ranks, K prefixes, R x C cells of a tile, P positive pairs,
L lines: rows of the matrix, or its columns.
Source: Milakov & Gimelshein, 2018, "Online normalizer calculation for softmax" (sums merged as max and sum).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict

import torch

from vembed.device import to_device
from vembed.losses.base import BatchLoss, query_shares
from vembed.losses.cells import CellMap, false_negative_mask
from vembed.losses.filters import FalseNegativeFilter, TileFilter
from vembed.losses.tiles import DEFAULT_TILE_SIZE, EmbeddingGradients, Prefixes, SimilarityTiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.cells import Tile
    from vembed.losses.keys import CellKeys

STRIP_TILES = 10
"""Most logits of a row block that are kept to save a product, in whole tiles: 40 MiB for tiles of 4."""

LEAST_STRIP_ROWS = 32
"""Below this, products with so few rows cost more than the one that is saved."""


# The contract with the loss stage -------------------------------------------------------------------------------------


class StreamedBatch(NamedTuple):
    """Embeddings of one rank's queries and of the documents of all ranks."""

    q_QE: Tensor  # embeddings of this rank's queries (Q, E)
    d_DE: Tensor  # embeddings of the documents of all ranks (D, E)
    structure: BatchStructure  # of the whole batch, all ranks; best on the CPU, where it is read
    first_query: int = 0  # number of this rank's first query in `structure`
    # Vectors of each of these queries and documents, which stand row after row above; None: one each
    counts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    every_q_QE: Tensor | None = None  # embeddings of the queries of all ranks; None: `q_QE` are all there are

    @property
    def queries(self) -> range:
        """Numbers of this rank's queries in `structure`."""
        count = len(self.q_QE) if self.counts is None else len(self.counts[0])
        return range(self.first_query, self.first_query + count)

    @property
    def rows(self) -> slice:
        """The same, to take this rank's part of something that has a row for each query of the batch."""
        return slice(self.queries.start, self.queries.stop)


class LossGradients(NamedTuple):
    """A rank's share of the loss and of its gradients: summed over ranks they are those of the batch."""

    loss: Tensor  # a scalar
    dq_QE: Tensor  # dL/d(queries of this rank), complete
    dd_DE: Tensor  # dL/d(documents of all ranks), of this rank's queries
    parameters: dict[str, Tensor]  # gradients of the loss's own parameters, by name


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums over the tiles of one rank, which ranks merge before any of them differentiates."""

    sweep: Sweep | None = None  # the sweep to continue; never merged, never sent
    columns: LogSumExp | None = None  # merged as (max, sum), any shape
    column_hardest: Hardest | None = None  # merged: the largest of all ranks remain
    sums: Tensor | None = None  # added up, any shape
    parts: tuple[Statistics | None, ...] = ()  # of a sum of losses: those of each part, merged one by one


class StreamedOptions(TypedDict, total=False):
    """Arguments of every loss over the cells of the matrix."""

    mask_false_negatives: bool
    prefixes: Prefixes | None
    tile_size: int
    negative_filter: FalseNegativeFilter | None


def streamed_options(keys: CellKeys, common: LossCommon) -> StreamedOptions:
    """Return those arguments from the keys of a run."""
    return {
        "mask_false_negatives": keys.mask_false_negatives,
        "prefixes": Prefixes.of_keys(keys),
        "tile_size": common.tile_size,
        "negative_filter": FalseNegativeFilter.of_keys(keys),
    }


class StreamedLoss(BatchLoss):
    """A loss that computes its gradients itself, for rows with one vector or several."""

    def __init__(
        self,
        *,
        mask_false_negatives: bool = True,
        prefixes: Prefixes | None = None,
        tile_size: int = DEFAULT_TILE_SIZE,
        negative_filter: FalseNegativeFilter | None = None,
    ) -> None:
        super().__init__()
        self.mask_false_negatives = mask_false_negatives
        self.negative_filter = negative_filter
        self.prefixes = prefixes
        self.tile_size = tile_size

    @property
    def streamed(self) -> StreamedLoss | None:
        """The loss itself."""
        return self

    @property
    def needs_statistics(self) -> bool:
        """True where `gradients` takes the statistics of all ranks."""
        return False

    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Sweep the tiles once; only for losses that need it."""
        raise NotImplementedError(f"{type(self).__name__} needs no statistics")

    @abstractmethod
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients, computed without autograd.

        Args:
            statistics: Those of `statistics`, merged over ranks; None where the loss needs none.
            into: Where to write dq (Q, E) and dd (D, E), of the type of the gradients; None allocates them.
        """

    def make_tiles(self, batch: StreamedBatch, *, scale: float, longest: float = math.inf) -> SimilarityTiles:
        """Return the tiles of a batch.

        Args:
            longest: Largest |q| times largest |d|, for losses that ask how large a logit can be.
        """
        tiles = SimilarityTiles(
            batch.q_QE,
            batch.d_DE,
            self.make_cell_map(batch),
            scale=scale,
            longest=longest,
            prefixes=self.prefixes,
            tile_size=self.tile_size,
        )
        if self.negative_filter is not None:
            tiles.filter = TileFilter(self.negative_filter, batch, tiles, self.prefix_dims)
        return tiles

    def make_cell_map(self, batch: StreamedBatch) -> CellMap:
        """Return the positives and the excluded cells of this rank's queries."""
        masks, device = self.mask_false_negatives, batch.q_QE.device
        return CellMap(batch.structure, batch.queries, mask_false_negatives=masks, device=device)

    def masked(self, structure: BatchStructure, similarity_QD: Tensor, positive_QD: Tensor) -> Tensor:
        """Return which cells are neither positive nor negative, bool (Q, D), for the definition of a loss."""
        masked_QD = torch.zeros_like(positive_QD)
        if self.mask_false_negatives:
            masked_QD = false_negative_mask(structure, positive_QD)
        if self.negative_filter is not None:
            masked_QD = masked_QD | self.negative_filter.false_negatives(structure, similarity_QD, positive_QD)
        return masked_QD

    def query_weights(self, batch: StreamedBatch, tiles: SimilarityTiles, share: float = 1.0) -> Tensor:
        """Return the weight of each of this rank's queries in each prefix, (K, Q); over all ranks they sum to share."""
        return self.weights_of(share * query_shares(batch.structure)[batch.rows], tiles)

    def weights_of(self, shares_L: Tensor, tiles: SimilarityTiles) -> Tensor:
        """Return the weight of each prefix times some shares, (K, L), on the device of the tiles."""
        weights_KL = torch.stack([weight * shares_L for weight in self.prefix_weights]).to(tiles.dtype)
        return to_device(weights_KL, tiles.device)

    @property
    def prefix_weights(self) -> tuple[float, ...]:
        """Weight of each prefix; 1 without prefixes."""
        return (1.0,) if self.prefixes is None else self.prefixes.weights

    @property
    def prefix_dims(self) -> tuple[int | None, ...]:
        """Length of each prefix; None is the embedding as it is."""
        return (None,) if self.prefixes is None else self.prefixes.dims


# Losses over the cells of the matrix ----------------------------------------------------------------------------------


Reach = Literal["cell", "row", "batch"]


class TileLogits(NamedTuple):
    """The logits of one tile for one prefix."""

    logits_RC: Tensor  # scale x similarity; -inf where the document is masked or a positive
    positives_P: Tensor  # logits of the positives in the tile, in the order of `tile.pairs`
    tile: Tile
    prefix: int
    is_collected: bool = False  # whether the matrix is as `collect` left it


class Sweep:
    """Sums of one batch over its tiles, and the slopes that follow from them.

    Attributes:
        tiles: The tiles that are swept.
        loss: This rank's share of the loss, complete after the last tile.
    """

    reach: Reach = "cell"
    """Cells that the slope of a cell depends on: itself alone, all of its row, or all of the batch."""
    can_reuse_logits: ClassVar[bool] = False
    """With reach "row": whether `slopes` can go on from the matrix that `collect` left, which saves a product."""
    every_cell: ClassVar[bool] = False
    """True where positives and masked cells are cells like any other; then `positives_P` is empty."""

    def __init__(self, tiles: SimilarityTiles) -> None:
        self.tiles = tiles
        self.loss = tiles.zeros()

    def collect(self, part: TileLogits) -> None:
        """Add a tile to the sums; the matrix is scratch afterwards. Reach "cell" has none."""

    def complete(self, rows: slice, merged: Statistics | None = None) -> None:
        """Compute the loss of some rows and what their slopes need: all their tiles are collected.

        Args:
            merged: With reach "batch", the statistics of all ranks.
        """

    def slopes(self, part: TileLogits) -> Tensor | None:
        """Turn the logits of a tile into slopes, in place, and return those of its positives (P,).

        None where the matrix has them already. A sweep that only collects, for cells that are differentiated one by
        one, has no slopes.
        """
        raise NotImplementedError(f"{type(self).__name__} only collects")


class CellLoss(StreamedLoss):
    """A loss over the cells of the similarity matrix that streams by a `Sweep`."""

    @abstractmethod
    def sweep(self, batch: StreamedBatch) -> Sweep:
        """Begin the sums of a batch."""

    def parameter_gradients(self, sweep: Any, scale_gradient: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the gradients of the loss's own parameters after the last tile, by name."""
        return {}

    def statistics_to_merge(self, sweep: Any) -> Statistics:
        """Return what ranks merge after the first sweep, for reach "batch"."""
        return Statistics(sweep)

    @torch.no_grad()
    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Sweep the tiles once, for losses whose slopes need the sums of all ranks."""
        if not self.needs_statistics:
            return super().statistics(batch)
        sweep = self.sweep(batch)
        for rows in sweep.tiles.row_blocks():
            collect_rows(sweep, rows)
        return self.statistics_to_merge(sweep)

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return loss and gradients, from the statistics of all ranks where the loss needs them."""
        if statistics is None and self.needs_statistics:
            raise ValueError(f"{type(self).__name__} needs the statistics of all ranks first")
        if statistics is None:
            sweep = self.sweep(batch)
        else:
            assert statistics.sweep is not None
            sweep = statistics.sweep
            sweep.loss = sweep.tiles.zeros()  # the same statistics may be differentiated again
            sweep.complete(slice(0, sweep.tiles.cell_map.num_rows), statistics)
        out = empty_gradients(sweep.tiles, batch, into)
        differentiate(sweep, out)
        parameters = self.parameter_gradients(sweep, sweep.tiles.finish(out))
        return LossGradients(sweep.loss, out.dq_QE, out.dd_DE, parameters)


def collect_rows(sweep: Sweep, rows: slice, *, keeps: bool = False) -> list[TileLogits]:
    """Collect the tiles of a row block; return them where their logits are kept, each in memory of its own."""
    kept: list[TileLogits] = []
    for tile in sweep.tiles.of_rows(rows):
        name = f"kept {len(kept)}" if keeps else "logits"
        for prefix, logits_RC in enumerate(sweep.tiles.logits(tile, name)):
            part = _excluded(sweep, tile, prefix, logits_RC)
            sweep.collect(part)
            if keeps:
                kept.append(part._replace(is_collected=True))
    return kept


def differentiate(sweep: Sweep, out: EmbeddingGradients) -> None:
    """Add the slopes of all tiles to the gradients of the embeddings."""
    tiles = sweep.tiles
    # Kept logits are worth a product of Q x D x E: 3 instead of 4.
    height = _kept_height(tiles) if sweep.reach == "row" and sweep.can_reuse_logits else None
    for rows in tiles.row_blocks(height):
        kept: list[TileLogits] = []
        if sweep.reach == "row":
            kept = collect_rows(sweep, rows, keeps=height is not None)
            sweep.complete(rows)
        if kept:  # every tile of the block has memory of its own, and the matrix is as `collect` left it
            for number, part in enumerate(kept):
                _replace_by_slopes(sweep, part)
                tiles.backward_plain(part.tile, part.logits_RC, out, f"kept {number}")
            continue
        for tile in tiles.of_rows(rows):

            def replace(prefix: int, logits_RC: Tensor, tile: Tile = tile) -> None:
                _replace_by_slopes(sweep, _excluded(sweep, tile, prefix, logits_RC))

            tiles.backward(tile, replace, out)


def _replace_by_slopes(sweep: Sweep, part: TileLogits) -> None:
    """Turn the logits of a tile into slopes, those of its positives included."""
    slopes_P = sweep.slopes(part)
    if slopes_P is not None:
        part.logits_RC.view(-1)[part.tile.pair_cells] = slopes_P


def _kept_height(tiles: SimilarityTiles) -> int | None:
    """Return the height of row blocks whose logits fit STRIP_TILES tiles; None where computing them again is better.

    Prefixes share a product on the way forth, so that keeping the logits of each would save little of it.
    """
    # As many rows as fill STRIP_TILES tiles with all of their columns: the more documents, the flatter the block. Flat
    # blocks leave a device idle, and every one of them reads all documents again.
    num_vectors = min(tiles.tile_size, STRIP_TILES * tiles.tile_size**2 // tiles.cell_map.num_columns)
    enough = min(LEAST_STRIP_ROWS, tiles.tile_size, tiles.cell_map.num_rows)
    if tiles.has_prefixes or num_vectors < enough:
        return None
    return max(1, num_vectors // tiles.row_vectors)


def _excluded(sweep: Sweep, tile: Tile, prefix: int, logits_RC: Tensor) -> TileLogits:
    """Take the positives out of fresh logits, and leave -inf there and where the document is masked."""
    if sweep.every_cell:
        return TileLogits(logits_RC, logits_RC.new_empty(0), tile, prefix)
    positives_P = logits_RC.view(-1)[tile.pair_cells]  # a copy, before -inf takes their cells
    sweep.tiles.exclude(prefix, tile, logits_RC)
    return TileLogits(logits_RC, positives_P, tile, prefix)


def zero_gradients(batch: StreamedBatch, into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return gradients of zero of both sides, in memory of the caller where it gives some."""
    dq_QE, dd_DE = into or (
        torch.empty_like(side, dtype=torch.promote_types(side.dtype, torch.float32))
        for side in (batch.q_QE, batch.d_DE)
    )
    return dq_QE.zero_(), dd_DE.zero_()


def empty_gradients(
    tiles: SimilarityTiles, batch: StreamedBatch, into: tuple[Tensor, Tensor] | None
) -> EmbeddingGradients:
    """Return gradients of zero, with room for the moments of prefixes."""
    moments = (
        tiles.zeros(tiles.num_prefixes, count) for count in (tiles.cell_map.num_rows, tiles.cell_map.num_columns)
    )
    return EmbeddingGradients(*zero_gradients(batch, into), *moments)


# Sums that tiles and ranks merge in any order -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogSumExp:
    """Sums of exponentials, each as (max, sum): the sum is exp(max) * sum, an empty one (-inf, 0).

    `max` need not be the largest logit, only near it: any value works while neither the exponentials nor their sum
    leave the range of the type.
    """

    max: Tensor  # subtracted from the logits, any shape
    sum: Tensor  # sum of exp(logit - max), same shape

    @classmethod
    def empty(cls, *shape: int, like: Tensor, bounded: bool) -> LogSumExp:
        """Return sums of nothing; bounded logits are so small that exp() can't overflow, and their max stays 0."""
        top = like.new_zeros(shape) if bounded else like.new_full(shape, -math.inf)
        return cls(top, like.new_zeros(shape))

    @classmethod
    def scattered(cls, logits_KP: Tensor, index_P: Tensor, count: int) -> LogSumExp:
        """Add each logit to the sum that its index names, and return the sums (K, count); those of no logit are empty.

        Args:
            index_P: Which of the `count` sums each of the P logits belongs to, int64.
        """
        index_KP = index_P.expand(logits_KP.shape)
        # Scattered by index: no loop, no sort, and no number is read from the device.
        top = logits_KP.new_full((len(logits_KP), count), -math.inf)
        top.scatter_reduce_(1, index_KP, logits_KP, "amax")
        terms = (logits_KP - _finite(top).gather(1, index_KP)).exp_()
        return cls(top, torch.zeros_like(top).index_add_(1, index_P, terms))

    @classmethod
    def stack(cls, parts: Sequence[LogSumExp]) -> LogSumExp:
        """Return several of one shape as one, with a new first dim."""
        return cls(torch.stack([part.max for part in parts]), torch.stack([part.sum for part in parts]))

    def __getitem__(self, index: int | slice | tuple[int | slice | Tensor, ...]) -> LogSumExp:
        return LogSumExp(self.max[index], self.sum[index])

    def value(self) -> Tensor:
        """Return the log-sum-exps; -inf where empty."""
        return self.max + self.sum.log()

    def without_idle_maxima(self) -> LogSumExp:
        """Return the same with empty sums as (-inf, 0): a maximum of nothing must not outweigh another rank's."""
        return LogSumExp(self.max.masked_fill(self.sum == 0, -math.inf), self.sum)

    def rescaled(self, top: Tensor) -> Tensor:
        """Return `sum` for another `max`, at least as large: ranks add these up once they agree on the maximum."""
        return self.sum * (self.max - _finite(top)).exp_()

    def merge(self, other: LogSumExp) -> LogSumExp:
        """Return the sums over both."""
        top = torch.maximum(self.max, other.max)
        return LogSumExp(top, self.rescaled(top) + other.rescaled(top))

    def add_logits(self, index: tuple[int, slice], logits_RC: Tensor, *, dim: int, scratch_RC: Tensor) -> None:
        """Add a tile to some of the sums, in place: over columns with dim 1, over rows with dim 0."""
        # Online softmax: rescale the sum so far to the new maximum, then add the tile under it.
        top = torch.maximum(self.max[index], logits_RC.amax(dim))
        shift = _finite(top)
        terms = torch.sub(logits_RC, shift.unsqueeze(dim), out=scratch_RC).exp_()
        self.sum[index].mul_((self.max[index] - shift).exp_()).add_(terms.sum(dim))
        self.max[index] = top


def _finite(top: Tensor) -> Tensor:
    """Return maxima that can be subtracted: 0 for those of nothing, where -inf - -inf would be NaN."""
    return top.masked_fill(top == -math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Hardest:
    """The k largest logits of each line and their positions; of equal logits, those at the lowest positions count."""

    logits: Tensor  # (..., k), descending; -inf where a line has fewer
    positions: Tensor  # (..., k), int32

    @classmethod
    def empty(cls, *shape: int, like: Tensor) -> Hardest:
        """Return a list without entries; the shape ends with k."""
        return cls(like.new_full(shape, -math.inf), like.new_zeros(shape, dtype=torch.int32))

    @classmethod
    def merged(cls, parts: Sequence[Hardest]) -> Hardest:
        """Return the largest of several lists of one shape."""
        whole = cls(torch.cat([part.logits for part in parts], -1), torch.cat([part.positions for part in parts], -1))
        return whole._largest(parts[0].logits.shape[-1])

    def add_logits(self, index: tuple[int, slice], logits_RC: Tensor, first: int) -> None:
        """Add a tile to some of the lines, in place.

        Args:
            first: Position of the tile's first column.
        """
        positions_C = torch.arange(first, first + logits_RC.shape[1], dtype=torch.int32, device=logits_RC.device)
        # The largest k of a tile first: merging all of its columns would sort R x (k + C) numbers again.
        count = self.logits.shape[-1]
        tile = Hardest(logits_RC, positions_C.expand_as(logits_RC))._largest(count)
        largest = Hardest.merged([Hardest(self.logits[index], self.positions[index]), tile])
        self.logits[index], self.positions[index] = largest.logits, largest.positions

    def _largest(self, most: int) -> Hardest:
        """Return the largest `most`. Which of equal logits `topk` takes is left open, so the least ones are redone."""
        count = min(most, self.logits.shape[-1])
        logits, columns = self.logits.topk(count)
        least = logits[..., -1:]
        others = (self.logits < least).logical_or_(self.logits > least)  # NaN counts as equal: its place must be real
        equal = self.positions.neg().masked_fill_(others, torch.iinfo(torch.int32).min).topk(count).values.neg_()
        # Entries above the least are those of `topk`. Behind them come the equal ones, from the lowest position on.
        nth = torch.arange(count, device=least.device) - (logits > least).sum(-1, keepdim=True)
        positions = torch.where(nth < 0, self.positions.gather(-1, columns), equal.gather(-1, nth.clamp_min(0)))
        return Hardest(logits, positions)
