"""Stream over tiles of the similarity matrix, so that the Q x D matrix never exists.

A loss asks for the logits of a tile and, later, hands back their gradient; each takes one product forward and two back:

    S = s q d^T (this tile)        dq += s G d        dd += s G^T q        with G = dL/dS

Matryoshka prefixes come from the same products: the blocks between two prefixes accumulate, and each prefix divides by
its own norms,

    S_m = s dot_m / (|q_:m| |d_:m|)        A_m = s G_m / (|q_:m| |d_:m|)
    d(block b of q) = sum over m >= b of A_m d_b  -  q_b sum over m >= b of rowsum(G_m S_m) / |q_:m|^2

and d likewise, so that any number of prefixes costs what the longest one does.

Memory: O(tile + (Q + D) E), the last being the gradients. Products are accumulated in at least float32.
Shape legend: Q queries of this rank, D documents of all ranks, E embedding dim, K prefixes, R x C cells of a tile.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.linalg import vector_norm

from vembed.losses.prefixes import NORM_EPSILON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from vembed.losses.cells import CellMap, Tile
    from vembed.losses.filters import TileFilter
    from vembed.losses.prefixes import Prefixes

DEFAULT_TILE_SIZE = 1024
"""Rows and columns of a tile: 4 MB of float32, so that a few of them stay in the caches of one core."""

BOUNDED_LOGIT = 40.0
"""Largest |logit| at which exp(logit) and sums of 2^31 of them stay within float32, so that no maximum is needed."""


class EmbeddingGradients(NamedTuple):
    """What tiles add up."""

    dq_QE: Tensor  # dL/dq (Q, E)
    dd_DE: Tensor  # dL/dd (D, E), this rank's share of it
    row_moments_KQ: Tensor  # sum over each row of G S without bias, where prefixes need it
    column_moments_KD: Tensor  # the same over each column


class SimilarityTiles:
    """Logits of tiles, and the way back from their gradients to embeddings.

    Args:
        q_QE: Queries of this rank (Q, E).
        d_DE: Documents of all ranks (D, E).
        longest: Largest |q| times largest |d|; 1 for prefixes, which have unit length.

    Attributes:
        num_prefixes: K; 1 without prefixes.
        row_vectors: Most vectors of a query, which are rows of the products.
        largest_logit: Bound of |logit| by the Cauchy-Schwarz inequality.
        dtype: Type of logits and gradients, at least float32.
        device: Where the embeddings lie.
        rows_only: Whether the columns' embeddings get no gradients: each of them is a row, here or on another rank.
        filter: What finds further cells that are no negatives, by their similarity.
    """

    def __init__(
        self,
        q_QE: Tensor,
        d_DE: Tensor,
        cells: CellMap,
        *,
        scale: float,
        longest: float = math.inf,
        prefixes: Prefixes | None,
        tile_size: int,
    ) -> None:
        self.cells, self.scale, self.largest_logit = cells, scale, scale * longest
        self.dtype, self.device = torch.promote_types(q_QE.dtype, torch.float32), q_QE.device
        self.tile_size, self.row_vectors = tile_size, 1
        self.num_prefixes = 1 if prefixes is None else len(prefixes.dims)
        self.filter: TileFilter | None = None
        self.rows_only = False
        self._q, self._d, self._prefixes = q_QE, d_DE, prefixes
        self._room: dict[str, Tensor] = {}
        self._inverse_norms: list[tuple[Tensor, Tensor]] = []
        if prefixes is not None:
            self._inverse_norms = [(self._inverse(q_QE, dim), self._inverse(d_DE, dim)) for dim in prefixes.dims]

    def _inverse(self, z_NE: Tensor, dim: int) -> Tensor:
        """Return 1 / norm of the prefix of each row, (N,)."""
        norms_N: Tensor = vector_norm(z_NE[:, :dim], dim=1, dtype=self.dtype)
        return norms_N.clamp_min(NORM_EPSILON).reciprocal()

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of the logits' type on their device."""
        return torch.zeros(shape, dtype=self.dtype, device=self._q.device)

    def room(self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a tile, uninitialised; the same for the same name in every tile."""
        size = shape[0] * shape[1]
        if name not in self._room or self._room[name].numel() < size:
            self._room[name] = torch.empty(size, dtype=dtype or self.dtype, device=self._q.device)
        return self._room[name][:size].view(shape)

    def strips(self, height: int | None = None) -> Iterator[Iterator[Tile]]:
        """Return the tiles row by row."""
        step = height or max(1, self.tile_size // self.row_vectors)
        for start in range(0, self.cells.num_rows, step):
            yield self.cells.strip(start, min(start + step, self.cells.num_rows), self.tile_size)

    def exclude(self, prefix: int, tile: Tile, logits_RC: Tensor) -> None:
        """Put -inf into the logits of a tile that are no negatives, positives included."""
        if self.filter is not None:
            self.filter.leave_out(prefix, tile, self, logits_RC)
        logits_RC.view(-1)[tile.excluded] = -math.inf

    def plain_logits(self, tile: Tile, name: str = "logits") -> Tensor:
        """Return the logits of a tile (R, C) without prefixes, in room of that name."""
        q_RE, d_CE = self._of(tile)
        logits_RC = self.room(name, tile.shape)
        return torch.addmm(logits_RC, q_RE, d_CE.T, beta=0, alpha=self.scale, out=logits_RC)

    def logits(self, tile: Tile) -> Iterator[Tensor]:
        """Return the logits of a tile (R, C), one prefix after the other, in the same room."""
        if self._prefixes is None:
            yield self.plain_logits(tile)
            return
        for prefix in range(self.num_prefixes):
            dot_RC = self._dot(tile, prefix)
            yield self._scaled(dot_RC, tile, prefix, self.room("logits", tile.shape))

    def backward_plain(self, tile: Tile, gradient_RC: Tensor, out: EmbeddingGradients, name: str = "logits") -> None:  # noqa: ARG002
        """Add what dL/dlogits of a tile gives the embeddings, without prefixes.

        Args:
            name: The room that `plain_logits` put its logits into.
        """
        q_RE, d_CE = self._of(tile)
        _add_product(out.dq_QE[tile.rows], gradient_RC, d_CE, self.scale)
        if not self.rows_only:
            _add_product(out.dd_DE[tile.columns], gradient_RC.T, q_RE, self.scale)

    def backward(self, tile: Tile, differentiate: Callable[[int, Tensor], None], out: EmbeddingGradients) -> None:
        """Compute the logits of a tile, have them turned into their gradients, and add those to the embeddings'.

        Args:
            differentiate: Turns the logits (R, C) of a prefix into dL/dlogits in place.
        """
        if self._prefixes is None:
            matrix_RC = self.plain_logits(tile)
            differentiate(0, matrix_RC)
            self.backward_plain(tile, matrix_RC, out)
            return
        for prefix in range(self.num_prefixes):
            dot_RC = self._dot(tile, prefix)
            matrix_RC = self._scaled(dot_RC, tile, prefix, self.room(f"gradient {prefix}", tile.shape))
            differentiate(prefix, matrix_RC)
            self._scaled(matrix_RC, tile, prefix, matrix_RC)
            moments_RC = torch.mul(matrix_RC, dot_RC, out=self.room("logits", tile.shape))
            out.row_moments_KQ[prefix, tile.rows] += moments_RC.sum(1)
            out.column_moments_KD[prefix, tile.columns] += moments_RC.sum(0)
        q_RE, d_CE = self._of(tile)
        for prefix in reversed(range(self.num_prefixes)):
            block, matrix_RC = self._block(prefix), self.room(f"gradient {prefix}", tile.shape)
            if prefix + 1 < self.num_prefixes:
                matrix_RC += self.room(f"gradient {prefix + 1}", tile.shape)
            _add_product(out.dq_QE[tile.rows, block], matrix_RC, d_CE[:, block])
            if not self.rows_only:
                _add_product(out.dd_DE[tile.columns, block], matrix_RC.T, q_RE[:, block])

    def backward_cells(
        self, prefix: int, cells: tuple[Tensor, Tensor], gradients_N: Tensor, out: EmbeddingGradients
    ) -> None:
        """Add what dL/dlogits of single cells of a prefix gives the embeddings, in a fixed order.

        Args:
            cells: Row and column of each cell (N,).
        """
        dim = None if self._prefixes is None else self._prefixes.dims[prefix]
        sides = (self._q[:, :dim], self._d[:, :dim])
        at_once = max(1, self.tile_size**2 // sides[0].shape[1])
        for rows, columns, slopes in zip(*(each.split(at_once) for each in (*cells, gradients_N)), strict=True):
            q_NE, d_NE = sides[0][rows].to(self.dtype), sides[1][columns].to(self.dtype)
            slopes_N = self.scale * slopes
            if self._prefixes is not None:
                inverse_q, inverse_d = self._inverse_norms[prefix]
                slopes_N *= inverse_q[rows] * inverse_d[columns]
                moments_N = slopes_N * torch.linalg.vecdot(q_NE, d_NE)
                out.row_moments_KQ[prefix].index_put_((rows,), moments_N, accumulate=True)
                out.column_moments_KD[prefix].index_put_((columns,), moments_N, accumulate=True)
            out.dq_QE[:, :dim].index_put_((rows,), d_NE.mul_(slopes_N[:, None]), accumulate=True)
            out.dd_DE[:, :dim].index_put_((columns,), q_NE.mul_(slopes_N[:, None]), accumulate=True)

    def finish(self, out: EmbeddingGradients) -> Tensor:
        """Take the part along each prefix out of the gradients, after the last tile.

        Returns:
            dL/d(log scale), a scalar.
        """
        if self._prefixes is None:
            parts = zip(self._q.split(self.tile_size), out.dq_QE.split(self.tile_size), strict=True)
            return torch.stack([(q.to(self.dtype) * dq).sum() for q, dq in parts]).sum()
        sides = ((self._q, out.dq_QE, out.row_moments_KQ), (self._d, out.dd_DE, out.column_moments_KD))
        for side, (z_NE, gradient_NE, moments_KN) in enumerate(sides[: 1 if self.rows_only else 2]):
            along_N = self.zeros(len(z_NE))
            for prefix in reversed(range(self.num_prefixes)):
                inverse_N = self._inverse_norms[prefix][side]
                # Where epsilon stands in for the norm, the norm isn't differentiated.
                longer = inverse_N < self.zeros(1).fill_(NORM_EPSILON).reciprocal()
                along_N += torch.where(longer, moments_KN[prefix] * inverse_N**2, 0.0)
                block = self._block(prefix)
                gradient_NE[:, block].addcmul_(z_NE[:, block].to(self.dtype), along_N[:, None], value=-1)
        return out.row_moments_KQ.sum()

    def _of(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the embeddings of a tile's rows and columns, in the type of the logits."""
        return self._q[tile.rows].to(self.dtype), self._d[tile.columns].to(self.dtype)

    def _block(self, prefix: int) -> slice:
        """Return what a prefix has more than the one before."""
        assert self._prefixes is not None
        dims = self._prefixes.dims
        return slice(dims[prefix - 1] if prefix else 0, dims[prefix])

    def _dot(self, tile: Tile, prefix: int) -> Tensor:
        """Add the block of a prefix to the dot products of the prefixes before it."""
        q_RE, d_CE = self._of(tile)
        block, dot_RC = self._block(prefix), self.room("dot", tile.shape)
        return torch.addmm(dot_RC, q_RE[:, block], d_CE[:, block].T, beta=min(prefix, 1), out=dot_RC)

    def _scaled(self, matrix_RC: Tensor, tile: Tile, prefix: int, out_RC: Tensor) -> Tensor:
        """Multiply by the scale over both norms."""
        inverse_q, inverse_d = self._inverse_norms[prefix]
        torch.mul(matrix_RC, self.scale * inverse_q[tile.rows, None], out=out_RC)
        return out_RC.mul_(inverse_d[tile.columns])


def longest_row(z_NE: Tensor) -> Tensor:
    """Return the largest norm of the rows, a scalar on their device; 0 where there are none."""
    dtype = torch.promote_types(z_NE.dtype, torch.float32)
    if not len(z_NE):  # a rank without queries
        return z_NE.new_zeros((), dtype=dtype)
    norms_N: Tensor = vector_norm(z_NE, dim=1, dtype=dtype)
    return norms_N.max()


def read_numbers(*scalars: Tensor) -> list[float]:
    """Return scalars as numbers, all in one copy: each copy waits until the device has done all that it was given."""
    dtype = functools.reduce(torch.promote_types, [scalar.dtype for scalar in scalars])
    numbers: list[float] = torch.stack([scalar.detach().to(dtype) for scalar in scalars]).tolist()
    return numbers


def _add_product(target: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Add a matrix product to a target in place."""
    torch.addmm(target, left, right, alpha=factor, out=target)
