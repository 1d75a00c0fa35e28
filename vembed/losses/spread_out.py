"""The spread-out regulariser: different rows are pushed as far apart as random directions are.

For each side of the batch, n rows x of E numbers,

    M1 = mean over pairs of different rows of <x, y>        M2 = mean over pairs of different rows of <x, y>^2
    L  = mean over both sides of spread_out_mean M1^2 + spread_out_second_moment max(0, M2 - 1/E)

Both moments follow from sums over rows, without an n x n matrix: with s = sum x and the Gram matrix G = X^T X (E, E),

    M1 = (|s|^2 - sum |x|^2) / (n (n - 1))              dM1/dx = 2 (s - x) / (n (n - 1))
    M2 = (|G|^2 - sum |x|^4) / (n (n - 1))              dM2/dx = 4 (G x - |x|^2 x) / (n (n - 1))

A rank sums over the rows of its queries and an equal share of the documents. Ranks add up s, G and both sums of norms,
and each then computes the gradients of its rows. Cost: n E^2 operations, where all products of rows would take n^2 E.

Source: Zhang et al., 2017, "Learning Spread-out Local Feature Descriptors".
Shape legend: N rows of a block, F = 2 + E + E^2 numbers of a side, padded to the longest prefix; K prefixes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch.nn.functional import normalize

from vembed.losses.streamed import LossGradients, Statistics, StreamedLoss, zero_gradients
from vembed.losses.tiles import DEFAULT_TILE_SIZE, NORM_EPSILON, Prefixes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import SpreadOutKeys
    from vembed.losses.streamed import StreamedBatch


class _Sums(NamedTuple):
    """Sums over the rows of a side, from which both moments follow."""

    squares: Tensor  # sum of |x|^2, a scalar
    fourths: Tensor  # sum of |x|^4, a scalar
    total_E: Tensor  # s
    gram_EE: Tensor  # G

    @classmethod
    def of(cls, x_NE: Tensor) -> _Sums:
        squares_N = x_NE.square().sum(1)
        return cls(squares_N.sum(), squares_N.square().sum(), x_NE.sum(0), x_NE.T @ x_NE)

    @classmethod
    def unpacked(cls, packed_F: Tensor, dim: int) -> _Sums:
        norms, total_E, rest = packed_F[:2], packed_F[2 : 2 + dim], packed_F[2 + dim : 2 + dim + dim * dim]
        return cls(norms[0], norms[1], total_E, rest.view(dim, dim))

    def packed(self) -> Tensor:
        return torch.cat([self.squares[None], self.fourths[None], self.total_E, self.gram_EE.flatten()])


class SpreadOutLoss(StreamedLoss):
    """The spread-out regulariser of queries and of documents."""

    def __init__(
        self,
        *,
        mean: float = 1.0,
        second_moment: float = 1.0,
        prefixes: Prefixes | None = None,
        tile_size: int = DEFAULT_TILE_SIZE,
    ) -> None:
        super().__init__(mask_false_negatives=False, prefixes=prefixes, tile_size=tile_size)
        self.mean = mean
        self.second_moment = second_moment

    @classmethod
    def from_keys(cls, keys: SpreadOutKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(
            mean=keys.spread_out_mean,
            second_moment=keys.spread_out_second_moment,
            prefixes=Prefixes.of_keys(keys),
            tile_size=common.tile_size,
        )

    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:  # noqa: ARG002
        """Return the mean over both sides."""
        prefixes = zip(self.prefix_weights, self.prefix_dims, strict=True)
        sides = [(weight, _cut(side, dim)) for weight, dim in prefixes for side in (q_QE, d_DE)]
        return torch.stack([weight / 2 * self._of_sums(_Sums.of(x_NE), len(x_NE)) for weight, x_NE in sides]).sum()

    def _of_sums(self, sums: _Sums, count: int) -> Tensor:
        """Return the loss of a side with `count` rows."""
        pairs, dim = max(1, count * (count - 1)), len(sums.total_E)
        # Sums over all pairs of rows, less the pairs of a row with itself.
        first = (sums.total_E.square().sum() - sums.squares) / pairs
        second = (sums.gram_EE.square().sum() - sums.fourths) / pairs
        return self.mean * first.square() + self.second_moment * (second - 1 / dim).relu()

    @property
    def needs_statistics(self) -> bool:
        """The moments are over the rows of all ranks."""
        return True

    @torch.no_grad()
    def statistics(self, batch: StreamedBatch) -> Statistics:
        """Return the sums over this rank's rows of both sides, (2, K, F)."""
        dtype = torch.promote_types(batch.q_QE.dtype, torch.float32)
        dims = [dim or batch.q_QE.shape[1] for dim in self.prefix_dims]
        sums_2KF = batch.q_QE.new_zeros(2, len(dims), 2 + max(dims) + max(dims) ** 2, dtype=dtype)
        # One tensor for all sums, so that ranks need one collective. Shorter prefixes leave the end of their row zero.
        for side, (z_NE, rows) in enumerate(_rows_of_rank(batch)):
            for block in self._blocks(z_NE, rows):
                for prefix, dim in enumerate(self.prefix_dims):
                    packed_F = _Sums.of(_cut(z_NE[block].to(dtype), dim)).packed()
                    sums_2KF[side, prefix, : len(packed_F)] += packed_F
        return Statistics(sums=sums_2KF)

    @torch.no_grad()
    def gradients(
        self, batch: StreamedBatch, statistics: Statistics | None = None, into: tuple[Tensor, Tensor] | None = None
    ) -> LossGradients:
        """Return this rank's share of the loss and the gradients of its rows."""
        if statistics is None or statistics.sums is None:
            raise ValueError("rows are compared with those of all ranks: their statistics come first")
        structure, out, losses = batch.structure, zero_gradients(batch, into), []
        counts = structure.num_queries, structure.num_documents
        sides = zip(_rows_of_rank(batch), out, statistics.sums, counts, strict=True)
        for (z_NE, rows), gradient_NE, sums_KF, count in sides:
            for weight, dim, sums_F in zip(self.prefix_weights, self.prefix_dims, sums_KF, strict=True):
                # The chain rule in two steps: slopes of the sums of all ranks, then those of this rank's rows. A graph
                # over all of its rows at once would hold several copies of them.
                with torch.enable_grad():
                    packed_F = sums_F.detach().requires_grad_()
                    loss = weight / 2 * self._of_sums(_Sums.unpacked(packed_F, dim or z_NE.shape[1]), count)
                    (slopes_F,) = torch.autograd.grad(loss, [packed_F])
                losses.append(loss.detach())
                for block in self._blocks(z_NE, rows):
                    with torch.enable_grad():
                        x_NE = z_NE[block].to(gradient_NE.dtype).detach().requires_grad_()
                        packed_F = _Sums.of(_cut(x_NE, dim)).packed()
                        (dx_NE,) = torch.autograd.grad(packed_F, [x_NE], slopes_F[: len(packed_F)])
                    gradient_NE[block] += dx_NE
        # Every rank has computed the whole loss from the same sums.
        share = len(batch.queries) / structure.num_queries
        return LossGradients(torch.stack(losses).sum() * share, *out, {})

    def _blocks(self, z_NE: Tensor, rows: range) -> Iterator[slice]:
        """Cut rows into blocks of an eighth of a tile's numbers: autograd holds several copies of a block."""
        step = max(1, self.tile_size**2 // (8 * z_NE.shape[1]))
        for start in range(rows.start, rows.stop, step):
            yield slice(start, min(start + step, rows.stop))


def _cut(x_NE: Tensor, dim: int | None) -> Tensor:
    return x_NE if dim is None else normalize(x_NE[:, :dim], dim=-1, eps=NORM_EPSILON)


def _rows_of_rank(batch: StreamedBatch) -> tuple[tuple[Tensor, range], tuple[Tensor, range]]:
    """Return both sides with the rows that this rank sums over: its queries, and an equal share of the documents."""
    structure = batch.structure
    edges = batch.queries.start, batch.queries.stop
    first, stop = (structure.num_documents * edge // structure.num_queries for edge in edges)
    return (batch.q_QE, range(len(batch.q_QE))), (batch.d_DE, range(first, stop))
